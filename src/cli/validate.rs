//! `weightrefit validate`.

use crate::cli::input::Files;
use crate::cli::{Failure, Printer};

/// Check the documents that `kubectl apply` would take, without a cluster
#[derive(Debug, clap::Args)]
pub(crate) struct Validate {
    #[command(flatten)]
    files: Files,
}

impl Validate {
    pub(crate) fn run(self, printer: &Printer) -> Result<(), Failure> {
        let documents = self.files.documents(printer)?;
        for refit in &documents.refits {
            printer.data(&format!(
                "WeightRefit {}/{} is valid",
                refit.value.metadata.namespace, refit.value.metadata.name
            ))?;
        }
        Ok(())
    }
}
