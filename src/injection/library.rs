//! The library by which a rank moves its bytes in its own process, and the container that copies it out of the agent's image:
//! image volumes would do without, but not on every cluster.

use super::offer::LIBRARY;
use super::quality::quality;
use super::{LIBRARY_CONTAINER, Profile, Settings, agent};
use k8s_openapi::api::core::v1::{Container, PodSpec};
use serde_json::{Value, json};

/// An init container that ends before the pod's containers start. `first` is the one whose user it has.
pub(super) fn container(settings: &Settings, profile: &Profile, spec: &PodSpec, first: &Container) -> Value {
    let mut container = json!({
        "name": LIBRARY_CONTAINER,
        "image": settings.image,
        "args": ["copy-library", format!("--to={}", LIBRARY.folder)],
        "securityContext": agent::security(profile, first),
        "volumeMounts": [{"name": LIBRARY.volume, "mountPath": LIBRARY.folder}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    });
    if let Some(policy) = settings.image_pull_policy {
        container["imagePullPolicy"] = json!(format!("{policy:?}"));
    }
    if let Some(amounts) = agent::amounts(quality(spec), profile) {
        container["resources"] = amounts;
    }
    container
}

/// On the node's disk, which is no memory of the pod's. It has room for two, as one replaces the other whole.
pub(super) fn volume() -> Value {
    json!({"name": LIBRARY.volume, "emptyDir": {"sizeLimit": "256Mi"}})
}
