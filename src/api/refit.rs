//! The resource `WeightRefit`, group `weightrefit.dev`, version `v1alpha1`: what `kubectl apply` takes.
//!
//! Unions are a struct with a `type` and optional members named like the types; `check` holds the rules that
//! types cannot say. No field is a float, a duration or unsigned, as Kubernetes' conventions want it.

use crate::api::policy::{Commit, Lag, Publish, Serving, Timeouts, Transfer};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The resource's apiVersion.
pub const API_VERSION: &str = "weightrefit.dev/v1alpha1";
/// The resource's kind.
pub const KIND: &str = "WeightRefit";

/// A lasting relation from one training world to pools of inference replicas.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WeightRefit {
    /// apiVersion: always [`API_VERSION`].
    pub api_version: String,
    /// kind: always [`KIND`].
    pub kind: String,
    /// metadata: name, namespace, annotations.
    pub metadata: Metadata,
    /// spec: what is wanted.
    pub spec: WeightRefitSpec,
    #[serde(default)]
    status: IgnoredAny,
}

/// The part of Kubernetes' ObjectMeta that is used; keys that only a server writes are read and dropped.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Metadata {
    /// name: of the object, unique in its namespace; a DNS subdomain.
    pub name: String,
    /// namespace: default `default`.
    #[serde(default = "default_namespace")]
    pub namespace: String,
    /// uid: written by the API server, absent offline.
    pub uid: Option<String>,
    /// annotations: free; `weightrefit.dev/local-weights` says where `weightrefit local` gets bytes.
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
    #[serde(default)]
    labels: IgnoredAny,
    #[serde(default)]
    creation_timestamp: IgnoredAny,
    #[serde(default)]
    deletion_timestamp: IgnoredAny,
    #[serde(default)]
    finalizers: IgnoredAny,
    #[serde(default)]
    generation: IgnoredAny,
    #[serde(default)]
    managed_fields: IgnoredAny,
    #[serde(default)]
    owner_references: IgnoredAny,
    #[serde(default)]
    resource_version: IgnoredAny,
}

fn default_namespace() -> String {
    "default".into()
}

/// What is wanted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WeightRefitSpec {
    /// paused: no new round begins while true; a running one ends by itself. Default false. Mutable.
    #[serde(default)]
    pub paused: bool,
    /// model: which tensors there are. Immutable.
    pub model: Model,
    /// training: the side that publishes.
    pub training: Training,
    /// inference: the side that receives.
    pub inference: Inference,
    /// commit: how arrived bytes become served weights.
    #[serde(default)]
    pub commit: Commit,
    /// lag: how far replicas may stay behind.
    #[serde(default)]
    pub lag: Lag,
    /// transfer: how bytes travel.
    #[serde(default)]
    pub transfer: Transfer,
    /// timeouts: of each phase of a round.
    #[serde(default)]
    pub timeouts: Timeouts,
}

/// Which tensors the model has. Example: `{type: TensorTable, tensorTable: {configMapKeyRef: {name: t, key: k}}}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Model {
    /// type: which member is set.
    #[serde(rename = "type")]
    pub kind: ModelType,
    /// huggingFaceConfig: the model's `config.json`.
    pub hugging_face_config: Option<KeySource>,
    /// tensorTable: names, shapes and dtypes as JSON.
    pub tensor_table: Option<KeySource>,
}

/// Kinds of [`Model`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ModelType {
    /// The table follows from the model's `config.json`.
    HuggingFaceConfig,
    /// The table is given.
    TensorTable,
    /// The trainer registers it.
    Registered,
}

/// A value in a ConfigMap of the refit's namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KeySource {
    /// configMapKeyRef: the ConfigMap and its key.
    pub config_map_key_ref: ConfigMapKey,
}

/// One key of one ConfigMap. Example: `{name: qwen3-30b-config, key: config.json}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ConfigMapKey {
    /// name: of the ConfigMap.
    pub name: String,
    /// key: under `data`, or under `binaryData` (gzip allowed).
    pub key: String,
}

/// The side that publishes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Training {
    /// worldSize: number of training ranks; 1 to 8,192. Mutable: a change ends the epoch.
    pub world_size: i32,
    /// ranks: how pods become ranks.
    pub ranks: Ranks,
    /// workloadRef: the workload; gives desired size, completion and suspension. Optional.
    pub workload_ref: Option<WorkloadRef>,
    /// layout: where each element lies on each rank. Default Registered.
    #[serde(default)]
    pub layout: Layout,
    /// publish: what happens to the trainer's memory meanwhile.
    #[serde(default)]
    pub publish: Publish,
}

