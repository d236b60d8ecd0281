//! What the workloads that a refit names ask for: how many pods, and whether they are suspended or have finished. It is
//! told to people, and that a trainer has finished is told by it too; nobody is a member by it.
//!
//! Invariants:
//! - O1: a workload is asked for by its name, now and then; what it told last holds until it tells something else.
//! - O2: of another namespace than the refit's nothing is asked before one of its pods claims the refit: who writes a
//!   refit learns of no namespace that has nothing to do with it.

use super::pod_facts::PodFacts;
use crate::api::refit::WeightRefitSpec;
use crate::api::workload::{Ranks, WorkloadKind, WorkloadRef};
use crate::limits;
use kube::Client;
use kube::api::{GetParams, Request};
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::time::Instant;

/// A workload that a side names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    /// Kind and namespace/name, as messages name it.
    pub shown: String,
    /// What it told last.
    pub told: Told,
}

/// What a workload tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    /// There is none of this name.
    Missing,
    /// The operator may not read it.
    Forbidden,
    /// Nobody may ask it yet (O2).
    Elsewhere,
    /// It wants no pods now.
    Suspended,
    /// All its pods have done what they were for.
    Completed,
    /// It gave up.
    Failed,
    /// It asks for these pods.
    Pods(Vec<Group>),
}

/// Pods that belong together: of a JobSet those of a job, of a LeaderWorkerSet a group; else all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// The replicated job; empty where there are none.
    pub name: String,
    /// How many such groups.
    pub groups: u64,
    /// Pods of each.
    pub pods: u64,
}

/// The workloads of a refit, where they are named and have been asked.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Workloads {
    /// The trainer's.
    pub training: Option<Workload>,
    /// The engines', by index of their pool.
    pub pools: Vec<Option<Workload>>,
}

impl Workload {
    /// Ranks that it asks for; `None` where it does not tell.
    #[must_use]
    pub fn ranks(&self, per_pod: u32) -> Option<u64> {
        self.sum(|pods| pods.saturating_mul(per_pod.into()))
    }

    /// Whole replicas of `per_replica` ranks that it asks for; `None` where it does not tell.
    #[must_use]
    pub fn replicas(&self, per_pod: u32, per_replica: u32) -> Option<u64> {
        self.sum(|pods| pods.saturating_mul(per_pod.into()) / u64::from(per_replica.max(1)))
    }

    fn sum(&self, of_pods: impl Fn(u64) -> u64) -> Option<u64> {
        match &self.told {
            Told::Missing | Told::Forbidden | Told::Elsewhere => None,
            Told::Suspended | Told::Completed | Told::Failed => Some(0),
            Told::Pods(groups) => {
                let each = groups.iter().map(|group| group.groups.saturating_mul(of_pods(group.pods)));
                Some(each.fold(0, u64::saturating_add))
            }
        }
    }

    /// What people should know of it, in words; `None` where it asks for pods as usual.
    #[must_use]
    pub fn remark(&self) -> Option<String> {
        let what = match &self.told {
            Told::Missing => "does not exist",
            Told::Forbidden => "may not be read by the operator",
            Told::Elsewhere => "is asked once a pod of its namespace claims the refit",
            Told::Suspended => "is suspended",
            Told::Completed => "has finished",
            Told::Failed => "has failed",
            Told::Pods(_) => return None,
        };
        Some(format!("{} {what}", self.shown))
    }
}

impl Told {
    /// What an object of this kind, or its scale, says. An absent number is 1, as the API server reads it.
    #[must_use]
    pub fn of(kind: WorkloadKind, object: &Value) -> Self {
        let spec = &object["spec"];
        let all = |pods| Self::Pods(vec![Group { name: String::new(), groups: 1, pods }]);
        match kind {
            WorkloadKind::StatefulSet | WorkloadKind::Deployment => all(number(&spec["replicas"])),
            WorkloadKind::LeaderWorkerSet => {
                let (groups, pods) =
                    (number(&spec["replicas"]), number(&spec["leaderWorkerTemplate"]["size"]));
                Self::Pods(vec![Group { name: String::new(), groups, pods }])
            }
            WorkloadKind::Job => ended(object, "Complete").unwrap_or_else(|| all(pods_of_job(spec))),
            WorkloadKind::JobSet => ended(object, "Completed").unwrap_or_else(|| {
                let jobs = spec["replicatedJobs"].as_array().into_iter().flatten();
                let group = |job: &Value| Group {
                    name: job["name"].as_str().unwrap_or_default().to_owned(),
                    groups: number(&job["replicas"]),
                    pods: pods_of_job(&job["template"]["spec"]),
                };
                Self::Pods(jobs.map(group).collect())
            }),
        }
    }

