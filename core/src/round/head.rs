//! The head of a replica: finishes by itself what the leader has authorised, and recovers in a new epoch
//! (protocol page §6 and §8).
//!
//! Invariants:
//! - H1: per round either Apply or `Outcome{NotCommitted}`, never both; what was decided is repeated.
//! - H2: Apply goes out only when all ranks are paused, each in the engine process that paused.
//! - H3 (I1): Resume goes out only when all ranks have applied, in the processes that paused; its own engine
//!   comes last.
//! - H4: after Apply it never gives up: a late Applied still completes the replica.
//! - H5 (I9): recovery acts on the reports of all ranks of this epoch and is over before `Settled`.

use super::io::Event;
use super::member::Member;
use super::message::{
    Blame, EngineRecord, EngineState, Message, OutcomeKind, Report, RoundKey, Timeouts, Version,
};
use super::recovery::{Verdict, judge};
use super::scope::Context;
use crate::code::Code;
use crate::id::{Incarnation, MemberId, RoundId};
use crate::limits;
use std::collections::{BTreeMap, BTreeSet};

/// The machine of one replica whose rank 0 this agent hosts, in one epoch.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Head {
    replica: u32,
    ranks: Vec<MemberId>,
    leader: MemberId,
    /// For recovery: each rank's account under this membership.
    reports: BTreeMap<MemberId, Report>,
    /// For the leader: the newest that is known of each rank.
    records: BTreeMap<MemberId, EngineRecord>,
    recovery: Recovery,
    commit: Option<Commit>,
    /// How the newest authorised round ended.
    outcome: Option<(RoundId, Message)>,
    resend_at: Option<u64>,
    closing: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Recovery {
    /// Not all ranks have reported.
    Waiting,
    /// R1, R2: these have not resumed yet.
    Resuming {
        version: Version,
        left: BTreeSet<MemberId>,
    },
    /// R3: `commit` is the recovery round.
    Finishing,
    Settled {
        held: bool,
    },
}

/// One authorised round (or the recovery round, 0) of the replica.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Commit {
    key: RoundKey,
    version: Version,
    timeouts: Timeouts,
    stage: Stage,
    /// Ranks that paused, by engine process; who failed since is missing.
    paused: BTreeMap<MemberId, Incarnation>,
    applied: BTreeSet<MemberId>,
    resumed: BTreeSet<MemberId>,
    deadline: Option<u64>,
    since: u64,
    pause_ms: u64,
    commit_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Stage {
    Pausing,
    Applying { held: bool },
    Resuming { own: bool },
}

impl Head {
    pub(super) fn new(ctx: &Context<'_>, replica: u32) -> Option<Self> {
        let ranks = ctx.scope.topology.replica(replica)?.ranks.clone();
        Some(Self {
            replica,
            ranks,
            leader: ctx.scope.membership.leader(),
            reports: BTreeMap::new(),
            records: BTreeMap::new(),
            recovery: Recovery::Waiting,
            commit: None,
            outcome: None,
            resend_at: Some(ctx.after(limits::RESEND_MS)),
            closing: false,
        })
    }

    fn own(&self) -> MemberId {
        self.ranks[0] // a replica has a rank 0 (membership M2)
    }

    fn tell(&self, ctx: &mut Context<'_>, to: MemberId, message: Message) {
        ctx.send(self.own(), to, message);
    }

    /// Leave for a new epoch, or for good.
    pub(super) fn close(&mut self, ctx: &mut Context<'_>) {
        self.closing = true;
        if self.commit.as_ref().is_some_and(|commit| commit.stage == Stage::Pausing) {
            self.give_up(ctx, Blame { code: Code::StaleEpoch, member: None });
        }
    }

    pub(super) fn authorise(&mut self, ctx: &mut Context<'_>, own: &Member, key: RoundKey, version: Version) {
        match &self.outcome {
            Some((round, outcome)) if *round == key.round => {
                return self.tell(ctx, self.leader, outcome.clone()); // H1
            }
            Some((round, _)) if *round > key.round => return, // a late copy of what was answered long ago
            _ => {}
        }
        if self.commit.as_ref().is_some_and(|commit| commit.key >= key) {
            return;
        }
        let staged = own.staged(key, &version).filter(|_| !self.closing);
        let Some(timeouts) = staged else {
            let blame = Blame { code: own.why_over(key), member: Some(self.own()) };
            return self.conclude(ctx, key.round, OutcomeKind::NotCommitted, Some(blame), (0, 0));
        };
        self.begin(ctx, key, version, timeouts);
    }

