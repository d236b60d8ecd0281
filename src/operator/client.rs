//! The operator's client of the API server. Whatever is asked through it gets an answer or a failure in bounded time,
//! and is counted; so nobody who asks sets a limit of their own, or can forget to.
//!
//! Invariants:
//! - Q1: a question ends within [`limits::API_ANSWER_MAX`]: the whole answer has come by then, of a watch its head.
//! - Q2: a server that says when to come again is asked again then, not before, as long as Q1 leaves time. No other
//!   failure is repeated here: who asked knows how soon it may ask again.
//! - Q3: a watch begins at most once in [`limits::WATCH_PAUSE`], however soon its answer ends.
//! - Q4: a watch refused as too old reads as the event that says so in a stream. kube begins anew for the event alone,
//!   and would repeat the refused question for ever.

use super::telemetry::Metrics;
use crate::limits;
use axum::body::{Body as Answer, Bytes};
use axum::http::header::RETRY_AFTER;
use axum::http::{Request, Response, StatusCode};
use kube::client::Body;
use kube::{Client, Config};
use prometheus::{IntCounter, IntCounterVec};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tokio_stream::{Stream, StreamExt, once};

/// What an API server says to a watch from a version that it has forgotten, as it says it within a stream.
const TOO_OLD: &str = concat!(
    r#"{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","#,
    r#""message":"too old resource version","reason":"Expired","code":410}}"#,
    "\n"
);

/// No answer within the limit (Q1).
#[derive(Debug, thiserror::Error)]
#[error("the API server did not answer within {} s", limits::API_ANSWER_MAX.as_secs())]
struct Silent;

/// A client of the API server that `config` names; `metrics` count what comes of its requests and watches.
///
/// # Errors
/// Credentials that cannot be used.
pub fn client(mut config: Config, metrics: &Metrics) -> kube::Result<Client> {
    let namespace = config.default_namespace.clone();
    config.default_retry = false; // Q2, and so that each is counted
    let asker = Asker {
        inner: Client::try_from(config)?,
        requests: metrics.api_requests.clone(),
        failures: metrics.watch_failures.clone(),
        watches: Arc::default(),
    };
    let ask = move |request| asker.clone().ask(request);
    Ok(Client::new(tower::service_fn(ask), namespace))
}

#[derive(Clone)]
struct Asker {
    inner: Client,
    requests: IntCounterVec,
    /// Of watches; kube tells of none whose connection breaks.
    failures: IntCounterVec,
    /// When each watch may begin again, by what it watches (Q3).
    watches: Arc<Mutex<BTreeMap<String, Instant>>>,
}

impl Asker {
    async fn ask(self, request: Request<Body>) -> kube::Result<Response<Answer>> {
        let watched = watched(&request);
        let resource = request.uri().path().rsplit('/').next().unwrap_or_default();
        let failures = watched.is_some().then(|| self.failures.with_label_values(&[resource]));
        if let Some(watched) = watched.clone() {
            sleep_until(self.turn_of(watched)).await;
        }
        let answer = self.ask_until_told(request, watched.is_some()).await?;
        Ok(match failures.filter(|_| answer.status() == StatusCode::OK) {
            Some(failures) => answer.map(|body| Answer::from_stream(counted(Answer::new(body), failures))),
            None => answer.map(Answer::new),
        })
    }

    async fn ask_until_told(
        &self,
        mut request: Request<Body>,
        is_watch: bool,
    ) -> kube::Result<Response<Body>> {
        let ends = Instant::now() + limits::API_ANSWER_MAX;
        loop {
            let again = copy(&request);
            let answer = timeout_at(ends, self.ask_once(request, is_watch)).await;
            let answer = answer.map_err(|_| kube::Error::Service(Box::new(Silent)))??;
            match (again, pause(&answer)) {
                (Some(again), Some(pause)) if Instant::now() + pause < ends => {
                    sleep(pause).await;
                    request = again;
                }
                _ => return Ok(answer),
            }
        }
    }

    async fn ask_once(&self, request: Request<Body>, is_watch: bool) -> kube::Result<Response<Body>> {
        let mut outcome = Outcome { requests: &self.requests, code: "timeout".to_owned() };
        let answer: kube::Result<_> = async {
            let answer = self.inner.send(request).await?;
            if is_watch && answer.status() == StatusCode::OK {
                return Ok(answer);
            }
            let (head, body) = answer.into_parts();
            Ok(Response::from_parts(head, Body::from(body.collect_bytes().await?.to_vec())))
        }
        .await;
        outcome.code = match &answer {
            Ok(answer) => answer.status().as_str().to_owned(),
            Err(_) => "failed".to_owned(),
        };
        match answer {
            Ok(answer) if is_watch && answer.status() == StatusCode::GONE => {
                Ok(Response::new(Body::from(TOO_OLD.as_bytes().to_vec()))) // Q4
            }
            answer => answer,
        }
    }

    /// When the watch may begin; the next one of the same may a while later (Q3).
    fn turn_of(&self, watched: String) -> Instant {
        let mut watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        watches.retain(|_, next| *next > now);
        let turn = watches.get(&watched).copied().unwrap_or(now);
        watches.insert(watched, turn + limits::WATCH_PAUSE);
        turn
    }
}

/// Counts a request however it ends, also by nobody waiting for its answer any more.
struct Outcome<'a> {
    requests: &'a IntCounterVec,
    code: String,
}

impl Drop for Outcome<'_> {
    fn drop(&mut self) {
        self.requests.with_label_values(&[&self.code]).inc();
    }
}

/// The same stream; its end counts where it comes before its time.
fn counted(body: Answer, failures: IntCounter) -> impl Stream<Item = Result<Bytes, axum::Error>> + Send {
    // The server's clock began before the answer came.
    let due = Instant::now() + Duration::from_secs(limits::WATCH_SECONDS.into()) - limits::WATCH_PAUSE;
    let mut is_over = false;
    let ends = once(None);
    body.into_data_stream().map(Some).chain(ends).filter_map(move |chunk| {
        if !matches!(chunk, Some(Ok(_))) && !std::mem::replace(&mut is_over, true) && Instant::now() < due {
            failures.inc();
        }
        chunk
    })
}

/// What a watch watches, without the version from which; `None` for other requests.
fn watched(request: &Request<Body>) -> Option<String> {
    let query = request.uri().query()?;
    let parameters = || query.split('&').filter(|parameter| !parameter.is_empty());
    parameters().find(|parameter| *parameter == "watch=true")?;
    let of_what = parameters().filter(|parameter| !parameter.starts_with("resourceVersion="));
    Some(std::iter::once(request.uri().path()).chain(of_what).collect::<Vec<_>>().join("&"))
}

/// The same request, if its body is at hand.
fn copy(request: &Request<Body>) -> Option<Request<Body>> {
    let mut copy = Request::new(request.body().try_clone()?);
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.headers_mut() = request.headers().clone();
    Some(copy)
}

/// After how long the server wants to be asked again (Q2), if it says so; not at once, whatever it says.
fn pause(answer: &Response<Body>) -> Option<Duration> {
    let is_later = matches!(answer.status(), StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
    let seconds = answer.headers().get(RETRY_AFTER).filter(|_| is_later)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds).max(limits::RETRY_PAUSE_MIN))
}
