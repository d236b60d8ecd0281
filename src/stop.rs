//! The request to end that a server gets from its supervisor, or from Ctrl-C.

use std::future::Future;
use std::io;
use tokio::signal::unix::{SignalKind, signal};

/// Ends when the process is asked to stop.
///
/// # Errors
/// Signals cannot be listened for.
pub fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
