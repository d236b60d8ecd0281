use super::super::Place;
use super::super::testing::kernels;
use super::*;
use crate::memory::create;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use weightrefit_core::id::{LocalId, TensorId};
use weightrefit_core::model::TensorMeta;
use weightrefit_core::region::{LocalTensor, Run};

/// One rank's piece of the tensor: runs per HF dim as (start, length), the order in which its local tensor stores
/// the dims, and a lead index.
type Held = (Vec<(u64, u64)>, Vec<u8>, Option<u64>);

fn element(shape: &[u64], index: &[u64]) -> u64 {
    index.iter().zip(shape).fold(0, |all, (at, extent)| all * extent + at)
}

fn content(seed: u64, at: u64, size: u64) -> Vec<u8> {
    (0..size).map(|byte| (at * 8 + byte).wrapping_mul(seed | 1).to_le_bytes()[2]).collect()
}

/// The rank's regions, with the tensor's content where they say it is, and rubbish elsewhere.
fn rank(shape: &[u64], dtype: DType, (parts, order, lead): &Held, seed: u64) -> (RankRegions, HostMemory) {
    let runs: Vec<Run> = parts.iter().map(|(hf, len)| Run { local: 1, hf: *hf, len: *len }).collect();
    let mut extents: Vec<u64> = order.iter().map(|dim| runs[usize::from(*dim)].len + 2).collect();
    extents.splice(0..0, lead.map(|lead| lead + 1));
    let local = LocalTensor { name: "w".into(), shape: extents.clone(), dtype };
    let piece = Piece {
        tensor: TensorId(0),
        local: LocalId(0),
        lead: *lead,
        dims: runs.iter().map(|run| vec![*run]).collect(),
        permute: Some(order.clone()),
    };
    let len = extents.iter().product::<u64>() * dtype.size();
    let (_, mapping) = create("test", len + 3).expect("memory");
    mapping.write(0, &vec![0x5a; len as usize + 3]);
    let count: u64 = runs.iter().map(|run| run.len).product();
    for position in 0..count {
        let mut rest = position;
        let mut at = vec![0; shape.len()];
        for dim in (0..shape.len()).rev() {
            at[dim] = rest % runs[dim].len;
            rest /= runs[dim].len;
        }
        let hf: Vec<u64> = at.iter().zip(&runs).map(|(at, run)| at + run.hf).collect();
        let mut local: Vec<u64> = order.iter().map(|dim| at[usize::from(*dim)] + 1).collect();
        local.splice(0..0, *lead);
        let data = content(seed, element(shape, &hf), dtype.size());
        mapping.write(3 + element(&extents, &local) * dtype.size(), &data);
    }
    let placements =
        Placements::new(vec![local.clone()], vec![Place { mapping: 0, offset: 3 }]).expect("one");
    let memory = HostMemory::new(vec![Arc::new(mapping)], Arc::new(placements)).expect("fits");
    (RankRegions { locals: vec![local], pieces: vec![piece] }, memory)
}

fn held(shape: Vec<u64>) -> impl Strategy<Value = Held> {
    let run = |extent: u64| (0..extent, 1..=extent).prop_map(move |(at, len)| (at, len.min(extent - at)));
    let runs = shape.iter().map(|extent| run(*extent)).collect::<Vec<_>>();
    let order: Vec<u8> = (0..shape.len() as u8).collect();
    let order = prop_oneof![2 => Just(order.clone()), 1 => Just(order).prop_shuffle()];
    (runs, order, prop::option::of(0_u64..2))
}

