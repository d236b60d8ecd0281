//! The readiness gate that pods may ask for: condition `weightrefit.dev/WeightsCurrent`, true once the engines of the pod
//! serve a verified version. The agent's probe says the same, faster and without anybody's help; the gate is for pods that
//! must not become ready unless the operator has said so too.
//!
//! Invariants:
//! - E1: it follows from what the pod's own agent says of its engines, never from what a leader hoped.
//! - E2: while a round changes the pod's engines, and while its agent is not connected, it stays as it is: then the probe
//!   alone decides.
//! - E3: only pods that ask for it are written to, and only when it changes.

use super::pod::Pod;
use super::pod_facts::{PodFacts, Side, WEIGHTS_CURRENT};
use super::record::whole_second;
use crate::coordinator::View;
use crate::limits;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use std::sync::Arc;
use tokio::time::Instant;
use weightrefit_proto::v1;

/// What one rank says of its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Engine {
    /// It serves a verified version.
    Serves,
    /// A round is about to change it.
    Changes,
    /// It serves nothing.
    Idle,
}

/// The pods whose gate must say something else than it does, and what.
pub fn due<'p>(pods: &'p [Arc<PodFacts>], view: &View) -> Vec<(&'p PodFacts, bool)> {
    let gated = pods.iter().filter(|pod| pod.is_gated && pod.side == Side::Inference && pod.is_present());
    let due = gated.filter_map(|pod| {
        let agent = view.agents.values().find(|agent| agent.pod_uid == pod.uid)?;
        let is_current = match agent.state.ranks.iter().map(engine).max()? {
            Engine::Serves => true,
            Engine::Changes => return None, // E2
            Engine::Idle => false,
        };
        (is_current != pod.has_current_weights).then_some((&**pod, is_current)) // E3
    });
    due.collect()
}

fn engine(rank: &v1::RankState) -> Engine {
    match (rank.registered, rank.engine_state.as_str()) {
        (true, "Serving") if rank.live.is_some() => Engine::Serves,
        (true, "Quiet" | "Applied") => Engine::Changes,
        _ => Engine::Idle,
    }
}

/// Writes gates, not often where that fails.
pub(super) struct Gates {
    client: Client,
    /// When to try again, after a failure.
    again: Option<Instant>,
    /// Which gate could not be written last, and why.
    trouble: Option<String>,
}

impl Gates {
    pub(super) fn new(client: Client) -> Self {
        Self { client, again: None, trouble: None }
    }

    /// What keeps gates from being written, since the last attempt.
    pub(super) fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// Writes those that are due; returns when to try again where that failed.
    pub(super) async fn write(&mut self, due: Vec<(&PodFacts, bool)>) -> Option<Instant> {
        if let Some(again) = self.again.filter(|again| *again > Instant::now() && !due.is_empty()) {
            return Some(again);
        }
        (self.again, self.trouble) = (None, None);
        for (pod, is_current) in due {
            let Err(error) = set(&self.client, pod, is_current).await else { continue };
            // One that is gone or made anew is told of by the watch.
            if matches!(&error, kube::Error::Api(status) if status.is_not_found() || status.is_conflict()) {
                continue;
            }
            let trouble = format!("readiness gate {WEIGHTS_CURRENT} of pod {}: {error}", pod.shown());
            tracing::warn!(trouble, "a readiness gate is not written");
            self.trouble = Some(trouble);
            self.again = Some(Instant::now() + limits::CONSENT_LIFETIME);
            break;
        }
        self.again
    }
}

