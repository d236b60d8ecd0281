//! `weightrefit explain`.

use crate::api::problem::nearest;
use crate::cli::{Failure, Output, Printer};
use weightrefit_core::code::{Code, Policy};

/// Explain an error code, or list all of them
#[derive(Debug, clap::Args)]
pub(crate) struct Explain {
    /// The code, as in conditions, metrics and messages; without it all codes are listed
    code: Option<String>,
    /// Format of stdout; json is `weightrefit.explain/v1`
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

#[derive(Debug, serde::Serialize)]
struct Explanations {
    schema: &'static str,
    codes: Vec<Explanation>,
}

#[derive(Debug, serde::Serialize)]
struct Explanation {
    code: &'static str,
    what: &'static str,
    policy: &'static str,
    remedy: &'static str,
}

impl Explain {
    pub(crate) fn run(self, printer: &Printer) -> Result<(), Failure> {
        let code = self.code.as_deref().map(known).transpose()?;
        match (code, self.output) {
            (Some(code), Output::Table) => {
                let Explanation { code, what, policy, remedy } = explanation(code);
                printer.data(&format!(
                    "{code}\n\nWhat happened:  {what}\nBy itself:      {policy}\nWhat to do:     {remedy}"
                ))
            }
            (Some(code), Output::Json) => printer.json(&explanations(&[code]), 2),
            (None, Output::Table) => {
                let row = |code: &Code| format!("{code:<22}{}", code.sentence());
                printer.data(&Code::ALL.iter().map(row).collect::<Vec<_>>().join("\n"))
            }
            (None, Output::Json) => printer.json(&explanations(Code::ALL), 2),
        }
    }
}

fn known(text: &str) -> Result<Code, Failure> {
    text.parse().map_err(|error| {
        let names: Vec<String> = Code::ALL.iter().map(|code| code.name().to_owned()).collect();
        let hint = nearest(text, &names).map(|near| format!("Did you mean `{near}`?"));
        Failure::usage(error, hint.unwrap_or_else(|| "`weightrefit explain` lists all codes.".into()))
    })
}

fn explanations(codes: &[Code]) -> Explanations {
    let codes = codes.iter().map(|&code| explanation(code)).collect();
    Explanations { schema: "weightrefit.explain/v1", codes }
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
