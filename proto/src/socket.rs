//! Agent socket, protocol 1: frames between an agent and the trainer or engine processes of its pod.
//!
//! A frame is a little-endian `u32` length and one JSON object of at most [`FRAME_BYTES_MAX`] bytes; file
//! descriptors ride as `SCM_RIGHTS` on the frame's first byte. The socket's directory mode and the peer's uid
//! authenticate. `docs/agent-socket.md` has a byte-level example that a test replays.

pub mod executor;

use crate::refit::{InFlight, KvCache};
use crate::report::{RoundReport, VersionReport};
use serde::{Deserialize, Serialize};
use weightrefit_core::code::Code;
use weightrefit_core::dtype::DType;
use weightrefit_core::id::{Epoch, Incarnation, Rank, RoundId};
use weightrefit_core::layout::recording::RecordedPiece;
use weightrefit_core::round::message::{EngineRecord, RoundKey, Version};

/// Version of the frames below.
pub const PROTOCOL: u32 = 1;

/// Longest JSON object; registrations are paged below it.
pub const FRAME_BYTES_MAX: usize = 16 << 20;

/// Most descriptors on one frame: a page of a registration rarely spans more than a few memories.
pub const FRAME_FDS_MAX: usize = 64;

/// Longest extras: two scales for each of some hundred layers are about 12 KB of JSON.
pub const EXTRAS_BYTES_MAX: usize = 64 << 10;

/// From a client to its agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase", rename_all_fields = "camelCase", deny_unknown_fields)]
#[expect(missing_docs, reason = "fields are named by the vocabulary and explained at their variant")]
pub enum ClientFrame {
    /// First frame of a connection.
    Hello { protocol: u32, instance: Incarnation, role: Role },
    /// One page of the rank's tensors; `page` counts from 0 to `pages - 1`. A trainer's page brings the
    /// descriptors of the memories that it adds, in order; an engine's brings none. `staging_device` is an engine's, on
    /// its first page: the UUID of the GPU on which it wants its staging, which else is memory of the host. Its
    /// `groups` are those that the page's tensors make, in their order: all of a registration's, or none.
    Register {
        page: u32,
        pages: u32,
        memories: Vec<Memory>,
        tensors: Vec<Tensor>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        staging_device: Option<String>,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        groups: Vec<Group>,
    },
    /// Trainer: the registered memory holds `step` and stays as it is until `released`. `extras`, of rank 0 alone, go
    /// to every engine with the `commit` of this step, as they are.
    Publish {
        step: i64,
        world: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        extras: Option<String>,
    },
    /// Engine: stopped at a step boundary.
    Paused { round: RoundKey, record: EngineRecord },
    /// Engine: of the commit's groups, the one of this number, counted over all pages, is what it serves from now on.
    /// One frame each, in their order, before `committed`; nothing answers it.
    Applied { round: RoundKey, group: u32 },
    /// Engine: live tensors hold the version; caches named were emptied.
    Committed { round: RoundKey, record: EngineRecord, caches_invalidated: Vec<String> },
    /// Engine: serves.
    Resumed { round: RoundKey, record: EngineRecord },
    /// Engine: after `abort`, serves on with what it had.
    Aborted { round: RoundKey, record: EngineRecord },
    /// Engine: could not do it.
    Failed { round: RoundKey, record: EngineRecord, message: String },
    /// Driver: answer with `report` when the trainer's `step` has ended everywhere, as far as it will.
    Refit { request: u64, step: i64, timeout_ms: u64 },
    /// Driver: answer with `status`.
    Status { request: u64 },
    /// Driver: from now on tell with `event` what happens.
    Events { request: u64 },
    /// Executor: what came of an order.
    Said { said: executor::Said },
}

