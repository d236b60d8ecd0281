//! `weightrefit version`.

use crate::api::refit::API_VERSION;
use crate::cli::{Failure, Output, Printer};
use weightrefit_core::plan::PLANNER_VERSION;
use weightrefit_core::plan::document::SCHEMA;
use weightrefit_proto::socket::PROTOCOL;

/// Print the versions of the program and of its interfaces
#[derive(Debug, clap::Args)]
pub(crate) struct Version {
    /// Format of stdout; json is `weightrefit.version/v1`
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl Version {
    pub(crate) fn run(self, printer: &Printer) -> Result<(), Failure> {
        let rows = [
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("apiVersion", API_VERSION.to_owned()),
            ("planSchema", SCHEMA.to_owned()),
            ("plannerVersion", PLANNER_VERSION.to_string()),
            ("agentSocket", PROTOCOL.to_string()),
        ];
        match self.output {
            Output::Table => {
                let rows: Vec<String> =
                    rows.iter().map(|(name, value)| format!("{name:<16}{value}")).collect();
                printer.data(&rows.join("\n"))
            }
            Output::Json => {
                let schema = ("schema", "weightrefit.version/v1".to_owned());
                let object: serde_json::Map<_, _> = [schema]
                    .into_iter()
                    .chain(rows)
                    .map(|(name, value)| (name.to_owned(), value.into()))
                    .collect();
                printer.json(&object, 1)
            }
        }
    }
}
