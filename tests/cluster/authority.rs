//! The authorities that a Secret keeps: one for all replicas, followed by the next in time.

use crate::bed::Bed;
use crate::operator::{is_true, made_ready, ready};
use crate::rogue::Rogue;
use crate::world::{Side, World};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use k8s_openapi::jiff::Timestamp;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyPair};
use serde_json::{Value, json};
use std::time::{Duration, SystemTime};
use weightrefit::identity::{CA_BUNDLE, CA_SECRET, Succession, load_or_create, publish_bundle, secrets};

const HOUR: u64 = 60 * 60;
const DAY: u64 = 24 * HOUR;

#[tokio::test]
async fn replicas_that_start_at_once_and_those_after_them_share_one_authority() {
    let bed = Bed::shared();
    bed.create_namespace("authority");
    let client = bed.client().await;
    let secrets = secrets(&client, "authority");
    let make = || load_or_create(&secrets);
    let (a, b, c, d) = tokio::join!(make(), make(), make(), make());
    let made: Vec<_> = [a, b, c, d].into_iter().map(|made| made.expect("an authority")).collect();
    let later = make().await.expect("the same");
    let pem = |kept: &weightrefit::identity::Kept| kept.succession.at(SystemTime::now()).bundle_pem();
    assert!(made.iter().all(|kept| pem(kept) == pem(&later)));

    publish_bundle(&client, "authority", pem(&later)).await.expect("a bundle");
    let bundle = || bed.kubectl(&["get", "configmap", CA_BUNDLE, "-n", "authority", "-o", "json"]);
    let first: Value = serde_json::from_str(&bundle()).expect("JSON");
    assert_eq!(first["data"]["ca.crt"], pem(&later));
    publish_bundle(&client, "authority", pem(&later)).await.expect("a bundle");
    let second: Value = serde_json::from_str(&bundle()).expect("JSON");
    assert_eq!(first["metadata"]["resourceVersion"], second["metadata"]["resourceVersion"], "no write");

    // Two that make a successor at once: the slower one finds what the faster one wrote.
    let (one, other) = (Succession::begin().expect("a key"), Succession::begin().expect("a key"));
    let written = later.replace(&secrets, &one).await.expect("the first");
    let Err(error) = later.replace(&secrets, &other).await else { panic!("overwritten") };
    assert!(error.is_overtaken(), "{error}");
    assert_eq!(pem(&make().await.expect("the first's")), pem(&written));
}

#[tokio::test]
async fn a_spoiled_secret_is_named_and_its_key_is_not_told() {
    let bed = Bed::shared();
    bed.create_namespace("spoiled");
    let secrets = secrets(&bed.client().await, "spoiled");
    load_or_create(&secrets).await.expect("an authority");
    let key = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n";
    for (data, want) in [
        (json!({"next.crt": "x"}), "no text under next.key"),
        (
            json!({"tls.crt": "x"}),
            "no authority under tls.crt: kept authority cannot be used: its certificate",
        ),
        (json!({"tls.key": key}), "no authority under tls.crt: kept authority cannot be used: its key"),
    ] {
        let patch = json!({"stringData": data}).to_string();
        bed.kubectl(&["patch", "secret", CA_SECRET, "-n", "spoiled", "-p", &patch]);
        let Err(error) = load_or_create(&secrets).await else { panic!("taken") };
        let shown = format!("{error} {error:?}");
        assert!(error.to_string().contains(want), "{error}");
        assert!(error.to_string().contains("delete it") && !shown.contains("c2VjcmV0"), "{shown}");
    }
}

/// An authority that was made and ends so many seconds before and after now: its certificate and key, PEM.
fn made(ago: u64, left: u64) -> [String; 2] {
    let (now, key) = (SystemTime::now(), KeyPair::generate().expect("a key"));
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "weightrefit");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.not_before = (now - Duration::from_secs(ago)).into();
    params.not_after = (now + Duration::from_secs(left)).into();
    [params.self_signed(&key).expect("a certificate").pem(), key.serialize_pem()]
}

