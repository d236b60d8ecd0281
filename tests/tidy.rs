//! House rules that neither the compiler nor clippy can see, one table row each: over every file that git tracks
//! or would track. Each row carries a sample that breaks it, so that no rule can be silently dead.

use std::path::Path;
use std::process::Command;

/// A file is split by idea long before this.
const FILE_LINES_MAX: usize = 600;

/// Names that say nothing about what a module holds, so that everything ends up in it.
const EMPTY_NAMES: &[&str] = &["utils", "util", "helpers", "helper", "common", "manager", "misc"];

/// Where unsafe code may be: memory that is mapped, device libraries, fd passing, the C ABI and its double.
const UNSAFE_HOMES: &[&str] = &[
    "agent/src/memory.rs",
    "agent/src/memory/",
    "agent/src/cuda.rs",
    "agent/src/cuda/",
    "agent/src/transport/nccl.rs",
    "agent/src/transport/nccl/",
    "agent/src/session/fd.rs",
    "agent/library/",
    "agent/testing/fakegpu/",
];

/// What `core` must not name. Maps without order, clocks, IO, randomness, threads, async.
const IMPURE: &[&str] = &[
    "HashMap",
    "HashSet",
    "Instant",
    "SystemTime",
    "std::fs",
    "std::net",
    "std::env",
    "std::process",
    "std::thread",
    "std::io::stdin",
    "rand",
    "tokio",
    "async",
    "unsafe",
];

struct File {
    path: String,
    text: String,
}

impl File {
    fn is(&self, ending: &str) -> bool {
        self.path.ends_with(ending)
    }

    /// Rust, Python or a script, by ending or first line.
    fn is_source(&self) -> bool {
        [".rs", ".py", ".sh", ".proto"].iter().any(|ending| self.is(ending)) || self.text.starts_with("#!")
    }

    fn within(&self, places: &[&str]) -> bool {
        places.iter().any(|place| self.path.starts_with(place))
    }

    /// Findings on the lines for which `wrong` gives a text.
    fn lines<'a>(text: &'a str, wrong: impl Fn(&'a str) -> Option<String>) -> Vec<String> {
        let numbered = text.split('\n').enumerate();
        numbered.filter_map(|(index, line)| Some(format!("line {}: {}", index + 1, wrong(line)?))).collect()
    }

    /// Findings on the code of a Rust file that names one of the words as a whole path or identifier.
    fn naming(&self, words: &[&str]) -> Vec<String> {
        let code = code_only(&self.text);
        Self::lines(&code, |line| {
            words.iter().find(|word| has_word(line, word)).map(|word| format!("names `{word}`"))
        })
    }

    /// Findings on the lines that contain one of the words, in any letter case.
    fn saying(&self, words: &[&str]) -> Vec<String> {
        Self::lines(&self.text, |line| {
            let line = line.to_lowercase();
            words.iter().find(|word| line.contains(&word.to_lowercase())).map(|word| format!("says `{word}`"))
        })
    }
}

/// One rule: its findings on a file, and samples (path, text) that it must and must not find fault with.
struct Rule {
    name: &'static str,
    find: fn(&File) -> Vec<String>,
    bad: &'static [(&'static str, &'static str)],
    good: &'static [(&'static str, &'static str)],
}

