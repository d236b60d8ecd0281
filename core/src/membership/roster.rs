//! Which membership comes next, and when: the coordinator's pure half. It is fed joins and departures and asked
//! for the next membership; the coordinator writes `(epoch, digest, version floor)` down before any agent hears of it.
//!
//! Invariants:
//! - R1: a membership holds all training ranks of the spec and whole replicas only, at least `min_replicas` of
//!   each pool.
//! - R2: its epoch is one above all that the record or any agent has heard of, unless it is the recorded
//!   membership itself, member for member, made of the same.
//! - R3: only a lost training rank ends an epoch early; joins, replacements and spec changes wait for a round
//!   boundary and until joins have settled. A lost inference replica changes nothing until then.
//! - R4: a seat has one agent: of two pods that claim it the older one's; and a pod has one: its newest.
//! - R5: what one agent says can neither exhaust the numbers nor make a membership impossible: it is refused.

use super::{Member, Membership, MembershipError, Seat, VersionFloor, check_member};
use crate::code::Code;
use crate::id::{Epoch, Incarnation, Rank, Sha256};
use crate::limits;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What a membership is made of besides its agents; another one than that of the recorded membership makes a new
/// epoch, so that all agents of an epoch have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Basis {
    /// Generation of the resource.
    pub generation: u64,
    /// Digest of what the resource and all that it names resolve to.
    pub resolved: Sha256,
}

/// Sizes that the resource asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Where they come from.
    pub basis: Basis,
    /// Training ranks; 0 once the trainer has finished.
    pub training_ranks: u32,
    /// Pools in the resource's order.
    pub pools: Vec<PoolSpec>,
}

/// Sizes of one pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSpec {
    /// Its name.
    pub name: String,
    /// Ranks of each replica.
    pub ranks_per_replica: u32,
    /// Fewest whole replicas of a membership.
    pub min_replicas: u32,
}

/// What an agent says when it joins, authenticated by its certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Joining {
    /// The agent process.
    pub incarnation: Incarnation,
    /// UID of its pod.
    pub pod_uid: String,
    /// Name of its pod, for messages.
    pub pod: String,
    /// When its pod was created, in seconds; pods of one second are in the order of their UIDs.
    pub created_s: i64,
    /// Hash of its public key.
    pub key: Sha256,
    /// Ranks that it hosts.
    pub seats: Vec<Seat>,
    /// Where it serves `Round`.
    pub round_addresses: Vec<String>,
    /// Where it serves bytes.
    pub byte_addresses: Vec<String>,
    /// Largest epoch that it or its clients have heard of.
    pub epoch_seen: Epoch,
    /// Largest version that it or its clients have heard of.
    pub version_seen: Option<VersionFloor>,
}

impl Joining {
    /// Of two pods that claim a seat, the one whose seniority is less holds it.
    fn seniority(&self) -> (i64, &str) {
        (self.created_s, &self.pod_uid)
    }

    fn member(&self, seat: &Seat) -> Member {
        Member {
            seat: seat.clone(),
            pod_uid: self.pod_uid.clone(),
            incarnation: self.incarnation,
            key: self.key,
            round_addresses: self.round_addresses.clone(),
            byte_addresses: self.byte_addresses.clone(),
        }
    }
}

/// What the coordinator has written down of the newest membership.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Recorded {
    /// Its epoch.
    pub epoch: Epoch,
    /// Its digest.
    pub digest: Sha256,
    /// Largest version heard of.
    pub floor: Option<VersionFloor>,
    /// What it was made of.
    pub basis: Basis,
}

impl Recorded {
    /// What is written down of a membership.
    #[must_use]
    pub fn of(membership: &Membership, basis: Basis) -> Self {
        let (epoch, digest, floor) = (membership.epoch(), membership.digest(), membership.floor());
        Self { epoch, digest, floor, basis }
    }
}

/// Why there is a new epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Cause {
    /// The first one.
    Created,
    /// A training rank's agent was lost and replaced.
    TrainingRankLost,
    /// A trainer came, finished or changed its size.
    TrainingChanged,
    /// The resource changed.
    SpecChanged,
    /// The agent of an inference rank was replaced.
    MemberReplaced,
    /// A replica joined.
    ReplicaJoined,
}

