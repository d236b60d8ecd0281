//! What the coordinator tells every agent of an epoch besides the membership: the resolved refit. Agents
//! compute the plan from it; they never expand presets.

use serde::{Deserialize, Serialize};
use weightrefit_core::dtype::DType;
use weightrefit_core::model::{TableError, TensorMeta, TensorTable};
use weightrefit_core::round::message::Timeouts;

/// A refit, resolved: the same bytes for every agent of an epoch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Refit {
    /// HF tensors, in table order.
    pub tensors: Vec<Tensor>,
    /// Canonical layout document (`layout: v1`) of the training side.
    pub training: serde_json::Value,
    /// Pools in the resource's order.
    pub pools: Vec<Pool>,
    /// How rounds behave.
    pub policy: Policy,
}

/// One HF tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Tensor {
    /// HF name.
    pub name: String,
    /// Extents in elements.
    pub shape: Vec<u64>,
    /// Dtype in the checkpoint.
    pub dtype: DType,
}

/// One pool of inference replicas.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Pool {
    /// Name, unique in the refit.
    pub name: String,
    /// Layout document (`layout: v1`) of one replica; null where the engines record it and have not yet, which agents
    /// never see.
    pub layout: serde_json::Value,
    /// Replicas that must be settled before a round opens.
    pub min_replicas: u32,
}

/// How rounds behave; values as in the resource.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Policy {
    /// Durations of the phases.
    pub timeouts: Timeouts,
    /// What a failing replica does to the others of its round.
    pub on_replica_failure: OnReplicaFailure,
    /// Whether bytes are protected by TLS between agents (control always is).
    pub encrypt_bytes: bool,
    /// Whether bytes may go by NCCL, which cannot encrypt them.
    #[serde(default)]
    pub fabric: Fabric,
    /// Whether digests are compared before a commit.
    pub verify: bool,
    /// What engines do with requests that run when they pause.
    #[serde(default)]
    pub in_flight: InFlight,
    /// What engines do with keys and values that older weights made.
    #[serde(default)]
    pub kv_cache: KvCache,
}

/// What becomes of requests that run when an engine pauses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum InFlight {
    /// They stop, and go on with the new weights.
    #[default]
    Keep,
    /// They end first.
    Drain,
    /// They are aborted.
    Abort,
}

/// What becomes of keys and values that older weights made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum KvCache {
    /// They are forgotten, those of kept requests too.
    #[default]
    Reset,
    /// They are used on.
    Keep,
    /// Requests that run use theirs on; those that come later find none that older weights made.
    SaltByVersion,
}

/// Whether bytes may go by NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Fabric {
    /// Never: the resource asks for TCP, or for encryption.
    #[default]
    Never,
    /// Where all members of a lane can.
    Auto,
    /// Or not at all.
    Required,
}

/// What a failing replica does to the others of its round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnReplicaFailure {
    /// The others go on.
    FenceReplica,
    /// No replica that is not authorised yet commits.
    AbortRound,
}

impl Refit {
    /// The tensor table.
    ///
    /// # Errors
    /// Names, sizes and dims that no model has.
    pub fn table(&self) -> Result<TensorTable, TableError> {
        let meta = |tensor: &Tensor| TensorMeta {
            name: tensor.name.clone(),
            shape: tensor.shape.clone(),
            dtype: tensor.dtype,
        };
        TensorTable::new(self.tensors.iter().map(meta).collect())
    }

    /// The list of tensors of a table.
    #[must_use]
    pub fn tensors_of(table: &TensorTable) -> Vec<Tensor> {
        let tensor = |meta: &TensorMeta| Tensor {
            name: meta.name.clone(),
            shape: meta.shape.clone(),
            dtype: meta.dtype,
        };
        table.iter().map(|(_, meta)| tensor(meta)).collect()
    }
}
