//! What the operator writes of a refit: `status`. It can be rebuilt from observation; only the epoch must not be
//! lost, and agents remember that too.
//!
//! Unlike the specification these types take unknown keys, for clients meet newer operators. Numbers are int64
//! where the protocol counts in u64, as Kubernetes' conventions want it.

use crate::api::condition::Condition;
use crate::api::schema;
use crate::limits;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use weightrefit_core::membership::roster::Cause;
use weightrefit_proto::report::RoundOutcome;

/// status: what is.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(transform = schema::finish)]
pub struct WeightRefitStatus {
    /// observedGeneration: generation of the resource that this status answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub observed_generation: Option<i64>,
    /// membership: who is which rank now; absent until the first one is formed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub membership: Option<MembershipStatus>,
    /// plan: what the members' plan moves; absent until there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanStatus>,
    /// training: the side that publishes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub training: Option<TrainingStatus>,
    /// inference: the side that receives, over all pools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inference: Option<InferenceStatus>,
    /// behind: replicas that do not serve the version committed last, at most 10, the worst first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = limits::BEHIND_MAX),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["pool", "replica"])
    )]
    pub behind: Vec<BehindReplica>,
    /// lastRound: the round that ended last; written at most every 30 seconds while rounds succeed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_round: Option<RoundStatus>,
    /// lastFailedRound: the aborted round that ended last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_failed_round: Option<RoundStatus>,
    /// agentVersions: versions of the members' agents, at most 8, those of the most pods first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = limits::AGENT_VERSIONS_MAX),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["version"])
    )]
    pub agent_versions: Vec<AgentVersion>,
    /// conditions: what holds, since when, and why; each type once.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = limits::CONDITIONS_MAX),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
}

impl WeightRefitStatus {
    /// The condition of this type.
    #[must_use]
    pub fn condition(&self, kind: &str) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.kind == kind)
    }
}

/// Who is which rank now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MembershipStatus {
    /// epoch: number of the membership; grows by one with each. Example: `7`.
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub epoch: i64,
    /// digest: of the membership; agents refuse another one of the same epoch.
    #[schemars(length(max = limits::DIGEST_MAX), regex(pattern = schema::SHA256))]
    pub digest: String,
    /// versionFloor: the largest version that any member had heard of; the next trainer that starts from an older step
    /// gets a larger run, even when all who held the version are gone. Absent before the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version_floor: Option<Version>,
    /// generation: of the resource that the membership was made from.
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub generation: i64,
    /// resolvedDigest: of what the resource and its ConfigMaps resolved to; all agents of an epoch have the same, and
    /// another one makes a new epoch.
    #[schemars(length(max = limits::DIGEST_MAX), regex(pattern = schema::SHA256))]
    pub resolved_digest: String,
    /// cause: why there is this epoch.
    #[schemars(schema_with = "schema::cause")]
    pub cause: Cause,
    /// startTime: when the epoch was written.
    #[schemars(schema_with = "schema::time")]
    pub start_time: Time,
    /// leader: pod that leads the rounds, as namespace/name. Example: `rl/trainer-0`.
    #[schemars(length(max = limits::POD_MAX))]
    pub leader: String,
    /// protocolVersion: version of the round protocol that all members speak.
    #[schemars(range(min = 1, max = limits::INTERFACE_VERSION_MAX))]
    pub protocol_version: i32,
    /// plannerVersion: version of the planner that all members use.
    #[schemars(range(min = 1, max = limits::INTERFACE_VERSION_MAX))]
    pub planner_version: i32,
}

/// What one round without skipped tensors moves.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PlanStatus {
    /// digest: of the plan; all members have computed the same.
    #[schemars(length(max = limits::DIGEST_MAX), regex(pattern = schema::SHA256))]
    pub digest: String,
    /// bytesMinimum: bytes that any plan must deliver.
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub bytes_minimum: i64,
    /// bytesPlanned: bytes that this plan delivers.
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub bytes_planned: i64,
    /// bytesCrossFabric: bytes of it that cross between fabric domains.
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub bytes_cross_fabric: i64,
}

/// The side that publishes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TrainingStatus {
    /// ranks: training ranks whose pod is known.
    #[schemars(range(min = 0, max = limits::RANKS_MAX))]
    pub ranks: i32,
    /// connectedRanks: those whose agent is connected.
    #[schemars(range(min = 0, max = limits::RANKS_MAX))]
    pub connected_ranks: i32,
    /// state: where the trainer stands.
    pub state: TrainingState,
    /// published: the version published last; absent before the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub published: Option<Version>,
}

/// Where the trainer stands. Absent and Completed are no failures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TrainingState {
    /// There are no training pods, or the workload is suspended.
    Absent,
    /// Some ranks are missing.
    Forming,
    /// All ranks are members.
    Running,
    /// The workload has finished.
    Completed,
}