/// A membership to send out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Next {
    /// The membership.
    pub membership: Arc<Membership>,
    /// What it was made of.
    pub basis: Basis,
    /// Why; `None` for the recorded one, which needs no write.
    pub cause: Option<Cause>,
}

/// Where the roster stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// No membership can be made: these seats have no agent. At most ten, in order.
    Forming {
        /// Seats without an agent.
        missing: Vec<Seat>,
    },
    /// A membership can be made, or is there.
    Complete,
}

/// Agents present and the membership that follows from them.
#[derive(Debug)]
pub struct Roster {
    refit_uid: String,
    spec: Spec,
    /// Counts the specs.
    revision: u64,
    agents: BTreeMap<Incarnation, Joining>,
    recorded: Option<Recorded>,
    current: Option<(Arc<Membership>, u64)>,
    epoch_seen: Epoch,
    version_seen: Option<VersionFloor>,
    joined_ms: u64,
}

impl Roster {
    /// `recorded` is what was written down before this coordinator started.
    #[must_use]
    pub fn new(refit_uid: impl Into<String>, spec: Spec, recorded: Option<Recorded>) -> Self {
        let (epoch_seen, version_seen) = recorded.map_or_else(Default::default, |r| (r.epoch, r.floor));
        let refit_uid = refit_uid.into();
        let (revision, agents, current, joined_ms) = Default::default();
        Self { refit_uid, spec, revision, agents, recorded, current, epoch_seen, version_seen, joined_ms }
    }

    /// An agent joins, or says again who it is. Returns the agents that it replaces, other than its own process, and
    /// why: they are present no more.
    ///
    /// # Errors
    /// Why it is refused; nothing changes then.
    pub fn join(
        &mut self,
        now_ms: u64,
        joining: Joining,
    ) -> Result<Vec<(Incarnation, RosterError)>, RosterError> {
        self.check(&joining)?;
        let mut replaced = Vec::new();
        for other in self.agents.values().filter(|other| other.incarnation != joining.incarnation) {
            let duplicate = |seat: &Seat, holder: &Joining, claimer: &Joining| RosterError::DuplicateRank {
                seat: seat.clone(),
                holder: holder.pod.clone(),
                claimer: claimer.pod.clone(),
            };
            let why = match other.seats.iter().find(|seat| joining.seats.contains(seat)) {
                _ if other.pod_uid == joining.pod_uid => RosterError::Replaced { pod: joining.pod.clone() },
                None => continue,
                Some(seat) if other.seniority() < joining.seniority() => {
                    return Err(duplicate(seat, other, &joining));
                }
                Some(seat) => duplicate(seat, &joining, other),
            };
            replaced.push((other.incarnation, why));
        }
        self.epoch_seen = self.epoch_seen.max(joining.epoch_seen);
        self.version_seen = self.version_seen.max(joining.version_seen);
        replaced.iter().for_each(|(gone, _)| drop(self.agents.remove(gone)));
        if self.agents.insert(joining.incarnation, joining).is_none() {
            self.joined_ms = now_ms;
        }
        Ok(replaced)
    }

    /// What is wrong with a joining agent by itself (R5).
    fn check(&self, joining: &Joining) -> Result<(), RosterError> {
        if let Some(seat) = joining.seats.iter().find(|seat| !self.spec_has(seat)) {
            return Err(RosterError::OutsideSpec { seat: seat.clone() });
        }
        let mut seats = BTreeSet::new();
        if let Some(seat) = joining.seats.iter().find(|seat| !seats.insert(*seat)) {
            return Err(RosterError::ClaimedTwice { seat: seat.clone() });
        }
        for seat in &joining.seats {
            check_member(&joining.member(seat))?;
        }
        self.check_heard(joining.epoch_seen, joining.version_seen)?;
        match self.agents.get(&joining.incarnation) {
            Some(other) if other.pod_uid != joining.pod_uid => {
                let (holder, claimer) = (other.pod.clone(), joining.pod.clone());
                Err(RosterError::Impostor { incarnation: joining.incarnation, holder, claimer })
            }
            _ => Ok(()),
        }
    }

