//! Members for tests of what is told of rounds.

use weightrefit_core::id::{Incarnation, Rank, Sha256};
use weightrefit_core::membership::{Member, Seat};

/// A seat in the pod of an agent, whose key is its number.
pub(super) fn member(seat: Seat, agent: u8) -> Member {
    Member {
        seat,
        pod_uid: format!("pod-{agent}"),
        incarnation: Incarnation(agent.into()),
        key: Sha256([agent; 32]),
        round_addresses: vec!["127.0.0.1:1".into()],
        byte_addresses: vec!["127.0.0.1:2".into()],
    }
}

/// A rank of a replica of pool `p`.
pub(super) fn engine(replica: &str, rank: u32) -> Seat {
    Seat::Inference { pool: "p".into(), replica: replica.into(), rank: Rank(rank) }
}
