//! What every container of a pod is given: a volume, and a variable that says what lies there.

use super::InjectError;
use k8s_openapi::api::core::v1::Container;

/// One volume that containers mount, read-only.
#[derive(Debug, Clone, Copy)]
pub(super) struct Offer {
    /// Name of the volume.
    pub(super) volume: &'static str,
    /// Where each container sees it.
    pub(super) folder: &'static str,
    /// Variable of each container.
    pub(super) variable: &'static str,
    /// Its value, a path below the folder.
    pub(super) value: &'static str,
}

/// Where clients find the agent socket. The folder of a volume is open to all; the one below it the agent makes for its own
/// user only.
pub(super) const SOCKET: Offer = Offer {
    volume: "weightrefit-socket",
    folder: "/run/weightrefit",
    variable: "WEIGHTREFIT_SOCKET",
    value: "/run/weightrefit/agent/agent.sock",
};

/// Where a rank finds the library that moves its bytes in its own process.
pub(super) const LIBRARY: Offer = Offer {
    volume: "weightrefit-library",
    folder: "/run/weightrefit-library",
    variable: "WEIGHTREFIT_LIBRARY",
    value: "/run/weightrefit-library/libweightrefit.so",
};

impl Offer {
    /// Whether the container has room for it.
    ///
    /// # Errors
    /// Something else is mounted there, or the variable is set.
    pub(super) fn check(&self, container: &Container) -> Result<(), InjectError> {
        let within = |path: &str| {
            path.strip_prefix(self.folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let mut mounts = container.volume_mounts.iter().flatten();
        if let Some(mount) = mounts.find(|mount| within(&mount.mount_path)) {
            let (container, path) = (container.name.clone(), mount.mount_path.clone());
            return Err(InjectError::Mounted { container, path, folder: self.folder });
        }
        if container.env.iter().flatten().any(|own| own.name == self.variable) {
            let (container, variable) = (container.name.clone(), self.variable);
            return Err(InjectError::Variable { container, variable });
        }
        Ok(())
    }
}
