//! What a rank digests as the kernels of `agent/kernels` read it: a table of fixed entries, little-endian, with the
//! addresses of a device in place of memories. [`RowsEntry::read`] reads one back, for the kernels' CPU reference.

use super::{ClassSums, DigestProgram, RowLoop, Rows};
use crate::executor::table::CASTS;
use std::sync::Arc;
use weightrefit_core::dtype::Cast;
use weightrefit_core::id::ContentSum;
use weightrefit_core::plan::moves::DIMS_MAX;

/// Bytes of an entry: `RowsEntry` of `agent/kernels/digest.cuh`.
pub const ROWS_ENTRY_BYTES: usize = 6 * 8 + DIMS_MAX * 24 + 4 * 4;

/// Words across and rows down that one thread sums at once, as the kernels are written.
const UNIT_WORDS: u64 = 8;
const UNIT_ROWS: u64 = 64;

/// The table of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DigestTable {
    /// Its entries.
    pub bytes: Vec<u8>,
    /// How many.
    pub entries: u32,
    /// What threads take, all entries together.
    pub units: u64,
    /// Sums that come out, one for each part.
    pub sums: u32,
}

/// An entry, as the CPU reference walks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsEntry {
    rows: Rows,
    /// Cast on the way.
    pub cast: Cast,
    /// Bytes of an element in wire dtype.
    pub element: u32,
    /// Which sum it is part of.
    pub sum: u32,
}

impl DigestProgram {
    /// The table, where memory `i` lies at `address(i)` of the device.
    #[must_use]
    pub fn table(&self, address: impl Fn(u32) -> u64) -> DigestTable {
        let (mut bytes, mut units) = (Vec::new(), 0);
        for (sum, part) in (0_u32..).zip(&self.parts) {
            for rows in part.boxes.iter().filter(|rows| rows.columns > 0 && rows.count() > 0) {
                let wire = part.dtype.size();
                let words = [units, address(part.mapping) + rows.base, rows.row, rows.column];
                words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
                [rows.columns, rows.column_stride].iter().for_each(|word| bytes.extend(word.to_le_bytes()));
                for each in &rows.loops {
                    [each.count, each.stride, each.rows].iter().for_each(|w| bytes.extend(w.to_le_bytes()));
                }
                let cast = CASTS.iter().position(|cast| *cast == part.cast).unwrap_or(0) as u32;
                let tail = [rows.depth as u32, cast, wire as u32, sum];
                tail.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
                let across = UNIT_WORDS / (wire / 2).max(1);
                units += rows.columns.div_ceil(across) * rows.count().div_ceil(UNIT_ROWS);
            }
        }
        let entries = u32::try_from(bytes.len() / ROWS_ENTRY_BYTES).unwrap_or(u32::MAX);
        DigestTable { bytes, entries, units, sums: u32::try_from(self.parts.len()).unwrap_or(u32::MAX) }
    }

    /// Of the sums that a table led to, in order.
    #[must_use]
    pub fn class_sums(&self, sums: impl IntoIterator<Item = ContentSum>) -> ClassSums {
        Arc::new(self.parts.iter().map(|part| part.class).zip(sums).collect())
    }
}

impl Rows {
    fn count(&self) -> u64 {
        self.loops[..self.depth].iter().map(|each| each.count).product()
    }
}

impl RowsEntry {
    /// An entry of a table; `None` where it is none.
    #[must_use]
    pub fn read(entry: &[u8; ROWS_ENTRY_BYTES]) -> Option<Self> {
        let long = |at: usize| Some(u64::from_le_bytes(*entry.get(at..)?.first_chunk()?));
        let short = |at: usize| Some(u32::from_le_bytes(*entry.get(at..)?.first_chunk()?));
        let tail = 6 * 8 + DIMS_MAX * 24;
        let mut loops = [RowLoop::default(); DIMS_MAX];
        for (dim, each) in loops.iter_mut().enumerate() {
            let at = 48 + 24 * dim;
            *each = RowLoop { count: long(at)?, stride: long(at + 8)?, rows: long(at + 16)? };
        }
        let depth = usize::try_from(short(tail)?).ok().filter(|depth| *depth <= DIMS_MAX)?;
        let rows = Rows {
            base: long(8)?,
            row: long(16)?,
            column: long(24)?,
            columns: long(32)?,
            column_stride: long(40)?,
            loops,
            depth,
        };
        let cast = *CASTS.get(usize::try_from(short(tail + 4)?).ok()?)?;
        Some(Self { rows, cast, element: short(tail + 8)?, sum: short(tail + 12)? })
    }

    /// Its columns: the number of the first, how many, and the bytes from one to the next.
    #[must_use]
    pub fn columns(&self) -> (u64, u64, u64) {
        (self.rows.column, self.rows.columns, self.rows.column_stride)
    }

    /// Calls `visit` with the number of each row and the address of its first element.
    pub fn each_row(&self, mut visit: impl FnMut(u64, u64)) {
        self.rows.each(|base, row, inner| {
            (0..inner.count).for_each(|turn| visit(row + turn * inner.rows, base + turn * inner.stride));
        });
    }
}
