//! What the other tests take for granted: accounts, tokens, roles and hand-made pods of a real API server, and that
//! it leaves nothing behind.

use crate::bed::Bed;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// For what follows within a second unless the machine is busy.
const PATIENCE: Duration = Duration::from_secs(60);

/// Tells a test that it is the process whose end another one watches.
const IS_CHILD: &str = "WEIGHTREFIT_TEST_CHILD";

#[test]
fn an_account_may_do_what_its_role_says_and_no_more() {
    let bed = Bed::shared();
    let version: Value = serde_json::from_str(&bed.kubectl(&["version", "-o", "json"])).expect("JSON");
    assert_eq!(version["serverVersion"]["major"], "1", "{version}");

    bed.create_namespace("roles");
    bed.kubectl(&["create", "serviceaccount", "reader", "-n", "roles"]);
    let token = bed.kubectl(&["create", "token", "reader", "-n", "roles"]);
    let token = format!("--token={}", token.trim_end());
    let refusal = || {
        let output = bed.try_kubectl(&[&token, "get", "configmaps", "-n", "roles"]);
        (!output.status.success()).then(|| String::from_utf8(output.stderr).expect("UTF-8"))
    };
    assert!(refusal().expect("no role yet").contains("system:serviceaccount:roles:reader"));

    bed.kubectl(&["create", "role", "reader", "--verb=list", "--resource=configmaps", "-n", "roles"]);
    let account = "--serviceaccount=roles:reader";
    bed.kubectl(&["create", "rolebinding", "reader", "--role=reader", account, "-n", "roles"]);
    wait_until("the role holds", || refusal().is_none());
    assert!(!bed.try_kubectl(&[&token, "get", "secrets", "-n", "roles"]).status.success());
}

#[test]
fn a_token_names_the_pod_it_was_made_for_and_only_to_its_audience() {
    let bed = Bed::shared();
    bed.create_namespace("tokens");
    bed.send("create", json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "tokens-0"}}));
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "rank-0", "namespace": "tokens"},
        "spec": {"nodeName": "tokens-0", "containers": [{"name": "main", "image": "none"}]},
    });
    let created = bed.send("create", pod);
    let status = json!({"status": {"podIP": "127.0.0.9", "podIPs": [{"ip": "127.0.0.9"}]}}).to_string();
    bed.kubectl(&["patch", "pod", "rank-0", "-n", "tokens", "--subresource=status", "-p", &status]);
    let address = bed.kubectl(&["get", "pod", "rank-0", "-n", "tokens", "-o", "jsonpath={.status.podIP}"]);
    assert_eq!(address, "127.0.0.9");

    let request = "create token default -n tokens --audience=weightrefit --bound-object-kind=Pod";
    let request: Vec<&str> = request.split(' ').chain(["--bound-object-name=rank-0"]).collect();
    let token = bed.kubectl(&request);
    let token = token.trim_end();
    let review = |audience: &str| {
        let spec = json!({"token": token, "audiences": [audience]});
        let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec});
        bed.send("create", review)["status"].clone()
    };
    let status = review("weightrefit");
    let user = &status["user"];
    assert_eq!(status["authenticated"], true, "{status}");
    assert_eq!(user["username"], "system:serviceaccount:tokens:default");
    assert_eq!(user["extra"]["authentication.kubernetes.io/pod-name"], json!(["rank-0"]));
    assert_eq!(user["extra"]["authentication.kubernetes.io/pod-uid"], json!([created["metadata"]["uid"]]));
    assert_ne!(review("another")["authenticated"], true);
    let output = bed.try_kubectl(&[&format!("--token={token}"), "get", "--raw=/api"]);
    assert!(!output.status.success(), "the API server is another audience");
}

#[test]
fn beds_run_side_by_side_and_end_with_their_process() {
    if std::env::var_os(IS_CHILD).is_some() {
        let bed = Bed::start();
        writeln!(std::io::stdout(), "\n{}", bed.kubeconfig().display()).expect("a reader");
        loop {
            std::thread::park();
        }
    }
    let folder = {
        let bed = Bed::start();
        assert_eq!(processes_in(folder_of(&bed.kubeconfig())), 4, "bash, cat, etcd, kube-apiserver");
        folder_of(&bed.kubeconfig()).to_owned()
    };
    assert!(!folder.exists() && processes_in(&folder) == 0, "a dropped bed is gone at once");

    let name = "api_server::beds_run_side_by_side_and_end_with_their_process";
    let mut child = Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", "--nocapture", name])
        .env(IS_CHILD, "1")
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
    let kubeconfig = lines.find(|line| line.ends_with("/kubeconfig")).expect("the child has a bed");
    Bed::shared().kubectl(&["get", "--raw=/readyz"]);
    child.kill().expect("a child");
    child.wait().expect("a child");
    let folder = folder_of(Path::new(&kubeconfig));
    wait_until("the bed of a killed process is gone", || !folder.exists() && processes_in(folder) == 0);
}

fn folder_of(kubeconfig: &Path) -> &Path {
    kubeconfig.parent().expect("a folder")
}

/// Processes that work in the folder.
fn processes_in(folder: &Path) -> usize {
    let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
    entries
        .filter_map(|entry| std::fs::read_link(entry.path().join("cwd")).ok())
        .filter(|at| at.starts_with(folder))
        .count()
}

fn wait_until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "it never happened that {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
