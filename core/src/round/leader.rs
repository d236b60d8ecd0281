//! The leader: opens rounds, lets bytes move, compares digests and authorises (protocol page §5). It never
//! commits; a replica that is authorised finishes alone.
//!
//! Invariants:
//! - L1: Authorise and Abort exclude each other per replica and round, even after a deadline.
//! - L2 (I2): Authorise goes out only for a replica whose digests all agree with what was published.
//! - L3 (I4): Transfer goes out only when all participants have prepared the same plan.
//! - L4: a round takes only replicas that are settled in this epoch and whose last Authorise has an Outcome.
//! - L5 (I8): Release goes out when no open round uses a publication and none will be opened on it.
//! - L6 (I5): every stage has a deadline, and each round ends with a code and a member for what failed.

mod attempt;
mod deciding;
mod desk;
mod moving;

pub(super) use deciding::Outcome;
pub(super) use desk::Memory;

use super::io::{Event, ReplicaEnd};
use super::message::{Blame, ClassSums, EngineRecord, Message, Report, RoundKey, Version};
use super::scope::Context;
use crate::code::Code;
use crate::id::{Epoch, MemberId, RoundId};
use crate::limits;
use attempt::{Attempt, Decision, Part, Stage};
use desk::{Desk, Verdict};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The machine of the agent that leads an epoch.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Leader {
    id: MemberId,
    memory: Memory,
    desk: Desk,
    standings: BTreeMap<u32, Standing>,
    /// Members that were silent or cut off and have not spoken since.
    away: BTreeSet<MemberId>,
    attempt: Option<Attempt>,
    last_round: RoundId,
    paused: bool,
    /// Until then the first round waits for all replicas to settle.
    settle_until: Option<u64>,
    ask_at: u64,
}

/// What is known of a replica, beyond one round.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
struct Standing {
    settled: bool,
    /// The last Authorise that has no Outcome: it is repeated until there is one.
    doubt: Option<(RoundId, Version)>,
    /// Largest version that a rank of it has reported.
    top: Option<(u64, i64, Epoch)>,
}

impl Leader {
    pub(super) fn new(ctx: &Context<'_>, mut memory: Memory, paused: bool) -> Self {
        if let Some(floor) = ctx.scope.membership.floor() {
            memory.hear_floor(floor);
        }
        let replicas = ctx.scope.topology.replicas().len();
        Self {
            id: ctx.scope.membership.leader(),
            memory,
            desk: Desk::new(ctx.scope.membership.training()),
            standings: (0..).take(replicas).map(|replica| (replica, Standing::default())).collect(),
            away: BTreeSet::new(),
            attempt: None,
            last_round: RoundId(0),
            paused,
            settle_until: Some(ctx.after(ctx.scope.topology.policies.timeouts.prepare_ms)),
            ask_at: ctx.after(limits::RESEND_MS),
        }
    }

    /// The epoch is over, or the agent leaves: whoever is not authorised is told so.
    pub(super) fn close(mut self, ctx: &mut Context<'_>, for_good: bool) -> Memory {
        let open = self.attempt.as_ref().is_some_and(|attempt| attempt.stage != Stage::Deciding);
        if for_good && open {
            self.abort_all(ctx, Blame { code: Code::Cancelled, member: Some(self.id) });
        }
        self.memory
    }

    /// A round is running.
    pub(super) fn is_busy(&self) -> bool {
        self.attempt.is_some()
    }

    fn tell(&self, ctx: &mut Context<'_>, to: MemberId, message: Message) {
        ctx.send(self.id, to, message);
    }

