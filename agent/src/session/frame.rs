//! Frames of the agent socket over a tokio stream.

use super::fd;
use crate::limits::FRAME_FDS_MAX;
use serde::Serialize;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use weightrefit_core::code::Code;
use weightrefit_proto::socket::{ClientFrame, FrameError, decode, encode, frame_length};

/// A frame could not be read or written.
#[derive(Debug, thiserror::Error)]
pub(super) enum WireError {
    /// The socket.
    #[error("agent socket failed: {0}")]
    Io(#[from] io::Error),
    /// Length or JSON.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// More descriptors than [`FRAME_FDS_MAX`].
    #[error("frame carries more than {FRAME_FDS_MAX} descriptors")]
    TooManyDescriptors,
    /// The stream ended inside a frame.
    #[error("stream ended inside a frame of {length} bytes")]
    Cut {
        /// Bytes announced.
        length: usize,
    },
}

impl WireError {
    /// The code and hint that the client is told; `None` where nobody listens any more.
    #[must_use]
    pub(super) fn told(&self) -> Option<(Code, &'static str)> {
        match self {
            Self::Io(_) | Self::Cut { .. } => None,
            Self::Frame(FrameError::TooLong { .. }) => {
                Some((Code::Unsupported, "Page the registration into smaller frames."))
            }
            Self::Frame(FrameError::Malformed(_)) => {
                Some((Code::Unsupported, "Send frames of protocol 1, as docs/agent-socket.md shows them."))
            }
            Self::TooManyDescriptors => {
                Some((Code::Unsupported, "Spread the memories of a registration over more pages."))
            }
        }
    }
}

/// Reads the next frame; `None` at a clean end of the stream.
pub(super) async fn read(half: &mut OwnedReadHalf) -> Result<Option<(ClientFrame, Vec<OwnedFd>)>, WireError> {
    let mut prefix = [0; 4];
    let stream: &UnixStream = half.as_ref();
    // Descriptors ride on the first byte, so only this call looks for them; plain reads below make the kernel
    // close whatever a client attaches elsewhere.
    let first = stream.async_io(Interest::READABLE, || fd::receive(stream.as_fd(), &mut prefix)).await?;
    if first.bytes == 0 {
        return Ok(None);
    }
    if first.fds_lost {
        return Err(WireError::TooManyDescriptors);
    }
    half.read_exact(&mut prefix[first.bytes..]).await.map_err(|_| WireError::Cut { length: 4 })?;
    let length = frame_length(prefix)?;
    // Grows as bytes arrive: an announced length alone reserves nothing.
    let mut body = Vec::new();
    half.take(length as u64).read_to_end(&mut body).await?;
    if body.len() < length {
        return Err(WireError::Cut { length });
    }
    Ok(Some((decode(&body)?, first.fds)))
}

/// Writes one frame with its descriptors.
pub(super) async fn write<T: Serialize>(
    half: &mut OwnedWriteHalf,
    frame: &T,
    fds: &[OwnedFd],
) -> Result<(), WireError> {
    let bytes = encode(frame)?;
    let passed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let stream: &UnixStream = half.as_ref();
    let sent = stream.async_io(Interest::WRITABLE, || fd::send(stream.as_fd(), &bytes, &passed)).await?;
    half.write_all(&bytes[sent..]).await?;
    Ok(())
}
