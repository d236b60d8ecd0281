//! What is observed, and what the status says of it.

mod carriers;
mod trainer;

use super::*;
use crate::api::condition::{Condition, ConditionStatus, ConditionType};
use crate::api::policy::Transport;
use crate::controller::pod_facts::{POD_INDEX_LABEL, PodPhase, Side};
use crate::controller::reason::AcceptedReason;
use crate::controller::workload::{Group, Workload};
use crate::coordinator::{AgentView, EndedRound, Refused};
use std::time::{Duration, UNIX_EPOCH};
use weightrefit_core::code::Code;
use weightrefit_core::id::{Epoch, Incarnation, Rank, Sha256};
use weightrefit_core::membership::roster::Standing;
use weightrefit_core::membership::{Member, Membership, Seat};
use weightrefit_proto::report::{RoundOutcome, RoundReport, VersionReport};
use weightrefit_proto::v1;

/// Two training ranks; a pool of replicas of one rank, of which one is needed.
fn spec() -> WeightRefitSpec {
    let json = r#"{
        "model": {"type": "Registered"},
        "training": {"worldSize": 2, "ranks": {"type": "StatefulSet"}},
        "inference": {"pools": [{"name": "default", "ranksPerReplica": 1, "ranks": {"type": "StatefulSet"}}]}
    }"#;
    serde_json::from_str(json).expect(json)
}

fn pod(side: Side, ordinal: u32) -> Arc<PodFacts> {
    let name = format!("{}-{ordinal}", if side == Side::Training { "trainer" } else { "engine" });
    Arc::new(PodFacts {
        namespace: "rl".into(),
        uid: format!("uid of {name}"),
        name,
        refit: "rl/tiny".into(),
        side,
        pool: "default".into(),
        service_account: "sa".into(),
        node: None,
        ips: vec![[127, 0, 0, 1].into()],
        marks: BTreeMap::from([(POD_INDEX_LABEL.to_owned(), ordinal.to_string())]),
        owner: None,
        phase: PodPhase::Running,
        ready: true,
        is_gated: false,
        has_current_weights: false,
        deleting: false,
        created: None,
    })
}

fn seat(side: Side, ordinal: u32) -> Seat {
    match side {
        Side::Training => Seat::Training { rank: Rank(ordinal) },
        Side::Inference => {
            Seat::Inference { pool: "default".into(), replica: format!("engine-{ordinal}"), rank: Rank(0) }
        }
    }
}

const FLEET: [(Side, u32); 4] =
    [(Side::Training, 0), (Side::Training, 1), (Side::Inference, 0), (Side::Inference, 1)];

struct World {
    spec: WeightRefitSpec,
    pods: Vec<Arc<PodFacts>>,
    malformed: Vec<String>,
    workloads: Workloads,
    view: Option<View>,
    accepted: Result<(), Unaccepted>,
    consent: Vec<NoConsent>,
    unwritten_gate: Option<&'static str>,
    is_settling: bool,
    previous: WeightRefitStatus,
    now: i64,
    memory: Memory,
}

impl World {
    /// All pods are there, all agents connected; engines wait for their first version.
    fn new() -> Self {
        let pods: Vec<_> = FLEET.iter().map(|(side, ordinal)| pod(*side, *ordinal)).collect();
        let (mut members, mut agents) = (Vec::new(), BTreeMap::new());
        for (number, ((side, ordinal), pod)) in FLEET.iter().zip(&pods).enumerate() {
            let (incarnation, seat) = (Incarnation(number as u128 + 1), seat(*side, *ordinal));
            members.push(Member {
                seat: seat.clone(),
                pod_uid: pod.uid.clone(),
                incarnation,
                key: Sha256([number as u8; 32]),
                round_addresses: vec![format!("127.0.0.1:{}", 1000 + number)],
                byte_addresses: vec![format!("127.0.0.1:{}", 2000 + number)],
            });
            let claim = match &seat {
                Seat::Training { rank } => {
                    v1::Claim { side: "training".into(), rank: rank.0, ..Default::default() }
                }
                Seat::Inference { pool, replica, rank } => v1::Claim {
                    side: "inference".into(),
                    pool: pool.clone(),
                    replica: replica.clone(),
                    rank: rank.0,
                },
            };
            let engine_state = if *side == Side::Inference { "Cold".into() } else { String::new() };
            let rank =
                v1::RankState { claim: Some(claim), registered: true, engine_state, ..Default::default() };
            let agent = AgentView {
                pod_uid: pod.uid.clone(),
                version: "0.1.0".into(),
                seats: vec![seat],
                accepted: Some(Epoch(1)),
                state: v1::State { ranks: vec![rank], ..Default::default() },
                ..AgentView::default()
            };
            agents.insert(incarnation, agent);
        }
        let membership = Membership::new("uid", Epoch(1), None, vec!["default".into()], members);
        let view = View {
            membership: Some(Arc::new(membership.expect("valid"))),
            cause: None,
            standing: Standing::Complete,
            agents,
            last_round: None,
            last_failed_round: None,
            refused: BTreeMap::new(),
        };
        let previous = WeightRefitStatus {
            membership: Some(crate::api::status::MembershipStatus {
                epoch: 1,
                digest: format!("sha256:{}", "0".repeat(64)),
                version_floor: None,
                generation: 1,
                resolved_digest: format!("sha256:{}", "1".repeat(64)),
                cause: weightrefit_core::membership::roster::Cause::Created,
                start_time: Time(time(0)),
                leader: "rl/trainer-0".into(),
                protocol_version: 1,
                planner_version: 1,
            }),
            ..WeightRefitStatus::default()
        };
        Self {
            spec: spec(),
            pods,
            malformed: Vec::new(),
            workloads: Workloads::default(),
            view: Some(view),
            accepted: Ok(()),
            consent: Vec::new(),
            unwritten_gate: None,
            is_settling: false,
            previous,
            now: 0,
            memory: Memory::default(),
        }
    }