    /// What is due now: accepts publications and opens rounds.
    pub(super) fn advance(&mut self, ctx: &mut Context<'_>) {
        let stage = self.attempt.as_ref().map(|attempt| attempt.stage);
        if stage != Some(Stage::Moving) {
            match self.desk.accept(ctx) {
                Verdict::Complete if stage == Some(Stage::Proposed) => {
                    // Supersession is the leader's alone, and only before bytes move.
                    self.abort_all(ctx, Blame { code: Code::Cancelled, member: None });
                    self.finish(ctx);
                }
                Verdict::Waiting | Verdict::Complete => {}
                refused @ Verdict::Refused { .. } => self.refuse_publication(ctx, refused),
            }
        }
        if self.attempt.is_none() {
            self.try_open(ctx);
        }
    }

    fn refuse_publication(&mut self, ctx: &mut Context<'_>, verdict: Verdict) {
        if let Verdict::Refused { step, code, member } = verdict {
            ctx.event(Event::PublishRefused { step, code, member });
            self.desk.release(ctx, None, self.newest_key(ctx));
        }
    }

    fn newest_key(&self, ctx: &Context<'_>) -> RoundKey {
        ctx.scope.key(self.last_round)
    }

    fn try_open(&mut self, ctx: &mut Context<'_>) {
        let Some(step) = self.desk.accepted().filter(|_| !self.paused).map(|accepted| accepted.step) else {
            return;
        };
        let here = |members: &[MemberId]| members.iter().all(|member| !self.away.contains(member));
        if !here(&ctx.scope.membership.training()) {
            return;
        }
        let ranks = |replica: u32| ctx.scope.topology.replica(replica).map_or(&[][..], |r| &r.ranks);
        let expected = |(replica, standing): (&u32, &Standing)| !standing.settled && here(ranks(*replica));
        if self.settle_until.is_some() && self.standings.iter().any(expected) {
            return;
        }
        let eligible = |(replica, standing): &(&u32, &Standing)| {
            standing.settled && standing.doubt.is_none() && here(ranks(**replica)) // L4
        };
        let mut replicas: BTreeSet<u32> =
            self.standings.iter().filter(eligible).map(|(replica, _)| *replica).collect();
        if !enough(ctx, &replicas) {
            return;
        }
        let Some(version) = self.desk.name(ctx, &mut self.memory) else {
            let code = Code::VersionRegressed;
            return self.refuse_publication(ctx, Verdict::Refused { step, code, member: None });
        };
        replicas.retain(|replica| self.standings[replica].top.is_none_or(|top| top <= version.name()));
        if enough(ctx, &replicas) {
            self.open(ctx, version, replicas, BTreeMap::new());
        }
    }

    /// Proposes the accepted version to these replicas.
    fn open(
        &mut self,
        ctx: &mut Context<'_>,
        version: Version,
        replicas: BTreeSet<u32>,
        fell_out: BTreeMap<u32, ReplicaEnd>,
    ) {
        let Some(accepted) = self.desk.accepted().cloned() else { return };
        self.last_round = RoundId(self.last_round.0 + 1);
        let topology = &ctx.scope.topology;
        let timeouts = topology.policies.timeouts;
        let attempt = Attempt {
            key: self.newest_key(ctx),
            version,
            world: accepted.world,
            sums: accepted.sums,
            parts: replicas.iter().map(|replica| (*replica, Part::new(topology, *replica))).collect(),
            sources: replicas.iter().flat_map(|replica| topology.sources_of(*replica)).collect(),
            stage: Stage::Proposed,
            prepared: BTreeMap::new(),
            busy: BTreeMap::new(),
            deadline: Some(ctx.after(timeouts.prepare_ms)),
            total_at: ctx.after(timeouts.total_ms),
            resend_at: ctx.after(limits::RESEND_MS),
            since: ctx.now,
            phases: BTreeMap::new(),
            fell_out,
        };
        ctx.event(Event::Phase { round: attempt.key, phase: super::io::Phase::Prepare });
        let participants = attempt.participants();
        self.attempt = Some(attempt);
        self.propose_to(ctx, participants);
    }

