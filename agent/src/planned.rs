//! A membership with all that follows from it: layouts, plan, topology, and what each rank of this agent sends or
//! receives. Made off the async threads, once per epoch; the same facts in every agent.
//!
//! Invariants:
//! - N1: everything is a function of the bytes that the coordinator sent.
//! - N2: a pool's replica indices of the plan are its replicas in the membership's order, which is bytewise too.

mod sides;

use crate::executor::{DigestProgram, ExecutorError, Placements, Program, RankMemory};
use crate::transport::nccl::{LaneMember, LanePlan};
use crate::transport::tcp::{Peers, ReceiveFrom, ReceiveJob, Resting, SendJob, SendTo};
use sides::{Side, plan, side_of, sides, verification};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;
use weightrefit_core::code::Code;
use weightrefit_core::digest::{Classes, ColumnKeys, LedgerError, Unverified};
use weightrefit_core::id::{Epoch, Incarnation, MemberId, Rank, RoundId, Sha256};
use weightrefit_core::layout::LayoutError;
use weightrefit_core::membership::accept::{ConfigureError, accept};
use weightrefit_core::membership::{Membership, Seat};
use weightrefit_core::model::{TableError, TensorTable};
use weightrefit_core::plan::moves::{Endpoint, PairMoves};
use weightrefit_core::plan::{Plan, PlanError};
use weightrefit_core::region::{LocalTensor, RankRegions};
use weightrefit_core::round::io::Slot;
use weightrefit_core::round::topology::{self, DigestLedger, PairFacts, Policies, Topology, TopologyError};
use weightrefit_proto::refit::{self, Refit};

/// Number of the planner's rules, as agents announce it.
pub(crate) const PLANNER_VERSION: u32 = weightrefit_core::plan::PLANNER_VERSION as u32;

/// A membership and what follows from it.
#[derive(Debug)]
pub struct Planned {
    /// Who is who.
    pub membership: Arc<Membership>,
    /// For the round machines.
    pub topology: Arc<Topology>,
    /// For byte streams.
    pub(crate) peers: Arc<Peers>,
    /// By slot.
    pub(crate) slots: Vec<SlotPlan>,
    pub(crate) table: TensorTable,
    /// Shared by all digests; `None` with verification disabled.
    pub(crate) keys: Option<Arc<ColumnKeys>>,
    /// By replica, those that receive anything; none where bytes may not go by NCCL.
    pub(crate) lanes: Vec<LanePlan>,
    /// Whether they may go no other way.
    pub(crate) needs_lanes: bool,
    /// What engines are told to do with requests when they pause.
    pub(crate) in_flight: refit::InFlight,
    /// What engines are told to do with keys and values when they commit.
    pub(crate) kv_cache: refit::KvCache,
}

/// What one rank of this agent is in this membership.
#[derive(Debug)]
pub(crate) struct SlotPlan {
    pub(crate) seat: Seat,
    pub(crate) member: MemberId,
    /// Digest of its side's or pool's layout.
    pub(crate) layout: Sha256,
    /// What it stores; local tensors sorted by name.
    pub(crate) regions: RankRegions,
    pub(crate) task: Task,
    /// Of its side or pool; `None` with verification disabled.
    classes: Option<Arc<Classes>>,
}

/// Its part of the plan.
#[derive(Debug)]
pub(crate) enum Task {
    /// A training rank, by destination, in the order of the plan.
    Send(Vec<Sending>),
    /// An inference rank.
    Receive(Receiving),
}

/// What a training rank sends to one destination.
#[derive(Debug)]
pub(crate) struct Sending {
    pub(crate) destination: MemberId,
    pub(crate) replica: u32,
    pub(crate) pair: Sha256,
    pub(crate) moves: PairMoves,
    /// Local tensors of the destination, whose dtypes the wire has.
    pub(crate) locals: Arc<Vec<LocalTensor>>,
}

