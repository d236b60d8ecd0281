//! Everything that must be right before the first byte, looked at once: each thing that is wrong has a reason of its
//! own.

use super::gpu::Gpu;
use super::lane::Reason;
use super::symbols::{Nccl, NcclError};
use crate::cuda::{CudaError, Device, Driver, LibraryError};
use crate::limits::{MEMLOCK_BYTES_MIN, SHM_BYTES_MIN};
use rustix::process::{Resource, getrlimit};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use weightrefit_core::code::Code;
use weightrefit_core::interface::{self, Library};

/// What the agent is told of devices.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Driver, in place of the system's.
    pub cuda: Option<PathBuf>,
    /// NCCL, in place of the loader's.
    pub nccl: Option<PathBuf>,
    /// UUIDs of the GPUs, in order of the agent's ranks; all that are visible, in order, where none is named.
    pub gpus: Vec<String>,
    /// Whether kernels of the agent may take turns with those of an engine on the same GPU.
    pub allow_time_slicing: bool,
    /// Device memory for packed windows of one lane.
    pub window_bytes: u64,
}

/// What surrounds the process.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Surroundings {
    /// `None` is without limit.
    memlock_bytes: Option<u64>,
    /// Size of `/dev/shm`.
    shm_bytes: u64,
    interfaces: Vec<String>,
    /// `NCCL_*`.
    environment: BTreeMap<String, String>,
}

impl Surroundings {
    fn read() -> Self {
        let shm = rustix::fs::statvfs("/dev/shm").map_or(0, |shm| shm.f_blocks.saturating_mul(shm.f_frsize));
        let links = std::fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            let (name, value) = (name.into_string().ok()?, value.to_string_lossy().into_owned());
            name.starts_with("NCCL_").then_some((name, value))
        });
        Self {
            memlock_bytes: getrlimit(Resource::Memlock).current,
            shm_bytes: shm,
            interfaces: links.filter_map(|link| link.file_name().into_string().ok()).collect(),
            environment: variables.collect(),
        }
    }

    fn check(&self) -> Result<(), Reason> {
        let variable = |name: &str| self.environment.get(name).map(String::as_str);
        if variable("NCCL_COMM_BLOCKING").is_some_and(|value| value != "0") {
            let text = "NCCL_COMM_BLOCKING is set: calls would block, and could not be ended by a deadline";
            return Err(Reason::new(Code::TransportUnavailable, text));
        }
        if variable("NCCL_COMM_ID").is_some() {
            let text = "NCCL_COMM_ID is set: all lanes would meet at one address with a known id";
            return Err(Reason::new(Code::TransportUnavailable, text));
        }
        if let Some(pattern) = variable("NCCL_SOCKET_IFNAME")
            && !interface::finds(Library::Nccl, pattern, &self.interfaces)
        {
            let known = self.interfaces.join(", ");
            let text = format!("NCCL_SOCKET_IFNAME is `{pattern}`, the interfaces are {known}");
            return Err(Reason::new(Code::InterfaceNotFound, text));
        }
        if let Some(bytes) = self.memlock_bytes.filter(|bytes| *bytes < MEMLOCK_BYTES_MIN) {
            let text = format!("{bytes} bytes may be locked in memory, {MEMLOCK_BYTES_MIN} are needed");
            return Err(Reason::new(Code::MemlockTooLow, text));
        }
        if self.shm_bytes < SHM_BYTES_MIN {
            let text = format!("/dev/shm has {} bytes, {SHM_BYTES_MIN} are needed", self.shm_bytes);
            return Err(Reason::new(Code::ShmTooSmall, text));
        }
        Ok(())
    }
}

/// Whether NCCL was told that ranks may share a GPU.
pub(super) fn shares_gpu() -> bool {
    std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1")
}

/// NCCL, and what surrounds it.
pub(super) fn nccl(settings: &Settings) -> Result<Nccl, Reason> {
    let nccl = Nccl::open(settings.nccl.as_deref()).map_err(|error| without_nccl(&error))?;
    Surroundings::read().check()?;
    Ok(nccl)
}

