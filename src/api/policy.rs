//! The policies of a refit: publishing, serving, commit, lag, transfer, with their defaults.

use crate::api::schema;
use crate::limits;
use schemars::JsonSchema;
use serde::de::{Deserializer, Error, Unexpected, Visitor};
use serde::{Deserialize, Serialize};
use std::fmt;

/// How the trainer's memory is treated while a version is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Publish {
    /// mode: where bytes leave from. Default Auto. Mutable. Example: `SnapshotHost`.
    pub mode: PublishMode,
    /// maxHoldSeconds: how long `publish` may keep the trainer from its next step. Default 2; 0 to 86,400 seconds.
    /// Mutable. Example: `0` where the trainer must never wait.
    #[schemars(range(min = 0, max = limits::TIMEOUT_SECONDS_MAX))]
    pub max_hold_seconds: i32,
}

impl Default for Publish {
    fn default() -> Self {
        Self { mode: PublishMode::Auto, max_hold_seconds: 2 }
    }
}

/// Values of [`Publish::mode`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = schema::union(&[("WithinStaleness", "withinStaleness")])))]
pub struct Serving {
    /// type: when. Required where serving is given. Mutable. Example: `Always`.
    #[serde(rename = "type")]
    pub kind: ServingType,
    /// withinStaleness: the limits. Required for, and only for, type WithinStaleness. Mutable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub within_staleness: Option<Staleness>,
}

/// Values of [`Serving::kind`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum ServingType {
    /// From the engine's start, with whatever weights it loaded.
    Always,
    /// Once a verified version is committed.
    #[default]
    AfterFirstRefit,
    /// While the committed version is recent enough.
    WithinStaleness,
}

/// How old a served version may be; at least one limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = schema::rules(&[(
    "has(self.maxStaleSteps) || has(self.maxStaleSeconds)",
    "at least one of maxStaleSteps and maxStaleSeconds must be set",
)])))]
pub struct Staleness {
    /// maxStaleSteps: steps that a served version may be behind the newest publication. Absent by default: no such
    /// limit; 0 to 1,000,000 steps. Mutable. Example: `4`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = limits::LAG_STEPS_MAX))]
    pub max_stale_steps: Option<i32>,
    /// maxStaleSeconds: seconds that a served version may be older than the newest publication. Absent by default: no
    /// such limit; 1 to 86,400 seconds. Mutable. Example: `600`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = limits::TIMEOUT_SECONDS_MAX))]
    pub max_stale_seconds: Option<i32>,
}

/// How arrived bytes become served weights.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Commit {
    /// mode: where bytes arrive. Default Auto. Mutable. Example: `Staged`.
    pub mode: CommitMode,
    /// stagingLocation: which memory staged bytes lie in; of no effect in mode InPlace. Default Auto. Mutable. Example:
    /// `Host` where device memory is full.
    pub staging_location: StagingLocation,
    /// inFlight: what happens to requests that run while weights change. Default Keep. Mutable. Example: `Drain`.
    pub in_flight: InFlight,
    /// kvCache: what happens to keys and values cached under older weights. Default Reset. Mutable. Example:
    /// `SaltByVersion`.
    pub kv_cache: KvCache,
    /// onReplicaFailure: what happens to a round when one replica fails in it. Default FenceReplica. Mutable. Example:
    /// `AbortRound`.
    pub on_replica_failure: OnReplicaFailure,
    /// strategy: how many replicas change at a time. Default type AllAtOnce. Mutable.
    pub strategy: Strategy,
}

/// Values of [`Commit::mode`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum OnReplicaFailure {
    /// The failed replica is kept from serving, the others commit.
    #[default]
    FenceReplica,
    /// Nobody commits.
    AbortRound,
}

/// How many replicas change at a time.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = schema::union(&[("Rolling", "rolling")])))]
pub struct Strategy {
    /// type: all or a few. Required where strategy is given. Mutable. Example: `Rolling`.
    #[serde(rename = "type")]
    pub kind: StrategyType,
    /// rolling: the limits. Required for, and only for, type Rolling. Mutable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rolling: Option<Rolling>,
}

/// Values of [`Strategy::kind`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum StrategyType {
    /// All replicas in one round.
    #[default]
    AllAtOnce,
    /// A few at a time.
    Rolling,
}

/// Limits of a rolling change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Rolling {
    /// maxUnavailable: replicas of a pool that may be paused at once. Required; a number of 1 to 1,024, or a percentage
    /// of 1% to 100% of the pool's replicas, rounded up. Mutable. Example: `25%`, which is 2 of 6 replicas.
    #[schemars(schema_with = "schema::count_or_percentage")]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Lag {
    /// maxSteps: steps that a replica may be behind the newest publication. Default 0, which is no limit; 0 to
    /// 1,000,000 steps. Mutable. Example: `2`.
    #[schemars(range(min = 0, max = limits::LAG_STEPS_MAX))]
    pub max_steps: i32,
    /// onExceeded: what happens when a replica is further behind than maxSteps. Default Ignore. Mutable. Example:
    /// `BlockTrainer`.
    pub on_exceeded: OnExceeded,
}

/// Values of [`Lag::on_exceeded`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Transfer {
    /// transport: what carries weight bytes. Default Auto. Mutable. Example: `Tcp`.
    pub transport: Transport,
    /// encryption: which weight bytes are encrypted; control always is mutual TLS. Value Required excludes transport
    /// Nccl and NcclM2n. The default is Required, the strictest. Mutable. Example: `TrustedFabric`.
    pub encryption: Encryption,
    /// verification: what is proven before a commit. Default Full. Mutable. Example: `Disabled`.
    pub verification: Verification,
    /// relay: whether replicas pass bytes on to their neighbours. Default Auto. Mutable. Example: `Disabled`.
    pub relay: Relay,
}

/// Values of [`Transfer::transport`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
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

/// Values of [`Transfer::encryption`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum Verification {
    /// Content digests of every tensor, before commit.
    #[default]
    Full,
    /// Byte counts only.
    Disabled,
}

/// Values of [`Transfer::relay`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum Relay {
    /// Where it lets fewer bytes cross the slow fabric.
    #[default]
    Auto,
    /// Never.
    Disabled,
}
