//! Round transcripts: commands, prose and everything that passes between members and to engines.
//!
//! `WEIGHTREFIT_REWRITE=1` writes what happens into the files. Commit a difference only when you understand it.

use crate::world::script::Script;
use std::path::Path;

#[test]
fn transcripts_happen_as_written() {
    let rewrite = std::env::var_os("WEIGHTREFIT_REWRITE").is_some();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/round/transcripts");
    let mut files: Vec<_> =
        std::fs::read_dir(&folder).expect("transcripts").map(|e| e.expect("entry").path()).collect();
    files.sort();
    let mut wrong = Vec::new();
    for path in files {
        let text = std::fs::read_to_string(&path).expect("a transcript");
        let got = replay(&text);
        if got != text && rewrite {
            std::fs::write(&path, &got).expect("a writable transcript");
        } else if got != text {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            let line = got.lines().zip(text.lines()).position(|(got, want)| got != want).unwrap_or(0);
            let [got, want] = [&got, &text].map(|text| text.lines().nth(line).unwrap_or("(end)").to_owned());
            wrong.push(format!("{name}:{}: got `{got}`, want `{want}`", line + 1));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A file is blocks: `# prose` lines, `> command` lines each followed by its output, indented by two.
fn replay(text: &str) -> String {
    let mut script = Script::new();
    let mut out = String::new();
    for line in text.lines() {
        if let Some(command) = line.strip_prefix("> ") {
            out.push_str(line);
            out.push('\n');
            for line in script.command(command).lines() {
                out.push_str(format!("  {line}").trim_end());
                out.push('\n');
            }
        } else if !line.starts_with("  ") {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}