/// The side that receives.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Inference {
    /// pools: 1 to 16, each name once.
    pub pools: Vec<Pool>,
}

/// Replicas that share one layout.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Pool {
    /// name: of the pool; a DNS label, matched by the pods' label `weightrefit.dev/pool`.
    pub name: String,
    /// ranksPerReplica: model-parallel ranks of one engine instance; 1 to 8,192.
    pub ranks_per_replica: i32,
    /// minReplicas: below this many serving replicas the refit is not Ready; 1 to 1,024, default 1.
    #[serde(default = "one")]
    pub min_replicas: i32,
    /// ranks: how pods become ranks and replicas.
    pub ranks: Ranks,
    /// workloadRef: the workload; gives the desired size. Optional.
    pub workload_ref: Option<WorkloadRef>,
    /// layout: where each element lies on each rank. Default Registered.
    #[serde(default)]
    pub layout: Layout,
    /// bootstrapFrom: where a new replica's first weights come from. Default Auto.
    #[serde(default)]
    pub bootstrap_from: BootstrapFrom,
    /// serving: when a replica may take requests. Default AfterFirstRefit.
    #[serde(default)]
    pub serving: Serving,
}

fn one() -> i32 {
    1
}

/// Source of a new replica's first weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum BootstrapFrom {
    /// The trainer while it holds the version, else replicas that do.
    #[default]
    Auto,
    /// The trainer only.
    Training,
}

/// How pods become ranks. Example: `{type: StatefulSet, ranksPerPod: 8}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Ranks {
    /// type: the workload's kind, or where else a rank is told.
    #[serde(rename = "type")]
    pub kind: RanksType,
    /// ranksPerPod: ranks that one pod hosts; default ranksPerReplica on the inference side, 1 in training.
    pub ranks_per_pod: Option<i32>,
    /// jobSet: which parts of the JobSet are ranks.
    pub job_set: Option<JobSetRanks>,
    /// label: the pod labels that hold rank and replica.
    pub label: Option<LabelRanks>,
}

/// Kinds of [`Ranks`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RanksType {
    /// Ranks in order of replicated job and completion index.
    JobSet,
    /// A group is a replica; the worker index counts inside it.
    LeaderWorkerSet,
    /// The ordinal counts.
    StatefulSet,
    /// The completion index counts.
    IndexedJob,
    /// A pod is one or more whole replicas.
    Deployment,
    /// Agents announce their rank.
    RayCluster,
    /// A clique set's index counts.
    PodCliqueSet,
    /// Pod labels say it.
    Label,
    /// Agents announce their rank.
    Registered,
}

/// Parts of a JobSet that are ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct JobSetRanks {
    /// replicatedJobs: their names, in rank order.
    pub replicated_jobs: Vec<String>,
}

/// Pod labels that hold rank and replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LabelRanks {
    /// rankKey: label of the pod's first rank.
    pub rank_key: String,
    /// replicaKey: label of the replica's name; inference only.
    pub replica_key: Option<String>,
}

/// A workload, by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WorkloadRef {
    /// apiVersion: group and version of the kind.
    pub api_version: String,
    /// kind: of the workload.
    pub kind: String,
    /// namespace: default the refit's own.
    pub namespace: Option<String>,
    /// name: of the workload.
    pub name: String,
}

/// Where each element lies on each rank. Example: `{type: Preset, preset: {name: megatron/qwen3-moe, revision: 1}}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Layout {
    /// type: which member is set.
    #[serde(rename = "type")]
    pub kind: LayoutType,
    /// preset: a document that weightrefit ships.
    pub preset: Option<PresetRef>,
    /// inline: a `layout: v1` document.
    pub inline: Option<serde_json::Value>,
    /// configMap: a `layout: v1` document in a ConfigMap of the refit's namespace.
    pub config_map: Option<ConfigMapKey>,
}

impl Default for Layout {
    fn default() -> Self {
        Self { kind: LayoutType::Registered, preset: None, inline: None, config_map: None }
    }
}

/// Kinds of [`Layout`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LayoutType {
    /// A shipped document.
    Preset,
    /// A document in the resource.
    Inline,
    /// A document in a ConfigMap.
    ConfigMap,
    /// What clients register.
    Registered,
}

/// A shipped layout document. Example: `{name: vllm/qwen-dense, revision: 1, sizes: {tp: 2}}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PresetRef {
    /// name: as `weightrefit layout presets` lists it.
    pub name: String,
    /// revision: of the document; at least 1.
    pub revision: i32,
    /// sizes: of the parallel axes; replaces the document's own.
    #[serde(default)]
    pub sizes: BTreeMap<String, i32>,
}
