//! Why a pod gets no agent.

use super::DeviceAccess;
use crate::controller::pod_facts::MalformedPod;
use weightrefit_core::code::Code;
use weightrefit_core::nearest::nearest;

/// Why a pod cannot be given an agent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InjectError {
    /// It is not what an API server would send.
    #[error("this is no pod: {0}")]
    Shape(String),
    /// Its labels do not say what it is.
    #[error(transparent)]
    Labels(#[from] MalformedPod),
    /// Nobody would use the agent.
    #[error("pod has no container")]
    NoContainer,
    /// The annotation names no profile.
    #[error("there is no injection profile `{name}`")]
    NoProfile {
        /// The name.
        name: String,
        /// Those that there are.
        known: Vec<String>,
    },
    /// The profile asks for what this version cannot do.
    #[error("injection profile `{profile}` has deviceAccess {access:?}, which this version does not support")]
    DeviceAccess {
        /// The profile.
        profile: String,
        /// What it asks for.
        access: DeviceAccess,
    },
    /// There is no device to share: what a container gets by a request of its own, such as of `nvidia.com/gpu`, no other has.
    #[error(
        "container `{container}` uses no resource claim, and injection profile `{profile}` has deviceAccess ResourceClaim"
    )]
    NoClaim {
        /// The profile.
        profile: String,
        /// The pod's first container.
        container: String,
    },
    /// Agents run on Linux.
    #[error("spec.os.name of the pod is not linux")]
    NotLinux,
    /// Others of the pod, or of the node, could read the agent's token and key.
    #[error("pod sets {field}, so that other containers could read the agent's token and key")]
    SharedProcesses {
        /// The field.
        field: &'static str,
        /// The profile, which could allow it.
        profile: String,
    },
    /// A name is taken by something that is no agent of ours.
    #[error("pod has a {what} `{name}` of its own")]
    Taken {
        /// Container or volume.
        what: &'static str,
        /// Its name.
        name: &'static str,
    },
    /// A folder is taken.
    #[error("container `{container}` mounts {path}, and {folder} must be what injection mounts")]
    Mounted {
        /// The container.
        container: String,
        /// The mount's path.
        path: String,
        /// What must be free.
        folder: &'static str,
    },
    /// A variable is taken.
    #[error("container `{container}` sets {variable} itself")]
    Variable {
        /// The container.
        container: String,
        /// The variable.
        variable: &'static str,
    },
    /// The port is taken: containers of a pod share its addresses.
    #[error("container `{container}` has port {port}, where the agent serves probes and metrics")]
    Port {
        /// The container.
        container: String,
        /// The port.
        port: u16,
    },
}

impl InjectError {
    /// Every [`Self::reason`].
    pub const REASONS: [&'static str; 12] = [
        "Shape",
        "Labels",
        "NoContainer",
        "NoProfile",
        "DeviceAccess",
        "NoClaim",
        "NotLinux",
        "SharedProcesses",
        "Taken",
        "Mounted",
        "Variable",
        "Port",
    ];

    /// Why, in one word, for metrics.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        let index = match self {
            Self::Shape(_) => 0,
            Self::Labels(_) => 1,
            Self::NoContainer => 2,
            Self::NoProfile { .. } => 3,
            Self::DeviceAccess { .. } => 4,
            Self::NoClaim { .. } => 5,
            Self::NotLinux => 6,
            Self::SharedProcesses { .. } => 7,
            Self::Taken { .. } => 8,
            Self::Mounted { .. } => 9,
            Self::Variable { .. } => 10,
            Self::Port { .. } => 11,
        };
        Self::REASONS[index]
    }

    /// The stable code, where there is one.
    #[must_use]
    pub const fn code(&self) -> Option<Code> {
        match self {
            Self::DeviceAccess { .. } | Self::NotLinux => Some(Code::Unsupported),
            _ => None,
        }
    }

    /// What a person can do about it.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::Shape(_) => "Correct that field of the pod.".to_owned(),
            Self::Labels(_) => "Correct the label, or remove label weightrefit.dev/refit.".to_owned(),
            Self::NoContainer => "Add the trainer's or engine's container.".to_owned(),
            Self::NoProfile { name, known } => {
                let near = nearest(name, known.iter().map(String::as_str));
                let near = near.map(|near| format!("Did you mean `{near}`? ")).unwrap_or_default();
                format!(
                    "{near}Profiles are listed in the operator's injection settings: {}.",
                    known.join(", ")
                )
            }
            Self::DeviceAccess { .. } => {
                "Choose a profile with another `deviceAccess` by annotation weightrefit.dev/profile."
                    .to_owned()
            }
            Self::NoClaim { container, .. } => format!(
                "Name a claim of spec.resourceClaims under resources.claims of container `{container}`, or choose another \
                 profile by annotation weightrefit.dev/profile."
            ),
            Self::NotLinux => "Remove label weightrefit.dev/refit, or spec.os.".to_owned(),
            Self::SharedProcesses { field, profile } => {
                format!("Remove {field}, or set `sharedProcesses: true` in injection profile `{profile}`.")
            }
            Self::Taken { what, .. } => format!("Rename that {what}."),
            Self::Mounted { folder, .. } => format!("Mount it elsewhere than {folder}."),
            Self::Variable { .. } => "Remove it: injection sets it.".to_owned(),
            Self::Port { .. } => "Change that port, or `metricsPort` of the injection profile.".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn reasons_are_the_names_of_what_happened() {
        let container = || "main".to_owned();
        let all = [
            InjectError::Shape("no object".into()),
            InjectError::Labels(MalformedPod::Missing { pod: "rl/p".into(), field: "spec" }),
            InjectError::NoContainer,
            InjectError::NoProfile { name: "large".into(), known: Vec::new() },
            InjectError::DeviceAccess { profile: "large".into(), access: DeviceAccess::VisibleDevices },
            InjectError::NoClaim { profile: "claim".into(), container: container() },
            InjectError::NotLinux,
            InjectError::SharedProcesses { field: "spec.hostPID", profile: "default".into() },
            InjectError::Taken { what: "volume", name: "x" },
            InjectError::Mounted { container: container(), path: "/run".into(), folder: "/run" },
            InjectError::Variable { container: container(), variable: "X" },
            InjectError::Port { container: container(), port: 9464 },
        ];
        for error in &all {
            assert!(format!("{error:?}").starts_with(error.reason()), "{error:?} is {}", error.reason());
        }
        let reasons: BTreeSet<&str> = all.iter().map(InjectError::reason).collect();
        assert_eq!(reasons, BTreeSet::from(InjectError::REASONS));
    }
}
