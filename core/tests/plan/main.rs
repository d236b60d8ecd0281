//! The planner against a naive one, over random small refits, and its refusals.

mod by_hand;
mod case;
mod documents;
mod pairs;
mod reference;
mod tables;

use case::{Case, Chance, LAYOUT, random};
use proptest::prelude::*;
use reference::Reference;
use weightrefit_core::id::Rank;
use weightrefit_core::plan::document::Document;
use weightrefit_core::plan::moves::{Dims, Endpoint, MoveBox, PairMoves};
use weightrefit_core::plan::{Plan, Sources};

fn endpoints(case: &Case) -> Vec<Endpoint> {
    let mut out: Vec<Endpoint> = (0..case.training.len() as u32).map(Endpoint::training).collect();
    for (pool, list) in (0..).zip(&case.pools) {
        for replica in 0..list.replicas.len() as u32 {
            let rank = |rank| Endpoint::Inference { pool, replica, rank: Rank(rank) };
            out.extend((0..list.ranks.len() as u32).map(rank));
        }
    }
    out
}

fn json(plan: &Plan) -> String {
    serde_json::to_string(&Document::new(plan, &plan.summarize(), true)).unwrap()
}

fn pairs(plan: &Plan) -> Vec<PairMoves> {
    (0..plan.pairs()).map(|at| plan.moves(at).unwrap()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_destination_element_is_written_once_with_the_right_one(seed: u64) {
        let case = random(seed);
        Reference::new(&case).check(&case.plan());
    }

    #[test]
    fn planned_is_the_minimum_that_elements_count_to(seed: u64) {
        let case = random(seed);
        let summary = case.plan().summarize();
        let reference = Reference::new(&case);
        prop_assert_eq!(summary.bytes.planned, reference.minimum);
        prop_assert_eq!(summary.bytes.minimum, reference.minimum);
        prop_assert_eq!(summary.routes.iter().map(|route| route.bytes).sum::<u64>(), reference.minimum);
    }

    #[test]
    fn the_busiest_source_is_within_a_row_a_set_of_the_optimum(seed: u64) {
        let case = random(seed);
        let (summary, reference) = (case.plan().summarize(), Reference::new(&case));
        let (busiest, bound, optimum) =
            (summary.bytes.busiest_source, summary.busiest_source_bound, reference.busiest_optimum());
        prop_assert!(bound <= optimum && optimum <= busiest, "{bound} {optimum} {busiest}");
        // A set's stretch can miss each of its two ends by half a row of at most 7 x 7 f32.
        prop_assert!(busiest <= optimum + reference.sets() * 7 * 7 * 4, "{busiest} {optimum}");
    }

    #[test]
    fn slices_are_the_whole_plan(seed: u64) {
        let case = random(seed);
        let plan = case.plan();
        let whole = pairs(&plan);
        for of in endpoints(&case) {
            let mut slice = plan.slice(of);
            slice.sends.sort_by_key(|pair| pair.destination);
            slice.receives.sort_by_key(|pair| pair.source);
            let of_whole = |pick: fn(&PairMoves) -> Endpoint| {
                whole.iter().filter(|pair| pick(pair) == of).cloned().collect::<Vec<_>>()
            };
            prop_assert_eq!(slice.sends, of_whole(|pair| pair.source));
            prop_assert_eq!(slice.receives, of_whole(|pair| pair.destination));
        }
    }

    #[test]
    fn the_order_of_pieces_and_replicas_does_not_matter(seed: u64) {
        let case = random(seed);
        let mut other = case.clone();
        let chance = &mut Chance(seed ^ 1);
        let ranks = other.pools.iter_mut().flat_map(|pool| &mut pool.ranks).chain(&mut other.training);
        ranks.for_each(|rank| chance.shuffle(&mut rank.pieces));
        other.pools.iter_mut().for_each(|pool| chance.shuffle(&mut pool.replicas));
        prop_assert_eq!(json(&case.plan()), json(&other.plan()));
    }

    #[test]
    fn routes_and_boxes_are_in_order(seed: u64) {
        let pairs = pairs(&random(seed).plan());
        prop_assert!(pairs.is_sorted_by_key(|pair| (pair.source, pair.destination)));
        for pair in &pairs {
            prop_assert!(pair.boxes.is_sorted_by_key(|moved| (moved.tensor, moved.hf)));
            prop_assert!(!pair.boxes.is_empty());
        }
    }

    #[test]
    fn no_two_boxes_could_be_one(seed: u64) {
        for pair in pairs(&random(seed).plan()) {
            for (at, a) in pair.boxes.iter().enumerate() {
                for b in &pair.boxes[at + 1..] {
                    prop_assert!(!continues(a, b) && !continues(b, a), "{a:?} {b:?}");
                }
            }
        }
    }
}

/// Whether `next` goes on where `one` ends, along one dim, in the HF tensor and in both local tensors.
fn continues(one: &MoveBox, next: &MoveBox) -> bool {
    let ends = |moved: &MoveBox| {
        let leads = [&moved.source_start, &moved.destination_start]
            .map(|start| (start.as_slice().len() > moved.hf.as_slice().len()).then(|| start.as_slice()[0]));
        (moved.tensor, moved.source, moved.destination, moved.permute, leads)
    };
    let moved_by = |a: &Dims, b: &Dims| -> Vec<u64> {
        a.as_slice().iter().zip(b.as_slice()).map(|(a, b)| b.wrapping_sub(*a)).collect()
    };
    let steps = [
        moved_by(&one.hf, &next.hf),
        moved_by(&one.source_start, &next.source_start),
        moved_by(&one.destination_start, &next.destination_start),
    ];
    let source_dims = &steps[1][steps[1].len() - steps[0].len()..];
    ends(one) == ends(next)
        && steps.iter().all(|step| step.iter().filter(|by| **by != 0).count() == 1)
        && (0..source_dims.len()).any(|d| {
            let same_elsewhere =
                (0..source_dims.len()).all(|e| e == d || one.shape.as_slice()[e] == next.shape.as_slice()[e]);
            source_dims[d] == one.shape.as_slice()[d]
                && same_elsewhere
                && steps.iter().all(|step| step.contains(&source_dims[d]))
        })
}

#[test]
fn an_empty_plan_is_a_plan() {
    let sources = Sources::new([], &Default::default(), LAYOUT).unwrap();
    let plan = weightrefit_core::plan::Planner::new(sources).plan().unwrap();
    assert_eq!((plan.pairs(), plan.summarize().bytes), (0, Default::default()));
}
