//! How far an engine is with a commit: its groups in their order, each told once.

use crate::limits;
use std::time::{Duration, Instant};
use weightrefit_core::round::message::RoundKey;
use weightrefit_proto::socket::{Group, GroupClass};

/// The groups of one rank's engine, and its commit as it runs.
#[derive(Debug, Default)]
pub(super) struct Applying {
    groups: Vec<Group>,
    commit: Option<Commit>,
}

#[derive(Debug)]
struct Commit {
    round: RoundKey,
    done: usize,
    /// Since when the first group that is not done is being applied.
    since: Instant,
    /// That group was said to be slow.
    told: bool,
}

/// A group came where another is due, or none.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("group {got} was applied where group {due} of {groups} is due")]
pub(super) struct OutOfOrder {
    got: u32,
    due: usize,
    groups: usize,
}

impl Applying {
    /// Of an engine that has registered these.
    pub(super) fn new(groups: Vec<Group>) -> Self {
        Self { groups, commit: None }
    }

    /// The engine is asked to commit.
    pub(super) fn begin(&mut self, round: RoundKey, now: Instant) {
        self.commit = Some(Commit { round, done: 0, since: now, told: false });
    }

    /// The engine has applied a group: what kind, and in which time. What it says of an older commit is not looked at.
    pub(super) fn applied(
        &mut self,
        round: RoundKey,
        group: u32,
        now: Instant,
    ) -> Result<Option<(GroupClass, Duration)>, OutOfOrder> {
        let Some(commit) = self.commit.as_mut().filter(|commit| commit.round == round) else {
            return Ok(None);
        };
        let due = commit.done;
        match self.groups.get(due) {
            Some(applied) if due == group as usize => {
                let took = now.duration_since(commit.since);
                *commit = Commit { round, done: due + 1, since: now, told: false };
                Ok(Some((applied.class, took)))
            }
            _ => Err(OutOfOrder { got: group, due, groups: self.groups.len() }),
        }
    }

    /// The engine has answered; the first group that it has not applied.
    pub(super) fn end(&mut self, round: RoundKey) -> Option<String> {
        let commit = self.commit.take_if(|commit| commit.round == round)?;
        Some(self.groups.get(commit.done)?.name.clone())
    }

    /// The engine is gone.
    pub(super) fn forget(&mut self) {
        self.commit = None;
    }

    /// A group that takes long, once.
    pub(super) fn slow(&mut self, now: Instant) -> Option<&str> {
        let commit = self.commit.as_mut()?;
        let is_slow = !commit.told && now.duration_since(commit.since) > limits::GROUP_SLOW;
        commit.told |= is_slow;
        let group = self.groups.get(commit.done).filter(|_| is_slow)?;
        Some(&group.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightrefit_core::id::{Epoch, RoundId};

    #[test]
    fn groups_are_applied_in_their_order_and_each_once() {
        let group = |name: &str, class| Group { name: name.to_owned(), class, tensors: 1 };
        let mut applying = Applying::new(vec![group("a", GroupClass::Direct), group("b", GroupClass::Apply)]);
        let round = |round| RoundKey { epoch: Epoch(1), round: RoundId(round) };
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        assert_eq!(applying.applied(round(1), 0, start), Ok(None), "no commit runs");
        applying.begin(round(2), start);
        assert_eq!(applying.applied(round(1), 7, start), Ok(None), "of an older commit");
        let out_of_order = OutOfOrder { got: 1, due: 0, groups: 2 };
        assert_eq!(applying.applied(round(2), 1, start), Err(out_of_order));
        assert_eq!(applying.applied(round(2), 0, start + second), Ok(Some((GroupClass::Direct, second))));
        assert_eq!(applying.slow(start + second + limits::GROUP_SLOW), None);
        let late = start + second * 2 + limits::GROUP_SLOW;
        assert_eq!((applying.slow(late).map(str::to_owned), applying.slow(late)), (Some("b".into()), None));
        assert_eq!(
            applying.applied(round(2), 1, start + second),
            Ok(Some((GroupClass::Apply, Duration::ZERO)))
        );
        assert!(applying.applied(round(2), 1, start).is_err());
        assert_eq!((applying.end(round(2)), applying.slow(late)), (None, None), "all are applied");
        applying.begin(round(3), start);
        assert_eq!(applying.end(round(2)), None, "of an older commit");
        assert_eq!(applying.end(round(3)).as_deref(), Some("a"));
    }
}
