//! Leader election against a real Lease.

use crate::bed::Bed;
use crate::members::PATIENCE;
use serde_json::json;
use std::future::Future;
use std::time::Duration;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
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
    let mut config = bed.config().await;
    let (address, relay) = relay(&config).await;
    config.cluster_url = format!("https://{address}").parse().expect("a URL");
    let client = kube::Client::try_from(config).expect("a client");
    let mut leader = soon("it leads", acquire(client, "cut-off", LEASE, "leader", TERMS)).await;
    relay.abort();
    soon("it notices", leader.lost()).await;
    let next = acquire(bed.client().await, "cut-off", LEASE, "next", TERMS);
    assert!(soon("another leads", next).await.leads());
}

/// Passes connections on to the API server until it is aborted, which cuts those that are open.
async fn relay(config: &kube::Config) -> (std::net::SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let authority = config.cluster_url.authority().expect("an address").to_string();
    let relay = tokio::spawn(async move {
        let mut connections = JoinSet::new();
        loop {
            let (mut near, _) = listener.accept().await.expect("a connection");
            let mut far = TcpStream::connect(&authority).await.expect("the API server");
            connections.spawn(async move { copy_bidirectional(&mut near, &mut far).await });
        }
    });
    (address, relay)
}
