//! Who a pod is: an authority in memory signs agents' keys, and one-time tokens say which pod a request is for.
//!
//! Agents authenticate each other by the key that the membership pins, so a certificate only has to bind a pod
//! UID to a key once: when the agent enrols and when it opens its stream.

mod authority;
mod token;

pub use authority::{Authority, IdentityError, SERVER_NAME, ServerIdentity, pod_of_certificate};
pub use token::Tokens;
