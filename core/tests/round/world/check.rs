//! Rules that no machine can see alone (protocol page §13), checked after every happening of a made-up world.

use super::{Agent, Engine, Place, plane::Plane};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use weightrefit_core::id::{Epoch, MemberId, Sha256};
use weightrefit_core::membership::Seat;
use weightrefit_core::round::io::{Effect, Event, Input};
use weightrefit_core::round::message::{EngineState, Header, Message, OutcomeKind, RoundKey, Version};
use weightrefit_core::round::node::Node;

type ReplicaName = (String, String);

/// What has happened, as far as a rule needs it.
#[derive(Clone, Default, Hash)]
pub(crate) struct Checker {
    /// Ranks that have ever applied a version.
    applied: BTreeSet<(Version, Place)>,
    landed: BTreeSet<(Place, RoundKey, u64)>,
    authorised: BTreeSet<(RoundKey, MemberId)>,
    aborted: BTreeSet<(RoundKey, MemberId)>,
    versions: BTreeSet<(ReplicaName, Version)>,
    proposed: BTreeSet<(RoundKey, MemberId)>,
    prepared: BTreeSet<(RoundKey, MemberId)>,
    /// Heads that said Apply, and that said NotCommitted.
    decided: BTreeMap<(RoundKey, MemberId), bool>,
    /// Largest version that a replica has served.
    served: BTreeMap<ReplicaName, Version>,
    serving: BTreeMap<Place, Version>,
    epochs: BTreeMap<Epoch, Sha256>,
}

fn hash(node: &Node) -> u64 {
    let mut hasher = DefaultHasher::new();
    node.hash(&mut hasher);
    hasher.finish()
}

impl Checker {
    /// I3: what comes under another epoch, digest or incarnation than the accepted ones changes nothing.
    pub(crate) fn message(&self, now: u64, node: &mut Node, input: &Input, out: &mut Vec<Effect>) {
        let Input::Message { header, peer_key, .. } = input else { return };
        let refuses = |node: &Node| node.membership().is_some() && node.admit(header, *peer_key).is_err();
        if !refuses(node) {
            return;
        }
        node.handle(now, Input::Tick, out);
        if !refuses(node) {
            return; // what was due has let a newer membership in
        }
        let before = hash(node);
        let mut probe = Vec::new();
        node.handle(now, input.clone(), &mut probe);
        let refused = |effect: &Effect| matches!(effect, Effect::Event(Event::Refused { .. }));
        assert!(
            hash(node) == before && probe.iter().all(refused),
            "I3: a stale message had effect: {input:?} {probe:?}"
        );
    }

    pub(crate) fn effect(&mut self, agent: usize, node: &Node, effect: &Effect) {
        match effect {
            Effect::Send { header, message } => self.sent(header, message),
            Effect::Event(Event::Configured { epoch, membership }) => {
                let known = *self.epochs.entry(*epoch).or_insert(*membership);
                assert_eq!(known, *membership, "I4: epoch {epoch} means two memberships");
            }
            Effect::Commit { slot, round, version } => {
                let (Some(membership), Some(id)) = (node.membership(), node.member_of(*slot)) else { return };
                assert_eq!(membership.epoch(), round.epoch, "I3: a commit of another epoch in agent {agent}");
                self.commit(node, id, *round, version);
            }
            _ => {}
        }
    }

    /// I2: applied only after all ranks landed matching digests and the leader authorised (or, in recovery,
    /// after the version had been authorised before).
    fn commit(&mut self, node: &Node, id: MemberId, round: RoundKey, version: &Version) {
        let topology = node.topology().expect("a node that commits has facts");
        let replica =
            topology.replica_of(id).and_then(|index| topology.replica(index)).expect("a rank's replica");
        let name = (replica.pool.to_string(), replica.name.clone());
        if round.round.0 == 0 {
            assert!(
                self.versions.contains(&(name, *version)),
                "I2: recovery to {version:?}, which nobody authorised"
            );
        } else {
            assert!(
                self.authorised.contains(&(round, replica.head())),
                "I2: commit in {round:?} without Authorise"
            );
            self.versions.insert((name, *version));
        }
    }

