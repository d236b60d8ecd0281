//! Which processes a run has: a pure function of the resolved refit.

use crate::api::resolve::ResolvedRefit;
use std::fmt;
use weightrefit_core::id::{Rank, Sha256};
use weightrefit_core::membership::Seat;
use weightrefit_core::membership::roster::{Basis, PoolSpec, Spec};

/// An agent and the ranks of its pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AgentSpec {
    /// UID of the pod; unique in the run.
    pub(crate) pod_uid: String,
    /// Ranks that it hosts.
    pub(crate) seats: Vec<Seat>,
}

/// All processes of a run beside the coordinator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct World {
    /// One per pod.
    pub(crate) agents: Vec<AgentSpec>,
    /// Sizes, with every replica of the run as a member from the first epoch on.
    pub(crate) spec: Spec,
}

/// One process, by what it does.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    /// Index in [`World::agents`].
    Agent(usize),
    /// Owner of a training rank.
    Trainer(Seat),
    /// Owner of an inference rank.
    Engine(Seat),
}

impl World {
    pub(crate) fn new(refit: &ResolvedRefit) -> Self {
        let mut agents = Vec::new();
        for pod in &refit.training.pods {
            let seats = pod.ranks.iter().map(|hosted| Seat::Training { rank: hosted.rank }).collect();
            agents.push(AgentSpec { pod_uid: format!("training.{}", pod.name), seats });
        }
        let mut pools = Vec::new();
        for pool in &refit.pools {
            for pod in &pool.side.pods {
                let seat = |(replica, rank): (&String, Rank)| {
                    let (pool, replica) = (pool.name.clone(), replica.clone());
                    Seat::Inference { pool, replica, rank }
                };
                let hosted =
                    pod.ranks.iter().filter_map(|hosted| Some((hosted.replica.as_ref()?, hosted.rank)));
                agents.push(AgentSpec {
                    pod_uid: format!("inference.{}.{}", pool.name, pod.name),
                    seats: hosted.map(seat).collect(),
                });
            }
            pools.push(PoolSpec {
                name: pool.name.clone(),
                ranks_per_replica: pool.side.layout.world(),
                min_replicas: pool.replicas,
            });
        }
        // Nothing changes while it runs.
        let basis = Basis { generation: 1, resolved: Sha256([0; 32]) };
        let spec = Spec { basis, training_ranks: refit.training.layout.world(), pools };
        Self { agents, spec }
    }

    /// The agent that hosts a rank.
    pub(super) fn agent_of(&self, seat: &Seat) -> Option<usize> {
        self.agents.iter().position(|agent| agent.seats.contains(seat))
    }

    /// The agent that leads while it is there.
    pub(super) fn leader(&self) -> usize {
        self.agent_of(&Seat::Training { rank: Rank(0) }).unwrap_or(0)
    }

    /// All ranks, in the agents' order.
    pub(super) fn seats(&self) -> impl Iterator<Item = &Seat> {
        self.agents.iter().flat_map(|agent| &agent.seats)
    }

    /// Pool and name of each replica, in the agents' order.
    pub(super) fn replicas(&self) -> impl Iterator<Item = (String, String)> {
        self.seats().filter_map(|seat| match seat {
            Seat::Inference { pool, replica, rank: Rank(0) } => Some((pool.clone(), replica.clone())),
            Seat::Inference { .. } | Seat::Training { .. } => None,
        })
    }

    /// Every process, agents first.
    pub(super) fn keys(&self) -> Vec<Key> {
        let agents = (0..self.agents.len()).map(Key::Agent);
        agents.chain(self.seats().cloned().map(Key::of_rank)).collect()
    }
}

impl Key {
    /// The rank of a client process.
    pub(super) const fn seat(&self) -> Option<&Seat> {
        match self {
            Self::Agent(_) => None,
            Self::Trainer(seat) | Self::Engine(seat) => Some(seat),
        }
    }

    /// The client process of a rank.
    pub(super) fn of_rank(seat: Seat) -> Self {
        match seat {
            Seat::Training { .. } => Self::Trainer(seat),
            Seat::Inference { .. } => Self::Engine(seat),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Agent(index) => write!(f, "agent {index}"),
            Self::Trainer(seat) => write!(f, "trainer of {seat}"),
            Self::Engine(seat) => write!(f, "engine of {seat}"),
        }
    }
}