    /// The same after both engines committed a step.
    fn serving(step: i64) -> Self {
        let mut world = Self::new();
        world.engine(0, "Serving", Some(step)).engine(1, "Serving", Some(step)).next();
        world
    }

    fn agent(&mut self, number: u128) -> &mut AgentView {
        self.view.as_mut().unwrap().agents.get_mut(&Incarnation(number)).unwrap()
    }

    fn engine(&mut self, ordinal: u128, state: &str, step: Option<i64>) -> &mut Self {
        let rank = &mut self.agent(3 + ordinal).state.ranks[0];
        rank.engine_state = state.into();
        rank.live = step.map(|step| v1::VersionName { run: 0, step });
        self
    }

    /// What carries the bytes of an engine, as its agent says.
    fn carrier(&mut self, ordinal: u128, transport: &str, code: &str) -> &mut Self {
        let reason = if code.is_empty() { String::new() } else { "why".to_owned() };
        let (pool, replica) = ("default".into(), format!("engine-{ordinal}"));
        let (transport, code) = (transport.into(), code.into());
        self.agent(3 + ordinal).state.carriers = vec![v1::Carrier { pool, replica, transport, code, reason }];
        self
    }

    /// The agent of the first engine's pod was refused at this second.
    fn refuse(&mut self, at: u64, code: Code, message: &str) {
        let fault = crate::coordinator::fault(code, message);
        let refused = Refused { fault, at: UNIX_EPOCH + Duration::from_secs(at) };
        let uid = pod(Side::Inference, 0).uid.clone();
        self.view.as_mut().unwrap().refused.insert(uid, refused);
    }

    fn lose(&mut self, number: u128) -> &mut Self {
        self.view.as_mut().unwrap().agents.remove(&Incarnation(number));
        self
    }

    fn ended(&mut self, step: i64, outcome: RoundOutcome, reason: Option<Code>) -> &mut Self {
        let report = RoundReport {
            id: step.unsigned_abs(),
            epoch: 1,
            version: VersionReport { run: 0, step },
            outcome,
            reason,
            member: reason.map(|_| "inference/default/engine-1/0".into()),
            phase_milliseconds: Default::default(),
            bytes: Default::default(),
            replicas: Vec::new(),
        };
        let heard = UNIX_EPOCH + Duration::from_secs(self.now.unsigned_abs());
        let ended = Arc::new(EndedRound { report, heard });
        let view = self.view.as_mut().unwrap();
        if outcome == RoundOutcome::Aborted {
            view.last_failed_round = Some(Arc::clone(&ended));
        }
        view.last_round = Some(ended);
        self
    }

    /// The status now, which is the previous one from then on.
    fn next(&mut self) -> &WeightRefitStatus {
        self.previous = self.peek();
        &self.previous
    }

