//! Transcripts of the command line: `tests/cli/*.txt` hold commands and all that they print, exit code included.
//!
//! A line is one of
//! - `file NAME <<END` … `END`: writes a file into the command's folder,
//! - `safetensors NAME [LENGTH] HEADER + N`: writes a safetensors file with that JSON header and N zero bytes of
//!   data; LENGTH replaces the true header length (a file that lies),
//! - `edit NAME: OLD => NEW`: writes NAME as first given, with OLD replaced (OLD must be there; `\n` is a line end),
//! - `also NAME: OLD => NEW`: the same on top of the edits before it,
//! - `$ weightrefit ARGS`: runs it; below stand `exit N` and the lines of stdout (`out|`) and stderr (`err|`),
//! - anything else: prose.
//!
//! `REWRITE=1 cargo test --test cli` writes what commands print now; commit that diff only when it is understood.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

macro_rules! transcripts {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            play(stringify!($name));
        })*

        #[test]
        fn every_transcript_is_played() {
            let mut files: Vec<String> = fs::read_dir(folder())
                .expect("tests/cli")
                .map(|entry| entry.expect("entry").file_name().into_string().expect("UTF-8"))
                .collect();
            files.sort();
            assert_eq!(files, [$(concat!(stringify!($name), ".txt")),*]);
        }
    };
}

transcripts! { bad_input explain help hints inject layout plan validate }

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli")
}

fn play(name: &str) {
    let path = folder().join(name).with_extension("txt");
    let want = fs::read_to_string(&path).expect("transcript");
    let got = run_all(&want);
    if std::env::var_os("REWRITE").is_some() {
        fs::write(&path, got).expect("rewritten transcript");
    } else {
        let differs = want.lines().zip(got.lines()).position(|(want, got)| want != got);
        let line = differs.unwrap_or_else(|| want.lines().count().min(got.lines().count()));
        let around =
            |text: &str| text.lines().skip(line.saturating_sub(6)).take(20).collect::<Vec<_>>().join("\n");
        assert!(
            want == got,
            "{name}.txt, line {}, want:\n{}\n\ngot:\n{}",
            line + 1,
            around(&want),
            around(&got)
        );
    }
}

/// The transcript again, with what its commands print now.
fn run_all(transcript: &str) -> String {
    let home = tempfile::tempdir().expect("temporary folder");
    let mut pristine: BTreeMap<&str, String> = BTreeMap::new();
    let mut out = String::new();
    let mut lines = transcript.lines();
    while let Some(line) = lines.next() {
        let is_output = line.starts_with("out|") || line.starts_with("err|") || line.starts_with("exit ");
        if is_output {
            continue;
        }
        writeln!(out, "{line}").expect("String");
        if let Some(name) = line.strip_prefix("file ").and_then(|rest| rest.strip_suffix(" <<END")) {
            let mut text = String::new();
            for line in lines.by_ref().take_while(|line| *line != "END") {
                writeln!(text, "{line}").expect("String");
            }
            writeln!(out, "{text}END").expect("String");
            fs::write(home.path().join(name), &text).expect(name);
            pristine.insert(name, text);
        } else if let Some(rest) = line.strip_prefix("edit ").or_else(|| line.strip_prefix("also ")) {
            let (name, change) = rest.split_once(": ").expect(line);
            let (old, new) = change.split_once(" => ").expect(line);
            let (old, new) = (old.replace("\\n", "\n"), new.replace("\\n", "\n"));
            let path = home.path().join(name);
            let first = line.starts_with("edit ");
            let text = if first { pristine[name].clone() } else { fs::read_to_string(&path).expect(line) };
            assert!(text.contains(&old), "{line}: `{old}` is not there");
            fs::write(path, text.replacen(&old, &new, 1)).expect(line);
        } else if let Some(rest) = line.strip_prefix("safetensors ") {
            let (name, bytes) = safetensors(rest);
            fs::write(home.path().join(name), bytes).expect(line);
        } else if let Some(arguments) = line.strip_prefix("$ weightrefit") {
            out.push_str(&run(home.path(), arguments));
        }
    }
    out
}

