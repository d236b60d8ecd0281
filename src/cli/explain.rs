//! `weightrefit explain`.

use crate::api::problem::nearest;
use crate::cli::{Failure, Output, Printer};
use crate::controller::reason;
use weightrefit_core::code::{Code, Policy, UnknownCode};

/// Explain an error code or the reason of a condition, or list all codes
#[derive(Debug, clap::Args)]
pub(crate) struct Explain {
    /// The code or reason, as in conditions, metrics and messages; without it all codes are listed
    code: Option<String>,
    /// Format of stdout; json is `weightrefit.explain/v1`
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

#[derive(Debug, serde::Serialize)]
struct Explanations {
    schema: &'static str,
    codes: Vec<Explanation>,
    reasons: Vec<Meaning>,
}

#[derive(Debug, serde::Serialize)]
struct Explanation {
    code: &'static str,
    what: &'static str,
    policy: &'static str,
    remedy: &'static str,
}

/// Of a word as the reason of a condition.
#[derive(Debug, serde::Serialize)]
struct Meaning {
    condition: &'static str,
    reason: &'static str,
    what: &'static str,
    remedy: &'static str,
}

impl Explain {
    pub(crate) fn run(self, printer: &Printer) -> Result<(), Failure> {
        let found = match &self.code {
            Some(word) => known(word)?,
            None => Explanations {
                schema: SCHEMA,
                codes: Code::ALL.iter().map(|&code| explanation(code)).collect(),
                reasons: reason::ALL.iter().map(meaning).collect(),
            },
        };
        match (self.output, self.code) {
            (Output::Json, _) => printer.json(&found, 2),
            (Output::Table, Some(_)) => printer.data(&shown(&found)),
            (Output::Table, None) => {
                let row = |one: &Explanation| format!("{:<22}{}", one.code, one.what);
                printer.data(&found.codes.iter().map(row).collect::<Vec<_>>().join("\n"))
            }
        }
    }
}

const SCHEMA: &str = "weightrefit.explain/v1";

fn known(word: &str) -> Result<Explanations, Failure> {
    let code = word.parse::<Code>();
    let reasons = reason::ALL.iter().filter(|entry| entry.name.eq_ignore_ascii_case(word));
    let reasons: Vec<Meaning> = reasons.map(meaning).collect();
    match code {
        Err(error) if reasons.is_empty() => Err(unknown(word, error)),
        code => Ok(Explanations {
            schema: SCHEMA,
            codes: code.ok().map(explanation).into_iter().collect(),
            reasons,
        }),
    }
}

fn unknown(word: &str, error: UnknownCode) -> Failure {
    let codes = Code::ALL.iter().map(|code| code.name());
    let names: Vec<String> =
        codes.chain(reason::ALL.iter().map(|entry| entry.name)).map(str::to_owned).collect();
    let hint = nearest(word, &names).map(|near| format!("Did you mean `{near}`?"));
    Failure::usage(error, hint.unwrap_or_else(|| "`weightrefit explain` lists all codes.".into()))
}

fn shown(found: &Explanations) -> String {
    let code = found.codes.iter().map(|Explanation { code, what, policy, remedy }| {
        format!("{code}\n\nWhat happened:  {what}\nBy itself:      {policy}\nWhat to do:     {remedy}")
    });
    let has_code = !found.codes.is_empty();
    let reasons = found.reasons.iter().map(|Meaning { condition, reason, what, remedy }| {
        let heading = format!("{reason}, as reason of {condition}\n\nWhat it means:  {what}");
        // Of a code the remedy stands above.
        if has_code { heading } else { format!("{heading}\nWhat to do:     {remedy}") }
    });
    code.chain(reasons).collect::<Vec<_>>().join("\n\n")
}

fn meaning(entry: &reason::Entry) -> Meaning {
    Meaning {
        condition: entry.condition.name(),
        reason: entry.name,
        what: entry.sentence,
        remedy: entry.remedy(),
    }
}

fn explanation(code: Code) -> Explanation {
    let policy = match code.policy() {
        Policy::WaitForChange => "Nothing happens until the resource, a layout or a registration changes.",
        Policy::Retry => "The same step is tried again, with back-off.",
        Policy::DropReplica => {
            "The replica leaves the round and stays fenced until a later round brings it up."
        }
        Policy::AbortRound => "The round is aborted; the next publication or retry opens another one.",
        Policy::Stop => "The process concerned stops, because going on could do harm.",
    };
    Explanation { code: code.name(), what: code.sentence(), policy, remedy: code.remedy() }
}
