//! The source: what it offers to whom in which round, and how far that is.

use super::flight::Flight;
use super::frame::{Purpose, StreamHeader};
use super::tasks::{Task, Tasks};
use super::{Peers, TransferError};
use crate::executor::{Program, RankMemory};
use crate::limits::OFFER_WAIT_MAX;
use crate::transport::nccl::LaneMember;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;
use weightrefit_core::code::Code;
use weightrefit_core::id::{Epoch, MemberId, RoundId, Sha256};

/// What one rank may send in a round.
#[derive(Debug)]
pub struct SendJob {
    /// The accepted membership.
    pub peers: Arc<Peers>,
    /// Round of its epoch.
    pub round: RoundId,
    /// The rank that sends.
    pub member: MemberId,
    /// Its publication.
    pub memory: RankMemory,
    /// Replicas allowed; one without a destination here is `Sent` at once.
    pub replicas: Vec<u32>,
    /// Ranks of these replicas that get bytes from this rank.
    pub destinations: Vec<SendTo>,
    /// This rank's place in the lane of the replica, where it has one.
    pub lane: Option<Arc<LaneMember>>,
}

/// What one destination gets.
#[derive(Debug, Clone)]
pub struct SendTo {
    /// The destination.
    pub member: MemberId,
    /// Its replica.
    pub replica: u32,
    /// Digest of the pair's boxes.
    pub pair: Sha256,
    /// The pair's moves, compiled for this end.
    pub program: Arc<Program>,
}

/// What a job reports; called from its threads, must not block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SendEvent {
    /// All destinations of the replica have acknowledged.
    Sent {
        /// The replica.
        replica: u32,
        /// Wire bytes.
        bytes: u64,
    },
    /// A stream to a destination of the replica failed; other replicas go on.
    Failed {
        /// The replica.
        replica: u32,
        /// The reason.
        error: TransferError,
    },
}

/// The senders of a job. Dropping it stops them without waiting.
#[derive(Debug)]
pub struct Senders {
    offer: Arc<Offer>,
    offers: Arc<Offers>,
}

impl Senders {
    /// Bytes handed to the network so far.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.offer.tasks.bytes.load(Ordering::Relaxed)
    }

    /// Offers nothing more and asks all to end; does not wait.
    pub fn stop(&self) {
        self.offers.withdraw(&self.offer);
        self.offer.tasks.stop();
    }

    /// Stops and waits until all are over: the publication is not read afterwards (B3).
    pub fn join(&self) {
        self.offers.withdraw(&self.offer);
        self.offer.tasks.stop_and_join();
    }
}

impl Drop for Senders {
    fn drop(&mut self) {
        self.stop();
    }
}

type Report = Box<dyn Fn(SendEvent) + Send + Sync>;

/// One job.
pub(super) struct Offer {
    pub(super) job: SendJob,
    pub(super) tasks: Arc<Tasks>,
    pub(super) flight: Arc<Flight>,
    progress: Mutex<Progress>,
    report: Report,
}

impl std::fmt::Debug for Offer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Offer").field("round", &self.job.round).field("member", &self.job.member).finish()
    }
}

#[derive(Debug, Default)]
struct Progress {
    /// Per destination: its number of streams, those taken, those acknowledged.
    streams: BTreeMap<MemberId, (u32, BTreeSet<u32>, BTreeSet<u32>)>,
    /// Replicas whose end was reported.
    ended: BTreeSet<u32>,
}

/// Jobs of all ranks of this agent, and what it believes of its peers.
#[derive(Debug, Default)]
pub(super) struct Offers {
    table: Mutex<Table>,
    added: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    peers: Option<Arc<Peers>>,
    offers: Vec<Weak<Offer>>,
    /// Per rank the highest round that is over (tombstone): asking for it again is not too early but too late.
    over: BTreeMap<MemberId, (Epoch, RoundId)>,
}

/// A stream that may flow.
#[derive(Debug)]
pub(super) struct Grant {
    pub(super) offer: Arc<Offer>,
    pub(super) destination: usize,
    pub(super) task: Task,
}

impl Offers {
    pub(super) fn configure(&self, peers: Option<Arc<Peers>>) {
        self.lock().peers = peers;
    }

    pub(super) fn add(self: &Arc<Self>, job: SendJob, report: Report) -> Senders {
        let unneeded: Vec<u32> = job
            .replicas
            .iter()
            .copied()
            .filter(|replica| !job.destinations.iter().any(|to| to.replica == *replica))
            .collect();
        let offer = Arc::new(Offer {
            job,
            tasks: Arc::default(),
            flight: Arc::default(),
            progress: Mutex::default(),
            report,
        });
        let mut table = self.lock();
        table.offers.retain(|offer| offer.strong_count() > 0);
        table.offers.push(Arc::downgrade(&offer));
        drop(table);
        self.added.notify_all();
        for replica in unneeded {
            (offer.report)(SendEvent::Sent { replica, bytes: 0 });
        }
        Senders { offer, offers: Arc::clone(self) }
    }

