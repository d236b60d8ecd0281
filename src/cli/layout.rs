//! `weightrefit layout`: what a layout yields, rank by rank, and which layouts are shipped.

use crate::api::mistaken::Sort;
use crate::api::problem::{FieldPath, layout_hint};
use crate::api::resolve::{Options, ResolvedPool, resolve};
use crate::cli::input::{self, Which};
use crate::cli::table::{Align, Table};
use crate::cli::tensors::TensorsFile;
use crate::cli::{Failure, Output, Printer};
use clap::{ArgGroup, Subcommand, ValueEnum};
use serde::Serialize;
use serde::ser::{Error as _, SerializeMap, SerializeSeq, Serializer};
use std::ops::Range;
use std::path::PathBuf;
use weightrefit_core::id::Rank;
use weightrefit_core::layout::{self, Document, LayoutError, RankLayout, preset};
use weightrefit_core::model::TensorTable;
use weightrefit_core::region::{LocalTensor, Piece, RankRegions, Run};

/// Look at layouts
#[derive(Debug, clap::Args)]
pub(crate) struct Layout {
    #[command(subcommand)]
    command: LayoutCommand,
}

#[derive(Debug, Subcommand)]
enum LayoutCommand {
    Pieces(Pieces),
    Presets(Presets),
}

impl Layout {
    pub(crate) fn run(self, printer: &Printer) -> Result<(), Failure> {
        match self.command {
            LayoutCommand::Pieces(command) => command.run(printer),
            LayoutCommand::Presets(command) => command.run(printer),
        }
    }
}