fn safetensors(rest: &str) -> (&str, Vec<u8>) {
    let (name, rest) = rest.split_once(' ').expect("name");
    let (head, data) = rest.rsplit_once(" + ").expect("+ N");
    let (length, header) = match head.split_once(' ') {
        Some((length, header)) if !length.starts_with('{') => (length.parse().expect("length"), header),
        _ => (head.len() as u64, head),
    };
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data.parse::<usize>().expect("N"), 0);
    (name, bytes)
}

fn run(home: &Path, arguments: &str) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_weightrefit"))
        .args(arguments.split_whitespace())
        .current_dir(home)
        .env_clear()
        .output()
        .expect("weightrefit runs");
    let mut text = format!("exit {}\n", output.status.code().expect("no signal"));
    for (prefix, bytes) in [("out|", output.stdout), ("err|", output.stderr)] {
        for line in String::from_utf8(bytes).expect("UTF-8").lines() {
            let gap = if line.is_empty() { "" } else { " " };
            writeln!(text, "{prefix}{gap}{line}").expect("String");
        }
    }
    text
}

fn weightrefit(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weightrefit"));
    command.args(arguments).stdin(Stdio::null());
    command
}

#[test]
fn what_cannot_be_written_is_a_failure() {
    let full = || Stdio::from(File::create("/dev/full").expect("Linux has /dev/full"));
    let commands: [&[&str]; 5] =
        [&["--help"], &["--version"], &["plan", "--help"], &["explain"], &["completion", "bash"]];
    for arguments in commands {
        let output = weightrefit(arguments).stdout(full()).output().expect("weightrefit runs");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{arguments:?}: {stderr}");
        assert!(stderr.contains("No space left on device"), "{arguments:?}: {stderr}");
    }
}

#[test]
fn every_help_has_the_exit_codes() {
    let mut rest = vec![Vec::new()];
    let mut seen = 0;
    while let Some(path) = rest.pop() {
        let mut arguments: Vec<&str> = path.iter().map(String::as_str).collect();
        arguments.push("--help");
        let output = weightrefit(&arguments).output().expect("weightrefit runs");
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        assert!(text.contains("Exit codes:\n  0  done\n  1  refused"), "{arguments:?}: {text}");
        seen += 1;
        let list = text.split("Commands:\n").nth(1).and_then(|list| list.split("\n\n").next());
        let names = list.into_iter().flat_map(str::lines).filter_map(|line| {
            let name = line.strip_prefix("  ").filter(|line| !line.starts_with(' '))?.split(' ').next()?;
            (name != "help").then(|| name.to_owned())
        });
        rest.extend(names.map(|name| [path.clone(), vec![name]].concat()));
    }
    assert_eq!(seen, 17, "the program, its commands and theirs");
}

/// A FIFO that nobody writes to would be waited for; descriptors of the process itself are read.
#[test]
fn pipes_are_read_where_their_writer_is_known() {
    let home = tempfile::tempdir().expect("temporary folder");
    let fifo = home.path().join("pipe.yaml");
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("mkfifo(1)").success());
    let fifo = fifo.to_str().expect("UTF-8");
    let pieces: &[&str] = &["layout", "pieces", "--tensors", "t.json", "--document", fifo];
    for arguments in [&["plan", "-f", fifo], &["validate", "-f", fifo], pieces] {
        fs::write(home.path().join("t.json"), r#"{"tensors": []}"#).expect("a file");
        let output = weightrefit(arguments).current_dir(&home).output().expect("weightrefit runs");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains("pipe.yaml is a named pipe, not a file"), "{stderr}");
    }
    let program = env!("CARGO_BIN_EXE_weightrefit");
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/qwen2.5-preset.yaml");
    for script in ["validate -f <(cat $1)", "validate -f - < $1", "validate -f /dev/stdin < $1"] {
        let pipe = format!("cat $1 | $0 {}", script.replace(" < $1", ""));
        for script in [format!("$0 {script}"), pipe] {
            let output = Command::new("bash").args(["-c", &script, program, example]).output().expect("bash");
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert_eq!((output.status.code(), &*stderr), (Some(0), ""), "{script}");
        }
    }
}
