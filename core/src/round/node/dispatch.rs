//! Which machine an input is for.

use super::Node;
use crate::code::Code;
use crate::id::{MemberId, Sha256};
use crate::round::head::Head;
use crate::round::io::{Event, Input, Slot};
use crate::round::leader::Outcome;
use crate::round::member::Proposal;
use crate::round::message::{Blame, Header, Message};
use crate::round::scope::Context;
use crate::round::source::Offer;
use std::collections::BTreeMap;

impl Node {
    pub(super) fn client(&mut self, ctx: &mut Context<'_>, input: Input) {
        let Some(slot) = client_slot(&input) else { return };
        if let Some(member) = self.members.get_mut(&slot) {
            match input {
                Input::EngineConnected { record, layout, .. } => {
                    let old = member.report().engine.map(|engine| engine.instance);
                    if let Some(old) = old {
                        member.disconnect(ctx, old);
                    }
                    member.connect(record, layout);
                    member.connected(ctx);
                }
                Input::ClientGone { instance, .. } => member.disconnect(ctx, instance),
                Input::Paused { round, record, .. } => member.paused(ctx, round, record),
                Input::Committed { round, record, .. } => member.committed(ctx, round, record),
                Input::Resumed { round, record, .. } => member.resumed(ctx, round, record),
                Input::Aborted { record, .. } => member.aborted(ctx, record),
                Input::Failed { round, record, .. } => member.failed(ctx, round, record),
                Input::StagingReady { round, .. } => member.staging_ready(ctx, round),
                Input::StagingFailed { round, code, .. } => member.staging_failed(ctx, round, code),
                Input::Received { round, bytes, skipped, .. } => member.received(ctx, round, bytes, skipped),
                Input::Digested { round, sums, .. } => member.digested(ctx, round, sums),
                Input::TransferFailed { round, code, peer, .. } => {
                    member.receive_failed(ctx, round, code, peer)
                }
                Input::ReceiversJoined { round, .. } => member.joined(ctx, round),
                _ => {} // meant for a source: a driver's mistake changes nothing
            }
        } else if let Some(source) = self.sources.get_mut(&slot) {
            match input {
                Input::TrainerConnected { instance, .. } => source.connect(ctx, instance),
                Input::ClientGone { instance, .. } => source.disconnect(ctx, instance),
                Input::Publish { step, world, .. } => source.publish(ctx, step, world),
                Input::PublicationDigested { step, epoch, sums, .. } => {
                    source.digested(ctx, step, epoch, sums)
                }
                Input::SendersJoined { round, replica, .. } => source.joined(ctx, round, replica),
                Input::Sent { round, replica, bytes, .. } => source.sent(ctx, round, replica, bytes),
                Input::TransferFailed { round, replica, code, peer, .. } => {
                    source.send_failed(ctx, round, replica, Blame { code, member: peer });
                }
                _ => {}
            }
        }
    }

    pub(super) fn peer_lost(&mut self, ctx: &mut Context<'_>, member: MemberId) {
        let lost = ctx.scope.agent_of(member);
        if lost.iter().any(|member| ctx.scope.slots().contains_key(member)) {
            return; // an agent does not lose itself
        }
        self.members.values_mut().for_each(|member| member.lose(ctx, &lost));
        self.heads.values_mut().for_each(|head| head.lose(ctx, &lost));
        if lost.contains(&ctx.scope.membership.leader()) {
            self.sources.values_mut().for_each(|source| source.leader_lost(ctx, true));
        }
        if let Some(leader) = &mut self.leader {
            leader.lose(ctx, &lost);
        }
    }

    pub(super) fn peer_found(&mut self, ctx: &mut Context<'_>, member: MemberId) {
        let found = ctx.scope.agent_of(member);
        self.heads.values_mut().for_each(|head| head.found(ctx.now));
        if found.contains(&ctx.scope.membership.leader()) {
            for source in self.sources.values_mut() {
                source.leader_lost(ctx, false);
                source.say_published(ctx);
            }
        }
        if let Some(leader) = &mut self.leader {
            found.iter().for_each(|member| leader.heard_from(*member));
            leader.found(ctx.now);
        }
        self.expire(ctx);
    }

