//! Additions to a document, as JSON Patch (RFC 6902) has them; nothing else is needed, as nothing is ever changed.

use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// One operation `add` of a JSON Patch.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "op", rename = "add")]
pub struct Addition {
    /// JSON Pointer of the place.
    pub path: String,
    /// What is put there.
    pub value: Value,
}

/// Additions to lists of one document, the lists being made where they are missing.
pub(super) struct Patch<'d> {
    document: &'d Value,
    /// Lists that this patch has begun, by the index of their addition.
    begun: BTreeMap<String, usize>,
    additions: Vec<Addition>,
}

impl<'d> Patch<'d> {
    pub(super) fn new(document: &'d Value) -> Self {
        Self { document, begun: BTreeMap::new(), additions: Vec::new() }
    }

    /// At the end of the list at `path`.
    pub(super) fn append(&mut self, path: &str, value: Value) {
        self.add(path, "-", value);
    }

    /// In front of the list at `path`.
    pub(super) fn insert_first(&mut self, path: &str, value: Value) {
        self.add(path, "0", value);
    }

    fn add(&mut self, path: &str, at: &str, value: Value) {
        if self.document.pointer(path).is_some_and(Value::is_array) {
            self.additions.push(Addition { path: format!("{path}/{at}"), value });
        } else if let Some(begun) = self.begun.get(path) {
            let list = self.additions[*begun].value.as_array_mut().expect("it was begun as a list");
            list.insert(if at == "-" { list.len() } else { 0 }, value);
        } else {
            self.begun.insert(path.to_owned(), self.additions.len());
            self.additions.push(Addition { path: path.to_owned(), value: json!([value]) });
        }
    }

    pub(super) fn into_additions(self) -> Vec<Addition> {
        self.additions
    }
}

/// Does what an API server does with such a patch. `document` is the one that it was made for.
///
/// # Panics
/// Where it was made for another document.
pub fn apply(document: &mut Value, additions: &[Addition]) {
    for Addition { path, value } in additions {
        let (parent, last) = path.rsplit_once('/').expect("a pointer below the root");
        match document.pointer_mut(parent).expect("the parent is there") {
            Value::Array(list) => {
                let index = if last == "-" { list.len() } else { last.parse().expect("an index") };
                list.insert(index, value.clone());
            }
            Value::Object(map) => drop(map.insert(last.to_owned(), value.clone())),
            other => panic!("{parent} is {other}, which has no parts"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_begun_once_and_keep_what_they_have() {
        let document = json!({"a": [1], "b": null});
        let mut patch = Patch::new(&document);
        for (path, value) in [("/a", 2), ("/b", 3), ("/c", 4), ("/b", 5)] {
            patch.append(path, json!(value));
        }
        for (path, value) in [("/a", 6), ("/c", 7)] {
            patch.insert_first(path, json!(value));
        }
        let additions = patch.into_additions();
        let json = serde_json::to_value(&additions).expect("JSON");
        assert_eq!(json[0], json!({"op": "add", "path": "/a/-", "value": 2}));
        let mut patched = document.clone();
        apply(&mut patched, &additions);
        assert_eq!(patched, json!({"a": [6, 1, 2], "b": [3, 5], "c": [7, 4]}));
    }
}
