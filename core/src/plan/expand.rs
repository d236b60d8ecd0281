//! From shares to boxes: each cell, cut by the runs of the source's piece, then joined where boxes touch.

use super::assign::Share;
use super::hyperbox::{Hyperbox, products};
use super::moves::{DIMS_MAX, Dims, MoveBox, PairMoves};
use super::source::{Held, Permute};
use super::{Plan, PlannedPair};
use crate::id::{LocalId, TensorId};
use crate::region::Run;

/// Where a box lies in one rank's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    local: LocalId,
    lead: Option<u64>,
    permute: Option<Permute>,
}

/// A box with all positions per HF dim; turned into the two sides' own dims at the end.
#[derive(Debug, Clone, Copy)]
struct Draft {
    tensor: TensorId,
    destination: Place,
    source: Place,
    bounds: Hyperbox,
    destination_start: Dims,
    source_start: Dims,
}

impl Plan {
    /// The boxes of one pair.
    pub(super) fn expand(&self, pair: &PlannedPair) -> PairMoves {
        let mut drafts = Vec::new();
        for share in &pair.shares {
            self.draft(pair, share, &mut drafts);
        }
        drafts.sort_unstable_by_key(|draft| (draft.group(), draft.bounds.lo));
        let mut boxes = Vec::with_capacity(drafts.len());
        for group in drafts.chunk_by(|a, b| a.group() == b.group()) {
            boxes.extend(joined(group.to_vec()).iter().map(Draft::finish));
        }
        boxes.sort_unstable_by_key(|moved| {
            (moved.tensor, moved.hf, moved.destination, moved.destination_start)
        });
        let bytes = boxes.iter().map(|moved| self.box_bytes(pair, moved)).sum();
        PairMoves { source: pair.source_endpoint(), destination: pair.destination.endpoint(), bytes, boxes }
    }

    fn box_bytes(&self, pair: &PlannedPair, moved: &MoveBox) -> u64 {
        let wire = self.needs.needs(pair.destination).locals[moved.destination.0 as usize].dtype;
        moved.shape.as_slice().iter().product::<u64>() * wire.size()
    }

    fn draft(&self, pair: &PlannedPair, share: &Share, drafts: &mut Vec<Draft>) {
        let (planner, needs) = (&self.needs, self.needs.needs(pair.destination));
        let set = planner.covers.holders.get(share.holders);
        let member = set.binary_search(&pair.source.0).expect("shares go to members of their set");
        let line = &needs.lines[&share.holders];
        let first = line.partition_point(|stretch| stretch.end <= share.from);
        let mut start = first.checked_sub(1).map_or(0, |before| line[before].end);
        let mut clipped: [Vec<Run>; DIMS_MAX] = Default::default();
        for stretch in line[first..].iter() {
            if start >= share.to {
                break;
            }
            let (held, cut) = &needs.pieces[stretch.piece as usize];
            let cell = &planner.cells(*cut)[stretch.cell as usize];
            let bounds = rows(cell.bounds, start, stretch.end, share);
            start = stretch.end;
            let stored = planner.sources.tensors[held.tensor.0 as usize].stored_as;
            let piece = planner.atoms(stored)[cell.atom as usize].pieces[member];
            let source = &planner.sources.pieces[stored.0 as usize][piece as usize].1;
            let by_hf = &planner.covers.by_hf[source.region as usize];
            for (d, runs) in by_hf.iter().enumerate() {
                clip(runs, bounds.lo.at(d), bounds.shape.at(d), &mut clipped[d]);
            }
            let dims: [&[Run]; DIMS_MAX] = std::array::from_fn(|d| clipped[d].as_slice());
            products(&dims[..by_hf.len()], |bounds, source_start| {
                let mut destination_start = cell.local;
                for d in 0..destination_start.rank() {
                    let inside = bounds.lo.at(d) - cell.bounds.lo.at(d);
                    destination_start = destination_start.with(d, cell.local.at(d) + inside);
                }
                drafts.push(Draft {
                    tensor: held.tensor,
                    destination: place(held),
                    source: place(source),
                    bounds,
                    destination_start,
                    source_start,
                });
            });
        }
    }
}

const fn place(held: &Held) -> Place {
    Place { local: held.local, lead: held.lead, permute: held.permute }
}