    fn withdraw(&self, offer: &Arc<Offer>) {
        let mut table = self.lock();
        table.offers.retain(|other| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(offer)));
        let key = (offer.job.peers.epoch, offer.job.round);
        let over = table.over.entry(offer.job.member).or_insert(key);
        *over = key.max(*over);
    }

    /// Whether a header is of the accepted membership and its destination who it says (B1, B2). `key` is what the
    /// peer proved; `None` without TLS.
    pub(super) fn identify(&self, header: &StreamHeader, key: Option<Sha256>) -> Result<(), Code> {
        let table = self.lock();
        let peers = table.peers.as_ref().ok_or(Code::NotConfigured)?;
        let same = header.refit_uid == peers.refit_uid
            && header.epoch == peers.epoch
            && header.membership == peers.membership;
        if !same {
            return Err(Code::StaleEpoch);
        }
        let source = peers.agent(header.source).map_err(|_| Code::StaleEpoch)?;
        let destination = peers.agent(header.destination).map_err(|_| Code::StaleEpoch)?;
        if key.is_some_and(|key| key != destination.1) {
            return Err(Code::Unauthenticated);
        }
        if source.0 != header.source_incarnation || destination.0 != header.destination_incarnation {
            return Err(Code::StaleEpoch);
        }
        Ok(())
    }

    /// Decides on the header of a stream that has been identified; waits a little for what it asks for.
    pub(super) fn admit(&self, header: &StreamHeader) -> Result<Grant, Code> {
        let until = Instant::now() + OFFER_WAIT_MAX;
        let mut table = self.lock();
        let (offer, at) = loop {
            if let Some(found) = table.find(header) {
                break found;
            }
            if table.over.get(&header.source).is_some_and(|over| (header.epoch, header.round) <= *over) {
                return Err(Code::SourceGone);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Code::Busy);
            }
            table = self.added.wait_timeout(table, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        drop(table);
        if let Purpose::Flight { attempt } = header.purpose
            && !offer.job.lane.as_ref().is_some_and(|lane| lane.is_at(attempt))
        {
            return Err(Code::Busy);
        }
        let task = offer.tasks.enter().ok_or(Code::SourceGone)?;
        offer.take(header, at)?;
        Ok(Grant { offer, destination: at, task })
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// The offer that a header asks for, and which of its destinations asks.
    fn find(&self, header: &StreamHeader) -> Option<(Arc<Offer>, usize)> {
        self.offers.iter().filter_map(Weak::upgrade).find_map(|offer| {
            let job = &offer.job;
            let mine =
                job.member == header.source && job.round == header.round && job.peers.epoch == header.epoch;
            let at = job.destinations.iter().position(|to| to.member == header.destination)?;
            mine.then_some((offer, at))
        })
    }
}

impl Offer {
    /// Takes the header's stream, once.
    fn take(&self, header: &StreamHeader, destination: usize) -> Result<(), Code> {
        let to = &self.job.destinations[destination];
        let streams_max = match header.purpose {
            Purpose::Flight { .. } => 1,
            _ => crate::limits::STREAMS_MAX,
        };
        let sane = header.streams <= streams_max && header.stream < header.streams;
        if to.pair != header.pair || !sane {
            return Err(Code::PlanMismatch);
        }
        let (start, end) = (
            to.program.split(header.stream, header.streams),
            to.program.split(header.stream + 1, header.streams),
        );
        if end - start != header.bytes {
            return Err(Code::PlanMismatch);
        }
        let mut progress = self.lock();
        // The first stream that is admitted fixes how many there are; a refused one fixes nothing.
        let fresh = (header.streams, BTreeSet::new(), BTreeSet::new());
        let (streams, taken, _) = progress.streams.entry(to.member).or_insert(fresh);
        if *streams != header.streams {
            return Err(Code::PlanMismatch);
        }
        // A stream that was given out has ended well or failed its replica; neither is sent twice.
        if taken.insert(header.stream) { Ok(()) } else { Err(Code::SourceGone) }
    }

    /// Counts a stream that has ended and reports its replica when that is its end.
    pub(super) fn ended(&self, destination: usize, stream: u32, result: Result<(), TransferError>) {
        let to = &self.job.destinations[destination];
        let mut progress = self.lock();
        let event = match result {
            Err(error) => {
                let stopped = self.tasks.is_stopped();
                let error = if stopped { TransferError::Cancelled } else { error };
                Some(SendEvent::Failed { replica: to.replica, error })
            }
            Ok(()) => {
                if let Some((_, _, acknowledged)) = progress.streams.get_mut(&to.member) {
                    acknowledged.insert(stream);
                }
                let of_replica = || self.job.destinations.iter().filter(|other| other.replica == to.replica);
                let complete = |member: &MemberId| {
                    progress.streams.get(member).is_some_and(|(count, _, done)| done.len() == *count as usize)
                };
                let bytes = of_replica().map(|other| other.program.bytes()).sum();
                let all = of_replica().all(|other| other.program.bytes() == 0 || complete(&other.member));
                all.then_some(SendEvent::Sent { replica: to.replica, bytes })
            }
        };
        let first = event.is_some() && progress.ended.insert(to.replica);
        drop(progress);
        if let Some(event) = event.filter(|_| first) {
            (self.report)(event);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
