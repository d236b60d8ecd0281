//! Whether this pod should get requests, and whether the agent is alive (protocol page §11).
//!
//! Invariants:
//! - H1: an engine rank is ready only by its own record: once it serves a verified version, until it is cold,
//!   dirty or its session is gone. While it is paused or applied the last answer stands.
//! - H2: ranks that do not serve are always ready.
//! - H3: before the pod's ranks are known nothing turns that could be stuck, and a pod that will serve is not ready.

use crate::limits;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use weightrefit_core::membership::Seat;
use weightrefit_core::round::message::{EngineRecord, EngineState};

/// What the probes answer; written by the round driver.
#[derive(Debug)]
pub struct Health(Mutex<State>);

#[derive(Debug)]
struct State {
    turned: Instant,
    ranks: Ranks,
}

#[derive(Debug)]
enum Ranks {
    /// Not told yet; whether some of them will serve.
    Untold {
        serve: bool,
    },
    Told(Vec<(Seat, bool)>),
}

impl Health {
    /// Before any engine has spoken. One entry per slot.
    #[must_use]
    pub fn new(seats: &[Seat]) -> Self {
        let health = Self::untold(false);
        health.tell(seats);
        health
    }

    /// Before the ranks of this pod are known; `serve` says whether they will get requests.
    #[must_use]
    pub fn untold(serve: bool) -> Self {
        Self(Mutex::new(State { turned: Instant::now(), ranks: Ranks::Untold { serve } }))
    }

    /// These are the ranks, one per slot.
    pub fn tell(&self, seats: &[Seat]) {
        let ready = |seat: &Seat| matches!(seat, Seat::Training { .. });
        let seats = seats.iter().map(|seat| (seat.clone(), ready(seat))).collect();
        let mut state = self.lock();
        (state.turned, state.ranks) = (Instant::now(), Ranks::Told(seats));
    }

    /// The round driver goes round.
    pub fn turned(&self) {
        self.lock().turned = Instant::now();
    }

    /// The record of an engine changed; `None` without a client.
    pub fn record(&self, slot: usize, record: Option<&EngineRecord>) {
        let mut state = self.lock();
        let Ranks::Told(seats) = &mut state.ranks else { return };
        if let Some((Seat::Inference { .. }, ready)) = seats.get_mut(slot) {
            *ready = is_ready(*ready, record);
        }
    }

    pub(crate) fn is_live(&self) -> bool {
        let state = self.lock();
        matches!(state.ranks, Ranks::Untold { .. }) || state.turned.elapsed() < limits::DRIVER_SILENCE_MAX
    }

    pub(crate) fn not_ready(&self) -> Option<String> {
        match &self.lock().ranks {
            Ranks::Untold { serve: false } => None,
            Ranks::Untold { serve: true } => {
                Some("the coordinator has not told the ranks of this pod".to_owned())
            }
            Ranks::Told(seats) => {
                let (seat, _) = seats.iter().find(|(_, ready)| !ready)?;
                Some(format!("{seat} does not serve a verified version"))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_ready(last: bool, record: Option<&EngineRecord>) -> bool {
    let Some(record) = record else { return false };
    match record.state {
        EngineState::Cold | EngineState::Dirty => false,
        EngineState::Quiet | EngineState::Applied => last,
        EngineState::Serving => record.live.is_some(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightrefit_core::id::{Epoch, Incarnation, Rank};
    use weightrefit_core::round::message::{ContentSum, RoundKey, Version};

    #[test]
    fn readiness_follows_the_engines_own_record() {
        use EngineState::{Applied, Cold, Dirty, Quiet, Serving};
        let version = Version { run: 0, step: 1, origin: Epoch(1), sum: ContentSum::default() };
        let record = |state, live: bool| EngineRecord {
            instance: Incarnation(1),
            live: live.then_some(version),
            state,
            round: RoundKey::default(),
        };
        let rows = [
            (false, Some(record(Cold, false)), false),
            (false, Some(record(Quiet, false)), false),
            (false, Some(record(Applied, true)), false),
            (false, Some(record(Serving, true)), true),
            (false, Some(record(Serving, false)), false),
            (true, Some(record(Quiet, true)), true),
            (true, Some(record(Applied, true)), true),
            (true, Some(record(Dirty, true)), false),
            (true, Some(record(Cold, false)), false),
            (true, None, false),
        ];
        for (last, record, want) in rows {
            assert_eq!(is_ready(last, record.as_ref()), want, "{last} {record:?}");
        }
    }

    #[test]
    fn a_pod_is_ready_when_each_rank_that_serves_is() {
        let engine = |rank| Seat::Inference { pool: "p".into(), replica: "r".into(), rank: Rank(rank) };
        let health = Health::new(&[Seat::Training { rank: Rank(0) }, engine(0), engine(1)]);
        let version = Version { run: 0, step: 1, origin: Epoch(1), sum: ContentSum::default() };
        let serving = EngineRecord {
            instance: Incarnation(1),
            live: Some(version),
            state: EngineState::Serving,
            round: RoundKey::default(),
        };
        assert_eq!(health.not_ready().as_deref(), Some("inference/p/r/0 does not serve a verified version"));
        health.record(1, Some(&serving));
        assert_eq!(health.not_ready().as_deref(), Some("inference/p/r/1 does not serve a verified version"));
        health.record(2, Some(&serving));
        assert_eq!(health.not_ready(), None);
        health.record(1, None);
        assert!(health.not_ready().is_some());
        assert_eq!(Health::new(&[Seat::Training { rank: Rank(0) }]).not_ready(), None);
    }

    #[test]
    fn a_pod_whose_ranks_are_not_known_is_alive_and_ready_only_if_it_will_not_serve() {
        let seat = Seat::Inference { pool: "p".into(), replica: "r".into(), rank: Rank(0) };
        for (serve, want) in
            [(true, Some("the coordinator has not told the ranks of this pod")), (false, None)]
        {
            let health = Health::untold(serve);
            health.record(0, None);
            assert_eq!((health.not_ready().as_deref(), health.is_live()), (want, true));
            health.tell(std::slice::from_ref(&seat));
            assert_eq!(
                health.not_ready().as_deref(),
                Some("inference/p/r/0 does not serve a verified version")
            );
            health.tell(&[Seat::Training { rank: Rank(0) }]);
            assert_eq!(health.not_ready(), None);
        }
    }
}
