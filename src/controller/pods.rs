//! A watch of the pods that carry the claim label: whatever the API server sends is pruned before it is kept, and
//! who asks gets the present facts. Writes nothing.
//!
//! Invariants:
//! - W1: a pod that cannot be read is none of the pods; what is wrong with it is kept for the refit that it means.
//! - W2: a refit is told of every pod that came to it, changed, or left it.

use super::pod::Pod;
use super::pod_facts::{PodFacts, REFIT_LABEL, meant, shown};
use super::scope::{self, Scope};
use super::watch::watch;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::{self, Event};
use kube::{Client, ResourceExt};
use prometheus::IntCounterVec;
use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::sync::watch::{Receiver, Sender, channel};
use tokio::task::JoinSet;
use tokio_stream::{Stream, StreamExt};

/// The pods that claim any refit, as the API server last told.
#[derive(Debug)]
pub struct Pods {
    scope: Scope,
    shared: Arc<Shared>,
    /// Watches whose first list is complete.
    listed: Receiver<usize>,
    /// Ended with this.
    watches: JoinSet<()>,
}

#[derive(Debug, Default)]
struct Shared {
    kept: Mutex<Kept>,
    changed: Notify,
}

/// namespace and name.
type Name = (String, String);

#[derive(Debug, Default)]
struct Kept {
    pods: BTreeMap<Name, Arc<PodFacts>>,
    by_uid: BTreeMap<String, Name>,
    by_refit: BTreeMap<String, BTreeSet<Name>>,
    malformed: BTreeMap<Name, Malformed>,
    /// Refits to be told of, each once however often it changed.
    changed: BTreeSet<String>,
}

/// A pod that cannot be read.
#[derive(Debug, PartialEq, Eq)]
struct Malformed {
    /// The refit that it means, where that can be told.
    refit: Option<String>,
    why: String,
}

impl Pods {
    /// Watches the pods of this scope until dropped. `failures` counts those of the watches.
    #[must_use]
    pub fn new(client: &Client, scope: Scope, failures: &IntCounterVec) -> Self {
        let shared = Arc::new(Shared::default());
        let (done, listed) = channel(0);
        let mut watches = JoinSet::new();
        for part in scope.parts() {
            let api = scope::api::<DeserializeGuard<Pod>>(client, part.as_deref());
            let events = watch(api, watcher::Config::default().labels(REFIT_LABEL), failures);
            watches.spawn(keep(Arc::clone(&shared), done.clone(), events));
        }
        Self { scope, shared, listed, watches }
    }

    /// What is watched.
    #[must_use]
    pub const fn scope(&self) -> &Scope {
        &self.scope
    }

    /// Waits until every pod that there was at the start is known.
    pub async fn synced(&self) {
        let (mut listed, all) = (self.listed.clone(), self.watches.len());
        // The watches end only with `self`.
        let _ = listed.wait_for(|listed| *listed >= all).await;
    }

