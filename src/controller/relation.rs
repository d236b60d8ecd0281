//! One task per refit: it walks the steps whenever something changes, and owns the refit's coordinator.
//!
//! Invariants:
//! - B1: the steps come in order: each takes what the one before proves.
//! - B2: while a change is refused, the coordinator goes on with what was accepted before.
//! - B3: a pod that is gone or may not take part is dismissed before the status says so.
//! - B4: after a request to the API server that failed, the steps wait, whatever changes meanwhile: a server that
//!   struggles is not asked as often as agents report.

use super::apply::Applied;
use super::build::build;
use super::bundles::Bundles;
use super::consent::NoConsent;
use super::dereference::{DereferenceError, dereference, named};
use super::events::{Publisher, happenings};
use super::figures::Figures;
use super::gate::ClusterGate;
use super::pod_facts::PodFacts;
use super::pods::Pods;
use super::readiness::{Gates, due};
use super::reason::{AcceptedReason, Reason};
use super::record::PodName;
use super::seats::{SeatError, seat};
use super::status::{Memory, Observed, Unaccepted, is_trainer_done, status};
use super::update_status::{Urgency, update_status, urgency};
use super::validate::validate;
use super::watch::watch;
use super::workload::Reader;
use crate::api::refit::{ABORT_ANNOTATION, WeightRefit};
use crate::api::status::WeightRefitStatus;
use crate::coordinator::{Server, View, fault};
use crate::identity::Trust;
use crate::limits;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::jiff::Timestamp;
use kube::runtime::events::Recorder;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, ResourceExt};
use prometheus::IntCounterVec;
use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch::Receiver;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_stream::StreamExt;
use weightrefit_core::code::Code;
use weightrefit_core::id::Epoch;

/// What all refits share.
pub struct Shared {
    /// The API server.
    pub client: Client,
    /// Serves the agents of all refits.
    pub server: Server,
    /// Pods that claim refits.
    pub pods: Arc<Pods>,
    /// Knows who may take part.
    pub gate: Arc<ClusterGate>,
    /// Makes events.
    pub recorder: Recorder,
    /// Whom agents must trust.
    pub trust: Receiver<Trust>,
    /// Has given it to namespaces.
    pub bundles: Arc<Bundles>,
    /// Bounds how many refits are validated at once.
    pub validations: Semaphore,
    /// Walks of the steps, by `outcome`.
    pub reconciles: IntCounterVec,
    /// Failures of watches, by `resource`.
    pub watch_failures: IntCounterVec,
    /// What is known of each refit.
    pub figures: Figures,
}

/// What a relation is told.
pub(super) struct Signals {
    /// The object, whenever it changes; closed when it is deleted or the operator stops.
    pub(super) objects: Receiver<Arc<WeightRefit>>,
    /// Its pods have changed.
    pub(super) pods: Arc<Notify>,
    /// Whether the end of `objects` is the object's deletion.
    pub(super) is_deleted: Receiver<bool>,
}

/// One refit, from its creation to its deletion.
pub(super) struct Relation {
    shared: Arc<Shared>,
    signals: Signals,
    api: Api<WeightRefit>,
    key: String,
    maps: ConfigMaps,
    workloads: Reader,
    gates: Gates,
    trust: Receiver<Trust>,
    applied: Option<Applied>,
    /// Of the generation that was looked at last.
    accepted: Option<(i64, Result<(), Unaccepted>)>,
    memory: Memory,
    events: Publisher,
    status: WeightRefitStatus,
    /// The request to abort a round that was carried out last.
    aborted: Option<String>,
    /// resourceVersion of the status that was written last.
    written: Option<u64>,
    written_at: Option<Instant>,
    /// Whether a request of the present walk failed (B4).
    failed: bool,
}

impl Relation {
    pub(super) fn new(shared: Arc<Shared>, signals: Signals) -> Self {
        let refit = Arc::clone(&signals.objects.borrow());
        let namespace = refit.namespace().unwrap_or_default();
        Self {
            api: Api::namespaced(shared.client.clone(), &namespace),
            key: refit.full_name(),
            maps: ConfigMaps::new(
                Api::namespaced(shared.client.clone(), &namespace),
                shared.watch_failures.clone(),
            ),
            workloads: Reader::new(shared.client.clone()),
            gates: Gates::new(shared.client.clone()),
            events: Publisher::new(shared.recorder.clone()),
            trust: shared.trust.clone(),
            shared,
            signals,
            applied: None,
            accepted: None,
            memory: Memory::default(),
            status: refit.status.clone().unwrap_or_default(),
            aborted: None,
            written: None,
            written_at: None,
            failed: false,
        }
    }

