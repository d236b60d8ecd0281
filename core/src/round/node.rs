//! All machines of one agent: it hosts ranks of one refit in its slots, heads of replicas, and maybe the leader.
//!
//! Invariants:
//! - N1: deadlines are looked at before the input, so that a process that was stopped does not act on old news.
//! - N2 (I3): every message passes `Scope::admit` and `Scope::may_say` before any machine sees it.
//! - N3: a new epoch takes effect when everything older is over in all slots: receivers and senders joined,
//!   rounds left, a running copy finished. Until then the old membership is the accepted one.
//! - N4: every step ends with no message left between members of this agent.

mod dispatch;

use super::head::Head;
use super::io::{Effect, Event, Input, Slot};
use super::leader::{Leader, Memory};
use super::member::Member;
use super::message::Header;
use super::scope::{Context, Post, Scope};
use super::source::Source;
use super::topology::Topology;
use crate::code::Code;
use crate::id::{Incarnation, MemberId, Sha256};
use crate::membership::accept::{Acceptance, ConfigureError, accept};
use crate::membership::{Membership, Seat};
use dispatch::client_slot;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The round protocol of one agent. Feed it with [`Node::handle`], do what it says, and call it again with
/// [`Input::Tick`] at [`Node::next_deadline`].
#[derive(Debug, Clone, Hash)]
pub struct Node {
    incarnation: Incarnation,
    seats: Vec<Seat>,
    scope: Option<Arc<Scope>>,
    /// A newer membership that waits for N3.
    pending: Option<Arc<Scope>>,
    drain: Drain,
    members: BTreeMap<Slot, Member>,
    sources: BTreeMap<Slot, Source>,
    heads: BTreeMap<u32, Head>,
    leader: Option<Leader>,
    memory: Memory,
    paused: bool,
    /// What clients said before the first membership.
    early: Vec<Input>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Drain {
    No,
    Asked,
    Done,
}

impl Node {
    /// `seats[i]` is hosted in `Slot(i)`.
    #[must_use]
    pub fn new(incarnation: Incarnation, seats: Vec<Seat>) -> Self {
        let (mut members, mut sources) = (BTreeMap::new(), BTreeMap::new());
        for (slot, seat) in (0..).map(Slot).zip(&seats) {
            match seat {
                Seat::Training { .. } => drop(sources.insert(slot, Source::new(slot))),
                Seat::Inference { .. } => drop(members.insert(slot, Member::new(slot))),
            }
        }
        Self {
            incarnation,
            seats,
            scope: None,
            pending: None,
            drain: Drain::No,
            members,
            sources,
            heads: BTreeMap::new(),
            leader: None,
            memory: Memory::default(),
            paused: false,
            early: Vec::new(),
        }
    }

    /// The accepted membership.
    #[must_use]
    pub fn membership(&self) -> Option<&Arc<Membership>> {
        self.scope.as_ref().map(|scope| &scope.membership)
    }

    /// The facts that came with it.
    #[must_use]
    pub fn topology(&self) -> Option<&Arc<Topology>> {
        self.scope.as_ref().map(|scope| &scope.topology)
    }

    /// Who the rank in this slot is in the accepted membership.
    #[must_use]
    pub fn member_of(&self, slot: Slot) -> Option<MemberId> {
        self.scope.as_ref()?.member_of(slot)
    }

    /// In which slot this agent hosts a member.
    #[must_use]
    pub fn slot_of(&self, member: MemberId) -> Option<Slot> {
        self.scope.as_ref()?.slots().get(&member).copied()
    }

    /// This agent leads and a round of it is running (joins wait for its end).
    #[must_use]
    pub fn round_open(&self) -> bool {
        self.leader.as_ref().is_some_and(Leader::is_busy)
    }

    /// Checks the header of a byte connection as that of a message; yields the slot that it is for.
    ///
    /// # Errors
    /// `NotConfigured`, `StaleEpoch` or `Unauthenticated`; nothing may be read from the connection then.
    pub fn admit(&self, header: &Header, peer_key: Sha256) -> Result<Slot, Code> {
        self.scope.as_ref().ok_or(Code::NotConfigured)?.admit(header, peer_key)
    }

    /// Takes a membership, or says why not. A new one takes effect with `Event::Configured`, in this call or in
    /// a later one (N3).
    ///
    /// # Errors
    /// Why it is refused; nothing changes.
    pub fn configure(
        &mut self,
        now: u64,
        membership: Arc<Membership>,
        topology: Arc<Topology>,
        out: &mut Vec<Effect>,
    ) -> Result<Acceptance, ConfigureError> {
        if self.drain != Drain::No {
            return Err(ConfigureError::Draining);
        }
        let newest = self.pending.as_ref().or(self.scope.as_ref()).map(|scope| &*scope.membership);
        let acceptance = accept(self.incarnation, &self.seats, newest, &membership)?;
        let (replicas, expected) = (topology.replicas().len(), membership.replicas().len());
        if replicas != expected {
            return Err(ConfigureError::OtherTopology { replicas, expected });
        }
        if acceptance == Acceptance::New {
            self.pending = Some(Arc::new(Scope::new(self.incarnation, &self.seats, membership, topology)));
            self.step(now, out, |node, ctx| node.close(ctx, false));
            self.enter_if_closed(now, out);
        }
        Ok(acceptance)
    }

    /// One step. `now` never decreases.
    pub fn handle(&mut self, now: u64, input: Input, out: &mut Vec<Effect>) {
        match self.scope {
            None => self.hear_early(input, out),
            Some(_) => {
                self.step(now, out, |node, ctx| node.input(ctx, input));
                self.enter_if_closed(now, out);
                self.end_drain(out);
            }
        }
    }

