//! Host memory with the content of a rank's memory that is on a device, for the byte streams of TCP.

use super::memory::{Part, ShadowError};
use super::{HostMemory, Placements};
use crate::cuda::{DeviceMemory, PinnedMapping, Stream};
use crate::limits::SHADOW_COPY_MAX;
use crate::memory::create;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use weightrefit_core::round::message::RoundKey;

/// Looks at a copy that is on its way.
const LOOK: Duration = Duration::from_micros(50);

/// Made when it is first needed, and kept for later rounds.
#[derive(Debug)]
pub(super) struct Shadow {
    parts: Vec<Part>,
    placements: Arc<Placements>,
    made: Mutex<Option<Made>>,
    copied_bytes: AtomicU64,
}

#[derive(Debug)]
struct Made {
    host: HostMemory,
    /// One for each part on a device, in order of the parts.
    pairs: Vec<Pair>,
    /// Whose content it has; `None` while it is written, or where nobody reads it.
    round: Option<RoundKey>,
}

#[derive(Debug)]
struct Pair {
    device: Arc<DeviceMemory>,
    host: PinnedMapping,
    stream: Stream,
}

impl Shadow {
    pub(super) fn new(parts: Vec<Part>, placements: Arc<Placements>) -> Self {
        Self { parts, placements, made: Mutex::default(), copied_bytes: AtomicU64::new(0) }
    }

    pub(super) fn copied_bytes(&self) -> u64 {
        self.copied_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn pull(&self, round: RoundKey) -> Result<HostMemory, ShadowError> {
        let mut held = self.lock();
        let made = self.make(&mut held)?;
        if made.round != Some(round) {
            made.round = None;
            self.copy(&mut held, |pair| pair.stream.download_mapped(&pair.device, &pair.host))?;
        }
        let made = self.make(&mut held)?;
        made.round = Some(round);
        Ok(made.host.clone())
    }

    pub(super) fn fill(&self) -> Result<HostMemory, ShadowError> {
        let mut held = self.lock();
        let made = self.make(&mut held)?;
        made.round = None;
        Ok(made.host.clone())
    }

    pub(super) fn push(&self) -> Result<(), ShadowError> {
        let mut held = self.lock();
        self.make(&mut held)?;
        self.copy(&mut held, |pair| pair.stream.upload_mapped(&pair.host, &pair.device))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Made>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make<'h>(&self, held: &'h mut Option<Made>) -> Result<&'h mut Made, ShadowError> {
        if held.is_none() {
            let (mut mappings, mut pairs) = (Vec::with_capacity(self.parts.len()), Vec::new());
            for part in &self.parts {
                let mapping = match part {
                    Part::Host(mapping) => Arc::clone(mapping),
                    Part::Device(memory) => {
                        let mapping = Arc::new(create("shadow of device memory", memory.len())?.1);
                        let host = PinnedMapping::new(memory.context(), Arc::clone(&mapping))?;
                        let stream = Stream::new(memory.context())?;
                        pairs.push(Pair { device: Arc::clone(memory), host, stream });
                        mapping
                    }
                };
                mappings.push(mapping);
            }
            let host = HostMemory::new(mappings, Arc::clone(&self.placements))?;
            *held = Some(Made { host, pairs, round: None });
        }
        Ok(held.as_mut().expect("made above, where it was not there"))
    }

    /// Copies all pairs, and waits. What may still be written after an error is never given back.
    fn copy(
        &self,
        held: &mut Option<Made>,
        enqueue: impl Fn(&Pair) -> Result<(), crate::cuda::CudaError>,
    ) -> Result<(), ShadowError> {
        let Some(made) = held else { return Ok(()) };
        let done =
            made.pairs.iter().try_for_each(|pair| Ok(enqueue(pair)?)).and_then(|()| settle(&made.pairs));
        match done {
            Ok(()) => {
                let bytes = made.pairs.iter().map(|pair| pair.device.len()).sum();
                self.copied_bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            Err(_) => std::mem::forget(held.take()),
        }
        done
    }
}

fn settle(pairs: &[Pair]) -> Result<(), ShadowError> {
    let until = Instant::now() + SHADOW_COPY_MAX;
    for pair in pairs {
        while !pair.stream.is_done()? {
            if Instant::now() >= until {
                return Err(ShadowError::Late { seconds: SHADOW_COPY_MAX.as_secs() });
            }
            std::thread::sleep(LOOK);
        }
    }
    Ok(())
}
