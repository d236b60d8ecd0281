//! The per-pod agent of weightrefit: rounds, byte transfer, verification, metrics.

pub mod args;
pub mod coordinator;
pub mod cuda;
mod dial;
pub mod executor;
pub mod identity;
pub mod library;
pub mod limits;
pub mod memory;
pub mod metrics;
pub mod peers;
pub mod planned;
pub mod readiness;
pub mod reference;
pub mod rounds;
pub mod server;
pub mod session;
pub mod start;
pub mod supervisor;
pub mod transport;
