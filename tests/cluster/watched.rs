//! An operator that looks at some namespaces, and has its rights in these alone.

use crate::members::{create_pod, token};
use crate::operator::{is_true, made_ready};
use crate::rogue::Rogue;
use crate::world::{AUDIENCE, World, condition, documents_in};
use serde_json::{Value, json};

impl World {
    /// Status of the refit of another namespace.
    fn status_in(&self, namespace: &str) -> Value {
        self.bed.refits(namespace)[0]["status"].clone()
    }

    fn change_in(&self, namespace: &str) -> i64 {
        let patch = json!({"spec": {"timeouts": {"totalSeconds": 299}}}).to_string();
        let changed =
            ["patch", "weightrefit", "tiny", "-n", namespace, "--type=merge", "-p", &patch, "-o", "json"];
        let refit: Value = serde_json::from_str(&self.bed.kubectl(&changed)).expect("JSON");
        refit["metadata"]["generation"].as_i64().expect("a generation")
    }
}

#[test]
fn an_operator_of_two_namespaces_serves_the_refits_of_both_and_nobody_elses() {
    let mut world = World::consenting("watched-one");
    world.watch_too("watched-two");
    world.bed.create_namespace("unwatched");
    for namespace in ["watched-two", "unwatched"] {
        world.bed.send("apply", documents_in(namespace));
    }
    let mut world = made_ready(world);
    world.wait("the other refit is accepted", |world| is_true(&world.status_in("watched-two"), "Accepted"));
    // Both are still followed, whichever list came last.
    for namespace in ["watched-one", "watched-two"] {
        let generation = world.change_in(namespace);
        world.wait(&format!("the change in {namespace} is seen"), |world| {
            world.status_in(namespace)["observedGeneration"] == generation
        });
    }
    world.refit(1);
    world.wait_for_status("step 1 is served", |status| status["inference"]["currentReplicas"] == 2);

    // Its pods of the other namespace belong to it.
    let labels = |refit_namespace: &str| {
        json!({
            "weightrefit.dev/refit": "tiny",
            "weightrefit.dev/refit-namespace": refit_namespace,
            "weightrefit.dev/side": "inference",
            "apps.kubernetes.io/pod-index": "7",
        })
    };
    create_pod(world.bed, "watched-two", "guest-0", labels("watched-one"));
    let status = world.wait_for_status("its pod elsewhere is asked for consent", |status| {
        condition(status, "Authorized").0 == "False"
    });
    let message = condition(&status, "Authorized").2;
    assert!(message.contains("watched-two:default of pod watched-two/guest-0 may not receive"), "{message}");

    // What it does not look at it neither serves nor asks for again and again.
    let uid = create_pod(world.bed, "unwatched", "stranger-0", labels("watched-one"));
    let token = token(world.bed, "unwatched", AUDIENCE, Some("stranger-0"));
    let port = world.port();
    let runtime = tokio::runtime::Runtime::new().expect("threads");
    let refused = runtime.block_on(async { Rogue::stranger(&port).enrol(&uid, &token).await });
    let refused = refused.expect_err("of no namespace that is watched");
    assert_eq!(refused.code, "NotConfigured", "{refused:?}");
    assert!(refused.message.contains("pod unwatched/stranger-0 is of a namespace that"), "{refused:?}");
    assert!(world.status_in("unwatched").is_null());
    let metrics = world.metrics();
    for resource in ["pods", "weightrefits"] {
        let none = format!("weightrefit_operator_watch_failures_total{{resource=\"{resource}\"}} 0\n");
        assert!(metrics.contains(&none), "{metrics}");
    }
}
