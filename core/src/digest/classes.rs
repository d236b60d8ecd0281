//! Classes of elements: those of one tensor that exactly the same copies hold, so that each is summed once (D2).
//!
//! A copy is a piece of a rank. A piece that holds some positions twice is several copies. Nearly always the
//! copies of a tensor are equal or disjoint, and a class is simply what some pieces hold; where they partly
//! overlap, the tensor is cut at the borders of all pieces.
//!
//! C1: the classes of a (tensor, wire dtype) are disjoint and together hold every element of the tensor.
//! C2: they follow from the regions alone: every agent derives the same ones in the same order.

use super::overlap::{self, Interval, Region};
use super::rows::{DigestError, Geometry};
use crate::code::Code;
use crate::dtype::{Cast, DType};
use crate::id::{Rank, TensorId};
use crate::model::TensorTable;
use crate::plan::moves::Dims;
use crate::region::{Piece, RankRegions, Run};
use std::collections::{BTreeMap, BTreeSet};

/// Classes of the training ranks, or of the ranks of one pool's replicas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Classes {
    /// By class number.
    pub(super) classes: Vec<(TensorId, DType)>,
    /// Digested (tensor, wire dtype), ascending.
    pub(super) tensors: BTreeSet<(TensorId, DType)>,
    ranks: Vec<Vec<Part>>,
}

/// One rank's copy of a class: what it digests and reports under the class's number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Number of the class.
    pub class: u32,
    /// The HF tensor whose geometry counts.
    pub tensor: TensorId,
    /// Wire dtype: elements are digested after the cast to it.
    pub dtype: DType,
    /// Index of the piece in the rank's regions.
    pub piece: u32,
    /// Products of runs to digest, where they are not those of the piece.
    products: Option<Vec<Vec<Vec<Run>>>>,
}

/// Elements to digest that are dense in the HF tensor and in the local one. All in HF dims, lead not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DigestBox {
    /// First element in the HF tensor.
    pub hf: Dims,
    /// First position in the local tensor, by HF dim.
    pub local: Dims,
    /// Extents; none is 0.
    pub shape: Dims,
}

/// Why a side cannot be digested.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LedgerError {
    /// Some elements are held by nobody.
    #[error("the ranks of {side} hold {held} of {needed} elements of `{tensor}` as {dtype}")]
    CoverageGap {
        /// Training or pool.
        side: String,
        /// HF tensor.
        tensor: String,
        /// Wire dtype.
        dtype: DType,
        /// Elements held.
        held: u64,
        /// Elements of the tensor.
        needed: u64,
    },
    /// A source stores the tensor in a dtype that cannot be cast.
    #[error("training rank {rank} stores `{tensor}` as {stored}, which cannot be cast to {wire}")]
    NoCast {
        /// HF tensor.
        tensor: String,
        /// The rank.
        rank: Rank,
        /// Its dtype.
        stored: DType,
        /// What a pool needs.
        wire: DType,
    },
    /// A piece names a tensor or local tensor that does not exist, or has other dims.
    #[error("piece {piece} of rank {rank} of {side} does not fit its tensors")]
    Piece {
        /// Training or pool.
        side: String,
        /// The rank.
        rank: Rank,
        /// Index of the piece.
        piece: usize,
    },
    /// The digest has no keys for the tensor.
    #[error("`{tensor}` cannot be digested: {source}")]
    Digest {
        /// HF tensor.
        tensor: String,
        /// Which bound.
        source: DigestError,
    },
    /// More classes than messages can number, or pieces that overlap in too many ways.
    #[error("the pieces of `{tensor}` in {side} overlap in more than {limit} ways")]
    TooManyClasses {
        /// Training or pool.
        side: String,
        /// HF tensor.
        tensor: String,
        /// The bound.
        limit: u64,
    },
}