    /// Runs until the object is deleted or the operator stops.
    pub(super) async fn run(mut self) {
        loop {
            let again = self.reconcile().await;
            if std::mem::take(&mut self.failed) {
                tokio::select! {
                    () = tokio::time::sleep(limits::RECONCILE_RETRY) => continue,
                    () = ended(&mut self.signals.objects) => break,
                }
            }
            let mut view = self.applied.as_ref().map(Applied::view);
            tokio::select! {
                changed = self.signals.objects.changed() => if changed.is_err() { break },
                () = self.signals.pods.notified() => {}
                () = self.maps.changed.notified() => self.accepted = None,
                Ok(()) = self.trust.changed() => {}
                () = changed(view.as_mut()) => tokio::time::sleep(limits::VIEW_INTERVAL).await,
                () = tokio::time::sleep_until(again) => {}
            }
        }
        if *self.signals.is_deleted.borrow() {
            let refit = Arc::clone(&self.signals.objects.borrow());
            let name = (refit.namespace().unwrap_or_default(), refit.name_any());
            self.shared.figures.forget((&name.0, &name.1), &refit.uid().unwrap_or_default());
            self.end().await;
        }
    }

    /// The agents of a deleted refit finish what must be finished, and leave.
    async fn end(self) {
        let Some(applied) = self.applied else { return };
        tracing::info!(refit = self.key, "deleted: its agents are drained");
        applied.coordinator().drain().await;
        let mut view = applied.view();
        let gone = view.wait_for(|view| view.agents.is_empty());
        // Those that are still there then find that there is no such refit.
        let _ = tokio::time::timeout(limits::DRAIN_LIMIT, gone).await;
    }

    /// Walks the steps; returns when to do it again if nothing happens.
    async fn reconcile(&mut self) -> Instant {
        let refit = Arc::clone(&self.signals.objects.borrow_and_update());
        self.adopt(&refit).await;
        let mut again = Instant::now() + limits::CONSENT_LIFETIME;
        let generation = refit.metadata.generation.unwrap_or_default();
        self.shared.pods.synced().await;
        let pods = self.shared.pods.of(&self.key);
        let namespace = refit.namespace().unwrap_or_default();
        if let Err(error) = self.workloads.read(&namespace, &refit.spec, &pods).await {
            tracing::warn!(refit = self.key, %error, "a workload does not say what it asks for");
            self.failed = true;
        }
        again = self.workloads.due().map_or(again, |due| again.min(due));
        let workloads = self.workloads.told(&namespace, &refit.spec);
        let is_trainer_done = is_trainer_done(&refit.spec, &pods, workloads.training.as_ref(), &self.status);
        if self.accepted.as_ref().is_none_or(|(of, _)| *of != generation) {
            self.maps.watch(named(&refit.spec));
            let accepted = self.accept(&refit, is_trainer_done).await;
            self.accepted = Some((generation, accepted));
        }
        if matches!(self.accepted, Some((_, Err(Unaccepted::Unreadable(_))))) {
            self.accepted = self.accepted.take().map(|(_, accepted)| (-1, accepted));
            self.failed = true;
        }
        self.publish_bundles(&pods).await;
        let consent = self.consent(&pods).await;
        if !consent.is_empty() {
            again = again.min(Instant::now() + limits::RECONCILE_RETRY);
        }
        if let Some(applied) = &mut self.applied {
            applied.trainer(is_trainer_done).await;
        }
        let seating = seat(&refit.spec, &pods);
        self.dismiss(&pods, &consent, &seating.errors).await;
        self.abort(&refit).await;
        let plan = match &mut self.applied {
            Some(applied) => applied.plan().await,
            None => None,
        };
        let is_settling = self.applied.as_ref().is_some_and(Applied::is_settling);
        if let Some(applied) = self.applied.as_ref().filter(|_| is_settling) {
            again = again.min(applied.settles_at());
        }
        let view = self.applied.as_ref().map(|applied| applied.view().borrow().clone());
        if let Some(view) = &view
            && let Some(at) = self.gates.write(due(&pods, view)).await
        {
            again = again.min(at);
        }
        let pod_name = pod_name(&self.shared.pods);
        let observed = Observed {
            namespace: &namespace,
            name: &refit.name_any(),
            generation,
            spec: &refit.spec,
            accepted: match &self.accepted {
                Some((_, accepted)) => accepted.as_ref().copied(),
                None => Ok(()),
            },
            consent: Some(&consent),
            pods: &pods,
            seating: &seating,
            workloads: &workloads,
            is_trainer_done,
            malformed: &self.shared.pods.malformed(&self.key),
            view: view.as_ref(),
            plan: plan.as_ref(),
            unwritten_gate: self.gates.trouble(),
            is_settling,
            pod_name: &*pod_name,
            previous: &self.status,
            now: Timestamp::now(),
        };
        let (next, at) = status(&observed, &mut self.memory);
        let uid = refit.uid().unwrap_or_default();
        self.shared.figures.tell((observed.namespace, observed.name), &uid, &next);
        if let Some(at) = at {
            let wait = Duration::try_from(at.duration_since(Timestamp::now())).unwrap_or_default();
            again = again.min(Instant::now() + wait);
        }
        self.write(&refit, next).await.map_or(again, |due| again.min(due))
    }

