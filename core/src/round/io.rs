//! What the agent feeds to its `Node` and what the `Node` asks of the agent:
//! `Node::new(incarnation, seats: Vec<Seat>)`,
//! `configure(now, Arc<Membership>, Arc<Topology>, &mut Vec<Effect>) -> Result<Acceptance, ConfigureError>`,
//! `handle(now, Input, &mut Vec<Effect>)`, `next_deadline() -> Option<u64>`; getters `membership()`, `topology()`,
//! `member_of(Slot)`, `slot_of(MemberId)`; and `admit(&Header, peer_key) -> Result<(), Code>` for the header of a
//! byte connection.
//!
//! The agent hosts one or more ranks of one refit, each in a [`Slot`]. It does the IO; the machines decide.
//! `now` is a monotonic clock in milliseconds that only this process knows.
//!
//! Duties of the driver:
//! - D1: the effects of one call are done in their order, before the next call.
//! - D2: every effect that names its answer gets exactly that answer, once, unless the client is gone
//!   (`ClientGone` then stands for all answers that it still owes).
//! - D3: frames of one client keep their order; an answer of an older connection is never fed after
//!   `ClientGone`.
//! - D4: `ClientGone` of an engine is fed after its socket is closed, since EOF is the agent's promise.

use super::message::{Blame, ClassSums, EngineRecord, Header, Message, RoundKey, StagingTag, Version};
use crate::code::Code;
use crate::id::{Epoch, Incarnation, MemberId, Sha256};
use std::fmt;
use std::sync::Arc;

/// Index of a rank that this agent hosts, in the order of the seats given to `Node::new`. Unlike a `MemberId`
/// it stays the same over all memberships.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An event, already authenticated as far as the transport can: `peer_key` is the hash of the public key that
/// the connection proved.
#[expect(missing_docs, reason = "fields are named by the vocabulary and explained at their variant")]
#[expect(clippy::large_enum_variant, reason = "messages are most inputs, and one lives at a time")]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Input {
    /// Time passed; deadlines are looked at before every other input anyway.
    Tick,
    /// A message of another member.
    Message {
        header: Header,
        peer_key: Sha256,
        message: Message,
    },
    /// The connection to this member's agent is lost (closed, or silent for the heartbeat limit). It concerns
    /// all members of that agent.
    PeerLost {
        member: MemberId,
    },
    /// The connection to this member's agent is there (again): what it still owes an answer is sent again.
    PeerFound {
        member: MemberId,
    },

    // From the agent socket.
    /// An engine client registered: its hello's record, and the digest of the layout that its tensors fit.
    EngineConnected {
        slot: Slot,
        record: EngineRecord,
        layout: Sha256,
    },
    /// A trainer client registered.
    TrainerConnected {
        slot: Slot,
        instance: Incarnation,
    },
    /// The client's connection ended.
    ClientGone {
        slot: Slot,
        instance: Incarnation,
    },
    /// `publish`: the rank's step is stable in memory. Answered, maybe much later, by `Released` or
    /// `RefusePublish`; a client that reconnects may repeat it.
    Publish {
        slot: Slot,
        step: i64,
        world: Arc<str>,
    },
    /// Answers of the engine client.
    Paused {
        slot: Slot,
        round: RoundKey,
        record: EngineRecord,
    },
    Committed {
        slot: Slot,
        round: RoundKey,
        record: EngineRecord,
    },
    Resumed {
        slot: Slot,
        round: RoundKey,
        record: EngineRecord,
    },
    /// After `abort`: a quiet engine serves on with what it had, any other stays as it is.
    Aborted {
        slot: Slot,
        round: RoundKey,
        record: EngineRecord,
    },
    /// Could not, or will not, do what was asked.
    Failed {
        slot: Slot,
        round: RoundKey,
        record: EngineRecord,
    },

    // From the data plane.
    /// Answers to `OpenStaging`.
    StagingReady {
        slot: Slot,
        round: RoundKey,
    },
    StagingFailed {
        slot: Slot,
        round: RoundKey,
        code: Code,
    },
    /// All bytes of the rank arrived and its receivers are over.
    Received {
        slot: Slot,
        round: RoundKey,
        bytes: u64,
        skipped: u64,
    },
    /// Staging is sealed and digested.
    Digested {
        slot: Slot,
        round: RoundKey,
        sums: ClassSums,
    },
    /// A receiver or sender failed; `JoinReceivers` or `JoinSenders` follows.
    TransferFailed {
        slot: Slot,
        round: RoundKey,
        replica: u32,
        code: Code,
        peer: Option<MemberId>,
    },
    /// The tasks are over, not asked to stop.
    ReceiversJoined {
        slot: Slot,
        round: RoundKey,
    },
    SendersJoined {
        slot: Slot,
        round: RoundKey,
        replica: u32,
    },
    /// A source's senders for one replica are done, acknowledged and over.
    Sent {
        slot: Slot,
        round: RoundKey,
        replica: u32,
        bytes: u64,
    },
    /// The published buffer is digested; nothing reads it any more for that.
    PublicationDigested {
        slot: Slot,
        step: i64,
        epoch: Epoch,
        sums: ClassSums,
    },

    // From operator and user.
    /// Leader: end the round in progress, if it can still be.
    Cancel,
    /// Leader: the refit is paused (`spec.paused`) or goes on.
    SetPaused {
        paused: bool,
    },
    /// Leave: end rounds as a member that leaves them would; ends in `Event::Drained`.
    Drain,
}

