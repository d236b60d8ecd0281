//! The data plane as the round driver uses it: staging and receivers of destinations, publications and senders of
//! sources, each under its slot. Whatever blocks runs on threads of its own and comes back as an event.
//!
//! Invariants:
//! - B1: an event of a task that was stopped, or of an older one, is dropped: the node hears of a task only
//!   while it wants to.
//! - B2: "joined" is said after the threads are over and no digest reads the memory.
//! - B3: memory of a slot is replaced or let go only when nothing runs on it.

use super::source::Source;
use super::staging::Staging;
use crate::executor::{DigestProgram, RankMemory};
use crate::limits;
use crate::planned::{Planned, Task};
use crate::transport::nccl::{Carried, Gpu, Lanes, Reason, Settings};
use crate::transport::tcp::{
    ByteServer, Receivers, Resting, Security, SendEvent, Senders, TransferError, receive,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, spawn_blocking};
use weightrefit_core::code::Code;
use weightrefit_core::id::{Epoch, MemberId};
use weightrefit_core::round::io::{Input, Slot};
use weightrefit_core::round::message::{ClassSums, RoundKey};
use weightrefit_proto::v1;

/// Number of a task, so that what an older one says is told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ticket(u64);

/// What tasks report.
#[derive(Debug)]
pub(super) enum DataEvent {
    /// Staging was made, or could not be.
    Opened { slot: Slot, round: RoundKey, result: Result<Staging, (Code, String)> },
    /// Receivers are done or failed.
    Received { slot: Slot, ticket: Ticket, result: Result<u64, TransferError> },
    /// Senders of one replica are done or failed.
    Sent { slot: Slot, ticket: Ticket, event: SendEvent },
    /// Staging is sealed and digested.
    Digested { slot: Slot, ticket: Ticket, sums: ClassSums },
    /// The publication is digested.
    PublicationDigested { slot: Slot, step: i64, epoch: Epoch, sums: ClassSums },
    /// Receivers and digest are over.
    ReceiversJoined { slot: Slot, round: RoundKey },
    /// Senders to one replica are over.
    SendersJoined { slot: Slot, round: RoundKey, replica: u32 },
}

#[derive(Debug, Default)]
struct Place {
    staging: Option<Staging>,
    /// Where the engine wants it; `None` is on the host.
    staging_gpu: Option<Arc<Gpu>>,
    opening: Option<RoundKey>,
    receiving: Option<(RoundKey, Ticket, Receivers)>,
    digesting: Option<Digesting>,
    source: Option<Arc<Source>>,
    /// Connections to its sources, of the present membership.
    resting: Arc<Resting>,
    sending: BTreeMap<(RoundKey, u32), (Ticket, Senders)>,
}

/// A digest of staging on its way.
#[derive(Debug)]
struct Digesting {
    round: RoundKey,
    ticket: Ticket,
    task: JoinHandle<()>,
    stop: Arc<AtomicBool>,
}

/// All slots.
pub(super) struct Data {
    server: ByteServer,
    security: Security,
    lanes: Lanes,
    places: Vec<Place>,
    plan: Option<Arc<Planned>>,
    // Unbounded, since the threads of the byte path must not wait; a task sends a handful of events, and how
    // many tasks there are is bounded by slots and replicas.
    events: mpsc::UnboundedSender<DataEvent>,
    next_ticket: u64,
    /// Bytes that went through shadows of memory that was let go of.
    shadowed_bytes: u64,
}

impl Data {
    pub(super) fn new(
        server: ByteServer,
        security: Security,
        fabric: Settings,
        slots: usize,
        events: mpsc::UnboundedSender<DataEvent>,
    ) -> Self {
        let places = (0..slots).map(|_| Place::default()).collect();
        let lanes = Lanes::new(fabric, security.clone(), slots);
        server.lead_lanes_to(lanes.hall());
        Self { server, security, lanes, places, plan: None, events, next_ticket: 0, shadowed_bytes: 0 }
    }

