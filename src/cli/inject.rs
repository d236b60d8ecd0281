//! `weightrefit inject`.

use crate::api::documents::{SourceText, objects};
use crate::cli::{Failure, Printer, input};
use crate::injection::{InjectError, NoTemplate, Settings, apply, inject, templates};
use serde_json::Value;
use std::path::PathBuf;

/// Add agents to pods and pod templates, as the operator's webhook does
///
/// For clusters without the webhook, and for manifests that are kept as they run. Pods and templates without label
/// `weightrefit.dev/refit`, and objects of other kinds, are printed as they are; comments are lost.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example: weightrefit inject -f engines.yaml --settings injection.yaml | kubectl apply -f -"
)]
pub(crate) struct Inject {
    /// YAML of Pods, Deployments, StatefulSets, ReplicaSets, DaemonSets, Jobs, CronJobs, JobSets, LeaderWorkerSets
    /// and lists of them; repeatable. `-` is stdin
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// The operator's injection settings
    #[arg(long, value_name = "FILE")]
    settings: PathBuf,
}

impl Inject {
    pub(crate) fn run(self, printer: &Printer) -> Result<(), Failure> {
        let source = |path: &PathBuf| -> Result<SourceText, Failure> {
            Ok(SourceText { file: path.display().to_string(), text: input::text(path)? })
        };
        let settings = Settings::parse(&source(&self.settings)?)?;
        let (mut documents, mut injected) = (Vec::new(), 0);
        for path in &self.files {
            let source = source(path)?;
            for mut object in objects(&source)? {
                let mut agents = Agents { file: &source.file, settings: &settings, printer, injected: 0 };
                agents.add(&mut object)?;
                injected += agents.injected;
                documents.push(serde_saphyr::to_string(&object).map_err(Failure::failed)?);
            }
        }
        if injected == 0 {
            printer.note("no pod was changed: none names a refit by label, or all have their agents");
        }
        printer.data(documents.join("---\n").trim_end())
    }
}

struct Agents<'r> {
    file: &'r str,
    settings: &'r Settings,
    printer: &'r Printer,
    injected: usize,
}

impl Agents<'_> {
    fn add(&mut self, object: &mut Value) -> Result<(), Failure> {
        if object["kind"] == "List" {
            let items = object.get_mut("items").and_then(Value::as_array_mut);
            return items.into_iter().flatten().try_for_each(|item| self.add(item));
        }
        let places = match templates(object) {
            Ok(places) => places,
            Err(NoTemplate { kind, name }) => {
                self.printer.note(&format!("{}: {kind} `{name}` has no pods that are known here", self.file));
                return Ok(());
            }
        };
        for place in places {
            let pod = object.pointer(&place).expect("it was found there");
            let additions =
                inject(pod, self.settings).map_err(|error| self.refused(object, &place, error))?;
            self.injected += usize::from(!additions.is_empty());
            apply(object.pointer_mut(&place).expect("it was found there"), &additions);
        }
        Ok(())
    }

    fn refused(&self, object: &Value, place: &str, error: InjectError) -> Failure {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or("?");
        let (kind, name) = (text("/kind"), text("/metadata/name"));
        let field = place.trim_start_matches('/').replace('/', ".");
        let of = if field.is_empty() { String::new() } else { format!(", {field}") };
        let said = format!("{}: {kind} `{name}`{of}: {error}", self.file);
        let failure = Failure::refused(said, error.hint());
        match error.code() {
            Some(code) => failure.coded(code),
            None => failure,
        }
    }
}