/// A GPU for each rank of the agent.
pub(super) fn gpus(settings: &Settings, ranks: usize) -> Result<Vec<Arc<Gpu>>, Reason> {
    if !settings.allow_time_slicing {
        let text = "the rank's process has no executor, and an agent in a process of its own would take turns with \
                    it on its GPU: --allow-time-slicing was not given";
        return Err(Reason::new(Code::TransportUnavailable, text));
    }
    open(settings, |visible| choose(&settings.gpus, visible, ranks, shares_gpu()))
}

/// The GPU of the rank of this process, whose own kernels run beside.
pub(super) fn own_gpu(settings: &Settings, ordinal: usize) -> Result<Arc<Gpu>, Reason> {
    let absent = |count: usize| {
        let text = format!("device {ordinal} is not among the {count} visible GPUs");
        Reason::new(Code::GpuNotVisible, text)
    };
    let gpus = open(settings, |visible| {
        let device = visible.get(ordinal).ok_or_else(|| absent(visible.len()))?;
        usable(vec![device.clone()])
    })?;
    gpus.into_iter().next().ok_or_else(|| absent(0))
}

fn open(
    settings: &Settings,
    choose: impl FnOnce(&[Device]) -> Result<Vec<Device>, Reason>,
) -> Result<Vec<Arc<Gpu>>, Reason> {
    let driver = Driver::open(settings.cuda.as_deref()).map_err(|error| without_driver(&error))?;
    let visible = driver.devices().map_err(|error| without_driver(&error))?;
    let open = |device| Gpu::new(&driver, device, settings.window_bytes).map(Arc::new);
    let gpus = choose(&visible)?.into_iter().map(open).collect::<Result<_, _>>();
    gpus.map_err(|error| without_driver(&error))
}

/// The devices of the ranks, in order; over and over where ranks may share one.
fn choose(named: &[String], visible: &[Device], ranks: usize, shares: bool) -> Result<Vec<Device>, Reason> {
    let absent = |text| Reason::new(Code::GpuNotVisible, text);
    let chosen: Vec<Device> = match named {
        [] if shares => visible.iter().cycle().take(ranks).cloned().collect(),
        [] => visible.iter().take(ranks).cloned().collect(),
        named => {
            let find = |uuid: &String| visible.iter().find(|device| device.uuid == *uuid).cloned();
            let missing =
                |uuid: &String| absent(format!("{uuid} is not among the {} visible GPUs", visible.len()));
            named.iter().map(|uuid| find(uuid).ok_or_else(|| missing(uuid))).collect::<Result<_, _>>()?
        }
    };
    if chosen.len() < ranks {
        return Err(absent(format!("{} GPUs for {ranks} ranks of this agent", chosen.len())));
    }
    usable(chosen)
}

/// Devices that NCCL can reach peers from.
fn usable(chosen: Vec<Device>) -> Result<Vec<Device>, Reason> {
    // An instance is called after its GPU and its slice: `NVIDIA H100 80GB HBM3 MIG 1g.10gb`.
    if let Some(instance) = chosen.iter().find(|device| device.name.contains(" MIG ")) {
        let text =
            format!("{} ({}) is a MIG instance, which has no peer access", instance.uuid, instance.name);
        return Err(Reason::new(Code::TransportUnavailable, text));
    }
    Ok(chosen)
}

fn without_driver(error: &CudaError) -> Reason {
    let code = match error {
        CudaError::OutOfMemory { .. } => Code::StagingExhausted,
        CudaError::Library(_) | CudaError::Call { .. } | CudaError::Range { .. } => Code::GpuNotVisible,
    };
    Reason::new(code, error.to_string())
}

