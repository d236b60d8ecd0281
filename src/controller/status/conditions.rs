//! The conditions: each a function of what is observed, with the time of its last change carried over (T3).

use super::carriers::carriers;
use super::fleet::ReplicaNow;
use super::known::Known;
use super::{Memory, Observed, Unaccepted, shown};
use crate::api::condition::{Condition, ConditionStatus, ConditionType};
use crate::api::ranks;
use crate::api::status::{TrainingState, WeightRefitStatus};
use crate::controller::consent::NoConsent;
use crate::controller::pod_facts::PodFacts;
use crate::controller::reason::{
    AcceptedReason, AuthorizedReason, CommunicatorsReadyReason, DegradedReason, InSyncReason,
    MembersResolvedReason, ReadyReason, Reason, ReconcilingReason, StalledReason,
};
use crate::controller::record::whole_second;
use crate::controller::seats::SeatError;
use crate::controller::validate::short;
use crate::coordinator::Refused;
use crate::limits;
use ConditionStatus::{False, True, Unknown};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use std::time::{SystemTime, UNIX_EPOCH};
use weightrefit_core::code::Code;
use weightrefit_core::id::Rank;
use weightrefit_proto::report::RoundOutcome;

/// Fills `next.conditions`; returns when to ask again.
pub(super) fn conditions(
    observed: &Observed<'_>,
    known: &Known,
    replicas: &[ReplicaNow],
    is_frozen: bool,
    memory: &mut Memory,
    next: &mut WeightRefitStatus,
) -> Option<Timestamp> {
    let made = Made { observed, next };
    let accepted = made.accepted();
    let authorized = made.authorized();
    let resolved = made.members_resolved(known);
    let holds = [&accepted, &authorized, &resolved].map(|condition| condition.status == True);
    let (mut communicators, mut in_sync, mut degraded) =
        (made.communicators_ready(), made.in_sync(memory), made.degraded(holds[0]));
    if observed.is_settling {
        communicators = made.kept(communicators);
    }
    if is_frozen {
        (in_sync, degraded) = (made.kept(in_sync), made.kept(degraded));
    }
    let mut ready = made.ready(holds, replicas);
    if is_frozen && holds == [true; 3] {
        ready = made.kept(ready);
    }
    let (ready, mut again) = made.dwelling(ready, memory);
    let forgotten = made.refused().first().and_then(|(_, refused)| {
        Timestamp::from_second(second(refused.at).saturating_add(REFUSED_FOR_S)).ok()
    });
    again = again.into_iter().chain(forgotten).min();
    let (reconciling, stalled) = (made.reconciling(holds[0]), made.stalled(&accepted, &authorized, known));
    let mut all = vec![ready, accepted, authorized, resolved, communicators, in_sync, degraded];
    all.extend(reconciling);
    all.extend(stalled);
    next.conditions = all;
    again
}

struct Made<'a> {
    observed: &'a Observed<'a>,
    next: &'a WeightRefitStatus,
}

