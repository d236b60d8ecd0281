//! Compiling a pair's moves for one of its ends.

use super::placement::strides;
use super::{ExecutorError, Placements};
use std::sync::Arc;
use weightrefit_core::dtype::{Cast, DType};
use weightrefit_core::plan::moves::{DIMS_MAX, MoveBox, PairMoves};
use weightrefit_core::region::LocalTensor;

/// What one end of a pair copies, in wire order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    pub(super) placements: Arc<Placements>,
    pub(super) copies: Vec<Copy>,
    bytes: u64,
}

/// One box at one end: runs of contiguous bytes, repeated by up to [`DIMS_MAX`] loops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Copy {
    /// First wire byte.
    pub(super) wire: u64,
    /// Memory, and the first byte in it.
    pub(super) mapping: u32,
    pub(super) base: u64,
    /// Contiguous bytes in memory; whole elements, not 0.
    pub(super) run: u64,
    /// Outermost first; no count is 0 or 1.
    pub(super) loops: [Loop; DIMS_MAX],
    pub(super) depth: usize,
    pub(super) cast: Cast,
    /// Bytes of an element on the wire.
    pub(super) wire_element: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Loop {
    pub(super) count: u64,
    /// Bytes in memory.
    pub(super) stride: u64,
}

impl Program {
    /// For the rank that sends: `destination` are the local tensors of the other end, whose dtypes the wire has.
    ///
    /// # Errors
    /// A plan that does not fit the tensors of either end.
    pub fn for_source(
        moves: &PairMoves,
        source: &Arc<Placements>,
        destination: &[LocalTensor],
    ) -> Result<Self, ExecutorError> {
        Self::compile(moves, source, |found| {
            let wire = destination.get(found.destination.0 as usize).ok_or(ExecutorError::UnknownLocal {
                index: found.destination.0,
                count: destination.len(),
            })?;
            let order = order(found);
            let end = End {
                local: found.source.0,
                start: found.source_start.as_slice(),
                // In wire order, the position of each dim among the source's.
                order: Some(order),
                wire: wire.dtype,
            };
            Ok(end)
        })
    }

    /// For the rank that receives.
    ///
    /// # Errors
    /// A plan that does not fit the tensors of this rank.
    pub fn for_destination(moves: &PairMoves, destination: &Arc<Placements>) -> Result<Self, ExecutorError> {
        Self::compile(moves, destination, |found| {
            let (local, _) = destination.local(found.destination.0)?;
            Ok(End {
                local: found.destination.0,
                start: found.destination_start.as_slice(),
                order: None,
                wire: local.dtype,
            })
        })
    }

    /// Bytes on the wire.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// First wire byte of stream `index` of `count`; that of stream `count` is the end (X3).
    ///
    /// # Panics
    /// Where `index` is above `count`.
    #[must_use]
    pub fn split(&self, index: u32, count: u32) -> u64 {
        assert!(index <= count && count > 0, "stream {index} of {count}");
        if index == count {
            return self.bytes;
        }
        self.boundary((u128::from(self.bytes) * u128::from(index) / u128::from(count)) as u64)
    }

    /// The last wire byte at `at` or before where an element begins; the end from there on. The same at both ends,
    /// as in [`Self::split`].
    #[must_use]
    pub fn boundary(&self, at: u64) -> u64 {
        if at >= self.bytes {
            return self.bytes;
        }
        let after = self.copies.partition_point(|copy| copy.wire <= at);
        let Some(copy) = after.checked_sub(1).map(|at| &self.copies[at]) else { return 0 };
        at - (at - copy.wire) % copy.wire_element
    }

    pub(super) fn of_copies(placements: Arc<Placements>, copies: Vec<Copy>, bytes: u64) -> Self {
        Self { placements, copies, bytes }
    }

    fn compile<'m>(
        moves: &'m PairMoves,
        placements: &Arc<Placements>,
        end_of: impl Fn(&'m MoveBox) -> Result<End<'m>, ExecutorError>,
    ) -> Result<Self, ExecutorError> {
        let mut copies: Vec<Copy> = Vec::with_capacity(moves.boxes.len());
        let mut wire = 0_u64;
        for found in &moves.boxes {
            let end = end_of(found)?;
            let extents = order(found).map(|dim| found.shape.as_slice().get(dim).copied().unwrap_or(1));
            let extents = &extents[..found.shape.as_slice().len()];
            let Some(copy) = end.copy(placements, extents, wire)? else { continue };
            wire = wire
                .checked_add(copy.wire_bytes())
                .ok_or(ExecutorError::ByteCount { planned: moves.bytes, boxes: u64::MAX })?;
            match copies.last_mut() {
                Some(last) if last.is_followed_by(&copy) => last.run += copy.run,
                _ => copies.push(copy),
            }
        }
        if wire != moves.bytes {
            return Err(ExecutorError::ByteCount { planned: moves.bytes, boxes: wire });
        }
        Ok(Self { placements: Arc::clone(placements), copies, bytes: wire })
    }
}

