//! Who a pod is: an authority signs agents' keys, and tokens say which pod a request is for. In a cluster a Secret
//! keeps the authority and in time its successor, and tokens are service accounts'; elsewhere both live as long as their coordinator.
//!
//! Agents authenticate each other by the key that the membership pins, so a certificate only has to bind a pod
//! UID to a key once: when the agent enrols and when it opens its stream.

mod authority;
mod kept;
mod succession;
mod token;

pub use authority::{Authority, IdentityError, SERVER_NAME, ServerIdentity, pod_of_certificate};
pub use kept::{
    CA_BUNDLE, CA_BUNDLE_KEY, CA_SECRET, Kept, KeptError, load_or_create, publish_bundle, secrets,
};
pub use succession::{Succession, Trust};
pub use token::Tokens;
