//! `weightrefit plan`.

use crate::api::resolve::{Options, ResolvedRefit, Side, resolve};
use crate::api::supported;
use crate::cli::input::{Files, Which};
use crate::cli::table::{Align, Table, bytes, grouped};
use crate::cli::tensors::TensorsFile;
use crate::cli::{Failure, Output, Printer};
use crate::limits;
use serde_json::Value;
use std::collections::BTreeMap;
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
    #[command(flatten)]
    tensors: TensorsFile,
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
        supported::check(&refit.value.spec).map_err(|(path, problem)| refit.refuse(path, problem))?;
        let tensors = self.tensors.read()?;
        let resolved =
            resolve(&documents, refit, &Options { tensors, replicas: self.replicas, open_pools: false })?;
        resolved.notes.iter().for_each(|note| printer.note(note));
        let plan = resolved.plan().map_err(|error| Failure::no_plan(refit, error))?;
        let summary = plan.summarize();
        match self.output {
            Output::Json => {
                let pools = resolved.pools.iter().map(|pool| layout(&pool.side));
                let document = Document::new(&plan, &summary, self.boxes);
                printer.json(&document.with_layouts(layout(&resolved.training), pools), 2)
            }
            Output::Table => printer.data(&shown(&resolved, &summary)),
        }
    }
}

/// Where a layout was written, and the sizes of its axes.
fn layout(side: &Side) -> Value {
    let sizes = |axes: &[(String, u64)]| -> Value {
        axes.iter().map(|(axis, size)| (axis.clone(), Value::from(*size))).collect()
    };
    let grids: Value = side.layout.grids().map(|(grid, axes)| (grid.to_owned(), sizes(axes))).collect();
    let mut layout = serde_json::to_value(&side.origin).expect("an origin is text and numbers");
    layout["grids"] = grids;
    layout
}

/// `tp 2 x dp 4`, each grid by its name where there are several.
fn axes(side: &Side) -> String {
    let named = side.layout.grids().len() > 1;
    let grid = |(name, axes): (&str, &[(String, u64)])| {
        let sizes: Vec<String> = axes.iter().map(|(axis, size)| format!("{axis} {size}")).collect();
        let name = if named { format!("{name}: ") } else { String::new() };
        format!("{name}{}", sizes.join(" x "))
    };
    side.layout.grids().map(grid).collect::<Vec<_>>().join("; ")
}

fn layouts(resolved: &ResolvedRefit) -> String {
    let mut table = Table::new(&[("SIDE", Align::Left), ("LAYOUT", Align::Left), ("AXES", Align::Left)]);
    let mut row = |name: String, side: &Side| table.row([name, side.origin.to_string(), axes(side)]);
    row("training".into(), &resolved.training);
    resolved.pools.iter().for_each(|pool| row(format!("pool {}", pool.name), &pool.side));
    table.shown()
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
    format!("{}\n\n{}\n\n{}", layouts(resolved), sides.shown(), figures(summary))
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