    /// What the object says of its status, unless it is older than what was written.
    async fn adopt(&mut self, refit: &WeightRefit) {
        let status = refit.status.clone().unwrap_or_default();
        let version: Option<u64> = refit.resource_version().and_then(|version| version.parse().ok());
        let is_older = matches!((version, self.written), (Some(version), Some(written)) if version < written);
        if is_older {
            return;
        }
        if status.membership != self.status.membership {
            let next = WeightRefitStatus { membership: status.membership.clone(), ..self.status.clone() };
            let news = happenings(&self.status, &next);
            self.events.publish(refit, news).await;
        }
        self.status = status;
    }

    /// The steps from the object to a coordinator that runs (B1).
    async fn accept(&mut self, refit: &Arc<WeightRefit>, is_trainer_done: bool) -> Result<(), Unaccepted> {
        let dereferenced = match dereference(&self.shared.client, Arc::clone(refit)).await {
            Ok(dereferenced) => dereferenced,
            Err(DereferenceError::Rejected(rejection)) => return Err(Unaccepted::Rejected(rejection)),
            Err(DereferenceError::Unreadable { name, source }) => {
                tracing::warn!(refit = self.key, config_map = name, error = %source, "cannot be read");
                let sentence = AcceptedReason::Unreadable.sentence();
                return Err(Unaccepted::Unreadable(format!(
                    "ConfigMap {name}: {sentence} It is asked again."
                )));
            }
        };
        let permit = self.shared.validations.acquire().await.expect("the semaphore is never closed");
        let validated = tokio::task::spawn_blocking(move || validate(dereferenced)).await;
        drop(permit);
        let validated = match validated {
            Ok(validated) => validated.map_err(Unaccepted::Rejected)?,
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        };
        let built = build(validated);
        self.applied = Some(match self.applied.take() {
            Some(applied) => applied.change(built, is_trainer_done).await,
            None => {
                let (server, pods) = (&self.shared.server, pod_name(&self.shared.pods));
                Applied::start(built, server, self.api.clone(), pods, is_trainer_done)
            }
        });
        Ok(())
    }

    /// Pods mount the authorities' certificates.
    async fn publish_bundles(&mut self, pods: &[Arc<PodFacts>]) {
        let namespaces: BTreeSet<&str> = pods.iter().map(|pod| pod.namespace.as_str()).collect();
        let pem = self.trust.borrow_and_update().bundle_pem();
        for namespace in namespaces {
            if let Err(error) = self.shared.bundles.give(namespace, &pem).await {
                tracing::warn!(%error, "pods cannot mount the authorities' certificates yet");
                self.failed = true;
            }
        }
    }

    /// Pods that may not take part.
    async fn consent(&self, pods: &[Arc<PodFacts>]) -> Vec<NoConsent> {
        let mut refused = Vec::new();
        for pod in pods.iter().filter(|pod| pod.is_present()) {
            refused.extend(self.shared.gate.consent(pod).await.err());
        }
        refused
    }

