//! A rank of a communicator: sends and receives over sockets, one operation of a peer after the other.

use crate::kernels::{read, write};
use crate::knobs::{Target, knobs};
use crate::queue::{Queue, sticky};
use crate::wire::{Hello, Meeting, join, tally};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(crate) const UNHANDLED_CUDA_ERROR: u32 = 1;
pub(crate) const INVALID_USAGE: u32 = 5;
pub(crate) const REMOTE_ERROR: u32 = 6;
pub(crate) const IN_PROGRESS: u32 = 7;

type Work = Box<dyn FnOnce() + Send>;

const LOOK: Duration = Duration::from_millis(2);

/// One send or receive.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operation {
    pub(crate) is_send: bool,
    pub(crate) peer: u32,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

/// A group of one communicator on one stream.
pub(crate) struct Launch {
    pub(crate) queue: Arc<Queue>,
    pub(crate) operations: Vec<Operation>,
}

/// One rank.
pub(crate) struct Communicator {
    nonce: u64,
    rank: u32,
    pub(crate) ranks: u32,
    /// 0, in progress while others are looked for, or what has failed it.
    state: AtomicU32,
    /// "In progress" answers that are left, and what is enqueued after the last of them.
    polls: Mutex<(u32, Vec<Launch>)>,
    pub(crate) revoked: AtomicBool,
    ended: AtomicBool,
    /// A thread for each direction and peer, since to start one takes longer than to move little.
    lines: Mutex<BTreeMap<(bool, u32), Sender<Work>>>,
    links: Mutex<Links>,
    arrived: Condvar,
    flying: Mutex<usize>,
    landed: Condvar,
}

#[derive(Default)]
struct Links {
    ports: Vec<u16>,
    incoming: BTreeMap<u32, TcpStream>,
    outgoing: BTreeMap<u32, TcpStream>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many sends of this rank, in whatever communicator, there were in this process.
fn count(rank: u32) -> u64 {
    static SENDS: Mutex<BTreeMap<u32, u64>> = Mutex::new(BTreeMap::new());
    let mut sends = lock(&SENDS);
    let count = sends.entry(rank).or_default();
    *count += 1;
    *count - 1
}

impl Communicator {
    /// Begins to look for the others.
    pub(crate) fn start(
        meeting: Meeting,
        rank: u32,
        ranks: u32,
        gpu: [u8; 16],
    ) -> std::io::Result<Arc<Self>> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        let own = Arc::new(Self {
            nonce: meeting.nonce,
            rank,
            ranks,
            state: AtomicU32::new(IN_PROGRESS),
            polls: Mutex::new((knobs().polls, Vec::new())),
            revoked: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            lines: Mutex::default(),
            links: Mutex::default(),
            arrived: Condvar::new(),
            flying: Mutex::new(0),
            landed: Condvar::new(),
        });
        let shares_gpu = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1");
        let version = knobs().nccl_version;
        let hello = Hello { nonce: meeting.nonce, rank, ranks, version, shares_gpu, port, gpu };
        let accepting = Arc::clone(&own);
        std::thread::spawn(move || accepting.accept(&listener));
        let joining = Arc::clone(&own);
        std::thread::spawn(move || {
            let joined = join(meeting, hello, || joining.is_ended());
            let state = match joined {
                Ok(ports) => {
                    lock(&joining.links).ports = ports;
                    0
                }
                Err(code) => code,
            };
            joining.state.store(state, Ordering::SeqCst);
        });
        Ok(own)
    }

