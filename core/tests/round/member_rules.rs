//! An inference rank in its agent (protocol page §6 and §8): what it refuses to be told too late or by half.

use crate::world::{Shape, TIMEOUTS, World, key_of};
use std::sync::Arc;
use weightrefit_core::code::Code;
use weightrefit_core::id::{ContentSum, Epoch, Incarnation, MemberId, RoundId, Sha256};
use weightrefit_core::round::io::{Effect, Input, Slot};
use weightrefit_core::round::message::{
    EngineRecord, EngineState, Message, Report, RoundKey, StagingTag, Version,
};

fn version(step: i64) -> Version {
    Version { run: 0, step, origin: Epoch(1), sum: ContentSum([1; 16]) }
}

fn record(state: EngineState, live: i64) -> EngineRecord {
    EngineRecord { instance: Incarnation(99), live: Some(version(live)), state, round: key(0) }
}

fn key(round: u64) -> RoundKey {
    RoundKey { epoch: Epoch(1), round: RoundId(round) }
}

/// Rank 1 of the replica (member 2); member 0 leads, member 1 is the head.
struct Rank {
    world: World,
    now: u64,
}

impl Rank {
    /// Its engine has just registered with this record.
    fn with(record: EngineRecord) -> Self {
        let world = World::configured(Shape::new(1, 1, 2));
        let mut rank = Self { world, now: 0 };
        rank.feed(Input::EngineConnected { slot: Slot(0), record, layout: Sha256([0; 32]) });
        rank
    }

    fn feed(&mut self, input: Input) -> Vec<Effect> {
        let mut out = Vec::new();
        self.world.agents[2].node.handle(self.now, input, &mut out);
        out.retain(|effect| !matches!(effect, Effect::Event(_)));
        out
    }

    fn hear(&mut self, from: usize, message: Message) -> Vec<Effect> {
        let header = self.world.header(from, 2);
        let peer_key = key_of(header.from_incarnation);
        self.feed(Input::Message { header, peer_key, message })
    }

    fn propose(&mut self, round: u64, step: i64) -> Vec<Effect> {
        self.hear(0, proposal(round, step, Sha256([9; 32])))
    }

    /// Up to Staged in this round.
    fn stage(&mut self, round: u64, step: i64) {
        assert!(matches!(self.propose(round, step)[..], [Effect::OpenStaging { .. }]));
        self.feed(Input::StagingReady { slot: Slot(0), round: key(round) });
        self.hear(0, Message::Transfer { round: RoundId(round) });
        self.feed(Input::Received { slot: Slot(0), round: key(round), bytes: 100, skipped: 0 });
        let sums = Arc::new(Vec::new());
        let said = said(&self.feed(Input::Digested { slot: Slot(0), round: key(round), sums }));
        assert!(matches!(said[..], [Message::Landed { .. }]), "{said:?}");
    }

    fn pause(&mut self, round: u64, step: i64) -> Vec<Effect> {
        self.hear(1, Message::Pause { round: RoundId(round), version: version(step) })
    }
}

fn proposal(round: u64, step: i64, plan: Sha256) -> Message {
    Message::Propose {
        round: RoundId(round),
        version: Version { sum: ContentSum::default(), ..version(step) },
        world: "w".into(),
        replicas: vec![0],
        sources: vec![MemberId(0)],
        plan,
        timeouts: TIMEOUTS,
    }
}

fn said(effects: &[Effect]) -> Vec<Message> {
    let message = |effect: &Effect| match effect {
        Effect::Send { message, .. } => Some(message.clone()),
        _ => None,
    };
    effects.iter().filter_map(message).collect()
}

fn refused(effects: &[Effect]) -> Option<(Code, bool)> {
    match &said(effects)[..] {
        [Message::Refused { code, retryable, .. }] => Some((*code, *retryable)),
        _ => None,
    }
}

fn failed(effects: &[Effect]) -> bool {
    matches!(said(effects)[..], [Message::Failed { .. }]) && effects.len() == 1
}

#[test]
fn i7_an_older_version_is_refused_but_a_dirty_or_cold_rank_takes_any() {
    assert_eq!(
        refused(&Rank::with(record(EngineState::Serving, 5)).propose(1, 4)),
        Some((Code::VersionRegressed, false))
    );
    assert_eq!(
        refused(&Rank::with(record(EngineState::Applied, 5)).propose(1, 4)),
        Some((Code::VersionRegressed, false))
    );
    for state in [EngineState::Dirty, EngineState::Cold] {
        assert_eq!(refused(&Rank::with(record(state, 5)).propose(1, 4)), None, "{state:?}");
    }
}

#[test]
fn i4_another_plan_is_refused() {
    let effects = Rank::with(record(EngineState::Serving, 1)).hear(0, proposal(1, 2, Sha256([8; 32])));
    assert_eq!(refused(&effects), Some((Code::PlanMismatch, false)));
}

#[test]
fn a_round_that_was_aborted_or_given_up_before_it_was_seen_is_never_entered() {
    let blame = weightrefit_core::round::message::Blame { code: Code::PeerLost, member: None };
    let mut rank = Rank::with(record(EngineState::Serving, 1));
    assert!(rank.hear(0, Message::Abort { round: RoundId(3), replicas: vec![0], blame }).is_empty());
    assert_eq!(refused(&rank.propose(3, 2)), Some((Code::PeerLost, false)));
    assert_eq!(refused(&rank.propose(2, 2)), Some((Code::Cancelled, false)));
    assert!(rank.hear(1, Message::GiveUp { round: RoundId(4), blame }).is_empty());
    assert_eq!(refused(&rank.propose(4, 2)), Some((Code::PeerLost, false)));
    assert_eq!(refused(&rank.propose(5, 2)), None);
}

