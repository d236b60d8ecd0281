//! A lane: who is in it, what its members say to its first rank, and how that one decides.
//!
//! D1: an attempt begins once all members have said hello, and only one is under way.
//! D2: whoever leaves, or says that it failed, ends the attempt for all; each says hello again when it has aborted.
//! D3: a member that cannot, or members that do not fit, make the lane TCP for all, with the reason.
//! D4: attempts that fail while they form, one after the other, are not repeated for ever.

use super::symbols::{NcclVersion, UniqueId};
use crate::limits;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256 as Hasher};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use weightrefit_core::code::Code;
use weightrefit_core::id::{MemberId, Sha256};
use weightrefit_core::membership::Membership;
use weightrefit_proto::socket::executor::LaneId;

/// A lane as it follows from a membership and its plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LanePlan {
    /// The replica, by index: lanes are formed in this order.
    pub(crate) replica: u32,
    /// Of the members' incarnations in order: a lane stays the same while they do, whatever else changes.
    pub(crate) key: Sha256,
    /// In order of their ranks in the lane; the first mints and decides.
    pub(crate) members: Vec<MemberId>,
    /// Most peers that one rank has.
    pub(crate) degree: u32,
    /// Where the first rank's agent is dialled.
    pub(crate) root: Vec<SocketAddr>,
    /// Where the leader's agent is dialled.
    pub(crate) leader: (MemberId, Vec<SocketAddr>),
}

impl LanePlan {
    /// The lane of a replica; `peers` are the pairs that exchange bytes.
    pub(crate) fn new(
        membership: &Membership,
        replica: u32,
        pairs: &BTreeSet<(MemberId, MemberId)>,
        addresses: impl Fn(MemberId) -> Vec<SocketAddr>,
    ) -> Option<Self> {
        let all: BTreeSet<MemberId> = pairs.iter().flat_map(|(from, to)| [*from, *to]).collect();
        let members: Vec<MemberId> = all.into_iter().collect();
        let root = *members.first()?;
        let mut hasher = Hasher::new();
        hasher.update(membership.refit_uid());
        for member in members.iter().filter_map(|member| membership.member(*member)) {
            hasher.update(member.incarnation.0.to_le_bytes());
            hasher.update(member.seat.to_string());
            hasher.update([0]);
        }
        let peers =
            |member: &MemberId| pairs.iter().filter(|(from, to)| from == member || to == member).count();
        let degree = members.iter().map(peers).max().unwrap_or(0);
        let leader = membership.leader();
        Some(Self {
            replica,
            key: Sha256(hasher.finalize().into()),
            degree: u32::try_from(degree).unwrap_or(u32::MAX),
            root: addresses(root),
            leader: (leader, addresses(leader)),
            members,
        })
    }

    /// A member's rank in the lane.
    pub(crate) fn rank(&self, member: MemberId) -> Option<u32> {
        let at = self.members.iter().position(|other| *other == member)?;
        u32::try_from(at).ok()
    }
}

/// Why a lane is TCP.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Reason {
    pub(crate) code: Code,
    pub(crate) text: String,
}

impl Reason {
    pub(crate) fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }
}

/// What a member brings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Facts {
    /// Of its library, as NCCL counts.
    pub(super) nccl: u32,
    /// Its GPU.
    pub(super) gpu: String,
    /// Whether NCCL may put it on a GPU with another rank.
    pub(super) shares_gpu: bool,
    /// The largest chunk that its windows have room for.
    pub(super) chunk_bytes_max: u64,
}

impl Facts {
    /// Of a GPU whose windows may take this much for one lane.
    pub(super) fn new(nccl: u32, gpu: String, shares_gpu: bool, window_bytes: u64, plan: &LanePlan) -> Self {
        // Two for each peer, at multiples of what the kernels like.
        let windows = 2 * u64::from(plan.degree.max(1));
        Self { nccl, gpu, shares_gpu, chunk_bytes_max: window_bytes / windows / 256 * 256 }
    }
}

