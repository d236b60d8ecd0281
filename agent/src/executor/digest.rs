//! Digesting a rank's classes where its tensors lie, after the cast to the wire dtype.

mod table;

pub use table::{DigestTable, ROWS_ENTRY_BYTES, RowsEntry};

use super::placement::strides;
use super::{ExecutorError, HostMemory, Placements};
use crate::memory::Mapping;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use weightrefit_core::digest::{Classes, ColumnKeys, DigestBox, RowDigest};
use weightrefit_core::dtype::{Cast, DType};
use weightrefit_core::id::{ContentSum, Rank};
use weightrefit_core::model::TensorTable;
use weightrefit_core::plan::moves::DIMS_MAX;
use weightrefit_core::region::{Piece, RankRegions};
use weightrefit_core::round::message::ClassSums;

/// Private copy that a digest is taken of: in the first-level cache with the keys of a usual row.
const SCRATCH_BYTES: usize = 8 << 10;

/// What a rank digests, compiled once per membership.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DigestProgram {
    parts: Vec<PartProgram>,
    row_words_max: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct PartProgram {
    class: u32,
    dtype: DType,
    cast: Cast,
    element: usize,
    mapping: u32,
    boxes: Vec<Rows>,
}

/// Rows of one dense box.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rows {
    /// First byte, row and column.
    base: u64,
    row: u64,
    column: u64,
    columns: u64,
    /// Bytes from one column to the next; more than an element where the tensor is stored transposed.
    column_stride: u64,
    /// Outermost first.
    loops: [RowLoop; DIMS_MAX],
    depth: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct RowLoop {
    count: u64,
    /// Bytes in memory, and rows of the HF tensor, from one to the next.
    stride: u64,
    rows: u64,
}

impl DigestProgram {
    /// For one rank of the side that `classes` are of.
    ///
    /// # Errors
    /// Where regions and placements do not fit each other.
    pub fn new(
        classes: &Classes,
        rank: Rank,
        regions: &RankRegions,
        table: &TensorTable,
        placements: &Placements,
    ) -> Result<Self, ExecutorError> {
        let mut parts = Vec::new();
        let mut row_words_max = 0;
        for part in classes.parts(rank) {
            let Some(piece) = regions.pieces.get(part.piece as usize) else { continue };
            let (local, place) = placements.local(piece.local.0)?;
            let cast = Cast::between(local.dtype, part.dtype).ok_or_else(|| ExecutorError::NoCast {
                name: local.name.clone(),
                source_dtype: local.dtype,
                wire: part.dtype,
            })?;
            let hf = &table[part.tensor].shape;
            let element = local.dtype.size();
            let local_strides = strides(&local.shape, element);
            let lead = usize::from(piece.lead.is_some());
            let by_hf_dim = |dim: usize| local_strides[lead + local_dim(piece, dim)];
            let mut boxes = Vec::new();
            let mut fits = local.shape.len() == hf.len() + lead && local.shape.len() <= DIMS_MAX;
            part.boxes(piece, |found| {
                let inside = (0..hf.len()).all(|dim| {
                    let end = found.local.as_slice()[dim].checked_add(found.shape.as_slice()[dim]);
                    local
                        .shape
                        .get(lead + local_dim(piece, dim))
                        .is_some_and(|extent| end.is_some_and(|end| end <= *extent))
                });
                fits &= inside && (lead == 0 || piece.lead < local.shape.first().copied());
                if fits {
                    let base = place.offset + piece.lead.unwrap_or(0) * local_strides[0];
                    boxes.push(rows(&found, hf, base, element, by_hf_dim));
                }
            });
            if !fits {
                return Err(ExecutorError::OutsideTensor {
                    name: local.name.clone(),
                    shape: local.shape.clone(),
                    start: piece.lead.into_iter().collect(),
                    extents: hf.clone(),
                });
            }
            let words = hf.last().copied().unwrap_or(1).saturating_mul(part.dtype.size().div_ceil(2));
            row_words_max = row_words_max.max(words);
            let (class, dtype, mapping, element) = (part.class, part.dtype, place.mapping, element as usize);
            parts.push(PartProgram { class, dtype, cast, element, mapping, boxes });
        }
        Ok(Self { parts, row_words_max })
    }

    /// Words of the longest row: what the shared [`ColumnKeys`] should hold.
    #[must_use]
    pub fn row_words_max(&self) -> u64 {
        self.row_words_max
    }

    /// Digests on `threads` threads; `None` when `stop` was set meanwhile.
    #[must_use]
    pub fn run(
        &self,
        memory: &HostMemory,
        keys: &ColumnKeys,
        threads: usize,
        stop: &AtomicBool,
    ) -> Option<ClassSums> {
        let sums = Mutex::new(vec![ContentSum::default(); self.parts.len()]);
        let next = AtomicUsize::new(0);
        let work = || {
            let mut scratch = Scratch { raw: [0; SCRATCH_BYTES], cast: [0; 2 * SCRATCH_BYTES] };
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(part) = self.parts.get(at) else { return };
                let sum = part.digest(memory, keys, &mut scratch, stop);
                sums.lock().unwrap_or_else(PoisonError::into_inner)[at] = sum;
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.min(self.parts.len()) {
                scope.spawn(work);
            }
            work();
        });
        if stop.load(Ordering::Relaxed) {
            return None;
        }
        Some(self.class_sums(sums.into_inner().unwrap_or_else(PoisonError::into_inner)))
    }
}

