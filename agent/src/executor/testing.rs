//! Random pairs of ranks, and gather and scatter against a copy element by element.

pub(super) mod kernels;

use super::*;
use crate::memory::{Mapping, create};
use proptest::prelude::*;
use std::sync::Arc;
use weightrefit_core::dtype::Cast;
use weightrefit_core::id::{LocalId, Rank, TensorId};
use weightrefit_core::plan::moves::{DIMS_MAX, Dims, Endpoint, MoveBox, PairMoves};
use weightrefit_core::region::LocalTensor;

/// One box and the margins of the local tensors around it.
#[derive(Debug, Clone)]
struct Case {
    dtypes: (DType, DType),
    shape: Vec<u64>,
    permute: Option<Vec<u8>>,
    source: Margin,
    destination: Margin,
}

/// Elements of a local tensor before and after the box in each dim, and the lead index where it is stacked.
#[derive(Debug, Clone)]
struct Margin {
    before: Vec<u64>,
    after: Vec<u64>,
    lead: Option<u64>,
}

impl Margin {
    fn local(&self, name: String, extents: &[u64], dtype: DType) -> (LocalTensor, Dims) {
        let around = self.before.iter().zip(&self.after).zip(extents);
        let mut shape: Vec<u64> = around.map(|((before, after), extent)| before + after + extent).collect();
        let mut start = self.before[..extents.len()].to_vec();
        if let Some(lead) = self.lead {
            shape.insert(0, lead + 2);
            start.insert(0, lead);
        }
        (LocalTensor { name, shape, dtype }, Dims::new(&start).expect("few dims"))
    }
}

fn margin() -> impl Strategy<Value = Margin> {
    let side = || prop::collection::vec(prop_oneof![2 => Just(0), 1 => 0_u64..3], 4);
    (side(), side(), prop::option::weighted(0.3, 0_u64..3)).prop_map(|(before, after, lead)| Margin {
        before,
        after,
        lead,
    })
}

fn case() -> impl Strategy<Value = Case> {
    let casts = [
        (DType::F32, DType::Bf16),
        (DType::F32, DType::F16),
        (DType::F16, DType::F32),
        (DType::Bf16, DType::F32),
    ];
    let dtypes = prop_oneof![
        prop::sample::select(DType::ALL.to_vec()).prop_map(|dtype| (dtype, dtype)),
        prop::sample::select(casts.to_vec()),
    ];
    let shape = prop::collection::vec(prop_oneof![1_u64..6, 1_u64..60], 0..4);
    let shape = (shape, prop::bool::weighted(0.3)).prop_flat_map(|(shape, permuted)| {
        let order: Vec<u8> = (0..shape.len() as u8).collect();
        let order = Just(order).prop_shuffle().prop_map(move |order| permuted.then_some(order));
        (Just(shape), order)
    });
    (dtypes, shape, margin(), margin()).prop_map(|(dtypes, (shape, permute), source, destination)| Case {
        dtypes,
        shape,
        permute,
        source,
        destination,
    })
}

/// The pair that moves all cases, with the local tensors of both ends.
fn pair(cases: &[Case]) -> (PairMoves, Vec<LocalTensor>, Vec<LocalTensor>) {
    let (mut boxes, mut from, mut to, mut bytes) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for (index, case) in cases.iter().enumerate() {
        let order: Vec<u8> = case.permute.clone().unwrap_or_else(|| (0..case.shape.len() as u8).collect());
        let extents: Vec<u64> = order.iter().map(|dim| case.shape[usize::from(*dim)]).collect();
        let (source, source_start) = case.source.local(format!("s{index}"), &case.shape, case.dtypes.0);
        let (destination, destination_start) =
            case.destination.local(format!("d{index}"), &extents, case.dtypes.1);
        let mut permute = [0; DIMS_MAX];
        permute[..order.len()].copy_from_slice(&order);
        boxes.push(MoveBox {
            tensor: TensorId(index as u32),
            hf: Dims::new(&vec![0; case.shape.len()]).expect("few dims"),
            shape: Dims::new(&case.shape).expect("few dims"),
            source: LocalId(index as u32),
            source_start,
            destination: LocalId(index as u32),
            destination_start,
            permute: case.permute.is_some().then_some(permute),
        });
        bytes += case.shape.iter().product::<u64>() * case.dtypes.1.size();
        from.push(source);
        to.push(destination);
    }
    let destination = Endpoint::Inference { pool: 0, replica: 0, rank: Rank(0) };
    let moves = PairMoves { source: Endpoint::Training { rank: Rank(0) }, destination, bytes, boxes };
    (moves, from, to)
}

fn memory(locals: Vec<LocalTensor>, fill: impl Fn(u64) -> u8) -> HostMemory {
    let (placements, len) = Placements::staging(locals).expect("small");
    let (_, mapping) = create("test", len).expect("memory");
    mapping.write(0, &(0..len).map(fill).collect::<Vec<u8>>());
    HostMemory::new(vec![Arc::new(mapping)], Arc::new(placements)).expect("fits")
}

