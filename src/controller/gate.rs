//! The coordinator's gate in a cluster: the API server says which pod a token is bound to, the refit says which
//! seats that pod may hold, and RBAC of the refit's namespace says whether its account may hold any.
//!
//! Invariants:
//! - G1: nothing of the request is believed: pod, account and node are what the token review says, and labels and
//!   deletion what the API server says of that pod.
//! - G2: an answer that could not be got refuses for now, never for ever and never in favour.

use super::consent::{Consent, NoConsent};
use super::pod::Pod;
use super::pod_facts::PodFacts;
use super::pods::Pods;
use super::refits::Refits;
use super::seats::{self, Allowed};
use crate::api::refit::WeightRefit;
use crate::coordinator::{Admitted, Gate, fault};
use crate::limits;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus, UserInfo};
use kube::api::PostParams;
use kube::{Api, Client};
use std::sync::Arc;
use tokio::sync::Semaphore;
use weightrefit_core::code::Code;
use weightrefit_core::membership::Seat;
use weightrefit_proto::v1;

/// Audience of enrolment tokens where none is configured. One of each cluster is safer: then a token of one cluster
/// is worth nothing in another that trusts the same issuer.
pub const DEFAULT_AUDIENCE: &str = "weightrefit.dev";

/// Trusts what the API server says. Shared by the coordinator's streams and the controller.
pub struct ClusterGate {
    client: Client,
    pods: Arc<Pods>,
    refits: Refits,
    audience: String,
    consent: Consent,
    /// Anybody who reaches the port can make us ask; this many questions of agents are open at once.
    reviews: Semaphore,
}

/// What a token review says about its bearer.
#[derive(Debug)]
struct Bearer {
    namespace: String,
    account: String,
    pod: String,
    /// Absent where the token was made before the pod had a node.
    node: Option<String>,
}

impl ClusterGate {
    /// A gate for tokens of `audience`, pods that `pods` knows, and `refits` as the controller's watch has them.
    #[must_use]
    pub fn new(client: Client, pods: Arc<Pods>, refits: Refits, audience: String) -> Self {
        let consent = Consent::new(client.clone());
        Self { client, pods, refits, audience, consent, reviews: Semaphore::new(limits::TOKEN_REVIEWS_MAX) }
    }

    /// Whether the account of the pod may take part in the refit that the pod claims.
    ///
    /// # Errors
    /// It may not, or the API server did not say.
    pub async fn consent(&self, pod: &PodFacts) -> Result<(), NoConsent> {
        self.consent.of(pod).await
    }

    /// The pod, if it may be of this refit as far as its labels say, and the refit.
    fn claimed(&self, refit: &str, pod_uid: &str) -> Result<(Arc<PodFacts>, Arc<WeightRefit>), v1::Fault> {
        let facts = self.pods.by_uid(pod_uid).ok_or_else(|| {
            let text = format!("no pod of uid {pod_uid} is known to claim a refit");
            fault(Code::NotConfigured, text)
        })?;
        let pod = facts.shown();
        if facts.deleting || facts.is_over() {
            return Err(fault(Code::Unauthorized, format!("pod {pod} is being deleted or has ended")));
        }
        if facts.refit != refit {
            let text = format!("pod {pod} claims refit {} by its labels, not the one announced", facts.refit);
            return Err(fault(Code::Unauthorized, text));
        }
        let resource = self.refits.get(refit).ok_or_else(|| {
            let why = match self.pods.scope().has(facts.refit_parts().0) {
                true => "which does not exist",
                false => "of a namespace that this operator does not look at",
            };
            fault(Code::NotConfigured, format!("pod {pod} claims refit {refit}, {why}"))
        })?;
        Ok((facts, resource))
    }

    async fn review(&self, token: &str) -> Result<TokenReviewStatus, v1::Fault> {
        let spec = TokenReviewSpec { token: token.to_owned(), audiences: Some(vec![self.audience.clone()]) };
        let review = TokenReview { spec, ..TokenReview::default() };
        let _permit = self.reviews.acquire().await.expect("the semaphore is never closed");
        let api = Api::<TokenReview>::all(self.client.clone());
        let parameters = PostParams::default();
        let answer = api.create(&parameters, &review).await;
        let review = answer.map_err(|error| unanswered("the review of the token", &error))?;
        Ok(review.status.unwrap_or_default())
    }

    /// The facts of the bearer's pod: as watched, or read once where the watch has not told of it yet.
    async fn pod_of(&self, bearer: &Bearer, uid: &str) -> Result<Arc<PodFacts>, v1::Fault> {
        if let Some(facts) = self.pods.by_uid(uid) {
            return Ok(facts);
        }
        if !self.pods.scope().has(&bearer.namespace) {
            let (pod, namespace) = (&bearer.pod, &bearer.namespace);
            let text = format!("pod {namespace}/{pod} is of a namespace that this operator does not look at");
            return Err(fault(Code::NotConfigured, text));
        }
        let api = Api::<Pod>::namespaced(self.client.clone(), &bearer.namespace);
        let pod = api.get_opt(&bearer.pod).await;
        let pod = pod.map_err(|error| unanswered("the look-up of the pod", &error))?;
        let pod = pod.filter(|pod| pod.metadata.uid.as_deref() == Some(uid)).ok_or_else(|| {
            unauthenticated(format!("pod {}/{} of uid {uid} is gone", bearer.namespace, bearer.pod))
        })?;
        PodFacts::of(&pod).map(Arc::new).map_err(|malformed| fault(Code::Unauthorized, malformed.to_string()))
    }
}

