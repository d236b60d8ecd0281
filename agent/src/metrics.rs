//! What the agent counts, declared in one place; `docs/metrics.md` lists the same and a test compares them.
//!
//! No label grows with pods, ranks or rounds; such values go to the log.

mod http;

pub use http::{MetricsError, MetricsServer};

use prometheus::core::Collector;
use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry,
};
use weightrefit_core::code::Code;
use weightrefit_core::round::io::Phase;

/// All metrics of the agent.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Registry,
    /// Rounds that this agent led, by outcome and reason (empty when committed).
    pub rounds: IntCounterVec,
    /// Seconds of the phases of rounds that this agent led.
    pub phase_seconds: HistogramVec,
    /// Seconds in which engines applied their groups, by class.
    pub apply_seconds: HistogramVec,
    /// Bytes that sources of this agent sent, acknowledged.
    pub sent_bytes: IntCounterVec,
    /// Bytes that destinations of this agent accepted.
    pub received_bytes: IntCounterVec,
    /// Bytes of the plan that needed not move.
    pub skipped_bytes: IntCounterVec,
    /// Bytes that the plan's minimum asked for in the rounds received.
    pub minimum_bytes: IntCounterVec,
    /// Step that the trainer ranks of this agent offer.
    pub published_step: IntGauge,
    /// Step that the engines of this agent hold.
    pub committed_step: IntGauge,
    /// Leader: steps between the newest accepted publication and the newest committed version.
    pub lag_steps: IntGauge,
    /// Leader: seconds since the newest accepted publication, 0 once it is committed.
    pub lag_seconds: Gauge,
    /// Seconds that engines were asked to be paused, from `pause` to serving again.
    pub engine_paused_seconds: Histogram,
    /// Seconds from `publish` to `released`.
    pub publication_held_seconds: Histogram,
    /// Bytes of staging held.
    pub staging_bytes: IntGauge,
    /// Ranks of rounds that received by TCP though NCCL was allowed, by code of the reason.
    pub transport_fallbacks: IntCounterVec,
    /// Bytes copied between devices and the host because TCP had to carry what lies on a device.
    pub shadowed_bytes: IntCounter,
    /// Digests that differed, at the leader.
    pub digest_mismatches: IntCounter,
    /// Messages, streams and connections of peers that were refused, by code.
    pub peer_refusals: IntCounterVec,
    /// Clients of the agent socket that were refused, by code.
    pub client_refusals: IntCounterVec,
    /// Connected clients by role.
    pub clients: IntGaugeVec,
    /// Agents of the membership with an open stream.
    pub peers: IntGauge,
    /// Messages that found no stream or a full one.
    pub peer_messages_dropped: IntCounter,
    /// Events waiting for the round driver, by source, or for the slowest driver.
    pub queue_depth: IntGaugeVec,
    /// Bound of each queue.
    pub queue_limit: IntGaugeVec,
    /// The accepted epoch.
    pub epoch: IntGauge,
    /// Leader: rounds aborted since one was committed.
    pub rounds_aborted_in_a_row: IntGauge,
    /// 1 while the stream to the coordinator is open.
    pub coordinator_connected: IntGauge,
    /// When the certificate that the coordinator gave ends; -1 before the first.
    pub certificate_expiry: IntGauge,
    /// Constant 1, labelled with the version.
    pub build_info: GaugeVec,
}

/// Seconds from a millisecond to the longest phase deadline one would set.
const SECONDS_BUCKETS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];

/// TCP, as a label.
pub const TCP: &[&str] = &["tcp"];
/// NCCL, as a label.
pub const NCCL: &[&str] = &["nccl"];

/// What keeps ranks from NCCL most often.
const FALLBACKS: [Code; 7] = [
    Code::GpuNotVisible,
    Code::InterfaceNotFound,
    Code::MemlockTooLow,
    Code::NcclError,
    Code::ShmTooSmall,
    Code::TransportUnavailable,
    Code::VersionSkew,
];