    fn propose_to(&self, ctx: &mut Context<'_>, members: BTreeSet<MemberId>) {
        let Some(attempt) = &self.attempt else { return };
        let propose = Message::Propose {
            round: attempt.key.round,
            version: attempt.version,
            world: attempt.world.clone(),
            replicas: attempt.parts.keys().copied().collect(),
            sources: attempt.sources.iter().copied().collect(),
            plan: ctx.scope.topology.plan,
            timeouts: ctx.scope.topology.policies.timeouts,
        };
        for member in members {
            self.tell(ctx, member, propose.clone());
        }
    }

    /// Aborts every replica that is still open (L1).
    fn abort_all(&mut self, ctx: &mut Context<'_>, blame: Blame) {
        let Some(attempt) = &self.attempt else { return };
        let open = attempt.parts.iter().filter(|(_, part)| part.decision == Decision::Open);
        let replicas: Vec<u32> = open.map(|(replica, _)| *replica).collect();
        self.abort_parts(ctx, &replicas, blame);
    }

    fn abort_parts(&mut self, ctx: &mut Context<'_>, replicas: &[u32], blame: Blame) {
        let Some(attempt) = &mut self.attempt else { return };
        let mut told = BTreeSet::new();
        let mut aborted = Vec::new();
        for replica in replicas {
            let Some(part) = attempt.parts.get_mut(replica) else { continue };
            if part.decision != Decision::Open {
                continue; // L1
            }
            part.decision = Decision::Aborted;
            part.end = Some(ReplicaEnd::Aborted(blame));
            aborted.push(*replica);
            told.extend(part.ranks.iter().chain(&part.sources).copied());
        }
        let round = attempt.key.round;
        for member in told {
            self.tell(ctx, member, Message::Abort { round, replicas: aborted.clone(), blame });
        }
    }

    /// The round is over: says how.
    fn finish(&mut self, ctx: &mut Context<'_>) {
        if let Some(attempt) = self.attempt.take() {
            ctx.event(Event::RoundEnded(Box::new(attempt.summary())));
        }
    }

    /// The round is over and nothing more will be made of its publication.
    fn finish_and_release(&mut self, ctx: &mut Context<'_>) {
        self.release(ctx);
        self.finish(ctx);
    }

    fn release(&mut self, ctx: &mut Context<'_>) {
        if let Some(attempt) = &self.attempt {
            let (step, world, up_to) = (attempt.version.step, attempt.world.clone(), attempt.key);
            self.desk.release(ctx, Some((step, &world)), up_to);
        }
    }

    pub(super) fn published(
        &mut self,
        ctx: &mut Context<'_>,
        from: MemberId,
        offer: (i64, Arc<str>, ClassSums),
    ) {
        self.desk.offer(ctx, from, offer);
    }

    pub(super) fn cancel(&mut self, ctx: &mut Context<'_>) {
        if self.attempt.as_ref().is_some_and(|attempt| attempt.stage != Stage::Deciding) {
            self.abort_all(ctx, Blame { code: Code::Cancelled, member: None });
            self.finish_and_release(ctx);
        }
    }

    pub(super) fn set_paused(&mut self, ctx: &mut Context<'_>, paused: bool) {
        self.paused = paused;
        if paused && self.attempt.as_ref().is_some_and(|attempt| attempt.stage == Stage::Proposed) {
            self.abort_all(ctx, Blame { code: Code::Cancelled, member: None });
            self.finish(ctx);
        }
    }

    /// Somebody spoke: it is not away.
    pub(super) fn heard_from(&mut self, from: MemberId) {
        self.away.remove(&from);
    }

    pub(super) fn hear(&mut self, ctx: &Context<'_>, from: MemberId, report: &Report) {
        let staged = report.staging.map(|tag| tag.version);
        let live = report.engine.and_then(|engine| engine.live);
        self.hear_versions(ctx, from, [staged, live]);
    }

    fn hear_records(&mut self, ctx: &Context<'_>, from: MemberId, records: &[Option<EngineRecord>]) {
        self.hear_versions(ctx, from, records.iter().map(|record| record.and_then(|record| record.live)));
    }

