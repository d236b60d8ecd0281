//! Streams with the agents of other members: who dials whom, and which stream carries a message.
//!
//! The leader's agent dials every other agent; a head's agent dials those of its replica's ranks. Streams carry
//! both directions, so a member answers on the stream that its leader or head opened.
//!
//! Invariants:
//! - P1: a link belongs to the key that its handshake proved; messages say who they are from, the key decides.
//! - P2: nothing here waits: a peer that does not read loses its link, not our time.
//! - P3: a new membership ends the links of keys that are not in it.

mod dialer;
mod envelope;
mod link;

pub use link::{LinkId, LinkSender};

use crate::identity::Identity;
use crate::limits;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tonic::Streaming;
use weightrefit_core::id::Sha256;
use weightrefit_core::membership::{Membership, Seat};
use weightrefit_core::round::message::{Header, Message};
use weightrefit_proto::v1;

/// What happens on links.
#[derive(Debug)]
pub enum PeerEvent {
    /// A link is there.
    Up {
        /// Key of the other agent.
        key: Sha256,
        /// For messages to it.
        sender: LinkSender,
    },
    /// A message came.
    Message {
        /// Key that the connection proved.
        key: Sha256,
        /// Who it says it is from and for.
        header: Header,
        /// What it says.
        message: Box<Message>,
        /// What goes beside a `propose`.
        extras: Option<String>,
    },
    /// The link is over.
    Down {
        /// Key of the other agent.
        key: Sha256,
        /// Which link.
        link: LinkId,
    },
}

/// Makes links out of streams; shared by the server and the dialers.
#[derive(Debug, Clone)]
pub struct Links {
    next: Arc<AtomicU64>,
    events: mpsc::Sender<PeerEvent>,
}

impl Links {
    /// Events go to `events`; it is bounded, and a slow reader of it slows the peers.
    #[must_use]
    pub fn new(events: mpsc::Sender<PeerEvent>) -> Self {
        Self { next: Arc::new(AtomicU64::new(0)), events }
    }

    /// Announces a link over an open stream and reads it until it ends.
    pub(crate) async fn run(
        &self,
        key: Sha256,
        incoming: Streaming<v1::Envelope>,
        outgoing: mpsc::Sender<v1::Envelope>,
    ) {
        let id = LinkId(self.next.fetch_add(1, Ordering::Relaxed));
        let weak = outgoing.downgrade();
        let sender = LinkSender::new(id, outgoing);
        if self.events.send(PeerEvent::Up { key, sender }).await.is_ok() {
            link::read(id, key, incoming, weak, self.events.clone()).await;
        }
    }
}

/// Links by key, and the dialers that keep ours up.
#[derive(Debug)]
pub struct Peers {
    identity: Arc<Identity>,
    links: Links,
    senders: BTreeMap<Sha256, Vec<LinkSender>>,
    dialers: BTreeMap<Sha256, Dialer>,
}

#[derive(Debug)]
struct Dialer {
    addresses: Vec<String>,
    task: AbortHandle,
}

impl Drop for Dialer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What a change of links means for the members of that agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// The first link is there.
    Found,
    /// The last link is gone.
    Lost,
    /// As before.
    Same,
}

impl Peers {
    /// No links, no dialers.
    #[must_use]
    pub fn new(identity: Arc<Identity>, links: Links) -> Self {
        Self { identity, links, senders: BTreeMap::new(), dialers: BTreeMap::new() }
    }

    /// A membership was accepted: lets its keys in, ends links of others, dials whom this agent has to dial.
    pub fn follow(&mut self, membership: &Membership) {
        let keys: BTreeSet<_> = membership.members().iter().map(|member| member.key).collect();
        self.senders.retain(|key, _| keys.contains(key)); // P3
        self.identity.pins().replace(keys);
        let targets = targets(membership, self.identity.key_hash());
        self.dialers.retain(|key, dialer| targets.get(key) == Some(&dialer.addresses));
        for (key, addresses) in targets {
            self.dialers.entry(key).or_insert_with(|| {
                let dial =
                    dialer::keep_up(Arc::clone(&self.identity), self.links.clone(), key, addresses.clone());
                Dialer { addresses, task: tokio::spawn(dial).abort_handle() }
            });
        }
    }

    /// Takes a link into use. Links of keys outside the membership are dropped.
    pub fn up(&mut self, key: Sha256, sender: LinkSender) -> Reach {
        if !self.identity.pins().contains(key) {
            return Reach::Same;
        }
        let links = self.senders.entry(key).or_default();
        links.push(sender);
        if links.len() == 1 { Reach::Found } else { Reach::Same }
    }

    /// Forgets a link.
    pub fn down(&mut self, key: Sha256, link: LinkId) -> Reach {
        let Some(links) = self.senders.get_mut(&key) else { return Reach::Same };
        let before = links.len();
        links.retain(|sender| sender.id() != link);
        match (before, links.len()) {
            (1.., 0) => {
                self.senders.remove(&key);
                Reach::Lost
            }
            _ => Reach::Same,
        }
    }

    /// Whether the agent with this key has a link, or is this one.
    #[must_use]
    pub fn reaches(&self, key: Sha256) -> bool {
        key == self.identity.key_hash() || self.senders.contains_key(&key)
    }

    /// Agents with a link.
    #[must_use]
    pub fn reachable(&self) -> usize {
        self.senders.len()
    }

    /// Sends on the newest link to `key` that takes it; links that take nothing are ended (P2). False when the
    /// message went nowhere.
    pub fn send(&mut self, key: Sha256, header: &Header, message: &Message, extras: Option<&str>) -> bool {
        let Some(links) = self.senders.get_mut(&key) else { return false };
        links.iter_mut().rev().any(|link| link.send(header, message, extras))
    }
}

/// Agents that the agent with key `own` dials, with their addresses.
fn targets(membership: &Membership, own: Sha256) -> BTreeMap<Sha256, Vec<String>> {
    let mut targets = BTreeMap::new();
    let leads = membership.member(membership.leader()).is_some_and(|leader| leader.key == own);
    let replicas = membership.replicas();
    let headed = |seat: &Seat| match seat {
        Seat::Training { .. } => false,
        Seat::Inference { pool, replica, .. } => replicas.iter().any(|found| {
            let head = membership.member(found.head());
            found.name == *replica
                && membership.pools().get(found.pool as usize) == Some(pool)
                && head.is_some_and(|head| head.key == own)
        }),
    };
    for member in membership.members() {
        if member.key != own && (leads || headed(&member.seat)) {
            targets.insert(member.key, member.round_addresses.clone());
        }
    }
    targets
}

/// Channel of a stream's outgoing half.
pub(crate) fn outgoing() -> (mpsc::Sender<v1::Envelope>, mpsc::Receiver<v1::Envelope>) {
    mpsc::channel(limits::LINK_ENVELOPES_MAX)
}
