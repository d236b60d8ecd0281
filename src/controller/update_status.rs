//! Last step: the status is written where it differs, soon for what people wait for, seldom for the rest.

use crate::api::refit::WeightRefit;
use crate::api::status::WeightRefitStatus;
use crate::limits;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Map, Value, json};

/// How soon a status should be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Urgency {
    /// It says what is there already.
    Same,
    /// Only figures and round results differ.
    Later,
    /// A condition, the generation or the plan has changed.
    Now,
}

/// How soon `next` should replace `previous`.
#[must_use]
pub fn urgency(previous: &WeightRefitStatus, next: &WeightRefitStatus) -> Urgency {
    if previous == next {
        return Urgency::Same;
    }
    let states = |status: &WeightRefitStatus| {
        let state = |condition: &crate::api::condition::Condition| {
            (condition.kind.clone(), condition.status, condition.reason.clone())
        };
        status.conditions.iter().map(state).collect::<Vec<_>>()
    };
    let is_transition = previous.observed_generation != next.observed_generation
        || previous.plan != next.plan
        || states(previous) != states(next);
    if is_transition { Urgency::Now } else { Urgency::Later }
}

/// Writes what differs, to the object of this UID only. `membership` is left to [`super::record`].
///
/// # Errors
/// As the API server says; a conflict where the object was made anew.
pub async fn update_status(
    api: &Api<WeightRefit>,
    name: &str,
    uid: &str,
    previous: &WeightRefitStatus,
    next: &WeightRefitStatus,
) -> kube::Result<WeightRefit> {
    let value = |status: &WeightRefitStatus| {
        let mut value = serde_json::to_value(status).expect("a status has only text keys");
        value.as_object_mut().expect("a status is an object").remove("membership");
        value
    };
    let status = difference(&value(previous), &value(next)).unwrap_or_else(|| json!({}));
    let patch = json!({"metadata": {"uid": uid}, "status": status});
    let params = PatchParams::apply(limits::FIELD_MANAGER);
    api.patch_status(name, &params, &Patch::Merge(patch)).await
}

/// The JSON merge patch (RFC 7396) from one value to the other; `None` where they are the same.
fn difference(from: &Value, to: &Value) -> Option<Value> {
    let (Value::Object(from), Value::Object(to)) = (from, to) else {
        return (from != to).then(|| to.clone());
    };
    let mut patch = Map::new();
    for (key, value) in to {
        match from.get(key) {
            Some(old) => drop(difference(old, value).map(|value| patch.insert(key.clone(), value))),
            None => drop(patch.insert(key.clone(), value.clone())),
        }
    }
    for key in from.keys().filter(|key| !to.contains_key(*key)) {
        patch.insert(key.clone(), Value::Null);
    }
    (!patch.is_empty()).then_some(Value::Object(patch))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_says_what_differs_and_what_is_gone() {
        for (from, to, want) in [
            (json!({"a": 1}), json!({"a": 1}), None),
            (json!({"a": 1}), json!({"a": 2}), Some(json!({"a": 2}))),
            (json!({"a": {"b": 1, "c": 2}}), json!({"a": {"b": 1}}), Some(json!({"a": {"c": null}}))),
            (json!({"a": [1, 2]}), json!({"a": [1]}), Some(json!({"a": [1]}))),
            (json!({}), json!({"a": {"b": 1}}), Some(json!({"a": {"b": 1}}))),
        ] {
            assert_eq!(difference(&from, &to), want, "{from} to {to}");
        }
    }
}
