//! One training rank as its agent sees it: the publication, who reads it, and when it goes back to the trainer
//! (protocol page §7).
//!
//! Invariants:
//! - O1 (I8): `released` is said only when no digest and no sender reads the buffer any more, and a publication
//!   that was released is never offered again.
//! - O2: a release counts only when it covers every round that has held this publication.
//! - O3: a second publication never frees the first.
//! - O4: a round that was left is never served again; entering a round first joins the senders of older ones.
//! - O5: the buffer comes back without a leader: after the sum of the round's deadlines.

use super::io::{Effect, Event, ReleaseOutcome, Slot};
use super::message::{Blame, ClassSums, Message, PublicationTag, Report, RoundKey, Timeouts};
use super::scope::Context;
use crate::code::Code;
use crate::id::{Epoch, Incarnation, MemberId, RoundId, Sha256};
use crate::limits;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The machine of one slot.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Source {
    slot: Slot,
    place: Option<(MemberId, MemberId)>,
    trainer: Option<Incarnation>,
    publication: Option<Publication>,
    /// What a new trainer process published while the old one's buffer is still on its way back.
    next: Option<(i64, Arc<str>)>,
    /// Newest publication that went back: a client that missed it hears it again.
    returned: Option<(Arc<str>, i64, ReleaseOutcome)>,
    floor: RoundKey,
    current: Option<Current>,
    /// Rounds left whose senders are still being joined.
    joining: BTreeSet<(RoundKey, u32)>,
    /// When the leader was lost and the buffer will go back by itself.
    alone_until: Option<u64>,
    resend_at: Option<u64>,
    closing: Option<bool>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Publication {
    step: i64,
    world: Arc<str>,
    /// Sums under the current epoch's plan, once digested.
    sums: Option<ClassSums>,
    /// A digest reads the buffer.
    digesting: bool,
    /// Highest round that has held it.
    held: Option<RoundKey>,
    /// Bytes of it were allowed to move.
    read: bool,
    release: Option<ReleaseOutcome>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Current {
    key: RoundKey,
    timeouts: Timeouts,
    replicas: BTreeMap<u32, Sending>,
    deadline: Option<u64>,
    /// The leader was told that this rank is ready, and bytes may move.
    moving: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Sending {
    Waiting,
    Running,
    Joining,
    Sent(u64),
    Over,
}

impl Sending {
    fn is_over(self) -> bool {
        matches!(self, Self::Sent(_) | Self::Over)
    }
}

/// What a proposal asks of a source.
#[derive(Debug, Clone)]
pub(super) struct Offer<'a> {
    pub(super) key: RoundKey,
    pub(super) step: i64,
    pub(super) world: &'a Arc<str>,
    pub(super) replicas: &'a [u32],
    pub(super) plan: Sha256,
    pub(super) timeouts: Timeouts,
}

impl Source {
    pub(super) fn new(slot: Slot) -> Self {
        Self {
            slot,
            place: None,
            trainer: None,
            publication: None,
            next: None,
            returned: None,
            floor: RoundKey::default(),
            current: None,
            joining: BTreeSet::new(),
            alone_until: None,
            resend_at: None,
            closing: None,
        }
    }

    /// A membership took effect: what is published is digested under its plan.
    pub(super) fn enter(&mut self, ctx: &mut Context<'_>, id: MemberId) {
        self.place = Some((id, ctx.scope.membership.leader()));
        self.closing = None;
        self.alone_until = None;
        self.floor = self.floor.max(RoundKey { epoch: ctx.scope.epoch(), round: RoundId(0) });
        self.digest(ctx);
    }

    /// Leave for a new epoch, or (`for_good`) for ever; then the publication goes back too.
    pub(super) fn close(&mut self, ctx: &mut Context<'_>, for_good: bool) {
        self.closing = Some(for_good);
        self.leave(ctx);
        if for_good && let Some(publication) = &mut self.publication {
            publication.release.get_or_insert(ReleaseOutcome::Withdrawn);
        }
        self.return_if_free(ctx);
    }

    pub(super) fn is_closed(&self) -> bool {
        let returned = self.closing != Some(true) || self.publication.is_none();
        self.closing.is_some() && self.current.is_none() && self.joining.is_empty() && returned
    }

    pub(super) fn connect(&mut self, ctx: &mut Context<'_>, instance: Incarnation) {
        if let Some(old) = self.trainer.filter(|old| *old != instance) {
            self.disconnect(ctx, old);
        }
        self.trainer = Some(instance);
    }

    /// The trainer is gone: what no round holds is worth nothing, what a round holds stays mapped until then.
    pub(super) fn disconnect(&mut self, ctx: &mut Context<'_>, instance: Incarnation) {
        if self.trainer != Some(instance) {
            return;
        }
        self.trainer = None;
        self.next = None;
        if let Some(publication) = &mut self.publication {
            publication.release.get_or_insert(ReleaseOutcome::Withdrawn);
        }
        self.return_if_free(ctx);
    }

    /// `publish`: taken, taken before, given back before, or refused.
    pub(super) fn publish(&mut self, ctx: &mut Context<'_>, step: i64, world: Arc<str>) {
        let same = |publication: &Publication| publication.step == step && publication.world == world;
        if let Some((world_returned, step_returned, outcome)) = &self.returned
            && (*step_returned, world_returned) == (step, &world)
        {
            let outcome = *outcome;
            return ctx.effect(Effect::Released { slot: self.slot, step, world, outcome });
        }
        let code = match &self.publication {
            Some(publication) if same(publication) && publication.release.is_none() => return,
            Some(publication) if publication.release.is_some() && self.closing != Some(true) => {
                self.next = Some((step, world));
                return;
            }
            Some(_) => Some(Code::Busy), // O3
            None if self.closing == Some(true) => Some(Code::Cancelled),
            None if world.is_empty() || world.len() > limits::WORLD_BYTES_MAX => Some(Code::Unsupported),
            None => None,
        };
        if let Some(code) = code {
            return ctx.effect(Effect::RefusePublish { slot: self.slot, step, code });
        }
        self.publication = Some(Publication {
            step,
            world,
            sums: None,
            digesting: false,
            held: None,
            read: false,
            release: None,
        });
        ctx.event(Event::Publication { slot: self.slot, step: Some(step) });
        self.digest(ctx);
    }

    fn digest(&mut self, ctx: &mut Context<'_>) {
        let epoch = ctx.scope.epoch();
        if let (Some(publication), Some(_)) = (&mut self.publication, self.place)
            && self.closing.is_none()
            && !publication.digesting
        {
            publication.digesting = true;
            publication.sums = None;
            ctx.effect(Effect::DigestPublication { slot: self.slot, step: publication.step, epoch });
        }
    }

    pub(super) fn digested(&mut self, ctx: &mut Context<'_>, step: i64, epoch: Epoch, sums: ClassSums) {
        let Some(publication) = self.publication.as_mut().filter(|publication| publication.step == step)
        else {
            return;
        };
        publication.digesting = false;
        if epoch != ctx.scope.epoch() {
            return self.digest(ctx); // of an older plan
        }
        publication.sums = Some(sums);
        self.say_published(ctx);
        self.return_if_free(ctx);
    }

    /// Said again until the leader has answered it with a round or a release.
    pub(super) fn say_published(&mut self, ctx: &mut Context<'_>) {
        let (Some(publication), Some((id, leader))) = (&self.publication, self.place) else { return };
        let Some(sums) = &publication.sums else { return };
        if publication.release.is_none() && self.closing.is_none() {
            let (step, world, sums) = (publication.step, publication.world.clone(), sums.clone());
            ctx.send(id, leader, Message::Published { step, world, sums });
            self.resend_at = Some(ctx.after(limits::RESEND_MS));
        }
    }

    pub(super) fn answer_query(&mut self, ctx: &mut Context<'_>) {
        self.say_published(ctx);
        if let Some((id, leader)) = self.place {
            ctx.send(id, leader, Message::Reported { report: self.report() });
        }
    }

    fn report(&self) -> Report {
        let tag = |p: &Publication| PublicationTag { step: p.step, world: p.world.clone() };
        Report { engine: None, staging: None, publication: self.publication.as_ref().map(tag) }
    }

    pub(super) fn propose(&mut self, ctx: &mut Context<'_>, offer: &Offer<'_>) {
        if self.current.as_ref().is_some_and(|current| current.key == offer.key) {
            return self.say_prepared(ctx);
        }
        if let Some((code, retryable)) = self.refusal(ctx, offer) {
            return self.refuse(ctx, offer.key.round, code, retryable);
        }
        self.leave(ctx);
        self.floor = offer.key;
        if let Some(publication) = &mut self.publication {
            publication.held = Some(offer.key);
        }
        let id = self.place.map_or(MemberId(0), |(id, _)| id);
        let mine = |replica: &&u32| ctx.scope.topology.sources_of(**replica).contains(&id);
        let replicas =
            offer.replicas.iter().filter(mine).map(|&replica| (replica, Sending::Waiting)).collect();
        let grace = offer.timeouts.prepare_ms.saturating_add(limits::MEMBER_GRACE_MS);
        let (deadline, timeouts) = (Some(ctx.after(grace)), offer.timeouts);
        self.current = Some(Current { key: offer.key, timeouts, replicas, deadline, moving: false });
        self.say_prepared(ctx);
    }

    fn refusal(&self, ctx: &Context<'_>, offer: &Offer<'_>) -> Option<(Code, bool)> {
        let offered = self.publication.as_ref().is_some_and(|publication| {
            publication.release.is_none()
                && publication.step == offer.step
                && publication.world == *offer.world
                && publication.sums.is_some()
        });
        if self.closing.is_some() {
            return Some((Code::Busy, true));
        }
        if offer.key <= self.floor || !offered {
            return Some((Code::SourceGone, false)); // O1, O4
        }
        (offer.plan != ctx.scope.topology.plan).then_some((Code::PlanMismatch, false))
    }

    /// O4: only when the senders of older rounds are joined.
    fn say_prepared(&self, ctx: &mut Context<'_>) {
        let (Some(current), Some((id, leader))) = (&self.current, self.place) else { return };
        if self.joining.is_empty() {
            let (plan, pairs) = (ctx.scope.topology.plan, ctx.scope.topology.pair_digests(id));
            let (round, report) = (current.key.round, self.report());
            ctx.send(id, leader, Message::Prepared { round, plan, pairs, report });
        }
    }

    fn refuse(&self, ctx: &mut Context<'_>, round: RoundId, code: Code, retryable: bool) {
        if let Some((id, leader)) = self.place {
            ctx.send(id, leader, Message::Refused { round, code, retryable, report: self.report() });
        }
    }

    pub(super) fn transfer(&mut self, ctx: &mut Context<'_>, key: RoundKey) {
        let Some(current) = self.current.as_mut().filter(|current| current.key == key) else {
            return self.refuse(ctx, key.round, Code::SourceGone, false);
        };
        if current.moving {
            return self.say_sent(ctx);
        }
        if !self.joining.is_empty() {
            return; // not Prepared yet, so the leader cannot mean it
        }
        current.moving = true;
        if let Some(publication) = &mut self.publication {
            publication.read = true;
        }
        let grace = current.timeouts.transfer_ms.saturating_add(limits::MEMBER_GRACE_MS);
        current.deadline = Some(ctx.after(grace));
        let mut replicas = Vec::new();
        for (replica, sending) in &mut current.replicas {
            if *sending == Sending::Waiting {
                *sending = Sending::Running;
                replicas.push(*replica);
            }
        }
        if !replicas.is_empty() {
            ctx.effect(Effect::AllowSend { slot: self.slot, round: key, replicas });
        }
        self.end_if_done(ctx);
    }

    fn say_sent(&self, ctx: &mut Context<'_>) {
        let (Some(current), Some((id, leader))) = (&self.current, self.place) else { return };
        for (&replica, sending) in &current.replicas {
            if let Sending::Sent(bytes) = *sending {
                ctx.send(id, leader, Message::Sent { round: current.key.round, replica, bytes });
            }
        }
    }

    pub(super) fn sent(&mut self, ctx: &mut Context<'_>, round: RoundKey, replica: u32, bytes: u64) {
        let (Some(current), Some((id, leader))) = (&mut self.current, self.place) else { return };
        let Some(sending) = current.replicas.get_mut(&replica).filter(|_| current.key == round) else {
            return;
        };
        if *sending == Sending::Running {
            *sending = Sending::Sent(bytes);
            ctx.send(id, leader, Message::Sent { round: round.round, replica, bytes });
            self.end_if_done(ctx);
        }
    }

    pub(super) fn send_failed(&mut self, ctx: &mut Context<'_>, round: RoundKey, replica: u32, blame: Blame) {
        if let (Some(current), Some((id, leader))) = (&self.current, self.place)
            && current.key == round
            && current.replicas.get(&replica).is_some_and(|sending| !sending.is_over())
        {
            ctx.send(id, leader, Message::TransferFailed { round: round.round, replica, blame });
            self.abort(ctx, round, &[replica]);
        }
    }

    pub(super) fn abort(&mut self, ctx: &mut Context<'_>, round: RoundKey, replicas: &[u32]) {
        match self.current.as_mut().filter(|current| current.key == round) {
            Some(current) => {
                for (replica, sending) in &mut current.replicas {
                    if replicas.contains(replica) {
                        stop(ctx, self.slot, round, *replica, sending);
                    }
                }
                self.end_if_done(ctx);
            }
            None => self.floor = self.floor.max(round),
        }
    }

    pub(super) fn joined(&mut self, ctx: &mut Context<'_>, round: RoundKey, replica: u32) {
        if self.joining.remove(&(round, replica)) && self.joining.is_empty() {
            self.say_prepared(ctx);
        }
        if let Some(current) = self.current.as_mut().filter(|current| current.key == round)
            && let Some(sending) = current.replicas.get_mut(&replica).filter(|s| **s == Sending::Joining)
        {
            *sending = Sending::Over;
        }
        self.end_if_done(ctx);
    }

    /// No open round uses the publication and none will be opened on it.
    pub(super) fn release(&mut self, ctx: &mut Context<'_>, step: i64, world: &Arc<str>, up_to: RoundKey) {
        if let Some(publication) = &mut self.publication
            && publication.step == step
            && publication.world == *world
            && publication.held.is_none_or(|held| held <= up_to)
        {
            let outcome = if publication.read { ReleaseOutcome::Read } else { ReleaseOutcome::Dropped };
            publication.release.get_or_insert(outcome);
            self.return_if_free(ctx);
        }
    }

    /// The leader is lost, or there again.
    pub(super) fn leader_lost(&mut self, ctx: &Context<'_>, lost: bool) {
        let t = &ctx.scope.topology.policies.timeouts;
        let sum =
            [t.publish_ms, t.prepare_ms, t.transfer_ms, t.verify_ms, t.pause_ms, t.commit_ms, t.resume_ms]
                .iter()
                .fold(limits::MEMBER_GRACE_MS, |sum, ms| sum.saturating_add(*ms));
        self.alone_until = if lost { self.alone_until.or(Some(ctx.after(sum))) } else { None };
    }

    pub(super) fn deadline(&self) -> Option<u64> {
        let round = self.current.as_ref().and_then(|current| current.deadline);
        [round, self.alone_until, self.resend_at].into_iter().flatten().min()
    }

    pub(super) fn expire(&mut self, ctx: &mut Context<'_>) {
        let now = ctx.now;
        let due = |at: Option<u64>| at.is_some_and(|at| at <= now);
        if due(self.current.as_ref().and_then(|current| current.deadline)) {
            self.leave(ctx);
        }
        if due(self.alone_until) {
            self.alone_until = None;
            if let Some(publication) = &mut self.publication {
                publication.release.get_or_insert(ReleaseOutcome::Withdrawn); // O5
            }
        }
        if due(self.resend_at) {
            self.resend_at = self.is_held().then(|| now.saturating_add(limits::RESEND_MS));
            if !self.is_held() {
                self.say_published(ctx);
            }
        }
        self.return_if_free(ctx);
    }

    /// Leaves the round: its senders are stopped and joined.
    fn leave(&mut self, ctx: &mut Context<'_>) {
        let Some(mut current) = self.current.take() else { return };
        for (replica, sending) in &mut current.replicas {
            stop(ctx, self.slot, current.key, *replica, sending);
            if *sending == Sending::Joining {
                self.joining.insert((current.key, *replica));
            }
        }
    }

    /// The round holds the buffer as long as one of its senders may read it; what it sent can be said again.
    fn end_if_done(&mut self, ctx: &mut Context<'_>) {
        if let Some(current) = &mut self.current
            && current.replicas.values().all(|sending| sending.is_over())
        {
            current.deadline = None;
        }
        self.return_if_free(ctx);
    }

    /// A sender may read the buffer now or later.
    fn is_held(&self) -> bool {
        let open = |current: &Current| current.replicas.values().any(|sending| !sending.is_over());
        self.current.as_ref().is_some_and(open) || !self.joining.is_empty()
    }

    fn return_if_free(&mut self, ctx: &mut Context<'_>) {
        if self.is_held() {
            return;
        }
        let free = |publication: &Publication| publication.release.is_some() && !publication.digesting;
        if let Some(publication) = self.publication.take_if(|publication| free(publication))
            && let Some(outcome) = publication.release
        {
            let step = publication.step;
            let world = publication.world;
            self.returned = Some((world.clone(), step, outcome));
            self.resend_at = None;
            ctx.effect(Effect::Released { slot: self.slot, step, world, outcome });
            ctx.event(Event::Publication { slot: self.slot, step: None });
            if let Some((step, world)) = self.next.take() {
                self.publish(ctx, step, world);
            }
        }
    }
}

fn stop(ctx: &mut Context<'_>, slot: Slot, round: RoundKey, replica: u32, sending: &mut Sending) {
    match *sending {
        Sending::Waiting => *sending = Sending::Over,
        Sending::Running => {
            *sending = Sending::Joining;
            ctx.effect(Effect::JoinSenders { slot, round, replica });
        }
        Sending::Joining | Sending::Sent(_) | Sending::Over => {}
    }
}
