//! `weightrefit plan`.

use crate::api::resolve::{Options, ResolvedRefit, resolve};
use crate::cli::input::{Files, Which};
use crate::cli::table::{Align, Table, bytes, grouped};
use crate::cli::tensors;
use crate::cli::{Failure, Output, Printer};
use crate::limits;
use std::collections::BTreeMap;
use std::path::PathBuf;
use weightrefit_core::plan::document::Document;
use weightrefit_core::plan::moves::Endpoint;
use weightrefit_core::plan::{PlanBytes, Summary};

/// Show who sends what to whom, and how few bytes that takes, without a cluster
#[derive(Debug, clap::Args)]
pub(crate) struct Plan {
    #[command(flatten)]
    files: Files,
    #[command(flatten)]
    which: Which,
    /// Replicas of each pool [default: its minReplicas]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(limits::REPLICAS_MAX)))]
    replicas: Option<u32>,
    /// Tensors in place of `spec.model`: a safetensors file, a `model.safetensors.index.json` beside its shards,
    /// or `{"tensors": [{"name", "shape", "dtype"}]}`
    #[arg(long, value_name = "FILE")]
    tensors: Option<PathBuf>,
    /// Format of stdout; json is `weightrefit.plan/v1`
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    /// List every box as well; with `-o json` only
    #[arg(long)]
    boxes: bool,
}

impl Plan {
    pub(crate) fn run(self, printer: &Printer) -> Result<(), Failure> {
        if self.boxes && self.output != Output::Json {
            return Err(Failure::usage("`--boxes` is for JSON only", "Add `-o json`."));
        }
        let documents = self.files.documents(printer)?;
        let refit = self.which.of(&documents)?;
        let tensors = self.tensors.as_deref().map(tensors::read).transpose()?;
        let resolved = resolve(&documents, refit, &Options { tensors, replicas: self.replicas })?;
        let plan = resolved.plan().map_err(|error| Failure::no_plan(refit, error))?;
        let summary = plan.summarize();
        match self.output {
            Output::Json => printer.json(&Document::new(&plan, &summary, self.boxes), 2),
            Output::Table => printer.data(&shown(&resolved, &summary)),
        }
    }
}

fn shown(resolved: &ResolvedRefit, summary: &Summary) -> String {
    let mut sides = Table::new(&[
        ("SIDE", Align::Left),
        ("RANKS", Align::Right),
        ("BYTES OUT", Align::Right),
        ("BYTES IN", Align::Right),
        ("BUSIEST", Align::Left),
        ("ITS BYTES", Align::Right),
    ]);
    let moved = Moved::of(summary);
    let row = |name: String, ranks: u64, out: u64, r#in: u64, busiest: Option<(&Endpoint, &u64)>| {
        let (who, most) = busiest.map_or_else(Default::default, |(end, most)| (rank(end), bytes(*most)));
        [name, ranks.to_string(), bytes(out), bytes(r#in), who, most]
    };
    let world = u64::from(resolved.training.layout.world());
    let total = moved.sent.values().sum();
    sides.row(row("training".into(), world, total, 0, busiest(moved.sent.iter())));
    for (index, pool) in resolved.pools.iter().enumerate() {
        let ranks = u64::from(pool.replicas) * u64::from(pool.side.layout.world());
        let here =
            |end: &Endpoint| matches!(end, Endpoint::Inference { pool, .. } if *pool as usize == index);
        let received = || moved.received.iter().filter(|(end, _)| here(end));
        let total = received().map(|(_, bytes)| bytes).sum();
        sides.row(row(format!("pool {}", pool.name), ranks, 0, total, busiest(received())));
    }
    format!("{}\n\n{}", sides.shown(), figures(summary))
}

fn figures(summary: &Summary) -> String {
    let PlanBytes { minimum, planned, busiest_source, gather_broadcast, peak_staging_per_rank, .. } =
        summary.bytes;
    let saved = saving(planned, gather_broadcast);
    let above = planned.saturating_sub(minimum);
    let mut figures = Table::new(&[("", Align::Left), ("BYTES", Align::Right), ("", Align::Left)]);
    let mut row =
        |name: &str, figure: u64, remark: String| figures.row([name.into(), grouped(figure), remark]);
    row("minimum", minimum, "what any plan must deliver".into());
    row(
        "planned",
        planned,
        if above == 0 { "the minimum".into() } else { format!("{} above it", bytes(above)) },
    );
    row("gather-broadcast", gather_broadcast, format!("the usual way; the plan saves {saved}"));
    let bound = summary.busiest_source_bound;
    row("busiest source", busiest_source, format!("no plan has less than {}", bytes(bound)));
    row("staging per rank", peak_staging_per_rank, "the most that an inference rank needs".into());
    format!("{}\n\ndigest {}", figures.shown(), summary.digest)
}

/// `66.8 %`, rounded down; never a better figure than the true one.
fn saving(planned: u64, gather_broadcast: u64) -> String {
    let saved = u128::from(gather_broadcast.saturating_sub(planned)) * 1000;
    let tenths = saved.checked_div(u128::from(gather_broadcast)).unwrap_or_default();
    format!("{}.{} %", tenths / 10, tenths % 10)
}

fn busiest<'a>(ends: impl Iterator<Item = (&'a Endpoint, &'a u64)>) -> Option<(&'a Endpoint, &'a u64)> {
    // Of equals the first, so that the table does not depend on how ties are broken.
    ends.fold(None, |best, end| match best {
        Some((_, most)) if most >= end.1 => best,
        _ => Some(end),
    })
}

fn rank(end: &Endpoint) -> String {
    match end {
        Endpoint::Training { rank } => format!("rank {rank}"),
        Endpoint::Inference { replica, rank, .. } => format!("replica {replica} rank {rank}"),
    }
}

#[derive(Default)]
struct Moved {
    sent: BTreeMap<Endpoint, u64>,
    received: BTreeMap<Endpoint, u64>,
}

impl Moved {
    fn of(summary: &Summary) -> Self {
        let mut moved = Self::default();
        for route in &summary.routes {
            *moved.sent.entry(route.source).or_default() += route.bytes;
            *moved.received.entry(route.destination).or_default() += route.bytes;
        }
        moved
    }
}
