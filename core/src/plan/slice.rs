//! One rank's part of a plan.

use super::Plan;
use super::moves::{Endpoint, PairMoves};

/// What one rank sends and receives. Peers come in rotated order: ranks that start at the same time start
/// with different peers, so that none is flooded.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Slice {
    /// Pairs with this rank as source.
    pub sends: Vec<PairMoves>,
    /// Pairs with this rank as destination.
    pub receives: Vec<PairMoves>,
}

impl Plan {
    /// The part of one rank, the same as the whole plan has for it, at the cost of its own boxes; empty for a
    /// rank that the plan does not know.
    #[must_use]
    pub fn slice(&self, of: Endpoint) -> Slice {
        let mut out = Slice::default();
        for pair in &self.pairs {
            if pair.source_endpoint() == of {
                out.sends.push(self.expand(pair));
            } else if pair.destination.endpoint() == of {
                out.receives.push(self.expand(pair));
            }
        }
        let sources: Vec<Endpoint> = (0..self.loads.len() as u32).map(Endpoint::training).collect();
        let destinations: Vec<Endpoint> = self.destinations.iter().map(|to| to.endpoint()).collect();
        rotate(&mut out.sends, of, &sources, &destinations, |pair| pair.destination);
        rotate(&mut out.receives, of, &destinations, &sources, |pair| pair.source);
        out
    }
}

/// Starts with the peer that stands among its side where `of` stands among its own.
fn rotate(
    pairs: &mut [PairMoves],
    of: Endpoint,
    own: &[Endpoint],
    peers: &[Endpoint],
    peer: fn(&PairMoves) -> Endpoint,
) {
    let Ok(at) = own.binary_search(&of) else { return };
    let Some(first) = peers.get(at * peers.len() / own.len()) else { return };
    let skipped = pairs.partition_point(|pair| peer(pair) < *first);
    pairs.rotate_left(skipped);
}
