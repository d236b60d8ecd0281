//! What members of a refit say to each other (protocol page §4). Every request may be repeated; order between
//! two connections is not assumed.

use crate::code::Code;
pub use crate::id::ContentSum;
use crate::id::{Epoch, Incarnation, MemberId, RoundId, Sha256};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Which weights: `(run, step)` for people, `origin` and `sum` make it unique. Ordered by `(run, step, origin)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Version {
    /// Grows when a trainer starts again from an older step.
    pub run: u64,
    /// The trainer's step.
    pub step: i64,
    /// Epoch in which the leader accepted the publication.
    pub origin: Epoch,
    /// Digest of one pool's table; zero between trainer and pools and where verification is disabled.
    pub sum: ContentSum,
}

impl Version {
    /// All but `sum`, in order of significance: what trainer and pools have in common, and how versions are
    /// ordered.
    #[must_use]
    pub fn name(&self) -> (u64, i64, Epoch) {
        (self.run, self.step, self.origin)
    }
}

/// Rounds are ordered by `(epoch, round)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct RoundKey {
    /// Epoch that the round belongs to.
    pub epoch: Epoch,
    /// Number inside the epoch.
    pub round: RoundId,
}

/// Durations of a round's phases in milliseconds; messages carry durations, never times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Timeouts {
    /// First to last rank that publishes one step.
    pub publish_ms: u64,
    /// Propose to Prepared.
    pub prepare_ms: u64,
    /// Pause to Paused.
    pub pause_ms: u64,
    /// Transfer to the last byte.
    pub transfer_ms: u64,
    /// Last byte to digests compared.
    pub verify_ms: u64,
    /// Apply to Applied, cache reset included.
    pub commit_ms: u64,
    /// Resume to Resumed.
    pub resume_ms: u64,
    /// The whole round.
    pub total_ms: u64,
}

/// What an engine client says of its rank (lives and dies with the tensors).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EngineRecord {
    /// Process instance of the engine.
    pub instance: Incarnation,
    /// The version that the live tensors hold entirely, if they do.
    pub live: Option<Version>,
    /// State of the rank.
    pub state: EngineState,
    /// Highest round that the client has seen.
    pub round: RoundKey,
}

/// State of an engine rank (protocol page §7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EngineState {
    /// Just started; gated, serves nothing.
    Cold,
    /// Serves `live`.
    Serving,
    /// Stopped at a step boundary; `live` is intact.
    Quiet,
    /// New version written entirely, not yet serving.
    Applied,
    /// Live tensors may be half written.
    Dirty,
}

/// Staging that an agent holds for a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StagingTag {
    /// What was staged.
    pub version: Version,
    /// All bytes arrived, receivers joined, digested.
    pub sealed: bool,
    /// The leader authorised it.
    pub authorised: bool,
}

/// What a training rank offers.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PublicationTag {
    /// The step published.
    pub step: i64,
    /// Token that all ranks of one trainer start share.
    pub world: Arc<str>,
}

/// A member's account of its rank, asked from the client, not from memory.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Report {
    /// Inference: the engine's record; `None` while no client is connected.
    pub engine: Option<EngineRecord>,
    /// Inference: staging held.
    pub staging: Option<StagingTag>,
    /// Training: outstanding publication.
    pub publication: Option<PublicationTag>,
}

/// Sum over one class of elements (see the digest module): `(class index, sum)`, ascending.
pub type ClassSums = Arc<Vec<(u32, ContentSum)>>;

/// Identity that every message carries; checked against the accepted membership before anything else.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Header {
    /// UID of the WeightRefit.
    pub refit_uid: Arc<str>,
    /// Epoch of the sender's accepted membership.
    pub epoch: Epoch,
    /// Digest of that membership.
    pub membership: Sha256,
    /// Incarnation of the sending agent.
    pub from_incarnation: Incarnation,
    /// Incarnation that the sender believes the receiver to have.
    pub to_incarnation: Incarnation,
    /// Sending member.
    pub from: MemberId,
    /// Receiving member.
    pub to: MemberId,
}