/// What a client is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase", deny_unknown_fields)]
#[expect(missing_docs, reason = "fields are named by the vocabulary and explained at their variant")]
pub enum Role {
    /// Owns the tensors of one training rank. `outstanding`: a publish that was not yet released.
    Trainer { rank: Rank, world: String, outstanding: Option<i64> },
    /// Owns the tensors, record, pause and resume of one inference rank.
    Engine { pool: String, replica: String, rank: Rank, record: EngineRecord },
    /// Asks for refits and watches them.
    Driver {},
    /// Moves bytes of the rank with this seat, in the rank's own process. `tables`: the form that it reads
    /// ([`executor::TABLES`]).
    Executor { seat: String, tables: u32, device: executor::Device },
}

/// One shared memory of a registration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Memory {
    /// Size in bytes; the descriptor is at least as long. Memory of the host is sealed against shrinking and growing.
    pub bytes: u64,
    /// UUID of the GPU on which it lies; absent for memory of the host. The descriptor is then that of a CUDA allocation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

/// One tensor of a registration: row-major, contiguous.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Tensor {
    /// The side's own name, as in the layout.
    pub name: String,
    /// Storage dtype.
    pub dtype: DType,
    /// Extents in elements.
    pub shape: Vec<u64>,
    /// Where it lies (trainer); absent for an engine, which copies into its live tensors itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<MemoryAt>,
    /// What of the checkpoint lies where in it, where the client recorded that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pieces: Option<Vec<RecordedPiece>>,
}

/// Tensors that an engine processes together, as those of one module: so many that follow on the page.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Group {
    /// The engine's name of it, once on a rank.
    pub name: String,
    /// What is to do beside copying.
    pub class: GroupClass,
    /// How many of the page's tensors, at least one.
    pub tensors: u32,
}

/// What an engine has to do beside copying, for a group's new content to be what it serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupClass {
    /// Nothing.
    Direct,
    /// It computes anew, in place, what derives from it.
    Derived,
    /// It makes another form of it: packed, quantised, transposed.
    Apply,
}

/// A place in a registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MemoryAt {
    /// Index over all pages of the registration.
    pub memory: u32,
    /// First byte.
    pub offset: u64,
}

/// From an agent to a client.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase", rename_all_fields = "camelCase", deny_unknown_fields)]
#[expect(missing_docs, reason = "fields are named by the vocabulary and explained at their variant")]
pub enum AgentFrame {
    /// Answer to `hello`.
    Welcome { protocol: u32, agent: Incarnation, version: String },
    /// Answer to the last page of a registration, once a membership and layout are there and fit it; to an executor,
    /// answer to its `hello`.
    Registered {},
    /// Engine: staging of the rank, read-only, on one descriptor: where each tensor's new content will be.
    /// Sent before the first `commit`, and again when it changes. On a GPU, where the engine wanted that, `device` is its
    /// UUID, and the descriptor that of a CUDA allocation.
    Staging {
        bytes: u64,
        tensors: Vec<StagedTensor>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<String>,
    },
    /// Trainer: the buffer of `step` is the trainer's again.
    Released { step: i64, outcome: ReleaseKind },
    /// Trainer: the publish of `step` was not taken; its buffer was never offered and is the trainer's.
    PublishRefused { step: i64, code: Code, message: String, hint: String },
    /// Engine: stop at a step boundary, with requests in flight as said; the agent writes nothing into live tensors.
    Pause { round: RoundKey, version: Version, writes: Writes, in_flight: InFlight },
    /// Engine: copy staging to the live tensors, empty caches as said, remember `version` as live.
    /// `extras` are what training rank 0 published beside the version.
    Commit {
        round: RoundKey,
        version: Version,
        copy: Copier,
        kv_cache: KvCache,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        extras: Option<String>,
    },
    /// Engine: serve `version`, and only if it is exactly what the live tensors hold.
    Resume { round: RoundKey, version: Version },
    /// Engine: the round is off; a quiet engine serves on.
    Abort { round: RoundKey },
    /// Driver: how the step ended, as far as it will.
    Report { request: u64, report: Box<RoundReport> },
    /// Driver: the agent's view.
    Status { request: u64, status: serde_json::Value },
    /// Driver that has asked for `events`: what happened, in order. Answers do not wait for events.
    Event { event: DriverEvent },
    /// Executor: do this.
    Order { order: executor::Order },
    /// Something was refused; the connection ends unless `request` is set.
    Error { code: Code, message: String, hint: String, request: Option<u64> },
}

