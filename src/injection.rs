//! Puts an agent into a pod: a pure function of the pod and of a named profile, the same for the admission webhook and
//! for `weightrefit inject`. It asks nobody, so it neither waits nor depends on the order in which things are made.
//!
//! Invariants:
//! - J1: nothing of the pod is changed or removed, only added; `nvidia.com/gpu` and all other requests stay as they are.
//! - J2: what was added once is not added again: an injected pod is left as it is, and only what others have made of it
//!   since (a container) gets what it lacks.
//! - J3: the pod keeps its quality of service class, and with it the static placement of its engine.
//! - J4: a pod that cannot be injected as asked is refused as a whole, with the field that is in the way.

mod agent;
mod library;
mod offer;
mod patch;
mod quality;
mod refusal;
mod settings;
mod template;

pub use patch::{Addition, apply};
pub use quality::{Quality, quality};
pub use refusal::InjectError;
pub use settings::{DeviceAccess, LogFormat, Profile, PullPolicy, Settings};
pub use template::{NoTemplate, templates};

use crate::controller::pod_facts::{MalformedPod, POOL_LABEL, REFIT_LABEL, REFIT_NAMESPACE_LABEL, Side};
use crate::controller::pod_facts::{checked, side};
use agent::Claim;
use k8s_openapi::api::core::v1::{Container, PodSpec, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use offer::{LIBRARY, Offer, SOCKET};
use patch::Patch;
use serde::Deserialize;
use serde_json::{Value, json};

/// Annotation that names the profile.
pub const PROFILE_ANNOTATION: &str = "weightrefit.dev/profile";
/// The profile of pods without [`PROFILE_ANNOTATION`].
pub const DEFAULT_PROFILE: &str = "default";
/// Name of the agent's container.
pub const AGENT_CONTAINER: &str = "weightrefit-agent";
/// Name of the container that copies the library for the ranks' own processes.
const LIBRARY_CONTAINER: &str = "weightrefit-library";
/// Volume of token and trust bundle, which the agent alone sees.
const IDENTITY_VOLUME: &str = "weightrefit-identity";
const IDENTITY_FOLDER: &str = "/var/run/secrets/weightrefit.dev";
/// Shared memory of the engine's processes.
const SHM: &str = "/dev/shm";

/// What must be added to `pod` (or pod template: `metadata` and `spec`) so that it has an agent. Nothing, where it names
/// no refit.
///
/// # Errors
/// Why it cannot have one.
pub fn inject(pod: &Value, settings: &Settings) -> Result<Vec<Addition>, InjectError> {
    let PodTemplateSpec { metadata, spec } =
        PodTemplateSpec::deserialize(pod).map_err(|error| InjectError::Shape(error.to_string()))?;
    let metadata = metadata.unwrap_or_default();
    let Some(claim) = claim(&metadata)? else { return Ok(Vec::new()) };
    let spec = spec.unwrap_or_default();
    let first = spec.containers.first().ok_or(InjectError::NoContainer)?;
    let profile = settings.profile(profile_of(&metadata))?;
    possible(&spec, profile, first)?;
    let is_injected = spec.init_containers.iter().flatten().any(is_agent);
    // What the pod was given, it goes on with, whatever the profile says by now.
    let has_library = match is_injected {
        true => has_volume(&spec, LIBRARY.volume),
        false => profile.1.device_access == DeviceAccess::InProcess,
    };
    let offers = if has_library { &[SOCKET, LIBRARY][..] } else { &[SOCKET][..] };
    let mut patch = Patch::new(pod);
    if !is_injected {
        free(&spec, profile, offers)?;
        patch.insert_first("/spec/initContainers", agent::container(settings, profile, &claim, &spec, first));
        patch.append("/spec/volumes", socket_volume());
        patch.append("/spec/volumes", identity_volume(settings));
        if has_library {
            // Before the agent, so that the pod is charged for the larger of the two and not for both.
            patch.insert_first("/spec/initContainers", library::container(settings, profile.1, &spec, first));
            patch.append("/spec/volumes", library::volume());
        }
    }
    for (index, container) in spec.containers.iter().enumerate() {
        for Offer { volume, folder, variable, value } in offers {
            if !container.volume_mounts.iter().flatten().any(|mount| mount.name == *volume) {
                let mount = json!({"name": volume, "mountPath": folder, "readOnly": true});
                patch.append(&format!("/spec/containers/{index}/volumeMounts"), mount);
            }
            if !container.env.iter().flatten().any(|own| own.name == *variable) {
                let variable = json!({"name": variable, "value": value});
                patch.append(&format!("/spec/containers/{index}/env"), variable);
            }
        }
    }
    Ok(patch.into_additions())
}

fn profile_of(metadata: &ObjectMeta) -> &str {
    let named = metadata.annotations.as_ref().and_then(|all| all.get(PROFILE_ANNOTATION));
    named.map_or(DEFAULT_PROFILE, String::as_str)
}

/// `None` for a pod that is nobody's.
fn claim(metadata: &ObjectMeta) -> Result<Option<Claim>, MalformedPod> {
    // A template has no name, and a new pod may not have its own yet.
    let pod = metadata.name.as_ref().or(metadata.generate_name.as_ref());
    let pod = pod.map_or("of this template", String::as_str);
    let Some(refit) = checked(metadata, REFIT_LABEL, pod)? else { return Ok(None) };
    let namespace = checked(metadata, REFIT_NAMESPACE_LABEL, pod)?;
    // Which pool it is of is the coordinator's business; a label that names none is refused here already.
    checked(metadata, POOL_LABEL, pod)?;
    let is_ray = metadata.labels.as_ref().is_some_and(|labels| labels.contains_key("ray.io/cluster"));
    let side = side(metadata, pod)?;
    Ok(Some(Claim {
        namespace: namespace.map(str::to_owned),
        refit: refit.to_owned(),
        side,
        // Ray starts its jobs once all its pods are ready, and engines are ready once a job has trained.
        is_probed: side == Side::Inference && !is_ray,
    }))
}

/// Whether this version can do what the profile asks of such a pod.
fn possible(spec: &PodSpec, profile: (&str, &Profile), first: &Container) -> Result<(), InjectError> {
    let (name, profile) = profile;
    match profile.device_access {
        DeviceAccess::HostMemory | DeviceAccess::InProcess => {}
        DeviceAccess::ResourceClaim if agent::claims_of(first).is_empty() => {
            let (profile, container) = (name.to_owned(), first.name.clone());
            return Err(InjectError::NoClaim { profile, container });
        }
        DeviceAccess::ResourceClaim => {}
        access @ DeviceAccess::VisibleDevices => {
            return Err(InjectError::DeviceAccess { profile: name.to_owned(), access });
        }
    }
    if spec.os.as_ref().is_some_and(|os| os.name != "linux") {
        return Err(InjectError::NotLinux);
    }
    let shared = [
        ("shareProcessNamespace", spec.share_process_namespace == Some(true)),
        ("hostPID", spec.host_pid == Some(true)),
    ];
    match shared.iter().find(|(_, is_set)| *is_set && !profile.shared_processes) {
        Some((field, _)) => Err(InjectError::SharedProcesses { field, profile: name.to_owned() }),
        None => Ok(()),
    }
}

/// Whether the names and places that are to be added are free.
fn free(spec: &PodSpec, (_, profile): (&str, &Profile), offers: &[Offer]) -> Result<(), InjectError> {
    let inits = spec.init_containers.iter().flatten();
    for name in [AGENT_CONTAINER, LIBRARY_CONTAINER] {
        if spec.containers.iter().chain(inits.clone()).any(|container| container.name == name) {
            return Err(InjectError::Taken { what: "container", name });
        }
    }
    let mut volumes = offers.iter().map(|offer| offer.volume).chain([IDENTITY_VOLUME]);
    if let Some(name) = volumes.find(|name| has_volume(spec, name)) {
        return Err(InjectError::Taken { what: "volume", name });
    }
    for container in &spec.containers {
        for offer in offers {
            offer.check(container)?;
        }
        let mut ports = container.ports.iter().flatten();
        if ports.any(|port| port.container_port == i32::from(profile.metrics_port)) {
            let (container, port) = (container.name.clone(), profile.metrics_port);
            return Err(InjectError::Port { container, port });
        }
    }
    Ok(())
}

fn has_volume(spec: &PodSpec, name: &str) -> bool {
    spec.volumes.iter().flatten().any(|volume| volume.name == name)
}

fn is_agent(container: &Container) -> bool {
    container.name == AGENT_CONTAINER && container.restart_policy.as_deref() == Some("Always")
}

fn socket_volume() -> Value {
    // In memory, as it holds nothing but a socket; the limit keeps it at that.
    json!({"name": SOCKET.volume, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}})
}

fn identity_volume(settings: &Settings) -> Value {
    use crate::identity::{CA_BUNDLE, CA_BUNDLE_KEY};
    json!({"name": IDENTITY_VOLUME, "projected": {"sources": [
        {"serviceAccountToken": {
            "audience": settings.audience,
            "expirationSeconds": settings.token_expiration_seconds,
            "path": "token",
        }},
        // Optional: the operator writes it where members are, and pods start without the operator.
        {"configMap": {
            "name": CA_BUNDLE, "optional": true, "items": [{"key": CA_BUNDLE_KEY, "path": CA_BUNDLE_KEY}],
        }},
    ]}})
}
