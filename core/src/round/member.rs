//! One inference rank as its agent sees it: staging, engine client, and its part in rounds (protocol page §6).
//!
//! Invariants:
//! - B1: `Prepared` is said only when no receiver of an older round is left here.
//! - B2: a round at or below `floor` that is not the current one is answered and changes nothing.
//! - B3 (I8): staging is dropped or reused only after its receivers are joined.
//! - B4: before Pause the rank leaves a round for any reason; while paused and clean it serves on; from the
//!   first applied byte it only waits for Resume, recovery or a full refit.
//! - B5: reports are the engine's word: its newest record, under the layout that the membership names.
//! - B6: Applied is said only for a version that the engine says is live in full.

mod answers;
mod steps;

use super::io::{Effect, Event, Slot};
use super::message::{
    Blame, EngineRecord, EngineState, Message, Report, RoundKey, StagingTag, Timeouts, Version,
};
use super::scope::Context;
use crate::code::Code;
use crate::id::{MemberId, RoundId, Sha256};
use crate::limits;

/// The machine of one slot.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Member {
    slot: Slot,
    place: Option<Place>,
    client: Option<Client>,
    staging: Option<Staging>,
    /// Highest round prepared, left or aborted.
    floor: RoundKey,
    /// How the newest round that is over ended here.
    tombstone: Option<Tombstone>,
    current: Option<Current>,
    receivers: Receivers,
    /// Leaving for a new epoch or for good: no round is entered.
    closing: bool,
}

/// Who this rank is in the accepted membership.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Place {
    id: MemberId,
    replica: u32,
    head: MemberId,
    leader: MemberId,
    layout: Sha256,
}