    /// A membership took effect; nothing of an older one runs any more.
    pub(super) fn configure(&mut self, plan: Arc<Planned>) {
        self.server.configure(Some(Arc::clone(&plan.peers)));
        let members: Vec<MemberId> = plan.slots.iter().map(|slot| slot.member).collect();
        self.lanes.configure(&plan.lanes, &plan.peers, &members, plan.needs_lanes);
        for (place, slot) in self.places.iter_mut().zip(&plan.slots) {
            if let Some(staging) = &place.staging
                && staging.layout() != slot.layout
            {
                let staging = place.staging.take();
                self.shadowed_bytes += staging.map_or(0, |staging| staging.memory().shadowed_bytes());
            }
            place.resting = Arc::default();
        }
        self.plan = Some(plan);
    }

    /// Executors in the processes of this agent's ranks.
    pub(super) fn executors(&self) -> &Lanes {
        &self.lanes
    }

    /// The trainer's memory, mapped.
    pub(super) fn adopt(&mut self, slot: Slot, source: Arc<Source>) {
        self.let_go(slot);
        if let Some(place) = self.place(slot) {
            place.source = Some(source);
        }
    }

    /// The GPU of a slot, which its client calls `uuid`.
    pub(super) fn gpu_called(&self, slot: Slot, uuid: &str) -> Result<Arc<Gpu>, Reason> {
        self.lanes.gpu_called(slot.0 as usize, uuid)
    }

    /// Where an engine wants its staging, from the next round on; `None` is on the host.
    pub(super) fn place_staging(&mut self, slot: Slot, gpu: Option<Arc<Gpu>>) {
        if let Some(place) = self.place(slot) {
            place.staging_gpu = gpu;
        }
    }

    /// Bytes that were copied between devices and the host because TCP had to carry them.
    pub(super) fn shadowed_bytes(&self) -> u64 {
        let staged = self.places.iter().filter_map(|place| Some(place.staging.as_ref()?.memory()));
        let published = self.places.iter().filter_map(|place| Some(place.source.as_ref()?.memory()));
        self.shadowed_bytes + staged.chain(published).map(RankMemory::shadowed_bytes).sum::<u64>()
    }

    /// The trainer's memory, as it was adopted.
    pub(super) fn source(&self, slot: Slot) -> Option<&Arc<Source>> {
        self.places.get(slot.0 as usize)?.source.as_ref()
    }

    /// Unmaps the trainer's memory; the node says when nothing reads it.
    pub(super) fn let_go(&mut self, slot: Slot) {
        let source = self.place(slot).and_then(|place| place.source.take());
        self.shadowed_bytes += source.map_or(0, |source| source.memory().shadowed_bytes());
    }

    /// Staging of a slot, for the engine.
    pub(super) fn staging(&mut self, slot: Slot) -> Option<&mut Staging> {
        self.place(slot)?.staging.as_mut()
    }

    /// Bytes of all staging held.
    pub(super) fn staging_bytes(&self) -> u64 {
        self.places.iter().filter_map(|place| place.staging.as_ref()).map(Staging::bytes).sum()
    }

    /// Bytes of the current round of a slot so far.
    pub(super) fn progress(&self, slot: Slot) -> u64 {
        let Some(place) = self.places.get(slot.0 as usize) else { return 0 };
        let received = place.receiving.as_ref().map_or(0, |(_, _, receivers)| receivers.received());
        let sent: u64 = place.sending.values().map(|(_, senders)| senders.sent()).sum();
        received + sent
    }

    /// What carries the bytes between a slot's rank and a replica; `None` where that may not be NCCL.
    pub(super) fn carrier(&self, slot: Slot, replica: u32) -> Option<Carried> {
        self.lanes.carried(slot.0 as usize, replica)
    }

    /// The replica that a slot receives for.
    pub(super) fn replica_of(&self, slot: Slot) -> Option<u32> {
        self.plan.as_ref()?.replica_of(slot)
    }

