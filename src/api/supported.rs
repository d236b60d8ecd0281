//! What the resource can say and this version cannot do yet. Asked before anything else is done with it, so that
//! nobody learns it from an agent.

use crate::api::policy::{
    CommitMode, Encryption, OnExceeded, OnReplicaFailure, PublishMode, ServingType, StagingLocation,
    StrategyType, Transport, Verification,
};
use crate::api::problem::{FieldPath, Problem};
use crate::api::refit::WeightRefitSpec;

/// The first field of `spec` that asks for what this version cannot carry out.
///
/// # Errors
/// With that field and [`Problem::Unsupported`].
pub fn check(spec: &WeightRefitSpec) -> Result<(), (FieldPath, Problem)> {
    let commit = &spec.commit;
    let rows = [
        (
            "paused",
            spec.paused.then_some("true"),
            "Stop the trainer from publishing, and set `paused: false`.",
        ),
        (
            "training.publish.mode",
            matches!(spec.training.publish.mode, PublishMode::SnapshotDevice).then_some("SnapshotDevice"),
            "Tensors lie in host memory here: choose `mode: Auto`.",
        ),
        (
            "commit.mode",
            matches!(commit.mode, CommitMode::InPlace).then_some("InPlace"),
            "Choose `mode: Auto` or `mode: Staged`.",
        ),
        (
            "commit.stagingLocation",
            matches!(commit.staging_location, StagingLocation::Device).then_some("Device"),
            "Tensors lie in host memory here: choose `stagingLocation: Auto` or `Host`.",
        ),
        (
            "commit.onReplicaFailure",
            matches!(commit.on_replica_failure, OnReplicaFailure::AbortRound).then_some("AbortRound"),
            "Choose `onReplicaFailure: FenceReplica`.",
        ),
        (
            "commit.strategy.type",
            matches!(commit.strategy.kind, StrategyType::Rolling).then_some("Rolling"),
            "Choose `strategy: {type: AllAtOnce}`.",
        ),
        (
            "lag.onExceeded",
            match spec.lag.on_exceeded {
                OnExceeded::Ignore => None,
                OnExceeded::BlockTrainer => Some("BlockTrainer"),
                OnExceeded::FenceReplica => Some("FenceReplica"),
            },
            "Choose `onExceeded: Ignore`.",
        ),
        (
            "transfer.transport",
            match spec.transfer.transport {
                Transport::Auto | Transport::Tcp | Transport::Nccl => None,
                Transport::NcclM2n => Some("NcclM2n"),
            },
            "Choose `transport: Auto`, `Tcp` or `Nccl`.",
        ),
        (
            "transfer.encryption",
            matches!(spec.transfer.encryption, Encryption::Disabled).then_some("Disabled"),
            "Agents send weights in TLS only: choose `encryption: Required`, or `TrustedFabric`.",
        ),
        (
            "transfer.verification",
            matches!(spec.transfer.verification, Verification::Disabled).then_some("Disabled"),
            "Choose `verification: Full`.",
        ),
    ];
    let at = FieldPath::of("spec");
    for (field, value, hint) in rows {
        if let Some(value) = value {
            return Err((at.key(field), Problem::Unsupported { value: value.into(), hint }));
        }
    }
    let training = (at.key("training"), spec.training.workload_ref.as_ref());
    let pools = spec.inference.pools.iter().enumerate();
    let pools =
        pools.map(|(index, pool)| (at.key("inference.pools").index(index), pool.workload_ref.as_ref()));
    for (side, workload) in std::iter::once(training).chain(pools) {
        let Some(unknown) = workload.filter(|workload| workload.known().is_none()) else { continue };
        let value = format!("{} {}", unknown.api_version, unknown.kind);
        let hint = "Name a StatefulSet or Deployment of apps/v1, a Job of batch/v1, a JobSet of \
                    jobset.x-k8s.io/v1alpha2 or a LeaderWorkerSet of leaderworkerset.x-k8s.io/v1, or leave \
                    workloadRef out.";
        return Err((side.key("workloadRef"), Problem::Unsupported { value, hint }));
    }
    for (index, pool) in spec.inference.pools.iter().enumerate() {
        let value = match pool.serving.kind {
            ServingType::AfterFirstRefit => continue,
            ServingType::Always => "Always",
            ServingType::WithinStaleness => "WithinStaleness",
        };
        let path = at.key("inference.pools").index(index).key("serving.type");
        let hint = "Choose `serving: {type: AfterFirstRefit}`.";
        return Err((path, Problem::Unsupported { value: value.into(), hint }));
    }
    Ok(())
}
