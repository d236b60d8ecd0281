//! Deciding: from the first Authorise until every replica has ended.

use super::Leader;
use super::attempt::{Decision, Stage};
use crate::code::Code;
use crate::id::{MemberId, RoundId};
use crate::limits;
use crate::round::io::{Event, Phase, ReplicaEnd};
use crate::round::message::{Blame, EngineRecord, Message, OutcomeKind, Version};
use crate::round::scope::Context;

/// How a head says its replica ended.
#[derive(Debug, Clone)]
pub(in crate::round) struct Outcome {
    pub(in crate::round) round: RoundId,
    pub(in crate::round) result: OutcomeKind,
    pub(in crate::round) blame: Option<Blame>,
    pub(in crate::round) pause_ms: u64,
    pub(in crate::round) commit_ms: u64,
    pub(in crate::round) records: Vec<Option<EngineRecord>>,
}

impl Leader {
    /// Once no replica waits for bytes or digests: the publication goes back, and whoever is verified commits.
    pub(super) fn decide_when_moved(&mut self, ctx: &mut Context<'_>) {
        let Some(attempt) = &mut self.attempt else { return };
        if attempt.stage != Stage::Moving || !attempt.all(|part| !part.is_moving()) {
            return;
        }
        attempt.stage = Stage::Deciding;
        attempt.close_phase(ctx.now, Phase::Transfer);
        let verify_ms = attempt.phases.get(&Phase::Verify).copied().unwrap_or_default();
        if let Some(transfer_ms) = attempt.phases.get_mut(&Phase::Transfer) {
            *transfer_ms = transfer_ms.saturating_sub(verify_ms); // Landed comes after the digest
        }
        let timeouts = ctx.scope.topology.policies.timeouts;
        let decided_ms = timeouts.pause_ms.saturating_add(timeouts.commit_ms);
        attempt.deadline = Some(ctx.after(decided_ms.saturating_add(limits::LEADER_GRACE_MS)));
        self.release(ctx); // L5: all have landed, or never will
        let Some(attempt) = &mut self.attempt else { return };
        let round = attempt.key;
        let verified: Vec<u32> =
            attempt.parts.iter().filter(|(_, p)| p.end.is_none()).map(|(r, _)| *r).collect();
        for replica in &verified {
            let Some(part) = attempt.parts.get_mut(replica) else { continue };
            part.decision = Decision::Authorised;
            let version = Version { sum: part.verified.unwrap_or_default(), ..attempt.version };
            if let Some(standing) = self.standings.get_mut(replica) {
                standing.doubt = Some((round.round, version));
            }
        }
        if !verified.is_empty() {
            ctx.event(Event::Phase { round, phase: Phase::Commit });
        }
        self.authorise(ctx);
        self.finish_when_ended(ctx);
    }

    /// Says Authorise (again) to the heads that have not said how it ended.
    fn authorise(&self, ctx: &mut Context<'_>) {
        let Some(attempt) = &self.attempt else { return };
        let open = attempt.parts.values().filter(|p| p.decision == Decision::Authorised && p.end.is_none());
        for part in open {
            let (Some(sum), Some(head)) = (part.verified, part.ranks.first()) else { continue };
            let version = Version { sum, ..attempt.version };
            self.tell(ctx, *head, Message::Authorise { round: attempt.key.round, version });
        }
    }

    pub(in crate::round) fn outcome(&mut self, ctx: &mut Context<'_>, from: MemberId, outcome: &Outcome) {
        self.hear_records(ctx, from, &outcome.records);
        let Some(replica) = ctx.scope.topology.replica_of(from) else { return };
        if let Some(standing) = self.standings.get_mut(&replica) {
            standing.doubt = standing.doubt.filter(|(doubt, _)| outcome.round < *doubt);
        }
        let Some(attempt) = self.attempt.as_mut().filter(|attempt| attempt.key.round == outcome.round) else {
            return;
        };
        let version = attempt.version;
        let Some(part) = attempt.parts.get_mut(&replica) else { return };
        if part.decision != Decision::Authorised || part.end.is_some() {
            return;
        }
        let blame = outcome.blame.unwrap_or(Blame { code: Code::CommitTimeout, member: Some(from) });
        let sum = part.verified.unwrap_or_default();
        part.end = Some(match outcome.result {
            OutcomeKind::Committed => {
                ReplicaEnd::Committed { version: Version { sum, ..version }, serving: false }
            }
            OutcomeKind::NotCommitted => ReplicaEnd::NotCommitted(blame),
            OutcomeKind::Held => ReplicaEnd::Held(blame),
        });
        part.ended_at = ctx.now;
        attempt.slowest(Phase::Pause, outcome.pause_ms);
        if outcome.result != OutcomeKind::NotCommitted {
            attempt.slowest(Phase::Commit, outcome.commit_ms);
        }
        if attempt.all(|part| part.end.is_some()) {
            let resume_ms = ctx.scope.topology.policies.timeouts.resume_ms;
            attempt.deadline = Some(ctx.after(resume_ms.saturating_add(limits::LEADER_GRACE_MS)));
        }
        self.finish_when_ended(ctx);
    }

