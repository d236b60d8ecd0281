//! Whole models: the pairs of shipped documents are minimal, balanced, and right at sampled elements.

use crate::case::Chance;
use crate::pairs::{self, Pair};
use std::collections::BTreeMap;
use weightrefit_core::id::{Rank, Sha256, TensorId};
use weightrefit_core::plan::moves::{Endpoint, MoveBox};
use weightrefit_core::plan::{Plan, Planner, Sources};
use weightrefit_core::region::{Piece, RankRegions};

const LAYOUT: Sha256 = Sha256([0; 32]);
const RANKS_SAMPLED: u64 = 3;
const ELEMENTS_SAMPLED: u64 = 3_000;

fn plan(pair: &Pair) -> Plan {
    let table = pair.training.table();
    let alias: BTreeMap<String, String> = table
        .iter()
        .map(|(id, tensor)| (tensor.name.clone(), table[pair.training.alias(id)].name.clone()))
        .collect();
    let tensors = table.iter().map(|(_, tensor)| (tensor.name.as_str(), tensor.shape.as_slice()));
    let mut sources = Sources::new(tensors, &alias, LAYOUT).unwrap();
    for rank in pair.training.ranks() {
        sources.add_rank(&pair.training.rank_regions(rank).unwrap()).unwrap();
    }
    let mut planner = Planner::new(sources);
    planner.add_pool("default", vec!["0".into()], LAYOUT).unwrap();
    for rank in pair.inference.ranks() {
        planner.add_rank(&pair.inference.rank_regions(rank).unwrap()).unwrap();
    }
    planner.plan().unwrap()
}

/// The place of an element that a piece holds, by its runs.
fn place(piece: &Piece, element: &[u64]) -> Option<Vec<u64>> {
    let mut out: Vec<u64> = piece.lead.into_iter().collect();
    for (runs, &hf) in piece.dims.iter().zip(element) {
        let run = runs.iter().find(|run| (run.hf..run.hf + run.len).contains(&hf))?;
        out.push(run.local + (hf - run.hf));
    }
    Some(out)
}

/// Where the box puts what it takes from where, for the element at `to` of its destination, if it writes it.
fn taken_from(moved: &MoveBox, to: &[u64]) -> Option<Vec<u64>> {
    let (start, from) = (moved.destination_start.as_slice(), moved.source_start.as_slice());
    let lead = start.len() - moved.shape.as_slice().len();
    let offset: Option<Vec<u64>> = (lead..start.len()).map(|d| to[d].checked_sub(start[d])).collect();
    let offset = offset.filter(|offset| offset.iter().zip(moved.shape.as_slice()).all(|(at, n)| at < n))?;
    (to[..lead] == start[..lead]).then(|| {
        let lead = from.len() - offset.len();
        let inside = from[lead..].iter().zip(&offset).map(|(start, by)| start + by);
        from[..lead].iter().copied().chain(inside).collect()
    })
}

fn check(pair: &Pair) {
    let plan = plan(pair);
    let summary = plan.summarize();
    assert_eq!(summary.bytes.planned, summary.bytes.minimum, "{}", pair.name);
    assert!(summary.bytes.gather_broadcast > summary.bytes.minimum, "{}", pair.name);
    let (busiest, bound) = (summary.bytes.busiest_source as f64, summary.busiest_source_bound as f64);
    assert!(busiest <= bound * 1.001, "{}: busiest source {busiest}, bound {bound}", pair.name);
    let mut chance = Chance(1);
    let mut sources: BTreeMap<Rank, RankRegions> = BTreeMap::new();
    for _ in 0..RANKS_SAMPLED {
        let rank = Rank(chance.below(pair.inference.world().into()) as u32);
        check_rank(pair, &plan, rank, &mut chance, &mut sources);
    }
}

fn check_rank(
    pair: &Pair,
    plan: &Plan,
    rank: Rank,
    chance: &mut Chance,
    sources: &mut BTreeMap<Rank, RankRegions>,
) {
    let regions = pair.inference.rank_regions(rank).unwrap();
    let slice = plan.slice(Endpoint::Inference { pool: 0, replica: 0, rank });
    let mut by_local: BTreeMap<_, Vec<(Rank, &MoveBox)>> = BTreeMap::new();
    for pair in &slice.receives {
        let Endpoint::Training { rank } = pair.source else { panic!("{:?} sends", pair.source) };
        pair.boxes
            .iter()
            .for_each(|moved| by_local.entry(moved.destination).or_default().push((rank, moved)));
    }
    for _ in 0..ELEMENTS_SAMPLED {
        let piece = &regions.pieces[chance.below(regions.pieces.len() as u64) as usize];
        let element: Vec<u64> = piece
            .dims
            .iter()
            .map(|runs| {
                let run = runs[chance.below(runs.len() as u64) as usize];
                run.hf + chance.below(run.len)
            })
            .collect();
        let to = place(piece, &element).unwrap();
        let writers = by_local[&piece.local].iter();
        let writers: Vec<_> =
            writers.filter_map(|(rank, moved)| Some((*rank, *moved, taken_from(moved, &to)?))).collect();
        let [(source, moved, from)] = &writers[..] else {
            panic!("{}: {} boxes write {to:?} of {:?}", pair.name, writers.len(), piece.local)
        };
        let held = sources.entry(*source).or_insert_with(|| pair.training.rank_regions(*source).unwrap());
        let wanted: TensorId = pair.training.alias(piece.tensor);
        let known = held.pieces.iter().filter(|held| held.tensor == wanted && held.local == moved.source);
        let known: Vec<_> = known.filter_map(|held| place(held, &element)).collect();
        assert!(known.contains(from), "{}: {element:?} of {wanted} is not at {from:?}", pair.name);
    }
}

#[test]
fn qwen3_moe_from_megatron_to_vllm() {
    check(&pairs::qwen3_moe_to_vllm());
}

#[test]
fn deepseek_v3_from_megatron_to_vllm() {
    check(&pairs::deepseek_v3_to_vllm());
}

#[test]
fn the_other_named_pairs() {
    pairs::others().iter().for_each(check);
}
