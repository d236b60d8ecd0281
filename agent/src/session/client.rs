//! One connection of the agent socket: hello, pages and frames in order; what is no frame of its role ends it.

use super::following::{Events, Following};
use super::frame::{self, WireError};
use super::registration::{Pages, Registration, RegistrationError};
use crate::limits;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;
use weightrefit_core::code::Code;
use weightrefit_core::id::Incarnation;
use weightrefit_proto::socket::{AgentFrame, ClientFrame, EXTRAS_BYTES_MAX, PROTOCOL, Role};

/// Number of a connection; never reused by this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u64);

/// What a connection has to say, in the order in which it happened.
#[derive(Debug)]
pub enum ClientEvent {
    /// A hello of protocol 1.
    Joined {
        /// The connection.
        client: ClientId,
        /// The process.
        instance: Incarnation,
        /// What it says it is.
        role: Role,
        /// Where frames for it go. The socket closes after the last clone of this is dropped (EOF promise).
        outbox: Outbox,
    },
    /// The last page of a registration came.
    Registered {
        /// The connection.
        client: ClientId,
        /// All pages.
        registration: Registration,
    },
    /// Any other frame that the role may send.
    Frame {
        /// The connection.
        client: ClientId,
        /// The frame, neither hello nor register.
        frame: ClientFrame,
    },
    /// Nothing more will come from it: it closed, or was refused.
    Gone {
        /// The connection.
        client: ClientId,
        /// The code it was refused with.
        refused: Option<Code>,
    },
    /// The socket is closed; follows `Gone` once every outbox is dropped.
    Closed {
        /// The connection.
        client: ClientId,
    },
}

#[derive(Debug)]
enum Outgoing {
    /// A frame and the descriptors that ride on it.
    Frame(AgentFrame, Vec<OwnedFd>),
    /// From now on these too, where nothing else waits.
    Events(Events),
}

/// Frames on their way to one client. While a clone of it lives, the socket stays open.
#[derive(Debug, Clone)]
pub struct Outbox {
    frames: mpsc::Sender<Outgoing>,
    end: Arc<Notify>,
}

/// The client does not read: its queue is full, or its socket broke.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("client takes no more frames")]
pub struct Stuck;

impl Outbox {
    /// Queues a frame; never waits.
    pub fn send(&self, frame: AgentFrame, fds: Vec<OwnedFd>) -> Result<(), Stuck> {
        self.frames.try_send(Outgoing::Frame(frame, fds)).map_err(|_| Stuck)
    }

    /// From now on the client is sent these events too, between its frames.
    pub fn follow(&self, events: Events) -> Result<(), Stuck> {
        self.frames.try_send(Outgoing::Events(events)).map_err(|_| Stuck)
    }

    /// Stops listening to the client; `Gone` follows, and the end of the stream after the last clone is dropped.
    pub fn end(&self) {
        self.end.notify_one();
    }
}

/// Why a connection ends before its client wanted.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Registration(#[from] RegistrationError),
    #[error("first frame is not a hello")]
    NoHello,
    #[error("no hello within {} s", limits::HELLO_TIMEOUT.as_secs())]
    Silent,
    #[error("client speaks protocol {0}, the agent {PROTOCOL}")]
    Protocol(u32),
    #[error("{role} may not send `{frame}`")]
    Role { role: &'static str, frame: &'static str },
    #[error("`{0}` carries descriptors")]
    Descriptors(&'static str),
    #[error("extras of {bytes} bytes, where {EXTRAS_BYTES_MAX} are possible")]
    Extras { bytes: usize },
    #[error("world token of {bytes} bytes, where 1 to {} are possible", limits::WORLD_BYTES_MAX)]
    World { bytes: usize },
}

