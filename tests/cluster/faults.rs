//! An API server that misbehaves: what the operator makes of it, while rounds go on.

use crate::fault_proxy::{Fault, FaultProxy, Rule};
use crate::world::{World, condition};
use serde_json::{Value, json};
use std::time::Instant;

/// Which requests about a refit meet a fault. Each refit names a ConfigMap of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum On {
    /// Its status is written.
    Status,
    /// Its ConfigMap is read.
    Read,
    /// Its ConfigMap is listed, for a watch to begin there.
    List,
    /// Its ConfigMap is watched.
    Watch,
}

const ENDLESS: usize = usize::MAX;

/// A refit without pods, which asks for one thing and meets one fault this often. Its name is the row's.
const ROWS: &[(&str, On, Fault, usize)] = &[
    ("status-409", On::Status, Fault::Refused(409), 2),
    ("status-429", On::Status, Fault::Later(1), 2),
    ("status-500", On::Status, Fault::Refused(500), 1),
    ("status-503", On::Status, Fault::Refused(503), 1),
    ("status-garbage", On::Status, Fault::Garbage, 1),
    ("status-lost", On::Status, Fault::LostAnswer, 1),
    ("status-no-answer", On::Status, Fault::NoAnswer, 1),
    ("read-500", On::Read, Fault::Refused(500), 1),
    ("read-garbage", On::Read, Fault::Garbage, 1),
    ("read-no-answer", On::Read, Fault::NoAnswer, 1),
    ("list-410", On::List, Fault::Refused(410), 1),
    ("list-500", On::List, Fault::Refused(500), 1),
    ("list-garbage", On::List, Fault::Garbage, 1),
    ("list-no-answer", On::List, Fault::NoAnswer, 1),
    ("watch-410", On::Watch, Fault::Refused(410), ENDLESS),
    ("watch-410-event", On::Watch, Fault::TooOldEvent, 2),
    ("watch-429", On::Watch, Fault::Later(1), 1),
    ("watch-500", On::Watch, Fault::Refused(500), 1),
    ("watch-503", On::Watch, Fault::Refused(503), 1),
    ("watch-cut", On::Watch, Fault::Cut, 2),
    ("watch-empty", On::Watch, Fault::Empty, ENDLESS),
    ("watch-garbage", On::Watch, Fault::Garbage, 1),
    ("watch-no-answer", On::Watch, Fault::NoAnswer, 1),
    ("watch-silent", On::Watch, Fault::Silence, 1),
];

/// What no refit asks for alone: name, parts of the request's line, and what it meets once.
const SHARED: &[(&str, &[&str], Fault)] = &[
    ("authority", &["GET", "/secrets/"], Fault::Refused(503)),
    ("bundle", &["PATCH", "/configmaps/weightrefit-ca-bundle"], Fault::Refused(500)),
    ("event", &["POST", "/events"], Fault::NoAnswer),
    ("lease", &["PUT", "/leases/"], Fault::Refused(500)),
    ("review", &["/subjectaccessreviews"], Fault::Refused(500)),
    ("token", &["/tokenreviews"], Fault::Garbage),
];

impl On {
    fn parts(self, name: &str) -> Vec<String> {
        let of_maps = |path: &str| vec!["GET".to_owned(), path.to_owned(), format!("{name}-tensors")];
        match self {
            Self::Status => vec!["PATCH".to_owned(), format!("/weightrefits/{name}/status")],
            Self::Read => of_maps("/configmaps/"),
            Self::List => [of_maps("/configmaps?"), vec!["limit=".to_owned()]].concat(),
            Self::Watch => [of_maps("/configmaps?"), vec!["watch=true".to_owned()]].concat(),
        }
    }
}

fn row_rule(&(name, on, fault, times): &(&str, On, Fault, usize)) -> Rule {
    // A version that is too old stays so: only who lists again gets a newer one.
    let until = matches!((on, fault), (On::Watch, Fault::Refused(410))).then(|| On::List.parts(name));
    let parts = on.parts(name);
    Rule { until, ..Rule::new(name, &parts.iter().map(String::as_str).collect::<Vec<_>>(), fault, times) }
}

fn is_true(status: &Value, kind: &str) -> bool {
    condition(status, kind).0 == "True"
}

/// A world whose operator reaches the API server through the proxy.
fn behind_proxy(namespace: &str) -> (World, FaultProxy) {
    let mut world = World::consenting(namespace);
    let proxy = FaultProxy::start(world.bed);
    world.reach_api_server_at(proxy.url());
    (world, proxy)
}