impl Made<'_> {
    fn condition<R: Reason>(
        &self,
        status: ConditionStatus,
        reason: R,
        message: impl AsRef<str>,
    ) -> Condition {
        let old = self.old(R::CONDITION).filter(|old| old.status == status);
        Condition {
            kind: R::CONDITION.name().to_owned(),
            status,
            observed_generation: Some(self.observed.generation),
            last_transition_time: old.map_or_else(
                || Time(whole_second(self.observed.now)),
                |old| old.last_transition_time.clone(),
            ),
            reason: reason.name().to_owned(),
            message: short(message.as_ref()),
        }
    }

    fn old(&self, kind: ConditionType) -> Option<&Condition> {
        self.observed.previous.condition(kind.name())
    }

    /// What the condition was, if it was there (T2).
    fn kept(&self, new: Condition) -> Condition {
        self.observed.previous.condition(&new.kind).cloned().unwrap_or(new)
    }

    fn accepted(&self) -> Condition {
        match self.observed.accepted {
            Ok(()) => self.condition(True, AcceptedReason::Valid, AcceptedReason::Valid.sentence()),
            Err(Unaccepted::Rejected(rejection)) => {
                self.condition(False, rejection.reason, &rejection.message)
            }
            Err(Unaccepted::Unreadable(message)) => {
                self.condition(Unknown, AcceptedReason::Unreadable, message)
            }
        }
    }

    fn authorized(&self) -> Condition {
        let observed = self.observed;
        let Some(consent) = observed.consent else {
            return self.condition(
                Unknown,
                AuthorizedReason::ReviewFailed,
                "The API server has not been asked yet.",
            );
        };
        let refused = |no: &&NoConsent| matches!(no, NoConsent::Refused { .. });
        if let Some(first) = consent.iter().find(refused) {
            let more = match consent.iter().filter(refused).count() {
                1 => String::new(),
                pods => format!(". So it is with {} more pods", pods - 1),
            };
            return self.condition(False, AuthorizedReason::Unauthorized, format!("{first}{more}"));
        }
        if let Some(first) = consent.first() {
            return self.condition(Unknown, AuthorizedReason::ReviewFailed, first.to_string());
        }
        match observed.pods.len() {
            0 => {
                let message = format!(
                    "No pod carries the label weightrefit.dev/refit: {} for this refit. Next: label the pod templates \
                     of trainer and engines.",
                    observed.name
                );
                self.condition(True, AuthorizedReason::NoPods, message)
            }
            pods => self.condition(True, AuthorizedReason::Permitted, format!("{pods} pods may take part.")),
        }
    }

    fn members_resolved(&self, known: &Known) -> Condition {
        let observed = self.observed;
        if self.next.membership.is_none() && matches!(observed.accepted, Err(Unaccepted::Rejected(_))) {
            let reason = MembersResolvedReason::NotAccepted;
            return self.condition(Unknown, reason, reason.sentence());
        }
        let world = observed.spec.training.world_size;
        let ranks = known.training.len();
        let mut short_pools = Vec::new();
        let (mut whole, mut least) = (0, 0);
        for pool in &observed.spec.inference.pools {
            let of_pool = known.whole(&pool.name, pool.ranks_per_replica);
            (whole, least) = (whole + of_pool, least + pool.min_replicas);
            if of_pool < pool.min_replicas {
                short_pools.push(format!("pool {}: {of_pool} of {} replicas", pool.name, pool.min_replicas));
            }
        }
        let figures = format!(
            "training {ranks} of {world} ranks; inference {whole} replicas, {least} needed{}",
            self.asked(known)
        );
        let faults = self.faults(known);
        let waits = known.errors.first().map(|error| format!(" {error}.")).unwrap_or_default();
        if let Some(first) = faults.first().filter(|fault| fault.code == Some(Code::DuplicateRank)) {
            let message = format!("{}; {figures}. {}", listed(&faults), first.remedy);
            return self.condition(False, MembersResolvedReason::DuplicateRank, message);
        }
        let is_done = known.is_trainer_done && self.next.membership.is_some();
        let all_ranks = (0..world.unsigned_abs()).map(Rank);
        let missing: Vec<Rank> = all_ranks.filter(|rank| !known.training.contains(rank)).collect();
        if missing.is_empty() || is_done {
            if !short_pools.is_empty() {
                let message = format!(
                    "{}; {figures}.{waits} No round begins before. Next: {}",
                    short_pools.join(", "),
                    self.look()
                );
                return self.condition(False, MembersResolvedReason::NotEnoughReady, message);
            }
            let reason = match missing.is_empty() {
                true => MembersResolvedReason::Complete,
                false => MembersResolvedReason::TrainerCompleted,
            };
            if let Some(first) = faults.first() {
                let message = format!("{}; {figures}. {}", listed(&faults), first.remedy);
                return self.condition(True, reason, message);
            }
            return self.condition(True, reason, format!("{figures}."));
        }
        if let Some(first) = faults.first() {
            let message = format!("{}; {figures}. {}", listed(&faults), first.remedy);
            return self.condition(False, MembersResolvedReason::PodRejected, message);
        }
        let shown: Vec<String> = missing.iter().take(5).map(Rank::to_string).collect();
        let more = if missing.len() > shown.len() { ", …" } else { "" };
        let message = format!(
            "training ranks {}{more} have no pod; {figures}.{waits} No round begins before. Next: {}",
            shown.join(", "),
            self.look()
        );
        self.condition(False, MembersResolvedReason::RankGap, message)
    }

    /// What workloads say, where it is other than what is there.
    fn asked(&self, known: &Known) -> String {
        let Observed { spec, workloads, .. } = self.observed;
        let training = workloads.training.as_ref().and_then(|workload| {
            let (asked, per_pod) = (&workload.shown, ranks::per_training_pod(&spec.training));
            let ranks = workload.ranks(per_pod).unwrap_or_default();
            let world = spec.training.world_size;
            let other = ranks != u64::from(world.unsigned_abs());
            workload.remark().or_else(|| other.then(|| format!("{asked} asks for {ranks} of {world} ranks")))
        });
        let pools = spec.inference.pools.iter().zip(&workloads.pools).enumerate();
        let pools = pools.filter_map(|(index, (pool, workload))| {
            let (workload, replicas) = (workload.as_ref()?, self.observed.desired(index).unwrap_or_default());
            let other = replicas != known.whole(&pool.name, pool.ranks_per_replica);
            let asked = || format!("{} asks for {replicas} replicas", workload.shown);
            workload.remark().or_else(|| other.then(asked))
        });
        training.into_iter().chain(pools).map(|remark| format!("; {remark}")).collect()
    }

    /// What a person must correct, ranks that are claimed twice first: of those that only agents announce, their
    /// coordinator knows.
    fn faults(&self, known: &Known) -> Vec<PodFault> {
        let seats = known.errors.iter().filter(|error| !matches!(error, SeatError::NoAddress { .. }));
        let seats = seats.map(|error| PodFault::of(error.code(), error.to_string()));
        let malformed = known.malformed.iter();
        let malformed = malformed.map(|why| PodFault {
            code: None,
            what: why.clone(),
            remedy: "Correct the labels of its pod template.",
        });
        let mut faults: Vec<PodFault> = seats.chain(malformed).collect();
        for (_, refused) in self.refused() {
            let what = refused.fault.message.clone();
            if refused.fault.code == Code::DuplicateRank.name()
                && faults.iter().all(|fault| fault.what != what)
            {
                faults.push(PodFault::of(Code::DuplicateRank, what));
            }
        }
        faults.sort_by_key(|fault| fault.code != Some(Code::DuplicateRank));
        faults
    }

    /// Pods whose agents were refused lately, by the age of the refusal.
    fn refused(&self) -> Vec<(&PodFacts, &Refused)> {
        let now = self.observed.now.as_second();
        let is_recent = |refused: &Refused| now - second(refused.at) < REFUSED_FOR_S;
        let all = self.observed.view.into_iter().flat_map(|view| &view.refused);
        let recent = all.filter(|(_, refused)| is_recent(refused));
        let of_pod = |uid: &str| self.observed.pods.iter().find(|pod| pod.uid == uid && pod.is_present());
        let mut recent: Vec<_> =
            recent.filter_map(|(uid, refused)| Some((&**of_pod(uid)?, refused))).collect();
        recent.sort_by_key(|(_, refused)| refused.at);
        recent
    }

    fn look(&self) -> String {
        format!("kubectl get pods -A -l weightrefit.dev/refit={}", self.observed.name)
    }

    fn communicators_ready(&self) -> Condition {
        use CommunicatorsReadyReason as R;
        let Some((view, membership)) =
            self.observed.view.and_then(|view| Some((view, view.membership.as_ref()?)))
        else {
            return self.condition(False, R::NoMembership, R::NoMembership.sentence());
        };
        let agents =
            || membership.members().iter().map(|member| (member, view.agents.get(&member.incarnation)));
        let pod = |uid: &str| (self.observed.pod_name)(uid).unwrap_or_else(|| uid.to_owned());
        if let Some((fault, member)) =
            agents().find_map(|(member, agent)| Some((agent?.refused.as_ref()?, member)))
        {
            let message = format!(
                "pod {} refused epoch {}: {}: {}. {}",
                pod(&member.pod_uid),
                membership.epoch(),
                fault.code,
                fault.message,
                fault.hint
            );
            return self.condition(False, R::Refused, message);
        }
        let all = membership.members().len();
        let absent: Vec<String> =
            agents().filter(|(_, agent)| agent.is_none()).map(|(member, _)| pod(&member.pod_uid)).collect();
        if let Some(first) = absent.first() {
            let message = format!(
                "{} of {all} members are not connected, first pod {first}. The others go on without them. \
                 Next: {}",
                absent.len(),
                self.look()
            );
            return self.condition(False, R::AgentsMissing, message);
        }
        let is_current = |accepted: Option<_>| accepted == Some(membership.epoch());
        let waiting =
            agents().filter(|(_, agent)| !agent.is_some_and(|agent| is_current(agent.accepted))).count();
        if waiting > 0 {
            let message =
                format!("{waiting} of {all} members have not answered to epoch {} yet.", membership.epoch());
            return self.condition(False, R::Configuring, message);
        }
        let (reason, message) = carriers(view, membership, self.observed.spec.transfer.transport);
        let status = if matches!(reason, R::Forming | R::NcclMissing) { False } else { True };
        self.condition(status, reason, message)
    }

    fn ready(&self, [accepted, authorized, resolved]: [bool; 3], replicas: &[ReplicaNow]) -> Condition {
        let inference = self.next.inference.as_ref();
        let oldest =
            inference.and_then(|inference| inference.oldest_serving).map_or("nothing".to_owned(), shown);
        let (serving, all) = inference.map_or((0, 0), |now| (now.serving_replicas, now.replicas));
        let serve = format!("{serving} of {all} replicas serve, the oldest {oldest}");
        let see = |reason: ReadyReason, condition: &str| {
            self.condition(False, reason, format!("See condition {condition}; {serve}."))
        };
        if !accepted {
            return see(ReadyReason::NotAccepted, "Accepted");
        }
        if !authorized {
            return see(ReadyReason::Unauthorized, "Authorized");
        }
        if !resolved {
            return see(ReadyReason::MembersMissing, "MembersResolved");
        }
        for pool in &self.observed.spec.inference.pools {
            let serves = |replica: &&ReplicaNow| replica.pool == pool.name && replica.is_serving();
            let serving = i32::try_from(replicas.iter().filter(serves).count()).unwrap_or(i32::MAX);
            if serving < pool.min_replicas {
                let message = format!(
                    "{serve}; pool {} has {serving} and needs {}. Next: see conditions CommunicatorsReady and Degraded.",
                    pool.name, pool.min_replicas
                );
                return self.condition(False, ReadyReason::NotEnoughServing, message);
            }
        }
        self.condition(True, ReadyReason::Refitting, format!("{serve}."))
    }

    /// Ready stays True until it has been wrong for a while; who waits for it, rolls back when it turns False.
    fn dwelling(&self, new: Condition, memory: &mut Memory) -> (Condition, Option<Timestamp>) {
        let was_ready = self.old(ConditionType::Ready).filter(|old| old.status == True);
        let (Some(was), false) = (was_ready, new.status == True) else {
            memory.unready_since = None;
            return (new, None);
        };
        let since = *memory.unready_since.get_or_insert(self.observed.now);
        let until = since.checked_add(dwell()).unwrap_or(since);
        if self.observed.now >= until {
            memory.unready_since = None;
            return (new, None);
        }
        (Condition { observed_generation: Some(self.observed.generation), ..was.clone() }, Some(until))
    }

    fn in_sync(&self, memory: &Memory) -> Condition {
        let Some((inference, committed)) =
            self.next.inference.as_ref().and_then(|inference| Some((inference, inference.committed?)))
        else {
            let reason = InSyncReason::NothingCommitted;
            return self.condition(False, reason, reason.sentence());
        };
        let newest = shown(committed);
        if inference.fenced_replicas > 0 {
            let message = format!(
                "{} replicas are fenced; the newest is {newest}. {}",
                inference.fenced_replicas,
                self.first_behind()
            );
            return self.condition(False, InSyncReason::ReplicasFenced, message);
        }
        let earliest = memory.earlier.unwrap_or(committed);
        match inference.oldest_serving {
            Some(oldest) if oldest >= earliest => {
                let message = format!(
                    "{} of {} replicas hold {newest}.",
                    inference.current_replicas, inference.replicas
                );
                self.condition(True, InSyncReason::Current, message)
            }
            oldest => {
                let oldest = oldest.map_or("nothing".to_owned(), shown);
                let message = format!(
                    "The oldest serving replica holds {oldest}, the newest is {newest}. {}",
                    self.first_behind()
                );
                self.condition(False, InSyncReason::ReplicasBehind, message)
            }
        }
    }

    fn first_behind(&self) -> String {
        let Some(first) = self.next.behind.first() else { return String::new() };
        format!("First: {}/{} {}: {}", first.pool, first.replica, first.reason, first.message)
    }

    fn degraded(&self, accepted: bool) -> Condition {
        let next = self.next;
        if !accepted && next.membership.is_some() {
            let reason = DegradedReason::ChangeRefused;
            return self.condition(True, reason, format!("{} See condition Accepted.", reason.sentence()));
        }
        if let Some((pod, fault)) = self.refused_registration() {
            let message = format!("pod {pod}: {}: {}. {}", fault.code, fault.message, fault.hint);
            return self.condition(True, DegradedReason::RegistrationRefused, message);
        }
        // Where a person must permit something, condition Authorized says so.
        let refused: Vec<PodFault> = (self.refused().into_iter())
            .filter(|_| self.observed.consent.is_some_and(<[_]>::is_empty))
            .filter_map(|(pod, refused)| {
                let code = refused.fault.code.parse().ok().filter(|code| *code != Code::Busy)?;
                let what =
                    format!("agent of pod {} is refused: {}: {}", pod.shown(), code, refused.fault.message);
                Some(PodFault::of(code, what))
            })
            .collect();
        if let Some(first) = refused.first() {
            let message = format!("{}. {}", listed(&refused), first.remedy);
            return self.condition(True, DegradedReason::AgentRefused, message);
        }
        if next.inference.as_ref().is_some_and(|inference| inference.fenced_replicas > 0) {
            return self.condition(True, DegradedReason::ReplicasFenced, self.first_behind());
        }
        if let Some(round) = next.last_round.as_ref().filter(|round| round.outcome == RoundOutcome::Aborted) {
            let reason = round.reason.as_deref().unwrap_or("no code");
            let message = format!(
                "round {} of epoch {} ended with {reason}. {}",
                round.id,
                round.epoch,
                round.message.as_deref().unwrap_or_default()
            );
            return self.condition(True, DegradedReason::RoundFailed, message);
        }
        if let Some(trouble) = self.observed.unwritten_gate {
            return self.condition(True, DegradedReason::GateNotWritten, trouble);
        }
        let absent = self.observed.view.and_then(|view| {
            let membership = view.membership.as_ref()?;
            let absent =
                membership.members().iter().filter(|member| !view.agents.contains_key(&member.incarnation));
            Some(absent.count()).filter(|absent| *absent > 0)
        });
        if let Some(absent) = absent {
            let message =
                format!("{absent} members' agents are not connected; see condition CommunicatorsReady.");
            return self.condition(True, DegradedReason::AgentsLost, message);
        }
        self.condition(False, DegradedReason::AsExpected, DegradedReason::AsExpected.sentence())
    }

    fn refused_registration(&self) -> Option<(String, &weightrefit_proto::v1::Fault)> {
        let agents = self.observed.view?.agents.values();
        let refused = |agent: &'_ crate::coordinator::AgentView| {
            agent.state.ranks.iter().position(|rank| rank.fault.is_some())
        };
        let (agent, at) = agents.into_iter().find_map(|agent| Some((agent, refused(agent)?)))?;
        let pod = (self.observed.pod_name)(&agent.pod_uid).unwrap_or_else(|| agent.pod_uid.clone());
        Some((pod, agent.state.ranks[at].fault.as_ref()?))
    }

    fn reconciling(&self, accepted: bool) -> Option<Condition> {
        if !accepted || self.observed.is_settling {
            return None;
        }
        let membership = self.next.membership.as_ref();
        let reason = match membership {
            None => ReconcilingReason::Forming,
            Some(membership) if membership.generation != self.observed.generation => {
                ReconcilingReason::Changing
            }
            Some(_) => return None,
        };
        Some(self.condition(True, reason, reason.sentence()))
    }

    fn stalled(&self, accepted: &Condition, authorized: &Condition, known: &Known) -> Option<Condition> {
        let is_forming = self.next.training.as_ref().is_none_or(|now| now.state == TrainingState::Forming);
        let has_fault = !self.faults(known).is_empty();
        let reason = match (accepted.status, authorized.status) {
            (False, _) => StalledReason::NotAccepted,
            (_, False) => StalledReason::Unauthorized,
            _ if has_fault && is_forming => StalledReason::PodRejected,
            _ => return None,
        };
        Some(self.condition(True, reason, reason.sentence()))
    }
}

