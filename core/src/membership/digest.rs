//! The bytes under the membership digest, as the documentation of `Membership::digest` states them.

use super::{Member, Seat};
use crate::id::{MemberId, Rank, Sha256};
use sha2::Digest;

pub(super) fn membership_digest(refit_uid: &str, leader: MemberId, members: &[Member]) -> Sha256 {
    let mut bytes = Bytes(sha2::Sha256::new());
    bytes.text("weightrefit.membership/v1");
    bytes.text(refit_uid);
    bytes.number(leader.0);
    bytes.count(members.len());
    for member in members {
        let (side, pool, replica, Rank(rank)) = match &member.seat {
            Seat::Training { rank } => (0, "", "", *rank),
            Seat::Inference { pool, replica, rank } => (1, pool.as_str(), replica.as_str(), *rank),
        };
        bytes.0.update([side]);
        bytes.text(pool);
        bytes.text(replica);
        bytes.number(rank);
        bytes.text(&member.pod_uid);
        bytes.0.update(member.incarnation.0.to_le_bytes());
        bytes.0.update(member.key.0);
        for addresses in [&member.round_addresses, &member.byte_addresses] {
            bytes.count(addresses.len());
            addresses.iter().for_each(|address| bytes.text(address));
        }
    }
    Sha256(bytes.0.finalize().into())
}

struct Bytes(sha2::Sha256);

impl Bytes {
    fn number(&mut self, number: u32) {
        self.0.update(number.to_le_bytes());
    }

    fn count(&mut self, count: usize) {
        self.number(u32::try_from(count).expect("members, addresses and names are bounded by limits.rs"));
    }

    fn text(&mut self, text: &str) {
        self.count(text.len());
        self.0.update(text);
    }
}
