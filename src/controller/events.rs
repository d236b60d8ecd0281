//! Events of a refit: a condition that changed, the first failure of a kind; never one per round.

use crate::api::condition::{Condition, ConditionStatus, ConditionType};
use crate::api::refit::WeightRefit;
use crate::api::status::WeightRefitStatus;
use crate::limits;
use kube::Resource;
use kube::runtime::events::{Event, EventType, Recorder};
use std::collections::BTreeMap;
use tokio::time::Instant;

/// One thing that people should see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Happening {
    /// Whether it is bad news.
    pub is_warning: bool,
    /// One word.
    pub reason: String,
    /// What happened.
    pub note: String,
}

/// What happened between two statuses.
#[must_use]
pub fn happenings(previous: &WeightRefitStatus, next: &WeightRefitStatus) -> Vec<Happening> {
    let mut happenings = Vec::new();
    if let Some(membership) = &next.membership
        && previous.membership.as_ref().is_none_or(|old| old.epoch != membership.epoch)
    {
        let note =
            format!("Epoch {}: {:?}; {} leads.", membership.epoch, membership.cause, membership.leader);
        happenings.push(Happening { is_warning: false, reason: "EpochStarted".into(), note });
    }
    for condition in &next.conditions {
        let old = previous.condition(&condition.kind);
        let is_new = match old {
            Some(old) => (old.status, &old.reason) != (condition.status, &condition.reason),
            // At the start only what is wrong is news.
            None => is_bad(condition) && !is_waiting(condition),
        };
        if is_new {
            let note = format!("{} is {:?}: {}", condition.kind, condition.status, condition.message);
            let is_warning = is_bad(condition);
            happenings.push(Happening { is_warning, reason: condition.reason.clone(), note });
        }
    }
    happenings
}

fn is_bad(condition: &Condition) -> bool {
    condition.status != ConditionStatus::Unknown
        && condition.wanted().is_some_and(|wanted| condition.status != wanted)
}

/// Conditions that are False while a refit comes up.
fn is_waiting(condition: &Condition) -> bool {
    let kinds = [ConditionType::Accepted, ConditionType::Authorized, ConditionType::Stalled];
    !kinds.iter().any(|kind| kind.name() == condition.kind)
}

/// Publishes events of one refit, each reason at most once in [`limits::EVENT_INTERVAL`].
pub struct Publisher {
    recorder: Recorder,
    last: BTreeMap<String, Instant>,
}

impl Publisher {
    /// Events by this recorder.
    #[must_use]
    pub fn new(recorder: Recorder) -> Self {
        Self { recorder, last: BTreeMap::new() }
    }

    /// Publishes them; what cannot be is lost, for it says nothing that the status does not.
    pub async fn publish(&mut self, refit: &WeightRefit, happenings: Vec<Happening>) {
        self.last.retain(|_, at| at.elapsed() < limits::EVENT_INTERVAL);
        for Happening { is_warning, reason, note } in happenings {
            if self.last.contains_key(&reason) {
                continue;
            }
            self.last.insert(reason.clone(), Instant::now());
            let event = Event {
                type_: if is_warning { EventType::Warning } else { EventType::Normal },
                reason,
                note: Some(note),
                action: "Reconcile".into(),
                secondary: None,
            };
            if let Err(error) = self.recorder.publish(&event, &refit.object_ref(&())).await {
                tracing::warn!(reason = event.reason, %error, "events are lost");
                // The next would wait as long, and what it is about with it.
                return;
            }
        }
    }
}
