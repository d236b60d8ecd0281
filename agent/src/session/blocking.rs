//! Frames of the agent socket for a client that blocks.

use super::fd;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use weightrefit_proto::socket::{FrameError, decode, encode, frame_length};

/// The connection is of no use.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BlockingError {
    #[error("agent socket failed: {0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("more descriptors than a frame may carry")]
    Descriptors,
}

/// Sends a frame whole, with its descriptors.
pub(crate) fn send<T: Serialize>(
    stream: &UnixStream,
    frame: &T,
    fds: &[BorrowedFd<'_>],
) -> Result<(), BlockingError> {
    let bytes = encode(frame)?;
    let mut sent = fd::send(stream.as_fd(), &bytes, fds)?;
    while sent < bytes.len() {
        sent += fd::send(stream.as_fd(), &bytes[sent..], &[])?;
    }
    Ok(())
}

/// The next frame and its descriptors; `None` at a clean end of the stream.
pub(crate) fn receive<T: DeserializeOwned>(
    stream: &UnixStream,
) -> Result<Option<(T, Vec<OwnedFd>)>, BlockingError> {
    let mut fds = Vec::new();
    let mut prefix = [0; 4];
    if !fill(stream, &mut prefix, &mut fds)? {
        return Ok(None);
    }
    let mut body = vec![0; frame_length(prefix)?];
    if !fill(stream, &mut body, &mut fds)? {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Ok(Some((decode(&body)?, fds)))
}

/// False where the stream ended before the first byte.
fn fill(stream: &UnixStream, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<bool, BlockingError> {
    let mut filled = 0;
    while filled < buffer.len() {
        let received = match fd::receive(stream.as_fd(), &mut buffer[filled..]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            received => received?,
        };
        if received.fds_lost {
            return Err(BlockingError::Descriptors);
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
