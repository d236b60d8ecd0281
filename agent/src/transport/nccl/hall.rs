//! Where the members of the lanes whose first rank this agent hosts meet: serves their connections, and does what
//! [`Root`] decides.

use super::connection::{Connection, Outbox};
use super::fabric::Fabric;
use super::lane::{FromMember, FromRoot, LanePlan, Order, Root};
use super::turnstile::{Turn, Turnstile};
use crate::limits::{RETRY_WAIT_MAX, RETRY_WAIT_MIN};
use crate::transport::tcp::{Dialer, Link, Peers, Purpose, StreamHeader};
use std::collections::BTreeMap;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weightrefit_core::code::Code;
use weightrefit_core::id::{MemberId, Sha256};

/// All lanes that begin here.
pub(crate) struct Hall {
    fabric: Arc<Fabric>,
    turnstile: Turnstile,
    lanes: Mutex<BTreeMap<Sha256, Arc<Lane>>>,
}

impl std::fmt::Debug for Hall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hall").finish_non_exhaustive()
    }
}

struct Lane {
    state: Mutex<State>,
    fabric: Arc<Fabric>,
}

struct State {
    root: Root,
    plan: LanePlan,
    /// Of the first rank, in this agent.
    slot: usize,
    peers: Arc<Peers>,
    members: BTreeMap<u32, (u64, Arc<Outbox<FromRoot>>)>,
    next: u64,
    /// The connection that holds or waits for the turn; shutting it gives it back.
    turn: Option<(u64, Option<Arc<TcpStream>>)>,
}

impl Hall {
    pub(super) fn new(fabric: Arc<Fabric>) -> Arc<Self> {
        Arc::new(Self { fabric, turnstile: Turnstile::default(), lanes: Mutex::default() })
    }

    /// The lanes whose first rank is hosted here. Others are forgotten, with their connections' outboxes; those that
    /// stay keep theirs.
    pub(super) fn configure(&self, wanted: &[(usize, LanePlan)], peers: &Arc<Peers>) {
        let mut lanes = self.lock();
        lanes.retain(|key, _| wanted.iter().any(|(_, plan)| plan.key == *key));
        for (slot, plan) in wanted {
            match lanes.get(&plan.key) {
                Some(lane) => {
                    let mut state = lane.lock();
                    (state.plan, state.slot, state.peers) = (plan.clone(), *slot, Arc::clone(peers));
                }
                None => {
                    let root = Root::new(u32::try_from(plan.members.len()).unwrap_or(u32::MAX));
                    let (plan_of, peers, members) = (plan.clone(), Arc::clone(peers), BTreeMap::new());
                    let slot = *slot;
                    let state = State { root, plan: plan_of, slot, peers, members, next: 0, turn: None };
                    let fabric = Arc::clone(&self.fabric);
                    lanes.insert(plan.key, Arc::new(Lane { state: Mutex::new(state), fabric }));
                }
            }
        }
    }

    /// Whether a connection with this header may stay; its identity is checked already.
    pub(crate) fn admit(&self, header: &StreamHeader) -> Result<(), Code> {
        match header.purpose {
            Purpose::Turn { .. } => Ok(()),
            _ => self.find(header).map(drop),
        }
    }

    fn find(&self, header: &StreamHeader) -> Result<(Arc<Lane>, u32), Code> {
        let lane = self.lock().get(&header.pair).cloned().ok_or(Code::StaleEpoch)?;
        let rank = lane.lock().plan.rank(header.destination).ok_or(Code::StaleEpoch)?;
        Ok((lane, rank))
    }

