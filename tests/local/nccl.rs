//! `weightrefit local` whose bytes go by NCCL: the agents' own code against a strict double of CUDA and NCCL, and the
//! same verdict over every element.

use super::*;
use std::collections::BTreeMap;

/// What an agent's windows of 1 MiB leave for a chunk: six of them, two for each of the three peers of an engine rank.
const CHUNK_BYTES: u64 = (1 << 20) / 6 / 256 * 256;

/// A run on the double, with knobs.
fn double(arguments: &[&str], knobs: &[(&str, &str)]) -> Command {
    let mut command = local("tests/local/tiny.yaml", &["--transport", "nccl", "--double"]);
    command.args(arguments).envs(knobs.iter().copied());
    command
}

/// The report, however the run ends.
fn any_report(command: &mut Command) -> Value {
    let output = output(command.args(["-o", "json"]));
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("no report: {}", String::from_utf8_lossy(&output.stderr)))
}

fn carriers(report: &Value) -> Vec<(&str, &str)> {
    let carriers = report["carriers"].as_array().expect("a list");
    carriers
        .iter()
        .map(|carrier| {
            (carrier["transport"].as_str().expect("text"), carrier["code"].as_str().expect("text"))
        })
        .collect()
}

/// Replicas that each round went without.
fn left_out(report: &Value) -> Vec<Vec<&str>> {
    let rounds = report["rounds"].as_array().expect("rounds");
    rounds
        .iter()
        .map(|round| {
            let list = round["leftOut"].as_array().expect("a list");
            list.iter().map(|one| one["replica"].as_str().expect("a name")).collect()
        })
        .collect()
}

/// Sends of all processes: (communicator, rank, peer) to the sizes of the calls.
fn tally(folder: &Path, side: &str) -> BTreeMap<(String, u64, u64), Vec<u64>> {
    let mut calls: BTreeMap<(String, u64, u64), Vec<u64>> = BTreeMap::new();
    for file in folder.read_dir().expect("a folder").flatten() {
        let text = std::fs::read_to_string(file.path()).expect("text");
        for line in text.lines() {
            let group: Value = serde_json::from_str(line).expect("JSON");
            let Some(name) = group["communicator"].as_str() else { continue };
            for call in group[side].as_array().expect("a list") {
                let key = (name.to_owned(), number(&group, "/rank"), number(call, "/0"));
                calls.entry(key).or_default().push(number(call, "/1"));
            }
        }
    }
    calls
}

#[test]
fn bytes_on_the_wire_are_the_plans_in_as_few_calls_as_chunks_allow() {
    let folder = tempfile::tempdir().expect("a folder");
    let knobs = [("FAKEGPU_TALLY", folder.path().to_str().expect("UTF-8")), ("FAKEGPU_LATENCY_US", "300")];
    let report = report(&mut double(&["--rounds", "3"], &knobs), 0);
    all_is_right(&report, 3, 3 * 2 * TINY_ELEMENTS);
    assert_eq!(carriers(&report), [("nccl", ""); 2]);
    let (sends, receives) = (tally(folder.path(), "sends"), tally(folder.path(), "receives"));
    let bytes = |calls: &BTreeMap<_, Vec<u64>>| calls.values().flatten().sum::<u64>();
    let minimum = number(&report, "/plan/bytes/minimum");
    assert_eq!((bytes(&sends), bytes(&receives)), (3 * minimum, 3 * minimum), "wire dtype, nothing else");
    assert_eq!(sends.len(), 2 * 3 * 2, "each of three trainers to each of two ranks of two replicas");
    assert!(sends.values().any(|sizes| sizes.len() >= 2 * 3), "some pair takes several chunks: {sends:?}");
    for (pair, sizes) in sends {
        let per_round = sizes.iter().sum::<u64>() / 3;
        assert!(sizes.len() as u64 <= 3 * (per_round.div_ceil(CHUNK_BYTES) + 1), "{pair:?}: {sizes:?}");
    }
}

/// Bytes that agents copied between host and device, up and down.
fn copied(folder: &Path) -> (u64, u64) {
    let (mut up, mut down) = (0, 0);
    for file in folder.read_dir().expect("a folder").flatten() {
        for line in std::fs::read_to_string(file.path()).expect("text").lines() {
            let line: Value = serde_json::from_str(line).expect("JSON");
            // An agent's first argument is an option, a client's its role.
            let is_agent = line["process"].as_str().is_some_and(|first| first.starts_with("--"));
            match line["copied"].as_str().filter(|_| is_agent) {
                Some("up") => up += number(&line, "/bytes"),
                Some(_) => down += number(&line, "/bytes"),
                None => {}
            }
        }
    }
    (up, down)
}

