//! What others see of this agent: metrics, probes, the state for the coordinator, answers for drivers.

use super::applying::{Applying, OutOfOrder};
use super::data::Data;
use super::events::Events;
use super::report::{named, phase_seconds};
use super::waiters::{Answer, Waiters};
use crate::metrics::{Metrics, NCCL, TCP};
use crate::planned::{Planned, Task};
use crate::readiness::Health;
use crate::transport::nccl::Carried;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::watch;
use weightrefit_core::code::Code;
use weightrefit_core::membership::{Seat, VersionFloor};
use weightrefit_core::round::io::{Event, Input, Phase, RoundSummary, Slot};
use weightrefit_core::round::message::{EngineRecord, EngineState, RoundKey, Version};
use weightrefit_core::round::node::Node;
use weightrefit_proto::report::{RoundOutcome, RoundReport};
use weightrefit_proto::socket::{DriverEvent, Group, GroupClass};
use weightrefit_proto::v1;

/// One rank as others see it.
#[derive(Debug)]
struct View {
    seat: Seat,
    registered: bool,
    fault: Option<v1::Fault>,
    record: Option<EngineRecord>,
    published: Option<i64>,
    publishing_since: Option<Instant>,
    paused_since: Option<Instant>,
    minimum: u64,
    applying: Applying,
}

/// The leader's view of how far the fleet is behind.
#[derive(Debug, Default)]
struct Lag {
    accepted: Option<(Version, Instant)>,
    committed: Option<i64>,
}

/// All of it.
pub(super) struct Observer {
    pub(super) metrics: Metrics,
    pub(super) waiters: Waiters,
    pub(super) events: Events,
    health: Arc<Health>,
    state: watch::Sender<v1::State>,
    views: Vec<View>,
    lag: Lag,
    last_round: Option<RoundReport>,
    epoch: u64,
    version_seen: Option<VersionFloor>,
    refusals: BTreeMap<Code, u64>,
    /// As far as they are counted.
    shadowed_bytes: u64,
}

impl Observer {
    pub(super) fn new(
        seats: Vec<Seat>,
        metrics: Metrics,
        health: Arc<Health>,
        state: watch::Sender<v1::State>,
    ) -> Self {
        let view = |seat| View {
            seat,
            registered: false,
            fault: None,
            record: None,
            published: None,
            publishing_since: None,
            paused_since: None,
            minimum: 0,
            applying: Applying::default(),
        };
        Self {
            metrics,
            waiters: Waiters::default(),
            events: Events::default(),
            health,
            state,
            views: seats.into_iter().map(view).collect(),
            lag: Lag::default(),
            last_round: None,
            epoch: 0,
            version_seen: None,
            refusals: BTreeMap::new(),
            shadowed_bytes: 0,
        }
    }

    /// Looks at an input on its way to the node.
    pub(super) fn before(&mut self, input: &Input, data: &Data) {
        match input {
            Input::ClientGone { slot, .. } => {
                if let Some(view) = self.view(*slot) {
                    view.registered = false;
                    view.paused_since = None;
                    view.applying.forget();
                }
            }
            Input::TrainerConnected { .. } => self.waiters.restarted(),
            Input::Resumed { slot, .. } | Input::Aborted { slot, .. } => {
                let since = self.view(*slot).and_then(|view| view.paused_since.take());
                if let Some(since) = since {
                    self.metrics.engine_paused_seconds.observe(since.elapsed().as_secs_f64());
                }
            }
            Input::Received { slot, bytes, skipped, .. } => {
                let minimum = self.view(*slot).map_or(0, |view| view.minimum);
                let carrier = data.replica_of(*slot).and_then(|replica| data.carrier(*slot, replica));
                let transport = label(carrier.as_ref());
                self.metrics.received_bytes.with_label_values(transport).inc_by(*bytes);
                self.metrics.skipped_bytes.with_label_values(transport).inc_by(*skipped);
                self.metrics.minimum_bytes.with_label_values(transport).inc_by(minimum);
                if let Some(Carried::Tcp(reason)) = carrier {
                    self.metrics.transport_fallbacks.with_label_values(&[reason.code.name()]).inc();
                }
            }
            Input::Sent { slot, replica, bytes, .. } => {
                let transport = label(data.carrier(*slot, *replica).as_ref());
                self.metrics.sent_bytes.with_label_values(transport).inc_by(*bytes);
            }
            _ => {}
        }
    }

