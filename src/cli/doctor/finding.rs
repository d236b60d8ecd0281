//! What a check found, and how it is shown.

use serde::Serialize;
use serde_json::{Value, json};

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) enum Level {
    /// As it should be.
    Good,
    /// Worth a thought: it may matter here.
    Advice,
    /// Whoever runs this may not look, or the API server did not say.
    Unknown,
    /// Refits do not work, or will not.
    Wrong,
}

/// What one check found.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Finding {
    pub(super) level: Level,
    /// What was looked at.
    pub(super) check: &'static str,
    /// What was found.
    pub(super) what: String,
    /// What follows from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) why: Option<String>,
    /// What a person can do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) to_do: Option<String>,
}

impl Finding {
    pub(super) fn good(check: &'static str, what: impl Into<String>) -> Self {
        Self { level: Level::Good, check, what: what.into(), why: None, to_do: None }
    }

    pub(super) fn wrong(
        check: &'static str,
        what: impl Into<String>,
        why: impl Into<String>,
        to_do: impl Into<String>,
    ) -> Self {
        let (why, to_do) = (Some(why.into()), Some(to_do.into()));
        Self { level: Level::Wrong, check, what: what.into(), why, to_do }
    }

    pub(super) fn advice(
        check: &'static str,
        what: impl Into<String>,
        why: impl Into<String>,
        to_do: impl Into<String>,
    ) -> Self {
        Self { level: Level::Advice, ..Self::wrong(check, what, why, to_do) }
    }

    /// The API server did not let us look, or did not answer.
    pub(super) fn unknown(check: &'static str, error: &kube::Error) -> Self {
        let (what, to_do) = match error {
            kube::Error::Api(status) if matches!(status.code, 401 | 403) => {
                (status.message.clone(), "Run this with an account that may read it.")
            }
            kube::Error::Api(status) => (status.message.clone(), "Try again."),
            other => (other.to_string(), "See whether `kubectl get --raw=/readyz` answers."),
        };
        Self { level: Level::Unknown, check, what, why: None, to_do: Some(to_do.to_owned()) }
    }
}

/// For programs.
pub(super) fn document(findings: &[Finding]) -> Value {
    json!({"schema": "weightrefit.doctor/v1", "findings": findings})
}

/// For people: a line each, and below what is not good the reason and the advice.
pub(super) fn shown(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.check.len()).max().unwrap_or_default();
    let one = |Finding { level, check, what, why, to_do }: &Finding| {
        let word = match level {
            Level::Good => "ok",
            Level::Advice => "advice",
            Level::Unknown => "unknown",
            Level::Wrong => "WRONG",
        };
        let indent = " ".repeat(9 + width + 2);
        let more = why.iter().map(|why| format!("\n{indent}why: {why}"));
        let more: String = more.chain(to_do.iter().map(|to_do| format!("\n{indent}do:  {to_do}"))).collect();
        format!("{word:<9}{check:<width$}  {what}{more}")
    };
    findings.iter().map(one).collect::<Vec<_>>().join("\n")
}
