//! The watch of pods that claim a refit.

use crate::bed::Bed;
use crate::members::{PATIENCE, create_pod};
use serde_json::json;
use tokio_stream::{Stream, StreamExt};
use weightrefit::controller::pod_facts::Side;
use weightrefit::controller::pods::Pods;
use weightrefit::controller::scope::Scope;
use weightrefit::operator::telemetry::Metrics;

/// Reads changes until the refit is told of, and the watch knows what is wanted.
async fn told(
    changes: &mut (impl Stream<Item = String> + Unpin),
    refit: &str,
    what: &str,
    known: impl Fn() -> bool,
) {
    let mut is_told = false;
    while !is_told || !known() {
        let changed = tokio::time::timeout(PATIENCE, changes.next()).await;
        let changed = changed.unwrap_or_else(|_| panic!("{refit} is never told that {what}"));
        is_told = changed.expect("changes never end") == refit;
    }
}

#[tokio::test]
async fn the_watch_follows_pods_from_refit_to_refit_and_leaves_out_what_it_cannot_read() {
    let bed = Bed::shared();
    bed.create_namespace("pods");
    let failures = Metrics::new().expect("metrics").watch_failures;
    let before = create_pod(
        bed,
        "pods",
        "trainer-0",
        json!({"weightrefit.dev/refit": "one", "weightrefit.dev/side": "training"}),
    );
    let pods = Pods::new(&bed.client().await, Scope::of(vec!["pods".to_owned()]), &failures);
    pods.synced().await;
    let names = |refit: &str| {
        let pods = pods.of(refit);
        pods.iter().map(|pod| pod.name.clone()).collect::<Vec<_>>().join(" ")
    };
    assert!(pods.is_synced() && names("pods/one") == "trainer-0", "pods from before the watch are known");
    let facts = pods.by_uid(&before).expect("it claims a refit");
    assert_eq!((facts.side, facts.ready, facts.service_account.as_str()), (Side::Training, true, "default"));
    assert_eq!(facts.node.as_deref(), Some("pods-trainer-0"));
    assert_eq!(facts.ips, ["127.0.0.9".parse::<std::net::IpAddr>().expect("an address")]);

    let mut changes = Box::pin(pods.changes());
    let labels = json!({"weightrefit.dev/refit": "one", "weightrefit.dev/side": "sideways"});
    create_pod(bed, "pods", "odd-0", labels);
    create_pod(bed, "pods", "bystander-0", json!({"app": "vllm"}));
    let labels = json!({
        "weightrefit.dev/refit": "one",
        "weightrefit.dev/refit-namespace": "elsewhere",
        "weightrefit.dev/side": "inference",
        "weightrefit.dev/pool": "big",
    });
    let uid = create_pod(bed, "pods", "vllm-0", labels);
    told(&mut changes, "elsewhere/one", "a pod came", || names("elsewhere/one") == "vllm-0").await;
    assert_eq!(pods.by_uid(&uid).expect("it claims a refit").pool, "big");
    assert_eq!(names("pods/one"), "trainer-0", "the odd pod is left out");

    bed.kubectl(&["label", "pod", "odd-0", "-n", "pods", "--overwrite", "weightrefit.dev/side=training"]);
    told(&mut changes, "pods/one", "the odd pod was mended", || names("pods/one") == "odd-0 trainer-0").await;
    for (side, all) in [("sideways", "trainer-0"), ("training", "odd-0 trainer-0")] {
        let label = format!("weightrefit.dev/side={side}");
        bed.kubectl(&["label", "pod", "odd-0", "-n", "pods", "--overwrite", &label]);
        let is_odd = side == "sideways";
        told(&mut changes, "pods/one", side, || pods.malformed("pods/one").is_empty() != is_odd).await;
        assert_eq!(names("pods/one"), all, "{side}");
    }
    bed.kubectl(&["label", "pod", "odd-0", "-n", "pods", "--overwrite", "weightrefit.dev/refit=two"]);
    told(&mut changes, "pods/two", "it changed refit", || names("pods/two") == "odd-0").await;
    assert_eq!(names("pods/one"), "trainer-0");
    bed.kubectl(&["label", "pod", "odd-0", "-n", "pods", "weightrefit.dev/refit-"]);
    told(&mut changes, "pods/two", "it claims none any more", || names("pods/two").is_empty()).await;

    bed.kubectl(&["delete", "pod", "vllm-0", "-n", "pods", "--wait=false"]);
    let is_deleting = || pods.by_uid(&uid).is_none_or(|pod| pod.deleting);
    told(&mut changes, "elsewhere/one", "its deletion began", is_deleting).await;
    bed.kubectl(&["delete", "pod", "vllm-0", "-n", "pods", "--grace-period=0", "--force"]);
    told(&mut changes, "elsewhere/one", "it is gone", || pods.by_uid(&uid).is_none()).await;
    assert_eq!(names("elsewhere/one"), "");
}