fn without_nccl(error: &NcclError) -> Reason {
    let code = match error {
        NcclError::Version { .. } | NcclError::Library(LibraryError::Symbol { .. }) => Code::VersionSkew,
        NcclError::Library(LibraryError::Missing { .. }) => Code::TransportUnavailable,
        NcclError::Call { .. } | NcclError::Cuda(_) => Code::NcclError,
    };
    Reason::new(code, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    type Names<'n> = &'n [&'n str];
    type Row<'r> = (&'r str, Names<'r>, &'r [Device], usize, Result<Names<'r>, Told<'r>>);
    type Told<'t> = (Code, &'t str);

    fn device(uuid: &str, name: &str) -> Device {
        Device { ordinal: 0, name: name.into(), uuid: uuid.into(), capability: (9, 0), multiprocessors: 132 }
    }

    #[test]
    fn each_thing_around_the_process_that_is_wrong_has_its_reason() {
        let right = || Surroundings {
            memlock_bytes: None,
            shm_bytes: 1 << 30,
            interfaces: vec!["lo".into(), "eth0".into()],
            environment: BTreeMap::new(),
        };
        let with = |name: &str, value: &str| Surroundings {
            environment: [(name.into(), value.into())].into(),
            ..right()
        };
        let rows: [(&str, Surroundings, Option<Told<'_>>); 8] = [
            ("all is right", right(), None),
            (
                "memlock 64 KiB",
                Surroundings { memlock_bytes: Some(64 << 10), ..right() },
                Some((Code::MemlockTooLow, "65536 bytes")),
            ),
            (
                "/dev/shm 64 MiB",
                Surroundings { shm_bytes: 64 << 20, ..right() },
                Some((Code::ShmTooSmall, "67108864 bytes")),
            ),
            ("blocking", with("NCCL_COMM_BLOCKING", "1"), Some((Code::TransportUnavailable, "BLOCKING"))),
            ("not blocking", with("NCCL_COMM_BLOCKING", "0"), None),
            ("id", with("NCCL_COMM_ID", "127.0.0.1:1"), Some((Code::TransportUnavailable, "NCCL_COMM_ID"))),
            ("no such link", with("NCCL_SOCKET_IFNAME", "ib0"), Some((Code::InterfaceNotFound, "lo, eth0"))),
            ("that name", with("NCCL_SOCKET_IFNAME", "=eth0"), None),
        ];
        for (name, surroundings, want) in rows {
            match (surroundings.check(), want) {
                (Ok(()), None) => {}
                (Err(reason), Some((code, text))) => {
                    assert_eq!(reason.code, code, "{name}");
                    assert!(reason.text.contains(text), "{name}: {reason}");
                }
                (found, _) => panic!("{name}: {found:?}"),
            }
        }
    }

    #[test]
    fn nobody_takes_turns_with_an_engine_unasked() {
        let reason = gpus(&Settings::default(), 1).expect_err("not asked");
        assert_eq!(reason.code, Code::TransportUnavailable);
        assert!(reason.text.contains("--allow-time-slicing was not given"), "{reason}");
    }

    #[test]
    fn each_rank_gets_the_gpu_that_it_was_promised_or_a_reason() {
        let visible = [device("GPU-a", "H200"), device("GPU-b", "H200")];
        let slice = [device("GPU-c", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")];
        let shared = choose(&[], &visible, 3, true).expect("two devices");
        assert_eq!(
            shared.iter().map(|device| &*device.uuid).collect::<Vec<_>>(),
            ["GPU-a", "GPU-b", "GPU-a"]
        );
        let rows: [Row<'_>; 7] = [
            ("in order", &[], &visible, 2, Ok(&["GPU-a", "GPU-b"])),
            ("fewer ranks", &[], &visible, 1, Ok(&["GPU-a"])),
            ("named", &["GPU-b"], &visible, 1, Ok(&["GPU-b"])),
            ("no GPU", &[], &[], 1, Err((Code::GpuNotVisible, "0 GPUs for 1 ranks"))),
            ("too few", &[], &visible, 3, Err((Code::GpuNotVisible, "2 GPUs for 3 ranks"))),
            ("wrong UUID", &["GPU-x"], &visible, 1, Err((Code::GpuNotVisible, "GPU-x is not among the 2"))),
            ("MIG", &[], &slice, 1, Err((Code::TransportUnavailable, "MIG instance"))),
        ];
        for (name, named, visible, ranks, want) in rows {
            let named: Vec<String> = named.iter().map(|uuid| (*uuid).to_owned()).collect();
            match (choose(&named, visible, ranks, false), want) {
                (Ok(chosen), Ok(want)) => {
                    let uuids: Vec<&str> = chosen.iter().map(|device| device.uuid.as_str()).collect();
                    assert_eq!(uuids, want, "{name}");
                }
                (Err(reason), Err((code, text))) => {
                    assert_eq!(reason.code, code, "{name}");
                    assert!(reason.text.contains(text), "{name}: {reason}");
                }
                (found, _) => panic!("{name}: {found:?}"),
            }
        }
    }
}
