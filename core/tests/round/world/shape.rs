//! How large a made-up world is, and the memberships and plan facts that follow.

use super::ledger::SumLedger;
use super::{PAIR_BYTES, TIMEOUTS, World, key_of};
use std::collections::BTreeMap;
use std::sync::Arc;
use weightrefit_core::id::{Epoch, Rank, Sha256};
use weightrefit_core::membership::roster::{Basis, Joining, PoolSpec, Roster, Spec};
use weightrefit_core::membership::{Member, Membership, Seat};
use weightrefit_core::round::topology::{OnReplicaFailure, PairFacts, Policies, Topology};

#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) trainers: u32,
    pub(crate) replicas: u32,
    pub(crate) ranks: u32,
    /// All ranks of a replica in one agent, and all training ranks in one.
    pub(crate) together: bool,
    pub(crate) policy: OnReplicaFailure,
    pub(crate) min_replicas: u32,
}

impl Shape {
    pub(crate) fn new(trainers: u32, replicas: u32, ranks: u32) -> Self {
        let policy = OnReplicaFailure::FenceReplica;
        Self { trainers, replicas, ranks, together: false, policy, min_replicas: 1 }
    }

    pub(super) fn seats(&self) -> Vec<Vec<Seat>> {
        let training = (0..self.trainers).map(|rank| Seat::Training { rank: Rank(rank) });
        let replica = |replica: u32| {
            (0..self.ranks).map(move |rank| {
                let (pool, replica) = ("default".to_owned(), format!("r{replica}"));
                Seat::Inference { pool, replica, rank: Rank(rank) }
            })
        };
        if self.together {
            let mut out = Vec::from_iter((self.trainers > 0).then(|| training.collect()));
            out.extend((0..self.replicas).map(|r| replica(r).collect()));
            out
        } else {
            training.chain((0..self.replicas).flat_map(replica)).map(|seat| vec![seat]).collect()
        }
    }
}

impl World {
    pub(crate) fn roster_spec(&self, generation: u64) -> Spec {
        let pool = PoolSpec {
            name: "default".into(),
            ranks_per_replica: self.shape.ranks,
            min_replicas: self.shape.min_replicas,
        };
        Spec {
            basis: Basis { generation, resolved: Sha256([0; 32]) },
            training_ranks: self.shape.trainers,
            pools: vec![pool],
        }
    }

    pub(crate) fn roster(&self) -> Roster {
        Roster::new("uid", self.roster_spec(0), None)
    }

    pub(crate) fn joining(&self, at: usize) -> Joining {
        let agent = &self.agents[at];
        Joining {
            incarnation: agent.incarnation,
            pod_uid: format!("pod-{at}"),
            pod: format!("pod-{at}"),
            created_s: 0,
            key: key_of(agent.incarnation),
            seats: agent.seats.clone(),
            round_addresses: vec![format!("10.0.0.{at}:1")],
            byte_addresses: vec![format!("10.0.0.{at}:2")],
            epoch_seen: agent.node.membership().map_or(Epoch(0), |m| m.epoch()),
            version_seen: None,
        }
    }

    /// The operator has written this membership down.
    pub(crate) fn enact(&mut self, membership: Arc<Membership>) {
        let (mut pairs, mut layouts) = (BTreeMap::new(), Vec::new());
        for (id, member) in membership.iter() {
            layouts.push(Sha256([u8::from(matches!(member.seat, Seat::Training { .. })); 32]));
            if matches!(member.seat, Seat::Inference { .. }) {
                for source in membership.training() {
                    pairs.insert((source, id), PairFacts { bytes: PAIR_BYTES, digest: Sha256([3; 32]) });
                }
            }
        }
        let policies = Policies {
            timeouts: TIMEOUTS,
            on_replica_failure: self.shape.policy,
            min_replicas: vec![self.shape.min_replicas],
        };
        let ledger = Arc::new(SumLedger);
        let topology = Topology::new(&membership, Sha256([9; 32]), layouts, pairs, policies, ledger);
        let topology = Arc::new(topology.expect("facts of the membership"));
        self.memberships.insert(membership.epoch(), (membership, topology));
    }

    /// A membership of all agents as they are now.
    pub(crate) fn enact_all(&mut self, epoch: u64) {
        let members = (0..self.agents.len()).flat_map(|at| {
            let Joining { incarnation, pod_uid, key, seats, round_addresses, byte_addresses, .. } =
                self.joining(at);
            seats.into_iter().map(move |seat| Member {
                seat,
                pod_uid: pod_uid.clone(),
                incarnation,
                key,
                round_addresses: round_addresses.clone(),
                byte_addresses: byte_addresses.clone(),
            })
        });
        let membership =
            Membership::new("uid", Epoch(epoch), self.heard, vec!["default".into()], members.collect());
        self.enact(Arc::new(membership.expect("a whole membership")));
    }
}
