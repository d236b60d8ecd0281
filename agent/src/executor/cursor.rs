//! Walking a range of a program's wire bytes.

use super::Program;
use super::program::Copy;
use weightrefit_core::dtype::Cast;
use weightrefit_core::plan::moves::DIMS_MAX;

/// Runs of up to this many bytes are copied by one loop over them instead of one call each.
const TINY_BYTES: u64 = 64;

/// Bytes in memory that come next: `count` runs of `run` bytes, `stride` bytes apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Memory.
    pub mapping: u32,
    /// First byte in it.
    pub offset: u64,
    /// Bytes of each run.
    pub run: u64,
    /// Bytes from one run to the next.
    pub stride: u64,
    /// Runs; not 0.
    pub count: u64,
    /// Cast on the way out.
    pub cast: Cast,
    /// Bytes on the wire of all runs.
    pub wire_bytes: u64,
}

/// A position in a program, up to a fixed end.
#[derive(Debug, Clone)]
pub struct Cursor<'p> {
    program: &'p Program,
    copy: usize,
    index: [u64; DIMS_MAX],
    /// First byte of the current run, and bytes of it that are done.
    offset: u64,
    within: u64,
    left: u64,
}

impl<'p> Cursor<'p> {
    /// Of stream `stream` of `streams`.
    ///
    /// # Panics
    /// Where there is no such stream.
    #[must_use]
    pub fn stream(program: &'p Program, stream: u32, streams: u32) -> Self {
        Self::range(program, program.split(stream, streams), program.split(stream + 1, streams))
    }

    /// From wire byte `start` to `end`, both boundaries of the program.
    ///
    /// # Panics
    /// Where `start` is above `end`.
    #[must_use]
    pub fn range(program: &'p Program, start: u64, end: u64) -> Self {
        let copy = program.copies.partition_point(|copy| copy.wire <= start).saturating_sub(1);
        let mut cursor =
            Self { program, copy, index: [0; DIMS_MAX], offset: 0, within: 0, left: end - start };
        if let Some(found) = program.copies.get(copy) {
            let done = found.memory_of(start - found.wire);
            cursor.within = done % found.run;
            let mut runs = done / found.run;
            cursor.offset = found.base;
            for at in (0..found.depth).rev() {
                let each = found.loops[at];
                cursor.index[at] = runs % each.count;
                cursor.offset += cursor.index[at] * each.stride;
                runs /= each.count;
            }
        }
        cursor
    }

    /// Wire bytes to the end.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.left
    }

    /// What comes next, at most `wire_max` bytes of it; `None` at the end, and where `wire_max` is less than an
    /// element that is cast.
    #[inline]
    #[must_use]
    pub fn span(&self, wire_max: u64) -> Option<Span> {
        let copy = self.current()?;
        let memory_max = copy.memory_of(wire_max.min(self.left));
        let mut span = Span {
            mapping: copy.mapping,
            offset: self.offset + self.within,
            run: copy.run,
            stride: 0,
            count: 1,
            cast: copy.cast,
            wire_bytes: 0,
        };
        if self.within == 0 && copy.run <= TINY_BYTES && copy.depth > 0 && memory_max >= copy.run {
            let inner = copy.loops[copy.depth - 1];
            span.count = (inner.count - self.index[copy.depth - 1]).min(memory_max / copy.run);
            span.stride = inner.stride;
        } else {
            span.run = (copy.run - self.within).min(memory_max);
        }
        span.wire_bytes = copy.wire_of(span.run) * span.count;
        (span.wire_bytes > 0).then_some(span)
    }

    /// Moves past `span`, which [`Self::span`] gave for this position.
    #[inline]
    pub fn pass(&mut self, span: &Span) {
        self.left -= span.wire_bytes;
        let Some(copy) = self.program.copies.get(self.copy) else { return };
        self.within += span.run;
        if self.within == copy.run {
            self.within = 0;
            self.step(copy, span.count);
        }
    }

    /// Moves past `wire_bytes`.
    ///
    /// # Panics
    /// Beyond the end, or inside an element that is cast.
    pub fn skip(&mut self, mut wire_bytes: u64) {
        while wire_bytes > 0 {
            let span = self.span(wire_bytes).expect("callers skip what they copied");
            self.pass(&span);
            wire_bytes -= span.wire_bytes;
        }
    }

    fn current(&self) -> Option<&'p Copy> {
        self.program.copies.get(self.copy)
    }

    /// `runs` runs further, all of them in the innermost loop.
    fn step(&mut self, copy: &Copy, mut runs: u64) {
        for at in (0..copy.depth).rev() {
            let each = copy.loops[at];
            self.index[at] += runs;
            self.offset += runs * each.stride;
            if self.index[at] < each.count {
                return;
            }
            self.offset -= each.count * each.stride;
            self.index[at] = 0;
            runs = 1;
        }
        self.copy += 1;
        self.offset = self.current().map_or(0, |next| next.base);
    }
}