    /// Agents whose pod is gone, whose account has lost the right, or whose seats an older pod holds, leave (B3). Where
    /// the API server does not say, nothing changes.
    async fn dismiss(&self, pods: &[Arc<PodFacts>], consent: &[NoConsent], errors: &[SeatError]) {
        let Some(applied) = &self.applied else { return };
        let agents: BTreeSet<String> =
            applied.view().borrow().agents.values().map(|agent| agent.pod_uid.clone()).collect();
        for uid in agents {
            let why = match pods.iter().find(|pod| pod.uid == uid && pod.is_present()) {
                None => {
                    let why = format!("pod of uid {uid} is gone, is being deleted, or claims another refit");
                    Some(fault(Code::Unauthorized, why))
                }
                Some(pod) => {
                    let shown = pod.shown();
                    let refused = consent
                        .iter()
                        .find(|no| matches!(no, NoConsent::Refused { pod, .. } if *pod == shown));
                    let younger = errors
                        .iter()
                        .find(|error| matches!(error, SeatError::Duplicate { pod, .. } if *pod == shown));
                    let refused = refused.map(|no| fault(no.code(), no.to_string()));
                    refused.or_else(|| younger.map(|error| fault(error.code(), error.to_string())))
                }
            };
            let Some(why) = why else { continue };
            tracing::info!(refit = self.key, pod = uid, why = why.message, "dismissed");
            applied.coordinator().dismiss(uid, why).await;
        }
    }

    /// Ends the round that somebody wants aborted: the first one after the one that the annotation names.
    async fn abort(&mut self, refit: &WeightRefit) {
        let (Some(applied), Some(request)) = (&self.applied, refit.annotations().get(ABORT_ANNOTATION))
        else {
            return;
        };
        let after =
            request.split_once('/').and_then(|(epoch, id)| Some((epoch.parse().ok()?, id.parse().ok()?)));
        let ended = [&self.status.last_round, &self.status.last_failed_round].into_iter().flatten();
        // A new operator has heard of no round yet; the status has.
        let ended: Vec<(u64, u64)> = ended.map(|r| (r.epoch.unsigned_abs(), r.id.unsigned_abs())).collect();
        let is_due = after.is_some_and(|after| {
            !ended.iter().any(|round| round.0 == after.0 && round.1 > after.1)
                && runs_after(&applied.view().borrow(), after)
        });
        if is_due && self.aborted.as_ref() != Some(request) {
            tracing::info!(refit = self.key, request, "round is aborted");
            applied.coordinator().cancel().await;
            self.aborted = Some(request.clone());
        }
    }

    /// Writes the status, if it is time; else returns when it will be.
    async fn write(&mut self, refit: &WeightRefit, next: WeightRefitStatus) -> Option<Instant> {
        let reconciles = self.shared.reconciles.clone();
        let count = |outcome: &str| reconciles.with_label_values(&[outcome]).inc();
        let due = match urgency(&self.status, &next) {
            Urgency::Same => {
                count("unchanged");
                return None;
            }
            Urgency::Now => None,
            Urgency::Later => self.written_at.map(|at| at + limits::STATUS_INTERVAL),
        };
        if let Some(due) = due.filter(|due| *due > Instant::now()) {
            count("deferred");
            return Some(due);
        }
        let (name, uid) = (refit.name_any(), refit.uid().unwrap_or_default());
        let written = match update_status(&self.api, &name, &uid, &self.status, &next).await {
            Ok(written) => written,
            Err(error) => {
                tracing::warn!(refit = self.key, %error, "status is not written");
                count("failed");
                self.failed = true;
                return None;
            }
        };
        count("written");
        let news = happenings(&self.status, &next);
        self.written = written.resource_version().and_then(|version| version.parse().ok());
        self.written_at = Some(Instant::now());
        self.status = written.status.unwrap_or_default();
        self.events.publish(refit, news).await;
        None
    }
}

/// Whether a round of this epoch runs, and none has ended in it after the one of this number.
fn runs_after(view: &View, (epoch, id): (u64, u64)) -> bool {
    let is_current = view.membership.as_ref().is_some_and(|membership| membership.epoch() == Epoch(epoch));
    let last = view.last_round.as_ref().map(|round| &round.report).filter(|report| report.epoch == epoch);
    let is_open = view.agents.values().any(|agent| agent.state.round_open);
    is_current && is_open && last.is_none_or(|report| report.id <= id)
}

/// Names pods by their UID.
fn pod_name(pods: &Arc<Pods>) -> Arc<PodName> {
    let pods = Arc::clone(pods);
    Arc::new(move |uid| pods.by_uid(uid).map(|pod| pod.shown()))
}

