//! One round as its leader keeps it: who takes part, what they said, how each replica ends.
//!
//! Invariants:
//! - L1: `decision` of a replica leaves `Open` once, for ever: Authorised xor Aborted.
//! - L2 (I2): a replica is Verified only when all its ranks have landed and all its sources have sent what the
//!   plan says, and the digests agree.

use crate::code::Code;
use crate::id::{MemberId, Sha256};
use crate::round::io::{Phase, ReplicaEnd, RoundSummary};
use crate::round::message::{Blame, ClassSums, ContentSum, RoundKey, Version};
use crate::round::topology::{PublishedSums, Topology};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Attempt {
    pub(super) key: RoundKey,
    pub(super) version: Version,
    pub(super) world: Arc<str>,
    pub(super) sums: PublishedSums,
    pub(super) parts: BTreeMap<u32, Part>,
    pub(super) sources: BTreeSet<MemberId>,
    pub(super) stage: Stage,
    /// Pair digests of those who are ready.
    pub(super) prepared: BTreeMap<MemberId, Vec<(MemberId, Sha256)>>,
    /// Who was busy: when to ask again, and how long the next wait is.
    pub(super) busy: BTreeMap<MemberId, (u64, u64)>,
    pub(super) deadline: Option<u64>,
    pub(super) total_at: u64,
    pub(super) resend_at: u64,
    pub(super) since: u64,
    pub(super) phases: BTreeMap<Phase, u64>,
    /// Replicas that fell out of this version's earlier proposals.
    pub(super) fell_out: BTreeMap<u32, ReplicaEnd>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Stage {
    Proposed,
    Moving,
    Deciding,
}

/// One replica's part.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Part {
    pub(super) ranks: Vec<MemberId>,
    pub(super) sources: BTreeSet<MemberId>,
    pub(super) landed: BTreeMap<MemberId, Landed>,
    pub(super) sent: BTreeMap<MemberId, u64>,
    pub(super) verified: Option<ContentSum>,
    pub(super) decision: Decision,
    pub(super) end: Option<ReplicaEnd>,
    pub(super) ended_at: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Landed {
    pub(super) received: u64,
    pub(super) skipped: u64,
    pub(super) sums: ClassSums,
}

/// Never taken back (L1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Decision {
    Open,
    Authorised,
    Aborted,
}

impl Part {
    pub(super) fn new(topology: &Topology, replica: u32) -> Self {
        let ranks = topology.replica(replica).map_or_else(Vec::new, |replica| replica.ranks.clone());
        let (landed, sent) = Default::default();
        let sources = topology.sources_of(replica);
        Self {
            ranks,
            sources,
            landed,
            sent,
            verified: None,
            decision: Decision::Open,
            end: None,
            ended_at: 0,
        }
    }

    /// Still waiting for bytes or digests.
    pub(super) fn is_moving(&self) -> bool {
        self.decision == Decision::Open && self.verified.is_none()
    }

    pub(super) fn needs(&self, source: MemberId) -> bool {
        self.is_moving() && self.sources.contains(&source) && !self.sent.contains_key(&source)
    }

    /// L2. `None` while somebody has not said so yet.
    pub(super) fn verify(
        &self,
        topology: &Topology,
        replica: u32,
        published: &PublishedSums,
    ) -> Option<Result<ContentSum, Blame>> {
        if self.landed.len() < self.ranks.len() || self.sent.len() < self.sources.len() {
            return None;
        }
        let mismatch = |member| Err(Blame { code: Code::DigestMismatch, member: Some(member) });
        for (rank, landed) in &self.landed {
            if landed.received.checked_add(landed.skipped) != Some(topology.planned_bytes(*rank)) {
                return Some(mismatch(*rank)); // I10
            }
        }
        let skipped = self.landed.values().any(|landed| landed.skipped > 0);
        for (source, sent) in &self.sent {
            if *sent != topology.sent_bytes(*source, replica) && !skipped {
                return Some(mismatch(*source));
            }
        }
        let sums = self.landed.iter().map(|(rank, landed)| (*rank, landed.sums.clone())).collect();
        let sum = topology.ledger.landed(replica, &sums, published);
        Some(sum.map_err(|fault| Blame { code: fault.code, member: fault.member }))
    }
}

impl Attempt {
    /// All who must answer: ranks of all replicas, and sources.
    pub(super) fn participants(&self) -> BTreeSet<MemberId> {
        self.parts
            .values()
            .flat_map(|part| part.ranks.iter().copied())
            .chain(self.sources.iter().copied())
            .collect()
    }

    pub(super) fn part_of(&self, rank: MemberId) -> Option<u32> {
        self.parts.iter().find(|(_, part)| part.ranks.contains(&rank)).map(|(replica, _)| *replica)
    }

    /// I4: both ends of a pair must have computed the same moves. The first member whose digests differ from
    /// its peer's.
    pub(super) fn disagreement(&self) -> Option<MemberId> {
        self.prepared.iter().find_map(|(member, pairs)| {
            let differs = |(peer, digest): &(MemberId, Sha256)| {
                let theirs = self.prepared.get(peer)?;
                let same = theirs.iter().any(|(back, theirs)| back == member && theirs == digest);
                (!same).then_some(*member)
            };
            pairs.iter().find_map(differs)
        })
    }

    pub(super) fn all(&self, decided: impl Fn(&Part) -> bool) -> bool {
        self.parts.values().all(decided)
    }

    /// Ends phase `phase`, which began at `since`.
    pub(super) fn close_phase(&mut self, now: u64, phase: Phase) {
        self.phases.insert(phase, now.saturating_sub(self.since));
        self.since = now;
    }

    /// Replicas run pause, commit and resume by themselves: the slowest counts.
    pub(super) fn slowest(&mut self, phase: Phase, ms: u64) {
        let known = self.phases.entry(phase).or_default();
        *known = ms.max(*known);
    }

    pub(super) fn summary(&self) -> RoundSummary {
        let mut replicas = self.fell_out.clone();
        replicas.extend(self.parts.iter().filter_map(|(replica, part)| Some((*replica, part.end?))));
        let committed = replicas.values().any(|end| matches!(end, ReplicaEnd::Committed { .. }));
        let blame = replicas.values().find_map(|end| match end {
            ReplicaEnd::Committed { .. } => None,
            ReplicaEnd::NotCommitted(blame)
            | ReplicaEnd::Held(blame)
            | ReplicaEnd::Aborted(blame)
            | ReplicaEnd::Unknown(blame) => Some(*blame),
        });
        let landed = || self.parts.values().flat_map(|part| part.landed.values());
        // Peers say these numbers; those of a replica that was not verified may be anything.
        let add = |sum: u64, bytes: &u64| sum.saturating_add(*bytes);
        RoundSummary {
            round: self.key,
            version: self.version,
            committed,
            blame: blame.filter(|_| !committed),
            replicas: replicas.into_iter().collect(),
            phases: self.phases.iter().map(|(phase, ms)| (*phase, *ms)).collect(),
            sent: self.parts.values().flat_map(|part| part.sent.values()).fold(0, add),
            received: landed().map(|landed| &landed.received).fold(0, add),
            skipped: landed().map(|landed| &landed.skipped).fold(0, add),
        }
    }
}
