//! Bytes over TCP, with TLS 1.3 or plain.
//!
//! The destination dials the source, once per stream, or takes a connection that a stream of the round before has
//! left; the first frame says which round, pair and part of it the stream is. Then come the bytes of the pair's boxes,
//! nothing between them, and an acknowledgement at the end.
//!
//! B1: a stream belongs to one (epoch, membership, round, source and destination incarnation, pair digest, part);
//!     what does not match is refused with a code, counted, and touches nothing.
//! B2: with TLS each side has proved the key that the membership names before a byte of a tensor moves.
//! B3: after `join` no task of the job reads or writes memory; a stop wakes those that wait for the peer.
//! B4: threads, buffers, handshakes and time before admission are bounded; garbage and floods cost others nothing
//!     but their share of those.
//! B5: a stream counts as done when the destination has acknowledged exactly the bytes that were sent.
//! B6: a connection serves another stream only after one that went well, and what asks for that is checked as the
//!     first was.
//!
//! Blocking threads on purpose: one per stream, and the bytes go from memory to the kernel and back without a
//! runtime between.

mod dial;
mod flight;
mod flow;
mod frame;
mod link;
mod offers;
mod receive;
mod resting;
mod server;
mod tasks;
#[cfg(test)]
mod testing;

pub(crate) use dial::Dialer;
pub(crate) use frame::{Purpose, StreamHeader};
pub(crate) use link::Link;
pub use offers::{SendEvent, SendJob, SendTo, Senders};
pub use receive::{ReceiveFrom, ReceiveJob, Receivers, receive};
pub use resting::Resting;
pub use server::ByteServer;

use crate::executor::ShadowError;
use crate::identity::Identity;
use std::sync::Arc;
use weightrefit_core::code::Code;
use weightrefit_core::id::{Epoch, Incarnation, MemberId, Sha256};

/// How streams are protected. Both ends must be set alike.
#[derive(Debug, Clone)]
pub enum Security {
    /// TLS 1.3, mutual, keys pinned by the membership.
    Tls(Arc<Identity>),
    /// None: `encryption: Disabled`. Anyone who reaches the port and knows the identities can read weights.
    Plain,
}

/// What the accepted membership says of those who exchange bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peers {
    /// UID of the WeightRefit.
    pub refit_uid: Arc<str>,
    /// The accepted epoch.
    pub epoch: Epoch,
    /// Digest of the membership.
    pub membership: Sha256,
    /// By member id: incarnation and public-key hash of its agent.
    pub agents: Vec<(Incarnation, Sha256)>,
}

impl Peers {
    /// Incarnation and key of a member's agent.
    pub(crate) fn agent(&self, member: MemberId) -> Result<(Incarnation, Sha256), TransferError> {
        let found = self.agents.get(member.0 as usize).copied();
        found.ok_or(TransferError::UnknownMember { peer: member, members: self.agents.len() })
    }
}

/// How a stream, and with it its job, failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// The source said no.
    #[error("member {peer} refused the stream: {code}")]
    Refused {
        /// The source.
        peer: MemberId,
        /// Its reason.
        code: Code,
    },
    /// The other end's key is not the one of the membership, or ours is not to it.
    #[error("keys of member {peer} and this agent do not match the membership: {detail}")]
    Key {
        /// The other end.
        peer: MemberId,
        /// What the TLS library says.
        detail: String,
    },
    /// The connection broke, or never came about.
    #[error("connection to member {peer} failed: {detail}")]
    Lost {
        /// The other end.
        peer: MemberId,
        /// What the system says.
        detail: String,
    },
    /// The other end counts other bytes.
    #[error("member {peer} counts {theirs} bytes of stream {stream}, this agent {ours}")]
    ByteCount {
        /// The other end.
        peer: MemberId,
        /// Index of the stream.
        stream: u32,
        /// Bytes there.
        theirs: u64,
        /// Bytes here.
        ours: u64,
    },
    /// The member is not in the membership.
    #[error("member {peer} is not in the membership of {members} members")]
    UnknownMember {
        /// The other end.
        peer: MemberId,
        /// Members there are.
        members: usize,
    },
    /// The replica's lane ended, or there is none though there must be.
    #[error("lane of the replica: {detail}")]
    Lane {
        /// As the lane says it.
        code: Code,
        /// What happened.
        detail: String,
    },
    /// The rank's memory is on a device, and the host could not be given it.
    #[error(transparent)]
    Shadow(#[from] ShadowError),
    /// Stopped by this agent.
    #[error("the transfer was stopped")]
    Cancelled,
    /// A task of this agent ended by a panic, which is a bug.
    #[error("a transfer task of this agent broke")]
    Broken,
    /// No thread for the task.
    #[error("no thread for a transfer task: {detail}")]
    NoThread {
        /// What the system says.
        detail: String,
    },
}

impl TransferError {
    /// The stable code that a user sees.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::Refused { code, .. } => *code,
            Self::Key { .. } => Code::Unauthenticated,
            Self::Lost { .. } => Code::PeerLost,
            Self::ByteCount { .. } => Code::PlanMismatch,
            Self::UnknownMember { .. } => Code::StaleEpoch,
            Self::Lane { code, .. } => *code,
            Self::Shadow(error) => error.code(),
            Self::Cancelled => Code::Cancelled,
            Self::Broken | Self::NoThread { .. } => Code::TransportUnavailable,
        }
    }

    /// The other end, where the failure is about one.
    #[must_use]
    pub const fn peer(&self) -> Option<MemberId> {
        match self {
            Self::Refused { peer, .. }
            | Self::Key { peer, .. }
            | Self::Lost { peer, .. }
            | Self::ByteCount { peer, .. }
            | Self::UnknownMember { peer, .. } => Some(*peer),
            Self::Lane { .. } | Self::Shadow(_) | Self::Cancelled | Self::Broken | Self::NoThread { .. } => {
                None
            }
        }
    }
}
