//! The accepted membership as one agent sees it, and the way out for messages and effects.
//!
//! Invariants:
//! - S1 (I3): a message is taken only under the accepted epoch, digest and both incarnations, from the key that
//!   the membership names, and in a role that may say it; a refused one changes nothing.
//! - S2: messages between members of one agent pass the same check.

use super::io::{Effect, Event, Slot};
use super::message::{Header, Message, RoundKey};
use super::topology::Topology;
use crate::code::Code;
use crate::id::{Epoch, Incarnation, MemberId, RoundId, Sha256};
use crate::membership::{Membership, Replica, Seat};
use std::collections::{BTreeMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// An accepted membership and what follows from it for this agent.
#[derive(Debug, Clone)]
pub(super) struct Scope {
    pub(super) membership: Arc<Membership>,
    pub(super) topology: Arc<Topology>,
    incarnation: Incarnation,
    refit_uid: Arc<str>,
    slots: BTreeMap<MemberId, Slot>,
}

impl Scope {
    pub(super) fn new(
        incarnation: Incarnation,
        seats: &[Seat],
        membership: Arc<Membership>,
        topology: Arc<Topology>,
    ) -> Self {
        let slot_of = |seat: &Seat| seats.iter().position(|own| own == seat);
        let slots = (membership.iter())
            .filter_map(|(id, member)| Some((id, Slot(u32::try_from(slot_of(&member.seat)?).ok()?))))
            .collect();
        let refit_uid = membership.refit_uid().into();
        Self { membership, topology, incarnation, refit_uid, slots }
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.membership.epoch()
    }

    pub(super) fn key(&self, round: RoundId) -> RoundKey {
        RoundKey { epoch: self.epoch(), round }
    }

    pub(super) fn slots(&self) -> &BTreeMap<MemberId, Slot> {
        &self.slots
    }

    pub(super) fn member_of(&self, slot: Slot) -> Option<MemberId> {
        self.slots.iter().find(|(_, own)| **own == slot).map(|(id, _)| *id)
    }

    pub(super) fn replica_of(&self, member: MemberId) -> Option<(u32, &Replica)> {
        let index = self.topology.replica_of(member)?;
        Some((index, self.topology.replica(index)?))
    }

    /// All members of the agent that hosts `member`.
    pub(super) fn agent_of(&self, member: MemberId) -> Vec<MemberId> {
        let Some(incarnation) = self.membership.member(member).map(|m| m.incarnation) else {
            return Vec::new();
        };
        self.membership.iter().filter(|(_, m)| m.incarnation == incarnation).map(|(id, _)| id).collect()
    }

    fn header(&self, from: MemberId, to: MemberId) -> Option<Header> {
        Some(Header {
            refit_uid: self.refit_uid.clone(),
            epoch: self.epoch(),
            membership: self.membership.digest(),
            from_incarnation: self.membership.member(from)?.incarnation,
            to_incarnation: self.membership.member(to)?.incarnation,
            from,
            to,
        })
    }

    /// S1 without the role: for byte connections too.
    pub(super) fn admit(&self, header: &Header, peer_key: Sha256) -> Result<Slot, Code> {
        let from = self.membership.member(header.from).ok_or(Code::StaleEpoch)?;
        let slot = *self.slots.get(&header.to).ok_or(Code::StaleEpoch)?;
        let same = *header.refit_uid == *self.refit_uid
            && header.epoch == self.epoch()
            && header.membership == self.membership.digest()
            && header.from_incarnation == from.incarnation
            && header.to_incarnation == self.incarnation;
        if !same {
            return Err(Code::StaleEpoch);
        }
        if peer_key == from.key { Ok(slot) } else { Err(Code::Unauthenticated) }
    }

    /// Whether `from` may say this to `to`.
    pub(super) fn may_say(&self, from: MemberId, to: MemberId, message: &Message) -> bool {
        let leader = self.membership.leader();
        let replica = |member| self.replica_of(member);
        let is_head = |member| replica(member).is_some_and(|(_, r)| r.head() == member);
        let heads = |head, rank| replica(rank).is_some_and(|(_, r)| r.head() == head);
        match message {
            Message::Propose { .. } | Message::Transfer { .. } | Message::Abort { .. } => from == leader,
            Message::Authorise { .. } => from == leader && is_head(to),
            Message::Release { .. } => from == leader && replica(to).is_none(),
            Message::Query {} => from == leader || to == leader || heads(from, to),
            Message::Prepared { .. } | Message::Refused { .. } | Message::TransferFailed { .. } => {
                to == leader
            }
            Message::Landed { .. } => to == leader && replica(from).is_some(),
            Message::Sent { .. } | Message::Published { .. } => to == leader && replica(from).is_none(),
            Message::Outcome { .. } | Message::Settled { .. } => to == leader && is_head(from),
            Message::Reported { .. } => to == leader || heads(to, from),
            Message::Pause { .. }
            | Message::Apply { .. }
            | Message::Resume { .. }
            | Message::GiveUp { .. } => heads(from, to),
            Message::Paused { .. }
            | Message::Applied { .. }
            | Message::Resumed { .. }
            | Message::Failed { .. } => heads(to, from),
        }
    }

    /// The key that the membership names for a member of this agent.
    pub(super) fn own_key(&self, member: MemberId) -> Option<Sha256> {
        self.membership.member(member).map(|m| m.key)
    }
}

/// Explored states differ by what machines remember, not by the facts they share.
impl Hash for Scope {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.epoch(), self.membership.digest()).hash(state);
    }
}

/// Where machines put what they want done: effects for the agent, messages for members of the same agent.
#[derive(Debug, Default)]
pub(super) struct Post {
    pub(super) effects: Vec<Effect>,
    pub(super) local: VecDeque<(Header, Message)>,
}

/// What every step of a machine gets.
pub(super) struct Context<'a> {
    pub(super) now: u64,
    pub(super) scope: &'a Scope,
    pub(super) post: &'a mut Post,
}

impl Context<'_> {
    pub(super) fn send(&mut self, from: MemberId, to: MemberId, message: Message) {
        let Some(header) = self.scope.header(from, to) else { return };
        match self.scope.slots.contains_key(&to) {
            true => self.post.local.push_back((header, message)),
            false => self.post.effects.push(Effect::Send { header, message }),
        }
    }

    pub(super) fn effect(&mut self, effect: Effect) {
        self.post.effects.push(effect);
    }

    pub(super) fn event(&mut self, event: Event) {
        self.post.effects.push(Effect::Event(event));
    }

    pub(super) fn after(&self, ms: u64) -> u64 {
        self.now.saturating_add(ms)
    }
}
