//! What the machines must know of plan and policy: facts that follow from one membership, and no boxes.
//!
//! Invariants:
//! - T1: replicas, their order and their ranks are those of the membership.
//! - T2: every pair goes from a training rank to an inference rank; planned bytes of a destination are the sum
//!   of its pairs.

use super::message::{ClassSums, ContentSum, Timeouts};
use crate::code::Code;
use crate::dtype::DType;
use crate::id::{MemberId, Sha256, TensorId};
use crate::membership::{Membership, Replica, Seat};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// All that a pair of ranks exchanges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PairFacts {
    /// Bytes in wire dtype.
    pub bytes: u64,
    /// Digest over the pair's boxes; both ends compute it by themselves.
    pub digest: Sha256,
}

/// What the resource says about rounds.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Policies {
    /// Durations of phases.
    pub timeouts: Timeouts,
    /// What one replica's failure does to the others.
    pub on_replica_failure: OnReplicaFailure,
    /// Per pool, in the membership's order: fewest settled replicas with which a round starts.
    pub min_replicas: Vec<u32>,
}

/// What one replica's failure does to the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OnReplicaFailure {
    /// The replica stays as it is; the others go on.
    FenceReplica,
    /// Until the first commit is authorised, the round ends for all.
    AbortRound,
}

/// Per tensor and wire dtype: the sum of what was published.
pub type PublishedSums = BTreeMap<(TensorId, DType), ContentSum>;

/// Compares the digests that ranks report (their classes follow from the plan). The leader asks it, so that no
/// round decision depends on how classes are made.
pub trait DigestLedger: fmt::Debug + Send + Sync {
    /// All training ranks' sums of one publication, added up per tensor and wire dtype.
    ///
    /// # Errors
    /// `ReplicaDivergence` with a member, where copies of one class differ.
    fn published(&self, sums: &BTreeMap<MemberId, ClassSums>) -> Result<PublishedSums, DigestFault>;

    /// All sums of one replica (index into the membership's list) against the publication; yields the pool's
    /// `Version::sum` (zero with verification disabled).
    ///
    /// # Errors
    /// `DigestMismatch` with the tensor, and the member where one can be told.
    fn landed(
        &self,
        replica: u32,
        sums: &BTreeMap<MemberId, ClassSums>,
        published: &PublishedSums,
    ) -> Result<ContentSum, DigestFault>;
}

/// Why digests do not agree.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{code}: tensor {tensor:?} of member {member:?} differs from what was published")]
pub struct DigestFault {
    /// `ReplicaDivergence` or `DigestMismatch`.
    pub code: Code,
    /// First tensor that differs, where one can be told.
    pub tensor: Option<TensorId>,
    /// The rank whose copy differs, where one can be told.
    pub member: Option<MemberId>,
}

/// Facts of one membership's plan; the same in every agent.
#[derive(Debug)]
pub struct Topology {
    /// Digest of the plan.
    pub plan: Sha256,
    /// Per member: digest of its side's or pool's canonical layout.
    pub layouts: Vec<Sha256>,
    /// What the resource says about rounds.
    pub policies: Policies,
    /// Compares digests.
    pub ledger: Arc<dyn DigestLedger>,
    replicas: Vec<Replica>,
    pairs: BTreeMap<(MemberId, MemberId), PairFacts>,
}

