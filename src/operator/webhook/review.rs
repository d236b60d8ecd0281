//! One question of the API server and its answer.

use crate::injection::{Settings, inject};
use crate::limits;
use crate::operator::telemetry::Metrics;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// The webhook's paths.
pub(super) fn router(settings: Settings, metrics: &Metrics) -> Router {
    Router::new()
        .route("/mutate", post(mutate))
        .layer(DefaultBodyLimit::max(limits::REVIEW_BYTES_MAX))
        .with_state((Arc::new(settings), metrics.clone()))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review {
    api_version: String,
    request: Request,
}

#[derive(Deserialize)]
struct Request {
    uid: String,
    kind: Kind,
    operation: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    object: Value,
}

#[derive(Deserialize)]
struct Kind {
    group: String,
    version: String,
    kind: String,
}

async fn mutate(State((settings, metrics)): State<(Arc<Settings>, Metrics)>, body: Bytes) -> Response {
    let _timer = metrics.webhook_seconds.start_timer();
    let count = |outcome, reason| metrics.webhook_requests.with_label_values(&[outcome, reason]).inc();
    let review = match serde_json::from_slice::<Review>(&body) {
        Ok(review) if review.api_version == "admission.k8s.io/v1" => review,
        Ok(review) => {
            count("malformed", "");
            let text = format!("AdmissionReview is of {}, not of admission.k8s.io/v1\n", review.api_version);
            return (StatusCode::BAD_REQUEST, text).into_response();
        }
        Err(error) => {
            count("malformed", "");
            return (StatusCode::BAD_REQUEST, format!("no AdmissionReview: {error}\n")).into_response();
        }
    };
    let response = answer(&review.request, &settings, count);
    let answer = json!({"apiVersion": review.api_version, "kind": "AdmissionReview", "response": response});
    ([(header::CONTENT_TYPE, "application/json")], answer.to_string()).into_response()
}

/// `count` is told what becomes of the pod, and why.
fn answer(request: &Request, settings: &Settings, count: impl Fn(&'static str, &'static str)) -> Value {
    let Kind { group, version, kind } = &request.kind;
    let is_new_pod = (group.as_str(), version.as_str(), kind.as_str()) == ("", "v1", "Pod")
        && request.operation == "CREATE";
    // The configuration asks for new pods only; nothing else is ours to judge.
    let injected = if is_new_pod { inject(&request.object, settings) } else { Ok(Vec::new()) };
    match injected {
        Ok(additions) if additions.is_empty() => {
            count("untouched", "");
            json!({"uid": request.uid, "allowed": true})
        }
        Ok(additions) => {
            count("injected", "");
            let patch = serde_json::to_vec(&additions).expect("additions are JSON");
            let patch = BASE64_STANDARD.encode(patch);
            json!({"uid": request.uid, "allowed": true, "patchType": "JSONPatch", "patch": patch})
        }
        Err(error) => {
            count("refused", error.reason());
            let meta = &request.object["metadata"];
            let name = meta["name"].as_str().or(meta["generateName"].as_str()).unwrap_or_default();
            let (pod, hint) = (format!("{}/{name}", request.namespace), error.hint());
            tracing::warn!(pod, %error, "pod refused");
            let message = format!("{error}. {hint}");
            let status = json!({"code": 422, "reason": "Invalid", "message": message});
            json!({"uid": request.uid, "allowed": false, "status": status})
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::documents::SourceText;
    use axum::body::{Body, to_bytes};
    use axum::http::Request as HttpRequest;
    use tower::ServiceExt;

    const SETTINGS: &str = "image: agent:1\ncoordinator: operator:7443\nprofiles: {default: {}}\n";

    async fn post(body: Vec<u8>) -> (u16, Value) {
        counted(&Metrics::new().expect("names are distinct"), body).await
    }

    async fn counted(metrics: &Metrics, body: Vec<u8>) -> (u16, Value) {
        let source = SourceText { file: "settings".into(), text: SETTINGS.into() };
        let router = router(Settings::parse(&source).expect("settings"), metrics);
        let request = HttpRequest::post("/mutate").body(Body::from(body)).expect("a request");
        let response = router.oneshot(request).await.expect("an answer");
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), usize::MAX).await.expect("a body");
        (status, serde_json::from_slice(&body).unwrap_or_else(|_| json!(String::from_utf8_lossy(&body))))
    }

    fn review(operation: &str, kind: &str, object: Value) -> Value {
        let kind = json!({"group": "", "version": "v1", "kind": kind});
        let request =
            json!({"uid": "u1", "kind": kind, "operation": operation, "namespace": "rl", "object": object});
        json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request})
    }

    fn pod(labels: Value) -> Value {
        json!({"metadata": {"name": "p", "labels": labels}, "spec": {"containers": [{"name": "main"}]}})
    }

    #[tokio::test]
    async fn new_pods_that_name_a_refit_get_a_patch_or_a_reason() {
        let claim = json!({"weightrefit.dev/refit": "tiny", "weightrefit.dev/side": "training"});
        let ask =
            |operation: &str, kind: &str, object| post(review(operation, kind, object).to_string().into());
        let (status, answer) = ask("CREATE", "Pod", pod(claim.clone())).await;
        let response = &answer["response"];
        assert_eq!((status, &response["uid"], &response["allowed"]), (200, &json!("u1"), &json!(true)));
        let patch = BASE64_STANDARD.decode(response["patch"].as_str().expect("a patch")).expect("base64");
        let patch: Value = serde_json::from_slice(&patch).expect("JSON");
        assert_eq!(patch[0]["op"], "add", "{patch}");

        for (operation, kind, labels) in
            [("CREATE", "Pod", json!({})), ("UPDATE", "Pod", claim.clone()), ("CREATE", "Secret", claim)]
        {
            let (status, answer) = ask(operation, kind, pod(labels)).await;
            assert_eq!((status, answer["response"].clone()), (200, json!({"uid": "u1", "allowed": true})));
        }

        let (_, answer) = ask("CREATE", "Pod", pod(json!({"weightrefit.dev/refit": "tiny"}))).await;
        let status = &answer["response"]["status"];
        assert_eq!((&answer["response"]["allowed"], &status["reason"]), (&json!(false), &json!("Invalid")));
        let message = status["message"].as_str().expect("a message");
        assert!(
            message.contains("weightrefit.dev/side") && message.contains("Correct the label"),
            "{message}"
        );
    }

    #[tokio::test]
    async fn what_becomes_of_pods_is_counted() {
        let metrics = Metrics::new().expect("names are distinct");
        let claim = json!({"weightrefit.dev/refit": "tiny", "weightrefit.dev/side": "training"});
        let half = json!({"weightrefit.dev/refit": "tiny"});
        let empty = json!({"metadata": {"labels": claim}, "spec": {"containers": []}});
        for object in [pod(claim.clone()), pod(json!({})), pod(half), empty, pod(claim)] {
            counted(&metrics, review("CREATE", "Pod", object).to_string().into()).await;
        }
        counted(&metrics, b"[]".to_vec()).await;
        let text = metrics.text().expect("it encodes");
        for (labels, want) in [
            (r#"outcome="injected",reason="""#, 2),
            (r#"outcome="untouched",reason="""#, 1),
            (r#"outcome="refused",reason="Labels""#, 1),
            (r#"outcome="refused",reason="NoContainer""#, 1),
            (r#"outcome="refused",reason="Port""#, 0),
            (r#"outcome="malformed",reason="""#, 1),
        ] {
            let line = format!("weightrefit_operator_webhook_requests_total{{{labels}}} {want}\n");
            assert!(text.contains(&line), "{line} in {text}");
        }
        assert!(text.contains("weightrefit_operator_webhook_seconds_count 6\n"), "{text}");
    }

    #[tokio::test]
    async fn what_is_no_review_or_larger_than_any_pod_is_refused() {
        for (body, want) in [
            (Vec::new(), 400),
            (b"[]".to_vec(), 400),
            (br#"{"apiVersion": "admission.k8s.io/v1"}"#.to_vec(), 400),
            (vec![b' '; limits::REVIEW_BYTES_MAX + 1], 413),
        ] {
            let length = body.len();
            assert_eq!(post(body).await.0, want, "{length} bytes");
        }
        let mut old = review("CREATE", "Pod", pod(json!({})));
        old["apiVersion"] = json!("admission.k8s.io/v1beta1");
        assert_eq!(post(old.to_string().into()).await.0, 400);
    }

    /// The API server itself takes at most 3 MiB; this is what a test of ours can send.
    #[tokio::test]
    async fn a_pod_as_large_as_may_come_is_injected() {
        let claim = json!({"weightrefit.dev/refit": "tiny", "weightrefit.dev/side": "training"});
        let mut large = pod(claim);
        let value = "x".repeat(limits::REVIEW_BYTES_MAX - 4096);
        large["spec"]["containers"][0]["env"] = json!([{"name": "LARGE", "value": value}]);
        let (status, answer) = post(review("CREATE", "Pod", large).to_string().into()).await;
        assert_eq!((status, &answer["response"]["patchType"]), (200, &json!("JSONPatch")));
    }
}
