//! Every bound of the agent, with its reason.

use std::time::Duration;

/// Heartbeats on a stream between agents: five fit into the time after which a peer counts as lost.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// Silence after which a peer is lost (protocol page §4).
pub const PEER_SILENCE_MAX: Duration = Duration::from_secs(5);
const _: () = assert!(PEER_SILENCE_MAX.as_millis() >= 5 * HEARTBEAT_INTERVAL.as_millis());

/// Time for one TCP and TLS connection: a peer that takes longer is as good as lost.
pub const DIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// A projected token is about 1 KiB; enterprise issuers reach a few.
pub const TOKEN_BYTES_MAX: u64 = 16 << 10;

/// A bundle during rotation holds two or three authorities of about 1 KiB; private ones ship whole chains.
pub const TRUST_BUNDLE_BYTES_MAX: u64 = 1 << 20;

/// A chain and a bundle.
pub const ENROL_RESPONSE_BYTES_MAX: usize = 2 << 20;

/// Renewal never runs hot, even with certificates of seconds.
pub const RENEWAL_INTERVAL_MIN: Duration = Duration::from_secs(10);

/// Connections to the agent socket: a pod has at most 16 ranks, each with a client that may be reconnecting,
/// and a few drivers.
pub const CLIENTS_MAX: usize = 64;

/// A client says hello at once; one that does not is none.
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Frames queued for a client: a round sends it five; one that leaves so many unread is stuck.
pub const OUTBOX_FRAMES_MAX: usize = 64;

/// The kernel buffers whole frames; one that is not taken in this time never will be.
pub const FRAME_WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Before accepting again when the process has run out of descriptors.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Descriptors on one frame; the frame module of `proto` says why.
pub const FRAME_FDS_MAX: usize = weightrefit_proto::socket::FRAME_FDS_MAX;

/// Pages of a registration: paged by group, and a model has some hundred.
pub const REGISTRATION_PAGES_MAX: usize = 1 << 16;

/// Tensors of one rank: the largest expert models reach some 60,000 on an unsharded rank.
pub const REGISTRATION_TENSORS_MAX: usize = 1 << 20;

/// Memories of one rank: each holds a descriptor until it is mapped, and 1,024 descriptors are the usual limit.
pub const REGISTRATION_MEMORIES_MAX: usize = 512;

/// Longest world token (decisions page).
pub const WORLD_BYTES_MAX: usize = 64;

/// First pause after a failed dial: a peer that gets its membership a moment later is met at once.
pub const REDIAL_PAUSE_MIN: Duration = Duration::from_millis(50);

/// Longest pause between dials: short beside the time in which a peer counts as lost.
pub const REDIAL_PAUSE_MAX: Duration = Duration::from_secs(1);

/// One message: sums of the classes of 60,000 tensors are about 4 MB of JSON; four times that.
pub const ENVELOPE_BYTES_MAX: usize = 16 << 20;

/// Messages queued on a link: a round has some ten between two agents per rank, and an agent hosts at most 16.
pub const LINK_ENVELOPES_MAX: usize = 512;

/// Handshakes done and not yet taken by the server.
pub const PEER_BACKLOG_MAX: usize = 16;

/// Connections of peers, handshakes included: an agent is dialled by its leader and by heads, and reconnects
/// overlap; a flood of others waits in the kernel.
pub const PEER_CONNECTIONS_MAX: usize = 256;

/// An agent opens one stream on a connection; a second overlaps while it reconnects.
pub const STREAMS_PER_CONNECTION_MAX: u32 = 4;

/// Events of peers, clients and bytes that wait for the round driver; a full queue slows their sources down.
pub const EVENTS_MAX: usize = 1024;
