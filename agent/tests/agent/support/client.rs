//! A blocking client of the agent socket.

use rustix::fs::{MemfdFlags, SealFlags};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use weightrefit_agent::session::fd;
use weightrefit_core::dtype::DType;
use weightrefit_core::id::{Incarnation, Rank};
use weightrefit_core::round::message::{EngineRecord, EngineState, RoundKey};
use weightrefit_proto::socket::{
    AgentFrame, ClientFrame, Memory, MemoryAt, PROTOCOL, Role, Tensor, decode, encode, frame_length,
};

/// A registration of one page and one tensor, on the host and without groups.
pub(crate) fn only_page(memories: Vec<Memory>, tensor: Tensor) -> ClientFrame {
    let (tensors, groups) = (vec![tensor], vec![]);
    ClientFrame::Register { page: 0, pages: 1, memories, tensors, staging_device: None, groups }
}

pub(crate) struct Client {
    pub(crate) stream: UnixStream,
    pub(crate) instance: Incarnation,
}

impl Client {
    pub(crate) fn connect(socket: &Path, instance: u128) -> Self {
        let stream = UnixStream::connect(socket).expect("the agent listens");
        stream.set_read_timeout(Some(super::PATIENCE)).expect("a timeout");
        Self { stream, instance: Incarnation(instance) }
    }

    /// Connects and says hello.
    pub(crate) fn hello(socket: &Path, instance: u128, role: Role) -> Self {
        let mut client = Self::connect(socket, instance);
        let instance = client.instance;
        client.send(&ClientFrame::Hello { protocol: PROTOCOL, instance, role }, &[]);
        client
    }

    /// The answer to the hello.
    pub(crate) fn welcome(mut self) -> Self {
        let frame = self.expect("welcome");
        assert!(matches!(frame, AgentFrame::Welcome { protocol: PROTOCOL, .. }), "{frame:?}");
        self
    }

    pub(crate) fn send(&mut self, frame: &ClientFrame, fds: &[BorrowedFd<'_>]) {
        let bytes = encode(frame).expect("a frame");
        let sent = fd::send(&self.stream, &bytes, fds).expect("the agent reads");
        self.stream.write_all(&bytes[sent..]).expect("the agent reads");
    }

    /// Next frame; `None` at the end of the stream.
    pub(crate) fn receive(&mut self) -> Option<(AgentFrame, Vec<OwnedFd>)> {
        let mut prefix = [0; 4];
        let first = fd::receive(&self.stream, &mut prefix).ok()?;
        if first.bytes == 0 {
            return None;
        }
        self.stream.read_exact(&mut prefix[first.bytes..]).expect("a frame");
        let mut body = vec![0; frame_length(prefix).expect("a length")];
        self.stream.read_exact(&mut body).expect("a frame");
        Some((decode(&body).expect("a frame"), first.fds))
    }

    pub(crate) fn expect(&mut self, what: &str) -> AgentFrame {
        self.receive().unwrap_or_else(|| panic!("stream ended before {what}")).0
    }
}

pub(crate) fn memfd(name: &str, bytes: &[u8], seals: SealFlags) -> OwnedFd {
    let memory =
        rustix::fs::memfd_create(name, MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).expect("memory");
    let file = File::from(memory);
    file.write_all_at(bytes, 0).expect("room");
    let memory = OwnedFd::from(file);
    rustix::fs::fcntl_add_seals(&memory, seals).expect("seals");
    memory
}

pub(crate) const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A trainer rank with one f32 tensor `w`.
pub(crate) struct Trainer {
    pub(crate) client: Client,
    pub(crate) memory: File,
}

impl Trainer {
    pub(crate) fn start(socket: &Path, rank: u32, shape: &[u64]) -> Self {
        let bytes = shape.iter().product::<u64>() as usize * 4;
        let memory = memfd("weights", &vec![0; bytes], SEALS);
        let role = Role::Trainer { rank: Rank(rank), world: "w1".to_owned(), outstanding: None };
        let mut client = Client::hello(socket, 0x7000 + u128::from(rank), role).welcome();
        let tensor = Tensor {
            name: "w".to_owned(),
            dtype: DType::F32,
            shape: shape.to_vec(),
            at: Some(MemoryAt { memory: 0, offset: 0 }),
            pieces: None,
        };
        let memories = vec![Memory { bytes: bytes as u64, device: None }];
        client.send(&only_page(memories, tensor), &[memory.as_fd()]);
        Self { client, memory: File::from(memory) }
    }