    /// What carries the bytes of the replicas that slots receive for, once each.
    pub(super) fn carriers(&self) -> Vec<v1::Carrier> {
        let Some(plan) = &self.plan else { return Vec::new() };
        let received = (0..).map(Slot).take(self.places.len());
        let received = received.filter_map(|slot| Some((plan.replica_of(slot)?, slot)));
        let of_replica = |(index, slot): (u32, Slot)| {
            let replica = plan.topology.replica(index)?;
            let (transport, reason) = match self.carrier(slot, index)? {
                Carried::Nccl => ("nccl", None),
                Carried::Tcp(reason) => ("tcp", Some(reason)),
                Carried::Forming => ("forming", None),
            };
            let (code, reason) = reason.map(|why| (why.code.name().to_owned(), why.text)).unwrap_or_default();
            let pool = plan.membership.pools().get(replica.pool as usize).cloned().unwrap_or_default();
            Some(v1::Carrier {
                pool,
                replica: replica.name.clone(),
                transport: transport.into(),
                code,
                reason,
            })
        };
        received.collect::<BTreeMap<_, _>>().into_iter().filter_map(of_replica).collect()
    }

    /// Streams that the byte server refused so far, by code.
    pub(super) fn refusals(&self) -> BTreeMap<Code, u64> {
        self.server.refusals()
    }

    pub(super) fn open_staging(&mut self, slot: Slot, round: RoundKey) -> Option<Input> {
        let planned = self.plan.clone()?;
        let plan = planned.slots.get(slot.0 as usize)?;
        let Task::Receive(receiving) = &plan.task else {
            return Some(Input::StagingFailed { slot, round, code: Code::Unsupported });
        };
        let executor = self.lanes.executor(slot.0 as usize);
        let place = self.places.get_mut(slot.0 as usize)?;
        let gpu = place.staging_gpu.clone();
        if let Some(staging) = &place.staging {
            let same = |wanted: &Arc<Gpu>| staging.gpu().is_some_and(|gpu| Arc::ptr_eq(gpu, wanted));
            // An executor that is gone may not have ended what it wrote to, and a new one cannot write to a sealed one.
            if staging.executor() == executor && gpu.as_ref().map_or(staging.gpu().is_none(), same) {
                return Some(Input::StagingReady { slot, round });
            }
            // B3: what ran on it was joined before this round began.
            self.shadowed_bytes += staging.memory().shadowed_bytes();
            place.staging = None;
        }
        place.opening = Some(round);
        let (events, layout, placements) =
            (self.events.clone(), plan.layout, Arc::clone(&receiving.placements));
        let (bytes, name) = (receiving.staging_bytes, plan.seat.to_string());
        spawn_blocking(move || {
            let result = Staging::open(&name, layout, placements, bytes, gpu, executor);
            let result = result.map_err(|error| (error.code(), error.to_string()));
            let _ = events.send(DataEvent::Opened { slot, round, result });
        });
        None
    }

    /// `Some` where nothing can be started; staging is there, so only a bug leads to that.
    pub(super) fn start_receive(&mut self, slot: Slot, round: RoundKey) -> Option<Input> {
        let ticket = self.ticket();
        let planned = self.plan.clone()?;
        let timeout = Duration::from_millis(planned.topology.policies.timeouts.transfer_ms);
        let memory = self.staging(slot).map(|staging| staging.memory().clone());
        let resting = Arc::clone(&self.place(slot)?.resting);
        let lane = planned.replica_of(slot).and_then(|replica| self.lanes.of(slot.0 as usize, replica));
        let deadline = Instant::now() + timeout;
        let ways = (lane, resting);
        let job = memory.and_then(|memory| planned.receive_job(slot, round.round, memory, deadline, ways));
        let Some(job) = job else {
            let replica = planned.replica_of(slot)?;
            return Some(unable(slot, round, replica));
        };
        let events = self.events.clone();
        let receivers = receive(job, &self.security, move |result| {
            let _ = events.send(DataEvent::Received { slot, ticket, result });
        });
        self.place(slot)?.receiving = Some((round, ticket, receivers));
        None
    }

