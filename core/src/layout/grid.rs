//! Grids and axes: which coordinates a rank has.
//!
//! Invariants:
//! - G1: the sizes of a grid multiply to the world; the first axis varies fastest.
//! - G2: a composite axis is a list of different axes of one grid, its first part fastest; `[]` has size 1.
//! - G3: the stage of a rank is the same in every grid that a rule uses.

use super::document::Document;
use super::error::LayoutError;
use crate::id::Rank;
use crate::limits::RANKS_MAX;
use crate::nearest::nearest;
use std::collections::BTreeMap;

/// The grids of a document with all sizes known, and the composite axes over them.
#[derive(Debug)]
pub(super) struct Grids {
    pub(super) world: u64,
    pub(super) grids: Vec<Grid>,
    /// Parts are grid axes: composites of composites are flattened.
    pub(super) composites: BTreeMap<String, Vec<String>>,
}

#[derive(Debug)]
pub(super) struct Grid {
    pub(super) name: String,
    /// The fastest first.
    pub(super) axes: Vec<(String, u64)>,
}

/// An axis as arithmetic on a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Axis {
    pub(super) name: String,
    pub(super) size: u64,
    /// (stride in ranks, size), the fastest first.
    parts: Vec<(u64, u64)>,
}

impl Axis {
    /// In `0..size`.
    pub(super) fn coordinate(&self, rank: Rank) -> u64 {
        // Cannot overflow: the parts' sizes multiply to at most the world, as strides do.
        let step = |(sum, scale): (u64, u64), (stride, size): &(u64, u64)| {
            (sum + u64::from(rank.0) / stride % size * scale, scale * size)
        };
        self.parts.iter().fold((0, 1), step).0
    }
}

impl Grids {
    pub(super) fn resolve(document: &Document) -> Result<Self, LayoutError> {
        let world = document.world;
        if world == 0 || world > RANKS_MAX {
            return Err(LayoutError::World { found: world });
        }
        if document.grids.is_empty() {
            return Err(LayoutError::NoGrid);
        }
        let grids: Vec<_> =
            document.grids.iter().map(|(name, axes)| grid(document, name, axes)).collect::<Result<_, _>>()?;
        let known = || grids.iter().flat_map(|grid| grid.axes.iter().map(|(name, _)| name.as_str()));
        for axis in document.sizes.keys() {
            if !known().any(|name| name == axis) {
                let nearest = nearest(axis, known()).unwrap_or_default().to_owned();
                return Err(LayoutError::UnusedSize { axis: axis.clone(), nearest });
            }
        }
        let mut composites = BTreeMap::<String, Vec<String>>::new();
        for (name, parts) in &document.axes {
            let place = format!("axes.{name}");
            if known().any(|axis| axis == name) {
                return Err(LayoutError::Twice { place, name: name.clone() });
            }
            let mut flat = Vec::<String>::new();
            for part in parts {
                match composites.get(part) {
                    Some(inner) => flat.extend(inner.iter().cloned()),
                    None if known().any(|axis| axis == part) => flat.push(part.clone()),
                    None => {
                        let near = nearest(part, known()).unwrap_or_default().to_owned();
                        return Err(LayoutError::UnknownAxis { place, axis: part.clone(), nearest: near });
                    }
                }
            }
            once(&place, &flat)?;
            composites.insert(name.clone(), flat);
        }
        Ok(Self { world, grids, composites })
    }

    pub(super) fn index(&self, name: &str, place: &str) -> Result<usize, LayoutError> {
        self.grids.iter().position(|grid| grid.name == name).ok_or_else(|| {
            let known = self.grids.iter().map(|grid| grid.name.as_str());
            let nearest = nearest(name, known).unwrap_or_default().to_owned();
            LayoutError::UnknownGrid { place: place.to_owned(), grid: name.to_owned(), nearest }
        })
    }

    /// The axis `name`, composite or not, of the grid with this index.
    pub(super) fn axis(&self, grid: usize, name: &str, place: &str) -> Result<Axis, LayoutError> {
        let grid = &self.grids[grid];
        let single = [name.to_owned()];
        let names = self.composites.get(name).map_or(&single[..], Vec::as_slice);
        let part = |part: &String| {
            let at = grid.axes.iter().position(|(axis, _)| axis == part)?;
            // At most the world (G1), so no overflow.
            Some((grid.axes[..at].iter().map(|(_, size)| size).product(), grid.axes[at].1))
        };
        let parts: Option<Vec<(u64, u64)>> = names.iter().map(part).collect();
        let parts = parts.ok_or_else(|| {
            let axes = grid.axes.iter().map(|(axis, _)| axis.as_str());
            let known = axes.chain(self.composites.keys().map(String::as_str));
            LayoutError::AxisOutsideGrid {
                place: place.to_owned(),
                axis: name.to_owned(),
                grid: grid.name.clone(),
                nearest: nearest(name, known.filter(|k| *k != name)).unwrap_or_default().to_owned(),
            }
        })?;
        let size = parts.iter().map(|(_, size)| size).product();
        Ok(Axis { name: name.to_owned(), size, parts })
    }
}

fn once(place: &str, names: &[String]) -> Result<(), LayoutError> {
    for (i, name) in names.iter().enumerate() {
        if names[..i].contains(name) {
            return Err(LayoutError::Twice { place: place.to_owned(), name: name.clone() });
        }
    }
    Ok(())
}

fn grid(document: &Document, name: &str, axes: &[String]) -> Result<Grid, LayoutError> {
    once(&format!("grids.{name}"), axes)?;
    let mut product = 1_u64;
    let mut free = None;
    for axis in axes {
        match (document.sizes.get(axis), free) {
            (Some(0), _) => return Err(LayoutError::SizeZero { axis: axis.clone() }),
            (Some(size), _) => product = product.saturating_mul(*size),
            (None, None) => free = Some(axis),
            (None, Some(first)) => {
                let (grid, first, second) = (name.to_owned(), first.clone(), axis.clone());
                return Err(LayoutError::TwoFreeAxes { grid, first, second });
            }
        }
    }
    let rest = document.world / product;
    if !document.world.is_multiple_of(product) || (free.is_none() && rest != 1) {
        return Err(LayoutError::GridWorld { grid: name.to_owned(), product, world: document.world });
    }
    let size = |axis: &String| (axis.clone(), document.sizes.get(axis).copied().unwrap_or(rest));
    Ok(Grid { name: name.to_owned(), axes: axes.iter().map(size).collect() })
}
