//! YAML text to trees of nodes that remember where they stand, so that every later refusal can name a line.
//!
//! Stricter than kubectl's reader: duplicate keys are refused, and so is a plain scalar that YAML 1.1 (kubectl)
//! and YAML 1.2 read as different values (`010`, `on`, `no`).

use crate::api::problem::{FieldPath, Position, Problem, Segment};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{Location, Spanned, UserMessageFormatter};
use std::fmt;

/// One YAML value and its place.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Node {
    /// First character of the value, or of the alias that stands for it.
    pub(super) position: Position,
    /// First byte of the value's own text; behind an alias that of the anchored value.
    offset: usize,
    /// Bytes of the value's own text; 0 for block collections.
    bytes: usize,
    /// The value.
    pub(super) value: Value,
}

/// A YAML value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    /// `null`, `~` or nothing.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// Any other number.
    Float(f64),
    /// Text.
    Text(String),
    /// A sequence.
    List(Vec<Node>),
    /// A mapping, in the order of the text.
    Map(Vec<Entry>),
}

/// One entry of a mapping.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    /// Where the key stands.
    pub(super) position: Position,
    /// The key.
    pub(super) key: String,
    /// The value.
    pub(super) node: Node,
}

/// Why a text is refused before its documents are looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unreadable {
    /// Where, when known.
    pub(super) position: Option<Position>,
    /// What is wrong.
    pub(super) problem: Problem,
}

impl Node {
    /// The documents of `text`, empty ones left out.
    ///
    /// # Errors
    /// When the text is no YAML, or has a duplicate key.
    pub(super) fn documents(text: &str) -> Result<Vec<Self>, Unreadable> {
        let options = serde_saphyr::options! { with_snippet: false, strict_booleans: true };
        serde_saphyr::from_multiple_with_options(text, options).map_err(|error| Unreadable {
            position: error.location().map(position_of),
            problem: Problem::Yaml(message(&error)),
        })
    }

    /// The value of `key`, when this is a mapping that has it.
    #[must_use]
    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        let Value::Map(entries) = &self.value else { return None };
        entries.iter().find(|entry| entry.key == key).map(|entry| &entry.node)
    }

    /// The text under `key`.
    #[must_use]
    pub(super) fn text(&self, key: &str) -> Option<&str> {
        match &self.get(key)?.value {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Where the field `path` stands, or the nearest of its parents that is there.
    #[must_use]
    pub(super) fn position_of(&self, path: &FieldPath) -> Position {
        let mut at = self.position;
        let mut node = self;
        for segment in path.segments() {
            let next = match (segment, &node.value) {
                (Segment::Key(key), Value::Map(entries)) => {
                    let Some(entry) = entries.iter().find(|entry| entry.key == *key) else { return at };
                    at = entry.position;
                    &entry.node
                }
                (Segment::Index(index), Value::List(nodes)) => match nodes.get(*index) {
                    Some(next) => {
                        at = next.position;
                        next
                    }
                    None => return at,
                },
                _ => return at,
            };
            node = next;
        }
        at
    }

    /// Refuses plain scalars that other YAML readers understand differently.
    ///
    /// # Errors
    /// With the first such scalar.
    pub(super) fn refuse_ambiguous(&self, text: &str) -> Result<(), Unreadable> {
        match &self.value {
            Value::List(nodes) => nodes.iter().try_for_each(|node| node.refuse_ambiguous(text)),
            Value::Map(entries) => entries.iter().try_for_each(|entry| entry.node.refuse_ambiguous(text)),
            _ => {
                let end = self.offset.saturating_add(self.bytes);
                let scalar = text.get(self.offset..end).unwrap_or_default();
                if !is_ambiguous(scalar) {
                    return Ok(());
                }
                let problem = Problem::Ambiguous { scalar: scalar.to_owned() };
                Err(Unreadable { position: Some(self.position), problem })
            }
        }
    }
}

/// Quoted scalars start with their quote here, so they never match.
fn is_ambiguous(scalar: &str) -> bool {
    let digits = scalar.strip_prefix(['+', '-']).unwrap_or(scalar);
    let octal = digits.len() > 1
        && digits.starts_with('0')
        && digits.bytes().all(|b| b.is_ascii_digit() || b == b'_');
    octal || ["on", "off", "yes", "no", "y", "n"].iter().any(|word| scalar.eq_ignore_ascii_case(word))
}

fn message(error: &serde_saphyr::Error) -> String {
    if let serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. } = error.without_snippet() {
        return format!("key `{key}` is there twice");
    }
    let text = error.without_snippet().render_with_formatter(&UserMessageFormatter);
    // The place is said apart, in front of the message.
    text.split(" at line ").next().unwrap_or_default().to_owned()
}

