//! The readiness gate that pods may ask for, and that its writer can write nothing else of a pod.

use crate::operator::made_ready;
use crate::world::{World, condition};
use axum::http::HeaderValue;
use kube::api::{Patch, PatchParams, Request};
use serde_json::{Value, json};
use weightrefit::controller::pod_facts::WEIGHTS_CURRENT;

impl World {
    fn pod(&self, name: &str) -> Value {
        let pod = self.bed.kubectl(&["get", "pod", name, "-n", &self.namespace, "-o", "json"]);
        serde_json::from_str(&pod).expect("JSON")
    }

    fn wait_for_gate(&mut self, pod: &str, status: &str) {
        self.wait(&format!("the gate of {pod} is {status}"), |world| {
            condition(&world.pod(pod)["status"], WEIGHTS_CURRENT).0 == status
        });
    }
}

#[test]
fn a_gate_follows_the_engines_and_the_operator_may_write_nothing_else() {
    let mut world = World::consenting("gates");
    world.gate_engines();
    let mut world = made_ready(world);
    // An operator that may not write it says so where people look.
    let degraded = |status: &Value| condition(status, "Degraded").1 == "GateNotWritten";
    let status = world.wait_for_status("it is told that no gate is written", degraded);
    let message = condition(&status, "Degraded").2;
    assert!(message.contains("of pod gates/engine-") && message.contains("pods/status"), "{message}");
    assert_eq!(condition(&world.pod("engine-0")["status"], WEIGHTS_CURRENT).0, "");
    world.kill_operator();
    world.grant("readiness-rbac.yaml");
    world.start_operator();
    world.wait_for_status("nothing is wrong any more", |status| {
        condition(status, "Degraded").1 == "AsExpected"
    });
    world.wait_for_gate("engine-0", "True");
    world.wait_for_gate("engine-1", "True");
    assert_eq!(condition(&world.pod("trainer-0")["status"], WEIGHTS_CURRENT).0, "", "it asked for none");
    // Whoever starts anew has weights that nobody has verified.
    world.stop_engines("engine-1");
    world.wait_for_gate("engine-1", "False");
    world.run_pods();
    world.wait("its engines are registered", |world| world.is_registered("engine-1"));
    world.refit(1);
    world.wait_for_gate("engine-1", "True");
    assert_eq!(condition(&world.pod("engine-0")["status"], WEIGHTS_CURRENT).0, "True");

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let may = |world: &World, patch: &Value| {
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(patch));
        let pods = Request::new("/api/v1/namespaces/gates/pods");
        let mut request =
            pods.patch_subresource("status", "engine-0", &parameters, &patch).expect("a request");
        let operator = HeaderValue::from_static("system:serviceaccount:gates:weightrefit-operator");
        request.headers_mut().insert("Impersonate-User", operator);
        let answer = async { world.bed.client().await.request::<Value>(request).await };
        runtime.block_on(answer).map(drop).map_err(|error| error.to_string())
    };
    let elsewhere = json!({"status": {"podIP": "127.9.9.9", "podIPs": [{"ip": "127.9.9.9"}]}});
    // Each of these but the first by a line of its own in the policy.
    for patch in [
        json!({"status": {"podIP": "127.9.9.9"}}),
        elsewhere,
        json!({"status": {"phase": "Succeeded"}}),
        json!({"status": {"hostIP": "127.9.9.9"}}),
        json!({"status": {"containerStatuses": [
            {"name": "main", "image": "none", "imageID": "", "ready": true, "restartCount": 0},
        ]}}),
        json!({"status": {"startTime": "2020-01-01T00:00:00Z"}}),
        json!({"status": {"reason": "Evicted"}}),
        json!({"status": {"message": "moved"}}),
        json!({"metadata": {"annotations": {"example.com/moved": "true"}}}),
        json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}),
        json!({"metadata": {"labels": {"weightrefit.dev/refit": "other"}}}),
    ] {
        world.wait(&format!("{patch} is refused"), |world| {
            may(world, &patch).is_err_and(|said| said.contains("the operator may"))
        });
    }
    let own =
        json!({"status": {"conditions": [{"type": WEIGHTS_CURRENT, "status": "True", "message": "x"}]}});
    assert_eq!(may(&world, &own), Ok(()));
}
