//! Second step: whether the resource, with what it names, is one that rounds can be run for. Reads nothing.

use super::dereference::Dereferenced;
use super::reason::AcceptedReason;
use crate::api::check;
use crate::api::documents::Document;
use crate::api::manifest::Manifest;
use crate::api::problem::{FieldPath, Problem, Refusal};
use crate::api::refit::{WeightRefit, WeightRefitSpec};
use crate::api::resolve::{NoPlan, Options, ResolvedRefit, resolve};
use crate::api::supported;
use crate::limits;
use std::sync::Arc;
use weightrefit_core::code::Code;

/// A resource that rounds can be run for: proof for [`super::build::build`].
#[derive(Debug)]
pub struct Validated {
    pub(super) refit: Arc<WeightRefit>,
    pub(super) resolved: Arc<ResolvedRefit>,
}

/// Why a resource is not accepted, as condition Accepted says it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// The reason.
    pub reason: AcceptedReason,
    /// What, where, what follows, what to do.
    pub message: String,
}

impl Rejection {
    pub(super) fn new(reason: AcceptedReason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }

    fn of(refusal: &Refusal) -> Self {
        let hint = refusal.problem.hint(&refusal.path);
        let name = &refusal.file;
        Self::new(reason(&refusal.problem), format!("{name}: {}: {}. {hint}", refusal.path, refusal.problem))
    }
}

/// Checks fields, layouts and plan. Takes a core for seconds on the largest models: not for async threads.
///
/// # Errors
/// With the first thing that is wrong.
pub fn validate(dereferenced: Dereferenced) -> Result<Validated, Rejection> {
    let Dereferenced { refit, documents } = dereferenced;
    let manifest = Manifest::from(&*refit);
    let name = format!("WeightRefit {}/{}", manifest.metadata.namespace, manifest.metadata.name);
    let document = Document::fetched(name, manifest);
    let refused = |(path, problem)| Rejection::of(&document.refuse(path, problem));
    check::check(&document.value).map_err(refused)?;
    supported::check(&refit.spec).map_err(refused)?;
    ranks(&refit.spec).map_err(refused)?;
    let resolved = resolve(&documents, &document, &Options { open_pools: true, ..Options::default() })
        .map_err(|refusal| Rejection::of(&refusal))?;
    let no_plan = |error: NoPlan| {
        let message = match &error {
            NoPlan::Layout { path, source } => format!("{path}: {source}. {}", error.code().remedy()),
            NoPlan::Plan(plan) => format!("{plan}. {}", error.code().remedy()),
        };
        Rejection::new(of_code(error.code()), format!("{}: {message}", document.file))
    };
    resolved.training.check().map_err(no_plan)?;
    resolved.pools.iter().try_for_each(|pool| pool.side.check()).map_err(no_plan)?;
    resolved.plan().map_err(no_plan)?;
    Ok(Validated { refit, resolved: Arc::new(resolved) })
}

/// Ways from pods to ranks that only documents may name yet.
fn ranks(spec: &WeightRefitSpec) -> Result<(), (FieldPath, Problem)> {
    let at = FieldPath::of("spec");
    let training = (at.key("training.ranks"), &spec.training.ranks);
    let pool = |(index, ranks)| (at.key("inference.pools").index(index).key("ranks"), ranks);
    let pools = spec.inference.pools.iter().map(|pool| &pool.ranks).enumerate().map(pool);
    for (path, ranks) in std::iter::once(training).chain(pools) {
        // The pods of one tell nothing of how many the other has.
        if let Some(set) = ranks.job_set.as_ref().filter(|set| set.replicated_jobs.len() > 1) {
            let value = format!("[{}]", set.replicated_jobs.join(", "));
            let hint = "Name one replicated job; its `replicas` and `parallelism` may be as large as needed.";
            return Err((path.key("jobSet.replicatedJobs"), Problem::Unsupported { value, hint }));
        }
    }
    Ok(())
}

fn reason(problem: &Problem) -> AcceptedReason {
    match problem {
        Problem::Unsupported { .. } => AcceptedReason::Unsupported,
        Problem::NotGiven { .. } => AcceptedReason::NoConfigMap,
        Problem::NoSuchKey { .. } => AcceptedReason::NoConfigMapKey,
        Problem::TooLarge { .. } => AcceptedReason::ConfigMapTooLarge,
        Problem::Undecodable { .. } | Problem::OtherSort { .. } => AcceptedReason::ConfigMapRejected,
        Problem::Table(_) => AcceptedReason::ModelRejected,
        other => other.code().map_or(AcceptedReason::LayoutRejected, of_code),
    }
}

const fn of_code(code: Code) -> AcceptedReason {
    match code {
        Code::CoverageGap => AcceptedReason::CoverageGap,
        Code::CoverageOverlap => AcceptedReason::CoverageOverlap,
        Code::DtypeMismatch => AcceptedReason::DtypeMismatch,
        Code::Unsupported => AcceptedReason::Unsupported,
        _ => AcceptedReason::LayoutRejected,
    }
}

/// At most as many characters as a condition takes, whole sentences or not.
pub(super) fn short(text: &str) -> String {
    if text.chars().count() <= limits::MESSAGE_MAX {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(limits::MESSAGE_MAX - 1).collect();
    short.push('…');
    short
}
