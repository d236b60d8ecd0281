//! A coordinator, agents of the real binary, and clients of their sockets, for tests.

pub(crate) mod client;
pub(crate) mod coordinator;

use coordinator::Coordinator;
use serde_json::json;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use weightrefit_core::dtype::DType;
use weightrefit_core::id::Sha256;
use weightrefit_core::round::message::Timeouts;
use weightrefit_proto::refit::{Fabric, InFlight, KvCache, OnReplicaFailure, Policy, Pool, Refit, Tensor};

/// Longest wait for something that happens in milliseconds; reached only by a test that fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// One f32 tensor of 8 × 4: whole on the one training rank, cut by rows on two inference ranks.
pub(crate) fn tiny_refit() -> Refit {
    let layout = |world: u64, cut: serde_json::Value| {
        json!({
            "layout": "v1", "sizes": {"tp": world}, "world": world, "grids": {"all": ["tp"]}, "axes": {"none": []},
            "stages": {"axis": "none", "layers": [[0, 1]]},
            "rules": [{"hf": "w", "to": "w", "cut": cut}],
        })
    };
    let by_rows = json!([{"dim": 0, "by": "tp"}]);
    let timeouts = Timeouts {
        publish_ms: 10_000,
        prepare_ms: 10_000,
        pause_ms: 10_000,
        transfer_ms: 10_000,
        verify_ms: 10_000,
        commit_ms: 10_000,
        resume_ms: 10_000,
        total_ms: 60_000,
    };
    Refit {
        tensors: vec![Tensor { name: "w".into(), shape: vec![8, 4], dtype: DType::F32 }],
        training: layout(1, by_rows.clone()),
        pools: vec![Pool { name: "default".into(), layout: layout(2, by_rows), min_replicas: 1 }],
        policy: Policy {
            timeouts,
            on_replica_failure: OnReplicaFailure::FenceReplica,
            encrypt_bytes: true,
            fabric: Fabric::Never,
            verify: true,
            in_flight: InFlight::default(),
            kv_cache: KvCache::default(),
        },
    }
}

/// Waits until `what` yields something. Polls, since the thing waited for is in another process.
pub(crate) fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "no {what} in {PATIENCE:?}");
        std::thread::yield_now();
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

/// An agent process; killed on drop.
pub(crate) struct Agent {
    process: Child,
    pub(crate) socket: PathBuf,
    pub(crate) metrics: String,
    pub(crate) round: String,
    pub(crate) bytes: String,
    pub(crate) key: Sha256,
}

impl Agent {
    /// The command line of an agent with these claims; `changes` replace flags.
    pub(crate) fn command(
        coordinator: &Coordinator,
        name: &str,
        claims: &[&str],
        changes: &[(&str, &str)],
    ) -> Command {
        let directory = coordinator.directory.path().join(name);
        std::fs::create_dir_all(&directory).expect("a directory");
        let path = |file: &str| directory.join(file).to_str().expect("text").to_owned();
        std::fs::write(path("token"), coordinator.token()).expect("a token");
        let mut flags = vec![
            ("--coordinator", coordinator.address.clone()),
            ("--coordinator-name", "coordinator.test".to_owned()),
            ("--trust-bundle", coordinator.bundle.to_str().expect("text").to_owned()),
            ("--token", path("token")),
            ("--socket", path("run/agent.sock")),
            ("--refit", "ns/refit".to_owned()),
            ("--pod-uid", name.to_owned()),
            ("--listen", "127.0.0.1".to_owned()),
            ("--metrics", "127.0.0.1:0".to_owned()),
            ("--log-format", "json".to_owned()),
        ];
        flags.extend(claims.iter().map(|claim| ("--claim", (*claim).to_owned())));
        let mut command = Command::new(env!("CARGO_BIN_EXE_weightrefit-agent"));
        for (flag, value) in flags {
            let changed = changes.iter().find(|(changed, _)| *changed == flag);
            command.args([flag, changed.map_or(&value, |(_, value)| *value)]);
        }
        command
    }

    /// Starts the binary with these claims and waits until it serves.
    pub(crate) fn start(coordinator: &Coordinator, name: &str, claims: &[&str]) -> Self {
        Self::launch(coordinator, name, Self::command(coordinator, name, claims, &[]))
    }

    /// Starts the binary without claims and waits until it serves.
    pub(crate) fn start_on_side(coordinator: &Coordinator, name: &str, side: &str) -> Self {
        let mut command = Self::command(coordinator, name, &[], &[]);
        command.args(["--side", side]);
        Self::launch(coordinator, name, command)
    }

    /// Starts the binary with these claims as a worker of its supervisor, and waits until it serves.
    pub(crate) fn start_supervised(coordinator: &Coordinator, name: &str, claims: &[&str]) -> Self {
        let mut command = Self::command(coordinator, name, claims, &[]);
        command.arg("--supervise");
        Self::launch(coordinator, name, command)
    }

    fn launch(coordinator: &Coordinator, name: &str, mut command: Command) -> Self {
        let socket = coordinator.directory.path().join(name).join("run").join("agent.sock");
        let mut process = command.stderr(Stdio::piped()).spawn().expect("the agent starts");
        let mut log = BufReader::new(process.stderr.take().expect("is piped"));
        let (mut metrics, mut started) = (String::new(), serde_json::Value::Null);
        while started.is_null() {
            let mut line = String::new();
            assert!(log.read_line(&mut line).expect("a log") > 0, "{name} ended");
            let line: serde_json::Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{line}"));
            match line["fields"]["message"].as_str() {
                Some("metrics served") => {
                    metrics = line["fields"]["address"].as_str().expect("one").to_owned()
                }
                Some("agent started") => started = line["fields"].clone(),
                _ => {}
            }
        }
        let name = name.to_owned();
        std::thread::spawn(move || {
            for line in log.lines().map_while(Result::ok) {
                let _ = writeln!(std::io::stderr(), "{name}: {line}");
            }
        });
        let text = |field: &str| started[field].as_str().expect(field).to_owned();
        let key = text("key").parse().expect("a key");
        Self { process, socket, metrics, round: text("round"), bytes: text("bytes"), key }
    }

    /// One GET of the metrics server: status and body.
    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.metrics).expect("metrics are served");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").expect("a request");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        let (head, body) = text.split_once("\r\n\r\n").expect("HTTP");
        (head[9..12].parse().expect("a status"), body.to_owned())
    }

    /// Value of one line of `/metrics`, 0 where it is absent.
    pub(crate) fn metric(&self, line: &str) -> f64 {
        let (_, text) = self.get("/metrics");
        let found = text.lines().find_map(|have| have.strip_prefix(line)?.strip_prefix(' '));
        found.map_or(0.0, |value| value.parse().expect("a number"))
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, signal).expect("it runs");
    }

    /// Waits for the end of the process.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        wait_for("end of the agent", || self.process.try_wait().expect("a child"))
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Whether it still runs.
    pub(crate) fn is_running(&mut self) -> bool {
        self.process.try_wait().expect("a child").is_none()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
