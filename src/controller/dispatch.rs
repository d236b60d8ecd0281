//! The watch of refits: each gets a task of its own, which ends with the object.
//!
//! Invariants:
//! - D1: an object of another UID is another relation: the old one is drained, whatever its name.
//! - D2: an object that cannot be read is warned of and left alone; the others go on.

use super::relation::{Relation, Shared, Signals};
use crate::api::refit::WeightRefit;
use kube::core::DeserializeGuard;
use kube::runtime::WatchStreamExt;
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, ResourceExt};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_stream::StreamExt;

/// A refit whose task runs.
struct Entry {
    uid: String,
    objects: watch::Sender<Arc<WeightRefit>>,
    pods: Arc<Notify>,
    is_deleted: watch::Sender<bool>,
}

struct Dispatch {
    shared: Arc<Shared>,
    entries: BTreeMap<String, Entry>,
    tasks: JoinSet<()>,
}

/// Runs a task per refit until `stop`. `store` is filled with every refit that there is.
pub async fn dispatch(
    shared: Arc<Shared>,
    api: Api<DeserializeGuard<WeightRefit>>,
    mut store: Writer<WeightRefit>,
    stop: impl Future<Output = ()>,
) {
    let mut stop = pin!(stop);
    let mut pods = pin!(shared.pods.changes());
    let mut refits = pin!(watcher(api, watcher::Config::default()).default_backoff());
    let mut dispatch =
        Dispatch { shared: Arc::clone(&shared), entries: BTreeMap::new(), tasks: JoinSet::new() };
    let mut listed = BTreeSet::new();
    loop {
        tokio::select! {
            () = &mut stop => break,
            Some(event) = refits.next() => match event {
                Ok(event) => {
                    let Some(event) = readable(event) else { continue };
                    store.apply_watcher_event(&event);
                    dispatch.follow(event, &mut listed);
                }
                Err(error) => tracing::warn!(%error, "watch of refits failed"),
            },
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
    fn follow(&mut self, event: Event<WeightRefit>, listed: &mut BTreeSet<String>) {
        match event {
            Event::Init => listed.clear(),
            Event::InitApply(refit) => {
                listed.insert(refit.full_name());
                self.apply(refit);
            }
            Event::InitDone => {
                let gone: Vec<String> =
                    self.entries.keys().filter(|key| !listed.contains(*key)).cloned().collect();
                gone.iter().for_each(|key| self.delete(key));
            }
            Event::Apply(refit) => self.apply(refit),
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
        let (objects, object) = watch::channel(refit);
        let (is_deleted, deletion) = watch::channel(false);
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

/// The event, unless its object cannot be read (D2).
fn readable(event: Event<DeserializeGuard<WeightRefit>>) -> Option<Event<WeightRefit>> {
    let read = |guard: DeserializeGuard<WeightRefit>| match guard.0 {
        Ok(refit) => Some(refit),
        Err(error) => {
            let (name, namespace) = (error.metadata.name, error.metadata.namespace);
            tracing::warn!(name, namespace, error = error.error, "WeightRefit cannot be read");
            None
        }
    };
    Some(match event {
        Event::Init => Event::Init,
        Event::InitDone => Event::InitDone,
        Event::InitApply(guard) => Event::InitApply(read(guard)?),
        Event::Apply(guard) => Event::Apply(read(guard)?),
        Event::Delete(guard) => Event::Delete(read(guard)?),
    })
}
