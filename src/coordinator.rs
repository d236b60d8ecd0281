//! Membership over agent streams: the same for the operator, for a coordinator without Kubernetes and for a run
//! on one machine. Agents dial; one task per refit owns its roster; nothing is sent before it is written down.
//!
//! Invariants:
//! - C1: an epoch is recorded before any agent hears of it, and its membership never changes.
//! - C2: an agent speaks for the pod that its certificate names, and for no other.
//! - C3: what an agent does wrong ends its stream with a code and leaves everybody else alone.

mod gate;
mod heard;
mod hub;
mod record;
mod recordings;
mod refusals;
mod server;
mod service;
mod tls;
mod wire;

#[cfg(test)]
mod tests;

pub use gate::{Admitted, Gate};
pub use hub::{AgentView, Coordinator, EndedRound, Refused, Settings, View};
pub use record::{EpochRecord, InMemory, RecordError};
pub use refusals::Refusals;
pub use server::Server;
pub use tls::TlsError;
pub(crate) use tls::accept;
pub use wire::fault;
