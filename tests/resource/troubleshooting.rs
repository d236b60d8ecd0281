//! docs/troubleshooting.md has every reason of every condition, in the words of `weightrefit explain`.
//!
//! `REWRITE=1 cargo test --test resource` writes its tables anew.

use std::fmt::Write as _;
use weightrefit::api::condition::ConditionType;
use weightrefit::controller::reason;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/troubleshooting.md");

/// What the tables stand between.
const MARKS: [&str; 2] = ["<!-- reasons: written by a test -->\n", "<!-- end of reasons -->\n"];

fn tables() -> String {
    let mut out = String::new();
    for kind in ConditionType::ALL {
        write!(out, "\n### {}\n\n{}\n\n", kind.name(), kind.meaning()).expect("String");
        out.push_str("| reason | what it means | what to do |\n|---|---|---|\n");
        for entry in reason::ALL.iter().filter(|entry| entry.condition == *kind) {
            writeln!(out, "| `{}` | {} | {} |", entry.name, entry.sentence, entry.remedy()).expect("String");
        }
    }
    out.push('\n');
    out
}

#[test]
fn the_page_has_every_reason_in_the_words_of_the_command() {
    let page = std::fs::read_to_string(PAGE).expect("a page");
    let (before, rest) = page.split_once(MARKS[0]).expect("the first mark");
    let (have, after) = rest.split_once(MARKS[1]).expect("the second mark");
    if std::env::var_os("REWRITE").is_some() {
        let page = [before, MARKS[0], &tables(), MARKS[1], after].concat();
        return std::fs::write(PAGE, page).expect("a writable page");
    }
    assert!(have == tables(), "docs/troubleshooting.md is stale: run `REWRITE=1 cargo test --test resource`");
}
