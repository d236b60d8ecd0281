//! `weightrefit history`.

use crate::cli::cluster::{Cluster, refused};
use crate::cli::status::{ago, round};
use crate::cli::table::{Align, Table};
use crate::cli::{Failure, Output, Printer};
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::ListParams;
use serde_json::json;

/// Show what happened to a refit: its events, oldest first, and the rounds that ended last
///
/// A cluster keeps events for an hour unless it is told otherwise; longer histories are in the metrics.
#[derive(Debug, clap::Args)]
pub(crate) struct History {
    /// The refit
    #[arg(value_name = "REFIT")]
    name: String,
    #[command(flatten)]
    cluster: Cluster,
    /// Format of stdout; json is `weightrefit.history/v1`
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl History {
    pub(crate) fn run(self, printer: &Printer) -> Result<(), Failure> {
        let Self { name, cluster, output } = self;
        let (refit, mut events) = cluster.run(async |cluster| {
            let refit = cluster.refit(&name).await?;
            let uid = refit.metadata.uid.as_deref().unwrap_or_default();
            let api: Api<Event> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
            let of_refit = ListParams::default().fields(&format!("involvedObject.uid={uid}"));
            let events = api.list(&of_refit).await.map_err(|error| refused(error, "list events"))?;
            Ok((refit, events.items))
        })?;
        events.sort_by_key(|event| happened(event).map(|time| time.0));
        let status = refit.status.unwrap_or_default();
        let rounds = [("last", status.last_round), ("last failed", status.last_failed_round)];
        let now = Timestamp::now();
        match output {
            Output::Json => {
                let event = |event: &Event| {
                    json!({"time": happened(event), "type": event.type_, "reason": event.reason, "message": event.message,
                           "count": times(event)})
                };
                let events: Vec<_> = events.iter().map(event).collect();
                let [(_, last), (_, failed)] = &rounds;
                let document = json!({"schema": "weightrefit.history/v1", "events": events, "lastRound": last,
                                      "lastFailedRound": failed});
                printer.json(&document, 3)
            }
            Output::Table => {
                printer.data(&shown(&events, now))?;
                let rounds = rounds.into_iter().filter_map(|(which, ended)| Some((which, ended?)));
                rounds
                    .map(|(which, ended)| format!("{which} round: {}", round(&ended, now)))
                    .try_for_each(|line| printer.data(&line))
            }
        }
    }
}

fn shown(events: &[Event], now: Timestamp) -> String {
    let columns = [
        ("AGO", Align::Right),
        ("TYPE", Align::Left),
        ("REASON", Align::Left),
        ("TIMES", Align::Right),
        ("MESSAGE", Align::Left),
    ];
    let mut table = Table::new(&columns);
    for event in events {
        let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
        table.row([
            happened(event).map_or("-".to_owned(), |time| ago(&time, now)),
            text(&event.type_),
            text(&event.reason),
            times(event).to_string(),
            text(&event.message),
        ]);
    }
    table.shown()
}

/// When it happened last.
fn happened(event: &Event) -> Option<Time> {
    let series = event.series.as_ref().and_then(|series| series.last_observed_time.as_ref());
    let micro = series.or(event.event_time.as_ref()).map(|time| Time(time.0));
    micro.or_else(|| event.last_timestamp.clone()).or_else(|| event.metadata.creation_timestamp.clone())
}

fn times(event: &Event) -> i32 {
    event.series.as_ref().and_then(|series| series.count).or(event.count).unwrap_or(1)
}
