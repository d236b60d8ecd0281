//! How long planning takes: a table on stdout and `target/bench/plan.json`. Regions are made before the clock
//! starts, one rank at a time, so a row is the planner alone; figures of peers are in the row's `peer`.

#![expect(clippy::print_stdout, reason = "a bench prints its table")]
#![expect(clippy::disallowed_types, reason = "a bench has a clock")]

#[path = "../tests/plan/tables.rs"]
mod tables;

#[path = "../tests/plan/pairs.rs"]
mod pairs;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};
use weightrefit_core::dtype::DType;
use weightrefit_core::id::{LocalId, Sha256, TensorId};
use weightrefit_core::layout::Layout;
use weightrefit_core::model::TensorMeta;
use weightrefit_core::plan::{Planner, Sources};
use weightrefit_core::region::{LocalTensor, Piece, RankRegions, Run};

const LAYOUT: Sha256 = Sha256([0; 32]);

struct Stopwatch(Duration);

impl Stopwatch {
    fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let out = work();
        self.0 += start.elapsed();
        out
    }
}

struct Case<'a> {
    name: &'a str,
    table: Vec<(&'a str, &'a [u64])>,
    alias: BTreeMap<String, String>,
    training: &'a mut dyn Iterator<Item = RankRegions>,
    inference: &'a mut dyn Iterator<Item = RankRegions>,
    replicas: u32,
    peer: &'a str,
}

fn measure(case: Case<'_>, rows: &mut Vec<serde_json::Value>) {
    let mut sources = Sources::new(case.table, &case.alias, LAYOUT).expect("a table");
    let mut watch = Stopwatch(Duration::ZERO);
    for regions in case.training {
        watch.time(|| sources.add_rank(&regions)).expect("a training rank");
    }
    let mut planner = watch.time(|| Planner::new(sources));
    let replicas = (0..case.replicas).map(|replica| replica.to_string()).collect();
    planner.add_pool("default", replicas, LAYOUT).expect("one pool");
    for regions in case.inference {
        watch.time(|| planner.add_rank(&regions)).expect("an inference rank");
    }
    let plan = watch.time(|| planner.plan()).expect("a plan");
    let sliced = watch.0.as_secs_f64();
    let summary = watch.time(|| plan.summarize());
    let seconds = watch.0.as_secs_f64();
    assert_eq!(summary.bytes.planned, summary.bytes.minimum);
    let boxes: u64 = summary.routes.iter().map(|route| route.boxes).sum();
    let balance = summary.bytes.busiest_source as f64 / summary.busiest_source_bound as f64;
    println!(
        "{:34} {seconds:8.3} s ({sliced:.3} s without digests) {boxes:>11} boxes {:>7} pairs {:>12.0} boxes/s \
         busiest source {balance:.4} of bound; {}",
        case.name,
        summary.routes.len(),
        boxes as f64 / seconds,
        case.peer,
    );
    let mut row = |what: &str, value: f64, unit: &str| {
        rows.push(serde_json::json!({
            "name": format!("plan/{}/{what}", case.name), "value": value, "unit": unit,
            "peer": case.peer, "bar": null, "pass": null,
        }));
    };
    row("seconds", seconds, "s");
    row("seconds-without-digests", sliced, "s");
    row("boxes-per-second", boxes as f64 / seconds, "boxes/s");
    row("boxes", boxes as f64, "boxes");
    row("busiest-source-over-bound", balance, "ratio");
}

