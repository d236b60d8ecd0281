//! The operator's life: who leads, and what it tells of itself.

pub mod lease;
pub mod telemetry;