    fn begin(&mut self, ctx: &mut Context<'_>, key: RoundKey, version: Version, timeouts: Timeouts) {
        self.commit = Some(Commit {
            key,
            version,
            timeouts,
            stage: Stage::Pausing,
            paused: BTreeMap::new(),
            applied: BTreeSet::new(),
            resumed: BTreeSet::new(),
            deadline: Some(ctx.after(timeouts.pause_ms)),
            since: ctx.now,
            pause_ms: 0,
            commit_ms: 0,
        });
        self.ask(ctx);
    }

    /// Says again what is unanswered.
    fn ask(&mut self, ctx: &mut Context<'_>) {
        self.resend_at = Some(ctx.after(limits::RESEND_MS));
        let Some(commit) = &self.commit else { return };
        let (round, version) = (commit.key.round, commit.version);
        for rank in &self.ranks {
            let message = match commit.stage {
                Stage::Pausing if !commit.paused.contains_key(rank) => Message::Pause { round, version },
                Stage::Applying { .. } if !commit.applied.contains(rank) => Message::Apply { round },
                Stage::Resuming { own } if !commit.resumed.contains(rank) && (own || *rank != self.own()) => {
                    Message::Resume { round, version }
                }
                _ => continue,
            };
            self.tell(ctx, *rank, message);
        }
    }

    pub(super) fn paused(
        &mut self,
        ctx: &mut Context<'_>,
        from: MemberId,
        round: RoundId,
        instance: Incarnation,
    ) {
        let Some(commit) = self.commit.as_mut().filter(|commit| commit.key.round == round) else { return };
        if commit.stage != Stage::Pausing {
            return;
        }
        let before = commit.paused.insert(from, instance);
        if before.is_some_and(|before| before != instance) {
            return self.give_up(ctx, Blame { code: Code::EngineCold, member: Some(from) }); // H2
        }
        if commit.paused.len() == self.ranks.len() {
            commit.stage = Stage::Applying { held: false };
            commit.pause_ms = ctx.now.saturating_sub(commit.since);
            commit.since = ctx.now;
            commit.deadline = Some(ctx.after(commit.timeouts.commit_ms));
            self.ask(ctx);
        }
    }

    pub(super) fn applied(
        &mut self,
        ctx: &mut Context<'_>,
        from: MemberId,
        round: RoundId,
        version: Version,
        instance: Incarnation,
    ) {
        let Some(commit) = self.commit.as_mut().filter(|commit| commit.key.round == round) else { return };
        let Stage::Applying { held } = commit.stage else { return };
        if commit.version != version || commit.paused.get(&from) != Some(&instance) {
            return; // H3: of a process that is gone
        }
        commit.applied.insert(from);
        let record =
            EngineRecord { instance, live: Some(version), state: EngineState::Applied, round: commit.key };
        self.records.insert(from, record);
        if commit.applied.len() < self.ranks.len() {
            return;
        }
        commit.commit_ms = ctx.now.saturating_sub(commit.since);
        commit.stage = Stage::Resuming { own: self.ranks.len() == 1 };
        commit.deadline = Some(ctx.after(commit.timeouts.resume_ms));
        let times = (commit.pause_ms, commit.commit_ms);
        if !held && round.0 > 0 {
            self.conclude(ctx, round, OutcomeKind::Committed, None, times);
        }
        self.ask(ctx);
    }

    pub(super) fn resumed(&mut self, ctx: &mut Context<'_>, from: MemberId, round: RoundId) {
        if let Recovery::Resuming { version, left } = &mut self.recovery
            && round.0 == 0
        {
            let version = *version;
            left.remove(&from);
            let over = left.is_empty();
            self.note_serving(from, version);
            return if over {
                self.settle(ctx, round, false)
            };
        }
        let Some(commit) = self.commit.as_mut().filter(|commit| commit.key.round == round) else { return };
        let Stage::Resuming { own } = &mut commit.stage else { return };
        commit.resumed.insert(from);
        let version = commit.version;
        let others = commit.resumed.len() + 1 >= self.ranks.len();
        let first = others && !std::mem::replace(own, *own || others);
        let all = commit.resumed.len() == self.ranks.len();
        self.note_serving(from, version);
        if all {
            self.commit = None;
            self.settle(ctx, round, false);
        } else if first {
            self.ask(ctx); // H3: its own engine last
        }
    }

