//! The client's end of the agent socket, with a thread that reads: frames come out of a channel, in order.

use crate::session::blocking::{self, BlockingError};
use std::net::Shutdown;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::Sender;
use std::time::Duration;
use weightrefit_proto::socket::{AgentFrame, ClientFrame, FrameError};

/// Between two attempts to connect: an agent that restarts is back within a second or so.
const RETRY: Duration = Duration::from_millis(50);

/// What a client waits for.
pub(super) enum Event {
    /// From the agent, by the connection of this number.
    Frame(u64, AgentFrame, Vec<OwnedFd>),
    /// The connection of this number ended.
    Gone(u64),
    /// A line of standard input.
    Command(String),
    /// It is time for the next step.
    Due,
}

/// One connection.
pub(super) struct Connection {
    /// Counts connections of this process.
    pub(super) number: u64,
    stream: UnixStream,
}

impl Connection {
    /// Connects, trying again until the agent listens. Frames and the end go to `events`.
    pub(super) fn open(path: &Path, number: u64, events: Sender<Event>) -> Result<Self, BlockingError> {
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(_) => std::thread::sleep(RETRY),
            }
        };
        let read = stream.try_clone()?;
        std::thread::spawn(move || {
            let result = forward_frames(&read, number, &events);
            if let Err(error) = result {
                tracing::warn!(%error, "connection to the agent ended");
            }
            // The receiver is gone when the process is about to end.
            let _ = events.send(Event::Gone(number));
        });
        Ok(Self { number, stream })
    }

    /// Sends a frame whole, as far as the agent still listens: where it does not, [`Event::Gone`] follows, and what
    /// was sent is said again on the next connection.
    pub(super) fn send(&self, frame: &ClientFrame, fds: &[BorrowedFd<'_>]) -> Result<(), FrameError> {
        match blocking::send(&self.stream, frame, fds) {
            Err(BlockingError::Frame(error)) => return Err(error),
            Err(error) => {
                tracing::debug!(%error, "the agent no longer listens");
                // The reader ends for certain; a stream that was reset cannot be shut down again.
                let _ = self.stream.shutdown(Shutdown::Both);
            }
            Ok(()) => {}
        }
        Ok(())
    }
}

fn forward_frames(stream: &UnixStream, number: u64, events: &Sender<Event>) -> Result<(), BlockingError> {
    while let Some((frame, fds)) = blocking::receive(stream)? {
        if events.send(Event::Frame(number, frame, fds)).is_err() {
            break;
        }
    }
    Ok(())
}
