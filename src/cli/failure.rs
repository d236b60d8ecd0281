//! Why a command did not succeed: the error, what to do about it, and the exit code.

use crate::api::documents::Document;
use crate::api::manifest::Manifest;
use crate::api::problem::{Problem, Refusal};
use crate::api::resolve::NoPlan;
use std::error::Error;
use std::process::ExitCode;
use weightrefit_core::code::Code;

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
    /// The stable code, where there is one; `weightrefit explain` takes it.
    pub code: Option<Code>,
    /// What happened; its sources are printed below it.
    pub error: Box<dyn Error + Send + Sync>,
    /// What to do about it.
    pub hint: Option<String>,
}

impl Failure {
    /// What was asked for cannot be: nothing was touched.
    pub fn refused(error: impl Into<Box<dyn Error + Send + Sync>>, hint: impl Into<String>) -> Self {
        Self { exit: Exit::Refused, code: None, error: error.into(), hint: Some(hint.into()) }
    }

    /// The arguments do not fit together.
    pub fn usage(error: impl Into<Box<dyn Error + Send + Sync>>, hint: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, code: None, error: error.into(), hint: Some(hint.into()) }
    }

    /// It went wrong on the way.
    pub fn failed(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { exit: Exit::Failed, code: None, error: error.into(), hint: None }
    }

    /// With the stable code.
    #[must_use]
    pub fn coded(self, code: Code) -> Self {
        Self { code: Some(code), ..self }
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        let (hint, code) = (refusal.problem.hint(&refusal.path), refusal.problem.code());
        Self { code, ..Self::refused(refusal, hint) }
    }
}

impl Failure {
    /// `refit` has no plan.
    pub(crate) fn no_plan(refit: &Document<Manifest>, error: NoPlan) -> Self {
        match error {
            NoPlan::Layout { path, source } => refit.refuse(path, Problem::Layout(source)).into(),
            NoPlan::Plan(error) => {
                let code = error.code();
                Self::refused(error, code.remedy()).coded(code)
            }
        }
    }
}
