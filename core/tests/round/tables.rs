//! Tables of the protocol page, row by row: the engine client's states, and who may say what to whom.

use crate::world::{Shape, TIMEOUTS, World, key_of};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use weightrefit_core::code::Code;
use weightrefit_core::id::{ContentSum, Epoch, Incarnation, MemberId, RoundId, Sha256};
use weightrefit_core::round::engine::{EngineAction, EngineAnswer, EngineClient, EngineInput};
use weightrefit_core::round::io::{Effect, Event, Input};
use weightrefit_core::round::message::{
    Blame, EngineState, Header, Message, OutcomeKind, Report, RoundKey, Version,
};

fn version(step: i64) -> Version {
    Version { run: 0, step, origin: Epoch(1), sum: ContentSum([1; 16]) }
}

fn round(id: &str) -> RoundKey {
    RoundKey { epoch: Epoch(1), round: RoundId(id.trim_start_matches('@').parse().expect("a round")) }
}

/// Brings a new client to a state by the frames that lead there.
fn engine(state: &str, live: &str, at: &str) -> EngineClient {
    let mut client = EngineClient::new(Incarnation(1));
    let mut out = Vec::new();
    let mut feed = |input| client.handle(input, &mut out);
    let key = round(at);
    let version = version(live.parse().unwrap_or(9));
    match state {
        "cold" if at == "@0" => {}
        "cold" => feed(EngineInput::Pause { round: key }),
        "dirty" => {
            feed(EngineInput::Commit { round: key, version });
            feed(EngineInput::CopyFailed);
        }
        _ => {
            feed(EngineInput::Commit { round: key, version });
            feed(EngineInput::Copied);
            if state != "applied" {
                feed(EngineInput::Resume { round: key, version });
            }
            if state == "quiet" {
                feed(EngineInput::Pause { round: key });
                feed(EngineInput::Stopped);
            }
        }
    }
    client
}

#[test]
fn engine_client_follows_its_table() {
    for line in include_str!("../../testdata/round/engine_table.txt").lines() {
        let Some((left, want)) = line.split_once(" => ").filter(|_| !line.starts_with('#')) else { continue };
        let (state, inputs) = left.split_once(", ").expect(line);
        let words: Vec<_> = state.split(' ').collect();
        let mut client = engine(words[0], words[1], words[2]);
        let mut out = Vec::new();
        let mut inputs = inputs.split(' ');
        while let Some(verb) = inputs.next() {
            let mut pair = || {
                let (step, at) = inputs.next().and_then(|word| word.split_once('@')).expect(line);
                (version(step.parse().expect(line)), round(at))
            };
            let input = match verb {
                "commit" => pair_input(pair(), |version, round| EngineInput::Commit { round, version }),
                "resume" => pair_input(pair(), |version, round| EngineInput::Resume { round, version }),
                "pause" => EngineInput::Pause { round: round(inputs.next().expect(line)) },
                "abort" => EngineInput::Abort { round: client.record().round },
                "eof" => EngineInput::AgentGone,
                "stopped" => EngineInput::Stopped,
                "copied" => EngineInput::Copied,
                "failed" => EngineInput::CopyFailed,
                other => panic!("{other} in {line}"),
            };
            client.handle(input, &mut out);
            let gated = matches!(client.record().state, EngineState::Cold | EngineState::Dirty);
            assert!(!gated || !client.serves(), "I6: {line}");
        }
        let live = client.record().live.map_or("-".to_owned(), |live| live.step.to_string());
        let did: Vec<_> = out.iter().map(action).collect();
        let got = format!("{:?} {live}, {}", client.record().state, did.join(" ")).to_lowercase();
        assert_eq!(got.trim_end(), want.trim_end(), "{line}");
    }
}

fn pair_input(
    (version, round): (Version, RoundKey),
    make: impl Fn(Version, RoundKey) -> EngineInput,
) -> EngineInput {
    make(version, round)
}

fn action(action: &EngineAction) -> &'static str {
    match action {
        EngineAction::Stop => "stop",
        EngineAction::Copy(_) => "copy",
        EngineAction::Serve => "serve",
        EngineAction::Answer(answer) => match answer {
            EngineAnswer::Paused { .. } => "paused",
            EngineAnswer::Committed { .. } => "committed",
            EngineAnswer::Resumed { .. } => "resumed",
            EngineAnswer::Aborted { .. } => "aborted",
            EngineAnswer::Failed { .. } => "refused",
        },
    }
}

/// Members: 0 and 1 train, 2 and 3 are the replica, 2 its head; 0 leads. Each in an agent of its own.
fn configured() -> World {
    World::configured(Shape::new(2, 1, 2))
}

fn fingerprint(world: &World, agent: usize) -> u64 {
    let mut hasher = DefaultHasher::new();
    world.agents[agent].node.hash(&mut hasher);
    hasher.finish()
}

fn refusals(world: &mut World, to: usize, header: Header, peer_key: Sha256, message: Message) -> Vec<Code> {
    let before = fingerprint(world, to);
    let mut out = Vec::new();
    world.agents[to].node.handle(0, Input::Message { header, peer_key, message }, &mut out);
    let code = |effect: &Effect| match effect {
        Effect::Event(Event::Refused { code, .. }) => Some(*code),
        _ => None,
    };
    let codes: Vec<_> = out.iter().filter_map(code).collect();
    assert!(
        codes.is_empty() || (codes.len() == out.len() && fingerprint(world, to) == before),
        "I3: refused, yet {out:?}"
    );
    codes
}

