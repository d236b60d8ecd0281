//! Two agents on loopback, and the bare copy between them that the transfer is compared with.

use anyhow::Context;
use rustls::{ClientConnection, Connection, ServerConnection};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;
use weightrefit_agent::identity::Identity;
use weightrefit_agent::limits::CHUNK_BYTES;
use weightrefit_agent::transport::tcp::{Peers, Security};
use weightrefit_core::id::{Epoch, Incarnation, Sha256};

/// Source and destination.
pub(crate) struct Ends {
    pub(crate) security: [Security; 2],
    pub(crate) peers: Arc<Peers>,
}

impl Ends {
    pub(crate) fn new(tls: bool) -> anyhow::Result<Self> {
        let identities = [Identity::generate("source")?, Identity::generate("destination")?];
        let keys = [identities[0].key_hash(), identities[1].key_hash()];
        for identity in &identities {
            identity.pins().replace(BTreeSet::from(keys));
        }
        let agents = vec![(Incarnation(1), keys[0]), (Incarnation(2), keys[1])];
        let peers = Peers { refit_uid: "bench".into(), epoch: Epoch(1), membership: Sha256([1; 32]), agents };
        let security = identities.map(|identity| match tls {
            true => Security::Tls(Arc::new(identity)),
            false => Security::Plain,
        });
        Ok(Self { security, peers: Arc::new(peers) })
    }
}

/// Memory that a bare copy goes from and to.
pub(crate) struct Buffers {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Buffers {
    /// Of this size, like the tensors of a transfer; or of a chunk per stream, which stays in the cache and shows
    /// what the sockets alone can do.
    pub(crate) fn new(bytes: u64) -> anyhow::Result<Self> {
        let bytes = usize::try_from(bytes)?;
        Ok(Self { from: vec![0x5a; bytes], to: vec![1; bytes] })
    }
}

/// GB/s of a bare copy of `bytes` over `streams` connections: dial, handshake and an acknowledging byte included,
/// as in a transfer. Each stream copies its share of the buffers, again and again where they are shorter.
pub(crate) fn bare(ends: &Ends, buffers: &mut Buffers, bytes: u64, streams: u32) -> anyhow::Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let share = bytes / u64::from(streams);
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let mut tasks = Vec::new();
        let part = buffers.from.len() / streams as usize;
        for (from, to) in buffers.from.chunks_exact(part).zip(buffers.to.chunks_exact_mut(part)) {
            tasks.push(scope.spawn(|| send(ends, &listener, from, share)));
            tasks.push(scope.spawn(|| receive(ends, address, to, share)));
        }
        tasks.into_iter().try_for_each(|task| task.join().map_err(|_| anyhow::anyhow!("a stream broke"))?)
    })?;
    Ok((share * u64::from(streams)) as f64 / begin.elapsed().as_secs_f64() / 1e9)
}

fn send(ends: &Ends, listener: &TcpListener, from: &[u8], mut left: u64) -> anyhow::Result<()> {
    let (mut socket, _) = listener.accept()?;
    socket.set_nodelay(true)?;
    let mut tls: Option<Connection> = match &ends.security[0] {
        Security::Plain => None,
        Security::Tls(identity) => Some(ServerConnection::new(Arc::new(identity.server_config()?))?.into()),
    };
    if let Some(tls) = &mut tls {
        handshake(tls, &mut socket)?;
    }
    let mut chunks = from.chunks(CHUNK_BYTES).cycle();
    while left > 0 {
        let chunk = chunks.next().context("the buffer is not empty")?;
        let n = left.min(chunk.len() as u64) as usize;
        match &mut tls {
            None => socket.write_all(&chunk[..n])?,
            Some(tls) => {
                tls.writer().write_all(&chunk[..n])?;
                while tls.wants_write() {
                    tls.write_tls(&mut socket)?;
                }
            }
        }
        left -= n as u64;
    }
    let mut end = [0];
    read(&mut tls, &mut socket, &mut end)?;
    Ok(())
}

fn receive(ends: &Ends, address: SocketAddr, to: &mut [u8], mut left: u64) -> anyhow::Result<()> {
    let mut socket = TcpStream::connect(address)?;
    socket.set_nodelay(true)?;
    let mut tls: Option<Connection> = match &ends.security[1] {
        Security::Plain => None,
        Security::Tls(identity) => {
            let config = identity.client_config(ends.peers.agents[0].1)?;
            Some(ClientConnection::new(Arc::new(config), address.ip().into())?.into())
        }
    };
    if let Some(tls) = &mut tls {
        handshake(tls, &mut socket)?;
    }
    let mut at = 0;
    while left > 0 {
        let room = left.min(CHUNK_BYTES.min(to.len() - at) as u64) as usize;
        let n = read(&mut tls, &mut socket, &mut to[at..at + room])?;
        at = (at + n) % to.len();
        left -= n as u64;
    }
    match &mut tls {
        None => socket.write_all(&[1])?,
        Some(tls) => {
            tls.writer().write_all(&[1])?;
            tls.write_tls(&mut socket)?;
        }
    }
    Ok(())
}

fn handshake(tls: &mut Connection, socket: &mut TcpStream) -> anyhow::Result<()> {
    while tls.is_handshaking() {
        tls.complete_io(socket)?;
    }
    tls.set_buffer_limit(None);
    Ok(())
}

fn read(tls: &mut Option<Connection>, socket: &mut TcpStream, out: &mut [u8]) -> anyhow::Result<usize> {
    let n = match tls {
        None => socket.read(out)?,
        Some(tls) => loop {
            match tls.reader().read(out) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                done => break done?,
            }
            if tls.read_tls(socket)? == 0 {
                break 0;
            }
            tls.process_new_packets()?;
        },
    };
    (n > 0).then_some(n).context("the stream ended early")
}
