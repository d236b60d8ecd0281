//! One replica of two ranks under every order of messages, tasks, crashes and deadlines that a budget allows. The
//! rules of `world::check` hold in every state. Loss is a message that is not delivered in a prefix; a deadline
//! may fire at any moment, which covers every clock, every slow peer and every process that was stopped.

use crate::world::{AtOnce, Happening, Shape, World};
use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use weightrefit_core::id::{Epoch, MemberId};
use weightrefit_core::round::io::Input;
use weightrefit_core::round::message::EngineState;

/// Longer than any phase: all deadlines that an agent has open fire at once.
const LEAP_MS: u64 = 1_000_000;

/// What may still go wrong.
#[derive(Clone, Copy, Hash, Default)]
struct Budget {
    agent_crashes: u8,
    engine_crashes: u8,
    deadlines: u8,
    lost_peers: u8,
    epochs: u8,
    publications: u8,
}

#[derive(Clone)]
struct State {
    world: World,
    budget: Budget,
}

impl State {
    /// Everything serves step 1, and step 2 is published.
    fn new(budget: Budget) -> Self {
        let mut world = World::new(Shape::new(1, 1, 2));
        world.enact_all(1);
        for agent in 0..world.agents.len() {
            world.configure(&mut AtOnce, agent, Epoch(1));
        }
        world.connect_all(&mut AtOnce);
        world.publish(&mut AtOnce, 1);
        let mut state = Self { world, budget };
        state.run();
        assert!(state.all_serve(1), "the start of an exploration serves");
        state.world.publish(&mut AtOnce, 2);
        state.settle();
        state
    }

    fn all_serve(&self, step: i64) -> bool {
        self.world.engines.values().all(|engine| {
            let record = engine.client.record();
            record.state == EngineState::Serving && record.live.is_some_and(|live| live.step == step)
        })
    }

    fn run(&mut self) {
        while let Some(at) = self.world.enabled().first().copied() {
            let what = self.world.take(at);
            self.world.happen(&mut AtOnce, what);
        }
    }

    /// What no order can change is done at once: frames between an agent and its clients, and answers of tasks
    /// that nothing else touches.
    fn settle(&mut self) {
        let dull = |what: &Happening| match what {
            Happening::ToEngine { .. } | Happening::ToAgent { .. } | Happening::Digest { .. } => true,
            Happening::Plane { input, .. } => {
                !matches!(input, Input::ReceiversJoined { .. } | Input::SendersJoined { .. })
            }
            _ => false,
        };
        while let Some(at) = self.world.enabled().into_iter().find(|at| dull(&self.world.pending[*at].what)) {
            let what = self.world.take(at);
            self.world.happen(&mut AtOnce, what);
        }
    }

    fn next(&self, out: &mut Vec<Self>) {
        for at in self.world.enabled() {
            let mut state = self.clone();
            let what = state.world.take(at);
            state.world.happen(&mut AtOnce, what);
            out.push(state);
        }
        let agents = self.world.agents.len();
        let mut fault = |left: u8, act: &dyn Fn(&mut Self)| {
            if left > 0 {
                let mut state = self.clone();
                act(&mut state);
                out.push(state);
            }
        };
        for agent in 0..agents {
            fault(self.budget.agent_crashes, &|state| {
                state.budget.agent_crashes -= 1;
                state.world.crash_agent(&mut AtOnce, agent);
            });
            fault(self.budget.deadlines, &|state| {
                state.budget.deadlines -= 1;
                state.world.agents[agent].skew += LEAP_MS;
                state.world.input(&mut AtOnce, agent, Input::Tick);
            });
            for member in (0..3).map(MemberId) {
                fault(self.budget.lost_peers, &|state| {
                    state.budget.lost_peers -= 1;
                    state.world.input(&mut AtOnce, agent, Input::PeerLost { member });
                });
            }
        }
        for place in self.world.engines.keys() {
            fault(self.budget.engine_crashes, &|state| {
                state.budget.engine_crashes -= 1;
                state.world.crash_engine(&mut AtOnce, *place);
            });
        }
        fault(self.budget.epochs, &|state| {
            state.budget.epochs -= 1;
            let epoch = state.world.memberships.len() as u64 + 1;
            state.world.enact_all(epoch);
            for agent in 0..agents {
                let incarnation = state.world.agents[agent].incarnation;
                let what = Happening::Configure { agent, incarnation, epoch: Epoch(epoch) };
                state.world.push(&mut AtOnce, None, what);
            }
        });
        fault(self.budget.publications, &|state| {
            state.budget.publications -= 1;
            let step = state.world.trainers.values().map(|trainer| trainer.step).max().unwrap_or(0) + 1;
            state.world.publish(&mut AtOnce, step);
        });
        out.iter_mut().for_each(Self::settle);
    }

    fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.world, self.budget).hash(&mut hasher);
        hasher.finish()
    }
}

/// Depth first, at most `most` states; the number seen, and whether that was all.
fn explore(budget: Budget, most: usize, end: impl Fn(&State)) -> (usize, bool) {
    let mut seen = BTreeSet::new();
    let first = State::new(budget);
    seen.insert(first.fingerprint());
    let mut stack = vec![first];
    let mut out = Vec::new();
    while let Some(state) = stack.pop() {
        state.next(&mut out);
        if out.is_empty() {
            end(&state);
        }
        stack.extend(out.drain(..).filter(|next| seen.insert(next.fingerprint())));
        if seen.len() >= most {
            return (seen.len(), false);
        }
    }
    (seen.len(), true)
}

#[test]
fn without_faults_every_order_ends_serving_the_newest_version() {
    let (states, all) = explore(Budget::default(), 200_000, |state| {
        assert!(
            state.all_serve(2),
            "ends with {:?}",
            state.world.engines.values().map(|e| e.client.record()).collect::<Vec<_>>()
        );
    });
    assert!(all, "{states} states and more");
}

fn safe(budget: Budget, most: usize) {
    let (states, _) = explore(budget, most, |_| {});
    assert!(states > 100, "only {states} states");
}

#[test]
fn an_agent_crash_and_a_new_epoch_at_any_moment_break_no_rule() {
    safe(Budget { agent_crashes: 1, epochs: 1, ..Budget::default() }, 60_000);
}

#[test]
fn an_engine_crash_and_a_deadline_at_any_moment_break_no_rule() {
    safe(Budget { engine_crashes: 1, deadlines: 1, ..Budget::default() }, 60_000);
}

#[test]
fn deadlines_of_any_agent_at_any_moment_break_no_rule() {
    safe(Budget { deadlines: 2, publications: 1, ..Budget::default() }, 60_000);
}

#[test]
fn a_lost_peer_and_an_engine_crash_in_two_epochs_break_no_rule() {
    safe(Budget { lost_peers: 1, engine_crashes: 1, epochs: 1, ..Budget::default() }, 60_000);
}