    /// Waits until it may publish.
    pub(crate) fn registered(mut self) -> Self {
        assert_eq!(self.client.expect("registration"), AgentFrame::Registered {});
        self
    }

    /// Writes the values and publishes.
    pub(crate) fn publish(&mut self, step: i64, values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.memory.write_all_at(&bytes, 0).expect("room");
        self.client.send(&ClientFrame::Publish { step, world: "w1".to_owned(), extras: None }, &[]);
    }
}

/// An engine rank with one f32 tensor `w`, which does what its agent says.
pub(crate) struct Engine {
    pub(crate) client: Client,
    pub(crate) record: EngineRecord,
    pub(crate) live: Vec<f32>,
    staging: Option<(File, u64)>,
}

impl Engine {
    pub(crate) fn start(socket: &Path, replica: &str, rank: u32, shape: &[u64]) -> Self {
        let instance = 0xe000 + u128::from(rank);
        let record = EngineRecord {
            instance: Incarnation(instance),
            live: None,
            state: EngineState::Cold,
            round: RoundKey::default(),
        };
        let (pool, replica) = ("default".to_owned(), replica.to_owned());
        let mut client =
            Client::hello(socket, instance, Role::Engine { pool, replica, rank: Rank(rank), record });
        let tensor =
            Tensor { name: "w".to_owned(), dtype: DType::F32, shape: shape.to_vec(), at: None, pieces: None };
        client.send(&only_page(vec![], tensor), &[]);
        let elements = shape.iter().product::<u64>() as usize;
        Self { client, record, live: vec![f32::NAN; elements], staging: None }
    }

    /// Answers frames until it serves again.
    pub(crate) fn refit(&mut self) {
        loop {
            let (frame, fds) = self.client.receive().expect("the agent is there");
            match frame {
                AgentFrame::Welcome { .. } | AgentFrame::Registered {} => {}
                AgentFrame::Staging { tensors, .. } => {
                    let memory = File::from(fds.into_iter().next().expect("staging"));
                    self.staging = Some((memory, tensors[0].offset));
                }
                AgentFrame::Pause { round, .. } => {
                    self.record.round = round;
                    if self.record.state == EngineState::Serving {
                        self.record.state = EngineState::Quiet;
                    }
                    self.client.send(&ClientFrame::Paused { round, record: self.record }, &[]);
                }
                AgentFrame::Commit { round, version, .. } => {
                    let (memory, offset) = self.staging.as_ref().expect("staging was shown");
                    let mut bytes = vec![0; self.live.len() * 4];
                    memory.read_exact_at(&mut bytes, *offset).expect("staging is readable");
                    let words = bytes.as_chunks::<4>().0.iter().copied();
                    self.live = words.map(f32::from_le_bytes).collect();
                    self.record =
                        EngineRecord { live: Some(version), state: EngineState::Applied, ..self.record };
                    let caches_invalidated = vec!["prefix".to_owned()];
                    self.client.send(
                        &ClientFrame::Committed { round, record: self.record, caches_invalidated },
                        &[],
                    );
                }
                AgentFrame::Resume { round, version } => {
                    assert_eq!(self.record.live, Some(version));
                    self.record.state = EngineState::Serving;
                    self.client.send(&ClientFrame::Resumed { round, record: self.record }, &[]);
                    return;
                }
                AgentFrame::Abort { round } => {
                    if self.record.state == EngineState::Quiet {
                        self.record.state = EngineState::Serving;
                    }
                    self.client.send(&ClientFrame::Aborted { round, record: self.record }, &[]);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