/// A run with all tensors on the double's GPUs, and what agents copied.
fn on_devices(transport: &str, rounds: &str) -> (Value, (u64, u64)) {
    let folder = tempfile::tempdir().expect("a folder");
    let arguments = ["--transport", transport, "--double", "--device-memory", "--rounds", rounds];
    let mut command = local("tests/local/tiny.yaml", &arguments);
    let report = report(command.env("FAKEGPU_TALLY", folder.path()), 0);
    (report, copied(folder.path()))
}

#[test]
fn what_is_on_devices_is_neither_copied_there_nor_back() {
    let (two, before) = on_devices("nccl", "2");
    let (five, after) = on_devices("nccl", "5");
    all_is_right(&two, 2, 2 * 2 * TINY_ELEMENTS);
    all_is_right(&five, 5, 5 * 2 * TINY_ELEMENTS);
    assert_eq!(carriers(&five), [("nccl", ""); 2]);
    assert!(before.0 > 0, "tables of programs");
    assert_eq!(after.0, before.0, "a later round copies nothing to a device");
    let minimum = number(&five, "/plan/bytes/minimum");
    assert!(after.1 < minimum / 100, "only digests come back: {} of {minimum} bytes", after.1);
}

#[test]
fn what_is_on_devices_goes_by_tcp_where_it_must() {
    let (report, (up, down)) = on_devices("tcp", "2");
    all_is_right(&report, 2, 2 * 2 * TINY_ELEMENTS);
    let minimum = number(&report, "/plan/bytes/minimum");
    assert!(up >= 2 * minimum && down > 0, "{up} bytes up, {down} down, {minimum} a round");
}

#[test]
fn real_weights_go_by_nccl_and_are_right() {
    let folder = tempfile::tempdir().expect("a folder");
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/minilm.yaml");
    let text = std::fs::read_to_string(example).expect("an example");
    let text = text.replacen("\nspec:\n", "\nspec:\n  transfer: {encryption: TrustedFabric}\n", 1);
    let file = folder.path().join("minilm.yaml");
    std::fs::write(&file, text).expect("a file");
    let arguments = ["--transport", "nccl", "--double", "--rounds", "2"];
    let report = report(&mut local(file.to_str().expect("UTF-8"), &arguments), 0);
    all_is_right(&report, 2, 138_438_144 / 3 * 2);
    assert_eq!(carriers(&report), [("nccl", ""); 2]);
}

#[test]
fn a_replica_that_is_killed_in_mid_transfer_costs_the_others_no_round() {
    for silent in ["0", "1"] {
        let fault = "kill:agent:inference/default/default-0/0@1/transfer";
        let knobs = [("FAKEGPU_LINK_BYTES", "2000000"), ("FAKEGPU_SILENT_DEATH", silent)];
        let report = any_report(&mut double(&["--rounds", "6", "--fault", fault], &knobs));
        assert_eq!(outcomes(&report), ["Committed"; 6], "silent: {silent}: {report}");
        let left_out = left_out(&report);
        assert!(left_out[1].contains(&"default-0"), "silent: {silent}: {report}");
        let others = left_out.iter().flatten().filter(|replica| **replica != "default-0").count();
        assert_eq!(others, 0, "silent: {silent}: {report}");
        assert!(left_out[5].is_empty(), "silent: {silent}: it comes back: {report}");
        assert_eq!(carriers(&report), [("nccl", ""); 2], "silent: {silent}: its lane too");
        assert_eq!(number(&report, "/verdict/mismatchedElements"), 0);
    }
}

