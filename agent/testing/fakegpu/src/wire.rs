//! How the ranks of a communicator find each other: at a port of the process that minted the id, as with NCCL.

use crate::communicator::{INVALID_USAGE, REMOTE_ERROR};
use crate::knobs::knobs;
use std::io::{Read, Result, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// First bytes of an id.
const MAGIC: [u8; 8] = *b"FAKENCCL";
/// The first NCCL that puts two ranks on one GPU, where it is told to.
const SHARES_GPU_SINCE: u32 = 23000;

/// What an id says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Meeting {
    pub(crate) port: u16,
    pub(crate) nonce: u64,
}

impl Meeting {
    pub(crate) fn id(self) -> [u8; 128] {
        let mut id = [0; 128];
        id[..8].copy_from_slice(&MAGIC);
        id[8..10].copy_from_slice(&self.port.to_be_bytes());
        id[16..24].copy_from_slice(&self.nonce.to_be_bytes());
        id
    }

    pub(crate) fn of(id: &[u8; 128]) -> Option<Self> {
        let port = u16::from_be_bytes([id[8], id[9]]);
        let nonce = u64::from_be_bytes(*id[16..].first_chunk()?);
        (id[..8] == MAGIC).then_some(Self { port, nonce })
    }
}

/// What a rank says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) nonce: u64,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) version: u32,
    pub(crate) shares_gpu: bool,
    pub(crate) port: u16,
    pub(crate) gpu: [u8; 16],
}

const HELLO_BYTES: usize = 8 + 3 * 4 + 1 + 2 + 16;

impl Hello {
    fn bytes(self) -> [u8; HELLO_BYTES] {
        let mut out = [0; HELLO_BYTES];
        out[..8].copy_from_slice(&self.nonce.to_be_bytes());
        out[8..12].copy_from_slice(&self.rank.to_be_bytes());
        out[12..16].copy_from_slice(&self.ranks.to_be_bytes());
        out[16..20].copy_from_slice(&self.version.to_be_bytes());
        out[20] = self.shares_gpu.into();
        out[21..23].copy_from_slice(&self.port.to_be_bytes());
        out[23..].copy_from_slice(&self.gpu);
        out
    }

    fn of(bytes: &[u8; HELLO_BYTES]) -> Self {
        let four = |at: usize| u32::from_be_bytes(*bytes[at..].first_chunk().expect("a hello is longer"));
        Self {
            nonce: u64::from_be_bytes(*bytes.first_chunk().expect("a hello is longer")),
            rank: four(8),
            ranks: four(12),
            version: four(16),
            shares_gpu: bytes[20] == 1,
            port: u16::from_be_bytes([bytes[21], bytes[22]]),
            gpu: *bytes[23..].first_chunk().expect("a hello is as long"),
        }
    }
}

/// Opens a meeting, and keeps it until all have come.
pub(crate) fn mint() -> Result<Meeting> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut nonce = [0; 8];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut nonce)?;
    let meeting = Meeting { port: listener.local_addr()?.port(), nonce: u64::from_be_bytes(nonce) };
    std::thread::spawn(move || meet(&listener, meeting.nonce));
    Ok(meeting)
}

fn meet(listener: &TcpListener, nonce: u64) {
    let mut present: Vec<(Hello, TcpStream)> = Vec::new();
    while let Ok((mut socket, _)) = listener.accept() {
        let mut bytes = [0; HELLO_BYTES];
        // Strangers are no reason to stop.
        let _ = socket.set_read_timeout(Some(Duration::from_secs(1)));
        if socket.read_exact(&mut bytes).is_err() {
            continue;
        }
        let hello = Hello::of(&bytes);
        if hello.nonce != nonce {
            continue;
        }
        present.push((hello, socket));
        if present.len() == hello.ranks as usize {
            break;
        }
    }
    present.sort_by_key(|(hello, _)| hello.rank);
    let hellos: Vec<Hello> = present.iter().map(|(hello, _)| *hello).collect();
    let code = verdict(&hellos);
    for (_, mut socket) in present {
        let mut answer = code.to_be_bytes().to_vec();
        hellos.iter().for_each(|hello| answer.extend(hello.port.to_be_bytes()));
        // A rank that is gone again needs none.
        let _ = socket.write_all(&answer);
    }
}

fn verdict(hellos: &[Hello]) -> u32 {
    let dense = hellos.iter().enumerate().all(|(at, hello)| hello.rank as usize == at);
    let same =
        hellos.windows(2).all(|pair| (pair[0].version, pair[0].ranks) == (pair[1].version, pair[1].ranks));
    let mut gpus: Vec<[u8; 16]> = hellos.iter().map(|hello| hello.gpu).collect();
    gpus.sort_unstable();
    gpus.dedup();
    let shared = gpus.len() == hellos.len()
        || hellos.iter().all(|hello| hello.shares_gpu && hello.version >= SHARES_GPU_SINCE);
    if dense && same && shared { 0 } else { INVALID_USAGE }
}

/// Says hello, and waits for the ports of all ranks; `None` once `ended`.
pub(crate) fn join(
    meeting: Meeting,
    hello: Hello,
    ended: impl Fn() -> bool,
) -> std::result::Result<Vec<u16>, u32> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, meeting.port));
    let until = Instant::now() + Duration::from_secs(60);
    let mut socket = loop {
        match TcpStream::connect(address) {
            Ok(socket) => break socket,
            Err(_) if ended() || Instant::now() > until => return Err(REMOTE_ERROR),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let asked = socket.write_all(&hello.bytes());
    asked.map_err(|_| REMOTE_ERROR)?;
    let mut answer = vec![0; 4 + 2 * hello.ranks as usize];
    let mut have = 0;
    let _ = socket.set_read_timeout(Some(Duration::from_millis(20)));
    while have < answer.len() {
        match socket.read(&mut answer[have..]) {
            Ok(0) => return Err(REMOTE_ERROR),
            Ok(n) => have += n,
            // Others may never come; only an abort ends that.
            Err(_) if ended() => return Err(REMOTE_ERROR),
            Err(_) => {}
        }
    }
    match u32::from_be_bytes([answer[0], answer[1], answer[2], answer[3]]) {
        0 => Ok(answer[4..].as_chunks::<2>().0.iter().map(|port| u16::from_be_bytes(*port)).collect()),
        code => Err(code),
    }
}

/// Writes a line to this process's tally.
pub(crate) fn tally(line: &str) {
    let Some(folder) = &knobs().tally else { return };
    let path = folder.join(format!("{}.jsonl", std::process::id()));
    let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
    let written = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    written.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}
