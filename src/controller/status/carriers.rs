//! How the bytes of each replica travel, as the agents of its ranks say.

use crate::api::policy::Transport;
use crate::controller::reason::CommunicatorsReadyReason as R;
use crate::coordinator::View;
use std::collections::BTreeMap;
use weightrefit_core::membership::Membership;

/// What carries a replica; of agents that differ the last of these counts, since a round waits for all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Carrier<'v> {
    Nccl,
    Forming,
    Tcp { code: &'v str, reason: &'v str },
}

type Told<'v> = BTreeMap<(&'v str, &'v str), Carrier<'v>>;

/// Reason and message for a membership whose members are all connected.
pub(super) fn carriers(view: &View, membership: &Membership, wanted: Transport) -> (R, String) {
    let told = told(view, membership);
    let (all, ranks) = (told.len(), membership.members().len());
    let (tcp, why) = some(&told, |carrier| matches!(carrier, Carrier::Tcp { .. }));
    let (forming, which) = some(&told, |carrier| carrier == Carrier::Forming);
    match (tcp, forming) {
        (1.., _) if wanted == Transport::Nccl => {
            (R::NcclMissing, format!("{tcp} of {all} replicas cannot use NCCL, first {why}."))
        }
        (_, 1..) => {
            let message =
                format!("Communicators of {forming} of {all} replicas are being formed, first {which}.");
            (R::Forming, message)
        }
        (0, 0) if all > 0 => (R::Nccl, format!("NCCL for all {all} replicas, in clear; control in TLS.")),
        (0, 0) => (R::Tcp, format!("TCP on all {ranks} ranks, protected by TLS.")),
        _ if tcp == all => {
            (R::Tcp, format!("TCP on all {ranks} ranks, protected by TLS; not NCCL: first {why}."))
        }
        _ => {
            let nccl = all - tcp;
            let message = format!(
                "NCCL for {nccl} of {all} replicas, in clear; TCP for {tcp}, protected by TLS, first {why}."
            );
            (R::Mixed, message)
        }
    }
}

/// How many are so, and the first of them.
fn some(told: &Told<'_>, is_so: impl Fn(Carrier<'_>) -> bool) -> (usize, String) {
    let first =
        told.iter().find(|(_, carrier)| is_so(**carrier)).map(|((pool, replica), carrier)| match carrier {
            Carrier::Tcp { code, reason } => format!("{pool}/{replica}: {code}: {reason}"),
            Carrier::Nccl | Carrier::Forming => format!("{pool}/{replica}"),
        });
    (told.values().filter(|carrier| is_so(**carrier)).count(), first.unwrap_or_default())
}

/// By pool and replica. None where bytes may not go by NCCL at all: agents then say nothing of carriers.
fn told<'v>(view: &'v View, membership: &Membership) -> Told<'v> {
    let mut told = Told::new();
    let agents = membership.members().iter().filter_map(|member| view.agents.get(&member.incarnation));
    for one in agents.flat_map(|agent| &agent.state.carriers) {
        let carrier = match one.transport.as_str() {
            "nccl" => Carrier::Nccl,
            "tcp" => Carrier::Tcp { code: &one.code, reason: &one.reason },
            _ => Carrier::Forming,
        };
        let known = told.entry((one.pool.as_str(), one.replica.as_str())).or_insert(carrier);
        *known = carrier.max(*known);
    }
    told
}
