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

/// Frames queued for a client: a round sends five to a trainer or engine, and three for each of some hundred replicas to
/// an executor; one that leaves so many unread is stuck.
pub const OUTBOX_FRAMES_MAX: usize = 512;

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

/// Versions whose extras are remembered: the one being staged, the one being recovered, and as many that overtake them.
pub const EXTRAS_REMEMBERED: usize = 4;

/// One group of an engine's tensors is applied in milliseconds; one that takes this long is named in the log.
pub const GROUP_SLOW: Duration = Duration::from_secs(5);

/// Longest world token (decisions page).
pub const WORLD_BYTES_MAX: usize = 64;

/// First pause after a failed dial: a peer that gets its membership a moment later is met at once.
pub const REDIAL_PAUSE_MIN: Duration = Duration::from_millis(50);

/// Longest pause between dials: short beside the time in which a peer counts as lost.
pub const REDIAL_PAUSE_MAX: Duration = Duration::from_secs(1);

/// One message: sums of the classes of 60,000 tensors are about 4 MB of JSON; four times that.
pub const ENVELOPE_BYTES_MAX: usize = 16 << 20;

/// A page of what a client has recorded is full at this: it and one more tensor of thousands of experts' pieces stay
/// below what a coordinator takes in one message.
pub const RECORDED_PAGE_BYTES: usize = 256 << 10;

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

/// Bytes that a stream reads or writes at once, and the size of its only buffer: large enough that system calls
/// do not count, small enough to stay in the second-level cache.
pub const CHUNK_BYTES: usize = 256 << 10;

/// Contiguous bytes from which a run goes straight between socket and tensor; below, a copy is cheaper than a
/// slice of its own in the system call.
pub const DIRECT_BYTES_MIN: u64 = 4 << 10;

/// Streams of one pair: beyond this, more streams share the same link and cores.
pub const STREAMS_MAX: u32 = 8;

/// Bytes for which another stream is worth its connection and handshake.
pub const STREAM_BYTES_MIN: u64 = 8 << 20;

/// Threads that receive for one rank; each has one chunk. More streams than that wait their turn.
pub const RECEIVE_THREADS_MAX: usize = 16;

/// Streams served at once by one agent: threads and chunks (32 MiB) of the source side. More are told to come
/// again.
pub const SEND_STREAMS_MAX: usize = 128;

/// Connections not yet admitted. When one more comes, the oldest goes, so a flood cannot lock others out for
/// longer than a handshake takes.
pub const HANDSHAKES_MAX: usize = 64;

/// Time from accepting a connection to having read its first frame.
pub const ADMISSION_TIMEOUT: Duration = Duration::from_secs(5);

/// A destination may ask before this agent has heard of the round from its leader, who tells both at once: it is let wait
/// for this long instead of being told to come again.
pub const OFFER_WAIT_MAX: Duration = Duration::from_millis(100);
const _: () = assert!(OFFER_WAIT_MAX.as_millis() < ADMISSION_TIMEOUT.as_millis());

/// Connections whose streams have ended, kept for those of the next round: a thread and a socket each. When one more is
/// to be kept the oldest goes, and is dialled anew where it is wanted.
pub const RESTING_LINKS_MAX: usize = SEND_STREAMS_MAX;

/// Time that a refused peer gets to read why.
pub const PARTING_TIMEOUT: Duration = Duration::from_millis(500);

/// First frame of a stream: identities and digests are about 200 bytes.
pub const STREAM_HEADER_BYTES_MAX: usize = 512;

/// Waiting for one connection attempt; a stop during it takes up to this long.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Silence of a peer in the middle of a stream. Rounds have shorter deadlines; this one ends what they forgot.
pub const STREAM_SILENCE_MAX: Duration = Duration::from_secs(120);

/// First and longest wait before asking again a source that is not yet ready.
pub const RETRY_WAIT_MIN: Duration = Duration::from_millis(5);
/// See [`RETRY_WAIT_MIN`].
pub const RETRY_WAIT_MAX: Duration = Duration::from_millis(200);

/// The round driver turns at least once a second; this much later something is wrong with it.
pub const DRIVER_SILENCE_MAX: Duration = Duration::from_secs(30);

/// Between attempts to reach the coordinator: rounds do not need it, so there is no hurry, but joins do.
pub const COORDINATOR_PAUSE_MIN: Duration = Duration::from_millis(100);

/// Longest pause between attempts; with 10,000 agents the coordinator sees 2,000 a second at worst.
pub const COORDINATOR_PAUSE_MAX: Duration = Duration::from_secs(5);

/// Membership and refit of one epoch: 4,096 members of 300 bytes, tables of 60,000 tensors of 200.
pub const INSTRUCTION_BYTES_MAX: usize = 64 << 20;

/// Messages to the coordinator that wait for the network; states are coalesced before.
pub const COORDINATOR_MESSAGES_MAX: usize = 16;

/// Between two states told to the coordinator.
pub const STATE_INTERVAL_MIN: Duration = Duration::from_millis(250);

