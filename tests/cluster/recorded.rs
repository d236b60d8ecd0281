//! A pool whose layout the refit does not say: its engines register what lies where.

use crate::operator::{is_true, made_ready};
use crate::world::{Side, World};

#[test]
fn a_pool_without_a_layout_gets_what_its_engines_register_from_any_operator() {
    let mut world = World::consenting("recorded");
    world.record_layouts();
    let mut world = made_ready(world);
    world.wait("each rank of both replicas is right", |world| world.checks(0) == 4);

    // Who comes later has the layout that there is; the second operator has heard it from those who were there.
    for (step, engine) in [(1, 1), (2, 0)] {
        let name = format!("engine-{engine}");
        world.delete_pod(&name);
        world.create_pod(Side::Inference, engine);
        world.run_pods();
        world.wait("it is registered", |world| world.is_registered(&name));
        world.wait_for_status("it is a member", |status| {
            status["membership"]["epoch"] == step + 1 && is_true(status, "CommunicatorsReady")
        });
        world.refit(step);
        world.wait("each rank of both replicas is right", |world| world.checks(step) == 4);
        world.kill_operator();
        world.start_operator();
    }
}