/// What a driver is told as it happens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase", deny_unknown_fields)]
#[expect(missing_docs, reason = "fields are named by the vocabulary and explained at their variant")]
pub enum DriverEvent {
    /// The membership that is in effect: the first event where there is one, and again with each epoch.
    MembershipChanged { epoch: Epoch, leader: String, replicas: Vec<ReplicaReach> },
    /// The leader reaches no more all agents of the replica; `member` is the first seat that it does not reach.
    ReplicaLost { pool: String, replica: String, member: String },
    /// The leader reaches all agents of the replica, for the first time in its epoch or again.
    ReplicaFound { pool: String, replica: String },
    /// All training ranks have published a step, and it became this version.
    VersionAccepted { version: VersionReport },
    /// A round on the version begins.
    RoundOpened { epoch: Epoch, id: RoundId, version: VersionReport },
    /// A round ended.
    RoundEnded { report: Box<RoundReport> },
    /// The driver did not read: so many events, which followed the one before this, are lost.
    Missed { count: u64 },
}

/// A replica of a membership, as its leader reaches it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReplicaReach {
    /// Its pool.
    pub pool: String,
    /// Its name in the pool.
    pub replica: String,
    /// Whether the leader reaches the agents of all its ranks.
    pub reached: bool,
}

/// One tensor's place in staging.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StagedTensor {
    /// Name as registered.
    pub name: String,
    /// First byte in staging.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Who writes live tensors while paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Writes {
    /// Nobody; the engine copies at commit.
    None,
    /// The agent (in-place commit).
    Agent,
}

/// Who copies at commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Copier {
    /// The engine's client.
    Client,
    /// The agent.
    Agent,
}

/// How a publication ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReleaseKind {
    /// A round read it.
    Read,
    /// Superseded or skewed, never read.
    Dropped,
    /// No leader asked for it in time.
    Withdrawn,
}

/// A frame as bytes: length prefix and JSON.
pub fn encode<T: Serialize>(frame: &T) -> Result<Vec<u8>, FrameError> {
    let mut out = vec![0; 4];
    serde_json::to_writer(&mut out, frame).map_err(|error| FrameError::Malformed(error.to_string()))?;
    let length = out.len() - 4;
    if length > FRAME_BYTES_MAX {
        return Err(FrameError::TooLong { length: length as u64 });
    }
    let prefix = u32::try_from(length).map_err(|_| FrameError::TooLong { length: length as u64 })?;
    out[..4].copy_from_slice(&prefix.to_le_bytes());
    Ok(out)
}

/// Checks a length prefix before anything is allocated.
pub fn frame_length(prefix: [u8; 4]) -> Result<usize, FrameError> {
    let length = u32::from_le_bytes(prefix);
    match usize::try_from(length) {
        Ok(length) if length <= FRAME_BYTES_MAX => Ok(length),
        _ => Err(FrameError::TooLong { length: u64::from(length) }),
    }
}

/// Parses the JSON object of a frame.
pub fn decode<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, FrameError> {
    serde_json::from_slice(body).map_err(|error| FrameError::Malformed(error.to_string()))
}

/// A frame that cannot be sent or understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Longer than [`FRAME_BYTES_MAX`].
    #[error("frame of {length} bytes is longer than the {FRAME_BYTES_MAX} allowed")]
    TooLong {
        /// Bytes announced.
        length: u64,
    },
    /// Not the JSON of a frame.
    #[error("malformed frame: {0}")]
    Malformed(String),
}
