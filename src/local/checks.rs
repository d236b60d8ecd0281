//! What the engines say of their live tensors, and what they should have said.

use super::report::Verdict;
use std::collections::{BTreeMap, BTreeSet};
use weightrefit_core::id::Rank;
use weightrefit_core::membership::Seat;
use weightrefit_proto::report::{ReplicaOutcome, RoundReport};

/// One rank's check of one version: the rank, run and step.
type Name = (Seat, u64, i64);

/// Checks of a run.
pub(super) struct Checks {
    /// Elements with a source, of each inference rank.
    elements: BTreeMap<Seat, u64>,
    /// Checks that a committed round owes.
    owed: BTreeMap<Name, u64>,
    done: BTreeMap<Name, u64>,
    /// First ranks of the replicas that committed the present step and owe a forward step on it.
    unread: BTreeSet<Seat>,
    /// First ranks that have completed a forward step since the present step was published.
    stepped: BTreeSet<Seat>,
    /// Ranks whose process is gone since the present step was published: what it committed is gone with it.
    lost: BTreeSet<Seat>,
    verdict: Verdict,
}

impl Checks {
    pub(super) fn new(elements: BTreeMap<Seat, u64>) -> Self {
        Self {
            elements,
            owed: BTreeMap::new(),
            done: BTreeMap::new(),
            unread: BTreeSet::new(),
            stepped: BTreeSet::new(),
            lost: BTreeSet::new(),
            verdict: Verdict::default(),
        }
    }

    /// A step is about to be published; commits of the step before that nobody read stay counted.
    pub(super) fn begin_step(&mut self) {
        self.verdict.unread_commits += self.unread.len() as u64;
        self.unread.clear();
        self.stepped.clear();
        self.lost.clear();
    }

    /// All ranks of a replica have read its live tensors.
    pub(super) fn stepped(&mut self, first_rank: Seat) {
        self.unread.remove(&first_rank);
        self.stepped.insert(first_rank);
    }

    /// Whether each replica that committed the present step has completed a forward step since.
    pub(super) fn are_read(&self) -> bool {
        self.unread.is_empty()
    }

    /// A round has ended: every rank of each replica that committed owes a check, and the replica a step.
    pub(super) fn committed(&mut self, report: &RoundReport) {
        let committed = report.replicas.iter().filter(|replica| replica.outcome == ReplicaOutcome::Committed);
        for ended in committed {
            let of_replica = |seat: &Seat| matches!(seat, Seat::Inference { pool, replica, .. } if (pool, replica) == (&ended.pool, &ended.replica));
            let version = report.version;
            for (seat, elements) in self.elements.iter().filter(|(seat, _)| of_replica(seat)) {
                if !self.lost.contains(seat) {
                    self.owed.insert((seat.clone(), version.run, version.step), *elements);
                }
            }
            let (pool, replica) = (ended.pool.clone(), ended.replica.clone());
            let first = Seat::Inference { pool, replica, rank: Rank(0) };
            if !self.stepped.contains(&first) && !self.lost.iter().any(of_replica) {
                self.unread.insert(first);
            }
        }
    }

    /// A rank has compared its live tensors.
    pub(super) fn checked(&mut self, name: Name, checked: u64, mismatched: u64, pads: u64) {
        self.verdict.checked_elements += checked;
        self.verdict.mismatched_elements += mismatched;
        self.verdict.pads += pads;
        self.done.insert(name, checked);
    }

    /// The process of a rank is gone, and with it the tensors that it would have compared.
    pub(super) fn lost(&mut self, seat: &Seat) {
        if let Seat::Inference { pool, replica, .. } = seat {
            let first = Seat::Inference { pool: pool.clone(), replica: replica.clone(), rank: Rank(0) };
            self.unread.remove(&first);
        }
        self.owed.retain(|name, _| name.0 != *seat || self.done.contains_key(name));
        self.lost.insert(seat.clone());
    }

    /// An engine has said its last.
    pub(super) fn ended(&mut self, steps: u64, torn_reads: u64) {
        self.verdict.steps += steps;
        self.verdict.torn_reads += torn_reads;
    }

    /// Whether every check that is owed was made.
    pub(super) fn are_complete(&self) -> bool {
        self.owed.keys().all(|name| self.done.contains_key(name))
    }

    pub(super) fn verdict(&self) -> Verdict {
        let unread_commits = self.verdict.unread_commits + self.unread.len() as u64;
        let unchecked = self.owed.iter().filter(|(name, elements)| self.done.get(*name) != Some(*elements));
        let unchecked_elements = unchecked.map(|(_, elements)| elements).sum();
        Verdict { unchecked_elements, unread_commits, ..self.verdict }
    }
}
