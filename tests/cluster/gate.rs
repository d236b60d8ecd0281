//! Who may enrol and take part, as a real API server says.

use crate::bed::Bed;
use crate::expired::expired;
use crate::members::{create_pod, eventually, token};
use kube::runtime::watcher::Event;
use serde_json::json;
use std::sync::Arc;
use weightrefit::api::refit::WeightRefit;
use weightrefit::controller::consent::NoConsent;
use weightrefit::controller::gate::{ClusterGate, DEFAULT_AUDIENCE};
use weightrefit::controller::pods::Pods;
use weightrefit::controller::refits::Refits;
use weightrefit::controller::scope::Scope;
use weightrefit::coordinator::Gate;
use weightrefit::operator::telemetry::Metrics;
use weightrefit_core::id::Rank;
use weightrefit_core::membership::Seat;
use weightrefit_proto::v1::Fault;

/// The pods of one namespace.
async fn pods(bed: &Bed, namespace: &str) -> Pods {
    let failures = Metrics::new().expect("metrics").watch_failures;
    let pods = Pods::new(&bed.client().await, Scope::of(vec![namespace.to_owned()]), &failures);
    pods.synced().await;
    pods
}

/// All pods, of which the watch never tells.
fn unwatched() -> Pods {
    let nowhere = kube::Config::new("http://127.0.0.1:1".parse().expect("a URL"));
    let client = kube::Client::try_from(nowhere).expect("a client");
    Pods::new(&client, Scope::default(), &Metrics::new().expect("metrics").watch_failures)
}

/// A gate that knows these pods and the refit `NAMESPACE/tiny`, of two training ranks and pools of replicas of two ranks.
async fn gate(bed: &Bed, pods: Pods, refit_namespace: &str) -> (Arc<ClusterGate>, Arc<Pods>) {
    let (client, pods) = (bed.client().await, Arc::new(pods));
    let refit = json!({
        "apiVersion": "weightrefit.dev/v1alpha1",
        "kind": "WeightRefit",
        "metadata": {"name": "tiny", "namespace": refit_namespace},
        "spec": {
            "model": {"type": "Registered"},
            "training": {"worldSize": 2, "ranks": {"type": "StatefulSet"}},
            "inference": {
                "pools": [{"name": "default", "ranksPerReplica": 2, "ranks": {"type": "StatefulSet"}}],
            },
        },
    });
    let refit: WeightRefit = serde_json::from_value(refit).expect("a refit");
    let (refits, mut parts) = Refits::new(&Scope::default());
    parts[0].take(&Event::Apply(refit), [].iter());
    let audience = DEFAULT_AUDIENCE.to_owned();
    (Arc::new(ClusterGate::new(client, Arc::clone(&pods), refits, audience)), pods)
}

fn training(refit: &str) -> serde_json::Value {
    json!({"weightrefit.dev/refit": refit, "weightrefit.dev/side": "training"})
}

/// Code and message of a refusal.
fn refused<T: std::fmt::Debug>(answer: Result<T, Fault>) -> String {
    let fault = answer.expect_err("must be refused");
    format!("{}: {}", fault.code, fault.message)
}

#[tokio::test]
async fn a_token_bound_to_a_claiming_pod_enrols_that_pod_and_nothing_else_does() {
    let bed = Bed::shared();
    bed.create_namespace("enrol");
    let uid = create_pod(bed, "enrol", "trainer-0", training("tiny"));
    let other = create_pod(bed, "enrol", "trainer-1", training("tiny"));
    let stranger = create_pod(bed, "enrol", "stranger-0", json!({}));
    let (watching, _) = gate(bed, pods(bed, "enrol").await, "enrol").await;
    // Its watch never tells of these pods, so each is read once.
    let (reading, _) = gate(bed, unwatched(), "enrol").await;
    let bound = token(bed, "enrol", DEFAULT_AUDIENCE, Some("trainer-0"));
    // One of another account is made for pods of that account alone.
    bed.kubectl(&["create", "serviceaccount", "other", "-n", "enrol"]);
    let other_pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "other-0", "namespace": "enrol", "labels": training("tiny")},
        "spec": {"serviceAccountName": "other", "containers": [{"name": "main", "image": "none"}]},
    });
    bed.send("create", other_pod);
    let audience = format!("--audience={DEFAULT_AUDIENCE}");
    let bound_to = |pod: &str| {
        let arguments = ["create", "token", "other", "-n", "enrol", &audience, "--bound-object-kind=Pod"];
        bed.try_kubectl(&[&arguments[..], &[&format!("--bound-object-name={pod}")]].concat())
    };
    assert!(!bound_to("trainer-0").status.success(), "bound to a pod of another account");
    let of_another_account = String::from_utf8(bound_to("other-0").stdout).expect("UTF-8");
    for gate in [&watching, &reading] {
        gate.enrol(&uid, &bound).await.expect("the pod of the token");
        let cases = [
            (
                &uid,
                token(bed, "enrol", "https://kubernetes.default.svc", Some("trainer-0")),
                "is not valid for",
            ),
            (
                &uid,
                token(bed, "enrol", DEFAULT_AUDIENCE, None),
                "token of account enrol:default is not bound to a pod",
            ),
            (&other, bound.clone(), "token is bound to pod enrol/trainer-0 of uid"),
            (&uid, format!("{bound}x"), "is not valid for audience"),
            (&uid, expired(bed, &bound), "has expired"),
            (&uid, of_another_account.trim_end().to_owned(), "token is bound to pod enrol/other-0 of uid"),
            (&uid, String::new(), "token has 0 bytes"),
        ];
        for (uid, token, want) in cases {
            let refusal = refused(gate.enrol(uid, &token).await);
            assert!(refusal.starts_with("Unauthenticated: ") && refusal.contains(want), "{refusal}");
        }
        let token = token(bed, "enrol", DEFAULT_AUDIENCE, Some("stranger-0"));
        let refusal = refused(gate.enrol(&stranger, &token).await);
        assert_eq!(refusal, "Unauthorized: pod enrol/stranger-0 has no label weightrefit.dev/refit");
    }
    let (elsewhere, _) = gate(bed, pods(bed, "elsewhere").await, "enrol").await;
    assert_eq!(
        refused(elsewhere.enrol(&uid, &bound).await),
        "NotConfigured: pod enrol/trainer-0 is of a namespace that this operator does not look at"
    );

    bed.kubectl(&["delete", "pod", "trainer-0", "-n", "enrol", "--wait=false"]);
    let watching = &watching;
    let begun = || async { watching.enrol(&uid, &bound).await.err() };
    let fault = eventually("a pod that is being deleted is refused", begun).await;
    assert_eq!(
        (fault.code.as_str(), fault.message.as_str()),
        ("Unauthenticated", "pod enrol/trainer-0 is being deleted")
    );
    bed.kubectl(&["delete", "pod", "trainer-0", "-n", "enrol", "--grace-period=0", "--force"]);
    let gone = || async { reading.enrol(&uid, &bound).await.err() };
    let fault = eventually("a pod that is gone is refused", gone).await;
    assert_eq!(fault.code, "Unauthenticated", "{fault:?}");
}