async fn set(client: &Client, pod: &PodFacts, is_current: bool) -> Result<(), kube::Error> {
    let (status, reason, message) = match is_current {
        true => ("True", "Serving", "Its engines serve a verified version."),
        false => ("False", "NotServing", "No engine of it serves a verified version."),
    };
    let condition = json!({
        "type": WEIGHTS_CURRENT, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": whole_second(Timestamp::now()).to_string(),
    });
    // Strategic: the API server merges conditions by type. The UID is a precondition.
    let patch =
        Patch::Strategic(json!({"metadata": {"uid": pod.uid}, "status": {"conditions": [condition]}}));
    let parameters = PatchParams { field_manager: Some(limits::FIELD_MANAGER.into()), ..Default::default() };
    let api = Api::<Pod>::namespaced(client.clone(), &pod.namespace);
    api.patch_status(&pod.name, &parameters, &patch).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordinator::AgentView;
    use std::collections::BTreeMap;
    use weightrefit_core::id::Incarnation;
    use weightrefit_core::membership::roster::Standing;

    fn pod(is_gated: bool, has_current_weights: bool) -> Arc<PodFacts> {
        let json = json!({
            "metadata": {
                "namespace": "rl", "name": "engine-0", "uid": "uid",
                "labels": {"weightrefit.dev/refit": "tiny", "weightrefit.dev/side": "inference"},
            },
            "spec": {"readinessGates": if is_gated { json!([{"conditionType": WEIGHTS_CURRENT}]) } else { json!([]) }},
            "status": {
                "phase": "Running",
                "conditions": [{"type": WEIGHTS_CURRENT, "status": if has_current_weights { "True" } else { "False" }}],
            },
        });
        let pod: Pod = serde_json::from_value(json).expect("a pod");
        Arc::new(PodFacts::of(&pod).expect("well formed"))
    }

    fn view(ranks: &[(&str, bool)]) -> View {
        let rank = |(engine_state, is_verified): &(&str, bool)| v1::RankState {
            registered: true,
            engine_state: (*engine_state).to_owned(),
            live: is_verified.then_some(v1::VersionName { run: 0, step: 1 }),
            ..Default::default()
        };
        let state = v1::State { ranks: ranks.iter().map(rank).collect(), ..Default::default() };
        let agent = AgentView { pod_uid: "uid".into(), state, ..AgentView::default() };
        View {
            membership: None,
            cause: None,
            standing: Standing::Complete,
            agents: BTreeMap::from([(Incarnation(1), agent)]),
            last_round: None,
            last_failed_round: None,
            refused: BTreeMap::new(),
        }
    }

    /// State of each rank's engine, and whether it holds a verified version.
    type Ranks = &'static [(&'static str, bool)];

    const SERVING: (&str, bool) = ("Serving", true);

    #[test]
    fn a_gate_follows_the_engines_of_its_own_pod() {
        let rows: [(Ranks, bool, bool, Option<bool>); 12] = [
            // What its ranks say, whether it has a gate and what that says, and what is written.
            (&[SERVING, SERVING], true, false, Some(true)),
            (&[SERVING, SERVING], true, true, None),
            (&[SERVING, SERVING], false, false, None),
            (&[SERVING, ("Cold", false)], true, false, None),
            (&[SERVING, ("Cold", false)], true, true, Some(false)),
            (&[SERVING, ("Dirty", true)], true, true, Some(false)),
            (&[SERVING, ("", false)], true, true, Some(false)),
            (&[("Serving", false)], true, false, None), // weights that nobody has verified
            (&[SERVING, ("Quiet", true)], true, true, None),
            (&[SERVING, ("Applied", true)], true, false, None),
            (&[("Quiet", true), ("Dirty", true)], true, true, Some(false)),
            (&[], true, true, None), // its agent has said nothing yet
        ];
        for (ranks, is_gated, is_current, want) in rows {
            let pods = [pod(is_gated, is_current)];
            let got: Vec<bool> = due(&pods, &view(ranks)).into_iter().map(|(_, next)| next).collect();
            assert_eq!(got, Vec::from_iter(want), "{ranks:?} {is_gated} {is_current}");
        }
        let away = View { agents: BTreeMap::new(), ..view(&[]) };
        assert!(due(&[pod(true, true)], &away).is_empty(), "its agent is not connected");
        let mut others = view(&[SERVING]);
        others.agents.values_mut().for_each(|agent| agent.pod_uid = "other".into());
        assert!(due(&[pod(true, false)], &others).is_empty(), "that is another pod's agent");
    }
}
