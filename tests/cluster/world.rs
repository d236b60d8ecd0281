//! A namespace with an operator, a refit and pods that really run: agents, and reference trainer and engines as their
//! clients. What a kubelet would do, this does: it gives pods their addresses and tokens, and restarts agents.

pub(crate) mod injected;
mod rights;

use crate::bed::Bed;
use crate::process::Process;
use crate::rogue::Port;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use weightrefit::api::documents::{Documents, SourceText};
use weightrefit::api::resolve::{Options, resolve};
use weightrefit::controller::pod_facts::WEIGHTS_CURRENT;
use weightrefit::identity::{CA_BUNDLE, CA_BUNDLE_KEY, SERVER_NAME};

/// For what follows within seconds unless the machine is busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) const AUDIENCE: &str = "weightrefit.test";

/// The refit of the tests: three training ranks, two replicas of two ranks.
const TINY: &str = include_str!("../local/tiny.yaml");

/// One namespace.
pub(crate) struct World {
    pub(crate) bed: &'static Bed,
    pub(crate) namespace: String,
    folder: tempfile::TempDir,
    operator: Option<Process>,
    /// Where agents dial; the same for each operator of this world.
    agents: Option<String>,
    /// Where operators find the API server, if not at its own address.
    api_server: Option<String>,
    /// More flags of its operators, and what keeps for itself what they name.
    webhook: Option<injected::Webhook>,
    /// Engines' pods ask for the readiness gate.
    is_gated: bool,
    /// All pods have the address of one node.
    is_of_host_network: bool,
    /// Namespaces that its operators look at: its own, and those that were added.
    watched: Vec<String>,
    /// The pool's layout is what its engines register.
    is_recorded: bool,
    pods: BTreeMap<String, Pod>,
    starts: u32,
    worlds: u32,
}

struct Pod {
    uid: String,
    /// As the API server made it.
    created: Value,
    side: Side,
    ordinal: u32,
    /// `None` after it was killed on purpose.
    agent: Option<Process>,
    clients: Vec<Process>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Training,
    Inference,
}

impl Side {
    const fn label(self) -> &'static str {
        match self {
            Self::Training => "training",
            Self::Inference => "inference",
        }
    }

    pub(crate) const fn owner(self) -> &'static str {
        match self {
            Self::Training => "trainer",
            Self::Inference => "engine",
        }
    }
}

impl World {
    /// A namespace with the operator's account and rights, and accounts for trainer and engines with consent.
    pub(crate) fn new(namespace: &str) -> Self {
        let bed = Bed::shared();
        bed.define_refits();
        bed.create_namespace(namespace);
        for side in [Side::Training, Side::Inference] {
            bed.kubectl(&["create", "serviceaccount", side.owner(), "-n", namespace]);
        }
        // As agents want it for their sockets.
        let mode = std::fs::Permissions::from_mode(0o700);
        let folder = tempfile::Builder::new().prefix("wr-").permissions(mode).tempdir().expect("a folder");
        let world = Self {
            bed,
            namespace: namespace.to_owned(),
            folder,
            operator: None,
            agents: None,
            api_server: None,
            webhook: None,
            is_gated: false,
            is_of_host_network: false,
            watched: vec![namespace.to_owned()],
            is_recorded: false,
            pods: BTreeMap::new(),
            starts: 0,
            worlds: 0,
        };
        world.grant("operator-rbac.yaml");
        world.write_inputs();
        world
    }

    /// As [`Self::new`], where both accounts may take part.
    pub(crate) fn consenting(namespace: &str) -> Self {
        let world = Self::new(namespace);
        world.consent(Side::Training);
        world.consent(Side::Inference);
        world
    }

    /// Engines' pods ask for the readiness gate from now on.
    pub(crate) fn gate_engines(&mut self) {
        self.is_gated = true;
    }

    /// Pods are of the host network from now on, all of one node.
    pub(crate) fn use_host_network(&mut self) {
        self.is_of_host_network = true;
    }

    /// The refit says nothing of the pool's layout from now on, and engines register it.
    pub(crate) fn record_layouts(&mut self) {
        self.is_recorded = true;
    }

    /// The namespace permits the account of a side.
    pub(crate) fn consent(&self, side: Side) {
        let verb = if side == Side::Training { "publish" } else { "receive" };
        let (namespace, account) =
            (self.namespace.as_str(), format!("--serviceaccount={}:{}", self.namespace, side.owner()));
        let (verb_flag, role_flag) = (format!("--verb={verb}"), format!("--role={verb}"));
        let (resource, name) = ("--resource=weightrefits.weightrefit.dev", "--resource-name=tiny");
        self.bed.kubectl(&["create", "role", verb, "-n", namespace, &verb_flag, resource, name]);
        self.bed.kubectl(&["create", "rolebinding", verb, "-n", namespace, &role_flag, &account]);
    }

