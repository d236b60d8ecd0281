//! The epoch in `status.membership`, written before any agent hears of it.
//!
//! Invariants:
//! - E1: an epoch is written only over the one that this writer knows: whoever else wrote meanwhile has won, and what
//!   it wrote is known from then on.
//! - E2 (I4): an epoch is above the one that it replaces, so that none means two memberships.
//! - E3: nothing is written to another object of the same name.
//! - E4: an epoch that stands already, with this very membership made of the same, is not replaced: it is ours, and the
//!   answer to the write was lost. Where the resource has changed since, the change is another epoch's.

use crate::api::refit::WeightRefit;
use crate::api::status::{MembershipStatus, Version};
use crate::coordinator::{EpochRecord, RecordError};
use crate::limits;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use std::sync::Arc;
use weightrefit_core::id::Epoch;
use weightrefit_core::membership::VersionFloor;
use weightrefit_core::membership::roster::{Basis, Next, Recorded};

/// Name of the pod of a UID, as namespace/name.
pub type PodName = dyn Fn(&str) -> Option<String> + Send + Sync;

/// The record of one refit.
pub struct StatusRecord {
    api: Api<WeightRefit>,
    name: String,
    uid: String,
    pods: Arc<PodName>,
    recorded: Option<Recorded>,
}

impl StatusRecord {
    /// The record of `refit`, with what its status holds.
    #[must_use]
    pub fn new(api: Api<WeightRefit>, refit: &WeightRefit, pods: Arc<PodName>) -> Self {
        let (name, uid) = (refit.name_any(), refit.uid().unwrap_or_default());
        Self { api, name, uid, pods, recorded: recorded(refit) }
    }

    async fn write(&mut self, next: &Next) -> Result<(), RecordError> {
        let failed = |error: kube::Error| RecordError(error.to_string());
        let found = self.api.get(&self.name).await.map_err(failed)?;
        if found.uid().as_deref() != Some(self.uid.as_str()) {
            return Err(RecordError(format!("{} was deleted and made anew", self.name)));
        }
        let known = |recorded: Option<Recorded>| recorded.map(|r| (r.epoch, r.digest, r.basis));
        let (present, ours) = (recorded(&found), Recorded::of(&next.membership, next.basis));
        if known(present) == known(Some(ours)) {
            self.recorded = present; // E4
            return Ok(());
        }
        if known(present) != known(self.recorded) {
            let epoch = |recorded: Option<Recorded>| recorded.map_or(Epoch(0), |recorded| recorded.epoch);
            let (theirs, ours) = (epoch(present), epoch(self.recorded));
            self.recorded = present;
            return Err(RecordError(format!(
                "epoch {theirs} stands where {ours} was known: somebody else wrote it"
            )));
        }
        let epoch = next.membership.epoch();
        if let Some(recorded) = self.recorded.filter(|recorded| epoch <= recorded.epoch) {
            return Err(RecordError(format!("epoch {epoch} is not above {}, which stands", recorded.epoch)));
        }
        let patch = json!({
            "metadata": {"uid": self.uid, "resourceVersion": found.resource_version()},
            "status": {"membership": self.membership(next)},
        });
        let params = PatchParams::apply(limits::FIELD_MANAGER);
        self.api.patch_status(&self.name, &params, &Patch::Merge(patch)).await.map_err(failed)?;
        self.recorded = Some(ours);
        Ok(())
    }

    fn membership(&self, next: &Next) -> MembershipStatus {
        let membership = &next.membership;
        let leader = membership.member(membership.leader());
        let leader =
            leader.map(|leader| (self.pods)(&leader.pod_uid).unwrap_or_else(|| leader.pod_uid.clone()));
        MembershipStatus {
            epoch: counter(membership.epoch().0),
            digest: membership.digest().to_string(),
            version_floor: membership.floor().map(|floor| version(floor.run, floor.step)),
            generation: counter(next.basis.generation),
            resolved_digest: next.basis.resolved.to_string(),
            cause: next.cause.expect("only a new membership is recorded"),
            start_time: Time(whole_second(Timestamp::now())),
            leader: leader.unwrap_or_default(),
            protocol_version: limits::PROTOCOL_VERSION,
            planner_version: limits::PLANNER_VERSION,
        }
    }
}

impl EpochRecord for StatusRecord {
    fn recorded(&self) -> Option<Recorded> {
        self.recorded
    }

    async fn record(&mut self, next: &Next) -> Result<(), RecordError> {
        self.write(next).await
    }
}

/// What the status of a refit says of its newest membership; nothing where it cannot be read.
#[must_use]
pub fn recorded(refit: &WeightRefit) -> Option<Recorded> {
    let membership = refit.status.as_ref()?.membership.as_ref()?;
    Some(Recorded {
        epoch: Epoch(membership.epoch.unsigned_abs()),
        digest: membership.digest.parse().ok()?,
        floor: membership
            .version_floor
            .map(|floor| VersionFloor { run: floor.run.unsigned_abs(), step: floor.step }),
        basis: Basis {
            generation: membership.generation.unsigned_abs(),
            resolved: membership.resolved_digest.parse().ok()?,
        },
    })
}

/// A version of the protocol in a status.
pub(super) fn version(run: u64, step: i64) -> Version {
    Version { run: counter(run), step: step.clamp(-limits::COUNTER_MAX, limits::COUNTER_MAX) }
}

/// A number of the protocol in a status.
pub(super) fn counter(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(limits::COUNTER_MAX).min(limits::COUNTER_MAX)
}

/// Kubernetes' times have seconds.
pub(super) fn whole_second(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}
