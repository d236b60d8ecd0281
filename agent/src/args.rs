//! Flags of `weightrefit-agent`: parsed without IO; [`crate::start`] acts on them.
//!
//! There are no environment variables besides `RUST_LOG`: a pod spec expands `$(NAME)` in arguments itself.

use crate::library::LibraryArgs;
use crate::reference::ReferenceRole;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use weightrefit_core::id::Rank;
use weightrefit_core::membership::Seat;

/// Moves exactly the missing weight bytes between the ranks of this pod and those of others.
#[derive(Debug, Parser)]
#[command(name = "weightrefit-agent", version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// The agent's own settings.
    #[command(flatten)]
    pub agent: Option<AgentArgs>,
    /// What else this binary can be.
    #[command(subcommand)]
    pub role: Option<Role>,
}

/// What else this binary can be.
#[derive(Debug, Subcommand)]
pub enum Role {
    /// A process of a reference run.
    #[command(flatten)]
    Reference(ReferenceRole),
    /// Copies the library for ranks that move their bytes themselves.
    #[command(hide = true)]
    CopyLibrary(LibraryArgs),
}

/// Settings of one agent.
#[derive(Debug, Clone, Args)]
pub struct AgentArgs {
    /// Coordinator to dial.
    #[arg(long, value_name = "HOST:PORT")]
    pub coordinator: String,
    /// Name that the coordinator's certificate must carry; by default the host of `--coordinator`.
    #[arg(long, value_name = "NAME")]
    pub coordinator_name: Option<String>,
    /// Authorities that the coordinator's certificate must chain to (PEM); reread at each connection.
    #[arg(long, value_name = "PATH", required_unless_present = "trust_bundle_fd")]
    pub trust_bundle: Option<PathBuf>,
    /// The same, from an inherited file descriptor, read once.
    #[arg(long, value_name = "N", conflicts_with = "trust_bundle")]
    pub trust_bundle_fd: Option<u32>,
    /// Enrolment token; reread at each enrolment.
    #[arg(long, value_name = "PATH", required_unless_present = "token_fd")]
    pub token: Option<PathBuf>,
    /// The same, from an inherited file descriptor, read once.
    #[arg(long, value_name = "N", conflicts_with = "token")]
    pub token_fd: Option<u32>,
    /// The refit that this pod claims to belong to.
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pub refit: String,
    /// UID of this pod.
    #[arg(long, value_name = "UID")]
    pub pod_uid: String,
    /// A rank that this pod hosts: `training/RANK` or `inference/POOL/REPLICA/RANK`. Repeat for several.
    #[arg(long = "claim", value_name = "CLAIM", required_unless_present = "side", value_parser = parse_claim)]
    pub claims: Vec<Seat>,
    /// Side of this pod, whose ranks the coordinator tells. An inference pod is not ready before it knows them.
    #[arg(long, value_enum, conflicts_with = "claims")]
    pub side: Option<Side>,
    /// Where trainer, engine and driver connect. The directory is made with mode 0700 where it is missing.
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// Address that other agents reach this one at; ports are chosen by the kernel.
    #[arg(long, value_name = "IP")]
    pub listen: IpAddr,
    /// Where `/metrics`, `/livez` and `/readyz` are served, a port alone being one of `--listen`; not served without
    /// it. They are served once the agent socket listens.
    #[arg(long, value_name = "[IP:]PORT", value_parser = parse_metrics)]
    pub metrics: Option<MetricsAddress>,
    /// NCCL driven by the agent, a process beside the engine, takes turns with the engine's kernels on their GPU. Only
    /// with this flag is it tried at all; without it bytes go by TCP.
    #[arg(long)]
    pub allow_time_slicing: bool,
    /// UUID of the GPU of a rank, as `nvidia-smi -L` prints it, in the order of the ranks. Without it the ranks take
    /// the visible GPUs in order.
    #[arg(long = "gpu", value_name = "UUID")]
    pub gpus: Vec<String>,
    /// Device memory, in MiB, for the packed bytes that one replica's lane has in flight.
    #[arg(long, value_name = "MIB", default_value_t = 2048, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub gpu_window_mib: u64,
    /// CUDA driver library, in place of the system's.
    #[arg(long, value_name = "PATH")]
    pub cuda_library: Option<PathBuf>,
    /// NCCL library, in place of the `libnccl.so.2` that the loader finds.
    #[arg(long, value_name = "PATH")]
    pub nccl_library: Option<PathBuf>,
    /// Form of the log on stderr; `RUST_LOG` filters it.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// Stop when this process, which must be the parent, ends; the kernel means the thread that started the agent.
    #[arg(long, value_name = "PID")]
    pub exit_with_parent: Option<u32>,
    /// Run the agent in a process below this one, which starts it again when it fails. What it is given must be files:
    /// each start reads them.
    #[arg(long, conflicts_with_all = ["trust_bundle_fd", "token_fd"])]
    pub supervise: bool,
    /// The supervisor that has started this agent: as `--exit-with-parent`, and `--supervise` is its business.
    #[arg(long, value_name = "PID", hide = true)]
    pub worker_of: Option<u32>,
}