/// Of one gate many streams ask, and the controller.
impl Gate for Arc<ClusterGate> {
    async fn enrol(&self, pod_uid: &str, token: &str) -> Result<(), v1::Fault> {
        if token.is_empty() || token.len() > limits::ENROLMENT_TOKEN_BYTES_MAX {
            let (length, max) = (token.len(), limits::ENROLMENT_TOKEN_BYTES_MAX);
            return Err(unauthenticated(format!("token has {length} bytes, 1 to {max} are possible")));
        }
        let status = self.review(token).await?;
        let bearer = bearer(status, &self.audience, pod_uid)?;
        let facts = self.pod_of(&bearer, pod_uid).await?;
        bearer.check(&facts)
    }

    async fn seats(&self, refit: &str, pod_uid: &str) -> Result<Vec<Seat>, v1::Fault> {
        let (facts, resource) = self.claimed(refit, pod_uid)?;
        match seats::allowed(&resource.spec, &facts) {
            Ok(Allowed::Exactly(seats)) => Ok(seats),
            Ok(Allowed::Announced(_)) => {
                let text = format!("refit {refit} leaves the ranks of pod {} to its agent", facts.shown());
                Err(fault(Code::Unsupported, text))
            }
            Err(error) => Err(fault(error.code(), error.to_string())),
        }
    }

    async fn admit(&self, refit: &str, pod_uid: &str, seats: &[Seat]) -> Result<Admitted, v1::Fault> {
        let (facts, resource) = self.claimed(refit, pod_uid)?;
        seats::allowed(&resource.spec, &facts)
            .and_then(|allowed| allowed.check(&facts, seats))
            .and_then(|()| seats::check_rivals(&resource.spec, &facts, &self.pods.of(refit)))
            .map_err(|error| fault(error.code(), error.to_string()))?;
        self.consent(&facts).await.map_err(|error| fault(error.code(), error.to_string()))?;
        Ok(Admitted { pod: facts.shown(), created_s: facts.created_s() })
    }

    fn refit_of(&self, pod_uid: &str) -> Option<String> {
        self.pods.by_uid(pod_uid).map(|facts| facts.refit.clone())
    }

    /// The API server is asked, since a watch may be late; but only where the watch does not know the refit either.
    async fn is_gone(&self, refit: &str) -> bool {
        let is_listed = tokio::select! {
            biased;
            listed = self.refits.listed() => listed,
            () = std::future::ready(()) => false,
        };
        let Some((namespace, name)) = refit.split_once('/').filter(|_| is_listed) else { return false };
        if self.refits.get(refit).is_some() {
            return false;
        }
        let _permit = self.reviews.acquire().await.expect("the semaphore is never closed");
        // Its metadata alone, which any version of the resource has.
        let api = Api::<WeightRefit>::namespaced(self.client.clone(), namespace);
        matches!(api.get_metadata_opt(name).await, Ok(None))
    }
}

/// Who the bearer is, if its token is for us and bound to that very pod.
fn bearer(status: TokenReviewStatus, audience: &str, pod_uid: &str) -> Result<Bearer, v1::Fault> {
    if status.authenticated != Some(true) {
        let why = status.error.unwrap_or_default();
        let why: String = why.chars().take(200).collect();
        return Err(unauthenticated(format!(
            "token of pod {pod_uid} is not valid for audience {audience}: {why}"
        )));
    }
    if !status.audiences.iter().flatten().any(|own| own == audience) {
        return Err(unauthenticated(format!("token of pod {pod_uid} is not for audience {audience}")));
    }
    let user = status.user.unwrap_or_default();
    let name = user.username.clone().unwrap_or_default();
    let account = name.strip_prefix("system:serviceaccount:").and_then(|name| name.split_once(':'));
    let Some((namespace, account)) = account else {
        return Err(unauthenticated(format!(
            "token of pod {pod_uid} is of `{name}`, not of a service account"
        )));
    };
    let (Some(uid), Some(pod)) = (extra(&user, "pod-uid"), extra(&user, "pod-name")) else {
        return Err(unauthenticated(format!("token of account {namespace}:{account} is not bound to a pod")));
    };
    if uid != pod_uid {
        let text = format!("token is bound to pod {namespace}/{pod} of uid {uid}, not {pod_uid}");
        return Err(unauthenticated(text));
    }
    Ok(Bearer {
        namespace: namespace.to_owned(),
        account: account.to_owned(),
        pod: pod.to_owned(),
        node: extra(&user, "node-name").map(str::to_owned),
    })
}

