//! A refit from `kubectl apply` to rounds, and what may happen to it, with everything that runs in a cluster but the
//! kubelet.

use crate::commands::weightrefit;
use crate::world::{Side, World, condition};
use rustix::process::Signal;
use serde_json::{Value, json};

pub(crate) fn is_true(status: &Value, kind: &str) -> bool {
    condition(status, kind).0 == "True"
}

/// A world whose refit has all pods, has been ready, and has committed step 0.
pub(crate) fn ready(namespace: &str) -> World {
    made_ready(World::consenting(namespace))
}

/// The same of a world that was prepared.
pub(crate) fn made_ready(mut world: World) -> World {
    world.start_operator();
    world.apply();
    world.start_pods();
    world.wait_for_status("all are connected", |status| is_true(status, "CommunicatorsReady"));
    world.refit(0);
    world.wait_for_status("step 0 is served", |status| status["inference"]["currentReplicas"] == 2);
    world
}

#[test]
fn what_the_operator_makes_is_owned_by_the_definition_and_goes_with_it() {
    let mut world = World::consenting("owned");
    world.start_operator();
    world.apply();
    world.start_pods();
    let definition = ["get", "crd", "weightrefits.weightrefit.dev", "-o", "jsonpath={.metadata.uid}"];
    let uid = world.bed.kubectl(&definition);
    let objects = ["secret/weightrefit-ca", "lease/weightrefit-operator", "configmap/weightrefit-ca-bundle"];
    let wait_until_owned = |world: &mut World| {
        for object in objects {
            world.wait(object, |world| {
                let owners = "jsonpath={.metadata.ownerReferences[*].uid}";
                let output = world.bed.try_kubectl(&["get", object, "-n", "owned", "-o", owners]);
                output.stdout == uid.as_bytes()
            });
        }
    };
    wait_until_owned(&mut world);
    // Whatever of it somebody deletes is made anew, and its owner told anew.
    objects.iter().for_each(|object| drop(world.bed.kubectl(&["delete", object, "-n", "owned"])));
    wait_until_owned(&mut world);
}

#[test]
fn an_applied_refit_becomes_ready_and_its_rounds_are_told() {
    let mut world = World::consenting("rounds");
    world.start_operator();
    world.apply();
    let status = world.wait_for_status("it is accepted", |status| is_true(status, "Accepted"));
    assert_eq!(condition(&status, "MembersResolved").1, "RankGap", "{status:#}");
    assert_eq!(condition(&status, "Ready").1, "MembersMissing", "{status:#}");
    world.start_pods();
    let status = world.wait_for_status("all are connected", |status| {
        let kinds = ["Accepted", "Authorized", "MembersResolved", "CommunicatorsReady"];
        kinds.iter().all(|kind| is_true(status, kind))
    });
    assert_eq!(status["membership"]["epoch"], 1, "{status:#}");
    assert_eq!(status["membership"]["leader"], "rounds/trainer-0");
    assert_eq!((&status["training"]["ranks"], &status["training"]["state"]), (&json!(3), &json!("Running")));
    world.refit(0);
    world.bed.kubectl(&[
        "wait",
        "weightrefit/tiny",
        "-n",
        "rounds",
        "--for=condition=Ready",
        "--timeout=60s",
    ]);
    let status = world.wait_for_status("the round is told", |status| {
        status["lastRound"]["outcome"] == "Committed" && is_true(status, "InSync")
    });
    world.wait("each rank of both replicas is right", |world| world.checks(0) == 4);
    assert_eq!(status["lastRound"]["version"], json!({"run": 0, "step": 0}), "{status:#}");
    assert_eq!(status["inference"]["committed"], json!({"run": 0, "step": 0}), "{status:#}");
    assert!(status.get("behind").is_none() && is_true(&status, "InSync"), "{status:#}");
    assert_eq!(condition(&status, "Degraded").0, "False", "{status:#}");
    assert_eq!(status["plan"]["bytesMinimum"], status["lastRound"]["bytes"]["received"], "{status:#}");
    // What is told of a refit's life is written after its status.
    world.wait("its events are there", |world| {
        let events = world.bed.kubectl(&["get", "events.events.k8s.io", "-n", "rounds", "-o", "json"]);
        let events: Value = serde_json::from_str(&events).expect("JSON");
        let events = events["items"].as_array().expect("a list");
        let about = |reason: &str| events.iter().filter(|event| event["reason"] == reason).count();
        assert!(about("EpochStarted") <= 1 && about("Refitting") <= 1, "{events:#?}");
        about("EpochStarted") == 1 && about("Refitting") == 1
    });
    assert_eq!(world.stop_operator(), Some(0));
}