/// From a member to the first rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum FromMember {
    /// It is there, and nothing of an older attempt is.
    Hello(Result<Facts, Reason>),
    /// It has found the others.
    Formed { attempt: u32 },
    /// It has ended the attempt.
    Failed { attempt: u32, reason: Reason },
}

/// From the first rank to a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum FromRoot {
    /// Bytes go by TCP.
    Tcp(Reason),
    /// They may go otherwise: what stood in the way is gone.
    Undecided,
    /// Find the others.
    Form { attempt: u32, id: LaneId, chunk_bytes: u64 },
    /// All have found each other.
    Ready { attempt: u32 },
    /// It is over, by what a member said of itself or because one is gone; say hello again when you have aborted.
    Abort { attempt: u32, reason: Option<Reason> },
}

impl From<UniqueId> for LaneId {
    fn from(id: UniqueId) -> Self {
        Self(id.0.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

/// `None` where it is none.
pub(super) fn id_of(id: &LaneId) -> Option<UniqueId> {
    let (pairs, rest) = id.0.as_bytes().as_chunks::<2>();
    let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let bytes: Vec<u8> = pairs.iter().map(byte).collect::<Option<_>>()?;
    rest.is_empty().then_some(UniqueId(bytes.try_into().ok()?))
}

/// What the first rank's agent has to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Order {
    /// Tell a member.
    Tell(u32, FromRoot),
    /// Wait for the turn at the leader (L2).
    TakeTurn,
    /// Let others form theirs.
    GiveTurn,
    /// Mint an id.
    Mint,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    Gathering,
    Turning,
    Forming { formed: BTreeSet<u32> },
    Ready,
    Tcp(Reason),
}

/// The first rank's decisions.
#[derive(Debug)]
pub(super) struct Root {
    ranks: u32,
    present: BTreeMap<u32, Result<Facts, Reason>>,
    phase: Phase,
    attempt: u32,
    /// Attempts in a row that failed while they formed, and the last reason.
    failures: u32,
    failure: Option<Reason>,
}

impl Root {
    pub(super) fn new(ranks: u32) -> Self {
        let (present, phase) = (BTreeMap::new(), Phase::Gathering);
        Self { ranks, present, phase, attempt: 0, failures: 0, failure: None }
    }

    /// A member is there.
    pub(super) fn hello(&mut self, rank: u32, facts: Result<Facts, Reason>) -> Vec<Order> {
        let mut orders = match self.phase {
            // It has begun anew, so the attempt that it was in is over.
            Phase::Turning | Phase::Forming { .. } | Phase::Ready => self.gone(rank),
            Phase::Gathering | Phase::Tcp(_) => Vec::new(),
        };
        self.present.insert(rank, facts);
        if self.present.len() == self.ranks as usize {
            orders.extend(self.decide());
        }
        orders
    }

    fn decide(&mut self) -> Vec<Order> {
        if let Some(reason) = self.obstacle() {
            self.phase = Phase::Tcp(reason.clone());
            return self.all(&FromRoot::Tcp(reason));
        }
        // Who was told of TCP waits again, and hears how it ends.
        let mut orders = match self.phase {
            Phase::Tcp(_) => self.all(&FromRoot::Undecided),
            _ => Vec::new(),
        };
        self.phase = Phase::Turning;
        orders.push(Order::TakeTurn);
        orders
    }

    /// D3, D4.
    fn obstacle(&self) -> Option<Reason> {
        if let Some(reason) = self.present.values().find_map(|facts| facts.as_ref().err()) {
            return Some(reason.clone());
        }
        if self.failures >= limits::LANE_FAILURES_MAX {
            return self.failure.clone();
        }
        let facts: Vec<&Facts> = self.present.values().filter_map(|facts| facts.as_ref().ok()).collect();
        let first = facts.first()?;
        if let Some(other) = facts.iter().find(|other| other.nccl != first.nccl) {
            let (one, two) = (NcclVersion(first.nccl), NcclVersion(other.nccl));
            let text = format!("members of the lane have NCCL {one} and {two}");
            return Some(Reason::new(Code::VersionSkew, text));
        }
        let mut seen = BTreeSet::new();
        let twice = facts.iter().find(|facts| !seen.insert(&facts.gpu))?;
        if facts.iter().filter(|facts| facts.gpu == twice.gpu).all(|facts| facts.shares_gpu) {
            return None;
        }
        let text =
            format!("two ranks of the lane are on {}, and NCCL_MULTI_RANK_GPU_ENABLE is not set", twice.gpu);
        Some(Reason::new(Code::TransportUnavailable, text))
    }

    /// It is this lane's turn.
    pub(super) fn turn(&self) -> Vec<Order> {
        if self.phase == Phase::Turning { vec![Order::Mint] } else { vec![Order::GiveTurn] }
    }

    /// An id, or why there is none.
    pub(super) fn minted(&mut self, id: Result<UniqueId, Reason>) -> Vec<Order> {
        match id {
            Ok(id) => {
                self.attempt += 1;
                self.phase = Phase::Forming { formed: BTreeSet::new() };
                let facts = self.present.values().filter_map(|facts| facts.as_ref().ok());
                let chunk = facts.map(|facts| facts.chunk_bytes_max).min().unwrap_or(0);
                let chunk_bytes = chunk.clamp(limits::LANE_CHUNK_BYTES_MIN, limits::LANE_CHUNK_BYTES_MAX);
                self.all(&FromRoot::Form { attempt: self.attempt, id: id.into(), chunk_bytes })
            }
            Err(reason) => {
                self.phase = Phase::Tcp(reason.clone());
                let mut orders = vec![Order::GiveTurn];
                orders.extend(self.all(&FromRoot::Tcp(reason)));
                orders
            }
        }
    }

    /// A member has found the others.
    pub(super) fn formed(&mut self, rank: u32, attempt: u32) -> Vec<Order> {
        let Phase::Forming { formed } = &mut self.phase else { return Vec::new() };
        if attempt != self.attempt {
            return Vec::new();
        }
        formed.insert(rank);
        if formed.len() < self.ranks as usize {
            return Vec::new();
        }
        self.phase = Phase::Ready;
        self.failures = 0;
        let mut orders = vec![Order::GiveTurn];
        orders.extend(self.all(&FromRoot::Ready { attempt }));
        orders
    }

    /// A member has ended the attempt.
    pub(super) fn failed(&mut self, attempt: u32, reason: Reason) -> Vec<Order> {
        let forming = matches!(self.phase, Phase::Forming { .. });
        if attempt != self.attempt || !(forming || self.phase == Phase::Ready) {
            return Vec::new();
        }
        if forming {
            self.failures += 1;
            self.failure = Some(reason.clone());
        }
        // Who was told to stop has nothing to say of the others' transfers.
        self.end(Some(reason).filter(|reason| reason.code != Code::Cancelled))
    }

    /// A member is not there any more.
    pub(super) fn gone(&mut self, rank: u32) -> Vec<Order> {
        self.present.remove(&rank);
        match self.phase {
            Phase::Turning => {
                // The others need not say hello again: they have begun nothing.
                self.phase = Phase::Gathering;
                vec![Order::GiveTurn]
            }
            Phase::Forming { .. } | Phase::Ready => self.end(None),
            Phase::Gathering | Phase::Tcp(_) => Vec::new(),
        }
    }

    /// D2.
    fn end(&mut self, reason: Option<Reason>) -> Vec<Order> {
        let forming = matches!(self.phase, Phase::Forming { .. });
        self.phase = Phase::Gathering;
        let mut orders: Vec<Order> = forming.then_some(Order::GiveTurn).into_iter().collect();
        orders.extend(self.all(&FromRoot::Abort { attempt: self.attempt, reason }));
        self.present.clear();
        orders
    }

    fn all(&self, message: &FromRoot) -> Vec<Order> {
        self.present.keys().map(|rank| Order::Tell(*rank, message.clone())).collect()
    }
}

#[cfg(test)]
mod tests;