impl Refusal {
    fn told(&self) -> Option<(Code, &'static str)> {
        match self {
            Self::Wire(error) => error.told(),
            Self::Registration(error) => Some((error.code(), error.code().remedy())),
            Self::Silent => None,
            Self::NoHello | Self::Protocol(_) | Self::Role { .. } | Self::Descriptors(_) => {
                Some((Code::Unsupported, "Send frames of protocol 1, as docs/agent-socket.md shows them."))
            }
            Self::Extras { .. } => Some((
                Code::Unsupported,
                "Publish what is large as a tensor of the model: extras are for scales and settings.",
            )),
            Self::World { .. } => Some((
                Code::Unsupported,
                "Draw the world token on rank 0 and spread it; without a process group use the launcher's restart id.",
            )),
        }
    }
}

/// Serves one connection to its end. `events` is bounded; a slow reader of it slows the client.
pub(super) async fn serve(
    client: ClientId,
    agent: Incarnation,
    stream: UnixStream,
    events: mpsc::Sender<ClientEvent>,
) {
    let (mut read, write) = stream.into_split();
    let (outgoing, queue) = mpsc::channel(limits::OUTBOX_FRAMES_MAX);
    let writer = tokio::spawn(write_all(write, queue));
    let end = Arc::new(Notify::new());
    let outbox = Outbox { frames: outgoing, end: Arc::clone(&end) };
    let refusal = tokio::select! {
        result = converse((client, agent), &mut read, &outbox, &events) => result.err(),
        () = end.notified() => None,
    };
    let told = refusal.as_ref().and_then(Refusal::told);
    if let Some(refusal) = &refusal {
        tracing::warn!(client = client.0, error = %refusal, "client refused");
        if let Some((code, hint)) = told {
            let message = refusal.to_string();
            let frame = AgentFrame::Error { code, message, hint: hint.to_owned(), request: None };
            // A client that reads nothing learns it from the end of the stream.
            let _ = outbox.send(frame, Vec::new());
        }
    }
    // Nobody is left to tell when the receiver is gone: the agent is stopping.
    let _ = events.send(ClientEvent::Gone { client, refused: told.map(|(code, _)| code) }).await;
    drop(outbox);
    let _ = writer.await;
    drop(read);
    let _ = events.send(ClientEvent::Closed { client }).await;
}

async fn converse(
    (client, agent): (ClientId, Incarnation),
    read: &mut OwnedReadHalf,
    outbox: &Outbox,
    events: &mpsc::Sender<ClientEvent>,
) -> Result<(), Refusal> {
    let first = timeout(limits::HELLO_TIMEOUT, frame::read(read)).await.map_err(|_| Refusal::Silent)??;
    let Some((first, fds)) = first else { return Ok(()) };
    let ClientFrame::Hello { protocol, instance, role } = first else { return Err(Refusal::NoHello) };
    if protocol != PROTOCOL {
        return Err(Refusal::Protocol(protocol));
    }
    if !fds.is_empty() {
        return Err(Refusal::Descriptors("hello"));
    }
    if let Role::Trainer { world, .. } = &role {
        check_world(world)?;
    }
    let kind = Kind::of(&role);
    let version = env!("CARGO_PKG_VERSION").to_owned();
    // The queue is empty yet.
    let _ = outbox.send(AgentFrame::Welcome { protocol: PROTOCOL, agent, version }, Vec::new());
    let joined = ClientEvent::Joined { client, instance, role, outbox: outbox.clone() };
    if events.send(joined).await.is_err() {
        return Ok(());
    }
    let (mut pages, mut wanted) = (Pages::default(), None);
    while let Some((frame, fds)) = frame::read(read).await? {
        let name = kind.check(&frame)?;
        let event = match frame {
            ClientFrame::Register { page, pages: of, memories, tensors, staging_device, groups } => {
                wanted = wanted.or(staging_device);
                match pages.add((page, of), memories, (tensors, groups), fds)? {
                    Some(registration) => {
                        let registration = Registration { staging_device: wanted.take(), ..registration };
                        ClientEvent::Registered { client, registration }
                    }
                    None => continue,
                }
            }
            _ if !fds.is_empty() => return Err(Refusal::Descriptors(name)),
            frame => {
                if let ClientFrame::Publish { world, extras, .. } = &frame {
                    check_world(world)?;
                    if let Some(extras) = extras.as_ref().filter(|extras| extras.len() > EXTRAS_BYTES_MAX) {
                        return Err(Refusal::Extras { bytes: extras.len() });
                    }
                }
                ClientEvent::Frame { client, frame }
            }
        };
        if events.send(event).await.is_err() {
            return Ok(());
        }
    }
    Ok(())
}

