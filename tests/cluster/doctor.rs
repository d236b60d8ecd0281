//! `weightrefit doctor` against a real API server: a healthy cluster is well, and what is wrong is named with what to do.

use crate::bed::{Bed, programs};
use crate::commands::{Ran, weightrefit};
use crate::operator::is_true;
use crate::world::World;
use serde_json::{Value, json};
use std::process::Command;

const NAMESPACE: &str = "doctor";

fn doctor(bed: &Bed, arguments: &[&str]) -> Ran {
    let usual = [
        "doctor",
        "-n",
        NAMESPACE,
        "--operator-namespace",
        NAMESPACE,
        "--webhook-configuration",
        "weightrefit-doctor",
    ];
    weightrefit(bed, &[&usual[..], arguments].concat())
}

/// The lines of what is wrong or unknown, without advice on the machine that the tests run on.
fn troubles(ran: &Ran) -> Vec<&str> {
    ran.out.lines().filter(|line| line.starts_with("WRONG") || line.starts_with("unknown")).collect()
}

#[test]
fn a_healthy_cluster_is_well_and_what_is_wrong_comes_with_advice() {
    let mut world = World::consenting(NAMESPACE);
    world.start_injecting_operator();
    let settings = std::fs::read_to_string(world.settings()).expect("settings");
    world.bed.send(
        "apply",
        json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": "weightrefit-injection", "namespace": NAMESPACE},
            "data": {"injection.yaml": settings},
        }),
    );
    world.apply();
    world.start_pods();
    world.wait_for_status("all are connected", |status| is_true(status, "CommunicatorsReady"));
    world.refit(0);
    world.wait_for_status("all is well", |status| is_true(status, "InSync") && is_true(status, "Ready"));
    let elsewhere = ["--operator-namespace", "doctor", "--webhook-configuration", "weightrefit-doctor"];
    let well = doctor(world.bed, &["tiny"]);
    assert_eq!((well.code, troubles(&well)), (Some(0), vec![]), "{}{}", well.out, well.err);
    for line in
        ["v1alpha1, as this binary has it", "leads", "may publish", "may receive", "5 claim doctor/tiny"]
    {
        assert!(well.out.contains(line), "{line} in {}", well.out);
    }
    let json = doctor(world.bed, &["tiny", "-o", "json"]);
    let json: Value = serde_json::from_str(&json.out).expect("JSON");
    assert_eq!(json["schema"], "weightrefit.doctor/v1");
    assert_eq!(json["findings"][0]["check"], "API server", "{json:#}");

    // As a plugin of kubectl.
    let folder = tempfile::tempdir().expect("a folder");
    let plugin = folder.path().join("kubectl-weightrefit");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_weightrefit"), plugin).expect("a link");
    let output = Command::new(programs().join("kubectl"))
        .args(["weightrefit", "doctor", "-n", NAMESPACE])
        .args(elsewhere)
        .env("PATH", folder.path())
        .env("KUBECONFIG", world.bed.kubeconfig())
        .output()
        .expect("kubectl starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    // Consent is taken back: the advice gives it again.
    world.bed.kubectl(&["delete", "rolebinding", "receive", "-n", NAMESPACE]);
    let refused = doctor(world.bed, &["tiny"]);
    assert_eq!(refused.code, Some(1), "{}", refused.out);
    assert!(refused.out.contains("may not receive"), "{}", refused.out);
    // The operator's condition, where it has noticed too, has advice of its own.
    let advice = refused.out.lines().filter_map(|line| line.split_once("do:  "));
    let is_grant = |command: &&str| command.starts_with("kubectl create role");
    let command = advice.map(|(_, command)| command).find(is_grant).expect("advice");
    for command in command.split(" && ") {
        let arguments: Vec<&str> = command.split_ascii_whitespace().skip(1).collect();
        world.bed.kubectl(&arguments);
    }
    let again = doctor(world.bed, &["tiny"]);
    assert!(again.out.contains("may receive"), "{}", again.out);

    // A pod of a profile that there is none of, a refit that there is none of, and no operator.
    let annotation = "weightrefit.dev/profile=large";
    world.bed.kubectl(&["annotate", "pod", "engine-0", "-n", NAMESPACE, annotation]);
    let profile = doctor(world.bed, &["tiny"]);
    assert!(profile.out.contains("doctor/engine-0 ask for large"), "{}", profile.out);
    let nobody = doctor(world.bed, &["nobody"]);
    assert!(nobody.out.contains("WeightRefit doctor/nobody does not exist"), "{}", nobody.out);
    assert!(nobody.err.contains("1 of "), "{}", nobody.err);
    // The webhook is asked about pods of other namespaces than the operator's.
    let apart = ["doctor", "-n", NAMESPACE, "--operator-namespace", "default"];
    let apart = [&apart[..], &["--webhook-configuration", "weightrefit-doctor"]].concat();
    let asked = weightrefit(world.bed, &apart);
    assert!(asked.out.contains("a pod of namespace doctor gets an agent"), "{}", asked.out);
    world.kill_operator();
    let down = weightrefit(world.bed, &apart);
    assert_eq!(down.code, Some(1), "{}", down.out);
    for line in
        ["nobody leads in namespace default", "failed calling webhook", "injection.yaml does not exist"]
    {
        assert!(down.out.contains(line), "{line} in {}", down.out);
    }
}

#[test]
fn another_definition_and_rights_that_lack_are_told() {
    let bed = Bed::start();
    let bare = weightrefit(&bed, &["doctor"]);
    assert_eq!(bare.code, Some(1), "{}", bare.err);
    assert!(bare.out.contains("weightrefits.weightrefit.dev does not exist"), "{}", bare.out);
    bed.define_refits();
    let change = json!([{
        "op": "replace",
        "path": "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/lag/description",
        "value": "As it was a year ago.",
    }]);
    let definition = ["crd", "weightrefits.weightrefit.dev"];
    bed.kubectl(&[&["patch"], &definition[..], &["--type=json", "-p", &change.to_string()]].concat());
    let old = weightrefit(&bed, &["doctor"]);
    assert!(old.out.contains("the cluster has another one than this binary"), "{}", old.out);

    bed.create_namespace("people");
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), bed.config_of("people", "default").to_string()).expect("written");
    let path = file.path().to_str().expect("UTF-8");
    let stranger = weightrefit(&bed, &["doctor", "tiny", "-n", "people", "--kubeconfig", path]);
    // Who may look at nothing has found nothing wrong.
    assert_eq!(stranger.code, Some(0), "{}", stranger.out);
    let unknown = stranger.out.lines().filter(|line| line.starts_with("unknown"));
    assert_eq!(unknown.count(), 5, "{}", stranger.out);
    assert!(stranger.out.contains("Run this with an account that may read it."), "{}", stranger.out);
}
