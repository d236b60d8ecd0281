//! Conformance over loopback, plain and with TLS.

mod misuse;

use super::*;
use crate::executor::{Cursor, HostMemory, Placements, Program, gather, scatter};
use crate::memory::create;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use weightrefit_core::dtype::DType;
use weightrefit_core::id::{LocalId, Rank, RoundId, TensorId};
use weightrefit_core::plan::moves::{Dims, Endpoint, MoveBox, PairMoves};
use weightrefit_core::region::LocalTensor;

const SOURCE: MemberId = MemberId(0);
const DESTINATION: MemberId = MemberId(1);
const ROUND: RoundId = RoundId(7);
const PAIR: Sha256 = Sha256([5; 32]);
/// Longer than any of these tests takes; a hang fails by it.
const PATIENCE: Duration = Duration::from_secs(60);

/// A source and a destination with one pair between them: a tensor whose rows are cut and cast, a tiny one, and
/// a long contiguous one.
struct World {
    security: [Security; 3],
    peers: Arc<Peers>,
    server: ByteServer,
    source: HostMemory,
    destination: HostMemory,
    out: Arc<Program>,
    into: Arc<Program>,
    expected: Vec<u8>,
}

impl World {
    fn new(tls: bool) -> Self {
        let identities =
            ["source", "destination", "other"].map(|name| Identity::generate(name).expect("key"));
        let agents =
            identities.iter().enumerate().map(|(i, id)| (Incarnation(100 + i as u128), id.key_hash()));
        let agents: Vec<(Incarnation, Sha256)> = agents.collect();
        for identity in &identities {
            identity.pins().replace(agents.iter().map(|(_, key)| *key).collect());
        }
        let security = identities.map(|identity| match tls {
            true => Security::Tls(Arc::new(identity)),
            false => Security::Plain,
        });
        let refit_uid = "refit".into();
        let peers = Peers { refit_uid, epoch: Epoch(3), membership: Sha256([2; 32]), agents };
        let peers = Arc::new(peers);
        let server = ByteServer::bind("127.0.0.1:0".parse().expect("address"), &security[0]).expect("bind");
        server.configure(Some(Arc::clone(&peers)));

        let tensors = |dtype: DType, shapes: [[u64; 2]; 3]| {
            ["cut", "tiny", "long"].into_iter().zip(shapes).map(move |(name, shape)| LocalTensor {
                name: name.into(),
                shape: shape.to_vec(),
                dtype: if name == "long" { DType::Bf16 } else { dtype },
            })
        };
        let from: Vec<LocalTensor> = tensors(DType::F32, [[700, 96], [3, 5], [4096, 1024]]).collect();
        let to: Vec<LocalTensor> = tensors(DType::Bf16, [[700, 32], [3, 5], [4096, 1024]]).collect();
        let dims = |values: &[u64]| Dims::new(values).expect("few dims");
        let boxes = (0..3_u32).map(|i| MoveBox {
            tensor: TensorId(i),
            hf: dims(&[0, 0]),
            shape: dims(&to[i as usize].shape),
            source: LocalId(i),
            source_start: dims(&[0, if i == 0 { 40 } else { 0 }]),
            destination: LocalId(i),
            destination_start: dims(&[0, 0]),
            permute: None,
        });
        let moves = PairMoves {
            source: Endpoint::Training { rank: Rank(0) },
            destination: Endpoint::Inference { pool: 0, replica: 0, rank: Rank(0) },
            bytes: 700 * 32 * 2 + 30 + 4096 * 1024 * 2,
            boxes: boxes.collect(),
        };
        let source = memory(from, |i| (i ^ i >> 8 ^ i >> 16) as u8);
        let destination = memory(to.clone(), |_| 0);
        let out = Program::for_source(&moves, source.placements(), &to).expect("fits");
        let into = Program::for_destination(&moves, destination.placements()).expect("fits");
        let copied = memory(to, |_| 0);
        let mut wire = vec![0; moves.bytes as usize];
        let n = gather(&mut Cursor::stream(&out, 0, 1), &source, &mut wire, |_| false);
        assert_eq!(n, wire.len());
        scatter(&mut Cursor::stream(&into, 0, 1), &copied, &wire);
        let expected = contents(&copied);
        let (out, into) = (Arc::new(out), Arc::new(into));
        Self { security, peers, server, source, destination, out, into, expected }
    }

    fn allow(&self) -> (Senders, Receiver<SendEvent>) {
        self.allow_in(ROUND)
    }

    fn allow_in(&self, round: RoundId) -> (Senders, Receiver<SendEvent>) {
        let (events, received) = channel();
        let to = SendTo { member: DESTINATION, replica: 4, pair: PAIR, program: Arc::clone(&self.out) };
        let job = SendJob {
            peers: Arc::clone(&self.peers),
            round,
            member: SOURCE,
            memory: self.source.clone().into(),
            replicas: vec![4],
            destinations: vec![to],
            lane: None,
        };
        let senders = self.server.allow(job, move |event| events.send(event).expect("the test listens"));
        (senders, received)
    }

