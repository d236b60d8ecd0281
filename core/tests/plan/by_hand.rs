//! Small refits written out: what is refused, what the document and the digests contain.

use crate::case::{LAYOUT, Pool};
use crate::{Case, json, pairs};
use sha2::{Digest, Sha256};
use weightrefit_core::code::Code;
use weightrefit_core::dtype::DType;
use weightrefit_core::id::{LocalId, TensorId};
use weightrefit_core::plan::moves::PairMoves;
use weightrefit_core::plan::{PlanError, Sources};
use weightrefit_core::region::{LocalTensor, Piece, RankRegions, Run};

/// A local tensor `name` that holds the HF ranges `dims` of one tensor, from its own start.
fn held(tensor: u32, name: &str, dtype: DType, dims: &[(u64, u64)]) -> RankRegions {
    let shape = dims.iter().map(|(from, to)| to - from).collect();
    let run = |&(from, to): &(u64, u64)| vec![Run { local: 0, hf: from, len: to - from }];
    RankRegions {
        locals: vec![LocalTensor { name: name.into(), shape, dtype }],
        pieces: vec![Piece {
            tensor: TensorId(tensor),
            local: LocalId(0),
            lead: None,
            dims: dims.iter().map(run).collect(),
            permute: None,
        }],
    }
}

/// `w` [8, 6]: two training ranks with its row halves in f32, a pool of two replicas with column halves.
fn halves() -> Case {
    let row = |from, to| held(0, "w.rows", DType::F32, &[(from, to), (0, 6)]);
    let column = |from, to| held(0, "w.columns", DType::Bf16, &[(0, 8), (from, to)]);
    Case {
        tensors: vec![("w".into(), vec![8, 6])],
        alias: Default::default(),
        training: vec![row(0, 4), row(4, 8)],
        pools: vec![Pool {
            name: "default".into(),
            replicas: vec!["9".into(), "10".into()],
            ranks: vec![column(0, 3), column(3, 6)],
        }],
    }
}

fn refusal(case: &Case) -> PlanError {
    case.planner().expect_err("the case is broken")
}

#[test]
fn a_gap_names_tensor_rank_and_range() {
    let mut case = halves();
    case.training[1] = held(0, "w.rows", DType::F32, &[(4, 7), (0, 6)]);
    let error = refusal(&case);
    assert_eq!(error.code(), Code::CoverageGap);
    assert_eq!(error.to_string(), "no training rank holds `w`[7:8, 0:3], which pool `default` rank 0 needs");
    case.training.clear();
    assert_eq!(
        refusal(&case).to_string(),
        "no training rank holds `w`[0:8, 0:3], which pool `default` rank 0 needs"
    );
}

#[test]
fn a_dtype_pair_without_a_cast_names_both_ranks_and_dtypes() {
    let mut case = halves();
    case.pools[0].ranks[1].locals[0].dtype = DType::F8E4M3;
    let error = refusal(&case);
    assert_eq!(error.code(), Code::DtypeMismatch);
    assert_eq!(
        error.to_string(),
        "`w` is f32 on training rank 0 and f8e4m3 on pool `default` rank 1, \
         and no cast is allowed between them"
    );
}

#[test]
fn pieces_that_do_not_fit_are_refused() {
    type Break = fn(&mut RankRegions);
    let cases: [(Break, &str); 10] = [
        (|rank| rank.pieces[0].tensor = TensorId(1), "the table has 1 tensors"),
        (|rank| rank.pieces[0].local = LocalId(1), "local tensor 1 of 1"),
        (|rank| drop(rank.pieces[0].dims.pop()), "it has 1 dims, the tensor 2"),
        (|rank| rank.pieces[0].lead = Some(0), "local tensor `w.rows` has 2 dims, the piece 3 (most are 6)"),
        (|rank| rank.locals[0].shape.push(1), "local tensor `w.rows` has 3 dims, the piece 2 (most are 6)"),
        (
            |rank| {
                rank.locals[0].shape.insert(0, 2);
                rank.pieces[0].lead = Some(2);
            },
            "lead Some(2) of 2 in `w.rows`",
        ),
        (
            |rank| rank.pieces[0].permute = Some(vec![0, 0]),
            "permute [0, 0] does not name each of 2 dims once",
        ),
        (
            |rank| rank.pieces[0].dims[0][0].len = 5,
            "dim 0: run of 5 at HF 4 and local 0 does not fit (HF extent 8, local 0..4) (in `w.rows`)",
        ),
        (
            |rank| rank.pieces[0].dims[1][0].hf = u64::MAX,
            "dim 1: run of 6 at HF 18446744073709551615 and local 0 does not fit \
             (HF extent 6, local 0..6) (in `w.rows`)",
        ),
        (
            |rank| rank.pieces[0].dims[0].push(Run { local: 3, hf: 0, len: 1 }),
            "dim 0: run of 1 at HF 0 and local 3 does not fit (HF extent 8, local 4..4) (in `w.rows`)",
        ),
    ];
    for (break_it, problem) in cases {
        let mut case = halves();
        break_it(&mut case.training[1]);
        let error = refusal(&case);
        assert_eq!(error.code(), Code::LayoutRejected);
        let text = error.to_string();
        assert!(text.starts_with("a piece of `") && text.contains(problem), "{text}\n{problem}");
        assert!(text.contains("on training rank 1"), "{text}");
    }
}

