use super::*;
use crate::digest::classes::tests::{Runs, rank, table};
use crate::digest::{ColumnKeys, RowDigest};
use crate::id::{Epoch, Incarnation, Sha256 as Hash};
use crate::membership::{Member, Seat};
use crate::region::RankRegions;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Two training ranks that hold the halves of a matrix and both all of a vector; a pool of one replica of two
/// ranks, cut by columns.
struct World {
    ledger: Ledger,
    training: Vec<RankRegions>,
    pool: Vec<RankRegions>,
}

fn world() -> World {
    let table = table(&[&[6, 4], &[5]]);
    let side = |dtype, cut: fn(u64) -> Runs| {
        (0..2).map(|at| rank(dtype, &[(0, cut(at)), (1, vec![vec![(0, 5)]])])).collect::<Vec<RankRegions>>()
    };
    let training = side(DType::Bf16, |at| vec![vec![(at * 3, 3)], vec![(0, 4)]]);
    let pool = side(DType::Bf16, |at| vec![vec![(0, 6)], vec![(at * 2, 2)]]);
    let pool_classes =
        Classes::of_pool("p", &table, &pool.iter().collect::<Vec<&RankRegions>>()).expect("covered");
    let training_classes = Classes::of_training(
        &table,
        &BTreeMap::new(),
        &training.iter().collect::<Vec<&RankRegions>>(),
        pool_classes.tensors(),
    )
    .expect("covered");
    let seats = [
        Seat::Training { rank: Rank(0) },
        Seat::Training { rank: Rank(1) },
        Seat::Inference { pool: "p".into(), replica: "a".into(), rank: Rank(0) },
        Seat::Inference { pool: "p".into(), replica: "a".into(), rank: Rank(1) },
    ];
    let members = seats.into_iter().enumerate().map(|(at, seat)| Member {
        seat,
        pod_uid: format!("pod-{at}"),
        incarnation: Incarnation(at as u128 + 1),
        key: Hash([at as u8; 32]),
        round_addresses: vec!["localhost:1".into()],
        byte_addresses: vec!["localhost:2".into()],
    });
    let membership =
        Membership::new("uid", Epoch(1), None, vec!["p".into()], members.collect()).expect("valid");
    World { ledger: Ledger::new(&membership, training_classes, vec![pool_classes]), training, pool }
}

/// What honest ranks report of the content where element i of tensor t is 31 i + t, except as `faults` say:
/// (rank, tensor) whose copies are all one bit off.
fn reports(
    classes: &Classes,
    ranks: &[RankRegions],
    first: u32,
    faults: &[(usize, u32)],
) -> BTreeMap<MemberId, ClassSums> {
    let keys = ColumnKeys::new(8);
    let report = |(at, regions): (usize, &RankRegions)| {
        let sums = classes.parts(Rank(at as u32)).iter().map(|part| {
            let mut digest = RowDigest::new(&keys, part.dtype);
            part.boxes(&regions.pieces[part.piece as usize], |found| {
                let (hf, shape) = (found.hf.as_slice(), found.shape.as_slice());
                let (rows, columns) = if shape.len() == 2 { (shape[0], shape[1]) } else { (1, shape[0]) };
                for row in 0..rows {
                    for column in 0..columns {
                        let (r, c) =
                            if hf.len() == 2 { (hf[0] + row, hf[1] + column) } else { (0, hf[0] + column) };
                        let wrong = u16::from(faults.contains(&(at, part.tensor.0)));
                        let value = ((r * 4 + c) as u16 * 31 + part.tensor.0 as u16) ^ wrong;
                        digest.row(r, c, &value.to_le_bytes());
                    }
                }
            });
            (part.class, digest.sum())
        });
        (MemberId(first + at as u32), Arc::new(sums.collect()))
    };
    ranks.iter().enumerate().map(report).collect()
}

#[test]
fn equal_content_agrees_however_it_is_cut() {
    let World { ledger, training, pool } = world();
    let published = ledger.published(&reports(&ledger.training, &training, 0, &[])).expect("honest");
    assert_eq!(published.len(), 2);
    let landed = ledger.landed(0, &reports(&ledger.pools[0], &pool, 2, &[]), &published).expect("honest");
    assert_eq!(landed, version_sum(&published));
    assert_ne!(landed, ContentSum::default());
}

