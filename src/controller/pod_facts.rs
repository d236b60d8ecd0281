//! What is kept of a pod: its labels and less than 1 KiB of the some 20 KiB that the API server sends.

use super::pod::{Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Label by which a pod names its refit; without it a pod is nobody's.
pub const REFIT_LABEL: &str = "weightrefit.dev/refit";
/// Label that names the refit's namespace, where it is not the pod's own.
pub const REFIT_NAMESPACE_LABEL: &str = "weightrefit.dev/refit-namespace";
/// Label that says on which side the pod is.
pub const SIDE_LABEL: &str = "weightrefit.dev/side";
/// Label that names the pool of an inference pod.
pub const POOL_LABEL: &str = "weightrefit.dev/pool";
/// Label in which a StatefulSet's controller tells the ordinal.
pub const POD_INDEX_LABEL: &str = "apps.kubernetes.io/pod-index";

/// Condition that a pod may name as a readiness gate: its engines serve a verified version.
pub const WEIGHTS_CURRENT: &str = "weightrefit.dev/WeightsCurrent";

/// The pool of pods without [`POOL_LABEL`].
const DEFAULT_POOL: &str = "default";
/// The service account of pods that name none.
const DEFAULT_ACCOUNT: &str = "default";

/// Which side of a refit a pod is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// It publishes.
    Training,
    /// It receives.
    Inference,
}

/// Where a pod is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodPhase {
    /// Not all containers have started.
    Pending,
    /// At least one container runs.
    Running,
    /// All containers ended well.
    Succeeded,
    /// All containers ended, one of them badly.
    Failed,
    /// Its node does not answer.
    Unknown,
}

/// Who made a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Kind of the object, such as `StatefulSet`.
    pub kind: String,
    /// Its name, in the pod's namespace.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

/// A pod that claims a refit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodFacts {
    /// Namespace of the pod.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// The refit that it claims, namespace/name.
    pub refit: String,
    /// The side that it claims.
    pub side: Side,
    /// Its pool; says nothing on the training side.
    pub pool: String,
    /// Its service account.
    pub service_account: String,
    /// Its node; `None` until it is scheduled.
    pub node: Option<String>,
    /// Its addresses; empty until the kubelet tells them.
    pub ips: Vec<IpAddr>,
    /// Labels, unchecked, and the annotations in which controllers number pods too; labels win.
    pub marks: BTreeMap<String, String>,
    /// The owner that controls it, where there is one.
    pub owner: Option<Owner>,
    /// Where it is in its life.
    pub phase: PodPhase,
    /// Whether its condition `Ready` is true.
    pub ready: bool,
    /// Whether [`WEIGHTS_CURRENT`] is one of its readiness gates.
    pub is_gated: bool,
    /// Whether that condition is true.
    pub has_current_weights: bool,
    /// Whether its deletion has begun.
    pub deleting: bool,
    /// When it was created.
    pub created: Option<Time>,
}

/// The refit (namespace/name) that a pod means, as far as its labels can be read: for those who look for it.
#[must_use]
pub fn meant(meta: &ObjectMeta) -> Option<String> {
    let own = meta.namespace.as_deref()?;
    let namespace = label(meta, REFIT_NAMESPACE_LABEL).filter(|name| is_dns_name(name)).unwrap_or(own);
    Some(format!("{namespace}/{}", label(meta, REFIT_LABEL)?))
}

/// A pod carries the claim label but cannot be taken for anything.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MalformedPod {
    /// The API server leaves none of these out.
    #[error("pod {pod} has no {field}")]
    Missing {
        /// namespace/name, as far as known.
        pod: String,
        /// Path of the field.
        field: &'static str,
    },
    /// A label's value is none that it may have.
    #[error("pod {pod} has label {label} of value `{value}`, which is not {wanted}")]
    Label {
        /// namespace/name.
        pod: String,
        /// The label.
        label: &'static str,
        /// What it says.
        value: String,
        /// What it could say.
        wanted: &'static str,
    },
    /// An address that is none.
    #[error("pod {pod} has status.podIPs `{value}`, which is not an IP address")]
    Address {
        /// namespace/name.
        pod: String,
        /// What it says.
        value: String,
    },
}

impl PodFacts {
    /// The facts of a pod.
    ///
    /// # Errors
    /// What makes it useless; other pods are not concerned.
    pub fn of(pod: &Pod) -> Result<Self, MalformedPod> {
        let meta = &pod.metadata;
        let shown = shown(meta);
        let missing = |field| MalformedPod::Missing { pod: shown.clone(), field };
        let namespace = meta.namespace.clone().ok_or_else(|| missing("metadata.namespace"))?;
        let name = meta.name.clone().ok_or_else(|| missing("metadata.name"))?;
        let uid = meta.uid.clone().ok_or_else(|| missing("metadata.uid"))?;
        let spec = pod.spec.as_ref().ok_or_else(|| missing("spec"))?;
        let refit = claimed(meta, &namespace, &shown)?;
        let status = pod.status.as_ref();
        Ok(Self {
            refit,
            side: side(meta, &shown)?,
            pool: checked(meta, POOL_LABEL, &shown)?.unwrap_or(DEFAULT_POOL).to_owned(),
            service_account: spec.service_account_name.clone().unwrap_or_else(|| DEFAULT_ACCOUNT.to_owned()),
            node: spec.node_name.clone().filter(|node| !node.is_empty()),
            ips: status.map(|status| addresses(status, &shown)).transpose()?.unwrap_or_default(),
            marks: marks(meta),
            owner: meta.owner_references.iter().flatten().find(|o| o.controller == Some(true)).map(owner),
            phase: phase(status),
            ready: status.is_some_and(|status| holds(status, "Ready")),
            is_gated: spec
                .readiness_gates
                .iter()
                .flatten()
                .any(|gate| gate.condition_type == WEIGHTS_CURRENT),
            has_current_weights: status.is_some_and(|status| holds(status, WEIGHTS_CURRENT)),
            deleting: meta.deletion_timestamp.is_some(),
            created: meta.creation_timestamp.clone(),
            namespace,
            name,
            uid,
        })
    }

