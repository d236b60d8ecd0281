//! What turns the types of the resource into a schema that an API server takes and people read: patterns, rules in
//! CEL, and the shapes that derive cannot make.
//!
//! Every rule here that concerns one object stands in `check` too, for files.

use crate::api::condition::ConditionType;
use crate::limits;
use schemars::generate::SchemaGenerator;
use schemars::{Schema, json_schema};
use serde_json::{Map, Value, json};

/// A DNS label, as RFC 1123 has it.
pub(super) const DNS_LABEL: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
/// A DNS subdomain, as names of objects are.
pub(super) const DNS_SUBDOMAIN: &str = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
/// A key of a ConfigMap.
pub(super) const CONFIG_MAP_KEY: &str = "^[-._a-zA-Z0-9]+$";
/// A reason: one word in camel case.
pub(super) const REASON: &str = "^[A-Z][A-Za-z0-9]*$";
/// A digest of agreement.
pub(super) const SHA256: &str = "^sha256:[0-9a-f]{64}$";

/// Where a schema keeps words with a meaning each, until [`finish`] has moved them to its description.
const KNOWN: &str = "x-known-values";

/// CEL rules, each with what it says when it is broken.
pub(super) fn rules(rules: &[(&str, &str)]) -> Value {
    rules.iter().map(|(rule, message)| json!({"rule": rule, "message": message})).collect()
}

/// The rules of a union: the member of a type is set exactly when `type` names it. Types without a member are not
/// listed.
pub(super) fn union(members: &[(&str, &str)]) -> Value {
    let rule = |(kind, member): &(&str, &str)| {
        json!({
            "rule": format!("self.type == '{kind}' ? has(self.{member}) : !has(self.{member})"),
            "message": format!("{member} must be set when type is {kind}, and only then"),
        })
    };
    members.iter().map(rule).collect()
}

/// Several lists of rules as one: a schema has a single list, and the last one written would win.
pub(super) fn all(lists: &[Value]) -> Value {
    lists.iter().filter_map(Value::as_array).flatten().cloned().collect()
}

/// An object of any keys.
pub(super) fn free_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": true,
        "maxProperties": limits::INLINE_KEYS_MAX,
    })
}

/// Sizes by name of the axis.
pub(super) fn axis_sizes(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "additionalProperties":
            {"type": "integer", "format": "int32", "minimum": 1, "maximum": limits::AXIS_SIZE_MAX},
        "maxProperties": limits::AXES_MAX,
    })
}

/// A number of replicas, or a percentage of them. The bounds of one kind do not concern values of the other.
pub(super) fn count_or_percentage(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "x-kubernetes-int-or-string": true,
        "minimum": 1,
        "maximum": limits::REPLICAS_MAX,
        "maxLength": "100%".len(),
        "pattern": "^([1-9][0-9]?|100)%$",
    })
}

/// A point in time, whose form bounds its length.
pub(super) fn time(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "format": "date-time"})
}

/// The type of a condition: open, but with the meaning of those that are known.
pub(super) fn condition_type(_: &mut SchemaGenerator) -> Schema {
    let known: Vec<_> = ConditionType::ALL.iter().map(|kind| word(kind.name(), kind.meaning())).collect();
    json_schema!({
        "type": "string",
        "minLength": 1,
        "maxLength": limits::REASON_MAX,
        "pattern": REASON,
        KNOWN: known,
    })
}

/// [`weightrefit_core::membership::roster::Cause`].
pub(super) fn cause(_: &mut SchemaGenerator) -> Schema {
    values(&[
        ("Created", "The first epoch."),
        ("TrainingRankLost", "A training rank's agent was lost and replaced."),
        ("TrainingChanged", "A trainer came, finished or changed its size."),
        ("SpecChanged", "The resource changed."),
        ("MemberReplaced", "The agent of an inference rank was replaced."),
        ("ReplicaJoined", "A replica joined."),
    ])
}

