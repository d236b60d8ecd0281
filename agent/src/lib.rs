//! The per-pod agent of weightrefit: rounds, byte transfer, verification, metrics.

pub mod args;
mod dial;
pub mod executor;
pub mod identity;
pub mod limits;
pub mod memory;
pub mod peers;
pub mod server;
pub mod session;
pub mod transport;
