//! What the agent feeds to its `Node` and what the `Node` asks of the agent.
//!
//! The agent hosts one or more ranks of one refit. It does the IO; the machines decide. `now` is a monotonic
//! clock in milliseconds that only this process knows.

use super::message::{ClassSums, EngineRecord, Header, Message, RoundKey, StagingTag, Version};
use crate::code::Code;
use crate::id::{Incarnation, MemberId, Sha256};

/// An event, already authenticated as far as the transport can: `peer_key` is the hash of the public key that
/// the connection proved.
#[expect(missing_docs, reason = "fields are named by the vocabulary and explained at their variant")]
#[expect(clippy::large_enum_variant, reason = "handled one at a time and never stored in numbers")]
#[derive(Debug, Clone)]
pub enum Input {
    /// Time passed; deadlines are looked at before every other input anyway.
    Tick,
    /// A message of another member.
    Message {
        header: Header,
        peer_key: Sha256,
        message: Message,
    },
    /// The connection to this member's agent is lost (closed, or silent for the heartbeat limit).
    PeerLost {
        member: MemberId,
    },

    // From the agent socket. `member` is the rank that the client owns.
    /// An engine client registered (hello with its record, tensors checked against the layout).
    EngineConnected {
        member: MemberId,
        record: EngineRecord,
    },
    /// A trainer client registered.
    TrainerConnected {
        member: MemberId,
        instance: Incarnation,
    },
    /// The client's connection ended.
    ClientGone {
        member: MemberId,
        instance: Incarnation,
    },
    /// `publish`: the rank's step is stable in memory.
    Publish {
        member: MemberId,
        step: i64,
        world: String,
    },
    /// Answers of the engine client.
    Paused {
        member: MemberId,
        round: RoundKey,
        record: EngineRecord,
    },
    Committed {
        member: MemberId,
        round: RoundKey,
        record: EngineRecord,
    },
    Resumed {
        member: MemberId,
        round: RoundKey,
        record: EngineRecord,
    },
    /// After `Abort`: serves on with what it had.
    Aborted {
        member: MemberId,
        round: RoundKey,
        record: EngineRecord,
    },
    Failed {
        member: MemberId,
        round: RoundKey,
        record: EngineRecord,
    },

    // From the data plane.
    /// All bytes of the rank arrived and its receivers are over.
    Received {
        member: MemberId,
        round: RoundKey,
        bytes: u64,
        skipped: u64,
    },
    /// Staging is sealed and digested.
    Digested {
        member: MemberId,
        round: RoundKey,
        sums: ClassSums,
    },
    /// A receiver or sender failed; the others of that rank and round are being stopped.
    TransferFailed {
        member: MemberId,
        round: RoundKey,
        replica: u32,
        code: Code,
        peer: Option<MemberId>,
    },
    /// Answer to `JoinReceivers` / `JoinSenders`: the tasks are over, not asked to stop.
    ReceiversJoined {
        member: MemberId,
        round: RoundKey,
    },
    SendersJoined {
        member: MemberId,
        round: RoundKey,
    },
    /// A source's senders for one replica are done and acknowledged.
    Sent {
        member: MemberId,
        round: RoundKey,
        replica: u32,
        bytes: u64,
    },
    /// The published buffer is digested.
    PublicationDigested {
        member: MemberId,
        step: i64,
        sums: ClassSums,
    },

    // From operator and user.
    /// Cancel the round in progress, if it can still be.
    Cancel,
    /// The refit is paused (`spec.paused`) or goes on.
    SetPaused {
        paused: bool,
    },
    /// Leave: end rounds as a member leaving them would, and send nothing more than that.
    Drain,
}