    /// N2, then the machine that the message is for.
    pub(super) fn message(
        &mut self,
        ctx: &mut Context<'_>,
        header: &Header,
        peer_key: Sha256,
        message: Message,
    ) {
        let from = header.from;
        let slot = match ctx.scope.admit(header, peer_key) {
            Ok(slot) => slot,
            Err(code) => return ctx.event(Event::Refused { from, code }),
        };
        if !ctx.scope.may_say(from, header.to, &message) {
            return ctx.event(Event::Refused { from, code: Code::Unauthenticated });
        }
        if let Some(leader) = &mut self.leader {
            leader.heard_from(from);
        }
        if from == ctx.scope.membership.leader() {
            self.sources.values_mut().for_each(|source| source.leader_lost(ctx, false));
        }
        match message {
            Message::Propose { .. }
            | Message::Transfer { .. }
            | Message::Abort { .. }
            | Message::Release { .. }
            | Message::Query {} => self.request(ctx, header, slot, message),
            Message::Authorise { round, version } => {
                let head = head_of(&mut self.heads, ctx, header.to);
                if let (Some(head), Some(own)) = (head, self.members.get(&slot)) {
                    head.authorise(ctx, own, ctx.scope.key(round), version);
                }
            }
            Message::Pause { .. }
            | Message::Apply { .. }
            | Message::Resume { .. }
            | Message::GiveUp { .. } => {
                self.order(ctx, slot, message);
            }
            Message::Paused { .. }
            | Message::Applied { .. }
            | Message::Resumed { .. }
            | Message::Failed { .. }
            | Message::Reported { .. } => self.account(ctx, header, slot, message),
            answer => self.answer(ctx, from, answer),
        }
    }

    /// From the leader to a participant, or a head's question.
    fn request(&mut self, ctx: &mut Context<'_>, header: &Header, slot: Slot, message: Message) {
        let key = |round| ctx.scope.key(round);
        let (member, source) = (self.members.get_mut(&slot), self.sources.get_mut(&slot));
        match message {
            Message::Propose { round, version, world, replicas, sources: _, plan, timeouts } => {
                let key = key(round);
                if let Some(member) = member {
                    member.propose(ctx, &Proposal { key, version, plan, timeouts });
                    if member.is_in(key)
                        && let Some(head) = head_of(&mut self.heads, ctx, header.to)
                    {
                        head.joined_round(key);
                    }
                } else if let Some(source) = source {
                    let (step, world, replicas) = (version.step, &world, &replicas[..]);
                    source.propose(ctx, &Offer { key, step, world, replicas, plan, timeouts });
                }
            }
            Message::Transfer { round } => match (member, source) {
                (Some(member), _) => member.transfer(ctx, key(round)),
                (_, Some(source)) => source.transfer(ctx, key(round)),
                (None, None) => {}
            },
            Message::Abort { round, replicas, blame } => match (member, source) {
                (Some(member), _) => member.abort(ctx, key(round), &replicas, blame.code),
                (_, Some(source)) => source.abort(ctx, key(round), &replicas),
                (None, None) => {}
            },
            Message::Release { step, world, up_to } => {
                if let Some(source) = source {
                    source.release(ctx, step, &world, up_to);
                }
            }
            _ => self.query(ctx, header, slot),
        }
    }

    fn query(&mut self, ctx: &mut Context<'_>, header: &Header, slot: Slot) {
        let leader = ctx.scope.membership.leader();
        if let Some(source) = self.sources.get_mut(&slot) {
            return source.answer_query(ctx);
        }
        let Some(member) = self.members.get(&slot) else { return };
        if header.from == leader {
            member.tell_leader(ctx);
            if let Some(head) = head_of(&mut self.heads, ctx, header.to) {
                head.answer_query(ctx);
            }
        }
        if ctx.scope.replica_of(header.to).is_some_and(|(_, replica)| replica.head() == header.from) {
            member.tell_head(ctx);
        }
    }

    /// From a head to a rank.
    fn order(&mut self, ctx: &mut Context<'_>, slot: Slot, message: Message) {
        let Some(member) = self.members.get_mut(&slot) else { return };
        let key = |round| ctx.scope.key(round);
        match message {
            Message::Pause { round, version } => member.pause(ctx, key(round), version),
            Message::Apply { round } => member.apply(ctx, key(round)),
            Message::Resume { round, version } => member.resume(ctx, key(round), version),
            Message::GiveUp { round, blame } => member.give_up(ctx, key(round), blame.code),
            _ => {}
        }
    }