/// Names of the rows whose refit does not have this status and reason of Accepted.
fn without(world: &World, of: impl Fn(&str) -> bool, status: &str) -> Vec<String> {
    let refits = world.bed.refits(&world.namespace);
    let is_right = |name: &str| {
        let refit = refits.iter().find(|refit| refit["metadata"]["name"] == name);
        refit.is_some_and(|refit| condition(&refit["status"], "Accepted").0 == status)
    };
    ROWS.iter().map(|row| row.0).filter(|name| of(name) && !is_right(name)).map(str::to_owned).collect()
}

/// The value of a metric of the operator, with its labels as they stand in the text; 0 while it is not there.
fn metric(world: &World, name: &str) -> u64 {
    let text = world.metrics();
    let name = format!("weightrefit_operator_{name} ");
    text.lines().find_map(|line| line.strip_prefix(&name)).map_or(0, |value| value.parse().expect("a number"))
}

/// A change that needs an epoch; the one that follows.
fn change(world: &World, seconds: u32) -> i64 {
    let epoch = world.get()["status"]["membership"]["epoch"].as_i64().expect("an epoch");
    let patch = json!({"spec": {"timeouts": {"totalSeconds": seconds}}}).to_string();
    world.bed.kubectl(&[
        "patch",
        "weightrefit",
        "tiny",
        "-n",
        &world.namespace,
        "--type=merge",
        "-p",
        &patch,
    ]);
    epoch + 1
}

/// A round commits, and each rank of both replicas is right.
fn round(world: &mut World, step: i64) {
    world.refit(step);
    world.wait("each rank of both replicas is right", |world| world.checks(step) == 4);
}

/// Epochs that the operator has brought into force.
fn epochs(world: &World) -> i64 {
    i64::try_from(world.logged("\"new epoch\"")).expect("a few")
}

/// A change comes between the write of an epoch and its answer: it gets an epoch of its own, though the members are the
/// same. Returns the epoch in force.
fn changed_before_its_epoch_is_known(world: &mut World, proxy: &FaultProxy, step: i64) -> Value {
    // A newer version would make another membership of the second attempt.
    world.wait_for_status("the operator has heard of the newest version", |status| {
        status["inference"]["committed"]["step"] == step
    });
    proxy.arm(Rule::new("unknown", &["/weightrefits/tiny/status", " epoch"], Fault::Garbage, ENDLESS));
    let epoch = change(world, 71);
    world.wait_for_status("the epoch is written", |status| status["membership"]["epoch"] == epoch);
    proxy.arm(Rule::new("unread", &["GET", "/weightrefits/tiny"], Fault::Refused(500), ENDLESS));
    change(world, 72);
    world.wait("the change is accepted, and the operator asks what stands", |world| {
        let refit = world.get();
        refit["status"]["observedGeneration"] == refit["metadata"]["generation"] && proxy.hits("unread") > 0
    });
    proxy.lift("unknown");
    proxy.lift("unread");
    let status = world.wait_for_status("the change is in force", |status| {
        status["membership"]["generation"] == status["observedGeneration"]
            && is_true(status, "CommunicatorsReady")
    });
    status["membership"]["epoch"].clone()
}