/// What the agent must do. Effects of one call are done in order.
#[expect(missing_docs, reason = "fields are named by the vocabulary and explained at their variant")]
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// To a member in another agent (a member of this agent is answered inside the `Node`).
    Send {
        header: Header,
        message: Message,
    },

    // Data plane.
    /// Make (or reuse) staging for the rank; nothing of an older round lives in it any more.
    OpenStaging {
        member: MemberId,
        round: RoundKey,
        version: Version,
    },
    /// Dial the rank's sources and receive its boxes; ends in `Received` or `TransferFailed`.
    StartReceive {
        member: MemberId,
        round: RoundKey,
    },
    /// Serve dialling destinations of these replicas from the publication; ends in `Sent` per replica.
    AllowSend {
        member: MemberId,
        round: RoundKey,
        replicas: Vec<u32>,
    },
    /// Stop and join; answered by `ReceiversJoined` / `SendersJoined`, at once when there are none.
    JoinReceivers {
        member: MemberId,
        round: RoundKey,
    },
    JoinSenders {
        member: MemberId,
        round: RoundKey,
    },
    /// Seal staging and digest it; answered by `Digested`.
    Digest {
        member: MemberId,
        round: RoundKey,
    },
    DropStaging {
        member: MemberId,
    },
    /// Digest the published buffer per class; answered by `PublicationDigested`.
    DigestPublication {
        member: MemberId,
        step: i64,
    },

    // Agent socket.
    /// `pause{round, version, writes: none}`.
    Pause {
        member: MemberId,
        round: RoundKey,
        version: Version,
    },
    /// `commit{round, version, copy: client}`.
    Commit {
        member: MemberId,
        round: RoundKey,
        version: Version,
    },
    /// `resume{round, version}`; `None` opens a cold engine of serving type Always.
    Resume {
        member: MemberId,
        round: RoundKey,
        version: Option<Version>,
    },
    /// `abort{round}`: a quiet engine serves on.
    AbortClient {
        member: MemberId,
        round: RoundKey,
    },
    /// `released{step, outcome}`: the buffer is the trainer's again.
    Released {
        member: MemberId,
        step: i64,
        outcome: ReleaseOutcome,
    },

    // Observation.
    Event(Event),
}

/// How a publication ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReleaseOutcome {
    /// A round read it.
    Read,
    /// Superseded or skewed, never read.
    Dropped,
    /// No leader asked for it in time.
    Withdrawn,
}

/// Something that metrics, logs, status and drivers want to know.
#[expect(missing_docs, reason = "fields are named by the vocabulary and explained at their variant")]
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Leader: a phase began (for progress and phase seconds).
    Phase { round: RoundKey, phase: Phase },
    /// Leader: the round ended.
    RoundEnded(Box<RoundSummary>),
    /// Leader: a complete publication was accepted under this version.
    Accepted { version: Version },
    /// Leader: a publication was refused.
    PublishRefused { step: i64, code: Code, member: Option<MemberId> },
    /// Member: a rank's record changed (readiness, status).
    Record { member: MemberId, record: EngineRecord, staging: Option<StagingTag> },
    /// A message was refused before it changed anything.
    Refused { from: MemberId, code: Code },
}

/// Phases of a round, in the order of a Staged round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Propose to all Prepared.
    Prepare,
    /// Transfer to the last byte landed.
    Transfer,
    /// Last byte to digests agreed.
    Verify,
    /// Authorise to all Paused.
    Pause,
    /// Apply to all Applied.
    Commit,
    /// Resume to all Resumed.
    Resume,
}

/// How a round ended, as its leader knows it.
#[derive(Debug, Clone, PartialEq)]
pub struct RoundSummary {
    /// Which round.
    pub round: RoundKey,
    /// Which weights (`sum` is zero here).
    pub version: Version,
    /// True when at least one replica committed.
    pub committed: bool,
    /// First reason, when none did.
    pub blame: Option<super::message::Blame>,
    /// Per replica (index into the membership's replica list) of the round: how it ended and why.
    pub replicas: Vec<(u32, ReplicaEnd)>,
    /// Milliseconds per phase that ran.
    pub phases: Vec<(Phase, u64)>,
    /// Bytes that sources sent, destinations accepted, and that needed not move.
    pub sent: u64,
    /// Bytes accepted by destinations.
    pub received: u64,
    /// Bytes of the plan that needed not move.
    pub skipped: u64,
}

/// How a replica's part of a round ended, as the leader knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplicaEnd {
    /// All ranks applied this version.
    Committed(Version),
    /// Serves what it served.
    NotCommitted(super::message::Blame),
    /// Paused until recovery or a full refit.
    Held(super::message::Blame),
    /// Never authorised.
    Aborted(super::message::Blame),
    /// Authorised, no outcome in time.
    Unknown(super::message::Blame),
}
