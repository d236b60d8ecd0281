//! Where epochs are written down.

use std::future::Future;
use weightrefit_core::membership::roster::{Next, Recorded};

/// The epoch could not be written down; the coordinator tries again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("epoch cannot be recorded: {0}")]
pub struct RecordError(pub String);

/// The one place where the newest `(epoch, membership digest, version floor)` is kept, in one write.
pub trait EpochRecord: Send + 'static {
    /// What was written last, by this coordinator or one before it, as far as this one knows.
    fn recorded(&self) -> Option<Recorded>;

    /// Writes it down. Only when this has succeeded may an agent hear of the epoch.
    ///
    /// # Errors
    /// It is not written. Where somebody else wrote an epoch meanwhile, [`Self::recorded`] is theirs from now on.
    fn record(&mut self, next: &Next) -> impl Future<Output = Result<(), RecordError>> + Send;
}

/// Lives as long as its coordinator: for runs whose agents do not outlive it either.
#[derive(Debug, Default)]
pub struct InMemory(Option<Recorded>);

impl EpochRecord for InMemory {
    fn recorded(&self) -> Option<Recorded> {
        self.0
    }

    async fn record(&mut self, next: &Next) -> Result<(), RecordError> {
        self.0 = Some(Recorded::of(&next.membership, next.basis));
        Ok(())
    }
}