const RULES: &[Rule] = &[
    Rule {
        name: "a file has at most 600 lines",
        find: |file| match file.text.lines().count() {
            lines if file.is_source() && lines > FILE_LINES_MAX => vec![format!("{lines} lines")],
            _ => vec![],
        },
        bad: &[("src/long.rs", LONG)],
        good: &[("src/short.rs", "fn f() {}\n"), ("core/testdata/long.json", LONG)],
    },
    Rule {
        name: "modules are named after what they hold",
        find: |file| {
            let parts = Path::new(&file.path).components();
            let mut names = parts.filter_map(|part| Path::new(part.as_os_str()).file_stem()?.to_str());
            let empty = names.find(|name| file.is_source() && EMPTY_NAMES.contains(name));
            empty.map(|name| format!("`{name}` says nothing")).into_iter().collect()
        },
        bad: &[("core/src/utils.rs", ""), ("agent/src/common/x.rs", ""), ("tests/helpers.py", "")],
        good: &[("core/src/region.rs", "")],
    },
    Rule {
        name: "unsafe code stays in its few places",
        find: |file| match file.is(".rs") && !file.within(UNSAFE_HOMES) {
            true => file.naming(&["unsafe"]),
            false => vec![],
        },
        bad: &[("agent/src/rounds.rs", "fn f() { unsafe { g() } }\n")],
        good: &[
            ("agent/src/memory/map.rs", "fn f() { unsafe { g() } }\n"),
            ("core/src/lib.rs", "#![forbid(unsafe_code)] // no unsafe\nconst S: &str = \"unsafe\";\n"),
        ],
    },
    Rule {
        name: "core is pure",
        find: |file| match file.path.starts_with("core/src/") && file.is(".rs") {
            true => file.naming(IMPURE),
            false => vec![],
        },
        bad: &[
            ("core/src/a.rs", "use std::collections::HashMap;\n"),
            ("core/src/a.rs", "fn now() -> std::time::Instant { std::time::Instant::now() }\n"),
            ("core/src/a.rs", "let text = std::fs::read(path);\n"),
            ("core/src/a.rs", "pub async fn f() {}\n"),
        ],
        good: &[
            ("core/src/a.rs", "// std::fs is for others\nlet operand = 1;\n"),
            ("src/a.rs", "use std::fs;\n"),
        ],
    },
    Rule {
        name: "lint exceptions say why",
        find: |file| {
            if !file.is(".rs") {
                return vec![];
            }
            let code = code_only(&file.text);
            let attributes = ["#[allow(", "#![allow(", "#[expect(", "#![expect("];
            let starts = attributes.iter().flat_map(|attribute| code.match_indices(attribute));
            let silent = starts.filter(|(at, _)| {
                let attribute = &code[*at..code[*at..].find(")]").map_or(code.len(), |end| at + end)];
                !attribute.contains("reason")
            });
            silent.map(|(at, _)| format!("line {}: no reason given", code[..at].lines().count())).collect()
        },
        bad: &[("src/a.rs", "#[allow(dead_code)]\nfn f() {}\n")],
        good: &[("src/a.rs", "#[expect(\n    dead_code,\n    reason = \"why\",\n)]\nfn f() {}\n")],
    },
    Rule {
        name: "nothing is left to do",
        find: |file| {
            let marks = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
            File::lines(&file.text, |line| {
                marks.iter().find(|mark| has_word(line, mark)).map(|mark| format!("says `{mark}`"))
            })
        },
        bad: &[("src/a.rs", concat!("// TO", "DO: later\n")), ("docs/a.md", concat!("FIX", "ME\n"))],
        good: &[("src/a.rs", "let x = 1;\n"), ("Cargo.toml", "todo = \"deny\"\n")],
    },
    Rule {
        name: "no registry host and no path of somebody's machine",
        find: |file| {
            file.saying(&[
                concat!("pypi", ".org"),
                concat!("python", "hosted"),
                concat!("index.crates", ".io"),
                concat!("static.crates", ".io"),
                concat!("npm", "js."),
                concat!("proxy.go", "lang"),
                concat!("debian", ".org"),
                concat!("/ro", "ot/"),
                concat!("/ho", "me/"),
                concat!("/wo", "rk/"),
                concat!("/Us", "ers/"),
            ])
        },
        bad: &[
            ("Makefile", concat!("curl https://pypi", ".org/simple\n")),
            ("a.md", concat!("in /ro", "ot/x\n")),
        ],
        good: &[("a.md", "in $HOME/.cache, from `pypi:NAME==VERSION`\n")],
    },
    Rule {
        name: "the text speaks of the product, not of how it was written",
        find: |file| {
            file.saying(&[
                concat!("clau", "de"),
                concat!("anthro", "pic"),
                concat!("chat", "gpt"),
                concat!("co", "pilot"),
                concat!("as an ", "ai "),
                concat!("ai-gene", "rated"),
                concat!("co-auth", "ored-by"),
                concat!("work", "place"),
                concat!("../sha", "red/"),
            ])
        },
        bad: &[
            ("docs/a.md", concat!("As an ", "AI model\n")),
            ("a.rs", concat!("// see ../sha", "red/design\n")),
        ],
        good: &[("docs/a.md", "The agent says so.\n")],
    },
    Rule {
        name: "every bound says why it is that large",
        find: |file| {
            let lines: Vec<&str> = file.text.lines().map(str::trim).collect();
            let bounds = lines.iter().enumerate().filter(|(_, line)| {
                let item = line.trim_start_matches("pub ").trim_start_matches("pub(crate) ");
                file.is("limits.rs") && item.starts_with("const ") && !item.starts_with("const _:")
            });
            let bare = bounds.filter(|(index, _)| {
                let above = lines[..*index].iter().rev().find(|line| !line.starts_with("#["));
                !above.is_some_and(|line| line.starts_with("///"))
            });
            bare.map(|(index, line)| format!("line {}: `{line}` has no reason above it", index + 1)).collect()
        },
        bad: &[("core/src/limits.rs", "pub const RANKS_MAX: u64 = 4096;\n")],
        good: &[(
            "core/src/limits.rs",
            "/// The largest fleet measured.\npub const RANKS_MAX: u64 = 4096;\n",
        )],
    },
    Rule {
        name: "examples and presets are YAML that our own reader takes",
        find: |file| {
            if !file.within(&["examples/", "core/presets/"]) || !file.is(".yaml") {
                return vec![];
            }
            let documents = serde_saphyr::from_multiple::<serde_json::Value>(&file.text);
            documents.err().map(|error| error.to_string()).into_iter().collect()
        },
        bad: &[("examples/a.yaml", "a: [1\n"), ("core/presets/a.yaml", "a: 1\na: 2\n")],
        good: &[("examples/a.yaml", "a: 1\n---\nb: [x, y]\n"), ("core/testdata/broken.yaml", "a: [1\n")],
    },
    Rule {
        name: "links between pages lead somewhere",
        find: |file| {
            let folder = root().join(&file.path).parent().map(Path::to_path_buf).unwrap_or_default();
            let targets = file.text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
            let local = targets.filter(|target| !target.is_empty() && !target.contains("://"));
            let dead = local.filter(|target| file.is(".md") && !folder.join(target).exists());
            dead.map(|target| format!("`{target}` does not exist")).collect()
        },
        bad: &[("docs/a.md", "[x](nowhere.md)\n"), ("a.md", "[x](docs/nowhere.md#part)\n")],
        good: &[("a.md", "[x](Cargo.toml) [y](#part) [z](https://example.org)\n")],
    },
    Rule {
        name: "lines end without blanks, files with one line end",
        find: |file| {
            if file.is(".txt") || file.path.contains("/testdata/") {
                return vec![]; // recorded as it was
            }
            let mut found = File::lines(&file.text, |line| {
                line.ends_with([' ', '\t', '\r']).then(|| "ends with a blank".into())
            });
            if !file.text.is_empty() && (!file.text.ends_with('\n') || file.text.ends_with("\n\n")) {
                found.push("does not end with one line end".into());
            }
            found
        },
        bad: &[("a.md", "x \n"), ("a.md", "x"), ("a.md", "x\n\n"), ("a.md", "x\r\n")],
        good: &[("a.md", "x\n\ny\n"), ("empty.md", ""), ("tests/cli/help.txt", "x \n")],
    },
];

