//! The status that follows from what is observed: a pure function, so that it can be tested as a table.
//!
//! Invariants:
//! - T1: `membership` is not touched: [`super::record`] writes it.
//! - T2: while a round runs, or agents have not had the time to connect again, what the fleet does is what it did.
//! - T3: a condition's time changes with its status only.

mod carriers;
mod conditions;
mod fleet;
mod known;
mod rounds;

#[cfg(test)]
mod tests;

use super::consent::NoConsent;
use super::pod_facts::PodFacts;
use super::record::{PodName, whole_second};
use super::seats::Seating;
use super::validate::{Rejection, short};
use super::workload::{Told, Workloads};
use crate::api::ranks;
use crate::api::refit::WeightRefitSpec;
use crate::api::status::{
    AgentVersion, BehindReplica, InferenceStatus, PlanStatus, TrainingState, TrainingStatus, Version,
    WeightRefitStatus,
};
use crate::coordinator::View;
use crate::limits;
use fleet::{Doing, ReplicaNow};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use known::Known;
pub use known::is_trainer_done;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Everything that a status follows from.
pub struct Observed<'a> {
    /// Namespace of the refit.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
    /// Its generation.
    pub generation: i64,
    /// What is wanted.
    pub spec: &'a WeightRefitSpec,
    /// Whether it is accepted.
    pub accepted: Result<(), &'a Unaccepted>,
    /// Pods that may not take part; `None` while nobody has been asked.
    pub consent: Option<&'a [NoConsent]>,
    /// Pods that claim the refit.
    pub pods: &'a [Arc<PodFacts>],
    /// Which seats they take.
    pub seating: &'a Seating,
    /// What the sides' workloads ask for.
    pub workloads: &'a Workloads,
    /// Whether the trainer has ended well.
    pub is_trainer_done: bool,
    /// What is wrong with pods that mean the refit and cannot be read.
    pub malformed: &'a [String],
    /// What its coordinator knows; `None` while it has none.
    pub view: Option<&'a View>,
    /// What the members' plan moves.
    pub plan: Option<&'a PlanStatus>,
    /// What keeps readiness gates of its pods from being written; `None` where nothing does.
    pub unwritten_gate: Option<&'a str>,
    /// Whether agents have not had the time to connect yet, since the coordinator started.
    pub is_settling: bool,
    /// Name of the pod of a UID, as namespace/name.
    pub pod_name: &'a PodName,
    /// What the status says now.
    pub previous: &'a WeightRefitStatus,
    /// The present.
    pub now: Timestamp,
}

impl Observed<'_> {
    /// Replicas that the workload of the pool of this index asks for; `None` where it does not tell.
    fn desired(&self, pool: usize) -> Option<i32> {
        let (workload, pool) = (self.workloads.pools.get(pool)?.as_ref()?, &self.spec.inference.pools[pool]);
        let asked = workload.replicas(ranks::per_pod(pool), pool.ranks_per_replica.unsigned_abs())?;
        Some(i32::try_from(asked).unwrap_or(i32::MAX))
    }
}

/// Why a refit is not accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unaccepted {
    /// A person must act.
    Rejected(Rejection),
    /// It cannot be told yet.
    Unreadable(String),
}

/// What must be remembered from one status to the next and does not stand in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Memory {
    /// Since when Ready should be False, while it is still True.
    pub unready_since: Option<Timestamp>,
    /// The version committed before the newest.
    pub earlier: Option<Version>,
}

/// The status, and when to ask again if nothing else happens.
#[must_use]
pub fn status(observed: &Observed<'_>, memory: &mut Memory) -> (WeightRefitStatus, Option<Timestamp>) {
    let known = Known::of(observed);
    let previous = observed.previous;
    let is_frozen = observed.is_settling || observed.view.is_some_and(is_round_open);
    let replicas = observed.view.map(fleet::replicas).unwrap_or_default();
    let (last_round, last_failed_round) = ended_rounds(observed);
    let committed = committed(observed, last_round.as_ref(), &replicas);
    if previous.inference.as_ref().and_then(|inference| inference.committed) < committed {
        memory.earlier = previous.inference.as_ref().and_then(|inference| inference.committed);
    }
    let mut next = WeightRefitStatus {
        observed_generation: Some(observed.generation),
        membership: previous.membership.clone(),
        plan: observed.plan.cloned().or_else(|| previous.plan.clone()),
        training: Some(training(observed, &known, committed)),
        last_round,
        last_failed_round,
        ..WeightRefitStatus::default()
    };
    if is_frozen && previous.inference.is_some() {
        next.inference = previous.inference.clone();
        next.behind = previous.behind.clone();
        next.agent_versions = previous.agent_versions.clone();
    } else {
        next.behind = behind(observed, &known, &replicas, committed);
        next.inference = Some(inference(observed, &known, &replicas, committed));
        next.agent_versions = observed.view.map(agent_versions).unwrap_or_default();
    }
    let again = conditions::conditions(observed, &known, &replicas, is_frozen, memory, &mut next);
    (next, again)
}

