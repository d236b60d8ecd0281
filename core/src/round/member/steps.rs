//! What leader and head tell a rank.

use super::{Current, Member, Message, Phase, Proposal, Receivers, Staging, Tombstone};
use crate::code::Code;
use crate::id::MemberId;
use crate::round::io::Effect;
use crate::round::message::{EngineState, RoundKey, StagingTag, Version};
use crate::round::scope::Context;

impl Member {
    /// Enters a round, or says why not.
    pub(in crate::round) fn propose(&mut self, ctx: &mut Context<'_>, proposal: &Proposal) {
        let key = proposal.key;
        if let Some(current) = &self.current
            && current.key == key
        {
            if current.phase >= Phase::Prepared {
                self.say_prepared(ctx, key);
            }
            return;
        }
        if let Some((code, retryable)) = self.refusal(ctx, proposal) {
            return self.refuse(ctx, key.round, code, retryable);
        }
        self.leave(ctx, Code::Cancelled);
        self.staging = None;
        self.floor = key;
        let deadline = self.grace(ctx, proposal.timeouts.prepare_ms);
        self.current = Some(Current {
            key,
            version: proposal.version,
            timeouts: proposal.timeouts,
            phase: Phase::Joining,
            deadline,
            received: (0, 0, 0),
            landed: None,
        });
        self.open_when_joined(ctx);
    }

    fn refusal(&self, ctx: &Context<'_>, proposal: &Proposal) -> Option<(Code, bool)> {
        if self.closing {
            return Some((Code::Busy, true));
        }
        if proposal.key <= self.floor {
            return Some((self.why_over(proposal.key), false)); // B2
        }
        let phase = self.current.as_ref().map(|current| current.phase);
        if phase.is_some_and(|phase| (Phase::Pausing..=Phase::Applying).contains(&phase)) {
            return Some((Code::Busy, true));
        }
        let Some(client) = self.client else { return Some((Code::EngineCold, false)) };
        if self.place.is_none_or(|place| place.layout != client.layout) {
            return Some((Code::RegistrationMismatch, false));
        }
        if proposal.plan != ctx.scope.topology.plan {
            return Some((Code::PlanMismatch, false));
        }
        let clean = !matches!(client.record.state, EngineState::Dirty | EngineState::Cold);
        let older = client.record.live.is_some_and(|live| proposal.version.name() < live.name());
        (clean && older).then_some((Code::VersionRegressed, false)) // I7
    }

    /// B1: staging is opened only when nobody writes to it any more.
    pub(super) fn open_when_joined(&mut self, ctx: &mut Context<'_>) {
        let Some(current) = &mut self.current else { return };
        if current.phase == Phase::Joining && self.receivers == Receivers::None {
            current.phase = Phase::Opening;
            ctx.effect(Effect::OpenStaging { slot: self.slot, round: current.key });
        }
    }

    pub(super) fn say_prepared(&self, ctx: &mut Context<'_>, key: RoundKey) {
        let Some(place) = self.place else { return };
        let (plan, pairs) = (ctx.scope.topology.plan, ctx.scope.topology.pair_digests(place.id));
        let report = self.report();
        self.to_leader(ctx, Message::Prepared { round: key.round, plan, pairs, report });
    }

    /// Bytes may move.
    pub(in crate::round) fn transfer(&mut self, ctx: &mut Context<'_>, key: RoundKey) {
        let Some(current) = self.current.as_mut().filter(|current| current.key == key) else {
            return self.refuse(ctx, key.round, self.why_over(key), false);
        };
        if current.phase == Phase::Prepared {
            current.phase = Phase::Receiving;
            let ms = current.timeouts.transfer_ms;
            self.receivers = Receivers::Running(key);
            ctx.effect(Effect::StartReceive { slot: self.slot, round: key });
            self.set_deadline(ctx, ms);
        } else if let Some(landed) = current.landed.clone() {
            self.to_leader(ctx, landed);
        }
    }

    /// The leader gives up on some replicas of a round.
    pub(in crate::round) fn abort(
        &mut self,
        ctx: &mut Context<'_>,
        key: RoundKey,
        replicas: &[u32],
        code: Code,
    ) {
        if self.place.is_none_or(|place| !replicas.contains(&place.replica)) {
            return;
        }
        match self.current.as_ref().filter(|current| current.key == key) {
            Some(current) if current.phase <= Phase::Staged => self.leave(ctx, code),
            Some(_) => {} // authorised: the head decides
            None => self.bury(key, code),
        }
    }

    /// The head gives up before any Apply.
    pub(in crate::round) fn give_up(&mut self, ctx: &mut Context<'_>, key: RoundKey, code: Code) {
        match self.current.as_ref().filter(|current| current.key == key) {
            Some(current) if current.phase <= Phase::Paused => self.leave(ctx, code),
            Some(_) => {}
            None => self.bury(key, code),
        }
    }

    /// B2: a round that was ended before it was seen is never entered.
    fn bury(&mut self, key: RoundKey, code: Code) {
        if key > self.floor {
            self.floor = key;
            self.tombstone = Some(Tombstone { round: key, code: Some(code) });
        }
    }

