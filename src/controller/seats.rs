//! Which seats a pod may hold: a pure function of the refit and the pod's facts.
//!
//! Invariants:
//! - S1: a seat has one pod, the older of those that claim it, whether it can be reached yet or not; a pod that is
//!   going away or has ended claims nothing.
//! - S2: a pod that is at fault is told of by name and field, and takes no seat from others.

use super::marks::{self, Place as Marked, decimal};
use super::pod_facts::{Owner, POD_INDEX_LABEL, PodFacts, Side};
use crate::api::ranks::{self, Hosted};
use crate::api::refit::{Pool, WeightRefitSpec};
use crate::api::workload::RanksType;
use crate::limits;
use std::collections::BTreeMap;
use std::sync::Arc;
use weightrefit_core::code::Code;
use weightrefit_core::membership::Seat;

/// What a pod may hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Allowed {
    /// These seats, all of them.
    Exactly(Vec<Seat>),
    /// What its agent announces, within the sizes of the refit.
    Announced(Bounds),
}

/// Sizes that announced seats must keep to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bounds {
    /// The pool; `None` on the training side.
    pub pool: Option<String>,
    /// Ranks of the training world or of one replica.
    pub ranks: u32,
    /// Seats that the pod must announce, where the refit says so.
    pub per_pod: Option<u32>,
}

/// Why a pod may not hold a seat.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SeatError {
    /// Nothing says which of its owner's pods it is.
    #[error("pod {pod} has no ordinal: {field} is `{value}`")]
    Ordinal {
        /// namespace/name.
        pod: String,
        /// Where the ordinal should be.
        field: &'static str,
        /// What is there.
        value: String,
    },
    /// What a controller writes on its pods is missing, or says what cannot be.
    #[error("pod {pod} has no rank: its {name} is `{value}`")]
    Mark {
        /// namespace/name.
        pod: String,
        /// The label or annotation.
        name: String,
        /// What is there; empty where it is missing.
        value: String,
    },
    /// The world has no such ranks.
    #[error("pod {pod} of ordinal {ordinal} begins at rank {first}, and {field} is {size}")]
    BeyondWorld {
        /// namespace/name.
        pod: String,
        /// Its ordinal.
        ordinal: u32,
        /// Its first rank, or first replica.
        first: u64,
        /// What bounds it.
        field: &'static str,
        /// The bound.
        size: u64,
    },
    /// The refit has no such pool.
    #[error("pod {pod} has label weightrefit.dev/pool of `{pool}`, and the refit has no such pool")]
    NoPool {
        /// namespace/name.
        pod: String,
        /// The pool.
        pool: String,
    },
    /// Another pod holds the seat.
    #[error("pod {pod} claims seat {seat}, which the older pod {holder} holds")]
    Duplicate {
        /// namespace/name.
        pod: String,
        /// The seat.
        seat: Seat,
        /// namespace/name of the pod that holds it.
        holder: String,
    },
    /// The pod cannot be reached yet.
    #[error("pod {pod} has no status.podIPs yet")]
    NoAddress {
        /// namespace/name.
        pod: String,
    },
    /// The agent announces others than the pod may hold.
    #[error("pod {pod} announces {announced}, and may hold {allowed}")]
    Announced {
        /// namespace/name.
        pod: String,
        /// The first that it may not hold, or how many there are.
        announced: String,
        /// What it may hold.
        allowed: String,
    },
    /// Pods become ranks in a way that this version does not know.
    #[error("pod {pod} has no rank: this version does not support {field} {kind:?}")]
    Unsupported {
        /// namespace/name.
        pod: String,
        /// The field of the refit.
        field: &'static str,
        /// Its value.
        kind: RanksType,
    },
}

impl SeatError {
    /// The stable code.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::Ordinal { .. } | Self::Mark { .. } | Self::BeyondWorld { .. } | Self::NoPool { .. } => {
                Code::RankGap
            }
            Self::Duplicate { .. } => Code::DuplicateRank,
            Self::NoAddress { .. } => Code::NotEnoughReady,
            Self::Announced { .. } => Code::Unauthorized,
            Self::Unsupported { .. } => Code::Unsupported,
        }
    }
}

