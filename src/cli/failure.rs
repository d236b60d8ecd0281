//! Why a command did not succeed: the error, what to do about it, and the exit code.

use crate::api::problem::Refusal;
use std::error::Error;
use std::process::ExitCode;

/// The exit codes of every command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Done.
    Done = 0,
    /// Refused: the reason and the remedy are said, nothing was touched.
    Refused = 1,
    /// Wrong usage.
    Usage = 2,
    /// Failed while running.
    Failed = 3,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Why a command did not succeed.
#[derive(Debug)]
pub struct Failure {
    /// The exit code.
    pub exit: Exit,
    /// What happened; its sources are printed below it.
    pub error: Box<dyn Error + Send + Sync>,
    /// What to do about it.
    pub hint: Option<String>,
}

impl Failure {
    /// What was asked for cannot be: nothing was touched.
    pub fn refused(error: impl Into<Box<dyn Error + Send + Sync>>, hint: impl Into<String>) -> Self {
        Self { exit: Exit::Refused, error: error.into(), hint: Some(hint.into()) }
    }

    /// The arguments do not fit together.
    pub fn usage(error: impl Into<Box<dyn Error + Send + Sync>>, hint: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, error: error.into(), hint: Some(hint.into()) }
    }

    /// It went wrong on the way.
    pub fn failed(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { exit: Exit::Failed, error: error.into(), hint: None }
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        let hint = refusal.problem.hint();
        Self::refused(refusal, hint)
    }
}
