//! Live tensors of the reference engine: read by the forward loop, written at commit, with a version stamp beside
//! each tensor.
//!
//! Words are atomic, so that a pause which does not hold is seen as a torn read and is not undefined behaviour.
//! The stamp is [`Stamp::WRITING`] while a tensor is written; a reader looks at it before and after.

use crate::memory::Mapping;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use weightrefit_core::round::message::Version;

/// Bytes copied or read at a time; small enough to stay in the second-level cache.
const COPY_BYTES: usize = 256 << 10;

/// Which version a tensor holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp(pub(super) u64);

impl Stamp {
    /// No version yet: memory as the process got it.
    pub(super) const NONE: Self = Self(0);
    /// Being written.
    pub(super) const WRITING: Self = Self(u64::MAX);

    /// Different versions of one run of this program get different stamps.
    pub(super) fn of(version: Version) -> Self {
        let step = (version.step as u64).wrapping_add(1) & 0xffff_ffff;
        Self(step | version.origin.0 << 32 & 0xffff << 32 | version.run << 48)
    }
}

/// What a reader saw of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Read {
    /// The step was given up.
    Cut,
    /// One version.
    Whole(Stamp),
    /// It was written meanwhile.
    Torn,
}

/// One tensor.
pub(super) struct LiveTensor {
    bytes: usize,
    words: Box<[AtomicU64]>,
    stamp: AtomicU64,
}

impl LiveTensor {
    /// Zeroed, without a version.
    pub(super) fn new(bytes: usize) -> Self {
        let words = (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
        Self { bytes, words, stamp: AtomicU64::new(Stamp::NONE.0) }
    }

    /// Reads the whole tensor as a forward step does, unless `cut` is set meanwhile.
    pub(super) fn read(&self, cut: &AtomicBool) -> Read {
        let before = self.stamp.load(Ordering::Acquire);
        for words in self.words.chunks(COPY_BYTES / 8) {
            if cut.load(Ordering::Relaxed) {
                return Read::Cut;
            }
            let sum = words.iter().fold(0_u64, |sum, word| sum.wrapping_add(word.load(Ordering::Relaxed)));
            std::hint::black_box(sum);
        }
        fence(Ordering::Acquire);
        let after = self.stamp.load(Ordering::Relaxed);
        if before == after && before != Stamp::WRITING.0 { Read::Whole(Stamp(before)) } else { Read::Torn }
    }

    /// A private copy of the bytes.
    pub(super) fn snapshot(&self) -> Vec<u8> {
        let mut out: Vec<u8> =
            self.words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
        out.truncate(self.bytes);
        out
    }

    /// Copies the tensor's new content from staging and stamps it.
    pub(super) fn write(&self, staging: &Mapping, offset: u64, stamp: Stamp) {
        self.stamp.store(Stamp::WRITING.0, Ordering::Relaxed);
        fence(Ordering::Release);
        let mut buffer = vec![0; COPY_BYTES.min(self.words.len() * 8)];
        let mut done = 0;
        for words in self.words.chunks(COPY_BYTES / 8) {
            let len = (words.len() * 8).min(self.bytes - done);
            buffer[len..].fill(0);
            staging.read(offset + done as u64, &mut buffer[..len]);
            for (word, bytes) in words.iter().zip(buffer.as_chunks::<8>().0) {
                word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
            }
            done += len;
        }
        self.stamp.store(stamp.0, Ordering::Release);
    }

    /// Flips the lowest bit of the first element: what a faulty engine or memory does.
    pub(super) fn corrupt(&self) {
        if let Some(word) = self.words.first() {
            word.fetch_xor(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightrefit_core::id::{ContentSum, Epoch};

    fn version(run: u64, step: i64, origin: u64) -> Version {
        Version { run, step, origin: Epoch(origin), sum: ContentSum::default() }
    }

    #[test]
    fn stamps_of_different_versions_differ() {
        let mut stamps = vec![Stamp::NONE.0, Stamp::WRITING.0];
        for (run, step, origin) in [(0, 0, 1), (0, 1, 1), (1, 0, 1), (0, 0, 2), (1, 0, 2)] {
            stamps.push(Stamp::of(version(run, step, origin)).0);
        }
        let all = stamps.len();
        stamps.sort_unstable();
        stamps.dedup();
        assert_eq!(stamps.len(), all);
    }

    #[test]
    fn what_is_written_is_read_back_with_its_stamp() {
        let data: Vec<u8> = (0..600_003_u32).map(|i| (i % 251) as u8).collect();
        let (_fd, staging) = crate::memory::create("staging", data.len() as u64 + 64).unwrap();
        staging.write(64, &data);
        let tensor = LiveTensor::new(data.len());
        let read = || tensor.read(&AtomicBool::new(false));
        assert_eq!(read(), Read::Whole(Stamp::NONE));
        tensor.write(&staging, 64, Stamp(7));
        assert_eq!(read(), Read::Whole(Stamp(7)));
        assert_eq!(tensor.read(&AtomicBool::new(true)), Read::Cut);
        assert!(tensor.snapshot() == data);
        tensor.corrupt();
        assert!(tensor.snapshot() != data);
        tensor.stamp.store(Stamp::WRITING.0, Ordering::Relaxed);
        assert_eq!(read(), Read::Torn);
    }
}
