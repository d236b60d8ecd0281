//! What one core does to bytes: digest, cast, and the ledger that says who digests what.

use crate::report::{Row, median};
use crate::workload::memory;
use crate::{ROUNDS, digest_bar};
use anyhow::Context;
use std::hint::black_box;
use std::sync::atomic::AtomicBool;
use weightrefit_agent::executor::DigestProgram;
use weightrefit_core::digest::{Classes, ColumnKeys};
use weightrefit_core::dtype::{Cast, DType};
use weightrefit_core::id::{LocalId, Rank, TensorId};
use weightrefit_core::model::{TensorMeta, TensorTable};
use weightrefit_core::region::{LocalTensor, Piece, RankRegions, Run};

/// Far more than any cache.
const BYTES: u64 = 256 << 20;

/// Digest of a bf16 tensor in shared memory, one thread, beside a copy of the same bytes.
pub(crate) fn digest(columns: u64) -> anyhow::Result<Row> {
    let shape = vec![BYTES / 2 / columns, columns];
    let table =
        TensorTable::new(vec![TensorMeta { name: "w".into(), shape: shape.clone(), dtype: DType::Bf16 }])?;
    let regions = whole(&[(0, shape.clone())], DType::Bf16);
    let memory = memory(regions.locals.clone(), true)?;
    let classes = Classes::of_pool("bench", &table, &[&regions])?;
    let program = DigestProgram::new(&classes, Rank(0), &regions, &table, memory.placements())?;
    let keys = ColumnKeys::new(program.row_words_max());
    let bytes = (shape[0] * shape[1] * 2) as usize;
    let mut copy = vec![0; bytes];
    let (mut ours, mut copied) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        copied.push(rate(bytes, || memory.mapping(0).read(0, black_box(&mut copy)))?);
        let mut sums = None;
        ours.push(rate(bytes, || sums = program.run(&memory, &keys, 1, &AtomicBool::new(false)))?);
        black_box(sums.context("nobody stops the digest")?);
    }
    Ok(Row {
        name: format!("digest, bf16 rows of {columns}, one core"),
        value: median(&mut ours),
        unit: "GB/s",
        peer: Some(("memcpy", median(&mut copied))),
        bar: digest_bar(columns),
    })
}

/// A cast from one private buffer to another, one thread, beside a copy of as many bytes in and out.
pub(crate) fn cast(cast: Cast, name: &str) -> anyhow::Result<Row> {
    let (from, to) = cast.sizes().unwrap_or((1, 1));
    let input = vec![0x3f; BYTES as usize];
    let mut output = vec![0; (BYTES / from * to) as usize];
    let mut copy = vec![0; BYTES as usize];
    let moved = input.len() + output.len();
    let (mut ours, mut copied) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        copied.push(rate(2 * input.len(), || black_box(&mut copy).copy_from_slice(black_box(&input)))?);
        ours.push(rate(moved, || cast.apply(black_box(&input), black_box(&mut output)))?);
    }
    Ok(Row {
        name: format!("cast {name}, in and out, one core"),
        value: median(&mut ours),
        unit: "GB/s",
        peer: Some(("memcpy, in and out", median(&mut copied))),
        bar: None,
    })
}

/// Seconds to derive the classes of 37,000 tensors over 64 ranks, each holding 1/64 of each.
pub(crate) fn ledger() -> anyhow::Result<Row> {
    const TENSORS: u32 = 37_000;
    const RANKS: u64 = 64;
    let meta =
        |at: u32| TensorMeta { name: format!("t{at:05}"), shape: vec![1536, 4096], dtype: DType::Bf16 };
    let table = TensorTable::new((0..TENSORS).map(meta).collect())?;
    let ranks: Vec<RankRegions> = (0..RANKS)
        .map(|rank| {
            let shapes: Vec<(u32, Vec<u64>)> =
                (0..TENSORS).map(|at| (at, vec![1536 / RANKS, 4096])).collect();
            let mut regions = whole(&shapes, DType::Bf16);
            regions.pieces.iter_mut().for_each(|piece| piece.dims[0][0].hf = rank * (1536 / RANKS));
            regions
        })
        .collect();
    let ranks: Vec<&RankRegions> = ranks.iter().collect();
    let begin = ran()?;
    let classes = Classes::of_pool("bench", &table, &ranks)?;
    let value = ran()? - begin;
    black_box(classes);
    Ok(Row { name: "classes of 37,000 tensors × 64 ranks".into(), value, unit: "s", peer: None, bar: None })
}

/// A rank that holds these tensors, or the first rows of them.
fn whole(tensors: &[(u32, Vec<u64>)], dtype: DType) -> RankRegions {
    let mut out = RankRegions::default();
    for (at, (tensor, shape)) in tensors.iter().enumerate() {
        let dims = shape.iter().map(|len| vec![Run { local: 0, hf: 0, len: *len }]).collect();
        out.locals.push(LocalTensor { name: format!("t{at:05}"), shape: shape.clone(), dtype });
        let (tensor, local) = (TensorId(*tensor), LocalId(at as u32));
        out.pieces.push(Piece { tensor, local, lead: None, dims, permute: None });
    }
    out
}

/// GB/s of one core: by the time that the thread ran, so that a busy machine does not count.
fn rate(bytes: usize, work: impl FnOnce()) -> anyhow::Result<f64> {
    let begin = ran()?;
    work();
    Ok(bytes as f64 / (ran()? - begin) / 1e9)
}

/// Seconds that this thread has run.
fn ran() -> anyhow::Result<f64> {
    let stat =
        std::fs::read_to_string("/proc/thread-self/schedstat").context("read the thread's run time")?;
    let nanoseconds: u64 = stat.split(' ').next().context("schedstat has three numbers")?.parse()?;
    Ok(nanoseconds as f64 / 1e9)
}