    fn hear_versions(
        &mut self,
        ctx: &Context<'_>,
        from: MemberId,
        versions: impl IntoIterator<Item = Option<Version>>,
    ) {
        for version in versions.into_iter().flatten() {
            self.memory.hear(&version);
            let standing = ctx.scope.topology.replica_of(from).and_then(|r| self.standings.get_mut(&r));
            if let Some(standing) = standing {
                standing.top = standing.top.max(Some(version.name()));
            }
        }
    }

    pub(super) fn settled(
        &mut self,
        ctx: &mut Context<'_>,
        from: MemberId,
        round: RoundId,
        records: &[Option<EngineRecord>],
    ) {
        self.hear_records(ctx, from, records);
        let Some(replica) = ctx.scope.topology.replica_of(from) else { return };
        let Some(standing) = self.standings.get_mut(&replica) else { return };
        standing.settled = true;
        standing.doubt = standing.doubt.filter(|(doubt, _)| round < *doubt);
        self.serving(ctx, replica, round);
    }

    pub(super) fn deadline(&self) -> Option<u64> {
        let attempt = self.attempt.as_ref();
        let stage =
            attempt.and_then(|attempt| attempt.deadline).map(|at| at.min(attempt.map_or(at, |a| a.total_at)));
        let resend = attempt.map(|attempt| attempt.resend_at);
        let busy = attempt.and_then(|attempt| attempt.busy.values().map(|(at, _)| *at).min());
        let open = self.standings.values().any(|standing| !standing.settled || standing.doubt.is_some());
        let ask = (open || !self.away.is_empty()).then_some(self.ask_at);
        [stage, resend, busy, ask, self.settle_until, self.desk.deadline()].into_iter().flatten().min()
    }

    pub(super) fn expire(&mut self, ctx: &mut Context<'_>) {
        self.settle_until = self.settle_until.filter(|until| *until > ctx.now);
        let refused = self.desk.expire(ctx);
        self.refuse_publication(ctx, refused);
        self.expire_attempt(ctx);
        if self.ask_at <= ctx.now {
            self.ask_at = ctx.after(limits::RESEND_MS);
            self.ask_standings(ctx);
        }
        if let Some(attempt) = &mut self.attempt
            && attempt.resend_at <= ctx.now
        {
            attempt.resend_at = ctx.after(limits::RESEND_MS);
            self.ask(ctx);
        }
    }

    /// Whoever has not settled, has no Outcome or is away is asked again.
    fn ask_standings(&self, ctx: &mut Context<'_>) {
        let mut asked = self.away.clone();
        for (replica, standing) in &self.standings {
            let Some(head) = ctx.scope.topology.replica(*replica).map(|replica| replica.head()) else {
                continue;
            };
            if let Some((round, version)) = standing.doubt
                && self.attempt.as_ref().is_none_or(|attempt| attempt.key.round != round)
            {
                self.tell(ctx, head, Message::Authorise { round, version });
            } else if !standing.settled {
                asked.insert(head);
            }
        }
        for member in asked {
            self.tell(ctx, member, Message::Query {});
        }
    }

    /// A lost connection is there again: it may have lost what was sent last.
    pub(super) fn found(&mut self, now: u64) {
        if let Some(attempt) = &mut self.attempt {
            attempt.resend_at = now;
        }
        self.ask_at = now;
    }
}

/// Whether a round may start with these replicas: at least one, and each pool's fewest.
fn enough(ctx: &Context<'_>, replicas: &BTreeSet<u32>) -> bool {
    let mut pools = BTreeMap::<u32, u32>::new();
    for replica in replicas.iter().filter_map(|replica| ctx.scope.topology.replica(*replica)) {
        *pools.entry(replica.pool).or_default() += 1;
    }
    let fewest = (0..).zip(&ctx.scope.topology.policies.min_replicas);
    !replicas.is_empty()
        && fewest.clone().all(|(pool, fewest)| pools.get(&pool).copied().unwrap_or_default() >= *fewest)
}
