//! What the environment asks for, read once.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

/// A rank of a communicator and the how-manieth of its sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) rank: u32,
    pub(crate) nth: u64,
}

/// All knobs, as `FAKEGPU_` and the name in capitals.
#[derive(Debug)]
pub(crate) struct Knobs {
    /// Devices of this process; 8 by default.
    pub(crate) devices: i32,
    /// Bytes of one device; 8 GiB by default.
    pub(crate) device_bytes: u64,
    /// What a device is called.
    pub(crate) name: String,
    /// Of the UUIDs; the process id by default, so that processes have GPUs of their own.
    pub(crate) seed: u32,
    /// As `cuDriverGetVersion` says it; 13000 by default.
    pub(crate) driver_version: i32,
    /// As `ncclGetVersion` says it; 23203 by default.
    pub(crate) nccl_version: u32,
    /// "In progress" answers of every call that may give any; 3 by default.
    pub(crate) polls: u32,
    /// Before each operation of a stream.
    pub(crate) latency: Duration,
    /// Bytes a second of a link; no limit by default.
    pub(crate) link_bytes: Option<u64>,
    /// `RANK@N`: a bit of that send is turned.
    pub(crate) flip: Option<Target>,
    /// `RANK@N`: that send fails the communicator with result 1.
    pub(crate) fail: Option<Target>,
    /// `RANK@N`: that send never happens.
    pub(crate) hang: Option<Target>,
    /// `RANK`: an abort of that rank never ends.
    pub(crate) wedge: Option<u32>,
    /// `1`: nobody hears of a peer's death, as over NVLink.
    pub(crate) silent_death: bool,
    /// Folder where each process writes what it sent and received, a line for each group, and each copy from or to a
    /// device.
    pub(crate) tally: Option<PathBuf>,
}

fn number<T: std::str::FromStr>(name: &str, default: T) -> T {
    match std::env::var(format!("FAKEGPU_{name}")) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("FAKEGPU_{name} is `{text}`")),
        Err(_) => default,
    }
}

fn target(name: &str) -> Option<Target> {
    let text = std::env::var(format!("FAKEGPU_{name}")).ok()?;
    let parsed = text.split_once('@').and_then(|(rank, nth)| Some((rank.parse().ok()?, nth.parse().ok()?)));
    let (rank, nth) = parsed.unwrap_or_else(|| panic!("FAKEGPU_{name} is `{text}`"));
    Some(Target { rank, nth })
}

/// The knobs.
pub(crate) fn knobs() -> &'static Knobs {
    static KNOBS: OnceLock<Knobs> = OnceLock::new();
    KNOBS.get_or_init(|| Knobs {
        devices: number("DEVICES", 8),
        device_bytes: number("DEVICE_BYTES", 8 << 30),
        name: std::env::var("FAKEGPU_NAME").unwrap_or_else(|_| "Double of a GPU".into()),
        seed: number("SEED", std::process::id()),
        driver_version: number("DRIVER_VERSION", 13000),
        nccl_version: number("NCCL_VERSION", 23203),
        polls: number("POLLS", 3),
        latency: Duration::from_micros(number("LATENCY_US", 0)),
        link_bytes: std::env::var_os("FAKEGPU_LINK_BYTES").map(|_| number("LINK_BYTES", 0)),
        flip: target("FLIP"),
        fail: target("FAIL"),
        hang: target("HANG"),
        wedge: std::env::var_os("FAKEGPU_WEDGE").map(|_| number("WEDGE", 0)),
        silent_death: number("SILENT_DEATH", 0) == 1,
        tally: std::env::var_os("FAKEGPU_TALLY").map(PathBuf::from),
    })
}
