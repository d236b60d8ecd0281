//! Pods that claim a rank twice, cannot be read, cannot be reached, or have ended.

use crate::operator::{is_true, ready};
use crate::rogue::{Rogue, joining, training};
use crate::world::{AUDIENCE, Side, World, condition};
use serde_json::{Value, json};
use weightrefit_proto::v1::agent_message::Kind;

/// A pod of the trainer's account, with these labels beside the claim, and its UID.
fn pod(world: &World, name: &str, labels: Value, status: Value) -> String {
    let mut all = json!({"weightrefit.dev/refit": "tiny"});
    for (key, value) in labels.as_object().expect("an object") {
        all[key] = value.clone();
    }
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": world.namespace, "labels": all},
        "spec": {"serviceAccountName": "trainer", "containers": [{"name": "main", "image": "none"}]},
    });
    let created = world.bed.send("create", pod);
    patch(world, name, status);
    created["metadata"]["uid"].as_str().expect("a uid").to_owned()
}

fn patch(world: &World, name: &str, status: Value) {
    world.bed.patch_status(&format!("/api/v1/namespaces/{}/pods", world.namespace), name, &status);
}

fn trainer(ordinal: &str) -> Value {
    json!({"weightrefit.dev/side": "training", "apps.kubernetes.io/pod-index": ordinal})
}

