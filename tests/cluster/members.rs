//! Pods that claim a refit, made by hand, and their tokens.

use crate::bed::Bed;
use serde_json::{Value, json};
use std::future::Future;
use std::time::{Duration, Instant};

/// For what follows within a second unless the machine is busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Creates the pod `name` on the node `name`, with these labels and an address, and returns its UID.
pub(crate) fn create_pod(bed: &Bed, namespace: &str, name: &str, labels: Value) -> String {
    let node = format!("{namespace}-{name}");
    bed.send("create", json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}));
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"nodeName": node, "containers": [{"name": "main", "image": "none"}]},
    });
    let created = bed.send("create", pod);
    let status = json!({"status": {
        "phase": "Running",
        "podIP": "127.0.0.9",
        "podIPs": [{"ip": "127.0.0.9"}],
        "conditions": [{"type": "Ready", "status": "True"}],
    }});
    bed.kubectl(&["patch", "pod", name, "-n", namespace, "--subresource=status", "-p", &status.to_string()]);
    created["metadata"]["uid"].as_str().expect("a UID").to_owned()
}

/// A token of the account `default` for an audience, bound to a pod where one is named.
pub(crate) fn token(bed: &Bed, namespace: &str, audience: &str, pod: Option<&str>) -> String {
    let audience = format!("--audience={audience}");
    let bound = pod.map(|pod| format!("--bound-object-name={pod}"));
    let mut arguments = vec!["create", "token", "default", "-n", namespace, &audience];
    if let Some(bound) = &bound {
        arguments.extend(["--bound-object-kind=Pod", bound]);
    }
    bed.kubectl(&arguments).trim_end().to_owned()
}

/// Asks until the answer is there.
pub(crate) async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, ask: impl Fn() -> F) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(start.elapsed() < PATIENCE, "it never happened that {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
