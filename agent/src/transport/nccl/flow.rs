//! The bytes of one rank of a lane in one round: packed per peer, chunk by chunk, chunk k + 1 packed while k flies.
//!
//! F1: wave k of a rank is one group with chunk k of each of its pairs, on either side, so no order of ranks can make
//!     two of them wait for each other.
//! F2: both ends cut a pair at the same wire bytes: at elements, from the boxes and the lane's chunk alone.
//! F3: work is over when its stream has passed it, never by a wait without deadline; until then its memory lives.
//!     Where it cannot be known to be over, the error says so ([`FlowError`]) and the communicator is aborted before
//!     the memory goes.
//! F4: what a round needs on the device stays for the next one, whose part it has as much as the first one's.

use super::FlowError;
use super::communicator::Ready;
use super::gpu::{Gpu, Shard, Waiting};
use crate::cuda::{CudaError, DeviceMemory, Event, Launch, Stream};
use crate::executor::{Part, Program, RankMemory};
use std::collections::BTreeMap;
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

/// What a rank of a lane has on its device: everything that work which was enqueued may still use (F3). Made when a
/// round first needs it, and kept until the communicator is gone (F4).
#[derive(Debug)]
pub(super) struct Kept {
    streams: [Stream; 2],
    halves: [Half; 2],
    windows: Option<DeviceMemory>,
    staging: Option<DeviceMemory>,
    /// By peer.
    tables: BTreeMap<u32, Table>,
    /// Of the round that is under way.
    shard: Option<Arc<Shard>>,
}

/// A pair's program on the device.
#[derive(Debug)]
struct Table {
    program: Arc<Program>,
    /// Where its memories began when it was made.
    bases: Vec<u64>,
    memory: DeviceMemory,
}

/// Marks of one half of the windows.
#[derive(Debug)]
struct Half {
    /// Its chunks are packed, or have arrived.
    filled: Event,
    /// They have left, or are unpacked: it may be filled again.
    emptied: Event,
}

impl Kept {
    fn new(gpu: &Gpu) -> Result<Self, CudaError> {
        let context = gpu.context();
        let stream = || Stream::new(context);
        let half =
            || Ok::<_, CudaError>(Half { filled: Event::new(context)?, emptied: Event::new(context)? });
        let (streams, halves) = ([stream()?, stream()?], [half()?, half()?]);
        Ok(Self { streams, halves, windows: None, staging: None, tables: BTreeMap::new(), shard: None })
    }

    /// True once nothing runs on it.
    pub(super) fn is_idle(&self) -> bool {
        // A stream that failed runs nothing any more either.
        self.streams.iter().all(|stream| stream.is_done().unwrap_or(true))
    }

    /// Where the memories of the job begin on the device, with what the job's direction needs there.
    fn bases(&mut self, job: &Job, gpu: &Gpu, waiting: &Waiting<'_>) -> Result<Vec<u64>, FlowError> {
        match job.direction {
            Direction::Send(round) => {
                let shard = gpu.shard(round, &job.memory, &self.streams[0], waiting)?;
                Ok(self.shard.insert(shard).addresses(&job.memory))
            }
            Direction::Receive => {
                let bytes = match job.memory.parts().first() {
                    Some(Part::Host(mapping)) => mapping.len(),
                    Some(Part::Device(memory)) => {
                        self.staging = None;
                        return Ok(vec![memory.address(0, memory.len())?]);
                    }
                    None => return Ok(Vec::new()),
                };
                if self.staging.as_ref().is_none_or(|staging| staging.len() != bytes) {
                    self.staging = None;
                    let staging = self.staging.insert(gpu.reserve(bytes)?);
                    // Pads stay as they are, since no table reaches them.
                    self.streams[0].clear(staging)?;
                }
                let staging = self.staging.as_ref().map(|staging| staging.address(0, bytes));
                Ok(staging.transpose()?.into_iter().collect())
            }
        }
    }

