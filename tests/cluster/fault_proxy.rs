//! A socket between the operator and the API server. It passes on what it is asked, with the credentials that come with
//! it, but where a rule says otherwise, and remembers what it was asked.

use crate::bed::{Bed, ReservedPort};
use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, TRANSFER_ENCODING};
use axum::http::request::Parts;
use axum::response::Response;
use kube::Client;
use serde_json::json;
use std::collections::BTreeMap;
use std::future::pending;
use std::io::Error;
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::net::TcpSocket;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

/// What happens to a request.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    /// It is refused with this HTTP status.
    Refused(u16),
    /// 429: come again after this many seconds.
    Later(u32),
    /// A watch begins, and says that its version is too old.
    TooOldEvent,
    /// A watch begins, and its connection is closed within a line.
    Cut,
    /// A watch begins, and ends.
    Empty,
    /// A watch begins, and says nothing.
    Silence,
    /// The request is neither passed on nor answered.
    NoAnswer,
    /// The request is passed on, and not answered.
    LostAnswer,
    /// The request is passed on, and answered by what is no JSON.
    Garbage,
}

/// Which requests meet a fault, and how often.
#[derive(Debug, Clone)]
pub(crate) struct Rule {
    /// By this its hits are asked for.
    pub(crate) name: String,
    /// All are in the request's line: method, path and query, and ` epoch` where a body writes one.
    pub(crate) parts: Vec<String>,
    pub(crate) fault: Fault,
    pub(crate) times: usize,
    /// Once met, it ends with a request that has all of these in its line.
    pub(crate) until: Option<Vec<String>>,
}

impl Rule {
    pub(crate) fn new(name: &str, parts: &[&str], fault: Fault, times: usize) -> Self {
        let parts = parts.iter().map(ToString::to_string).collect();
        Self { name: name.to_owned(), parts, fault, times, until: None }
    }
}

pub(crate) struct FaultProxy {
    bed: &'static Bed,
    port: ReservedPort,
    shared: Arc<Shared>,
    /// `None` while connections are refused.
    runtime: Option<Runtime>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<Book>,
    /// Watches that are passed on end when it changes.
    cuts: watch::Sender<u32>,
}

#[derive(Default)]
struct Book {
    rules: Vec<Rule>,
    hits: BTreeMap<String, usize>,
    lines: Vec<String>,
}

