//! What engine client and data plane tell the agent of a rank.

use super::{Client, Member, Message, Phase, Receivers};
use crate::code::Code;
use crate::id::{Incarnation, MemberId, Sha256};
use crate::round::io::Effect;
use crate::round::message::{Blame, ClassSums, EngineRecord, EngineState, RoundKey};
use crate::round::scope::Context;

impl Member {
    pub(in crate::round) fn connect(&mut self, record: EngineRecord, layout: Sha256) {
        self.client = Some(Client { record, layout, aborts_owed: 0, copying_until: None });
    }

    /// A new engine process, or the same one again: its word goes to the head.
    pub(in crate::round) fn connected(&mut self, ctx: &mut Context<'_>) {
        self.show(ctx);
        let report = self.report();
        self.to_head(ctx, Message::Reported { report });
    }

    /// EOF of the engine: whatever it held may be gone, so the round is over for this rank.
    pub(in crate::round) fn disconnect(&mut self, ctx: &mut Context<'_>, instance: Incarnation) {
        if self.client.is_none_or(|client| client.record.instance != instance) {
            return;
        }
        self.client = None;
        self.show(ctx);
        let Some((key, phase)) = self.current.as_ref().map(|current| (current.key, current.phase)) else {
            return;
        };
        if phase <= Phase::Staged {
            self.transfer_failed(ctx, key, self.blame(Code::EngineCold));
        }
        self.leave(ctx, Code::EngineCold);
        self.fail(ctx, key.round, Code::EngineCold);
    }

    /// Every answer carries the engine's record; frames of one client keep their order, so it is the newest.
    fn hear(&mut self, ctx: &mut Context<'_>, record: EngineRecord) -> bool {
        let Some(client) = self.client.as_mut().filter(|c| c.record.instance == record.instance) else {
            return false; // of a process that is gone
        };
        client.record = record;
        self.show(ctx);
        true
    }

    fn phase_of(&self, round: RoundKey) -> Option<Phase> {
        self.current.as_ref().filter(|current| current.key == round).map(|current| current.phase)
    }

    pub(in crate::round) fn paused(&mut self, ctx: &mut Context<'_>, round: RoundKey, record: EngineRecord) {
        if !self.hear(ctx, record) || self.phase_of(round) != Some(Phase::Pausing) {
            return;
        }
        if record.state == EngineState::Serving {
            self.leave(ctx, Code::EngineRefused);
            return self.fail(ctx, round.round, Code::EngineRefused);
        }
        if let Some(current) = &mut self.current {
            current.phase = Phase::Paused;
        }
        self.say_paused(ctx, round);
    }

    pub(super) fn say_paused(&self, ctx: &mut Context<'_>, round: RoundKey) {
        if let Some(client) = self.client {
            let instance = client.record.instance;
            self.to_head(ctx, Message::Paused { round: round.round, instance });
        }
    }

    pub(in crate::round) fn committed(
        &mut self,
        ctx: &mut Context<'_>,
        round: RoundKey,
        record: EngineRecord,
    ) {
        if !self.hear(ctx, record) {
            return;
        }
        self.copied();
        let Some(current) = self.current.as_ref().filter(|current| current.key == round) else { return };
        if current.phase != Phase::Applying {
            return;
        }
        match record.state == EngineState::Applied && record.live == Some(current.version) {
            true => self.applied(ctx), // B6
            false => self.hold(ctx, round, Code::ApplyFailed),
        }
    }

    /// B6 holds: the engine's record says so.
    pub(super) fn applied(&mut self, ctx: &mut Context<'_>) {
        let Some(current) = &mut self.current else { return };
        current.phase = Phase::Applied;
        self.say_applied(ctx);
        self.close_after_copy();
    }

    pub(super) fn say_applied(&self, ctx: &mut Context<'_>) {
        let (Some(current), Some(client)) = (&self.current, self.client) else { return };
        if client.record.live == Some(current.version) {
            let (round, version, instance) = (current.key.round, current.version, client.record.instance);
            self.to_head(ctx, Message::Applied { round, version, instance });
        } else {
            self.fail(ctx, current.key.round, Code::ApplyFailed);
        }
    }

    fn hold(&mut self, ctx: &mut Context<'_>, round: RoundKey, code: Code) {
        if let Some(current) = &mut self.current {
            current.phase = Phase::Held;
            current.deadline = None;
        }
        self.fail(ctx, round.round, code);
        self.close_after_copy();
    }

    fn copied(&mut self) {
        if let Some(client) = &mut self.client {
            client.copying_until = None;
        }
    }

    /// An epoch that waited for the copy goes on.
    fn close_after_copy(&mut self) {
        if self.closing {
            self.end(Some(Code::StaleEpoch));
        }
    }

