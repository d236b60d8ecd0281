//! Proposed and Moving: from Propose until every replica is Verified or Aborted.

use super::attempt::{Landed, Stage};
use super::{Leader, enough};
use crate::code::Code;
use crate::id::{MemberId, RoundId, Sha256};
use crate::limits;
use crate::round::io::{Event, Phase, ReplicaEnd};
use crate::round::message::{Blame, ClassSums, Message};
use crate::round::scope::Context;
use crate::round::topology::OnReplicaFailure;
use std::collections::BTreeSet;

impl Leader {
    fn stage_of(&self, round: RoundId) -> Option<Stage> {
        self.attempt.as_ref().filter(|attempt| attempt.key.round == round).map(|attempt| attempt.stage)
    }

    pub(in crate::round) fn prepared(
        &mut self,
        ctx: &mut Context<'_>,
        from: MemberId,
        round: RoundId,
        plan: Sha256,
        pairs: Vec<(MemberId, Sha256)>,
    ) {
        if self.stage_of(round) != Some(Stage::Proposed) {
            return;
        }
        if plan != ctx.scope.topology.plan {
            return self.fall_out(ctx, &BTreeSet::from([from]), Code::PlanMismatch);
        }
        let Some(attempt) = &mut self.attempt else { return };
        let participants = attempt.participants();
        if !participants.contains(&from) {
            return;
        }
        attempt.busy.remove(&from);
        attempt.prepared.insert(from, pairs);
        if attempt.prepared.len() < participants.len() {
            return; // L3
        }
        if let Some(member) = attempt.disagreement() {
            self.abort_all(ctx, Blame { code: Code::PlanMismatch, member: Some(member) });
            return self.finish_and_release(ctx);
        }
        attempt.stage = Stage::Moving;
        attempt.close_phase(ctx.now, Phase::Prepare);
        let timeouts = ctx.scope.topology.policies.timeouts;
        attempt.deadline = Some(ctx.after(timeouts.transfer_ms.saturating_add(timeouts.verify_ms)));
        ctx.event(Event::Phase { round: attempt.key, phase: Phase::Transfer });
        for member in participants {
            self.tell(ctx, member, Message::Transfer { round });
        }
    }

    pub(in crate::round) fn refused(
        &mut self,
        ctx: &mut Context<'_>,
        from: MemberId,
        round: RoundId,
        code: Code,
        retryable: bool,
    ) {
        match self.stage_of(round) {
            Some(Stage::Proposed) if retryable => {
                let Some(attempt) = &mut self.attempt else { return };
                if attempt.prepared.contains_key(&from) {
                    return; // said before it was ready, heard after it
                }
                let wait = attempt.busy.get(&from).map_or(limits::BUSY_RETRY_MS, |(_, wait)| *wait);
                attempt.busy.insert(from, (ctx.after(wait), (wait * 2).min(limits::RESEND_MS)));
            }
            Some(Stage::Proposed) => self.fall_out(ctx, &BTreeSet::from([from]), code),
            Some(Stage::Moving) if !retryable => {
                self.fail_member(ctx, from, Blame { code, member: Some(from) });
            }
            Some(Stage::Moving | Stage::Deciding) | None => {}
        }
    }

    /// These members cannot take part: proposes again without their replicas, or gives up.
    fn fall_out(&mut self, ctx: &mut Context<'_>, members: &BTreeSet<MemberId>, code: Code) {
        let Some(attempt) = &self.attempt else { return };
        let Some(first) = attempt.participants().intersection(members).next().copied() else { return };
        let blame = Blame { code, member: Some(first) };
        let source = attempt.sources.intersection(members).next().copied();
        let mut left: BTreeSet<u32> = attempt.parts.keys().copied().collect();
        let mut fell_out = attempt.fell_out.clone();
        for replica in members.iter().filter_map(|member| attempt.part_of(*member)) {
            left.remove(&replica);
            fell_out.insert(replica, ReplicaEnd::Aborted(blame));
        }
        let version = attempt.version;
        self.abort_all(ctx, blame);
        if let Some(source) = source {
            match code {
                Code::SourceGone => self.desk.forget(ctx, source),
                Code::PeerLost | Code::PrepareTimeout => {} // the publication waits for it, or for a new epoch
                _ => self.release(ctx),
            }
            return self.finish(ctx);
        }
        let fence = ctx.scope.topology.policies.on_replica_failure == OnReplicaFailure::FenceReplica;
        if fence && enough(ctx, &left) {
            self.attempt = None;
            self.open(ctx, version, left, fell_out);
        } else {
            self.finish_and_release(ctx);
        }
    }

    pub(in crate::round) fn landed(
        &mut self,
        ctx: &mut Context<'_>,
        from: MemberId,
        round: RoundId,
        (received, skipped, digest_ms): (u64, u64, u64),
        sums: ClassSums,
    ) {
        if self.stage_of(round) != Some(Stage::Moving) {
            return;
        }
        let Some(attempt) = &mut self.attempt else { return };
        let Some(replica) = attempt.part_of(from) else { return };
        attempt.slowest(Phase::Verify, digest_ms);
        if let Some(part) = attempt.parts.get_mut(&replica) {
            part.landed.entry(from).or_insert(Landed { received, skipped, sums });
        }
        self.verify(ctx, replica);
    }

