//! What drivers that follow are told as it happens.
//!
//! Invariants:
//! - E1: telling never waits, whoever does not read.
//! - E2: who begins to follow hears of the membership in effect first, and of each change after it once.

use crate::limits;
use crate::session::Events as Following;
use std::sync::Arc;
use tokio::sync::broadcast;
use weightrefit_core::id::{Epoch, Sha256};
use weightrefit_core::membership::Membership;
use weightrefit_proto::socket::{DriverEvent, ReplicaReach};

/// Events, and the state of whose changes they tell.
#[derive(Debug)]
pub(super) struct Events {
    told: broadcast::Sender<Arc<DriverEvent>>,
    /// In effect.
    membership: Option<Known>,
}

#[derive(Debug)]
struct Known {
    epoch: Epoch,
    leader: String,
    /// In the membership's order, each with the agents of its ranks and those ranks' seats.
    replicas: Vec<(ReplicaReach, Vec<(Sha256, String)>)>,
}

impl Default for Events {
    fn default() -> Self {
        Self { told: broadcast::Sender::new(limits::DRIVER_EVENTS_MAX), membership: None }
    }
}

impl Events {
    /// Tells whoever follows.
    pub(super) fn tell(&self, event: DriverEvent) {
        // Fails only where nobody follows.
        let _ = self.told.send(Arc::new(event));
    }

    /// How many wait for the slowest driver.
    pub(super) fn waiting(&self) -> usize {
        self.told.len()
    }

    /// For a driver that begins to follow: what it hears first, and where the rest comes from.
    pub(super) fn follow(&self) -> (Option<DriverEvent>, Following) {
        (self.membership.as_ref().map(Known::event), self.told.subscribe())
    }

    /// A membership is in effect; `reaches` says whether the agent with a key can be reached from here.
    pub(super) fn enter(&mut self, membership: &Membership, reaches: impl Fn(Sha256) -> bool) {
        let known = Known::new(membership, reaches);
        self.tell(known.event());
        self.membership = Some(known);
    }

    /// The reach of some agent has changed.
    pub(super) fn look(&mut self, reaches: impl Fn(Sha256) -> bool) {
        let Some(known) = &mut self.membership else { return };
        for (standing, agents) in &mut known.replicas {
            let away = agents.iter().find(|(key, _)| !reaches(*key));
            if standing.reached == away.is_none() {
                continue;
            }
            standing.reached = away.is_none();
            let (pool, replica) = (standing.pool.clone(), standing.replica.clone());
            let event = match away {
                Some((_, seat)) => DriverEvent::ReplicaLost { pool, replica, member: seat.clone() },
                None => DriverEvent::ReplicaFound { pool, replica },
            };
            let _ = self.told.send(Arc::new(event));
        }
    }
}

impl Known {
    fn new(membership: &Membership, reaches: impl Fn(Sha256) -> bool) -> Self {
        let seat = |id| membership.member(id).map(|member| member.seat.to_string()).unwrap_or_default();
        let replicas = membership.replicas().into_iter().map(|replica| {
            let ranks = replica.ranks.iter().filter_map(|id| membership.member(*id));
            let agents: Vec<_> = ranks.map(|member| (member.key, member.seat.to_string())).collect();
            let reached = agents.iter().all(|(key, _)| reaches(*key));
            let pool = membership.pools().get(replica.pool as usize).cloned().unwrap_or_default();
            (ReplicaReach { pool, replica: replica.name, reached }, agents)
        });
        Self { epoch: membership.epoch(), leader: seat(membership.leader()), replicas: replicas.collect() }
    }

    fn event(&self) -> DriverEvent {
        let replicas = self.replicas.iter().map(|(standing, _)| standing.clone()).collect();
        DriverEvent::MembershipChanged { epoch: self.epoch, leader: self.leader.clone(), replicas }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rounds::testing::{engine, member};
    use weightrefit_core::id::Rank;
    use weightrefit_core::membership::Seat;

    /// A trainer, and replicas `a` and `b` of two ranks.
    fn membership() -> Membership {
        let members = vec![
            member(Seat::Training { rank: Rank(0) }, 0),
            member(engine("a", 0), 1),
            member(engine("a", 1), 2),
            member(engine("b", 0), 3),
            member(engine("b", 1), 4),
        ];
        Membership::new("uid", Epoch(4), None, vec!["p".into()], members).expect("is valid")
    }

    /// All events that wait, as JSON.
    fn heard(following: &mut Following) -> Vec<String> {
        std::iter::from_fn(|| following.try_recv().ok())
            .map(|event| serde_json::to_string(&*event).expect("is JSON"))
            .collect()
    }

    #[test]
    fn who_follows_hears_of_each_change_of_a_replica_once() {
        let mut events = Events::default();
        let (first, mut following) = events.follow();
        assert_eq!(first, None);
        let reach = |agents: &'static [u8]| move |key: Sha256| agents.contains(&key.0[0]);
        events.enter(&membership(), reach(&[0, 1, 2]));
        let present = |a, b| {
            format!(
                r#"{{"kind":"membershipChanged","epoch":4,"leader":"training/0","replicas":[{{"pool":"p","replica":"a","reached":{a}}},{{"pool":"p","replica":"b","reached":{b}}}]}}"#
            )
        };
        assert_eq!(heard(&mut following), [present(true, false)]);
        let rows: [(&[u8], &[&str]); 5] = [
            (&[0, 1, 2, 3], &[]),
            (&[0, 1, 2, 3, 4], &[r#"{"kind":"replicaFound","pool":"p","replica":"b"}"#]),
            (
                &[0, 1, 3, 4],
                &[r#"{"kind":"replicaLost","pool":"p","replica":"a","member":"inference/p/a/1"}"#],
            ),
            (&[0, 3, 4], &[]),
            (&[0, 1, 2, 3, 4], &[r#"{"kind":"replicaFound","pool":"p","replica":"a"}"#]),
        ];
        for (agents, want) in rows {
            events.look(reach(agents));
            assert_eq!(heard(&mut following), want, "{agents:?}");
        }
        let (first, _) = events.follow();
        assert_eq!(
            first.map(|event| serde_json::to_string(&event).expect("is JSON")),
            Some(present(true, true))
        );
    }
}
