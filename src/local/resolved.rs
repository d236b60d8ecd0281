//! The resolved refit as coordinator and agents get it, and what its inference ranks hold.

use super::world::World;
use crate::api::resolve::ResolvedRefit;
use crate::coordinator::Settings;
use std::collections::BTreeMap;
use weightrefit_core::layout::LayoutError;
use weightrefit_core::membership::Seat;
use weightrefit_core::region::{RankRegions, Run};
use weightrefit_proto::refit;

/// What a coordinator must know of the refit, where no cluster says it.
pub(crate) fn settings(resolved: &ResolvedRefit, world: &World) -> Settings {
    let ResolvedRefit { namespace, name, uid, .. } = resolved;
    Settings {
        refit: format!("{namespace}/{name}"),
        refit_uid: uid.clone().unwrap_or_else(|| format!("local.{namespace}.{name}")),
        spec: world.spec.clone(),
        resolved: serde_json::to_vec(&refit(resolved)).expect("a refit has only text keys"),
    }
}

/// What every agent of the run computes its plan from. A run of fewer replicas than the resource asks for does not
/// wait for more.
fn refit(resolved: &ResolvedRefit) -> refit::Refit {
    let mut refit = resolved.for_agents();
    for (pool, of_run) in refit.pools.iter_mut().zip(&resolved.pools) {
        pool.min_replicas = pool.min_replicas.min(of_run.replicas);
    }
    refit
}

/// Elements that have a source, of each inference rank.
pub(super) fn elements(resolved: &ResolvedRefit) -> Result<BTreeMap<Seat, u64>, LayoutError> {
    let mut elements = BTreeMap::new();
    for pool in &resolved.pools {
        let of_rank = |rank| Ok((rank, held(&pool.side.layout.rank_regions(rank)?)));
        let of_ranks =
            pool.side.layout.ranks().map(of_rank).collect::<Result<BTreeMap<_, _>, LayoutError>>()?;
        for hosted in pool.side.pods.iter().flat_map(|pod| &pod.ranks) {
            let Some(replica) = hosted.replica.clone() else { continue };
            let seat = Seat::Inference { pool: pool.name.clone(), replica, rank: hosted.rank };
            elements.insert(seat, of_ranks.get(&hosted.rank).copied().unwrap_or(0));
        }
    }
    Ok(elements)
}

fn held(regions: &RankRegions) -> u64 {
    let runs = |runs: &Vec<Run>| runs.iter().map(|run| run.len).sum::<u64>();
    regions.pieces.iter().map(|piece| piece.dims.iter().map(runs).product::<u64>()).sum()
}
