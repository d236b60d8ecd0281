//! Fourth step: the coordinator of an accepted refit is started, or told of a change.

use super::build::Built;
use super::record::{PodName, StatusRecord};
use crate::api::refit::WeightRefit;
use crate::api::resolve::ResolvedRefit;
use crate::api::status::PlanStatus;
use crate::controller::record::counter;
use crate::coordinator::{Coordinator, EpochRecord, Server, Settings, View};
use crate::limits;
use kube::Api;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::time::Instant;
use weightrefit_core::id::Epoch;
use weightrefit_core::membership::Membership;

/// What is coordinated: proof for the status that a coordinator runs.
pub struct Applied {
    coordinator: Coordinator,
    view: watch::Receiver<View>,
    settings: Settings,
    resolved: Arc<ResolvedRefit>,
    /// Ranks of the training world, whether or not it has finished.
    training_ranks: u32,
    started: Instant,
    /// Whether there was a membership before: then agents that have one dial again.
    goes_on: bool,
    plan: Option<(Epoch, PlanStatus)>,
}

impl Applied {
    /// Starts the coordinator.
    #[must_use]
    pub fn start(
        built: Built,
        server: &Server,
        api: Api<WeightRefit>,
        pods: Arc<PodName>,
        is_trainer_done: bool,
    ) -> Self {
        let Built { refit, resolved, mut settings } = built;
        let training_ranks = settings.spec.training_ranks;
        if is_trainer_done {
            settings.spec.training_ranks = 0;
        }
        let record = StatusRecord::new(api, &refit, pods);
        let goes_on = record.recorded().is_some();
        let coordinator = server.coordinate(settings.clone(), record);
        let view = coordinator.view();
        let (started, plan) = (Instant::now(), None);
        Self { coordinator, view, settings, resolved, training_ranks, started, goes_on, plan }
    }

    /// Tells the coordinator what has changed, if anything has.
    #[must_use]
    pub async fn change(mut self, built: Built, is_trainer_done: bool) -> Self {
        let Built { refit: _, resolved, mut settings } = built;
        self.training_ranks = settings.spec.training_ranks;
        if is_trainer_done {
            settings.spec.training_ranks = 0;
        }
        if settings.spec != self.settings.spec {
            (self.settings, self.resolved) = (settings, resolved);
            self.respec().await;
        }
        self
    }

    /// A trainer that has finished is no member any more; one that begins anew is.
    pub async fn trainer(&mut self, is_done: bool) {
        let ranks = if is_done { 0 } else { self.training_ranks };
        if std::mem::replace(&mut self.settings.spec.training_ranks, ranks) != ranks {
            tracing::info!(refit = self.settings.refit, is_done, "trainer");
            self.respec().await;
        }
    }

    async fn respec(&mut self) {
        self.plan = None;
        self.coordinator.respec(self.settings.spec.clone(), self.settings.resolved.clone()).await;
    }

    /// What the coordinator knows.
    #[must_use]
    pub fn view(&self) -> watch::Receiver<View> {
        self.view.clone()
    }

    /// The coordinator.
    #[must_use]
    pub fn coordinator(&self) -> &Coordinator {
        &self.coordinator
    }

    /// Whether agents of before may not have dialled again yet.
    #[must_use]
    pub fn is_settling(&self) -> bool {
        let view = self.view.borrow();
        let is_whole = view.membership.as_ref().is_some_and(|membership| {
            membership.members().iter().all(|member| view.agents.contains_key(&member.incarnation))
        });
        self.goes_on && !is_whole && self.started.elapsed() < limits::SETTLE
    }

    /// When [`Self::is_settling`] ends at the latest.
    #[must_use]
    pub fn settles_at(&self) -> Instant {
        self.started + limits::SETTLE
    }

    /// What the plan of the membership in force moves, once all its members have made the same.
    pub async fn plan(&mut self) -> Option<PlanStatus> {
        let (membership, digest) = agreed(&self.view.borrow())?;
        if let Some((_, plan)) = self.plan.as_ref().filter(|(epoch, _)| *epoch == membership.epoch()) {
            return Some(plan.clone());
        }
        let (resolved, epoch) = (Arc::clone(&self.resolved), membership.epoch());
        let bytes = tokio::task::spawn_blocking(move || {
            let names = |pool: usize| names(&membership, pool);
            resolved.plan_of(names).map(|plan| plan.summarize().bytes)
        });
        let bytes = match bytes.await {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(error)) => {
                tracing::error!(refit = self.settings.refit, %error, "members have a plan, and there is none");
                return None;
            }
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        let plan = PlanStatus {
            digest,
            bytes_minimum: counter(bytes.minimum),
            bytes_planned: counter(bytes.planned),
            bytes_cross_fabric: counter(bytes.cross_fabric),
        };
        self.plan = Some((epoch, plan.clone()));
        Some(plan)
    }
}

/// The membership in force and the digest of its plan, where all members have accepted it and made the same.
fn agreed(view: &View) -> Option<(Arc<Membership>, String)> {
    let membership = view.membership.as_ref()?;
    let mut digests = membership.members().iter().map(|member| {
        let agent = view.agents.get(&member.incarnation)?;
        agent.plan_digest.as_ref().filter(|_| agent.accepted == Some(membership.epoch()))
    });
    let first = digests.next()??;
    digests.all(|digest| digest == Some(first)).then(|| (Arc::clone(membership), first.clone()))
}

/// Names of the replicas of the pool of this index.
fn names(membership: &Membership, pool: usize) -> Vec<String> {
    let of_pool = |replica: &weightrefit_core::membership::Replica| replica.pool as usize == pool;
    membership.replicas().into_iter().filter(of_pool).map(|replica| replica.name).collect()
}
