//! The per-pod agent of weightrefit: rounds, byte transfer, verification, metrics.

pub mod args;
pub mod limits;
