//! The policies of a refit: publishing, serving, commit, lag, transfer, timeouts, with their defaults.

use serde::de::{Deserializer, Error, Unexpected, Visitor};
use serde::{Deserialize, Serialize};
use std::fmt;

/// How the trainer's memory is treated while a version is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Publish {
    /// mode: default Auto.
    pub mode: PublishMode,
    /// maxHoldSeconds: how long `publish` may keep the trainer from its next step; 0 to 86,400, default 2.
    pub max_hold_seconds: i32,
}

impl Default for Publish {
    fn default() -> Self {
        Self { mode: PublishMode::Auto, max_hold_seconds: 2 }
    }
}

/// Values of [`Publish::mode`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum PublishMode {
    /// ZeroCopy where the hold allows it, else a snapshot.
    #[default]
    Auto,
    /// Bytes leave from the trainer's own tensors, which stay unchanged until released.
    ZeroCopy,
    /// A copy in device memory.
    SnapshotDevice,
    /// A copy in host memory.
    SnapshotHost,
}

/// When a replica may take requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Serving {
    /// type: default AfterFirstRefit.
    #[serde(rename = "type")]
    pub kind: ServingType,
    /// withinStaleness: the limits of the type of that name.
    pub within_staleness: Option<Staleness>,
}

/// Values of [`Serving::kind`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum ServingType {
    /// From the engine's start, with whatever weights it loaded.
    Always,
    /// Once a verified version is committed.
    #[default]
    AfterFirstRefit,
    /// While the committed version is recent enough.
    WithinStaleness,
}

/// How old a served version may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Staleness {
    /// maxStaleSteps: steps behind the newest publication; 0 to 1,000,000.
    pub max_stale_steps: Option<i32>,
    /// maxStaleSeconds: seconds behind the newest publication; 1 to 86,400.
    pub max_stale_seconds: Option<i32>,
}

/// How arrived bytes become served weights.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Commit {
    /// mode: default Auto.
    pub mode: CommitMode,
    /// stagingLocation: default Auto.
    pub staging_location: StagingLocation,
    /// inFlight: what happens to running requests; default Keep.
    pub in_flight: InFlight,
    /// kvCache: what happens to cached keys and values; default Reset.
    pub kv_cache: KvCache,
    /// onReplicaFailure: default FenceReplica.
    pub on_replica_failure: OnReplicaFailure,
    /// strategy: how many replicas change at a time; default AllAtOnce.
    pub strategy: Strategy,
}

/// Values of [`Commit::mode`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum CommitMode {
    /// Staged; InPlace only with Rolling and where staging does not fit.
    #[default]
    Auto,
    /// All bytes are verified beside the served ones before these change.
    Staged,
    /// Bytes land in the served tensors while the engine is paused.
    InPlace,
}

/// Values of [`Commit::staging_location`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum StagingLocation {
    /// Device memory where it fits, else host memory.
    #[default]
    Auto,
    /// Device memory.
    Device,
    /// Host memory.
    Host,
}

/// Values of [`Commit::in_flight`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum InFlight {
    /// They stop and go on with the new weights.
    #[default]
    Keep,
    /// They end first.
    Drain,
    /// They are aborted.
    Abort,
}

/// Values of [`Commit::kv_cache`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum KvCache {
    /// Emptied.
    #[default]
    Reset,
    /// Kept.
    Keep,
    /// Entries of older versions are no longer found.
    SaltByVersion,
}

/// Values of [`Commit::on_replica_failure`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum OnReplicaFailure {
    /// The failed replica is kept from serving, the others commit.
    #[default]
    FenceReplica,
    /// Nobody commits.
    AbortRound,
}

/// How many replicas change at a time.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Strategy {
    /// type: default AllAtOnce.
    #[serde(rename = "type")]
    pub kind: StrategyType,
    /// rolling: the limits of the type of that name.
    pub rolling: Option<Rolling>,
}