    /// The part of it that becomes ranks.
    fn part(&self, ranks: &Ranks) -> Self {
        match (self, &ranks.job_set) {
            (Self::Pods(groups), Some(set)) => {
                let is_part =
                    |group: &&Group| group.name.is_empty() || set.replicated_jobs.contains(&group.name);
                Self::Pods(groups.iter().filter(is_part).cloned().collect())
            }
            _ => self.clone(),
        }
    }
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or(1)
}

/// Pods that a Job runs at once.
fn pods_of_job(spec: &Value) -> u64 {
    let at_once = number(&spec["parallelism"]);
    spec["completions"].as_u64().map_or(at_once, |all| all.min(at_once))
}

/// Why a Job or JobSet asks for no pods, if it does not.
fn ended(object: &Value, completed: &str) -> Option<Told> {
    let conditions = || object["status"]["conditions"].as_array().into_iter().flatten();
    let holds =
        |kind: &str| conditions().any(|condition| condition["type"] == kind && condition["status"] == "True");
    match object["spec"]["suspend"].as_bool() {
        _ if holds(completed) => Some(Told::Completed),
        _ if holds("Failed") => Some(Told::Failed),
        Some(true) => Some(Told::Suspended),
        _ => None,
    }
}

/// Asks the API server for the workloads of one refit.
pub(super) struct Reader {
    client: Client,
    /// Each with its namespace, what it told last, and when.
    asked: Vec<(WorkloadRef, Told, Instant)>,
}

impl Reader {
    pub(super) fn new(client: Client) -> Self {
        Self { client, asked: Vec::new() }
    }

    /// Asks those that were not asked for a while (O1).
    ///
    /// # Errors
    /// The API server does not say; what was told last holds.
    pub(super) async fn read(
        &mut self,
        refit_namespace: &str,
        spec: &WeightRefitSpec,
        pods: &[Arc<PodFacts>],
    ) -> Result<(), kube::Error> {
        let named: Vec<WorkloadRef> =
            references(spec).map(|workload| placed(workload, refit_namespace)).collect();
        self.asked.retain(|(asked, ..)| named.contains(asked));
        let mut open: BTreeSet<&str> = pods.iter().map(|pod| pod.namespace.as_str()).collect();
        open.insert(refit_namespace);
        for workload in named {
            let last = self.asked.iter().position(|(asked, ..)| *asked == workload);
            if last.is_some_and(|last| self.asked[last].2.elapsed() < limits::WORKLOAD_LIFETIME) {
                continue;
            }
            let is_open = workload.namespace.as_deref().is_some_and(|namespace| open.contains(namespace));
            let told = match workload.known() {
                Some(kind) if is_open => ask(&self.client, &workload, kind).await?,
                Some(_) => Told::Elsewhere,
                None => continue, // the refit is not accepted
            };
            if let Some(last) = last {
                self.asked.swap_remove(last);
            }
            self.asked.push((workload, told, Instant::now()));
        }
        Ok(())
    }

    /// When to read again.
    pub(super) fn due(&self) -> Option<Instant> {
        self.asked.iter().map(|(.., at)| *at + limits::WORKLOAD_LIFETIME).min()
    }

    /// What they told last.
    pub(super) fn told(&self, refit_namespace: &str, spec: &WeightRefitSpec) -> Workloads {
        let told = |workload: Option<&WorkloadRef>, ranks: &Ranks| {
            let workload = placed(workload?, refit_namespace);
            let (_, told, _) = self.asked.iter().find(|(asked, ..)| *asked == workload)?;
            let namespace = workload.namespace.unwrap_or_default();
            let shown = format!("{} {namespace}/{}", workload.kind, workload.name);
            Some(Workload { shown, told: told.part(ranks) })
        };
        let pools = spec.inference.pools.iter();
        Workloads {
            training: told(spec.training.workload_ref.as_ref(), &spec.training.ranks),
            pools: pools.map(|pool| told(pool.workload_ref.as_ref(), &pool.ranks)).collect(),
        }
    }
}

fn references(spec: &WeightRefitSpec) -> impl Iterator<Item = &WorkloadRef> {
    let pools = spec.inference.pools.iter().filter_map(|pool| pool.workload_ref.as_ref());
    spec.training.workload_ref.iter().chain(pools)
}

/// The reference with its namespace.
fn placed(workload: &WorkloadRef, refit_namespace: &str) -> WorkloadRef {
    let namespace = workload.namespace.clone().unwrap_or_else(|| refit_namespace.to_owned());
    WorkloadRef { namespace: Some(namespace), ..workload.clone() }
}

