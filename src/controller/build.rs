//! Third step: what a coordinator must know. A pure function.

use super::validate::Validated;
use crate::api::refit::WeightRefit;
use crate::api::resolve::ResolvedRefit;
use crate::coordinator::Settings;
use kube::ResourceExt;
use sha2::Digest;
use std::sync::Arc;
use weightrefit_core::id::Sha256;
use weightrefit_core::membership::roster::{Basis, PoolSpec, Spec};

/// What to coordinate: proof for [`super::apply::Applied::start`] that the resource is accepted.
#[derive(Debug)]
pub struct Built {
    pub(super) refit: Arc<WeightRefit>,
    pub(super) resolved: Arc<ResolvedRefit>,
    pub(super) settings: Settings,
}

/// Builds it.
#[must_use]
pub fn build(validated: Validated) -> Built {
    let Validated { refit, resolved } = validated;
    let pool = |pool: &crate::api::refit::Pool| PoolSpec {
        name: pool.name.clone(),
        ranks_per_replica: pool.ranks_per_replica.unsigned_abs(),
        min_replicas: pool.min_replicas.unsigned_abs(),
    };
    let for_agents = serde_json::to_vec(&resolved.for_agents()).expect("a refit has only text keys");
    let basis = Basis {
        generation: refit.metadata.generation.unwrap_or_default().unsigned_abs(),
        resolved: Sha256(sha2::Sha256::digest(&for_agents).into()),
    };
    let settings = Settings {
        refit: format!("{}/{}", resolved.namespace, resolved.name),
        refit_uid: refit.uid().unwrap_or_default(),
        spec: Spec {
            basis,
            training_ranks: refit.spec.training.world_size.unsigned_abs(),
            pools: refit.spec.inference.pools.iter().map(pool).collect(),
        },
        resolved: for_agents,
    };
    Built { refit, resolved, settings }
}
