//! Pods of one refit, and the seats that they get.

use super::*;
use crate::controller::pod_facts::PodPhase;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// One training pod type and one pool, as JSON of their `ranks` and sizes.
fn spec(training: &str, pool: &str) -> WeightRefitSpec {
    let json = format!(
        r#"{{"model": {{"type": "Registered"}}, "training": {{{training}}},
            "inference": {{"pools": [{{"name": "default", {pool}}}]}}}}"#
    );
    serde_json::from_str(&json).expect(&json)
}

const TRAINING: &str = r#""worldSize": 4, "ranks": {"type": "StatefulSet", "ranksPerPod": 2}"#;
const POOL: &str = r#""ranksPerReplica": 2, "ranks": {"type": "StatefulSet"}"#;

fn pod(side: Side, name: &str) -> PodFacts {
    PodFacts {
        namespace: "rl".into(),
        name: name.into(),
        uid: format!("uid-{name}"),
        refit: "rl/tiny".into(),
        side,
        pool: "default".into(),
        service_account: "default".into(),
        node: None,
        ips: vec!["10.0.0.1".parse().expect("an address")],
        marks: BTreeMap::new(),
        owner: None,
        phase: PodPhase::Running,
        ready: true,
        is_gated: false,
        has_current_weights: false,
        deleting: false,
        created: None,
    }
}

fn list(allowed: &Allowed) -> String {
    match allowed {
        Allowed::Exactly(seats) => seats.iter().map(Seat::to_string).collect::<Vec<_>>().join(" "),
        Allowed::Announced(bounds) => bounds.shown(),
    }
}

#[test]
fn a_pod_holds_the_seats_of_its_ordinal_or_of_its_name() {
    let deployment = r#""ranksPerReplica": 1, "ranks": {"type": "Deployment", "ranksPerPod": 2}"#;
    let halves = r#""ranksPerReplica": 4, "ranks": {"type": "StatefulSet", "ranksPerPod": 2}"#;
    let registered = r#""ranksPerReplica": 2, "ranks": {"type": "Registered"}"#;
    let alone = r#""worldSize": 2, "ranks": {"type": "Deployment", "ranksPerPod": 2}"#;
    let announced = r#""worldSize": 4, "ranks": {"type": "Registered", "ranksPerPod": 2}"#;
    for (training, pool, side, name, want) in [
        (TRAINING, POOL, Side::Training, "trainer-1", "training/2 training/3"),
        (alone, POOL, Side::Training, "trainer-7f-x", "training/0 training/1"),
        (announced, POOL, Side::Training, "t", "2 of the ranks 0 to 3 of training"),
        (TRAINING, POOL, Side::Inference, "vllm-1", "inference/default/vllm-1/0 inference/default/vllm-1/1"),
        (
            TRAINING,
            halves,
            Side::Inference,
            "vllm-3",
            "inference/default/vllm-1/2 inference/default/vllm-1/3",
        ),
        (TRAINING, deployment, Side::Inference, "e-x", "inference/default/e-x/0/0 inference/default/e-x/1/0"),
        (
            TRAINING,
            registered,
            Side::Inference,
            "ray",
            "any number of the ranks 0 to 1 of inference/default/REPLICA",
        ),
    ] {
        let allowed = allowed(&spec(training, pool), &pod(side, name)).expect(name);
        assert_eq!(list(&allowed), want);
    }
}

#[test]
fn the_label_of_the_controller_counts_before_the_name() {
    let mut pod = pod(Side::Training, "trainer-0");
    pod.marks.insert(POD_INDEX_LABEL.to_owned(), "1".to_owned());
    assert_eq!(list(&allowed(&spec(TRAINING, POOL), &pod).expect("a seat")), "training/2 training/3");
    let owner = Owner { kind: "StatefulSet".into(), name: "engines".into(), uid: String::new() };
    (pod.side, pod.owner) = (Side::Inference, Some(owner));
    let want = "inference/default/engines-1/0 inference/default/engines-1/1";
    assert_eq!(list(&allowed(&spec(TRAINING, POOL), &pod).expect("a seat")), want);
}

#[test]
fn what_is_wrong_names_the_pod_and_the_field() {
    let alike = r#""worldSize": 4, "ranks": {"type": "Deployment"}"#;
    for (training, side, name, index, pool, want) in [
        (
            TRAINING,
            Side::Training,
            "trainer",
            None,
            "default",
            "rl/trainer has no ordinal: the end of metadata.name is `trainer`",
        ),
        (TRAINING, Side::Training, "trainer-01", None, "default", "the end of metadata.name is `trainer-01`"),
        (
            TRAINING,
            Side::Training,
            "trainer-0",
            Some("x"),
            "default",
            "label apps.kubernetes.io/pod-index is `x`",
        ),
        (
            TRAINING,
            Side::Training,
            "trainer-2",
            None,
            "default",
            "ordinal 2 begins at rank 4, and training.worldSize is 4",
        ),
        (TRAINING, Side::Training, "trainer-4294967295", None, "default", "begins at rank 8589934590"),
        (TRAINING, Side::Inference, "vllm-1024", None, "default", "the largest number of replicas is 1024"),
        (TRAINING, Side::Inference, "vllm-0", None, "big", "label weightrefit.dev/pool of `big`"),
        (
            alike,
            Side::Training,
            "trainer-0",
            None,
            "default",
            "does not support training.ranks.type Deployment",
        ),
    ] {
        let mut pod = pod(side, name);
        pod.marks.extend(index.map(|index: &str| (POD_INDEX_LABEL.to_owned(), index.to_owned())));
        pod.pool = pool.to_owned();
        let error = allowed(&spec(training, POOL), &pod).expect_err(name).to_string();
        assert!(error.starts_with(&format!("pod rl/{name} ")) && error.contains(want), "{error}");
    }
}

