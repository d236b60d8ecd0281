//! What training ranks offer, and which version it becomes (protocol page §3).
//!
//! Invariants:
//! - K1: a version is accepted only when all training ranks offer the same step of the same world.
//! - K2 (I7): an accepted version is larger than every version that any report has named; a name of another
//!   world's step is never given again.
//! - K3: a publication that was released is released again when it is offered again, never accepted again.

use crate::code::Code;
use crate::id::{Epoch, MemberId};
use crate::membership::VersionFloor;
use crate::round::io::Event;
use crate::round::message::{ClassSums, ContentSum, Message, RoundKey, Version};
use crate::round::scope::Context;
use crate::round::topology::PublishedSums;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What a leader remembers from one epoch to the next, as long as its process lives.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(in crate::round) struct Memory {
    world: Option<Arc<str>>,
    accepted: Option<Version>,
    /// Largest version heard of.
    known: Option<(u64, i64, Epoch)>,
}

impl Memory {
    pub(in crate::round) fn hear(&mut self, version: &Version) {
        self.known = self.known.max(Some(version.name()));
    }

    /// The largest version that the coordinator has heard of; whoever held it may be gone.
    pub(super) fn hear_floor(&mut self, floor: VersionFloor) {
        self.known = self.known.max(Some((floor.run, floor.step, Epoch(0))));
    }

    /// The version of a step in this epoch.
    fn allot(&self, epoch: Epoch, step: i64, world: &Arc<str>) -> Result<Version, Code> {
        let version = |run| Version { run, step, origin: epoch, sum: ContentSum::default() };
        let accepted = self.accepted.filter(|_| self.world.as_ref() == Some(world));
        if let Some(last) = accepted {
            if (step, epoch) <= (last.step, last.origin) {
                return Err(Code::VersionRegressed); // same world: steps grow
            }
            if self.known.is_none_or(|known| known < version(last.run).name()) && step >= last.step {
                return Ok(version(last.run));
            }
        }
        Ok(version(match self.known {
            None => 0,
            Some((run, known_step, _)) if step > known_step => run,
            Some((run, ..)) => run.saturating_add(1),
        }))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Offer {
    step: i64,
    world: Arc<str>,
    sums: ClassSums,
}

/// A complete publication that no round has used up.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Accepted {
    pub(super) step: i64,
    /// Allotted when the first round opens: only then have replicas said what they hold (K2).
    pub(super) version: Option<Version>,
    pub(super) world: Arc<str>,
    pub(super) sums: PublishedSums,
}

/// What came of an offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    Waiting,
    Complete,
    Refused { step: i64, code: Code, member: Option<MemberId> },
}

/// Publications of one epoch.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Desk {
    training: Vec<MemberId>,
    offers: BTreeMap<MemberId, Offer>,
    released: BTreeMap<MemberId, (i64, Arc<str>, RoundKey)>,
    accepted: Option<Accepted>,
    /// When the ranks that have not offered the step are too late.
    skew_at: Option<u64>,
}

impl Desk {
    pub(super) fn new(training: Vec<MemberId>) -> Self {
        let (offers, released) = Default::default();
        Self { training, offers, released, accepted: None, skew_at: None }
    }

    pub(super) fn accepted(&self) -> Option<&Accepted> {
        self.accepted.as_ref()
    }

    pub(super) fn deadline(&self) -> Option<u64> {
        self.skew_at
    }

    /// A rank offers a step, maybe again.
    pub(super) fn offer(
        &mut self,
        ctx: &mut Context<'_>,
        from: MemberId,
        (step, world, sums): (i64, Arc<str>, ClassSums),
    ) {
        if let Some((released_step, released_world, up_to)) = self.released.get(&from)
            && (*released_step, released_world) == (step, &world)
        {
            let (up_to, leader) = (*up_to, ctx.scope.membership.leader());
            return ctx.send(leader, from, Message::Release { step, world, up_to }); // K3
        }
        let offer = Offer { step, world, sums };
        if self.offers.insert(from, offer.clone()) != Some(offer) && self.skew_at.is_none() {
            let publish_ms = ctx.scope.topology.policies.timeouts.publish_ms;
            self.skew_at = Some(ctx.after(publish_ms));
        }
    }