fn position_of(location: Location) -> Position {
    Position { line: location.line(), column: location.column() }
}

impl From<Node> for serde_json::Value {
    fn from(node: Node) -> Self {
        match node.value {
            Value::Null => Self::Null,
            Value::Bool(value) => value.into(),
            Value::Int(value) => value.into(),
            Value::Float(value) => value.into(),
            Value::Text(text) => text.into(),
            Value::List(nodes) => nodes.into_iter().map(Self::from).collect(),
            Value::Map(entries) => {
                Self::Object(entries.into_iter().map(|entry| (entry.key, entry.node.into())).collect())
            }
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Spanned { value, referenced, defined } = Spanned::<Value>::deserialize(deserializer)?;
        let byte = |n: Option<u64>| n.and_then(|n| usize::try_from(n).ok()).unwrap_or_default();
        let (offset, bytes) = (byte(defined.span().byte_offset()), byte(defined.span().byte_len()));
        Ok(Self { position: position_of(referenced), offset, bytes, value })
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Build)
    }
}

struct Build;

impl<'de> Visitor<'de> for Build {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Int(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        i64::try_from(value)
            .map(Value::Int)
            .map_err(|_| E::custom(format!("integer {value} is above 2^63 - 1")))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut nodes = Vec::new();
        while let Some(node) = seq.next_element()? {
            nodes.push(node);
        }
        Ok(Value::List(nodes))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some((key, node)) = map.next_entry::<Spanned<String>, Node>()? {
            entries.push(Entry { position: position_of(key.referenced), key: key.value, node });
        }
        Ok(Value::Map(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_ambiguous(text: &str) -> Option<(Position, Problem)> {
        let documents = Node::documents(text).expect(text);
        let found = documents.iter().find_map(|node| node.refuse_ambiguous(text).err())?;
        Some((found.position.expect(text), found.problem))
    }

    #[test]
    fn scalars_that_yaml_versions_read_differently_are_refused_with_their_place() {
        for (text, want) in [
            ("a: 010\n", Some((1, 4, "010"))),
            ("a: [1, -007]\n", Some((1, 8, "-007"))),
            ("a:\n  b: No\n", Some((2, 6, "No"))),
            ("a: &x on\nb: 1\n", Some((1, 7, "on"))),
            ("a: '010'\nb: \"on\"\nc: 0\nd: 10\ne: true\nf: 0x10\non: 1\ng: none\n", None),
        ] {
            let want = want.map(|(line, column, scalar)| {
                (Position { line, column }, Problem::Ambiguous { scalar: scalar.into() })
            });
            assert_eq!(first_ambiguous(text), want, "{text}");
        }
    }

    #[test]
    fn broken_yaml_names_its_place() {
        for (text, line, column, message) in [
            ("a: 1\nb: 2\na: 3\n", 3, 1, "key `a` is there twice"),
            ("a: b: c\n", 1, 5, "mapping values are not allowed in this context"),
            ("a: *nope\n", 1, 4, "reference to unknown value"),
        ] {
            let found = Node::documents(text).expect_err(text);
            let want = Unreadable {
                position: Some(Position { line, column }),
                problem: Problem::Yaml(message.into()),
            };
            assert_eq!(found, want);
        }
    }

    #[test]
    fn anchors_and_several_documents_are_read() {
        let nodes = Node::documents("a: &x 1\nb: *x\n---\n---\nc: [2]\n").expect("YAML");
        assert_eq!(nodes.len(), 2);
        assert_eq!(nodes[0].get("b").map(|node| node.value.clone()), Some(Value::Int(1)));
        assert_eq!(nodes[1].position_of(&FieldPath::of("c").index(0)), Position { line: 5, column: 5 });
    }
}