fn running(ip: &str) -> Value {
    json!({"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]})
}

fn rank_1(world: &World, uid: &str) -> Kind {
    Kind::Joining(joining(&format!("{}/tiny", world.namespace), uid, 9, vec![training(1)]))
}

#[test]
fn of_two_pods_of_one_rank_the_older_holds_it_and_both_are_named() {
    let mut world = ready("doubles");
    let epoch = |status: &Value| status["membership"]["epoch"].as_u64();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let doubles = |world: &mut World, young: &str, old: &str| {
        let want =
            format!("pod doubles/{young} claims seat training/1, which the older pod doubles/{old} holds");
        let status = world.wait_for_status(&want, |status| {
            let (_, reason, message) = condition(status, "MembersResolved");
            reason == "DuplicateRank" && message.starts_with(&want)
        });
        assert_eq!(condition(&status, "MembersResolved").0, "False", "{status:#}");
    };
    let resolved = |world: &mut World| {
        world.wait_for_status("one is gone", |status| is_true(status, "MembersResolved"));
    };

    // The younger comes second.
    let copy = pod(&world, "copy-1", trainer("1"), running("127.0.0.9"));
    doubles(&mut world, "copy-1", "trainer-1");
    let token = world.bed.token("doubles", "trainer", AUDIENCE, "copy-1");
    let (port, claim) = (world.port(), rank_1(&world, &copy));
    let rogue = runtime.block_on(async {
        let rogue = Rogue::enrolled(&port, &copy, &token).await;
        let refused = rogue.open(Some(claim.clone())).await.expect("a stream").refusal().await;
        assert_eq!(refused.code, "DuplicateRank", "{refused:?}");
        assert!(refused.message.contains("which the older pod doubles/trainer-1 holds"), "{refused:?}");
        rogue
    });
    let status = world.get()["status"].clone();
    assert_eq!((epoch(&status), is_true(&status, "CommunicatorsReady")), (Some(1), true), "{status:#}");

    // The older is deleted: the younger holds the rank, and it is the older of the next pair.
    world.delete_pod("trainer-1");
    resolved(&mut world);
    let line = runtime.block_on(async {
        let mut line = rogue.open(Some(claim)).await.expect("a stream");
        assert_eq!(line.membership().await.epoch().0, 2, "it is a member now");
        line
    });
    world.create_pod(Side::Training, 1);
    world.run_pods();
    doubles(&mut world, "trainer-1", "copy-1");
    world.bed.kubectl(&["delete", "pod", "copy-1", "-n", "doubles", "--force", "--grace-period=0"]);
    let fault = runtime.block_on(line.refusal());
    assert_eq!(fault.code, "Unauthorized", "{fault:?}");
    resolved(&mut world);
    world.restart_trainer();
    world.wait_for_status("the right one is in", |status| {
        epoch(status) == Some(3) && is_true(status, "CommunicatorsReady")
    });
    world.refit(1);
    world.wait("each rank of both replicas is right", |world| world.checks(1) == 4);
}

#[test]
fn pods_that_cannot_be_ranks_are_listed_and_those_that_have_ended_leave() {
    let mut world = ready("odd");
    let side = |side: &str| json!({"weightrefit.dev/side": side, "apps.kubernetes.io/pod-index": "7"});
    pod(&world, "odd-0", side("sideways"), running("127.0.0.9"));
    let status = world.wait_for_status("it is told", |status| {
        condition(status, "MembersResolved").2.contains("odd/odd-0 has label weightrefit.dev/side")
    });
    assert_eq!(condition(&status, "MembersResolved").1, "Complete", "all ranks are there: {status:#}");
    pod(&world, "odd-1", json!({}), running("127.0.0.9"));
    pod(&world, "far-9", trainer("9"), running("127.0.0.9"));
    pod(&world, "nameless", json!({"weightrefit.dev/side": "training"}), running("::1"));
    pod(&world, "text-1", trainer("one"), running("127.0.0.9"));
    let status = world.wait_for_status("more are counted", |status| {
        condition(status, "MembersResolved").2.contains("; and 3 more; ")
    });
    assert!(is_true(&status, "Ready") && is_true(&status, "MembersResolved"), "{status:#}");
    for name in ["odd-0", "odd-1", "far-9", "nameless", "text-1"] {
        world.bed.kubectl(&["delete", "pod", name, "-n", "odd", "--force", "--grace-period=0"]);
    }
    world.wait_for_status("they are gone", |status| !condition(status, "MembersResolved").2.contains("odd/"));

    // A pod without an address holds its seat and is no member yet; one that is going away holds none.
    let engine = json!({"weightrefit.dev/side": "inference", "apps.kubernetes.io/pod-index": "1"});
    world.delete_pod("engine-1");
    pod(&world, "engine-1", engine, json!({"phase": "Pending"}));
    world.wait_for_status("it is waited for", |status| {
        let (_, reason, message) = condition(status, "MembersResolved");
        reason == "NotEnoughReady" && message.contains("pod odd/engine-1 has no status.podIPs yet")
    });
    world.bed.kubectl(&["delete", "pod", "engine-1", "-n", "odd", "--force", "--grace-period=0"]);
    world.create_pod(Side::Inference, 1);
    world.run_pods();
    world.wait_for_status("it is back", |status| {
        status["membership"]["epoch"] == 2 && is_true(status, "CommunicatorsReady")
    });
    world.refit(1);
    world.wait_for_status("it serves", |status| status["inference"]["currentReplicas"] == 2);

    // A trainer that has finished leaves the membership; engines serve on.
    for ordinal in 0..3 {
        assert_eq!(world.get()["status"]["membership"]["epoch"], 2, "as long as one trains");
        patch(&world, &format!("trainer-{ordinal}"), json!({"phase": "Succeeded"}));
    }
    let status = world.wait_for_status("the trainer is done", |status| {
        status["membership"]["epoch"] == 3
            && is_true(status, "CommunicatorsReady")
            && condition(status, "MembersResolved").1 == "TrainerCompleted"
    });
    assert_eq!(status["membership"]["cause"], "TrainingChanged", "{status:#}");
    assert_eq!(status["membership"]["leader"], "odd/engine-0", "{status:#}");
    assert!(is_true(&status, "Ready"), "{status:#}");
    for ordinal in 0..3 {
        world.delete_pod(&format!("trainer-{ordinal}"));
    }
    world.stop_operator();
    world.start_operator();
    world.wait("the next operator knows it is over", |world| world.operator_said("epoch goes on"));
    let status = world.get()["status"].clone();
    assert_eq!(
        (&status["membership"]["epoch"], &status["training"]["state"]),
        (&json!(3), &json!("Completed"))
    );

    // Another trainer begins.
    (0..3).for_each(|ordinal| world.create_pod(Side::Training, ordinal));
    world.restart_trainer();
    world.wait_for_status("it is in", |status| {
        status["membership"]["epoch"] == 4 && is_true(status, "CommunicatorsReady")
    });
    world.refit(2);
    world.wait_for_status("rounds go on", |status| {
        status["inference"]["committed"]["step"] == 2 && status["inference"]["currentReplicas"] == 2
    });
}