    fn sent(&mut self, header: &Header, message: &Message) {
        let key = |round| RoundKey { epoch: header.epoch, round };
        match message {
            Message::Propose { round, .. } => drop(self.proposed.insert((key(*round), header.to))),
            Message::Prepared { round, .. } => drop(self.prepared.insert((key(*round), header.from))),
            Message::Authorise { round, .. } => {
                assert!(
                    !self.aborted.contains(&(key(*round), header.to)),
                    "L1: Authorise after Abort in {round:?}"
                );
                self.authorised.insert((key(*round), header.to));
            }
            Message::Abort { round, .. } => {
                let authorised = self.authorised.contains(&(key(*round), header.to));
                assert!(!authorised, "L1: Abort after Authorise in {round:?}");
                self.aborted.insert((key(*round), header.to));
            }
            Message::Apply { round } => self.decide(key(*round), header.from, true),
            Message::Outcome { round, result: OutcomeKind::NotCommitted, .. } => {
                self.decide(key(*round), header.from, false);
            }
            _ => {}
        }
    }

    fn decide(&mut self, round: RoundKey, head: MemberId, apply: bool) {
        let known = *self.decided.entry((round, head)).or_insert(apply);
        assert_eq!(known, apply, "H1: head {head} both applies and gives up in {round:?}");
    }

    /// I4: no byte moves before all participants have prepared.
    pub(crate) fn wrote(&self, round: RoundKey, to: MemberId) {
        let participants = self.proposed.iter().filter(|(key, _)| *key == round);
        let missing = participants.clone().find(|participant| !self.prepared.contains(participant));
        assert!(missing.is_none(), "I4: bytes to {to} before {missing:?} prepared");
    }

    pub(crate) fn landed(&mut self, place: Place, round: RoundKey, content: u64) {
        self.landed.insert((place, round, content));
    }

    /// I8: nothing reads what goes back to the trainer.
    pub(crate) fn released(&self, plane: &Plane, place: Place) {
        assert!(!plane.senders(place), "I8: released while a sender of {place:?} reads");
    }

    pub(crate) fn engines(&mut self, now: u64, engines: &BTreeMap<Place, Engine>, agents: &[Agent]) {
        let mut replicas = BTreeMap::<ReplicaName, Vec<Place>>::new();
        for place in engines.keys() {
            let seat = &agents[place.0].seats[usize::try_from(place.1.0).expect("small")];
            if let Seat::Inference { replica, .. } = seat {
                replicas.entry(("0".into(), replica.clone())).or_default().push(*place);
            }
        }
        for (name, places) in replicas {
            self.replica(now, engines, &name, &places);
        }
    }

    fn replica(&mut self, now: u64, engines: &BTreeMap<Place, Engine>, name: &ReplicaName, places: &[Place]) {
        let mut one: Option<Version> = None;
        for place in places {
            let engine = &engines[place];
            let record = engine.client.record();
            if let (EngineState::Applied, Some(live)) = (record.state, record.live) {
                self.applied.insert((live, *place));
            }
            if record.state != EngineState::Serving {
                continue;
            }
            let live = record.live.unwrap_or_else(|| panic!("I6: {place:?} serves without a whole version"));
            let whole = engine.live.is_some_and(|content| super::ledger::sum(content) == live.sum);
            assert!(whole, "I1: at {now} {place:?} serves {live:?}, but holds {:?}", engine.live);
            let same = *one.get_or_insert(live) == live;
            assert!(same, "I1: at {now} replica {name:?} serves {one:?} and {live:?}");
            if self.serving.insert(*place, live) != Some(live) {
                let all = places.iter().all(|place| self.applied.contains(&(live, *place)));
                assert!(all, "I1: at {now} {place:?} serves {live:?} before all ranks applied it");
            }
            let served = *self.served.entry(name.clone()).or_insert(live);
            assert!(
                served.name() <= live.name(),
                "I7: replica {name:?} served {served:?}, now {place:?} serves {live:?}"
            );
            self.served.insert(name.clone(), live);
        }
    }
}