fn check_world(world: &str) -> Result<(), Refusal> {
    match world.len() {
        1..=limits::WORLD_BYTES_MAX => Ok(()),
        bytes => Err(Refusal::World { bytes }),
    }
}

/// Which frames a connection may send.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Trainer,
    Engine,
    Driver,
    Executor,
}

impl Kind {
    fn of(role: &Role) -> Self {
        match role {
            Role::Trainer { .. } => Self::Trainer,
            Role::Engine { .. } => Self::Engine,
            Role::Driver {} => Self::Driver,
            Role::Executor { .. } => Self::Executor,
        }
    }

    fn check(self, frame: &ClientFrame) -> Result<&'static str, Refusal> {
        let (name, allowed) = match frame {
            ClientFrame::Hello { .. } => ("hello", false),
            ClientFrame::Register { groups, .. } if !groups.is_empty() => ("groups", self == Self::Engine),
            ClientFrame::Register { .. } => ("register", matches!(self, Self::Trainer | Self::Engine)),
            ClientFrame::Publish { .. } => ("publish", self == Self::Trainer),
            ClientFrame::Paused { .. } => ("paused", self == Self::Engine),
            ClientFrame::Applied { .. } => ("applied", self == Self::Engine),
            ClientFrame::Committed { .. } => ("committed", self == Self::Engine),
            ClientFrame::Resumed { .. } => ("resumed", self == Self::Engine),
            ClientFrame::Aborted { .. } => ("aborted", self == Self::Engine),
            ClientFrame::Failed { .. } => ("failed", self == Self::Engine),
            ClientFrame::Refit { .. } => ("refit", self == Self::Driver),
            ClientFrame::Status { .. } => ("status", self == Self::Driver),
            ClientFrame::Events { .. } => ("events", self == Self::Driver),
            ClientFrame::Said { .. } => ("said", self == Self::Executor),
        };
        let role = match self {
            Self::Trainer => "a trainer",
            Self::Engine => "an engine",
            Self::Driver => "a driver",
            Self::Executor => "an executor",
        };
        if allowed { Ok(name) } else { Err(Refusal::Role { role, frame: name }) }
    }
}

async fn write_all(mut write: OwnedWriteHalf, mut queue: mpsc::Receiver<Outgoing>) {
    let mut following = Following::default();
    loop {
        let done = tokio::select! {
            biased;
            outgoing = queue.recv() => match outgoing {
                Some(Outgoing::Frame(frame, fds)) => {
                    timeout(limits::FRAME_WRITE_TIMEOUT, frame::write(&mut write, &frame, &fds)).await
                }
                Some(Outgoing::Events(events)) => {
                    following.begin(events);
                    continue;
                }
                None => return,
            },
            begun = following.next(&write) => match begun {
                Ok(rest) => timeout(limits::FRAME_WRITE_TIMEOUT, write.write_all(&rest))
                    .await
                    .map(|done| done.map_err(WireError::from)),
                Err(error) => Ok(Err(error)),
            },
        };
        match done {
            Ok(Ok(())) => {}
            // The socket is of no use any more; waiting for the outboxes keeps the promise of EOF.
            Ok(Err(error)) => {
                tracing::debug!(error = %error, "client socket broke");
                queue.close();
            }
            Err(_) => {
                tracing::warn!("client does not read");
                queue.close();
            }
        }
    }
}