#[test]
fn what_goes_wrong_on_the_way_never_reaches_an_engine() {
    // A process counts its sends over all lanes, so each knob hits one lane, once.
    // Of a hang the destination says that its time is up, or a source that its communicator ended, whoever is first.
    let rows: [(&str, &str, &[&str]); 3] = [
        ("FAKEGPU_FLIP", "0@9", &["DigestMismatch"]),
        ("FAKEGPU_FAIL", "1@9", &["NcclError"]),
        ("FAKEGPU_HANG", "1@9", &["TransferTimeout", "NcclError"]),
    ];
    for (knob, value, reasons) in rows {
        let report = any_report(&mut double(&["--rounds", "5"], &[(knob, value)]));
        assert_eq!(outcomes(&report), ["Committed"; 5], "{knob}: {report}");
        let rounds = report["rounds"].as_array().expect("rounds");
        let hit: Vec<&Value> =
            rounds.iter().flat_map(|round| round["leftOut"].as_array().expect("a list")).collect();
        assert!(
            hit.iter().any(|one| reasons.iter().any(|reason| one["reason"] == *reason)),
            "{knob}: {report}"
        );
        assert!(left_out(&report)[4].is_empty(), "{knob}: it comes back: {report}");
        assert_eq!(carriers(&report), [("nccl", ""); 2], "{knob}: by NCCL");
        assert_eq!(number(&report, "/verdict/mismatchedElements"), 0, "{knob}");
    }
}

#[test]
fn an_abort_that_never_ends_ends_its_process_and_says_so() {
    let knobs = [("FAKEGPU_FAIL", "1@9"), ("FAKEGPU_WEDGE", "1")];
    let run = output(&mut double(&["--rounds", "4"], &knobs));
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert_eq!(run.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("AgentWedged") && stderr.contains("this process ends"), "{stderr}");
}

#[test]
fn auto_takes_tcp_and_says_why_where_something_is_missing() {
    type Knobs<'k> = &'k [(&'k str, &'k str)];
    let rows: [(Knobs<'_>, &str, &str); 9] = [
        (&[("FAKEGPU_DEVICES", "0")], "GpuNotVisible", "CUDA_ERROR_NO_DEVICE"),
        (&[("FAKEGPU_DEVICES", "1")], "GpuNotVisible", "1 GPUs for 2 ranks of this agent"),
        (&[("FAKEGPU_NAME", "H100 MIG 1g.10gb")], "TransportUnavailable", "MIG instance"),
        (&[("FAKEGPU_NCCL_VERSION", "22703")], "VersionSkew", "NCCL 2.27.3 is not from 2.28.0"),
        (&[("FAKEGPU_NCCL_VERSION", "30000")], "VersionSkew", "NCCL 3.0.0 is not from"),
        (&[("NCCL_COMM_BLOCKING", "1")], "TransportUnavailable", "NCCL_COMM_BLOCKING"),
        (&[("NCCL_COMM_ID", "127.0.0.1:1")], "TransportUnavailable", "NCCL_COMM_ID"),
        (&[("NCCL_SOCKET_IFNAME", "nowhere")], "InterfaceNotFound", "`nowhere`"),
        (&[("FAKEGPU_SEED", "7")], "TransportUnavailable", "NCCL_MULTI_RANK_GPU_ENABLE is not set"),
    ];
    for (knobs, code, text) in rows {
        let mut command =
            local("tests/local/tiny.yaml", &["--transport", "auto", "--double", "--rounds", "1"]);
        let report = report(command.envs(knobs.iter().copied()), 0);
        all_is_right(&report, 1, 2 * TINY_ELEMENTS);
        for carrier in report["carriers"].as_array().expect("a list") {
            assert_eq!((&carrier["transport"], &carrier["code"]), (&"tcp".into(), &code.into()), "{knobs:?}");
            let reason = carrier["reason"].as_str().expect("a text");
            assert!(reason.contains(text), "{knobs:?}: {reason}");
        }
    }
}

#[test]
fn ranks_may_share_a_gpu_where_nccl_was_told_so() {
    let knobs = [("FAKEGPU_SEED", "7"), ("NCCL_MULTI_RANK_GPU_ENABLE", "1")];
    let report = report(&mut double(&["--rounds", "1"], &knobs), 0);
    all_is_right(&report, 1, 2 * TINY_ELEMENTS);
    assert_eq!(carriers(&report), [("nccl", ""); 2]);
}

#[test]
fn nccl_in_clear_is_refused_where_encryption_is_required() {
    let run = output(&mut local("examples/minilm.yaml", &["--transport", "nccl", "--double"]));
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert_eq!(run.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("`Nccl` excludes encryption `Required`"), "{stderr}");
    let report = report(
        &mut local("examples/qwen3-moe-tiny.yaml", &["--transport", "auto", "--double", "--rounds", "1"]),
        0,
    );
    assert_eq!(report.get("carriers"), None, "there are no lanes at all");
}