    /// namespace/name, as messages and conditions name it.
    #[must_use]
    pub fn shown(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Namespace and name of the claimed refit.
    #[must_use]
    pub fn refit_parts(&self) -> (&str, &str) {
        self.refit.split_once('/').expect("`claimed` joins two parts")
    }

    /// When it was created, in seconds, which are all that Kubernetes tells.
    #[must_use]
    pub fn created_s(&self) -> i64 {
        self.created.as_ref().map_or(i64::MIN, |created| created.0.as_second())
    }

    /// Whether it may hold a seat: neither is it going away nor has it ended.
    #[must_use]
    pub fn is_present(&self) -> bool {
        !self.deleting && !self.is_over()
    }

    /// Order in which pods take seats: the older first.
    #[must_use]
    pub fn seniority(&self) -> (i64, &str) {
        (self.created_s(), &self.uid)
    }

    /// Whether its containers have ended for good.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.phase, PodPhase::Succeeded | PodPhase::Failed)
    }
}

/// namespace/name of an object that may lack either.
pub(super) fn shown(meta: &ObjectMeta) -> String {
    let part = |part: &Option<String>| part.clone().unwrap_or_else(|| "?".to_owned());
    format!("{}/{}", part(&meta.namespace), part(&meta.name))
}

fn label<'a>(meta: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    meta.labels.as_ref()?.get(key).map(String::as_str)
}

/// A label whose value must be a DNS name, if it is there at all.
pub(crate) fn checked<'a>(
    meta: &'a ObjectMeta,
    key: &'static str,
    pod: &str,
) -> Result<Option<&'a str>, MalformedPod> {
    let Some(value) = label(meta, key) else { return Ok(None) };
    if !is_dns_name(value) {
        let (pod, value) = (pod.to_owned(), value.to_owned());
        return Err(MalformedPod::Label { pod, label: key, value, wanted: "a DNS name" });
    }
    Ok(Some(value))
}

fn is_dns_name(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'.');
    !text.is_empty() && text.bytes().all(plain)
}

fn marks(meta: &ObjectMeta) -> BTreeMap<String, String> {
    let annotations = meta.annotations.iter().flatten();
    let mut marks: BTreeMap<String, String> = annotations
        .filter(|(key, _)| super::marks::ANNOTATIONS.contains(&key.as_str()))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    marks.extend(meta.labels.iter().flatten().map(|(key, value)| (key.clone(), value.clone())));
    marks
}

fn claimed(meta: &ObjectMeta, own: &str, pod: &str) -> Result<String, MalformedPod> {
    let missing = || MalformedPod::Missing { pod: pod.to_owned(), field: "label weightrefit.dev/refit" };
    let name = checked(meta, REFIT_LABEL, pod)?.ok_or_else(missing)?;
    let namespace = checked(meta, REFIT_NAMESPACE_LABEL, pod)?.unwrap_or(own);
    Ok(format!("{namespace}/{name}"))
}

/// Which side the labels say.
pub(crate) fn side(meta: &ObjectMeta, pod: &str) -> Result<Side, MalformedPod> {
    match label(meta, SIDE_LABEL) {
        Some("training") => Ok(Side::Training),
        Some("inference") => Ok(Side::Inference),
        other => Err(MalformedPod::Label {
            pod: pod.to_owned(),
            label: SIDE_LABEL,
            value: other.unwrap_or_default().to_owned(),
            wanted: "training or inference",
        }),
    }
}

fn addresses(status: &PodStatus, pod: &str) -> Result<Vec<IpAddr>, MalformedPod> {
    let all = status.pod_ips.iter().flatten().map(|ip| &ip.ip);
    let parse = |ip: &String| {
        ip.parse().map_err(|_| MalformedPod::Address { pod: pod.to_owned(), value: ip.clone() })
    };
    all.map(parse).collect()
}

fn owner(reference: &OwnerReference) -> Owner {
    let OwnerReference { kind, name, uid, .. } = reference.clone();
    Owner { kind, name, uid }
}

fn phase(status: Option<&PodStatus>) -> PodPhase {
    match status.and_then(|status| status.phase.as_deref()) {
        Some("Running") => PodPhase::Running,
        Some("Succeeded") => PodPhase::Succeeded,
        Some("Failed") => PodPhase::Failed,
        None | Some("Pending") => PodPhase::Pending,
        Some(_) => PodPhase::Unknown,
    }
}

fn holds(status: &PodStatus, kind: &str) -> bool {
    let mut conditions = status.conditions.iter().flatten();
    conditions.any(|condition| condition.kind == kind && condition.status == "True")
}
