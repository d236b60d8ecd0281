//! Digests of agreement: what the two ends of a pair, and all agents of a membership, must have equal.

use super::Plan;
use super::moves::{Endpoint, PairMoves};
use crate::dtype::DType;
use crate::id::Sha256;
use sha2::Digest;
use std::collections::BTreeSet;

/// Number of the planner's rules: agents whose planners may cut the same input differently differ in it.
pub const PLANNER_VERSION: u64 = 1;

impl PairMoves {
    /// SHA-256 over its boxes in order; of each the tensor index, HF start, shape, source start and
    /// destination start, every number as u64 little-endian, without counts or padding.
    #[must_use]
    pub fn digest(&self) -> Sha256 {
        let mut hash = Hash::default();
        for moved in &self.boxes {
            hash.number(u64::from(moved.tensor.0));
            for dims in [&moved.hf, &moved.shape, &moved.source_start, &moved.destination_start] {
                dims.as_slice().iter().for_each(|&value| hash.number(value));
            }
        }
        hash.finish()
    }
}

/// A hash over numbers (u64 little-endian), texts (length, then UTF-8) and digests (32 bytes).
#[derive(Default)]
pub(super) struct Hash(sha2::Sha256);

impl Hash {
    fn number(&mut self, value: u64) {
        self.0.update(value.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.update(text);
    }

    fn digest(&mut self, digest: &Sha256) {
        self.0.update(digest.0);
    }

    pub(super) fn finish(self) -> Sha256 {
        Sha256(self.0.finalize().into())
    }

    /// One pair of a plan digest.
    pub(super) fn pair(&mut self, source: Endpoint, destination: Endpoint, digest: &Sha256) {
        self.number(0); // Stage: all moves are direct.
        for endpoint in [source, destination] {
            let numbers = match endpoint {
                Endpoint::Training { rank } => [0, 0, 0, rank.0],
                Endpoint::Inference { pool, replica, rank } => [1, pool, replica, rank.0],
            };
            numbers.into_iter().for_each(|value| self.number(value.into()));
        }
        self.digest(digest);
    }
}

impl Plan {
    /// Starts the plan digest: a hash (see [`Hash`]) over, in this order,
    /// 1. [`PLANNER_VERSION`];
    /// 2. the number of tensors, and by name of each: name, number of dims, dims, and per pool the number of
    ///    wire dtypes and their names, sorted;
    /// 3. the training layout's digest and number of ranks; the number of pools, and of each: name, layout
    ///    digest, number of ranks, number of replicas, their names sorted;
    /// 4. the number of pairs, and of each in plan order: stage (0), source and destination as (side 0
    ///    training or 1 inference, pool, replica, rank; 0 where a side has none), pair digest.
    ///
    /// This does 1 to 3 and the count of 4.
    pub(super) fn digest_head(&self) -> Hash {
        let mut hash = Hash::default();
        let (sources, pools) = (&self.needs.sources, &self.needs.pools);
        hash.number(PLANNER_VERSION);
        let wire: Vec<Vec<BTreeSet<&str>>> = (0..pools.len()).map(|pool| self.wire_names(pool)).collect();
        let mut by_name: Vec<usize> = (0..sources.tensors.len()).collect();
        by_name.sort_unstable_by_key(|&at| &sources.tensors[at].name);
        hash.number(by_name.len() as u64);
        for at in by_name {
            let tensor = &sources.tensors[at];
            hash.text(&tensor.name);
            hash.number(tensor.shape.len() as u64);
            tensor.shape.iter().for_each(|&extent| hash.number(extent));
            for names in &wire {
                hash.number(names[at].len() as u64);
                names[at].iter().for_each(|name| hash.text(name));
            }
        }
        hash.digest(&sources.layout);
        hash.number(sources.locals.len() as u64);
        hash.number(pools.len() as u64);
        for pool in pools {
            hash.text(&pool.name);
            hash.digest(&pool.layout);
            hash.number(pool.ranks.len() as u64);
            hash.number(pool.replicas.len() as u64);
            pool.replicas.iter().for_each(|name| hash.text(name));
        }
        hash.number(self.pairs.len() as u64);
        hash
    }

    /// By tensor, the names of the dtypes that a pool's ranks receive it in.
    fn wire_names(&self, pool: usize) -> Vec<BTreeSet<&'static str>> {
        self.wire_dtypes(pool)
            .into_iter()
            .map(|dtypes| dtypes.into_iter().map(DType::name).collect())
            .collect()
    }
}
