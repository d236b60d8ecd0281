//! The bytes of one rank of a lane in one round: packed per peer, chunk by chunk, chunk k + 1 packed while k flies.
//!
//! F1: wave k of a rank is one group with chunk k of each of its pairs, on either side, so no order of ranks can make
//!     two of them wait for each other.
//! F2: both ends cut a pair at the same wire bytes: at elements, from the boxes and the lane's chunk alone.
//! F3: work is over when its stream has passed it, never by a wait without deadline; until then its memory lives.
//!     Where it cannot be known to be over, the error says so ([`FlowError`]) and the communicator is aborted before
//!     the memory goes.

use super::FlowError;
use super::communicator::Ready;
use super::gpu::{Gpu, Waiting};
use crate::cuda::{DeviceMemory, Event, Launch, Stream};
use crate::executor::{Program, RankMemory};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use weightrefit_core::round::message::RoundKey;

/// Windows begin at multiples of this, so that the kernels' wide copies stay aligned.
const WINDOW_ALIGNMENT: u64 = 256;

/// What a rank exchanges with one peer.
#[derive(Debug, Clone)]
pub(crate) struct Pair {
    /// Its rank in the lane.
    pub(crate) peer: u32,
    pub(crate) program: Arc<Program>,
}

/// What a rank does in a round.
#[derive(Debug)]
pub(crate) enum Direction {
    /// From a publication.
    Send(RoundKey),
    /// To staging.
    Receive,
}

/// All of it.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) direction: Direction,
    pub(crate) memory: RankMemory,
    pub(crate) pairs: Vec<Pair>,
    pub(crate) deadline: Instant,
    /// Bytes moved so far.
    pub(crate) moved: Arc<AtomicU64>,
}

/// Everything that work which was enqueued may still use (F3). Kept by the worker until its communicator is gone.
#[derive(Debug)]
pub(super) struct Lent {
    streams: [Stream; 2],
    windows: DeviceMemory,
    tables: Vec<DeviceMemory>,
    staging: Option<DeviceMemory>,
}

impl Lent {
    /// True once nothing runs on it.
    pub(super) fn is_idle(&self) -> bool {
        // A stream that failed runs nothing any more either.
        self.streams.iter().all(|stream| stream.is_done().unwrap_or(true))
    }
}

/// One pair with its place on the device.
struct Flight<'j> {
    pair: &'j Pair,
    window: u64,
}

/// Moves a job's bytes. What is left in `lent` after an error may still be in use.
pub(super) fn run(
    job: &Job,
    gpu: &Gpu,
    communicator: &Ready,
    chunk: u64,
    stopped: &dyn Fn() -> bool,
    lent: &mut Option<Lent>,
) -> Result<u64, FlowError> {
    let healthy = || communicator.is_settled().map(drop).map_err(FlowError::from);
    let waiting = Waiting { stopped, deadline: job.deadline, healthy: &healthy };
    let context = gpu.context();
    let streams = [Stream::new(context)?, Stream::new(context)?];
    let largest = job.pairs.iter().map(|pair| pair.program.bytes()).max().unwrap_or(0);
    // A boundary is at an element, at most 7 bytes from where it was wanted.
    let window = (chunk.min(largest) + WINDOW_ALIGNMENT).next_multiple_of(WINDOW_ALIGNMENT);
    let pairs = job.pairs.len() as u64;
    let windows = gpu.reserve(2 * pairs * window)?;
    let (shard, staging) = match job.direction {
        Direction::Send(round) => (Some(gpu.shard(round, &job.memory, &streams[0], &waiting)?), None),
        Direction::Receive => (None, Some(gpu.reserve(job.memory.mapping(0).len())?)),
    };
    let base = staging.as_ref().map_or(Ok(0), |staging| staging.address(0, staging.len()))?;
    let lent = lent.insert(Lent { streams, windows, tables: Vec::new(), staging });
    if let Some(staging) = &lent.staging {
        lent.streams[0].clear(staging)?;
    }
    for pair in &job.pairs {
        let table = pair.program.table(|mapping| shard.as_ref().map_or(base, |shard| shard.address(mapping)));
        lent.tables.push(gpu.table(&table, &lent.streams[0], &waiting)?);
    }
    let flights = job.pairs.iter().zip(0..).map(|(pair, at): (_, u64)| Flight { pair, window: at * window });
    let flights: Vec<Flight<'_>> = flights.collect();
    let waves = Waves { job, gpu, communicator, lent, flights: &flights, half: pairs * window, chunk };
    let moved = waves.fly(&waiting)?;
    if let Some(staging) = &lent.staging {
        gpu.copy_out(staging, job.memory.mapping(0), &lent.streams[0], &waiting)?;
    }
    Ok(moved)
}

