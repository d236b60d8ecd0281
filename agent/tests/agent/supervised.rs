//! An agent below its supervisor, which a container runs as its first process.

use crate::support::coordinator::Coordinator;
use crate::support::{Agent, tiny_refit, wait_for};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::process::Stdio;

/// The one child of the process.
fn worker_of(supervisor: u32) -> Option<Pid> {
    let children = std::fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children"));
    let children = children.expect("it runs");
    let mut pids = children.split_whitespace().map(|pid| pid.parse().expect("a number"));
    let worker = pids.next().and_then(Pid::from_raw);
    assert_eq!(pids.next(), None, "one worker, and nobody who is not reaped");
    worker
}

fn incarnation(coordinator: &Coordinator, pod: &str) -> Option<Vec<u8>> {
    let heard = coordinator.heard.lock().expect("no panic");
    heard.joined.get(pod).map(|(joining, _)| joining.incarnation.clone())
}

#[test]
fn a_worker_that_is_killed_begins_anew_below_the_same_process() {
    let coordinator = Coordinator::start(tiny_refit());
    let mut agent = Agent::start_supervised(&coordinator, "pod", &["training/0"]);
    let mut seen = Vec::new();
    for _ in 0..3 {
        let (worker, joined) = wait_for("a worker of a new incarnation", || {
            let joined = incarnation(&coordinator, "pod").filter(|joined| !seen.contains(joined))?;
            Some((worker_of(agent.pid())?, joined))
        });
        seen.push(joined);
        kill_process(worker, Signal::KILL).expect("it runs");
        wait_for("the end of the worker", || test_kill_process(worker).is_err().then_some(()));
    }
    assert!(agent.is_running(), "the supervisor has seen three workers end");
    let worker = wait_for("another worker", || worker_of(agent.pid()));
    wait_for("its join", || incarnation(&coordinator, "pod").filter(|joined| !seen.contains(joined)));
    agent.signal(Signal::TERM);
    assert!(agent.wait().success(), "the worker was told, and ended well");
    assert!(test_kill_process(worker).is_err(), "before its supervisor");
}

#[test]
fn no_worker_outlives_its_supervisor() {
    let coordinator = Coordinator::start(tiny_refit());
    let mut agent = Agent::start_supervised(&coordinator, "pod", &["training/0"]);
    let worker = worker_of(agent.pid()).expect("it serves");
    agent.signal(Signal::KILL);
    agent.wait();
    // It is reaped by whoever reaps orphans here; a process that has ended has no program any more.
    let program = format!("/proc/{}/exe", worker.as_raw_nonzero());
    wait_for("the end of the worker", || std::fs::read_link(&program).is_err().then_some(()));
}

#[test]
fn a_worker_that_refuses_what_it_is_given_ends_its_supervisor_with_its_code_and_words() {
    let coordinator = Coordinator::start(tiny_refit());
    // An address for documentation, which no machine has.
    let changes = [("--listen", "192.0.2.1"), ("--metrics", "192.0.2.1:0")];
    let mut command = Agent::command(&coordinator, "pod", &["training/0"], &changes);
    let output = command.arg("--supervise").stderr(Stdio::piped()).output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("hint: Check --listen"), "{said}");
    assert!(!said.contains("starting it again"), "{said}");
}

#[test]
fn what_can_be_read_once_is_refused_with_it() {
    let coordinator = Coordinator::start(tiny_refit());
    let mut command = Agent::command(&coordinator, "pod", &["training/0"], &[]);
    let output = command.args(["--supervise", "--token-fd", "0"]).output().expect("it starts");
    assert_eq!(output.status.code(), Some(2));
}