    /// The slot's registration was taken, or refused.
    pub(super) fn registered(&mut self, slot: Slot, result: Result<(), v1::Fault>) {
        if let Some(view) = self.view(slot) {
            view.registered = result.is_ok();
            view.fault = result.err();
        }
    }

    /// What the slot's engine processes together.
    pub(super) fn groups(&mut self, slot: Slot, groups: Vec<Group>) {
        if let Some(view) = self.view(slot) {
            view.applying = Applying::new(groups);
        }
    }

    /// An engine is asked to commit.
    pub(super) fn committing(&mut self, slot: Slot, round: RoundKey) {
        if let Some(view) = self.view(slot) {
            view.applying.begin(round, Instant::now());
        }
    }

    /// An engine has applied a group.
    pub(super) fn applied(&mut self, slot: Slot, round: RoundKey, group: u32) -> Result<(), OutOfOrder> {
        let Some(view) = self.view(slot) else { return Ok(()) };
        if let Some((class, took)) = view.applying.applied(round, group, Instant::now())? {
            let class = [class_name(class)];
            self.metrics.apply_seconds.with_label_values(&class).observe(took.as_secs_f64());
        }
        Ok(())
    }

    /// An engine has answered a commit; a group that it has not applied.
    pub(super) fn committed(&mut self, slot: Slot, round: RoundKey) -> Option<String> {
        self.view(slot)?.applying.end(round)
    }

    /// A trainer publishes.
    pub(super) fn publishing(&mut self, slot: Slot, step: i64) {
        self.metrics.published_step.set(step);
        if let Some(view) = self.view(slot) {
            view.publishing_since.get_or_insert_with(Instant::now);
        }
    }

    /// A publication went back.
    pub(super) fn released(&mut self, slot: Slot, step: i64) -> Vec<Answer> {
        let since = self.view(slot).and_then(|view| view.publishing_since.take());
        if let Some(since) = since {
            self.metrics.publication_held_seconds.observe(since.elapsed().as_secs_f64());
        }
        self.waiters.returned(step)
    }

    /// An engine is asked to pause.
    pub(super) fn pausing(&mut self, slot: Slot) {
        if let Some(view) = self.view(slot) {
            view.paused_since.get_or_insert_with(Instant::now);
        }
    }

    /// A membership is in effect.
    pub(super) fn configured(&mut self, plan: &Planned) {
        self.epoch = plan.epoch().0;
        self.metrics.epoch.set(i64::try_from(self.epoch).unwrap_or(i64::MAX));
        for (view, slot) in self.views.iter_mut().zip(&plan.slots) {
            view.minimum = match &slot.task {
                Task::Receive(receiving) => receiving.minimum,
                Task::Send(_) => 0,
            };
        }
    }

    /// The leader's round ended.
    pub(super) fn round_ended(&mut self, summary: &RoundSummary, report: RoundReport) -> Vec<Answer> {
        let outcome = match report.outcome {
            RoundOutcome::Committed => "Committed",
            RoundOutcome::Aborted => "Aborted",
        };
        self.metrics.rounds.with_label_values(&[outcome, report.reason.map_or("", Code::name)]).inc();
        match report.outcome {
            RoundOutcome::Committed => self.metrics.rounds_aborted_in_a_row.set(0),
            RoundOutcome::Aborted => self.metrics.rounds_aborted_in_a_row.inc(),
        }
        for (phase, seconds) in phase_seconds(summary) {
            self.metrics.phase_seconds.with_label_values(&[phase]).observe(seconds);
        }
        let differs = |code: &Code| matches!(code, Code::DigestMismatch | Code::ReplicaDivergence);
        let reasons = report.replicas.iter().filter_map(|replica| replica.reason);
        self.metrics.digest_mismatches.inc_by(reasons.filter(differs).count() as u64);
        if summary.committed {
            self.lag.committed = self.lag.committed.max(Some(summary.version.step));
            if self.lag.accepted.is_some_and(|(version, _)| version.step <= summary.version.step) {
                self.lag.accepted = None;
            }
        }
        self.last_round = Some(report.clone());
        self.events.tell(DriverEvent::RoundEnded { report: Box::new(report.clone()) });
        self.waiters.ended(report)
    }