impl FaultProxy {
    pub(crate) fn start(bed: &'static Bed) -> Self {
        let (port, shared) = (ReservedPort::new(), Arc::default());
        let mut proxy = Self { bed, port, shared, runtime: None };
        proxy.listen();
        proxy
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.port.address)
    }

    pub(crate) fn arm(&self, rule: Rule) {
        self.book().rules.push(rule);
    }

    /// No rule holds any more.
    pub(crate) fn disarm(&self) {
        self.book().rules.clear();
    }

    /// The rule of this name holds no more.
    pub(crate) fn lift(&self, name: &str) {
        self.book().rules.retain(|rule| rule.name != name);
    }

    /// How many requests have met the rule of this name.
    pub(crate) fn hits(&self, name: &str) -> usize {
        self.book().hits.get(name).copied().unwrap_or_default()
    }

    /// Requests until now whose line has all these parts.
    pub(crate) fn lines(&self, parts: &[&str]) -> Vec<String> {
        let has_all = |line: &&String| parts.iter().all(|part| line.contains(part));
        self.book().lines.iter().filter(has_all).cloned().collect()
    }

    /// Closes the connections of all watches that are passed on.
    pub(crate) fn cut_watches(&self) {
        self.shared.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Closes all connections, and refuses new ones.
    pub(crate) fn refuse(&mut self) {
        self.runtime.take().expect("it listens").shutdown_background();
    }

    /// Accepts connections again.
    pub(crate) fn listen(&mut self) {
        let runtime = Runtime::new().expect("a runtime");
        let (listener, router) = runtime.block_on(async {
            let socket = TcpSocket::new_v4().expect("a socket");
            socket.set_reuseport(true).expect("SO_REUSEPORT");
            socket.bind(self.port.address.into()).expect("the reserved port");
            let listener = socket.listen(64).expect("a port");
            let mut config = self.bed.config().await;
            (config.default_retry, config.auth_info) = (false, Default::default());
            let upstream = Client::try_from(config).expect("a client");
            let router = Router::new().fallback(handle).with_state((upstream, Arc::clone(&self.shared)));
            (listener, router)
        });
        runtime.spawn(async { axum::serve(listener, router).await });
        self.runtime = Some(runtime);
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.shared.state.lock().expect("no panic")
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Shared {
    /// Writes the request down, and finds what happens to it.
    fn meet(&self, line: String) -> Option<Fault> {
        let mut book = self.state.lock().expect("no panic");
        let has_all = |parts: &Vec<String>| parts.iter().all(|part| line.contains(part));
        let Book { rules, hits, lines } = &mut *book;
        rules.retain(|rule| !(hits.contains_key(&rule.name) && rule.until.as_ref().is_some_and(has_all)));
        let met = rules.iter_mut().find(|rule| has_all(&rule.parts)).map(|rule| {
            rule.times -= 1;
            (rule.name.clone(), rule.fault)
        });
        rules.retain(|rule| rule.times > 0);
        lines.push(line);
        let (name, fault) = met?;
        *hits.entry(name).or_default() += 1;
        Some(fault)
    }
}

type Shares = State<(Client, Arc<Shared>)>;

async fn handle(State((upstream, shared)): Shares, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap_or_default();
    let target = head.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
    let is_epoch = head.method == "PATCH" && String::from_utf8_lossy(&body).contains("\"membership\"");
    let line = format!("{} {target}{}", head.method, if is_epoch { " epoch" } else { "" });
    let is_watch = line.contains("watch=true");
    match shared.meet(line) {
        None if is_watch => cut_short(relay(&upstream, head, body).await, shared.cuts.subscribe()),
        None => relay(&upstream, head, body).await,
        Some(Fault::Refused(code)) => refusal(code, None),
        Some(Fault::Later(seconds)) => refusal(429, Some(seconds)),
        Some(Fault::TooOldEvent) => {
            answer(json!({"type": "ERROR", "object": status(410)}).to_string() + "\n")
        }
        Some(Fault::Cut) => {
            let half = Ok(Bytes::from_static(b"{\"type\":\"MODIF"));
            stream(tokio_stream::iter([half, Err(Error::other("cut"))]))
        }
        Some(Fault::Empty) => answer(""),
        Some(Fault::Silence) => stream(tokio_stream::pending()),
        Some(Fault::NoAnswer) => pending().await,
        Some(Fault::LostAnswer) => {
            drop(relay(&upstream, head, body).await);
            pending().await
        }
        Some(Fault::Garbage) => {
            drop(relay(&upstream, head, body).await);
            answer("<html>no JSON</html>")
        }
    }
}

/// What the API server answers.
async fn relay(upstream: &Client, head: Parts, body: Bytes) -> Response {
    let mut request = axum::http::Request::new(kube::client::Body::from(body.to_vec()));
    *request.method_mut() = head.method;
    *request.uri_mut() = head.uri;
    *request.headers_mut() = head.headers;
    request.headers_mut().remove("host");
    match upstream.send(request).await {
        Ok(mut answer) => {
            answer.headers_mut().remove(TRANSFER_ENCODING);
            answer.map(Body::new)
        }
        Err(error) => panic!("the API server itself: {error}"),
    }
}

/// The same answer, whose connection is closed when `cuts` changes.
fn cut_short(answer: Response, mut cuts: watch::Receiver<u32>) -> Response {
    let (tell, chunks) = mpsc::channel(1);
    let (head, body) = answer.into_parts();
    let mut body = body.into_data_stream();
    tokio::spawn(async move {
        loop {
            let chunk = tokio::select! {
                chunk = body.next() => chunk.map(|chunk| chunk.map_err(Error::other)),
                _ = cuts.changed() => Some(Err(Error::other("cut"))),
                () = tell.closed() => None,
            };
            let Some(chunk) = chunk else { return };
            let is_last = chunk.is_err();
            if tell.send(chunk).await.is_err() || is_last {
                return;
            }
        }
    });
    Response::from_parts(head, Body::from_stream(ReceiverStream::new(chunks)))
}

fn status(code: u16) -> serde_json::Value {
    let reason = match code {
        409 => "Conflict",
        410 => "Expired",
        429 => "TooManyRequests",
        503 => "ServiceUnavailable",
        _ => "InternalError",
    };
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": format!("fault {code}"), "reason": reason, "code": code,
    })
}

fn refusal(code: u16, again: Option<u32>) -> Response {
    let mut refusal = answer(status(code).to_string());
    *refusal.status_mut() = code.try_into().expect("a status");
    refusal.headers_mut().extend(again.map(|seconds| (RETRY_AFTER, seconds.into())));
    refusal
}

fn answer(body: impl Into<Body>) -> Response {
    let mut answer = Response::new(body.into());
    answer.headers_mut().insert(CONTENT_TYPE, "application/json".parse().expect("a header"));
    answer
}

fn stream(chunks: impl tokio_stream::Stream<Item = Result<Bytes, Error>> + Send + 'static) -> Response {
    answer(Body::from_stream(chunks))
}
