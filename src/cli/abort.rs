//! `weightrefit abort`.

use crate::api::refit::ABORT_ANNOTATION;
use crate::cli::cluster::{Cluster, refused};
use crate::cli::{Failure, Printer};
use kube::api::{Patch, PatchParams};
use serde_json::json;

/// End the round that runs now: no replica commits it that has not been authorised yet
///
/// Replicas serve on with what they have, and the next publication makes a new round. Between rounds the request waits
/// for the next one of the same membership.
#[derive(Debug, clap::Args)]
pub(crate) struct Abort {
    /// The refit
    #[arg(value_name = "REFIT")]
    name: String,
    #[command(flatten)]
    cluster: Cluster,
}

impl Abort {
    pub(crate) fn run(self, printer: &Printer) -> Result<(), Failure> {
        let Self { name, cluster } = self;
        let said = cluster.run(async |cluster| {
            let refit = cluster.refit(&name).await?;
            let status = refit.status.unwrap_or_default();
            let Some(membership) = &status.membership else {
                let error =
                    format!("WeightRefit {}/{name} has no members, so no round runs", cluster.namespace);
                return Err(Failure::refused(error, format!("See `weightrefit status {name}`.")));
            };
            let epoch = membership.epoch;
            let ended = [&status.last_round, &status.last_failed_round].into_iter().flatten();
            let ended = ended.filter(|round| round.epoch == epoch).map(|round| round.id).max().unwrap_or(0);
            // Named, so that neither a late operator nor a restarted one ends a round that nobody meant.
            let after = format!("{epoch}/{ended}");
            let patch = json!({"metadata": {
                "annotations": {ABORT_ANNOTATION: after},
                "resourceVersion": refit.metadata.resource_version,
            }});
            let patched = cluster.refits().patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await;
            patched.map_err(|error| refused(error, "annotate the WeightRefit"))?;
            Ok(format!(
                "the first round after {epoch}.{ended} of WeightRefit {}/{name} will be aborted",
                cluster.namespace
            ))
        })?;
        printer.data(&said)
    }
}
