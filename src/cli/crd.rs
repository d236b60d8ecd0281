//! `weightrefit crd`.

use crate::api::refit::WeightRefit;
use crate::cli::{Failure, Printer};
use kube::CustomResourceExt;

/// Print the CustomResourceDefinition, for `kubectl apply --server-side -f -`
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: weightrefit crd | kubectl apply --server-side -f -")]
pub(crate) struct Crd {}

impl Crd {
    pub(crate) fn run(self, printer: &Printer) -> Result<(), Failure> {
        let definition = serde_saphyr::to_string(&WeightRefit::crd()).map_err(Failure::failed)?;
        printer.data(&format!("# Printed by `weightrefit crd`.\n{}", definition.trim_end()))
    }
}