    fn job(&self) -> ReceiveJob {
        self.job_from(self.server.local_addr().expect("bound"))
    }

    fn job_from(&self, address: SocketAddr) -> ReceiveJob {
        ReceiveJob {
            peers: Arc::clone(&self.peers),
            round: ROUND,
            member: DESTINATION,
            memory: self.destination.clone().into(),
            sources: vec![ReceiveFrom {
                member: SOURCE,
                addresses: vec![address],
                pair: PAIR,
                program: Arc::clone(&self.into),
            }],
            streams: 4,
            deadline: Instant::now() + PATIENCE,
            lane: None,
            resting: Arc::default(),
        }
    }

    fn receive(&self, job: ReceiveJob) -> (Receivers, Receiver<Result<u64, TransferError>>) {
        let (ended, end) = channel();
        let receivers =
            receive(job, &self.security[1], move |result| ended.send(result).expect("the test listens"));
        (receivers, end)
    }

    /// Receives with a job that must fail, and how it did.
    fn refused(&self, job: ReceiveJob) -> TransferError {
        let (_receivers, end) = self.receive(job);
        end.recv_timeout(PATIENCE).expect("ends").expect_err("refused")
    }
}

fn memory(locals: Vec<LocalTensor>, fill: impl Fn(u64) -> u8) -> HostMemory {
    let (placements, len) = Placements::staging(locals).expect("small");
    let (_, mapping) = create("test", len).expect("memory");
    mapping.write(0, &(0..len).map(fill).collect::<Vec<u8>>());
    HostMemory::new(vec![Arc::new(mapping)], Arc::new(placements)).expect("fits")
}

fn contents(memory: &HostMemory) -> Vec<u8> {
    let mut out = vec![0; memory.mapping(0).len() as usize];
    memory.mapping(0).read(0, &mut out);
    out
}

#[test]
fn all_bytes_arrive_and_are_acknowledged() {
    for tls in [false, true] {
        let world = World::new(tls);
        let (senders, events) = world.allow();
        let (receivers, end) = world.receive(world.job());
        let bytes = world.out.bytes();
        assert_eq!(end.recv_timeout(PATIENCE).expect("ends"), Ok(bytes), "tls: {tls}");
        let sent = events.recv_timeout(PATIENCE).expect("ends");
        assert_eq!(sent, SendEvent::Sent { replica: 4, bytes });
        assert_eq!((receivers.received(), senders.sent()), (bytes, bytes));
        receivers.join();
        senders.join();
        assert!(contents(&world.destination) == world.expected, "tls: {tls}");
        assert!(world.server.refusals().is_empty());
    }
}

/// Passes connections on to a world's server: how many there were, and the present ones.
struct Between {
    address: SocketAddr,
    sockets: Arc<Mutex<Vec<TcpStream>>>,
}

