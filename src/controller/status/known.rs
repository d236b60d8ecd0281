//! What pods and agents tell of ranks and replicas, before anybody has agreed on anything.

use super::Observed;
use crate::api::refit::WeightRefitSpec;
use crate::api::status::{TrainingState, WeightRefitStatus};
use crate::controller::pod_facts::{PodFacts, PodPhase, Side};
use crate::controller::seats::SeatError;
use crate::controller::workload::{Told, Workload};
use crate::coordinator::AgentView;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use weightrefit_core::id::Rank;
use weightrefit_core::membership::Seat;

/// Ranks and replicas that are known.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// Training ranks with a pod.
    pub(super) training: BTreeSet<Rank>,
    /// Ranks with a pod, by pool and replica.
    pub(super) replicas: BTreeMap<String, BTreeMap<String, BTreeSet<Rank>>>,
    /// What is wrong with pods, in the order of their age.
    pub(super) errors: Vec<SeatError>,
    /// What is wrong with pods that cannot be read.
    pub(super) malformed: Vec<String>,
    /// Pods that claim the training side and have not been deleted.
    pub(super) training_pods: usize,
    /// Whether the trainer has ended well.
    pub(super) is_trainer_done: bool,
}

impl Known {
    /// From the pods that claim the refit, and for ranks that only agents tell, from those that are connected.
    pub(super) fn of(observed: &Observed<'_>) -> Self {
        let Observed { pods, seating, is_trainer_done, view, malformed, .. } = *observed;
        let training: Vec<_> =
            pods.iter().filter(|pod| pod.side == Side::Training && !pod.deleting).collect();
        let mut known = Self {
            errors: seating.errors.clone(),
            malformed: malformed.to_vec(),
            training_pods: training.len(),
            is_trainer_done,
            ..Self::default()
        };
        let has_pod = |agent: &&AgentView| pods.iter().any(|pod| pod.uid == agent.pod_uid && !pod.deleting);
        let agents = view.into_iter().flat_map(|view| view.agents.values()).filter(has_pod);
        let announced = agents.flat_map(|agent| &agent.seats);
        seating.holders.keys().chain(announced).for_each(|seat| known.take(seat));
        known
    }

    fn take(&mut self, seat: &Seat) {
        match seat {
            Seat::Training { rank } => drop(self.training.insert(*rank)),
            Seat::Inference { pool, replica, rank } => {
                let replicas = self.replicas.entry(pool.clone()).or_default();
                replicas.entry(replica.clone()).or_default().insert(*rank);
            }
        }
    }

    /// Whole replicas of a pool.
    pub(super) fn whole(&self, pool: &str, ranks_per_replica: i32) -> i32 {
        let ranks = ranks_per_replica.unsigned_abs() as usize;
        let whole = self.replicas.get(pool).into_iter().flatten().filter(|(_, known)| known.len() >= ranks);
        i32::try_from(whole.count()).unwrap_or(i32::MAX)
    }
}

/// Whether the trainer has ended well, so that memberships go without it: its workload says so, or as many of its pods
/// have as its world needs; and none is still to end. The objects of both may be deleted afterwards.
#[must_use]
pub fn is_trainer_done(
    spec: &WeightRefitSpec,
    pods: &[Arc<PodFacts>],
    workload: Option<&Workload>,
    previous: &WeightRefitStatus,
) -> bool {
    let training = || pods.iter().filter(|pod| pod.side == Side::Training && !pod.deleting);
    if previous.membership.is_none() || training().any(|pod| !pod.is_over()) {
        return false;
    }
    let was_done = previous.training.as_ref().is_some_and(|now| now.state == TrainingState::Completed);
    let per_pod = spec.training.ranks.ranks_per_pod.unwrap_or(1).max(1);
    let needed = usize::try_from(spec.training.world_size.div_euclid(per_pod)).unwrap_or(usize::MAX);
    let says_so = workload.is_some_and(|workload| workload.told == Told::Completed);
    was_done || says_so || training().filter(|pod| pod.phase == PodPhase::Succeeded).count() >= needed
}