    /// When [`Input::Tick`] is due, if nothing else happens.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        let members = self.members.values().map(Member::deadline);
        let sources = self.sources.values().map(Source::deadline);
        let heads = self.heads.values().map(Head::deadline);
        let leader = self.leader.iter().map(Leader::deadline);
        members.chain(sources).chain(heads).chain(leader).flatten().min()
    }

    /// Clients may come before the first membership; what they said is fed again when it is there.
    fn hear_early(&mut self, input: Input, out: &mut Vec<Effect>) {
        match input {
            Input::Message { header, .. } => {
                out.push(Effect::Event(Event::Refused { from: header.from, code: Code::NotConfigured }));
            }
            Input::EngineConnected { .. } | Input::TrainerConnected { .. } | Input::Publish { .. } => {
                self.early.push(input);
            }
            Input::ClientGone { slot, .. } => self.early.retain(|early| client_slot(early) != Some(slot)),
            Input::SetPaused { paused } => self.paused = paused,
            Input::Drain => {
                self.drain = Drain::Asked;
                self.end_drain(out);
            }
            _ => {} // nothing else can be meant without a membership
        }
    }

    fn step(&mut self, now: u64, out: &mut Vec<Effect>, act: impl FnOnce(&mut Self, &mut Context<'_>)) {
        let Some(scope) = self.scope.clone() else { return };
        let mut post = Post::default();
        let mut ctx = Context { now, scope: &scope, post: &mut post };
        self.expire(&mut ctx); // N1
        self.deliver(&mut ctx);
        act(self, &mut ctx);
        self.deliver(&mut ctx);
        out.append(&mut post.effects);
    }

    /// N4.
    fn deliver(&mut self, ctx: &mut Context<'_>) {
        loop {
            while let Some((header, message)) = ctx.post.local.pop_front() {
                if let Some(key) = ctx.scope.own_key(header.from) {
                    self.message(ctx, &header, key, message);
                }
            }
            if let Some(leader) = &mut self.leader {
                leader.advance(ctx);
            }
            if ctx.post.local.is_empty() {
                return;
            }
        }
    }

    fn expire(&mut self, ctx: &mut Context<'_>) {
        self.members.values_mut().for_each(|member| member.expire(ctx));
        self.sources.values_mut().for_each(|source| source.expire(ctx));
        self.heads.values_mut().for_each(|head| head.expire(ctx));
        if let Some(leader) = &mut self.leader {
            leader.expire(ctx);
        }
    }

    fn input(&mut self, ctx: &mut Context<'_>, input: Input) {
        match input {
            Input::Tick => {}
            Input::Message { header, peer_key, message } => self.message(ctx, &header, peer_key, message),
            Input::PeerLost { member } => self.peer_lost(ctx, member),
            Input::PeerFound { member } => self.peer_found(ctx, member),
            Input::Cancel => {
                if let Some(leader) = &mut self.leader {
                    leader.cancel(ctx);
                }
            }
            Input::SetPaused { paused } => {
                self.paused = paused;
                if let Some(leader) = &mut self.leader {
                    leader.set_paused(ctx, paused);
                }
            }
            Input::Drain => {
                self.drain = Drain::Asked;
                self.pending = None;
                self.close(ctx, true);
            }
            client => self.client(ctx, client),
        }
    }

    /// Everything of the accepted membership ends.
    fn close(&mut self, ctx: &mut Context<'_>, for_good: bool) {
        if let Some(leader) = self.leader.take() {
            self.memory = leader.close(ctx, for_good);
        }
        self.heads.values_mut().for_each(|head| head.close(ctx));
        self.deliver(ctx); // a head that gives up tells its own rank first
        self.members.values_mut().for_each(|member| member.close(ctx));
        self.sources.values_mut().for_each(|source| source.close(ctx, for_good));
    }

    fn is_closed(&self) -> bool {
        self.members.values().all(Member::is_closed) && self.sources.values().all(Source::is_closed)
    }

    /// N3.
    fn enter_if_closed(&mut self, now: u64, out: &mut Vec<Effect>) {
        if self.scope.is_some() && !self.is_closed() {
            return;
        }
        let Some(scope) = self.pending.take() else { return };
        self.scope = Some(scope.clone());
        self.heads.clear();
        out.push(Effect::Event(Event::Configured {
            epoch: scope.epoch(),
            membership: scope.membership.digest(),
        }));
        let early = std::mem::take(&mut self.early);
        self.step(now, out, |node, ctx| {
            node.enter(ctx);
            early.into_iter().for_each(|input| node.client(ctx, input));
        });
    }

    fn enter(&mut self, ctx: &mut Context<'_>) {
        let scope = ctx.scope;
        if scope.slots().contains_key(&scope.membership.leader()) {
            self.leader = Some(Leader::new(ctx, std::mem::take(&mut self.memory), self.paused));
        }
        for (replica, facts) in (0..).zip(scope.topology.replicas()) {
            if scope.slots().contains_key(&facts.head())
                && let Some(head) = Head::new(ctx, replica)
            {
                self.heads.insert(replica, head);
            }
        }
        for (id, slot) in scope.slots() {
            if let Some(member) = self.members.get_mut(slot) {
                member.enter(ctx, *id);
            }
            if let Some(source) = self.sources.get_mut(slot) {
                source.enter(ctx, *id);
            }
        }
    }

    fn end_drain(&mut self, out: &mut Vec<Effect>) {
        if self.drain == Drain::Asked && (self.scope.is_none() || self.is_closed()) {
            self.drain = Drain::Done;
            out.push(Effect::Event(Event::Drained));
        }
    }
}
