//! Pipeline stages: which layers a coordinate of the stage axis holds, and under which local number.
//!
//! Invariants:
//! - P1: no layer is in two ranges, so its owner, chunk and local number are unique.
//! - P2: there is one entry per coordinate of the stage axis.

use super::document::Stages;
use super::error::LayoutError;
use super::grid::{Axis, Grids};
use crate::id::Rank;

#[derive(Debug)]
pub(super) struct StageMap {
    pub(super) axis: String,
    /// Per stage its chunks.
    pub(super) layers: Vec<Vec<(u64, u64)>>,
    /// Sorted by first layer; empty ranges left out.
    sorted: Vec<Range>,
}

#[derive(Debug, Clone, Copy)]
struct Range {
    low: u64,
    high: u64,
    home: LayerHome,
}

/// Where a layer lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LayerHome {
    pub(super) stage: u64,
    pub(super) chunk: u64,
    /// Number within the chunk.
    pub(super) local: u64,
}

impl StageMap {
    pub(super) fn new(stages: &Stages) -> Result<Self, LayoutError> {
        let mut sorted = Vec::new();
        for (stage, chunks) in stages.layers.iter().enumerate() {
            for (chunk, &(low, high)) in chunks.iter().enumerate() {
                let home = LayerHome { stage: stage as u64, chunk: chunk as u64, local: 0 };
                if low < high {
                    sorted.push(Range { low, high, home });
                }
            }
        }
        sorted.sort_by_key(|range| range.low);
        if let Some([a, b]) = sorted.array_windows().find(|[a, b]| a.high > b.low) {
            let (layer, first, second) = (b.low, a.home.stage, b.home.stage);
            return Err(LayoutError::StageOverlap { layer, first, second });
        }
        Ok(Self { axis: stages.axis.clone(), layers: stages.layers.clone(), sorted })
    }

    /// `None` where no range holds the layer.
    pub(super) fn home(&self, layer: u64) -> Option<LayerHome> {
        let after = self.sorted.partition_point(|range| range.low <= layer);
        let range = self.sorted.get(after.checked_sub(1)?)?;
        (layer < range.high).then(|| LayerHome { local: layer - range.low, ..range.home })
    }

    /// P2.
    pub(super) fn one_entry_per_stage(&self, size: u64) -> Result<(), LayoutError> {
        if self.layers.len() as u64 != size {
            let axis = self.axis.clone();
            return Err(LayoutError::StageCount { axis, size, found: self.layers.len() });
        }
        Ok(())
    }

    /// G3: what a rank holds would else depend on which grid a rule names.
    pub(super) fn same_in_all_grids<'a>(
        &self,
        grids: &Grids,
        used: impl Iterator<Item = (usize, &'a Axis)>,
    ) -> Result<(), LayoutError> {
        let mut axes: Vec<Option<&Axis>> = vec![None; grids.grids.len()];
        used.for_each(|(grid, axis)| axes[grid] = Some(axis));
        let mut used = axes.iter().enumerate().filter_map(|(grid, axis)| Some((grid, (*axis)?)));
        let Some((first_grid, first)) = used.next() else { return Ok(()) };
        for (grid, axis) in used {
            // Worlds fit `u32` (limits.rs).
            let differs = |rank: &u32| first.coordinate(Rank(*rank)) != axis.coordinate(Rank(*rank));
            if let Some(rank) = (0..u32::try_from(grids.world).unwrap_or(u32::MAX)).find(differs) {
                return Err(LayoutError::StageDiffers {
                    rank: Rank(rank),
                    axis: self.axis.clone(),
                    first: grids.grids[first_grid].name.clone(),
                    second: grids.grids[grid].name.clone(),
                });
            }
        }
        Ok(())
    }
}