impl Metrics {
    /// Registers everything.
    ///
    /// # Errors
    /// Two metrics of one name: a programmer's error that any start of the agent shows.
    pub fn new() -> Result<Self, prometheus::Error> {
        let r = Registry::new();
        let metrics = Self {
            rounds: counters(
                &r,
                "rounds_total",
                "Rounds led, by outcome and reason.",
                &["outcome", "reason"],
            )?,
            phase_seconds: histograms(&r, "phase_seconds", "Phases of the rounds led.", &["phase"])?,
            apply_seconds: histograms(
                &r,
                "apply_seconds",
                "Groups of tensors that engines of this agent applied.",
                &["class"],
            )?,
            sent_bytes: counters(&r, "sent_bytes_total", "Bytes sent and acknowledged.", &["transport"])?,
            received_bytes: counters(&r, "received_bytes_total", "Bytes accepted.", &["transport"])?,
            skipped_bytes: counters(
                &r,
                "skipped_bytes_total",
                "Planned bytes that needed not move.",
                &["transport"],
            )?,
            minimum_bytes: counters(
                &r,
                "minimum_bytes_total",
                "Least bytes that the rounds received could need.",
                &["transport"],
            )?,
            published_step: gauge(
                &r,
                "published_step",
                "Step that the trainer ranks of this agent offer; -1 before the first.",
            )?,
            committed_step: gauge(
                &r,
                "committed_step",
                "Step that the engines of this agent hold; -1 before the first.",
            )?,
            lag_steps: gauge(
                &r,
                "lag_steps",
                "Leader: steps from the newest committed to the newest publication.",
            )?,
            lag_seconds: register(
                &r,
                Gauge::with_opts(opts("lag_seconds", "Leader: age of a publication not yet committed."))?,
            )?,
            engine_paused_seconds: histogram(&r, "engine_paused_seconds", "From pause to serving again.")?,
            publication_held_seconds: histogram(&r, "publication_held_seconds", "From publish to release.")?,
            staging_bytes: gauge(&r, "staging_bytes", "Staging memory held.")?,
            transport_fallbacks: counters(
                &r,
                "transport_fallbacks_total",
                "Ranks of rounds that received by TCP though NCCL was allowed.",
                &["code"],
            )?,
            shadowed_bytes: register(
                &r,
                IntCounter::with_opts(opts(
                    "shadowed_bytes_total",
                    "Copied between devices and the host because TCP had to carry them.",
                ))?,
            )?,
            digest_mismatches: register(
                &r,
                IntCounter::with_opts(opts(
                    "digest_mismatches_total",
                    "Leader: digests that differed from the publication.",
                ))?,
            )?,
            peer_refusals: counters(
                &r,
                "peer_refusals_total",
                "Peers, streams and messages refused.",
                &["code"],
            )?,
            client_refusals: counters(
                &r,
                "client_refusals_total",
                "Clients of the agent socket refused.",
                &["code"],
            )?,
            clients: gauges(&r, "clients", "Connected clients of the agent socket.", &["role"])?,
            peers: gauge(&r, "peers", "Agents with an open stream.")?,
            peer_messages_dropped: register(
                &r,
                IntCounter::with_opts(opts(
                    "peer_messages_dropped_total",
                    "Messages that found no stream or a full one.",
                ))?,
            )?,
            queue_depth: gauges(
                &r,
                "queue_depth",
                "Events waiting for the round driver or, as `events`, for a slow driver.",
                &["queue"],
            )?,
            queue_limit: gauges(&r, "queue_limit", "Events that may wait.", &["queue"])?,
            epoch: gauge(&r, "epoch", "Epoch of the accepted membership.")?,
            rounds_aborted_in_a_row: gauge(
                &r,
                "rounds_aborted_in_a_row",
                "Leader: rounds aborted since one was committed.",
            )?,
            coordinator_connected: gauge(
                &r,
                "coordinator_connected",
                "1 while the stream to the coordinator is open, else 0.",
            )?,
            certificate_expiry: gauge(
                &r,
                "certificate_expiry_timestamp_seconds",
                "When this agent's certificate ends, in Unix time; -1 before the first.",
            )?,
            build_info: register(&r, GaugeVec::new(opts("build_info", "Constant 1."), &["version"])?)?,
            registry: r,
        };
        metrics.build_info.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1.0);
        // 0 is a step, and a time.
        for unknown in [&metrics.published_step, &metrics.committed_step, &metrics.certificate_expiry] {
            unknown.set(-1);
        }
        // A counter that is there, and 0, from the start shows its first increase.
        drop(metrics.rounds.with_label_values(&["Committed", ""]));
        for code in FALLBACKS {
            drop(metrics.transport_fallbacks.with_label_values(&[code.name()]));
        }
        for bytes in
            [&metrics.sent_bytes, &metrics.received_bytes, &metrics.skipped_bytes, &metrics.minimum_bytes]
        {
            drop(bytes.with_label_values(TCP));
        }
        Ok(metrics)
    }

    /// Counts a refused peer.
    pub fn refuse_peer(&self, code: Code) {
        self.peer_refusals.with_label_values(&[code.name()]).inc();
    }

    /// Counts a refused client.
    pub fn refuse_client(&self, code: Code) {
        self.client_refusals.with_label_values(&[code.name()]).inc();
    }

    /// What there is, whether or not it has a value yet.
    #[cfg(test)]
    fn descriptions(&self) -> Vec<prometheus::core::Desc> {
        // Exhaustive, so that a new metric cannot be forgotten.
        let Self {
            registry: _,
            rounds,
            phase_seconds,
            apply_seconds,
            sent_bytes,
            received_bytes,
            skipped_bytes,
            minimum_bytes,
            published_step,
            committed_step,
            lag_steps,
            lag_seconds,
            engine_paused_seconds,
            publication_held_seconds,
            staging_bytes,
            transport_fallbacks,
            shadowed_bytes,
            digest_mismatches,
            peer_refusals,
            client_refusals,
            clients,
            peers,
            peer_messages_dropped,
            queue_depth,
            queue_limit,
            epoch,
            rounds_aborted_in_a_row,
            coordinator_connected,
            certificate_expiry,
            build_info,
        } = self;
        let all: [&dyn Collector; 29] = [
            rounds,
            phase_seconds,
            apply_seconds,
            sent_bytes,
            received_bytes,
            skipped_bytes,
            minimum_bytes,
            published_step,
            committed_step,
            lag_steps,
            lag_seconds,
            engine_paused_seconds,
            publication_held_seconds,
            staging_bytes,
            transport_fallbacks,
            shadowed_bytes,
            digest_mismatches,
            peer_refusals,
            client_refusals,
            clients,
            peers,
            peer_messages_dropped,
            queue_depth,
            queue_limit,
            epoch,
            rounds_aborted_in_a_row,
            coordinator_connected,
            certificate_expiry,
            build_info,
        ];
        all.iter().flat_map(|metric| metric.desc()).cloned().collect()
    }

    /// The text that `/metrics` serves.
    ///
    /// # Errors
    /// Those of the encoder.
    pub fn text(&self) -> Result<String, prometheus::Error> {
        prometheus::TextEncoder::new().encode_to_string(&self.registry.gather())
    }
}

