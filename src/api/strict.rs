//! From YAML nodes to typed documents, with refusals that name the field's path, its line and the remedy.
//!
//! serde's own errors are text; this deserializer keeps them as data by giving serde an error type of its own.

use crate::api::problem::{FieldPath, Position, Problem};
use crate::api::yaml::{Entry, Node, Value};
use serde::de::value::StrDeserializer;
use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Expected, MapAccess, SeqAccess, Unexpected, VariantAccess,
    Visitor,
};
use serde::forward_to_deserialize_any;
use std::fmt::Display;

/// A problem, with its place once the deserializer that met it has said so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Located {
    /// Where it stands.
    pub(super) place: Option<(FieldPath, Position)>,
    /// What is wrong.
    pub(super) problem: Problem,
}

/// The document in `node` as a `T`.
///
/// # Errors
/// With the first problem and its place.
pub(super) fn from_node<'de, T: serde::Deserialize<'de>>(node: &'de Node) -> Result<T, Located> {
    T::deserialize(Strict { node, path: FieldPath::default() })
}

impl Display for Located {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.problem.fmt(f)
    }
}

impl std::error::Error for Located {}

impl From<Problem> for Located {
    fn from(problem: Problem) -> Self {
        Self { place: None, problem }
    }
}

impl serde::de::Error for Located {
    fn custom<T: Display>(message: T) -> Self {
        Problem::Yaml(message.to_string()).into()
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Problem::WrongType { expected: expected.to_string(), found: found.to_string() }.into()
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        match found {
            Unexpected::Signed(value) => {
                let expected = "an integer between -2147483648 and 2147483647".to_owned();
                Problem::WrongType { expected, found: format!("the number {value}") }.into()
            }
            _ => Self::invalid_type(found, expected),
        }
    }

    fn unknown_variant(value: &str, known: &'static [&'static str]) -> Self {
        let known = known.iter().map(|&name| name.to_owned()).collect();
        Problem::UnknownValue { value: value.to_owned(), known }.into()
    }

    fn unknown_field(key: &str, known: &'static [&'static str]) -> Self {
        let known = known.iter().map(|&name| name.to_owned()).collect();
        Problem::UnknownKey { key: key.to_owned(), known }.into()
    }

    fn missing_field(key: &'static str) -> Self {
        Problem::Missing(key.to_owned()).into()
    }
}

struct Strict<'de> {
    node: &'de Node,
    path: FieldPath,
}

impl<'de> Strict<'de> {
    /// The innermost deserializer that sees an error knows its place best.
    fn place<T>(node: &Node, path: &FieldPath, result: Result<T, Located>) -> Result<T, Located> {
        result.map_err(|mut located| {
            if located.place.is_none() {
                let place = match &located.problem {
                    Problem::UnknownKey { key, .. } => {
                        (path.clone(), node.position_of(&FieldPath::default().entry(key)))
                    }
                    _ => (path.clone(), node.position),
                };
                located.place = Some(place);
            }
            located
        })
    }

    fn wrong<T>(&self, expected: &str) -> Result<T, Located> {
        let found = describe(&self.node.value);
        let problem = Problem::WrongType { expected: expected.to_owned(), found };
        Self::place(self.node, &self.path, Err(problem.into()))
    }

    fn map<V: Visitor<'de>>(self, entries: &'de [Entry], visitor: V) -> Result<V::Value, Located> {
        let access = Entries { rest: entries.iter(), value: None, path: self.path.clone() };
        Self::place(self.node, &self.path, visitor.visit_map(access))
    }

    fn list<V: Visitor<'de>>(self, nodes: &'de [Node], visitor: V) -> Result<V::Value, Located> {
        let access = Elements { rest: nodes.iter().enumerate(), path: self.path.clone() };
        Self::place(self.node, &self.path, visitor.visit_seq(access))
    }

    fn integer<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Located> {
        match &self.node.value {
            Value::Int(value) => Self::place(self.node, &self.path, visitor.visit_i64(*value)),
            _ => self.wrong("an integer"),
        }
    }
}

