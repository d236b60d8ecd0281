//! Command lines of a run's processes.

use super::world::{Key, World};
use crate::identity::SERVER_NAME;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;
use std::str::FromStr;
use weightrefit_core::id::Rank;
use weightrefit_core::membership::Seat;

/// A reference process that is wrong on purpose, to see that the verdict says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// The trainer publishes weights of another step.
    WrongRule,
    /// One engine rank flips a bit of its live tensors after each commit.
    CorruptLive,
    /// Engines go on reading while they are paused.
    IgnorePause,
}

/// The text names no way to be broken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not `wrong-rule`, `corrupt-live` or `ignore-pause`")]
pub struct BrokenError(String);

impl FromStr for Broken {
    type Err = BrokenError;
    fn from_str(text: &str) -> Result<Self, BrokenError> {
        match text {
            "wrong-rule" => Ok(Self::WrongRule),
            "corrupt-live" => Ok(Self::CorruptLive),
            "ignore-pause" => Ok(Self::IgnorePause),
            _ => Err(BrokenError(text.chars().take(80).collect())),
        }
    }
}

/// What all command lines have in common.
pub(super) struct Launch {
    /// The agent binary.
    pub(super) program: PathBuf,
    /// Directory of the run.
    pub(super) directory: PathBuf,
    /// Where the coordinator listens.
    pub(super) coordinator: SocketAddr,
    /// Its authority, PEM.
    pub(super) authority: PathBuf,
    /// namespace/name of the refit.
    pub(super) refit: String,
    /// JSON of the resolved refit.
    pub(super) resolved: PathBuf,
    /// Safetensors file.
    pub(super) weights: PathBuf,
    /// Port of each agent's metrics.
    pub(super) metrics: Option<u16>,
    /// What is wrong on purpose.
    pub(super) broken: Option<Broken>,
    /// What agents may drive NCCL with.
    pub(super) devices: Option<Devices>,
    /// Trainers and engines keep their tensors on these.
    pub(super) device_memory: bool,
}

/// GPUs and NCCL of a run.
#[derive(Debug, Clone)]
pub(super) enum Devices {
    /// Those of this machine.
    Real,
    /// The library that stands for both.
    Double(PathBuf),
}

impl Launch {
    /// The command of a process; `world_token` is that of the present start of the trainer.
    pub(super) fn command(&self, world: &World, key: &Key, world_token: &str) -> Command {
        match key {
            Key::Agent(index) => self.agent(world, *index),
            Key::Trainer(seat) => self.trainer(world, seat, world_token),
            Key::Engine(seat) => self.engine(world, seat),
        }
    }

    /// Socket of an agent; short, because a socket's path is at most 107 bytes.
    pub(super) fn socket(&self, agent: usize) -> PathBuf {
        self.directory.join(format!("{agent}.agent"))
    }

    fn agent(&self, world: &World, index: usize) -> Command {
        let spec = &world.agents[index];
        let mut command = Command::new(&self.program);
        command.arg("--coordinator").arg(self.coordinator.to_string());
        command.arg("--coordinator-name").arg(SERVER_NAME);
        command.arg("--trust-bundle").arg(&self.authority);
        command.args(["--token-fd", "0"]);
        command.arg("--refit").arg(&self.refit);
        command.arg("--pod-uid").arg(&spec.pod_uid);
        for seat in &spec.seats {
            command.arg("--claim").arg(seat.to_string());
        }
        command.arg("--socket").arg(self.socket(index));
        command.arg("--listen").arg(address(index).to_string());
        command.args(self.metrics.map(|port| format!("--metrics={port}")));
        command.arg("--exit-with-parent").arg(std::process::id().to_string());
        if self.devices.is_some() {
            command.arg("--allow-time-slicing");
        }
        if let Some(Devices::Double(library)) = &self.devices {
            command.arg("--cuda-library").arg(library).arg("--nccl-library").arg(library);
            // Small models then take many chunks.
            command.args(["--gpu-window-mib", "1"]);
            self.share_devices(&mut command, index);
        }
        command
    }

    fn trainer(&self, world: &World, seat: &Seat, world_token: &str) -> Command {
        let mut command = self.rank("reference-trainer", world, seat);
        command.arg("--training-rank").arg(rank(seat).to_string());
        command.arg("--world").arg(world_token);
        if self.broken == Some(Broken::WrongRule) {
            command.arg("--wrong-rule");
        }
        command
    }

    fn engine(&self, world: &World, seat: &Seat) -> Command {
        let mut command = self.rank("reference-engine", world, seat);
        if let Seat::Inference { pool, replica, rank } = seat {
            command.arg("--pool").arg(pool).arg("--replica").arg(replica);
            command.arg("--replica-rank").arg(rank.to_string());
            let head = Seat::Inference { pool: pool.clone(), replica: replica.clone(), rank: Rank(0) };
            let number = world.seats().position(|other| *other == head).unwrap_or(0);
            command.arg("--replica-socket").arg(self.directory.join(format!("{number}.replica")));
            if self.broken == Some(Broken::CorruptLive) && *rank == Rank(0) {
                command.arg("--corrupt-live");
            }
        }
        if self.broken == Some(Broken::IgnorePause) {
            command.arg("--ignore-pause");
        }
        command
    }

    /// An agent and its clients see the same GPUs, and no others do.
    fn share_devices(&self, command: &mut Command, agent: usize) {
        if self.device_memory {
            command.env("FAKEGPU_SEED", (agent + 1).to_string());
        }
    }

    fn rank(&self, role: &str, world: &World, seat: &Seat) -> Command {
        let agent = world.agent_of(seat).unwrap_or(0);
        let mut command = Command::new(&self.program);
        command.arg(role);
        command.arg("--socket").arg(self.socket(agent));
        command.arg("--refit").arg(&self.resolved);
        command.arg("--weights").arg(&self.weights);
        command.arg("--launcher").arg(std::process::id().to_string());
        if let (true, Some(devices)) = (self.device_memory, &self.devices) {
            let slot = world.agents.get(agent).and_then(|spec| spec.seats.iter().position(|own| own == seat));
            command.arg("--device").arg(slot.unwrap_or(0).to_string());
            if let Devices::Double(library) = devices {
                command.arg("--cuda-library").arg(library);
                self.share_devices(&mut command, agent);
            }
        }
        command
    }
}

/// Each agent has a loopback address of its own, as pods have.
fn address(agent: usize) -> Ipv4Addr {
    let [low, high] = u16::try_from(agent + 2).unwrap_or(u16::MAX).to_le_bytes();
    Ipv4Addr::new(127, 0, high, low)
}

fn rank(seat: &Seat) -> Rank {
    match seat {
        Seat::Training { rank } | Seat::Inference { rank, .. } => *rank,
    }
}
