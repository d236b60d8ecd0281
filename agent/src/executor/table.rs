//! A program as the kernels of `agent/kernels` read it: a table of fixed entries, little-endian, with the addresses
//! of a device in place of memories. [`Program::of_table`] reads it back, so that the CPU reference of the kernels
//! is the code of the TCP path.

use super::program::{Copy, Loop};
use super::{Placements, Program};
use std::sync::Arc;
use weightrefit_core::dtype::Cast;
use weightrefit_core::plan::moves::DIMS_MAX;

/// Bytes of an entry: `Entry` of `agent/kernels/moves.cuh`.
pub const ENTRY_BYTES: usize = 3 * 8 + DIMS_MAX * 16 + 4 * 4;

/// Casts by their number in the kernels.
pub(super) const CASTS: [Cast; 5] =
    [Cast::None, Cast::F32ToBf16, Cast::F32ToF16, Cast::F16ToF32, Cast::Bf16ToF32];

impl Program {
    /// The table, where memory `i` lies at `address(i)` of the device; and its entries.
    #[must_use]
    pub fn table(&self, address: impl Fn(u32) -> u64) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.copies.len() * ENTRY_BYTES);
        for copy in &self.copies {
            let base = address(copy.mapping) + copy.base;
            [copy.wire, base, copy.run].iter().for_each(|word| out.extend(word.to_le_bytes()));
            for each in &copy.loops {
                out.extend(each.count.max(1).to_le_bytes());
                out.extend(each.stride.to_le_bytes());
            }
            let cast = CASTS.iter().position(|cast| *cast == copy.cast).unwrap_or(0) as u32;
            let words = [copy.depth as u32, cast, copy.wire_element as u32, 0];
            words.iter().for_each(|word| out.extend(word.to_le_bytes()));
        }
        out
    }

    /// Entries of the table.
    #[must_use]
    pub fn entries(&self) -> u32 {
        // A pair has at most as many boxes as fit in a message, far below 2^32.
        u32::try_from(self.copies.len()).unwrap_or(u32::MAX)
    }

    /// The program of a table, whose only memory is the device's address space; `None` where it is none.
    #[must_use]
    pub fn of_table(table: &[u8]) -> Option<Self> {
        let (entries, rest) = table.as_chunks::<ENTRY_BYTES>();
        let copies = entries.iter().map(read).collect::<Option<Vec<Copy>>>().filter(|_| rest.is_empty())?;
        let bytes = copies.last().map_or(0, |last| last.wire + last.wire_bytes());
        Some(Self::of_copies(Arc::new(Placements::none()), copies, bytes))
    }
}

pub(super) fn read(entry: &[u8; ENTRY_BYTES]) -> Option<Copy> {
    let long = |at: usize| Some(u64::from_le_bytes(*entry.get(at..)?.first_chunk()?));
    let short = |at: usize| Some(u32::from_le_bytes(*entry.get(at..)?.first_chunk()?));
    let tail = 3 * 8 + DIMS_MAX * 16;
    let mut loops = [Loop::default(); DIMS_MAX];
    for (dim, each) in loops.iter_mut().enumerate() {
        *each = Loop { count: long(24 + 16 * dim)?, stride: long(32 + 16 * dim)? };
    }
    Some(Copy {
        wire: long(0)?,
        mapping: 0,
        base: long(8)?,
        run: long(16)?,
        loops,
        depth: (short(tail)? as usize <= DIMS_MAX).then_some(short(tail)? as usize)?,
        cast: *CASTS.get(short(tail + 4)? as usize)?,
        wire_element: u64::from(short(tail + 8)?),
    })
}