fn describe(value: &Value) -> String {
    match value {
        Value::Null => "nothing".into(),
        Value::Bool(value) => format!("`{value}`"),
        Value::Int(value) => format!("the number {value}"),
        Value::Float(value) => format!("the number {value}"),
        Value::Text(text) => format!("the text `{}`", text.chars().take(80).collect::<String>()),
        Value::List(_) => "a list".into(),
        Value::Map(_) => "a mapping".into(),
    }
}

macro_rules! integers {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Located> {
            self.integer(visitor)
        }
    )*};
}

impl<'de> Deserializer<'de> for Strict<'de> {
    type Error = Located;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Located> {
        let (node, path) = (self.node, self.path.clone());
        let result = match &self.node.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Int(value) => visitor.visit_i64(*value),
            Value::Float(value) => visitor.visit_f64(*value),
            Value::Text(text) => visitor.visit_borrowed_str(text),
            Value::List(nodes) => return self.list(nodes, visitor),
            Value::Map(entries) => return self.map(entries, visitor),
        };
        Self::place(node, &path, result)
    }

    integers! { deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_u8 deserialize_u16
    deserialize_u32 deserialize_u64 }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Located> {
        match &self.node.value {
            Value::Bool(value) => visitor.visit_bool(*value),
            _ => self.wrong("`true` or `false`"),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Located> {
        match &self.node.value {
            Value::Text(text) => Self::place(self.node, &self.path, visitor.visit_borrowed_str(text)),
            _ => self.wrong("text"),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Located> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Located> {
        match &self.node.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Located> {
        match &self.node.value {
            Value::List(nodes) => self.list(nodes, visitor),
            _ => self.wrong("a list"),
        }
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Located> {
        match &self.node.value {
            Value::Map(entries) => self.map(entries, visitor),
            _ => self.wrong("a mapping"),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Located> {
        self.deserialize_map(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        known: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Located> {
        match &self.node.value {
            Value::Text(text) => Self::place(self.node, &self.path, visitor.visit_enum(Word(text))),
            _ => self.wrong(&format!("one of {}", known.join(", "))),
        }
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Located> {
        visitor.visit_unit()
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Located> {
        visitor.visit_newtype_struct(self)
    }

    // No document type has these; what stands there then speaks for itself.
    forward_to_deserialize_any! { f32 f64 char bytes byte_buf unit unit_struct tuple tuple_struct identifier }
}

struct Entries<'de> {
    rest: std::slice::Iter<'de, Entry>,
    value: Option<&'de Entry>,
    path: FieldPath,
}

impl<'de> MapAccess<'de> for Entries<'de> {
    type Error = Located;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Located> {
        self.value = self.rest.next();
        self.value.map(|entry| seed.deserialize(StrDeserializer::new(&entry.key))).transpose()
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Located> {
        let entry =
            self.value.take().ok_or_else(|| Located::from(Problem::Yaml("value without a key".into())))?;
        seed.deserialize(Strict { node: &entry.node, path: self.path.entry(&entry.key) })
    }
}

struct Elements<'de> {
    rest: std::iter::Enumerate<std::slice::Iter<'de, Node>>,
    path: FieldPath,
}

impl<'de> SeqAccess<'de> for Elements<'de> {
    type Error = Located;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Located> {
        let Some((index, node)) = self.rest.next() else { return Ok(None) };
        seed.deserialize(Strict { node, path: self.path.index(index) }).map(Some)
    }
}

/// A variant without content, which is all that enums of the resource have.
struct Word<'de>(&'de str);

impl<'de> EnumAccess<'de> for Word<'de> {
    type Error = Located;
    type Variant = Self;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self), Located> {
        Ok((seed.deserialize(StrDeserializer::<Located>::new(self.0))?, self))
    }
}

impl<'de> VariantAccess<'de> for Word<'de> {
    type Error = Located;

    fn unit_variant(self) -> Result<(), Located> {
        Ok(())
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, Located> {
        seed.deserialize(StrDeserializer::new(self.0))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Located> {
        visitor.visit_borrowed_str(self.0)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Located> {
        visitor.visit_borrowed_str(self.0)
    }
}
