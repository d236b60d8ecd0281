//! The leader's side of L2: one lane of the refit forms at a time, the lowest of those that wait. A turn is held by a
//! connection: whoever dies with it gives it back.

use super::connection::{Connection, Outbox};
use crate::transport::tcp::Link;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// What the leader says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Turn {
    /// It is this lane's.
    Yours,
}

/// Who waits and who has the turn.
#[derive(Debug, Default)]
pub(super) struct Turnstile(Mutex<Queue>);

#[derive(Debug, Default)]
struct Queue {
    next: u64,
    /// By lane and arrival.
    waiting: BTreeMap<(u32, u64), Arc<Outbox<Turn>>>,
    holder: Option<(u32, u64)>,
}

impl Queue {
    fn grant(&mut self) {
        if self.holder.is_some() {
            return;
        }
        if let Some((place, outbox)) = self.waiting.pop_first() {
            self.holder = Some(place);
            outbox.say(Turn::Yours);
        }
    }
}

impl Turnstile {
    /// Serves a lane until its connection ends.
    pub(super) fn serve(&self, link: Link, lane: u32) -> std::io::Result<()> {
        let outbox = Outbox::new()?;
        let mut connection = Connection::new(link, Arc::clone(&outbox))?;
        let place = {
            let mut queue = self.lock();
            let place = (lane, queue.next);
            queue.next += 1;
            queue.waiting.insert(place, outbox);
            queue.grant();
            place
        };
        let ended = loop {
            if let Err(error) = connection.turn::<Turn>() {
                break error;
            }
        };
        let mut queue = self.lock();
        queue.waiting.remove(&place);
        if queue.holder == Some(place) {
            queue.holder = None;
        }
        queue.grant();
        Err(ended)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_lane_that_waits_has_the_next_turn() {
        let mut queue = Queue::default();
        let outbox = || Outbox::new().expect("a descriptor");
        queue.waiting.insert((5, 0), outbox());
        queue.grant();
        assert_eq!(queue.holder, Some((5, 0)));
        queue.waiting.insert((3, 1), outbox());
        queue.waiting.insert((1, 2), outbox());
        queue.grant();
        assert_eq!(queue.holder, Some((5, 0)), "one at a time");
        queue.holder = None;
        queue.grant();
        assert_eq!(queue.holder, Some((1, 2)));
    }
}
