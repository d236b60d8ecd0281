//! The data plane of a made-up world: staging, senders and receivers as tasks that take their time to stop.

use super::{Chance, Happening, PAIR_BYTES, Place, World, ledger};
use std::collections::{BTreeMap, BTreeSet};
use weightrefit_core::id::{Incarnation, MemberId};
use weightrefit_core::round::io::{Effect, Input, Slot};
use weightrefit_core::round::message::RoundKey;

#[derive(Clone, Default, Hash)]
pub(crate) struct Plane {
    /// What each source's bytes in staging are, by destination.
    staging: BTreeMap<Place, BTreeMap<MemberId, u64>>,
    /// Receiver tasks that are not over: round, and the sources that are done.
    receivers: BTreeMap<Place, Vec<(RoundKey, BTreeSet<MemberId>)>>,
    /// Sender tasks that are not over, by source and destination.
    senders: BTreeMap<Place, BTreeSet<(RoundKey, MemberId)>>,
    /// Trainer processes whose buffer the agent has mapped.
    taken: BTreeSet<(Place, Incarnation)>,
    /// Buffers of trainer processes that died while a round may read them.
    mapped: BTreeMap<Place, (Incarnation, u64)>,
}

impl Plane {
    pub(crate) fn is_read(&self, source: Place) -> bool {
        self.senders.get(&source).is_some_and(|senders| !senders.is_empty())
            && !self.mapped.contains_key(&source)
    }

    pub(crate) fn senders(&self, source: Place) -> bool {
        self.senders.get(&source).is_some_and(|senders| !senders.is_empty())
    }

    pub(crate) fn take(&mut self, source: Place, trainer: Incarnation) {
        self.taken.insert((source, trainer));
    }

    pub(crate) fn keep_mapped(&mut self, source: Place, trainer: Incarnation, content: Option<u64>) {
        if let Some(content) = content.filter(|_| self.taken.contains(&(source, trainer))) {
            self.mapped.entry(source).or_insert((trainer, content));
        }
    }

    /// A dead trainer's buffer goes before that of the trainer which follows it.
    pub(crate) fn unmap(&mut self, source: Place) {
        match self.mapped.remove(&source) {
            Some((trainer, _)) => drop(self.taken.remove(&(source, trainer))),
            None => self.taken.retain(|(place, _)| *place != source),
        }
    }

    fn kept(&self, source: Place) -> Option<u64> {
        self.mapped.get(&source).map(|(_, content)| *content)
    }

    /// What a copy of staging gives: one content, or nothing whole.
    pub(crate) fn staged(&self, place: Place) -> Option<u64> {
        let parts = self.staging.get(&place)?;
        let first = *parts.values().next()?;
        parts.values().all(|part| *part == first).then_some(first)
    }

    pub(crate) fn agent_gone(&mut self, agent: usize) {
        self.staging.retain(|place, _| place.0 != agent);
        self.receivers.retain(|place, _| place.0 != agent);
        self.senders.retain(|place, _| place.0 != agent);
        self.mapped.retain(|place, _| place.0 != agent);
        self.taken.retain(|(place, _)| place.0 != agent);
    }
}

impl World {
    pub(super) fn plane_effect(
        &mut self,
        chance: &mut dyn Chance,
        agent: usize,
        incarnation: Incarnation,
        effect: Effect,
    ) {
        let answer = match effect {
            Effect::OpenStaging { slot, round } => {
                self.plane.staging.insert((agent, slot), BTreeMap::new());
                Input::StagingReady { slot, round }
            }
            Effect::DropStaging { slot } => {
                self.plane.staging.remove(&(agent, slot));
                return;
            }
            Effect::StartReceive { slot, round } => {
                self.plane.receivers.entry((agent, slot)).or_default().push((round, BTreeSet::new()));
                return self.match_pairs(chance, round);
            }
            Effect::AllowSend { slot, round, replicas } => {
                let Some(topology) = self.agents[agent].node.topology() else { return };
                let ranks = replicas.iter().filter_map(|replica| topology.replica(*replica));
                let ranks = ranks.flat_map(|replica| replica.ranks.clone()).map(|rank| (round, rank));
                self.plane.senders.entry((agent, slot)).or_default().extend(ranks);
                return self.match_pairs(chance, round);
            }
            Effect::Digest { slot, round } => {
                return self.push(chance, None, Happening::Digest { agent, incarnation, slot, round });
            }
            Effect::JoinReceivers { slot, round } => Input::ReceiversJoined { slot, round },
            Effect::JoinSenders { slot, round, replica } => Input::SendersJoined { slot, round, replica },
            Effect::DigestPublication { slot, step, epoch } => {
                let place = (agent, slot);
                let read = self.trainers.get(&place).map_or(0, |trainer| trainer.buffer);
                let kept = self.plane.kept(place);
                let sums = ledger::sums(kept.unwrap_or(read));
                Input::PublicationDigested { slot, step, epoch, sums }
            }
            other => unreachable!("{other:?} is not of the data plane"),
        };
        self.push(chance, None, Happening::Plane { agent, incarnation, input: answer });
    }