/// What the agent must do. Effects of one call are done in order.
#[expect(missing_docs, reason = "fields are named by the vocabulary and explained at their variant")]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Effect {
    /// To a member in another agent (a member of this agent is answered inside the `Node`). May be lost with
    /// its connection; the machines repeat what matters.
    Send {
        header: Header,
        message: Message,
    },

    // Data plane. Older rounds of the slot are over when `OpenStaging` is given.
    /// Make (or reuse) staging for the rank; answered by `StagingReady` or `StagingFailed`.
    OpenStaging {
        slot: Slot,
        round: RoundKey,
    },
    /// Dial the rank's sources and receive its boxes; answered by `Received` or `TransferFailed`, unless
    /// `JoinReceivers` comes first.
    StartReceive {
        slot: Slot,
        round: RoundKey,
    },
    /// Serve dialling destinations of these replicas from the publication; answered per replica by `Sent` or
    /// `TransferFailed`, unless `JoinSenders` comes first.
    AllowSend {
        slot: Slot,
        round: RoundKey,
        replicas: Vec<u32>,
    },
    /// Stop and join receivers and digest of the slot, and let none start for that round any more; answered by
    /// `ReceiversJoined`, at once when there are none.
    JoinReceivers {
        slot: Slot,
        round: RoundKey,
    },
    /// The same for the slot's senders to one replica; answered by `SendersJoined`.
    JoinSenders {
        slot: Slot,
        round: RoundKey,
        replica: u32,
    },
    /// Seal staging and digest it per class (no sums with verification disabled); answered by `Digested`,
    /// unless `JoinReceivers` comes first.
    Digest {
        slot: Slot,
        round: RoundKey,
    },
    /// What staging holds is worth nothing; the memory may be kept for the next round.
    DropStaging {
        slot: Slot,
    },
    /// Digest the published buffer per class; always answered by `PublicationDigested`.
    DigestPublication {
        slot: Slot,
        step: i64,
        epoch: Epoch,
    },

    // Agent socket.
    /// `pause{round, version, writes: none}`; answered by `Paused` or `Failed`.
    Pause {
        slot: Slot,
        round: RoundKey,
        version: Version,
    },
    /// `commit{round, version, copy: client}`; answered by `Committed` or `Failed`.
    Commit {
        slot: Slot,
        round: RoundKey,
        version: Version,
    },
    /// `resume{round, version}`; answered by `Resumed` or `Failed`.
    Resume {
        slot: Slot,
        round: RoundKey,
        version: Version,
    },
    /// `abort{round}`: a quiet engine serves on. Also how the engine is asked for its record in a new epoch.
    /// Answered by `Aborted`.
    AbortClient {
        slot: Slot,
        round: RoundKey,
    },
    /// `released{step, outcome}`: nothing reads the buffer any more, it is the trainer's again. A client of
    /// another world is not meant: then, and without a client, the memory is only let go.
    Released {
        slot: Slot,
        step: i64,
        world: Arc<str>,
        outcome: ReleaseOutcome,
    },
    /// The publish cannot be taken; the buffer was never offered.
    RefusePublish {
        slot: Slot,
        step: i64,
        code: Code,
    },

    // Observation.
    Event(Event),
}

/// How a publication ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReleaseOutcome {
    /// A round read it.
    Read,
    /// Superseded or skewed, never read.
    Dropped,
    /// No leader asked for it in time, or the agent leaves.
    Withdrawn,
}

/// Something that metrics, logs, status and drivers want to know.
#[expect(missing_docs, reason = "fields are named by the vocabulary and explained at their variant")]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// A configure took effect; all messages and `MemberId`s are now of this membership.
    Configured { epoch: Epoch, membership: Sha256 },
    /// `Drain` is done: no round, no reader, no writer is left here.
    Drained,
    /// Leader: a phase began (for progress and phase seconds).
    Phase { round: RoundKey, phase: Phase },
    /// Leader: the round ended.
    RoundEnded(Box<RoundSummary>),
    /// Leader: a complete publication was accepted under this version (its `sum` is zero).
    Accepted { version: Version },
    /// Leader: a publication was refused.
    PublishRefused { step: i64, code: Code, member: Option<MemberId> },
    /// A rank's record or staging changed (readiness, status). `record` is `None` without a client.
    Record { slot: Slot, record: Option<EngineRecord>, staging: Option<StagingTag> },
    /// A source's publication as it is held now; `None` when free.
    Publication { slot: Slot, step: Option<i64> },
    /// Head: a replica of this agent is settled in this epoch, or held until a full refit.
    Settled { replica: u32, held: bool },
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
    /// All Applied to all Resumed.
    Resume,
}

/// How a round ended, as its leader knows it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RoundSummary {
    /// Which round.
    pub round: RoundKey,
    /// Which weights (`sum` is zero here).
    pub version: Version,
    /// True when at least one replica committed.
    pub committed: bool,
    /// First reason, when none did.
    pub blame: Option<Blame>,
    /// Per replica of the round (index into the membership's replica list): how it ended and why.
    pub replicas: Vec<(u32, ReplicaEnd)>,
    /// Milliseconds per phase that ran; the slowest replica's for those that replicas run by themselves.
    pub phases: Vec<(Phase, u64)>,
    /// Bytes that sources sent.
    pub sent: u64,
    /// Bytes accepted by destinations.
    pub received: u64,
    /// Bytes of the plan that needed not move.
    pub skipped: u64,
}

/// How a replica's part of a round ended, as the leader knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "fields are explained at their variant")]
pub enum ReplicaEnd {
    /// All ranks applied this version; `serving` once all have resumed (else `ResumeTimeout`: fenced).
    Committed { version: Version, serving: bool },
    /// Serves what it served.
    NotCommitted(Blame),
    /// Paused until recovery or a full refit.
    Held(Blame),
    /// Never authorised.
    Aborted(Blame),
    /// Authorised, no outcome in time.
    Unknown(Blame),
}