impl LedgerError {
    /// The stable code that a user sees.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::CoverageGap { .. } => Code::CoverageGap,
            Self::NoCast { .. } => Code::DtypeMismatch,
            Self::Piece { .. } | Self::Digest { .. } | Self::TooManyClasses { .. } => Code::LayoutRejected,
        }
    }
}

/// A copy: its rank, its piece, and its runs where they are not all of the piece's.
struct Copy {
    rank: usize,
    piece: usize,
    runs: Option<Vec<Vec<Run>>>,
}

impl Classes {
    /// Of the training side (`ranks` in order, as the planner accepted them), for the tensors that pools want.
    /// `alias` says under which tensor the training side holds another (its layout's aliases).
    ///
    /// # Errors
    /// Where a wanted tensor is not held whole or cannot be cast.
    pub fn of_training(
        table: &TensorTable,
        alias: &BTreeMap<TensorId, TensorId>,
        ranks: &[&RankRegions],
        wanted: &BTreeSet<(TensorId, DType)>,
    ) -> Result<Self, LedgerError> {
        let pieces = by_tensor("training", table, ranks)?;
        let mut out = Self::empty(ranks);
        for &(tensor, wire) in wanted {
            let stored_as = alias.get(&tensor).unwrap_or(&tensor);
            let held = pieces.get(stored_as).map_or(&[][..], Vec::as_slice);
            for &(rank, piece) in held {
                let stored = stored_dtype(ranks[rank], piece);
                if Cast::between(stored, wire).is_none() {
                    let (tensor, rank) = (table[tensor].name.clone(), Rank(rank as u32));
                    return Err(LedgerError::NoCast { tensor, rank, stored, wire });
                }
            }
            out.add("training", table, ranks, (tensor, wire), held)?;
        }
        Ok(out)
    }

    /// Of the replicas of one pool (`ranks` in order, as the planner accepted them): all tensors that they hold,
    /// in the dtypes in which they store them.
    ///
    /// # Errors
    /// Where the ranks together hold only part of a tensor.
    pub fn of_pool(pool: &str, table: &TensorTable, ranks: &[&RankRegions]) -> Result<Self, LedgerError> {
        let side = format!("pool `{pool}`");
        let mut out = Self::empty(ranks);
        for (tensor, held) in by_tensor(&side, table, ranks)? {
            let mut by_dtype: BTreeMap<DType, Vec<(usize, usize)>> = BTreeMap::new();
            for (rank, piece) in held {
                by_dtype.entry(stored_dtype(ranks[rank], piece)).or_default().push((rank, piece));
            }
            for (dtype, held) in by_dtype {
                out.add(&side, table, ranks, (tensor, dtype), &held)?;
            }
        }
        Ok(out)
    }

    /// The digested tensors with their wire dtypes.
    #[must_use]
    pub fn tensors(&self) -> &BTreeSet<(TensorId, DType)> {
        &self.tensors
    }

    /// Number of ranks.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// What a rank digests, in the order in which it reports (ascending classes); nothing for a rank that does
    /// not exist.
    #[must_use]
    pub fn parts(&self, rank: Rank) -> &[Part] {
        self.ranks.get(rank.0 as usize).map_or(&[], Vec::as_slice)
    }

    fn empty(ranks: &[&RankRegions]) -> Self {
        Self { classes: Vec::new(), tensors: BTreeSet::new(), ranks: vec![Vec::new(); ranks.len()] }
    }

