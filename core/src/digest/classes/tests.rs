use super::*;
use crate::id::LocalId;
use crate::model::TensorMeta;
use crate::region::LocalTensor;
use proptest::prelude::*;

/// What a piece holds: runs of each dim as (HF start, length).
pub(in crate::digest) type Runs = Vec<Vec<(u64, u64)>>;
/// Copies, as (rank, piece).
type Copies = Vec<(usize, u32)>;

pub(in crate::digest) fn table(shapes: &[&[u64]]) -> TensorTable {
    let meta = |(at, shape): (usize, &&[u64])| TensorMeta {
        name: format!("t{at}"),
        shape: shape.to_vec(),
        dtype: DType::F32,
    };
    TensorTable::new(shapes.iter().enumerate().map(meta).collect()).expect("a table")
}

/// A rank that holds these parts of tensors, each in a local tensor of its own.
pub(in crate::digest) fn rank(dtype: DType, pieces: &[(u32, Runs)]) -> RankRegions {
    let mut out = RankRegions::default();
    for (at, (tensor, dims)) in pieces.iter().enumerate() {
        let runs = |runs: &Vec<(u64, u64)>| {
            let mut local = 0;
            let run = |(hf, len): &(u64, u64)| {
                local += len;
                Run { local: local - len, hf: *hf, len: *len }
            };
            runs.iter().map(run).collect::<Vec<Run>>()
        };
        let dims: Vec<Vec<Run>> = dims.iter().map(runs).collect();
        let shape = dims.iter().map(|runs| runs.iter().map(|run| run.len).sum()).collect();
        out.locals.push(LocalTensor { name: format!("l{at:02}"), shape, dtype });
        out.pieces.push(Piece {
            tensor: TensorId(*tensor),
            local: LocalId(at as u32),
            lead: None,
            dims,
            permute: None,
        });
    }
    out
}

/// Elements (row-major index) of a part, each as often as its boxes hold it.
fn elements(part: &Part, piece: &Piece, shape: &[u64]) -> Vec<u64> {
    let mut out = Vec::new();
    part.boxes(piece, |found| {
        let extents = found.shape.as_slice();
        for element in 0..extents.iter().product::<u64>() {
            let (mut rest, mut index, mut stride) = (element, 0, 1);
            for dim in (0..extents.len()).rev() {
                index += (found.hf.as_slice()[dim] + rest % extents[dim]) * stride;
                rest /= extents[dim];
                stride *= shape[dim];
            }
            out.push(index);
        }
    });
    out
}

fn runs(extent: u64) -> impl Strategy<Value = Vec<(u64, u64)>> {
    let run = (0..extent, 1..=extent).prop_map(move |(start, len)| (start, len.min(extent - start)));
    prop_oneof![3 => Just(vec![(0, extent)]), 4 => prop::collection::vec(run, 1..3)]
}

proptest! {
    /// C1, and: a class is exactly the elements that the same copies hold, whatever the overlaps.
    #[test]
    fn classes_are_what_the_same_copies_hold(
        held in prop::collection::vec(prop::collection::vec((runs(5), runs(6)), 0..3), 1..4),
    ) {
        let shape = [5, 6];
        let table = table(&[&shape]);
        // One rank holds everything, so that nothing is missing.
        let mut held: Vec<Vec<Runs>> =
            held.into_iter().map(|pieces| pieces.into_iter().map(|(a, b)| vec![a, b]).collect()).collect();
        held[0].push(vec![vec![(0, 5)], vec![(0, 6)]]);
        let ranks: Vec<RankRegions> = held.into_iter().map(|pieces| {
            rank(DType::Bf16, &pieces.into_iter().map(|dims| (0, dims)).collect::<Vec<_>>())
        }).collect();
        let ranks: Vec<&RankRegions> = ranks.iter().collect();
        let classes = Classes::of_pool("p", &table, &ranks).expect("covered");

        // What each class and each element is held by.
        let mut by_class: BTreeMap<u32, (BTreeSet<u64>, Copies)> = BTreeMap::new();
        let mut holders: BTreeMap<u64, Copies> = BTreeMap::new();
        for (at, regions) in ranks.iter().enumerate() {
            let parts = classes.parts(Rank(at as u32));
            prop_assert!(parts.is_sorted_by_key(|part| part.class));
            for part in parts {
                let found = elements(part, &regions.pieces[part.piece as usize], &shape);
                let set: BTreeSet<u64> = found.iter().copied().collect();
                prop_assert_eq!(set.len(), found.len(), "a part holds an element twice");
                let class = by_class.entry(part.class).or_insert_with(|| (set.clone(), Vec::new()));
                prop_assert_eq!(&class.0, &set, "copies of a class hold different elements");
                class.1.push((at, part.piece));
                for element in set {
                    holders.entry(element).or_default().push((at, part.piece));
                }
            }
        }
        let mut seen = BTreeSet::new();
        for (elements, copies) in by_class.values() {
            for element in elements {
                prop_assert!(seen.insert(*element), "element {} is in two classes", element);
                prop_assert_eq!(&holders[element], copies);
            }
        }
        prop_assert_eq!(seen.len(), 30);
        // And every element that a piece holds is in some part of it, as often as the piece holds it.
        for (at, regions) in ranks.iter().enumerate() {
            for (index, piece) in regions.pieces.iter().enumerate() {
                let whole = Part { class: 0, tensor: TensorId(0), dtype: DType::Bf16, piece: index as u32, products: None };
                let mut expected = elements(&whole, piece, &shape);
                let parts = classes.parts(Rank(at as u32)).iter().filter(|part| part.piece == index as u32);
                let mut found: Vec<u64> = parts.flat_map(|part| elements(part, piece, &shape)).collect();
                expected.sort_unstable();
                found.sort_unstable();
                prop_assert_eq!(found, expected);
            }
        }
    }
}