fn contents(mapping: &Mapping) -> Vec<u8> {
    let mut out = vec![0; mapping.len() as usize];
    mapping.read(0, &mut out);
    out
}

/// What `to` must hold: its old bytes, and each element of each box copied alone.
fn naive(moves: &PairMoves, source: &HostMemory, from: &[u8], destination: &HostMemory, to: &mut [u8]) {
    let offset = |memory: &HostMemory, local: LocalId, at: &[u64]| {
        let (tensor, place) = memory.placements().local(local.0).expect("known");
        let index = at.iter().zip(&tensor.shape).fold(0, |index, (at, dim)| index * dim + at);
        ((place.offset + index * tensor.dtype.size()) as usize, tensor.dtype)
    };
    for found in &moves.boxes {
        let shape = found.shape.as_slice();
        for element in 0..shape.iter().product::<u64>() {
            let mut rest = element;
            let mut position = vec![0; shape.len()];
            for dim in (0..shape.len()).rev() {
                position[dim] = rest % shape[dim];
                rest /= shape[dim];
            }
            let place = |start: &Dims, position: &[u64]| {
                let lead = start.as_slice().len() - position.len();
                let moved = position.iter().zip(&start.as_slice()[lead..]).map(|(a, b)| a + b);
                start.as_slice()[..lead].iter().copied().chain(moved).collect::<Vec<u64>>()
            };
            let permuted: Vec<u64> = match found.permute {
                Some(permute) => (0..shape.len()).map(|dim| position[usize::from(permute[dim])]).collect(),
                None => position.clone(),
            };
            let (a, stored) = offset(source, found.source, &place(&found.source_start, &position));
            let (b, wire) =
                offset(destination, found.destination, &place(&found.destination_start, &permuted));
            let cast = Cast::between(stored, wire).expect("castable");
            let (read, written) = (stored.size() as usize, wire.size() as usize);
            cast.apply(&from[a..a + read], &mut to[b..b + written]);
        }
    }
}

proptest! {
    #[test]
    fn gather_and_scatter_equal_a_copy_element_by_element(
        cases in prop::collection::vec(case(), 1..5), streams in 1_u32..5,
        chunks in (8_usize..400, 1_usize..400), seed: u64,
    ) {
        let (moves, from, to) = pair(&cases);
        let source = memory(from, |i| (i.wrapping_mul(seed | 1) >> 3) as u8);
        let destination = memory(to, |_| 0xaa);
        let mut expected = contents(destination.mapping(0));
        naive(&moves, &source, &contents(source.mapping(0)), &destination, &mut expected);

        let locals = destination.placements().locals();
        let out = Program::for_source(&moves, source.placements(), locals).expect("fits");
        let into = Program::for_destination(&moves, destination.placements()).expect("fits");
        prop_assert_eq!((out.bytes(), into.bytes()), (moves.bytes, moves.bytes));
        let passed = Passed::read(&out.pass()).expect("a program");
        prop_assert!(passed.fits(&source));
        prop_assert_eq!(passed.program().pass(), out.pass());
        for stream in (0..streams).rev() {
            prop_assert_eq!(out.split(stream, streams), into.split(stream, streams));
            let mut sending = Cursor::stream(&out, stream, streams);
            let mut receiving = Cursor::stream(&into, stream, streams);
            let mut wire = Vec::new();
            let mut chunk = vec![0; chunks.0];
            while sending.left() > 0 {
                let n = gather(&mut sending, &source, &mut chunk, |_| false);
                prop_assert!(n > 0);
                wire.extend_from_slice(&chunk[..n]);
            }
            prop_assert_eq!(wire.len() as u64, receiving.left());
            for chunk in wire.chunks(chunks.1) {
                scatter(&mut receiving, &destination, chunk);
            }
            prop_assert_eq!(receiving.left(), 0);
        }
        prop_assert_eq!(contents(destination.mapping(0)), expected);
    }
}

fn locals(shape: &[u64], dtype: DType) -> Vec<LocalTensor> {
    vec![LocalTensor { name: "w".into(), shape: shape.to_vec(), dtype }]
}

fn one_box(shape: &[u64], start: &[u64], bytes: u64) -> PairMoves {
    let dims = |values: &[u64]| Dims::new(values).expect("few dims");
    let found = MoveBox {
        tensor: TensorId(0),
        hf: dims(&vec![0; shape.len()]),
        shape: dims(shape),
        source: LocalId(0),
        source_start: dims(start),
        destination: LocalId(0),
        destination_start: dims(start),
        permute: None,
    };
    let destination = Endpoint::Inference { pool: 0, replica: 0, rank: Rank(0) };
    PairMoves { source: Endpoint::Training { rank: Rank(0) }, destination, bytes, boxes: vec![found] }
}

