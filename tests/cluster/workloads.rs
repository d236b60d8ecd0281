//! What workloads that a refit names tell of it: a real Job and a real StatefulSet, scaled and finished by hand, since no
//! controller runs here.

use crate::operator::{is_true, made_ready};
use crate::world::{World, condition};
use serde_json::{Value, json};

impl World {
    /// Both sides of the refit name a workload of this namespace.
    fn name_workloads(&mut self) {
        let training = "    ranks: {type: StatefulSet, ranksPerPod: 1}\n";
        let pool = "      ranks: {type: StatefulSet, ranksPerPod: 2}\n";
        let job = "    workloadRef: {apiVersion: batch/v1, kind: Job, name: trainer}\n";
        let set = "      workloadRef: {apiVersion: apps/v1, kind: StatefulSet, name: engine}\n";
        let documents = self.documents();
        let named = documents.replace(training, &[training, job].concat());
        let named = named.replace(pool, &[pool, set].concat());
        assert_eq!(named.len(), documents.len() + job.len() + set.len());
        self.bed.send("apply", named);
    }

    fn create_workload(&self, api_version: &str, kind: &str, name: &str, spec: Value) {
        let metadata = json!({"name": name, "namespace": self.namespace});
        self.bed.send(
            "create",
            json!({"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}),
        );
    }

    fn wait_for_desired(&mut self, replicas: i64) -> Value {
        self.wait_for_status(&format!("{replicas} replicas are desired"), |status| {
            status["inference"]["desiredReplicas"] == replicas
        })
    }
}

fn resolved(status: &Value) -> &str {
    condition(status, "MembersResolved").2
}

#[test]
fn a_scaled_workload_is_what_is_desired_and_a_finished_one_ends_the_trainer() {
    let mut world = made_ready(World::consenting("workloads"));
    world.name_workloads();
    let status = world.wait_for_status("both are missed", |status| {
        resolved(status).contains("StatefulSet workloads/engine does not exist")
    });
    assert!(resolved(&status).contains("; Job workloads/trainer does not exist"), "{status:#}");
    assert_eq!(status["inference"]["desiredReplicas"], 2, "what is found: {status:#}");

    let template = json!({
        "metadata": {"labels": {"app": "engine"}},
        "spec": {"containers": [{"name": "main", "image": "none"}]},
    });
    let set = json!({
        "replicas": 3, "selector": {"matchLabels": {"app": "engine"}}, "serviceName": "engine", "template": template,
    });
    world.create_workload("apps/v1", "StatefulSet", "engine", set);
    let status = world.wait_for_desired(3);
    assert!(resolved(&status).contains("StatefulSet workloads/engine asks for 3 replicas"), "{status:#}");
    world.bed.kubectl(&["scale", "statefulset", "engine", "-n", "workloads", "--replicas=4"]);
    world.wait_for_desired(4);
    world.bed.kubectl(&["scale", "statefulset", "engine", "-n", "workloads", "--replicas=2"]);
    world.wait_for_desired(2);

    let mut template = template;
    template["spec"]["restartPolicy"] = json!("Never");
    let job = json!({
        "parallelism": 3, "completions": 3, "completionMode": "Indexed", "suspend": true, "template": template,
    });
    world.create_workload("batch/v1", "Job", "trainer", job);
    world.wait_for_status("it is suspended", |status| {
        resolved(status).contains("; Job workloads/trainer is suspended")
    });
    let resume = json!({"spec": {"suspend": false}}).to_string();
    world.bed.kubectl(&["patch", "job", "trainer", "-n", "workloads", "-p", &resume]);
    let status = world.wait_for_status("all is as usual", |status| {
        resolved(status).ends_with("inference 2 replicas, 2 needed.")
    });
    assert_eq!(status["training"]["state"], "Running", "{status:#}");

    // Its pods are gone before anybody saw how they ended; the Job tells.
    (0..3).for_each(|ordinal| world.delete_pod(&format!("trainer-{ordinal}")));
    world.wait_for_status("they are missed", |status| condition(status, "MembersResolved").1 == "RankGap");
    let (begin, end) = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z");
    let holds = |kind: &str| json!({"type": kind, "status": "True", "lastTransitionTime": end});
    let done = json!({
        "startTime": begin, "completionTime": end, "succeeded": 3, "completedIndexes": "0-2",
        "conditions": [holds("SuccessCriteriaMet"), holds("Complete")],
    });
    world.bed.patch_status("/apis/batch/v1/namespaces/workloads/jobs", "trainer", &done);
    let status = world.wait_for_status("the trainer is done", |status| {
        status["training"]["state"] == "Completed" && is_true(status, "Ready")
    });
    assert_eq!(condition(&status, "MembersResolved").1, "TrainerCompleted", "{status:#}");
    assert_eq!(status["inference"]["servingReplicas"], 2, "{status:#}");
}

#[test]
fn a_workload_that_tells_no_size_is_refused_and_one_elsewhere_is_not_asked() {
    let mut world = World::new("odd-workloads");
    world.start_operator();
    let documents = world.documents();
    let refit = documents.split_once("---\n").expect("two documents").0;
    world.apply();
    let with = |reference: &str| {
        let line = format!("worldSize: 3\n    workloadRef: {reference}");
        refit.replace("worldSize: 3", &line)
    };
    world.bed.send("apply", with("{apiVersion: ray.io/v1, kind: RayCluster, name: trainer}"));
    let status =
        world.wait_for_status("it is refused", |status| condition(status, "Accepted").1 == "Unsupported");
    let message = condition(&status, "Accepted").2;
    assert!(message.contains("spec.training.workloadRef: `ray.io/v1 RayCluster`"), "{message}");

    // Somebody who may not read that namespace must not learn from a refit what is in it.
    world.bed.create_namespace("odd-neighbour");
    world
        .bed
        .send("apply", with("{apiVersion: batch/v1, kind: Job, namespace: odd-neighbour, name: trainer}"));
    let status = world.wait_for_status("it is not asked", |status| {
        resolved(status)
            .contains("Job odd-neighbour/trainer is asked once a pod of its namespace claims the refit")
    });
    assert!(is_true(&status, "Accepted"), "{status:#}");
}
