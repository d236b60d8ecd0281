//! What is proved over all ranks: every rank evaluates (L2), and the pieces of each tensor tile it (L3).
//!
//! Only pieces are looked at, not how they were made, so that a mistake in the evaluation shows here.

use super::bind::Layout;
use super::error::LayoutError;
use crate::id::{Rank, TensorId};
use crate::region::Piece;
use std::collections::{BTreeMap, BTreeSet};

/// Positions of one dim of the HF tensor as sorted (start, end).
type Positions = Vec<(u64, u64)>;

/// Per dim its positions.
type Region = Vec<Positions>;

/// Distinct regions that ranks hold of one tensor, each with the first rank that holds it.
type Holders = Vec<(u32, Rank)>;

/// Regions of all tensors, each stored once: a model has few shapes and few ways to cut them.
#[derive(Default)]
struct Regions {
    ids: BTreeMap<Region, u32>,
    list: Vec<Region>,
}

impl Layout {
    /// Whether every rank can be evaluated, and the elements of every tensor that this side holds are held exactly
    /// once, replicas counted once.
    ///
    /// # Errors
    /// The first rank, tensor or local tensor for which that is not so.
    pub fn check(&self) -> Result<(), LayoutError> {
        let mut regions = Regions::default();
        let mut holders: Vec<Holders> = vec![Vec::new(); self.table.len()];
        for rank in self.ranks() {
            for piece in self.rank_regions(rank)?.pieces {
                let region = regions.id(&piece);
                let holders = &mut holders[piece.tensor.0 as usize];
                if !holders.iter().any(|(known, _)| *known == region) {
                    holders.push((region, rank));
                }
            }
        }
        // Tensors of one shape whose parts are equal need to be looked at once.
        let mut known = BTreeSet::<(&[u64], Vec<u32>)>::new();
        for tensor in &self.held {
            let holders = &holders[tensor.0 as usize];
            let shape = self.table[*tensor].shape.as_slice();
            let key = (shape, holders.iter().map(|(region, _)| *region).collect());
            if known.insert(key) {
                self.tiles(*tensor, holders, &regions)?;
            }
        }
        Ok(())
    }

    fn tiles(&self, tensor: TensorId, holders: &Holders, regions: &Regions) -> Result<(), LayoutError> {
        let meta = &self.table[tensor];
        let region = |(id, _): &(u32, Rank)| &regions.list[*id as usize];
        // Along the dim with the most different starts, few regions meet.
        let start = |region: &Region, dim: usize| region[dim].first().map_or(0, |run| run.0);
        let end = |region: &Region, dim: usize| region[dim].last().map_or(0, |run| run.1);
        let starts = |dim: &usize| {
            let mut starts: Vec<_> = holders.iter().map(|holder| start(region(holder), *dim)).collect();
            starts.sort_unstable();
            starts.dedup();
            starts.len()
        };
        let mut sorted: Vec<_> = holders.iter().collect();
        if let Some(dim) = (0..meta.shape.len()).max_by_key(starts) {
            sorted.sort_by_key(|holder| start(region(holder), dim));
            for (i, first) in sorted.iter().enumerate() {
                let near = |second: &&&(u32, Rank)| start(region(second), dim) < end(region(first), dim);
                if let Some(second) =
                    sorted[i + 1..].iter().take_while(near).find(|second| meet(region(first), region(second)))
                {
                    let (a, b) = (first.1.min(second.1), first.1.max(second.1));
                    return Err(LayoutError::TensorOverlap {
                        tensor: meta.name.clone(),
                        first: a,
                        second: b,
                    });
                }
            }
        }
        let volume = |region: &Region| -> u128 {
            let extent = |runs: &Positions| runs.iter().map(|run| u128::from(run.1 - run.0)).sum::<u128>();
            region.iter().map(extent).product()
        };
        let held: u128 = sorted.iter().map(|holder| volume(region(holder))).sum();
        let elements = meta.elements();
        // Disjoint parts of a tensor never exceed it.
        match u128::from(elements).saturating_sub(held) {
            0 => Ok(()),
            missing => Err(LayoutError::TensorGap {
                tensor: meta.name.clone(),
                missing: u64::try_from(missing).unwrap_or(elements),
                elements,
            }),
        }
    }
}

impl Regions {
    fn id(&mut self, piece: &Piece) -> u32 {
        let positions = |runs: &Vec<crate::region::Run>| {
            let mut runs: Vec<_> = runs.iter().map(|run| (run.hf, run.hf + run.len)).collect();
            runs.sort_unstable();
            runs
        };
        let region: Region = piece.dims.iter().map(positions).collect();
        if let Some(id) = self.ids.get(&region) {
            return *id;
        }
        // No more regions than pieces, and memory ends before 2^32 of them.
        let id = self.list.len() as u32;
        self.list.push(region.clone());
        self.ids.insert(region, id);
        id
    }
}

/// Whether two regions of one tensor share an element: their runs must share a position in every dim.
fn meet(a: &Region, b: &Region) -> bool {
    let share = |(a, b): (&Positions, &Positions)| {
        let (mut i, mut j) = (0, 0);
        while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
            if x.0 < y.1 && y.0 < x.1 {
                return true;
            }
            if x.1 <= y.1 { i += 1 } else { j += 1 }
        }
        false
    };
    a.iter().zip(b).all(share)
}