#[test]
fn faults_of_the_api_server_pass_and_rounds_go_on() {
    let begin = Instant::now();
    let (mut world, mut proxy) = behind_proxy("faults");
    ROWS.iter().for_each(|row| proxy.arm(row_rule(row)));
    for (name, parts, fault) in SHARED {
        proxy.arm(Rule::new(name, parts, *fault, 1));
    }
    let documents = world.documents();
    let rows: Vec<String> = ROWS.iter().map(|row| documents.replace("tiny", row.0)).collect();
    world.bed.send("apply", rows.join("---\n"));
    world.apply();
    world.start_operator();
    world.start_pods();
    let status = world.wait_for_status("all are connected", |status| is_true(status, "CommunicatorsReady"));
    assert_eq!(status["membership"]["epoch"], 1, "{status:#}");
    round(&mut world, 0);

    // Every epoch is written once, whatever becomes of the write.
    let mut step = 0;
    for (seconds, fault) in (50..).zip([
        Fault::Refused(409),
        Fault::Refused(500),
        Fault::Garbage,
        Fault::LostAnswer,
        Fault::NoAnswer,
    ]) {
        let name = format!("epoch {fault:?}");
        proxy.arm(Rule::new(&name, &["/weightrefits/tiny/status", " epoch"], fault, 1));
        let epoch = change(&world, seconds);
        world.wait(&format!("{name} is met"), |_| proxy.hits(&name) == 1);
        // The API server may have it before the operator knows.
        world.wait(&format!("{name} is got over"), |world| epochs(world) >= epoch);
        let status = world.wait_for_status(&format!("{name} is got over"), |status| {
            status["membership"]["epoch"].as_i64() >= Some(epoch) && is_true(status, "CommunicatorsReady")
        });
        assert_eq!(status["membership"]["epoch"], epoch, "{name}: {status:#}");
        step += 1;
        round(&mut world, step);
    }
    let epoch = changed_before_its_epoch_is_known(&mut world, &proxy, step);

    // Every row comes to its right condition, and to the next one when its ConfigMap changes.
    world.wait("every row's refit is accepted", |world| without(world, |_| true, "True").is_empty());
    let broken = rows.iter().map(|row| row.replace("{\"tensors\": [", "{\"tensors\": [[,"));
    world.bed.send("apply", broken.collect::<Vec<_>>().join("---\n"));
    let sees = |name: &str| name != "watch-empty";
    world.wait("every row's change is seen", |world| without(world, sees, "False").is_empty());
    for (name, _, _, times) in ROWS {
        let hits = proxy.hits(name);
        assert!(if *times == ENDLESS { hits > 0 } else { hits == *times }, "{name}: {hits} hits");
    }
    proxy.disarm();
    world.wait("a watch that ended at once goes on", |world| without(world, |_| true, "False").is_empty());

    let seconds = usize::try_from(begin.elapsed().as_secs()).expect("short");
    for (name, on, ..) in ROWS {
        let asked = proxy.lines(&on.parts(name).iter().map(String::as_str).collect::<Vec<_>>()).len();
        assert!(asked <= 10 + seconds, "{name} asked {asked} times in {seconds} s");
    }
    for (name, least) in [
        ("api_requests_total{code=\"409\"}", 3),
        ("api_requests_total{code=\"410\"}", 2),
        ("api_requests_total{code=\"429\"}", 3),
        ("api_requests_total{code=\"500\"}", 5),
        ("api_requests_total{code=\"503\"}", 3),
        ("api_requests_total{code=\"timeout\"}", 6),
        ("reconciles_total{outcome=\"failed\"}", 7),
        ("watch_failures_total{resource=\"configmaps\"}", 10),
    ] {
        assert!(metric(&world, name) >= least, "{name} is {}", metric(&world, name));
    }
    let status = world.wait_for_status("rounds are told", |status| {
        status["inference"]["committed"]["step"] == step && is_true(status, "Ready")
    });
    assert_eq!(status["membership"]["epoch"], epoch, "{status:#}");

    // The watches that all refits share.
    for (resource, kind) in [("weightrefits", "/weightrefits?"), ("pods", "/pods?")] {
        let failures = format!("watch_failures_total{{resource=\"{resource}\"}}");
        let before = metric(&world, &failures);
        proxy.arm(Rule::new(resource, &["watch=true", kind], Fault::TooOldEvent, 1));
        proxy.cut_watches();
        world.wait("the watch is too old", |world| {
            proxy.hits(resource) == 1 && metric(world, &failures) >= before + 2
        });
        step += 1;
        round(&mut world, step);
    }
    let before = metric(&world, "api_requests_total{code=\"failed\"}");
    proxy.refuse();
    world.wait("nobody answers", |world| metric(world, "api_requests_total{code=\"failed\"}") > before + 3);
    proxy.listen();
    step += 1;
    round(&mut world, step);
    assert_eq!(world.get()["status"]["membership"]["epoch"], epoch);

    let epoch = change(&world, 60);
    let status = world.wait_for_status("changes are seen", |status| {
        status["membership"]["epoch"].as_i64() >= Some(epoch) && is_true(status, "CommunicatorsReady")
    });
    assert_eq!(status["membership"]["epoch"], epoch, "{status:#}");
    for (name, ..) in SHARED {
        assert_eq!(proxy.hits(name), 1, "{name}");
    }
    assert_eq!(world.stop_operator(), Some(0));
}

#[test]
fn an_operator_that_cannot_renew_its_lease_ends_and_the_next_keeps_the_epoch() {
    let (mut world, proxy) = behind_proxy("no-lease");
    world.start_operator();
    world.apply();
    world.start_pods();
    world.wait_for_status("all are connected", |status| is_true(status, "CommunicatorsReady"));
    round(&mut world, 0);
    let before = world.get()["status"]["membership"].clone();
    proxy.arm(Rule::new("lease", &["/leases/"], Fault::NoAnswer, ENDLESS));
    // Not as one that was told to stop: something is wrong, and whoever runs it should know.
    world.wait("the operator ends", |world| world.operator_exit_code() == Some(1));
    assert_eq!(world.logged("the lease is lost; another process leads"), 1);
    round(&mut world, 1);
    proxy.disarm();
    world.start_operator();
    let status = world.wait_for_status("the next operator leads", |status| {
        status["inference"]["committed"]["step"] == 1 && is_true(status, "CommunicatorsReady")
    });
    assert_eq!(status["membership"], before, "{status:#}");
    round(&mut world, 2);
}
