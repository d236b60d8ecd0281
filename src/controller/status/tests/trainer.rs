//! When the trainer counts as done, and whose ranks count as known.

use super::*;

/// The pods of a side change.
fn each(world: &mut World, side: Side, change: fn(&mut PodFacts)) {
    let of_side = world.pods.iter_mut().filter(|pod| pod.side == side);
    of_side.for_each(|pod| change(Arc::make_mut(pod)));
}

#[test]
fn a_trainer_that_was_done_stays_done_and_one_that_was_never_a_member_is_not() {
    let is_done = |world: &World| is_trainer_done(&world.spec, &world.pods, None, &world.previous);
    let mut world = World::serving(1);
    assert!(!is_done(&world), "it runs");
    each(&mut world, Side::Training, |pod| pod.phase = PodPhase::Succeeded);
    assert!(is_done(&world), "all its pods have succeeded");
    world.next();
    world.pods.retain(|pod| pod.side == Side::Inference);
    assert!(is_done(&world), "they are deleted meanwhile");
    let mut new = World::new();
    each(&mut new, Side::Training, |pod| pod.phase = PodPhase::Succeeded);
    new.previous.membership = None;
    assert!(!is_done(&new), "pods of before the refit");
}

#[test]
fn ranks_of_a_pod_that_goes_away_are_not_known_though_its_agent_is_still_there() {
    let mut world = World::serving(1);
    each(&mut world, Side::Inference, |pod| pod.deleting = true);
    assert!(shown(&world.peek()).contains("MembersResolved=False/NotEnoughReady"));
}
