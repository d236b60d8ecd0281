//! The watch of refits: each gets a task of its own, which ends with the object.
//!
//! Invariants:
//! - D1: an object of another UID is another relation: the old one is drained, whatever its name.
//! - D2: an object that cannot be read is warned of and left alone; the others go on.
//! - D3: the list of one namespace deletes no refit of another.

use super::refits::Part;
use super::relation::{Relation, Shared, Signals};
use super::scope;
use super::watch::watch;
use crate::api::refit::WeightRefit;
use kube::ResourceExt;
use kube::api::ObjectMeta;
use kube::core::DeserializeGuard;
use kube::core::error_boundary::InvalidObject;
use kube::runtime::watcher::{self, Event};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio::sync::watch::{Sender, channel};
use tokio::task::JoinSet;
use tokio_stream::{StreamExt, StreamMap};

/// A refit whose task runs.
struct Entry {
    uid: String,
    objects: Sender<Arc<WeightRefit>>,
    pods: Arc<Notify>,
    is_deleted: Sender<bool>,
}

struct Dispatch {
    shared: Arc<Shared>,
    entries: BTreeMap<String, Entry>,
    tasks: JoinSet<()>,
}

/// Runs a task per refit until `stop`. `parts` are filled with every refit that there is.
pub async fn dispatch(shared: Arc<Shared>, mut parts: Vec<Part>, stop: impl Future<Output = ()>) {
    let mut stop = pin!(stop);
    let mut pods = pin!(shared.pods.changes());
    let mut refits = StreamMap::new();
    for (index, part) in parts.iter().enumerate() {
        let api = scope::api(&shared.client, part.namespace());
        refits.insert(index, Box::pin(watch(api, watcher::Config::default(), &shared.watch_failures)));
    }
    let mut dispatch =
        Dispatch { shared: Arc::clone(&shared), entries: BTreeMap::new(), tasks: JoinSet::new() };
    loop {
        tokio::select! {
            () = &mut stop => break,
            Some((index, event)) = refits.next() => {
                let Some(event) = dispatch.readable(event) else { continue };
                let gone = parts[index].take(&event, dispatch.entries.keys());
                gone.iter().for_each(|key| dispatch.delete(key));
                dispatch.follow(event);
            }
            Some(refit) = pods.next() => {
                if let Some(entry) = dispatch.entries.get(&refit) {
                    entry.pods.notify_one();
                }
            }
            // A task that panics takes the operator with it: half a controller is worse than none.
            Some(ended) = dispatch.tasks.join_next() => if let Err(error) = ended
                && error.is_panic()
            {
                std::panic::resume_unwind(error.into_panic());
            },
        }
    }
    // Nobody is told to leave: agents go on, and find the next operator.
    dispatch.entries.clear();
    while dispatch.tasks.join_next().await.is_some() {}
}

impl Dispatch {
    fn readable(&self, event: Event<DeserializeGuard<WeightRefit>>) -> Option<Event<WeightRefit>> {
        readable(event, |name| self.entries.get(name).map(|entry| Arc::clone(&entry.objects.borrow())))
    }

    fn follow(&mut self, event: Event<WeightRefit>) {
        match event {
            Event::Init | Event::InitDone => {}
            Event::InitApply(refit) | Event::Apply(refit) => self.apply(refit),
            Event::Delete(refit) => {
                let key = refit.full_name();
                if self.entries.get(&key).is_some_and(|entry| Some(&entry.uid) == refit.uid().as_ref()) {
                    self.delete(&key);
                }
            }
        }
    }

    fn apply(&mut self, refit: WeightRefit) {
        let (key, uid) = (refit.full_name(), refit.uid().unwrap_or_default());
        let refit = Arc::new(refit);
        if let Some(entry) = self.entries.get(&key).filter(|entry| entry.uid == uid) {
            entry.objects.send_replace(refit);
            return;
        }
        self.delete(&key); // D1
        let (objects, object) = channel(refit);
        let (is_deleted, deletion) = channel(false);
        let pods = Arc::new(Notify::new());
        let signals = Signals { objects: object, pods: Arc::clone(&pods), is_deleted: deletion };
        self.tasks.spawn(Relation::new(Arc::clone(&self.shared), signals).run());
        self.entries.insert(key, Entry { uid, objects, pods, is_deleted });
    }

    fn delete(&mut self, key: &str) {
        if let Some(entry) = self.entries.remove(key) {
            entry.is_deleted.send_replace(true);
        }
    }
}

/// The event, unless its object cannot be read (D2). Where it is listed, which deletes what is not, or deleted, it stands
/// as it was `known` last.
fn readable(
    event: Event<DeserializeGuard<WeightRefit>>,
    known: impl Fn(&str) -> Option<Arc<WeightRefit>>,
) -> Option<Event<WeightRefit>> {
    let read = |guard: DeserializeGuard<WeightRefit>| {
        guard.0.map_err(|InvalidObject { error, metadata: ObjectMeta { namespace, name, uid, .. } }| {
            let name = format!("{}/{}", namespace.unwrap_or_default(), name.unwrap_or_default());
            tracing::warn!(refit = name, error, "WeightRefit cannot be read");
            known(&name).filter(|known| known.uid() == uid)
        })
    };
    let last = |guard| read(guard).or_else(|known| known.map(Arc::unwrap_or_clone).ok_or(())).ok();
    Some(match event {
        Event::Init => Event::Init,
        Event::InitDone => Event::InitDone,
        Event::InitApply(guard) => Event::InitApply(last(guard)?),
        Event::Apply(guard) => Event::Apply(read(guard).ok()?),
        Event::Delete(guard) => Event::Delete(last(guard)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_refit_that_cannot_be_read_any_more_stands_as_it_was() {
        let refit = |uid: &str, spec: serde_json::Value| {
            let metadata = json!({"namespace": "rl", "name": "tiny", "uid": uid});
            let kind = ("weightrefit.dev/v1alpha1", "WeightRefit");
            json!({"apiVersion": kind.0, "kind": kind.1, "metadata": metadata, "spec": spec})
        };
        let spec = json!({
            "model": {"type": "Registered"},
            "training": {"worldSize": 2, "ranks": {"type": "StatefulSet"}},
            "inference": {"pools": [{"name": "default", "ranksPerReplica": 2, "ranks": {"type": "StatefulSet"}}]},
        });
        let good: Arc<WeightRefit> = Arc::new(serde_json::from_value(refit("one", spec)).unwrap());
        let known = |name: &str| (name == "rl/tiny").then(|| Arc::clone(&good));
        let broken = |uid| serde_json::from_value(refit(uid, json!({"model": 7}))).unwrap();
        for (event, want) in [
            (Event::InitApply(broken("one")), Some("InitApply(tiny)")),
            (Event::Delete(broken("one")), Some("Delete(tiny)")),
            (Event::Apply(broken("one")), None),
            (Event::InitApply(broken("two")), None),
            (Event::Delete(broken("two")), None),
        ] {
            let read = readable(event, known).map(|event| event.to_string());
            assert_eq!(read.as_deref(), want);
        }
        assert!(readable(Event::InitApply(broken("one")), |_| None).is_none(), "never known");
    }
}
