//! A watch as all of the operator's are: it begins anew after whatever failure, after a growing pause, and each
//! failure is counted.

use crate::limits;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Config, Event, watcher};
use kube::{Api, Resource};
use prometheus::IntCounterVec;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use tokio_stream::{Stream, StreamExt};

/// What happens to the objects that `config` selects. `failures` counts by `resource`.
pub fn watch<K>(
    api: Api<K>,
    config: Config,
    failures: &IntCounterVec,
) -> impl Stream<Item = Event<K>> + Send + use<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let resource = K::plural(&());
    let failures = failures.with_label_values(&[&resource]);
    // Ends a watch that says nothing, as one does whose connection was lost without a word.
    let config = config.timeout(limits::WATCH_SECONDS);
    watcher(api, config).default_backoff().filter_map(move |event| match event {
        Ok(event) => Some(event),
        Err(error) => {
            failures.inc();
            tracing::warn!(%resource, %error, "watch failed; it begins anew");
            None
        }
    })
}
