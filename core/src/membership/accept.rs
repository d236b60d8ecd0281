//! Whether an agent takes a Configure (protocol page §3).
//!
//! Invariants:
//! - A1: one epoch names one membership: the same epoch with another digest is refused.
//! - A2: epochs only grow.
//! - A3: a membership is taken only by the incarnation that it names, for every seat that the agent hosts.

use super::{Membership, Seat};
use crate::code::Code;
use crate::id::{Epoch, Incarnation, Sha256};

/// What becomes of a Configure that is not refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acceptance {
    /// A larger epoch: it takes effect when everything older is over (`Event::Configured`).
    New,
    /// The membership that is accepted already, or is waiting to be.
    Again,
}

/// Decides on `offered`, given the newest membership accepted or waiting.
///
/// # Errors
/// Why it is refused; nothing changes.
pub fn accept(
    incarnation: Incarnation,
    seats: &[Seat],
    newest: Option<&Membership>,
    offered: &Membership,
) -> Result<Acceptance, ConfigureError> {
    if let Some(newest) = newest {
        if offered.refit_uid() != newest.refit_uid() {
            let (offered, own) = (offered.refit_uid().to_owned(), newest.refit_uid().to_owned());
            return Err(ConfigureError::OtherRefit { offered, own });
        }
        let (epoch, digest) = (newest.epoch(), newest.digest());
        if offered.epoch() < epoch {
            return Err(ConfigureError::OlderEpoch { offered: offered.epoch(), accepted: epoch });
        }
        if offered.epoch() == epoch {
            return match offered.digest() == digest {
                true => Ok(Acceptance::Again),
                false => {
                    Err(ConfigureError::OtherDigest { epoch, offered: offered.digest(), accepted: digest })
                }
            };
        }
    }
    for seat in seats {
        let named = offered.members().iter().find(|member| member.seat == *seat);
        let named = named.ok_or_else(|| ConfigureError::NotNamed { seat: seat.clone() })?;
        if named.incarnation != incarnation {
            let (seat, named) = (seat.clone(), named.incarnation);
            return Err(ConfigureError::OtherIncarnation { seat, named, own: incarnation });
        }
    }
    Ok(Acceptance::New)
}

/// Why a Configure is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "fields are named by the message")]
pub enum ConfigureError {
    /// The agent belongs to another resource.
    #[error("membership of refit {offered}, this agent belongs to {own}")]
    OtherRefit { offered: String, own: String },
    /// A late or stale coordinator.
    #[error("epoch {offered} is older than the accepted epoch {accepted}")]
    OlderEpoch { offered: Epoch, accepted: Epoch },
    /// Two coordinators, or one that lost what it wrote.
    #[error("epoch {epoch} has membership {offered}, but {accepted} is accepted under that number")]
    OtherDigest { epoch: Epoch, offered: Sha256, accepted: Sha256 },
    /// A rank of this agent is not a member.
    #[error("{seat} is not a member")]
    NotNamed { seat: Seat },
    /// A predecessor or successor of this agent process is meant.
    #[error("{seat} is named with incarnation {named}, this agent is {own}")]
    OtherIncarnation { seat: Seat, named: Incarnation, own: Incarnation },
    /// The topology was made for another membership.
    #[error("topology with {replicas} replicas for a membership with {expected}")]
    OtherTopology { replicas: usize, expected: usize },
    /// The agent is leaving.
    #[error("the agent is draining")]
    Draining,
}

impl ConfigureError {
    /// The stable code under which this surfaces.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::OlderEpoch { .. } | Self::OtherDigest { .. } | Self::OtherIncarnation { .. } => {
                Code::StaleEpoch
            }
            Self::OtherRefit { .. } | Self::NotNamed { .. } => Code::Unauthorized,
            Self::OtherTopology { .. } => Code::PlanMismatch,
            Self::Draining => Code::Cancelled,
        }
    }
}
