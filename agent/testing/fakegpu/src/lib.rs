//! A strict stand-in for libcuda and libnccl in one library, for tests on machines without a GPU. Never shipped.
//!
//! What real libraries forgive, or punish rarely, fails here each time:
//! - device memory has addresses that the host cannot touch: reading one is a fault;
//! - streams are threads: a copy reads its source when it runs, and what a copy will write holds garbage before;
//! - only pinned host memory, only live device memory, and only ranges inside one allocation are accepted; anything
//!   else makes the context fail for good, as an illegal address does;
//! - NCCL calls return "in progress" as often as asked, and nothing is enqueued before the last of them;
//! - a send waits for its receive; one of another size hangs, as do a missing peer and a dead one that nobody detects;
//! - memory that passes between processes may be written, or read, only as its mapping says;
//! - one failure fails the communicator, at every rank that hears of it.
//!
//! `FAKEGPU_*` in the environment turn the knobs of module `knobs`.

#![expect(unsafe_code, reason = "two C interfaces")]

mod arena;
mod communicator;
mod driver;
mod kernels;
mod knobs;
mod nccl;
mod queue;
mod shared;
mod wire;
