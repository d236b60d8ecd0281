//! The agent's container.

use super::offer::SOCKET;
use super::quality::{Quality, quality};
use super::{
    AGENT_CONTAINER, DeviceAccess, IDENTITY_FOLDER, IDENTITY_VOLUME, LogFormat, Profile, SHM, Settings,
};
use crate::controller::pod_facts::Side;
use crate::identity::{CA_BUNDLE_KEY, SERVER_NAME};
use k8s_openapi::api::core::v1::{Container, PodSpec, ResourceClaim};
use serde_json::{Map, Value, json};

/// What the pod's labels say.
#[derive(Debug)]
pub(super) struct Claim {
    /// Namespace of the refit, where it is not the pod's own.
    pub(super) namespace: Option<String>,
    /// Name of the refit.
    pub(super) refit: String,
    /// Side of the pod.
    pub(super) side: Side,
    /// Whether the pod's readiness is that of its ranks.
    pub(super) is_probed: bool,
}

/// The container: a native sidecar, which starts before trainer or engine and ends after it. `first` is the container
/// that the agent shares its user and its `/dev/shm` with.
pub(super) fn container(
    settings: &Settings,
    (_, profile): (&str, &Profile),
    claim: &Claim,
    spec: &PodSpec,
    first: &Container,
) -> Value {
    let port = profile.metrics_port;
    let mut container = json!({
        "name": AGENT_CONTAINER,
        "image": settings.image,
        "restartPolicy": "Always",
        "args": arguments(settings, profile, claim),
        "env": [
            variable("POD_NAMESPACE", "metadata.namespace"),
            variable("POD_UID", "metadata.uid"),
            variable("POD_IP", "status.podIP"),
        ],
        "ports": [{"name": "weightrefit", "containerPort": port, "protocol": "TCP"}],
        // The socket listens before this is served. It asks for nothing else: pods start without the operator.
        "startupProbe": probe("/livez", port, 120),
        "securityContext": security(profile, first),
        "volumeMounts": mounts(spec, first),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    });
    if let Some(policy) = settings.image_pull_policy {
        container["imagePullPolicy"] = json!(format!("{policy:?}"));
    }
    if claim.is_probed {
        // At once: an engine that is poisoned or gone must get no more requests.
        container["readinessProbe"] = probe("/readyz", port, 1);
    }
    if let Some(resources) = resources(quality(spec), profile, first) {
        container["resources"] = resources;
    }
    container
}

/// `$(NAME)` is for the kubelet, which fills in the variable.
fn arguments(settings: &Settings, profile: &Profile, claim: &Claim) -> Vec<String> {
    let namespace = claim.namespace.as_deref().unwrap_or("$(POD_NAMESPACE)");
    let side = match claim.side {
        Side::Training => "training",
        Side::Inference => "inference",
    };
    let format = match profile.log_format {
        LogFormat::Text => "text",
        LogFormat::Json => "json",
    };
    let mut arguments = vec![
        // An agent that fails begins anew where it is: the container's restart count is read as the pod's health.
        "--supervise".to_owned(),
        format!("--coordinator={}", settings.coordinator),
        format!("--coordinator-name={SERVER_NAME}"),
        format!("--trust-bundle={IDENTITY_FOLDER}/{CA_BUNDLE_KEY}"),
        format!("--token={IDENTITY_FOLDER}/token"),
        format!("--refit={namespace}/{}", claim.refit),
        "--pod-uid=$(POD_UID)".to_owned(),
        format!("--side={side}"),
        format!("--socket={}", SOCKET.value),
        "--listen=$(POD_IP)".to_owned(),
        format!("--metrics={}", profile.metrics_port),
        format!("--log-format={format}"),
    ];
    arguments.extend(profile.allow_time_slicing.then(|| "--allow-time-slicing".to_owned()));
    arguments
}

fn variable(name: &str, field: &str) -> Value {
    json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}})
}

fn probe(path: &str, port: u16, failures: u32) -> Value {
    json!({"httpGet": {"path": path, "port": port}, "periodSeconds": 1, "failureThreshold": failures})
}

/// What the `restricted` Pod Security Standard asks for, with the user of the container whose socket it is: only that
/// user may speak to the agent.
pub(super) fn security(profile: &Profile, first: &Container) -> Value {
    let mut security = json!({
        "allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": true,
        "seccompProfile": {"type": "RuntimeDefault"},
    });
    let Some(own) = &first.security_context else {
        if let Some(user) = profile.run_as_user {
            security["runAsUser"] = json!(user);
        }
        return security;
    };
    let parts = [
        ("runAsUser", profile.run_as_user.or(own.run_as_user).map(Value::from)),
        ("runAsGroup", own.run_as_group.map(Value::from)),
        ("runAsNonRoot", own.run_as_non_root.map(Value::from)),
        ("seLinuxOptions", own.se_linux_options.as_ref().map(|options| json!(options))),
    ];
    for (key, value) in parts {
        if let Some(value) = value {
            security[key] = value;
        }
    }
    security
}

fn mounts(spec: &PodSpec, first: &Container) -> Vec<Value> {
    let mut mounts = vec![
        json!({"name": SOCKET.volume, "mountPath": SOCKET.folder}),
        json!({"name": IDENTITY_VOLUME, "mountPath": IDENTITY_FOLDER, "readOnly": true}),
    ];
    // Without a volume there, the runtime gives all containers of a pod the same one.
    let others = spec.containers.iter().filter(|container| container.name != first.name);
    let shared = std::iter::once(first).chain(others).find_map(|container| {
        container.volume_mounts.iter().flatten().find(|mount| mount.mount_path.trim_end_matches('/') == SHM)
    });
    if let Some(shared) = shared {
        let mut mount = Map::new();
        mount.insert("name".to_owned(), json!(shared.name));
        mount.insert("mountPath".to_owned(), json!(SHM));
        if let Some(path) = &shared.sub_path {
            mount.insert("subPath".to_owned(), json!(path));
        }
        mounts.push(Value::Object(mount));
    }
    mounts
}

/// The claims by which this container has its devices: which of them hold tensors it alone knows, so the agent shares all.
pub(super) fn claims_of(container: &Container) -> &[ResourceClaim] {
    container.resources.as_ref().and_then(|own| own.claims.as_deref()).unwrap_or_default()
}

fn resources(quality: Quality, profile: &Profile, first: &Container) -> Option<Value> {
    let mut resources = amounts(quality, profile);
    if profile.device_access == DeviceAccess::ResourceClaim {
        resources.get_or_insert_with(|| json!({}))["claims"] = json!(claims_of(first));
    }
    resources
}

/// J3. Where only requests are needed no limit is set: a replica that is staged would meet it.
pub(super) fn amounts(quality: Quality, profile: &Profile) -> Option<Value> {
    let amounts = json!({"cpu": profile.cpu, "memory": profile.memory});
    match quality {
        Quality::Guaranteed => Some(json!({"requests": amounts, "limits": amounts})),
        Quality::Burstable => Some(json!({"requests": amounts})),
        // The agent is then one of those that the pod's own resources, or nothing, is shared by.
        Quality::BestEffort | Quality::OfPod => None,
    }
}