/// Who holds which seat.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seating {
    /// The pods whose seats the refit tells, by seat. Pods whose agents announce theirs are not here.
    pub holders: BTreeMap<Seat, Arc<PodFacts>>,
    /// What is wrong, in the order of the pods' age.
    pub errors: Vec<SeatError>,
}

/// What the pod may hold, whoever else claims the same.
///
/// # Errors
/// What is wrong with the pod.
pub fn allowed(spec: &WeightRefitSpec, pod: &PodFacts) -> Result<Allowed, SeatError> {
    match pod.side {
        Side::Training => training(spec, pod),
        Side::Inference => {
            let pool = spec.inference.pools.iter().find(|pool| pool.name == pod.pool);
            let missing = || SeatError::NoPool { pod: pod.shown(), pool: pod.pool.clone() };
            inference(pool.ok_or_else(missing)?, pod)
        }
    }
}

/// Seats all pods that claim the refit. Pods that go away or are over are left out.
#[must_use]
pub fn seat(spec: &WeightRefitSpec, pods: &[Arc<PodFacts>]) -> Seating {
    let mut present: Vec<&Arc<PodFacts>> = pods.iter().filter(|pod| pod.is_present()).collect();
    present.sort_by(|a, b| a.seniority().cmp(&b.seniority()));
    let mut seating = Seating::default();
    let mut claimed = BTreeMap::new();
    for pod in present {
        if let Err(error) = seating.take(spec, pod, &mut claimed) {
            seating.errors.push(error);
        }
    }
    seating
}

/// Whether no older pod claims a seat of this one, as [`seat`] would find.
///
/// # Errors
/// The seat, and the pod that holds it.
pub fn check_rivals(spec: &WeightRefitSpec, pod: &PodFacts, pods: &[Arc<PodFacts>]) -> Result<(), SeatError> {
    let Allowed::Exactly(seats) = allowed(spec, pod)? else { return Ok(()) };
    // Of thousands of pods hardly two have one ordinal, and where there are none a pod shares all seats or none.
    let ordinal = |pod: &PodFacts| place(pod).ok().map(|place| place.ordinal);
    let own = ordinal(pod).filter(|_| ranks_type(spec, pod) == Some(RanksType::StatefulSet));
    let is_rival = |other: &&Arc<PodFacts>| {
        let is_older = other.side == pod.side && other.seniority() < pod.seniority();
        is_older && other.is_present() && own.is_none_or(|own| ordinal(other) == Some(own))
    };
    for other in pods.iter().filter(is_rival) {
        let Ok(Allowed::Exactly(held)) = allowed(spec, other) else { continue };
        if let Some(seat) = seats.iter().find(|seat| held.contains(seat)) {
            let (pod, seat, holder) = (pod.shown(), seat.clone(), other.shown());
            return Err(SeatError::Duplicate { pod, seat, holder });
        }
    }
    Ok(())
}

impl Seating {
    fn take(
        &mut self,
        spec: &WeightRefitSpec,
        pod: &Arc<PodFacts>,
        claimed: &mut BTreeMap<Seat, Arc<PodFacts>>,
    ) -> Result<(), SeatError> {
        let seats = match allowed(spec, pod)? {
            Allowed::Exactly(seats) => seats,
            Allowed::Announced(_) => Vec::new(),
        };
        if let Some((seat, holder)) = seats.iter().find_map(|seat| Some((seat, claimed.get(seat)?))) {
            let (pod, seat, holder) = (pod.shown(), seat.clone(), holder.shown());
            return Err(SeatError::Duplicate { pod, seat, holder });
        }
        claimed.extend(seats.iter().map(|seat| (seat.clone(), Arc::clone(pod))));
        if pod.ips.is_empty() {
            return Err(SeatError::NoAddress { pod: pod.shown() });
        }
        self.holders.extend(seats.into_iter().map(|seat| (seat, Arc::clone(pod))));
        Ok(())
    }
}