/// Which side of a refit a pod is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Side {
    /// It publishes.
    Training,
    /// It receives.
    Inference,
}

/// Where metrics are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricsAddress {
    /// There.
    At(SocketAddr),
    /// At this port of the address that other agents reach this one at.
    Port(u16),
}

impl MetricsAddress {
    /// The address, where agents are reached at `listen`.
    #[must_use]
    pub const fn with(self, listen: IpAddr) -> SocketAddr {
        match self {
            Self::At(address) => address,
            Self::Port(port) => SocketAddr::new(listen, port),
        }
    }
}

fn parse_metrics(text: &str) -> Result<MetricsAddress, std::net::AddrParseError> {
    match text.parse() {
        Ok(port) => Ok(MetricsAddress::Port(port)),
        Err(_) => text.parse().map(MetricsAddress::At),
    }
}

/// Form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// The text is not a claim.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("claim `{text}` is neither `training/RANK` nor `inference/POOL/REPLICA/RANK`")]
pub struct ClaimError {
    text: String,
}

/// Reads a claim: the seat as it is displayed.
pub fn parse_claim(text: &str) -> Result<Seat, ClaimError> {
    let parsed = match text.split_once('/') {
        Some(("training", rank)) => rank.parse().ok().map(|rank| Seat::Training { rank: Rank(rank) }),
        Some(("inference", rest)) => inference_claim(rest),
        _ => None,
    };
    parsed.ok_or_else(|| ClaimError { text: text.chars().take(200).collect() })
}

fn inference_claim(rest: &str) -> Option<Seat> {
    let (pool, rest) = rest.split_once('/')?;
    // A replica's name may contain slashes; pools and ranks have none.
    let (replica, rank) = rest.rsplit_once('/')?;
    if pool.is_empty() || replica.is_empty() {
        return None;
    }
    Some(Seat::Inference {
        pool: pool.to_owned(),
        replica: replica.to_owned(),
        rank: Rank(rank.parse().ok()?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_read_as_they_are_written() {
        for text in ["training/0", "training/31", "inference/default/vllm-0/3", "inference/a/b/c/7"] {
            assert_eq!(parse_claim(text).expect(text).to_string(), text);
        }
        let Ok(Seat::Inference { pool, replica, rank }) = parse_claim("inference/a/b/c/7") else { panic!() };
        assert_eq!((pool.as_str(), replica.as_str(), rank), ("a", "b/c", Rank(7)));
    }

    #[test]
    fn what_is_no_claim_is_refused() {
        for text in [
            "",
            "training",
            "training/",
            "training/x",
            "training/-1",
            "inference/0",
            "inference//r/0",
            "inference/p//0",
            "inference/p/r/x",
            "serving/0",
            "training/4294967296",
        ] {
            assert!(parse_claim(text).is_err(), "{text}");
        }
    }

    #[test]
    fn metrics_are_served_where_the_flag_or_the_agents_address_says() {
        let listen = "fd00::7".parse().expect("an address");
        for (text, want) in
            [("9464", "[fd00::7]:9464"), ("127.0.0.1:80", "127.0.0.1:80"), ("[::]:9464", "[::]:9464")]
        {
            assert_eq!(parse_metrics(text).expect(text).with(listen).to_string(), want);
        }
        for text in ["", "127.0.0.1", "65536", "port"] {
            assert!(parse_metrics(text).is_err(), "{text}");
        }
    }

    #[test]
    fn flags_make_sense_to_clap() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