/// List the layouts that weightrefit ships
#[derive(Debug, clap::Args)]
struct Presets {
    /// Format of stdout; json is `weightrefit.presets/v1`
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

#[derive(Debug, Serialize)]
struct PresetList {
    schema: &'static str,
    presets: Vec<PresetEntry>,
}

#[derive(Debug, Serialize)]
struct PresetEntry {
    name: &'static str,
    revision: u32,
}

impl Presets {
    fn run(self, printer: &Printer) -> Result<(), Failure> {
        let entries = preset::names().map(|name| PresetEntry { name, revision: preset::REVISION });
        match self.output {
            Output::Json => {
                let presets = entries.collect();
                printer.json(&PresetList { schema: "weightrefit.presets/v1", presets }, 2)
            }
            Output::Table => {
                let mut table = Table::new(&[("NAME", Align::Left), ("REVISION", Align::Right)]);
                entries.for_each(|entry| table.row([entry.name.into(), entry.revision.to_string()]));
                printer.data(&table.shown())
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SideName {
    Training,
    Inference,
}

/// Show which part of which tensor lies where on each rank
///
/// The layout is one side of a refit (`-f` and `--side`), or a bare `layout: v1` document (`--document` and
/// `--tensors`). All ranks are checked, even where `--rank` shows one.
#[derive(Debug, clap::Args)]
#[command(group(ArgGroup::new("input").required(true).args(["files", "document"])))]
struct Pieces {
    /// YAML that `kubectl apply` takes: the WeightRefit and the ConfigMaps it names; repeatable. `-` is stdin, and
    /// `<(command)` works; a named pipe is refused, as opening one waits for whoever writes to it
    #[arg(short, long = "filename", value_name = "FILE", requires = "side")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    which: Which,
    /// The side of the refit
    #[arg(long, value_enum, conflicts_with = "document")]
    side: Option<SideName>,
    /// The pool of the inference side, where there are several
    #[arg(long, value_name = "POOL", conflicts_with = "document")]
    pool: Option<String>,
    /// A `layout: v1` document, in place of a refit
    #[arg(long, value_name = "FILE", requires = "tensors")]
    document: Option<PathBuf>,
    #[command(flatten)]
    tensors: TensorsFile,
    /// Show this rank only
    #[arg(long, value_name = "N")]
    rank: Option<u32>,
    /// Format of stdout; json is `weightrefit.pieces/v1`
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl Pieces {
    fn run(self, printer: &Printer) -> Result<(), Failure> {
        let layout = self.layout(printer)?;
        layout.check().map_err(|error| {
            let (code, hint) = (error.code(), layout_hint(&error));
            Failure::refused(error, hint).coded(code)
        })?;
        let ranks = match self.rank {
            None => 0..layout.world(),
            Some(rank) if rank < layout.world() => rank..rank + 1,
            Some(rank) => {
                let hint = format!("The layout has ranks 0 to {}.", layout.world() - 1);
                return Err(Failure::refused(format!("rank {rank} is outside the layout"), hint));
            }
        };
        let shown = Shown { layout: &layout, ranks };
        match self.output {
            Output::Json => printer.json(&shown, 4),
            Output::Table => printer.data(&shown.table()?),
        }
    }

    fn layout(&self, printer: &Printer) -> Result<layout::Layout, Failure> {
        let tensors = self.tensors.read()?;
        if let (Some(path), Some(tensors)) = (&self.document, &tensors) {
            let text = input::text(path)?;
            let bound = Document::parse(&text).and_then(|document| layout::Layout::new(&document, tensors));
            return bound.map_err(|source| {
                if let Some(problem) = Sort::Layout.mistaken(&text) {
                    let hint = problem.hint(&FieldPath::default());
                    return Failure::refused(format!("{}: {problem}", path.display()), hint);
                }
                let (code, hint) = (source.code(), layout_hint(&source));
                Failure::refused(InDocument { file: path.display().to_string(), source }, hint).coded(code)
            });
        }
        let documents = input::documents(&self.files, printer)?;
        let refit = self.which.of(&documents)?;
        let resolved = resolve(&documents, refit, &Options { tensors, ..Options::default() })?;
        resolved.notes.iter().for_each(|note| printer.note(note));
        match self.side {
            Some(SideName::Inference) => self.pool_of(resolved.pools),
            _ => Ok(resolved.training.layout),
        }
    }

    fn pool_of(&self, pools: Vec<ResolvedPool>) -> Result<layout::Layout, Failure> {
        let names: Vec<String> = pools.iter().map(|pool| pool.name.clone()).collect();
        let hint = format!("The pools are: {}.", names.join(", "));
        let wanted = match &self.pool {
            Some(name) => name,
            None if names.len() == 1 => &names[0],
            None => {
                return Err(Failure::usage("the refit has several pools", format!("Add `--pool`. {hint}")));
            }
        };
        let found = pools.into_iter().find(|pool| pool.name == *wanted).map(|pool| pool.side.layout);
        found.ok_or_else(|| Failure::refused(format!("pool `{wanted}` is not in the refit"), hint))
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{file}: {source}")]
struct InDocument {
    file: String,
    source: LayoutError,
}

/// Ranks of a layout, written one after the other.
struct Shown<'a> {
    layout: &'a layout::Layout,
    ranks: Range<u32>,
}

impl Shown<'_> {
    fn table(&self) -> Result<String, Failure> {
        let mut table = Table::new(&[
            ("RANK", Align::Right),
            ("LOCAL TENSOR", Align::Left),
            ("SHAPE", Align::Left),
            ("DTYPE", Align::Left),
            ("HOLDS", Align::Left),
            ("AT", Align::Left),
        ]);
        for rank in self.ranks.clone() {
            let held = self.layout.rank(Rank(rank)).map_err(Failure::failed)?;
            let pieces = by_local(&held.regions);
            for (index, local) in held.regions.locals.iter().enumerate() {
                let mut row = |holds: String, at: String| {
                    let shape = format!("{:?}", local.shape);
                    table.row([
                        rank.to_string(),
                        local.name.clone(),
                        shape,
                        local.dtype.to_string(),
                        holds,
                        at,
                    ]);
                };
                let first = pieces.partition_point(|piece| (piece.local.0 as usize) < index);
                for piece in pieces[first..].iter().take_while(|piece| piece.local.0 as usize == index) {
                    let hf = &self.layout.table()[piece.tensor].name;
                    let at = format!("{}{}", lead(piece), ranges(piece, |run| run.local));
                    row(format!("{hf}{}", ranges(piece, |run| run.hf)), at);
                }
                if local.shape.contains(&0) {
                    row("nothing".into(), String::new());
                } else if held.pads[index] > 0 {
                    let plural = if held.pads[index] == 1 { "" } else { "s" };
                    row("padding".into(), format!("{} element{plural}", held.pads[index]));
                }
            }
        }
        Ok(table.shown())
    }
}

/// In order of the local tensors, and inside each as its elements lie.
fn by_local(regions: &RankRegions) -> Vec<&Piece> {
    let mut pieces: Vec<&Piece> = regions.pieces.iter().collect();
    let start = |runs: &Vec<Run>| runs.first().map(|run| run.local);
    pieces.sort_by_cached_key(|piece| {
        (piece.local, piece.lead, piece.dims.iter().map(start).collect::<Vec<_>>())
    });
    pieces
}

fn lead(piece: &Piece) -> String {
    piece.lead.map(|lead| format!("[{lead}]")).unwrap_or_default()
}

/// `[0:4+8:12, 0:64]`: half-open runs of each dim.
fn ranges(piece: &Piece, start: impl Fn(&Run) -> u64) -> String {
    let run = |run: &Run| format!("{}:{}", start(run), start(run) + run.len);
    let dim = |runs: &Vec<Run>| runs.iter().map(run).collect::<Vec<_>>().join("+");
    format!("[{}]", piece.dims.iter().map(dim).collect::<Vec<_>>().join(", "))
}

/// `weightrefit.pieces/v1`.
impl Serialize for Shown<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("schema", "weightrefit.pieces/v1")?;
        map.serialize_entry("world", &self.layout.world())?;
        map.serialize_entry("ranks", &Ranks(self))?;
        map.end()
    }
}

struct Ranks<'a>(&'a Shown<'a>);

impl Serialize for Ranks<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut seq = serializer.serialize_seq(None)?;
        for rank in self.0.ranks.clone() {
            // All ranks were checked before the first byte was written.
            let held = self.0.layout.rank(Rank(rank)).map_err(S::Error::custom)?;
            seq.serialize_element(&RankEntry::of(rank, &held, self.0.layout.table()))?;
        }
        seq.end()
    }
}

#[derive(Serialize)]
struct RankEntry<'a> {
    rank: u32,
    tensors: Vec<LocalEntry<'a>>,
    pieces: Vec<PieceEntry<'a>>,
}

#[derive(Serialize)]
struct LocalEntry<'a> {
    name: &'a str,
    shape: &'a [u64],
    dtype: &'static str,
    /// Elements that no piece fills.
    pads: u64,
}