    /// Adds the classes of one tensor in one wire dtype.
    fn add(
        &mut self,
        side: &str,
        table: &TensorTable,
        ranks: &[&RankRegions],
        (tensor, dtype): (TensorId, DType),
        held: &[(usize, usize)],
    ) -> Result<(), LedgerError> {
        let meta = &table[tensor];
        let name = || meta.name.clone();
        Geometry::new(&meta.shape, dtype).map_err(|source| LedgerError::Digest { tensor: name(), source })?;
        // Copies of one region, in order of region and then of (rank, piece).
        let mut groups: BTreeMap<Region, Vec<Copy>> = BTreeMap::new();
        for &(rank, piece) in held {
            for (region, runs) in copies(&ranks[rank].pieces[piece]) {
                groups.entry(region).or_default().push(Copy { rank, piece, runs });
            }
        }
        let (regions, groups): (Vec<Region>, Vec<Vec<Copy>>) = groups.into_iter().unzip();
        let overlapping = |limit| LedgerError::TooManyClasses { side: side.into(), tensor: name(), limit };
        let classes = overlap::classes(&regions).map_err(|too_many| overlapping(too_many.limit))?;
        let mut elements = 0_u64;
        for class in classes {
            elements += class.elements(&regions);
            let number = u32::try_from(self.classes.len()).map_err(|_| overlapping(u64::from(u32::MAX)))?;
            self.classes.push((tensor, dtype));
            let mut parts: Vec<(usize, Part)> = Vec::new();
            for copy in class.holders.iter().flat_map(|group| &groups[*group]) {
                let part =
                    |products| Part { class: number, tensor, dtype, piece: copy.piece as u32, products };
                let runs = copy.runs.as_ref().unwrap_or(&ranks[copy.rank].pieces[copy.piece].dims);
                let products = match &class.products {
                    None => copy.runs.as_ref().map(|runs| vec![runs.clone()]),
                    Some(products) => Some(products.iter().map(|region| restrict(runs, region)).collect()),
                };
                parts.push((copy.rank, part(products)));
            }
            parts.sort_by_key(|(rank, part)| (*rank, part.piece));
            for (rank, part) in parts {
                self.ranks[rank].push(part);
            }
        }
        let needed = meta.elements();
        if elements != needed {
            let (side, held) = (side.into(), elements);
            return Err(LedgerError::CoverageGap { side, tensor: name(), dtype, held, needed });
        }
        self.tensors.insert((tensor, dtype));
        Ok(())
    }
}

impl Part {
    /// Calls `visit` with every dense box of the part. `piece` is the one that the part names.
    pub fn boxes(&self, piece: &Piece, mut visit: impl FnMut(DigestBox)) {
        match &self.products {
            None => product(&piece.dims, &mut visit),
            Some(products) => products.iter().for_each(|runs| product(runs, &mut visit)),
        }
    }
}

/// The boxes of a product of run lists, last dim fastest.
fn product(dims: &[Vec<Run>], visit: &mut impl FnMut(DigestBox)) {
    let mut index = vec![0_usize; dims.len()];
    if dims.iter().any(Vec::is_empty) {
        return;
    }
    loop {
        let runs = || index.iter().zip(dims).map(|(at, runs)| &runs[*at]);
        let dims_of = |field: fn(&Run) -> u64| {
            let values: Vec<u64> = runs().map(field).collect();
            Dims::new(&values).expect("pieces have no more dims than boxes")
        };
        visit(DigestBox {
            hf: dims_of(|run| run.hf),
            local: dims_of(|run| run.local),
            shape: dims_of(|run| run.len),
        });
        let Some(dim) = (0..dims.len()).rev().find(|dim| index[*dim] + 1 < dims[*dim].len()) else { return };
        index[dim] += 1;
        index[dim + 1..].fill(0);
    }
}