#[test]
fn sizes_that_cannot_be_real_are_refused() {
    let mut case = halves();
    case.training[0].locals[0].shape = vec![1 << 40, 1 << 40];
    assert_eq!(
        refusal(&case).to_string(),
        "the size of `w.rows` [1099511627776, 1099511627776] does not fit in 63 bits"
    );
    let mut case = halves();
    case.tensors[0].1 = vec![u64::MAX, 0];
    assert!(matches!(refusal(&case), PlanError::TooLarge { .. }));
}

#[test]
fn runs_whose_boxes_would_not_fit_in_memory_are_refused() {
    let mut case = halves();
    let extent = 1 << 12;
    case.tensors[0].1 = vec![extent, extent];
    let rank = &mut case.training[1];
    rank.locals[0].shape = vec![extent, extent];
    rank.pieces[0].dims = vec![(0..extent / 2).map(|i| Run { local: i, hf: 2 * i, len: 1 }).collect(); 2];
    assert!(refusal(&case).to_string().ends_with("its runs make more than 1048576 boxes"));
}

#[test]
fn names_that_come_twice_are_refused() {
    let mut case = halves();
    case.pools[0].replicas = vec!["1".into(), "0".into(), "1".into()];
    assert_eq!(refusal(&case).to_string(), "replica `1` is named twice");
    let mut case = halves();
    case.pools.push(case.pools[0].clone());
    assert_eq!(refusal(&case).to_string(), "pool `default` is named twice");
    let mut case = halves();
    case.tensors.push(case.tensors[0].clone());
    assert_eq!(refusal(&case).to_string(), "tensor `w` is named twice");
}

#[test]
fn an_alias_of_another_shape_is_refused_and_one_outside_the_table_ignored() {
    let mut case = halves();
    case.alias.insert("w".into(), "elsewhere".into());
    assert!(case.planner().is_ok());
    case.tensors.push(("elsewhere".into(), vec![6, 8]));
    assert_eq!(
        refusal(&case).to_string(),
        "`w` has shape [8, 6], but its alias `elsewhere` has shape [6, 8]"
    );
}

#[test]
fn the_document_of_a_small_plan() {
    let plan = halves().plan();
    let document: serde_json::Value = serde_json::from_str(&json(&plan)).unwrap();
    let text = serde_json::to_string_pretty(&document).unwrap() + "\n";
    assert_eq!(text, include_str!("../../testdata/plan/halves.json"));
}

#[test]
fn a_permuted_box_has_the_shape_of_its_source() {
    let mut case = halves();
    let rank = &mut case.training[0];
    rank.locals[0].shape = vec![6, 4];
    rank.pieces[0].permute = Some(vec![1, 0]);
    let first = pairs(&case.plan())[0].boxes[0];
    assert_eq!((first.shape.as_slice(), first.hf.as_slice()), (&[3, 4][..], &[0, 0][..]));
    assert_eq!(first.permute.map(|permute| [permute[0], permute[1]]), Some([1, 0]));
    // Both sides transposed: no permute, and the shape is that of both.
    let rank = &mut case.pools[0].ranks[0];
    rank.locals[0].shape = vec![3, 8];
    rank.pieces[0].permute = Some(vec![1, 0]);
    let first = pairs(&case.plan())[0].boxes[0];
    assert_eq!((first.shape.as_slice(), first.permute), (&[3, 4][..], None));
}

#[test]
fn the_pair_digest_hashes_boxes_as_documented() {
    let pair: PairMoves = pairs(&halves().plan()).pop().unwrap();
    assert_eq!(pair.boxes.len(), 1);
    // Tensor 0; rows 4..8 and columns 3..6; from (0, 3) of the source to (4, 0) of the destination.
    let numbers = [0_u64, 4, 3, 4, 3, 0, 3, 4, 0];
    let bytes: Vec<u8> = numbers.into_iter().flat_map(u64::to_le_bytes).collect();
    assert_eq!(pair.digest().0, <[u8; 32]>::from(Sha256::digest(bytes)));
}

