//! The GPU of one rank. What lies on it is used where it is; published memory of the host is copied to it once a
//! round, staging of the host comes back from it.
//!
//! G1: what a copy that was enqueued uses outlives it: every function here waits for its copies, and where it cannot,
//!     the caller waits for its streams before it lets go of anything, this device included.

mod digest;

use super::FlowError;
use crate::cuda::{Context, CudaError, Device, DeviceMemory, Driver, Event, Kernels, PinnedMemory, Stream};
use crate::executor::{Part, RankMemory};
use crate::limits::SHADOW_COPY_MAX;
use crate::memory::Mapping;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use weightrefit_core::round::message::RoundKey;

/// Bytes of one of the two buffers through which host memory goes to the device and back.
const BOUNCE_BYTES: usize = 4 << 20;
/// Looks at work that is on its way: at once, then a yield each, then pauses of up to this long.
const LOOK_MAX: Duration = Duration::from_micros(200);
const YIELDS: u32 = 64;

/// When to stop waiting.
pub(super) struct Waiting<'w> {
    /// Asked at each look.
    pub(super) stopped: &'w dyn Fn() -> bool,
    pub(super) deadline: Instant,
    /// Also looked at: the communicator may have failed.
    pub(super) healthy: &'w dyn Fn() -> Result<(), FlowError>,
}

impl Waiting<'_> {
    /// Waits until `done` says so.
    pub(super) fn until(
        &self,
        what: &'static str,
        mut done: impl FnMut() -> Result<bool, FlowError>,
    ) -> Result<(), FlowError> {
        let mut looks = 0_u32;
        while !done()? {
            (self.healthy)()?;
            if (self.stopped)() {
                return Err(FlowError::Stopped);
            }
            if Instant::now() >= self.deadline {
                return Err(FlowError::Late { what });
            }
            match looks {
                0..YIELDS => std::thread::yield_now(),
                _ => std::thread::sleep(LOOK_MAX.min(Duration::from_micros(u64::from(looks - YIELDS) * 10))),
            }
            looks += 1;
        }
        Ok(())
    }
}

/// A device with its kernels.
#[derive(Debug)]
pub struct Gpu {
    context: Context,
    kernels: Kernels,
    /// Bytes of device memory for packed windows of one lane.
    window_bytes: u64,
    /// Published memory on the device, and the round that it is of.
    shard: Mutex<Option<(RoundKey, Arc<Shard>)>>,
    /// Locked for one copy at a time; copies to and from the host wait for no peer.
    bounce: Mutex<Bounce>,
    /// Locked for one digest at a time; none before the first.
    digests: Mutex<Option<digest::Digests>>,
}

/// Copies of a rank's memories on the device; none of those that are there themselves.
#[derive(Debug)]
pub(super) struct Shard(Vec<Option<DeviceMemory>>);

impl Shard {
    /// Where each memory begins.
    pub(super) fn addresses(&self, memory: &RankMemory) -> Vec<u64> {
        let address = |(part, copy): (&Part, &Option<DeviceMemory>)| match part {
            Part::Device(memory) => memory.address(0, memory.len()).ok(),
            Part::Host(_) => copy.as_ref().and_then(|copy| copy.address(0, copy.len()).ok()),
        };
        memory.parts().iter().zip(&self.0).filter_map(address).collect()
    }
}