const LONG: &str = match std::str::from_utf8(&[b'\n'; FILE_LINES_MAX + 1]) {
    Ok(text) => text,
    Err(_) => panic!("line ends are UTF-8"),
};

#[test]
fn the_tree_follows_the_house_rules() {
    let mut findings = Vec::new();
    for file in tree() {
        for rule in RULES {
            findings.extend(
                (rule.find)(&file).iter().map(|what| format!("{}: {what} ({})", file.path, rule.name)),
            );
        }
    }
    assert!(findings.is_empty(), "{} findings:\n{}", findings.len(), findings.join("\n"));
}

#[test]
fn each_rule_finds_what_breaks_it_and_nothing_else() {
    for rule in RULES {
        let found = |(path, text): &(&str, &str)| {
            !(rule.find)(&File { path: (*path).into(), text: (*text).into() }).is_empty()
        };
        for sample in rule.bad {
            assert!(found(sample), "`{}` does not see {sample:?}", rule.name);
        }
        for sample in rule.good {
            assert!(!found(sample), "`{}` finds fault with {sample:?}", rule.name);
        }
    }
}

#[test]
fn comments_and_literals_are_not_code() {
    let rows = [
        ("a // b", "a     "),
        ("a /* b /* c */ d */ e", "a                   e"),
        (r#"f("unsafe \" x", y)"#, r#"f("           ", y)"#),
        (r###"r#"un"safe"# z"###, r###"r#"       "# z"###),
        ("'\"' 'x' '\\'' &'a b", "' ' ' ' '  ' &'a b"),
        ("a\n\"b\nc\"\nd", "a\n\" \n \"\nd"),
        (r#"("", "x")"#, r#"("", " ")"#),
    ];
    for (text, code) in rows {
        assert_eq!(code_only(text), code, "{text}");
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The files of the checkout that git tracks or would track, as text.
fn tree() -> Vec<File> {
    let listing = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let git = Command::new("git").args(listing).current_dir(root()).output().expect("git is installed");
    assert!(git.status.success(), "git ls-files: {}", String::from_utf8_lossy(&git.stderr));
    let paths = String::from_utf8(git.stdout).expect("paths are UTF-8");
    let paths = paths.split_terminator('\0').filter(|path| !["Cargo.lock", "LICENSE"].contains(path));
    let read =
        |path: &str| Some(File { path: path.into(), text: std::fs::read_to_string(root().join(path)).ok()? });
    let files: Vec<File> = paths.filter_map(read).collect();
    assert!(files.len() > 20, "only {} files found", files.len());
    files
}

/// Whether the line names the word: not as a part of a longer identifier.
fn has_word(line: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word)
        .any(|(at, _)| !line[..at].ends_with(part) && !line[at + word.len()..].starts_with(part))
}

/// The text of a Rust file with comments and the insides of literals blanked; lines stay where they are.
fn code_only(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let rest = &chars[at..];
        // Length of what opens (kept), and of the inside (blanked).
        let (opening, inside) = match rest {
            ['/', '/', ..] => (0, rest.iter().position(|c| *c == '\n').unwrap_or(rest.len())),
            ['/', '*', ..] => (0, comment_length(rest)),
            ['r', '"' | '#', ..] if !out.ends_with(char::is_alphanumeric) => {
                raw_string(rest).unwrap_or((1, 0))
            }
            ['"', ..] => (1, literal_length(&rest[1..], '"')),
            ['\'', '\\', _, ..] => (1, literal_length(&rest[1..], '\'')),
            ['\'', _, '\'', ..] => (1, 1),
            _ => (1, 0),
        };
        out.extend(&rest[..opening]);
        out.extend(rest[opening..opening + inside].iter().map(|c| if *c == '\n' { '\n' } else { ' ' }));
        at += opening + inside;
        let literal = inside > 0 && opening > 0 || rest.starts_with(&['"']) || opening > 1;
        if literal && at < chars.len() {
            out.push(chars[at]); // or the closing quote would open the next literal
            at += 1;
        }
    }
    out
}

/// Length of a block comment, which may hold others.
fn comment_length(chars: &[char]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < chars.len() {
        match chars[at..] {
            ['/', '*', ..] => (depth, at) = (depth + 1, at + 2),
            ['*', '/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at.min(chars.len())
}

/// Length of the inside of a literal, up to its closing quote.
fn literal_length(chars: &[char], quote: char) -> usize {
    let mut at = 0;
    while at < chars.len() && chars[at] != quote {
        at += if chars[at] == '\\' { 2 } else { 1 };
    }
    at.min(chars.len())
}

/// Lengths of the opening and of the inside of a raw string.
fn raw_string(chars: &[char]) -> Option<(usize, usize)> {
    let hashes = chars[1..].iter().take_while(|c| **c == '#').count();
    let opening = hashes + 2;
    let closing: Vec<char> = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
    (chars.get(opening - 1) == Some(&'"')).then_some(())?;
    Some((opening, chars[opening..].windows(closing.len()).position(|part| part == closing)?))
}
