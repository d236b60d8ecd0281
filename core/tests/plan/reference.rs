//! The naive planner: element by element, from the regions alone. It shares nothing with the real one.

use crate::case::Case;
use std::collections::{BTreeMap, BTreeSet};
use weightrefit_core::id::{LocalId, Rank, TensorId};
use weightrefit_core::plan::Plan;
use weightrefit_core::plan::moves::{Endpoint, MoveBox};
use weightrefit_core::region::{Piece, RankRegions};

/// (tensor as the training side stores it, HF index).
type Element = (TensorId, Vec<u64>);
/// (local tensor, position in it).
type Place = (LocalId, Vec<u64>);

/// Calls `visit` for every index below `shape`.
pub(crate) fn indices(shape: &[u64], visit: &mut dyn FnMut(&[u64])) {
    fn go(shape: &[u64], index: &mut Vec<u64>, visit: &mut dyn FnMut(&[u64])) {
        let Some(&n) = shape.get(index.len()) else { return visit(index) };
        for i in 0..n {
            index.push(i);
            go(shape, index, visit);
            index.pop();
        }
    }
    go(shape, &mut Vec::new(), visit);
}

/// Every element of a piece with its place.
fn elements(piece: &Piece, visit: &mut dyn FnMut(Vec<u64>, Place)) {
    let dims: Vec<Vec<(u64, u64)>> = piece
        .dims
        .iter()
        .map(|runs| runs.iter().flat_map(|run| (0..run.len).map(|i| (run.hf + i, run.local + i))).collect())
        .collect();
    let lens: Vec<u64> = dims.iter().map(|dim| dim.len() as u64).collect();
    indices(&lens, &mut |index| {
        let pairs: Vec<(u64, u64)> = index.iter().zip(&dims).map(|(&i, dim)| dim[i as usize]).collect();
        let mut place: Vec<u64> = piece.lead.into_iter().collect();
        for i in 0..dims.len() {
            let hf_dim = piece.permute.as_ref().map_or(i, |permute| usize::from(permute[i]));
            place.push(pairs[hf_dim].1);
        }
        visit(pairs.iter().map(|pair| pair.0).collect(), (piece.local, place));
    });
}

fn contents(case: &Case, rank: &RankRegions) -> BTreeMap<Place, Element> {
    let mut out = BTreeMap::new();
    for piece in &rank.pieces {
        elements(piece, &mut |hf, place| {
            let before = out.insert(place, (case.stored_as(piece.tensor), hf));
            assert_eq!(before, None, "the case itself is broken: two pieces at one place");
        });
    }
    out
}

pub(crate) struct Reference {
    sources: Vec<BTreeMap<Place, Element>>,
    destinations: BTreeMap<Endpoint, BTreeMap<Place, Element>>,
    pub(crate) minimum: u64,
    /// Bytes by the set of ranks that could send them.
    by_holders: BTreeMap<BTreeSet<u32>, u64>,
}

impl Reference {
    pub(crate) fn new(case: &Case) -> Self {
        let sources: Vec<_> = case.training.iter().map(|rank| contents(case, rank)).collect();
        let mut holders: BTreeMap<&Element, BTreeSet<u32>> = BTreeMap::new();
        for (rank, source) in (0..).zip(&sources) {
            for element in source.values() {
                holders.entry(element).or_default().insert(rank);
            }
        }
        let mut destinations = BTreeMap::new();
        let (mut minimum, mut by_holders) = (0, BTreeMap::new());
        for (pool, list) in (0..).zip(&case.pools) {
            for replica in 0..list.replicas.len() as u32 {
                for (rank, regions) in (0..).zip(&list.ranks) {
                    let held = contents(case, regions);
                    for ((local, _), element) in &held {
                        let bytes = regions.locals[local.0 as usize].dtype.size();
                        minimum += bytes;
                        *by_holders.entry(holders[element].clone()).or_default() += bytes;
                    }
                    destinations.insert(Endpoint::Inference { pool, replica, rank: Rank(rank) }, held);
                }
            }
        }
        Self { sources, destinations, minimum, by_holders }
    }

    /// The lowest load of the busiest source that any plan with divisible elements can have.
    pub(crate) fn busiest_optimum(&self) -> u64 {
        let subsets = 1_u32..1 << self.sources.len();
        let forced = subsets.map(|subset| {
            let inside = |set: &BTreeSet<u32>| set.iter().all(|rank| subset >> rank & 1 == 1);
            let bytes: u64 = self.by_holders.iter().filter(|(set, _)| inside(set)).map(|(_, b)| b).sum();
            bytes.div_ceil(u64::from(subset.count_ones()))
        });
        forced.max().unwrap_or(0)
    }

    pub(crate) fn sets(&self) -> u64 {
        self.by_holders.len() as u64
    }

    /// P1 and P2: applies every box and compares element by element.
    pub(crate) fn check(&self, plan: &Plan) {
        let mut missing = self.destinations.clone();
        for pair in (0..plan.pairs()).map(|at| plan.moves(at).unwrap()) {
            let Endpoint::Training { rank } = pair.source else { panic!("{:?} sends", pair.source) };
            let target = missing.get_mut(&pair.destination).expect("a destination of the case");
            for moved in &pair.boxes {
                self.apply(moved, &self.sources[rank.0 as usize], target);
            }
        }
        assert!(missing.values().all(BTreeMap::is_empty), "never written: {missing:?}");
    }

    fn apply(
        &self,
        moved: &MoveBox,
        source: &BTreeMap<Place, Element>,
        target: &mut BTreeMap<Place, Element>,
    ) {
        let mut first = true;
        indices(moved.shape.as_slice(), &mut |offset| {
            let from = shifted(moved.source_start.as_slice(), offset);
            let turned: Vec<u64> = match moved.permute {
                None => offset.to_vec(),
                Some(permute) => (0..offset.len()).map(|i| offset[usize::from(permute[i])]).collect(),
            };
            let to = shifted(moved.destination_start.as_slice(), &turned);
            let sent = source.get(&(moved.source, from)).expect("a source sends only what it holds");
            let wanted = target.remove(&(moved.destination, to));
            assert_eq!(
                wanted.as_ref(),
                Some(sent),
                "written twice, outside every piece, or wrong: {moved:?}"
            );
            if first {
                assert_eq!(moved.hf.as_slice(), sent.1, "{moved:?}");
                first = false;
            }
        });
    }
}

/// `start` + `offset`, where `start` may have a lead in front.
fn shifted(start: &[u64], offset: &[u64]) -> Vec<u64> {
    let stacked = start.len() - offset.len();
    let mut out = start.to_vec();
    out[stacked..].iter_mut().zip(offset).for_each(|(at, by)| *at += by);
    out
}