    /// Failures to start; senders of the others run.
    pub(super) fn allow_send(&mut self, slot: Slot, round: RoundKey, replicas: &[u32]) -> Vec<Input> {
        let Some(planned) = self.plan.clone() else { return Vec::new() };
        let source = self.source(slot).cloned();
        // Compiled when the membership took effect, in all but the tightest race.
        let programs =
            source.as_ref().map(|source| tokio::task::block_in_place(|| source.programs(&planned, slot)));
        let mut failures = Vec::new();
        for &replica in replicas {
            let job = match (&source, &programs) {
                (Some(source), Some(Ok(programs))) => {
                    let memory = source.memory().clone();
                    let lane = self.lanes.of(slot.0 as usize, replica);
                    planned.send_job(slot, round.round, replica, memory, &programs.sends, lane)
                }
                _ => None,
            };
            let Some(job) = job else {
                failures.push(unable(slot, round, replica));
                continue;
            };
            let ticket = self.ticket();
            let events = self.events.clone();
            let senders = self.server.allow(job, move |event| {
                let _ = events.send(DataEvent::Sent { slot, ticket, event });
            });
            if let Some(place) = self.place(slot) {
                place.sending.insert((round, replica), (ticket, senders));
            }
        }
        failures
    }

    pub(super) fn digest(&mut self, slot: Slot, round: RoundKey) {
        let ticket = self.ticket();
        let Some(planned) = self.plan.clone() else { return };
        let Some(place) = self.places.get_mut(slot.0 as usize) else { return };
        let Some(staging) = &place.staging else { return };
        let (memory, gpu, events) = (staging.memory().clone(), staging.gpu().cloned(), self.events.clone());
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let task = spawn_blocking(move || {
            let program = planned.slots.get(slot.0 as usize).and_then(|slot| match &slot.task {
                Task::Receive(receiving) => receiving.digest.clone(),
                Task::Send(_) => None,
            });
            if let Some(sums) = digest(&planned, program.as_ref(), (&memory, gpu.as_deref()), &stopped) {
                let _ = events.send(DataEvent::Digested { slot, ticket, sums });
            }
        });
        place.digesting = Some(Digesting { round, ticket, task, stop });
    }

    pub(super) fn digest_publication(&self, slot: Slot, step: i64, epoch: Epoch) {
        let Some(planned) = self.plan.clone() else { return };
        let Some(source) = self.source(slot).cloned() else { return };
        let events = self.events.clone();
        spawn_blocking(move || {
            let program = source.programs(&planned, slot).map(|programs| programs.digest.clone());
            let sums = program.map(|program| {
                let lies = (source.memory(), source.gpu().map(Arc::as_ref));
                digest(&planned, program.as_ref(), lies, &AtomicBool::new(false))
            });
            // A registration that does not fit the plan has no sums, which no ledger takes.
            let sums = sums.ok().flatten().unwrap_or_default();
            let _ = events.send(DataEvent::PublicationDigested { slot, step, epoch, sums });
        });
    }

    pub(super) fn join_receivers(&mut self, slot: Slot, round: RoundKey) {
        let events = self.events.clone();
        let Some(place) = self.place(slot) else { return };
        place.opening = None; // B1
        let receiving = place.receiving.take();
        let digesting = place.digesting.take();
        tokio::spawn(async move {
            if let Some((_, _, receivers)) = receiving {
                receivers.stop();
                let joined = spawn_blocking(move || receivers.join()).await;
                debug_assert!(joined.is_ok());
            }
            if let Some(Digesting { task, stop, .. }) = digesting {
                stop.store(true, Ordering::Relaxed);
                let _ = task.await; // B2; its event is dropped
            }
            let _ = events.send(DataEvent::ReceiversJoined { slot, round });
        });
    }

    pub(super) fn join_senders(&mut self, slot: Slot, round: RoundKey, replica: u32) {
        let events = self.events.clone();
        let Some(place) = self.place(slot) else { return };
        let sending = place.sending.remove(&(round, replica));
        tokio::spawn(async move {
            if let Some((_, senders)) = sending {
                senders.stop();
                let joined = spawn_blocking(move || senders.join()).await;
                debug_assert!(joined.is_ok());
            }
            let _ = events.send(DataEvent::SendersJoined { slot, round, replica });
        });
    }