    /// Anything else that the node observes.
    pub(super) fn event(&mut self, event: Event) {
        match event {
            Event::Phase { round, phase } => {
                self.phase(round, phase);
            }
            Event::Accepted { version } => {
                self.version_seen = self.version_seen.max(Some(floor(&version)));
                self.lag.accepted = Some((version, Instant::now()));
                self.events.tell(DriverEvent::VersionAccepted { version: named(&version) });
                tracing::info!(run = version.run, step = version.step, "publication accepted");
            }
            Event::Record { slot, record, staging: _ } => {
                self.health.record(slot.0 as usize, record.as_ref());
                if let Some(record) = &record {
                    self.hear(record);
                    if let (EngineState::Serving, Some(live)) = (record.state, record.live) {
                        self.metrics.committed_step.set(live.step);
                    }
                }
                if let Some(view) = self.view(slot) {
                    view.record = record;
                }
            }
            Event::Publication { slot, step } => {
                if let Some(view) = self.view(slot) {
                    view.published = step;
                }
            }
            Event::Settled { replica, held } => tracing::info!(replica, held, "replica settled"),
            Event::Refused { from, code } => {
                tracing::debug!(from = from.0, code = %code, "message refused");
                self.metrics.refuse_peer(code);
            }
            // The driver has acted on these.
            Event::Configured { .. }
            | Event::Drained
            | Event::RoundEnded(_)
            | Event::PublishRefused { .. } => {}
        }
    }

    fn phase(&mut self, round: RoundKey, phase: Phase) {
        let name = crate::metrics::phase_name(phase);
        tracing::debug!(epoch = round.epoch.0, round = round.round.0, phase = name, "phase");
        if let (Phase::Prepare, Some((version, _))) = (phase, self.lag.accepted) {
            self.waiters.opened(version.step);
            let RoundKey { epoch, round: id } = round;
            self.events.tell(DriverEvent::RoundOpened { epoch, id, version: named(&version) });
        }
    }

    /// Four times a second.
    pub(super) fn tick(
        &mut self,
        depths: &[(&str, usize, usize)],
        [trainers, engines, drivers, executors]: [i64; 4],
        data: &Data,
        peers: usize,
    ) {
        self.health.turned();
        let small = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
        for &(queue, depth, limit) in depths {
            self.metrics.queue_depth.with_label_values(&[queue]).set(small(depth));
            self.metrics.queue_limit.with_label_values(&[queue]).set(small(limit));
        }
        let roles =
            [("trainer", trainers), ("engine", engines), ("driver", drivers), ("executor", executors)];
        for (role, count) in roles {
            self.metrics.clients.with_label_values(&[role]).set(count);
        }
        self.metrics.peers.set(small(peers));
        self.metrics.staging_bytes.set(i64::try_from(data.staging_bytes()).unwrap_or(i64::MAX));
        let shadowed = data.shadowed_bytes();
        self.metrics.shadowed_bytes.inc_by(shadowed.saturating_sub(self.shadowed_bytes));
        self.shadowed_bytes = shadowed;
        for (code, count) in data.refusals() {
            let before = self.refusals.insert(code, count).unwrap_or(0);
            self.metrics.peer_refusals.with_label_values(&[code.name()]).inc_by(count.saturating_sub(before));
        }
        for view in &mut self.views {
            let View { seat, applying, .. } = view;
            if let Some(group) = applying.slow(Instant::now()) {
                tracing::warn!(%seat, group, "engine takes long to apply this");
            }
        }
        let accepted = self.lag.accepted;
        self.metrics.lag_seconds.set(accepted.map_or(0.0, |(_, since)| since.elapsed().as_secs_f64()));
        let steps = accepted.map_or(0, |(version, _)| match self.lag.committed {
            Some(committed) => version.step.saturating_sub(committed),
            None => 1,
        });
        self.metrics.lag_steps.set(steps);
    }

    /// Tells the coordinator where anything changed.
    pub(super) fn publish(&self, node: &Node, data: &Data) {
        let ranks = (0..).map(Slot).zip(&self.views).map(|(slot, view)| v1::RankState {
            claim: Some(v1::Claim::from(&view.seat)),
            registered: view.registered,
            engine_state: view.record.map(|record| state_name(record.state).to_owned()).unwrap_or_default(),
            live: view.record.and_then(|record| record.live).map(name),
            published_step: view.published,
            round_bytes: data.progress(slot),
            fault: view.fault.clone(),
        });
        let state = v1::State {
            ranks: ranks.collect(),
            round_open: node.round_open(),
            version_seen: self.version_seen.map(|seen| v1::VersionName { run: seen.run, step: seen.step }),
            epoch_seen: self.epoch,
            carriers: data.carriers(),
        };
        self.state.send_if_modified(|told| {
            let changed = *told != state;
            if changed {
                *told = state;
            }
            changed
        });
    }

