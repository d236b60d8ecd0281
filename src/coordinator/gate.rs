//! Who may enrol, and what a pod may be.

use super::wire::fault;
use crate::identity::Tokens;
use std::future::Future;
use std::sync::Arc;
use weightrefit_core::code::Code;
use weightrefit_core::membership::Seat;
use weightrefit_proto::v1;

/// A pod that may hold what its agent announces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admitted {
    /// Its name, for messages.
    pub pod: String,
    /// When it was created, in seconds: the older of two pods holds a seat.
    pub created_s: i64,
}

/// The coordinator's only source of trust in pods (C2).
pub trait Gate: Send + Sync + 'static {
    /// Whether the bearer of `token` is the pod `pod_uid`.
    ///
    /// # Errors
    /// What the agent is told.
    fn enrol(&self, pod_uid: &str, token: &str) -> impl Future<Output = Result<(), v1::Fault>> + Send;

    /// The ranks that `refit` (namespace/name) gives the pod.
    ///
    /// # Errors
    /// What the agent is told.
    fn seats(&self, refit: &str, pod_uid: &str) -> impl Future<Output = Result<Vec<Seat>, v1::Fault>> + Send;

    /// Whether the pod may hold these ranks of `refit` (namespace/name) now.
    ///
    /// # Errors
    /// What the agent is told.
    fn admit(
        &self,
        refit: &str,
        pod_uid: &str,
        seats: &[Seat],
    ) -> impl Future<Output = Result<Admitted, v1::Fault>> + Send;

    /// The refit (namespace/name) that the pod belongs to, whatever its agent announces; `None` where only agents say.
    fn refit_of(&self, pod_uid: &str) -> Option<String>;

    /// Whether `refit` (namespace/name) does not exist, for certain: that nobody coordinates it yet is not enough.
    fn is_gone(&self, refit: &str) -> impl Future<Output = bool> + Send;
}

/// Without Kubernetes whoever holds a pod's one-time token is that pod, and was started as what it claims.
impl Gate for Arc<Tokens> {
    async fn enrol(&self, pod_uid: &str, token: &str) -> Result<(), v1::Fault> {
        if self.redeem(pod_uid, token) {
            return Ok(());
        }
        Err(fault(Code::Unauthenticated, format!("token is not the unused one of pod {pod_uid}")))
    }

    async fn seats(&self, _: &str, pod_uid: &str) -> Result<Vec<Seat>, v1::Fault> {
        let text =
            format!("agent of pod {pod_uid} was started without --claim, and nothing else tells its ranks");
        Err(fault(Code::Unsupported, text))
    }

    async fn admit(&self, _: &str, pod_uid: &str, _: &[Seat]) -> Result<Admitted, v1::Fault> {
        Ok(Admitted { pod: pod_uid.to_owned(), created_s: 0 })
    }

    fn refit_of(&self, _: &str) -> Option<String> {
        None
    }

    /// A run lasts as long as its coordinator.
    async fn is_gone(&self, _: &str) -> bool {
        false
    }
}
