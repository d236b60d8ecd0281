//! The definition in `crds/` and what it makes the API server do: take every example, refuse what breaks a rule, keep a
//! status, and explain each field.

use crate::bed::Bed;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// A bed of its own, since the definition is there for all.
fn defined() -> Bed {
    let bed = Bed::start();
    bed.define_refits();
    bed
}

#[test]
fn the_server_takes_the_definition_and_every_example() {
    let bed = defined();
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let files = fs::read_dir(examples).expect("examples").map(|entry| entry.expect("entry").path());
    for file in files.filter(|file| file.extension().is_some_and(|ending| ending == "yaml")) {
        bed.kubectl(&["apply", "-f", file.to_str().expect("UTF-8")]);
    }
    let refit = ["-n", "default", "weightrefit/minilm"];

    let model = r#"{"spec": {"model": {"tensorTable": {"configMapKeyRef": {"name": "other"}}}}}"#;
    let refused = bed.try_kubectl(&[&["patch", "--type=merge", "-p", model], &refit[..]].concat());
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("model is immutable"), "{said}");

    let status: Value = serde_json::from_str(include_str!("../resource/status.json")).expect("JSON");
    let patch = json!({"status": status}).to_string();
    bed.kubectl(&[&["patch", "--subresource=status", "--type=merge", "-p", &patch], &refit[..]].concat());
    let kept: Value =
        serde_json::from_str(&bed.kubectl(&[&["get", "-o", "json"], &refit[..]].concat())).expect("JSON");
    assert_eq!(kept["status"], status);
    bed.kubectl(&[&["wait", "--for=condition=Ready", "--timeout=60s"], &refit[..]].concat());
    let row = bed.kubectl(&[&["get", "--no-headers"], &refit[..]].concat());
    let columns: Vec<&str> = row.split_whitespace().collect();
    assert_eq!(columns[..6], ["minilm", "True", "Refitting", "120", "3", "4"], "{row}");

    // From here on the condition speaks of an older generation, which `kubectl wait` does not take.
    let paused = r#"{"spec": {"paused": true}}"#;
    bed.kubectl(&[&["patch", "--type=merge", "-p", paused], &refit[..]].concat());
    let waited = bed.try_kubectl(&[&["wait", "--for=condition=Ready", "--timeout=1s"], &refit[..]].concat());
    assert!(!waited.status.success());

    let explained = bed.kubectl(&["explain", "weightrefit.spec.transfer.encryption"]);
    assert!(explained.contains("`TrustedFabric`: TCP in TLS, NCCL in clear."), "{explained}");
}