/// What an inference rank receives.
#[derive(Debug)]
pub(crate) struct Receiving {
    pub(crate) replica: u32,
    pub(crate) placements: Arc<Placements>,
    pub(crate) staging_bytes: u64,
    /// Bytes that the plan delivers.
    pub(crate) minimum: u64,
    pub(crate) sources: Vec<ReceiveFrom>,
    pub(crate) digest: Option<Arc<DigestProgram>>,
}

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PlannedError {
    /// Not the JSON of a membership, or one that cannot be.
    #[error("malformed membership: {0}")]
    Membership(serde_json::Error),
    /// Not the JSON of a refit.
    #[error("malformed refit: {0}")]
    Refit(serde_json::Error),
    /// It is not for this agent.
    #[error(transparent)]
    Configure(#[from] ConfigureError),
    /// Tensors.
    #[error(transparent)]
    Table(#[from] TableError),
    /// A layout.
    #[error("layout of {side}: {source}")]
    Layout {
        /// `training` or the pool.
        side: String,
        /// Why.
        source: Box<LayoutError>,
    },
    /// Membership and refit disagree.
    #[error("{what} has {found} {unit}, the membership {expected}")]
    Disagree {
        /// A side or the refit.
        what: String,
        /// Ranks or pools.
        unit: &'static str,
        /// In the refit.
        found: usize,
        /// In the membership.
        expected: usize,
    },
    /// No plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Nothing to compare digests with.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// Facts that do not fit.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// Sizes that do not fit.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    /// An address that is none.
    #[error("`{address}` of {seat} is no address and port")]
    Address {
        /// As the member reported it.
        address: String,
        /// Whose.
        seat: Seat,
    },
    /// Not yet.
    #[error("{0} is not supported by this agent")]
    Unsupported(&'static str),
}

impl PlannedError {
    /// The stable code.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::Configure(error) => error.code(),
            Self::Table(error) => error.code(),
            Self::Layout { source, .. } => source.code(),
            Self::Plan(error) => error.code(),
            Self::Disagree { .. } => Code::RankGap,
            Self::Ledger(error) => error.code(),
            Self::Membership(_)
            | Self::Refit(_)
            | Self::Topology(_)
            | Self::Executor(_)
            | Self::Address { .. }
            | Self::Unsupported(_) => Code::Unsupported,
        }
    }
}

impl Planned {
    /// Reads, checks and plans. `seats` are those of this agent, by slot.
    ///
    /// # Errors
    /// Why the configuration cannot be used; the coordinator is told.
    pub fn new(
        membership: &[u8],
        refit: &[u8],
        incarnation: Incarnation,
        seats: &[Seat],
    ) -> Result<Self, PlannedError> {
        let membership: Membership = serde_json::from_slice(membership).map_err(PlannedError::Membership)?;
        let refit: Refit = serde_json::from_slice(refit).map_err(PlannedError::Refit)?;
        accept(incarnation, seats, None, &membership)?;
        if !refit.policy.encrypt_bytes {
            return Err(PlannedError::Unsupported("`encryption: Disabled`"));
        }
        let table = refit.table()?;
        let (mut training, mut pools) = sides(&membership, &refit, &table)?;
        let plan = plan(&table, &training, &pools, &membership)?;
        let members = Members::new(&membership);
        let mut pairs = BTreeMap::new();
        let summary = plan.summarize();
        for route in &summary.routes {
            let ends = (members.of(route.source), members.of(route.destination));
            let (Some(source), Some(destination)) = ends else { continue };
            pairs.insert((source, destination), PairFacts { bytes: route.bytes, digest: route.digest });
        }
        let layouts =
            membership.members().iter().map(|member| side_of(&member.seat, &training, &pools).layout);
        let layouts = layouts.collect();
        let (ledger, keys): (Arc<dyn DigestLedger>, _) = match refit.policy.verify {
            true => {
                let (ledger, keys) = verification(&membership, &table, &mut training, &mut pools)?;
                (Arc::new(ledger), Some(Arc::new(keys)))
            }
            false => (Arc::new(Unverified), None),
        };
        let lanes = match refit.policy.fabric {
            refit::Fabric::Never => Vec::new(),
            refit::Fabric::Auto | refit::Fabric::Required => lanes(&membership, &pairs)?,
        };
        let topology = Topology::new(&membership, summary.digest, layouts, pairs, policies(&refit), ledger)?;
        let mut planned = Self {
            peers: Arc::new(peers(&membership)),
            membership: Arc::new(membership),
            topology: Arc::new(topology),
            slots: Vec::new(),
            table,
            keys,
            lanes,
            needs_lanes: refit.policy.fabric == refit::Fabric::Required,
            in_flight: refit.policy.in_flight,
            kv_cache: refit.policy.kv_cache,
        };
        let seats = seats.iter().map(|seat| planned.slot(seat, &plan, &members, &training, &pools));
        planned.slots = seats.collect::<Result<_, _>>()?;
        Ok(planned)
    }

    /// What a rank digests, for memory with these placements; `None` with verification disabled.
    pub(crate) fn digest_program(
        &self,
        slot: &SlotPlan,
        placements: &Placements,
    ) -> Result<Option<Arc<DigestProgram>>, ExecutorError> {
        let Some(classes) = &slot.classes else { return Ok(None) };
        let (Seat::Training { rank } | Seat::Inference { rank, .. }) = slot.seat;
        let program = DigestProgram::new(classes, rank, &slot.regions, &self.table, placements)?;
        Ok(Some(Arc::new(program)))
    }

    /// Epoch of the membership.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.membership.epoch()
    }

    /// The replica that a slot is a rank of.
    pub(crate) fn replica_of(&self, slot: Slot) -> Option<u32> {
        match &self.slots.get(slot.0 as usize)?.task {
            Task::Receive(receiving) => Some(receiving.replica),
            Task::Send(_) => None,
        }
    }

    /// What a destination asks of its sources.
    pub(crate) fn receive_job(
        &self,
        slot: Slot,
        round: RoundId,
        memory: RankMemory,
        deadline: Instant,
        (lane, resting): (Option<Arc<LaneMember>>, Arc<Resting>),
    ) -> Option<ReceiveJob> {
        let plan = self.slots.get(slot.0 as usize)?;
        let Task::Receive(receiving) = &plan.task else { return None };
        Some(ReceiveJob {
            peers: Arc::clone(&self.peers),
            round,
            member: plan.member,
            memory,
            sources: receiving.sources.clone(),
            streams: crate::limits::STREAMS_PER_PAIR,
            deadline,
            lane,
            resting,
        })
    }

    /// What a source offers to one replica.
    pub(crate) fn send_job(
        &self,
        slot: Slot,
        round: RoundId,
        replica: u32,
        memory: RankMemory,
        programs: &BTreeMap<MemberId, Arc<Program>>,
        lane: Option<Arc<LaneMember>>,
    ) -> Option<SendJob> {
        let plan = self.slots.get(slot.0 as usize)?;
        let Task::Send(sends) = &plan.task else { return None };
        let of_replica = sends.iter().filter(|send| send.replica == replica);
        let destinations = of_replica.map(|send| {
            let program = Arc::clone(programs.get(&send.destination)?);
            Some(SendTo { member: send.destination, replica, pair: send.pair, program })
        });
        let destinations = destinations.collect::<Option<_>>()?;
        let peers = Arc::clone(&self.peers);
        let replicas = vec![replica];
        Some(SendJob { peers, round, member: plan.member, memory, replicas, destinations, lane })
    }

    fn slot(
        &self,
        seat: &Seat,
        plan: &Plan,
        members: &Members,
        training: &Side,
        pools: &[Side],
    ) -> Result<SlotPlan, PlannedError> {
        let side = side_of(seat, training, pools);
        let (Seat::Training { rank } | Seat::Inference { rank, .. }) = seat;
        let regions = side.ranks[rank.0 as usize].clone();
        // `accept` has found every seat in the membership.
        let found = self.membership.iter().find(|(_, member)| member.seat == *seat);
        let (member, _) = found.expect("the membership names every seat");
        let mut slice = members.endpoints.get(&member).map(|of| plan.slice(*of)).unwrap_or_default();
        let task = match seat {
            Seat::Training { .. } => Task::Send(
                slice.sends.drain(..).filter_map(|moves| self.sending(moves, members, pools)).collect(),
            ),
            Seat::Inference { .. } => {
                let (placements, staging_bytes) = Placements::staging(regions.locals.clone())?;
                let placements = Arc::new(placements);
                let sources = self.sources(&slice.receives, members, &placements)?;
                // Every inference rank is a rank of a replica of its membership.
                let replica = self.topology.replica_of(member).expect("an inference rank has a replica");
                let minimum = self.topology.planned_bytes(member);
                let digest = None;
                Task::Receive(Receiving { replica, placements, staging_bytes, minimum, sources, digest })
            }
        };
        let (layout, classes) = (side.layout, side.classes.clone());
        let mut slot = SlotPlan { seat: seat.clone(), member, layout, regions, task, classes };
        if let Task::Receive(receiving) = &slot.task {
            let digest = self.digest_program(&slot, &receiving.placements)?;
            if let Task::Receive(receiving) = &mut slot.task {
                receiving.digest = digest;
            }
        }
        Ok(slot)
    }

    fn sending(&self, moves: PairMoves, members: &Members, pools: &[Side]) -> Option<Sending> {
        let destination = members.of(moves.destination)?;
        let Endpoint::Inference { pool, rank, .. } = moves.destination else { return None };
        let locals = Arc::new(pools[pool as usize].ranks[rank.0 as usize].locals.clone());
        let replica = self.topology.replica_of(destination)?;
        Some(Sending { destination, replica, pair: moves.digest(), moves, locals })
    }

    fn sources(
        &self,
        receives: &[PairMoves],
        members: &Members,
        placements: &Arc<Placements>,
    ) -> Result<Vec<ReceiveFrom>, PlannedError> {
        let mut sources = Vec::with_capacity(receives.len());
        for moves in receives {
            let Some(member) = members.of(moves.source) else { continue };
            let addresses = byte_addresses(&self.membership, member)?;
            let program = Arc::new(Program::for_destination(moves, placements)?);
            sources.push(ReceiveFrom { member, addresses, pair: moves.digest(), program });
        }
        Ok(sources)
    }
}

