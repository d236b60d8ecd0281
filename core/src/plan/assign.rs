//! Cuts every line among its holders, in the quotas that `balance` dealt out.
//!
//! Along the line of a set of holders lie the needs of (pool, replica, rank) in order, so a source's quota is
//! one stretch of it: it meets few destinations, and only cells at the end of a quota are cut, between rows.

use super::balance;
use super::demand::{Planner, RankNeeds, Stretch};
use super::error::PlanError;
use super::moves::Endpoint;
use super::{Plan, PlannedPair};
use crate::id::Rank;
use std::collections::BTreeMap;

/// Part `from..to` (bytes) of the line that a destination rank has for one set of holders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) holders: u32,
    pub(super) from: u64,
    pub(super) to: u64,
}

/// One rank of one replica of one pool; ordered as in the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Destination {
    pub(super) pool: u32,
    pub(super) replica: u32,
    pub(super) rank: Rank,
}

impl Destination {
    pub(super) const fn endpoint(self) -> Endpoint {
        Endpoint::Inference { pool: self.pool, replica: self.replica, rank: self.rank }
    }
}

impl Planner {
    /// The plan of all destinations given so far.
    ///
    /// # Errors
    /// `TooLarge`.
    pub fn plan(self) -> Result<Plan, PlanError> {
        let destinations = self.destinations()?;
        // By set of holders: the destinations that it serves, in order.
        let mut served: BTreeMap<u32, Vec<Destination>> = BTreeMap::new();
        for &destination in &destinations {
            for holders in self.needs(destination).lines.keys() {
                served.entry(*holders).or_default().push(destination);
            }
        }
        let length = |holders, destination: &Destination| length(&self.needs(*destination).lines[&holders]);
        let sets: Vec<(&[u32], u64)> = served
            .iter()
            .map(|(&holders, destinations)| {
                let bytes = destinations.iter().map(|destination| length(holders, destination)).sum();
                (self.covers.holders.get(holders).as_slice(), bytes)
            })
            .collect();
        let quotas = balance::quotas(&sets, self.sources.locals.len());
        let mut shares = Vec::new();
        for (((&holders, destinations), quota), (set, _)) in served.iter().zip(&quotas).zip(&sets) {
            self.cut_line(holders, destinations, quota, |member, destination, share| {
                shares.push((Rank(set[member]), destination, share));
            });
        }
        shares.sort_unstable_by_key(|(source, destination, share)| (*source, *destination, share.holders));
        let mut loads = vec![0_u64; self.sources.locals.len()];
        let mut pairs: Vec<PlannedPair> = Vec::new();
        for (source, destination, share) in shares {
            loads[source.0 as usize] += share.to - share.from;
            match pairs.last_mut() {
                Some(pair) if (pair.source, pair.destination) == (source, destination) => {
                    pair.shares.push(share);
                }
                _ => pairs.push(PlannedPair { source, destination, shares: vec![share] }),
            }
        }
        let bound = balance::bound(&sets, &loads);
        Ok(Plan { destinations, pairs, loads, bound, needs: self })
    }

    /// What a destination needs, shared by all replicas.
    pub(super) fn needs(&self, destination: Destination) -> &RankNeeds {
        &self.pools[destination.pool as usize].ranks[destination.rank.0 as usize]
    }

    /// All destinations in order; refuses needs whose sum does not fit.
    fn destinations(&self) -> Result<Vec<Destination>, PlanError> {
        let mut out = Vec::new();
        let mut total = 0_u64;
        for (pool, list) in (0..).zip(&self.pools) {
            for (replica, _) in (0..).zip(&list.replicas) {
                for (rank, needs) in (0..).zip(&list.ranks) {
                    out.push(Destination { pool, replica, rank: Rank(rank) });
                    total = total
                        .checked_add(needs.minimum)
                        .filter(|total| *total <= u64::MAX / 2)
                        .ok_or_else(|| PlanError::TooLarge { what: "what all ranks need".into() })?;
                }
            }
        }
        Ok(out)
    }

    /// Walks the line of one set of holders through all destinations, member after member, and hands out the
    /// share of each pair.
    fn cut_line(
        &self,
        holders: u32,
        destinations: &[Destination],
        quota: &[u64],
        mut hand_out: impl FnMut(usize, Destination, Share),
    ) {
        let (mut member, mut quota_end, mut start) = (0, quota[0], 0);
        for &destination in destinations {
            let needs = self.needs(destination);
            let line = &needs.lines[&holders];
            let len = length(line);
            let mut from = 0;
            while from < len {
                let last = member + 1 == quota.len();
                let ends_here = !last && quota_end < start + len;
                let to = match ends_here {
                    false => len,
                    true if quota_end <= start + from => from,
                    true => self.nearest_row(needs, line, quota_end - start),
                };
                if to > from {
                    hand_out(member, destination, Share { holders, from, to });
                    from = to;
                }
                if ends_here {
                    member += 1;
                    quota_end += quota[member];
                }
            }
            start += len;
        }
    }

    /// The place nearest to `offset` on a line where its cell can be cut.
    fn nearest_row(&self, needs: &RankNeeds, line: &[Stretch], offset: u64) -> u64 {
        let at = line.partition_point(|stretch| stretch.end <= offset);
        let start = at.checked_sub(1).map_or(0, |before| line[before].end);
        let Some(stretch) = line.get(at) else { return start };
        let bounds = self.cells(needs.pieces[stretch.piece as usize].1)[stretch.cell as usize].bounds;
        let rows = bounds.row_dim().map_or(1, |d| bounds.shape.at(d));
        let row = (stretch.end - start) / rows;
        start + (offset - start + row / 2) / row * row
    }
}

fn length(line: &[Stretch]) -> u64 {
    line.last().map_or(0, |last| last.end)
}
