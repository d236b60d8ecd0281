//! Peers that lie, break off, hold on or send rubbish.

use super::super::frame::{Purpose, StreamHeader, read_answer, write_acknowledgement, write_answer};
use super::super::link::Link;
use super::*;
use crate::limits::HANDSHAKES_MAX;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};

fn header(world: &World) -> StreamHeader {
    StreamHeader {
        refit_uid: Arc::clone(&world.peers.refit_uid),
        epoch: world.peers.epoch,
        membership: world.peers.membership,
        round: ROUND,
        source: SOURCE,
        destination: DESTINATION,
        source_incarnation: world.peers.agents[0].0,
        destination_incarnation: world.peers.agents[1].0,
        pair: PAIR,
        purpose: Purpose::Bytes,
        stream: 0,
        streams: 1,
        bytes: world.out.bytes(),
    }
}

fn dial(world: &World) -> TcpStream {
    TcpStream::connect(world.server.local_addr().expect("bound")).expect("listens")
}

/// A destination by hand: what the source answers to this header.
fn asked(world: &World, header: &StreamHeader) -> (TcpStream, Option<Code>) {
    let mut socket = dial(world);
    header.write(&mut socket).expect("sent");
    let answer = read_answer(&mut socket).expect("answered");
    (socket, answer)
}

/// A source by hand, for one plain stream: what `serve` does with it once it is admitted.
fn source(
    serve: impl FnOnce(TcpStream, StreamHeader) + Send + 'static,
) -> (SocketAddr, std::thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = listener.local_addr().expect("bound");
    let thread = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().expect("dialled");
        let header = StreamHeader::read(&mut socket).expect("header");
        write_answer(&mut socket, None).expect("sent");
        serve(socket, header);
    });
    (address, thread)
}

fn one_stream(world: &World, address: SocketAddr) -> ReceiveJob {
    ReceiveJob { streams: 1, ..world.job_from(address) }
}

#[test]
fn headers_that_do_not_fit_the_pair_are_refused() {
    let world = World::new(false);
    let (_senders, _events) = world.allow();
    let rows: [(&str, StreamHeader); 4] = [
        ("fewer bytes", StreamHeader { bytes: 1, ..header(&world) }),
        ("more bytes", StreamHeader { bytes: u64::MAX, ..header(&world) }),
        ("stream beyond its number", StreamHeader { stream: 1, ..header(&world) }),
        ("too many streams", StreamHeader { streams: u32::MAX, ..header(&world) }),
    ];
    for (name, header) in rows {
        assert_eq!(asked(&world, &header).1, Some(Code::PlanMismatch), "{name}");
    }
    let (_socket, admitted) =
        asked(&world, &StreamHeader { streams: 2, bytes: world.out.split(1, 2), ..header(&world) });
    assert_eq!(admitted, None);
    let other = asked(&world, &StreamHeader { stream: 1, streams: 3, ..header(&world) }).1;
    assert_eq!(other, Some(Code::PlanMismatch), "another number of streams than the first said");
}

#[test]
fn a_wrong_acknowledgement_fails_the_replica() {
    let world = World::new(false);
    let (_senders, events) = world.allow();
    let (mut socket, answer) = asked(&world, &header(&world));
    assert_eq!(answer, None);
    let mut all = vec![0; world.out.bytes() as usize];
    socket.read_exact(&mut all).expect("sent");
    write_acknowledgement(&mut socket, 12).expect("sent");
    let error =
        TransferError::ByteCount { peer: DESTINATION, stream: 0, theirs: 12, ours: world.out.bytes() };
    assert_eq!(events.recv_timeout(PATIENCE), Ok(SendEvent::Failed { replica: 4, error }));
    socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
    assert_eq!(socket.read(&mut [0]).expect("closed"), 0, "such a connection serves no more");
}