/// Members by the endpoints of the plan, and back.
struct Members {
    by_endpoint: BTreeMap<Endpoint, MemberId>,
    endpoints: BTreeMap<MemberId, Endpoint>,
}

impl Members {
    fn new(membership: &Membership) -> Self {
        let mut endpoints = BTreeMap::new();
        for (rank, member) in (0..).zip(membership.training()) {
            endpoints.insert(member, Endpoint::Training { rank: Rank(rank) });
        }
        let mut seen = BTreeMap::<u32, u32>::new();
        for found in membership.replicas() {
            let next = seen.entry(found.pool).or_default();
            let replica = *next; // N2
            *next += 1;
            for (rank, member) in (0..).zip(&found.ranks) {
                let endpoint = Endpoint::Inference { pool: found.pool, replica, rank: Rank(rank) };
                endpoints.insert(*member, endpoint);
            }
        }
        let by_endpoint = endpoints.iter().map(|(member, endpoint)| (*endpoint, *member)).collect();
        Self { by_endpoint, endpoints }
    }

    fn of(&self, endpoint: Endpoint) -> Option<MemberId> {
        self.by_endpoint.get(&endpoint).copied()
    }
}

fn policies(refit: &Refit) -> Policies {
    Policies {
        timeouts: refit.policy.timeouts,
        on_replica_failure: match refit.policy.on_replica_failure {
            refit::OnReplicaFailure::FenceReplica => topology::OnReplicaFailure::FenceReplica,
            refit::OnReplicaFailure::AbortRound => topology::OnReplicaFailure::AbortRound,
        },
        min_replicas: refit.pools.iter().map(|pool| pool.min_replicas).collect(),
    }
}

