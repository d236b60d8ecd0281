//! Memory shared with other processes: sealed memfds, mapped.
//!
//! A training publisher creates and seals its memfds and passes them; the agent maps them read-only. Staging is
//! created by the agent and passed to the engine, which can map it read-only only.
//!
//! # Why this is sound though another process may write at any time
//!
//! M1: no reference to mapped memory ever exists. A `&[u8]` would promise that the bytes do not change, and a
//! `&mut [u8]` that nobody else looks; another process keeps neither promise. All access goes through raw
//! pointers: copies between mapped and private memory in this module, or addresses that only the kernel follows
//! (`readv`, `writev`).
//!
//! M2: a copy out of mapped memory may see a mixture of old and new bytes, but every mixture is a valid `u8`, and
//! the copy is then private: it cannot change between a check and a use. The copying functions are never inlined,
//! so a caller's use of the private copy cannot be turned into a second read of shared memory.
//!
//! M3: nothing here decides on a byte that was read: sizes, offsets and loops come from plans and registrations.
//! A peer that writes to a published buffer spoils its own digest and nothing else.
//!
//! M4: no access can raise SIGBUS. Only memory of tmpfs whose size is sealed against shrinking is mapped, after
//! its size was compared with the size used; huge-page memfds, which may lack pages at fault time, are refused.
//!
//! M5: every access is checked against the length of its mapping. Offsets are checked when a plan is compiled, so
//! a violation here is a bug of this program: it panics, which ends the task and fails the round.

#![expect(unsafe_code, reason = "maps memory that other processes share")]

mod batch;
mod mapping;
#[cfg(test)]
mod testing;

pub use batch::{ReceiveBatch, SendBatch};
pub use mapping::{Mapping, MemoryError, create, refuse_new_writers};
