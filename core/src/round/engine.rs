//! Engine client: gate and record of one inference rank, in the engine's own process (protocol page §7, Staged).
//! It lives and dies with the tensors, so its word is what recovery believes.
//!
//! Invariants:
//! - E1 (I6): a new process is Cold and gated; Cold and Dirty never serve.
//! - E2: the record says Dirty before the first live byte is written, and Applied only after the last.
//! - E3: it serves again only by `resume` for exactly `live`, or by `abort` or EOF from Quiet, where `live` was
//!   not touched. No timer resumes.
//! - E4 (I7): `commit` takes no version below `live` unless the tensors are Dirty or Cold, and never while serving.
//! - E5: a request of a round older than the newest that paused it is refused.

use super::message::{EngineRecord, EngineState, RoundKey, Version};
use crate::code::Code;
use crate::id::Incarnation;

/// What the agent's frames, or the engine itself, say.
#[expect(missing_docs, reason = "named by the agent socket's frames")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EngineInput {
    Pause {
        round: RoundKey,
    },
    /// The engine has stopped at a step boundary (answer to `Stop`).
    Stopped,
    Commit {
        round: RoundKey,
        version: Version,
    },
    /// The copy of staging to live tensors, post steps and cache resets are done (answer to `Copy`).
    Copied,
    /// They failed: live tensors may be half written.
    CopyFailed,
    Resume {
        round: RoundKey,
        version: Version,
    },
    Abort {
        round: RoundKey,
    },
    /// EOF of the agent's connection.
    AgentGone,
}

/// What the engine process must do, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EngineAction {
    /// Stop serving at the next step boundary, then feed `Stopped`.
    Stop,
    /// Copy all of staging to the live tensors and empty caches, then feed `Copied` or `CopyFailed`.
    Copy(Version),
    /// Open the gate.
    Serve,
    /// Send this frame.
    Answer(EngineAnswer),
}

/// Frames to the agent; each carries the record as it is then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "named by the agent socket's frames")]
pub enum EngineAnswer {
    Paused { round: RoundKey, record: EngineRecord },
    Committed { round: RoundKey, record: EngineRecord },
    Resumed { round: RoundKey, record: EngineRecord },
    Aborted { round: RoundKey, record: EngineRecord },
    Failed { round: RoundKey, record: EngineRecord, code: Code },
}

/// The machine.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EngineClient {
    record: EngineRecord,
    /// Rounds whose `pause` waits for the step boundary.
    stopping: Option<RoundKey>,
    copying: Option<(RoundKey, Version)>,
}

impl EngineClient {
    /// A new process: Cold, gated, whatever checkpoint it has loaded.
    #[must_use]
    pub fn new(instance: Incarnation) -> Self {
        let record =
            EngineRecord { instance, live: None, state: EngineState::Cold, round: RoundKey::default() };
        Self { record, stopping: None, copying: None }
    }

    /// For `hello` and every answer.
    #[must_use]
    pub fn record(&self) -> EngineRecord {
        self.record
    }

    /// Whether forward steps may run.
    #[must_use]
    pub fn serves(&self) -> bool {
        self.record.state == EngineState::Serving
    }

    /// One step; actions are pushed in the order in which they must be done.
    pub fn handle(&mut self, input: EngineInput, out: &mut Vec<EngineAction>) {
        match input {
            EngineInput::Pause { round } => self.pause(round, out),
            EngineInput::Stopped => self.stopped(out),
            EngineInput::Commit { round, version } => self.commit(round, version, out),
            EngineInput::Copied => self.copied(out),
            EngineInput::CopyFailed => self.copy_failed(out),
            EngineInput::Resume { round, version } => self.resume(round, version, out),
            EngineInput::Abort { round } => {
                self.serve_if_quiet(out);
                out.push(answer(EngineAnswer::Aborted { round, record: self.record }));
            }
            EngineInput::AgentGone => self.serve_if_quiet(out),
        }
    }

    fn pause(&mut self, round: RoundKey, out: &mut Vec<EngineAction>) {
        if round < self.record.round || self.copying.is_some() {
            return out.push(self.refuse(round, Code::StaleEpoch)); // E5
        }
        self.record.round = round;
        if self.record.state == EngineState::Serving {
            let asked = self.stopping.replace(round).is_some();
            if !asked {
                out.push(EngineAction::Stop);
            }
        } else {
            out.push(answer(EngineAnswer::Paused { round, record: self.record }));
        }
    }

    fn stopped(&mut self, out: &mut Vec<EngineAction>) {
        let Some(round) = self.stopping.take() else {
            if self.serves() {
                out.push(EngineAction::Serve); // the pause was called off before the boundary
            }
            return;
        };
        self.record.state = EngineState::Quiet;
        out.push(answer(EngineAnswer::Paused { round, record: self.record }));
    }

    fn commit(&mut self, round: RoundKey, version: Version, out: &mut Vec<EngineAction>) {
        let clean = matches!(self.record.state, EngineState::Quiet | EngineState::Applied);
        let older = self.record.live.is_some_and(|live| version.name() < live.name());
        let refusal = if round < self.record.round || self.copying.is_some() {
            Some(Code::StaleEpoch) // E5
        } else if self.record.state == EngineState::Serving {
            Some(Code::EngineRefused) // E4
        } else if clean && older {
            Some(Code::VersionRegressed) // E4
        } else {
            None
        };
        if let Some(code) = refusal {
            return out.push(self.refuse(round, code));
        }
        self.record = EngineRecord { state: EngineState::Dirty, live: None, round, ..self.record }; // E2
        self.copying = Some((round, version));
        out.push(EngineAction::Copy(version));
    }

    fn copied(&mut self, out: &mut Vec<EngineAction>) {
        let Some((round, version)) = self.copying.take() else { return };
        self.record = EngineRecord { state: EngineState::Applied, live: Some(version), ..self.record };
        out.push(answer(EngineAnswer::Committed { round, record: self.record }));
    }

    fn copy_failed(&mut self, out: &mut Vec<EngineAction>) {
        let Some((round, _)) = self.copying.take() else { return };
        out.push(self.refuse(round, Code::ApplyFailed));
    }

    fn resume(&mut self, round: RoundKey, version: Version, out: &mut Vec<EngineAction>) {
        let paused = matches!(self.record.state, EngineState::Applied | EngineState::Quiet);
        if round < self.record.round || self.record.live != Some(version) || self.copying.is_some() {
            return out.push(self.refuse(round, Code::EngineRefused)); // E3, E5
        }
        if paused {
            self.record.state = EngineState::Serving;
            out.push(EngineAction::Serve);
        }
        match self.record.state {
            EngineState::Serving => out.push(answer(EngineAnswer::Resumed { round, record: self.record })),
            _ => out.push(self.refuse(round, Code::EngineRefused)),
        }
    }

    fn serve_if_quiet(&mut self, out: &mut Vec<EngineAction>) {
        self.stopping = None;
        if self.record.state == EngineState::Quiet {
            self.record.state = EngineState::Serving; // E3
            out.push(EngineAction::Serve);
        }
    }

    fn refuse(&self, round: RoundKey, code: Code) -> EngineAction {
        answer(EngineAnswer::Failed { round, record: self.record, code })
    }
}

fn answer(answer: EngineAnswer) -> EngineAction {
    EngineAction::Answer(answer)
}
