//! Drivers that wait for a step to end.
//!
//! Invariants:
//! - W1: a step has ended when a round committed it, or when its publication went back and no round on it is
//!   open: nothing will be tried again then.
//! - W2: every request is answered once: with the last round of the step, a refusal, or at its deadline.

use crate::limits;
use crate::session::ClientId;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};
use weightrefit_core::code::Code;
use weightrefit_proto::report::{RoundOutcome, RoundReport};

/// An answer to a request of a driver.
#[derive(Debug, PartialEq)]
pub(super) struct Answer {
    pub(super) client: ClientId,
    pub(super) request: u64,
    pub(super) result: Result<RoundReport, (Code, String)>,
}

#[derive(Debug)]
struct Waiter {
    client: ClientId,
    request: u64,
    step: i64,
    deadline: Instant,
}

#[derive(Debug, Default)]
struct Step {
    /// The last round on it.
    last: Option<RoundReport>,
    open: bool,
    returned: bool,
}

impl Step {
    fn ended(&self) -> Option<&RoundReport> {
        let last = self.last.as_ref()?;
        let done = last.outcome == RoundOutcome::Committed || (self.returned && !self.open);
        done.then_some(last)
    }
}

/// Requests, and what is known of recent steps.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    waiting: Vec<Waiter>,
    steps: BTreeMap<i64, Step>,
    order: VecDeque<i64>,
}

impl Waiters {
    /// A driver waits for a step; answered at once where it has ended already.
    pub(super) fn ask(
        &mut self,
        now: Instant,
        client: ClientId,
        (request, step, timeout_ms): (u64, i64, u64),
    ) -> Option<Answer> {
        let waiting = self.waiting.iter().filter(|waiter| waiter.client == client).count();
        if waiting >= limits::WAITERS_PER_DRIVER_MAX {
            let max = limits::WAITERS_PER_DRIVER_MAX;
            let message = format!("this driver waits for {waiting} steps already, {max} are allowed");
            return Some(Answer { client, request, result: Err((Code::Busy, message)) });
        }
        if let Some(report) = self.steps.get(&step).and_then(Step::ended) {
            return Some(Answer { client, request, result: Ok(report.clone()) });
        }
        let timeout = Duration::from_millis(timeout_ms).min(limits::WAIT_MAX);
        self.waiting.push(Waiter { client, request, step, deadline: now + timeout });
        None
    }

    /// Another trainer process publishes: it may count steps from anywhere.
    pub(super) fn restarted(&mut self) {
        self.steps.clear();
        self.order.clear();
    }

    /// A round on the step opened.
    pub(super) fn opened(&mut self, step: i64) {
        self.step(step).open = true;
    }

    /// A round on the step ended.
    pub(super) fn ended(&mut self, report: RoundReport) -> Vec<Answer> {
        let step = report.version.step;
        let known = self.step(step);
        known.open = false;
        known.last = Some(report);
        self.settle(step)
    }

    /// The publication of the step went back to the trainer.
    pub(super) fn returned(&mut self, step: i64) -> Vec<Answer> {
        self.step(step).returned = true;
        self.settle(step)
    }

    /// The step was not taken at all.
    pub(super) fn refused(&mut self, step: i64, code: Code) -> Vec<Answer> {
        self.take(|waiter| waiter.step == step, |_| Err((code, format!("step {step} was not taken"))))
    }

