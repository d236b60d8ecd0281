//! Faults that tests inject: a signal to one process at one moment of one step. Nothing is simulated.

use super::world::Key;
use std::str::FromStr;
use weightrefit_core::id::Rank;
use weightrefit_core::membership::Seat;

/// `kill:agent:inference/default/default-0/1@2/transfer`: what, to whom, at which step and moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub(super) action: Action,
    pub(super) role: Role,
    pub(super) seat: Seat,
    pub(super) step: i64,
    pub(super) moment: Moment,
}

/// What happens to the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// SIGKILL; it is started again as a supervisor would.
    Kill,
    /// SIGSTOP until the step has ended, or for [`crate::limits::STOP_MAX`], then SIGCONT.
    Stop,
}

/// Which process of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// The agent that hosts it.
    Agent,
    /// The trainer or engine that owns it.
    Client,
}

/// When, as far as an observer can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Moment {
    /// The trainer has been told to publish.
    Publish,
    /// Bytes have arrived somewhere.
    Transfer,
    /// An engine has paused.
    Pause,
    /// An engine has copied the new version.
    Commit,
    /// An engine serves the new version.
    Resume,
}

impl Moment {
    const ALL: [(&'static str, Self); 5] = [
        ("publish", Self::Publish),
        ("transfer", Self::Transfer),
        ("pause", Self::Pause),
        ("commit", Self::Commit),
        ("resume", Self::Resume),
    ];

    pub(super) fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, moment)| *moment == self).map_or("", |(name, _)| name)
    }
}

/// The text is no fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("fault `{0}` is not `kill|stop:agent|trainer|engine:SEAT@STEP/publish|transfer|pause|commit|resume`")]
pub struct FaultError(String);

impl Fault {
    pub(super) fn key(&self, world: &super::world::World) -> Option<Key> {
        let agent = world.agent_of(&self.seat)?;
        Some(match self.role {
            Role::Agent => Key::Agent(agent),
            Role::Client => Key::of_rank(self.seat.clone()),
        })
    }
}

impl FromStr for Fault {
    type Err = FaultError;
    fn from_str(text: &str) -> Result<Self, FaultError> {
        parse(text).ok_or_else(|| FaultError(text.chars().take(200).collect()))
    }
}

fn parse(text: &str) -> Option<Fault> {
    let (who, when) = text.rsplit_once('@')?;
    let (step, moment) = when.split_once('/')?;
    let mut parts = who.splitn(3, ':');
    let action = match parts.next()? {
        "kill" => Action::Kill,
        "stop" => Action::Stop,
        _ => return None,
    };
    let (role, seat) = (parts.next()?, seat(parts.next()?)?);
    let role = match (role, &seat) {
        ("agent", _) => Role::Agent,
        ("trainer", Seat::Training { .. }) | ("engine", Seat::Inference { .. }) => Role::Client,
        _ => return None,
    };
    let (_, moment) = *Moment::ALL.iter().find(|(name, _)| *name == moment)?;
    Some(Fault { action, role, seat, step: step.parse().ok()?, moment })
}

fn seat(text: &str) -> Option<Seat> {
    let (side, rest) = text.split_once('/')?;
    match side {
        "training" => Some(Seat::Training { rank: Rank(rest.parse().ok()?) }),
        "inference" => {
            let (pool, rest) = rest.split_once('/')?;
            let (replica, rank) = rest.rsplit_once('/')?;
            let (pool, replica) = (pool.to_owned(), replica.to_owned());
            Some(Seat::Inference { pool, replica, rank: Rank(rank.parse().ok()?) })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_names_process_and_moment() {
        let fault: Fault = "kill:agent:inference/default/vllm-0/1@2/transfer".parse().unwrap();
        assert_eq!(
            (fault.action, fault.role, fault.step, fault.moment),
            (Action::Kill, Role::Agent, 2, Moment::Transfer)
        );
        assert_eq!(fault.seat.to_string(), "inference/default/vllm-0/1");
        let fault: Fault = "stop:trainer:training/3@0/publish".parse().unwrap();
        assert_eq!((fault.action, fault.role, fault.moment), (Action::Stop, Role::Client, Moment::Publish));
    }

    #[test]
    fn what_is_no_fault_is_refused() {
        for text in [
            "",
            "kill:agent:training/0",
            "kill:agent:training/0@1",
            "burn:agent:training/0@1/pause",
            "kill:trainer:inference/a/b/0@1/pause",
            "kill:engine:training/0@1/pause",
            "kill:agent:training/x@1/pause",
            "kill:agent:training/0@1/lunch",
        ] {
            assert!(text.parse::<Fault>().is_err(), "{text}");
        }
    }
}
