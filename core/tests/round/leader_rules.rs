//! The leader at its desk (protocol page §3): what makes a version out of what the training ranks publish.

use crate::world::ledger::{content, sums};
use crate::world::{Shape, TIMEOUTS, World, key_of};
use std::sync::Arc;
use weightrefit_core::code::Code;
use weightrefit_core::id::{Epoch, Incarnation};
use weightrefit_core::round::io::{Effect, Event, Input, Slot};
use weightrefit_core::round::message::Message;

/// What the leader says after its own rank and rank 1 have published these (step, world).
fn events(own: (i64, &str), other: (i64, &str)) -> Vec<Event> {
    let mut world = World::configured(Shape::new(2, 1, 1));
    let (step, name) = own;
    let published = sums(content("w", 1));
    let header = world.header(1, 0);
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