    pub(super) fn failed(
        &mut self,
        ctx: &mut Context<'_>,
        from: MemberId,
        round: RoundId,
        code: Code,
        record: Option<EngineRecord>,
    ) {
        if let Some(record) = record {
            self.records.insert(from, record);
        }
        let blame = Blame { code, member: Some(from) };
        if let Recovery::Resuming { .. } = self.recovery
            && round.0 == 0
        {
            return self.settle(ctx, round, true);
        }
        let Some(commit) = self.commit.as_mut().filter(|commit| commit.key.round == round) else { return };
        match commit.stage {
            Stage::Pausing => self.give_up(ctx, blame),
            Stage::Applying { .. } => {
                commit.paused.remove(&from); // H3: what that process says from now on is void
                commit.applied.remove(&from);
                self.hold(ctx, blame);
            }
            // A leader ends its round by itself; recovery has none, and only a full refit helps that rank.
            Stage::Resuming { .. } if round.0 == 0 => {
                self.commit = None;
                self.settle(ctx, round, true);
            }
            Stage::Resuming { .. } => {}
        }
    }

    pub(super) fn lose(&mut self, ctx: &mut Context<'_>, lost: &[MemberId]) {
        let Some(rank) = self.ranks.iter().copied().find(|rank| lost.contains(rank)) else { return };
        let blame = Blame { code: Code::PeerLost, member: Some(rank) };
        match self.commit.as_ref().map(|commit| commit.stage) {
            Some(Stage::Pausing) => self.give_up(ctx, blame),
            Some(Stage::Applying { .. }) => self.hold(ctx, blame),
            Some(Stage::Resuming { .. }) | None => {}
        }
    }

    /// Before any Apply: H1.
    fn give_up(&mut self, ctx: &mut Context<'_>, blame: Blame) {
        let Some(commit) = self.commit.take() else { return };
        let round = commit.key.round;
        for rank in self.ranks.clone() {
            self.tell(ctx, rank, Message::GiveUp { round, blame });
        }
        let times = (ctx.now.saturating_sub(commit.since), 0);
        self.conclude(ctx, round, OutcomeKind::NotCommitted, Some(blame), times);
    }

    /// After Apply: says so once, and keeps waiting (H4).
    fn hold(&mut self, ctx: &mut Context<'_>, blame: Blame) {
        let Some(commit) = &mut self.commit else { return };
        if commit.stage == (Stage::Applying { held: false }) {
            commit.stage = Stage::Applying { held: true };
            commit.deadline = None;
            self.recovery = Recovery::Settled { held: true };
            let (round, times) = (commit.key.round, (commit.pause_ms, ctx.now.saturating_sub(commit.since)));
            self.conclude(ctx, round, OutcomeKind::Held, Some(blame), times);
        }
    }

    fn conclude(
        &mut self,
        ctx: &mut Context<'_>,
        round: RoundId,
        result: OutcomeKind,
        blame: Option<Blame>,
        (pause_ms, commit_ms): (u64, u64),
    ) {
        if round.0 == 0 {
            return self.settle(ctx, round, true); // a recovery that did not come through
        }
        let records = self.records();
        let outcome = Message::Outcome { round, result, blame, pause_ms, commit_ms, records };
        self.outcome = Some((round, outcome.clone()));
        self.tell(ctx, self.leader, outcome);
    }

    fn settle(&mut self, ctx: &mut Context<'_>, round: RoundId, held: bool) {
        self.recovery = Recovery::Settled { held };
        let records = self.records();
        self.tell(ctx, self.leader, Message::Settled { round, held, records });
        ctx.event(Event::Settled { replica: self.replica, held });
    }

    /// The leader asks how this replica stands.
    pub(super) fn answer_query(&self, ctx: &mut Context<'_>) {
        if let Some((_, outcome)) = &self.outcome {
            self.tell(ctx, self.leader, outcome.clone());
        }
        if let Recovery::Settled { held } = self.recovery
            && self.commit.is_none()
        {
            let round = self.outcome.as_ref().map_or(RoundId(0), |(round, _)| *round);
            let records = self.records();
            self.tell(ctx, self.leader, Message::Settled { round, held, records });
        }
    }