    /// The refit's documents, in this namespace.
    pub(crate) fn documents(&self) -> String {
        documents_in(&self.namespace)
    }

    pub(crate) fn apply(&self) {
        let mut documents = self.documents();
        if self.is_recorded {
            let (head, rest) = documents.split_once("  inference:").expect("a pool");
            let (pool, rest) = rest.split_once("      layout:").expect("a layout");
            let (_, tail) = rest.split_once("\n  transfer:").expect("what follows");
            documents =
                format!("{head}  inference:{pool}      layout: {{type: Registered}}\n  transfer:{tail}");
        }
        self.bed.send("apply", documents);
    }

    /// Operators find the API server at this URL from now on.
    pub(crate) fn reach_api_server_at(&mut self, url: String) {
        self.api_server = Some(url);
    }

    /// Starts an operator with the rights of the manifest, and waits until agents can dial it.
    pub(crate) fn start_operator(&mut self) {
        let namespace = self.namespace.clone();
        let mut config = self.bed.config_of(&namespace, "weightrefit-operator");
        if let Some(url) = &self.api_server {
            config["clusters"][0]["cluster"] = json!({"server": url});
        }
        let kubeconfig = self.path("operator.kubeconfig");
        std::fs::write(&kubeconfig, config.to_string()).expect("a file");
        let listen = self.agents.clone().unwrap_or_else(|| "127.0.0.1:0".into());
        self.starts += 1;
        let mut command = Command::new(program("weightrefit-operator"));
        command
            .args(["--namespace", &namespace, "--agent-listen", &listen])
            .args(self.watched.iter().flat_map(|watched| ["--watch-namespace", watched.as_str()]))
            .args(["--http-listen", "127.0.0.1:0", "--audience", AUDIENCE])
            .args(self.webhook.iter().flat_map(injected::Webhook::flags))
            .env("KUBECONFIG", &kubeconfig)
            .env("RUST_LOG", "info,weightrefit=debug");
        let operator = Process::start(command, self.path(&format!("operator-{}.log", self.starts)));
        self.agents = Some(wait_for("the operator serves", || logged_field(&operator, "agents")));
        self.operator = Some(operator);
    }

    /// Where agents dial, and the authority that they trust.
    pub(crate) fn port(&self) -> Port {
        let bundle = std::fs::read(self.path("bundle.pem")).expect("pods were run");
        Port { address: self.agents.clone().expect("an operator was started"), bundle }
    }

    /// UID of a pod of this world, and the token that its agent has.
    pub(crate) fn credentials(&self, pod: &str) -> (String, String) {
        let uid = self.pods[pod].uid.clone();
        let token = std::fs::read_to_string(self.path(&format!("{uid}.token"))).expect("a token");
        (uid, token)
    }

    /// What the operator's `/metrics` says now.
    pub(crate) fn metrics(&self) -> String {
        let mut stream = TcpStream::connect(self.http()).expect("it serves");
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("text");
        answer
    }

    /// Whether the present operator has logged this.
    pub(crate) fn operator_said(&self, text: &str) -> bool {
        self.operator.as_ref().is_some_and(|operator| operator.log().contains(text))
    }

    fn http(&self) -> String {
        logged_field(self.operator.as_ref().expect("an operator"), "http").expect("it serves")
    }

    /// The operator's exit code, once it has ended by itself.
    pub(crate) fn operator_exit_code(&mut self) -> Option<i32> {
        self.operator.as_mut().expect("an operator").exit_code()
    }

    /// Ends the operator without a word.
    pub(crate) fn kill_operator(&mut self) {
        self.operator = None;
    }

    /// Asks the operator to stop, and returns its exit code.
    pub(crate) fn stop_operator(&mut self) -> Option<i32> {
        self.operator.take().expect("an operator").terminate()
    }

    /// Creates all pods of the refit, and what runs in them.
    pub(crate) fn start_pods(&mut self) {
        (0..3).for_each(|ordinal| self.create_pod(Side::Training, ordinal));
        (0..2).for_each(|ordinal| self.create_pod(Side::Inference, ordinal));
        self.run_pods();
    }