/// Why a replica or round ended without a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Blame {
    /// The reason.
    pub code: Code,
    /// The member it concerns, where one is to blame.
    pub member: Option<MemberId>,
}

/// One message between two members.
#[expect(missing_docs, reason = "fields are named by the vocabulary and explained at their variant")]
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Message {
    // Leader to participants.
    /// Opens a round. `replicas` index the membership's replica list; `sources` are the training members used;
    /// `world` and the version's step name the publication that they must hold.
    Propose {
        round: RoundId,
        version: Version,
        world: Arc<str>,
        replicas: Vec<u32>,
        sources: Vec<MemberId>,
        plan: Sha256,
        timeouts: Timeouts,
    },
    /// All participants prepared the same plan: bytes may move.
    Transfer { round: RoundId },
    /// Gives up on `replicas` (all of the round's when it ends); never for a replica already authorised.
    Abort { round: RoundId, replicas: Vec<u32>, blame: Blame },
    /// To a head: commit this version (its `sum` set). Irrevocable.
    Authorise { round: RoundId, version: Version },
    /// To a source: no open round uses this publication and none will be opened on it.
    Release { step: i64, world: Arc<str>, up_to: RoundKey },
    /// From the leader, or from a head to its ranks: say again how you stand. A rank answers its head with
    /// `Reported`; a head answers the leader with its `Outcome` or `Settled`, a source with `Published`, and
    /// whoever has nothing else to say with `Reported`.
    Query {},

    // Participants to the leader.
    /// Ready: no receiver or sender of an older round exists here. `pairs` = digests per peer, ascending.
    Prepared { round: RoundId, plan: Sha256, pairs: Vec<(MemberId, Sha256)>, report: Report },
    /// Not ready.
    Refused { round: RoundId, code: Code, retryable: bool, report: Report },
    /// All bytes of the rank arrived, receivers joined, memory sealed and digested in `digest_ms`.
    Landed { round: RoundId, received: u64, skipped: u64, digest_ms: u64, sums: ClassSums },
    /// A source's senders of the round are done and joined for one replica.
    Sent { round: RoundId, replica: u32, bytes: u64 },
    /// The transfer failed at this member.
    TransferFailed { round: RoundId, replica: u32, blame: Blame },
    /// A training rank offers a step, digested.
    Published { step: i64, world: Arc<str>, sums: ClassSums },
    /// Head: how the replica's part of the round ended. `pause_ms` and `commit_ms` are as the head saw them.
    Outcome {
        round: RoundId,
        result: OutcomeKind,
        blame: Option<Blame>,
        pause_ms: u64,
        commit_ms: u64,
        records: Vec<Option<EngineRecord>>,
    },
    /// Head: nothing of `round` or of an older one can still change the replica; round 0 is recovery. Unless
    /// `held`, all its ranks serve one version. `records` are in order of rank.
    Settled { round: RoundId, held: bool, records: Vec<Option<EngineRecord>> },
    /// A rank's account: pushed to its head in a new epoch, and the answer to `Query`.
    Reported { report: Report },

    // Head to the ranks of its replica.
    /// Stop at a step boundary; the version is the authorised one.
    Pause { round: RoundId, version: Version },
    /// All ranks are paused: copy staging to live tensors.
    Apply { round: RoundId },
    /// All ranks have applied `version` (or never left it): serve.
    Resume { round: RoundId, version: Version },
    /// The head gave up before any Apply.
    GiveUp { round: RoundId, blame: Blame },

    // Ranks to their head.
    /// The engine is quiet.
    Paused { round: RoundId, instance: Incarnation },
    /// The engine holds `version` entirely.
    Applied { round: RoundId, version: Version, instance: Incarnation },
    /// The engine serves again.
    Resumed { round: RoundId },
    /// The engine failed or is gone.
    Failed { round: RoundId, code: Code, record: Option<EngineRecord> },
}

/// How a replica's part of a round ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum OutcomeKind {
    /// All ranks applied.
    Committed,
    /// Nothing was applied; the replica serves what it served.
    NotCommitted,
    /// Paused, waiting for recovery or a full refit.
    Held,
}