#[test]
fn equal_and_disjoint_pieces_are_classes_as_they_are() {
    let table = table(&[&[8, 4], &[3]]);
    let half =
        |start| rank(DType::Bf16, &[(0, vec![vec![(start, 4)], vec![(0, 4)]]), (1, vec![vec![(0, 3)]])]);
    let (low, high) = (half(0), half(4));
    let classes = Classes::of_pool("p", &table, &[&low, &high, &low]).expect("covered");
    assert_eq!(classes.classes.len(), 3);
    let numbers = |rank| classes.parts(Rank(rank)).iter().map(|part| part.class).collect::<Vec<u32>>();
    assert_eq!((numbers(0), numbers(1), numbers(2)), (vec![0, 2], vec![1, 2], vec![0, 2]));
    assert!(classes.parts(Rank(0)).iter().all(|part| part.products.is_none()));
    assert!(classes.parts(Rank(3)).is_empty());
}

#[test]
fn a_side_that_holds_part_of_a_tensor_is_refused() {
    let table = table(&[&[8, 4]]);
    let part = rank(DType::Bf16, &[(0, vec![vec![(0, 7)], vec![(0, 4)]])]);
    let refused = Classes::of_pool("p", &table, &[&part, &part]).expect_err("a row is missing");
    assert_eq!(refused.to_string(), "the ranks of pool `p` hold 28 of 32 elements of `t0` as bf16");
    assert_eq!(refused.code(), Code::CoverageGap);
    let wanted = BTreeSet::from([(TensorId(0), DType::Bf16)]);
    let refused =
        Classes::of_training(&table, &BTreeMap::new(), &[&part], &wanted).expect_err("a row is missing");
    assert_eq!(refused.to_string(), "the ranks of training hold 28 of 32 elements of `t0` as bf16");
}

#[test]
fn what_cannot_be_digested_is_refused_by_name() {
    let table = table(&[&[8]]);
    let whole = |dtype| rank(dtype, &[(0, vec![vec![(0, 8)]])]);
    let wanted = BTreeSet::from([(TensorId(0), DType::F8E4M3)]);
    let refused = Classes::of_training(&table, &BTreeMap::new(), &[&whole(DType::Bf16)], &wanted);
    let refused = refused.expect_err("no cast");
    assert_eq!(refused.to_string(), "training rank 0 stores `t0` as bf16, which cannot be cast to f8e4m3");
    let mut unknown = whole(DType::Bf16);
    unknown.pieces[0].tensor = TensorId(7);
    let refused = Classes::of_pool("p", &table, &[&unknown]).expect_err("no such tensor");
    assert_eq!(refused.to_string(), "piece 0 of rank 0 of pool `p` does not fit its tensors");
    let mut outside = whole(DType::Bf16);
    outside.pieces[0].dims[0][0].hf = u64::MAX;
    assert!(Classes::of_pool("p", &table, &[&outside]).is_err());
}

#[test]
fn an_alias_is_digested_where_the_trainer_holds_it() {
    let table = table(&[&[4], &[4]]);
    let tied = rank(DType::F32, &[(0, vec![vec![(0, 4)]])]);
    let wanted = BTreeSet::from([(TensorId(0), DType::Bf16), (TensorId(1), DType::Bf16)]);
    assert!(Classes::of_training(&table, &BTreeMap::new(), &[&tied], &wanted).is_err());
    let alias = BTreeMap::from([(TensorId(1), TensorId(0))]);
    let classes = Classes::of_training(&table, &alias, &[&tied], &wanted).expect("held under the other name");
    let parts: Vec<(TensorId, u32)> =
        classes.parts(Rank(0)).iter().map(|part| (part.tensor, part.piece)).collect();
    assert_eq!(parts, [(TensorId(0), 0), (TensorId(1), 0)]);
}

#[test]
fn pieces_that_overlap_in_too_many_ways_are_refused() {
    let table = table(&[&[200, 200]]);
    let bands: Vec<(u32, Runs)> =
        (0..100_u64).map(|at| (0, vec![vec![(at, 100)], vec![(at, 100)]])).collect();
    let refused = Classes::of_pool("p", &table, &[&rank(DType::I8, &bands)]).expect_err("too many");
    assert_eq!(refused.to_string(), "the pieces of `t0` in pool `p` overlap in more than 16384 ways");
}
