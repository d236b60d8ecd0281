//! Which connection speaks for which slot.
//!
//! Invariants:
//! - L1: a slot has at most one current client; a new connection of the same process takes its place, one of
//!   another process is refused while the first lives.
//! - L2: what a connection says reaches the node only while it is current and registered, and nothing of a
//!   later one before the end of the earlier (D3 of the node).
//! - L3: an engine's end is told after its socket is closed; a trainer's socket closes after its memory is let
//!   go (EOF promise).

use crate::limits;
use crate::session::{ClientEvent, ClientId, Events, Outbox, Registration, Stuck};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::Instant;
use weightrefit_core::code::Code;
use weightrefit_core::id::Incarnation;
use weightrefit_core::membership::Seat;
use weightrefit_core::round::io::Slot;
use weightrefit_core::round::message::EngineRecord;
use weightrefit_proto::socket::executor::{Device, Said, TABLES};
use weightrefit_proto::socket::{AgentFrame, ClientFrame, Role};

/// What the round driver has to know or do.
#[derive(Debug)]
pub(super) enum News {
    /// The current client of the slot has registered; nothing of it is checked yet.
    Registered { slot: Slot, registration: Registration },
    /// The current, admitted client of the slot said this.
    Said { slot: Slot, frame: ClientFrame },
    /// An engine's socket is closed.
    EngineGone { slot: Slot, instance: Incarnation },
    /// A trainer says nothing more; its socket waits for [`Clients::let_go`].
    TrainerGone { slot: Slot, instance: Incarnation },
    /// An engine said hello with this record; it is not admitted yet.
    Hello { record: EngineRecord },
    /// A driver asks.
    Asked { client: ClientId, frame: ClientFrame },
    /// A driver is gone.
    DriverGone { client: ClientId },
    /// A client was refused with this code.
    Refused { code: Code },
    /// An executor in the process of the slot's rank.
    ExecutorFound { slot: Slot, client: ClientId, device: Device, outbox: Outbox },
    /// What it says.
    ExecutorSaid { slot: Slot, client: ClientId, said: Said },
    /// It is gone.
    ExecutorGone { slot: Slot, client: ClientId },
}

/// Who a rank's client is.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Who {
    /// A trainer rank.
    Trainer,
    /// An engine rank, with the record of its hello.
    Engine(EngineRecord),
    /// An executor of a rank, which is no client of its slot: it comes and goes beside it.
    Executor,
}

#[derive(Debug)]
struct Client {
    slot: Option<Slot>,
    instance: Incarnation,
    who: Option<Who>,
    /// Dropped when the socket may close.
    outbox: Option<Outbox>,
    /// Pages came before the connection was current.
    early: Option<Registration>,
    /// The driver has taken its registration.
    admitted: bool,
    gone: bool,
}

#[derive(Debug, Default)]
struct Place {
    current: Option<ClientId>,
    /// Wants to be: since when.
    next: Option<(ClientId, Instant)>,
    executor: Option<ClientId>,
}

/// All connections of the agent socket.
#[derive(Debug)]
pub(super) struct Clients {
    seats: Vec<Seat>,
    places: Vec<Place>,
    clients: BTreeMap<ClientId, Client>,
}

impl Clients {
    pub(super) fn new(seats: Vec<Seat>) -> Self {
        let places = seats.iter().map(|_| Place::default()).collect();
        Self { seats, places, clients: BTreeMap::new() }
    }

    /// Takes what a connection says.
    pub(super) fn handle(&mut self, now: Instant, event: ClientEvent) -> Vec<News> {
        match event {
            ClientEvent::Joined { client, instance, role, outbox } => {
                self.joined(now, client, instance, role, outbox)
            }
            ClientEvent::Registered { client, registration } => self.registered(client, registration),
            ClientEvent::Frame { client, frame } => self.said(client, frame),
            ClientEvent::Gone { client, refused } => self.gone(client, refused),
            ClientEvent::Closed { client } => self.closed(client),
        }
    }