fn peers(membership: &Membership) -> Peers {
    Peers {
        refit_uid: membership.refit_uid().into(),
        epoch: membership.epoch(),
        membership: membership.digest(),
        agents: membership.members().iter().map(|member| (member.incarnation, member.key)).collect(),
    }
}

/// Where the byte port of a member's agent may be.
fn byte_addresses(membership: &Membership, member: MemberId) -> Result<Vec<SocketAddr>, PlannedError> {
    let Some(found) = membership.member(member) else { return Ok(Vec::new()) };
    let address = |text: &String| {
        let error = || PlannedError::Address { address: text.clone(), seat: found.seat.clone() };
        text.parse::<SocketAddr>().map_err(|_| error())
    };
    found.byte_addresses.iter().map(address).collect()
}

/// A lane for each replica that receives anything.
fn lanes(
    membership: &Membership,
    pairs: &BTreeMap<(MemberId, MemberId), PairFacts>,
) -> Result<Vec<LanePlan>, PlannedError> {
    let addresses: Vec<Vec<SocketAddr>> =
        membership.iter().map(|(id, _)| byte_addresses(membership, id)).collect::<Result<_, _>>()?;
    let address = |member: MemberId| addresses.get(member.0 as usize).cloned().unwrap_or_default();
    let lane = |(index, replica): (u32, weightrefit_core::membership::Replica)| {
        let own = pairs.iter().filter(|((_, to), pair)| pair.bytes > 0 && replica.ranks.contains(to));
        LanePlan::new(membership, index, &own.map(|(ends, _)| *ends).collect(), address)
    };
    Ok((0..).zip(membership.replicas()).filter_map(lane).collect())
}