    /// Whether an agent can have heard of these: numbers only grow one by one.
    fn check_heard(&self, epoch: Epoch, version: Option<VersionFloor>) -> Result<(), RosterError> {
        let leap = |what, heard: u64, known: u64| match heard > known.saturating_add(limits::LEAP_MAX) {
            true => Err(RosterError::Leap { what, heard, known }),
            false => Ok(()),
        };
        leap("epoch", epoch.0, self.epoch_seen.0)?;
        let run = |version: Option<VersionFloor>| version.map_or(0, |version| version.run);
        leap("run", run(version), run(self.version_seen))
    }

    /// The agent's stream ended.
    pub fn depart(&mut self, incarnation: Incarnation) {
        self.agents.remove(&incarnation);
    }

    /// The resource changed, or what it names.
    pub fn respec(&mut self, spec: Spec) {
        self.spec = spec;
        self.revision += 1;
    }

    /// A later report of an agent, or of the record.
    ///
    /// # Errors
    /// Numbers that nobody can have heard of; nothing changes then.
    pub fn hear(&mut self, epoch: Epoch, version: Option<VersionFloor>) -> Result<(), RosterError> {
        self.check_heard(epoch, version)?;
        self.epoch_seen = self.epoch_seen.max(epoch);
        self.version_seen = self.version_seen.max(version);
        Ok(())
    }

    /// Largest epoch that the record or any agent has heard of.
    #[must_use]
    pub fn epoch_seen(&self) -> Epoch {
        self.epoch_seen
    }

    /// The membership in force.
    #[must_use]
    pub fn current(&self) -> Option<&Arc<Membership>> {
        self.current.as_ref().map(|(membership, _)| membership)
    }

    /// Agents that are present, whether members or not.
    #[must_use]
    pub fn agents(&self) -> &BTreeMap<Incarnation, Joining> {
        &self.agents
    }

    /// Whether the agent leads; before there is a membership in force, whether it will if nobody older comes.
    #[must_use]
    pub fn leads(&self, incarnation: Incarnation) -> bool {
        let will_lead = |seat: &Seat| match seat {
            Seat::Training { rank } => *rank == Rank(0),
            Seat::Inference { rank, .. } => *rank == Rank(0) && self.spec.training_ranks == 0,
        };
        match self.current() {
            Some(current) => {
                let leader = current.member(current.leader());
                leader.is_some_and(|leader| leader.incarnation == incarnation)
            }
            None => self.agents.get(&incarnation).is_some_and(|agent| agent.seats.iter().any(will_lead)),
        }
    }

    /// Whether a membership can be made, and who is missing.
    #[must_use]
    pub fn standing(&self) -> Standing {
        let missing: Vec<_> = self.missing().into_iter().take(10).collect();
        if missing.is_empty() { Standing::Complete } else { Standing::Forming { missing } }
    }

    /// When to ask [`Self::next`] again after `now_ms`, if nothing else happens; not later than now when only what
    /// happens next can change its answer.
    #[must_use]
    pub fn next_deadline_ms(&self, now_ms: u64) -> u64 {
        let settled = self.settled_ms();
        match self.goes_on() && now_ms >= settled {
            true => limits::RESTART_SETTLE_MS,
            false => settled,
        }
    }

    fn settled_ms(&self) -> u64 {
        self.joined_ms.saturating_add(limits::JOIN_SETTLE_MS)
    }

    /// Whether members of the recorded membership may still come back.
    fn goes_on(&self) -> bool {
        self.current.is_none() && self.recorded.is_some()
    }