/// Runs are `[local start, HF start, length]`, one list per HF dim.
#[derive(Serialize)]
struct PieceEntry<'a> {
    tensor: &'a str,
    local: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    lead: Option<u64>,
    dims: Vec<Vec<[u64; 3]>>,
    /// Local dim `i` (after `lead`) is HF dim `permute[i]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    permute: Option<&'a [u8]>,
}

impl<'a> RankEntry<'a> {
    fn of(rank: u32, held: &'a RankLayout, table: &'a TensorTable) -> Self {
        let RankLayout { regions, pads, .. } = held;
        let local = |(local, pads): (&'a LocalTensor, &u64)| LocalEntry {
            name: &local.name,
            shape: &local.shape,
            dtype: local.dtype.name(),
            pads: *pads,
        };
        let piece = |piece: &'a Piece| PieceEntry {
            tensor: &table[piece.tensor].name,
            local: &regions.locals[piece.local.0 as usize].name,
            lead: piece.lead,
            dims: piece
                .dims
                .iter()
                .map(|runs| runs.iter().map(|run| [run.local, run.hf, run.len]).collect())
                .collect(),
            permute: piece.permute.as_deref(),
        };
        Self {
            rank,
            tensors: regions.locals.iter().zip(pads).map(local).collect(),
            pieces: by_local(regions).into_iter().map(piece).collect(),
        }
    }
}