    fn peek(&mut self) -> WeightRefitStatus {
        let names: BTreeMap<String, String> = FLEET
            .iter()
            .map(|(side, ordinal)| pod(*side, *ordinal))
            .map(|pod| (pod.uid.clone(), pod.shown()))
            .collect();
        let observed = Observed {
            namespace: "rl",
            name: "tiny",
            generation: 1,
            spec: &self.spec,
            accepted: self.accepted.as_ref().copied(),
            consent: Some(&self.consent),
            pods: &self.pods,
            seating: &crate::controller::seats::seat(&self.spec, &self.pods),
            workloads: &self.workloads,
            is_trainer_done: is_trainer_done(
                &self.spec,
                &self.pods,
                self.workloads.training.as_ref(),
                &self.previous,
            ),
            malformed: &self.malformed,
            view: self.view.as_ref(),
            plan: None,
            unwritten_gate: self.unwritten_gate,
            is_settling: self.is_settling,
            pod_name: &move |uid: &str| names.get(uid).cloned(),
            previous: &self.previous,
            now: time(self.now),
        };
        status(&observed, &mut self.memory).0
    }
}

fn time(second: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + second).unwrap()
}

fn find(status: &WeightRefitStatus, kind: ConditionType) -> Option<&Condition> {
    status.conditions.iter().find(|condition| condition.kind == kind.name())
}

/// All conditions, a word each: `Ready=False/NotEnoughServing`.
fn shown(status: &WeightRefitStatus) -> String {
    let one =
        |condition: &Condition| format!("{}={:?}/{}", condition.kind, condition.status, condition.reason);
    status.conditions.iter().map(one).collect::<Vec<_>>().join(" ")
}

/// Makes a world other than it is when all is well.
type Change = fn(&mut World);

#[test]
fn conditions_follow_from_what_is_observed() {
    let refuse = |world: &mut World| {
        let rejection = Rejection { reason: AcceptedReason::NoConfigMap, message: "ConfigMap rl/x".into() };
        world.accepted = Err(Unaccepted::Rejected(rejection));
    };
    let rows: &[(&str, Change, &str)] = &[
        (
            "all serve",
            |_| {},
            "Ready=True/Refitting Accepted=True/Valid Authorized=True/Permitted MembersResolved=True/Complete CommunicatorsReady=True/Tcp InSync=True/Current Degraded=False/AsExpected",
        ),
        (
            "a pod cannot be read",
            |world| world.malformed.push("pod rl/odd has label x of value `y`".into()),
            "MembersResolved=True/Complete",
        ),
        (
            "a pod cannot be read and a rank is missing",
            |world| {
                world.malformed.push("pod rl/odd has label x of value `y`".into());
                world.pods.remove(0);
                world.lose(1);
            },
            "MembersResolved=False/PodRejected",
        ),
        (
            "an agent was refused lately",
            |world| world.refuse(1_000_030, Code::Unsupported, "joined twice"),
            "Ready=True/Refitting Degraded=True/AgentRefused",
        ),
        (
            "a readiness gate is not written",
            |world| world.unwritten_gate = Some("pod rl/engine-0: forbidden"),
            "Ready=True/Refitting Degraded=True/GateNotWritten",
        ),
        (
            "an agent was refused long ago",
            |world| world.refuse(1_000_000, Code::Unsupported, "joined twice"),
            "Ready=True/Refitting Degraded=False/AsExpected",
        ),
        (
            "two agents announce one rank",
            |world| {
                world.refuse(1_000_030, Code::DuplicateRank, "pod a claims b, which the older pod c holds")
            },
            "MembersResolved=False/DuplicateRank",
        ),
        (
            "the API server did not give what is named",
            |world| world.accepted = Err(Unaccepted::Unreadable("ConfigMap x".into())),
            "Accepted=Unknown/Unreadable Degraded=True/ChangeRefused",
        ),
        (
            "a change is refused",
            refuse,
            "Accepted=False/NoConfigMap Degraded=True/ChangeRefused Stalled=True/NotAccepted",
        ),
        (
            "the API server did not say who may take part",
            |world| world.consent.push(NoConsent::Unknown { pod: "rl/engine-0".into(), why: "busy".into() }),
            "Authorized=Unknown/ReviewFailed",
        ),
        ("no pods", |world| world.pods.clear(), "Authorized=True/NoPods MembersResolved=False/RankGap"),
        ("a training pod is missing", |world| drop(world.pods.remove(1)), "MembersResolved=False/RankGap"),
        ("no engine pods", |world| world.pods.truncate(2), "MembersResolved=False/NotEnoughReady"),
        (
            "two pods of one rank",
            |world| {
                let mut twin = (*pod(Side::Training, 1)).clone();
                (twin.name, twin.uid) = ("twin-1".into(), "uid of twin-1".into());
                world.pods.push(Arc::new(twin));
            },
            "MembersResolved=False/DuplicateRank",
        ),
        (
            "an agent is lost",
            |world| {
                world.lose(4);
            },
            "CommunicatorsReady=False/AgentsMissing Degraded=True/AgentsLost",
        ),
        (
            "an agent has not answered",
            |world| world.agent(1).accepted = None,
            "CommunicatorsReady=False/Configuring",
        ),
        (
            "an agent refused",
            |world| {
                world.agent(1).refused = Some(v1::Fault { code: "PlanMismatch".into(), ..Default::default() })
            },
            "CommunicatorsReady=False/Refused",
        ),
        (
            "a registration is refused",
            |world| world.agent(3).state.ranks[0].fault = Some(v1::Fault::default()),
            "Degraded=True/RegistrationRefused",
        ),
        (
            "an engine is fenced",
            |world| {
                world.engine(1, "Dirty", None);
            },
            "InSync=False/ReplicasFenced Degraded=True/ReplicasFenced",
        ),
        (
            "an engine is a round behind",
            |world| {
                world.engine(1, "Serving", Some(8)).engine(0, "Serving", Some(9));
            },
            "InSync=True/Current",
        ),
        (
            "an engine is two rounds behind",
            |world| {
                world.engine(0, "Serving", Some(9)).next();
                world.engine(0, "Serving", Some(10));
            },
            "InSync=False/ReplicasBehind",
        ),
        (
            "a round failed",
            |world| {
                world.ended(9, RoundOutcome::Aborted, Some(Code::DigestMismatch));
            },
            "Degraded=True/RoundFailed",
        ),
        (
            "the coordinator has just started",
            |world| {
                world.is_settling = true;
                world.view.as_mut().unwrap().agents.clear();
            },
            "CommunicatorsReady=True/Tcp InSync=True/Current Degraded=False/AsExpected",
        ),
        (
            "a round runs",
            |world| {
                world.agent(1).state.round_open = true;
                world.engine(0, "Quiet", Some(8)).engine(1, "Applied", Some(8));
            },
            "Ready=True/Refitting InSync=True/Current Degraded=False/AsExpected",
        ),
    ];
    for (what, change, want) in rows {
        let mut world = World::serving(8);
        change(&mut world);
        world.now = 60;
        let got = shown(&world.peek());
        for word in want.split(' ') {
            assert!(got.split(' ').any(|condition| condition == word), "{what}: no {word} in {got}");
        }
    }
}

