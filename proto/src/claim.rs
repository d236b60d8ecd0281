//! Seats as messages between agents and coordinator name them.

use crate::v1::Claim;
use weightrefit_core::id::Rank;
use weightrefit_core::membership::Seat;

impl From<&Seat> for Claim {
    fn from(seat: &Seat) -> Self {
        match seat {
            Seat::Training { rank } => Self { side: "training".to_owned(), rank: rank.0, ..Self::default() },
            Seat::Inference { pool, replica, rank } => Self {
                side: "inference".to_owned(),
                pool: pool.clone(),
                replica: replica.clone(),
                rank: rank.0,
            },
        }
    }
}

impl Claim {
    /// The seat; `None` where the side is neither `training` nor `inference`.
    #[must_use]
    pub fn seat(&self) -> Option<Seat> {
        let rank = Rank(self.rank);
        match self.side.as_str() {
            "training" => Some(Seat::Training { rank }),
            "inference" => {
                Some(Seat::Inference { pool: self.pool.clone(), replica: self.replica.clone(), rank })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seat_is_read_as_it_is_told() {
        let engine = Seat::Inference { pool: "p".into(), replica: "a/b".into(), rank: Rank(3) };
        for own in [Seat::Training { rank: Rank(7) }, engine] {
            assert_eq!(Claim::from(&own).seat(), Some(own));
        }
        assert_eq!(Claim { side: "sideways".into(), ..Claim::default() }.seat(), None);
    }
}