    /// Accepts what all ranks offer, if it is not accepted already.
    pub(super) fn accept(&mut self, ctx: &Context<'_>) -> Verdict {
        let Some(first) = self.training.first().and_then(|rank| self.offers.get(rank)) else {
            return Verdict::Waiting;
        };
        let same = |rank: &MemberId| {
            self.offers.get(rank).is_some_and(|o| o.step == first.step && o.world == first.world)
        };
        if !self.training.iter().all(same) {
            return Verdict::Waiting; // K1
        }
        self.skew_at = None;
        let (step, world) = (first.step, first.world.clone());
        if self.accepted.as_ref().is_some_and(|a| a.step == step && a.world == world) {
            return Verdict::Waiting;
        }
        let sums = self.offers.iter().map(|(rank, offer)| (*rank, offer.sums.clone())).collect();
        match ctx.scope.topology.ledger.published(&sums) {
            Ok(sums) => {
                self.accepted = Some(Accepted { step, version: None, world, sums });
                Verdict::Complete
            }
            Err(fault) => Verdict::Refused { step, code: fault.code, member: fault.member },
        }
    }

    /// The version of what is accepted; `None` when it is refused, for `VersionRegressed`.
    pub(super) fn name(&mut self, ctx: &mut Context<'_>, memory: &mut Memory) -> Option<Version> {
        let accepted = self.accepted.as_mut()?;
        if accepted.version.is_none() {
            let version = memory.allot(ctx.scope.epoch(), accepted.step, &accepted.world).ok()?;
            memory.world = Some(accepted.world.clone());
            memory.accepted = Some(version);
            memory.hear(&version);
            accepted.version = Some(version);
            ctx.event(Event::Accepted { version });
        }
        accepted.version
    }

    /// Ranks that published too early for the others, or the others too late.
    pub(super) fn expire(&mut self, ctx: &Context<'_>) -> Verdict {
        if self.skew_at.is_none_or(|at| at > ctx.now) {
            return Verdict::Waiting;
        }
        self.skew_at = None;
        let newest = self.offers.values().map(|offer| offer.step).max().unwrap_or_default();
        let behind = |rank: &&MemberId| self.offers.get(rank).is_none_or(|offer| offer.step != newest);
        let first = self.training.first();
        let member = self.training.iter().find(behind).or(first).copied();
        Verdict::Refused { step: newest, code: Code::PublishSkew, member }
    }

    /// Gives back all offers (or those of one publication): no open round uses them and none will be opened on
    /// them.
    pub(super) fn release(&mut self, ctx: &mut Context<'_>, only: Option<(i64, &Arc<str>)>, up_to: RoundKey) {
        let leader = ctx.scope.membership.leader();
        let meant = |step: i64, world: &Arc<str>| only.is_none_or(|only| only == (step, world));
        let (gone, kept) =
            std::mem::take(&mut self.offers).into_iter().partition(|(_, o)| meant(o.step, &o.world));
        self.offers = kept;
        let gone: BTreeMap<MemberId, Offer> = gone;
        for (rank, Offer { step, world, .. }) in gone {
            self.released.insert(rank, (step, world.clone(), up_to));
            ctx.send(leader, rank, Message::Release { step, world, up_to });
        }
        self.accepted.take_if(|accepted| meant(accepted.step, &accepted.world));
        self.skew_at = self.skew_at.filter(|_| !self.offers.is_empty());
    }

    /// A source does not hold what it offered.
    pub(super) fn forget(&mut self, ctx: &Context<'_>, from: MemberId) {
        self.offers.remove(&from);
        self.accepted = None;
        self.skew_at = Some(ctx.after(ctx.scope.topology.policies.timeouts.publish_ms));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `heard RUN STEP ORIGIN`, `floor RUN STEP`, or `epoch E step S world W => run R` (or `=> refused`); state
    /// runs on per block.
    #[test]
    fn versions_are_allotted_as_the_page_says() {
        let mut memory = Memory::default();
        for line in include_str!("../../../testdata/round/allotment.txt").lines() {
            let words: Vec<_> = line.split(' ').collect();
            let number = |at: usize| words[at].parse::<u64>().expect(line);
            match words[0] {
                "" | "#" => memory = if words[0].is_empty() { Memory::default() } else { memory },
                "heard" => {
                    memory.known = memory.known.max(Some((number(1), number(2) as i64, Epoch(number(3)))))
                }
                "floor" => memory.hear_floor(VersionFloor { run: number(1), step: number(2) as i64 }),
                "epoch" => {
                    let (world, step) = (Arc::from(words[5]), number(3) as i64);
                    let got = memory.allot(Epoch(number(1)), step, &world);
                    if let Ok(version) = got {
                        assert!(memory.known.is_none_or(|known| known < version.name()), "K2: {line}");
                        memory.hear(&version);
                        (memory.world, memory.accepted) = (Some(world), Some(version));
                    }
                    let got = got.map_or("refused".to_owned(), |version| format!("run {}", version.run));
                    assert_eq!(got, line.split_once(" => ").expect(line).1, "{line}");
                }
                other => panic!("{other}"),
            }
        }
    }
}
