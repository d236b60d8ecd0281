//! Dense hyper-rectangles of one HF tensor's index space.

use super::moves::{DIMS_MAX, Dims};
use crate::region::Run;
use std::fmt;

/// The positions `lo[d]..lo[d] + shape[d]` of every dim; no extent is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Hyperbox {
    pub(super) lo: Dims,
    pub(super) shape: Dims,
}

impl Hyperbox {
    pub(super) fn end(&self, d: usize) -> u64 {
        self.lo.at(d) + self.shape.at(d)
    }

    /// Elements; 1 for a scalar. Callers have checked that the whole tensor's elements fit in u64.
    pub(super) fn volume(&self) -> u64 {
        self.shape.as_slice().iter().product()
    }

    /// The first dim that can be cut, where there is one.
    pub(super) fn row_dim(&self) -> Option<usize> {
        self.shape.as_slice().iter().position(|&n| n > 1)
    }

    /// Positions `from..to` (counted from the box's start) of dim `d`, all of the others.
    pub(super) fn rows(&self, d: usize, from: u64, to: u64) -> Self {
        self.range(d, self.lo.at(d) + from, self.lo.at(d) + to)
    }

    /// The same box with positions `from..to` of dim `d`.
    pub(super) fn range(&self, d: usize, from: u64, to: u64) -> Self {
        Self { lo: self.lo.with(d, from), shape: self.shape.with(d, to - from) }
    }

    /// What both hold, if anything.
    pub(super) fn intersect(&self, other: &Self) -> Option<Self> {
        let mut out = *self;
        for d in 0..self.lo.rank() {
            let lo = self.lo.at(d).max(other.lo.at(d));
            let end = self.end(d).min(other.end(d));
            if lo >= end {
                return None;
            }
            out.lo = out.lo.with(d, lo);
            out.shape = out.shape.with(d, end - lo);
        }
        Some(out)
    }

    /// What `self` holds and `other` does not, as disjoint boxes.
    pub(super) fn minus(&self, other: &Self) -> Vec<Self> {
        let Some(common) = self.intersect(other) else { return vec![*self] };
        let mut rest = *self;
        let mut out = Vec::new();
        for d in 0..self.lo.rank() {
            let (lo, end) = (common.lo.at(d) - rest.lo.at(d), common.end(d) - rest.lo.at(d));
            if lo > 0 {
                out.push(rest.rows(d, 0, lo));
            }
            if end < rest.shape.at(d) {
                out.push(rest.rows(d, end, rest.shape.at(d)));
            }
            rest = rest.rows(d, lo, end);
        }
        out
    }
}

impl fmt::Display for Hyperbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for d in 0..self.lo.rank() {
            write!(f, "{}{}:{}", if d == 0 { "[" } else { ", " }, self.lo.at(d), self.end(d))?;
        }
        f.write_str(if self.lo.rank() == 0 { "" } else { "]" })
    }
}

/// Calls `visit` with the box and the local start (per HF dim) of every combination of one run per dim, the
/// last dim fastest. More than [`DIMS_MAX`] dims never get here: tensors are checked where they come in.
pub(super) fn products(dims: &[&[Run]], mut visit: impl FnMut(Hyperbox, Dims)) {
    if dims.iter().any(|runs| runs.is_empty()) {
        return;
    }
    let mut at = [0; DIMS_MAX];
    let fill = |at: &[usize; DIMS_MAX], pick: fn(&Run) -> u64| {
        let mut values = [0; DIMS_MAX];
        for (d, runs) in dims.iter().enumerate() {
            values[d] = pick(&runs[at[d]]);
        }
        Dims::new(&values[..dims.len()]).expect("no more dims than DIMS_MAX")
    };
    loop {
        let hyperbox = Hyperbox { lo: fill(&at, |run| run.hf), shape: fill(&at, |run| run.len) };
        visit(hyperbox, fill(&at, |run| run.local));
        let mut d = dims.len();
        loop {
            if d == 0 {
                return;
            }
            d -= 1;
            at[d] += 1;
            if at[d] < dims[d].len() {
                break;
            }
            at[d] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hyperbox(lo: &[u64], shape: &[u64]) -> Hyperbox {
        Hyperbox { lo: Dims::new(lo).unwrap(), shape: Dims::new(shape).unwrap() }
    }

    #[test]
    fn a_box_minus_its_middle_is_four_disjoint_boxes_of_the_rest() {
        let (all, middle) = (hyperbox(&[0, 0], &[4, 5]), hyperbox(&[1, 2], &[2, 2]));
        let rest = all.minus(&middle);
        assert_eq!(rest.iter().map(Hyperbox::volume).sum::<u64>(), 20 - 4);
        for (i, a) in rest.iter().enumerate() {
            assert_eq!(a.intersect(&middle), None);
            assert!(rest[i + 1..].iter().all(|b| a.intersect(b).is_none()));
        }
        assert_eq!(all.minus(&all), []);
        assert_eq!(all.minus(&hyperbox(&[4, 0], &[1, 5])), [all]);
    }

    #[test]
    fn products_visit_every_combination_once_and_a_scalar_once() {
        let runs = |list: &[(u64, u64, u64)]| {
            list.iter().map(|&(local, hf, len)| Run { local, hf, len }).collect::<Vec<_>>()
        };
        let (a, b) = (runs(&[(0, 4, 2), (2, 0, 1)]), runs(&[(1, 7, 3)]));
        let mut seen = Vec::new();
        products(&[&a, &b], |hyperbox, local| seen.push((hyperbox, local.as_slice().to_vec())));
        assert_eq!(
            seen,
            [(hyperbox(&[4, 7], &[2, 3]), vec![0, 1]), (hyperbox(&[0, 7], &[1, 3]), vec![2, 1])]
        );
        let mut scalars = 0;
        products(&[], |hyperbox, _| scalars += hyperbox.volume());
        assert_eq!(scalars, 1);
    }

    #[test]
    fn a_box_prints_as_half_open_ranges() {
        assert_eq!(hyperbox(&[0, 8], &[4, 8]).to_string(), "[0:4, 8:16]");
        assert_eq!(hyperbox(&[], &[]).to_string(), "");
    }
}
