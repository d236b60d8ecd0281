//! Ways to move the bytes of a round between two agents.

pub mod nccl;
pub mod tcp;
