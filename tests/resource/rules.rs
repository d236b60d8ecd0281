//! The rules that the API server enforces from the definition are those that files are checked by: each row is refused
//! by both, and each rule of the definition has a row. The rules are evaluated as the API server does, defaults first.

use crate::schema;
use kube::core::cel::Validator;
use serde_json::Value;
use std::collections::BTreeSet;
use weightrefit::api::documents::{Documents, SourceText};

const GOOD: &str = "\
apiVersion: weightrefit.dev/v1alpha1
kind: WeightRefit
metadata: {name: qwen3-30b, namespace: rl}
spec:
  model: {type: HuggingFaceConfig, huggingFaceConfig: {configMapKeyRef: {name: qwen3-30b-config, key: config.json}}}
  training:
    worldSize: 16
    ranks: {type: JobSet, ranksPerPod: 8, jobSet: {replicatedJobs: [trainer]}}
    layout: {type: Preset, preset: {name: megatron/qwen3-moe, revision: 1, sizes: {tp: 2, pp: 2, ep: 8}}}
  inference:
    pools:
    - name: default
      ranksPerReplica: 8
      ranks: {type: LeaderWorkerSet, ranksPerPod: 8}
      serving: {type: WithinStaleness, withinStaleness: {maxStaleSteps: 4}}
  commit: {strategy: {type: Rolling, rolling: {maxUnavailable: 25%}}}
  transfer: {transport: Tcp}
";

/// What is replaced by what, and the rule that is broken by it.
const BAD: &[(&str, &str, &str)] = &[
    (
        "name: qwen3-30b,",
        "name: qwen3-30b-0123456789-0123456789-0123456789-0123456789-0123456789,",
        "metadata.name must have at most 63 bytes: pods name the refit by a label",
    ),
    (
        "type: HuggingFaceConfig",
        "type: Registered",
        "huggingFaceConfig must be set when type is HuggingFaceConfig, and only then",
    ),
    (
        "type: HuggingFaceConfig",
        "type: TensorTable",
        "tensorTable must be set when type is TensorTable, and only then",
    ),
    ("worldSize: 16", "worldSize: 12", "worldSize must be a multiple of ranks.ranksPerPod"),
    ("type: JobSet", "type: StatefulSet", "jobSet must be set when type is JobSet, and only then"),
    (", jobSet: {replicatedJobs: [trainer]}", "", "jobSet must be set when type is JobSet, and only then"),
    ("type: LeaderWorkerSet", "type: Label", "label must be set when type is Label, and only then"),
    (
        "type: LeaderWorkerSet, ranksPerPod: 8",
        "type: LeaderWorkerSet, ranksPerPod: 3",
        "one of ranks.ranksPerPod and ranksPerReplica must divide the other",
    ),
    (
        "type: LeaderWorkerSet, ranksPerPod: 8",
        "type: Deployment, ranksPerPod: 4",
        "a pod of a Deployment must hold whole replicas: its pods are alike, so nothing tells which part one would be",
    ),
    ("type: Preset", "type: Registered", "preset must be set when type is Preset, and only then"),
    ("type: Preset", "type: Inline", "inline must be set when type is Inline, and only then"),
    ("type: Preset", "type: ConfigMap", "configMap must be set when type is ConfigMap, and only then"),
    (
        "type: WithinStaleness",
        "type: Always",
        "withinStaleness must be set when type is WithinStaleness, and only then",
    ),
    ("{maxStaleSteps: 4}", "{}", "at least one of maxStaleSteps and maxStaleSeconds must be set"),
    ("type: Rolling", "type: AllAtOnce", "rolling must be set when type is Rolling, and only then"),
    (", rolling: {maxUnavailable: 25%}", "", "rolling must be set when type is Rolling, and only then"),
    (
        "commit: {strategy: {type: Rolling, rolling: {maxUnavailable: 25%}}}",
        "commit: {mode: InPlace}",
        "commit.mode InPlace needs strategy type Rolling: in place, the trainer's death would poison every replica at once",
    ),
    (
        "transport: Tcp",
        "transport: NcclM2n",
        "transfer.transport must not be Nccl or NcclM2n while encryption is Required: NCCL cannot encrypt",
    ),
];