/// Name of a phase in metrics, JSON and logs.
#[must_use]
pub const fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Prepare => "prepare",
        Phase::Transfer => "transfer",
        Phase::Verify => "verify",
        Phase::Pause => "pause",
        Phase::Commit => "commit",
        Phase::Resume => "resume",
    }
}

fn opts(name: &str, help: &str) -> Opts {
    Opts::new(format!("weightrefit_agent_{name}"), help)
}

fn register<T: Collector + Clone + 'static>(registry: &Registry, metric: T) -> Result<T, prometheus::Error> {
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}

fn counters(
    r: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> Result<IntCounterVec, prometheus::Error> {
    register(r, IntCounterVec::new(opts(name, help), labels)?)
}

fn gauge(r: &Registry, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
    register(r, IntGauge::with_opts(opts(name, help))?)
}

fn gauges(r: &Registry, name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec, prometheus::Error> {
    register(r, IntGaugeVec::new(opts(name, help), labels)?)
}

fn histogram_opts(name: &str, help: &str) -> HistogramOpts {
    HistogramOpts::from(opts(name, help)).buckets(SECONDS_BUCKETS.to_vec())
}

fn histogram(r: &Registry, name: &str, help: &str) -> Result<Histogram, prometheus::Error> {
    register(r, Histogram::with_opts(histogram_opts(name, help))?)
}

fn histograms(
    r: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> Result<HistogramVec, prometheus::Error> {
    register(r, HistogramVec::new(histogram_opts(name, help), labels)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows `| name | kind | labels | meaning |` of the agent's table in docs/metrics.md.
    fn documented() -> Vec<String> {
        let text = include_str!("../../docs/metrics.md");
        let rows = text.lines().filter(|line| line.starts_with("| `weightrefit_agent_"));
        rows.map(|row| row.split('|').skip(1).take(4).map(str::trim).collect::<Vec<_>>().join(" | "))
            .collect()
    }

    #[test]
    fn the_inventory_is_the_documented_one() {
        let metrics = Metrics::new().expect("names are distinct");
        let mut have = Vec::new();
        for description in metrics.descriptions() {
            let labels = match description.variable_labels.as_slice() {
                [] => String::new(),
                labels => labels.iter().map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", "),
            };
            have.push((description.fq_name, labels, description.help));
        }
        have.sort();
        let documented = documented();
        let strip = |row: &String| {
            let mut cells = row.split(" | ");
            let name = cells.next().unwrap_or_default().trim_matches('`').to_owned();
            let _kind = cells.next();
            (name, cells.next().unwrap_or_default().to_owned(), cells.next().unwrap_or_default().to_owned())
        };
        let want: Vec<_> = documented.iter().map(strip).collect();
        assert_eq!(have, want, "docs/metrics.md lists other metrics than the agent has");
    }

    #[test]
    fn names_say_unit_and_kind() {
        let metrics = Metrics::new().expect("names are distinct");
        metrics.rounds.with_label_values(&["Committed", ""]).inc();
        metrics.refuse_client(Code::DuplicateRank);
        let text = metrics.text().expect("encodes");
        for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
            let (name, kind) = line.split_once(' ').expect("a kind");
            assert_eq!(name.ends_with("_total"), kind == "counter", "{name} is a {kind}");
        }
        assert!(text.contains(r#"weightrefit_agent_received_bytes_total{transport="tcp"} 0"#), "{text}");
        assert!(
            text.contains(r#"weightrefit_agent_client_refusals_total{code="DuplicateRank"} 1"#),
            "{text}"
        );
    }
}