    /// Answers those whose time is over.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<Answer> {
        self.take(
            |waiter| waiter.deadline <= now,
            |waiter| Err((Code::CommitTimeout, format!("step {} has not ended in time", waiter.step))),
        )
    }

    /// The driver is gone.
    pub(super) fn forget(&mut self, client: ClientId) {
        self.waiting.retain(|waiter| waiter.client != client);
    }

    fn settle(&mut self, step: i64) -> Vec<Answer> {
        let Some(report) = self.steps.get(&step).and_then(Step::ended).cloned() else { return Vec::new() };
        self.take(|waiter| waiter.step == step, |_| Ok(report.clone()))
    }

    fn take(
        &mut self,
        which: impl Fn(&Waiter) -> bool,
        result: impl Fn(&Waiter) -> Result<RoundReport, (Code, String)>,
    ) -> Vec<Answer> {
        let (done, waiting) = std::mem::take(&mut self.waiting).into_iter().partition::<Vec<_>, _>(which);
        self.waiting = waiting;
        let answer = |waiter: Waiter| Answer {
            client: waiter.client,
            request: waiter.request,
            result: result(&waiter),
        };
        done.into_iter().map(answer).collect()
    }

    fn step(&mut self, step: i64) -> &mut Step {
        if !self.steps.contains_key(&step) {
            self.order.push_back(step);
            if self.order.len() > limits::STEPS_REMEMBERED
                && let Some(oldest) = self.order.pop_front()
            {
                self.steps.remove(&oldest);
            }
        }
        self.steps.entry(step).or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightrefit_proto::report::{PhaseMilliseconds, RoundBytes, VersionReport};

    fn report(step: i64, outcome: RoundOutcome) -> RoundReport {
        RoundReport {
            id: 1,
            epoch: 1,
            version: VersionReport { run: 0, step },
            outcome,
            reason: None,
            member: None,
            phase_milliseconds: PhaseMilliseconds::default(),
            bytes: RoundBytes::default(),
            replicas: vec![],
        }
    }

    fn ask(waiters: &mut Waiters, now: Instant, request: u64, step: i64) -> Option<Answer> {
        waiters.ask(now, ClientId(7), (request, step, 1000))
    }

    #[test]
    fn a_commit_ends_a_step_and_an_abort_does_only_once_nothing_more_can_come() {
        let now = Instant::now();
        let mut waiters = Waiters::default();
        assert_eq!(ask(&mut waiters, now, 1, 5), None);
        waiters.opened(5);
        assert_eq!(waiters.ended(report(5, RoundOutcome::Aborted)), vec![]);
        waiters.opened(5);
        assert_eq!(waiters.returned(5), vec![], "a round still reads staging");
        let committed = report(5, RoundOutcome::Committed);
        let want = |request| Answer { client: ClientId(7), request, result: Ok(committed.clone()) };
        assert_eq!(waiters.ended(committed.clone()), vec![want(1)]);
        assert_eq!(ask(&mut waiters, now, 2, 5), Some(want(2)), "it is remembered");
        assert_eq!(ask(&mut waiters, now, 3, 6), None);
        assert_eq!(waiters.ended(report(6, RoundOutcome::Aborted)), vec![]);
        assert_eq!(waiters.returned(6).len(), 1);
        assert_eq!(waiters.returned(6), vec![], "answered once");
    }

    #[test]
    fn refusals_and_deadlines_are_answers_too() {
        let now = Instant::now();
        let mut waiters = Waiters::default();
        for request in 0..limits::WAITERS_PER_DRIVER_MAX as u64 {
            assert_eq!(ask(&mut waiters, now, request, 1), None);
        }
        let one_more = ask(&mut waiters, now, 99, 1).expect("is refused");
        assert_eq!(one_more.result.expect_err("is refused").0, Code::Busy);
        assert_eq!(waiters.expire(now), vec![]);
        let late = waiters.expire(now + Duration::from_secs(1));
        assert_eq!(late.len(), limits::WAITERS_PER_DRIVER_MAX);
        assert_eq!(ask(&mut waiters, now, 1, 2), None);
        let refused = waiters.refused(2, Code::PublishSkew);
        assert_eq!(refused[0].result.as_ref().expect_err("is refused").0, Code::PublishSkew);
        assert_eq!(ask(&mut waiters, now, 1, 3), None);
        waiters.forget(ClientId(7));
        assert_eq!(waiters.returned(3), vec![]);
    }
}