#[test]
fn a_replaced_training_pod_makes_a_new_epoch_and_a_deleted_engine_none() {
    let mut world = ready("replaced");
    world.delete_pod("engine-1");
    // minReplicas are 2: no round begins before there is another.
    let status = world.wait_for_status("the engine is missed", |status| {
        status["behind"][0]["replica"] == "engine-1"
            && condition(status, "MembersResolved").1 == "NotEnoughReady"
    });
    assert_eq!(
        (&status["membership"]["epoch"], &status["behind"][0]["reason"]),
        (&json!(1), &json!("PeerLost"))
    );

    world.create_pod(Side::Inference, 1);
    world.run_pods();
    let status = world.wait_for_status("the engine is replaced", |status| status["membership"]["epoch"] == 2);
    assert_eq!(status["membership"]["cause"], "MemberReplaced", "{status:#}");

    world.delete_pod("trainer-1");
    world.wait_for_status("the rank is missed", |status| condition(status, "MembersResolved").1 == "RankGap");
    world.create_pod(Side::Training, 1);
    world.restart_trainer();
    let status = world.wait_for_status("the trainer is whole", |status| {
        status["membership"]["epoch"] == 3 && is_true(status, "CommunicatorsReady")
    });
    assert_eq!(status["membership"]["cause"], "TrainingRankLost", "{status:#}");
    world.refit(1);
    world.wait_for_status("rounds go on", |status| {
        status["inference"]["committed"]["step"] == 1 && status["inference"]["currentReplicas"] == 2
    });
    world.wait("each rank of both replicas is right", |world| world.checks(1) == 4);
}

#[test]
fn a_pod_without_consent_gets_nothing_and_the_condition_says_the_command() {
    let mut world = World::new("no-consent");
    world.consent(Side::Training);
    world.start_operator();
    world.apply();
    world.start_pods();
    let status = world.wait_for_status("consent is missed", |status| {
        condition(status, "Authorized").1 == "Unauthorized" && status["training"]["connectedRanks"] == 3
    });
    assert!(status.get("membership").is_none(), "{status:#}");
    assert_eq!(condition(&status, "Stalled").1, "Unauthorized", "{status:#}");
    let message = condition(&status, "Authorized").2;
    let command = message.split("run: ").nth(1).expect("a command");
    let command = command.split(". So it is").next().expect("a command");
    for command in command.split(" && ") {
        let arguments: Vec<&str> = command.split_ascii_whitespace().skip(1).collect();
        world.bed.kubectl(&arguments);
    }
    let status =
        world.wait_for_status("the command was right", |status| is_true(status, "CommunicatorsReady"));
    assert!(is_true(&status, "Authorized"), "{status:#}");
    assert_eq!(status["membership"]["epoch"], 1, "{status:#}");
}

#[test]
fn rounds_go_on_without_the_operator_and_the_next_one_keeps_the_epoch() {
    let mut world = ready("takeover");
    let before = world.get()["status"].clone();
    world.kill_operator();
    world.refit(1);
    world.wait("each rank of both replicas is right", |world| world.checks(1) == 4);
    world.start_operator();
    let status = world.wait_for_status("the next operator leads", |status| {
        status["inference"]["committed"]["step"] == 1 && is_true(status, "CommunicatorsReady")
    });
    assert_eq!(status["membership"], before["membership"]);
    assert!(is_true(&status, "Ready") && is_true(&before, "Ready"), "{status:#}");
    world.refit(2);
    let status =
        world.wait_for_status("rounds are told", |status| status["lastRound"]["version"]["step"] == 2);
    assert_eq!(status["membership"]["epoch"], 1, "{status:#}");
}