/// Values of [`Strategy::kind`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum StrategyType {
    /// All replicas in one round.
    #[default]
    AllAtOnce,
    /// A few at a time.
    Rolling,
}

/// Limits of a rolling change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Rolling {
    /// maxUnavailable: replicas of a pool that may be paused at once: a number or a percentage, rounded up.
    pub max_unavailable: IntOrString,
}

/// A number, or text such as `25%`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum IntOrString {
    /// A number.
    Int(i32),
    /// Text.
    String(String),
}

impl<'de> Deserialize<'de> for IntOrString {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl Visitor<'_> for Either {
            type Value = IntOrString;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number or a percentage")
            }
            fn visit_i64<E: Error>(self, value: i64) -> Result<IntOrString, E> {
                let number =
                    i32::try_from(value).map_err(|_| E::invalid_value(Unexpected::Signed(value), &self))?;
                Ok(IntOrString::Int(number))
            }
            fn visit_u64<E: Error>(self, value: u64) -> Result<IntOrString, E> {
                let number =
                    i32::try_from(value).map_err(|_| E::invalid_value(Unexpected::Unsigned(value), &self))?;
                Ok(IntOrString::Int(number))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<IntOrString, E> {
                Ok(IntOrString::String(text.to_owned()))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// How far replicas may stay behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Lag {
    /// maxSteps: 0 (default) is no limit, at most 1,000,000.
    pub max_steps: i32,
    /// onExceeded: default Ignore.
    pub on_exceeded: OnExceeded,
}

/// Values of [`Lag::on_exceeded`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum OnExceeded {
    /// The trainer waits in `publish`.
    BlockTrainer,
    /// The replica is kept from serving.
    FenceReplica,
    /// Only shown.
    #[default]
    Ignore,
}

/// How bytes travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Transfer {
    /// transport: default Auto.
    pub transport: Transport,
    /// encryption: default Required.
    pub encryption: Encryption,
    /// verification: default Full.
    pub verification: Verification,
    /// relay: whether replicas pass bytes on to their neighbours; default Auto.
    pub relay: Relay,
}

/// Values of [`Transfer::transport`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Transport {
    /// The fastest that both ends have and encryption allows.
    #[default]
    Auto,
    /// TCP.
    Tcp,
    /// NCCL.
    Nccl,
    /// NCCL's M2N resharding.
    NcclM2n,
}

/// Values of [`Transfer::encryption`]; control always is mutual TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Encryption {
    /// TLS everywhere.
    #[default]
    Required,
    /// TCP in TLS, NCCL in clear.
    TrustedFabric,
    /// All weight bytes in clear.
    Disabled,
}

/// Values of [`Transfer::verification`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Verification {
    /// Content digests of every tensor, before commit.
    #[default]
    Full,
    /// Byte counts only.
    Disabled,
}

/// Values of [`Transfer::relay`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Relay {
    /// Where it lets fewer bytes cross the slow fabric.
    #[default]
    Auto,
    /// Never.
    Disabled,
}

/// Most seconds of each phase of a round; 1 to 86,400 each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Timeouts {
    /// publishSeconds: from the first to the last rank that publishes one step; default 60.
    pub publish_seconds: i32,
    /// prepareSeconds: default 10.
    pub prepare_seconds: i32,
    /// pauseSeconds: default 30.
    pub pause_seconds: i32,
    /// transferSeconds: default 120.
    pub transfer_seconds: i32,
    /// verifySeconds: default 30.
    pub verify_seconds: i32,
    /// commitSeconds: default 30.
    pub commit_seconds: i32,
    /// resumeSeconds: default 10.
    pub resume_seconds: i32,
    /// totalSeconds: of the whole round; default 300.
    pub total_seconds: i32,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            publish_seconds: 60,
            prepare_seconds: 10,
            pause_seconds: 30,
            transfer_seconds: 120,
            verify_seconds: 30,
            commit_seconds: 30,
            resume_seconds: 10,
            total_seconds: 300,
        }
    }
}
