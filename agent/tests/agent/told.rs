//! An agent that is not told its ranks at its start.

use crate::support::client::{Client, Engine};
use crate::support::coordinator::Coordinator;
use crate::support::{Agent, tiny_refit, wait_for};
use weightrefit_proto::socket::Role;
use weightrefit_proto::v1;

fn claim(rank: u32) -> v1::Claim {
    v1::Claim { side: "inference".into(), pool: "default".into(), replica: "a".into(), rank }
}

#[test]
fn clients_connect_before_the_ranks_are_known_and_take_part_afterwards() {
    let coordinator = Coordinator::start(tiny_refit());
    let mut engine_agent = Agent::start_on_side(&coordinator, "engine", "inference");
    let trainer_agent = Agent::start(&coordinator, "trainer", &["training/0"]);
    Client::hello(&engine_agent.socket, 1, Role::Driver {}).welcome();
    let engines = [0, 1].map(|rank| Engine::start(&engine_agent.socket, "a", rank, &[4, 4]));
    let untold = (503, "the coordinator has not told the ranks of this pod\n".to_owned());
    assert_eq!(engine_agent.get("/readyz"), untold);
    assert_eq!(engine_agent.get("/livez").0, 200);

    coordinator.heard.lock().expect("no panic").seats = vec![claim(0), claim(1)];
    coordinator.configure(1, &["trainer", "engine"]);
    wait_for("registered engines", || {
        let heard = coordinator.heard.lock().expect("no panic");
        let ranks = &heard.states.get("engine")?.ranks;
        (ranks.len() == 2 && ranks.iter().all(|rank| rank.registered)).then_some(())
    });
    let (status, why) = engine_agent.get("/readyz");
    assert_eq!((status, why.as_str()), (503, "inference/default/a/0 does not serve a verified version\n"));
    drop((engines, trainer_agent));
    engine_agent.signal(rustix::process::Signal::TERM);
    assert!(engine_agent.wait().success(), "a drained agent ends well");
}

#[test]
fn a_training_pod_is_ready_whatever_it_knows_and_stops_when_told() {
    let coordinator = Coordinator::start(tiny_refit());
    let mut agent = Agent::start_on_side(&coordinator, "trainer", "training");
    assert_eq!((agent.get("/readyz").0, agent.get("/livez").0), (200, 200));
    agent.signal(rustix::process::Signal::TERM);
    assert!(agent.wait().success(), "it has begun nothing");
}

#[test]
fn an_agent_whose_ranks_have_changed_ends_to_begin_anew() {
    let coordinator = Coordinator::start(tiny_refit());
    coordinator.heard.lock().expect("no panic").seats = vec![claim(0), claim(1)];
    let mut agent = Agent::start_on_side(&coordinator, "engine", "inference");
    coordinator.joined("engine");
    coordinator.refuse("engine");
    coordinator.joined("engine");
    assert!(agent.is_running(), "refused for another reason");
    coordinator.heard.lock().expect("no panic").seats = vec![claim(1)];
    coordinator.refuse("engine");
    assert!(agent.wait().success(), "the kubelet starts it again");
}