    /// From a rank to its head; a report may be for the leader.
    fn account(&mut self, ctx: &mut Context<'_>, header: &Header, slot: Slot, message: Message) {
        let from = header.from;
        let is_head = ctx.scope.replica_of(from).is_some_and(|(_, replica)| replica.head() == header.to);
        if let (Message::Reported { report }, Some(leader)) = (&message, &mut self.leader) {
            leader.hear(ctx, from, report);
        }
        let Some(head) = head_of(&mut self.heads, ctx, header.to).filter(|_| is_head) else { return };
        match message {
            Message::Paused { round, instance } => head.paused(ctx, from, round, instance),
            Message::Applied { round, version, instance } => {
                head.applied(ctx, from, round, version, instance)
            }
            Message::Resumed { round } => head.resumed(ctx, from, round),
            Message::Failed { round, code, record } => head.failed(ctx, from, round, code, record),
            Message::Reported { report } => {
                if let Some(own) = self.members.get(&slot) {
                    head.reported(ctx, own, from, report);
                }
            }
            _ => {}
        }
    }

    /// To the leader.
    fn answer(&mut self, ctx: &mut Context<'_>, from: MemberId, message: Message) {
        let Some(leader) = &mut self.leader else { return };
        match message {
            Message::Prepared { round, plan, pairs, report } => {
                leader.hear(ctx, from, &report);
                leader.prepared(ctx, from, round, plan, pairs);
            }
            Message::Refused { round, code, retryable, report } => {
                leader.hear(ctx, from, &report);
                leader.refused(ctx, from, round, code, retryable);
            }
            Message::Landed { round, received, skipped, digest_ms, sums } => {
                leader.landed(ctx, from, round, (received, skipped, digest_ms), sums);
            }
            Message::Sent { round, replica, bytes } => leader.sent(ctx, from, round, replica, bytes),
            Message::TransferFailed { round, replica, blame } => {
                leader.transfer_failed(ctx, from, round, replica, blame);
            }
            Message::Published { step, world, sums } => leader.published(ctx, from, (step, world, sums)),
            Message::Outcome { round, result, blame, pause_ms, commit_ms, records } => {
                let outcome = Outcome { round, result, blame, pause_ms, commit_ms, records };
                leader.outcome(ctx, from, &outcome);
            }
            Message::Settled { round, held: _, records } => leader.settled(ctx, from, round, &records),
            _ => {}
        }
    }
}

fn head_of<'a>(
    heads: &'a mut BTreeMap<u32, Head>,
    ctx: &Context<'_>,
    member: MemberId,
) -> Option<&'a mut Head> {
    let (replica, facts) = ctx.scope.replica_of(member)?;
    if facts.head() == member { heads.get_mut(&replica) } else { None }
}

/// The slot of an input from a client or from the data plane.
pub(super) fn client_slot(input: &Input) -> Option<Slot> {
    match input {
        Input::EngineConnected { slot, .. }
        | Input::TrainerConnected { slot, .. }
        | Input::ClientGone { slot, .. }
        | Input::Publish { slot, .. }
        | Input::Paused { slot, .. }
        | Input::Committed { slot, .. }
        | Input::Resumed { slot, .. }
        | Input::Aborted { slot, .. }
        | Input::Failed { slot, .. }
        | Input::StagingReady { slot, .. }
        | Input::StagingFailed { slot, .. }
        | Input::Received { slot, .. }
        | Input::Digested { slot, .. }
        | Input::TransferFailed { slot, .. }
        | Input::ReceiversJoined { slot, .. }
        | Input::SendersJoined { slot, .. }
        | Input::Sent { slot, .. }
        | Input::PublicationDigested { slot, .. } => Some(*slot),
        Input::Tick
        | Input::Message { .. }
        | Input::PeerLost { .. }
        | Input::PeerFound { .. }
        | Input::Cancel
        | Input::SetPaused { .. }
        | Input::Drain => None,
    }
}
