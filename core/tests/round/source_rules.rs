//! The publication of a training rank (protocol page §7): who may free it, and when.

use crate::world::{Shape, TIMEOUTS, World, key_of};
use std::sync::Arc;
use weightrefit_core::code::Code;
use weightrefit_core::id::{Epoch, MemberId, RoundId, Sha256};
use weightrefit_core::round::io::{Effect, Input, ReleaseOutcome, Slot};
use weightrefit_core::round::message::{Message, RoundKey, Version};

/// Training rank 1 in its own agent, spoken to by its leader, member 0.
struct Source {
    world: World,
    now: u64,
}

impl Source {
    /// Has published step 1 and told the leader.
    fn offering() -> Self {
        let world = World::configured(Shape::new(2, 1, 1));
        let mut source = Self { world, now: 0 };
        source.publish(1);
        let sums = Arc::new(Vec::new());
        let said = source.feed(Input::PublicationDigested { slot: Slot(0), step: 1, epoch: Epoch(1), sums });
        assert!(
            matches!(said[..], [Effect::Send { message: Message::Published { step: 1, .. }, .. }]),
            "{said:?}"
        );
        source
    }

    fn feed(&mut self, input: Input) -> Vec<Effect> {
        let mut out = Vec::new();
        self.world.agents[1].node.handle(self.now, input, &mut out);
        out.retain(|effect| !matches!(effect, Effect::Event(_)));
        out
    }

    fn publish(&mut self, step: i64) -> Vec<Effect> {
        self.feed(Input::Publish { slot: Slot(0), step, world: "w".into() })
    }

    fn hear(&mut self, message: Message) -> Vec<Effect> {
        let header = self.world.header(0, 1);
        let peer_key = key_of(header.from_incarnation);
        self.feed(Input::Message { header, peer_key, message })
    }

    fn propose(&mut self, round: u64) -> Vec<Effect> {
        let version = Version { run: 0, step: 1, origin: Epoch(1), sum: Default::default() };
        self.hear(Message::Propose {
            round: RoundId(round),
            version,
            world: "w".into(),
            replicas: vec![0],
            sources: vec![MemberId(0), MemberId(1)],
            plan: Sha256([9; 32]),
            timeouts: TIMEOUTS,
        })
    }

    fn release(&mut self, round: u64) -> Vec<Effect> {
        self.hear(Message::Release { step: 1, world: "w".into(), up_to: key(round) })
    }

    fn joined(&mut self, round: u64) -> Vec<Effect> {
        self.feed(Input::SendersJoined { slot: Slot(0), round: key(round), replica: 0 })
    }
}

fn key(round: u64) -> RoundKey {
    RoundKey { epoch: Epoch(1), round: RoundId(round) }
}

fn prepared(effects: &[Effect]) -> bool {
    matches!(effects, [Effect::Send { message: Message::Prepared { .. }, .. }])
}

fn refused(effects: &[Effect]) -> Option<Code> {
    match effects {
        [Effect::Send { message: Message::Refused { code, .. }, .. }] => Some(*code),
        _ => None,
    }
}

fn released(effects: &[Effect]) -> Option<ReleaseOutcome> {
    effects.iter().find_map(|effect| match effect {
        Effect::Released { outcome, .. } => Some(*outcome),
        _ => None,
    })
}

#[test]
fn i8_a_release_counts_only_when_it_covers_every_round_that_held_the_publication() {
    let mut source = Source::offering();
    assert!(prepared(&source.propose(5)));
    source.hear(Message::Abort {
        round: RoundId(5),
        replicas: vec![0],
        blame: weightrefit_core::round::message::Blame { code: Code::Cancelled, member: None },
    });
    assert_eq!(released(&source.release(4)), None, "of an older round");
    assert_eq!(released(&source.release(5)), Some(ReleaseOutcome::Dropped), "no byte was allowed to move");
}