/// How long a second client of a rank waits before it is refused: when an engine restarts, its new connection
/// may be seen before the end of the old one.
pub const DUPLICATE_GRACE: Duration = Duration::from_millis(500);

/// Steps that one driver may wait for at once: it awaits one, and a loop that pipelines awaits two.
pub const WAITERS_PER_DRIVER_MAX: usize = 16;

/// Events that wait for the slowest driver that follows them: a round has three, so this is minutes of a fast run. A
/// driver that is slower misses the oldest.
pub const DRIVER_EVENTS_MAX: usize = 256;

/// Longest wait for a step: longer than any round, shorter than a forgotten driver.
pub const WAIT_MAX: Duration = Duration::from_secs(24 * 3600);

/// Ended steps that are remembered for drivers that ask late.
pub const STEPS_REMEMBERED: usize = 64;

/// The round driver looks at clients, waiters and gauges this often; deadlines of rounds have their own timer.
pub const DRIVER_TICK: Duration = Duration::from_millis(250);
const _: () = assert!(DRIVER_SILENCE_MAX.as_millis() > 10 * DRIVER_TICK.as_millis());

/// A drain that takes longer than a commit may is given up; the kernel closes and unmaps what is left.
pub const DRAIN_MAX: Duration = Duration::from_secs(60);

/// Streams of one pair: enough to fill a fast link, few enough for fair sharing among pairs.
pub const STREAMS_PER_PAIR: u32 = 4;
const _: () = assert!(STREAMS_PER_PAIR <= STREAMS_MAX);

/// Threads for control: it is idle most of the time, and one may be busy with a large message.
pub const CONTROL_THREADS: usize = 2;

/// After the drain, threads that still block get this long.
pub const SHUTDOWN_MAX: Duration = Duration::from_secs(2);

/// Threads of one digest: memory bandwidth is the limit beyond a few, and other ranks digest at the same time.
pub const DIGEST_THREADS_MAX: usize = 8;

/// A worker that ran this long had begun well: what ended it is news.
pub const WORKER_SETTLED: Duration = Duration::from_secs(10);

/// First pause after a worker that failed at once: long enough for a port or a file to come free.
pub const WORKER_PAUSE_MIN: Duration = Duration::from_millis(100);

/// Longest pause between workers: an agent that can work again is back well before anybody has looked.
pub const WORKER_PAUSE_MAX: Duration = Duration::from_secs(30);

/// Largest chunk of a lane: beyond it a larger message is no faster, and two windows a peer hold one each.
pub const LANE_CHUNK_BYTES_MAX: u64 = 256 << 20;

/// Smallest: windows that have no room for it take this all the same, since below it every message costs more than
/// its bytes.
pub const LANE_CHUNK_BYTES_MIN: u64 = 64 << 10;

/// Thread blocks of a lane on one GPU: enough for one network card or a fair part of NVLink, few enough for the lanes
/// of some ten replicas to run side by side, without which one would wait for another.
pub const LANE_CTAS_MAX: u32 = 8;

/// The ranks of a lane find each other in seconds, with hundreds of ranks; NCCL itself waits for ever.
pub const LANE_FORMING_MAX: Duration = Duration::from_secs(60);

/// How long a round waits for its lane before it takes TCP: a lane that forms needs less, and rounds have deadlines.
pub const LANE_WAIT_MAX: Duration = Duration::from_secs(20);

/// Between two looks at the bytes that an executor has moved: far shorter than the state that they are told in.
pub const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// An id is minted in milliseconds; its process may have been stopped.
pub const MINT_MAX: Duration = Duration::from_secs(5);

/// Attempts in a row that may fail while they form: a rank that was restarted meanwhile makes one fail, or two.
pub const LANE_FAILURES_MAX: u32 = 3;

/// An abort waits for kernels to see a flag, which they do in milliseconds; NCCL's proxies take up to a second.
pub const ABORT_MAX: Duration = Duration::from_secs(10);

/// A frame of a lane: an id in hex, or a reason.
pub const LANE_FRAME_BYTES_MAX: usize = 16 << 10;

/// A copy between device and host whose tensors go by TCP: the memory of a whole device takes some three seconds, and
/// what takes longer than this has met a device that is gone.
pub const SHADOW_COPY_MAX: Duration = Duration::from_secs(60);

/// A digest on a device reads its whole memory once: a tenth of a second, and as much again for each process that takes
/// turns on it.
pub const DEVICE_DIGEST_MAX: Duration = Duration::from_secs(30);

/// Rows whose keys a device keeps, 4 MiB of them: more than any weight but the longest stacks of experts has.
pub const DEVICE_DIGEST_ROWS: u64 = 1 << 18;

/// Memory that may be locked: the default of Linux since 5.16. The older 64 KiB are too little for NCCL's own buffers.
pub const MEMLOCK_BYTES_MIN: u64 = 8 << 20;

/// Size of `/dev/shm`, as NCCL's documentation asks for; container runtimes give 64 MiB.
pub const SHM_BYTES_MIN: u64 = 1 << 30;