fn is_round_open(view: &View) -> bool {
    view.agents.values().any(|agent| agent.state.round_open)
}

type Round = Option<crate::api::status::RoundStatus>;

fn ended_rounds(observed: &Observed<'_>) -> (Round, Round) {
    let shown = |ended: Option<&Arc<crate::coordinator::EndedRound>>| {
        let view = observed.view?;
        Some(rounds::round(ended?, view, observed.pod_name))
    };
    let last = observed.view.and_then(|view| shown(view.last_round.as_ref()));
    let failed = observed.view.and_then(|view| shown(view.last_failed_round.as_ref()));
    let previous = observed.previous;
    (last.or_else(|| previous.last_round.clone()), failed.or_else(|| previous.last_failed_round.clone()))
}

/// The newest version that any replica is known to have committed.
fn committed(
    observed: &Observed<'_>,
    last: Option<&crate::api::status::RoundStatus>,
    replicas: &[ReplicaNow],
) -> Option<Version> {
    use weightrefit_proto::report::RoundOutcome;
    let before = observed.previous.inference.as_ref().and_then(|inference| inference.committed);
    let last = last.filter(|round| round.outcome == RoundOutcome::Committed).map(|round| round.version);
    let live = replicas.iter().filter(|replica| replica.is_serving()).filter_map(|replica| replica.version);
    before.into_iter().chain(last).chain(live).max()
}

fn training(observed: &Observed<'_>, known: &Known, committed: Option<Version>) -> TrainingStatus {
    let world = observed.spec.training.world_size;
    let states =
        observed.view.into_iter().flat_map(|view| view.agents.values()).flat_map(|agent| &agent.state.ranks);
    let training = states.filter(|state| state.claim.as_ref().is_some_and(|claim| claim.side == "training"));
    let connected =
        observed.view.into_iter().flat_map(|view| view.agents.values()).flat_map(|agent| &agent.seats);
    let connected =
        connected.filter(|seat| matches!(seat, weightrefit_core::membership::Seat::Training { .. }));
    let ranks = i32::try_from(known.training.len()).unwrap_or(i32::MAX);
    let before = observed.previous.training.as_ref();
    let published = before.and_then(|training| training.published);
    // An offer names its step only; the run is that of the newest version known.
    let run = published.max(committed).map_or(0, |version| version.run);
    let offered = training.filter_map(|state| state.published_step).max().map(|step| Version { run, step });
    let connected_ranks = match before {
        Some(before) if observed.is_settling => before.connected_ranks,
        _ => i32::try_from(connected.count()).unwrap_or(i32::MAX),
    };
    let is_suspended =
        observed.workloads.training.as_ref().is_some_and(|workload| workload.told == Told::Suspended);
    TrainingStatus {
        ranks,
        connected_ranks,
        state: match (known.training_pods, ranks == world) {
            _ if known.is_trainer_done => TrainingState::Completed,
            // Its pods may not be gone yet.
            _ if is_suspended && ranks == 0 => TrainingState::Absent,
            (0, false) => TrainingState::Absent,
            (_, false) => TrainingState::Forming,
            (_, true) => TrainingState::Running,
        },
        published: published.max(committed).max(offered),
    }
}

