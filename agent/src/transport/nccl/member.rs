//! A rank's place in a lane: says hello to the lane's first rank, forms what that one orders, and lends the
//! communicator to rounds.

use super::communicator::Join;
use super::connection::{Connection, Outbox};
use super::fabric::Fabric;
use super::flow::Job;
use super::gpu::Gpu;
use super::hall::Hall;
use super::lane::{Facts, FromMember, FromRoot, LanePlan, Reason, id_of};
use super::preflight::Settings;
use super::remote::Remote;
use super::worker::Worker;
use crate::limits;
use crate::session::{ClientId, Outbox as ClientOutbox};
use crate::transport::tcp::{Dialer, Peers, Purpose, Security};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use weightrefit_core::code::Code;
use weightrefit_core::id::{MemberId, Sha256};
use weightrefit_proto::socket::executor::{Device, Said};

/// Where a lane is, as its members see it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// Nothing is decided.
    Waiting,
    /// Bytes go by TCP.
    Tcp(Reason),
    /// All ranks of this attempt have found each other.
    Ready(u32),
}

/// How bytes of a round go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Choice {
    /// By the lane's attempt.
    Nccl(u32),
    /// By TCP, and why.
    Tcp(Reason),
}

/// What carries a replica's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Carried {
    /// Its lane.
    Nccl,
    /// TCP, and why.
    Tcp(Reason),
    /// It is not decided.
    Forming,
}

/// One rank of a lane.
#[derive(Debug)]
pub struct LaneMember {
    key: Sha256,
    shared: Arc<Shared>,
}

/// What the present membership says of a lane: its members' numbers change with every epoch.
#[derive(Debug, Clone)]
struct View {
    dialer: Dialer,
    plan: LanePlan,
    member: MemberId,
    /// Whether bytes may go no other way.
    is_required: bool,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    view: Mutex<View>,
    outbox: Arc<Outbox<FromMember>>,
    worker: Mutex<Option<Box<dyn Worker>>>,
    ended: AtomicBool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn view(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// None before the rank is prepared, or where it cannot take part.
    fn worker(&self) -> MutexGuard<'_, Option<Box<dyn Worker>>> {
        self.worker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn turn_to(&self, state: State) {
        let before = std::mem::replace(&mut *self.lock(), state.clone());
        self.changed.notify_all();
        if let State::Tcp(reason) = &state
            && before != state
        {
            let replica = self.view().plan.replica;
            tracing::info!(replica, code = %reason.code, reason = %reason, "bytes go by TCP");
        }
    }

    /// Ends whatever the worker does, then calls.
    fn abort(&self, attempt: u32, reason: Option<Reason>, done: impl FnOnce() + Send + 'static) {
        match &*self.worker() {
            Some(worker) => worker.abort(attempt, reason, Box::new(done)),
            None => done(),
        }
    }
}

impl LaneMember {
    fn start(fabric: &Arc<Fabric>, view: View, slot: usize) -> std::io::Result<Self> {
        let key = view.plan.key;
        let ranks = view.plan.rank(view.member).zip(u32::try_from(view.plan.members.len()).ok());
        let name = format!("lane-{}-{}", view.plan.replica, view.member);
        let shared = Arc::new(Shared {
            state: Mutex::new(State::Waiting),
            changed: Condvar::new(),
            view: Mutex::new(view),
            outbox: Outbox::new()?,
            worker: Mutex::default(),
            ended: AtomicBool::new(false),
        });
        if let Some((rank, ranks)) = ranks {
            let (fabric, shared) = (Arc::clone(fabric), Arc::clone(&shared));
            let runner = Runner { fabric, shared, slot, rank, ranks };
            std::thread::Builder::new().name(name).spawn(move || runner.run())?;
        }
        Ok(Self { key, shared })
    }

    /// The rank in the lane of a member of the present membership.
    pub(crate) fn rank_of(&self, member: MemberId) -> Option<u32> {
        self.shared.view().plan.rank(member)
    }

    /// Whether a round without this lane must fail.
    pub(crate) fn is_required(&self) -> bool {
        self.shared.view().is_required
    }