#[test]
fn ready_turns_true_at_once_and_false_only_when_it_lasts() {
    let mut world = World::new();
    assert!(shown(world.next()).starts_with("Ready=False/NotEnoughServing"));
    world.engine(0, "Serving", Some(1)).now = 5;
    let ready = find(world.next(), ConditionType::Ready).unwrap().clone();
    assert_eq!((ready.status, ready.last_transition_time), (ConditionStatus::True, Time(time(5))));
    world.engine(0, "Cold", None);
    for (now, want) in [(10, "True"), (39, "True"), (40, "False"), (41, "False")] {
        world.now = now;
        let ready = find(world.next(), ConditionType::Ready).unwrap();
        assert_eq!(format!("{:?}", ready.status), want, "at {now}");
        let since = if want == "True" { 5 } else { 40 };
        assert_eq!(ready.last_transition_time, Time(time(since)), "at {now}");
    }
}

#[test]
fn ready_that_recovers_in_time_was_never_false() {
    let mut world = World::serving(1);
    for (now, state) in [(10, "Cold"), (30, "Serving"), (35, "Cold"), (60, "Cold")] {
        world.engine(0, state, (state == "Serving").then_some(1)).engine(
            1,
            state,
            (state == "Serving").then_some(1),
        );
        world.now = now;
        assert_eq!(
            find(world.next(), ConditionType::Ready).unwrap().status,
            ConditionStatus::True,
            "at {now}"
        );
    }
}

#[test]
fn nothing_is_written_while_nothing_changes() {
    let mut world = World::serving(3);
    world.next();
    let before = world.next().clone();
    world.now = 3600;
    assert_eq!(world.peek(), before);
}

#[test]
fn a_lost_replica_is_listed_with_where_and_since_when() {
    let mut world = World::serving(3);
    world.lose(4).now = 7;
    world.next();
    world.now = 20;
    let behind = &world.next().behind;
    let [one] = &behind[..] else { panic!("{behind:?}") };
    assert_eq!((one.replica.as_str(), one.reason.as_str()), ("engine-1", "PeerLost"));
    assert_eq!((one.pod.as_deref(), one.rank, &one.since), (Some("rl/engine-1"), Some(0), &Time(time(7))));
}

