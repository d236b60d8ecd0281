//! Pure logic of weightrefit: no IO, clock, randomness, async, threads or `unsafe`; ordered maps only.
//!
//! Data flows one way: layout → pieces → plan → moves → (bytes, in the agent) → digests → round decisions.

#![forbid(unsafe_code)]

pub mod code;
pub mod digest;
pub mod dtype;
pub mod id;
pub mod interface;
pub mod layout;
pub mod limits;
pub mod membership;
pub mod model;
pub mod nearest;
pub mod plan;
pub mod region;
pub mod round;