#[test]
fn faults_are_named() {
    let World { ledger, training, pool } = world();
    let honest = ledger.published(&reports(&ledger.training, &training, 0, &[])).expect("honest");
    let fault = |code, tensor, member: Option<u32>| {
        Err(DigestFault { code, tensor: Some(TensorId(tensor)), member: member.map(MemberId) })
    };
    let published =
        |faults: &[_]| ledger.published(&reports(&ledger.training, &training, 0, faults)).map(|_| ());
    let landed =
        |faults: &[_]| ledger.landed(0, &reports(&ledger.pools[0], &pool, 2, faults), &honest).map(|_| ());
    // Copies of the vector differ.
    assert_eq!(published(&[(1, 1)]), fault(Code::ReplicaDivergence, 1, Some(1)));
    assert_eq!(landed(&[(1, 1)]), fault(Code::DigestMismatch, 1, Some(3)));
    // A part of the matrix has no copy to differ from: the publication shows it.
    assert_eq!(published(&[(1, 0)]), Ok(()));
    assert_eq!(landed(&[(1, 0)]), fault(Code::DigestMismatch, 0, None));
    // Equal copies that are not what was published.
    assert_eq!(landed(&[(0, 1), (1, 1)]), fault(Code::DigestMismatch, 1, None));
}

#[test]
fn reports_that_do_not_have_the_classes_of_their_rank_are_refused() {
    let World { ledger, training, .. } = world();
    let honest = reports(&ledger.training, &training, 0, &[]);
    let refused = |change: fn(&mut Vec<(u32, ContentSum)>)| {
        let mut sums = honest.clone();
        change(Arc::make_mut(sums.get_mut(&MemberId(1)).expect("reported")));
        let fault = ledger.published(&sums).expect_err("refused");
        assert_eq!((fault.code, fault.member), (Code::ReplicaDivergence, Some(MemberId(1))));
    };
    refused(|sums| sums.truncate(1));
    refused(|sums| sums.push((9, ContentSum::default())));
    refused(|sums| sums[0].0 = 0);
    let mut missing = honest.clone();
    missing.remove(&MemberId(1));
    assert!(ledger.published(&missing).is_err());
    assert!(ledger.landed(7, &honest, &PublishedSums::new()).is_err(), "no such replica");
}

/// Computed with `hashlib` from the rule of the decisions page.
#[test]
fn the_sum_of_a_version_is_over_index_dtype_and_digest() {
    let sums = PublishedSums::from([
        ((TensorId(0), DType::Bf16), ContentSum([1; 16])),
        ((TensorId(258), DType::F32), ContentSum([2; 16])),
    ]);
    let expected =
        [0x19, 0x7e, 0x50, 0x45, 0x99, 0xa0, 0xf6, 0xd7, 0x86, 0x33, 0xc2, 0x33, 0x15, 0xd9, 0x8a, 0x85];
    assert_eq!(version_sum(&sums).0, expected);
}

#[test]
fn without_verification_every_version_has_sum_zero() {
    assert_eq!(Unverified.published(&BTreeMap::new()), Ok(PublishedSums::new()));
    assert_eq!(Unverified.landed(0, &BTreeMap::new(), &PublishedSums::new()), Ok(ContentSum::default()));
}

#[test]
fn one_element_never_counts_twice() {
    let World { ledger, training, .. } = world();
    let published = ledger.published(&reports(&ledger.training, &training, 0, &[])).expect("honest");
    let keys = ColumnKeys::new(8);
    let mut whole = RowDigest::new(&keys, DType::Bf16);
    let row: Vec<u8> = (0..5_u16).flat_map(|c| (c * 31 + 1).to_le_bytes()).collect();
    whole.row(0, 0, &row);
    assert_eq!(published[&(TensorId(1), DType::Bf16)], whole.sum(), "both ranks hold the vector");
    assert_eq!(ledger.training.tensors(), &BTreeSet::from_iter(published.keys().copied()));
}
