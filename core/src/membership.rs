//! Who is which rank: one membership is named by its epoch and digest, and never changes.
//!
//! Invariants:
//! - M1: members are in canonical order: training by rank, then pools in the resource's order, replicas
//!   bytewise, rank. A `MemberId` is an index into that order.
//! - M2: ranks of a side or replica are exactly `0..n`; all replicas of a pool have the same `n`.
//! - M3: member 0 leads: training rank 0, or the head of the lowest replica where there is no trainer.
//! - M4: the digest covers all that agents rely on when they accept each other's messages; the epoch stands
//!   beside it, and the version floor is outside.
//! - M5: members of one agent (equal incarnation) have one pod, one key and the same addresses.

pub mod accept;
mod digest;
pub mod roster;

use crate::code::Code;
use crate::id::{Epoch, Incarnation, MemberId, Rank, Sha256};
use crate::limits;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Which rank a member is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(tag = "side", rename_all = "camelCase", deny_unknown_fields)]
pub enum Seat {
    /// A rank of the training side.
    Training {
        /// Which.
        rank: Rank,
    },
    /// A rank of an inference replica.
    Inference {
        /// Pool, by name.
        pool: String,
        /// Replica inside the pool.
        replica: String,
        /// Rank inside the replica.
        rank: Rank,
    },
}

impl fmt::Display for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Training { rank } => write!(f, "training/{rank}"),
            Self::Inference { pool, replica, rank } => write!(f, "inference/{pool}/{replica}/{rank}"),
        }
    }
}

/// A rank and the agent that hosts it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Member {
    /// Which rank.
    pub seat: Seat,
    /// UID of the pod.
    pub pod_uid: String,
    /// The agent process.
    pub incarnation: Incarnation,
    /// Hash of the agent's public key.
    pub key: Sha256,
    /// Where the agent serves `Round`, `host:port`, most preferred first.
    pub round_addresses: Vec<String>,
    /// Where the agent serves bytes, `host:port`, most preferred first.
    pub byte_addresses: Vec<String>,
}

/// A replica of a membership; messages name it by its index in [`Membership::replicas`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Replica {
    /// Index of its pool in [`Membership::pools`].
    pub pool: u32,
    /// Name inside the pool.
    pub name: String,
    /// Its ranks in order; the first is the head.
    pub ranks: Vec<MemberId>,
}

impl Replica {
    /// The member whose agent decides for this replica.
    #[must_use]
    pub fn head(&self) -> MemberId {
        self.ranks[0] // M2: a replica exists by its ranks, and they begin with 0
    }
}

/// What is left of a version when all who held it are gone: its run and step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VersionFloor {
    /// Its run.
    pub run: u64,
    /// Its step.
    pub step: i64,
}

/// An accepted or offered membership. Always valid: the fields are private and reading it checks them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Fields", into = "Fields")]
pub struct Membership {
    fields: Fields,
    digest: Sha256,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Fields {
    refit_uid: String,
    epoch: Epoch,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    floor: Option<VersionFloor>,
    pools: Vec<String>,
    leader: MemberId,
    members: Vec<Member>,
}

impl Membership {
    /// Puts `members` into canonical order and checks them. `pools` are all pools of the resource, in its order;
    /// a pool may have no replica.
    ///
    /// # Errors
    /// A [`MembershipError`] that names the seat or field.
    pub fn new(
        refit_uid: impl Into<String>,
        epoch: Epoch,
        floor: Option<VersionFloor>,
        pools: Vec<String>,
        mut members: Vec<Member>,
    ) -> Result<Self, MembershipError> {
        let order = pool_order(&pools)?;
        members.sort_by_cached_key(|member| sort_key(&order, &member.seat));
        let fields =
            Fields { refit_uid: refit_uid.into(), epoch, floor, pools, leader: MemberId(0), members };
        Self::try_from(fields)
    }

    /// UID of the WeightRefit.
    #[must_use]
    pub fn refit_uid(&self) -> &str {
        &self.fields.refit_uid
    }

    /// Number of this membership.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.fields.epoch
    }

    /// Largest version that the coordinator has heard of, outside the digest: a leader that finds nobody who
    /// remembers more goes on above it.
    #[must_use]
    pub fn floor(&self) -> Option<VersionFloor> {
        self.fields.floor
    }

    /// All pools of the resource, in its order.
    #[must_use]
    pub fn pools(&self) -> &[String] {
        &self.fields.pools
    }

    /// The member that leads (M3).
    #[must_use]
    pub fn leader(&self) -> MemberId {
        self.fields.leader
    }

