//! A program on its way to the executor in a rank's own process: the kernels' table, where an address is an offset
//! and the last word of an entry says in which memory.

use super::program::Copy;
use super::table::read;
use super::{ENTRY_BYTES, HostMemory, Placements, Program};
use std::sync::Arc;

/// Bytes of an element on the wire.
const ELEMENTS: [u64; 4] = [1, 2, 4, 8];

/// A program that was passed: nothing of it is known to be true but what is checked here, and, against the memory that
/// it is for, by [`Self::fits`] (X1).
#[derive(Debug, Clone)]
pub struct Passed {
    program: Arc<Program>,
    /// By memory, the end of what is touched.
    ends: Vec<u64>,
}

impl Program {
    /// The table for another process.
    #[must_use]
    pub fn pass(&self) -> Vec<u8> {
        let mut table = self.table(|_| 0);
        let (entries, _) = table.as_chunks_mut::<ENTRY_BYTES>();
        for (entry, copy) in entries.iter_mut().zip(&self.copies) {
            entry[ENTRY_BYTES - 4..].copy_from_slice(&copy.mapping.to_le_bytes());
        }
        table
    }
}

impl Passed {
    /// Reads what [`Program::pass`] wrote; `None` where it is none, or where wire bytes do not follow one another.
    #[must_use]
    pub fn read(table: &[u8]) -> Option<Self> {
        let (mut wire, mut ends, mut copies) = (0_u64, Vec::new(), Vec::new());
        let (entries, rest) = table.as_chunks::<ENTRY_BYTES>();
        for entry in entries {
            let copy = Copy { mapping: u32::from_le_bytes(*entry.last_chunk()?), ..read(entry)? };
            let (end, bytes) = measured(&copy)?;
            if copy.wire != wire {
                return None;
            }
            wire = wire.checked_add(bytes)?;
            let at = copy.mapping as usize;
            if at >= crate::limits::REGISTRATION_MEMORIES_MAX {
                return None;
            }
            ends.resize(ends.len().max(at + 1), 0);
            ends[at] = end.max(ends[at]);
            copies.push(copy);
        }
        let program = Program::of_copies(Arc::new(Placements::none()), copies, wire);
        rest.is_empty().then_some(Self { program: Arc::new(program), ends })
    }

    /// The program.
    #[must_use]
    pub fn program(&self) -> &Arc<Program> {
        &self.program
    }

    /// Whether all that it touches lies in this memory.
    #[must_use]
    pub fn fits(&self, memory: &HostMemory) -> bool {
        let bytes = |at: usize| memory.mappings().get(at).map_or(0, |mapping| mapping.len());
        self.ends.iter().enumerate().all(|(at, end)| *end <= bytes(at))
    }
}

/// The end of what a copy touches in its memory, and its bytes on the wire; `None` where it is no copy of whole
/// elements.
fn measured(copy: &Copy) -> Option<(u64, u64)> {
    let element = copy.cast.sizes().map_or(copy.wire_element, |(from, _)| from);
    let is_whole = ELEMENTS.contains(&copy.wire_element)
        && copy.cast.sizes().is_none_or(|(_, to)| to == copy.wire_element)
        && copy.run > 0
        && copy.run.is_multiple_of(element);
    let mut end = copy.base.checked_add(copy.run)?;
    let mut elements = copy.run / element.max(1);
    for each in &copy.loops[..copy.depth] {
        let last = each.count.checked_sub(1)?.checked_mul(each.stride)?;
        end = end.checked_add(last)?;
        elements = elements.checked_mul(each.count)?;
    }
    is_whole.then_some((end, elements.checked_mul(copy.wire_element)?))
}