    /// Whether every pod that there was at the start is known.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        *self.listed.borrow() >= self.watches.len()
    }

    /// The pods that claim `refit` (namespace/name), by namespace and name.
    #[must_use]
    pub fn of(&self, refit: &str) -> Vec<Arc<PodFacts>> {
        let kept = self.shared.lock();
        let names = kept.by_refit.get(refit).into_iter().flatten();
        names.filter_map(|name| kept.pods.get(name).cloned()).collect()
    }

    /// Namespaces of the pods that claim one of these refits (namespace/name).
    pub fn namespaces(&self, is_one: impl Fn(&str) -> bool) -> BTreeSet<String> {
        let kept = self.shared.lock();
        let names = kept.by_refit.iter().filter(|(refit, _)| is_one(refit)).flat_map(|(_, names)| names);
        names.map(|(namespace, _)| namespace.clone()).collect()
    }

    /// What is wrong with pods that mean `refit` (namespace/name) and cannot be read, by namespace and name.
    #[must_use]
    pub fn malformed(&self, refit: &str) -> Vec<String> {
        let kept = self.shared.lock();
        let of_refit = kept.malformed.values().filter(|malformed| malformed.refit.as_deref() == Some(refit));
        of_refit.map(|malformed| malformed.why.clone()).collect()
    }

    /// The pod of this UID, if it claims a refit.
    #[must_use]
    pub fn by_uid(&self, uid: &str) -> Option<Arc<PodFacts>> {
        let kept = self.shared.lock();
        kept.pods.get(kept.by_uid.get(uid)?).cloned()
    }

    /// Refits (namespace/name) whose pods changed since they were last yielded. For one reader: what one is told,
    /// another is not.
    pub fn changes(&self) -> impl Stream<Item = String> + Send + 'static {
        let (wake, queue) = tokio::sync::mpsc::channel(1);
        let shared = Arc::clone(&self.shared);
        tokio::spawn(async move {
            loop {
                let next = shared.lock().changed.pop_first();
                match next {
                    Some(refit) => match wake.send(refit).await {
                        Ok(()) => {}
                        Err(unsent) => {
                            shared.lock().changed.insert(unsent.0);
                            return;
                        }
                    },
                    None => tokio::select! {
                        () = shared.changed.notified() => {}
                        () = wake.closed() => return,
                    },
                }
            }
        });
        tokio_stream::wrappers::ReceiverStream::new(queue)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().expect("no holder of this lock panics")
    }
}

/// One watch, for ever.
async fn keep(
    shared: Arc<Shared>,
    listed: Sender<usize>,
    events: impl Stream<Item = Event<DeserializeGuard<Pod>>>,
) {
    let mut events = pin!(events);
    let mut own = BTreeSet::new();
    let mut seen = BTreeSet::new();
    let mut is_first = true;
    while let Some(event) = events.next().await {
        let mut kept = shared.lock();
        match event {
            Event::Init => seen.clear(),
            Event::InitApply(pod) => drop(seen.insert(kept.apply(pod))),
            Event::InitDone => {
                own.difference(&seen).for_each(|gone| kept.remove(gone));
                own = std::mem::take(&mut seen);
                if std::mem::take(&mut is_first) {
                    listed.send_modify(|listed| *listed += 1);
                }
            }
            Event::Apply(pod) => drop(own.insert(kept.apply(pod))),
            Event::Delete(pod) => {
                let name = name(&pod);
                kept.remove(&name);
                own.remove(&name);
            }
        }
        let is_told = kept.changed.is_empty();
        drop(kept);
        if !is_told {
            shared.changed.notify_one();
        }
    }
}

fn name(pod: &DeserializeGuard<Pod>) -> Name {
    (pod.namespace().unwrap_or_default(), pod.name_any())
}

impl Kept {
    /// Keeps the pod, or what is wrong with it (W1); its name.
    fn apply(&mut self, pod: DeserializeGuard<Pod>) -> Name {
        let name = name(&pod);
        let facts = match &pod.0 {
            Ok(pod) => PodFacts::of(pod).map_err(|malformed| (meant(&pod.metadata), malformed.to_string())),
            Err(invalid) => {
                let why = format!("pod {} cannot be read: {}", shown(&invalid.metadata), invalid.error);
                Err((meant(&invalid.metadata), why))
            }
        };
        match facts {
            Ok(facts) => self.insert(name.clone(), facts),
            Err((refit, why)) => {
                let malformed = Malformed { refit, why };
                if self.malformed.get(&name) != Some(&malformed) {
                    tracing::warn!(error = malformed.why, "pod left out");
                    self.remove(&name);
                    self.changed.extend(malformed.refit.clone());
                    self.malformed.insert(name.clone(), malformed);
                }
            }
        }
        name
    }

    fn insert(&mut self, name: Name, facts: PodFacts) {
        if self.pods.get(&name).is_some_and(|old| **old == facts) {
            return;
        }
        self.remove(&name);
        self.changed.insert(facts.refit.clone());
        self.by_uid.insert(facts.uid.clone(), name.clone());
        self.by_refit.entry(facts.refit.clone()).or_default().insert(name.clone());
        self.pods.insert(name, Arc::new(facts));
    }