    /// The membership that should replace the current one now, if any. `round_open`: a round of the current one
    /// is running. Write it down, then call [`Self::enact`], then send it.
    ///
    /// # Errors
    /// Facts of agents that make no membership (names or addresses beyond their bounds).
    pub fn next(&self, now_ms: u64, round_open: bool) -> Result<Option<Next>, MembershipError> {
        if !self.missing().is_empty() {
            return Ok(None);
        }
        let settled = now_ms >= self.settled_ms();
        let members = self.members();
        let Some((current, revision)) = &self.current else {
            return if settled { self.first(now_ms, members) } else { Ok(None) };
        };
        let Some(cause) = self.cause(current, *revision, &members) else { return Ok(None) };
        if cause != Cause::TrainingRankLost && (round_open || !settled) {
            return Ok(None);
        }
        let membership = Arc::new(self.membership(Epoch(self.epoch_seen.0 + 1), members)?);
        Ok(Some(Next { membership, basis: self.spec.basis, cause: Some(cause) }))
    }

    /// `membership` is written down (or was): it is in force from now on.
    pub fn enact(&mut self, membership: Arc<Membership>) {
        self.epoch_seen = self.epoch_seen.max(membership.epoch());
        self.recorded = Some(Recorded::of(&membership, self.spec.basis));
        self.current = Some((membership, self.revision));
    }

    /// After a restart of the coordinator, at its time 0, the recorded membership goes on if everybody is still who
    /// they were. Its members dial again one by one, so another one is made only after a while.
    fn first(&self, now_ms: u64, members: Vec<Member>) -> Result<Option<Next>, MembershipError> {
        let basis = self.spec.basis;
        let cause = match self.recorded {
            None => Cause::Created,
            Some(recorded) if recorded.basis != basis => Cause::SpecChanged,
            Some(recorded) => {
                let again = self.membership(recorded.epoch, members.clone())?;
                if recorded.epoch == self.epoch_seen && again.digest() == recorded.digest {
                    return Ok(Some(Next { membership: Arc::new(again), basis, cause: None }));
                }
                if now_ms < limits::RESTART_SETTLE_MS {
                    return Ok(None);
                }
                Cause::MemberReplaced
            }
        };
        let membership = Arc::new(self.membership(Epoch(self.epoch_seen.0 + 1), members)?);
        Ok(Some(Next { membership, basis, cause: Some(cause) }))
    }

    /// The gravest difference between the current membership and what the present agents would make.
    fn cause(&self, current: &Membership, revision: u64, members: &[Member]) -> Option<Cause> {
        let of = |members: &[Member]| -> BTreeMap<Seat, Incarnation> {
            members.iter().map(|member| (member.seat.clone(), member.incarnation)).collect()
        };
        let (before, after) = (of(current.members()), of(members));
        let is_training = |seat: &Seat| matches!(seat, Seat::Training { .. });
        let size = |side: &BTreeMap<Seat, Incarnation>| side.keys().filter(|seat| is_training(seat)).count();
        let replaced = |seat: &Seat| before.get(seat).is_some_and(|old| after.get(seat) != Some(old));
        if size(&before) != size(&after) {
            return Some(Cause::TrainingChanged);
        }
        if after.keys().any(|seat| is_training(seat) && replaced(seat)) {
            return Some(Cause::TrainingRankLost);
        }
        if self.revision != revision {
            return Some(Cause::SpecChanged);
        }
        if after.keys().any(replaced) {
            return Some(Cause::MemberReplaced);
        }
        after.keys().any(|seat| !before.contains_key(seat)).then_some(Cause::ReplicaJoined)
    }

    fn membership(&self, epoch: Epoch, members: Vec<Member>) -> Result<Membership, MembershipError> {
        let pools = self.spec.pools.iter().map(|pool| pool.name.clone()).collect();
        Membership::new(self.refit_uid.clone(), epoch, self.version_seen, pools, members)
    }

    fn seats(&self) -> BTreeMap<&Seat, &Joining> {
        let of_agent = |agent| move |seat| (seat, agent);
        self.agents.values().flat_map(|agent: &Joining| agent.seats.iter().map(of_agent(agent))).collect()
    }

    /// Training ranks and whole replicas (R1).
    fn members(&self) -> Vec<Member> {
        let seats = self.seats();
        let whole = |seat: &Seat| match seat {
            Seat::Training { .. } => self.spec_has(seat),
            Seat::Inference { pool, replica, .. } => self.is_whole(&seats, pool, replica),
        };
        seats.iter().filter(|(seat, _)| whole(seat)).map(|(seat, agent)| agent.member(seat)).collect()
    }