    /// Refuses contenders whose predecessor turned out to live.
    pub(super) fn refuse_duplicates(&mut self, now: Instant) -> Vec<News> {
        let mut news = Vec::new();
        for at in 0..self.places.len() {
            let Some((next, since)) = self.places[at].next else { continue };
            let same = self.places[at].current.map(|current| self.clients[&current].instance)
                == Some(self.clients[&next].instance);
            if !same && now.duration_since(since) > limits::DUPLICATE_GRACE {
                self.places[at].next = None;
                news.push(self.refuse_duplicate(next, at));
            }
        }
        news
    }

    /// The current client of a slot, while it speaks.
    fn current(&self, slot: Slot) -> Option<(ClientId, &Client)> {
        let id = self.places.get(slot.0 as usize)?.current?;
        let client = self.clients.get(&id)?;
        (!client.gone).then_some((id, client))
    }

    /// Who the current client of the slot is.
    pub(super) fn who(&self, slot: Slot) -> Option<(Incarnation, &Who)> {
        let (_, client) = self.current(slot)?;
        Some((client.instance, client.who.as_ref()?))
    }

    /// Whether the slot's client has registered and was admitted.
    pub(super) fn is_admitted(&self, slot: Slot) -> bool {
        self.current(slot).is_some_and(|(_, client)| client.admitted)
    }

    /// The registration was taken; from now on the client is heard.
    pub(super) fn admit(&mut self, slot: Slot) {
        if let Some(id) = self.current(slot).map(|(id, _)| id)
            && let Some(client) = self.clients.get_mut(&id)
        {
            client.admitted = true;
        }
        self.tell(slot, AgentFrame::Registered {}, Vec::new());
    }

    /// Sends to the slot's client; one that does not read is ended. Without a client nothing happens.
    pub(super) fn tell(&self, slot: Slot, frame: AgentFrame, fds: Vec<OwnedFd>) {
        if let Some((_, client)) = self.current(slot) {
            send(client, frame, fds);
        }
    }

    /// Sends to a driver.
    pub(super) fn answer(&self, client: ClientId, frame: AgentFrame) {
        if let Some(client) = self.clients.get(&client) {
            send(client, frame, Vec::new());
        }
    }

    /// From now on the driver is sent these events.
    pub(super) fn follow(&self, client: ClientId, events: Events) {
        if let Some(client) = self.clients.get(&client) {
            queue(client, |outbox| outbox.follow(events));
        }
    }

    /// Refuses the slot's client and ends it.
    pub(super) fn refuse(&self, slot: Slot, code: Code, message: String) {
        if let Some((_, client)) = self.current(slot) {
            refuse(client, code, message, code.remedy());
        }
    }

    /// Nothing of the slot's former client is mapped or read any more: its socket closes.
    pub(super) fn let_go(&mut self, slot: Slot) {
        let Some(id) = self.places.get(slot.0 as usize).and_then(|place| place.current) else { return };
        if let Some(client) = self.clients.get_mut(&id)
            && client.gone
        {
            client.outbox = None;
        }
    }

    /// Ends every connection; their sockets close at once, so nothing of them may be mapped any more.
    pub(super) fn end_all(&mut self) {
        for client in self.clients.values_mut() {
            end(client);
            client.outbox = None;
        }
    }

    /// No connection is left.
    pub(super) fn is_empty(&self) -> bool {
        self.clients.is_empty()
    }

    /// Connections by role: trainers, engines, drivers, executors.
    pub(super) fn counts(&self) -> [i64; 4] {
        let mut counts = [0; 4];
        for client in self.clients.values() {
            match client.who {
                Some(Who::Trainer) => counts[0] += 1,
                Some(Who::Engine(_)) => counts[1] += 1,
                None => counts[2] += 1,
                Some(Who::Executor) => counts[3] += 1,
            }
        }
        counts
    }