impl Between {
    fn new(world: &World) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let (address, server) = (listener.local_addr().expect("bound"), world.server.local_addr());
        let (sockets, server) = (Arc::<Mutex<Vec<TcpStream>>>::default(), server.expect("bound"));
        let all = Arc::clone(&sockets);
        // Ends with the test's process.
        std::thread::spawn(move || {
            for here in listener.incoming().flatten() {
                let there = TcpStream::connect(server).expect("listens");
                for (from, to) in [(&here, &there), (&there, &here)] {
                    let (mut from, mut to) = (from.try_clone().expect("one"), to.try_clone().expect("one"));
                    std::thread::spawn(move || {
                        // Either end may break off.
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
                all.lock().expect("no panic").push(here);
            }
        });
        Self { address, sockets }
    }

    fn count(&self) -> usize {
        self.sockets.lock().expect("no panic").len()
    }

    fn cut(&self) {
        for socket in self.sockets.lock().expect("no panic").iter() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

#[test]
fn the_next_round_takes_the_connections_of_the_last_where_they_still_are() {
    for tls in [false, true] {
        let world = World::new(tls);
        let between = Between::new(&world);
        let resting = Arc::<Resting>::default();
        let round = |round: u64| {
            let (_senders, events) = world.allow_in(RoundId(round));
            world.destination.mapping(0).write(0, &vec![0; world.expected.len()]);
            let (round, resting) = (RoundId(round), Arc::clone(&resting));
            let job = ReceiveJob { round, resting, streams: 2, ..world.job_from(between.address) };
            let (_receivers, end) = world.receive(job);
            assert_eq!(end.recv_timeout(PATIENCE).expect("ends"), Ok(world.out.bytes()), "tls: {tls}");
            assert!(matches!(events.recv_timeout(PATIENCE), Ok(SendEvent::Sent { .. })), "tls: {tls}");
            assert!(contents(&world.destination) == world.expected, "tls: {tls}");
            between.count()
        };
        let first = round(7);
        assert_eq!((round(8), round(9)), (first, first), "tls: {tls}");
        between.cut();
        assert_eq!(round(10), 2 * first, "dialled anew, tls: {tls}");
        assert!(world.server.refusals().is_empty());
    }
}

#[test]
fn a_source_that_is_not_ready_is_asked_again() {
    let world = World::new(true);
    let (_receivers, end) = world.receive(world.job());
    while !world.server.refusals().contains_key(&Code::Busy) {
        std::thread::yield_now();
    }
    let (_senders, _events) = world.allow();
    assert_eq!(end.recv_timeout(PATIENCE).expect("ends"), Ok(world.out.bytes()));
}

#[test]
fn what_does_not_match_is_refused_with_its_code() {
    type Change = fn(&mut ReceiveJob);
    let rows: [(&str, Code, Change); 9] = [
        ("older epoch", Code::StaleEpoch, |job| edit(job, |peers| peers.epoch = Epoch(2))),
        ("other membership", Code::StaleEpoch, |job| edit(job, |peers| peers.membership = Sha256([3; 32]))),
        ("other refit", Code::StaleEpoch, |job| edit(job, |peers| peers.refit_uid = "else".into())),
        ("older incarnation here", Code::StaleEpoch, |job| {
            edit(job, |peers| peers.agents[1].0 = Incarnation(1))
        }),
        ("older incarnation there", Code::StaleEpoch, |job| {
            edit(job, |peers| peers.agents[0].0 = Incarnation(1))
        }),
        ("other pair", Code::PlanMismatch, |job| job.sources[0].pair = Sha256([6; 32])),
        ("unknown source", Code::StaleEpoch, |job| {
            job.sources[0].member = MemberId(9);
            edit(job, |peers| peers.agents.resize(10, peers.agents[0]));
        }),
        ("no offer for that member", Code::Busy, |job| {
            job.sources[0].member = MemberId(2);
            let own = job.peers.agents[0].1;
            // The server's own key passes the dial; its table says that member 2 is another agent.
            edit(job, |peers| peers.agents[2].1 = own);
            job.deadline = Instant::now();
        }),
        ("later round", Code::Busy, |job| {
            job.round = RoundId(8);
            job.deadline = Instant::now();
        }),
    ];
    for tls in [false, true] {
        let world = World::new(tls);
        let (senders, _events) = world.allow();
        for (name, code, change) in rows {
            let mut job = world.job();
            change(&mut job);
            let peer = job.sources[0].member;
            assert_eq!(world.refused(job), TransferError::Refused { peer, code }, "{name}, tls: {tls}");
            assert!(world.server.refusals()[&code] > 0, "{name}: counted");
        }
        assert!(contents(&world.destination).iter().all(|byte| *byte == 0), "nothing was written");
        drop(senders);
        assert_eq!(world.refused(world.job()).code(), Code::SourceGone);
        world.server.configure(None);
        let job = ReceiveJob { deadline: Instant::now(), ..world.job() };
        assert_eq!(world.refused(job).code(), Code::NotConfigured);
    }
}

fn edit(job: &mut ReceiveJob, change: impl FnOnce(&mut Peers)) {
    let mut peers = (*job.peers).clone();
    change(&mut peers);
    job.peers = Arc::new(peers);
}

#[test]
fn a_stream_is_served_to_its_destination_once() {
    let world = World::new(false);
    let (_senders, events) = world.allow();
    let (_first, end) = world.receive(world.job());
    assert!(end.recv_timeout(PATIENCE).expect("ends").is_ok());
    assert!(matches!(events.recv_timeout(PATIENCE), Ok(SendEvent::Sent { .. })));
    assert_eq!(world.refused(world.job()).code(), Code::SourceGone);
}

#[test]
fn a_replica_that_needs_nothing_from_a_rank_is_sent_at_once() {
    let world = World::new(false);
    let (events, received) = channel();
    let job = SendJob {
        peers: Arc::clone(&world.peers),
        round: ROUND,
        member: SOURCE,
        memory: world.source.clone().into(),
        replicas: vec![2, 3],
        destinations: Vec::new(),
        lane: None,
    };
    let _senders = world.server.allow(job, move |event| events.send(event).expect("the test listens"));
    let sent: Vec<SendEvent> = received.try_iter().collect();
    assert_eq!(sent, [2, 3].map(|replica| SendEvent::Sent { replica, bytes: 0 }));
}

#[test]
fn a_job_without_sources_is_done_at_once() {
    let world = World::new(false);
    let (_receivers, end) = world.receive(ReceiveJob { sources: Vec::new(), ..world.job() });
    assert_eq!(end.try_recv(), Ok(Ok(0)));
}
