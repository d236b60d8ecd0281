//! Reads JSON values into typed parts, and names the place of whatever does not fit.

use super::error::LayoutError;
use crate::limits::ENTRIES_MAX;
use crate::nearest::nearest;
use serde_json::{Map, Value};

/// A value and its place in the document, as `rules[3].cut[0]`; the document itself is the place ``.
#[derive(Clone)]
pub(super) struct Node<'a> {
    value: &'a Value,
    place: String,
}

/// A map whose keys are all known.
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    place: String,
}

impl<'a> Node<'a> {
    pub(super) fn root(value: &'a Value) -> Self {
        Self { value, place: String::new() }
    }

    pub(super) fn place(&self) -> &str {
        &self.place
    }

    pub(super) fn is_text(&self) -> bool {
        self.value.is_string()
    }

    fn wrong(&self, expected: &'static str) -> LayoutError {
        let found = match self.value {
            Value::Null => "nothing".to_owned(),
            Value::Array(_) => "a list".to_owned(),
            Value::Object(_) => "a map".to_owned(),
            Value::String(text) => format!("the text `{}`", text.chars().take(80).collect::<String>()),
            other => format!("`{other}`"),
        };
        LayoutError::WrongType { place: self.place.clone(), expected, found }
    }

    fn child(&self, name: &str, value: &'a Value) -> Self {
        let dot = if self.place.is_empty() { "" } else { "." };
        Self { value, place: format!("{}{dot}{name}", self.place) }
    }

    /// The map with any keys, in document order.
    pub(super) fn entries(&self) -> Result<Vec<(&'a str, Self)>, LayoutError> {
        let Value::Object(map) = self.value else { return Err(self.wrong("a map")) };
        self.bounded(map.len())?;
        Ok(map.iter().map(|(key, value)| (key.as_str(), self.child(key, value))).collect())
    }

    /// The map, whose keys must be among `known`.
    pub(super) fn fields(&self, known: &[&'static str]) -> Result<Fields<'a>, LayoutError> {
        let Value::Object(map) = self.value else { return Err(self.wrong("a map")) };
        for key in map.keys() {
            if !known.contains(&key.as_str()) {
                return Err(LayoutError::UnknownKey {
                    place: self.place.clone(),
                    key: key.chars().take(80).collect(),
                    nearest: nearest(key, known.iter().copied()).unwrap_or_default().to_owned(),
                });
            }
        }
        Ok(Fields { map, place: self.place.clone() })
    }

    pub(super) fn list(&self) -> Result<Vec<Self>, LayoutError> {
        let Value::Array(list) = self.value else { return Err(self.wrong("a list")) };
        self.bounded(list.len())?;
        let item = |(i, value)| Self { value, place: format!("{}[{i}]", self.place) };
        Ok(list.iter().enumerate().map(item).collect())
    }

    fn bounded(&self, len: usize) -> Result<(), LayoutError> {
        if len > ENTRIES_MAX {
            return Err(LayoutError::TooMany { place: self.place.clone(), found: len, most: ENTRIES_MAX });
        }
        Ok(())
    }

    pub(super) fn text(&self) -> Result<String, LayoutError> {
        self.value.as_str().map(str::to_owned).ok_or_else(|| self.wrong("text"))
    }

    pub(super) fn integer(&self) -> Result<u64, LayoutError> {
        self.value.as_u64().ok_or_else(|| self.wrong("an integer of at least 0"))
    }

    pub(super) fn boolean(&self) -> Result<bool, LayoutError> {
        self.value.as_bool().ok_or_else(|| self.wrong("`true` or `false`"))
    }

    /// An integer, or an expression of it as text.
    pub(super) fn expression(&self) -> Result<String, LayoutError> {
        match self.value {
            Value::String(text) => Ok(text.clone()),
            _ => self
                .value
                .as_u64()
                .map(|n| n.to_string())
                .ok_or_else(|| self.wrong("an integer of at least 0, or an expression")),
        }
    }

    /// One of a few words.
    pub(super) fn word<T: Copy>(&self, words: &[(&'static str, T)]) -> Result<T, LayoutError> {
        let text = self.text()?;
        words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value).ok_or_else(|| {
            let known = words.iter().map(|(word, _)| *word);
            LayoutError::UnknownWord {
                place: self.place.clone(),
                nearest: nearest(&text, known).unwrap_or_default().to_owned(),
                word: text.chars().take(80).collect(),
            }
        })
    }
}

impl<'a> Fields<'a> {
    pub(super) fn optional(&self, key: &'static str) -> Option<Node<'a>> {
        self.map
            .get(key)
            .map(|value| Node { value: &Value::Null, place: self.place.clone() }.child(key, value))
    }

    pub(super) fn required(&self, key: &'static str) -> Result<Node<'a>, LayoutError> {
        self.optional(key).ok_or_else(|| LayoutError::MissingKey { place: self.place.clone(), key })
    }

    pub(super) fn parse<T>(
        &self,
        key: &'static str,
        read: impl FnOnce(Node<'a>) -> Result<T, LayoutError>,
    ) -> Result<Option<T>, LayoutError> {
        self.optional(key).map(read).transpose()
    }
}