fn inference(
    observed: &Observed<'_>,
    known: &Known,
    replicas: &[ReplicaNow],
    committed: Option<Version>,
) -> InferenceStatus {
    let count = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
    let desired = observed.spec.inference.pools.iter().enumerate().map(|(index, pool)| {
        let found = || count(known.replicas.get(&pool.name).map_or(0, BTreeMap::len)).max(pool.min_replicas);
        observed.desired(index).unwrap_or_else(found)
    });
    let serving = || replicas.iter().filter(|replica| replica.is_serving());
    let is_current = |replica: &&ReplicaNow| committed.is_some() && replica.version == committed;
    InferenceStatus {
        // A workload may ask for any number; the schema has a bound.
        desired_replicas: desired.fold(0, i32::saturating_add).min(limits::ALL_REPLICAS_MAX),
        replicas: count(replicas.len()),
        current_replicas: count(serving().filter(is_current).count()),
        serving_replicas: count(serving().count()),
        fenced_replicas: count(replicas.iter().filter(|replica| replica.doing == Doing::Fenced).count()),
        committed,
        oldest_serving: serving().filter_map(|replica| replica.version).min(),
    }
}

/// Replicas that do not serve the version committed last, the worst first.
fn behind(
    observed: &Observed<'_>,
    known: &Known,
    replicas: &[ReplicaNow],
    committed: Option<Version>,
) -> Vec<BehindReplica> {
    let Some(committed) = committed else { return Vec::new() };
    let is_current =
        |replica: &&ReplicaNow| replica.doing == Doing::Serving && replica.version == Some(committed);
    let mut late: Vec<&ReplicaNow> = replicas.iter().filter(|replica| !is_current(replica)).collect();
    let waiting = joining(known, replicas);
    late.extend(&waiting);
    late.sort_by_key(|replica| (std::cmp::Reverse(replica.doing), replica.version));
    late.truncate(limits::BEHIND_MAX);
    late.into_iter().map(|replica| behind_one(observed, replica, committed)).collect()
}

/// Replicas with a pod for each rank that are no members yet.
fn joining(known: &Known, replicas: &[ReplicaNow]) -> Vec<ReplicaNow> {
    let mut joining = Vec::new();
    for (pool, of_pool) in &known.replicas {
        for replica in of_pool.keys() {
            if !replicas.iter().any(|member| (&member.pool, &member.replica) == (pool, replica)) {
                let (pool, replica) = (pool.clone(), replica.clone());
                joining.push(ReplicaNow { pool, replica, doing: Doing::Unowned, version: None, at: None });
            }
        }
    }
    joining
}

fn behind_one(observed: &Observed<'_>, now: &ReplicaNow, committed: Version) -> BehindReplica {
    let before = observed.previous.behind.iter();
    let before = before.into_iter().find(|old| (&old.pool, &old.replica) == (&now.pool, &now.replica));
    let report = observed.view.and_then(|view| rounds::of_replica(view, &now.pool, &now.replica));
    let blamed = report.and_then(|report| rounds::member(observed.view?, report.member.as_ref()?));
    let reported = report.and_then(|report| report.reason).filter(|_| now.doing != Doing::Lost);
    let code = reported.unwrap_or(now.doing.code());
    let since = before.map_or_else(|| Time(whole_second(observed.now)), |old| old.since.clone());
    let (pod_uid, rank) = match (&now.at, blamed) {
        (Some((uid, rank)), None) => (Some(uid), Some(i32::try_from(rank.0).unwrap_or(i32::MAX))),
        (_, Some(member)) => (Some(&member.pod_uid), Some(rounds::rank(&member.seat))),
        (None, None) => (None, None),
    };
    let held = now.version.map_or("no verified version".to_owned(), shown);
    let text =
        format!("holds {held}, and {} is committed. {} {}", shown(committed), code.sentence(), code.remedy());
    BehindReplica {
        pool: now.pool.clone(),
        replica: now.replica.clone(),
        version: now.version,
        reason: code.name().to_owned(),
        pod: pod_uid.and_then(|uid| (observed.pod_name)(uid)),
        rank,
        since,
        message: short(&text),
    }
}

/// A version in a message.
pub(super) fn shown(version: Version) -> String {
    format!("{}/{}", version.run, version.step)
}

fn agent_versions(view: &View) -> Vec<AgentVersion> {
    let mut pods: BTreeMap<&str, i32> = BTreeMap::new();
    for agent in view.agents.values() {
        *pods.entry(&agent.version).or_default() += 1;
    }
    let mut versions: Vec<AgentVersion> = (pods.into_iter())
        .map(|(version, pods)| AgentVersion { version: version.to_owned(), pods })
        .collect();
    versions.sort_by_key(|version| std::cmp::Reverse(version.pods));
    versions.truncate(limits::AGENT_VERSIONS_MAX);
    versions
}
