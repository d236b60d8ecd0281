//! The CustomResourceDefinition: `crds/` holds what `weightrefit crd` prints, and its schema is one that an API server
//! takes and that people can read, field by field.
//!
//! `REWRITE=1 cargo test --test resource` writes the file anew.

use crate::schema;
use kube::CustomResourceExt;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;
use weightrefit::api::refit::WeightRefit;
use weightrefit::api::status::WeightRefitStatus;
use weightrefit_core::membership::roster::Cause;
use weightrefit_proto::report::RoundOutcome;

const FILE: &str = "crds/weightrefits.weightrefit.dev.yaml";

#[test]
fn the_file_is_what_the_command_prints() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_weightrefit")).arg("crd").output().expect("weightrefit runs");
    let printed = String::from_utf8(output.stdout).expect("UTF-8");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(FILE);
    if std::env::var_os("REWRITE").is_some() {
        fs::write(&path, &printed).expect(FILE);
    }
    let file = fs::read_to_string(&path).expect(FILE);
    assert!(file == printed, "{FILE} is stale: run `REWRITE=1 cargo test --test resource`");
    let read: Value = serde_saphyr::from_str(&file).expect("YAML");
    assert_eq!(read, serde_json::to_value(WeightRefit::crd()).expect("JSON"));
}

#[test]
fn the_schema_breaks_no_rule() {
    let schema = schema();
    let mut findings = Vec::new();
    for rule in RULES {
        walk(&schema, &mut Vec::new(), &mut |path, node| {
            if let Some(finding) = (rule.find)(path, node) {
                findings.push(format!("{}: {} {finding}", rule.name, shown(path)));
            }
        });
    }
    assert!(findings.is_empty(), "{}", findings.join("\n"));
}

#[test]
fn every_rule_finds_what_breaks_it() {
    for rule in RULES {
        for (text, broken) in
            rule.bad.iter().map(|bad| (bad, true)).chain(rule.good.iter().map(|good| (good, false)))
        {
            let node: Value = serde_json::from_str(text).expect(text);
            let mut found = false;
            walk(&node, &mut vec!["spec".into()], &mut |path, node| {
                found |= (rule.find)(path, node).is_some()
            });
            assert_eq!(found, broken, "{}: {text}", rule.name);
        }
    }
}

#[test]
fn columns_and_names_are_those_of_the_contract() {
    let crd = serde_json::to_value(WeightRefit::crd()).expect("JSON");
    let version = &crd["spec"]["versions"][0];
    let columns = version["additionalPrinterColumns"].as_array().expect("columns");
    let narrow =
        columns.iter().filter(|column| column.get("priority").is_none_or(|priority| *priority == json!(0)));
    let names: Vec<_> = narrow.map(|column| column["name"].as_str().expect("name")).collect();
    assert_eq!(names, ["Ready", "Reason", "Step", "Current", "Desired", "Ended", "Age"]);
    assert_eq!(crd["spec"]["names"]["shortNames"], json!(["wr"]));
    assert_eq!(crd["spec"]["scope"], "Namespaced");
    assert_eq!(version["subresources"], json!({"status": {}}));
    for column in columns {
        let path = column["jsonPath"].as_str().expect("path");
        let mut node = &schema();
        // Conditions are found by type and metadata has no schema; all other paths are plain.
        for key in path.split('.').skip(1).filter(|_| !path.contains('[') && !path.contains("metadata")) {
            node = &node["properties"][key];
        }
        assert!(!node.is_null(), "{path} is not in the schema");
    }
}

#[test]
fn a_status_is_written_as_it_was_read() {
    let text = include_str!("status.json");
    let status: WeightRefitStatus = serde_json::from_str(text).expect("status");
    assert_eq!(
        serde_json::to_value(&status).expect("JSON"),
        serde_json::from_str::<Value>(text).expect("JSON")
    );
    assert_eq!(serde_json::to_value(WeightRefitStatus::default()).expect("JSON"), json!({}));
    let newer = r#"{"observedGeneration": 1, "unheardOf": true}"#;
    assert_eq!(serde_json::from_str::<WeightRefitStatus>(newer).expect(newer).observed_generation, Some(1));
}

#[test]
fn closed_sets_that_other_crates_own_are_theirs() {
    let schema = schema();
    let status = &schema["properties"]["status"]["properties"];
    for word in status["membership"]["properties"]["cause"]["enum"].as_array().expect("causes") {
        serde_json::from_value::<Cause>(word.clone()).expect("a cause");
    }
    for word in status["lastRound"]["properties"]["outcome"]["enum"].as_array().expect("outcomes") {
        serde_json::from_value::<RoundOutcome>(word.clone()).expect("an outcome");
    }
}

