//! Connections that a destination keeps from one round to the next, so that a round waits for no handshake.

use super::link::Link;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use weightrefit_core::id::MemberId;

/// By source of one membership, in which their keys were proved. As many as the rank had streams at once.
#[derive(Debug, Default)]
pub struct Resting(Mutex<BTreeMap<MemberId, Vec<Link>>>);

impl Resting {
    /// A connection to a source; its other end may be closed.
    pub(super) fn take(&self, source: MemberId) -> Option<Link> {
        self.lock().get_mut(&source)?.pop()
    }

    /// Keeps one whose stream went well.
    pub(super) fn keep(&self, source: MemberId, link: Link) {
        self.lock().entry(source).or_default().push(link);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<MemberId, Vec<Link>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