    /// In canonical order (M1); a [`MemberId`] is an index.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.fields.members
    }

    /// The member of this index.
    #[must_use]
    pub fn member(&self, id: MemberId) -> Option<&Member> {
        self.fields.members.get(usize::try_from(id.0).ok()?)
    }

    /// Members with their indices.
    pub fn iter(&self) -> impl Iterator<Item = (MemberId, &Member)> {
        (0..).map(MemberId).zip(&self.fields.members)
    }

    /// Training ranks, in order; empty where the trainer is gone.
    #[must_use]
    pub fn training(&self) -> Vec<MemberId> {
        let is_training = |member: &Member| matches!(member.seat, Seat::Training { .. });
        self.iter().filter(|(_, member)| is_training(member)).map(|(id, _)| id).collect()
    }

    /// Replicas in canonical order.
    #[must_use]
    pub fn replicas(&self) -> Vec<Replica> {
        let mut out: Vec<Replica> = Vec::new();
        for (id, member) in self.iter() {
            let Seat::Inference { pool, replica, .. } = &member.seat else { continue };
            let pool = self.fields.pools.iter().position(|name| name == pool).unwrap_or(usize::MAX);
            let pool = u32::try_from(pool).unwrap_or(u32::MAX);
            match out.last_mut() {
                Some(last) if last.pool == pool && last.name == *replica => last.ranks.push(id),
                _ => out.push(Replica { pool, name: replica.clone(), ranks: vec![id] }),
            }
        }
        out
    }

    /// Digest of agreement (M4). It is sha256 over, with integers little-endian and a text as its u32 length in
    /// bytes and its bytes: text `weightrefit.membership/v1`; text refit UID; u32 leader; u32 number of members;
    /// per member u8 side (0 training, 1 inference), text pool and text replica (both empty for training),
    /// u32 rank, text pod UID, 16 bytes incarnation, 32 bytes key hash, u32 number of round addresses and each
    /// as text, u32 number of byte addresses and each as text.
    #[must_use]
    pub fn digest(&self) -> Sha256 {
        self.digest
    }
}

impl From<Membership> for Fields {
    fn from(membership: Membership) -> Self {
        membership.fields
    }
}

impl TryFrom<Fields> for Membership {
    type Error = MembershipError;
    fn try_from(fields: Fields) -> Result<Self, MembershipError> {
        check_sizes(&fields)?;
        let order = pool_order(&fields.pools)?;
        for member in &fields.members {
            if let Seat::Inference { pool, .. } = &member.seat
                && !order.contains_key(pool.as_str())
            {
                return Err(MembershipError::UnknownPool { seat: member.seat.clone() });
            }
        }
        check_order(&order, &fields.members)?;
        check_ranks(&fields.members)?;
        check_agents(&fields.members)?;
        if fields.leader != MemberId(0) {
            return Err(MembershipError::Leader { leader: fields.leader });
        }
        let digest = digest::membership_digest(&fields.refit_uid, fields.leader, &fields.members);
        Ok(Self { fields, digest })
    }
}

type PoolOrder<'a> = BTreeMap<&'a str, usize>;

fn pool_order(pools: &[String]) -> Result<PoolOrder<'_>, MembershipError> {
    let mut order = BTreeMap::new();
    for (at, pool) in pools.iter().enumerate() {
        if order.insert(pool.as_str(), at).is_some() {
            return Err(MembershipError::DuplicatePool { pool: pool.clone() });
        }
    }
    Ok(order)
}

/// Unknown pools sort last and are refused afterwards.
fn sort_key(order: &PoolOrder<'_>, seat: &Seat) -> (usize, String, Rank) {
    match seat {
        Seat::Training { rank } => (0, String::new(), *rank),
        Seat::Inference { pool, replica, rank } => {
            let pool = order.get(pool.as_str()).map_or(usize::MAX, |at| at + 1);
            (pool, replica.clone(), *rank)
        }
    }
}

fn check_sizes(fields: &Fields) -> Result<(), MembershipError> {
    let members = fields.members.len();
    if members == 0 || members > limits::MEMBERS_MAX {
        return Err(MembershipError::Size { members });
    }
    if fields.pools.len() > limits::POOLS_MAX {
        return Err(MembershipError::Pools { pools: fields.pools.len() });
    }
    check_text("refit UID", &fields.refit_uid)?;
    fields.pools.iter().try_for_each(|pool| check_text("pool", pool))?;
    fields.members.iter().try_for_each(check_member)
}

/// What each member must keep to, whoever else there is.
fn check_member(member: &Member) -> Result<(), MembershipError> {
    check_text("pod UID", &member.pod_uid)?;
    if let Seat::Inference { replica, .. } = &member.seat {
        check_text("replica", replica)?;
    }
    for addresses in [&member.round_addresses, &member.byte_addresses] {
        let count = addresses.len();
        if count == 0 || count > limits::ADDRESSES_MAX {
            return Err(MembershipError::Addresses { seat: member.seat.clone(), count });
        }
        addresses.iter().try_for_each(|address| check_text("address", address))?;
    }
    Ok(())
}

fn check_text(field: &'static str, text: &str) -> Result<(), MembershipError> {
    match text.len() {
        0 => Err(MembershipError::Text { field, bytes: 0 }),
        bytes if bytes > limits::NAME_BYTES_MAX => Err(MembershipError::Text { field, bytes }),
        _ => Ok(()),
    }
}