    /// A rank's account. Until recovery is over, or while it waits for what it cannot do itself, all of them
    /// are judged again.
    pub(super) fn reported(&mut self, ctx: &mut Context<'_>, own: &Member, from: MemberId, report: Report) {
        let Some(engine) = report.engine else { return }; // no engine, no word: the head waits
        self.records.insert(from, engine);
        self.reports.insert(from, report);
        let open = match self.recovery {
            Recovery::Waiting | Recovery::Resuming { .. } => true,
            Recovery::Settled { held } => held && self.commit.is_none() && !own.has_joined_round(),
            Recovery::Finishing => false,
        };
        let all = self.ranks.iter().all(|rank| self.reports.contains_key(rank));
        if !open || !all || self.closing {
            return; // C1
        }
        let again = matches!(self.recovery, Recovery::Settled { .. });
        match judge(self.ranks.iter().filter_map(|rank| self.reports.get(rank))) {
            Verdict::Same(version) => self.resume_all(ctx, version),
            Verdict::Finish(version) if !again => {
                self.recovery = Recovery::Finishing;
                let timeouts = ctx.scope.topology.policies.timeouts;
                self.begin(ctx, ctx.scope.key(RoundId(0)), version, timeouts);
            }
            Verdict::Finish(_) => {} // tried once in this epoch
            Verdict::Held if !again => self.settle(ctx, RoundId(0), true),
            Verdict::Held => {}
        }
    }

    fn resume_all(&mut self, ctx: &mut Context<'_>, version: Version) {
        let paused = |rank: &&MemberId| {
            let report = self.reports.get(rank);
            report.and_then(|r| r.engine).is_none_or(|engine| engine.state != EngineState::Serving)
        };
        let left: BTreeSet<_> = self.ranks.iter().filter(paused).copied().collect();
        if left.is_empty() {
            return self.settle(ctx, RoundId(0), false);
        }
        self.recovery = Recovery::Resuming { version, left };
        self.ask_recovery(ctx);
    }

    /// Asks ranks for what recovery still lacks.
    fn ask_recovery(&mut self, ctx: &mut Context<'_>) {
        self.resend_at = Some(ctx.after(limits::RESEND_MS));
        match &self.recovery {
            Recovery::Waiting => {
                let missing = self.ranks.iter().filter(|rank| !self.reports.contains_key(rank));
                missing.for_each(|rank| self.tell(ctx, *rank, Message::Query {}));
            }
            Recovery::Resuming { version, left } => {
                let resume = Message::Resume { round: RoundId(0), version: *version };
                left.iter().for_each(|rank| self.tell(ctx, *rank, resume.clone()));
            }
            Recovery::Finishing | Recovery::Settled { .. } => {}
        }
    }

    /// A lost connection is there again: it may have lost what was sent last.
    pub(super) fn found(&mut self, now: u64) {
        self.resend_at = Some(now);
    }

    pub(super) fn deadline(&self) -> Option<u64> {
        let open = matches!(self.recovery, Recovery::Waiting | Recovery::Resuming { .. });
        let resend = self.resend_at.filter(|_| open || self.commit.is_some());
        let commit = self.commit.as_ref().and_then(|commit| commit.deadline);
        [resend, commit].into_iter().flatten().min()
    }

    pub(super) fn expire(&mut self, ctx: &mut Context<'_>) {
        if let Some(commit) = &mut self.commit
            && commit.deadline.is_some_and(|deadline| deadline <= ctx.now)
        {
            commit.deadline = None;
            let late = |done: &dyn Fn(&MemberId) -> bool| self.ranks.iter().copied().find(|rank| !done(rank));
            match &mut commit.stage {
                Stage::Pausing => {
                    let member = late(&|rank| commit.paused.contains_key(rank));
                    self.give_up(ctx, Blame { code: Code::PauseTimeout, member });
                }
                Stage::Applying { .. } => {
                    let member = late(&|rank| commit.applied.contains(rank));
                    self.hold(ctx, Blame { code: Code::CommitTimeout, member });
                }
                // The barrier is passed, so the own engine may serve whatever keeps the others.
                Stage::Resuming { own } => {
                    *own = true;
                    self.resend_at = Some(ctx.now);
                }
            }
        }
        if self.resend_at.is_some_and(|at| at <= ctx.now) {
            self.ask(ctx);
            self.ask_recovery(ctx);
        }
    }

    /// The leader opened a newer round and the own rank has joined it: what was open here is over.
    pub(super) fn joined_round(&mut self, key: RoundKey) {
        if self.commit.as_ref().is_some_and(|commit| commit.key < key) {
            self.commit = None;
        }
    }

    fn note_serving(&mut self, rank: MemberId, version: Version) {
        if let Some(record) = self.records.get_mut(&rank) {
            *record = EngineRecord { live: Some(version), state: EngineState::Serving, ..*record };
        }
    }

    fn records(&self) -> Vec<Option<EngineRecord>> {
        self.ranks.iter().map(|rank| self.records.get(rank).copied()).collect()
    }
}