#[test]
fn what_asks_on_a_connection_that_has_served_is_checked_as_the_first_was() {
    let stale = |header: StreamHeader| StreamHeader { epoch: Epoch(2), ..header };
    let early = |header: StreamHeader| StreamHeader { round: RoundId(9), ..header };
    let again = |header: StreamHeader| header;
    type Change = fn(StreamHeader) -> StreamHeader;
    let rows: [(&str, Code, Change); 3] = [
        ("older epoch", Code::StaleEpoch, stale),
        ("later round", Code::Busy, early),
        ("the same stream", Code::SourceGone, again),
    ];
    for (name, code, change) in rows {
        let world = World::new(false);
        let (_senders, events) = world.allow();
        let (mut socket, answer) = asked(&world, &header(&world));
        assert_eq!(answer, None, "{name}");
        let mut all = vec![0; world.out.bytes() as usize];
        socket.read_exact(&mut all).expect("sent");
        write_acknowledgement(&mut socket, world.out.bytes()).expect("sent");
        assert!(matches!(events.recv_timeout(PATIENCE), Ok(SendEvent::Sent { .. })), "{name}");
        change(header(&world)).write(&mut socket).expect("sent");
        assert_eq!(read_answer(&mut socket).expect("answered"), Some(code), "{name}");
        assert_eq!(socket.read(&mut [0]).expect("closed"), 0, "{name}: it serves no more");
    }
}

#[test]
fn a_destination_that_breaks_off_fails_the_replica() {
    let world = World::new(false);
    let (_senders, events) = world.allow();
    drop(asked(&world, &header(&world)));
    let failed = events.recv_timeout(PATIENCE).expect("ends");
    assert!(matches!(
        failed,
        SendEvent::Failed { replica: 4, error: TransferError::Lost { peer: DESTINATION, .. } }
    ));
}

#[test]
fn a_source_that_breaks_off_fails_the_job() {
    let world = World::new(false);
    let (address, thread) = source(|mut socket, _| socket.write_all(&[1; 100_000]).expect("sent"));
    let failed = world.refused(one_stream(&world, address));
    assert!(matches!(failed, TransferError::Lost { peer: SOURCE, .. }), "{failed}");
    thread.join().expect("source");
}

#[test]
fn no_byte_is_written_after_join() {
    let world = World::new(false);
    let (go, gone) = channel::<()>();
    let (wrote, written) = channel::<()>();
    let (address, thread) = source(move |mut socket, header| {
        let half = header.bytes as usize / 2;
        socket.write_all(&vec![1; half]).expect("sent");
        wrote.send(()).expect("the test waits");
        gone.recv().expect("the test goes on");
        // The receiver is over: this must reach no memory. Where it ends is the kernel's affair.
        let _ = socket.write_all(&vec![2; header.bytes as usize - half]);
        let _ = socket.shutdown(Shutdown::Both);
    });
    let (receivers, end) = world.receive(one_stream(&world, address));
    written.recv().expect("the receiver reads, so the first half is written");
    while receivers.received() < world.into.bytes() / 4 {
        std::thread::yield_now();
    }
    receivers.join();
    assert_eq!(
        end.try_recv(),
        Ok(Err(TransferError::Cancelled)),
        "the end was reported before join returned"
    );
    let then = contents(&world.destination);
    assert!(then.contains(&1) && !then.contains(&2));
    go.send(()).expect("the source waits");
    thread.join().expect("source");
    assert!(contents(&world.destination) == then);
}

#[test]
fn senders_that_wait_for_a_stuck_destination_can_be_joined() {
    let world = World::new(false);
    let (senders, events) = world.allow();
    // Takes the stream and never reads.
    let (_socket, answer) = asked(&world, &header(&world));
    assert_eq!(answer, None);
    senders.join();
    let failed = events.try_recv().expect("reported before join returned");
    assert_eq!(failed, SendEvent::Failed { replica: 4, error: TransferError::Cancelled });
    assert_eq!(asked(&world, &header(&world)).1, Some(Code::SourceGone));
}