    /// Windows, and a table for each pair. What a job of before had for other pairs goes.
    fn fit(&mut self, job: &Job, gpu: &Gpu, windows: u64, waiting: &Waiting<'_>) -> Result<(), FlowError> {
        if self.windows.as_ref().is_none_or(|have| have.len() < windows) {
            self.windows = None;
            self.windows = Some(gpu.reserve(windows)?);
        }
        let bases = self.bases(job, gpu, waiting)?;
        let mut before = std::mem::take(&mut self.tables);
        for pair in &job.pairs {
            let same = |table: &Table| Arc::ptr_eq(&table.program, &pair.program) && table.bases == bases;
            let table = match before.remove(&pair.peer).filter(same) {
                Some(table) => table,
                None => {
                    let at = |mapping: u32| bases.get(mapping as usize).copied().unwrap_or(0);
                    let memory = gpu.table(&pair.program.table(at), &self.streams[0], waiting)?;
                    Table { program: Arc::clone(&pair.program), bases: bases.clone(), memory }
                }
            };
            self.tables.insert(pair.peer, table);
        }
        Ok(())
    }
}

/// One pair with its place on the device.
struct Flight<'j> {
    pair: &'j Pair,
    table: &'j DeviceMemory,
    window: u64,
}

/// Moves a job's bytes. What is left in `kept` after an error may still be in use.
pub(super) fn run(
    job: &Job,
    gpu: &Gpu,
    communicator: &Ready,
    chunk: u64,
    stopped: &dyn Fn() -> bool,
    kept: &mut Option<Kept>,
) -> Result<u64, FlowError> {
    let healthy = || communicator.is_settled().map(drop).map_err(FlowError::from);
    let waiting = Waiting { stopped, deadline: job.deadline, healthy: &healthy };
    let kept = match kept {
        Some(kept) => kept,
        None => kept.insert(Kept::new(gpu)?),
    };
    let largest = job.pairs.iter().map(|pair| pair.program.bytes()).max().unwrap_or(0);
    // A boundary is at an element, at most 7 bytes from where it was wanted.
    let window = (chunk.min(largest) + WINDOW_ALIGNMENT).next_multiple_of(WINDOW_ALIGNMENT);
    let half = job.pairs.len() as u64 * window;
    kept.fit(job, gpu, 2 * half, &waiting)?;
    let flights = job.pairs.iter().zip(0..).filter_map(|(pair, at): (_, u64)| {
        let table = &kept.tables.get(&pair.peer)?.memory;
        Some(Flight { pair, table, window: at * window })
    });
    let flights: Vec<Flight<'_>> = flights.collect();
    if let Some(windows) = &kept.windows {
        Waves { job, gpu, communicator, kept, windows, flights: &flights, half, chunk }.fly(&waiting)?;
    }
    if let (Some(staging), Some(Part::Host(mapping))) = (&kept.staging, job.memory.parts().first()) {
        gpu.copy_out(staging, mapping, &kept.streams[0], &waiting)?;
    }
    kept.shard = None;
    Ok(job.pairs.iter().map(|pair| pair.program.bytes()).sum())
}

struct Waves<'j> {
    job: &'j Job,
    gpu: &'j Gpu,
    communicator: &'j Ready,
    kept: &'j Kept,
    windows: &'j DeviceMemory,
    flights: &'j [Flight<'j>],
    /// Bytes of one half of the windows.
    half: u64,
    chunk: u64,
}

impl Waves<'_> {
    fn fly(&self, waiting: &Waiting<'_>) -> Result<(), FlowError> {
        let longest = self.flights.iter().map(|flight| flight.pair.program.bytes()).max().unwrap_or(0);
        let waves = longest.div_ceil(self.chunk);
        let mut counted = 0;
        for wave in 0..waves {
            self.enqueue(wave, &self.kept.halves[(wave % 2) as usize], waiting)?;
            // The wave before last is over for certain, or its half could not be filled again.
            while counted + 2 <= wave {
                self.count(counted);
                counted += 1;
            }
        }
        let streams = &self.kept.streams;
        waiting.until("the last bytes", || Ok(streams[0].is_done()? && streams[1].is_done()?))?;
        (counted..waves).for_each(|wave| self.count(wave));
        Ok(())
    }

    /// Packing and unpacking is on stream 0, what flies on stream 1.
    fn enqueue(&self, wave: u64, half: &Half, waiting: &Waiting<'_>) -> Result<(), FlowError> {
        let [kernels, wire] = &self.kept.streams;
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
        let (windows, wire) = (self.windows, &self.kept.streams[1]);
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
        self.flights.iter().filter_map(move |flight| {
            let (first, last) = self.range(flight, wave);
            let (table, entries, window) = (flight.table, flight.pair.program.entries(), self.windows);
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