impl Allowed {
    /// Whether the pod may hold what its agent announces.
    ///
    /// # Errors
    /// The first seat that it may not hold.
    pub fn check(&self, pod: &PodFacts, announced: &[Seat]) -> Result<(), SeatError> {
        let refuse = |announced: String, allowed: String| {
            Err(SeatError::Announced { pod: pod.shown(), announced, allowed })
        };
        match self {
            Self::Exactly(seats) => {
                if let Some(other) = announced.iter().find(|seat| !seats.contains(seat)) {
                    return refuse(shown(other), range(seats));
                }
                if let Some(missing) = seats.iter().find(|seat| !announced.contains(seat)) {
                    return refuse(format!("no seat {missing}"), range(seats));
                }
            }
            Self::Announced(bounds) => {
                if let Some(other) = announced.iter().find(|seat| !bounds.hold(seat)) {
                    return refuse(shown(other), bounds.shown());
                }
                if bounds.per_pod.is_some_and(|per_pod| announced.len() != per_pod as usize) {
                    return refuse(format!("{} seats", announced.len()), bounds.shown());
                }
            }
        }
        Ok(())
    }
}

impl Bounds {
    fn hold(&self, seat: &Seat) -> bool {
        match (seat, &self.pool) {
            (Seat::Training { rank }, None) => rank.0 < self.ranks,
            (Seat::Inference { pool, replica, rank }, Some(own)) => {
                let is_named = !replica.is_empty() && replica.len() <= limits::REPLICA_NAME_MAX;
                pool == own && is_named && rank.0 < self.ranks
            }
            _ => false,
        }
    }

    /// As messages tell it.
    #[must_use]
    pub fn shown(&self) -> String {
        let side =
            self.pool.as_ref().map_or("training".to_owned(), |pool| format!("inference/{pool}/REPLICA"));
        let per_pod = self.per_pod.map_or("any number".to_owned(), |per_pod| per_pod.to_string());
        format!("{per_pod} of the ranks 0 to {} of {side}", self.ranks.saturating_sub(1))
    }
}

fn ranks_type(spec: &WeightRefitSpec, pod: &PodFacts) -> Option<RanksType> {
    match pod.side {
        Side::Training => Some(spec.training.ranks.kind),
        Side::Inference => {
            spec.inference.pools.iter().find(|pool| pool.name == pod.pool).map(|pool| pool.ranks.kind)
        }
    }
}

fn training(spec: &WeightRefitSpec, pod: &PodFacts) -> Result<Allowed, SeatError> {
    let training = &spec.training;
    let world = training.world_size.unsigned_abs();
    let per_pod = training.ranks.ranks_per_pod.map(i32::unsigned_abs);
    let ordinal = match training.ranks.kind {
        RanksType::StatefulSet => place(pod)?.ordinal,
        // One pod is the whole world, or nothing tells its pods apart.
        RanksType::Deployment if per_pod.unwrap_or(1) == world => 0,
        RanksType::IndexedJob | RanksType::JobSet | RanksType::LeaderWorkerSet | RanksType::PodCliqueSet => {
            marks::in_world(&training.ranks, pod, world / per_pod.unwrap_or(1).max(1))?
        }
        RanksType::Label => marks::told(&training.ranks, pod, per_pod.unwrap_or(1))?.index,
        // What Ray's labels tell is the order of hosts, and ranks are the framework's to give.
        RanksType::Registered | RanksType::RayCluster => {
            return Ok(Allowed::Announced(Bounds { pool: None, ranks: world, per_pod }));
        }
        kind @ RanksType::Deployment => {
            return Err(SeatError::Unsupported { pod: pod.shown(), field: "training.ranks.type", kind });
        }
    };
    let ranks = ranks::training_ranks(training, ordinal);
    if ranks.is_empty() {
        let (pod, size) = (pod.shown(), u64::from(world));
        let first = u64::from(ordinal) * u64::from(per_pod.unwrap_or(1));
        return Err(SeatError::BeyondWorld { pod, ordinal, first, field: "training.worldSize", size });
    }
    Ok(Allowed::Exactly(ranks.into_iter().map(|hosted| Seat::Training { rank: hosted.rank }).collect()))
}