impl World {
    /// The Secret keeps these authorities from now on, by the prefix of their keys; every namespace has had the younger
    /// one's certificate since so many seconds ago.
    fn keep(&self, authorities: &[(&str, &[String; 2])], announced: Option<u64>) {
        let of = |(prefix, [certificate, key]): &(&str, &[String; 2])| {
            [(format!("{prefix}.crt"), json!(certificate)), (format!("{prefix}.key"), json!(key))]
        };
        let mut data: serde_json::Map<String, Value> = authorities.iter().flat_map(of).collect();
        let since = announced.map(|ago| SystemTime::now() - Duration::from_secs(ago));
        let since = since.map(|since| Timestamp::try_from(since).expect("a time").to_string());
        data.insert("next.announced".into(), json!(since.unwrap_or_default()));
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls",
            "metadata": {"name": CA_SECRET, "namespace": self.namespace}, "stringData": data,
        });
        self.bed.send("apply", secret);
    }

    /// What the Secret keeps under this key; empty where it has nothing.
    fn kept(&self, key: &str) -> String {
        let path = format!("jsonpath={{.data.{}}}", key.replace('.', "\\."));
        let output = self.bed.try_kubectl(&["get", "secret", CA_SECRET, "-n", &self.namespace, "-o", &path]);
        String::from_utf8(BASE64_STANDARD.decode(output.stdout).expect("base64")).expect("PEM")
    }

    /// Fetches what pods may mount; whether it is these certificates, in this order.
    fn is_bundle(&mut self, certificates: &[&str]) -> bool {
        self.fetch_bundle();
        let bundle = String::from_utf8(self.port().bundle).expect("PEM");
        bundle.replace(['\r', '\n'], "") == certificates.concat().replace(['\r', '\n'], "")
    }
}

/// Whose certificate the operator shows, PEM without line ends.
fn signer(runtime: &tokio::runtime::Runtime, world: &World) -> String {
    let port = world.port();
    runtime.block_on(async move {
        let stream = Rogue::stranger(&port).connect().await.expect("a handshake");
        let chain = stream.get_ref().1.peer_certificates().expect("a certificate");
        BASE64_STANDARD.encode(&chain[1])
    })
}

fn is_of(signer: &str, [certificate, _]: &[String; 2]) -> bool {
    certificate.replace(['\r', '\n'], "").contains(signer)
}

#[test]
fn an_authority_is_followed_by_the_next_while_rounds_go_on() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let world = World::consenting("succession");
    let first = made(500 * DAY, 200 * DAY);
    world.keep(&[("tls", &first)], None);
    let mut world = made_ready(world);
    // At two thirds of its life a successor is announced; the first signs on.
    world.wait("there is a successor", |world| !world.kept("next.crt").is_empty());
    let announced = world.kept("next.crt");
    world.wait("both are published", |world| world.is_bundle(&[&first[0], &announced]));
    world.wait("that is written down", |world| !world.kept("next.announced").is_empty());
    assert!(is_of(&signer(&runtime, &world), &first));
    // Somebody who takes it out of the Secret again changes nothing for pods, and is not answered at once.
    let without = json!({"data": {"next.crt": null, "next.key": null, "next.announced": null}}).to_string();
    world.bed.kubectl(&["patch", "secret", CA_SECRET, "-n", "succession", "--type=merge", "-p", &without]);
    world.refit(1);
    assert!(world.kept("next.crt").is_empty() && world.is_bundle(&[&first[0], &announced]));
    let (uid, token) = world.credentials("engine-1");
    let early = runtime.block_on(Rogue::enrolled(&world.port(), &uid, &token));

    // The day is over; only now the namespace gets the certificate, and its pods need time to mount it.
    let next = made(25 * HOUR, 600 * DAY);
    world.keep(&[("tls", &first), ("next", &next)], None);
    world.wait("both are published", |world| world.is_bundle(&[&first[0], &next[0]]));
    world.wait("that is written down", |world| !world.kept("next.announced").is_empty());
    assert!(is_of(&signer(&runtime, &world), &first));
    // A day after it was announced the successor signs, and what the first has signed is good.
    world.keep(&[("tls", &first), ("next", &next)], Some(24 * HOUR));
    world.wait("the successor signs", |world| is_of(&signer(&runtime, world), &next));
    let mut early = early.at(&world.port());
    assert!(runtime.block_on(early.open(None)).is_ok());
    assert!(
        runtime
            .block_on(async { Rogue::enrolled(&world.port(), &uid, &token).await.open(None).await })
            .is_ok()
    );
    world.refit(2);

    // When all that the first has signed has ended, it is forgotten.
    let next = made(52 * HOUR, 600 * DAY);
    world.keep(&[("tls", &first), ("next", &next)], Some(51 * HOUR));
    world.wait("it takes the first one's place", |world| {
        world.kept("tls.crt") == next[0] && world.kept("next.crt").is_empty()
    });
    world.wait("it alone is published", |world| world.is_bundle(&[&next[0]]));
    early = early.at(&world.port());
    world.wait("it alone is trusted", |_| runtime.block_on(early.open(None)).is_err());
    // Agents that were away so long enrol anew.
    world.kill_operator();
    world.start_operator();
    world.wait_for_status("all are there again", |status| {
        status["training"]["connectedRanks"] == 3 && is_true(status, "CommunicatorsReady")
    });
    world.refit(3);
    world.wait("each rank of both replicas is right", |world| world.checks(3) == 4);
    let status = world.get()["status"].clone();
    assert_eq!(status["membership"]["epoch"], 1, "{status:#}");
}

