//! `weightrefit status`.

use crate::api::condition::{Condition, ConditionType};
use crate::api::refit::WeightRefit;
use crate::api::status::{BehindReplica, RoundStatus, Version, WeightRefitStatus};
use crate::cli::cluster::{Cluster, Connected, refused};
use crate::cli::table::{Align, Table, bytes, grouped};
use crate::cli::{Failure, Output, Printer};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use serde_json::json;

/// Show how refits in a cluster stand: all of them, or one with its reasons
#[derive(Debug, clap::Args)]
pub(crate) struct Status {
    /// One refit, with its conditions and the replicas behind [default: a line for each]
    #[arg(value_name = "REFIT")]
    name: Option<String>,
    /// Of all namespaces
    #[arg(short = 'A', long, conflicts_with_all = ["name", "namespace"])]
    all_namespaces: bool,
    #[command(flatten)]
    cluster: Cluster,
    /// Format of stdout; json is `weightrefit.status/v1`
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl Status {
    pub(crate) fn run(self, printer: &Printer) -> Result<(), Failure> {
        let Self { name, all_namespaces, cluster, output } = self;
        let one = name.is_some();
        let refits = cluster.run(async |cluster| find(&cluster, name.as_deref(), all_namespaces).await)?;
        match output {
            Output::Json => printer.json(&document(&refits), 3),
            Output::Table if one => {
                refits.iter().try_for_each(|refit| printer.data(&details(refit, Timestamp::now())))
            }
            Output::Table if refits.is_empty() => {
                printer.note("no WeightRefit here; -A looks in all namespaces");
                Ok(())
            }
            Output::Table => printer.data(&lines(&refits, Timestamp::now())),
        }
    }
}

async fn find(
    cluster: &Connected,
    name: Option<&str>,
    everywhere: bool,
) -> Result<Vec<WeightRefit>, Failure> {
    if let Some(name) = name {
        return Ok(vec![cluster.refit(name).await?]);
    }
    let api = if everywhere { Api::all(cluster.client.clone()) } else { cluster.refits() };
    let list = api.list(&ListParams::default()).await;
    list.map(|list| list.items).map_err(|error| refused(error, "list WeightRefits"))
}

fn document(refits: &[WeightRefit]) -> serde_json::Value {
    let one = |refit: &WeightRefit| {
        json!({"namespace": refit.namespace(), "name": refit.name_any(), "generation": refit.metadata.generation,
               "status": refit.status})
    };
    json!({"schema": "weightrefit.status/v1", "refits": refits.iter().map(one).collect::<Vec<_>>()})
}

/// One line for each refit.
fn lines(refits: &[WeightRefit], now: Timestamp) -> String {
    use Align::{Left, Right};
    let columns = [
        ("REFIT", Left),
        ("READY", Left),
        ("REASON", Left),
        ("VERSION", Right),
        ("CURRENT", Right),
        ("ENDED", Right),
    ];
    let mut table = Table::new(&columns);
    for refit in refits {
        let status = refit.status.as_ref();
        let ready = status.and_then(|status| status.condition(ConditionType::Ready.name()));
        let inference = status.and_then(|status| status.inference.as_ref());
        let ended = status.and_then(|status| status.last_round.as_ref()).map(|round| &round.completion_time);
        table.row([
            refit.full_name(),
            ready.map_or("-".to_owned(), |ready| format!("{:?}", ready.status)),
            ready.map_or("-".to_owned(), |ready| ready.reason.clone()),
            version(inference.and_then(|inference| inference.committed)),
            inference.map_or("-".to_owned(), |i| format!("{}/{}", i.current_replicas, i.desired_replicas)),
            ended.map_or("-".to_owned(), |time| ago(time, now)),
        ]);
    }
    table.shown()
}

/// Everything that a person needs to see what one refit does and what keeps it from more.
fn details(refit: &WeightRefit, now: Timestamp) -> String {
    let Some(status) = &refit.status else {
        return format!("{} has no status yet: no operator has seen it", refit.full_name());
    };
    let mut out = summary(refit, status, now);
    let mut table = Table::new(&[
        ("CONDITION", Align::Left),
        ("STATUS", Align::Left),
        ("SINCE", Align::Right),
        ("REASON", Align::Left),
    ]);
    for Condition { kind, status, last_transition_time, reason, .. } in &status.conditions {
        table.row([kind.clone(), format!("{status:?}"), ago(last_transition_time, now), reason.clone()]);
    }
    out.push(format!("\n{}", table.shown()));
    let troubling = status.conditions.iter().filter(|condition| condition.is_trouble());
    out.extend(troubling.map(|condition| format!("\n{}: {}", condition.kind, condition.message)));
    if !status.behind.is_empty() {
        out.push(format!("\n{}", behind(&status.behind, now)));
    }
    if let Some(failed) = &status.last_failed_round {
        out.push(format!("\nlast failed round  {}", round(failed, now)));
        out.extend(failed.message.iter().map(|message| format!("                   {message}")));
    }
    out.join("\n")
}

fn summary(refit: &WeightRefit, status: &WeightRefitStatus, now: Timestamp) -> Vec<String> {
    let mut out = vec![refit.full_name()];
    let stale = status.observed_generation != refit.metadata.generation;
    if stale {
        out.push("  (the status is of an older specification)".to_owned());
    }
    if let Some(m) = &status.membership {
        out.push(format!(
            "  membership  epoch {}, {:?}, {} ago, led by {}",
            m.epoch,
            m.cause,
            ago(&m.start_time, now),
            m.leader
        ));
    }
    if let Some(t) = &status.training {
        let (connected, ranks) = (t.connected_ranks, t.ranks);
        out.push(format!(
            "  training    {:?}, {connected} of {ranks} ranks connected, published {}",
            t.state,
            version(t.published)
        ));
    }
    if let Some(i) = &status.inference {
        out.push(format!(
            "  inference   {} of {} replicas current, {} serving, {} fenced; committed {}, oldest serving {}",
            i.current_replicas,
            i.desired_replicas,
            i.serving_replicas,
            i.fenced_replicas,
            version(i.committed),
            version(i.oldest_serving)
        ));
    }
    if let Some(plan) = &status.plan {
        let (planned, minimum) = (plan.bytes_planned.unsigned_abs(), plan.bytes_minimum.unsigned_abs());
        out.push(format!(
            "  plan        {} ({} bytes, minimum {})",
            bytes(planned),
            grouped(planned),
            grouped(minimum)
        ));
    }
    out.extend(status.last_round.as_ref().map(|last| format!("  last round  {}", round(last, now))));
    out
}

fn behind(replicas: &[BehindReplica], now: Timestamp) -> String {
    let columns = [
        ("BEHIND", Align::Left),
        ("VERSION", Align::Right),
        ("SINCE", Align::Right),
        ("REASON", Align::Left),
        ("POD", Align::Left),
        ("RANK", Align::Right),
    ];
    let mut table = Table::new(&columns);
    for replica in replicas {
        table.row([
            format!("{}/{}", replica.pool, replica.replica),
            version(replica.version),
            ago(&replica.since, now),
            replica.reason.clone(),
            replica.pod.clone().unwrap_or_else(|| "-".to_owned()),
            replica.rank.map_or("-".to_owned(), |rank| rank.to_string()),
        ]);
    }
    table.shown()
}

/// A round in one line.
pub(crate) fn round(round: &RoundStatus, now: Timestamp) -> String {
    let took = round.completion_time.0.duration_since(round.start_time.0);
    let reason = round.reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
    let (epoch, id, outcome) = (round.epoch, round.id, round.outcome);
    let received = bytes(round.bytes.received.unsigned_abs());
    let (version, seconds) = (version(Some(round.version)), took.as_secs());
    format!(
        "{epoch}.{id} of {version}: {outcome:?}{reason}, {received} in {seconds} s, {} ago",
        ago(&round.completion_time, now)
    )
}

/// `run.step`.
pub(crate) fn version(version: Option<Version>) -> String {
    version.map_or("-".to_owned(), |version| format!("{}.{}", version.run, version.step))
}

/// `12s`, `34m`, `5h`, `6d`, as kubectl writes ages.
pub(crate) fn ago(time: &Time, now: Timestamp) -> String {
    let seconds = now.duration_since(time.0).as_secs().max(0);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7_200 => format!("{}m", seconds / 60),
        7_200..172_800 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The contract's example of a status, as a person sees it.
    #[test]
    fn a_status_reads_as_its_page_says() {
        let refit: WeightRefit =
            serde_saphyr::from_str(include_str!("../../tests/status/refit.yaml")).expect("a refit");
        let now: Timestamp = "2026-11-30T03:00:00Z".parse().expect("a time");
        let shown = format!("{}\n\n{}\n", lines(std::slice::from_ref(&refit), now), details(&refit, now));
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/status/page.txt");
        if std::env::var_os("REWRITE").is_some() {
            std::fs::write(page, &shown).expect("a writable page");
        }
        assert_eq!(shown, std::fs::read_to_string(page).expect("a page"));
    }

    #[test]
    fn ages_are_short() {
        let now: Timestamp = "2026-11-30T12:00:00Z".parse().expect("a time");
        for (time, want) in [
            ("2026-11-30T12:00:09Z", "0s"),
            ("2026-11-30T11:58:01Z", "119s"),
            ("2026-11-30T11:58:00Z", "2m"),
            ("2026-11-30T10:00:00Z", "2h"),
            ("2026-11-28T12:00:00Z", "2d"),
        ] {
            assert_eq!(ago(&Time(time.parse().expect("a time")), now), want, "{time}");
        }
    }
}