/// One local tensor per HF tensor, holding `range` of dim `dim`.
fn cut(table: &[(String, Vec<u64>, DType)], range: impl Fn(&[u64]) -> (usize, u64, u64)) -> RankRegions {
    let mut out = RankRegions::default();
    for (at, (name, shape, dtype)) in (0..).zip(table) {
        let (dim, from, to) = range(shape);
        let bounds = |(d, &n): (usize, &u64)| if d == dim { (from, to) } else { (0, n) };
        let ranges: Vec<(u64, u64)> = shape.iter().enumerate().map(bounds).collect();
        out.locals.push(LocalTensor {
            name: name.clone(),
            shape: ranges.iter().map(|(from, to)| to - from).collect(),
            dtype: *dtype,
        });
        if from < to {
            let run = |&(from, to): &(u64, u64)| vec![Run { local: 0, hf: from, len: to - from }];
            out.pieces.push(Piece {
                tensor: TensorId(at),
                local: LocalId(at),
                lead: None,
                dims: ranges.iter().map(run).collect(),
                permute: None,
            });
        }
    }
    out
}

/// `torch.chunk` of dim 0 over the training ranks, against row- and column-cut linears of TP8 replicas.
fn fully_sharded(ranks: u64, replicas: u32, rows: &mut Vec<serde_json::Value>) {
    let mut table = tables::qwen3(&tables::QWEN3_0_6B);
    table.sort_by(|a, b| a.0.cmp(&b.0));
    let chunk = |rank: u64| {
        cut(&table, move |shape| {
            let size = shape[0].div_ceil(ranks);
            (0, (rank * size).min(shape[0]), ((rank + 1) * size).min(shape[0]))
        })
    };
    let parallel = |rank: u64| {
        cut(&table, move |shape| {
            let dim = usize::from(shape.len() == 2 && shape[1] > shape[0]);
            match shape {
                [n] => (0, 0, *n),
                _ => (dim, shape[dim] * rank / 8, shape[dim] * (rank + 1) / 8),
            }
        })
    };
    measure(
        Case {
            name: &format!("synthetic/{ranks}-to-{}", 8 * replicas),
            table: table.iter().map(|(name, shape, _)| (name.as_str(), shape.as_slice())).collect(),
            alias: BTreeMap::new(),
            training: &mut (0..ranks).map(chunk),
            inference: &mut (0..8).map(parallel),
            replicas,
            peer: "no peer plans this size",
        },
        rows,
    );
}

/// A pair of shipped documents on a whole model.
fn documents(pair: &pairs::Pair, replicas: u32, peer: &str, rows: &mut Vec<serde_json::Value>) {
    let table = pair.training.table();
    let carrier = |(id, tensor): (TensorId, &TensorMeta)| {
        (tensor.name.clone(), table[pair.training.alias(id)].name.clone())
    };
    let regions = |layout: &Layout, rank| layout.rank_regions(rank).expect("a preset on its model");
    measure(
        Case {
            name: pair.name,
            table: table.iter().map(|(_, tensor)| (tensor.name.as_str(), tensor.shape.as_slice())).collect(),
            alias: table.iter().map(carrier).collect(),
            training: &mut pair.training.ranks().map(|rank| regions(&pair.training, rank)),
            inference: &mut pair.inference.ranks().map(|rank| regions(&pair.inference, rank)),
            replicas,
            peer,
        },
        rows,
    );
}

fn main() {
    let mut rows = Vec::new();
    let peer = "per rank: Megatron-LM 1.17 s, NeMo-RL 0.57 s; reference evaluator, all ranks: 105 s";
    documents(&pairs::qwen3_moe_to_vllm(), 1, peer, &mut rows);
    let peer = "per rank: Megatron-LM 1.61 s, NeMo-RL 1.03 s; reference evaluator, all ranks: 174 s";
    documents(&pairs::deepseek_v3_to_vllm(), 1, peer, &mut rows);
    for pair in pairs::others() {
        documents(&pair, 1, "not measured", &mut rows);
    }
    fully_sharded(1024, 64, &mut rows);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench");
    std::fs::create_dir_all(&folder).expect("the target folder can be written");
    let text = serde_json::to_string_pretty(&rows).expect("rows are plain JSON");
    std::fs::write(folder.join("plan.json"), text).expect("the target folder can be written");
}
