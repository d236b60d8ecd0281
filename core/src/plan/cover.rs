//! Covers: a tensor's index space cut into atoms, each with the set of ranks that hold all of it.
//!
//! Invariants:
//! - C1: the atoms of a cover are disjoint, and together hold exactly what some source rank holds.
//! - C2: a rank that holds an element twice counts once, with the piece that comes first.

use super::hyperbox::{Hyperbox, products};
use super::intern::Interner;
use super::source::{Region, Sources};
use crate::region::Run;
use std::collections::BTreeMap;

/// Elements that the same ranks hold.
#[derive(Debug)]
pub(super) struct Atom {
    pub(super) bounds: Hyperbox,
    /// The ranks, an id in [`Covers::holders`].
    pub(super) holders: u32,
    /// For each of these ranks, the index of its piece among all source pieces of the tensor.
    pub(super) pieces: Vec<u32>,
}

/// The covers of all tensors; tensors that the same ranks hold in the same regions share one.
#[derive(Debug)]
pub(super) struct Covers {
    /// Sets of ranks, each sorted.
    pub(super) holders: Interner<Vec<u32>>,
    /// Atoms in order of their first element.
    pub(super) list: Vec<Vec<Atom>>,
    /// By tensor.
    pub(super) of_tensor: Vec<u32>,
    /// By source region, per dim: its runs in HF order, each position once.
    pub(super) by_hf: Vec<Region>,
}

impl Covers {
    pub(super) fn new(sources: &Sources) -> Self {
        let by_hf: Vec<Region> = (0..sources.regions.len())
            .map(|id| sources.regions.get(id as u32).iter().map(|runs| in_hf_order(runs)).collect())
            .collect();
        let mut holders = Interner::default();
        let mut seen = Interner::default();
        let mut list: Vec<Vec<Atom>> = Vec::new();
        let of_tensor = sources.pieces.iter().map(|pieces| {
            let id = seen.id(pieces.iter().map(|(rank, held)| (rank.0, held.region)).collect::<Vec<_>>());
            if id as usize == list.len() {
                list.push(cover(seen.get(id), &by_hf, &mut holders));
            }
            id
        });
        let of_tensor = of_tensor.collect();
        Self { holders, list, of_tensor, by_hf }
    }
}

/// Sorted by HF position; positions that come again are dropped.
fn in_hf_order(runs: &[Run]) -> Vec<Run> {
    let mut sorted = runs.to_vec();
    sorted.sort_by_key(|run| (run.hf, run.local));
    let mut free = 0;
    sorted.retain_mut(|run| {
        let dropped = free.max(run.hf) - run.hf;
        if dropped >= run.len {
            return false;
        }
        *run = Run { local: run.local + dropped, hf: run.hf + dropped, len: run.len - dropped };
        free = run.hf + run.len;
        true
    });
    sorted
}

/// The HF positions alone, touching ones joined; as runs whose local start does not matter.
fn positions(runs: &[Run]) -> Vec<Run> {
    let mut out: Vec<Run> = Vec::with_capacity(runs.len());
    for run in runs {
        match out.last_mut() {
            Some(last) if last.hf + last.len == run.hf => last.len += run.len,
            _ => out.push(Run { local: 0, ..*run }),
        }
    }
    out
}

/// (rank, index of its piece among the tensor's), sorted by rank.
type Holders = Vec<(u32, u32)>;

fn cover(pieces: &[(u32, u32)], by_hf: &[Region], sets: &mut Interner<Vec<u32>>) -> Vec<Atom> {
    let mut groups: BTreeMap<Region, Holders> = BTreeMap::new();
    for (at, &(rank, region)) in (0..).zip(pieces) {
        let held = by_hf[region as usize].iter().map(|runs| positions(runs)).collect();
        let group = groups.entry(held).or_default();
        if group.last().is_none_or(|last| last.0 != rank) {
            group.push((rank, at)); // C2
        }
    }
    let mut parts: Vec<(Hyperbox, Holders)> = Vec::new();
    for (region, holders) in groups {
        let dims: Vec<&[Run]> = region.iter().map(Vec::as_slice).collect();
        products(&dims, |bounds, _| parts.push((bounds, holders.clone())));
    }
    parts.sort();
    if overlap(&parts) {
        let whole = parts[0].0;
        let mut disjoint = Vec::new();
        slabs(&parts.iter().collect::<Vec<_>>(), 0, whole, &mut disjoint);
        parts = disjoint;
    }
    let atom = |(bounds, holders): (Hyperbox, Holders)| {
        let (ranks, pieces) = holders.into_iter().unzip();
        Atom { bounds, holders: sets.id(ranks), pieces }
    };
    parts.into_iter().map(atom).collect()
}

/// Whether any two parts, sorted by first element, share one.
fn overlap(parts: &[(Hyperbox, Holders)]) -> bool {
    let mut open: Vec<&Hyperbox> = Vec::new();
    for (part, _) in parts {
        open.retain(|earlier| earlier.end(0) > part.lo.at(0));
        if open.iter().any(|earlier| earlier.intersect(part).is_some()) {
            return true;
        }
        open.push(part);
    }
    false
}

/// Cuts parts that overlap into disjoint ones (C1): dim by dim, into the slabs between all ends of parts.
/// Layouts whose ranks hold partly the same elements of a tensor are rare, and all tensors cut alike share this.
fn slabs(parts: &[&(Hyperbox, Holders)], d: usize, slab: Hyperbox, out: &mut Vec<(Hyperbox, Holders)>) {
    if d == slab.lo.rank() {
        let mut holders: Holders = parts.iter().flat_map(|(_, holders)| holders).copied().collect();
        holders.sort_unstable();
        holders.dedup_by_key(|(rank, _)| *rank); // C2
        return out.push((slab, holders));
    }
    let ends = |(part, _): &&(Hyperbox, Holders)| [part.lo.at(d), part.end(d)];
    let mut ends: Vec<u64> = parts.iter().flat_map(ends).collect();
    ends.sort_unstable();
    ends.dedup();
    let mut coming = parts.to_vec();
    coming.sort_by_key(|(part, _)| std::cmp::Reverse(part.lo.at(d)));
    let mut open: Vec<&(Hyperbox, Holders)> = Vec::new();
    for &[from, to] in ends.array_windows() {
        open.retain(|(part, _)| part.end(d) > from);
        while coming.last().is_some_and(|(part, _)| part.lo.at(d) == from) {
            open.extend(coming.pop());
        }
        if !open.is_empty() {
            slabs(&open, d + 1, slab.range(d, from, to), out);
        }
    }
}