/// What is replaced by what the API server refuses by the bounds and forms of single fields.
const OUT_OF_BOUNDS: &[(&str, &str)] = &[
    ("worldSize: 16", "worldSize: 0"),
    ("worldSize: 16", "worldSize: 8200"),
    ("worldSize: 16", "worldSize: 1.5"),
    ("worldSize: 16", "worldsize: 16"),
    ("revision: 1", "revision: 0"),
    ("revision: 1", "revision: 1000001"),
    ("tp: 2", "tp: 0"),
    ("maxUnavailable: 25%", "maxUnavailable: 0"),
    ("maxUnavailable: 25%", "maxUnavailable: 1025"),
    ("maxUnavailable: 25%", "maxUnavailable: 0%"),
    ("maxUnavailable: 25%", "maxUnavailable: 05%"),
    ("maxUnavailable: 25%", "maxUnavailable: 101%"),
    ("name: default", "name: Default"),
    ("transport: Tcp", "verification: Off"),
    ("key: config.json", "key: a/b"),
    ("[trainer]", "[trainer, trainer]"),
    ("[trainer]", "[]"),
    ("  commit: {", "  timeouts: {totalSeconds: 0}\n  commit: {"),
    ("  commit: {", "  lag: {maxSteps: 1000001}\n  commit: {"),
    ("maxStaleSteps: 4", "maxStaleSeconds: 0"),
];

/// Rules that a single file cannot break, since they compare with what was there before.
const TRANSITIONS: &[&str] = &["model is immutable: another model is another WeightRefit"];

/// What the API server would say of `text`.
fn broken(schema: &Value, text: &str, old: Option<&str>) -> Vec<String> {
    let value = |text: &str| serde_saphyr::from_str::<Value>(text).expect(text);
    let old = old.map(value);
    match Validator::new().validate_with_defaults(schema, &value(text), old.as_ref()) {
        Ok(()) => Vec::new(),
        Err(errors) => errors.as_slice().iter().map(|error| error.message.clone()).collect(),
    }
}

fn parsed(text: &str) -> Result<Documents, String> {
    let source = SourceText { file: "refit.yaml".into(), text: text.into() };
    Documents::parse(&[source]).map_err(|refusal| refusal.to_string())
}

#[test]
fn what_the_definition_refuses_files_refuse_too() {
    let schema = schema();
    assert_eq!(broken(&schema, GOOD, None), Vec::<String>::new());
    parsed(GOOD).expect("a good file");
    for (old, new, message) in BAD {
        assert!(GOOD.contains(old), "`{old}` is not there");
        let text = GOOD.replacen(old, new, 1);
        let said = broken(&schema, &text, None);
        assert!(said.iter().any(|said| said == message), "{new}: {said:?}");
        parsed(&text).expect_err(new);
    }
}

#[test]
fn files_have_the_bounds_of_the_definition() {
    for (old, new) in OUT_OF_BOUNDS {
        assert!(GOOD.contains(old), "`{old}` is not there");
        parsed(&GOOD.replacen(old, new, 1)).expect_err(new);
    }
    let long = format!("name: {}.{}, key", "a".repeat(100), "b".repeat(152));
    parsed(&GOOD.replace("name: qwen3-30b-config, key", &long)).expect("a name of 253 bytes");
}

#[test]
fn the_model_cannot_change_and_all_else_can() {
    let schema = schema();
    let other = GOOD.replace("key: config.json", "key: other.json");
    assert_eq!(broken(&schema, &other, Some(GOOD)), TRANSITIONS);
    let other = GOOD.replace("worldSize: 16", "worldSize: 32").replace("tp: 2", "tp: 4");
    assert_eq!(broken(&schema, &other, Some(GOOD)), Vec::<String>::new());
}

#[test]
fn every_rule_has_a_row() {
    let mut rules = BTreeSet::new();
    collect(&schema(), &mut rules);
    let rows: BTreeSet<String> =
        BAD.iter().map(|row| row.2).chain(TRANSITIONS.iter().copied()).map(str::to_owned).collect();
    assert_eq!(rules, rows);
}

fn collect(node: &Value, rules: &mut BTreeSet<String>) {
    match node {
        Value::Object(entries) => {
            let own = entries.get("x-kubernetes-validations").and_then(Value::as_array).into_iter().flatten();
            rules.extend(own.map(|rule| rule["message"].as_str().expect("message").to_owned()));
            entries.values().for_each(|inner| collect(inner, rules));
        }
        Value::Array(items) => items.iter().for_each(|inner| collect(inner, rules)),
        _ => {}
    }
}
