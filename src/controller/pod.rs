//! The part of a pod that is read. The API server sends some two hundred types for a pod; what is not named here is
//! skipped where it stands, and costs neither memory nor time.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

/// A pod, as far as anything here asks for it.
#[derive(Debug, Clone, Deserialize, kube::Resource)]
#[resource(inherit = k8s_openapi::api::core::v1::Pod)]
pub struct Pod {
    /// Names, labels, owners.
    pub metadata: ObjectMeta,
    /// What is wanted of it.
    pub spec: Option<PodSpec>,
    /// What became of it; `None` until somebody says.
    pub status: Option<PodStatus>,
}

/// What is wanted of a pod.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSpec {
    /// Its account; the API server fills in the default one.
    pub service_account_name: Option<String>,
    /// Its node, once it is scheduled.
    pub node_name: Option<String>,
    /// What must hold of it before it counts as ready.
    pub readiness_gates: Option<Vec<ReadinessGate>>,
}

/// A condition that others than the kubelet write.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadinessGate {
    /// The condition.
    pub condition_type: String,
}

/// What became of a pod.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodStatus {
    /// Where it is in its life.
    pub phase: Option<String>,
    /// Its addresses, once the kubelet tells them.
    #[serde(rename = "podIPs")]
    pub pod_ips: Option<Vec<PodIp>>,
    /// What holds of it.
    pub conditions: Option<Vec<PodCondition>>,
}

/// One address of a pod.
#[derive(Debug, Clone, Deserialize)]
pub struct PodIp {
    /// As text, unchecked.
    pub ip: String,
}

/// One thing that does or does not hold of a pod.
#[derive(Debug, Clone, Deserialize)]
pub struct PodCondition {
    /// What, such as `Ready`.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
}