/// One of each message, and who may say it to whom: `L` leader, `T` training rank, `H` head, `R` rank of a replica.
fn messages() -> Vec<(Message, &'static str)> {
    let (round, version, world, blame) =
        (RoundId(9), version(1), Arc::<str>::from("w"), Blame { code: Code::Cancelled, member: None });
    let (report, plan, sums) = (Report::default(), Sha256([9; 32]), Arc::new(Vec::new()));
    let records = Vec::new;
    let instance = Incarnation(1);
    vec![
        (
            Message::Propose {
                round,
                version,
                world: world.clone(),
                replicas: vec![0],
                sources: Vec::new(),
                plan,
                timeouts: TIMEOUTS,
            },
            "L>TR",
        ),
        (Message::Transfer { round }, "L>TR"),
        (Message::Abort { round, replicas: vec![0], blame }, "L>TR"),
        (Message::Authorise { round, version }, "L>H"),
        (Message::Release { step: 1, world: world.clone(), up_to: RoundKey::default() }, "L>T"),
        (Message::Prepared { round, plan, pairs: Vec::new(), report: report.clone() }, "TR>L"),
        (Message::Refused { round, code: Code::Busy, retryable: true, report: report.clone() }, "TR>L"),
        (Message::Landed { round, received: 0, skipped: 0, digest_ms: 0, sums: sums.clone() }, "R>L"),
        (Message::Sent { round, replica: 0, bytes: 0 }, "T>L"),
        (Message::TransferFailed { round, replica: 0, blame }, "TR>L"),
        (Message::Published { step: 1, world, sums }, "T>L"),
        (
            Message::Outcome {
                round,
                result: OutcomeKind::Committed,
                blame: None,
                pause_ms: 0,
                commit_ms: 0,
                records: records(),
            },
            "H>L",
        ),
        (Message::Settled { round, held: false, records: records() }, "H>L"),
        (Message::Pause { round, version }, "H>R"),
        (Message::Apply { round }, "H>R"),
        (Message::Resume { round, version }, "H>R"),
        (Message::GiveUp { round, blame }, "H>R"),
        (Message::Paused { round, instance }, "R>H"),
        (Message::Applied { round, version, instance }, "R>H"),
        (Message::Resumed { round }, "R>H"),
        (Message::Failed { round, code: Code::Busy, record: None }, "R>H"),
        (Message::Reported { report }, "TR>L R>H"),
        (Message::Query {}, "L>TR TR>L H>R"),
    ]
}

#[test]
fn i3_a_message_in_another_role_is_refused_and_changes_nothing() {
    let is = |role: char, member: usize| match role {
        'L' => member == 0,
        'T' => member < 2,
        'H' => member == 2,
        _ => member >= 2,
    };
    for (message, who) in messages() {
        for (from, to) in
            (0..4).flat_map(|from| (0..4).map(move |to| (from, to))).filter(|(from, to)| from != to)
        {
            let allowed = who.split(' ').any(|rule| {
                let (sender, receiver) = rule.split_once('>').expect("a rule");
                sender.chars().any(|role| is(role, from)) && receiver.chars().any(|role| is(role, to))
            });
            let mut world = configured();
            let (header, key) = (world.header(from, to), key_of(world.agents[from].incarnation));
            let refused = refusals(&mut world, to, header, key, message.clone());
            let want = if allowed { Vec::new() } else { vec![Code::Unauthenticated] };
            assert_eq!(refused, want, "{from} > {to}: {message:?}");
        }
    }
}

#[test]
fn i3_a_message_of_another_epoch_digest_incarnation_or_key_is_refused_and_changes_nothing() {
    let propose = messages().swap_remove(0).0;
    type Change = fn(&mut Header);
    let change: [(&str, Change); 7] = [
        ("refit", |header| header.refit_uid = "other".into()),
        ("older epoch", |header| header.epoch = Epoch(0)),
        ("newer epoch", |header| header.epoch = Epoch(2)),
        ("digest", |header| header.membership = Sha256([0; 32])),
        ("sender's incarnation", |header| header.from_incarnation = Incarnation(77)),
        ("receiver's incarnation", |header| header.to_incarnation = Incarnation(77)),
        ("receiver", |header| header.to = MemberId(1)),
    ];
    for (what, change) in change {
        let mut world = configured();
        let (mut header, key) = (world.header(0, 2), key_of(world.agents[0].incarnation));
        change(&mut header);
        let refused = refusals(&mut world, 2, header.clone(), key, propose.clone());
        assert_eq!(refused, [Code::StaleEpoch], "{what}");
        assert_eq!(world.agents[2].node.admit(&header, key), Err(Code::StaleEpoch), "bytes: {what}");
    }
    let mut world = configured();
    let (header, key) = (world.header(0, 2), key_of(world.agents[1].incarnation));
    assert_eq!(refusals(&mut world, 2, header.clone(), key, propose.clone()), [Code::Unauthenticated]);
    assert_eq!(world.agents[2].node.admit(&header, key), Err(Code::Unauthenticated));
    let key = key_of(world.agents[0].incarnation);
    assert_eq!(refusals(&mut world, 2, header, key, propose), []);
}