    /// What an event means for the node.
    pub(super) fn handle(&mut self, event: DataEvent) -> Option<Input> {
        match event {
            DataEvent::Opened { slot, round, result } => {
                let place = self.place(slot)?;
                let wanted = place.opening.take_if(|opening| *opening == round).is_some();
                match result {
                    Ok(staging) => {
                        place.staging = Some(staging);
                        wanted.then_some(Input::StagingReady { slot, round })
                    }
                    Err((code, message)) => {
                        tracing::error!(%slot, code = %code, error = message, "no staging");
                        wanted.then_some(Input::StagingFailed { slot, round, code })
                    }
                }
            }
            DataEvent::Received { slot, ticket, result } => self.received(slot, ticket, result),
            DataEvent::Sent { slot, ticket, event } => self.sent(slot, ticket, event),
            DataEvent::Digested { slot, ticket, sums } => {
                let place = self.place(slot)?;
                let done = place.digesting.take_if(|digesting| digesting.ticket == ticket)?;
                Some(Input::Digested { slot, round: done.round, sums })
            }
            DataEvent::PublicationDigested { slot, step, epoch, sums } => {
                Some(Input::PublicationDigested { slot, step, epoch, sums })
            }
            DataEvent::ReceiversJoined { slot, round } => Some(Input::ReceiversJoined { slot, round }),
            DataEvent::SendersJoined { slot, round, replica } => {
                Some(Input::SendersJoined { slot, round, replica })
            }
        }
    }

    fn received(&mut self, slot: Slot, ticket: Ticket, result: Result<u64, TransferError>) -> Option<Input> {
        let planned = self.plan.clone()?;
        let place = self.place(slot)?;
        let &(round, current, _) = place.receiving.as_ref()?;
        if current != ticket {
            return None; // B1
        }
        match result {
            Ok(bytes) => {
                // Its threads are over by its own word; dropping the handle waits for nothing.
                place.receiving = None;
                Some(Input::Received { slot, round, bytes, skipped: 0 })
            }
            Err(error) => {
                tracing::warn!(%slot, code = %error.code(), error = %error, "receive failed");
                let replica = planned.replica_of(slot)?;
                Some(failed(slot, round, replica, &error))
            }
        }
    }

    fn sent(&mut self, slot: Slot, ticket: Ticket, event: SendEvent) -> Option<Input> {
        let place = self.place(slot)?;
        let found = place.sending.iter().find(|(_, (current, _))| *current == ticket);
        let (&(round, replica), _) = found?; // B1
        match event {
            SendEvent::Sent { bytes, .. } => {
                place.sending.remove(&(round, replica));
                Some(Input::Sent { slot, round, replica, bytes })
            }
            SendEvent::Failed { error, .. } => {
                tracing::warn!(%slot, replica, code = %error.code(), error = %error, "send failed");
                Some(failed(slot, round, replica, &error))
            }
        }
    }

    fn place(&mut self, slot: Slot) -> Option<&mut Place> {
        self.places.get_mut(slot.0 as usize)
    }

    fn ticket(&mut self) -> Ticket {
        self.next_ticket += 1;
        Ticket(self.next_ticket)
    }
}

/// Plan and memory do not fit each other, which registration and planning have ruled out.
fn unable(slot: Slot, round: RoundKey, replica: u32) -> Input {
    tracing::error!(%slot, replica, "plan and memory do not fit");
    Input::TransferFailed { slot, round, replica, code: Code::PlanMismatch, peer: None }
}

/// No sums with verification disabled; `None` when stopped. What lies on a GPU is digested there.
fn digest(
    planned: &Planned,
    program: Option<&Arc<DigestProgram>>,
    (memory, gpu): (&RankMemory, Option<&Gpu>),
    stop: &AtomicBool,
) -> Option<ClassSums> {
    let (Some(program), Some(keys)) = (program, &planned.keys) else { return Some(ClassSums::default()) };
    if let Some(gpu) = gpu {
        let digested = gpu.digest(program, memory, &|| stop.load(Ordering::Relaxed));
        // Without a digest there are no sums, which no ledger takes.
        return digested.unwrap_or_else(|error| {
            tracing::error!(code = %error.code(), error = %error, "no digest on the device");
            Some(ClassSums::default())
        });
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    program.run(memory.on_host()?, keys, threads.min(limits::DIGEST_THREADS_MAX), stop)
}

fn failed(slot: Slot, round: RoundKey, replica: u32, error: &TransferError) -> Input {
    let (code, peer): (Code, Option<MemberId>) = (error.code(), error.peer());
    Input::TransferFailed { slot, round, replica, code, peer }
}