fn check_order(order: &PoolOrder<'_>, members: &[Member]) -> Result<(), MembershipError> {
    for pair in members.windows(2) {
        match sort_key(order, &pair[0].seat).cmp(&sort_key(order, &pair[1].seat)) {
            std::cmp::Ordering::Less => {}
            std::cmp::Ordering::Equal => {
                return Err(MembershipError::DuplicateRank { seat: pair[1].seat.clone() });
            }
            std::cmp::Ordering::Greater => return Err(MembershipError::Order { seat: pair[1].seat.clone() }),
        }
    }
    Ok(())
}

fn check_ranks(members: &[Member]) -> Result<(), MembershipError> {
    let mut sizes = BTreeMap::<(Option<&str>, &str), u32>::new();
    for member in members {
        let (side, rank) = match &member.seat {
            Seat::Training { rank } => ((None, ""), *rank),
            Seat::Inference { pool, replica, rank } => ((Some(pool.as_str()), replica.as_str()), *rank),
        };
        let next = sizes.entry(side).or_default();
        if rank.0 != *next {
            return Err(MembershipError::RankGap { seat: member.seat.clone(), missing: Rank(*next) });
        }
        *next += 1;
    }
    let mut pools = BTreeMap::<&str, (u32, &str)>::new();
    for ((pool, replica), ranks) in sizes {
        let Some(pool) = pool else { continue };
        let &mut (expected, _) = pools.entry(pool).or_insert((ranks, replica));
        if expected != ranks {
            let (pool, replica) = (pool.to_owned(), replica.to_owned());
            return Err(MembershipError::ReplicaSize { pool, replica, ranks, expected });
        }
    }
    Ok(())
}

fn check_agents(members: &[Member]) -> Result<(), MembershipError> {
    let mut agents = BTreeMap::<Incarnation, &Member>::new();
    for member in members {
        let first = agents.entry(member.incarnation).or_insert(member);
        let same = first.pod_uid == member.pod_uid
            && first.key == member.key
            && first.round_addresses == member.round_addresses
            && first.byte_addresses == member.byte_addresses;
        if !same {
            return Err(MembershipError::Agent { seat: member.seat.clone(), other: first.seat.clone() });
        }
    }
    Ok(())
}

/// A membership that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "fields are named by the message")]
pub enum MembershipError {
    /// Ranks of a side or replica must be `0..n`.
    #[error("rank {missing} is missing before {seat}")]
    RankGap { seat: Seat, missing: Rank },
    /// Two members with one seat.
    #[error("two members claim {seat}")]
    DuplicateRank { seat: Seat },
    /// Members are not in canonical order.
    #[error("{seat} is out of order")]
    Order { seat: Seat },
    /// Replicas of a pool share one layout, hence one size.
    #[error("replica `{replica}` of pool `{pool}` has {ranks} ranks, its pool has {expected}")]
    ReplicaSize { pool: String, replica: String, ranks: u32, expected: u32 },
    /// A pool is listed twice.
    #[error("pool `{pool}` is listed twice")]
    DuplicatePool { pool: String },
    /// A member's pool is not listed.
    #[error("the pool of {seat} is not one of the refit")]
    UnknownPool { seat: Seat },
    /// One incarnation is one agent.
    #[error("{seat} and {other} share an incarnation, but not pod, key and addresses")]
    Agent { seat: Seat, other: Seat },
    /// The leader is the first member.
    #[error("member {leader} is named as leader, member 0 leads")]
    Leader { leader: MemberId },
    /// No members, or too many.
    #[error("{members} members, where 1 to {} are possible", limits::MEMBERS_MAX)]
    Size { members: usize },
    /// Too many pools.
    #[error("{pools} pools, where at most {} are possible", limits::POOLS_MAX)]
    Pools { pools: usize },
    /// A member must be reachable.
    #[error("{seat} has {count} addresses, where 1 to {} are possible", limits::ADDRESSES_MAX)]
    Addresses { seat: Seat, count: usize },
    /// Names are bounded.
    #[error("{field} of {bytes} bytes, where 1 to {} are possible", limits::NAME_BYTES_MAX)]
    Text { field: &'static str, bytes: usize },
}

impl MembershipError {
    /// The stable code under which this surfaces.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::RankGap { .. } | Self::ReplicaSize { .. } => Code::RankGap,
            Self::DuplicateRank { .. } => Code::DuplicateRank,
            Self::Agent { .. } => Code::Unauthenticated,
            Self::Order { .. }
            | Self::DuplicatePool { .. }
            | Self::UnknownPool { .. }
            | Self::Leader { .. }
            | Self::Size { .. }
            | Self::Pools { .. }
            | Self::Addresses { .. }
            | Self::Text { .. } => Code::Unsupported,
        }
    }
}