/// One rule for every node of the schema: what is wrong with the node, and samples (each the schema of `spec`) that it
/// must and must not find fault with.
struct Rule {
    name: &'static str,
    find: fn(&[String], &Map<String, Value>) -> Option<String>,
    bad: &'static [&'static str],
    good: &'static [&'static str],
}

const RULES: &[Rule] = &[
    Rule {
        name: "a field's text begins with its name",
        find: |path, node| {
            let name = path.last().filter(|name| *name != "[]" && *name != "{}")?;
            let text = node.get("description").and_then(Value::as_str).unwrap_or_default();
            let told = text.strip_prefix(&format!("{name}: ")).is_some_and(|rest| rest.len() > 3);
            (!told).then(|| format!("says `{text}`"))
        },
        bad: &[
            r#"{"properties": {"a": {"type": "string"}}}"#,
            r#"{"properties": {"a": {"description": "a thing"}}}"#,
        ],
        good: &[r#"{"description": "spec: what.", "properties": {"a": {"description": "a: a thing."}}}"#],
    },
    Rule {
        name: "a field of spec says its default, whether it can change, and gives an example",
        find: |path, node| {
            if path.first().is_none_or(|first| first != "spec")
                || path.len() < 2
                || path.iter().any(|key| key == "{}")
            {
                return None;
            }
            let text = node.get("description").and_then(Value::as_str).unwrap_or_default().to_lowercase();
            let is_leaf = node.get("properties").is_none();
            let defaulted = node.contains_key("default") && is_leaf;
            let wanted = [("default", defaulted), ("mutable", true), ("example: ", is_leaf)];
            let missing = wanted.iter().find(|(word, wanted)| *wanted && !text.contains(word));
            missing
                .filter(|_| path.last().is_some_and(|name| name != "[]"))
                .map(|(word, _)| format!("lacks `{word}`"))
        },
        bad: &[
            r#"{"properties": {"a": {"type": "integer", "description": "a: n. Mutable."}}}"#,
            r#"{"properties": {"a": {"type": "integer", "description": "a: n. Example: `1`."}}}"#,
            r#"{"properties": {"a": {"type": "integer", "default": 1, "description": "a: n. Mutable. Example: `1`."}}}"#,
        ],
        good: &[
            r#"{"properties": {"a": {"description": "a: n. Default 1. Mutable. Example: `1`.", "default": 1}}}"#,
        ],
    },
    Rule {
        name: "no word is a boolean to YAML 1.1",
        find: |path, node| {
            // Kubernetes' conventions have True and False in conditions, which no person writes.
            if path == ["status", "conditions", "[]", "status"] {
                return None;
            }
            let is_boolean = |word: &&Value| {
                let word = word.as_str().unwrap_or("y").to_lowercase();
                ["y", "n", "yes", "no", "on", "off", "true", "false", "null", "~"].contains(&word.as_str())
            };
            Some(format!("has {}", node.get("enum")?.as_array()?.iter().find(is_boolean)?))
        },
        bad: &[r#"{"enum": ["Auto", "Off"]}"#, r#"{"enum": ["Auto", null]}"#],
        good: &[r#"{"enum": ["Auto", "Disabled"]}"#],
    },
    Rule {
        name: "every word of a closed set is explained",
        find: |_, node| {
            let text = node.get("description").and_then(Value::as_str).unwrap_or_default();
            let explained =
                |word: &&Value| !text.contains(&format!("- `{}`: ", word.as_str().unwrap_or_default()));
            Some(format!("does not explain {}", node.get("enum")?.as_array()?.iter().find(explained)?))
        },
        bad: &[r#"{"enum": ["Auto", "Tcp"], "description": "- `Auto`: the fastest"}"#],
        good: &[r#"{"enum": ["Auto"], "description": "- `Auto`: the fastest"}"#],
    },
    Rule {
        name: "numbers are bounded signed integers",
        find: |_, node| match node.get("type")?.as_str()? {
            "number" => Some("is a float".into()),
            "integer" => {
                let format = node.get("format").and_then(Value::as_str).unwrap_or_default();
                let bounded = node.contains_key("minimum") && node.contains_key("maximum");
                (!bounded || !["int32", "int64"].contains(&format))
                    .then(|| format!("has format `{format}`, {bounded}"))
            }
            _ => None,
        },
        bad: &[
            r#"{"type": "number"}"#,
            r#"{"type": "integer", "format": "uint32", "minimum": 0, "maximum": 1}"#,
            r#"{"type": "integer", "format": "int32", "minimum": 0}"#,
        ],
        good: &[r#"{"type": "integer", "format": "int64", "minimum": 0, "maximum": 1}"#],
    },
    Rule {
        name: "texts are bounded",
        find: |_, node| {
            let bounded = ["enum", "maxLength"].iter().any(|key| node.contains_key(*key))
                || node.get("format").is_some_and(|format| format == "date-time");
            let text = node.get("type").is_some_and(|kind| kind == "string")
                || node.contains_key("x-kubernetes-int-or-string");
            (text && !bounded).then(|| "has no maxLength".into())
        },
        bad: &[r#"{"type": "string"}"#, r#"{"x-kubernetes-int-or-string": true}"#],
        good: &[r#"{"type": "string", "maxLength": 1}"#, r#"{"type": "string", "format": "date-time"}"#],
    },
    Rule {
        name: "lists are bounded, and say how they merge",
        find: |_, node| {
            let told = ["maxItems", "x-kubernetes-list-type"].iter().all(|key| node.contains_key(*key));
            (node.get("type")? == "array" && !told).then(|| "lacks maxItems or x-kubernetes-list-type".into())
        },
        bad: &[
            r#"{"type": "array", "maxItems": 1}"#,
            r#"{"type": "array", "x-kubernetes-list-type": "set"}"#,
        ],
        good: &[r#"{"type": "array", "maxItems": 1, "x-kubernetes-list-type": "set"}"#],
    },
    Rule {
        name: "objects have a closed set of keys, or a bounded number",
        find: |_, node| {
            let closed =
                node.contains_key("properties") && !node.contains_key("x-kubernetes-preserve-unknown-fields");
            (node.get("type")? == "object" && !closed && !node.contains_key("maxProperties"))
                .then(|| "has no maxProperties".into())
        },
        bad: &[r#"{"type": "object"}"#, r#"{"type": "object", "additionalProperties": {"type": "boolean"}}"#],
        good: &[r#"{"type": "object", "properties": {}}"#, r#"{"type": "object", "maxProperties": 1}"#],
    },
    Rule {
        name: "defaults of objects are written in full",
        find: |_, node| {
            let default = node.get("default")?.as_object()?;
            let inner = node.get("properties")?.as_object()?;
            let mut missing =
                inner.iter().filter(|(key, of)| of.get("default").is_some() && !default.contains_key(*key));
            missing.next().map(|(key, _)| format!("lacks `{key}` in its default"))
        },
        bad: &[r#"{"default": {}, "properties": {"a": {"default": 1}}}"#],
        good: &[r#"{"default": {"a": 1}, "properties": {"a": {"default": 1}, "b": {}}}"#],
    },
    Rule {
        name: "a required field of spec says so, and no other does",
        find: |path, node| {
            if path.first().is_none_or(|first| first != "spec") {
                return None;
            }
            let required: Vec<_> =
                node.get("required").and_then(Value::as_array).into_iter().flatten().collect();
            let mut fields = node.get("properties")?.as_object()?.iter();
            let differs = fields.find(|(key, of)| {
                let text = of.get("description").and_then(Value::as_str).unwrap_or_default();
                let says =
                    ["Required.", "Required;", "Required where"].iter().any(|words| text.contains(words));
                says != required.iter().any(|name| *name == *key)
            });
            differs.map(|(key, _)| format!("differs in `{key}`"))
        },
        bad: &[
            r#"{"required": ["a"], "properties": {"a": {"description": "a: n. Absent by default."}}}"#,
            r#"{"properties": {"a": {"description": "a: n. Required; 1 to 2."}}}"#,
        ],
        good: &[r#"{"required": ["a"], "properties": {"a": {"description": "a: n. Required; 1 to 2."}}}"#],
    },
    Rule {
        name: "the schema is structural",
        find: |path, node| {
            // kube writes the root, and there an optional status; the API server keeps no null in it.
            if path == ["status"] && node.get("properties").is_some() {
                return None;
            }
            let loose = [
                "anyOf",
                "oneOf",
                "allOf",
                "not",
                "$ref",
                "nullable",
                "const",
                "uniqueItems",
                "x-known-values",
            ];
            loose.iter().find(|key| node.contains_key(**key)).map(|key| format!("has `{key}`"))
        },
        bad: &[r#"{"oneOf": []}"#, r#"{"properties": {"a": {"nullable": true}}}"#],
        good: &[r#"{"type": "string"}"#],
    },
];

/// Shows every node of `schema` and its path to `visit`; `[]` stands for elements, `{}` for values of a map.
fn walk(schema: &Value, path: &mut Vec<String>, visit: &mut impl FnMut(&[String], &Map<String, Value>)) {
    let Some(node) = schema.as_object() else { return };
    visit(path, node);
    let mut inner = Vec::new();
    inner.extend(node.get("items").map(|items| ("[]", items)));
    inner.extend(node.get("additionalProperties").map(|values| ("{}", values)));
    let properties = node.get("properties").and_then(Value::as_object).into_iter().flatten();
    inner.extend(properties.map(|(key, of)| (key.as_str(), of)));
    for (key, of) in inner {
        path.push(key.into());
        walk(of, path, visit);
        path.pop();
    }
}

fn shown(path: &[String]) -> String {
    path.join(".")
}
