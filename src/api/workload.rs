//! Which workload a side is, and how its pods become ranks.

use crate::api::schema::{self, DNS_LABEL, DNS_SUBDOMAIN};
use crate::limits;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How pods become ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = schema::union(&[("JobSet", "jobSet"), ("Label", "label")])))]
pub struct Ranks {
    /// type: the workload's kind, or where else a rank is told. Required. Mutable. Example: `StatefulSet`.
    #[serde(rename = "type")]
    pub kind: RanksType,
    /// ranksPerPod: ranks that one pod hosts. Default ranksPerReplica in a pool, 1 in training; 1 to 8,192; it divides
    /// ranksPerReplica or is a multiple of it, and divides worldSize. Mutable. Example: `8`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = limits::RANKS_MAX))]
    pub ranks_per_pod: Option<i32>,
    /// jobSet: which parts of the JobSet are ranks. Required for, and only for, type JobSet. Mutable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job_set: Option<JobSetRanks>,
    /// label: the pod labels that hold rank and replica. Required for, and only for, type Label. Mutable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<LabelRanks>,
}

/// Kinds of [`Ranks`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct JobSetRanks {
    /// replicatedJobs: names of the replicated jobs whose pods are ranks, in rank order. Required; 1 to 63 DNS labels,
    /// each once. Mutable. Example: `[trainer]`.
    #[schemars(
        length(min = 1, max = limits::REPLICATED_JOBS_MAX),
        inner(length(max = limits::LABEL_MAX), regex(pattern = DNS_LABEL)),
        extend("x-kubernetes-list-type" = "set")
    )]
    pub replicated_jobs: Vec<String>,
}

/// Pod labels that hold rank and replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LabelRanks {
    /// rankKey: label whose value is the pod's first rank, a decimal number. Required; at most 317 bytes. Mutable.
    /// Example: `example.com/rank`.
    #[schemars(length(min = 1, max = limits::LABEL_KEY_MAX))]
    pub rank_key: String,
    /// replicaKey: label whose value names the replica. Absent by default, which is right in training and where a pod
    /// is a replica; at most 317 bytes. Mutable. Example: `example.com/replica`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = limits::LABEL_KEY_MAX))]
    pub replica_key: Option<String>,
}

/// A workload, by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WorkloadRef {
    /// apiVersion: group and version of the kind: `apps/v1`, `batch/v1`, `jobset.x-k8s.io/v1alpha2` or
    /// `leaderworkerset.x-k8s.io/v1`. Required; at most 253 bytes. Mutable. Example: `jobset.x-k8s.io/v1alpha2`.
    #[schemars(length(min = 1, max = limits::OBJECT_NAME_MAX))]
    pub api_version: String,
    /// kind: of the workload: StatefulSet, Deployment, Job, JobSet or LeaderWorkerSet. Required; at most 63 bytes.
    /// Mutable. Example: `JobSet`.
    #[schemars(length(min = 1, max = limits::LABEL_MAX))]
    pub kind: String,
    /// namespace: of the workload. Default the refit's own; a DNS label of at most 63 bytes. Mutable. Example: `serve`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = limits::LABEL_MAX), regex(pattern = DNS_LABEL))]
    pub namespace: Option<String>,
    /// name: of the workload. Required; at most 253 bytes. Mutable. Example: `trainer`.
    #[schemars(length(max = limits::OBJECT_NAME_MAX), regex(pattern = DNS_SUBDOMAIN))]
    pub name: String,
}

/// Kinds of workloads that tell how many pods they ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkloadKind {
    /// `apps/v1`.
    StatefulSet,
    /// `apps/v1`.
    Deployment,
    /// `batch/v1`.
    Job,
    /// `jobset.x-k8s.io/v1alpha2`.
    JobSet,
    /// `leaderworkerset.x-k8s.io/v1`.
    LeaderWorkerSet,
}

impl WorkloadRef {
    /// What it refers to; `None` where that does not tell how many pods it asks for.
    #[must_use]
    pub fn known(&self) -> Option<WorkloadKind> {
        Some(match (self.api_version.as_str(), self.kind.as_str()) {
            ("apps/v1", "StatefulSet") => WorkloadKind::StatefulSet,
            ("apps/v1", "Deployment") => WorkloadKind::Deployment,
            ("batch/v1", "Job") => WorkloadKind::Job,
            ("jobset.x-k8s.io/v1alpha2", "JobSet") => WorkloadKind::JobSet,
            ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet") => WorkloadKind::LeaderWorkerSet,
            _ => return None,
        })
    }
}