/// Pieces that hold anything, as (rank, piece) in order, by tensor.
fn by_tensor(
    side: &str,
    table: &TensorTable,
    ranks: &[&RankRegions],
) -> Result<BTreeMap<TensorId, Vec<(usize, usize)>>, LedgerError> {
    let mut out: BTreeMap<TensorId, Vec<(usize, usize)>> = BTreeMap::new();
    for (rank, regions) in ranks.iter().enumerate() {
        for (at, piece) in regions.pieces.iter().enumerate() {
            let shape = table.get(piece.tensor).map(|meta| meta.shape.as_slice());
            let fits = |shape: &[u64]| {
                let inside =
                    |run: &Run, extent: u64| run.hf.checked_add(run.len).is_some_and(|end| end <= extent);
                shape.len() == piece.dims.len()
                    && piece
                        .dims
                        .iter()
                        .zip(shape)
                        .all(|(runs, extent)| runs.iter().all(|run| inside(run, *extent)))
            };
            let local = regions.locals.get(piece.local.0 as usize);
            if !shape.is_some_and(fits) || local.is_none() {
                return Err(LedgerError::Piece { side: side.into(), rank: Rank(rank as u32), piece: at });
            }
            if !piece.dims.iter().any(Vec::is_empty) {
                out.entry(piece.tensor).or_default().push((rank, at));
            }
        }
    }
    Ok(out)
}

fn stored_dtype(regions: &RankRegions, piece: usize) -> DType {
    // `by_tensor` has checked the index.
    regions.locals[regions.pieces[piece].local.0 as usize].dtype
}

/// The copies that a piece is: one, unless it holds positions twice.
fn copies(piece: &Piece) -> Vec<(Region, Option<Vec<Vec<Run>>>)> {
    if !piece.dims.iter().any(|runs| repeats(runs)) {
        return vec![(region_of(&piece.dims), None)];
    }
    let mut products: Vec<Vec<Vec<Run>>> = vec![Vec::new()];
    for runs in &piece.dims {
        let layers = layers(runs);
        let longer = products.iter().flat_map(|product| {
            layers.iter().map(|layer| product.iter().chain([layer]).cloned().collect::<Vec<Vec<Run>>>())
        });
        products = longer.collect();
    }
    products.into_iter().map(|runs| (region_of(&runs), Some(runs))).collect()
}

/// True where the runs hold a position twice.
fn repeats(runs: &[Run]) -> bool {
    let ascends = |runs: &[Run]| runs.windows(2).all(|pair| pair[0].hf + pair[0].len <= pair[1].hf);
    if ascends(runs) {
        return false;
    }
    let mut sorted = runs.to_vec();
    sorted.sort_unstable_by_key(|run| run.hf);
    !ascends(&sorted)
}

/// The runs, split so that no layer holds a position twice.
fn layers(runs: &[Run]) -> Vec<Vec<Run>> {
    let mut layers: Vec<Vec<Run>> = Vec::new();
    for run in runs {
        let overlaps = |other: &Run| other.hf < run.hf + run.len && run.hf < other.hf + other.len;
        match layers.iter_mut().find(|layer| !layer.iter().any(overlaps)) {
            Some(layer) => layer.push(*run),
            None => layers.push(vec![*run]),
        }
    }
    layers
}

/// The HF positions of runs per dim: sorted, neighbours joined.
fn region_of(dims: &[Vec<Run>]) -> Region {
    let intervals = |runs: &Vec<Run>| {
        let mut out: Vec<Interval> = runs.iter().map(|run| (run.hf, run.hf + run.len)).collect();
        out.sort_unstable();
        out.dedup_by(|next, last| {
            let adjacent = last.1 == next.0;
            if adjacent {
                last.1 = next.1;
            }
            adjacent
        });
        out
    };
    dims.iter().map(intervals).collect()
}

/// The parts of runs inside a region.
fn restrict(dims: &[Vec<Run>], region: &Region) -> Vec<Vec<Run>> {
    let restricted = |(runs, intervals): (&Vec<Run>, &Vec<Interval>)| {
        let inside = runs.iter().flat_map(|run| {
            intervals.iter().filter_map(|interval| {
                let (start, end) = (interval.0.max(run.hf), interval.1.min(run.hf + run.len));
                (start < end).then(|| Run {
                    local: run.local + (start - run.hf),
                    hf: start,
                    len: end - start,
                })
            })
        });
        inside.collect()
    };
    dims.iter().zip(region).map(restricted).collect()
}

#[cfg(test)]
pub(super) mod tests;
