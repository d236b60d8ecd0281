//! What each replica of the membership holds and does, from what its ranks' agents say.

use crate::api::status::Version;
use crate::controller::record::version;
use crate::coordinator::View;
use weightrefit_core::code::Code;
use weightrefit_core::id::Rank;
use weightrefit_core::membership::Seat;
use weightrefit_proto::v1;

/// One replica.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ReplicaNow {
    pub(super) pool: String,
    pub(super) replica: String,
    pub(super) doing: Doing,
    /// What all its ranks hold.
    pub(super) version: Option<Version>,
    /// UID of the pod and rank that the state comes from, where it is one rank's.
    pub(super) at: Option<(String, Rank)>,
}

/// What a replica does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Doing {
    /// Takes requests.
    Serving,
    /// Is ready for its first version.
    Cold,
    /// No client owns some rank.
    Unowned,
    /// Is kept from serving.
    Fenced,
    /// Some agent is not connected.
    Lost,
}

impl ReplicaNow {
    /// Whether it takes requests with weights that were committed.
    pub(super) fn is_serving(&self) -> bool {
        self.doing == Doing::Serving && self.version.is_some()
    }
}

impl Doing {
    /// Why the replica does not serve, where nothing says it better.
    pub(super) const fn code(self) -> Code {
        match self {
            Self::Serving => Code::SourceGone,
            Self::Cold | Self::Unowned => Code::EngineCold,
            Self::Fenced => Code::CommitTimeout,
            Self::Lost => Code::PeerLost,
        }
    }
}

/// The replicas of the membership in force, in its order.
pub(super) fn replicas(view: &View) -> Vec<ReplicaNow> {
    let Some(membership) = &view.membership else { return Vec::new() };
    let mut replicas = Vec::new();
    for replica in membership.replicas() {
        let members = replica.ranks.iter().filter_map(|id| membership.member(*id));
        let mut now: Option<ReplicaNow> = None;
        for member in members {
            let Seat::Inference { pool, replica, rank } = &member.seat else { continue };
            let state = view.rank(member);
            let doing = match state {
                None if view.agents.contains_key(&member.incarnation) => Doing::Unowned,
                None => Doing::Lost,
                Some(state) => doing(state),
            };
            let version =
                state.and_then(|state| state.live.as_ref()).map(|live| version(live.run, live.step));
            let at = Some((member.pod_uid.clone(), *rank));
            match &mut now {
                None => {
                    let (pool, replica) = (pool.clone(), replica.clone());
                    now = Some(ReplicaNow { pool, replica, doing, version, at });
                }
                Some(now) => {
                    if doing > now.doing {
                        (now.doing, now.at) = (doing, at);
                    }
                    if now.version != version {
                        now.version = None;
                    }
                }
            }
        }
        replicas.extend(now);
    }
    for replica in &mut replicas {
        if replica.doing == Doing::Serving {
            replica.at = None;
        }
    }
    replicas
}

fn doing(state: &v1::RankState) -> Doing {
    match (state.registered, state.engine_state.as_str()) {
        (false, _) => Doing::Unowned,
        (true, "Serving") => Doing::Serving,
        (true, "Cold") => Doing::Cold,
        (true, _) => Doing::Fenced,
    }
}
