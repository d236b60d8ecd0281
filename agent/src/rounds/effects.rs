//! What the node asks for, done.

use super::waiters::Answer;
use super::{RoundDriver, not_taken};
use crate::coordinator::Upward;
use crate::session::ClientId;
use std::sync::Arc;
use std::time::Instant;
use weightrefit_core::code::Code;
use weightrefit_core::round::io::{Effect, Event, ReleaseOutcome, Slot};
use weightrefit_core::round::message::{Header, Message};
use weightrefit_proto::socket::{AgentFrame, ClientFrame, Copier, ReleaseKind, Writes};

impl RoundDriver {
    pub(super) fn act(&mut self, effect: Effect) {
        match effect {
            Effect::Send { header, message } => self.send(&header, &message),
            Effect::OpenStaging { slot, round } => {
                let done = self.data.open_staging(slot, round);
                self.inputs.extend(done);
            }
            Effect::StartReceive { slot, round } => {
                let failed = self.data.start_receive(slot, round);
                self.inputs.extend(failed);
            }
            Effect::AllowSend { slot, round, replicas } => {
                let failed = self.data.allow_send(slot, round, &replicas);
                self.inputs.extend(failed);
            }
            Effect::JoinReceivers { slot, round } => self.data.join_receivers(slot, round),
            Effect::JoinSenders { slot, round, replica } => self.data.join_senders(slot, round, replica),
            Effect::Digest { slot, round } => self.data.digest(slot, round),
            // The memory is kept for the next round; what it holds is written over there.
            Effect::DropStaging { slot: _ } => {}
            Effect::DigestPublication { slot, step, epoch } => {
                self.data.digest_publication(slot, step, epoch);
            }
            Effect::Pause { slot, round, version } => {
                self.observer.pausing(slot);
                let in_flight = self.plan.as_ref().map(|plan| plan.in_flight).unwrap_or_default();
                self.tell(slot, AgentFrame::Pause { round, version, writes: Writes::None, in_flight });
            }
            Effect::Commit { slot, round, version } => {
                self.show_staging(slot);
                self.observer.committing(slot, round);
                let kv_cache = self.plan.as_ref().map(|plan| plan.kv_cache).unwrap_or_default();
                let (copy, extras) = (Copier::Client, self.extras.of(&version).map(str::to_owned));
                self.tell(slot, AgentFrame::Commit { round, version, copy, kv_cache, extras });
            }
            Effect::Resume { slot, round, version } => {
                self.tell(slot, AgentFrame::Resume { round, version });
            }
            Effect::AbortClient { slot, round } => self.tell(slot, AgentFrame::Abort { round }),
            Effect::Released { slot, step, world, outcome } => self.released(slot, (world, step), outcome),
            Effect::RefusePublish { slot, step, code } => {
                self.desk(slot).outstanding.retain(|(_, outstanding)| *outstanding != step);
                let (message, hint) = (not_taken(step, code), code.remedy().to_owned());
                self.tell(slot, AgentFrame::PublishRefused { step, code, message, hint });
                let answers = self.observer.waiters.refused(step, code);
                self.answer(answers);
                self.let_go_if_free(slot);
            }
            Effect::Event(event) => self.event(event),
        }
    }

    fn send(&mut self, header: &Header, message: &Message) {
        let member = self.plan.as_ref().and_then(|plan| plan.membership.member(header.to));
        let Some(key) = member.map(|member| member.key) else { return };
        let extras = match message {
            Message::Propose { version, .. } => self.extras.of(version),
            _ => None,
        };
        if !self.peers.send(key, header, message, extras) {
            self.observer.metrics.peer_messages_dropped.inc();
        }
    }

    fn tell(&self, slot: Slot, frame: AgentFrame) {
        self.clients.tell(slot, frame, Vec::new());
    }

    /// The engine learns where new weights lie before it is asked to take them, once per connection.
    fn show_staging(&mut self, slot: Slot) {
        let Some(staging) = self.data.staging(slot) else { return };
        if staging.told {
            return;
        }
        match staging.frame() {
            Ok((frame, fds)) => {
                staging.told = true;
                self.clients.tell(slot, frame, fds);
            }
            // The commit that follows fails in the engine, which has no staging then.
            Err(error) => tracing::error!(%slot, error = %error, "staging cannot be passed"),
        }
    }

