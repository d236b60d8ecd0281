//! Extras: what training rank 0 publishes beside a step, on its way to the `commit` of every engine. The leader's agent
//! has them from its trainer, all others from the leader's `propose`. Nobody on the way reads them.

use crate::limits;
use std::collections::BTreeMap;
use std::sync::Arc;
use weightrefit_core::id::Epoch;
use weightrefit_core::round::message::Version;

/// Extras by what they belong to.
#[derive(Debug, Default)]
pub(super) struct Extras {
    /// At the leader's agent: by step of the present world.
    published: BTreeMap<i64, Arc<str>>,
    versions: BTreeMap<(u64, i64, Epoch), Arc<str>>,
}

impl Extras {
    /// Training rank 0 publishes a step.
    pub(super) fn publish(&mut self, step: i64, extras: Option<String>) {
        note(&mut self.published, step, extras.map(Into::into));
    }

    /// A step became a version.
    pub(super) fn accept(&mut self, version: &Version) {
        let extras = self.published.get(&version.step).cloned();
        note(&mut self.versions, version.name(), extras);
    }

    /// The leader has said what belongs to a version.
    pub(super) fn hear(&mut self, version: &Version, extras: Option<String>) {
        note(&mut self.versions, version.name(), extras.map(Into::into));
    }

    /// What belongs to a version.
    pub(super) fn of(&self, version: &Version) -> Option<&str> {
        self.versions.get(&version.name()).map(AsRef::as_ref)
    }
}

fn note<K: Ord>(all: &mut BTreeMap<K, Arc<str>>, key: K, extras: Option<Arc<str>>) {
    match extras {
        Some(extras) => drop(all.insert(key, extras)),
        None => drop(all.remove(&key)),
    }
    while all.len() > limits::EXTRAS_REMEMBERED {
        all.pop_first();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightrefit_core::round::message::ContentSum;

    #[test]
    fn extras_belong_to_the_version_that_their_step_became() {
        let version =
            |step, origin| Version { run: 0, step, origin: Epoch(origin), sum: ContentSum::default() };
        let mut leader = Extras::default();
        leader.publish(7, Some("a".to_owned()));
        leader.accept(&version(7, 1));
        leader.accept(&version(7, 2));
        assert_eq!((leader.of(&version(7, 1)), leader.of(&version(7, 2))), (Some("a"), Some("a")));
        assert_eq!(leader.of(&version(8, 2)), None);
        leader.publish(7, None);
        leader.accept(&version(7, 3));
        assert_eq!(leader.of(&version(7, 3)), None, "another world's step of that number");
        let mut member = Extras::default();
        for step in 0..9 {
            member.hear(&version(step, 1), Some(step.to_string()));
        }
        assert_eq!((member.of(&version(8, 1)), member.of(&version(0, 1))), (Some("8"), None));
    }
}
