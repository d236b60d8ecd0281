//! What the engines of pools without a layout have recorded, and the layouts that follow from it.
//!
//! Invariants:
//! - G1: a layout is made of one replica whose ranks have all recorded; the others of its pool are compared with it where
//!   they register.
//! - G2: all agents of an epoch are told the same bytes.

use super::wire::fault;
use crate::limits;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use weightrefit_core::code::Code;
use weightrefit_core::id::Epoch;
use weightrefit_core::layout::recording::RecordedTensor;
use weightrefit_core::membership::{Membership, Seat};
use weightrefit_proto::refit::Refit;
use weightrefit_proto::v1;

/// One rank's tensors, page by page.
#[derive(Debug, Default)]
struct Recording {
    tensors: Vec<RecordedTensor>,
    pages: u32,
    next: u32,
    bytes: usize,
}

/// All of a refit.
#[derive(Debug, Default)]
pub(super) struct Recordings {
    ranks: BTreeMap<Seat, Recording>,
    /// What agents of this epoch were told (G2).
    told: Option<(Epoch, Vec<u8>)>,
}

impl Recordings {
    /// Takes a page of what a rank has recorded; whether that was the last.
    ///
    /// # Errors
    /// What the agent is told before its stream ends.
    pub(super) fn hear(&mut self, seat: Seat, page: v1::Recorded) -> Result<bool, v1::Fault> {
        let refuse = |text: String| Err(fault(Code::Unsupported, text));
        let recording = self.ranks.entry(seat.clone()).or_default();
        if page.page == 0 {
            *recording = Recording { pages: page.pages, ..Recording::default() };
        }
        if (page.page, page.pages) != (recording.next, recording.pages) || page.page >= page.pages {
            return refuse(format!(
                "page {} of {} of what {seat} has recorded is not due",
                page.page, page.pages
            ));
        }
        recording.bytes += page.tensors.len();
        if recording.bytes > limits::RECORDING_BYTES_MAX {
            return refuse(format!("{seat} has recorded more than {} bytes", limits::RECORDING_BYTES_MAX));
        }
        match serde_json::from_slice::<Vec<RecordedTensor>>(&page.tensors) {
            Ok(tensors) => recording.tensors.extend(tensors),
            Err(error) => return refuse(format!("what {seat} has recorded cannot be read: {error}")),
        }
        recording.next += 1;
        Ok(recording.next == recording.pages)
    }

    /// The rank's agent is gone, and nobody knows what its engine is when it comes back.
    pub(super) fn forget(&mut self, seat: &Seat) {
        self.ranks.remove(seat);
    }

    /// What agents of this membership are told: `resolved` with a layout for every pool; `None` while engines are
    /// missing.
    pub(super) fn resolve(&mut self, resolved: &[u8], membership: &Membership) -> Option<Vec<u8>> {
        let epoch = membership.epoch();
        if let Some((told, bytes)) = &self.told
            && *told == epoch
        {
            return Some(bytes.clone());
        }
        let bytes = self.fill(resolved, membership)?;
        self.told = Some((epoch, bytes.clone()));
        Some(bytes)
    }

    /// Whether agents of this epoch have been told what to do.
    pub(super) fn have_told(&self, epoch: Epoch) -> bool {
        self.told.as_ref().is_some_and(|(told, _)| *told == epoch)
    }

    fn fill(&self, resolved: &[u8], membership: &Membership) -> Option<Vec<u8>> {
        // Agents say what is wrong with what is no refit.
        let Ok(mut refit) = serde_json::from_slice::<Refit>(resolved) else {
            return Some(resolved.to_owned());
        };
        let mut open = (0..).zip(&mut refit.pools).filter(|(_, pool)| pool.layout.is_null()).peekable();
        if open.peek().is_none() {
            return Some(resolved.to_owned());
        }
        for (index, pool) in open {
            pool.layout = self.layout(index, membership)?;
        }
        Some(serde_json::to_vec(&refit).expect("a refit has only text keys"))
    }

