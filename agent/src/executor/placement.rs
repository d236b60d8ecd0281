//! Where the local tensors of a rank lie in its memory.

use super::ExecutorError;
use crate::memory::Mapping;
use std::sync::Arc;
use weightrefit_core::plan::moves::DIMS_MAX;
use weightrefit_core::region::LocalTensor;

/// Staging puts tensors at multiples of this: a cache line, and enough for every vector unit and for DMA.
const STAGING_ALIGNMENT: u64 = 256;

/// First byte of a local tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Index of the memory.
    pub mapping: u32,
    /// Bytes from its beginning.
    pub offset: u64,
}

/// The local tensors of a rank with their places, both indexed by local id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placements {
    locals: Vec<LocalTensor>,
    places: Vec<Place>,
}

impl Placements {
    /// Of tensors that the client placed.
    ///
    /// # Errors
    /// Where the two lists differ in length or a tensor has 2^64 bytes.
    pub fn new(locals: Vec<LocalTensor>, places: Vec<Place>) -> Result<Self, ExecutorError> {
        if locals.len() != places.len() {
            return Err(ExecutorError::PlaceCount { places: places.len(), locals: locals.len() });
        }
        locals.iter().try_for_each(|local| bytes_of(local).map(drop))?;
        Ok(Self { locals, places })
    }

    /// Of memory whose tensors are not known here.
    #[must_use]
    pub fn none() -> Self {
        Self { locals: Vec::new(), places: Vec::new() }
    }

    /// Of staging: one memory, tensors in order. Also returns its size in bytes.
    ///
    /// # Errors
    /// Where sizes leave u64.
    pub fn staging(locals: Vec<LocalTensor>) -> Result<(Self, u64), ExecutorError> {
        let mut end = 0_u64;
        let mut places = Vec::with_capacity(locals.len());
        for local in &locals {
            let offset = end.checked_next_multiple_of(STAGING_ALIGNMENT);
            let bytes = bytes_of(local)?;
            let next = offset.and_then(|offset| Some((offset, offset.checked_add(bytes)?)));
            let (offset, next) = next.ok_or_else(|| too_large(local))?;
            places.push(Place { mapping: 0, offset });
            end = next;
        }
        Ok((Self { locals, places }, end))
    }

    /// The local tensors.
    #[must_use]
    pub fn locals(&self) -> &[LocalTensor] {
        &self.locals
    }

    /// Their places.
    #[must_use]
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    pub(super) fn local(&self, index: u32) -> Result<(&LocalTensor, Place), ExecutorError> {
        let at = index as usize;
        let found = self.locals.get(at).zip(self.places.get(at).copied());
        found.ok_or(ExecutorError::UnknownLocal { index, count: self.locals.len() })
    }
}

/// Memory of the host, checked to hold its placements: what is read and written here without a device.
#[derive(Debug, Clone)]
pub struct HostMemory {
    mappings: Vec<Arc<Mapping>>,
    placements: Arc<Placements>,
}

impl HostMemory {
    /// Pairs memory and placements.
    ///
    /// # Errors
    /// Where a tensor does not lie inside its memory.
    pub fn new(mappings: Vec<Arc<Mapping>>, placements: Arc<Placements>) -> Result<Self, ExecutorError> {
        check(&placements, |memory| mappings.get(memory as usize).map_or(0, |mapping| mapping.len()))?;
        Ok(Self { mappings, placements })
    }

    /// The placements.
    #[must_use]
    pub fn placements(&self) -> &Arc<Placements> {
        &self.placements
    }

    /// All memories.
    #[must_use]
    pub fn mappings(&self) -> &[Arc<Mapping>] {
        &self.mappings
    }

    /// Memory `index`; programs name only those that their placements have.
    #[inline]
    #[must_use]
    pub fn mapping(&self, index: u32) -> &Mapping {
        &self.mappings[index as usize]
    }
}

/// Whether each tensor lies inside its memory, of which `available` tells the bytes.
pub(super) fn check(placements: &Placements, available: impl Fn(u32) -> u64) -> Result<(), ExecutorError> {
    for (local, place) in placements.locals.iter().zip(&placements.places) {
        let (bytes, available) = (bytes_of(local)?, available(place.mapping));
        if place.offset.checked_add(bytes).is_none_or(|end| end > available) {
            return Err(ExecutorError::OutsideMemory {
                name: local.name.clone(),
                bytes,
                offset: place.offset,
                memory: place.mapping,
                available,
            });
        }
    }
    Ok(())
}

/// Bytes of a local tensor. Its strides fit in u64 too, even where an extent of 0 makes the bytes 0.
pub(super) fn bytes_of(local: &LocalTensor) -> Result<u64, ExecutorError> {
    let strides = local.shape.iter().try_fold(local.dtype.size(), |all, dim| all.checked_mul((*dim).max(1)));
    let bytes = strides.ok_or_else(|| too_large(local))?;
    Ok(if local.shape.contains(&0) { 0 } else { bytes })
}

/// Bytes between neighbours of each dim of a row-major tensor, which fits in u64 (`Placements`).
pub(super) fn strides(shape: &[u64], element: u64) -> [u64; DIMS_MAX] {
    let mut out = [element; DIMS_MAX];
    for dim in (0..shape.len().min(DIMS_MAX).saturating_sub(1)).rev() {
        out[dim] = out[dim + 1] * shape[dim + 1].max(1);
    }
    out
}

fn too_large(local: &LocalTensor) -> ExecutorError {
    ExecutorError::TooLarge { name: local.name.clone(), shape: local.shape.clone() }
}