    /// Stop at a step boundary; in round 0, for a recovery to `version`.
    pub(in crate::round) fn pause(&mut self, ctx: &mut Context<'_>, key: RoundKey, version: Version) {
        if self.can_recover_to(key, &version) {
            let timeouts = ctx.scope.topology.policies.timeouts;
            let (phase, received) = (Phase::Staged, (0, 0, 0));
            self.current =
                Some(Current { key, version, timeouts, phase, deadline: None, received, landed: None });
        }
        let phase = self.current.as_ref().filter(|current| current.key == key).map(|current| current.phase);
        match (phase, &mut self.current) {
            (Some(Phase::Staged), Some(current)) if current.version.name() == version.name() => {
                current.version = version;
                current.phase = Phase::Pausing;
                let ms = current.timeouts.pause_ms;
                if let Some(staging) = &mut self.staging {
                    staging.tag = StagingTag { version, authorised: true, ..staging.tag };
                }
                ctx.effect(Effect::Pause { slot: self.slot, round: key, version });
                self.set_deadline(ctx, ms);
                self.show(ctx);
            }
            (Some(Phase::Pausing), _) => {}
            (Some(Phase::Paused), _) => self.say_paused(ctx, key),
            _ => self.fail(ctx, key.round, self.why_over(key)),
        }
    }

    /// R3 asks for this: nothing of this epoch has begun here, the tensors are whole, and the rank is at
    /// `version` or holds authorised staging of exactly it.
    fn can_recover_to(&self, key: RoundKey, version: &Version) -> bool {
        let report = self.report();
        let Some(engine) = report.engine else { return false };
        let staged = |tag: StagingTag| tag.sealed && tag.authorised && tag.version == *version;
        key == self.floor
            && key.round.0 == 0
            && self.current.is_none()
            && self.tombstone.is_none_or(|tombstone| tombstone.round != key)
            && !self.closing
            && !matches!(engine.state, EngineState::Dirty | EngineState::Cold)
            && (engine.live == Some(*version) || report.staging.is_some_and(staged))
    }

    /// All ranks are paused: make the staged version live.
    pub(in crate::round) fn apply(&mut self, ctx: &mut Context<'_>, key: RoundKey) {
        let Some(current) = self.current.as_mut().filter(|current| current.key == key) else {
            return self.fail(ctx, key.round, self.why_over(key));
        };
        match current.phase {
            Phase::Paused => {
                let Some(client) = &mut self.client else { return };
                current.deadline = None;
                if client.record.live == Some(current.version) {
                    return self.applied(ctx); // recovery: this rank was there already
                }
                current.phase = Phase::Applying;
                let (version, commit_ms) = (current.version, current.timeouts.commit_ms);
                client.copying_until =
                    Some(ctx.after(commit_ms.saturating_add(crate::limits::MEMBER_GRACE_MS)));
                ctx.effect(Effect::Commit { slot: self.slot, round: key, version });
            }
            Phase::Applying => {}
            Phase::Applied | Phase::Resuming | Phase::Held => self.say_applied(ctx),
            _ => self.fail(ctx, key.round, Code::EngineRefused),
        }
    }

    /// The barrier is passed: serve exactly `version`.
    pub(in crate::round) fn resume(&mut self, ctx: &mut Context<'_>, key: RoundKey, version: Version) {
        let record = self.report().engine;
        let live = record.is_some_and(|record| record.live == Some(version));
        if self.tombstone == Some(Tombstone { round: key, code: None }) {
            return self.to_head(ctx, Message::Resumed { round: key.round });
        }
        if key.round.0 == 0 && key == self.floor && self.current.is_none() && live {
            // R1, R2: dead once the rank has joined any round of this epoch, which raises the floor.
            let timeouts = ctx.scope.topology.policies.timeouts;
            let (phase, received) = (Phase::Applied, (0, 0, 0));
            self.current =
                Some(Current { key, version, timeouts, phase, deadline: None, received, landed: None });
        }
        let at = self.current.as_mut().filter(|current| current.key == key && current.version == version);
        match at {
            Some(current) if matches!(current.phase, Phase::Applied | Phase::Held) && live => {
                current.phase = Phase::Resuming;
                current.deadline = None;
                ctx.effect(Effect::Resume { slot: self.slot, round: key, version });
            }
            Some(current) if current.phase == Phase::Resuming => {}
            _ => self.fail(ctx, key.round, self.why_over(key)),
        }
    }

    /// Connection to an agent is lost.
    pub(in crate::round) fn lose(&mut self, ctx: &mut Context<'_>, lost: &[MemberId]) {
        let (Some(place), Some(current)) = (self.place, &self.current) else { return };
        let leader = lost.contains(&place.leader) && current.phase <= Phase::Staged;
        let head = lost.contains(&place.head) && matches!(current.phase, Phase::Pausing | Phase::Paused);
        if leader || head {
            self.leave(ctx, Code::PeerLost);
        }
    }

    pub(super) fn set_deadline(&mut self, ctx: &Context<'_>, ms: u64) {
        let deadline = self.grace(ctx, ms);
        if let Some(current) = &mut self.current {
            current.deadline = deadline;
        }
    }

    pub(super) fn stage(&mut self, ctx: &mut Context<'_>) {
        let (Some(current), Some(client)) = (&self.current, &self.client) else { return };
        let tag = StagingTag { version: current.version, sealed: true, authorised: false };
        self.staging = Some(Staging { tag, layout: client.layout });
        self.show(ctx);
    }
}
