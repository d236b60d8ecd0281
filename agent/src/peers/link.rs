//! One bidirectional stream with another agent, whoever dialled it: messages, heartbeats, and its end.

use super::PeerEvent;
use super::envelope;
use crate::limits;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tonic::Streaming;
use weightrefit_core::id::Sha256;
use weightrefit_core::round::message::{Header, Message};
use weightrefit_proto::v1;

/// Number of a link; never reused by this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u64);

/// The sending end of a link. Dropping it ends the link.
#[derive(Debug)]
pub struct LinkSender {
    id: LinkId,
    /// `None` once its peer did not read: the link is ending.
    outgoing: Option<mpsc::Sender<v1::Envelope>>,
}

impl LinkSender {
    pub(super) fn new(id: LinkId, outgoing: mpsc::Sender<v1::Envelope>) -> Self {
        Self { id, outgoing: Some(outgoing) }
    }

    /// Which link.
    #[must_use]
    pub fn id(&self) -> LinkId {
        self.id
    }

    /// Queues a message; never waits. False when the link is over or its peer does not read, which ends it.
    pub(super) fn send(&mut self, header: &Header, message: &Message, extras: Option<&str>) -> bool {
        let Some(outgoing) = &self.outgoing else { return false };
        let sent = match envelope::pack(header, message, extras) {
            Ok(envelope) => outgoing.try_send(envelope).is_ok(),
            Err(error) => {
                tracing::error!(error = %error, "message cannot be packed");
                false
            }
        };
        if !sent {
            self.outgoing = None;
        }
        sent
    }
}

/// Reads a link until it ends, is silent for too long, or its sender is dropped.
pub(super) async fn read(
    id: LinkId,
    key: Sha256,
    mut incoming: Streaming<v1::Envelope>,
    outgoing: mpsc::WeakSender<v1::Envelope>,
    events: mpsc::Sender<PeerEvent>,
) {
    let beat = tokio::spawn(beat(outgoing.clone()));
    loop {
        let next = match timeout(limits::PEER_SILENCE_MAX, incoming.message()).await {
            Ok(Ok(Some(envelope))) => envelope::unpack(envelope),
            Ok(Ok(None)) => break,
            Ok(Err(status)) => {
                tracing::debug!(peer = %key, error = %status, "link failed");
                break;
            }
            Err(_) => {
                tracing::warn!(peer = %key, "peer is silent");
                break;
            }
        };
        let event = match next {
            Ok(None) => continue,
            Ok(Some((header, message, extras))) => {
                PeerEvent::Message { key, header, message: Box::new(message), extras }
            }
            Err(error) => {
                tracing::warn!(peer = %key, error = %error, "peer refused");
                break;
            }
        };
        if outgoing.upgrade().is_none() || events.send(event).await.is_err() {
            break;
        }
    }
    beat.abort();
    // Nobody is left to tell when the receiver is gone: the agent is stopping.
    let _ = events.send(PeerEvent::Down { key, link: id }).await;
}

async fn beat(outgoing: mpsc::WeakSender<v1::Envelope>) {
    let mut ticks = interval(limits::HEARTBEAT_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(sender) = outgoing.upgrade() else { return };
        // A full queue says as much as a heartbeat would; a closed one ends the reader too.
        let _ = sender.try_send(envelope::heartbeat());
    }
}