impl Topology {
    /// `layouts` has one entry per member; `pairs` is keyed by (source, destination).
    ///
    /// # Errors
    /// Where the facts do not fit the membership.
    pub fn new(
        membership: &Membership,
        plan: Sha256,
        layouts: Vec<Sha256>,
        pairs: BTreeMap<(MemberId, MemberId), PairFacts>,
        policies: Policies,
        ledger: Arc<dyn DigestLedger>,
    ) -> Result<Self, TopologyError> {
        let members = membership.members().len();
        if layouts.len() != members {
            return Err(TopologyError::Layouts { layouts: layouts.len(), members });
        }
        if policies.min_replicas.len() != membership.pools().len() {
            let (policies, pools) = (policies.min_replicas.len(), membership.pools().len());
            return Err(TopologyError::Pools { policies, pools });
        }
        let training = |id| matches!(membership.member(id).map(|m| &m.seat), Some(Seat::Training { .. }));
        let inference = |id| matches!(membership.member(id).map(|m| &m.seat), Some(Seat::Inference { .. }));
        let mut planned = BTreeMap::<MemberId, u64>::new();
        for (&(source, destination), pair) in &pairs {
            if !training(source) || !inference(destination) {
                return Err(TopologyError::Pair { source_member: source, destination });
            }
            let sum = planned.entry(destination).or_default();
            *sum = sum.checked_add(pair.bytes).ok_or(TopologyError::TooManyBytes { destination })?;
        }
        let replicas = membership.replicas();
        Ok(Self { plan, layouts, policies, ledger, replicas, pairs })
    }

    /// Replicas in the membership's order; messages name them by index.
    #[must_use]
    pub fn replicas(&self) -> &[Replica] {
        &self.replicas
    }

    /// The replica that a member is a rank of, by index.
    #[must_use]
    pub fn replica_of(&self, member: MemberId) -> Option<u32> {
        let at = self.replicas.iter().position(|replica| replica.ranks.contains(&member))?;
        u32::try_from(at).ok()
    }

    /// The replica of this index.
    #[must_use]
    pub fn replica(&self, index: u32) -> Option<&Replica> {
        self.replicas.get(usize::try_from(index).ok()?)
    }

    /// Training ranks that send to any rank of the replica, ascending.
    #[must_use]
    pub fn sources_of(&self, replica: u32) -> BTreeSet<MemberId> {
        let ranks = self.replica(replica).map_or(&[][..], |replica| &replica.ranks);
        self.pairs.keys().filter(|(_, to)| ranks.contains(to)).map(|&(from, _)| from).collect()
    }

    /// Bytes that the plan delivers to a destination rank.
    #[must_use]
    pub fn planned_bytes(&self, destination: MemberId) -> u64 {
        self.pairs.iter().filter(|((_, to), _)| *to == destination).map(|(_, pair)| pair.bytes).sum()
    }

    /// Bytes that the plan moves from a source to a replica.
    #[must_use]
    pub fn sent_bytes(&self, source: MemberId, replica: u32) -> u64 {
        let ranks = self.replica(replica).map_or(&[][..], |replica| &replica.ranks);
        let of_pair = |((from, to), pair): (&(MemberId, MemberId), &PairFacts)| {
            if *from == source && ranks.contains(to) { pair.bytes } else { 0 }
        };
        self.pairs.iter().map(of_pair).sum()
    }

    /// Pair digests of one member with each of its peers, ascending by peer.
    #[must_use]
    pub fn pair_digests(&self, member: MemberId) -> Vec<(MemberId, Sha256)> {
        let mut out: Vec<_> = (self.pairs.iter())
            .filter_map(|(&(from, to), pair)| match member {
                m if m == from => Some((to, pair.digest)),
                m if m == to => Some((from, pair.digest)),
                _ => None,
            })
            .collect();
        out.sort_unstable();
        out
    }
}

/// Facts that do not fit their membership.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "fields are named by the message")]
pub enum TopologyError {
    /// One layout digest per member is needed.
    #[error("{layouts} layout digests for {members} members")]
    Layouts { layouts: usize, members: usize },
    /// One policy per pool is needed.
    #[error("minReplicas of {policies} pools for {pools} pools")]
    Pools { policies: usize, pools: usize },
    /// Pairs go from training to inference.
    #[error(
        "pair from member {source_member} to member {destination} does not go from a training to an inference rank"
    )]
    Pair { source_member: MemberId, destination: MemberId },
    /// More than a u64 of bytes.
    #[error("planned bytes of member {destination} exceed 64 bits")]
    TooManyBytes { destination: MemberId },
}