impl Bearer {
    /// Whether the pod is still what the token was made for.
    fn check(&self, facts: &PodFacts) -> Result<(), v1::Fault> {
        let pod = facts.shown();
        let is_bound = facts.namespace == self.namespace && facts.name == self.pod;
        if !is_bound || facts.service_account != self.account {
            let text = format!(
                "pod {pod} runs as account {}, the token is of {}:{}",
                facts.service_account, self.namespace, self.account
            );
            return Err(unauthenticated(text));
        }
        if let (Some(bound), Some(node)) = (&self.node, &facts.node)
            && bound != node
        {
            return Err(unauthenticated(format!("pod {pod} is on node {node}, the token is for {bound}")));
        }
        match facts.deleting {
            true => Err(unauthenticated(format!("pod {pod} is being deleted"))),
            false => Ok(()),
        }
    }
}

fn extra<'a>(user: &'a UserInfo, key: &str) -> Option<&'a str> {
    match user.extra.as_ref()?.get(&format!("authentication.kubernetes.io/{key}"))?.as_slice() {
        [one] if !one.is_empty() => Some(one),
        _ => None,
    }
}

fn unauthenticated(text: String) -> v1::Fault {
    fault(Code::Unauthenticated, text)
}

/// G2: whoever asks may ask again.
fn unanswered(what: &str, error: &kube::Error) -> v1::Fault {
    tracing::warn!(what, %error, "no answer of the API server");
    fault(Code::Busy, format!("there is no answer to {what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// What a review says of a good token, with one part changed, and what is said of it then.
    #[test]
    fn a_token_is_for_us_and_bound_to_the_pod_that_shows_it() {
        let good = || {
            json!({
                "authenticated": true,
                "audiences": ["weightrefit.dev"],
                "user": {
                    "username": "system:serviceaccount:rl:trainer",
                    "extra": {
                        "authentication.kubernetes.io/pod-name": ["trainer-0"],
                        "authentication.kubernetes.io/pod-uid": ["uid"],
                        "authentication.kubernetes.io/node-name": ["node-1"],
                    },
                },
            })
        };
        let read = |status| serde_json::from_value::<TokenReviewStatus>(status).expect("a status");
        let extra = "/user/extra/authentication.kubernetes.io~1";
        let of = bearer(read(good()), "weightrefit.dev", "uid").expect("a good token");
        assert_eq!(
            (of.namespace.as_str(), of.account.as_str(), of.pod.as_str()),
            ("rl", "trainer", "trainer-0")
        );
        for (at, value, want) in [
            ("/authenticated", json!(false), "is not valid for audience"),
            ("/audiences", json!(["https://kubernetes.default.svc"]), "is not for audience"),
            ("/audiences", json!([]), "is not for audience"),
            ("/user/username", json!("admin"), "is of `admin`, not of a service account"),
            (&format!("{extra}pod-uid"), json!([]), "is not bound to a pod"),
            (&format!("{extra}pod-uid"), json!(["uid", "other"]), "is not bound to a pod"),
            (&format!("{extra}pod-uid"), json!(["other"]), "token is bound to pod rl/trainer-0 of uid other"),
        ] {
            let mut status = good();
            *status.pointer_mut(at).expect(at) = value;
            let fault = bearer(read(status), "weightrefit.dev", "uid").expect_err(want);
            assert!(fault.code == "Unauthenticated" && fault.message.contains(want), "{}", fault.message);
        }
    }

    /// Makes the pod another than it was.
    type Change = fn(&mut PodFacts);

    #[test]
    fn a_pod_is_still_what_its_token_was_made_for() {
        let check = |change: Change| {
            let pod = json!({
                "metadata": {
                    "namespace": "rl", "name": "trainer-0", "uid": "uid",
                    "labels": {"weightrefit.dev/refit": "tiny", "weightrefit.dev/side": "training"},
                },
                "spec": {"serviceAccountName": "trainer", "nodeName": "node-1"},
            });
            let pod: Pod = serde_json::from_value(pod).expect("a pod");
            let mut facts = PodFacts::of(&pod).expect("well formed");
            change(&mut facts);
            let word = str::to_owned;
            let bearer = Bearer {
                namespace: word("rl"),
                account: word("trainer"),
                pod: word("trainer-0"),
                node: Some(word("node-1")),
            };
            bearer.check(&facts).err().map(|fault| fault.message)
        };
        assert_eq!(check(|_| {}), None);
        assert_eq!(check(|pod| pod.node = None), None, "it has no node yet");
        let rows: [(Change, &str); 5] = [
            (|pod| pod.service_account = "other".into(), "runs as account other, the token is of rl:trainer"),
            (|pod| pod.name = "trainer-1".into(), "pod rl/trainer-1 runs as account trainer"),
            (|pod| pod.namespace = "serve".into(), "pod serve/trainer-0 runs as account trainer"),
            (|pod| pod.node = Some("node-2".into()), "is on node node-2, the token is for node-1"),
            (|pod| pod.deleting = true, "is being deleted"),
        ];
        for (change, want) in rows {
            let said = check(change).expect(want);
            assert!(said.contains(want), "{said}");
        }
    }
}
