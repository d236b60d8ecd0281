//! Streams and events: each stream is a thread that does one thing after the other.

use crate::knobs::knobs;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The first error of this process's work: everything fails with it from then on.
static STICKY: AtomicU32 = AtomicU32::new(0);

pub(crate) fn sticky() -> u32 {
    STICKY.load(Ordering::SeqCst)
}

type Work = Box<dyn FnOnce() -> Result<(), u32> + Send>;

/// A stream.
pub(crate) struct Queue {
    work: Sender<Work>,
    pending: Arc<AtomicUsize>,
}

impl Queue {
    fn start() -> Self {
        let (work, inbox) = channel::<Work>();
        let pending = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&pending);
        std::thread::spawn(move || {
            while let Ok(work) = inbox.recv() {
                if !knobs().latency.is_zero() {
                    std::thread::sleep(knobs().latency);
                }
                // After a failure nothing runs any more.
                if sticky() == 0
                    && let Err(error) = work()
                {
                    let _ = STICKY.compare_exchange(0, error, Ordering::SeqCst, Ordering::SeqCst);
                }
                count.fetch_sub(1, Ordering::SeqCst);
            }
        });
        Self { work, pending }
    }

    pub(crate) fn add(&self, work: impl FnOnce() -> Result<(), u32> + Send + 'static) {
        self.pending.fetch_add(1, Ordering::SeqCst);
        // The thread lives as long as the sender.
        let _ = self.work.send(Box::new(work));
    }

    pub(crate) fn is_done(&self) -> bool {
        self.pending.load(Ordering::SeqCst) == 0
    }
}

/// An event: how often it was recorded, and how many of these the streams have passed.
#[derive(Default)]
pub(crate) struct Mark {
    counts: Mutex<(u64, u64)>,
    changed: Condvar,
}

impl Mark {
    fn lock(&self) -> MutexGuard<'_, (u64, u64)> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn record(self: &Arc<Self>, queue: &Queue) {
        let mut counts = self.lock();
        counts.0 += 1;
        if queue.is_done() {
            counts.1 = counts.0;
            self.changed.notify_all();
            return;
        }
        let (own, mark) = (counts.0, Arc::clone(self));
        queue.add(move || {
            let mut counts = mark.lock();
            counts.1 = counts.1.max(own);
            mark.changed.notify_all();
            Ok(())
        });
    }

    pub(crate) fn make_wait(self: &Arc<Self>, queue: &Queue) {
        let (until, passed) = *self.lock();
        if passed >= until {
            return;
        }
        let mark = Arc::clone(self);
        queue.add(move || {
            let mut counts = mark.lock();
            while counts.1 < until && sticky() == 0 {
                let look = std::time::Duration::from_millis(10);
                counts = mark.changed.wait_timeout(counts, look).unwrap_or_else(PoisonError::into_inner).0;
            }
            Ok(())
        });
    }

    pub(crate) fn is_done(&self) -> bool {
        let counts = self.lock();
        counts.1 >= counts.0
    }
}

/// Handles by number.
pub(crate) struct Table<T>(Mutex<(usize, BTreeMap<usize, Arc<T>>)>);

impl<T> Table<T> {
    const fn new() -> Self {
        Self(Mutex::new((0, BTreeMap::new())))
    }

    fn lock(&self) -> MutexGuard<'_, (usize, BTreeMap<usize, Arc<T>>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, value: T) -> usize {
        let mut table = self.lock();
        table.0 += 16; // never 0, and no small number that a caller might make up
        let key = table.0;
        table.1.insert(key, Arc::new(value));
        key
    }

    pub(crate) fn get(&self, key: usize) -> Option<Arc<T>> {
        self.lock().1.get(&key).cloned()
    }

    pub(crate) fn remove(&self, key: usize) -> Option<Arc<T>> {
        self.lock().1.remove(&key)
    }
}

pub(crate) static QUEUES: Table<Queue> = Table::new();
pub(crate) static MARKS: Table<Mark> = Table::new();

pub(crate) fn new_queue() -> usize {
    QUEUES.add(Queue::start())
}