#[test]
fn the_plan_digest_covers_table_layouts_members_and_boxes() {
    type Change = fn(&mut Case);
    let changes: [Change; 8] = [
        |_| (),
        |case| case.tensors[0].0 = "v".into(),
        |case| case.tensors.push(("unused".into(), vec![1])),
        |case| case.pools[0].name = "other".into(),
        |case| case.pools[0].replicas[0] = "8".into(),
        |case| case.pools[0].ranks.iter_mut().for_each(|rank| rank.locals[0].dtype = DType::F32),
        |case| case.training.push(RankRegions::default()),
        |case| case.training.swap(0, 1),
    ];
    let mut digests: Vec<_> = changes
        .iter()
        .map(|change| {
            let mut case = halves();
            change(&mut case);
            case.plan().summarize().digest
        })
        .collect();
    assert_eq!(digests[0], halves().plan().summarize().digest);
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), changes.len());
}

#[test]
fn the_plan_digest_is_over_the_bytes_that_its_documentation_lists() {
    let plan = halves().plan();
    let mut bytes = Vec::new();
    let number = |bytes: &mut Vec<u8>, value: u64| bytes.extend(value.to_le_bytes());
    let text = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    };
    [1, 1].into_iter().for_each(|value| number(&mut bytes, value)); // Planner version, tensors.
    text(&mut bytes, "w");
    [2, 8, 6, 1].into_iter().for_each(|value| number(&mut bytes, value)); // Dims, wire dtypes of the pool.
    text(&mut bytes, "bf16");
    bytes.extend(LAYOUT.0);
    [2, 1].into_iter().for_each(|value| number(&mut bytes, value)); // Training ranks, pools.
    text(&mut bytes, "default");
    bytes.extend(LAYOUT.0);
    [2, 2].into_iter().for_each(|value| number(&mut bytes, value)); // Ranks, replicas.
    text(&mut bytes, "10");
    text(&mut bytes, "9");
    number(&mut bytes, 8);
    let mut pairs = pairs(&plan).into_iter();
    for source in 0..2 {
        for replica in 0..2 {
            for rank in 0..2 {
                let numbers = [0, 0, 0, 0, source, 1, 0, replica, rank]; // Stage, source, destination.
                numbers.into_iter().for_each(|value| number(&mut bytes, value));
                bytes.extend(pairs.next().unwrap().digest().0);
            }
        }
    }
    assert_eq!(plan.summarize().digest.0, <[u8; 32]>::from(Sha256::digest(bytes)));
}

#[test]
fn replicas_that_hold_the_same_share_the_sending() {
    let mut case = halves();
    case.training.extend(case.training.clone());
    let summary = case.plan().summarize();
    assert_eq!((summary.bytes.busiest_source, summary.busiest_source_bound), (48, 48));
    // Each of the copies feeds one replica: nobody has more peers than it must.
    assert_eq!(summary.routes.len(), 8);
    assert!(summary.routes.iter().all(|route| (route.bytes, route.boxes) == (24, 1)));
}

#[test]
fn peers_of_a_slice_rotate() {
    let plan = halves().plan();
    let first_source = |replica, rank| {
        plan.slice(weightrefit_core::plan::moves::Endpoint::Inference {
            pool: 0,
            replica,
            rank: weightrefit_core::id::Rank(rank),
        })
        .receives[0]
            .source
    };
    let training = weightrefit_core::plan::moves::Endpoint::training;
    assert_eq!([(0, 0), (0, 1), (1, 0), (1, 1)].map(|(a, b)| first_source(a, b)), [0, 0, 1, 1].map(training));
}

#[test]
fn an_unknown_rank_has_an_empty_slice() {
    let plan = halves().plan();
    assert_eq!(plan.slice(weightrefit_core::plan::moves::Endpoint::training(2)), Default::default());
}

#[test]
fn gather_and_broadcast_counts_whole_tensors() {
    // Gather: 48 elements less the 24 of rank 0, in bf16; broadcast: 48 bf16 elements to 2 x 2 ranks.
    let bytes = halves().plan().summarize().bytes;
    assert_eq!(bytes.gather_broadcast, 24 * 2 + 4 * 48 * 2);
    assert_eq!((bytes.minimum, bytes.planned, bytes.peak_staging_per_rank), (192, 192, 48));
    assert_eq!((bytes.busiest_source, bytes.busiest_destination), (96, 48));
}

#[test]
fn a_table_of_no_tensors_takes_no_rank_with_pieces() {
    let mut sources = Sources::new([], &Default::default(), LAYOUT).unwrap();
    assert!(sources.add_rank(&halves().training[0]).is_err());
    assert!(sources.add_rank(&RankRegions::default()).is_ok());
}
