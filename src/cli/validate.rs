//! `weightrefit validate`.

use crate::api::documents::{Document, Documents};
use crate::api::manifest::Manifest;
use crate::api::problem::{Problem, Refusal};
use crate::api::resolve::{Options, resolve};
use crate::api::supported;
use crate::cli::input::Files;
use crate::cli::tensors::TensorsFile;
use crate::cli::{Failure, Printer};
use weightrefit_core::model::TensorTable;

/// Check the documents that `kubectl apply` would take, without a cluster
///
/// Fields are always checked, also against what this version can carry out. Layouts, and whether the two sides fit each other, are checked as far as the files
/// hold what that takes; stderr says what was left out.
#[derive(Debug, clap::Args)]
pub(crate) struct Validate {
    #[command(flatten)]
    files: Files,
    #[command(flatten)]
    tensors: TensorsFile,
}

impl Validate {
    pub(crate) fn run(self, printer: &Printer) -> Result<(), Failure> {
        let documents = self.files.documents(printer)?;
        let tensors = self.tensors.read()?;
        for refit in &documents.refits {
            let unsupported = |(path, problem)| refit.refuse(path, problem);
            supported::check(&refit.value.spec).map_err(unsupported)?;
            let checked = match validate(&documents, refit, tensors.clone(), printer)? {
                Ok(()) => "fields, layouts and plan",
                Err(left_out) => {
                    printer.note(&format!("layouts and plan were not checked: {left_out}"));
                    "fields"
                }
            };
            let Manifest { metadata, .. } = &refit.value;
            printer
                .data(&format!("WeightRefit {}/{} is valid: {checked}", metadata.namespace, metadata.name))?;
        }
        Ok(())
    }
}

/// The inner error is what stands in the way of checking more than fields.
fn validate(
    documents: &Documents,
    refit: &Document<Manifest>,
    tensors: Option<TensorTable>,
    printer: &Printer,
) -> Result<Result<(), Refusal>, Failure> {
    let resolved = match resolve(documents, refit, &Options { tensors, ..Options::default() }) {
        Ok(resolved) => resolved,
        Err(refusal) => match *refusal.problem {
            // A cluster may well have what the files lack.
            Problem::Unsupported { .. } | Problem::NotGiven { .. } => return Ok(Err(refusal)),
            _ => return Err(refusal.into()),
        },
    };
    resolved.notes.iter().for_each(|note| printer.note(note));
    let no_plan = |error| Failure::no_plan(refit, error);
    resolved.training.check().map_err(no_plan)?;
    resolved.pools.iter().try_for_each(|pool| pool.side.check()).map_err(no_plan)?;
    resolved.plan().map_err(no_plan)?;
    Ok(Ok(()))
}
