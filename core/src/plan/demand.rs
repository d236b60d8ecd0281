//! What each destination rank needs, as lines: per set of holders, the cells that any of them can send.
//!
//! A cell is a dense box of one destination piece inside one atom. All cells of a rank with the same holders
//! lie end to end, in bytes, on one line; who sends what is then a matter of cutting lines. Replicas of a pool
//! have equal lines, so these are kept once per rank of a pool.
//!
//! Invariants:
//! - D1: the cells of a piece are disjoint and together the whole piece (else `CoverageGap`).
//! - D2: lines depend on the layouts only, not on the order in which pieces or ranks' tensors were given.

use super::check::tensor_bytes;
use super::cover::{Atom, Covers};
use super::error::{Holder, PlanError};
use super::hyperbox::{Hyperbox, products};
use super::moves::Dims;
use super::source::{Held, Local, Sources};
use crate::dtype::{Cast, DType};
use crate::id::{Rank, Sha256, TensorId};
use crate::region::{RankRegions, Run};
use std::collections::BTreeMap;

/// A dense box of a destination piece that one set of ranks holds.
#[derive(Debug)]
pub(super) struct Cell {
    pub(super) bounds: Hyperbox,
    /// First element in the destination's local tensor, per HF dim.
    pub(super) local: Dims,
    /// Index in the cover's atoms.
    pub(super) atom: u32,
}

/// The cells of one region under one cover, and a box that no atom holds, if any.
#[derive(Debug)]
struct Cut {
    cells: Vec<Cell>,
    gap: Option<Hyperbox>,
}

/// One cell of one piece, and where it ends on its line.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stretch {
    /// Index in [`RankNeeds::pieces`].
    pub(super) piece: u32,
    /// Index in the piece's cells.
    pub(super) cell: u32,
    /// Bytes from the start of the line.
    pub(super) end: u64,
}

/// What one rank of every replica of a pool needs.
#[derive(Debug)]
pub(super) struct RankNeeds {
    pub(super) locals: Vec<Local>,
    /// With the index of their cells.
    pub(super) pieces: Vec<(Held, u32)>,
    /// By set of holders.
    pub(super) lines: BTreeMap<u32, Vec<Stretch>>,
    /// Bytes of the regions, from the layout alone.
    pub(super) minimum: u64,
    /// Bytes of the local tensors that receive anything, pads included.
    pub(super) staging: u64,
}

/// A pool with the needs of its ranks.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) name: String,
    /// Sorted bytewise.
    pub(super) replicas: Vec<String>,
    pub(super) layout: Sha256,
    pub(super) ranks: Vec<RankNeeds>,
}

/// Takes the destinations, pool by pool and rank by rank, and then makes the [`Plan`](super::Plan).
#[derive(Debug)]
pub struct Planner {
    pub(super) sources: Sources,
    pub(super) covers: Covers,
    pub(super) pools: Vec<Pool>,
    /// By tensor: the dtypes it is stored in, each with the first rank that does.
    dtypes: Vec<Vec<(DType, Rank)>>,
    cut_ids: BTreeMap<(u32, u32), u32>,
    cuts: Vec<Cut>,
}

impl Planner {
    /// Starts with all training ranks known and no pool.
    #[must_use]
    pub fn new(sources: Sources) -> Self {
        let covers = Covers::new(&sources);
        let dtypes = sources.pieces.iter().map(|pieces| dtypes(&sources, pieces)).collect();
        Self { sources, covers, pools: Vec::new(), dtypes, cut_ids: BTreeMap::new(), cuts: Vec::new() }
    }

    /// Starts the next pool (order of the resource). `replicas` are its replicas' names in any order,
    /// `layout` the digest of its canonical layout.
    ///
    /// # Errors
    /// `DuplicateName` for a pool or replica named twice.
    pub fn add_pool(
        &mut self,
        name: &str,
        mut replicas: Vec<String>,
        layout: Sha256,
    ) -> Result<(), PlanError> {
        replicas.sort_unstable();
        let duplicate = |what, name: &str| Err(PlanError::DuplicateName { what, name: name.into() });
        if let Some(pair) = replicas.windows(2).find(|pair| pair[0] == pair[1]) {
            return duplicate("replica", &pair[0]);
        }
        if self.pools.iter().any(|pool| pool.name == name) {
            return duplicate("pool", name);
        }
        self.pools.push(Pool { name: name.into(), replicas, layout, ranks: Vec::new() });
        Ok(())
    }

    /// Adds the next rank, counted from 0, of every replica of the pool added last.
    ///
    /// # Errors
    /// `CoverageGap`, `DtypeMismatch`, `MalformedPiece`, `TooLarge`.
    ///
    /// # Panics
    /// Before the first pool: a programmer's error.
    pub fn add_rank(&mut self, regions: &RankRegions) -> Result<(), PlanError> {
        let pool = self.pools.last().expect("add_pool comes before add_rank");
        let holder = Holder::Inference(pool.name.clone(), Rank(pool.ranks.len() as u32));
        let minimum = minimum(regions)?;
        let (locals, held) = self.sources.intern(&holder, regions)?;
        let staging = staging(regions)?;
        let mut pieces = Vec::with_capacity(held.len());
        let mut lines: BTreeMap<u32, Vec<Stretch>> = BTreeMap::new();
        for held in held {
            let wire = locals[held.local.0 as usize].dtype;
            let stored = self.sources.tensors[held.tensor.0 as usize].stored_as;
            self.check_casts(stored, wire, &holder)?;
            let cut = self.cut(held.region, self.covers.of_tensor[stored.0 as usize]);
            if let Some(gap) = self.cuts[cut as usize].gap {
                return Err(PlanError::CoverageGap {
                    tensor: self.sources.tensors[stored.0 as usize].name.clone(),
                    destination: holder,
                    range: gap.to_string(),
                });
            }
            let atoms = self.atoms(stored);
            let piece = pieces.len() as u32;
            for (cell, part) in (0..).zip(&self.cuts[cut as usize].cells) {
                let line = lines.entry(atoms[part.atom as usize].holders).or_default();
                let start = line.last().map_or(0, |last| last.end);
                line.push(Stretch { piece, cell, end: start + part.bounds.volume() * wire.size() });
            }
            pieces.push((held, cut));
        }
        let pool = self.pools.last_mut().expect("there is one, see above");
        pool.ranks.push(RankNeeds { locals, pieces, lines, minimum, staging });
        Ok(())
    }

