//! Engines that have registered groups, and do not keep to them.

use crate::support::client::{Client, Trainer};
use crate::support::coordinator::Coordinator;
use crate::support::{Agent, tiny_refit};
use std::path::Path;
use weightrefit_core::code::Code;
use weightrefit_core::dtype::DType;
use weightrefit_core::id::{Incarnation, Rank};
use weightrefit_core::round::message::{EngineRecord, EngineState, RoundKey, Version};
use weightrefit_proto::socket::{AgentFrame, ClientFrame, Group, GroupClass, Role, Tensor};

/// What a rank answers to `commit`, after what it did.
type Answer = fn(RoundKey, EngineRecord) -> Vec<ClientFrame>;

fn record(state: EngineState, live: Option<Version>, round: RoundKey) -> EngineRecord {
    EngineRecord { instance: Incarnation(7), live, state, round }
}

fn committed(round: RoundKey, record: EngineRecord) -> ClientFrame {
    ClientFrame::Committed { round, record, caches_invalidated: vec![] }
}

fn applied(round: RoundKey, group: u32) -> ClientFrame {
    ClientFrame::Applied { round, group }
}

/// Rank of replica `a` with its one tensor in one group.
fn register(socket: &Path, rank: u32) -> Client {
    let record = record(EngineState::Cold, None, RoundKey::default());
    let role = Role::Engine { pool: "default".to_owned(), replica: "a".to_owned(), rank: Rank(rank), record };
    let mut client = Client::hello(socket, 7, role);
    let tensor =
        Tensor { name: "w".to_owned(), dtype: DType::F32, shape: vec![4, 4], at: None, pieces: None };
    let groups = vec![Group { name: "module".to_owned(), class: GroupClass::Apply, tensors: 1 }];
    let page = ClientFrame::Register {
        page: 0,
        pages: 1,
        memories: vec![],
        tensors: vec![tensor],
        staging_device: None,
        groups,
    };
    client.send(&page, &[]);
    client
}

/// Takes part up to the commit, and returns what the agent has to say of its answer, if it says something: `resume`
/// comes when both ranks have answered well.
fn take(mut client: Client, answer: Answer) -> Option<(Code, String)> {
    loop {
        match client.receive()?.0 {
            AgentFrame::Pause { round, .. } => {
                let record = record(EngineState::Cold, None, round);
                client.send(&ClientFrame::Paused { round, record }, &[]);
            }
            AgentFrame::Commit { round, version, .. } => {
                let record = record(EngineState::Applied, Some(version), round);
                answer(round, record).iter().for_each(|frame| client.send(frame, &[]));
            }
            AgentFrame::Resume { .. } => return None,
            AgentFrame::Error { code, message, .. } => return Some((code, message)),
            _ => {}
        }
    }
}

#[test]
fn an_engine_says_of_each_of_its_groups_once_and_in_order_that_it_is_applied() {
    let rows: [(Answer, Option<(Code, &str)>); 4] = [
        (|round, record| vec![applied(round, 0), committed(round, record)], None),
        (
            |round, _| vec![applied(round, 1)],
            Some((Code::Unsupported, "group 1 was applied where group 0 of 1 is due")),
        ),
        (
            |round, _| vec![applied(round, 0), applied(round, 0)],
            Some((Code::Unsupported, "group 0 was applied where group 1 of 1 is due")),
        ),
        (
            |round, record| vec![committed(round, record)],
            Some((Code::ApplyFailed, "the engine says that it has committed, and has not applied `module`")),
        ),
    ];
    for (answer, want) in rows {
        let coordinator = Coordinator::start(tiny_refit());
        let trainer_agent = Agent::start(&coordinator, "trainer", &["training/0"]);
        let claims = ["inference/default/a/0", "inference/default/a/1"];
        let mut engine_agent = Agent::start(&coordinator, "engine", &claims);
        let trainer = Trainer::start(&trainer_agent.socket, 0, &[8, 4]);
        let (first, second) = (register(&engine_agent.socket, 0), register(&engine_agent.socket, 1));
        coordinator.configure(1, &["trainer", "engine"]);
        let mut trainer = trainer.registered();
        trainer.publish(1, &[0.5; 32]);
        let other = std::thread::spawn(move || take(second, rows[0].0));
        let told = take(first, answer);
        assert_eq!(told.as_ref().map(|(code, message)| (*code, message.as_str())), want);
        let count = r#"weightrefit_agent_apply_seconds_count{class="Apply"}"#;
        if want.is_none() {
            assert!(engine_agent.metric(count) >= 1.0, "each is measured");
        }
        // The other rank is never told to serve where the first did not keep to its groups.
        engine_agent.signal(rustix::process::Signal::KILL);
        engine_agent.wait();
        other.join().expect("no panic");
    }
}
