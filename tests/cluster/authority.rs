//! The authority that a Secret keeps.

use crate::bed::Bed;
use serde_json::json;
use weightrefit::identity::{CA_BUNDLE, CA_SECRET, load_or_create, publish_bundle};

#[tokio::test]
async fn replicas_that_start_at_once_and_those_after_them_share_one_authority() {
    let bed = Bed::shared();
    bed.create_namespace("authority");
    let client = bed.client().await;
    let make = || load_or_create(&client, "authority");
    let (a, b, c, d) = tokio::join!(make(), make(), make(), make());
    let made: Vec<_> = [a, b, c, d].into_iter().map(|made| made.expect("an authority")).collect();
    let later = load_or_create(&bed.client().await, "authority").await.expect("the same");
    assert!(made.iter().all(|authority| authority.certificate() == later.certificate()));

    publish_bundle(&client, "authority", &later).await.expect("a bundle");
    let bundle = || bed.kubectl(&["get", "configmap", CA_BUNDLE, "-n", "authority", "-o", "json"]);
    let first: serde_json::Value = serde_json::from_str(&bundle()).expect("JSON");
    assert_eq!(first["data"]["ca.crt"], later.certificate_pem());
    publish_bundle(&client, "authority", &later).await.expect("a bundle");
    let second: serde_json::Value = serde_json::from_str(&bundle()).expect("JSON");
    assert_eq!(first["metadata"]["resourceVersion"], second["metadata"]["resourceVersion"], "no write");
}

#[tokio::test]
async fn a_spoiled_secret_is_named_and_its_key_is_not_told() {
    let bed = Bed::shared();
    bed.create_namespace("spoiled");
    let client = bed.client().await;
    load_or_create(&client, "spoiled").await.expect("an authority");
    let key = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n";
    for (data, want) in [(json!({"tls.key": key}), "not a private key"), (json!({"tls.crt": "x"}), "PEM")] {
        let patch = json!({"stringData": data}).to_string();
        bed.kubectl(&["patch", "secret", CA_SECRET, "-n", "spoiled", "-p", &patch]);
        let Err(error) = load_or_create(&client, "spoiled").await else { panic!("taken") };
        let shown = format!("{error} {error:?}");
        assert!(error.to_string().contains("secret spoiled/weightrefit-ca keeps no authority"), "{error}");
        assert!(shown.contains(want) && !shown.contains("c2VjcmV0"), "{shown}");
    }
}