#[tokio::test]
async fn a_pod_takes_its_own_seats_once_the_refits_namespace_consents() {
    let bed = Bed::shared();
    bed.define_refits();
    bed.create_namespace("consent");
    bed.create_namespace("serve");
    let labels = |side: &str| {
        json!({
            "weightrefit.dev/refit": "tiny",
            "weightrefit.dev/refit-namespace": "consent",
            "weightrefit.dev/side": side,
        })
    };
    let engine = create_pod(bed, "serve", "vllm-1", labels("inference"));
    let trainer = create_pod(bed, "serve", "trainer-0", labels("training"));
    let (gate, pods) = gate(bed, pods(bed, "serve").await, "consent").await;
    let seats = |replica: &str| {
        let seat =
            |rank| Seat::Inference { pool: "default".into(), replica: replica.into(), rank: Rank(rank) };
        [seat(0), seat(1)]
    };
    let (own, first) = (seats("vllm-1"), [Seat::Training { rank: Rank(0) }]);

    let command = "kubectl create role tiny:receive:serve:default -n consent --verb=receive \
                   --resource=weightrefits.weightrefit.dev --resource-name=tiny && \
                   kubectl create rolebinding tiny:receive:serve:default -n consent \
                   --role=tiny:receive:serve:default --serviceaccount=serve:default";
    let refusal = refused(gate.admit("consent/tiny", &engine, &own).await);
    let sentence =
        "service account serve:default of pod serve/vllm-1 may not receive weights of consent/tiny";
    assert_eq!(refusal, format!("Unauthorized: {sentence}; to let it, run: {command}"));
    for command in command.split(" && ") {
        let words: Vec<&str> = command.split_whitespace().skip(1).collect();
        bed.kubectl(&words);
    }
    let admitted = || async { gate.admit("consent/tiny", &engine, &own).await.ok() };
    eventually("who has consent is admitted", admitted).await;

    for (refit, uid, seats, want) in [
        (
            "consent/tiny",
            &engine,
            &seats("vllm-0")[..],
            "Unauthorized: pod serve/vllm-1 announces inference/default/vllm-0/0",
        ),
        (
            "consent/tiny",
            &engine,
            &own[..1],
            "Unauthorized: pod serve/vllm-1 announces no seat inference/default/vllm-1/1",
        ),
        ("consent/tiny", &engine, &first, "Unauthorized: pod serve/vllm-1 announces training/0"),
        (
            "serve/tiny",
            &engine,
            &own,
            "Unauthorized: pod serve/vllm-1 claims refit consent/tiny by its labels",
        ),
        ("consent/tiny", &"no-such-uid".to_owned(), &own, "NotConfigured: no pod of uid no-such-uid"),
        (
            "consent/tiny",
            &trainer,
            &first,
            "may not publish weights of consent/tiny; to let it, run: kubectl create role tiny:publish:serve:default",
        ),
    ] {
        let refusal = refused(gate.admit(refit, uid, seats).await);
        assert!(refusal.contains(want), "{refusal}");
    }
    let facts = pods.by_uid(&engine).expect("it claims the refit");
    assert_eq!(gate.consent(&facts).await, Ok(()));
    let facts = pods.by_uid(&trainer).expect("it claims the refit");
    assert!(matches!(gate.consent(&facts).await, Err(NoConsent::Refused { .. })));

    bed.kubectl(&["delete", "pod", "vllm-1", "-n", "serve", "--wait=false"]);
    let begun = || async { gate.admit("consent/tiny", &engine, &own).await.err() };
    let fault = eventually("a pod that is being deleted is refused", begun).await;
    assert_eq!(
        (fault.code.as_str(), fault.message.as_str()),
        ("Unauthorized", "pod serve/vllm-1 is being deleted or has ended")
    );
}