/// What is wrong with a pod or its agent.
struct PodFault {
    /// None for labels, of which no agent hears.
    code: Option<Code>,
    what: String,
    remedy: &'static str,
}

impl PodFault {
    fn of(code: Code, what: String) -> Self {
        Self { code: Some(code), what, remedy: code.remedy() }
    }
}

/// The first few, each short enough for all to fit, and how many more there are.
fn listed(faults: &[PodFault]) -> String {
    let room = limits::MESSAGE_MAX / (2 * limits::FAULTS_SHOWN_MAX);
    let shown = faults.iter().take(limits::FAULTS_SHOWN_MAX);
    let mut shown: Vec<String> = match faults.len() {
        1 => shown.map(|fault| fault.what.clone()).collect(),
        _ => shown.map(|fault| fault.what.chars().take(room).collect()).collect(),
    };
    if let Some(more) = faults.len().checked_sub(limits::FAULTS_SHOWN_MAX).filter(|more| *more > 0) {
        shown.push(format!("and {more} more"));
    }
    shown.join("; ")
}

const REFUSED_FOR_S: i64 = limits::REFUSED_FOR.as_secs().cast_signed();

fn second(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

fn dwell() -> SignedDuration {
    SignedDuration::try_from(limits::READY_DWELL).unwrap_or(SignedDuration::ZERO)
}