#[test]
fn a_refit_that_is_made_anew_in_a_round_goes_on() {
    let mut world = ready("anew");
    let before = world.get();
    world.publish(1);
    let documents = world.documents();
    world.bed.replace_by_force(&documents);
    assert_ne!(world.get()["metadata"]["uid"], before["metadata"]["uid"]);
    let status = world.wait_for_status("it is formed anew", |status| is_true(status, "CommunicatorsReady"));
    assert!(status["membership"]["epoch"].as_i64() >= Some(1), "{status:#}");
    world.restart_trainer();
    world.wait_for_status("the trainer is there", |status| status["training"]["connectedRanks"] == 3);
    world.refit(2);
    world.wait_for_status("rounds go on", |status| {
        status["inference"]["committed"]["step"] == 2 && status["inference"]["currentReplicas"] == 2
    });
}

/// Addresses that others listen at too, as all pods of a node's own network do.
#[test]
fn pods_of_the_host_network_share_an_address() {
    let mut world = World::consenting("host-network");
    world.use_host_network();
    let mut world = made_ready(world);
    world.refit(1);
    world.wait("each rank of both replicas is right", |world| world.checks(1) == 4);
}

#[test]
fn an_aborted_round_ends_and_the_next_is_left_alone() {
    let mut world = ready("aborted");
    world.wait_for_status("the round is told", |status| status["lastRound"]["outcome"] == "Committed");
    let abort = weightrefit(world.bed, &["abort", "tiny", "-n", "aborted"]);
    assert_eq!(abort.code, Some(0), "{}", abort.err);
    world.signal_agents(Side::Inference, Signal::STOP);
    world.publish(1);
    let status = world.wait_for_status("the round is aborted", |status| !status["lastFailedRound"].is_null());
    world.signal_agents(Side::Inference, Signal::CONT);
    assert_eq!(status["lastFailedRound"]["reason"], "Cancelled", "{status:#}");
    world.refit(2);
    world.wait_for_status("the next round commits", |status| status["inference"]["committed"]["step"] == 2);
}

#[test]
fn what_cannot_be_accepted_says_why() {
    let mut world = World::new("refused");
    world.start_operator();
    let documents = world.documents();
    let (refit, map) = documents.split_once("---\n").expect("two documents");
    world.bed.send("create", refit);
    let reason = |world: &mut World, reason: &str| {
        let status = world.wait_for_status(&format!("the reason is {reason}"), |status| {
            condition(status, "Accepted").1 == reason
        });
        assert_eq!(condition(&status, "Stalled").1, if reason == "Valid" { "" } else { "NotAccepted" });
        condition(&status, "Accepted").2.to_owned()
    };
    let message = reason(&mut world, "NoConfigMap");
    assert!(message.contains("ConfigMap refused/tiny-tensors does not exist"), "{message}");
    world.bed.send("create", map);
    reason(&mut world, "Valid");
    world.bed.send("replace", map.replace("tensors.json", "tensors"));
    let message = reason(&mut world, "NoConfigMapKey");
    assert!(message.contains("no key `tensors.json`"), "{message}");
    world.bed.send("replace", map.replace("{\"tensors\": [", "{\"tensors\": [[,"));
    reason(&mut world, "ModelRejected");
    world.bed.send("replace", map.replace("[256, 256]", "[256, 255]"));
    let message = reason(&mut world, "LayoutRejected");
    assert!(message.contains("spec."), "{message}");
    world.bed.send("replace", zip_bomb(&world.namespace));
    reason(&mut world, "ConfigMapTooLarge");
    world.bed.send("replace", map);
    reason(&mut world, "Valid");
    world
        .bed
        .send("apply", refit.replace("worldSize: 3", "worldSize: 3\n    publish: {mode: SnapshotDevice}"));
    let message = reason(&mut world, "Unsupported");
    assert!(message.contains("spec.training.publish.mode"), "{message}");
    assert_eq!(world.stop_operator(), Some(0));
}

/// A ConfigMap whose value is small and expands to more than is read.
fn zip_bomb(namespace: &str) -> String {
    use base64::Engine;
    use std::io::Write;
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    let zeros = vec![0; 1 << 20];
    for _ in 0..=(weightrefit::limits::INFLATED_BYTES_MAX >> 20) {
        gzip.write_all(&zeros).expect("memory");
    }
    let bytes = gzip.finish().expect("memory");
    let encoded = base64::engine::general_purpose::STANDARD.encode(bytes);
    let metadata = json!({"name": "tiny-tensors", "namespace": namespace});
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": {"tensors.json": encoded}})
        .to_string()
}