#[test]
fn the_worst_ten_are_listed_and_messages_fit() {
    let mut world = World::serving(3);
    world.pods.extend((2..30).map(|ordinal| pod(Side::Inference, ordinal)));
    world.engine(0, "Dirty", None).lose(4);
    let rejection = Rejection { reason: AcceptedReason::LayoutRejected, message: "é".repeat(2000) };
    world.accepted = Err(Unaccepted::Rejected(rejection));
    let status = world.peek();
    let names: Vec<&str> = status.behind.iter().map(|behind| behind.replica.as_str()).collect();
    assert_eq!((names.len(), &names[..2]), (limits::BEHIND_MAX, &["engine-1", "engine-0"][..]));
    for condition in &status.conditions {
        assert!(condition.message.chars().count() <= limits::MESSAGE_MAX, "{}", condition.kind);
    }
    let bytes = serde_json::to_vec(&status).unwrap().len();
    assert!(bytes < 8 << 10, "{bytes}");
}

#[test]
fn rounds_are_told_with_where_they_failed() {
    let mut world = World::serving(3);
    world.now = 30;
    world.ended(4, RoundOutcome::Aborted, Some(Code::DigestMismatch));
    let status = world.next().clone();
    let failed = status.last_failed_round.as_ref().unwrap();
    assert_eq!(status.last_round.as_ref(), Some(failed));
    assert_eq!(
        (failed.reason.as_deref(), failed.pod.as_deref()),
        (Some("DigestMismatch"), Some("rl/engine-1"))
    );
    world.ended(5, RoundOutcome::Committed, None);
    let status = world.next();
    assert_eq!(status.last_failed_round.as_ref().unwrap().version.step, 4, "it stays");
    assert_eq!(status.last_round.as_ref().unwrap().reason, None);
    assert_eq!(status.inference.as_ref().unwrap().committed, Some(Version { run: 0, step: 5 }));
}

#[test]
fn a_new_operator_forgets_nothing_that_the_status_tells() {
    let mut world = World::serving(3);
    world.ended(3, RoundOutcome::Committed, None).next();
    let before = world.next().clone();
    let view = world.view.as_mut().unwrap();
    (view.last_round, view.membership) = (None, None);
    view.agents.clear();
    world.is_settling = true;
    assert_eq!(world.peek(), before);
}

#[test]
fn what_workloads_ask_for_is_told_and_one_that_has_finished_ends_the_trainer() {
    let workload = |shown: &str, told: Told| Some(Workload { shown: shown.into(), told });
    let pods = |pods| Told::Pods(vec![Group { name: String::new(), groups: 1, pods }]);
    let rows = [
        // What the trainer's and the engines' workloads tell, pods of the trainer; desired, state, what is said.
        (
            Told::Missing,
            Told::Missing,
            2,
            2,
            "Running",
            "; Job rl/trainer does not exist; StatefulSet rl/engine",
        ),
        (pods(2), pods(2), 2, 2, "Running", "1 needed."),
        (
            pods(1),
            pods(5),
            2,
            5,
            "Running",
            "; Job rl/trainer asks for 1 of 2 ranks; StatefulSet rl/engine asks for 5",
        ),
        (pods(2), pods(1 << 40), 2, limits::ALL_REPLICAS_MAX, "Running", "asks for 2147483647 replicas"),
        (
            Told::Suspended,
            pods(0),
            0,
            0,
            "Absent",
            "; Job rl/trainer is suspended; StatefulSet rl/engine asks for 0",
        ),
        (Told::Failed, pods(2), 0, 2, "Absent", "; Job rl/trainer has failed"),
        (Told::Completed, pods(2), 0, 2, "Completed", "; Job rl/trainer has finished"),
        (Told::Completed, pods(2), 2, 2, "Running", "; Job rl/trainer has finished"),
    ];
    for (trainer, engines, training_pods, desired, state, said) in rows {
        let mut world = World::serving(3);
        let what = format!("{trainer:?} {engines:?} {training_pods}");
        world.workloads = Workloads {
            training: workload("Job rl/trainer", trainer),
            pools: vec![workload("StatefulSet rl/engine", engines)],
        };
        world.pods.drain(..2 - training_pods);
        let status = world.peek();
        assert_eq!(status.inference.as_ref().unwrap().desired_replicas, desired, "{what}");
        assert_eq!(format!("{:?}", status.training.as_ref().unwrap().state), state, "{what}");
        let resolved = find(&status, ConditionType::MembersResolved).unwrap();
        assert!(resolved.message.contains(said), "{what}: {}", resolved.message);
        assert_eq!(resolved.reason == "TrainerCompleted", state == "Completed", "{what}");
    }
}