async fn ask(client: &Client, workload: &WorkloadRef, kind: WorkloadKind) -> Result<Told, kube::Error> {
    // The scale says it where there is one; a LeaderWorkerSet's leaves out how large a group is.
    let (resource, is_scaled) = match kind {
        WorkloadKind::StatefulSet => ("statefulsets", true),
        WorkloadKind::Deployment => ("deployments", true),
        WorkloadKind::Job => ("jobs", false),
        WorkloadKind::JobSet => ("jobsets", false),
        WorkloadKind::LeaderWorkerSet => ("leaderworkersets", false),
    };
    let WorkloadRef { api_version, namespace, name, .. } = workload;
    let namespace = namespace.as_deref().unwrap_or_default();
    let request = Request::new(format!("/apis/{api_version}/namespaces/{namespace}/{resource}"));
    let request = match is_scaled {
        true => request.get_subresource("scale", name),
        false => request.get(name, &GetParams::default()),
    };
    match client.request::<Value>(request.map_err(kube::Error::BuildRequest)?).await {
        Ok(object) => Ok(Told::of(kind, &object)),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(Told::Missing),
        Err(kube::Error::Api(status)) if status.is_forbidden() => Ok(Told::Forbidden),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn job(spec: Value, conditions: Value) -> Value {
        json!({"spec": spec, "status": {"conditions": conditions}})
    }

    fn holds(kind: &str) -> Value {
        json!([{"type": "SuccessCriteriaMet", "status": "True"}, {"type": kind, "status": "True"}])
    }

    /// Of two ranks a pod and four a replica: ranks, replicas, and what there is to say.
    fn shown(kind: WorkloadKind, object: &Value, ranks: &Ranks) -> String {
        let workload = Workload { shown: "it".into(), told: Told::of(kind, object).part(ranks) };
        let number = |number: Option<u64>| number.map_or("-".to_owned(), |number| number.to_string());
        let remark = workload.remark().unwrap_or_default();
        format!("{} {} {remark}", number(workload.ranks(2)), number(workload.replicas(2, 4)))
    }

    #[test]
    fn objects_as_their_controllers_keep_them_tell_what_is_asked_for() {
        use WorkloadKind::{Deployment, Job, JobSet, LeaderWorkerSet, StatefulSet};
        let jobs = json!({"replicatedJobs": [
            {"name": "trainer", "replicas": 2, "template": {"spec": {"parallelism": 4, "completions": 4}}},
            {"name": "launcher", "replicas": 1, "template": {"spec": {}}},
        ]});
        let suspended = |spec: &Value| {
            let mut spec = spec.clone();
            spec["suspend"] = json!(true);
            spec
        };
        let huge = json!({"replicas": u64::MAX, "leaderWorkerTemplate": {"size": u64::MAX}});
        let rows = [
            (StatefulSet, json!({"spec": {"replicas": 5}}), "10 2 "),
            (StatefulSet, json!({"spec": {}}), "2 0 "),
            (Deployment, json!({"spec": {"replicas": 0}}), "0 0 "),
            (
                LeaderWorkerSet,
                json!({"spec": {"replicas": 3, "leaderWorkerTemplate": {"size": 3}}}),
                "18 3 ", // a group is one replica and a half
            ),
            (LeaderWorkerSet, json!({"spec": huge}), "18446744073709551615 18446744073709551615 "),
            (Job, job(json!({"parallelism": 4, "completions": 3}), json!([])), "6 1 "),
            (Job, job(json!({"parallelism": 4}), json!([])), "8 2 "),
            (Job, job(json!({"parallelism": 4, "suspend": true}), json!([])), "0 0 it is suspended"),
            (Job, job(json!({"parallelism": 4}), holds("Complete")), "0 0 it has finished"),
            (Job, job(json!({"parallelism": 4}), holds("Failed")), "0 0 it has failed"),
            (Job, job(json!({"parallelism": 4}), json!([{"type": "Complete", "status": "False"}])), "8 2 "),
            (JobSet, job(jobs.clone(), json!([])), "16 4 "), // the launcher is no rank
            (JobSet, job(suspended(&jobs), json!([])), "0 0 it is suspended"),
            (JobSet, job(jobs.clone(), holds("Completed")), "0 0 it has finished"),
            (JobSet, job(jobs, holds("Failed")), "0 0 it has failed"),
        ];
        let ranks = json!({"type": "JobSet", "jobSet": {"replicatedJobs": ["trainer"]}});
        let ranks: Ranks = serde_json::from_value(ranks).expect("ranks");
        for (kind, object, want) in rows {
            assert_eq!(shown(kind, &object, &ranks), want, "{kind:?} {object}");
        }
    }

    #[test]
    fn what_is_not_told_is_no_number() {
        for (told, want) in [
            (Told::Missing, "it does not exist"),
            (Told::Forbidden, "it may not be read by the operator"),
            (Told::Elsewhere, "it is asked once a pod of its namespace claims the refit"),
        ] {
            let workload = Workload { shown: "it".into(), told };
            assert_eq!((workload.ranks(1), workload.replicas(1, 1)), (None, None), "{want}");
            assert_eq!(workload.remark().as_deref(), Some(want));
        }
    }
}
