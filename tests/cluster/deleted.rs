//! A refit that is deleted: its agents let go of all that they hold, and nobody else notices.

use crate::world::{Side, World, condition};
use rustix::process::Signal;
use serde_json::{Value, json};

/// All agents of the world.
const AGENTS: usize = 5;

/// Makes the refit (anew) and waits until its members are connected.
fn form(world: &mut World) {
    world.apply();
    world.wait_for_status("all are connected", |status| condition(status, "CommunicatorsReady").0 == "True");
}

fn delete(world: &World) {
    world.bed.kubectl(&["delete", "weightrefit", "tiny", "-n", &world.namespace]);
}

/// Another refit of the operator follows a change.
fn bystander_goes_on(world: &mut World, seconds: u32) {
    let patch = json!({"spec": {"timeouts": {"totalSeconds": seconds}}}).to_string();
    let name = ["weightrefit", "bystander", "-n", &world.namespace.clone()];
    world.bed.kubectl(&[&["patch"], &name[..], &["--type=merge", "-p", &patch]].concat());
    world.wait("the bystander goes on", |world| {
        let found = world.bed.kubectl(&[&["get"], &name[..], &["-o", "json"]].concat());
        let found: Value = serde_json::from_str(&found).expect("JSON");
        found["status"]["observedGeneration"] == found["metadata"]["generation"]
    });
}

#[test]
fn agents_of_a_deleted_refit_let_go_whether_or_not_an_operator_saw_it_go() {
    let mut world = World::consenting("deleted");
    world.start_operator();
    world.bed.send("apply", world.documents().replace("tiny", "bystander"));
    world.apply();
    world.start_pods();
    form(&mut world);
    world.refit(0);

    // In a round, which cannot end while the engines' agents stand still.
    world.signal_agents(Side::Inference, Signal::STOP);
    let before = world.logged("publication accepted");
    world.publish(1);
    world.wait("the round has begun", |world| world.logged("publication accepted") > before);
    delete(&world);
    world.wait("the trainer has its memory back", |world| world.has_memory_back(1));
    world.signal_agents(Side::Inference, Signal::CONT);
    world.wait("all agents leave", |world| world.logged("draining") == AGENTS);
    bystander_goes_on(&mut world, 50);
    form(&mut world);
    world.restart_trainer();
    world.refit(2);

    // While no operator runs.
    assert_eq!(world.stop_operator(), Some(0));
    delete(&world);
    world.refit(3);
    world.start_operator();
    world.wait("all agents leave", |world| world.logged("draining") == 2 * AGENTS);
    bystander_goes_on(&mut world, 60);
    form(&mut world);
    world.restart_trainer();
    world.refit(4);
    world.wait("each rank of both replicas is right", |world| world.checks(4) == 4);
    assert_eq!(world.stop_operator(), Some(0));
}