    /// The atoms of a tensor as the training side stores it.
    pub(super) fn atoms(&self, stored: TensorId) -> &[Atom] {
        &self.covers.list[self.covers.of_tensor[stored.0 as usize] as usize]
    }

    /// The cells of a piece of [`RankNeeds::pieces`].
    pub(super) fn cells(&self, cut: u32) -> &[Cell] {
        &self.cuts[cut as usize].cells
    }

    fn check_casts(&self, stored: TensorId, wire: DType, holder: &Holder) -> Result<(), PlanError> {
        let refused =
            self.dtypes[stored.0 as usize].iter().find(|(from, _)| Cast::between(*from, wire).is_none());
        refused.map_or(Ok(()), |&(source_dtype, rank)| {
            Err(PlanError::DtypeMismatch {
                tensor: self.sources.tensors[stored.0 as usize].name.clone(),
                source_rank: Holder::Training(rank),
                source_dtype,
                destination: holder.clone(),
                wire,
            })
        })
    }

    /// The cells of a region under a cover, made once: all layers and experts that are cut alike share them.
    fn cut(&mut self, region: u32, cover: u32) -> u32 {
        if let Some(id) = self.cut_ids.get(&(region, cover)) {
            return *id;
        }
        let dims: Vec<&[Run]> = self.sources.regions.get(region).iter().map(Vec::as_slice).collect();
        let cut = cut(&dims, &self.covers.list[cover as usize]);
        let id = self.cuts.len() as u32;
        self.cuts.push(cut);
        self.cut_ids.insert((region, cover), id);
        id
    }
}

fn dtypes(sources: &Sources, pieces: &[(Rank, Held)]) -> Vec<(DType, Rank)> {
    let mut out: Vec<(DType, Rank)> = Vec::new();
    for (rank, held) in pieces {
        let dtype = sources.locals[rank.0 as usize][held.local.0 as usize].dtype;
        if out.iter().all(|(known, _)| *known != dtype) {
            out.push((dtype, *rank));
        }
    }
    out
}

fn cut(dims: &[&[Run]], atoms: &[Atom]) -> Cut {
    let mut out = Cut { cells: Vec::new(), gap: None };
    products(dims, |bounds, local| {
        let end = bounds.lo.at(0) + bounds.shape.at(0).max(1);
        let reachable = atoms.partition_point(|atom| atom.bounds.lo.at(0) < end);
        let first = out.cells.len();
        for (atom, held) in (0..).zip(&atoms[..reachable]) {
            let Some(common) = bounds.intersect(&held.bounds) else { continue };
            let mut start = local;
            for d in 0..start.rank() {
                start = start.with(d, start.at(d) + common.lo.at(d) - bounds.lo.at(d));
            }
            out.cells.push(Cell { bounds: common, local: start, atom });
        }
        let found: u64 = out.cells[first..].iter().map(|cell| cell.bounds.volume()).sum();
        if found < bounds.volume() && out.gap.is_none() {
            out.gap = out.cells[first..]
                .iter()
                .fold(vec![bounds], |rest, cell| {
                    rest.iter().flat_map(|part| part.minus(&cell.bounds)).collect()
                })
                .into_iter()
                .min();
        }
    });
    out
}

/// Bytes that a rank needs, from its regions alone: the yardstick that the plan is measured against.
fn minimum(rank: &RankRegions) -> Result<u64, PlanError> {
    let too_large = || PlanError::TooLarge { what: "what a rank needs".into() };
    rank.pieces.iter().try_fold(0_u64, |sum, piece| {
        let element = rank.locals.get(piece.local.0 as usize).map_or(0, |local| local.dtype.size());
        let bytes = piece.dims.iter().try_fold(element, |all, runs| {
            let extent = runs.iter().try_fold(0_u64, |n, run| n.checked_add(run.len))?;
            all.checked_mul(extent)
        });
        bytes.and_then(|bytes| sum.checked_add(bytes)).ok_or_else(too_large)
    })
}

/// Bytes of the local tensors that some piece fills.
fn staging(rank: &RankRegions) -> Result<u64, PlanError> {
    let mut filled = vec![false; rank.locals.len()];
    for piece in &rank.pieces {
        filled[piece.local.0 as usize] |= piece.dims.iter().all(|runs| !runs.is_empty());
    }
    rank.locals.iter().zip(filled).filter(|(_, filled)| *filled).try_fold(0_u64, |sum, (local, _)| {
        let bytes = tensor_bytes(&local.name, &local.shape, local.dtype.size())?;
        sum.checked_add(bytes).ok_or_else(|| PlanError::TooLarge { what: "a rank's staging".into() })
    })
}
