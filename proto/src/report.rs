//! How a round ended, as JSON: what the leader tells the coordinator and its drivers, and what
//! `weightrefit local -o json` prints of each round.

use serde::{Deserialize, Serialize};
use weightrefit_core::code::Code;

/// One round.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RoundReport {
    /// Number inside the epoch.
    pub id: u64,
    /// Epoch of the membership.
    pub epoch: u64,
    /// What was to be committed.
    pub version: VersionReport,
    /// Committed when at least one replica did.
    pub outcome: RoundOutcome,
    /// First reason, when none did.
    pub reason: Option<Code>,
    /// The member to blame, as its seat (`training/0`), where one is.
    pub member: Option<String>,
    /// Milliseconds of the phases that ran.
    pub phase_milliseconds: PhaseMilliseconds,
    /// Bytes; received and skipped together are what was planned.
    pub bytes: RoundBytes,
    /// In the membership's order.
    pub replicas: Vec<ReplicaReport>,
}

/// A version, as people name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct VersionReport {
    /// Grows when a trainer starts again from an older step.
    pub run: u64,
    /// The trainer's step.
    pub step: i64,
}

/// How a round ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RoundOutcome {
    /// At least one replica serves the version.
    Committed,
    /// None does.
    Aborted,
}

/// Milliseconds per phase; absent phases did not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "named by the phases of the vocabulary")]
pub struct PhaseMilliseconds {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prepare: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfer: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verify: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume: Option<u64>,
}

/// Bytes of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RoundBytes {
    /// By sources.
    pub sent: u64,
    /// By destinations.
    pub received: u64,
    /// Needed not move.
    pub skipped: u64,
}

/// A replica's part of a round.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaReport {
    /// Its pool.
    pub pool: String,
    /// Its name in the pool.
    pub replica: String,
    /// How it ended.
    pub outcome: ReplicaOutcome,
    /// Why, when it did not commit, or committed and does not serve.
    pub reason: Option<Code>,
    /// The member to blame, as its seat.
    pub member: Option<String>,
}

/// How a replica's part of a round ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReplicaOutcome {
    /// All its ranks hold the version.
    Committed,
    /// It serves what it served.
    NotCommitted,
    /// Paused until recovery or a full refit.
    Held,
    /// It was never authorised.
    Aborted,
    /// Authorised, and nothing heard in time.
    Unknown,
}
