//! The resource `WeightRefit`, group `weightrefit.dev`, version `v1alpha1`: what `kubectl apply` takes.
//!
//! These types are the resource: files are read into them, and the API server's schema is made from them, their
//! doc comments included. Unions are a struct with a `type` and optional members named like the types. No field
//! is a float, a duration or unsigned, as Kubernetes' conventions want it. Except the model everything may be
//! changed at any time; a change takes effect between two rounds, as a new epoch.

use crate::api::policy::{Commit, Lag, Publish, Serving, Transfer};
use crate::api::schema::{self, DNS_LABEL};
use crate::api::source::{Layout, Model};
use crate::api::status::WeightRefitStatus;
use crate::api::timeouts::Timeouts;
use crate::api::workload::{Ranks, WorkloadRef};
use crate::limits;
use kube::{CustomResource, ResourceExt};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The resource's apiVersion.
pub const API_VERSION: &str = "weightrefit.dev/v1alpha1";
/// The resource's kind.
pub const KIND: &str = "WeightRefit";

/// Annotation `EPOCH/ROUND`: the first round of that epoch after that one is to be aborted; written by `weightrefit abort`.
pub const ABORT_ANNOTATION: &str = "weightrefit.dev/abort";

impl WeightRefit {
    /// `namespace/name`.
    #[must_use]
    pub fn full_name(&self) -> String {
        format!("{}/{}", self.namespace().unwrap_or_default(), self.name_any())
    }
}

/// spec: what is wanted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, CustomResource, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[kube(
    group = "weightrefit.dev",
    version = "v1alpha1",
    kind = "WeightRefit",
    plural = "weightrefits",
    shortname = "wr",
    category = "rl",
    namespaced,
    status = "WeightRefitStatus",
    derive = "PartialEq",
    doc = "A lasting relation from one training world to pools of inference replicas: each version that the trainer \
           publishes is sent to the replicas, exactly the bytes that each of them lacks, proven right, and committed \
           by all ranks of a replica together or not at all.",
    validation = Rule::new("self.metadata.name.size() <= 63")
        .message("metadata.name must have at most 63 bytes: pods name the refit by a label"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason"
    ),
    printcolumn(
        name = "Step",
        type_ = "integer",
        json_path = ".status.inference.committed.step",
        description = "Step of the version committed last."
    ),
    printcolumn(
        name = "Current",
        type_ = "integer",
        json_path = ".status.inference.currentReplicas",
        description = "Replicas that hold the version committed last."
    ),
    printcolumn(
        name = "Desired",
        type_ = "integer",
        json_path = ".status.inference.desiredReplicas",
        description = "Replicas that the workloads ask for."
    ),
    printcolumn(
        name = "Ended",
        type_ = "date",
        json_path = ".status.lastRound.completionTime",
        description = "When the last round ended."
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(
        name = "Epoch",
        type_ = "integer",
        json_path = ".status.membership.epoch",
        description = "Number of the present membership.",
        priority = 1
    ),
    printcolumn(
        name = "Published",
        type_ = "integer",
        json_path = ".status.training.published.step",
        description = "Step of the version that the trainer published last.",
        priority = 1
    )
)]
#[schemars(transform = schema::finish, extend("x-kubernetes-validations" = schema::rules(&[(
    "self.commit.mode != 'InPlace' || self.commit.strategy.type == 'Rolling'",
    "commit.mode InPlace needs strategy type Rolling: in place, the trainer's death would poison every \
     replica at once",
), (
    "self.transfer.encryption != 'Required' || !(self.transfer.transport in ['Nccl', 'NcclM2n'])",
    "transfer.transport must not be Nccl or NcclM2n while encryption is Required: NCCL cannot encrypt",
)])))]
pub struct WeightRefitSpec {
    /// paused: no new round begins while true; a running one ends by itself, replicas go on serving. Default false.
    /// Mutable. Example: `true` while the engines' nodes are repaired.
    #[serde(default)]
    pub paused: bool,
    /// model: which tensors there are. Required. Immutable: another model is another refit.
    pub model: Model,
    /// training: the side that publishes. Required. Mutable.
    pub training: Training,
    /// inference: the side that receives. Required. Mutable.
    pub inference: Inference,
    /// commit: how arrived bytes become served weights. Mutable.
    #[serde(default)]
    pub commit: Commit,
    /// lag: how far replicas may stay behind the trainer. Mutable.
    #[serde(default)]
    pub lag: Lag,
    /// transfer: how bytes travel. Mutable.
    #[serde(default)]
    pub transfer: Transfer,
    /// timeouts: of each phase of a round. Mutable.
    #[serde(default)]
    pub timeouts: Timeouts,
}