impl Gpu {
    /// Takes a device into use.
    pub fn new(driver: &Driver, device: Device, window_bytes: u64) -> Result<Self, CudaError> {
        let context = Context::new(driver, device)?;
        let kernels = Kernels::load(&context)?;
        let bounce = Mutex::new(Bounce::new(&context)?);
        Ok(Self {
            context,
            kernels,
            window_bytes,
            shard: Mutex::default(),
            bounce,
            digests: Mutex::default(),
        })
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    pub(super) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Bytes of packed windows that a lane may have on this device.
    pub(super) fn window_bytes(&self) -> u64 {
        self.window_bytes
    }

    /// Memory for `bytes`, predicted first: the framework beside us must not be the one that finds none left.
    pub(super) fn reserve(&self, bytes: u64) -> Result<DeviceMemory, FlowError> {
        let free = self.context.free_bytes()?;
        if bytes > free {
            return Err(FlowError::Exhausted { bytes, free });
        }
        Ok(DeviceMemory::new(&self.context, bytes)?)
    }

    /// Memory for an engine's staging, zeroed, and its descriptor. Blocks until it is there.
    pub(crate) fn staging(&self, bytes: u64) -> Result<(DeviceMemory, OwnedFd), FlowError> {
        let free = self.context.free_bytes()?;
        if bytes > free {
            return Err(FlowError::Exhausted { bytes, free });
        }
        let (memory, stream) = (DeviceMemory::shareable(&self.context, bytes)?, Stream::new(&self.context)?);
        // Pads stay as they are, since nothing reaches them.
        stream.clear(&memory)?;
        let deadline = Instant::now() + SHADOW_COPY_MAX;
        let waiting = Waiting { stopped: &|| false, deadline, healthy: &|| Ok(()) };
        if let Err(error) = waiting.until("zeros", || Ok(stream.is_done()?)) {
            std::mem::forget(memory); // it may still be written
            return Err(error);
        }
        let fd = memory.export()?;
        Ok((memory, fd))
    }

    /// Published memory of the host on the device, copied by the first lane of a round that asks.
    pub(super) fn shard(
        &self,
        round: RoundKey,
        memory: &RankMemory,
        stream: &Stream,
        waiting: &Waiting<'_>,
    ) -> Result<Arc<Shard>, FlowError> {
        let mut held = self.shard.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, shard)) = &*held
            && *of == round
        {
            return Ok(Arc::clone(shard));
        }
        // Older rounds have no senders any more, so its memory is this one's, where it fits.
        let reusable = held.take().and_then(|(_, shard)| Arc::try_unwrap(shard).ok());
        let mapped = |part: &Part| match part {
            Part::Host(mapping) => Some(mapping.len()),
            Part::Device(_) => None,
        };
        let bytes = || memory.parts().iter().map(mapped);
        let fits =
            |shard: &Shard| shard.0.iter().map(|copy| copy.as_ref().map(DeviceMemory::len)).eq(bytes());
        let shard = match reusable.filter(fits) {
            Some(shard) => shard,
            None => {
                let reserve = |bytes: Option<u64>| bytes.map(|bytes| self.reserve(bytes)).transpose();
                Shard(bytes().map(reserve).collect::<Result<_, _>>()?)
            }
        };
        for (part, copy) in memory.parts().iter().zip(&shard.0) {
            if let (Part::Host(mapping), Some(copy)) = (part, copy) {
                self.copy_in(mapping, copy, stream, waiting)?;
            }
        }
        let shard = Arc::new(shard);
        *held = Some((round, Arc::clone(&shard)));
        Ok(shard)
    }

    /// What another agent calls a round is another one.
    pub(super) fn forget_shard(&self) {
        *self.shard.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn copy_in(
        &self,
        from: &Mapping,
        to: &DeviceMemory,
        stream: &Stream,
        waiting: &Waiting<'_>,
    ) -> Result<(), FlowError> {
        let mut bounce = self.bounce();
        let mut at = 0;
        while at < from.len() {
            let bytes = (from.len() - at).min(BOUNCE_BYTES as u64);
            let buffer = bounce.next(waiting)?;
            from.read(at, &mut buffer.memory.bytes_mut()[..bytes as usize]);
            stream.upload(&buffer.memory, to, at, bytes)?;
            buffer.event.record(stream)?;
            at += bytes;
        }
        bounce.drain(waiting)
    }

    /// Bytes of the host, on the device. For tables: small, and gone when the caller's wait is over.
    pub(super) fn table(
        &self,
        bytes: &[u8],
        stream: &Stream,
        waiting: &Waiting<'_>,
    ) -> Result<DeviceMemory, FlowError> {
        let memory = self.reserve(bytes.len() as u64)?;
        let mut bounce = self.bounce();
        for (index, piece) in bytes.chunks(BOUNCE_BYTES).enumerate() {
            let buffer = bounce.next(waiting)?;
            buffer.memory.bytes_mut()[..piece.len()].copy_from_slice(piece);
            stream.upload(&buffer.memory, &memory, (index * BOUNCE_BYTES) as u64, piece.len() as u64)?;
            buffer.event.record(stream)?;
        }
        bounce.drain(waiting)?;
        Ok(memory)
    }

    /// Staging, from the device to the host; one copy is on its way while the one before is written.
    pub(super) fn copy_out(
        &self,
        from: &DeviceMemory,
        to: &Mapping,
        stream: &Stream,
        waiting: &Waiting<'_>,
    ) -> Result<(), FlowError> {
        let mut bounce = self.bounce();
        let mut pending: Option<(u64, u64)> = None;
        let mut at = 0;
        let bytes_all = from.len().min(to.len());
        while at < bytes_all || pending.is_some() {
            let begun = (at < bytes_all).then(|| (at, (bytes_all - at).min(BOUNCE_BYTES as u64)));
            if let Some((offset, bytes)) = begun {
                let buffer = bounce.next(waiting)?;
                stream.download(from, offset, &mut buffer.memory, bytes)?;
                buffer.event.record(stream)?;
                at += bytes;
            }
            if let Some((offset, bytes)) = pending {
                let buffer = bounce.other(begun.is_some());
                waiting.until("a copy from the device", || Ok(buffer.event.is_done()?))?;
                to.write(offset, &buffer.memory.bytes()[..bytes as usize]);
            }
            pending = begun;
        }
        Ok(())
    }

    fn bounce(&self) -> MutexGuard<'_, Bounce> {
        self.bounce.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Two pinned buffers, used in turn.
#[derive(Debug)]
struct Bounce {
    buffers: [Buffer; 2],
    turn: usize,
}

#[derive(Debug)]
struct Buffer {
    memory: PinnedMemory,
    /// After the last copy that uses the memory.
    event: Event,
}

impl Bounce {
    fn new(context: &Context) -> Result<Self, CudaError> {
        let buffer = || {
            let memory = PinnedMemory::new(context, BOUNCE_BYTES)?;
            Ok::<_, CudaError>(Buffer { memory, event: Event::new(context)? })
        };
        Ok(Self { buffers: [buffer()?, buffer()?], turn: 0 })
    }

    /// The next buffer, once nothing uses it any more.
    fn next(&mut self, waiting: &Waiting<'_>) -> Result<&mut Buffer, FlowError> {
        let buffer = &mut self.buffers[self.turn];
        self.turn ^= 1;
        waiting.until("a copy to the device", || Ok(buffer.event.is_done()?))?;
        Ok(buffer)
    }

    /// The buffer before the last one that [`Self::next`] gave, or the last where none was given since.
    fn other(&self, given: bool) -> &Buffer {
        &self.buffers[if given { self.turn } else { self.turn ^ 1 }]
    }

    fn drain(&self, waiting: &Waiting<'_>) -> Result<(), FlowError> {
        let events = || self.buffers.iter().map(|buffer| buffer.event.is_done());
        waiting.until("copies to the device", || {
            Ok(events().collect::<Result<Vec<_>, _>>()?.iter().all(|done| *done))
        })
    }
}
