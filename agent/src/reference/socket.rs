//! The client's end of the agent socket, with a thread that reads: frames come out of a channel, in order.

use crate::session::fd;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::Sender;
use std::time::Duration;
use weightrefit_proto::socket::{AgentFrame, ClientFrame, FrameError, decode, encode, frame_length};

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

/// The connection is of no use.
#[derive(Debug, thiserror::Error)]
pub(super) enum SocketError {
    #[error("agent socket failed: {0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("more descriptors than a frame may carry")]
    Descriptors,
}

impl Connection {
    /// Connects, trying again until the agent listens. Frames and the end go to `events`.
    pub(super) fn open(path: &Path, number: u64, events: Sender<Event>) -> Result<Self, SocketError> {
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
        let bytes = encode(frame)?;
        if let Err(error) = self.send_bytes(&bytes, fds) {
            tracing::debug!(%error, "the agent no longer listens");
            // The reader ends for certain; a stream that was reset cannot be shut down again.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        Ok(())
    }

    fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut sent = fd::send(self.stream.as_fd(), bytes, fds)?;
        while sent < bytes.len() {
            sent += fd::send(self.stream.as_fd(), &bytes[sent..], &[])?;
        }
        Ok(())
    }
}

fn forward_frames(stream: &UnixStream, number: u64, events: &Sender<Event>) -> Result<(), SocketError> {
    loop {
        let mut fds = Vec::new();
        let mut prefix = [0; 4];
        if !fill(stream, &mut prefix, &mut fds)? {
            return Ok(());
        }
        let mut body = vec![0; frame_length(prefix)?];
        if !fill(stream, &mut body, &mut fds)? {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        if events.send(Event::Frame(number, decode(&body)?, fds)).is_err() {
            return Ok(());
        }
    }
}

/// False where the stream ended before the first byte.
fn fill(stream: &UnixStream, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<bool, SocketError> {
    let mut filled = 0;
    while filled < buffer.len() {
        let received = match fd::receive(stream.as_fd(), &mut buffer[filled..]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            received => received?,
        };
        if received.fds_lost {
            return Err(SocketError::Descriptors);
        }
        fds.extend(received.fds);
        match received.bytes {
            0 if filled == 0 => return Ok(false),
            0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            bytes => filled += bytes,
        }
    }
    Ok(true)
}