    /// All ranks of a replica have resumed.
    pub(super) fn serving(&mut self, ctx: &mut Context<'_>, replica: u32, round: RoundId) {
        let Some(attempt) = self.attempt.as_mut().filter(|attempt| attempt.key.round == round) else {
            return;
        };
        let Some(part) = attempt.parts.get_mut(&replica) else { return };
        let since = part.ended_at;
        if let Some(ReplicaEnd::Committed { serving: serving @ false, .. }) = &mut part.end {
            *serving = true;
            attempt.slowest(Phase::Resume, ctx.now.saturating_sub(since));
            self.finish_when_ended(ctx);
        }
    }

    fn finish_when_ended(&mut self, ctx: &mut Context<'_>) {
        let over = |end: Option<ReplicaEnd>| {
            end.is_some_and(|end| !matches!(end, ReplicaEnd::Committed { serving: false, .. }))
        };
        let attempt = self.attempt.as_ref();
        if attempt.is_some_and(|a| a.stage == Stage::Deciding && a.all(|part| over(part.end))) {
            self.finish(ctx);
        }
    }

    /// Unanswered requests of the round, again.
    pub(super) fn ask(&mut self, ctx: &mut Context<'_>) {
        let Some(attempt) = &self.attempt else { return };
        match attempt.stage {
            Stage::Proposed => {
                let open = |member: &MemberId| {
                    !attempt.prepared.contains_key(member) && !attempt.busy.contains_key(member)
                };
                let open = attempt.participants().into_iter().filter(open).collect();
                self.propose_to(ctx, open);
            }
            Stage::Moving => {
                let round = attempt.key.round;
                let moving = attempt.parts.values().filter(|part| part.is_moving());
                let open = moving.flat_map(|part| {
                    let ranks = part.ranks.iter().filter(|rank| !part.landed.contains_key(rank));
                    ranks.chain(part.sources.iter().filter(|source| !part.sent.contains_key(source)))
                });
                for member in open.copied().collect::<std::collections::BTreeSet<_>>() {
                    self.tell(ctx, member, Message::Transfer { round });
                }
            }
            Stage::Deciding => self.authorise(ctx),
        }
    }

    pub(super) fn expire_attempt(&mut self, ctx: &mut Context<'_>) {
        self.ask_busy(ctx);
        let Some(attempt) = &mut self.attempt else { return };
        let due = attempt.deadline.is_some_and(|at| at <= ctx.now) || attempt.total_at <= ctx.now;
        if !due {
            return;
        }
        if attempt.stage != Stage::Deciding {
            return self.expire_moving(ctx);
        }
        for part in attempt.parts.values_mut().filter(|part| part.end.is_none()) {
            // No Abort is sent to it (L1); it is out of every round until its head has answered (L4).
            let blame = Blame { code: Code::CommitTimeout, member: part.ranks.first().copied() };
            part.end = Some(ReplicaEnd::Unknown(blame));
        }
        self.finish(ctx); // a replica that has not resumed by now is Committed and not serving
    }

    fn ask_busy(&mut self, ctx: &mut Context<'_>) {
        let Some(attempt) = self.attempt.as_mut().filter(|a| a.stage == Stage::Proposed) else { return };
        let due = |(member, (at, _)): (&MemberId, &(u64, u64))| (*at <= ctx.now).then_some(*member);
        let due: std::collections::BTreeSet<_> = attempt.busy.iter().filter_map(due).collect();
        for member in &due {
            if let Some((at, wait)) = attempt.busy.get_mut(member) {
                *at = ctx.now.saturating_add(*wait); // until its answer says otherwise
            }
        }
        if !due.is_empty() {
            self.propose_to(ctx, due);
        }
    }
}
