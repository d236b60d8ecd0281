//! `weightrefit doctor`.

mod finding;
mod here;
mod installation;
mod refit;

use crate::cli::cluster::Cluster;
use crate::cli::{Failure, Output, Printer};
use finding::{Level, document, shown};

/// Find out what keeps refits from working in this cluster, and what to do about it
///
/// Looks at the API server, the resource's definition, the operator, its webhook and certificates; with a name also at
/// that refit, its pods and whether their accounts may take part; and inside a pod at what agents and engines need of
/// it. Nothing is changed: the webhook is asked about a pod that is not created.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Installed as `kubectl-weightrefit`, it is also `kubectl weightrefit doctor`. Exit code 1: something is wrong."
)]
pub(crate) struct Doctor {
    /// A refit to look at too
    #[arg(value_name = "REFIT")]
    name: Option<String>,
    /// Namespace of the operator
    #[arg(long, value_name = "NAME", default_value = "weightrefit-system")]
    operator_namespace: String,
    /// Name of the MutatingWebhookConfiguration
    #[arg(long, value_name = "NAME", default_value = "weightrefit")]
    webhook_configuration: String,
    #[command(flatten)]
    cluster: Cluster,
    /// Format of stdout; json is `weightrefit.doctor/v1`
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl Doctor {
    pub(crate) fn run(self, printer: &Printer) -> Result<(), Failure> {
        // All fields by name, so that none is forgotten.
        let Self { name, operator_namespace, webhook_configuration, cluster, output } = self;
        let mut findings = cluster.run(async |cluster| {
            let mut found = installation::look(&cluster, &operator_namespace, &webhook_configuration).await;
            if let Some(name) = &name {
                found.findings.extend(refit::look(&cluster, name, found.settings.as_ref()).await);
            }
            Ok(found.findings)
        })?;
        if here::is_pod() {
            findings.extend(here::look());
        }
        match output {
            Output::Table => printer.data(&shown(&findings))?,
            Output::Json => printer.json(&document(&findings), 3)?,
        }
        let wrong = findings.iter().filter(|finding| finding.level == Level::Wrong).count();
        match wrong {
            0 => Ok(()),
            _ => Err(Failure::refused(
                format!("{wrong} of {} checks found something wrong", findings.len()),
                "Begin with the first: later ones often follow from it.",
            )),
        }
    }
}