    pub(in crate::round) fn sent(
        &mut self,
        ctx: &mut Context<'_>,
        from: MemberId,
        round: RoundId,
        replica: u32,
        bytes: u64,
    ) {
        if self.stage_of(round) != Some(Stage::Moving) {
            return;
        }
        let part = self.attempt.as_mut().and_then(|attempt| attempt.parts.get_mut(&replica));
        if let Some(part) = part.filter(|part| part.sources.contains(&from)) {
            part.sent.entry(from).or_insert(bytes);
            self.verify(ctx, replica);
        }
    }

    fn verify(&mut self, ctx: &mut Context<'_>, replica: u32) {
        let Some(attempt) = &mut self.attempt else { return };
        let Some(part) = attempt.parts.get_mut(&replica).filter(|part| part.is_moving()) else { return };
        match part.verify(&ctx.scope.topology, replica, &attempt.sums) {
            None => {}
            Some(Ok(sum)) => {
                part.verified = Some(sum);
                self.decide_when_moved(ctx);
            }
            Some(Err(blame)) => self.fail_parts(ctx, &[replica], blame),
        }
    }

    pub(in crate::round) fn transfer_failed(
        &mut self,
        ctx: &mut Context<'_>,
        from: MemberId,
        round: RoundId,
        replica: u32,
        blame: Blame,
    ) {
        match self.stage_of(round) {
            Some(Stage::Proposed) => self.fall_out(ctx, &BTreeSet::from([from]), blame.code),
            Some(Stage::Moving) => {
                let part = self.attempt.as_ref().and_then(|attempt| attempt.parts.get(&replica));
                let concerned = part.is_some_and(|p| p.ranks.contains(&from) || p.sources.contains(&from));
                if concerned {
                    let member = blame.member.or(Some(from));
                    self.fail_parts(ctx, &[replica], Blame { member, ..blame });
                }
            }
            Some(Stage::Deciding) | None => {}
        }
    }

    /// Connections to these members are lost.
    pub(in crate::round) fn lose(&mut self, ctx: &mut Context<'_>, lost: &[MemberId]) {
        self.away.extend(lost);
        match self.attempt.as_ref().map(|attempt| attempt.stage) {
            Some(Stage::Proposed) => self.fall_out(ctx, &lost.iter().copied().collect(), Code::PeerLost),
            Some(Stage::Moving) => {
                for member in lost {
                    self.fail_member(ctx, *member, Blame { code: Code::PeerLost, member: Some(*member) });
                }
            }
            Some(Stage::Deciding) | None => {}
        }
    }

    /// A participant fails while bytes move: its own replica, or all that still need it.
    fn fail_member(&mut self, ctx: &mut Context<'_>, member: MemberId, blame: Blame) {
        let Some(attempt) = self.attempt.as_ref().filter(|attempt| attempt.stage == Stage::Moving) else {
            return;
        };
        let concerned =
            attempt.parts.iter().filter(|(_, part)| part.ranks.contains(&member) || part.needs(member));
        let replicas: Vec<u32> = concerned.map(|(replica, _)| *replica).collect();
        self.fail_parts(ctx, &replicas, blame);
    }

    fn fail_parts(&mut self, ctx: &mut Context<'_>, replicas: &[u32], blame: Blame) {
        if replicas.is_empty() {
            return;
        }
        match ctx.scope.topology.policies.on_replica_failure {
            OnReplicaFailure::FenceReplica => self.abort_parts(ctx, replicas, blame),
            OnReplicaFailure::AbortRound => self.abort_all(ctx, blame), // nothing is authorised while Moving
        }
        self.decide_when_moved(ctx);
    }

    /// Unanswered at the deadline, or when the round has lasted too long.
    pub(super) fn expire_moving(&mut self, ctx: &mut Context<'_>) {
        let Some(attempt) = &self.attempt else { return };
        match attempt.stage {
            Stage::Proposed => {
                let silent: BTreeSet<_> = attempt
                    .participants()
                    .into_iter()
                    .filter(|m| !attempt.prepared.contains_key(m))
                    .collect();
                self.away.extend(silent.iter().filter(|member| !attempt.busy.contains_key(member)));
                self.fall_out(ctx, &silent, Code::PrepareTimeout);
            }
            Stage::Moving => {
                let late: Vec<_> = attempt.parts.iter().filter(|(_, part)| part.is_moving()).collect();
                let blame = |part: &super::Part| {
                    let rank = part.ranks.iter().find(|rank| !part.landed.contains_key(rank));
                    let source = part.sources.iter().find(|source| !part.sent.contains_key(source));
                    Blame { code: Code::TransferTimeout, member: rank.or(source).copied() }
                };
                let late: Vec<_> = late.into_iter().map(|(replica, part)| (*replica, blame(part))).collect();
                for (replica, blame) in late {
                    self.fail_parts(ctx, &[replica], blame);
                }
            }
            Stage::Deciding => {}
        }
    }
}
