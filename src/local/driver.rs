//! The driver's connection to the agent that leads: asks for the end of a step, as an RL loop awaits its refit.

use std::path::PathBuf;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::mpsc::{Receiver, UnboundedSender};
use weightrefit_core::code::Code;
use weightrefit_core::id::Incarnation;
use weightrefit_proto::report::RoundReport;
use weightrefit_proto::socket::{
    AgentFrame, ClientFrame, FrameError, PROTOCOL, Role, decode, encode, frame_length,
};

/// Between two attempts to reach the agent.
const RETRY: Duration = Duration::from_millis(50);

/// What came of a step.
#[derive(Debug)]
pub(super) enum Answer {
    /// It ended, as far as it will.
    Ended { step: i64, report: Box<RoundReport> },
    /// The agent does not know, and why.
    Refused { step: i64, code: Code, message: String },
    /// The agent is gone; the question has been asked again of its successor.
    Asked { step: i64 },
}

/// A driver: asks for each step that comes through `steps`, one after the other.
pub(super) struct Driver {
    /// Socket of the agent that hosts the leader.
    pub(super) socket: PathBuf,
    /// This process.
    pub(super) instance: Incarnation,
    /// How long a step may take.
    pub(super) timeout: Duration,
}

impl Driver {
    /// Runs until `steps` is closed.
    pub(super) async fn run(self, mut steps: Receiver<i64>, answers: UnboundedSender<Answer>) {
        let mut next = steps.recv().await;
        while let Some(step) = next {
            tokio::select! {
                answer = self.insist(step, &answers) => {
                    // The run is over when nobody listens.
                    let _ = answers.send(answer);
                    next = steps.recv().await;
                }
                // The run has given up the step.
                later = steps.recv() => next = later,
            }
        }
    }

    /// Asks until there is an answer.
    async fn insist(&self, step: i64, answers: &UnboundedSender<Answer>) -> Answer {
        loop {
            match self.ask(step, answers).await {
                Ok(answer) => return answer,
                Err(error) => tracing::debug!(%error, step, "no answer yet"),
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn ask(&self, step: i64, answers: &UnboundedSender<Answer>) -> Result<Answer, DriverError> {
        let mut stream = UnixStream::connect(&self.socket).await?;
        let hello = ClientFrame::Hello { protocol: PROTOCOL, instance: self.instance, role: Role::Driver {} };
        stream.write_all(&encode(&hello)?).await?;
        let request = u64::try_from(step).unwrap_or(0);
        let timeout_ms = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX);
        stream.write_all(&encode(&ClientFrame::Refit { request, step, timeout_ms })?).await?;
        let _ = answers.send(Answer::Asked { step });
        loop {
            match receive(&mut stream).await? {
                AgentFrame::Report { request: of, report } if of == request => {
                    return Ok(Answer::Ended { step, report });
                }
                AgentFrame::Error { code, message, request: Some(of), .. } if of == request => {
                    return Ok(Answer::Refused { step, code, message });
                }
                AgentFrame::Error { message, .. } => return Err(DriverError::Refused(message)),
                _ => {}
            }
        }
    }
}

async fn receive(stream: &mut UnixStream) -> Result<AgentFrame, DriverError> {
    let mut prefix = [0; 4];
    stream.read_exact(&mut prefix).await?;
    let mut body = vec![0; frame_length(prefix)?];
    stream.read_exact(&mut body).await?;
    Ok(decode(&body)?)
}

#[derive(Debug, thiserror::Error)]
enum DriverError {
    #[error("agent socket failed: {0}")]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("refused: {0}")]
    Refused(String),
}