/// The connected engine client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Client {
    record: EngineRecord,
    layout: Sha256,
    /// `abort` frames without an answer; at zero the record is what the engine says now.
    aborts_owed: u32,
    /// A `commit` without an answer, and until when an epoch waits for it.
    copying_until: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Staging {
    tag: StagingTag,
    layout: Sha256,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Tombstone {
    round: RoundKey,
    /// `None`: it resumed.
    code: Option<Code>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Receivers {
    None,
    Running(RoundKey),
    Joining(RoundKey),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Current {
    key: RoundKey,
    version: Version,
    timeouts: Timeouts,
    phase: Phase,
    deadline: Option<u64>,
    /// Bytes received and skipped, and when the last arrived.
    received: (u64, u64, u64),
    /// Said to the leader, for repetition.
    landed: Option<Message>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Phase {
    /// Receivers of an older round are being joined.
    Joining,
    /// Staging is being made.
    Opening,
    Prepared,
    Receiving,
    Digesting,
    Staged,
    Pausing,
    Paused,
    Applying,
    Applied,
    Resuming,
    Held,
}

/// What a proposal asks of this rank.
#[derive(Debug, Clone)]
pub(super) struct Proposal {
    pub(super) key: RoundKey,
    pub(super) version: Version,
    pub(super) plan: Sha256,
    pub(super) timeouts: Timeouts,
}

impl Member {
    pub(super) fn new(slot: Slot) -> Self {
        Self {
            slot,
            place: None,
            client: None,
            staging: None,
            floor: RoundKey::default(),
            tombstone: None,
            current: None,
            receivers: Receivers::None,
            closing: false,
        }
    }

    /// A membership took effect: the engine is asked for its record, which then goes to the head.
    pub(super) fn enter(&mut self, ctx: &mut Context<'_>, id: MemberId) {
        let Some((replica, facts)) = ctx.scope.replica_of(id) else { return };
        let layout = ctx.scope.topology.layouts[id.0 as usize];
        let (head, leader) = (facts.head(), ctx.scope.membership.leader());
        self.place = Some(Place { id, replica, head, leader, layout });
        self.closing = false;
        self.floor = self.floor.max(RoundKey { epoch: ctx.scope.epoch(), round: RoundId(0) });
        if let Some(client) = &mut self.client {
            client.aborts_owed += 1;
            let round = client.record.round;
            ctx.effect(Effect::AbortClient { slot: self.slot, round });
        }
    }

    /// Leave for a new epoch, or for good: everything but a running copy ends now.
    pub(super) fn close(&mut self, ctx: &mut Context<'_>) {
        self.closing = true;
        match self.current.as_ref().map(|current| current.phase) {
            Some(Phase::Applying) | None => {}
            Some(Phase::Applied | Phase::Resuming | Phase::Held) => self.end(Some(Code::StaleEpoch)),
            Some(_) => self.leave(ctx, Code::StaleEpoch),
        }
    }

    /// Nothing of an older round runs here any more.
    pub(super) fn is_closed(&self) -> bool {
        self.closing && !self.is_copying() && self.current.is_none() && self.receivers == Receivers::None
    }

    /// An engine copy is running that must not be cut off.
    pub(super) fn is_copying(&self) -> bool {
        self.client.is_some_and(|client| client.copying_until.is_some())
    }

    /// Timeouts of a round that is staged here and waits for its head's Pause.
    pub(super) fn staged(&self, key: RoundKey, version: &Version) -> Option<Timeouts> {
        let current = self.current.as_ref()?;
        let is =
            current.key == key && current.phase == Phase::Staged && current.version.name() == version.name();
        is.then_some(current.timeouts)
    }

    /// Why the round is not open here any more.
    pub(super) fn why_over(&self, key: RoundKey) -> Code {
        match self.tombstone {
            Some(Tombstone { round, code: Some(code) }) if round == key => code,
            _ => Code::Cancelled,
        }
    }

    /// In this round, and not yet over.
    pub(super) fn is_in(&self, key: RoundKey) -> bool {
        self.current.as_ref().is_some_and(|current| current.key == key)
    }

    pub(super) fn has_joined_round(&self) -> bool {
        self.floor.round > RoundId(0)
    }

    pub(super) fn report(&self) -> Report {
        let layout = self.place.map(|place| place.layout);
        let engine = self.client.map(|client| match Some(client.layout) == layout {
            true => client.record,
            // Tensors of another layout hold nothing of this membership.
            false => EngineRecord { live: None, state: EngineState::Cold, ..client.record },
        });
        let staging = self.staging.filter(|staging| Some(staging.layout) == layout).map(|s| s.tag);
        Report { engine, staging, publication: None }
    }

    pub(super) fn deadline(&self) -> Option<u64> {
        let copying = self.client.and_then(|client| client.copying_until).filter(|_| self.closing);
        let current = self.current.as_ref().and_then(|current| current.deadline);
        [copying, current].into_iter().flatten().min()
    }

    pub(super) fn expire(&mut self, ctx: &mut Context<'_>) {
        if self.closing
            && let Some(client) = &mut self.client
            && client.copying_until.is_some_and(|until| until <= ctx.now)
        {
            client.copying_until = None; // the engine hangs: the epoch goes on, its word will be Dirty
            self.end(Some(Code::CommitTimeout));
        }
        let Some(current) = &mut self.current else { return };
        if current.deadline.is_none_or(|deadline| deadline > ctx.now) {
            return;
        }
        let code = match current.phase {
            Phase::Joining | Phase::Opening | Phase::Prepared => Code::PrepareTimeout,
            Phase::Receiving => Code::TransferTimeout,
            Phase::Digesting | Phase::Staged => Code::VerifyTimeout,
            Phase::Pausing | Phase::Paused => Code::PauseTimeout,
            Phase::Applying | Phase::Applied | Phase::Resuming | Phase::Held => {
                current.deadline = None; // B4
                return;
            }
        };
        self.leave(ctx, code);
    }

    /// Leaves the round before anything was applied; needs nobody.
    fn leave(&mut self, ctx: &mut Context<'_>, code: Code) {
        let Some(current) = self.current.take() else { return };
        self.tombstone = Some(Tombstone { round: current.key, code: Some(code) });
        if matches!(current.phase, Phase::Pausing | Phase::Paused)
            && let Some(client) = &mut self.client
        {
            client.aborts_owed += 1;
            ctx.effect(Effect::AbortClient { slot: self.slot, round: current.key });
        }
        match self.receivers {
            Receivers::Running(round) => {
                self.receivers = Receivers::Joining(round);
                ctx.effect(Effect::JoinReceivers { slot: self.slot, round });
            }
            Receivers::None => self.drop_unauthorised(ctx),
            Receivers::Joining(_) => {}
        }
    }

    /// The round is over here without anything to undo.
    fn end(&mut self, code: Option<Code>) {
        if let Some(current) = self.current.take() {
            self.tombstone = Some(Tombstone { round: current.key, code });
        }
    }

    fn drop_unauthorised(&mut self, ctx: &mut Context<'_>) {
        if self.staging.is_none_or(|staging| !staging.tag.authorised) {
            self.drop_staging(ctx);
        }
    }

    fn drop_staging(&mut self, ctx: &mut Context<'_>) {
        self.staging = None;
        ctx.effect(Effect::DropStaging { slot: self.slot });
        self.show(ctx);
    }

    fn to_leader(&self, ctx: &mut Context<'_>, message: Message) {
        if let Some(place) = self.place {
            ctx.send(place.id, place.leader, message);
        }
    }

    fn to_head(&self, ctx: &mut Context<'_>, message: Message) {
        if let Some(place) = self.place {
            ctx.send(place.id, place.head, message);
        }
    }

    fn refuse(&self, ctx: &mut Context<'_>, round: RoundId, code: Code, retryable: bool) {
        self.to_leader(ctx, Message::Refused { round, code, retryable, report: self.report() });
    }

    fn fail(&self, ctx: &mut Context<'_>, round: RoundId, code: Code) {
        self.to_head(ctx, Message::Failed { round, code, record: self.report().engine });
    }

    fn blame(&self, code: Code) -> Blame {
        Blame { code, member: self.place.map(|place| place.id) }
    }

    fn show(&self, ctx: &mut Context<'_>) {
        let Report { engine: record, staging, .. } = self.report();
        ctx.event(Event::Record { slot: self.slot, record, staging });
    }

    fn grace(&self, ctx: &Context<'_>, ms: u64) -> Option<u64> {
        Some(ctx.after(ms.saturating_add(limits::MEMBER_GRACE_MS)))
    }
}