    fn accept(&self, listener: &TcpListener) {
        while !self.is_ended() {
            let Ok((mut socket, _)) = listener.accept() else {
                std::thread::sleep(LOOK);
                continue;
            };
            let mut header = [0; 12];
            let named = socket.set_nonblocking(false).and_then(|()| socket.set_nodelay(true));
            let named = named.and_then(|()| socket.read_exact(&mut header));
            let nonce = u64::from_be_bytes(*header.first_chunk().expect("12 bytes"));
            if named.is_ok() && nonce == self.nonce {
                let peer = u32::from_be_bytes(*header[8..].first_chunk().expect("12 bytes"));
                lock(&self.links).incoming.insert(peer, socket);
                self.arrived.notify_all();
            }
        }
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst) || self.revoked.load(Ordering::SeqCst)
    }

    /// Fails it; the first failure stays.
    fn fail(&self, code: u32) {
        let _ = self.state.compare_exchange(0, code, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Without counting as a poll.
    pub(crate) fn failure(&self) -> u32 {
        match self.state.load(Ordering::SeqCst) {
            IN_PROGRESS => 0,
            state => state,
        }
    }

    /// `ncclCommGetAsyncError`: the poll after which nothing is left enqueues what has waited for it.
    pub(crate) fn poll(&self) -> u32 {
        match self.state.load(Ordering::SeqCst) {
            0 => {}
            state => return state,
        }
        let mut polls = lock(&self.polls);
        if polls.0 > 0 {
            polls.0 -= 1;
            return IN_PROGRESS;
        }
        0
    }

    /// True while a call is not over, so that no other may be made.
    pub(crate) fn is_busy(&self) -> bool {
        self.state.load(Ordering::SeqCst) == IN_PROGRESS || lock(&self.polls).0 > 0
    }

    /// Enqueues groups, at once or after the polls.
    pub(crate) fn launch(self: &Arc<Self>, launches: Vec<Launch>) -> u32 {
        let mut polls = lock(&self.polls);
        if knobs().polls == 0 {
            drop(polls);
            launches.into_iter().for_each(|launch| self.enqueue(launch));
            return 0;
        }
        polls.0 = knobs().polls;
        polls.1 = launches;
        IN_PROGRESS
    }

    /// What waited for the polls, once they are over.
    pub(crate) fn enqueue_late(self: &Arc<Self>) {
        let late = {
            let mut polls = lock(&self.polls);
            if polls.0 > 0 { Vec::new() } else { std::mem::take(&mut polls.1) }
        };
        late.into_iter().for_each(|launch| self.enqueue(launch));
    }

    fn enqueue(self: &Arc<Self>, launch: Launch) {
        let list = |send: bool| {
            let of = launch.operations.iter().filter(|operation| operation.is_send == send);
            of.map(|operation| format!("[{},{}]", operation.peer, operation.bytes))
                .collect::<Vec<_>>()
                .join(",")
        };
        let (rank, ranks) = (self.rank, self.ranks);
        let (sends, receives, comm) = (list(true), list(false), self.nonce);
        tally(&format!(
            r#"{{"communicator":"{comm:x}","rank":{rank},"ranks":{ranks},"sends":[{sends}],"receives":[{receives}]}}"#
        ));
        let own = Arc::clone(self);
        *lock(&self.flying) += 1;
        launch.queue.add(move || {
            let result = own.fly(&launch.operations);
            *lock(&own.flying) -= 1;
            own.landed.notify_all();
            result
        });
    }

    /// Peers side by side, operations of one in order.
    fn fly(self: &Arc<Self>, operations: &[Operation]) -> Result<(), u32> {
        let mut lines: BTreeMap<(bool, u32), Vec<Operation>> = BTreeMap::new();
        operations.iter().for_each(|one| lines.entry((one.is_send, one.peer)).or_default().push(*one));
        let last = lines.pop_last();
        let (told, results) = channel();
        let others = lines.len();
        for (key, line) in lines {
            let (own, told) = (Arc::clone(self), told.clone());
            self.line(
                key,
                Box::new(move || {
                    let _ = told.send(own.perform_all(&line));
                }),
            );
        }
        drop(told);
        let last = last.map_or(Ok(()), |(_, line)| self.perform_all(&line));
        let results: Vec<Result<(), u32>> = results.iter().collect();
        // A thread that broke says nothing.
        if results.len() < others {
            return Err(UNHANDLED_CUDA_ERROR);
        }
        results.into_iter().chain([last]).collect()
    }

    fn line(&self, key: (bool, u32), work: Work) {
        let start = || {
            let (line, inbox) = channel::<Work>();
            std::thread::spawn(move || inbox.iter().for_each(|work| work()));
            line
        };
        // The thread lives as long as the sender.
        let _ = lock(&self.lines).entry(key).or_insert_with(start).send(work);
    }

    fn perform_all(&self, line: &[Operation]) -> Result<(), u32> {
        line.iter().try_for_each(|one| self.perform(one))
    }

    fn perform(&self, operation: &Operation) -> Result<(), u32> {
        let done = if operation.is_send { self.send(operation)? } else { self.receive(operation)? };
        if done {
            return Ok(());
        }
        if !self.is_ended() && !knobs().silent_death {
            self.fail(REMOTE_ERROR);
        }
        // The kernel spins until an abort frees it.
        self.hang();
        Ok(())
    }

    fn hang(&self) {
        while !self.is_ended() && sticky() == 0 {
            std::thread::sleep(LOOK);
        }
    }

    fn is_hit(&self, target: Option<Target>, nth: u64) -> bool {
        target == Some(Target { rank: self.rank, nth })
    }

    /// False where the peer is gone.
    fn send(&self, operation: &Operation) -> Result<bool, u32> {
        let nth = count(self.rank);
        let mut bytes = read(operation.address, operation.bytes)?;
        if self.is_hit(knobs().hang, nth) {
            self.hang();
        }
        if self.is_hit(knobs().fail, nth) {
            self.fail(UNHANDLED_CUDA_ERROR);
            self.hang();
        }
        if self.is_hit(knobs().flip, nth) && !bytes.is_empty() {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        }
        if let Some(rate) = knobs().link_bytes {
            self.slowly(operation.bytes, rate);
        }
        let Some(mut socket) = self.outgoing(operation.peer) else { return Ok(false) };
        let mut taken = [0];
        let framed = [&operation.bytes.to_be_bytes()[..], &bytes].concat();
        let sent = socket.write_all(&framed).and_then(|()| socket.read_exact(&mut taken));
        Ok(sent.is_ok())
    }

    fn slowly(&self, bytes: u64, rate: u64) {
        let until = std::time::Instant::now() + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
        while std::time::Instant::now() < until && !self.is_ended() {
            std::thread::sleep(LOOK);
        }
    }

    fn receive(&self, operation: &Operation) -> Result<bool, u32> {
        let Some(mut socket) = self.incoming(operation.peer) else { return Ok(false) };
        let mut length = [0; 8];
        if socket.read_exact(&mut length).is_err() {
            return Ok(false);
        }
        if u64::from_be_bytes(length) != operation.bytes {
            self.hang(); // NCCL does not look; what comes of it is that nothing ends
            return Ok(false);
        }
        let mut bytes = vec![0; operation.bytes as usize];
        if socket.read_exact(&mut bytes).is_err() {
            return Ok(false);
        }
        write(operation.address, &bytes)?;
        Ok(socket.write_all(&[1]).is_ok())
    }

    fn incoming(&self, peer: u32) -> Option<TcpStream> {
        let mut links = lock(&self.links);
        loop {
            if self.is_ended() {
                return None;
            }
            if let Some(socket) = links.incoming.get(&peer) {
                return socket.try_clone().ok();
            }
            links = self.arrived.wait_timeout(links, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn outgoing(&self, peer: u32) -> Option<TcpStream> {
        let mut links = lock(&self.links);
        if let Some(socket) = links.outgoing.get(&peer) {
            return socket.try_clone().ok();
        }
        let port = *links.ports.get(peer as usize)?;
        let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
        socket.set_nodelay(true).ok()?;
        let header = [&self.nonce.to_be_bytes()[..], &self.rank.to_be_bytes()].concat();
        socket.write_all(&header).ok()?;
        links.outgoing.insert(peer, socket.try_clone().ok()?);
        Some(socket)
    }

    fn shut(&self) {
        let links = lock(&self.links);
        for socket in links.incoming.values().chain(links.outgoing.values()) {
            // A peer that is gone has shut it already.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Stops what flies; nothing flies any more.
    pub(crate) fn revoke(&self) {
        self.revoked.store(true, Ordering::SeqCst);
        self.shut();
        let mut polls = lock(&self.polls);
        *polls = (knobs().polls, Vec::new());
    }

    /// Ends it, once nothing of it runs.
    pub(crate) fn abort(&self) {
        while knobs().wedge == Some(self.rank) {
            std::thread::sleep(Duration::from_secs(1));
        }
        self.ended.store(true, Ordering::SeqCst);
        self.shut();
        let mut flying = lock(&self.flying);
        while *flying > 0 && sticky() == 0 {
            flying = self.landed.wait_timeout(flying, LOOK).unwrap_or_else(PoisonError::into_inner).0;
            self.shut(); // a socket that came between
        }
    }
}
