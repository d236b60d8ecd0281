//! Events on their way to a driver that follows them.
//!
//! Invariants:
//! - F1: who tells an event never waits. A driver that does not read misses the oldest of what waits for it, and hears
//!   how many before the next event.
//! - F2: no event is begun before the socket has room, so one that nobody reads holds up no answer and no end.

use super::frame::WireError;
use std::future::pending;
use std::io::ErrorKind;
use std::sync::Arc;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use weightrefit_proto::socket::{AgentFrame, DriverEvent, encode};

/// What one driver has still to hear; bounded by its sender, which drops the oldest (F1).
pub type Events = broadcast::Receiver<Arc<DriverEvent>>;

/// The events of one connection.
#[derive(Debug, Default)]
pub(super) struct Following {
    events: Option<Events>,
    /// A frame that waits for room in the socket.
    held: Option<Vec<u8>>,
}

impl Following {
    /// From now on these.
    pub(super) fn begin(&mut self, events: Events) {
        self.events = Some(events);
    }

    /// Sends the next event and returns what of its frame is left to send: nothing, unless it is larger than what a
    /// socket takes at once. May be dropped while it waits; nothing is lost then.
    pub(super) async fn next(&mut self, socket: &OwnedWriteHalf) -> Result<Vec<u8>, WireError> {
        let Some(events) = &mut self.events else { return pending().await };
        if self.held.is_none() {
            let event = match events.recv().await {
                Ok(event) => Arc::unwrap_or_clone(event),
                Err(RecvError::Lagged(count)) => DriverEvent::Missed { count },
                // The agent is leaving; the end of the stream says so.
                Err(RecvError::Closed) => return pending().await,
            };
            self.held = Some(encode(&AgentFrame::Event { event })?);
        }
        loop {
            socket.writable().await?;
            let frame = self.held.get_or_insert_default();
            match socket.try_write(frame) {
                Ok(sent) => {
                    frame.drain(..sent);
                    return Ok(std::mem::take(&mut self.held).unwrap_or_default());
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::client::{ClientEvent, ClientId, serve};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixStream;
    use tokio::sync::mpsc;
    use weightrefit_core::id::Incarnation;
    use weightrefit_proto::socket::{ClientFrame, PROTOCOL, Role, decode, frame_length};

    const WAITING_MAX: usize = 8;
    const TOLD: u64 = 20_000;

    async fn read(stream: &mut UnixStream) -> AgentFrame {
        let mut prefix = [0; 4];
        stream.read_exact(&mut prefix).await.expect("a prefix");
        let mut body = vec![0; frame_length(prefix).expect("a length")];
        stream.read_exact(&mut body).await.expect("a frame");
        decode(&body).expect("a frame")
    }

    fn found(number: u64) -> DriverEvent {
        DriverEvent::ReplicaFound { pool: "p".to_owned(), replica: number.to_string() }
    }

    #[tokio::test]
    async fn a_driver_that_does_not_read_is_told_how_much_it_missed_and_holds_nobody_up() {
        let (mut driver, stream) = UnixStream::pair().expect("a pair");
        let (said, mut heard) = mpsc::channel(4);
        let served = tokio::spawn(serve(ClientId(1), Incarnation(2), stream, said));
        let hello =
            ClientFrame::Hello { protocol: PROTOCOL, instance: Incarnation(3), role: Role::Driver {} };
        driver.write_all(&encode(&hello).expect("a frame")).await.expect("is read");
        let Some(ClientEvent::Joined { outbox, .. }) = heard.recv().await else { panic!("no hello") };
        assert!(matches!(read(&mut driver).await, AgentFrame::Welcome { .. }));
        let sender = broadcast::Sender::new(WAITING_MAX);
        outbox.follow(sender.subscribe()).expect("there is room");
        for number in 0..TOLD {
            let _ = sender.send(Arc::new(found(number)));
            tokio::task::yield_now().await; // the socket is filled meanwhile
        }
        assert_eq!(sender.len(), WAITING_MAX, "the socket is full");
        let status = AgentFrame::Status { request: 1, status: serde_json::Value::Null };
        outbox.send(status.clone(), Vec::new()).expect("there is room");
        let (mut next, mut missed, mut answered) = (0, 0, false);
        while next < TOLD || !answered {
            match read(&mut driver).await {
                AgentFrame::Event { event: DriverEvent::Missed { count } } => {
                    missed += count;
                    next += count;
                }
                AgentFrame::Event { event } => {
                    assert_eq!(event, found(next));
                    next += 1;
                }
                frame => answered = frame == status,
            }
        }
        assert!(missed > 0 && next == TOLD, "{missed} of {next}");

        for number in 0..TOLD {
            let _ = sender.send(Arc::new(found(number)));
            tokio::task::yield_now().await;
        }
        outbox.end();
        assert!(matches!(heard.recv().await, Some(ClientEvent::Gone { .. })));
        drop(outbox);
        served.await.expect("ends, though the driver reads nothing");
    }
}