    pub(in crate::round) fn resumed(&mut self, ctx: &mut Context<'_>, round: RoundKey, record: EngineRecord) {
        if !self.hear(ctx, record) || self.phase_of(round) != Some(Phase::Resuming) {
            return;
        }
        self.end(None);
        self.to_head(ctx, Message::Resumed { round: round.round });
        self.drop_staging(ctx);
    }

    pub(in crate::round) fn aborted(&mut self, ctx: &mut Context<'_>, record: EngineRecord) {
        if !self.hear(ctx, record) {
            return;
        }
        let Some(client) = &mut self.client else { return };
        client.aborts_owed = client.aborts_owed.saturating_sub(1);
        self.tell_head(ctx);
    }

    /// B5: only when the engine has answered all that was asked.
    pub(in crate::round) fn tell_head(&self, ctx: &mut Context<'_>) {
        if self.client.is_some_and(|client| client.aborts_owed == 0) {
            self.to_head(ctx, Message::Reported { report: self.report() });
        }
    }

    pub(in crate::round) fn tell_leader(&self, ctx: &mut Context<'_>) {
        self.to_leader(ctx, Message::Reported { report: self.report() });
    }

    pub(in crate::round) fn failed(&mut self, ctx: &mut Context<'_>, round: RoundKey, record: EngineRecord) {
        if !self.hear(ctx, record) {
            return;
        }
        match self.phase_of(round) {
            Some(Phase::Pausing) => {
                self.leave(ctx, Code::EngineRefused);
                self.fail(ctx, round.round, Code::EngineRefused);
            }
            Some(Phase::Applying) => {
                self.copied();
                self.hold(ctx, round, Code::ApplyFailed);
            }
            Some(Phase::Resuming) => self.hold(ctx, round, Code::EngineRefused),
            _ => {}
        }
    }

    pub(in crate::round) fn staging_ready(&mut self, ctx: &mut Context<'_>, round: RoundKey) {
        if self.phase_of(round) != Some(Phase::Opening) {
            return;
        }
        if let Some(current) = &mut self.current {
            current.phase = Phase::Prepared;
        }
        self.say_prepared(ctx, round);
    }

    pub(in crate::round) fn staging_failed(&mut self, ctx: &mut Context<'_>, round: RoundKey, code: Code) {
        if self.phase_of(round) == Some(Phase::Opening) {
            self.leave(ctx, code);
            self.refuse(ctx, round.round, code, false);
        }
    }

    pub(in crate::round) fn received(
        &mut self,
        ctx: &mut Context<'_>,
        round: RoundKey,
        bytes: u64,
        skipped: u64,
    ) {
        let Some(current) = self.current.as_mut().filter(|current| current.key == round) else { return };
        if current.phase == Phase::Receiving {
            current.phase = Phase::Digesting;
            current.received = (bytes, skipped, ctx.now);
            let ms = current.timeouts.verify_ms;
            ctx.effect(Effect::Digest { slot: self.slot, round });
            self.set_deadline(ctx, ms);
        }
    }

    pub(in crate::round) fn digested(&mut self, ctx: &mut Context<'_>, round: RoundKey, sums: ClassSums) {
        if self.receivers != Receivers::Running(round) || self.phase_of(round) != Some(Phase::Digesting) {
            return;
        }
        self.receivers = Receivers::None;
        let Some(current) = &mut self.current else { return };
        let (received, skipped, since) = current.received;
        let digest_ms = ctx.now.saturating_sub(since);
        let landed = Message::Landed { round: round.round, received, skipped, digest_ms, sums };
        current.landed = Some(landed.clone());
        current.phase = Phase::Staged;
        let ms = current.timeouts.transfer_ms.saturating_add(current.timeouts.verify_ms);
        self.set_deadline(ctx, ms);
        self.stage(ctx);
        self.to_leader(ctx, landed);
    }

    pub(in crate::round) fn receive_failed(
        &mut self,
        ctx: &mut Context<'_>,
        round: RoundKey,
        code: Code,
        peer: Option<MemberId>,
    ) {
        if self.phase_of(round).is_some_and(|phase| phase <= Phase::Staged) {
            let member = peer.or(self.place.map(|place| place.id));
            self.transfer_failed(ctx, round, Blame { code, member });
            self.leave(ctx, code);
        }
    }

    fn transfer_failed(&self, ctx: &mut Context<'_>, round: RoundKey, blame: Blame) {
        if let Some(place) = self.place {
            let replica = place.replica;
            self.to_leader(ctx, Message::TransferFailed { round: round.round, replica, blame });
        }
    }

    /// B3: only now may staging be dropped or reused.
    pub(in crate::round) fn joined(&mut self, ctx: &mut Context<'_>, round: RoundKey) {
        if self.receivers == Receivers::Joining(round) {
            self.receivers = Receivers::None;
            self.drop_unauthorised(ctx);
            self.open_when_joined(ctx);
        }
    }
}
