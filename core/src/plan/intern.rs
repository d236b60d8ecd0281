//! Equal values stored once and named by a small number: layers and experts repeat the same regions.

use std::collections::BTreeMap;
use std::sync::Arc;

/// The distinct values seen so far, numbered in order of first sight.
#[derive(Debug)]
pub(super) struct Interner<T> {
    ids: BTreeMap<Arc<T>, u32>,
    items: Vec<Arc<T>>,
}

impl<T> Default for Interner<T> {
    fn default() -> Self {
        Self { ids: BTreeMap::new(), items: Vec::new() }
    }
}

impl<T: Ord> Interner<T> {
    pub(super) fn id(&mut self, item: T) -> u32 {
        if let Some(id) = self.ids.get(&item) {
            return *id;
        }
        let id = u32::try_from(self.items.len()).expect("2^32 distinct values do not fit in memory");
        let item = Arc::new(item);
        self.ids.insert(Arc::clone(&item), id);
        self.items.push(item);
        id
    }

    /// The value of an id that [`Self::id`] gave.
    pub(super) fn get(&self, id: u32) -> &T {
        &self.items[id as usize]
    }

    pub(super) fn len(&self) -> usize {
        self.items.len()
    }
}