    fn layout(&self, pool: u32, membership: &Membership) -> Option<Value> {
        let of_pool = membership.replicas().into_iter().filter(|replica| replica.pool == pool);
        let recorded = |replica: weightrefit_core::membership::Replica| {
            let ranks = replica.ranks.iter().map(|member| {
                let seat = &membership.member(*member)?.seat;
                self.ranks.get(seat).filter(|rank| rank.next == rank.pages && rank.pages > 0)
            });
            ranks.map(|rank| rank.map(|rank| &rank.tensors)).collect::<Option<Vec<_>>>()
        };
        let ranks = of_pool.filter_map(recorded).next()?; // G1
        Some(json!({"layout": "v1", "ranks": ranks}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightrefit_core::id::{Incarnation, Rank, Sha256};
    use weightrefit_core::membership::Member;

    fn page(page: u32, pages: u32, tensors: &str) -> v1::Recorded {
        v1::Recorded { claim: None, page, pages, tensors: tensors.as_bytes().to_vec() }
    }

    #[test]
    fn pages_come_in_order_and_say_what_tensors_are() {
        let seat = Seat::Inference { pool: "p".into(), replica: "r".into(), rank: Rank(0) };
        let tensor = r#"[{"name": "w", "dtype": "bf16", "shape": [4], "pieces": []}]"#;
        let mut recordings = Recordings::default();
        assert_eq!(recordings.hear(seat.clone(), page(0, 2, tensor)), Ok(false));
        assert_eq!(recordings.hear(seat.clone(), page(1, 2, tensor)), Ok(true));
        assert_eq!(recordings.ranks[&seat].tensors.len(), 2);
        assert_eq!(recordings.hear(seat.clone(), page(0, 1, tensor)), Ok(true), "it begins anew");
        assert_eq!(recordings.ranks[&seat].tensors.len(), 1);
        let long = format!("[{}]", " ".repeat(limits::RECORDING_BYTES_MAX));
        for (wrong, want) in [
            (page(1, 2, tensor), "page 1 of 2 of what inference/p/r/0 has recorded is not due"),
            (page(0, 0, tensor), "page 0 of 0 of what inference/p/r/0 has recorded is not due"),
            (page(0, 1, "[{}]"), "what inference/p/r/0 has recorded cannot be read: missing field `name`"),
            (page(0, 1, &long), "inference/p/r/0 has recorded more than 16777216 bytes"),
        ] {
            let fault = recordings.hear(seat.clone(), wrong).expect_err(want);
            assert_eq!(fault.code, Code::Unsupported.name());
            assert!(fault.message.starts_with(want), "{}", fault.message);
        }
        recordings.forget(&seat);
        assert!(recordings.ranks.is_empty());
    }

    /// Two replicas of two ranks, of which `a` is complete before `b` is.
    #[test]
    fn a_layout_is_that_of_the_first_whole_replica_and_stays_it_for_the_epoch() {
        let seat = |replica: &str, rank| Seat::Inference {
            pool: "p".into(),
            replica: replica.into(),
            rank: Rank(rank),
        };
        let seats = [seat("a", 0), seat("a", 1), seat("b", 0), seat("b", 1)];
        let member = |(number, seat): (u8, &Seat)| Member {
            seat: seat.clone(),
            pod_uid: format!("uid-{number}"),
            incarnation: Incarnation(number.into()),
            key: Sha256([number; 32]),
            round_addresses: vec![format!("127.0.0.1:{number}")],
            byte_addresses: vec![format!("127.0.0.1:{}", 100 + number)],
        };
        let members = (1..).zip(&seats).map(member).collect();
        let membership = Membership::new("uid", Epoch(1), None, vec!["p".into()], members).expect("valid");
        let phases = ["publish", "prepare", "pause", "transfer", "verify", "commit", "resume", "total"];
        let timeouts: BTreeMap<_, _> = phases.iter().map(|phase| (format!("{phase}_ms"), 1)).collect();
        let policy = json!({
            "timeouts": timeouts, "onReplicaFailure": "FenceReplica", "encryptBytes": true, "verify": true,
        });
        let pools = json!([{"name": "p", "layout": null, "minReplicas": 1}]);
        let refit = json!({"tensors": [], "training": null, "pools": pools, "policy": policy});
        let resolved = refit.to_string().into_bytes();
        let tensors =
            |name: &str| format!(r#"[{{"name": "{name}", "dtype": "bf16", "shape": [4], "pieces": []}}]"#);
        let mut recordings = Recordings::default();
        let mut hear = |seat: &Seat, number, pages, name: &str| {
            recordings.hear(seat.clone(), page(number, pages, &tensors(name))).expect("in order");
            recordings.resolve(&resolved, &membership)
        };
        assert_eq!(hear(&seats[0], 0, 1, "first"), None, "its other rank has not recorded");
        assert_eq!(hear(&seats[1], 0, 2, "second"), None, "a page is missing");
        assert_eq!(hear(&seats[2], 0, 1, "other"), None, "the other replica is not whole either");
        let told = hear(&seats[1], 1, 2, "third").expect("a whole replica");
        let text = String::from_utf8(told.clone()).expect("JSON");
        assert!(["first", "second", "third"].iter().all(|name| text.contains(name)), "{text}");
        assert!(!text.contains("other"), "{text}");
        // An engine that begins anew, and records something else, changes nothing of what the others were told.
        assert_eq!(hear(&seats[0], 0, 1, "changed"), Some(told));
    }
}
