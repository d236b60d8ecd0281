//! Leader election against a real Lease.

use crate::bed::Bed;
use crate::fault_proxy::{Fault, FaultProxy, Rule};
use crate::members::{PATIENCE, eventually};
use serde_json::json;
use std::future::Future;
use std::time::Duration;
use weightrefit::operator::lease::{LEASE, Terms, acquire};

/// As short as the Lease allows.
const TERMS: Terms = Terms {
    duration: Duration::from_secs(1),
    renew_within: Duration::from_millis(800),
    retry: Duration::from_millis(50),
};

/// With a deadline that only a wedged election meets.
async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("it never happened that {what}"))
}

#[tokio::test]
async fn the_lease_goes_from_hand_to_hand_and_is_never_in_two() {
    let bed = Bed::shared();
    bed.create_namespace("lease");
    let client = bed.client().await;
    // So long that nobody gets it by waiting.
    let long = Terms { duration: Duration::from_secs(3600), renew_within: PATIENCE, ..TERMS };
    let first = soon("the first leads", acquire(client.clone(), "lease", LEASE, "first", long)).await;
    let second = tokio::spawn(acquire(client.clone(), "lease", LEASE, "second", long));
    assert!(first.leads() && !second.is_finished());
    let holder = || {
        let path = "jsonpath={.spec.holderIdentity}";
        bed.kubectl(&["get", "lease", LEASE, "-n", "lease", "-o", path])
    };
    assert_eq!(holder(), "first");
    soon("the first releases", first.release()).await;
    let mut second = soon("the second leads", second).await.expect("no panic");
    assert_eq!(holder(), "second");

    let patch = json!({"spec": {"holderIdentity": "ghost", "leaseDurationSeconds": 1}}).to_string();
    bed.kubectl(&["patch", "lease", LEASE, "-n", "lease", "--type=merge", "-p", &patch]);
    soon("the second notices", second.lost()).await;
    assert!(!second.leads());
    let third = soon("silence ends a lease", acquire(client, "lease", LEASE, "third", TERMS)).await;
    assert!(third.leads() && holder() == "third");
}

#[tokio::test]
async fn a_leader_that_is_cut_off_leads_no_more() {
    let bed = Bed::shared();
    bed.create_namespace("cut-off");
    let (mut proxy, client) = behind_proxy(bed).await;
    let mut leader = soon("it leads", acquire(client, "cut-off", LEASE, "leader", TERMS)).await;
    proxy.refuse();
    soon("it notices", leader.lost()).await;
    let next = acquire(bed.client().await, "cut-off", LEASE, "next", TERMS);
    assert!(soon("another leads", next).await.leads());
}

#[tokio::test]
async fn a_leader_survives_a_write_that_is_never_answered() {
    let bed = Bed::shared();
    bed.create_namespace("mute");
    let (proxy, client) = behind_proxy(bed).await;
    // Long enough for a busy machine; the write takes a third of it.
    let terms = Terms { duration: Duration::from_secs(60), renew_within: Duration::from_secs(12), ..TERMS };
    let leader = soon("it leads", acquire(client, "mute", LEASE, "leader", terms)).await;
    proxy.arm(Rule::new("mute", &["PUT", "/leases/"], Fault::NoAnswer, 1));
    let writes = || proxy.lines(&["PUT", "/leases/"]).len();
    let is_met = || async { (proxy.hits("mute") == 1).then(writes) };
    let before = eventually("a write is not answered", is_met).await;
    eventually("it writes again", || async { (writes() > before).then_some(()) }).await;
    assert!(leader.leads());
}

/// A client that reaches the API server through a proxy.
async fn behind_proxy(bed: &'static Bed) -> (FaultProxy, kube::Client) {
    let proxy = tokio::task::spawn_blocking(|| FaultProxy::start(bed)).await.expect("no panic");
    let mut config = bed.config().await;
    config.cluster_url = proxy.url().parse().expect("a URL");
    (proxy, kube::Client::try_from(config).expect("a client"))
}
