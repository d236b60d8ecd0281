//! The refits as the API server last told, of every namespace that the operator looks at.

use super::scope::Scope;
use crate::api::refit::WeightRefit;
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{ObjectRef, Store, store};
use kube::runtime::watcher::Event;
use std::collections::BTreeSet;
use std::sync::Arc;

/// What is known of refits; written by [`Part`]s.
#[derive(Clone)]
pub struct Refits {
    stores: Vec<Store<WeightRefit>>,
}

/// Those of one namespace, or of all, which one watch tells of.
pub struct Part {
    namespace: Option<String>,
    writer: Writer<WeightRefit>,
    /// What the list that is being read has so far, by namespace/name.
    listed: BTreeSet<String>,
}

impl Refits {
    /// Nothing is known yet.
    #[must_use]
    pub fn new(scope: &Scope) -> (Self, Vec<Part>) {
        let part = |namespace| {
            let (store, writer) = store();
            (store, Part { namespace, writer, listed: BTreeSet::new() })
        };
        let (stores, parts) = scope.parts().into_iter().map(part).unzip();
        (Self { stores }, parts)
    }

    /// The refit of this name (namespace/name).
    #[must_use]
    pub fn get(&self, refit: &str) -> Option<Arc<WeightRefit>> {
        let (namespace, name) = refit.split_once('/')?;
        let key = ObjectRef::new(name).within(namespace);
        self.stores.iter().find_map(|store| store.get(&key))
    }

    /// Waits until all that there were at the start are known; false where nobody watches them any more.
    pub async fn listed(&self) -> bool {
        for store in &self.stores {
            if store.wait_until_ready().await.is_err() {
                return false;
            }
        }
        true
    }
}

impl Part {
    /// The namespace; all of them where there is none.
    pub(super) fn namespace(&self) -> Option<&str> {
        self.namespace.as_deref()
    }

    /// Takes what the watch tells. Which of `known` (namespace/name) a list that is complete now does not have, so that
    /// they are gone; those of other namespances it says nothing of.
    pub fn take<'k>(
        &mut self,
        event: &Event<WeightRefit>,
        known: impl Iterator<Item = &'k String>,
    ) -> Vec<String> {
        self.writer.apply_watcher_event(event);
        match event {
            Event::Init => self.listed.clear(),
            Event::InitApply(refit) => drop(self.listed.insert(refit.full_name())),
            Event::InitDone => {
                let listed = std::mem::take(&mut self.listed);
                return known.filter(|key| self.covers(key) && !listed.contains(*key)).cloned().collect();
            }
            Event::Apply(_) | Event::Delete(_) => {}
        }
        Vec::new()
    }

    fn covers(&self, refit: &str) -> bool {
        let of = refit.split_once('/').map(|(namespace, _)| namespace);
        self.namespace.as_deref().is_none_or(|own| Some(own) == of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refit(name: &str) -> WeightRefit {
        let (namespace, name) = name.split_once('/').expect("two parts");
        let spec = json!({
            "model": {"type": "Registered"},
            "training": {"worldSize": 2, "ranks": {"type": "StatefulSet"}},
            "inference": {"pools": [{"name": "default", "ranksPerReplica": 2, "ranks": {"type": "StatefulSet"}}]},
        });
        let kind = ("weightrefit.dev/v1alpha1", "WeightRefit");
        let metadata = json!({"namespace": namespace, "name": name});
        let json = json!({"apiVersion": kind.0, "kind": kind.1, "metadata": metadata, "spec": spec});
        serde_json::from_value(json).expect("a refit")
    }

    #[test]
    fn a_list_of_one_namespace_is_whole_for_that_namespace_alone() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let known = names(&["rl/gone", "rl/here", "serve/there"]);
        for (scope, want) in
            [(vec!["rl", "serve"], vec!["rl/gone"]), (vec![], vec!["rl/gone", "serve/there"])]
        {
            let (refits, mut parts) = Refits::new(&Scope::of(names(&scope)));
            let listed = [Event::Init, Event::InitApply(refit("rl/here")), Event::InitDone];
            let gone = listed.iter().flat_map(|event| parts[0].take(event, known.iter()));
            assert_eq!(gone.collect::<Vec<_>>(), names(&want), "{scope:?}");
            assert!(refits.get("rl/here").is_some() && refits.get("serve/there").is_none());
            let Some(other) = parts.get_mut(1) else { continue };
            other.take(&Event::Apply(refit("serve/there")), known.iter());
            assert!(refits.get("rl/here").is_some() && refits.get("serve/there").is_some());
        }
    }
}