    /// Both ends are ready: bytes are under way.
    fn match_pairs(&mut self, chance: &mut dyn Chance, round: RoundKey) {
        let Some((membership, _)) = self.memberships.get(&round.epoch).cloned() else { return };
        for (from, to) in topology_pairs(&membership) {
            let (Some(source), Some(destination)) = (self.place_of(round, from), self.place_of(round, to))
            else {
                continue;
            };
            let sends = self.plane.senders.get(&source).is_some_and(|s| s.contains(&(round, to)));
            let receives = (self.plane.receivers.get(&destination))
                .is_some_and(|tasks| tasks.iter().any(|(key, done)| *key == round && !done.contains(&from)));
            let what = Happening::Chunk { from, to, round };
            if sends && receives && !self.pending.iter().any(|p| p.what == what) {
                self.push(chance, None, what);
            }
        }
    }

    /// Where a member of that epoch lives, if its agent is still the same process.
    fn place_of(&self, round: RoundKey, member: MemberId) -> Option<Place> {
        let (membership, _) = self.memberships.get(&round.epoch)?;
        let member = membership.member(member)?;
        let agent = self.agents.iter().position(|agent| agent.incarnation == member.incarnation)?;
        let slot = self.agents[agent].seats.iter().position(|seat| *seat == member.seat)?;
        Some((agent, Slot(u32::try_from(slot).ok()?)))
    }

    /// All bytes of one pair move at once: what the buffer holds now is in staging now.
    pub(super) fn chunk(&mut self, chance: &mut dyn Chance, from: MemberId, to: MemberId, round: RoundKey) {
        let (Some(source), Some(destination)) = (self.place_of(round, from), self.place_of(round, to)) else {
            return;
        };
        let sends = self.plane.senders.get(&source).is_some_and(|senders| senders.contains(&(round, to)));
        let kept = self.plane.kept(source);
        let tasks = self.plane.receivers.entry(destination).or_default();
        let Some((_, done)) = tasks.iter_mut().find(|(key, _)| *key == round).filter(|_| sends) else {
            return;
        };
        let trainer = &self.trainers[&source];
        assert!(kept.is_some() || !trainer.owns, "I8: a sender reads what the trainer owns");
        let content = if chance.corrupt() { 1 } else { kept.unwrap_or(trainer.buffer) };
        done.insert(from);
        let all = done.len() == self.trainers.len();
        self.plane.staging.entry(destination).or_default().insert(from, content);
        self.check.wrote(round, to);
        self.plane.senders.entry(source).or_default().remove(&(round, to));
        let bytes = PAIR_BYTES * self.trainers.len() as u64;
        if all {
            let (agent, slot) = destination;
            let input = Input::Received { slot, round, bytes, skipped: 0 };
            let incarnation = self.agents[agent].incarnation;
            self.push(chance, None, Happening::Plane { agent, incarnation, input });
        }
        let Some((_, topology)) = self.memberships.get(&round.epoch) else { return };
        let Some(replica) = topology.replica_of(to) else { return };
        let ranks = topology.replica(replica).map_or_else(Vec::new, |replica| replica.ranks.clone());
        let left =
            |senders: &BTreeSet<(RoundKey, MemberId)>| ranks.iter().any(|r| senders.contains(&(round, *r)));
        if !self.plane.senders.get(&source).is_some_and(left) {
            let (agent, slot) = source;
            let bytes = PAIR_BYTES * ranks.len() as u64;
            let input = Input::Sent { slot, round, replica, bytes };
            let incarnation = self.agents[agent].incarnation;
            self.push(chance, None, Happening::Plane { agent, incarnation, input });
        }
    }

    pub(super) fn digest(&mut self, chance: &mut dyn Chance, agent: usize, slot: Slot, round: RoundKey) {
        let tasks = self.plane.receivers.entry((agent, slot)).or_default();
        let running = tasks.iter().any(|(key, _)| *key == round);
        tasks.retain(|(key, _)| *key != round);
        if running {
            let content = self.plane.staged((agent, slot)).unwrap_or(2);
            self.check.landed((agent, slot), round, content);
            self.input(chance, agent, Input::Digested { slot, round, sums: ledger::sums(content) });
        }
    }

    pub(super) fn plane_input(&mut self, chance: &mut dyn Chance, agent: usize, input: Input) {
        match &input {
            Input::ReceiversJoined { slot, round } => {
                self.plane.receivers.entry((agent, *slot)).or_default().retain(|(key, _)| key != round);
            }
            Input::SendersJoined { slot, round, replica } => {
                let (_, topology) = &self.memberships[&round.epoch];
                let ranks = topology.replica(*replica).map_or_else(Vec::new, |replica| replica.ranks.clone());
                let senders = self.plane.senders.entry((agent, *slot)).or_default();
                senders.retain(|(key, rank)| key != round || !ranks.contains(rank));
            }
            _ => {}
        }
        self.input(chance, agent, input);
    }
}

fn topology_pairs(membership: &weightrefit_core::membership::Membership) -> Vec<(MemberId, MemberId)> {
    let training = membership.training();
    let inference = membership.iter().map(|(id, _)| id).filter(|id| !training.contains(id));
    inference.flat_map(|to| training.iter().map(move |from| (*from, to)).collect::<Vec<_>>()).collect()
}
