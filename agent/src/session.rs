//! The agent socket, protocol 1: listens, checks who connects, serves each connection in a task of its own.
//!
//! Invariants:
//! - S1: only processes of this user (or root) speak; the directory keeps others from connecting at all.
//! - S2: number of connections, frames, descriptors and registrations are bounded before memory is spent.
//! - S3: a socket closes only after its last [`Outbox`] is dropped: EOF is a promise that nothing of the
//!   client is mapped or read any more.

pub(crate) mod blocking;
mod client;
pub mod fd;
mod following;
mod frame;
mod registration;

pub use client::{ClientEvent, ClientId, Outbox, Stuck};
pub use following::Events;
pub use registration::{Registration, RegistrationError, compare, compare_recorded, recorded};

use crate::limits;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc};
use weightrefit_core::id::Incarnation;

/// The agent socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// File system.
    #[error("cannot open the agent socket at {path}: {source}")]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Others could connect.
    #[error("directory {path} of the agent socket has mode {mode:o}, which lets others in")]
    Open {
        /// Where.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Somebody answers there.
    #[error("another agent answers on {path}")]
    Taken {
        /// Where.
        path: PathBuf,
    },
}

/// The listening socket. Dropping it removes the path.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
}

impl Listener {
    /// Binds `path`. Makes its directory with mode 0700 where it is missing and refuses one that others can
    /// search; takes over the path of an agent that is gone.
    pub fn bind(path: &Path) -> Result<Self, SocketError> {
        let io = |source| SocketError::Io { path: path.to_owned(), source };
        let directory = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(io)?;
        let mode = std::fs::metadata(directory).map_err(io)?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(SocketError::Open { path: directory.to_owned(), mode });
        }
        if std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
            if std::os::unix::net::UnixStream::connect(path).is_ok() {
                return Err(SocketError::Taken { path: path.to_owned() });
            }
            std::fs::remove_file(path).map_err(io)?;
        }
        Ok(Self { socket: UnixListener::bind(path).map_err(io)?, path: path.to_owned() })
    }

    /// Accepts connections until dropped; `agent` is what they are welcomed with.
    pub async fn serve(self, agent: Incarnation, events: mpsc::Sender<ClientEvent>) {
        let room = Arc::new(Semaphore::new(limits::CLIENTS_MAX));
        let mut next = 0;
        loop {
            // The semaphore is never closed, so an error cannot come.
            let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
            let stream = match self.socket.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Descriptors ran out, most likely: existing clients go on, new ones wait.
                    tracing::warn!(error = %error, "cannot accept clients");
                    tokio::time::sleep(limits::ACCEPT_PAUSE).await;
                    continue;
                }
            };
            if !trusted(&stream) {
                tracing::warn!("client of another user refused");
                continue;
            }
            next += 1;
            let (client, events) = (ClientId(next), events.clone());
            tokio::spawn(async move {
                client::serve(client, agent, stream, events).await;
                drop(permit);
            });
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Gone already, or taken over by the next agent's bind: both are fine.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn trusted(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    stream.peer_cred().is_ok_and(|peer| peer.uid() == own || peer.uid() == 0)
}
