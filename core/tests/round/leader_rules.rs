//! The leader at its desk (protocol page §3): what makes a version out of what the training ranks publish.

use crate::world::ledger::{content, sums};
use crate::world::{Chance, Happening, Shape, TIMEOUTS, World, key_of};
use std::sync::Arc;
use weightrefit_core::code::Code;
use weightrefit_core::id::{Epoch, Incarnation, MemberId};
use weightrefit_core::round::io::{Effect, Event, Input, Slot};
use weightrefit_core::round::message::{Header, Message};

struct AtOnce;
impl Chance for AtOnce {
    fn delay(&mut self, _: &Happening) -> Option<u64> {
        Some(0)
    }
}

/// What the leader says after its own rank and rank 1 have published these (step, world).
fn events(own: (i64, &str), other: (i64, &str)) -> Vec<Event> {
    let mut world = World::new(Shape::new(2, 1, 1));
    world.enact_all(1);
    (0..3).for_each(|agent| world.configure(&mut AtOnce, agent, Epoch(1)));
    world.pending.clear();
    let (step, name) = own;
    let published = sums(content("w", 1));
    let (membership, _) = &world.memberships[&Epoch(1)];
    let header = Header {
        refit_uid: "uid".into(),
        epoch: Epoch(1),
        membership: membership.digest(),
        from_incarnation: world.agents[1].incarnation,
        to_incarnation: world.agents[0].incarnation,
        from: MemberId(1),
        to: MemberId(0),
    };
    let peer_key = key_of(world.agents[1].incarnation);
    let message = Message::Published { step: other.0, world: other.1.into(), sums: Arc::clone(&published) };
    let slot = Slot(0);
    let mut out = Vec::new();
    let mut feed = |now, input| world.agents[0].node.handle(now, input, &mut out);
    feed(0, Input::TrainerConnected { slot, instance: Incarnation(7) });
    feed(0, Input::Publish { slot, step, world: name.into() });
    feed(0, Input::PublicationDigested { slot, step, epoch: Epoch(1), sums: published });
    feed(0, Input::Message { header, peer_key, message });
    feed(TIMEOUTS.publish_ms + 1, Input::Tick);
    let event = |effect| if let Effect::Event(event) = effect { Some(event) } else { None };
    out.into_iter().filter_map(event).collect()
}

#[test]
fn a_version_is_one_step_of_one_world() {
    let refused = |events: &[Event]| {
        let skew = |event: &Event| matches!(event, Event::PublishRefused { code: Code::PublishSkew, .. });
        events.iter().any(skew)
    };
    let same = events((1, "w"), (1, "w"));
    assert!(!refused(&same), "{same:?}");
    for other in [(1, "v"), (2, "w"), (2, "v")] {
        let mixed = events((1, "w"), other);
        assert!(refused(&mixed), "{other:?}: {mixed:?}");
    }
}
