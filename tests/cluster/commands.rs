//! `weightrefit status`, `history` and `abort` with the rights of whoever runs them.

use crate::bed::Bed;
use serde_json::{Value, json};
use std::process::{Command, Output};

/// What the command made of a cluster.
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

pub(crate) fn weightrefit(bed: &Bed, arguments: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weightrefit"));
    let Output { status, stdout, stderr } =
        command.args(arguments).env("KUBECONFIG", bed.kubeconfig()).output().expect("it runs");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    Ran { code: status.code(), out: text(stdout), err: text(stderr) }
}

#[test]
fn a_cluster_says_how_its_refits_stand() {
    let bed = Bed::start();
    let bare = weightrefit(&bed, &["status"]);
    assert_eq!(bare.code, Some(1), "{}", bare.err);
    assert!(bare.err.contains("weightrefit crd | kubectl apply"), "{}", bare.err);

    bed.define_refits();
    bed.create_namespace("rl");
    let none = weightrefit(&bed, &["status", "-n", "rl"]);
    assert_eq!((none.code, none.out.as_str()), (Some(0), ""), "{}", none.err);
    assert!(none.err.contains("no WeightRefit here"), "{}", none.err);

    let refit = include_str!("../status/refit.yaml");
    bed.send("create", refit);
    let new = weightrefit(&bed, &["status", "qwen3-30b", "-n", "rl"]);
    assert!(new.out.contains("no operator has seen it"), "{}", new.out);
    let idle = weightrefit(&bed, &["abort", "qwen3-30b", "-n", "rl"]);
    assert_eq!(idle.code, Some(1), "{}", idle.err);
    assert!(idle.err.contains("no members, so no round runs"), "{}", idle.err);

    let status: Value = serde_json::from_str(include_str!("../resource/status.json")).expect("JSON");
    let patch = json!({"status": status}).to_string();
    let of = ["weightrefit/qwen3-30b", "-n", "rl"];
    bed.kubectl(&[&["patch", "--subresource=status", "--type=merge", "-p", &patch], &of[..]].concat());
    let list = weightrefit(&bed, &["status", "-A"]);
    assert!(
        list.out.lines().nth(1).is_some_and(|line| line.starts_with("rl/qwen3-30b  True   Refitting")),
        "{}",
        list.out
    );
    let one = weightrefit(&bed, &["status", "qwen3-30b", "-n", "rl"]);
    assert!(one.out.contains("default/vllm-2"), "{}", one.out);
    let json = weightrefit(&bed, &["status", "-A", "-o", "json"]);
    let json: Value = serde_json::from_str(&json.out).expect("JSON");
    assert_eq!((&json["schema"], &json["refits"][0]["status"]), (&json!("weightrefit.status/v1"), &status));

    let aborted = weightrefit(&bed, &["abort", "qwen3-30b", "-n", "rl"]);
    assert_eq!(aborted.code, Some(0), "{}", aborted.err);
    let annotation = bed.kubectl(
        &[&["get", "-o", r"jsonpath={.metadata.annotations.weightrefit\.dev/abort}"], &of[..]].concat(),
    );
    assert_eq!(annotation, "7/120");

    let uid = bed.kubectl(&[&["get", "-o", "jsonpath={.metadata.uid}"], &of[..]].concat());
    for (name, time, message) in
        [("b", "2026-11-30T02:00:00Z", "second"), ("a", "2026-11-30T01:00:00Z", "first")]
    {
        bed.send("create", json!({
            "apiVersion": "v1", "kind": "Event", "metadata": {"name": name, "namespace": "rl"},
            "involvedObject": {"kind": "WeightRefit", "name": "qwen3-30b", "namespace": "rl", "uid": uid},
            "type": "Normal", "reason": "MembersResolved", "message": message, "lastTimestamp": time, "count": 2,
        }));
    }
    let history = weightrefit(&bed, &["history", "qwen3-30b", "-n", "rl"]);
    let (first, second) = (history.out.find("first"), history.out.find("second"));
    assert!(
        first.is_some() && first < second && history.out.contains("last failed round: 7.112"),
        "{}",
        history.out
    );

    let absent = weightrefit(&bed, &["status", "nobody", "-n", "rl"]);
    assert_eq!(absent.code, Some(1), "{}", absent.err);
    assert!(absent.err.contains(r#"weightrefits.weightrefit.dev "nobody" not found"#), "{}", absent.err);
}

#[test]
fn what_an_account_may_not_do_is_said_and_not_tried_again() {
    let bed = Bed::shared();
    bed.create_namespace("commands");
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), bed.config_of("commands", "default").to_string()).expect("written");
    let path = file.path().to_str().expect("UTF-8");
    let refused = weightrefit(bed, &["status", "-n", "commands", "--kubeconfig", path]);
    assert_eq!(refused.code, Some(1), "{}", refused.err);
    assert!(refused.err.contains("weightrefit-view"), "{}", refused.err);
}

#[test]
fn a_cluster_that_is_not_there_is_told_from_a_file_that_is_not() {
    let run = |config: &str| {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), config).expect("written");
        let output = Command::new(env!("CARGO_BIN_EXE_weightrefit"))
            .args(["status", "--kubeconfig", file.path().to_str().expect("UTF-8")])
            .output()
            .expect("it runs");
        (output.status.code(), String::from_utf8(output.stderr).expect("UTF-8"))
    };
    let (code, said) = run("{clusters: 7}");
    assert!(code == Some(1) && said.contains("--kubeconfig"), "{said}");
    let nobody = r#"{"apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {}}], "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]}"#;
    let (code, said) = run(nobody);
    assert!(code == Some(3) && said.contains("kubectl get --raw=/readyz"), "{said}");
}