/// Position of HF dim `dim` among the local dims, lead not counted.
fn local_dim(piece: &Piece, dim: usize) -> usize {
    let permuted = piece.permute.as_ref();
    permuted.and_then(|permute| permute.iter().position(|hf| usize::from(*hf) == dim)).unwrap_or(dim)
}

/// The rows of a box of a tensor of shape `hf`, in local memory with the given strides by HF dim.
fn rows(found: &DigestBox, hf: &[u64], base: u64, element: u64, stride: impl Fn(usize) -> u64) -> Rows {
    let (shape, local, start) = (found.shape.as_slice(), found.local.as_slice(), found.hf.as_slice());
    let mut out = Rows {
        base,
        row: 0,
        column: 0,
        columns: 1,
        column_stride: element,
        loops: Default::default(),
        depth: 0,
    };
    let Some(last) = shape.len().checked_sub(1) else { return out };
    out.base += local.iter().enumerate().map(|(dim, at)| at * stride(dim)).sum::<u64>();
    (out.column, out.columns, out.column_stride) = (start[last], shape[last], stride(last));
    let mut dim_rows = 1;
    for dim in (0..last).rev() {
        out.row += start[dim] * dim_rows;
        out.enclose(RowLoop { count: shape[dim], stride: stride(dim), rows: dim_rows });
        dim_rows *= hf[dim];
    }
    out.loops[..out.depth].reverse();
    out
}

impl Rows {
    /// Innermost first meanwhile.
    fn enclose(&mut self, outer: RowLoop) {
        if outer.count == 1 {
            return;
        }
        if let Some(inner) = self.depth.checked_sub(1).map(|at| &mut self.loops[at])
            && (outer.stride, outer.rows) == (inner.stride * inner.count, inner.rows * inner.count)
        {
            inner.count *= outer.count;
            return;
        }
        self.loops[self.depth] = outer;
        self.depth += 1;
    }

    /// Calls `visit` with the first byte and row of every repetition of the innermost loop, and that loop.
    fn each(&self, mut visit: impl FnMut(u64, u64, RowLoop)) {
        let (outer, inner) = match self.loops[..self.depth].split_last() {
            Some((inner, outer)) => (outer, *inner),
            None => (&[][..], RowLoop { count: 1, stride: 0, rows: 0 }),
        };
        let mut index = [0; DIMS_MAX];
        loop {
            let offsets = || index.iter().zip(outer);
            let base = self.base + offsets().map(|(at, each)| at * each.stride).sum::<u64>();
            let row = self.row + offsets().map(|(at, each)| at * each.rows).sum::<u64>();
            visit(base, row, inner);
            let Some(dim) = (0..outer.len()).rev().find(|dim| index[*dim] + 1 < outer[*dim].count) else {
                return;
            };
            index[dim] += 1;
            index[dim + 1..].fill(0);
        }
    }
}

struct Scratch {
    raw: [u8; SCRATCH_BYTES],
    /// A cast at most doubles.
    cast: [u8; 2 * SCRATCH_BYTES],
}

impl PartProgram {
    fn digest(
        &self,
        memory: &HostMemory,
        keys: &ColumnKeys,
        scratch: &mut Scratch,
        stop: &AtomicBool,
    ) -> ContentSum {
        let mapping = memory.mapping(self.mapping);
        let mut digest = RowDigest::new(keys, self.dtype);
        for rows in &self.boxes {
            rows.each(|base, row, inner| {
                if !stop.load(Ordering::Relaxed) {
                    self.digest_rows(mapping, rows, (base, row, inner), &mut digest, scratch);
                }
            });
        }
        digest.sum()
    }

    /// The rows of one innermost loop, several or a part of one at a time.
    fn digest_rows(
        &self,
        mapping: &Mapping,
        rows: &Rows,
        (base, row, inner): (u64, u64, RowLoop),
        digest: &mut RowDigest<'_>,
        scratch: &mut Scratch,
    ) {
        let contiguous = rows.column_stride == self.element as u64;
        let room = (SCRATCH_BYTES / self.element) as u64;
        let (at_once, columns) =
            if contiguous && rows.columns <= room { (room / rows.columns, rows.columns) } else { (1, room) };
        let mut done = 0;
        while done < inner.count {
            let count = at_once.min(inner.count - done);
            let first = base + done * inner.stride;
            let mut column = 0;
            while column < rows.columns {
                let width = columns.min(rows.columns - column);
                let bytes = (count * width) as usize * self.element;
                let raw = &mut scratch.raw[..bytes];
                let cast = &mut scratch.cast[..(count * width) as usize * self.dtype.size() as usize];
                let offset = first + column * rows.column_stride;
                let one_run = contiguous && (count == 1 || inner.stride == width * self.element as u64);
                let wire = match (one_run, self.cast) {
                    (true, Cast::None) => {
                        mapping.read(offset, raw);
                        &*raw
                    }
                    (true, _) => {
                        mapping.read_cast(offset, self.cast, cast);
                        &*cast
                    }
                    (false, _) => {
                        let (stride, run) = match contiguous {
                            true => (inner.stride, width as usize * self.element),
                            false => (rows.column_stride, self.element),
                        };
                        mapping.read_rows(offset, stride, run, raw);
                        self.cast.apply(raw, cast);
                        &*cast
                    }
                };
                for (at, elements) in
                    wire.chunks_exact(width as usize * self.dtype.size() as usize).enumerate()
                {
                    digest.row(row + (done + at as u64) * inner.rows, rows.column + column, elements);
                }
                column += width;
            }
            done += count;
        }
    }
}

#[cfg(test)]
mod tests;