#[test]
fn a_successor_waits_for_a_namespace_that_lacks_its_certificate() {
    let mut world = World::new("lacking");
    let first = made(10 * DAY, 690 * DAY);
    world.keep(&[("tls", &first)], None);
    world.start_operator();
    world.apply();
    world.create_pod(Side::Training, 0);
    world.wait("the namespace has the certificate", |world| world.is_bundle(&[&first[0]]));
    let counts = |world: &World, state: &str, number: u32| {
        world.metrics().contains(&format!("weightrefit_operator_bundles{{state=\"{state}\"}} {number}\n"))
    };
    world.wait("it is counted", |world| counts(world, "current", 1) && counts(world, "lacking", 0));

    // From now on it can be given nothing more.
    let role = "clusterrole/weightrefit:operator:lacking";
    let all = world.bed.kubectl(&["get", role, "-o", "json"]);
    let mut fewer: Value = serde_json::from_str(&all).expect("JSON");
    let rules = fewer["rules"].as_array_mut().expect("a list");
    rules.retain(|rule| rule["resourceNames"] != json!([CA_BUNDLE]));
    let rules = json!({"rules": rules}).to_string();
    world.bed.kubectl(&["patch", role, "--type=merge", "-p", &rules]);
    let old = made(500 * DAY, 200 * DAY);
    world.keep(&[("tls", &old)], None);
    world.wait("there is a successor", |world| !world.kept("next.crt").is_empty());
    world.wait("it is counted", |world| counts(world, "current", 0) && counts(world, "lacking", 1));
    assert_eq!(world.kept("next.announced"), "");

    let all: Value = serde_json::from_str(&all).expect("JSON");
    world.bed.kubectl(&["patch", role, "--type=merge", "-p", &json!({"rules": all["rules"]}).to_string()]);
    world.wait("it is announced", |world| !world.kept("next.announced").is_empty());
    let next = world.kept("next.crt");
    assert!(world.is_bundle(&[&old[0], &next]) && counts(&world, "lacking", 0));
}

#[test]
fn a_deleted_authority_is_made_anew_and_a_broken_one_changes_nothing() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let mut world = ready("deleted-authority");
    let first = world.kept("tls.crt");
    let patch = json!({"stringData": {"tls.key": "none"}}).to_string();
    world.bed.kubectl(&["patch", "secret", CA_SECRET, "-n", "deleted-authority", "-p", &patch]);
    world.wait("it is noticed", |world| world.operator_said("the authority known so far is used on"));
    let (uid, token) = world.credentials("engine-1");
    let agent = runtime.block_on(Rogue::enrolled(&world.port(), &uid, &token));
    assert!(runtime.block_on(agent.open(None)).is_ok());
    world.bed.kubectl(&["delete", "secret", CA_SECRET, "-n", "deleted-authority"]);
    world.wait("there is another", |world| !["", &first].contains(&world.kept("tls.crt").as_str()));
    let second = world.kept("tls.crt");
    world.wait("it is published", |world| world.is_bundle(&[&second]));
    // Who was proven by the deleted one is proven no more: agents are cut off, and enrol anew.
    world.wait("all have enrolled anew", |world| {
        world.logged("no certificate of this coordinator's authority") >= 5
    });
    world.wait_for_status("all are there again", |status| {
        status["training"]["connectedRanks"] == 3 && is_true(status, "CommunicatorsReady")
    });
    world.refit(1);
    world.wait("each rank of both replicas is right", |world| world.checks(1) == 4);
}
