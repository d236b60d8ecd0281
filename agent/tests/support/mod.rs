//! A coordinator, agents of the real binary, and clients of their sockets, for tests.

#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

pub mod client;
pub mod coordinator;

use coordinator::Coordinator;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for something that happens in milliseconds; reached only by a test that fails.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until `what` yields something. Polls, since the thing waited for is in another process.
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
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
pub struct Agent {
    process: Child,
    pub socket: PathBuf,
    pub metrics: String,
    pub round: String,
    pub bytes: String,
    directory: PathBuf,
}

impl Agent {
    /// Starts the binary with these claims and waits until it serves.
    pub fn start(coordinator: &Coordinator, name: &str, claims: &[&str]) -> Self {
        let directory = coordinator.directory.path().join(name);
        std::fs::create_dir_all(&directory).expect("a directory");
        let socket = directory.join("run").join("agent.sock");
        let token = directory.join("token");
        std::fs::write(&token, coordinator.token()).expect("a token");
        let mut command = Command::new(env!("CARGO_BIN_EXE_weightrefit-agent"));
        command.args(["--coordinator", &coordinator.address, "--coordinator-name", "coordinator.test"]);
        command.args(["--trust-bundle".as_ref(), coordinator.bundle.as_os_str()]);
        command.args(["--token".as_ref(), token.as_os_str(), "--socket".as_ref(), socket.as_os_str()]);
        command.args(["--refit", "ns/refit", "--pod-uid", name, "--listen", "127.0.0.1"]);
        command.args(["--metrics", "127.0.0.1:0", "--log-format", "json"]);
        for claim in claims {
            command.args(["--claim", claim]);
        }
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
        Self { process, socket, metrics, round: text("round"), bytes: text("bytes"), directory }
    }

    /// One GET of the metrics server: status and body.
    pub fn get(&self, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.metrics).expect("metrics are served");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").expect("a request");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        let (head, body) = text.split_once("\r\n\r\n").expect("HTTP");
        (head[9..12].parse().expect("a status"), body.to_owned())
    }

    /// Value of one line of `/metrics`, 0 where it is absent.
    pub fn metric(&self, line: &str) -> f64 {
        let (_, text) = self.get("/metrics");
        let found = text.lines().find_map(|have| have.strip_prefix(line)?.strip_prefix(' '));
        found.map_or(0.0, |value| value.parse().expect("a number"))
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, signal).expect("it runs");
    }

    /// Waits for the end of the process.
    pub fn wait(&mut self) -> ExitStatus {
        wait_for("end of the agent", || self.process.try_wait().expect("a child"))
    }

    /// Its directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.process.try_wait().expect("a child").is_none()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
