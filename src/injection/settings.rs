//! The operator's injection settings: a file, mounted from a ConfigMap in a cluster.

use super::InjectError;
use crate::api::documents::{self, SourceText};
use crate::api::problem::{FieldPath, Problem, Refusal};
use crate::controller::gate::DEFAULT_AUDIENCE;
use serde::Deserialize;
use std::collections::BTreeMap;

/// What agents are and where they dial, and the profiles that pods choose from.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Settings {
    /// image: of the agent, with a tag or digest. Required.
    pub image: String,
    /// imagePullPolicy: of the agent's container; by default Kubernetes decides.
    pub image_pull_policy: Option<PullPolicy>,
    /// coordinator: `host:port` that agents dial, the operator's Service. Required.
    pub coordinator: String,
    /// audience: of agents' tokens; that of the operator's flag `--audience`. Default `weightrefit.dev`.
    #[serde(default = "audience")]
    pub audience: String,
    /// tokenExpirationSeconds: lifetime of a token, which the kubelet renews. Default 3600; 600 to 86,400.
    #[serde(default = "token_expiration")]
    pub token_expiration_seconds: i64,
    /// profiles: by name; pods choose by annotation `weightrefit.dev/profile`, else take `default`. Required.
    pub profiles: BTreeMap<String, Profile>,
}

/// One way to inject.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Profile {
    /// deviceAccess: where the tensors lie, and how they are reached. Default `HostMemory`.
    pub device_access: DeviceAccess,
    /// cpu: request of the agent, and its limit where the pod is Guaranteed. Default `500m`.
    pub cpu: String,
    /// memory: the same; staged bytes are charged to the agent, so it must hold a replica's. Default `1Gi`.
    pub memory: String,
    /// metricsPort: where the agent serves probes and metrics; default 9464. Pods of the host network that share a
    /// node need different ones.
    pub metrics_port: u16,
    /// logFormat: of the agent's log. Default `Json`.
    pub log_format: LogFormat,
    /// runAsUser: user of the agent, which must be that of trainer or engine. By default that of the pod's first
    /// container or of the pod, and where they say none, the image's.
    pub run_as_user: Option<i64>,
    /// sharedProcesses: whether pods that share their processes get an agent, although others of the pod can read its
    /// token and key. Default false.
    pub shared_processes: bool,
    /// allowTimeSlicing: whether the agent's kernels may take turns with those of trainer or engine on one GPU, which
    /// holds these up while bytes move; without it bytes never go by NCCL. Default false.
    pub allow_time_slicing: bool,
}

/// Where tensors lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum DeviceAccess {
    /// In host memory, shared over the agent socket.
    #[default]
    HostMemory,
    /// On devices of trainer or engine, whose own process moves the bytes with a library that an init container brings.
    InProcess,
    /// On devices of the resource claims of the pod's first container, which the agent shares.
    ResourceClaim,
    /// On devices of the node, all of which the agent sees. This version cannot do that.
    VisibleDevices,
}

/// Form of the agent's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    #[default]
    Json,
}

/// When the kubelet fetches the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum PullPolicy {
    /// At each start.
    Always,
    /// Where the node has it not.
    IfNotPresent,
    /// Whoever made the node has put it there.
    Never,
}

impl Default for Profile {
    fn default() -> Self {
        Self {
            device_access: DeviceAccess::default(),
            cpu: "500m".to_owned(),
            memory: "1Gi".to_owned(),
            metrics_port: 9464,
            log_format: LogFormat::default(),
            run_as_user: None,
            shared_processes: false,
            allow_time_slicing: false,
        }
    }
}

impl Settings {
    /// Reads and checks the file's text.
    ///
    /// # Errors
    /// With the first problem and its line.
    pub fn parse(source: &SourceText) -> Result<Self, Refusal> {
        let document = documents::only::<Self>(source)?;
        document.value.check().map_err(|(path, problem)| document.refuse(path, problem))?;
        Ok(document.value)
    }

    /// The profile of this name.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn profile<'s>(&'s self, name: &'s str) -> Result<(&'s str, &'s Profile), InjectError> {
        let missing = || InjectError::NoProfile {
            name: name.to_owned(),
            known: self.profiles.keys().cloned().collect(),
        };
        Ok((name, self.profiles.get(name).ok_or_else(missing)?))
    }

    fn check(&self) -> Result<(), (FieldPath, Problem)> {
        let malformed =
            |path, value: &str, expected| (path, Problem::Malformed { value: value.to_owned(), expected });
        if self.image.is_empty() || self.image.contains(char::is_whitespace) {
            return Err(malformed(FieldPath::of("image"), &self.image, "an image with a tag or digest"));
        }
        let port =
            self.coordinator.rsplit_once(':').map(|(host, port)| (!host.is_empty(), port.parse::<u16>()));
        if !matches!(port, Some((true, Ok(1..)))) {
            return Err(malformed(FieldPath::of("coordinator"), &self.coordinator, "host:port"));
        }
        if !(600..=86_400).contains(&self.token_expiration_seconds) {
            let problem =
                Problem::OutOfBounds { value: self.token_expiration_seconds, least: 600, most: 86_400 };
            return Err((FieldPath::of("tokenExpirationSeconds"), problem));
        }
        for (name, profile) in &self.profiles {
            let at = FieldPath::of("profiles").entry(name);
            for (key, quantity) in [("cpu", &profile.cpu), ("memory", &profile.memory)] {
                if super::quality::nano(quantity).is_none_or(|nano| nano <= 0) {
                    return Err(malformed(
                        at.key(key),
                        quantity,
                        "a quantity above 0, such as `500m` or `1Gi`",
                    ));
                }
            }
            if profile.metrics_port == 0 {
                return Err((
                    at.key("metricsPort"),
                    Problem::OutOfBounds { value: 0, least: 1, most: 65_535 },
                ));
            }
        }
        Ok(())
    }
}

fn audience() -> String {
    DEFAULT_AUDIENCE.to_owned()
}

fn token_expiration() -> i64 {
    3600
}
