//! What this pod gives those who run in it: looked at where the command runs, so in the container of an engine or trainer.

use super::finding::Finding;
use rustix::process::{Resource, getrlimit};
use weightrefit_core::code::Code;
use weightrefit_core::interface::{self, Library};

/// Locked memory that a network card's library registers before its first message.
const MEMLOCK_BYTES: u64 = 64 << 20;

/// Shared memory of a container that mounts none: too little for any engine of several processes.
const SHM_DEFAULT_BYTES: u64 = 64 << 20;

/// Variables that name the interfaces that libraries must use.
const INTERFACE_VARIABLES: [(&str, Library); 2] =
    [("NCCL_SOCKET_IFNAME", Library::Nccl), ("GLOO_SOCKET_IFNAME", Library::Gloo)];

/// Whether this is a container of a pod.
pub(super) fn is_pod() -> bool {
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
}

/// All checks.
pub(super) fn look() -> Vec<Finding> {
    let memlock = memlock(getrlimit(Resource::Memlock).current);
    let shm = rustix::fs::statvfs("/dev/shm").ok().map(|fs| fs.f_blocks.saturating_mul(fs.f_frsize));
    let present: Vec<String> = std::fs::read_dir("/sys/class/net")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    let interfaces = INTERFACE_VARIABLES.into_iter().filter_map(|(variable, library)| {
        let value = std::env::var(variable).ok()?;
        Some(interfaces(variable, library, &value, &present))
    });
    [memlock, self::shm(shm)].into_iter().chain(interfaces).collect()
}

fn memlock(limit: Option<u64>) -> Finding {
    match limit {
        None => Finding::good("locked memory", "no limit"),
        Some(limit) if limit >= MEMLOCK_BYTES => Finding::good("locked memory", format!("{limit} bytes")),
        Some(limit) => Finding::advice(
            "locked memory",
            format!("the limit is {limit} bytes"),
            "RDMA libraries register more than that and then fall back to TCP without a word; TCP needs none",
            Code::MemlockTooLow.remedy(),
        ),
    }
}

fn shm(bytes: Option<u64>) -> Finding {
    match bytes {
        Some(bytes) if bytes > SHM_DEFAULT_BYTES => Finding::good("/dev/shm", format!("{bytes} bytes")),
        found => Finding::advice(
            "/dev/shm",
            found.map_or("there is none".to_owned(), |bytes| format!("it has {bytes} bytes")),
            "engines of several processes, and NCCL between them, need more",
            Code::ShmTooSmall.remedy(),
        ),
    }
}

fn interfaces(variable: &'static str, library: Library, value: &str, present: &[String]) -> Finding {
    let check = "interface";
    if interface::finds(library, value, present) {
        return Finding::good(check, format!("{variable}={value}"));
    }
    Finding::wrong(
        check,
        format!("{variable}={value} names none of {}", present.join(", ")),
        "whoever reads it finds no address to listen on and does not start",
        Code::InterfaceNotFound.remedy(),
    )
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;

    #[test]
    fn what_a_pod_lacks_is_told() {
        let present = ["lo".to_owned(), "eth0".to_owned(), "ens1f0".to_owned()];
        for (variable, library) in INTERFACE_VARIABLES {
            for (value, want) in [("eth0", Level::Good), ("ib0", Level::Wrong)] {
                assert_eq!(interfaces(variable, library, value, &present).level, want, "{variable}={value}");
            }
        }
        for (limit, want) in
            [(None, Level::Good), (Some(8 << 20), Level::Advice), (Some(1 << 30), Level::Good)]
        {
            assert_eq!(memlock(limit).level, want, "{limit:?}");
        }
        for (bytes, want) in
            [(None, Level::Advice), (Some(64 << 20), Level::Advice), (Some(1 << 30), Level::Good)]
        {
            assert_eq!(shm(bytes).level, want, "{bytes:?}");
        }
    }
}