#[test]
fn i8_released_waits_for_the_senders() {
    let mut source = Source::offering();
    source.propose(1);
    assert!(matches!(source.hear(Message::Transfer { round: RoundId(1) })[..], [Effect::AllowSend { .. }]));
    assert_eq!(released(&source.release(1)), None, "a sender may still read");
    let gone = Input::ClientGone { slot: Slot(0), instance: source.world.agents[1].incarnation };
    assert_eq!(released(&source.feed(gone)), None);
    source.now += TIMEOUTS.transfer_ms + 10_000;
    assert!(matches!(source.feed(Input::Tick)[..], [Effect::JoinSenders { .. }]), "its own deadline");
    assert_eq!(released(&source.feed(Input::Tick)), None, "asked to stop is not over");
    assert_eq!(released(&source.joined(1)), Some(ReleaseOutcome::Read));
}

#[test]
fn i8_prepared_waits_for_the_senders_of_older_rounds() {
    let mut source = Source::offering();
    source.propose(1);
    source.hear(Message::Transfer { round: RoundId(1) });
    assert!(matches!(source.propose(2)[..], [Effect::JoinSenders { .. }]), "not Prepared");
    assert!(source.propose(2).is_empty(), "still not");
    assert!(source.hear(Message::Transfer { round: RoundId(2) }).is_empty(), "no byte before Prepared");
    assert!(prepared(&source.joined(1)));
}

#[test]
fn i8_a_round_that_was_left_is_never_served_again() {
    let mut source = Source::offering();
    source.propose(5);
    source.now += TIMEOUTS.prepare_ms + 10_000;
    source.feed(Input::Tick);
    assert_eq!(refused(&source.propose(5)), Some(Code::SourceGone), "left by its own deadline");
    assert_eq!(refused(&source.hear(Message::Transfer { round: RoundId(5) })), Some(Code::SourceGone));
    assert!(prepared(&source.propose(6)), "a newer round may have it");
}

#[test]
fn i8_a_publication_that_went_back_by_itself_is_never_offered_again() {
    let mut source = Source::offering();
    source.feed(Input::PeerLost { member: MemberId(0) });
    source.now += 100_000;
    assert_eq!(released(&source.feed(Input::Tick)), Some(ReleaseOutcome::Withdrawn));
    assert_eq!(refused(&source.propose(1)), Some(Code::SourceGone));
    assert_eq!(
        released(&source.publish(1)),
        Some(ReleaseOutcome::Withdrawn),
        "a client that missed it hears it again"
    );
}

#[test]
fn i8_a_trainer_that_goes_while_a_round_may_read_leaves_its_buffer_until_then() {
    let mut source = Source::offering();
    let instance = source.world.trainers[&(1, Slot(0))].instance;
    source.feed(Input::TrainerConnected { slot: Slot(0), instance });
    source.propose(1);
    assert_eq!(released(&source.feed(Input::ClientGone { slot: Slot(0), instance })), None);
    source.now += TIMEOUTS.prepare_ms + 10_000;
    assert_eq!(released(&source.feed(Input::Tick)), Some(ReleaseOutcome::Withdrawn));
}

#[test]
fn i8_a_second_publish_never_frees_the_first() {
    let mut source = Source::offering();
    source.propose(1);
    let again = source.publish(1);
    assert!(again.is_empty(), "the same publish, repeated: {again:?}");
    let second = source.publish(2);
    assert!(matches!(second[..], [Effect::RefusePublish { step: 2, code: Code::Busy, .. }]), "{second:?}");
    source.hear(Message::Transfer { round: RoundId(1) });
    let sent = source.feed(Input::Sent { slot: Slot(0), round: key(1), replica: 0, bytes: 100 });
    assert!(matches!(sent[..], [Effect::Send { message: Message::Sent { .. }, .. }]), "{sent:?}");
    assert_eq!(released(&source.release(1)), Some(ReleaseOutcome::Read));
}
