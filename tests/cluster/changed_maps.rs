//! ConfigMaps that a refit names, changed and deleted at all times: one epoch means one resolved refit.

use crate::operator::{is_true, ready};
use crate::world::{World, condition};
use serde_json::Value;

/// The ConfigMap with its rows in this order: another order is another table.
fn map(world: &World, is_reversed: bool) -> String {
    let documents = world.documents();
    let (_, map) = documents.split_once("---\n").expect("two documents");
    let rows: Vec<&str> = map.lines().filter(|line| line.contains("\"shape\"")).collect();
    let ordered: Vec<&str> = if is_reversed { rows.iter().rev().copied().collect() } else { rows.clone() };
    let ordered: Vec<String> = ordered.iter().map(|row| row.trim_end_matches(',').to_owned()).collect();
    map.replace(&rows.join("\n"), &ordered.join(",\n"))
}

fn epoch(status: &Value) -> (u64, &str) {
    let membership = &status["membership"];
    (membership["epoch"].as_u64().unwrap_or_default(), membership["cause"].as_str().unwrap_or_default())
}

#[test]
fn an_epoch_means_one_resolved_refit_whenever_its_config_map_changes() {
    let mut world = ready("changed");
    let refit_goes_on = |world: &mut World, step: i64| {
        world.refit(step);
        world.wait_for_status("the round is told", |status| {
            status["inference"]["committed"]["step"] == step && status["inference"]["currentReplicas"] == 2
        });
    };

    // While no operator looks: text that means the same is the same, another table is another epoch.
    let before = world.get()["status"]["membership"].clone();
    world.stop_operator();
    let same = map(&world, false).replace("{\"tensors\": [", "{ \"tensors\" :  [");
    world.bed.send("replace", same);
    world.start_operator();
    world.wait("the next operator goes on", |world| world.operator_said("epoch goes on"));
    assert_eq!(world.get()["status"]["membership"], before);
    world.stop_operator();
    world.bed.send("replace", map(&world, true));
    world.start_operator();
    let status = world.wait_for_status("there is a new epoch", |status| {
        epoch(status) == (2, "SpecChanged") && is_true(status, "CommunicatorsReady")
    });
    assert_ne!(status["membership"]["resolvedDigest"], before["resolvedDigest"]);
    assert_eq!(status["membership"]["digest"], before["digest"], "its members are the same");
    refit_goes_on(&mut world, 1);

    // While a round runs: it ends as it began.
    world.publish(2);
    world.bed.send("replace", map(&world, false));
    let status = world.wait_for_status("the round has ended and the epoch is new", |status| {
        status["inference"]["committed"]["step"] == 2 && epoch(status) == (3, "SpecChanged")
    });
    assert_eq!(status["membership"]["resolvedDigest"], before["resolvedDigest"]);

    // Deleted: rounds go on with what was accepted.
    world.bed.kubectl(&["delete", "configmap", "tiny-tensors", "-n", "changed"]);
    let status =
        world.wait_for_status("it is missed", |status| condition(status, "Accepted").1 == "NoConfigMap");
    assert_eq!(condition(&status, "Degraded").1, "ChangeRefused", "{status:#}");
    refit_goes_on(&mut world, 3);
    world.wait("each rank of both replicas is right", |world| world.checks(3) == 4);
    world.bed.send("create", map(&world, false));
    let status = world.wait_for_status("all is well", |status| {
        is_true(status, "Accepted") && is_true(status, "Ready") && condition(status, "Degraded").0 == "False"
    });
    assert_eq!(epoch(&status).0, 3, "{status:#}");
}