/// [`weightrefit_proto::report::RoundOutcome`].
pub(super) fn outcome(_: &mut SchemaGenerator) -> Schema {
    values(&[("Committed", "At least one replica serves the version."), ("Aborted", "No replica does.")])
}

/// A closed set of words as derive writes it for an enum with doc comments.
fn values(values: &[(&str, &str)]) -> Schema {
    json_schema!({"oneOf": values.iter().map(|(name, meaning)| word(name, meaning)).collect::<Vec<_>>()})
}

fn word(name: &str, meaning: &str) -> Value {
    json!({"type": "string", "const": name, "description": meaning})
}

/// Finishes the schema of `spec` or `status`, all types inlined: makes it structural, and its texts readable.
pub(super) fn finish(schema: &mut Schema) {
    if let Some(object) = schema.as_object_mut() {
        finish_node(object);
    }
}

fn finish_node(schema: &mut Map<String, Value>) {
    unwrap_option(schema);
    close_enum(schema);
    if let Some(Value::String(text)) = schema.get_mut("description") {
        *text = reflowed(text);
    }
    for key in ["items", "additionalProperties"] {
        if let Some(Value::Object(inner)) = schema.get_mut(key) {
            finish_node(inner);
        }
    }
    if let Some(Value::Object(properties)) = schema.get_mut("properties") {
        properties.values_mut().filter_map(Value::as_object_mut).for_each(finish_node);
    }
}

/// An optional field is one that may be absent. `null` needs no leave: the API server drops it where a field is not
/// nullable, and so does serde.
fn unwrap_option(schema: &mut Map<String, Value>) {
    if let Some(Value::Array(types)) = schema.get_mut("type") {
        types.retain(|kind| kind != "null");
        if let [one] = types.as_mut_slice() {
            let one = one.take();
            schema.insert("type".into(), one);
        }
    }
    if schema.get("default").is_some_and(Value::is_null) {
        schema.remove("default");
    }
    let is_option = |of: &Vec<Value>| of.len() == 2 && of[1] == json!({"type": "null"});
    if schema.get("anyOf").and_then(Value::as_array).is_some_and(is_option)
        && let Some(Value::Array(mut of)) = schema.remove("anyOf")
        && let Value::Object(inner) = of.swap_remove(0)
    {
        // What the field says of itself stands; the rest is its type's.
        for (key, value) in inner {
            schema.entry(key).or_insert(value);
        }
    }
}

/// Words with a meaning each become `enum`, unless the set is open; the meanings, for which `enum` has no place, join
/// the description.
fn close_enum(schema: &mut Map<String, Value>) {
    let (head, words) = match (schema.remove("oneOf"), schema.remove(KNOWN)) {
        (Some(Value::Array(words)), _) => {
            schema.insert("type".into(), "string".into());
            schema.insert("enum".into(), words.iter().map(|word| word["const"].clone()).collect());
            ("Possible values:", words)
        }
        (_, Some(Value::Array(words))) => ("Known values:", words),
        _ => return,
    };
    let text = schema.get("description").and_then(Value::as_str).unwrap_or_default();
    let mut text = format!("{text}\n\n{head}");
    for word in &words {
        let of = |key: &str| word[key].as_str().unwrap_or_default().replace('\n', " ");
        text.push_str(&format!("\n- `{}`: {}", of("const"), of("description")));
    }
    schema.insert("description".into(), text.into());
}

/// Lines of a comment are wrapped for the eye of who reads code; only paragraphs and lists mean something.
fn reflowed(text: &str) -> String {
    let mut out = String::new();
    for line in text.lines().map(str::trim) {
        let glue = match (out.is_empty(), line.is_empty() || line.starts_with("- ") || out.ends_with('\n')) {
            (true, _) => "",
            (false, true) => "\n",
            (false, false) => " ",
        };
        out.push_str(glue);
        out.push_str(line);
    }
    out
}
