//! What a source sends to one replica by the replica's lane: it begins once all of its destinations are there.

use super::TransferError;
use super::offers::SendJob;
use super::tasks::Tasks;
use crate::transport::nccl::{Direction, FlowError, Job, LaneMember, Pair};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use weightrefit_core::round::message::RoundKey;

/// A stop is seen this soon.
const LOOK: Duration = Duration::from_millis(20);

/// The destinations of a job that have come.
#[derive(Debug, Default)]
pub(super) struct Flight {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// By index of the destination: the attempt of the lane, `None` by TCP.
    arrived: BTreeMap<usize, Option<u32>>,
    is_launched: bool,
    outcome: Option<Result<(), TransferError>>,
}

impl Flight {
    /// A destination has come. The last one launches, where any goes by the lane.
    pub(super) fn arrive(
        self: &Arc<Self>,
        job: &SendJob,
        tasks: &Arc<Tasks>,
        destination: usize,
        attempt: Option<u32>,
    ) {
        let Some(lane) = &job.lane else { return };
        let mut state = self.lock();
        state.arrived.insert(destination, attempt);
        let expected = job.destinations.iter().filter(|to| to.program.bytes() > 0).count();
        let by_lane: Vec<(usize, u32)> =
            state.arrived.iter().filter_map(|(at, attempt)| Some((*at, (*attempt)?))).collect();
        let Some(&(_, attempt)) = by_lane.last() else { return };
        if state.arrived.len() < expected || state.is_launched {
            return;
        }
        state.is_launched = true;
        drop(state);
        let pair = |(at, _): &(usize, u32)| {
            let to = &job.destinations[*at];
            Some(Pair { peer: lane.rank_of(to.member)?, program: Arc::clone(&to.program) })
        };
        let pairs: Option<Vec<Pair>> = by_lane.iter().map(pair).collect();
        let flight = Arc::clone(self);
        let done =
            move |result: Result<u64, FlowError>| flight.end(result.map(drop).map_err(TransferError::from));
        let Some(pairs) = pairs.filter(|_| by_lane.iter().all(|(_, other)| *other == attempt)) else {
            return done(Err(FlowError::Gone));
        };
        let flown = Job {
            direction: Direction::Send(RoundKey { epoch: job.peers.epoch, round: job.round }),
            memory: job.memory.clone(),
            pairs,
            // The destinations have a deadline, and their end is the lane's.
            deadline: Instant::now() + crate::limits::STREAM_SILENCE_MAX,
            moved: Arc::clone(&tasks.bytes),
        };
        let tasks = Arc::clone(tasks);
        lane.fly(attempt, flown, move || tasks.is_stopped(), done);
    }

    /// Waits for the end. Nothing reads the job's memory afterwards.
    pub(super) fn wait(&self, tasks: &Tasks) -> Result<(), TransferError> {
        let mut state = self.lock();
        loop {
            if let Some(outcome) = &state.outcome {
                return outcome.clone();
            }
            if !state.is_launched && tasks.is_stopped() {
                return Err(TransferError::Cancelled);
            }
            state = self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn end(&self, outcome: Result<(), TransferError>) {
        self.lock().outcome = Some(outcome);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl From<FlowError> for TransferError {
    fn from(error: FlowError) -> Self {
        match error {
            FlowError::Stopped => Self::Cancelled,
            error => Self::Lane { code: error.code(), detail: error.to_string() },
        }
    }
}

/// Moves what a destination gets by its replica's lane, and waits for the end.
pub(super) fn receive(
    lane: &LaneMember,
    attempt: u32,
    job: Job,
    tasks: &Arc<Tasks>,
) -> Result<u64, TransferError> {
    let (ended, end) = std::sync::mpsc::channel();
    let stopped = Arc::clone(tasks);
    lane.fly(
        attempt,
        job,
        move || stopped.is_stopped(),
        move |result| {
            // This function waits for it.
            let _ = ended.send(result);
        },
    );
    end.recv().unwrap_or(Err(FlowError::Gone)).map_err(TransferError::from)
}