    /// How a round that begins now moves its bytes; waits while that is not decided.
    pub(crate) fn choose(&self, stopped: impl Fn() -> bool, deadline: Instant) -> Choice {
        let until = deadline.min(Instant::now() + limits::LANE_WAIT_MAX);
        let mut state = self.shared.lock();
        loop {
            match &*state {
                State::Ready(attempt) => return Choice::Nccl(*attempt),
                State::Tcp(reason) => return Choice::Tcp(reason.clone()),
                State::Waiting if stopped() || Instant::now() >= until => {
                    let text = "the lane has not formed in time".to_owned();
                    return Choice::Tcp(Reason::new(Code::TransportUnavailable, text));
                }
                State::Waiting => {
                    let look = Duration::from_millis(20);
                    let wait = self.shared.changed.wait_timeout(state, look);
                    state = wait.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }

    /// Whether this attempt may carry a round.
    pub(crate) fn is_at(&self, attempt: u32) -> bool {
        *self.shared.lock() == State::Ready(attempt)
    }

    /// Moves a round's bytes; `done` is called once, when nothing of it runs any more.
    pub(crate) fn fly(
        &self,
        attempt: u32,
        job: Job,
        stopped: impl Fn() -> bool + Send + 'static,
        done: impl FnOnce(Result<u64, super::FlowError>) + Send + 'static,
    ) {
        let shared = Arc::clone(&self.shared);
        let ended = Arc::clone(&self.shared);
        let done = move |result: Result<u64, super::FlowError>| {
            if let Err(error) = &result {
                // The communicator is gone; the others must hear of it.
                let mut state = ended.lock();
                if *state == State::Ready(attempt) {
                    *state = State::Waiting;
                }
                drop(state);
                let reason = Reason::new(error.code(), error.to_string());
                ended.outbox.say(FromMember::Failed { attempt, reason });
            }
            done(result);
        };
        match &*shared.worker() {
            Some(worker) => worker.run(attempt, job, Box::new(stopped), Box::new(done)),
            None => done(Err(super::FlowError::Gone)),
        }
    }

    /// What carries its bytes now.
    fn carried(&self) -> Carried {
        match &*self.shared.lock() {
            State::Waiting => Carried::Forming,
            State::Tcp(reason) => Carried::Tcp(reason.clone()),
            State::Ready(_) => Carried::Nccl,
        }
    }
}

impl Drop for LaneMember {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        self.shared.outbox.wake();
    }
}

/// The thread of a [`LaneMember`].
struct Runner {
    fabric: Arc<Fabric>,
    shared: Arc<Shared>,
    slot: usize,
    rank: u32,
    ranks: u32,
}

impl Runner {
    fn run(self) {
        let mut prepared = (self.fabric.changes(self.slot), self.prepare());
        let mut wait = limits::RETRY_WAIT_MIN;
        while !self.is_ended() {
            let View { dialer, plan, member, .. } = self.shared.view().clone();
            let Some(root) = plan.members.first().copied() else { return };
            if let Ok(Ok(link)) = dialer.ask(member, root, plan.key, Purpose::Lane, &plan.root) {
                wait = limits::RETRY_WAIT_MIN;
                self.shared.outbox.clear();
                let ended = Connection::new(link, Arc::clone(&self.shared.outbox))
                    .and_then(|connection| self.converse(connection, &mut prepared));
                if let Err(error) = ended {
                    tracing::debug!(replica = plan.replica, rank = self.rank, error = %error, "lane lost");
                }
                self.abort_and_wait();
            }
            std::thread::sleep(wait);
            wait = (wait * 2).min(limits::RETRY_WAIT_MAX);
        }
        self.abort_and_wait();
    }

    fn is_ended(&self) -> bool {
        self.shared.ended.load(Ordering::Relaxed)
    }

    /// What this rank brings, with a worker to back it.
    fn prepare(&self) -> Result<Facts, Reason> {
        let View { plan, member, .. } = self.shared.view().clone();
        let name = format!("nccl-{}-{member}", plan.replica);
        let prepared = self.fabric.rank(self.slot, &plan, name);
        let (worker, prepared) = match prepared {
            Ok((worker, facts)) => (Some(worker), Ok(facts)),
            Err(reason) => (None, Err(reason)),
        };
        // The one before goes without the lock, which its end may want.
        let before = std::mem::replace(&mut *self.shared.worker(), worker);
        drop(before);
        self.shared.turn_to(match &prepared {
            Ok(_) => State::Waiting,
            // Nobody has to tell this rank that it cannot.
            Err(reason) => State::Tcp(reason.clone()),
        });
        prepared
    }

    fn converse(
        &self,
        mut connection: Connection<FromMember>,
        (changes, facts): &mut (u64, Result<Facts, Reason>),
    ) -> std::io::Result<()> {
        let mut is_new = true;
        while !self.is_ended() {
            let now = self.fabric.changes(self.slot);
            if now != *changes {
                // An attempt of the executor before, or of the device in its place, is over.
                self.abort_and_wait();
                (*changes, *facts) = (now, self.prepare());
                is_new = true;
            }
            if std::mem::take(&mut is_new) {
                self.shared.outbox.say(FromMember::Hello(facts.clone()));
            }
            for message in connection.turn::<FromRoot>()? {
                self.obey(message, facts);
            }
        }
        Ok(())
    }

    fn obey(&self, message: FromRoot, facts: &Result<Facts, Reason>) {
        let LanePlan { replica, degree, .. } = self.shared.view().plan.clone();
        match message {
            FromRoot::Tcp(reason) => self.shared.turn_to(State::Tcp(reason)),
            FromRoot::Undecided => self.shared.turn_to(State::Waiting),
            FromRoot::Form { attempt, id, chunk_bytes } => {
                let outbox = Arc::clone(&self.shared.outbox);
                let done = move |result: Result<(), super::FlowError>| match result {
                    Ok(()) => outbox.say(FromMember::Formed { attempt }),
                    Err(error) => {
                        let reason = Reason::new(error.code(), error.to_string());
                        outbox.say(FromMember::Failed { attempt, reason });
                    }
                };
                let Some(id) = id_of(&id) else {
                    return done(Err(super::FlowError::Gone));
                };
                let (rank, ranks, ctas_max) = (self.rank, self.ranks, limits::LANE_CTAS_MAX);
                let join = Join { id, rank, ranks, degree, ctas_max };
                match &*self.shared.worker() {
                    Some(worker) => worker.form(attempt, join, chunk_bytes, Box::new(done)),
                    None => done(Err(super::FlowError::Gone)),
                }
            }
            FromRoot::Ready { attempt } => {
                tracing::info!(replica, attempt, ranks = self.ranks, "lane formed");
                self.shared.turn_to(State::Ready(attempt));
            }
            FromRoot::Abort { attempt, reason } => {
                tracing::info!(replica, attempt, "lane torn down");
                self.shared.turn_to(State::Waiting);
                let (outbox, facts) = (Arc::clone(&self.shared.outbox), facts.clone());
                self.shared.abort(attempt, reason, move || outbox.say(FromMember::Hello(facts)));
            }
        }
    }

    /// No first rank, no lane.
    fn abort_and_wait(&self) {
        let mut state = self.shared.lock();
        if matches!(*state, State::Ready(_)) {
            *state = State::Waiting;
        }
        drop(state);
        let (done, wait) = std::sync::mpsc::channel();
        // A new connection counts attempts on, or from the beginning where the first rank has begun anew: what
        // ends here is whatever the worker has.
        let send = move || {
            let _ = done.send(());
        };
        match &*self.shared.worker() {
            Some(worker) => worker.abort_current(Box::new(send)),
            None => send(),
        }
        let _ = wait.recv_timeout(2 * limits::ABORT_MAX);
    }
}

/// All lanes that ranks of this agent are in.
pub struct Lanes {
    fabric: Arc<Fabric>,
    hall: Arc<Hall>,
    /// By slot and replica.
    members: Mutex<BTreeMap<(usize, u32), Arc<LaneMember>>>,
}

impl Lanes {
    pub(crate) fn new(settings: Settings, security: Security, slots: usize) -> Self {
        let fabric = Arc::new(Fabric::new(settings, security, slots));
        Self { hall: Hall::new(Arc::clone(&fabric)), fabric, members: Mutex::default() }
    }

    /// For the byte port.
    pub(crate) fn hall(&self) -> Arc<Hall> {
        Arc::clone(&self.hall)
    }

    /// The lanes of a membership; `slots` are this agent's ranks. Those that stay the same stay formed.
    pub(crate) fn configure(
        &self,
        plans: &[LanePlan],
        peers: &Arc<Peers>,
        slots: &[MemberId],
        is_required: bool,
    ) {
        let rooted = |plan: &LanePlan| {
            let root = plan.members.first()?;
            Some((slots.iter().position(|slot| slot == root)?, plan.clone()))
        };
        let here: Vec<(usize, LanePlan)> = plans.iter().filter_map(rooted).collect();
        self.hall.configure(&here, peers);
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        let mut before = std::mem::take(&mut *members);
        for plan in plans {
            for (slot, member) in slots.iter().enumerate().filter(|(_, member)| plan.members.contains(member))
            {
                let kept = before.iter().find(|((at, _), lane)| *at == slot && lane.key == plan.key);
                let kept = kept.map(|(at, _)| *at).and_then(|at| before.remove(&at));
                let (dialer, plan_of, member) = (self.fabric.dialer(peers), plan.clone(), *member);
                let view = View { dialer, plan: plan_of, member, is_required };
                let lane = match kept {
                    Some(lane) => {
                        *lane.shared.view() = view;
                        lane
                    }
                    None => match LaneMember::start(&self.fabric, view, slot) {
                        Ok(lane) => Arc::new(lane),
                        Err(error) => {
                            tracing::error!(replica = plan.replica, error = %error, "no thread for a lane");
                            continue;
                        }
                    },
                };
                members.insert((slot, plan.replica), lane);
            }
        }
    }

    /// An executor in the process of a slot's rank has come.
    pub(crate) fn executor_found(&self, slot: usize, client: ClientId, device: Device, outbox: ClientOutbox) {
        self.fabric.executor_found(slot, Remote::new(client, device, outbox));
        self.look_again(slot);
    }

    /// What it says.
    pub(crate) fn executor_said(&self, slot: usize, client: ClientId, said: Said) {
        if self.fabric.executor_said(slot, client, said) {
            self.look_again(slot);
        }
    }

    /// It is gone.
    pub(crate) fn executor_gone(&self, slot: usize, client: ClientId) {
        self.fabric.executor_gone(slot, client);
        self.look_again(slot);
    }

    /// The executor in the process of a slot's rank, if there is one.
    pub(crate) fn executor(&self, slot: usize) -> Option<ClientId> {
        Some(self.fabric.executor(slot)?.client)
    }

    /// Makes the lanes of a slot look at the executor that there is now.
    fn look_again(&self, slot: usize) {
        let members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        members.iter().filter(|((at, _), _)| *at == slot).for_each(|(_, lane)| lane.shared.outbox.wake());
    }

    /// The lane of a rank and a replica, where there is one.
    pub(crate) fn of(&self, slot: usize, replica: u32) -> Option<Arc<LaneMember>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner).get(&(slot, replica)).cloned()
    }

    /// The GPU of a rank, which its client calls `uuid`; opens the driver where nothing has.
    pub(crate) fn gpu_called(&self, slot: usize, uuid: &str) -> Result<Arc<Gpu>, Reason> {
        let gpu = self.fabric.gpu(slot)?;
        let own = &gpu.context().device().uuid;
        if own == uuid {
            return Ok(gpu);
        }
        let text = format!("the client's memory is on {uuid}, the GPU of rank {slot} of this agent is {own}");
        Err(Reason::new(Code::GpuNotVisible, text))
    }

    /// What carries the bytes between a rank and a replica; `None` where that may not be NCCL.
    pub(crate) fn carried(&self, slot: usize, replica: u32) -> Option<Carried> {
        Some(self.of(slot, replica)?.carried())
    }
}

impl Drop for Lanes {
    /// What waits for executors is over, and their sockets close.
    fn drop(&mut self) {
        self.fabric.end_executors();
    }
}
