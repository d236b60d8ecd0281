//! Wire, digest and cast rates of the host data path, each beside its peer measured in the same run.
//!
//! Prints a table and writes `target/bench/transfer.json`. Rates are medians over rounds in which this path and
//! its peer take turns, since a shared machine drifts.

mod host;
mod loopback;
mod report;
mod workload;

use report::{Row, median};
use std::num::NonZero;
use weightrefit_agent::limits::CHUNK_BYTES;
use weightrefit_core::dtype::{Cast, DType};
use workload::{Model, Workload};

/// Rounds per row: enough for a median on a noisy machine.
const ROUNDS: usize = 5;
/// Least share of a bare loopback copy that the TCP path must reach.
const LOOPBACK_RATIO_MIN: f64 = 0.6;
/// Least digest rate of one core on bf16 rows of 384 words and more.
const DIGEST_GBS_MIN: f64 = 4.0;

fn main() -> anyhow::Result<()> {
    // `cargo bench -- wire` or `-- host` runs one half; cargo itself adds `--bench`.
    let half = std::env::args().skip(1).find(|argument| !argument.starts_with("--"));
    let runs = |name| half.as_deref().is_none_or(|half| half == name);
    let mut rows = Vec::new();
    if runs("wire") {
        rows.extend(wire()?);
    }
    if runs("host") {
        rows.extend(host()?);
    }
    report::write("transfer", &rows)
}

fn wire() -> anyhow::Result<Vec<Row>> {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let streams = u32::try_from(cores.min(4))?;
    let mut rows = Vec::new();
    for (model, source) in
        [(Model::MiniLm, DType::F32), (Model::MiniLm, DType::Bf16), (Model::Qwen06, DType::Bf16)]
    {
        let workload = Workload::new(model, source)?;
        for tls in [false, true] {
            rows.extend(transfer(&workload, streams, tls)?);
        }
    }
    Ok(rows)
}

fn host() -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for columns in [384, 1024, 3072] {
        rows.push(host::digest(columns)?);
    }
    for (cast, name) in [
        (Cast::F32ToBf16, "f32 to bf16"),
        (Cast::F32ToF16, "f32 to f16"),
        (Cast::Bf16ToF32, "bf16 to f32"),
        (Cast::F16ToF32, "f16 to f32"),
    ] {
        rows.push(host::cast(cast, name)?);
    }
    rows.push(host::ledger()?);
    Ok(rows)
}

/// One pair over loopback without digest, beside a bare copy of as many bytes from memory to memory with the same
/// streams and TLS setting. The second row is what the sockets do with buffers that stay in the cache.
fn transfer(workload: &Workload, streams: u32, tls: bool) -> anyhow::Result<[Row; 2]> {
    let ends = loopback::Ends::new(tls)?;
    let mut memory = loopback::Buffers::new(workload.bytes())?;
    let mut cache = loopback::Buffers::new(u64::from(streams) * CHUNK_BYTES as u64)?;
    let (mut ours, mut bare, mut cached) = (Vec::new(), Vec::new(), Vec::new());
    // Small models take milliseconds: more of them for as steady a median.
    let rounds = if workload.bytes() < 100 << 20 { 5 * ROUNDS } else { ROUNDS };
    for _ in 0..rounds {
        bare.push(loopback::bare(&ends, &mut memory, workload.bytes(), streams)?);
        ours.push(workload.transfer(&ends, streams)?);
        cached.push(loopback::bare(&ends, &mut cache, workload.bytes(), streams)?);
    }
    workload.check()?;
    let setting = if tls { "tls 1.3" } else { "plain" };
    let peer = median(&mut bare);
    let row = |what: &str, value, peer: Option<f64>| Row {
        name: format!("{what}, {setting}, {streams} streams"),
        value,
        unit: "GB/s on the wire",
        peer: peer.map(|peer| ("bare loopback copy", peer)),
        bar: peer.map(|peer| LOOPBACK_RATIO_MIN * peer),
    };
    let size = format!("  sockets alone, {:.0} MB", workload.bytes() as f64 / 1e6);
    Ok([row(workload.name(), median(&mut ours), Some(peer)), row(&size, median(&mut cached), None)])
}

/// The bar of the digest, for `host`.
fn digest_bar(columns: u64) -> Option<f64> {
    (columns >= 384).then_some(DIGEST_GBS_MIN)
}