/// The rows of a cell that lie in a share; shares end between rows.
fn rows(cell: Hyperbox, start: u64, end: u64, share: &Share) -> Hyperbox {
    let Some(d) = cell.row_dim() else { return cell };
    let row = (end - start) / cell.shape.at(d);
    cell.rows(d, share.from.saturating_sub(start) / row, (share.to.min(end) - start) / row)
}

/// The parts of `runs` (in HF order) inside `lo..lo + len`.
fn clip(runs: &[Run], lo: u64, len: u64, out: &mut Vec<Run>) {
    out.clear();
    let first = runs.partition_point(|run| run.hf + run.len <= lo);
    for run in &runs[first..] {
        if run.hf >= lo + len {
            break;
        }
        let from = lo.max(run.hf);
        let to = (lo + len).min(run.hf + run.len);
        out.push(Run { local: run.local + (from - run.hf), hf: from, len: to - from });
    }
}

/// Joins boxes of one group that touch in the HF tensor and in both local tensors, until none do.
fn joined(mut drafts: Vec<Draft>) -> Vec<Draft> {
    let dims = drafts.first().map_or(0, |draft| draft.bounds.lo.rank());
    let mut before = 0;
    while drafts.len() > 1 && drafts.len() != before {
        before = drafts.len();
        for d in (0..dims).rev() {
            drafts.sort_unstable_by_key(|draft| draft.across(d));
            drafts.dedup_by(|next, kept| kept.absorb(next, d));
        }
    }
    drafts
}

impl Draft {
    const fn group(&self) -> (TensorId, Place, Place) {
        (self.tensor, self.destination, self.source)
    }

    /// Sorts candidates for joining along `d` next to each other.
    fn across(&self, d: usize) -> (Dims, Dims, Dims, Dims, u64) {
        (
            self.bounds.lo.with(d, 0),
            self.bounds.shape.with(d, 0),
            self.destination_start.with(d, 0),
            self.source_start.with(d, 0),
            self.bounds.lo.at(d),
        )
    }

    fn absorb(&mut self, next: &Self, d: usize) -> bool {
        let (a, b) = (self.across(d), next.across(d));
        let len = self.bounds.shape.at(d);
        let touches = |a: &Dims, b: &Dims| a.at(d) + len == b.at(d);
        let joins = (a.0, a.1, a.2, a.3) == (b.0, b.1, b.2, b.3)
            && touches(&self.bounds.lo, &next.bounds.lo)
            && touches(&self.destination_start, &next.destination_start)
            && touches(&self.source_start, &next.source_start);
        if joins {
            self.bounds.shape = self.bounds.shape.with(d, len + next.bounds.shape.at(d));
        }
        joins
    }

    fn finish(&self) -> MoveBox {
        let dims = self.bounds.lo.rank();
        MoveBox {
            tensor: self.tensor,
            hf: self.bounds.lo,
            shape: self.source.local_dims(None, &self.bounds.shape),
            source: self.source.local,
            source_start: self.source.local_dims(self.source.lead, &self.source_start),
            destination: self.destination.local,
            destination_start: self.destination.local_dims(self.destination.lead, &self.destination_start),
            permute: permute(dims, &self.source, &self.destination),
        }
    }
}

impl Place {
    /// HF dim of local dim `i`.
    fn hf_dim(&self, i: usize) -> usize {
        self.permute.map_or(i, |permute| usize::from(permute[i]))
    }

    /// Reorders values per HF dim into local dims, behind the lead.
    fn local_dims(&self, lead: Option<u64>, values: &Dims) -> Dims {
        let mut out = [0; DIMS_MAX];
        let stacked = usize::from(lead.is_some());
        out[0] = lead.unwrap_or(0);
        for i in 0..values.rank() {
            out[i + stacked] = values.at(self.hf_dim(i));
        }
        Dims::new(&out[..values.rank() + stacked]).expect("local tensors have at most DIMS_MAX dims")
    }
}

/// Destination dim `i` is source dim `permute[i]`.
fn permute(dims: usize, source: &Place, destination: &Place) -> Option<Permute> {
    let mut out = [0; DIMS_MAX];
    for (i, entry) in out.iter_mut().enumerate().take(dims) {
        let same = (0..dims).find(|&j| source.hf_dim(j) == destination.hf_dim(i));
        *entry = same.expect("permutes name each dim once") as u8;
    }
    (0..dims).any(|i| usize::from(out[i]) != i).then_some(out)
}