    fn released(&mut self, slot: Slot, publication: (Arc<str>, i64), outcome: ReleaseOutcome) {
        let (_, step) = publication;
        let outcome = match outcome {
            ReleaseOutcome::Read => ReleaseKind::Read,
            ReleaseOutcome::Dropped => ReleaseKind::Dropped,
            ReleaseOutcome::Withdrawn => ReleaseKind::Withdrawn,
        };
        // Without it the client is of another world and published nothing of this.
        if self.desk(slot).outstanding.remove(&publication) {
            self.tell(slot, AgentFrame::Released { step, outcome });
        }
        let answers = self.observer.released(slot, step);
        self.answer(answers);
        self.let_go_if_free(slot);
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Configured { epoch, membership } => {
                let Some(plan) = self.pending.take() else { return };
                debug_assert_eq!((plan.epoch(), plan.membership.digest()), (epoch, membership));
                self.enter(plan);
            }
            Event::Drained => self.drained = true,
            Event::RoundEnded(summary) => {
                let Some(plan) = self.plan.clone() else { return };
                let report = super::report::round(&summary, &plan.membership);
                super::report::log(&report);
                match serde_json::to_string(&report) {
                    Ok(json) => self.tell_coordinator(Upward::RoundEnded(json)),
                    Err(error) => tracing::error!(error = %error, "round cannot be reported"),
                }
                let answers = self.observer.round_ended(&summary, report);
                self.answer(answers);
            }
            Event::PublishRefused { step, code, member } => {
                let seat = member.and_then(|id| self.plan.as_ref()?.membership.member(id).map(|m| &m.seat));
                let member = seat.map(ToString::to_string);
                tracing::warn!(step, code = %code, member, "publication refused");
                let answers = self.observer.waiters.refused(step, code);
                self.answer(answers);
            }
            other => {
                if let Event::Accepted { version } = &other {
                    self.extras.accept(version);
                }
                self.observer.event(other);
            }
        }
    }

    /// R3: the membership that the node has entered is everybody's now.
    fn enter(&mut self, plan: Arc<crate::planned::Planned>) {
        let (epoch, members) = (plan.epoch().0, plan.membership.members().len());
        tracing::info!(epoch, members, plan = %plan.topology.plan, "membership in effect");
        let before = self.plan.replace(Arc::clone(&plan));
        self.data.configure(Arc::clone(&plan));
        self.peers.follow(&plan.membership);
        self.observer.configured(&plan);
        self.observer.events.enter(&plan.membership, |key| self.peers.reaches(key));
        for (slot, now) in (0..).map(Slot).zip(&plan.slots) {
            let old = before.as_ref().and_then(|before| before.slots.get(slot.0 as usize));
            if !self.clients.is_admitted(slot) {
                self.late.push_back(slot);
            } else if old.is_some_and(|old| old.layout != now.layout) {
                let message = "the layout of this rank has changed: register again".to_owned();
                self.clients.refuse(slot, Code::RegistrationMismatch, message);
            } else {
                self.compile(slot);
            }
        }
    }

    pub(super) fn asked(&mut self, client: ClientId, frame: ClientFrame) {
        match frame {
            ClientFrame::Refit { request, step, timeout_ms } => {
                if let Some(answer) = self.not_leading(client, request) {
                    return self.answer(vec![answer]);
                }
                let asked = (request, step, timeout_ms);
                let answer = self.observer.waiters.ask(Instant::now(), client, asked);
                self.answer(answer.into_iter().collect());
            }
            ClientFrame::Status { request } => {
                let status = self.observer.status(self.plan.as_deref(), &self.data);
                self.clients.answer(client, AgentFrame::Status { request, status });
            }
            ClientFrame::Events { request } => {
                if let Some(answer) = self.not_leading(client, request) {
                    return self.answer(vec![answer]);
                }
                let (first, events) = self.observer.events.follow();
                if let Some(event) = first {
                    self.clients.answer(client, AgentFrame::Event { event });
                }
                self.clients.follow(client, events);
            }
            // The session lets no driver send anything else.
            _ => {}
        }
    }

    fn not_leading(&self, client: ClientId, request: u64) -> Option<Answer> {
        // Before the first membership the question waits: whoever leads will be known.
        let plan = self.plan.as_ref()?;
        let leader = plan.membership.leader();
        if self.node.slot_of(leader).is_some() {
            return None;
        }
        let seat = plan.membership.member(leader).map(|member| member.seat.to_string()).unwrap_or_default();
        let message = format!("rounds are led by the agent of {seat}: ask that one");
        Some(Answer { client, request, result: Err((Code::NotConfigured, message)) })
    }

    pub(super) fn answer(&self, answers: Vec<Answer>) {
        for Answer { client, request, result } in answers {
            let frame = match result {
                Ok(report) => AgentFrame::Report { request, report: Box::new(report) },
                Err((code, message)) => {
                    let hint = code.remedy().to_owned();
                    AgentFrame::Error { code, message, hint, request: Some(request) }
                }
            };
            self.clients.answer(client, frame);
        }
    }
}
