//! `weightrefit local`.

use crate::api::policy::Transport;
use crate::api::resolve::{Options, resolve};
use crate::api::{check, supported};
use crate::cli::input::{Files, Which};
use crate::cli::table::{Align, Table, bytes, grouped};
use crate::cli::{Exit, Failure, Output, Printer};
use crate::limits;
use crate::local::{self, Broken, Fault, LocalError, LocalReport, RoundLine, Verdict};
use std::path::PathBuf;
use weightrefit_core::plan::PlanBytes;
use weightrefit_proto::report::RoundOutcome;

/// Run a whole refit on this machine: real agents, a reference trainer and reference engines
#[derive(Debug, clap::Args)]
pub(crate) struct Local {
    #[command(flatten)]
    files: Files,
    #[command(flatten)]
    which: Which,
    /// Steps that the trainer publishes
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=i64::from(limits::LOCAL_ROUNDS_MAX)))]
    rounds: u32,
    /// Replicas of each pool [default: its minReplicas]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(limits::REPLICAS_MAX)))]
    replicas: Option<u32>,
    /// Safetensors file that the trainer starts from [default: what the annotation
    /// `weightrefit.dev/local-weights` names]
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// Serve each agent's metrics on this port: of 127.0.0.2 those of the first, of 127.0.0.3 those of the next
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    metrics: Option<u16>,
    /// Run nothing: write what the reference trainer and engine read into this folder, for runs elsewhere
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["rounds", "metrics", "transport", "output", "fault", "broken", "double"])]
    prepare: Option<PathBuf>,
    /// What carries the bytes, in place of `spec.transfer.transport`; nccl needs `encryption: TrustedFabric`
    #[arg(long, value_enum, value_name = "TRANSPORT")]
    transport: Option<Carrier>,
    /// Format of stdout; json is `weightrefit.local/v1`
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    /// Signal to a process at a moment of a step
    #[arg(long, value_name = "FAULT", hide = true)]
    fault: Vec<Fault>,
    /// A reference process that is wrong on purpose
    #[arg(long, value_name = "HOW", hide = true)]
    broken: Option<Broken>,
    /// GPUs and NCCL are the double of the tests
    #[arg(long, hide = true)]
    double: bool,
    /// Trainers and engines keep their tensors on the GPUs that agents use; without any, on the host
    #[arg(long, hide = true)]
    device_memory: bool,
}

/// Values of `--transport`.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Carrier {
    Auto,
    Tcp,
    Nccl,
}

impl From<Carrier> for Transport {
    fn from(carrier: Carrier) -> Self {
        match carrier {
            Carrier::Auto => Self::Auto,
            Carrier::Tcp => Self::Tcp,
            Carrier::Nccl => Self::Nccl,
        }
    }
}

impl Local {
    pub(crate) fn run(self, printer: &Printer) -> Result<(), Failure> {
        // All fields by name, so that none is forgotten.
        let Self {
            files,
            which,
            rounds,
            replicas,
            weights,
            metrics,
            prepare,
            transport,
            output,
            fault,
            broken,
            double,
            device_memory,
        } = self;
        let mut documents = files.documents(printer)?;
        if let Some(transport) = transport {
            let chosen = which.of(&documents)?.value.metadata.name.clone();
            let named = documents.refits.iter_mut().filter(|refit| refit.value.metadata.name == chosen);
            named.for_each(|refit| refit.value.spec.transfer.transport = transport.into());
        }
        let refit = which.of(&documents)?;
        check::check(&refit.value).map_err(|(path, problem)| refit.refuse(path, problem))?;
        supported::check(&refit.value.spec).map_err(|(path, problem)| refit.refuse(path, problem))?;
        let resolved = resolve(&documents, refit, &Options { replicas, ..Options::default() })?;
        if let Some(folder) = prepare {
            return local::prepare(&resolved, weights, &folder).map_err(failure);
        }
        let options =
            local::Options { rounds, weights, metrics, faults: fault, broken, double, device_memory };
        resolved.notes.iter().for_each(|note| printer.note(note));
        super::log("warn");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(Failure::failed)?;
        // On this thread, which lives as long as the run and so as its processes.
        let report = runtime.block_on(local::run(&resolved, options)).map_err(failure)?;
        match output {
            Output::Json => printer.json(&report, 3)?,
            Output::Table => printer.data(&shown(&report))?,
        }
        match report.complaints().as_slice() {
            [] => Ok(()),
            complaints => Err(Failure::failed(complaints.join("; "))),
        }
    }
}

