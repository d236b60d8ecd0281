//! What a driver that follows is told, by real agents.

use crate::support::client::{Client, Engine, Trainer};
use crate::support::coordinator::Coordinator;
use crate::support::{Agent, tiny_refit};
use weightrefit_core::code::Code;
use weightrefit_core::id::{Epoch, RoundId};
use weightrefit_proto::report::VersionReport;
use weightrefit_proto::socket::{AgentFrame, ClientFrame, DriverEvent, ReplicaReach, Role};

const CLAIMS: [&str; 2] = ["inference/default/a/0", "inference/default/a/1"];

fn next(driver: &mut Client) -> DriverEvent {
    match driver.expect("event") {
        AgentFrame::Event { event } => event,
        other => panic!("{other:?}"),
    }
}

fn changed(epoch: u64) -> DriverEvent {
    let replica = ReplicaReach { pool: "default".into(), replica: "a".into(), reached: false };
    DriverEvent::MembershipChanged {
        epoch: Epoch(epoch),
        leader: "training/0".into(),
        replicas: vec![replica],
    }
}

fn found() -> DriverEvent {
    DriverEvent::ReplicaFound { pool: "default".into(), replica: "a".into() }
}

#[test]
fn a_driver_hears_of_memberships_rounds_and_replicas_as_they_come_and_go() {
    let coordinator = Coordinator::start(tiny_refit());
    let trainer_agent = Agent::start(&coordinator, "trainer", &["training/0"]);
    let engine_agent = Agent::start(&coordinator, "engine", &CLAIMS);
    let mut driver = Client::hello(&trainer_agent.socket, 1, Role::Driver {}).welcome();
    driver.send(&ClientFrame::Events { request: 1 }, &[]);
    let trainer = Trainer::start(&trainer_agent.socket, 0, &[8, 4]);
    let mut engines = [0, 1].map(|rank| Engine::start(&engine_agent.socket, "a", rank, &[4, 4]));
    coordinator.configure(1, &["trainer", "engine"]);
    let mut trainer = trainer.registered();
    assert_eq!([next(&mut driver), next(&mut driver)], [changed(1), found()]);

    trainer.publish(7, &[1.0; 32]);
    std::thread::scope(|scope| {
        for engine in &mut engines {
            scope.spawn(|| engine.refit());
        }
    });
    let version = VersionReport { run: 0, step: 7 };
    assert_eq!(next(&mut driver), DriverEvent::VersionAccepted { version });
    assert_eq!(next(&mut driver), DriverEvent::RoundOpened { epoch: Epoch(1), id: RoundId(1), version });
    let report = Box::new(coordinator.round(7));
    assert_eq!(next(&mut driver), DriverEvent::RoundEnded { report });

    drop((engines, engine_agent));
    let lost = DriverEvent::ReplicaLost {
        pool: "default".into(),
        replica: "a".into(),
        member: "inference/default/a/0".into(),
    };
    assert_eq!(next(&mut driver), lost);
    // So that the next membership waits for the new agent.
    coordinator.heard.lock().expect("no panic").joined.remove("engine");
    let _engine_agent = Agent::start(&coordinator, "engine", &CLAIMS);
    coordinator.configure(2, &["trainer", "engine"]);
    assert_eq!([next(&mut driver), next(&mut driver)], [changed(2), found()]);

    let mut late = Client::hello(&trainer_agent.socket, 2, Role::Driver {}).welcome();
    late.send(&ClientFrame::Events { request: 1 }, &[]);
    let DriverEvent::MembershipChanged { epoch, replicas, .. } = next(&mut late) else {
        panic!("the membership comes first")
    };
    assert!(epoch == Epoch(2) && replicas[0].reached);
}

#[test]
fn an_agent_that_does_not_lead_says_who_does() {
    let coordinator = Coordinator::start(tiny_refit());
    let _trainer_agent = Agent::start(&coordinator, "trainer", &["training/0"]);
    let engine_agent = Agent::start(&coordinator, "engine", &CLAIMS);
    let mut early = Client::hello(&engine_agent.socket, 1, Role::Driver {}).welcome();
    early.send(&ClientFrame::Events { request: 1 }, &[]);
    early.send(&ClientFrame::Status { request: 2 }, &[]);
    assert!(matches!(early.expect("status"), AgentFrame::Status { request: 2, .. }), "nobody knows yet");
    coordinator.configure(1, &["trainer", "engine"]);
    let DriverEvent::MembershipChanged { leader, .. } = next(&mut early) else { panic!("no membership") };
    assert_eq!(leader, "training/0");
    let mut late = Client::hello(&engine_agent.socket, 2, Role::Driver {}).welcome();
    late.send(&ClientFrame::Events { request: 3 }, &[]);
    let AgentFrame::Error { code, message, request, .. } = late.expect("refusal") else { panic!("no error") };
    assert_eq!((code, request), (Code::NotConfigured, Some(3)));
    assert_eq!(message, "rounds are led by the agent of training/0: ask that one");
}
