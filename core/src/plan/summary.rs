//! A plan's figures: bytes that move and that other ways would move, and the digest.

use super::assign::{Destination, Share};
use super::moves::Endpoint;
use super::{Plan, PlannedPair};
use crate::dtype::DType;
use crate::id::{Rank, Sha256};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of one refit with everything in it sent once, in wire dtype. `crossFabric*` equal the plain figures
/// while no fabric domains are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanBytes {
    /// What any plan must deliver: the distinct elements of every destination rank, a second copy counted;
    /// taken from the layouts alone.
    pub minimum: u64,
    /// What this plan delivers: the sum over its boxes.
    pub planned: u64,
    /// Planned bytes that cross the slow fabric.
    pub cross_fabric: u64,
    /// What any plan must take across it.
    pub cross_fabric_minimum: u64,
    /// Sent by the busiest training rank.
    pub busiest_source: u64,
    /// Received by the busiest inference rank.
    pub busiest_destination: u64,
    /// What the usual way moves, casting first: every tensor that some destination holds a part of is gathered
    /// whole on training rank 0 (free where that rank holds it itself) in the smallest wire dtype it has, and
    /// then each rank of each replica receives, whole and in its pool's wire dtype, every tensor that some
    /// rank of its pool holds a part of.
    pub gather_broadcast: u64,
    /// Full staging of the rank that needs most: its local tensors that receive anything, pads included.
    pub peak_staging_per_rank: u64,
}

/// One pair in figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// Sender.
    pub source: Endpoint,
    /// Receiver.
    pub destination: Endpoint,
    /// Bytes in wire dtype.
    pub bytes: u64,
    /// Number of boxes.
    pub boxes: u64,
    /// Digest of the boxes.
    pub digest: Sha256,
}

/// All that there is to say about a plan without its boxes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// Plan digest.
    pub digest: Sha256,
    /// Figures.
    pub bytes: PlanBytes,
    /// In plan order: source rank, then pool, replica, rank.
    pub routes: Vec<Route>,
    /// Bytes that some source must send whatever the plan; `busiest_source` over this is what balancing left.
    pub busiest_source_bound: u64,
}

impl Plan {
    /// Expands every pair once. The cost is that of all boxes; replicas that a source serves alike count once.
    #[must_use]
    pub fn summarize(&self) -> Summary {
        let mut hash = self.digest_head();
        let mut routes: Vec<Route> = Vec::with_capacity(self.pairs.len());
        let mut alike: BTreeMap<(u32, Rank), (&[Share], usize)> = BTreeMap::new();
        let mut sender = None;
        for pair in &self.pairs {
            if sender.replace(pair.source) != Some(pair.source) {
                alike.clear();
            }
            let route = self.route(pair, &mut alike, &routes);
            hash.pair(route.source, route.destination, &route.digest);
            routes.push(route);
        }
        let bytes = self.bytes(&routes);
        Summary { digest: hash.finish(), bytes, routes, busiest_source_bound: self.bound }
    }

    fn route<'a>(
        &self,
        pair: &'a PlannedPair,
        alike: &mut BTreeMap<(u32, Rank), (&'a [Share], usize)>,
        routes: &[Route],
    ) -> Route {
        let key = (pair.destination.pool, pair.destination.rank);
        if let Some(&(shares, at)) = alike.get(&key)
            && shares == pair.shares
        {
            return Route { destination: pair.destination.endpoint(), ..routes[at] };
        }
        alike.insert(key, (&pair.shares, routes.len()));
        let moves = self.expand(pair);
        Route {
            source: moves.source,
            destination: moves.destination,
            bytes: moves.bytes,
            boxes: moves.boxes.len() as u64,
            digest: moves.digest(),
        }
    }

    fn bytes(&self, routes: &[Route]) -> PlanBytes {
        let mut sent: BTreeMap<Endpoint, u64> = BTreeMap::new();
        let mut received: BTreeMap<Endpoint, u64> = BTreeMap::new();
        for route in routes {
            *sent.entry(route.source).or_default() += route.bytes;
            *received.entry(route.destination).or_default() += route.bytes;
        }
        let busiest = |side: BTreeMap<Endpoint, u64>| side.into_values().max().unwrap_or(0);
        let planned = routes.iter().map(|route| route.bytes).sum();
        let minimum = self.destinations.iter().map(|to| self.needs.needs(*to).minimum).sum();
        let staging = |to: &Destination| self.needs.needs(*to).staging;
        PlanBytes {
            minimum,
            planned,
            cross_fabric: planned,
            cross_fabric_minimum: minimum,
            busiest_source: busiest(sent),
            busiest_destination: busiest(received),
            gather_broadcast: self.gather_broadcast(),
            peak_staging_per_rank: self.destinations.iter().map(staging).max().unwrap_or(0),
        }
    }

    /// See [`PlanBytes::gather_broadcast`]. Saturates: a comparison need not refuse what a plan accepts.
    fn gather_broadcast(&self) -> u64 {
        let sources = &self.needs.sources;
        let mut smallest: Vec<Option<u64>> = vec![None; sources.tensors.len()];
        let mut total = 0_u64;
        for (at, pool) in self.needs.pools.iter().enumerate().filter(|(_, pool)| !pool.replicas.is_empty()) {
            let receivers = pool.replicas.len() as u64 * pool.ranks.len() as u64;
            for (tensor, dtypes) in self.wire_dtypes(at).into_iter().enumerate() {
                let elements: u64 = sources.tensors[tensor].shape.iter().product();
                for size in dtypes.into_iter().map(DType::size) {
                    let least = &mut smallest[sources.tensors[tensor].stored_as.0 as usize];
                    *least = Some(least.map_or(size, |known| known.min(size)));
                    total = total.saturating_add((elements * size).saturating_mul(receivers));
                }
            }
        }
        for (tensor, size) in smallest.into_iter().enumerate() {
            let Some(size) = size else { continue };
            let elements: u64 = sources.tensors[tensor].shape.iter().product();
            total = total.saturating_add((elements - self.on_rank_0(tensor)) * size);
        }
        total
    }

    /// Elements of a tensor that training rank 0 holds.
    fn on_rank_0(&self, tensor: usize) -> u64 {
        let covers = &self.needs.covers;
        let atoms = &covers.list[covers.of_tensor[tensor] as usize];
        let held = atoms.iter().filter(|atom| covers.holders.get(atom.holders).first() == Some(&0));
        held.map(|atom| atom.bounds.volume()).sum()
    }

    /// By tensor, the dtypes that a pool's ranks receive it in.
    pub(super) fn wire_dtypes(&self, pool: usize) -> Vec<BTreeSet<DType>> {
        let mut out = vec![BTreeSet::new(); self.needs.sources.tensors.len()];
        for needs in &self.needs.pools[pool].ranks {
            for (held, _) in &needs.pieces {
                out[held.tensor.0 as usize].insert(needs.locals[held.local.0 as usize].dtype);
            }
        }
        out
    }
}