    /// Serves an admitted connection until it ends.
    pub(crate) fn serve(&self, link: Link, header: &StreamHeader) {
        let ended = match header.purpose {
            Purpose::Turn { lane } => self.turnstile.serve(link, lane),
            _ => match self.find(header) {
                Ok((lane, rank)) => lane.serve(link, rank),
                Err(_) => return,
            },
        };
        if let Err(error) = ended {
            tracing::debug!(member = header.destination.0, error = %error, "a connection of a lane ended");
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Sha256, Arc<Lane>>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lane {
    fn serve(self: &Arc<Self>, link: Link, rank: u32) -> std::io::Result<()> {
        let outbox = Outbox::new()?;
        let mut connection = Connection::new(link, Arc::clone(&outbox))?;
        let own = {
            let mut state = self.lock();
            let own = state.next;
            state.next += 1;
            // An older connection of this rank is not spoken to any more, and ends by its silence.
            state.members.insert(rank, (own, outbox));
            own
        };
        let ended = loop {
            match connection.turn::<FromMember>() {
                Ok(heard) => heard.into_iter().for_each(|message| self.hear(rank, message)),
                Err(error) => break error,
            }
        };
        let mut state = self.lock();
        if state.members.get(&rank).is_some_and(|(id, _)| *id == own) {
            state.members.remove(&rank);
            let orders = state.root.gone(rank);
            self.perform(&mut state, orders);
        }
        Err(ended)
    }

    fn hear(self: &Arc<Self>, rank: u32, message: FromMember) {
        let mut state = self.lock();
        let orders = match message {
            FromMember::Hello(facts) => state.root.hello(rank, facts),
            FromMember::Formed { attempt } => state.root.formed(rank, attempt),
            FromMember::Failed { attempt, reason } => {
                let replica = state.plan.replica;
                tracing::warn!(replica, rank, attempt, code = %reason.code, error = %reason, "a rank of a lane failed");
                state.root.failed(attempt, reason)
            }
        };
        self.perform(&mut state, orders);
    }

    fn perform(self: &Arc<Self>, state: &mut State, orders: Vec<Order>) {
        for order in orders {
            match order {
                Order::Tell(rank, message) => {
                    if let Some((_, outbox)) = state.members.get(&rank) {
                        outbox.say(message);
                    }
                }
                Order::TakeTurn => self.take_turn(state),
                Order::GiveTurn => {
                    if let Some((_, Some(socket))) = state.turn.take() {
                        // A socket that its peer has reset is shut already.
                        let _ = socket.shutdown(Shutdown::Both);
                    }
                }
                Order::Mint => self.mint(state),
            }
        }
    }

    /// Off this thread, which others wait for: the rank's process may have to be asked.
    fn mint(self: &Arc<Self>, state: &State) {
        let (slot, turn) = (state.slot, state.turn.as_ref().map(|(own, _)| *own));
        let lane = Arc::clone(self);
        let spawned = std::thread::Builder::new().name("lane-mint".into()).spawn(move || {
            let minted = lane.fabric.mint(slot);
            let mut state = lane.lock();
            // Its turn may be over, and with it all that an id would be for.
            if state.turn.as_ref().map(|(own, _)| *own) == turn {
                let orders = state.root.minted(minted);
                lane.perform(&mut state, orders);
            }
        });
        if let Err(error) = spawned {
            tracing::error!(error = %error, "no thread to mint an id of a lane");
        }
    }

    fn take_turn(self: &Arc<Self>, state: &mut State) {
        let own = state.next;
        state.next += 1;
        state.turn = Some((own, None));
        let (leader, addresses) = state.plan.leader.clone();
        // The first rank dials in its own name.
        let Some(&member) = state.plan.members.first() else { return };
        let dialer = self.fabric.dialer(&state.peers);
        let header = (member, leader, state.plan.key, Purpose::Turn { lane: state.plan.replica });
        let lane = Arc::clone(self);
        let spawned = std::thread::Builder::new()
            .name("lane-turn".into())
            .spawn(move || lane.hold_turn(own, &dialer, header, &addresses));
        if let Err(error) = spawned {
            tracing::error!(error = %error, "no thread for the turn of a lane");
        }
    }

    /// Asks until the leader answers, for as long as the turn is wanted.
    fn hold_turn(
        self: &Arc<Self>,
        own: u64,
        dialer: &Dialer,
        (member, leader, key, purpose): (MemberId, MemberId, Sha256, Purpose),
        addresses: &[std::net::SocketAddr],
    ) {
        let mut wait = RETRY_WAIT_MIN;
        while self.wants(own, None) {
            if let Ok(Ok(link)) = dialer.ask(member, leader, key, purpose, addresses) {
                let socket = Arc::clone(link.socket());
                if !self.wants(own, Some(&socket)) {
                    return;
                }
                let outbox = Outbox::<Turn>::new();
                let connection = outbox.and_then(|outbox| Connection::new(link, outbox));
                if let Ok(mut connection) = connection {
                    while let Ok(heard) = connection.turn::<Turn>() {
                        if !heard.is_empty() {
                            let mut state = self.lock();
                            if state.turn.as_ref().is_some_and(|(id, _)| *id == own) {
                                let orders = state.root.turn();
                                self.perform(&mut state, orders);
                            }
                        }
                    }
                }
            }
            std::thread::sleep(wait);
            wait = (wait * 2).min(RETRY_WAIT_MAX);
        }
    }

    /// Whether the turn is still wanted by this call; notes its socket.
    fn wants(&self, own: u64, socket: Option<&Arc<TcpStream>>) -> bool {
        let mut state = self.lock();
        match &mut state.turn {
            Some((id, held)) if *id == own => {
                if let Some(socket) = socket {
                    *held = Some(Arc::clone(socket));
                }
                true
            }
            _ => false,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