/// One end of a box.
struct End<'m> {
    local: u32,
    start: &'m [u64],
    order: Option<[usize; DIMS_MAX]>,
    wire: DType,
}

impl End<'_> {
    /// The copy of a box of `extents` in wire order; `None` for an empty one.
    fn copy(
        &self,
        placements: &Placements,
        extents: &[u64],
        wire: u64,
    ) -> Result<Option<Copy>, ExecutorError> {
        let (local, place) = placements.local(self.local)?;
        let element = local.dtype.size();
        let cast = Cast::between(local.dtype, self.wire).ok_or_else(|| ExecutorError::NoCast {
            name: local.name.clone(),
            source_dtype: local.dtype,
            wire: self.wire,
        })?;
        let outside = || ExecutorError::OutsideTensor {
            name: local.name.clone(),
            shape: local.shape.clone(),
            start: self.start.to_vec(),
            extents: extents.to_vec(),
        };
        let lead =
            local.shape.len().checked_sub(extents.len()).filter(|lead| *lead <= 1).ok_or_else(outside)?;
        if self.start.len() != local.shape.len() || local.shape.len() > DIMS_MAX {
            return Err(outside());
        }
        let strides = strides(&local.shape, element);
        let mut copy = Copy {
            wire,
            mapping: place.mapping,
            base: place.offset,
            run: element,
            loops: [Loop::default(); DIMS_MAX],
            depth: 0,
            cast,
            wire_element: self.wire.size(),
        };
        let at = |dim: usize| lead + self.order.map_or(dim, |order| order[dim]);
        let lead_fits = lead == 0 || self.start[0] < local.shape[0];
        let fits = |dim: usize| {
            self.start[at(dim)].checked_add(extents[dim]).is_some_and(|end| end <= local.shape[at(dim)])
        };
        if (0..extents.len()).any(|dim| at(dim) >= local.shape.len()) {
            return Err(outside());
        }
        if !(0..extents.len()).all(fits) {
            return Err(outside());
        }
        if extents.contains(&0) {
            return Ok(None);
        }
        if !lead_fits {
            return Err(outside());
        }
        copy.base += self.start.iter().zip(strides).map(|(start, stride)| start * stride).sum::<u64>();
        for dim in (0..extents.len()).rev() {
            copy.enclose(extents[dim], strides[at(dim)]);
        }
        copy.loops[..copy.depth].reverse();
        Ok(Some(copy))
    }
}

impl Copy {
    /// Repeats what there is so far `count` times, `stride` bytes apart. Loops are innermost first meanwhile.
    fn enclose(&mut self, count: u64, stride: u64) {
        if count == 1 {
            return;
        }
        if self.depth == 0 && stride == self.run {
            self.run *= count;
            return;
        }
        if let Some(inner) = self.depth.checked_sub(1).map(|at| &mut self.loops[at])
            && stride == inner.stride * inner.count
        {
            inner.count *= count;
            return;
        }
        self.loops[self.depth] = Loop { count, stride };
        self.depth += 1;
    }

    /// Bytes on the wire.
    pub(super) fn wire_bytes(&self) -> u64 {
        let runs: u64 = self.loops[..self.depth].iter().map(|each| each.count).product();
        self.wire_of(self.run) * runs
    }

    /// Wire bytes of `bytes` in memory.
    #[inline]
    pub(super) fn wire_of(&self, bytes: u64) -> u64 {
        self.cast.sizes().map_or(bytes, |(from, to)| bytes / from * to)
    }

    /// Bytes in memory of `bytes` on the wire; whole elements only, where they are cast.
    #[inline]
    pub(super) fn memory_of(&self, bytes: u64) -> u64 {
        self.cast.sizes().map_or(bytes, |(from, to)| bytes / to * from)
    }

    /// True where the two are one run, so that a rank that holds whole neighbouring tensors sends them at once.
    fn is_followed_by(&self, next: &Self) -> bool {
        self.depth == 0
            && next.depth == 0
            && self.mapping == next.mapping
            && self.base + self.run == next.base
            && self.cast == next.cast
            && self.wire_element == next.wire_element
    }
}

/// Position among the source's dims of each of the destination's.
fn order(found: &MoveBox) -> [usize; DIMS_MAX] {
    found.permute.map_or_else(|| std::array::from_fn(|dim| dim), |permute| permute.map(usize::from))
}