fn inference(pool: &Pool, pod: &PodFacts) -> Result<Allowed, SeatError> {
    let per_replica = pool.ranks_per_replica.unsigned_abs();
    let hosted = match pool.ranks.kind {
        RanksType::StatefulSet => {
            let Place { owner, ordinal } = place(pod)?;
            let first = u64::from(ordinal) * u64::from(ranks::per_pod(pool)) / u64::from(per_replica.max(1));
            let (field, size) = ("the largest number of replicas", limits::REPLICAS_MAX.unsigned_abs());
            beyond(pod, ordinal, first, field, size)?;
            ranks::pool_ranks(pool, owner, ordinal)
        }
        RanksType::Deployment => ranks::replicas_of_pod(pool, &pod.name),
        RanksType::IndexedJob | RanksType::JobSet | RanksType::LeaderWorkerSet | RanksType::PodCliqueSet => {
            of_group(pool, pod, marks::in_group(&pool.ranks, pod)?)?
        }
        RanksType::Label => of_replica(pool, pod, marks::told(&pool.ranks, pod, ranks::per_pod(pool))?)?,
        RanksType::Registered | RanksType::RayCluster => {
            let per_pod = pool.ranks.ranks_per_pod.map(i32::unsigned_abs);
            let pool = Some(pool.name.clone());
            return Ok(Allowed::Announced(Bounds { pool, ranks: per_replica, per_pod }));
        }
    };
    let seat = |Hosted { replica, rank }| Seat::Inference {
        pool: pool.name.clone(),
        replica: replica.expect("a rank of a pool is one of a replica"),
        rank,
    };
    Ok(Allowed::Exactly(hosted.into_iter().map(seat).collect()))
}

/// A group's pods are its replicas, one after the other.
fn of_group(pool: &Pool, pod: &PodFacts, place: Marked) -> Result<Vec<Hosted>, SeatError> {
    let per_replica = u64::from(pool.ranks_per_replica.unsigned_abs().max(1));
    let first = u64::from(place.index) * u64::from(ranks::per_pod(pool)) / per_replica;
    beyond(pod, place.index, first, "the largest number of replicas", limits::REPLICAS_MAX.unsigned_abs())?;
    Ok(match pool.ranks.kind {
        RanksType::IndexedJob => ranks::pool_ranks(pool, &place.group, place.index),
        _ => ranks::group_ranks(pool, &place.group, place.index),
    })
}

/// A label names the replica, and its pods come one after the other.
fn of_replica(pool: &Pool, pod: &PodFacts, place: Marked) -> Result<Vec<Hosted>, SeatError> {
    let (per_replica, per_pod) = (pool.ranks_per_replica.unsigned_abs(), ranks::per_pod(pool));
    let first = u64::from(place.index) * u64::from(per_pod);
    beyond(pod, place.index, first, "ranksPerReplica", per_replica)?;
    Ok(match per_pod >= per_replica {
        true => ranks::replicas_of_pod(pool, &place.group),
        false => ranks::group_ranks(pool, &place.group, place.index),
    })
}

fn beyond(pod: &PodFacts, ordinal: u32, first: u64, field: &'static str, size: u32) -> Result<(), SeatError> {
    let size = u64::from(size);
    if first < size {
        return Ok(());
    }
    Err(SeatError::BeyondWorld { pod: pod.shown(), ordinal, first, field, size })
}

/// Which of its owner's pods a pod is.
struct Place<'a> {
    owner: &'a str,
    ordinal: u32,
}

/// By the label of its StatefulSet's controller, else by its name `<owner>-<ordinal>`.
fn place(pod: &PodFacts) -> Result<Place<'_>, SeatError> {
    let fault = |field, value: &str| SeatError::Ordinal { pod: pod.shown(), field, value: value.to_owned() };
    let in_name = pod.name.rsplit_once('-').and_then(|(owner, tail)| Some((owner, decimal(tail)?)));
    let ordinal = match pod.marks.get(POD_INDEX_LABEL) {
        Some(index) => decimal(index).ok_or_else(|| fault("label apps.kubernetes.io/pod-index", index))?,
        None => in_name.ok_or_else(|| fault("the end of metadata.name", &pod.name))?.1,
    };
    let owner = match &pod.owner {
        Some(Owner { kind, name, .. }) if kind == "StatefulSet" => name.as_str(),
        _ => in_name.map_or(pod.name.as_str(), |(owner, _)| owner),
    };
    Ok(Place { owner, ordinal })
}

/// A seat that an agent named itself, short enough for a message.
fn shown(seat: &Seat) -> String {
    seat.to_string().chars().take(120).collect()
}

fn range(seats: &[Seat]) -> String {
    match seats {
        [] => "no seat".to_owned(),
        [one] => one.to_string(),
        [first, .., last] => format!("{first} to {last}"),
    }
}

#[cfg(test)]
mod tests;