/// Ends when the object is deleted or the operator stops, however often the object changes before.
async fn ended(objects: &mut Receiver<Arc<WeightRefit>>) {
    while objects.changed().await.is_ok() {}
}

async fn changed(view: Option<&mut Receiver<View>>) {
    if let Some(view) = view
        && view.changed().await.is_ok()
    {
        return;
    }
    std::future::pending().await
}

/// The ConfigMaps that a refit names, each watched by name.
struct ConfigMaps {
    api: Api<ConfigMap>,
    names: BTreeSet<String>,
    changed: Arc<Notify>,
    failures: IntCounterVec,
    /// Ended with this.
    watches: JoinSet<()>,
}

impl ConfigMaps {
    fn new(api: Api<ConfigMap>, failures: IntCounterVec) -> Self {
        Self { api, names: BTreeSet::new(), changed: Arc::default(), failures, watches: JoinSet::new() }
    }

    fn watch(&mut self, names: BTreeSet<&str>) {
        if self.names.iter().map(String::as_str).eq(names.iter().copied()) {
            return;
        }
        self.watches.abort_all();
        for name in &names {
            let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
            let events = watch(self.api.clone(), config, &self.failures);
            let changed = Arc::clone(&self.changed);
            self.watches.spawn(async move {
                let mut events = pin!(events);
                let mut known: Option<Option<String>> = None;
                let mut listed = None;
                while let Some(event) = events.next().await {
                    let now = match event {
                        Event::Init => {
                            listed = None;
                            continue;
                        }
                        Event::InitApply(map) => {
                            listed = map.resource_version();
                            continue;
                        }
                        Event::InitDone => listed.take(),
                        Event::Apply(map) => map.resource_version(),
                        Event::Delete(_) => None,
                    };
                    if known.replace(now.clone()) != Some(now) {
                        changed.notify_one();
                    }
                }
            });
        }
        self.names = names.into_iter().map(str::to_owned).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordinator::{AgentView, EndedRound};
    use std::collections::BTreeMap;
    use std::time::UNIX_EPOCH;
    use weightrefit_core::id::{Incarnation, Rank, Sha256};
    use weightrefit_core::membership::roster::Standing;
    use weightrefit_core::membership::{Member, Membership, Seat};
    use weightrefit_proto::v1;

    /// Epoch 2 is in force; whether a round is open, and epoch and number of the last that has ended.
    fn view(round_open: bool, last: Option<(u64, u64)>) -> View {
        let member = Member {
            seat: Seat::Training { rank: Rank(0) },
            pod_uid: "uid".into(),
            incarnation: Incarnation(1),
            key: Sha256([0; 32]),
            round_addresses: vec!["127.0.0.1:1".into()],
            byte_addresses: vec!["127.0.0.1:2".into()],
        };
        let membership = Membership::new("uid", Epoch(2), None, Vec::new(), vec![member]).expect("valid");
        let state = v1::State { round_open, ..Default::default() };
        let report = |(epoch, id): (u64, u64)| {
            let json = serde_json::json!({
                "id": id, "epoch": epoch, "version": {"run": 0, "step": 1}, "outcome": "Committed", "reason": null,
                "member": null, "phaseMilliseconds": {}, "bytes": {"sent": 0, "received": 0, "skipped": 0},
                "replicas": [],
            });
            let report = serde_json::from_value(json).expect("a report");
            Arc::new(EndedRound { report, heard: UNIX_EPOCH })
        };
        View {
            membership: Some(Arc::new(membership)),
            cause: None,
            standing: Standing::Complete,
            agents: BTreeMap::from([(Incarnation(1), AgentView { state, ..AgentView::default() })]),
            last_round: last.map(report),
            last_failed_round: None,
            refused: BTreeMap::new(),
        }
    }

    #[test]
    fn the_round_after_the_one_that_is_named_is_aborted_and_no_later_one() {
        let after = (2, 7);
        for (round_open, last, named, runs) in [
            (true, None, after, true),
            (true, Some((2, 7)), after, true),
            (true, Some((1, 9)), after, true), // numbers begin anew with each epoch
            (true, Some((2, 8)), after, false),
            (false, Some((2, 7)), after, false),
            (true, Some((2, 7)), (1, 7), false),
        ] {
            let view = view(round_open, last);
            assert_eq!(runs_after(&view, named), runs, "{round_open} {last:?} {named:?}");
        }
        assert!(!runs_after(&View { membership: None, ..view(true, None) }, after));
    }
}
