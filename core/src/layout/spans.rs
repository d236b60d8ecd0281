//! One dim of one tensor as an ordered list of spans, and the cuts on it.
//!
//! Invariants:
//! - S1: spans are never empty, and the sum of their lengths fits `u64`.
//! - S2: a cut keeps the order, and the parts of all coordinates of an axis join to the whole (spread apart).

use super::document::Division;
use crate::limits::RANKS_MAX;

/// `len` consecutive positions; `hf` is where they are in the HF tensor, absent for padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) hf: Option<u64>,
    pub(super) len: u64,
}

/// What a cut by one axis needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct CutBy {
    pub(super) kind: Division,
    /// At least 1.
    pub(super) unit: u64,
    pub(super) spread: bool,
    /// Coordinate on the axis, below `parts`.
    pub(super) index: u64,
    /// Size of the axis, at least 1.
    pub(super) parts: u64,
}

/// Why an extent cannot be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CutError {
    /// Not a whole number of units.
    #[error("an extent of {extent} is no multiple of the unit {unit}")]
    Unit {
        /// Elements before the cut.
        extent: u64,
        /// Elements of a unit.
        unit: u64,
    },
    /// Units do not divide by the coordinates.
    #[error("an extent of {extent} with unit {unit} does not divide into {parts} equal parts")]
    Uneven {
        /// Elements before the cut.
        extent: u64,
        /// Elements of a unit.
        unit: u64,
        /// Coordinates.
        parts: u64,
    },
    /// Coordinates do not divide by the fewer units.
    #[error("{parts} coordinates do not divide evenly over {units} units")]
    Spread {
        /// Units.
        units: u64,
        /// Coordinates.
        parts: u64,
    },
}

/// Sizes of an axis near `parts`, and no larger than `most`, that fit: at most two on each side.
pub(super) fn sizes_near(most: u64, parts: u64, fits: impl Fn(u64) -> bool) -> Vec<u64> {
    let below = (1..parts.min(RANKS_MAX + 1)).rev().filter(|size| fits(*size)).take(2);
    let above = (parts.saturating_add(1)..=most.min(RANKS_MAX)).filter(|size| fits(*size)).take(2);
    let mut sizes: Vec<u64> = below.chain(above).collect();
    sizes.sort_unstable();
    sizes
}

impl CutError {
    /// Sizes of the axis near the one given with which the cut would come out; none where no size helps.
    pub(super) fn fitting_sizes(&self) -> Vec<u64> {
        match *self {
            Self::Unit { .. } => Vec::new(),
            Self::Uneven { extent, unit, parts } => {
                let units = extent / unit;
                sizes_near(units, parts, |size| units.is_multiple_of(size))
            }
            // Above the units, a multiple of them lets each be shared by equally many.
            Self::Spread { units, parts } => {
                sizes_near(RANKS_MAX, parts, |size| units.is_multiple_of(size) || size.is_multiple_of(units))
            }
        }
    }
}

pub(super) fn extent(spans: &[Span]) -> u64 {
    spans.iter().map(|span| span.len).sum()
}

/// The positions `low..high` of `spans`.
pub(super) fn take(spans: &[Span], low: u64, high: u64) -> Vec<Span> {
    let mut out = Vec::new();
    let mut at = 0;
    for span in spans {
        let (from, to) = (low.max(at), high.min(at + span.len));
        if from < to {
            out.push(Span { hf: span.hf.map(|hf| hf + (from - at)), len: to - from });
        }
        at += span.len;
    }
    out
}

/// The positions of an extent that one coordinate gets.
pub(super) fn part(extent: u64, by: CutBy) -> Result<(u64, u64), CutError> {
    let CutBy { kind, unit, spread, index, parts } = by;
    match kind {
        Division::Chunk => {
            // `ceil(ceil(N / unit) / n) * unit` may pass the end, also of `u64`; both ends are then the extent.
            let chunk = extent.div_ceil(unit).div_ceil(parts).saturating_mul(unit);
            let end = |i: u64| chunk.saturating_mul(i).min(extent);
            Ok((end(index), end(index + 1)))
        }
        Division::Balanced => {
            let (base, longer) = (extent / parts, extent % parts);
            let low = index * base + index.min(longer);
            Ok((low, low + base + u64::from(index < longer)))
        }
        Division::Even | Division::RoundRobin => {
            if !extent.is_multiple_of(unit) {
                return Err(CutError::Unit { extent, unit });
            }
            let units = extent / unit;
            if spread && units < parts && units > 0 {
                if !parts.is_multiple_of(units) {
                    return Err(CutError::Spread { units, parts });
                }
                let at = index / (parts / units);
                return Ok((at * unit, (at + 1) * unit));
            }
            if !units.is_multiple_of(parts) {
                return Err(CutError::Uneven { extent, unit, parts });
            }
            let width = units / parts * unit;
            Ok((index * width, (index + 1) * width))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(extent: u64, kind: Division, unit: u64, spread: bool, parts: u64) -> String {
        let one = |index| match part(extent, CutBy { kind, unit, spread, index, parts }) {
            Ok((low, high)) => format!("{low}..{high}"),
            Err(error) => error.to_string(),
        };
        (0..parts).map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn divisions_give_the_ranges_of_the_catalogue() {
        use Division::{Balanced, Chunk, Even};
        assert_eq!(parts(10, Chunk, 1, false, 4), "0..3 3..6 6..9 9..10");
        assert_eq!(parts(9, Chunk, 1, false, 8), "0..2 2..4 4..6 6..8 8..9 9..9 9..9 9..9");
        assert_eq!(parts(768, Chunk, 256, false, 4), "0..256 256..512 512..768 768..768");
        assert_eq!(parts(10, Balanced, 1, false, 4), "0..3 3..6 6..8 8..10");
        assert_eq!(parts(8, Even, 2, false, 4), "0..2 2..4 4..6 6..8");
        assert_eq!(parts(4, Even, 2, true, 4), "0..2 0..2 2..4 2..4");
        assert_eq!(parts(0, Even, 2, true, 2), "0..0 0..0");
        assert_eq!(parts(5, Even, 2, false, 1), "an extent of 5 is no multiple of the unit 2");
        assert_eq!(parts(u64::MAX, Chunk, u64::MAX, false, 2), format!("0..{0} {0}..{0}", u64::MAX));
    }

    #[test]
    fn sizes_that_would_come_out_are_named_on_both_sides() {
        for (extent, unit, spread, parts, want) in [
            (14, 1, false, 4, vec![1, 2, 7, 14]),
            (16 * 128, 128, false, 3, vec![1, 2, 4, 8]),
            (2 * 64, 64, true, 3, vec![1, 2, 4, 6]),
            (13, 1, false, 2, vec![1, 13]),
            (5, 2, false, 2, vec![]),
        ] {
            let cut = |parts| part(extent, CutBy { kind: Division::Even, unit, spread, index: 0, parts });
            let sizes = cut(parts).expect_err("does not come out").fitting_sizes();
            assert!(sizes.iter().all(|size| cut(*size).is_ok()), "{sizes:?}");
            assert_eq!(sizes, want, "{extent} by {parts}");
        }
    }

    #[test]
    fn a_span_of_padding_is_cut_like_any_other() {
        let spans = [Span { hf: Some(0), len: 5 }, Span { hf: None, len: 3 }];
        assert_eq!(take(&spans, 4, 7), [Span { hf: Some(4), len: 1 }, Span { hf: None, len: 2 }]);
        assert_eq!(extent(&spans), 8);
    }
}