    fn joined(
        &mut self,
        now: Instant,
        id: ClientId,
        instance: Incarnation,
        role: Role,
        outbox: Outbox,
    ) -> Vec<News> {
        let (seat, who) = match role {
            Role::Executor { seat, tables, device } => {
                return self.executor_joined(id, instance, (&seat, tables, device), outbox);
            }
            Role::Driver {} => (None, None),
            Role::Trainer { rank, .. } => (Some(Seat::Training { rank }), Some(Who::Trainer)),
            Role::Engine { pool, replica, rank, record } => {
                (Some(Seat::Inference { pool, replica, rank }), Some(Who::Engine(record)))
            }
        };
        let at = seat.as_ref().map(|seat| self.seats.iter().position(|own| own == seat));
        let slot = at.flatten().and_then(|at| u32::try_from(at).ok()).map(Slot);
        let outbox = Some(outbox);
        let client = Client { slot, instance, who, outbox, early: None, admitted: false, gone: false };
        if let (Some(seat), None) = (&seat, slot) {
            let news = self.refuse_stranger(&client, &seat.to_string());
            self.clients.insert(id, client);
            return vec![news];
        }
        let mut news = match &client.who {
            Some(Who::Engine(record)) => vec![News::Hello { record: *record }],
            _ => Vec::new(),
        };
        self.clients.insert(id, client);
        if let Some(slot) = slot {
            news.extend(self.contend(now, id, instance, slot));
        }
        news
    }

    /// L1, at once: an executor that is refused comes again.
    fn executor_joined(
        &mut self,
        id: ClientId,
        instance: Incarnation,
        (seat, tables, device): (&str, u32, Device),
        outbox: Outbox,
    ) -> Vec<News> {
        let at = self.seats.iter().position(|own| own.to_string() == seat);
        let slot = at.and_then(|at| u32::try_from(at).ok()).map(Slot);
        let (who, heard) = (Some(Who::Executor), outbox.clone());
        let client =
            Client { slot, instance, who, outbox: Some(outbox), early: None, admitted: false, gone: false };
        let Some((at, slot)) = at.zip(slot) else {
            let news = self.refuse_stranger(&client, seat);
            self.clients.insert(id, client);
            return vec![news];
        };
        let before = self.places[at].executor.filter(|before| !self.clients[before].gone);
        let refused = if tables != TABLES {
            let message =
                format!("the executor reads tables of form {tables}, this agent writes form {TABLES}");
            Some((Code::VersionSkew, message))
        } else if before.is_some_and(|before| self.clients[&before].instance != instance) {
            let message = format!("{seat} has an executor of another process, which is connected");
            Some((Code::DuplicateRank, message))
        } else {
            None
        };
        if let Some((code, message)) = refused {
            refuse(&client, code, message, code.remedy());
            self.clients.insert(id, client);
            return vec![News::Refused { code }];
        }
        let mut news = Vec::new();
        if let Some(before) = before {
            end(&self.clients[&before]);
            news.push(News::ExecutorGone { slot, client: before });
        }
        send(&client, AgentFrame::Registered {}, Vec::new());
        self.places[at].executor = Some(id);
        self.clients.insert(id, client);
        news.push(News::ExecutorFound { slot, client: id, device, outbox: heard });
        news
    }

    fn refuse_stranger(&self, client: &Client, seat: &str) -> News {
        let own = self.seats.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let hint = "Connect to the agent of that rank, or correct this agent's --claim.";
        refuse(client, Code::Unsupported, format!("this agent hosts {own}, not {seat}"), hint);
        News::Refused { code: Code::Unsupported }
    }

    fn contend(&mut self, now: Instant, id: ClientId, instance: Incarnation, slot: Slot) -> Vec<News> {
        let at = slot.0 as usize;
        let Some(current) = self.places[at].current else {
            self.places[at].current = Some(id);
            return Vec::new();
        };
        let same = self.clients[&current].instance == instance;
        if let Some((other, _)) = self.places[at].next {
            if !same {
                return vec![self.refuse_duplicate(id, at)];
            }
            end(&self.clients[&other]);
        }
        if same {
            end(&self.clients[&current]); // L1
        }
        self.places[at].next = Some((id, now));
        Vec::new()
    }

    fn refuse_duplicate(&self, id: ClientId, at: usize) -> News {
        let message = format!("{} has a client of another process, which is connected", self.seats[at]);
        refuse(&self.clients[&id], Code::DuplicateRank, message, Code::DuplicateRank.remedy());
        News::Refused { code: Code::DuplicateRank }
    }

