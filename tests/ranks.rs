//! Which ranks pods are by what the controllers of their workloads write on them: `tests/ranks/NAME.yaml` holds pods of
//! the shape that a controller gives them, the side that they are of, and the seats or the refusal of each.

use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use weightrefit::api::refit::WeightRefitSpec;
use weightrefit::controller::pod::Pod;
use weightrefit::controller::pod_facts::PodFacts;
use weightrefit::controller::seats::{Allowed, allowed};

#[test]
fn pods_are_the_ranks_that_their_controllers_number() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ranks");
    let mut files = 0;
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("entry").path();
        let text = fs::read_to_string(&path).expect("text");
        let case: Value = serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        let spec = spec(&case["side"]);
        let is_training = case["side"].get("training").is_some();
        for pod in case["pods"].as_array().expect("pods") {
            let want = pod["want"].as_str().expect("what is wanted");
            let got = match allowed(&spec, &facts(pod, is_training)) {
                Ok(Allowed::Exactly(seats)) => {
                    let seats = seats.iter().map(|seat| seat.to_string().replace("inference/default/", ""));
                    seats.collect::<Vec<_>>().join(" ")
                }
                Ok(Allowed::Announced(bounds)) => bounds.shown(),
                Err(error) => error.to_string(),
            };
            assert!(
                got == want || (got.starts_with("pod ") && got.contains(want)),
                "{path:?}: {got}\nwant: {want}"
            );
        }
        files += 1;
    }
    assert!(files >= 12, "{files} files");
}

/// A refit with one side as the case says.
fn spec(side: &Value) -> WeightRefitSpec {
    let mut pool =
        side.get("pool").cloned().unwrap_or(json!({"ranksPerReplica": 1, "ranks": {"type": "Deployment"}}));
    pool["name"] = json!("default");
    let training = side.get("training").cloned();
    let training = training.unwrap_or(json!({"worldSize": 1, "ranks": {"type": "StatefulSet"}}));
    let spec = json!({"model": {"type": "Registered"}, "training": training, "inference": {"pools": [pool]}});
    serde_json::from_value(spec).expect("a spec")
}

fn facts(pod: &Value, is_training: bool) -> PodFacts {
    let side = if is_training { "training" } else { "inference" };
    let mut labels = pod["labels"].clone();
    labels["weightrefit.dev/refit"] = json!("tiny");
    labels["weightrefit.dev/side"] = json!(side);
    let metadata = json!({
        "name": pod["name"], "namespace": "ns", "uid": "u", "labels": labels,
        "annotations": pod.get("annotations").cloned().unwrap_or(json!({})),
        "ownerReferences": pod.get("ownerReferences").cloned().unwrap_or(json!([])),
    });
    let pod =
        json!({"metadata": metadata, "spec": {"containers": []}, "status": {"podIPs": [{"ip": "10.0.0.1"}]}});
    PodFacts::of(&serde_json::from_value::<Pod>(pod).expect("a pod")).expect("facts")
}