/// The side that publishes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = schema::rules(&[(
    "self.worldSize % (has(self.ranks.ranksPerPod) ? self.ranks.ranksPerPod : 1) == 0",
    "worldSize must be a multiple of ranks.ranksPerPod",
)])))]
pub struct Training {
    /// worldSize: number of training ranks. Required; 1 to 8,192. Mutable: a change ends the epoch. Example: `16`.
    #[schemars(range(min = 1, max = limits::RANKS_MAX))]
    pub world_size: i32,
    /// ranks: how pods become ranks. Required. Mutable.
    pub ranks: Ranks,
    /// workloadRef: the trainer's workload, which tells desired size, completion and suspension. Absent by default:
    /// then what is found is what is desired. Mutable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workload_ref: Option<WorkloadRef>,
    /// layout: where each element lies on each rank. Default type Registered. Mutable.
    #[serde(default)]
    pub layout: Layout,
    /// publish: what happens to the trainer's memory while a version is sent. Mutable.
    #[serde(default)]
    pub publish: Publish,
}

/// The side that receives.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Inference {
    /// pools: sets of replicas that share one layout; layouts may differ between pools. Required; 1 to 16, each name
    /// once. Mutable. Example: `[{name: default, ranksPerReplica: 8, ranks: {type: LeaderWorkerSet, ranksPerPod: 8}}]`.
    #[schemars(
        length(min = 1, max = limits::POOLS_MAX),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"])
    )]
    pub pools: Vec<Pool>,
}

/// Replicas that share one layout.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = schema::rules(&[(
    "!has(self.ranks.ranksPerPod) || self.ranksPerReplica % self.ranks.ranksPerPod == 0 || \
     self.ranks.ranksPerPod % self.ranksPerReplica == 0",
    "one of ranks.ranksPerPod and ranksPerReplica must divide the other",
), (
    "self.ranks.type != 'Deployment' || !has(self.ranks.ranksPerPod) || \
     self.ranks.ranksPerPod >= self.ranksPerReplica",
    "a pod of a Deployment must hold whole replicas: its pods are alike, so nothing tells which part one would be",
)])))]
pub struct Pool {
    /// name: of the pool, matched by the pods' label `weightrefit.dev/pool`, whose absence means `default`. Required;
    /// a DNS label of at most 63 bytes. Mutable: another name is another pool. Example: `default`.
    #[schemars(length(max = limits::LABEL_MAX), regex(pattern = DNS_LABEL))]
    pub name: String,
    /// ranksPerReplica: model-parallel ranks of one engine instance. Required; 1 to 8,192. Mutable. Example: `8`.
    #[schemars(range(min = 1, max = limits::RANKS_MAX))]
    pub ranks_per_replica: i32,
    /// minReplicas: while fewer replicas serve, the refit is not Ready. Default 1; 1 to 1,024. Mutable. Example: `2`.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = limits::REPLICAS_MAX))]
    pub min_replicas: i32,
    /// ranks: how pods become ranks and replicas. Required. Mutable.
    pub ranks: Ranks,
    /// workloadRef: the engines' workload, which tells the desired size. Absent by default: then what is found is
    /// what is desired. Mutable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workload_ref: Option<WorkloadRef>,
    /// layout: where each element lies on each rank of a replica. Default type Registered. Mutable.
    #[serde(default)]
    pub layout: Layout,
    /// bootstrapFrom: where a new replica's first weights come from. Default Auto. Mutable. Example: `Training`.
    #[serde(default)]
    pub bootstrap_from: BootstrapFrom,
    /// serving: when a replica may take requests. Default type AfterFirstRefit. Mutable.
    #[serde(default)]
    pub serving: Serving,
}

fn one() -> i32 {
    1
}

/// Source of a new replica's first weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum BootstrapFrom {
    /// The trainer while it holds the version, else replicas that do.
    #[default]
    Auto,
    /// The trainer only.
    Training,
}