/// The side that receives, over all pools.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InferenceStatus {
    /// desiredReplicas: replicas that the workloads ask for; what is found where none is referred to.
    #[schemars(range(min = 0, max = limits::ALL_REPLICAS_MAX))]
    pub desired_replicas: i32,
    /// replicas: whole replicas that are members.
    #[schemars(range(min = 0, max = limits::ALL_REPLICAS_MAX))]
    pub replicas: i32,
    /// currentReplicas: those that hold the version committed last.
    #[schemars(range(min = 0, max = limits::ALL_REPLICAS_MAX))]
    pub current_replicas: i32,
    /// servingReplicas: those that may take requests.
    #[schemars(range(min = 0, max = limits::ALL_REPLICAS_MAX))]
    pub serving_replicas: i32,
    /// fencedReplicas: those kept from serving.
    #[schemars(range(min = 0, max = limits::ALL_REPLICAS_MAX))]
    pub fenced_replicas: i32,
    /// committed: the version committed last; absent before the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub committed: Option<Version>,
    /// oldestServing: the oldest version that some replica serves; absent while none serves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest_serving: Option<Version>,
}

/// A version of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Version {
    /// run: grows when a trainer starts again from an older step.
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub run: i64,
    /// step: the trainer's step.
    #[schemars(range(min = -limits::COUNTER_MAX, max = limits::COUNTER_MAX))]
    pub step: i64,
}

/// A replica that does not serve the version committed last.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BehindReplica {
    /// pool: of the replica.
    #[schemars(length(max = limits::LABEL_MAX))]
    pub pool: String,
    /// replica: its name inside the pool. Example: `vllm-2`.
    #[schemars(length(max = limits::REPLICA_NAME_MAX))]
    pub replica: String,
    /// version: what it holds; absent when that is nothing verified.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<Version>,
    /// reason: a code; `weightrefit explain CODE` says more. Example: `DigestMismatch`.
    #[schemars(length(min = 1, max = limits::REASON_MAX), regex(pattern = schema::REASON))]
    pub reason: String,
    /// pod: where it happened, as namespace/name; absent when it is no single pod's doing.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = limits::POD_MAX))]
    pub pod: Option<String>,
    /// rank: where it happened, inside the replica; absent when it is no single rank's doing.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = limits::RANKS_MAX))]
    pub rank: Option<i32>,
    /// since: when it fell behind.
    #[schemars(schema_with = "schema::time")]
    pub since: Time,
    /// message: what happened and what follows; at most 512 characters.
    #[schemars(length(max = limits::MESSAGE_MAX))]
    pub message: String,
}

/// A round that has ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoundStatus {
    /// epoch: of the membership it ran in.
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub epoch: i64,
    /// id: its number inside the epoch.
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub id: i64,
    /// version: what was to be committed.
    pub version: Version,
    /// outcome: whether it was.
    #[schemars(schema_with = "schema::outcome")]
    pub outcome: RoundOutcome,
    /// reason: first code, when it was aborted. Example: `DigestMismatch`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = limits::REASON_MAX), regex(pattern = schema::REASON))]
    pub reason: Option<String>,
    /// pod: where it failed, as namespace/name; absent when it is no single pod's doing.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = limits::POD_MAX))]
    pub pod: Option<String>,
    /// rank: where it failed, on its side or inside its replica; absent when it is no single rank's doing.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = limits::RANKS_MAX))]
    pub rank: Option<i32>,
    /// message: what failed and what follows, when it was aborted; at most 512 characters.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = limits::MESSAGE_MAX))]
    pub message: Option<String>,
    /// startTime: when the leader proposed it.
    #[schemars(schema_with = "schema::time")]
    pub start_time: Time,
    /// completionTime: when it ended.
    #[schemars(schema_with = "schema::time")]
    pub completion_time: Time,
    /// bytes: what moved.
    pub bytes: RoundBytes,
    /// phaseMilliseconds: how long each phase took.
    pub phase_milliseconds: PhaseMilliseconds,
}

/// Weight bytes of a round; received and skipped together are what was planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoundBytes {
    /// sent: by sources.
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub sent: i64,
    /// received: by destinations.
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub received: i64,
    /// skipped: needed not move, because the destination had them.
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub skipped: i64,
}

/// Milliseconds of each phase that ran, the slowest replica's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PhaseMilliseconds {
    /// prepare: until every participant had answered the proposal; absent when that phase did not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub prepare: Option<i64>,
    /// transfer: until all bytes had arrived; absent when that phase did not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub transfer: Option<i64>,
    /// verify: until the digests of what arrived were compared; absent when that phase did not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub verify: Option<i64>,
    /// pause: until the engines had paused; absent when that phase did not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub pause: Option<i64>,
    /// apply: until the engines had turned staged tensors into their own format; absent when that phase did not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub apply: Option<i64>,
    /// commit: until the replicas held the version; absent when that phase did not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub commit: Option<i64>,
    /// reset: until the engines' caches were reset; absent when that phase did not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub reset: Option<i64>,
    /// resume: until the engines had resumed; absent when that phase did not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub resume: Option<i64>,
}

/// A version of the agent, and how many pods run it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AgentVersion {
    /// version: of the agent. Example: `0.1.0`.
    #[schemars(length(max = limits::LABEL_MAX))]
    pub version: String,
    /// pods: member pods that run it.
    #[schemars(range(min = 0, max = limits::AGENTS_MAX))]
    pub pods: i32,
}
