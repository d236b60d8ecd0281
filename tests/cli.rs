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
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

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

transcripts! { bad_input explain help layout plan validate }

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