struct Waves<'j> {
    job: &'j Job,
    gpu: &'j Gpu,
    communicator: &'j Ready,
    lent: &'j Lent,
    flights: &'j [Flight<'j>],
    /// Bytes of one half of the windows.
    half: u64,
    chunk: u64,
}

/// Marks of one half of the windows.
struct Half {
    /// Its chunks are packed, or have arrived.
    filled: Event,
    /// They have left, or are unpacked: it may be filled again.
    emptied: Event,
}

impl Waves<'_> {
    fn fly(&self, waiting: &Waiting<'_>) -> Result<u64, FlowError> {
        let context = self.gpu.context();
        let half =
            || Ok::<_, FlowError>(Half { filled: Event::new(context)?, emptied: Event::new(context)? });
        let halves = [half()?, half()?];
        let longest = self.flights.iter().map(|flight| flight.pair.program.bytes()).max().unwrap_or(0);
        let waves = longest.div_ceil(self.chunk);
        let mut counted = 0;
        for wave in 0..waves {
            self.enqueue(wave, &halves[(wave % 2) as usize], waiting)?;
            // The wave before last is over for certain, or its half could not be filled again.
            while counted + 2 <= wave {
                self.count(counted);
                counted += 1;
            }
        }
        let streams = &self.lent.streams;
        waiting.until("the last bytes", || Ok(streams[0].is_done()? && streams[1].is_done()?))?;
        (counted..waves).for_each(|wave| self.count(wave));
        Ok(self.flights.iter().map(|flight| flight.pair.program.bytes()).sum())
    }

    /// Packing and unpacking is on stream 0, what flies on stream 1.
    fn enqueue(&self, wave: u64, half: &Half, waiting: &Waiting<'_>) -> Result<(), FlowError> {
        let [kernels, wire] = &self.lent.streams;
        // On the host, so that no more than two waves are ever enqueued: a stop then has little to wait for.
        waiting.until("a window", || Ok(half.emptied.is_done()?))?;
        match self.job.direction {
            Direction::Send(_) => {
                self.launches(wave).try_for_each(|launch| self.gpu.kernels().gather(kernels, &launch))?;
                half.filled.record(kernels)?;
                wire.wait(&half.filled)?;
                self.group(wave, waiting)?;
                half.emptied.record(wire)?;
            }
            Direction::Receive => {
                // Staging is cleared, tables are there.
                if wave == 0 {
                    half.filled.record(kernels)?;
                    wire.wait(&half.filled)?;
                }
                self.group(wave, waiting)?;
                half.filled.record(wire)?;
                kernels.wait(&half.filled)?;
                self.launches(wave).try_for_each(|launch| self.gpu.kernels().scatter(kernels, &launch))?;
                half.emptied.record(kernels)?;
            }
        }
        Ok(())
    }

    /// One group: chunk `wave` of each pair that has one.
    fn group(&self, wave: u64, waiting: &Waiting<'_>) -> Result<(), FlowError> {
        let (windows, wire) = (&self.lent.windows, &self.lent.streams[1]);
        self.communicator.group(|group| {
            for flight in self.flights {
                let (first, last) = self.range(flight, wave);
                let (offset, bytes) = (flight.window + wave % 2 * self.half, last - first);
                match self.job.direction {
                    _ if bytes == 0 => {}
                    Direction::Send(_) => group.send(flight.pair.peer, windows, offset, bytes, wire)?,
                    Direction::Receive => group.receive(flight.pair.peer, windows, offset, bytes, wire)?,
                }
            }
            Ok(())
        })?;
        // Only then has the stream all of it: what is recorded before would come too early.
        waiting.until("NCCL", || Ok(self.communicator.is_settled()?))
    }

    /// What the kernels do in a wave.
    fn launches(&self, wave: u64) -> impl Iterator<Item = Launch<'_>> {
        self.flights.iter().zip(&self.lent.tables).filter_map(move |(flight, table)| {
            let (first, last) = self.range(flight, wave);
            let (entries, window) = (flight.pair.program.entries(), &self.lent.windows);
            let offset = flight.window + wave % 2 * self.half;
            (last > first).then_some(Launch { table, entries, window, offset, first, bytes: last - first })
        })
    }

    /// Wire bytes of a pair's chunk (F2).
    fn range(&self, flight: &Flight<'_>, wave: u64) -> (u64, u64) {
        let program = &flight.pair.program;
        let at = |wave: u64| program.boundary(wave.saturating_mul(self.chunk));
        (at(wave), at(wave + 1))
    }

    fn count(&self, wave: u64) {
        let ranges = self.flights.iter().map(|flight| self.range(flight, wave));
        self.job.moved.fetch_add(ranges.map(|(first, last)| last - first).sum(), Ordering::Relaxed);
    }
}