    /// Creates the pod as its controller and a kubelet would.
    pub(crate) fn create_pod(&mut self, side: Side, ordinal: u32) {
        let (namespace, name) = (self.namespace.clone(), format!("{}-{ordinal}", side.owner()));
        let node = match self.is_of_host_network {
            true => format!("{namespace}-node"),
            false => format!("{namespace}-{name}"),
        };
        let node_document = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}});
        self.bed.apply("/api/v1/nodes", &node_document);
        let gates = match self.is_gated && side == Side::Inference {
            true => json!([{"conditionType": WEIGHTS_CURRENT}]),
            false => json!([]),
        };
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": name, "namespace": namespace,
                "labels": {
                    "weightrefit.dev/refit": "tiny",
                    "weightrefit.dev/side": side.label(),
                    "apps.kubernetes.io/pod-index": ordinal.to_string(),
                },
            },
            "spec": {
                "nodeName": node,
                "hostNetwork": self.is_of_host_network,
                "serviceAccountName": side.owner(),
                "readinessGates": gates,
                "containers": [{"name": "main", "image": "none"}],
            },
        });
        let pods = format!("/api/v1/namespaces/{namespace}/pods");
        let created = self.bed.apply(&pods, &pod);
        let uid = created["metadata"]["uid"].as_str().expect("a uid").to_owned();
        let ip = self.address(side, ordinal);
        let status = json!({"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]});
        self.bed.patch_status(&pods, &name, &status);
        let token = self.bed.token(&namespace, side.owner(), AUDIENCE, &name);
        std::fs::write(self.path(&format!("{uid}.token")), token).expect("a file");
        self.pods.insert(name, Pod { uid, created, side, ordinal, agent: None, clients: Vec::new() });
    }

    /// Starts agents and clients of pods that have none; the trust bundle must be there by then.
    pub(crate) fn run_pods(&mut self) {
        self.fetch_bundle();
        let names: Vec<String> = self.pods.keys().cloned().collect();
        for name in &names {
            if self.pods[name].agent.is_none() {
                self.start_agent(name);
            }
            if self.pods[name].clients.is_empty() {
                self.start_clients(name);
            }
        }
    }

    /// The operator publishes its certificate where pods claim refits; the kubelet mounts it.
    pub(crate) fn fetch_bundle(&self) {
        let path = format!("jsonpath={{.data.{}}}", CA_BUNDLE_KEY.replace('.', "\\."));
        let bundle = wait_for("there is a trust bundle", || {
            let output =
                self.bed.try_kubectl(&["get", "configmap", CA_BUNDLE, "-n", &self.namespace, "-o", &path]);
            output.status.success().then(|| String::from_utf8(output.stdout).expect("UTF-8"))
        });
        std::fs::write(self.path("bundle.pem"), bundle).expect("a file");
    }

    fn start_agent(&mut self, name: &str) {
        self.starts += 1;
        let command = self.injected_agent(name).unwrap_or_else(|| self.agent(name));
        let agent = Process::start(command, self.path(&format!("{name}-{}.log", self.starts)));
        self.pods.get_mut(name).expect("a pod").agent = Some(agent);
    }

    fn agent(&self, name: &str) -> Command {
        let pod = &self.pods[name];
        let mut command = Command::new(program("weightrefit-agent"));
        command
            .args(["--coordinator", self.agents.as_deref().expect("an operator was started")])
            .args(["--coordinator-name", SERVER_NAME, "--refit", &format!("{}/tiny", self.namespace)])
            .arg("--trust-bundle")
            .arg(self.path("bundle.pem"))
            .arg("--token")
            .arg(self.path(&format!("{}.token", pod.uid)))
            .args(["--pod-uid", &pod.uid, "--listen", &self.address(pod.side, pod.ordinal)])
            .arg("--socket")
            .arg(self.socket(name))
            .args(["--exit-with-parent", &std::process::id().to_string()]);
        for claim in claims(pod.side, pod.ordinal) {
            command.args(["--claim", &claim]);
        }
        command
    }

    fn start_clients(&mut self, name: &str) {
        let pod = &self.pods[name];
        let (side, ordinal) = (pod.side, pod.ordinal);
        let mut clients = Vec::new();
        let ranks = if side == Side::Training { 1 } else { 2 };
        for rank in 0..ranks {
            self.starts += 1;
            let mut command = Command::new(program("weightrefit-agent"));
            let role = if side == Side::Training { "reference-trainer" } else { "reference-engine" };
            command
                .arg(role)
                .arg("--socket")
                .arg(self.socket(name))
                .arg("--refit")
                .arg(self.path("refit.json"))
                .arg("--weights")
                .arg(self.path("weights.safetensors"))
                .args(["--launcher", &std::process::id().to_string()]);
            match side {
                Side::Training => {
                    command.args(["--training-rank", &ordinal.to_string()]);
                    command.args(["--world", &format!("world-{}", self.worlds)]);
                }
                Side::Inference => {
                    command.args([
                        "--pool",
                        "default",
                        "--replica",
                        name,
                        "--replica-rank",
                        &rank.to_string(),
                    ]);
                    command.arg("--replica-socket").arg(self.path(&format!("{name}.replica")));
                    command.args(self.is_recorded.then_some("--record"));
                }
            }
            clients.push(Process::start(command, self.path(&format!("{name}-{rank}-{}.log", self.starts))));
        }
        self.pods.get_mut(name).expect("a pod").clients = clients;
    }

    /// The whole trainer starts again, as it does when one of its ranks was lost.
    pub(crate) fn restart_trainer(&mut self) {
        self.worlds += 1;
        self.pods.values_mut().filter(|pod| pod.side == Side::Training).for_each(|pod| pod.clients.clear());
        self.run_pods();
    }

    /// The engines of a pod end; [`Self::run_pods`] starts others.
    pub(crate) fn stop_engines(&mut self, name: &str) {
        self.pods.get_mut(name).expect("a pod").clients.clear();
    }

    /// Whether the agent has taken what all clients of the pod hold.
    pub(crate) fn is_registered(&self, name: &str) -> bool {
        self.pods[name].clients.iter().all(|client| client.said("{\"type\":\"registered\"}"))
    }

    /// Deletes the pod, and what runs in it.
    pub(crate) fn delete_pod(&mut self, name: &str) {
        self.pods.remove(name);
        self.bed.kubectl(&["delete", "pod", name, "-n", &self.namespace, "--force", "--grace-period=0"]);
    }

    /// The agents of a side stand still (SIGSTOP), or go on.
    pub(crate) fn signal_agents(&self, side: Side, signal: rustix::process::Signal) {
        let pods = self.pods.values().filter(|pod| pod.side == side);
        pods.filter_map(|pod| pod.agent.as_ref()).for_each(|agent| agent.signal(signal));
    }

    /// Every training rank publishes the step.
    pub(crate) fn publish(&mut self, step: i64) {
        for pod in self.pods.values_mut().filter(|pod| pod.side == Side::Training) {
            pod.clients.iter_mut().for_each(|client| client.tell(&format!("publish {step}")));
        }
    }

    /// Publishes the step and waits until every training rank has its memory back.
    pub(crate) fn refit(&mut self, step: i64) {
        self.publish(step);
        self.wait(&format!("step {step} is released"), |world| world.has_memory_back(step));
    }

    /// Whether every training rank has been told that the step's memory is its own again.
    pub(crate) fn has_memory_back(&self, step: i64) -> bool {
        let released = format!("{{\"type\":\"released\",\"step\":{step}}}");
        let mut trainers = self.pods.values().filter(|pod| pod.side == Side::Training);
        trainers.all(|pod| pod.clients.iter().all(|client| client.said(&released)))
    }

    /// How often this text is in the logs of this world's processes, those that have ended included.
    pub(crate) fn logged(&self, text: &str) -> usize {
        let files =
            std::fs::read_dir(self.folder.path()).expect("a folder").map(|file| file.expect("a file").path());
        let logs = files.filter(|path| path.extension().is_some_and(|extension| extension == "log"));
        logs.map(|log| std::fs::read_to_string(log).expect("a log").matches(text).count()).sum()
    }

    /// How often engines have compared their live tensors of a step with the file and found no difference.
    pub(crate) fn checks(&self, step: i64) -> usize {
        let engines = self.pods.values().filter(|pod| pod.side == Side::Inference);
        let lines = engines.flat_map(|pod| &pod.clients).flat_map(Process::lines);
        let lines = lines.filter_map(|line| serde_json::from_str::<Value>(&line).ok());
        let of_step = |line: &Value| line["type"] == "checked" && line["step"] == step;
        let checks: Vec<Value> = lines.filter(of_step).collect();
        for check in &checks {
            assert_eq!((&check["mismatched"], &check["padsNotZero"]), (&json!(0), &json!(0)), "{check}");
            assert_ne!(check["checked"], 0, "{check}");
        }
        checks.len()
    }

    /// The refit as the API server has it.
    pub(crate) fn get(&self) -> Value {
        let mut refits = self.bed.refits(&self.namespace).into_iter();
        refits.find(|refit| refit["metadata"]["name"] == "tiny").expect("it is there")
    }

    /// Waits until the refit's status is as wanted, and returns it.
    pub(crate) fn wait_for_status(&mut self, what: &str, done: impl Fn(&Value) -> bool) -> Value {
        self.wait(what, |world| done(&world.get()["status"]));
        self.get()["status"].clone()
    }

    /// Waits, and restarts agents that ended meanwhile as a kubelet does.
    pub(crate) fn wait(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !done(self) {
            if start.elapsed() > PATIENCE {
                panic!("it never happened that {what}\n{}", self.report());
            }
            self.tend();
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn tend(&mut self) {
        let ended = |pod: &mut Pod| pod.agent.as_mut().is_some_and(Process::has_ended);
        let names: Vec<String> =
            self.pods.iter_mut().filter_map(|(name, pod)| ended(pod).then(|| name.clone())).collect();
        names.iter().for_each(|name| self.start_agent(name));
    }

    /// What everybody said last.
    fn report(&self) -> String {
        let mut report = format!("{:#}\n", self.get()["status"]);
        let operator = self.operator.iter().map(|operator| ("operator".to_owned(), operator));
        let of_pod = |(name, pod): (&String, &'_ Pod)| {
            let clients = pod.clients.iter().map(|client| (format!("client of {name}"), client.tail()));
            let agent = pod.agent.iter().map(|agent| (format!("agent of {name}"), agent.tail()));
            agent.chain(clients).collect::<Vec<_>>()
        };
        for (name, tail) in operator.map(|(n, p)| (n, p.tail())).chain(self.pods.iter().flat_map(of_pod)) {
            report.push_str(&format!("--- {name}\n{tail}\n"));
        }
        report
    }

    /// The resolved refit and a weights file, for the reference clients.
    fn write_inputs(&self) {
        let source = SourceText { file: "tiny.yaml".into(), text: self.documents() };
        let documents = Documents::parse(&[source]).expect("valid");
        let refit = resolve(&documents, &documents.refits[0], &Options::default()).expect("resolves");
        let json = serde_json::to_vec(&refit.for_agents()).expect("JSON");
        std::fs::write(self.path("refit.json"), json).expect("a file");
        let (mut header, mut bytes) = (serde_json::Map::new(), Vec::new());
        for (_, tensor) in refit.tensors.iter() {
            let begin = bytes.len();
            let elements = tensor.shape.iter().product::<u64>();
            for element in 0..elements {
                let value = (element.wrapping_mul(2_654_435_761) % 65_521) as f32 / 65_521.0;
                bytes.extend(value.to_le_bytes());
            }
            let entry = json!({"dtype": "F32", "shape": tensor.shape, "data_offsets": [begin, bytes.len()]});
            header.insert(tensor.name.clone(), entry);
        }
        let header = Value::Object(header).to_string();
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes].concat();
        std::fs::write(self.path("weights.safetensors"), file).expect("a file");
    }

    /// Each pod has a loopback address of its own, unless it has its node's.
    fn address(&self, side: Side, ordinal: u32) -> String {
        match (self.is_of_host_network, side) {
            (true, _) => "127.0.3.1".to_owned(),
            (false, Side::Training) => format!("127.0.1.{}", ordinal + 1),
            (false, Side::Inference) => format!("127.0.2.{}", ordinal + 1),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// The first value of this field in a process's log.
fn logged_field(process: &Process, field: &str) -> Option<String> {
    let log = process.log();
    let mut lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.find_map(|line| line["fields"][field].as_str().map(str::to_owned))
}

/// The status of a condition, empty while there is none.
pub(crate) fn condition<'a>(status: &'a Value, kind: &str) -> (&'a str, &'a str, &'a str) {
    let conditions = status["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
    let found = conditions.iter().find(|condition| condition["type"] == kind);
    let text = |key: &str| found.and_then(|condition| condition[key].as_str()).unwrap_or_default();
    (text("status"), text("reason"), text("message"))
}

fn claims(side: Side, ordinal: u32) -> Vec<String> {
    match side {
        Side::Training => vec![format!("training/{ordinal}")],
        Side::Inference => (0..2).map(|rank| format!("inference/default/engine-{ordinal}/{rank}")).collect(),
    }
}

/// The refit's documents, in a namespace.
pub(crate) fn documents_in(namespace: &str) -> String {
    TINY.replace("namespace: tests", &format!("namespace: {namespace}"))
}

fn checkout() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A binary of this build.
fn program(name: &str) -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_weightrefit")).with_file_name(name)
}

fn wait_for<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "it never happened that {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