fn failure(error: LocalError) -> Failure {
    let (hint, refused) = (error.hint(), error.is_refusal());
    Failure { hint, exit: if refused { Exit::Refused } else { Exit::Failed }, ..Failure::failed(error) }
}

fn shown(report: &LocalReport) -> String {
    let columns =
        ["PREPARE", "TRANSFER", "VERIFY", "PAUSE", "COMMIT", "RESUME"].map(|name| (name, Align::Right));
    let [prepare, transfer, verify, pause, commit, resume] = columns;
    let mut rounds = Table::new(&[
        ("STEP", Align::Right),
        ("OUTCOME", Align::Left),
        prepare,
        transfer,
        verify,
        pause,
        commit,
        resume,
        ("RECEIVED", Align::Right),
        ("MINIMUM", Align::Right),
        ("GB/S", Align::Right),
        ("SAVED", Align::Right),
    ]);
    report.rounds.iter().for_each(|round| rounds.row(row(round, &report.plan.bytes)));
    let left_out: String = report.rounds.iter().flat_map(left_out).collect();
    format!("{}\n\n{left_out}{}", rounds.shown(), verdict(report))
}

/// A line for each replica that a committed step went without; an aborted one has gone without all.
fn left_out(round: &RoundLine) -> Vec<String> {
    if round.outcome != RoundOutcome::Committed {
        return Vec::new();
    }
    let step = round.version.step;
    let mut lines: Vec<String> =
        round.left_out.iter().map(|replica| format!("step {step} left out {replica}\n")).collect();
    lines.last_mut().into_iter().for_each(|line| line.push('\n'));
    lines
}

fn row(round: &RoundLine, plan: &PlanBytes) -> [String; 12] {
    let outcome = match (round.outcome, round.reason) {
        (RoundOutcome::Committed, Some(reason)) => format!("Committed, say engines: {reason}"),
        (RoundOutcome::Committed, None) if round.left_out.is_empty() => "Committed".to_owned(),
        (RoundOutcome::Committed, None) => format!("Committed, {} left out", round.left_out.len()),
        (RoundOutcome::Aborted, Some(reason)) => format!("Aborted: {reason}"),
        (RoundOutcome::Aborted, None) => "Aborted".to_owned(),
    };
    let ms = |phase: Option<u64>| phase.map_or_else(|| "-".to_owned(), |ms| format!("{ms} ms"));
    let phases = &round.phase_milliseconds;
    let rate = round.gigabytes_per_second().map_or_else(|| "-".to_owned(), |rate| format!("{rate:.2}"));
    [
        round.version.step.to_string(),
        outcome,
        ms(phases.prepare),
        ms(phases.transfer),
        ms(phases.verify),
        ms(phases.pause),
        ms(phases.commit),
        ms(phases.resume),
        bytes(round.bytes.received),
        bytes(plan.minimum),
        rate,
        saved(round.bytes.received, plan.gather_broadcast),
    ]
}

/// Against gather and broadcast, rounded down.
fn saved(received: u64, usual: u64) -> String {
    let less = u128::from(usual.saturating_sub(received)) * 1000;
    let tenths = less.checked_div(u128::from(usual)).unwrap_or_default();
    format!("{}.{} %", tenths / 10, tenths % 10)
}

fn verdict(report: &LocalReport) -> String {
    let Verdict { checked_elements, mismatched_elements, torn_reads, steps, pads, .. } = report.verdict;
    let committed = report.rounds.iter().filter(|round| round.outcome == RoundOutcome::Committed).count();
    let word = if report.complaints().is_empty() { "right" } else { "NOT RIGHT" };
    format!(
        "verdict: {word}: {committed} of {} rounds committed; {} elements compared with the trainer's, {} differ \
         ({} pads are zero); {} forward steps, {} read two versions",
        report.rounds.len(),
        grouped(checked_elements),
        grouped(mismatched_elements),
        grouped(pads),
        grouped(steps),
        grouped(torn_reads),
    )
}