#[test]
fn i3_a_resume_of_recovery_is_dead_once_the_rank_has_joined_a_round_of_the_epoch() {
    let mut rank = Rank::with(record(EngineState::Applied, 1));
    let resume = Message::Resume { round: RoundId(0), version: version(1) };
    rank.propose(1, 2);
    assert!(failed(&rank.hear(1, resume.clone())), "the late one");
    let mut fresh = Rank::with(record(EngineState::Applied, 1));
    assert!(matches!(fresh.hear(1, resume)[..], [Effect::Resume { .. }]), "in time");
}

#[test]
fn i1_a_rank_resumes_only_what_it_has_applied_in_that_round() {
    let mut rank = Rank::with(record(EngineState::Serving, 1));
    rank.stage(1, 2);
    rank.pause(1, 2);
    let resume = |step| Message::Resume { round: RoundId(1), version: version(step) };
    assert!(failed(&rank.hear(1, resume(2))), "not even paused");
    rank.feed(Input::Paused { slot: Slot(0), round: key(1), record: record(EngineState::Quiet, 1) });
    assert!(failed(&rank.hear(1, resume(1))), "paused, not applied");
    assert!(matches!(rank.hear(1, Message::Apply { round: RoundId(1) })[..], [Effect::Commit { .. }]));
    let committed =
        Input::Committed { slot: Slot(0), round: key(1), record: record(EngineState::Applied, 2) };
    assert!(matches!(said(&rank.feed(committed))[..], [Message::Applied { .. }]));
    assert!(failed(&rank.hear(1, resume(1))), "another version");
    assert!(matches!(rank.hear(1, resume(2))[..], [Effect::Resume { .. }]));
}

#[test]
fn i2_applied_is_said_only_when_the_engine_says_that_this_version_is_live() {
    for wrong in
        [record(EngineState::Applied, 1), record(EngineState::Dirty, 2), record(EngineState::Quiet, 2)]
    {
        let mut rank = Rank::with(record(EngineState::Serving, 1));
        rank.stage(1, 2);
        rank.pause(1, 2);
        rank.feed(Input::Paused { slot: Slot(0), round: key(1), record: record(EngineState::Quiet, 1) });
        rank.hear(1, Message::Apply { round: RoundId(1) });
        let committed = Input::Committed { slot: Slot(0), round: key(1), record: wrong };
        assert!(failed(&rank.feed(committed)), "{wrong:?}");
    }
}

#[test]
fn i5_a_rank_ends_its_round_without_hearing_from_anyone() {
    let mut rank = Rank::with(record(EngineState::Serving, 1));
    rank.stage(1, 2);
    rank.now += TIMEOUTS.transfer_ms + TIMEOUTS.verify_ms + 5_000;
    assert!(matches!(rank.feed(Input::Tick)[..], [Effect::DropStaging { .. }]), "staged");
    assert!(failed(&rank.pause(1, 2)), "what was left is over");
    rank.stage(2, 3);
    rank.pause(2, 3);
    rank.now += TIMEOUTS.pause_ms + 5_000;
    assert!(
        matches!(rank.feed(Input::Tick)[..], [Effect::AbortClient { .. }]),
        "paused: serves on, keeps staging"
    );
    assert_eq!(
        refused(&rank.hear(0, Message::Transfer { round: RoundId(2) })),
        Some((Code::PauseTimeout, false))
    );
}

#[test]
fn n1_a_deadline_that_has_passed_counts_before_the_message_that_comes_late() {
    let mut rank = Rank::with(record(EngineState::Serving, 1));
    rank.stage(1, 2);
    rank.pause(1, 2);
    let quiet = record(EngineState::Quiet, 1);
    rank.feed(Input::Paused { slot: Slot(0), round: key(1), record: quiet });
    rank.now += TIMEOUTS.pause_ms + 5_000;
    let effects = rank.hear(1, Message::Apply { round: RoundId(1) });
    assert!(matches!(effects[0], Effect::AbortClient { .. }), "{effects:?}");
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::Commit { .. })), "{effects:?}");
}

#[test]
fn i9_a_rank_joins_a_recovery_only_with_whole_tensors_and_exactly_that_version() {
    let mut staged = Rank::with(record(EngineState::Serving, 1));
    staged.stage(1, 2);
    staged.pause(1, 2);
    staged.now += 100_000;
    staged.feed(Input::Tick);
    let report = |rank: &mut Rank| match &said(&rank.hear(1, Message::Query {}))[..] {
        [Message::Reported { report: Report { staging, .. } }] => *staging,
        other => panic!("{other:?}"),
    };
    let early = said(&staged.hear(1, Message::Query {}));
    assert!(early.is_empty(), "no word before the engine has answered abort: {early:?}");
    staged.feed(Input::Aborted { slot: Slot(0), round: key(1), record: record(EngineState::Serving, 1) });
    let kept = StagingTag { version: version(2), sealed: true, authorised: true };
    assert_eq!(report(&mut staged), Some(kept));
    assert!(failed(&staged.pause(0, 2)), "a round of this epoch was joined");
    assert!(failed(&Rank::with(record(EngineState::Dirty, 2)).pause(0, 2)), "Dirty");
    assert!(failed(&Rank::with(record(EngineState::Serving, 1)).pause(0, 2)), "nothing staged");
    assert!(matches!(Rank::with(record(EngineState::Applied, 2)).pause(0, 2)[..], [Effect::Pause { .. }]));
}