    fn remove(&mut self, name: &Name) {
        if let Some(malformed) = self.malformed.remove(name) {
            self.changed.extend(malformed.refit);
        }
        let Some(old) = self.pods.remove(name) else { return };
        self.by_uid.remove(&old.uid);
        if let Some(names) = self.by_refit.get_mut(&old.refit) {
            names.remove(name);
            if names.is_empty() {
                self.by_refit.remove(&old.refit);
            }
        }
        self.changed.insert(old.refit.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// `name refit` of a pod that can be read, with `!` behind of one that cannot.
    fn pod(words: &str) -> DeserializeGuard<Pod> {
        let (name, refit) = words.trim_end_matches('!').split_once(' ').expect("two words");
        let side = if words.ends_with('!') { "sideways" } else { "training" };
        let labels = json!({"weightrefit.dev/refit": refit, "weightrefit.dev/side": side});
        let metadata =
            json!({"namespace": "rl", "name": name, "uid": format!("uid-{name}"), "labels": labels});
        serde_json::from_value(json!({"metadata": metadata, "spec": {}})).expect("a pod")
    }

    fn list(pods: &[&str]) -> Vec<Event<DeserializeGuard<Pod>>> {
        let listed = pods.iter().map(|words| Event::InitApply(pod(words)));
        std::iter::once(Event::Init).chain(listed).chain([Event::InitDone]).collect()
    }

    /// A list, what happens then, and of refits that were told of since: which, and the pods of each.
    #[tokio::test]
    async fn a_refit_is_told_of_each_pod_that_came_changed_or_left() {
        let nothing = || Vec::new();
        for (first, then, want) in [
            (vec!["a one"], nothing(), ""),
            (vec![], vec![Event::Apply(pod("a one"))], "rl/one: a"),
            (vec!["a one"], vec![Event::Apply(pod("a two"))], "rl/one: ; rl/two: a"),
            (vec!["a one"], vec![Event::Delete(pod("a one"))], "rl/one: "),
            (vec!["a one"], vec![Event::Apply(pod("a one"))], ""), // the same again
            (vec!["a one", "b one"], list(&["a one"]), "rl/one: a"),
            (vec!["a one"], list(&["b one"]), "rl/one: b"),
            (vec!["a one"], list(&["a one"]), ""),
            // One that cannot be read is no pod, of the refit that it was of or means now.
            (vec![], vec![Event::Apply(pod("a one!"))], "rl/one: a!"),
            (vec!["a one", "b one"], vec![Event::Apply(pod("a one!"))], "rl/one: b a!"),
            (vec!["a one"], vec![Event::Apply(pod("a two!"))], "rl/one: ; rl/two: a!"),
            (vec!["a one!"], vec![Event::Apply(pod("a one"))], "rl/one: a"),
            (vec!["a one!"], vec![Event::Delete(pod("a one!"))], "rl/one: "),
        ] {
            let (shared, (done, listed)) = (Arc::new(Shared::default()), channel(0));
            let what = format!("{first:?} {then:?}");
            let events = list(&first).into_iter().chain([Event::Apply(pod("last told"))]);
            // One watch tells all of it; what it told at first is read in between.
            let seen = Arc::clone(&shared);
            let events = tokio_stream::iter(events.inspect(move |event| {
                if matches!(event, Event::Apply(_)) {
                    seen.lock().changed.clear();
                }
            }));
            keep(Arc::clone(&shared), done, events.chain(tokio_stream::iter(then))).await;
            assert_eq!(*listed.borrow(), 1, "{what}");
            let kept = shared.lock();
            let of = |refit: &String| {
                let pods = kept.by_refit.get(refit).into_iter().flatten().map(|(_, name)| name.clone());
                let odd = kept.malformed.iter().filter(|(_, odd)| odd.refit.as_ref() == Some(refit));
                let all = pods.chain(odd.map(|((_, name), _)| format!("{name}!")));
                format!("{refit}: {}", all.collect::<Vec<_>>().join(" "))
            };
            let told = kept.changed.iter().filter(|refit| *refit != "rl/told").map(of);
            assert_eq!(told.collect::<Vec<_>>().join("; "), want, "{what}");
        }
    }
}
