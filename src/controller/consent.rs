//! Whether the namespace of a refit lets a pod's service account take part: the virtual verbs `publish` and
//! `receive` on that very refit, as RBAC has them.
//!
//! Invariants:
//! - N1: each question has one review in flight, and its answer is used until it is stale.
//! - N2: an answer that could not be got is no consent.

use super::pod_facts::{PodFacts, Side};
use crate::limits;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use weightrefit_core::code::Code;

/// The pod's account may not take part.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoConsent {
    /// RBAC does not let it.
    #[error("service account {} of pod {pod} may not {} weights of {}; to let it, run: {}", question.account(), question.verb(), question.refit, question.command())]
    Refused {
        /// namespace/name.
        pod: String,
        /// What was asked.
        question: Box<Question>,
    },
    /// The API server did not say.
    #[error("cannot tell whether pod {pod} may take part: {why}")]
    Unknown {
        /// namespace/name.
        pod: String,
        /// What happened instead.
        why: String,
    },
}

impl NoConsent {
    /// The stable code.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::Refused { .. } => Code::Unauthorized,
            Self::Unknown { .. } => Code::Busy,
        }
    }
}

/// Whether an account may take part in a refit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Question {
    namespace: String,
    service_account: String,
    refit: String,
    side: Side,
}

impl Question {
    /// Of the account of a pod, about the refit that it claims.
    #[must_use]
    pub fn of(pod: &PodFacts) -> Self {
        Self {
            namespace: pod.namespace.clone(),
            service_account: pod.service_account.clone(),
            refit: pod.refit.clone(),
            side: pod.side,
        }
    }

    /// The account as `kubectl --serviceaccount` names it.
    #[must_use]
    pub fn account(&self) -> String {
        format!("{}:{}", self.namespace, self.service_account)
    }

    /// The virtual verb.
    #[must_use]
    pub const fn verb(&self) -> &'static str {
        match self.side {
            Side::Training => "publish",
            Side::Inference => "receive",
        }
    }

    /// What an administrator runs to let the account take part. Each account gets a role of its own, so that the
    /// command never meets one that exists.
    #[must_use]
    pub fn command(&self) -> String {
        let (namespace, refit) = self.refit_parts();
        let (verb, account) = (self.verb(), self.account());
        let role = format!("{refit}:{verb}:{account}");
        format!(
            "kubectl create role {role} -n {namespace} --verb={verb} \
             --resource=weightrefits.weightrefit.dev --resource-name={refit} && \
             kubectl create rolebinding {role} -n {namespace} --role={role} --serviceaccount={account}"
        )
    }

    /// What the API server says now.
    ///
    /// # Errors
    /// It does not say.
    pub async fn ask(&self, client: &Client) -> kube::Result<bool> {
        let api = Api::<SubjectAccessReview>::all(client.clone());
        let answer = api.create(&PostParams::default(), &self.review()).await?;
        Ok(answer.status.is_some_and(|status| status.allowed && status.denied != Some(true)))
    }

    fn refit_parts(&self) -> (&str, &str) {
        self.refit.split_once('/').expect("facts name a refit by two parts")
    }

    fn review(&self) -> SubjectAccessReview {
        let (namespace, refit) = self.refit_parts();
        let groups = vec![
            "system:serviceaccounts".to_owned(),
            format!("system:serviceaccounts:{}", self.namespace),
            "system:authenticated".to_owned(),
        ];
        let resource = ResourceAttributes {
            group: Some("weightrefit.dev".to_owned()),
            resource: Some("weightrefits".to_owned()),
            verb: Some(self.verb().to_owned()),
            namespace: Some(namespace.to_owned()),
            name: Some(refit.to_owned()),
            ..ResourceAttributes::default()
        };
        let spec = SubjectAccessReviewSpec {
            user: Some(format!("system:serviceaccount:{}", self.account())),
            groups: Some(groups),
            resource_attributes: Some(resource),
            ..SubjectAccessReviewSpec::default()
        };
        SubjectAccessReview { spec, ..SubjectAccessReview::default() }
    }
}

/// Asks and remembers for a short time.
pub(super) struct Consent {
    client: Client,
    asked: Mutex<BTreeMap<Question, Arc<tokio::sync::Mutex<Option<Answer>>>>>,
}

#[derive(Clone)]
struct Answer {
    at: Instant,
    is_allowed: Result<bool, String>,
}

impl Answer {
    fn is_fresh(&self) -> bool {
        self.at.elapsed() < self.lifetime()
    }

    fn lifetime(&self) -> Duration {
        match self.is_allowed {
            Ok(true) => limits::CONSENT_LIFETIME,
            Ok(false) | Err(_) => limits::NO_CONSENT_LIFETIME,
        }
    }
}

impl Consent {
    pub(super) fn new(client: Client) -> Self {
        Self { client, asked: Mutex::default() }
    }

    pub(super) async fn of(&self, pod: &PodFacts) -> Result<(), NoConsent> {
        let question = Question::of(pod);
        let slot = self.slot(&question);
        let mut slot = slot.lock().await; // N1
        let answer = match slot.take().filter(Answer::is_fresh) {
            Some(answer) => answer,
            None => self.ask(&question).await,
        };
        *slot = Some(answer.clone());
        match answer.is_allowed {
            Ok(true) => Ok(()),
            Ok(false) => Err(NoConsent::Refused { pod: pod.shown(), question: Box::new(question) }),
            Err(why) => Err(NoConsent::Unknown { pod: pod.shown(), why }),
        }
    }

    fn slot(&self, question: &Question) -> Arc<tokio::sync::Mutex<Option<Answer>>> {
        let mut asked = self.asked.lock().expect("no holder of this lock panics");
        if asked.len() >= limits::CONSENTS_MAX && !asked.contains_key(question) {
            // Those in use are locked; all others are asked again when needed.
            asked.retain(|_, slot| slot.try_lock().is_err());
        }
        Arc::clone(asked.entry(question.clone()).or_default())
    }

    async fn ask(&self, question: &Question) -> Answer {
        let answer = question.ask(&self.client).await;
        let is_allowed = answer.map_err(|error| format!("there is no answer to the access review: {error}"));
        Answer { at: Instant::now(), is_allowed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::pod::Pod;
    use serde_json::json;

    /// N2
    #[tokio::test]
    async fn an_api_server_that_does_not_answer_permits_nobody() {
        let nowhere = kube::Config::new("http://127.0.0.1:1".parse().expect("a URL"));
        let consent = Consent::new(Client::try_from(nowhere).expect("a client"));
        let labels = json!({"weightrefit.dev/refit": "tiny", "weightrefit.dev/side": "inference"});
        let metadata = json!({"namespace": "rl", "name": "engine-0", "uid": "uid", "labels": labels});
        let pod: Pod = serde_json::from_value(json!({"metadata": metadata, "spec": {}})).expect("a pod");
        let answer = consent.of(&PodFacts::of(&pod).expect("well formed")).await;
        assert!(matches!(&answer, Err(NoConsent::Unknown { pod, .. }) if pod == "rl/engine-0"), "{answer:?}");
    }
}