fn world() -> impl Strategy<Value = (Vec<u64>, Vec<Held>)> {
    let shape = prop_oneof![
        6 => prop::collection::vec(1_u64..20, 0..3),
        1 => prop::collection::vec(1_u64..5, 4),
        // Rows longer than the scratch.
        1 => (1_u64..3, 2500_u64..5000).prop_map(|(rows, columns)| vec![rows, columns]),
    ];
    shape.prop_flat_map(|shape| {
        let whole: Held =
            (shape.iter().map(|extent| (0, *extent)).collect(), (0..shape.len() as u8).collect(), None);
        let others = prop::collection::vec(held(shape.clone()), 0..3);
        (Just(shape), others.prop_map(move |others| others.into_iter().chain([whole.clone()]).collect()))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever ranks hold, all holders of a class report one sum, and the classes add up to the whole tensor's
    /// digest after the cast.
    #[test]
    fn classes_add_up_to_the_tensor((shape, ranks) in world(), seed: u64, dtypes in 0..5_usize, threads in 1..3_usize) {
        let (stored, wire) = [
            (DType::F32, DType::Bf16),
            (DType::Bf16, DType::F32),
            (DType::Bf16, DType::Bf16),
            (DType::I8, DType::I8),
            (DType::F64, DType::F64),
        ][dtypes];
        let meta = TensorMeta { name: "w".into(), shape: shape.clone(), dtype: stored };
        let table = TensorTable::new(vec![meta]).expect("small");
        let (regions, memories): (Vec<RankRegions>, Vec<HostMemory>) =
            ranks.iter().map(|held| rank(&shape, stored, held, seed)).unzip();
        let wanted = BTreeSet::from([(TensorId(0), wire)]);
        let all: Vec<&RankRegions> = regions.iter().collect();
        let classes = Classes::of_training(&table, &BTreeMap::new(), &all, &wanted).expect("covered");

        let mut sums: BTreeMap<u32, ContentSum> = BTreeMap::new();
        for (at, (regions, memory)) in regions.iter().zip(&memories).enumerate() {
            let program = DigestProgram::new(&classes, Rank(at as u32), regions, &table, memory.placements());
            let program = program.expect("fits");
            let keys = ColumnKeys::new(program.row_words_max());
            let report = program.run(memory, &keys, threads, &AtomicBool::new(false)).expect("not stopped");
            for (class, sum) in report.iter() {
                prop_assert_eq!(*sums.entry(*class).or_insert(*sum), *sum);
            }
        }

        let keys = ColumnKeys::new(0);
        let mut whole = RowDigest::new(&keys, wire);
        let columns = shape.last().copied().unwrap_or(1);
        for at in 0..shape.iter().product::<u64>() {
            let data = content(seed, at, stored.size());
            let mut cast = vec![0; wire.size() as usize];
            Cast::between(stored, wire).expect("castable").apply(&data, &mut cast);
            whole.row(at / columns, at % columns, &cast);
        }
        let total = sums.values().fold(ContentSum::default(), |total, sum| total.plus(*sum));
        prop_assert_eq!(total, whole.sum());
    }
}

/// The kernel's code, compiled for this machine, sums each part as the code of the CPU does.
#[test]
fn the_kernel_digests_what_the_cpu_digests() {
    let mut runner = TestRunner::deterministic();
    let dtypes = [
        (DType::F32, DType::Bf16),
        (DType::F32, DType::F16),
        (DType::F16, DType::F32),
        (DType::Bf16, DType::F32),
        (DType::Bf16, DType::Bf16),
        (DType::F32, DType::F32),
        (DType::I8, DType::I8),
        (DType::F64, DType::F64),
    ];
    let (mut input, mut want) = (Vec::new(), Vec::new());
    for case in 0..160_usize {
        let (shape, ranks) = world().new_tree(&mut runner).expect("a world").current();
        let (stored, wire) = dtypes[case % dtypes.len()];
        let meta = TensorMeta { name: "w".into(), shape: shape.clone(), dtype: stored };
        let table = TensorTable::new(vec![meta]).expect("small");
        let (regions, memories): (Vec<RankRegions>, Vec<HostMemory>) =
            ranks.iter().map(|held| rank(&shape, stored, held, case as u64)).unzip();
        let wanted = BTreeSet::from([(TensorId(0), wire)]);
        let all: Vec<&RankRegions> = regions.iter().collect();
        let classes = Classes::of_training(&table, &BTreeMap::new(), &all, &wanted).expect("covered");
        for (at, (regions, memory)) in regions.iter().zip(&memories).enumerate() {
            let program = DigestProgram::new(&classes, Rank(at as u32), regions, &table, memory.placements());
            let program = program.expect("fits");
            let keys = ColumnKeys::new(program.row_words_max());
            let sums = program.run(memory, &keys, 1, &AtomicBool::new(false)).expect("not stopped");
            let on_device = program.table(|_| 0);
            let bytes = memory.mapping(0).len();
            let head = [2, on_device.entries.into(), bytes, on_device.units, on_device.sums.into()];
            head.iter().for_each(|word: &u64| input.extend(word.to_le_bytes()));
            input.extend(&on_device.bytes);
            let mut contents = vec![0; bytes as usize];
            memory.mapping(0).read(0, &mut contents);
            input.extend(contents);
            want.extend(sums.iter().map(|(_, sum)| sum.lanes()));
        }
    }
    let found = kernels::run(input);
    let lanes = |sum: &[u8; 16]| {
        let (lanes, _) = sum.as_chunks::<4>();
        [0, 1, 2, 3].map(|lane: usize| u32::from_le_bytes(lanes[lane]))
    };
    let found: Vec<[u32; 4]> = found.as_chunks::<16>().0.iter().map(lanes).collect();
    assert!(want.len() > 200, "{} sums", want.len());
    assert_eq!(found.len(), want.len());
    let differs = found.iter().zip(&want).position(|(a, b)| a != b);
    assert_eq!(differs, None, "of {} sums", want.len());
}

#[test]
fn a_stopped_digest_reports_nothing() {
    let held: Held = (vec![(0, 4), (0, 4)], vec![0, 1], None);
    let (regions, memory) = rank(&[4, 4], DType::Bf16, &held, 7);
    let meta = TensorMeta { name: "w".into(), shape: vec![4, 4], dtype: DType::Bf16 };
    let table = TensorTable::new(vec![meta]).expect("small");
    let classes = Classes::of_pool("p", &table, &[&regions]).expect("covered");
    let program = DigestProgram::new(&classes, Rank(0), &regions, &table, memory.placements()).expect("fits");
    let keys = ColumnKeys::new(4);
    assert!(program.run(&memory, &keys, 1, &AtomicBool::new(false)).is_some());
    assert!(program.run(&memory, &keys, 1, &AtomicBool::new(true)).is_none());
}

#[test]
fn regions_that_do_not_fit_the_placements_are_refused() {
    let held: Held = (vec![(0, 4), (0, 4)], vec![0, 1], None);
    let (mut regions, memory) = rank(&[4, 4], DType::Bf16, &held, 7);
    let meta = TensorMeta { name: "w".into(), shape: vec![4, 4], dtype: DType::Bf16 };
    let table = TensorTable::new(vec![meta]).expect("small");
    let classes = Classes::of_pool("p", &table, &[&regions]).expect("covered");
    regions.pieces[0].dims[1][0].local = 3;
    let refused = DigestProgram::new(&classes, Rank(0), &regions, &table, memory.placements());
    assert!(matches!(refused, Err(ExecutorError::OutsideTensor { .. })));
    regions.pieces[0].local = LocalId(5);
    let refused = DigestProgram::new(&classes, Rank(0), &regions, &table, memory.placements());
    assert!(matches!(refused, Err(ExecutorError::UnknownLocal { index: 5, count: 1 })));
}