#[test]
fn the_older_of_two_pods_holds_a_seat_and_one_that_goes_away_holds_none() {
    let at = |text: &str| Some(Time(text.parse().expect("a time")));
    let mut young = pod(Side::Training, "other-0");
    let mut old = pod(Side::Training, "trainer-0");
    (young.created, old.created) = (at("2026-01-02T00:00:00Z"), at("2026-01-01T00:00:00Z"));
    let seats = |pods: &[&PodFacts]| {
        let pods: Vec<_> = pods.iter().map(|pod| Arc::new((*pod).clone())).collect();
        let Seating { holders, errors } = seat(&spec(TRAINING, POOL), &pods);
        let holders: Vec<_> = holders.iter().map(|(seat, pod)| format!("{seat}={}", pod.name)).collect();
        (holders.join(" "), errors.iter().map(SeatError::to_string).collect::<Vec<_>>().join("; "))
    };
    let (holders, errors) = seats(&[&young, &old]);
    assert_eq!(holders, "training/0=trainer-0 training/1=trainer-0");
    assert_eq!(errors, "pod rl/other-0 claims seat training/0, which the older pod rl/trainer-0 holds");
    old.deleting = true;
    assert_eq!(seats(&[&young, &old]), ("training/0=other-0 training/1=other-0".into(), String::new()));
    young.phase = PodPhase::Failed;
    assert_eq!(seats(&[&young, &old]), (String::new(), String::new()));
    (young.phase, young.ips) = (PodPhase::Pending, vec![]);
    assert_eq!(seats(&[&young]).1, "pod rl/other-0 has no status.podIPs yet");
    (old.deleting, old.ips, young.ips) = (false, vec![], old.ips.clone());
    let (holders, errors) = seats(&[&young, &old]);
    assert_eq!(holders, "", "the older one need not be reached to hold its seat");
    assert!(errors.starts_with("pod rl/trainer-0 has no") && errors.contains("older pod rl/trainer-0"));
}

#[test]
fn an_agent_announces_all_that_its_pod_holds_and_nothing_else() {
    let training = |rank| Seat::Training { rank: weightrefit_core::id::Rank(rank) };
    let inference = |replica: &str, rank| Seat::Inference {
        pool: "default".into(),
        replica: replica.into(),
        rank: weightrefit_core::id::Rank(rank),
    };
    let registered = r#""worldSize": 4, "ranks": {"type": "Registered", "ranksPerPod": 2}"#;
    let free = r#""ranksPerReplica": 2, "ranks": {"type": "Registered"}"#;
    for (world, side, announced, want) in [
        (TRAINING, Side::Training, vec![training(1), training(0)], ""),
        (TRAINING, Side::Training, vec![training(0)], "announces no seat training/1"),
        (TRAINING, Side::Training, vec![training(0), training(1), training(2)], "announces training/2"),
        (registered, Side::Training, vec![training(3), training(0)], ""),
        (registered, Side::Training, vec![training(3), training(4)], "announces training/4"),
        (registered, Side::Training, vec![training(3)], "announces 1 seats"),
        (registered, Side::Training, vec![inference("a", 0)], "announces inference/default/a/0"),
        (TRAINING, Side::Inference, vec![inference("a", 1)], ""),
        (TRAINING, Side::Inference, vec![inference("a", 2)], "announces inference/default/a/2"),
        (TRAINING, Side::Inference, vec![inference("", 0)], "announces inference/default//0"),
        (TRAINING, Side::Inference, vec![training(0)], "announces training/0"),
    ] {
        let pod = pod(side, "trainer-0");
        let allowed = allowed(&spec(world, free), &pod).expect("a pod in order");
        match allowed.check(&pod, &announced) {
            Ok(()) => assert_eq!(want, "", "{announced:?}"),
            Err(error) => assert!(!want.is_empty() && error.to_string().contains(want), "{error}"),
        }
    }
}

/// When the other pod of the same rank was made, in seconds after this one, what else is changed of it, and whether it keeps
/// this one from the rank.
#[test]
fn an_older_pod_of_the_same_rank_is_a_rival_and_no_other() {
    let unchanged: fn(&mut PodFacts) = |_| {};
    for (later, change, is_rival) in [
        (-1, unchanged, true),
        (1, unchanged, false),
        (-1, |pod| pod.deleting = true, false),
        (-1, |pod| pod.phase = PodPhase::Succeeded, false),
        (-1, |pod| pod.name = "twin-0".into(), false),
        (-1, |pod| pod.side = Side::Inference, false),
    ] {
        let at = |second: i64| Some(Time(k8s_openapi::jiff::Timestamp::from_second(second).expect("a time")));
        let own = PodFacts { created: at(0), ..pod(Side::Training, "trainer-1") };
        let mut other = PodFacts { created: at(later), ..pod(Side::Training, "twin-1") };
        change(&mut other);
        let found = check_rivals(&spec(TRAINING, POOL), &own, &[Arc::new(own.clone()), Arc::new(other)]);
        let duplicate = matches!(&found, Err(SeatError::Duplicate { holder, .. }) if holder == "rl/twin-1");
        assert_eq!((duplicate, found.is_ok()), (is_rival, !is_rival), "{later} {found:?}");
    }
}
