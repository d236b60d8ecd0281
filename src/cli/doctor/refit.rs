//! One refit: what its conditions say, and its pods: their agents, profiles and consent.

use super::finding::Finding;
use crate::cli::cluster::Connected;
use crate::controller::consent::Question;
use crate::controller::pod;
use crate::controller::pod_facts::{PodFacts, REFIT_LABEL, meant};
use crate::injection::{AGENT_CONTAINER, DEFAULT_PROFILE, PROFILE_ANNOTATION, Settings};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use std::collections::BTreeSet;

/// Pods at fault that one finding names; the number says how many more.
const NAMED_MAX: usize = 5;

/// All checks of the refit of this name.
pub(super) async fn look(cluster: &Connected, name: &str, settings: Option<&Settings>) -> Vec<Finding> {
    const CHECK: &str = "refit";
    let full = format!("{}/{name}", cluster.namespace);
    let refit = match cluster.refits().get_opt(name).await {
        Ok(Some(refit)) => refit,
        Ok(None) => {
            return vec![Finding::wrong(
                CHECK,
                format!("WeightRefit {full} does not exist"),
                "pods that name it wait for ever",
                "Apply it, or name its namespace with -n; `weightrefit status -A` lists all.",
            )];
        }
        // Where the kind is unknown, the definition's check has said so.
        Err(kube::Error::Api(status)) if status.code == 404 => return Vec::new(),
        Err(error) => return vec![Finding::unknown(CHECK, &error)],
    };
    let mut findings = Vec::new();
    match refit.status {
        None => findings.push(Finding::wrong(
            CHECK,
            format!("no operator has seen {full}"),
            "it has no status",
            "See whether an operator leads, and whether --watch-namespace keeps it from this namespace.",
        )),
        Some(status) => {
            let troubles = status.conditions.iter().filter(|condition| condition.is_trouble());
            findings.extend(troubles.map(|condition| {
                let to_do = format!("`weightrefit explain {}`", condition.reason);
                let what =
                    format!("{full}: {} is {:?}, {}", condition.kind, condition.status, condition.reason);
                Finding::wrong(CHECK, what, condition.message.clone(), to_do)
            }));
            if findings.is_empty() {
                findings
                    .push(Finding::good(CHECK, format!("all conditions of {full} are as they should be")));
            }
        }
    }
    findings.extend(pods(cluster, name, &full, settings).await);
    findings
}

async fn pods(cluster: &Connected, name: &str, full: &str, settings: Option<&Settings>) -> Vec<Finding> {
    const CHECK: &str = "pods";
    let claiming = ListParams::default().labels(&format!("{REFIT_LABEL}={name}"));
    let everywhere = Api::<Pod>::all(cluster.client.clone()).list(&claiming).await;
    let (pods, elsewhere) = match everywhere {
        Ok(pods) => (pods, None),
        // Most people may look into their own namespaces only.
        Err(error) => {
            match Api::<Pod>::namespaced(cluster.client.clone(), &cluster.namespace).list(&claiming).await {
                Ok(pods) => (pods, Some(Finding::unknown("pods elsewhere", &error))),
                Err(error) => return vec![Finding::unknown(CHECK, &error)],
            }
        }
    };
    let pods: Vec<Pod> =
        pods.items.into_iter().filter(|pod| meant(&pod.metadata).as_deref() == Some(full)).collect();
    let mut findings: Vec<Finding> = elsewhere.into_iter().collect();
    if pods.is_empty() {
        findings.push(Finding::wrong(
            CHECK,
            format!("no pod claims {full}"),
            "there is nobody to send weights to or from",
            "Put labels weightrefit.dev/refit and weightrefit.dev/side on the pod templates of trainer and engines.",
        ));
        return findings;
    }
    findings.push(Finding::good(CHECK, format!("{} claim {full}", pods.len())));
    findings.extend(without_agent(&pods));
    findings.extend(settings.and_then(|settings| without_profile(&pods, settings)));
    findings.extend(consent(cluster, &pods).await);
    findings
}

fn without_agent(pods: &[Pod]) -> Option<Finding> {
    let has_agent = |pod: &Pod| {
        let containers = pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
        containers.map(|container| container.name.as_str()).any(|name| name == AGENT_CONTAINER)
    };
    let without: Vec<&Pod> = pods.iter().filter(|pod| !has_agent(pod)).collect();
    (!without.is_empty()).then(|| {
        Finding::advice(
            "agents",
            format!("no container {AGENT_CONTAINER} in {}", named(&without)),
            "such a pod takes no part, unless its agent runs under another name",
            "It was created before the webhook, or its template went past `weightrefit inject`: delete it, and its owner makes another.",
        )
    })
}

fn without_profile(pods: &[Pod], settings: &Settings) -> Option<Finding> {
    let profile = |pod: &Pod| {
        pod.annotations().get(PROFILE_ANNOTATION).cloned().unwrap_or_else(|| DEFAULT_PROFILE.to_owned())
    };
    let without: Vec<&Pod> =
        pods.iter().filter(|pod| !settings.profiles.contains_key(&profile(pod))).collect();
    let wanted: BTreeSet<String> = without.iter().map(|pod| profile(pod)).collect();
    (!without.is_empty()).then(|| {
        Finding::wrong(
            "profiles",
            format!("{} ask for {}", named(&without), wanted.into_iter().collect::<Vec<_>>().join(", ")),
            "no such injection profile exists, so the next pods of the kind are refused",
            "Add it to injection.profiles of the chart, or correct annotation weightrefit.dev/profile.",
        )
    })
}

async fn consent(cluster: &Connected, pods: &[Pod]) -> Vec<Finding> {
    const CHECK: &str = "consent";
    let (mut questions, mut findings) = (BTreeSet::new(), Vec::new());
    for pod in pods {
        let read = serde_json::to_value(pod).and_then(serde_json::from_value::<pod::Pod>);
        match read.map(|pod| PodFacts::of(&pod)) {
            Ok(Ok(facts)) => drop(questions.insert(Question::of(&facts))),
            Ok(Err(malformed)) => findings.push(Finding::wrong(
                "pods",
                malformed.to_string(),
                "it can be none of the refit's ranks",
                "Correct the label on its template.",
            )),
            Err(error) => {
                findings.push(Finding::wrong("pods", error.to_string(), "it cannot be read", "Look at it."))
            }
        }
    }
    for question in questions {
        let (account, verb) = (question.account(), question.verb());
        findings.push(match question.ask(&cluster.client).await {
            Ok(true) => Finding::good(CHECK, format!("{account} may {verb}")),
            Ok(false) => Finding::wrong(
                CHECK,
                format!("{account} may not {verb}"),
                "the refit's namespace has to let a pod's account take part, by RBAC on this very refit",
                question.command(),
            ),
            Err(error) => Finding::unknown(CHECK, &error),
        });
    }
    findings
}

fn named(pods: &[&Pod]) -> String {
    let name = |pod: &&Pod| format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
    let first = pods.iter().take(NAMED_MAX).map(name).collect::<Vec<_>>().join(", ");
    match pods.len().saturating_sub(NAMED_MAX) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}
