//! The transfer plan: for every destination element the one source that sends it, grouped by pair, in order.
//!
//! [`Sources`] takes the training ranks, [`Planner`] the ranks of the pools, [`Plan`] has the answer: figures
//! by [`Plan::summarize`], boxes by [`Plan::moves`] and [`Plan::slice`], `weightrefit.plan/v1` by
//! [`document`]. The planner knows no model, no engine and no layout: regions are all it sees.
//!
//! Invariants:
//! - P1: every destination element is in exactly one box, and its source holds that element.
//! - P2: the boxes' bytes are the minimum: elements of the destinations' pieces, in wire dtype.
//! - P3: the plan is a function of what ranks hold, not of the order in which pieces or replicas were named.
//! - P4: a rank's slice has the pairs that the whole plan has for it.

mod assign;
mod balance;
pub(crate) mod check;
mod cover;
mod demand;
mod digest;
pub mod document;
mod error;
mod expand;
mod hyperbox;
mod intern;
pub mod moves;
mod slice;
mod source;
mod summary;

pub use demand::Planner;
pub use digest::PLANNER_VERSION;
pub use error::{Holder, PlanError};
pub use slice::Slice;
pub use source::Sources;
pub use summary::{PlanBytes, Route, Summary};

use crate::id::Rank;
use assign::{Destination, Share};
use moves::{Endpoint, PairMoves};

/// Who sends what to whom. Boxes are made when asked for: a plan of millions of boxes stays small.
#[derive(Debug)]
pub struct Plan {
    needs: Planner,
    destinations: Vec<Destination>,
    pairs: Vec<PlannedPair>,
    /// Bytes by training rank.
    loads: Vec<u64>,
    /// Lower bound of the busiest source's bytes.
    bound: u64,
}

/// A pair, with its parts of the destination's lines.
#[derive(Debug)]
struct PlannedPair {
    source: Rank,
    destination: Destination,
    shares: Vec<Share>,
}

impl PlannedPair {
    const fn source_endpoint(&self) -> Endpoint {
        Endpoint::Training { rank: self.source }
    }
}

impl Plan {
    /// Number of pairs that exchange anything.
    #[must_use]
    pub fn pairs(&self) -> usize {
        self.pairs.len()
    }

    /// Pair `at` in plan order (source rank, pool, replica, rank) with its boxes; `None` past the last.
    #[must_use]
    pub fn moves(&self, at: usize) -> Option<PairMoves> {
        self.pairs.get(at).map(|pair| self.expand(pair))
    }
}