    fn is_whole(&self, seats: &BTreeMap<&Seat, &Joining>, pool: &str, replica: &str) -> bool {
        let Some(spec) = self.spec.pools.iter().find(|spec| spec.name == pool) else { return false };
        (0..spec.ranks_per_replica).map(Rank).all(|rank| {
            let (pool, replica) = (pool.to_owned(), replica.to_owned());
            seats.contains_key(&Seat::Inference { pool, replica, rank })
        })
    }

    /// Seats that R1 still needs: training ranks, and for pools that are short of replicas the missing ranks of
    /// started ones, or rank 0 of one that nobody has started.
    fn missing(&self) -> BTreeSet<Seat> {
        let seats = self.seats();
        let mut missing: BTreeSet<Seat> = (0..self.spec.training_ranks)
            .map(|rank| Seat::Training { rank: Rank(rank) })
            .filter(|seat| !seats.contains_key(seat))
            .collect();
        for spec in &self.spec.pools {
            let names: BTreeSet<&str> = (seats.keys())
                .filter_map(|seat| match seat {
                    Seat::Inference { pool, replica, .. } if *pool == spec.name => Some(replica.as_str()),
                    _ => None,
                })
                .collect();
            let whole = names.iter().filter(|name| self.is_whole(&seats, &spec.name, name)).count();
            if u32::try_from(whole).is_ok_and(|whole| whole >= spec.min_replicas) {
                continue;
            }
            let seat = |replica: &str, rank| {
                let (pool, replica) = (spec.name.clone(), replica.to_owned());
                Seat::Inference { pool, replica, rank: Rank(rank) }
            };
            let ranks = |name: &&str| (0..spec.ranks_per_replica).map(|r| seat(name, r)).collect::<Vec<_>>();
            let started = names.iter().flat_map(ranks).filter(|seat| !seats.contains_key(seat));
            let before = missing.len();
            missing.extend(started);
            if missing.len() == before {
                missing.insert(seat("(any)", 0));
            }
        }
        missing
    }

    fn spec_has(&self, seat: &Seat) -> bool {
        match seat {
            Seat::Training { rank } => rank.0 < self.spec.training_ranks,
            Seat::Inference { pool, rank, .. } => {
                self.spec.pools.iter().any(|spec| spec.name == *pool && rank.0 < spec.ranks_per_replica)
            }
        }
    }
}

/// What an agent says is refused, or another agent takes its place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "fields are named by the message")]
pub enum RosterError {
    /// The resource has no such rank or pool.
    #[error("{seat} is outside the sizes of the resource")]
    OutsideSpec { seat: Seat },
    /// One claim names a seat twice.
    #[error("{seat} is claimed twice by one agent")]
    ClaimedTwice { seat: Seat },
    /// Two pods for one rank.
    #[error("pod {claimer} claims {seat}, which the older pod {holder} holds")]
    DuplicateRank { seat: Seat, holder: String, claimer: String },
    /// Two agents in one pod, or an older one whose end went unnoticed.
    #[error("another agent process of pod {pod} has joined in place of this one")]
    Replaced { pod: String },
    /// Processes draw their incarnations.
    #[error("pod {claimer} claims incarnation {incarnation}, which is an agent of pod {holder}")]
    Impostor { incarnation: Incarnation, holder: String, claimer: String },
    /// Names or addresses that no membership can have.
    #[error(transparent)]
    Facts(#[from] MembershipError),
    /// A number far above all others.
    #[error("{what} {heard} cannot have been heard of: the largest known is {known}")]
    Leap { what: &'static str, heard: u64, known: u64 },
}

impl RosterError {
    /// The stable code under which this surfaces.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::OutsideSpec { .. } | Self::ClaimedTwice { .. } => Code::Unsupported,
            Self::DuplicateRank { .. } | Self::Replaced { .. } => Code::DuplicateRank,
            Self::Impostor { .. } => Code::Unauthenticated,
            Self::Facts(facts) => facts.code(),
            Self::Leap { .. } => Code::StaleEpoch,
        }
    }
}