#[test]
fn a_table_that_is_none_or_leaves_its_memory_is_refused() {
    let placements = Arc::new(Placements::staging(locals(&[4, 4], DType::F32)).expect("small").0);
    let two = one_box(&[2, 2], &[1, 1], 16);
    let table = Program::for_destination(&two, &placements).expect("fits").pass();
    assert_eq!(table.len(), ENTRY_BYTES);
    let word = |at: usize, value: u64| {
        let mut changed = table.clone();
        changed[at..at + 8].copy_from_slice(&value.to_le_bytes());
        changed
    };
    let tail = ENTRY_BYTES - 16;
    let rows = [
        ("cut", table[1..].to_vec()),
        ("wire bytes from elsewhere", word(0, 4)),
        ("a base that wraps around", word(8, u64::MAX)),
        ("a run of nothing", word(16, 0)),
        ("a run of half an element", word(16, 2)),
        ("a loop that wraps around", word(32, u64::MAX)),
        ("no turn of a loop", word(24, 0)),
        ("too deep", word(tail, 99)),
        ("an element of three bytes", word(tail + 8, 3)),
        ("a memory of a large number", word(tail + 8, 4 | u64::MAX << 32)),
    ];
    for (name, table) in rows {
        assert!(Passed::read(&table).is_none(), "{name}");
    }
    let small = memory(locals(&[2, 2], DType::F32), |_| 0);
    assert!(!Passed::read(&table).expect("a program").fits(&small), "beyond the end of the memory");
    assert!(!Passed::read(&word(tail + 8, 4 | 1 << 32)).expect("a program").fits(&small), "no such memory");
}

#[test]
fn plans_that_do_not_fit_the_tensors_are_refused() {
    let rows: [(&str, PairMoves, DType, DType, &str); 6] = [
        (
            "beyond the end",
            one_box(&[2, 4], &[3, 0], 16),
            DType::Bf16,
            DType::Bf16,
            "does not fit local tensor `w`",
        ),
        ("wraps around", one_box(&[2, 4], &[u64::MAX, 0], 16), DType::Bf16, DType::Bf16, "does not fit"),
        ("too few dims", one_box(&[2], &[0], 4), DType::Bf16, DType::Bf16, "does not fit"),
        (
            "no cast",
            one_box(&[2, 4], &[0, 0], 8),
            DType::Bf16,
            DType::F8E4M3,
            "is bf16, its destination f8e4m3",
        ),
        (
            "wrong count",
            one_box(&[2, 4], &[0, 0], 17),
            DType::Bf16,
            DType::Bf16,
            "says 17 bytes, its boxes have 16",
        ),
        ("count before the cast", one_box(&[2, 4], &[0, 0], 32), DType::F32, DType::Bf16, "boxes have 16"),
    ];
    for (name, moves, source, wire, message) in rows {
        let (placements, _) = Placements::staging(locals(&[4, 4], source)).expect("small");
        let refused = Program::for_source(&moves, &Arc::new(placements), &locals(&[4, 4], wire));
        let refused = refused.expect_err(name).to_string();
        assert!(refused.contains(message), "{name}: {refused}");
    }
    let (placements, _) = Placements::staging(Vec::new()).expect("none");
    let unknown = Program::for_destination(&one_box(&[1], &[0], 2), &Arc::new(placements));
    assert_eq!(unknown.expect_err("unknown").to_string(), "the plan names local tensor 0, the rank has 0");
}

#[test]
fn whole_neighbouring_tensors_become_one_run() {
    let two = |name: &str| LocalTensor { name: name.into(), shape: vec![16, 8], dtype: DType::Bf16 };
    let (placements, len) = Placements::staging(vec![two("a"), two("b")]).expect("small");
    assert_eq!(len, 512);
    let mut moves = one_box(&[16, 8], &[0, 0], 512);
    let mut second = moves.boxes[0];
    second.tensor = TensorId(1);
    second.destination = LocalId(1);
    moves.boxes.push(second);
    let program = Program::for_destination(&moves, &Arc::new(placements)).expect("fits");
    let span = Cursor::stream(&program, 0, 1).span(u64::MAX).expect("some");
    assert_eq!((span.run, span.wire_bytes), (512, 512));
}

#[test]
fn tensors_outside_their_memory_are_refused() {
    let (_, mapping) = create("small", 100).expect("memory");
    let mapping = Arc::new(mapping);
    let fits = |mapping_index: u32, offset: u64| {
        let place = Place { mapping: mapping_index, offset };
        let placements = Placements::new(locals(&[5, 5], DType::F32), vec![place]).expect("one each");
        HostMemory::new(vec![Arc::clone(&mapping)], Arc::new(placements)).map(drop)
    };
    assert_eq!(fits(0, 0), Ok(()));
    let outside = fits(0, 1).expect_err("one byte too far");
    assert_eq!(outside.to_string(), "local tensor `w` of 100 bytes at 1 does not fit memory 0 of 100 bytes");
    assert!(fits(0, u64::MAX).is_err());
    assert!(fits(1, 0).is_err());
    assert!(
        Placements::new(locals(&[1 << 40, 1 << 40], DType::F32), vec![Place { mapping: 0, offset: 0 }])
            .is_err()
    );
    assert!(Placements::new(locals(&[1], DType::F32), Vec::new()).is_err());
}