    fn registered(&mut self, id: ClientId, registration: Registration) -> Vec<News> {
        let Some(client) = self.clients.get_mut(&id) else { return Vec::new() };
        let Some(slot) = client.slot else { return Vec::new() };
        if self.places[slot.0 as usize].current == Some(id) {
            return vec![News::Registered { slot, registration }];
        }
        client.early = Some(registration);
        Vec::new()
    }

    fn said(&self, id: ClientId, frame: ClientFrame) -> Vec<News> {
        let Some(client) = self.clients.get(&id) else { return Vec::new() };
        if let ClientFrame::Said { said } = frame {
            let heard = client.slot.filter(|slot| self.places[slot.0 as usize].executor == Some(id));
            return heard.map(|slot| News::ExecutorSaid { slot, client: id, said }).into_iter().collect();
        }
        match client.slot {
            None if client.who.is_none() => vec![News::Asked { client: id, frame }],
            Some(slot) if self.places[slot.0 as usize].current == Some(id) && client.admitted => {
                vec![News::Said { slot, frame }]
            }
            // L2. A client that speaks before it is registered breaks the protocol of the socket.
            Some(_) => {
                let hint = "Wait for `registered` before any other frame.";
                refuse(client, Code::Unsupported, "client is not registered".to_owned(), hint);
                vec![News::Refused { code: Code::Unsupported }]
            }
            None => Vec::new(),
        }
    }

    fn gone(&mut self, id: ClientId, refused: Option<Code>) -> Vec<News> {
        let mut news: Vec<_> = refused.map(|code| News::Refused { code }).into_iter().collect();
        let Some(client) = self.clients.get_mut(&id) else { return news };
        client.gone = true;
        if let (Some(Who::Executor), Some(slot)) = (&client.who, client.slot) {
            client.outbox = None;
            news.push(News::ExecutorGone { slot, client: id });
            return news;
        }
        let current = client.slot.filter(|slot| self.places[slot.0 as usize].current == Some(id));
        match (current, &client.who) {
            (Some(slot), Some(Who::Trainer)) if client.admitted => {
                news.push(News::TrainerGone { slot, instance: client.instance });
            }
            _ => client.outbox = None,
        }
        news
    }

    fn closed(&mut self, id: ClientId) -> Vec<News> {
        let Some(client) = self.clients.remove(&id) else { return Vec::new() };
        let Some(slot) = client.slot else { return vec![News::DriverGone { client: id }] };
        let place = &mut self.places[slot.0 as usize];
        place.executor.take_if(|executor| *executor == id);
        if place.next.is_some_and(|(next, _)| next == id) {
            place.next = None;
        }
        if place.current != Some(id) {
            return Vec::new();
        }
        let mut news = Vec::new();
        if client.admitted && matches!(client.who, Some(Who::Engine(_))) {
            news.push(News::EngineGone { slot, instance: client.instance });
        }
        place.current = place.next.take().map(|(next, _)| next);
        if let Some(next) = place.current
            && let Some(registration) = self.clients.get_mut(&next).and_then(|next| next.early.take())
        {
            news.push(News::Registered { slot, registration });
        }
        news
    }
}

fn send(client: &Client, frame: AgentFrame, fds: Vec<OwnedFd>) {
    queue(client, |outbox| outbox.send(frame, fds));
}

fn queue(client: &Client, add: impl FnOnce(&Outbox) -> Result<(), Stuck>) {
    let Some(outbox) = &client.outbox else { return };
    if add(outbox).is_err() {
        tracing::warn!(instance = %client.instance, "client does not read its frames");
        outbox.end();
    }
}

fn refuse(client: &Client, code: Code, message: String, hint: &str) {
    tracing::warn!(code = %code, error = message, "client refused");
    send(client, AgentFrame::Error { code, message, hint: hint.to_owned(), request: None }, Vec::new());
    end(client);
}

fn end(client: &Client) {
    if let Some(outbox) = &client.outbox {
        outbox.end();
    }
}