#[test]
fn a_receiver_that_waits_to_ask_again_can_be_joined() {
    let world = World::new(false);
    let (receivers, end) = world.receive(world.job());
    while world.server.refusals().is_empty() {
        std::thread::yield_now();
    }
    receivers.join();
    assert_eq!(end.try_recv(), Ok(Err(TransferError::Cancelled)));
}

#[test]
fn garbage_is_counted_and_the_port_goes_on() {
    for tls in [false, true] {
        let world = World::new(tls);
        let (_senders, _events) = world.allow();
        let rows: [&[u8]; 4] =
            [b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", &[0; 5000], &[0xff; 64], b"wrbytes1\xff\xff"];
        for garbage in rows {
            let mut socket = dial(&world);
            socket.write_all(garbage).expect("sent");
            let _ = socket.shutdown(Shutdown::Write);
            let mut rest = Vec::new();
            // An alert, an answer or a reset; the end is what matters.
            let _ = socket.read_to_end(&mut rest);
        }
        let (_receivers, end) = world.receive(world.job());
        assert_eq!(end.recv_timeout(PATIENCE).expect("ends"), Ok(world.out.bytes()));
        assert_eq!(world.server.refusals().values().sum::<u64>(), rows.len() as u64, "tls: {tls}");
    }
}

#[test]
fn a_flood_of_silent_connections_locks_nobody_out() {
    let world = World::new(true);
    let (_senders, _events) = world.allow();
    let _silent: Vec<TcpStream> = (0..HANDSHAKES_MAX * 2).map(|_| dial(&world)).collect();
    let (_receivers, end) = world.receive(world.job());
    assert_eq!(end.recv_timeout(PATIENCE).expect("ends"), Ok(world.out.bytes()));
}

#[test]
fn admission_ends_at_its_deadline_however_slowly_a_peer_writes() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let mut slow = TcpStream::connect(listener.local_addr().expect("bound")).expect("listens");
    slow.write_all(b"wr").expect("sent");
    let (socket, _) = listener.accept().expect("dialled");
    let mut link = Link::plain(Arc::new(socket), Instant::now()).expect("set up");
    // Bytes are there, and the time is over all the same.
    assert_eq!(link.read(&mut [0; 8]).expect_err("late").kind(), ErrorKind::TimedOut);
}

#[test]
fn keys_that_the_membership_does_not_name_are_refused() {
    let world = World::new(true);
    let (_senders, _events) = world.allow();
    let run = |security: &Security, job: ReceiveJob| {
        let (ended, end) = channel();
        let _receivers = receive(job, security, move |result| ended.send(result).expect("the test listens"));
        end.recv_timeout(PATIENCE).expect("ends").expect_err("refused")
    };
    // Another agent of the membership in the destination's place.
    let refused = run(&world.security[2], world.job());
    assert_eq!(refused, TransferError::Refused { peer: SOURCE, code: Code::Unauthenticated });
    // A stranger with a good certificate.
    let stranger = Security::Tls(Arc::new(Identity::generate("stranger").expect("key")));
    let refused = run(&stranger, world.job());
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    // A source whose key is not the one of the membership.
    let mut job = world.job();
    edit(&mut job, |peers| peers.agents[0].1 = Sha256([0; 32]));
    let refused = run(&world.security[1], job);
    assert!(matches!(refused, TransferError::Key { peer: SOURCE, .. }), "{refused}");
    // No TLS at all: the connection is closed, as one that is crowded out, and dialled again until it is too late.
    let refused = run(&Security::Plain, ReceiveJob { deadline: Instant::now(), ..world.job() });
    assert_eq!(refused.peer(), Some(SOURCE), "{refused}");
    assert!(contents(&world.destination).iter().all(|byte| *byte == 0));
    assert!(world.server.refusals()[&Code::Unauthenticated] >= 3);
}