    /// What a driver sees.
    pub(super) fn status(&self, plan: Option<&Planned>, data: &Data) -> serde_json::Value {
        let ranks = (0..).map(Slot).zip(&self.views).map(|(slot, view)| {
            json!({
                "seat": view.seat.to_string(),
                "registered": view.registered,
                "engine": view.record,
                "publishedStep": view.published,
                "roundBytes": data.progress(slot),
            })
        });
        let leader = plan.and_then(|plan| plan.membership.member(plan.membership.leader()));
        json!({
            "epoch": plan.map(|plan| plan.epoch().0),
            "membershipDigest": plan.map(|plan| plan.membership.digest()),
            "planDigest": plan.map(|plan| plan.topology.plan),
            "leader": leader.map(|member| member.seat.to_string()),
            "ranks": ranks.collect::<Vec<_>>(),
            "carriers": data.carriers().iter().map(|carrier| json!({
                "pool": carrier.pool,
                "replica": carrier.replica,
                "transport": carrier.transport,
                "code": carrier.code,
                "reason": carrier.reason,
            })).collect::<Vec<_>>(),
            "lastRound": self.last_round,
        })
    }

    /// What an engine's record says of versions and epochs.
    pub(super) fn hear(&mut self, record: &EngineRecord) {
        if let Some(live) = record.live {
            self.version_seen = self.version_seen.max(Some(floor(&live)));
        }
        self.epoch = self.epoch.max(record.round.epoch.0);
    }

    fn view(&mut self, slot: Slot) -> Option<&mut View> {
        self.views.get_mut(slot.0 as usize)
    }
}

/// Without a lane, and while it is not decided, bytes go by TCP.
const fn label(carrier: Option<&Carried>) -> &'static [&'static str] {
    match carrier {
        Some(Carried::Nccl) => NCCL,
        Some(Carried::Tcp(_) | Carried::Forming) | None => TCP,
    }
}

fn floor(version: &Version) -> VersionFloor {
    VersionFloor { run: version.run, step: version.step }
}

fn name(version: Version) -> v1::VersionName {
    v1::VersionName { run: version.run, step: version.step }
}

const fn state_name(state: EngineState) -> &'static str {
    match state {
        EngineState::Cold => "Cold",
        EngineState::Serving => "Serving",
        EngineState::Quiet => "Quiet",
        EngineState::Applied => "Applied",
        EngineState::Dirty => "Dirty",
    }
}

/// As the agent socket spells it.
const fn class_name(class: GroupClass) -> &'static str {
    match class {
        GroupClass::Direct => "Direct",
        GroupClass::Derived => "Derived",
        GroupClass::Apply => "Apply",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightrefit_core::id::{Epoch, RoundId};
    use weightrefit_core::round::message::ContentSum;
    use weightrefit_proto::report::{PhaseMilliseconds, RoundBytes, VersionReport};

    #[test]
    fn rounds_aborted_in_a_row_are_counted_until_one_commits() {
        let metrics = Metrics::new().expect("names are distinct");
        let (state, _state) = watch::channel(v1::State::default());
        let health = Arc::new(Health::new(&[]));
        let mut observer = Observer::new(Vec::new(), metrics.clone(), health, state);
        let version = Version { run: 0, step: 1, origin: Epoch(1), sum: ContentSum::default() };
        let (epoch, bytes) = (Epoch(1), RoundBytes { sent: 0, received: 0, skipped: 0 });
        let mut end = |outcome, want| {
            let summary = RoundSummary {
                round: RoundKey { epoch, round: RoundId(1) },
                version,
                committed: outcome == RoundOutcome::Committed,
                blame: None,
                replicas: Vec::new(),
                phases: Vec::new(),
                sent: 0,
                received: 0,
                skipped: 0,
            };
            let report = RoundReport {
                id: 1,
                epoch: 1,
                version: VersionReport { run: 0, step: 1 },
                outcome,
                reason: None,
                member: None,
                phase_milliseconds: PhaseMilliseconds::default(),
                bytes,
                replicas: Vec::new(),
            };
            drop(observer.round_ended(&summary, report));
            assert_eq!(metrics.rounds_aborted_in_a_row.get(), want);
        };
        let (committed, aborted) = (RoundOutcome::Committed, RoundOutcome::Aborted);
        for (outcome, want) in [(aborted, 1), (aborted, 2), (committed, 0), (aborted, 1)] {
            end(outcome, want);
        }
    }
}
