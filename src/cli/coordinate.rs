//! `weightrefit coordinate`.

use crate::api::resolve::{Options, resolve};
use crate::api::supported;
use crate::cli::input::{Files, Which};
use crate::cli::{Exit, Failure, Output, Printer};
use crate::coordinate::{self, CoordinateError, Started};
use crate::limits;
use crate::stop::stop_signal;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Coordinate a refit without Kubernetes: form its membership, serve its agents until stopped
///
/// Pods and their ranks are those that the resource describes. stdout gets the command line of each pod's agent; add
/// `--socket` and `--listen` as its machine wants them. A pod's token is a file in the directory: who can read it is
/// that pod, so give each machine its own, or a directory that only you can read. A used token is replaced at once.
#[derive(Debug, clap::Args)]
pub(crate) struct Coordinate {
    #[command(flatten)]
    files: Files,
    #[command(flatten)]
    which: Which,
    /// Where agents dial; port 0 takes a free one
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:7443")]
    listen: SocketAddr,
    /// For the authority and the tokens; made with mode 0700
    #[arg(long, value_name = "DIRECTORY")]
    directory: PathBuf,
    /// Replicas of each pool [default: its minReplicas]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(limits::REPLICAS_MAX)))]
    replicas: Option<u32>,
    /// Format of stdout; json is `weightrefit.coordinate/v1`
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl Coordinate {
    pub(crate) fn run(self, printer: &Printer) -> Result<(), Failure> {
        // All fields by name, so that none is forgotten.
        let Self { files, which, listen, directory, replicas, output } = self;
        if listen.ip().is_unspecified() {
            let hint = "Name the address of this machine that agents reach.";
            return Err(Failure::usage(format!("agents cannot dial {}", listen.ip()), hint));
        }
        let documents = files.documents(printer)?;
        let refit = which.of(&documents)?;
        supported::check(&refit.value.spec).map_err(|(path, problem)| refit.refuse(path, problem))?;
        let resolved =
            resolve(&documents, refit, &Options { replicas, open_pools: true, ..Options::default() })?;
        resolved.plan().map_err(|error| Failure::no_plan(refit, error))?;
        resolved.notes.iter().for_each(|note| printer.note(note));
        super::log("info");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        runtime.map_err(Failure::failed)?.block_on(async {
            let stop = stop_signal().map_err(Failure::failed)?;
            let (running, started) =
                coordinate::start(&resolved, listen, &directory).await.map_err(failure)?;
            match output {
                Output::Json => printer.json(&started, 2)?,
                Output::Table => printer.data(&shown(&started))?,
            }
            stop.await;
            drop(running);
            tracing::info!("stopped; agents go on");
            Ok(())
        })
    }
}

fn failure(error: CoordinateError) -> Failure {
    let hint = match &error {
        CoordinateError::Directory { .. } => "Name a directory that you may write to.",
        CoordinateError::Open { .. } => "Take the rights of group and others away: `chmod 700`.",
        CoordinateError::Listen { .. } => "Name a free port of this machine with `--listen`.",
        CoordinateError::Random | CoordinateError::Identity(_) | CoordinateError::Tls(_) => {
            return Failure::failed(error);
        }
    };
    Failure { exit: Exit::Refused, hint: Some(hint.to_owned()), ..Failure::failed(error) }
}

/// A line for each agent, as a shell takes it.
fn shown(started: &Started) -> String {
    let line = |arguments: &Vec<String>| {
        let words: Vec<String> = arguments.iter().map(|argument| quoted(argument)).collect();
        format!("weightrefit-agent {} --socket SOCKET --listen IP", words.join(" "))
    };
    started.agents.iter().map(|agent| line(&agent.arguments)).collect::<Vec<_>>().join("\n")
}

fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    if word.chars().all(plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}
