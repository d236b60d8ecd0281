//! What a required key looks like: a line to copy for whoever left it out.

use crate::api::problem::FieldPath;

/// Ends of paths, without indices, and a value that can stand there; of several that fit the first counts.
const SAMPLES: [(&str, &str); 41] = [
    ("workloadRef.apiVersion", "apps/v1"),
    ("workloadRef.kind", "StatefulSet"),
    ("workloadRef.name", "trainer"),
    ("apiVersion", "weightrefit.dev/v1alpha1"),
    ("kind", "WeightRefit"),
    ("metadata.name", "qwen"),
    ("metadata", "{name: qwen}"),
    (
        "spec",
        "{model: {type: Registered}, training: {worldSize: 8, ranks: {type: StatefulSet}}, inference: {pools: \
         [{name: default, ranksPerReplica: 2, ranks: {type: StatefulSet}}]}}",
    ),
    ("configMapKeyRef.name", "qwen-config"),
    ("configMapKeyRef.key", "config.json"),
    ("configMapKeyRef", "{name: qwen-config, key: config.json}"),
    ("model.huggingFaceConfig", "{configMapKeyRef: {name: qwen-config, key: config.json}}"),
    ("model.tensorTable", "{configMapKeyRef: {name: qwen-tensors, key: tensors.json}}"),
    ("model.type", "HuggingFaceConfig"),
    (
        "model",
        "{type: HuggingFaceConfig, huggingFaceConfig: {configMapKeyRef: {name: qwen-config, key: config.json}}}",
    ),
    ("layout.preset.name", "fsdp2/hf"),
    ("layout.preset.revision", "1"),
    ("layout.preset", "{name: fsdp2/hf, revision: 1, sizes: {dp_shard: 8}}"),
    ("layout.configMap.name", "layouts"),
    ("layout.configMap.key", "training.yaml"),
    ("layout.configMap", "{name: layouts, key: training.yaml}"),
    (
        "layout.inline",
        "{layout: v1, world: 8, grids: {all: [dp]}, axes: {pp: []}, stages: {axis: pp, layers: [[0, 24]]}, \
         rules: [{hf: '(?P<n>.*)', to: '{n}'}]}",
    ),
    ("layout.type", "Preset"),
    ("ranks.jobSet.replicatedJobs", "[trainer]"),
    ("ranks.jobSet", "{replicatedJobs: [trainer]}"),
    ("ranks.label.rankKey", "example.com/rank"),
    ("ranks.label", "{rankKey: example.com/rank}"),
    ("ranks.type", "StatefulSet"),
    ("ranks", "{type: StatefulSet}"),
    ("training.worldSize", "8"),
    (
        "training",
        "{worldSize: 8, ranks: {type: StatefulSet}, layout: {type: Preset, preset: {name: fsdp2/hf, revision: 1, \
         sizes: {dp_shard: 8}}}}",
    ),
    ("pools.name", "default"),
    ("pools.ranksPerReplica", "2"),
    ("inference.pools", "[{name: default, ranksPerReplica: 2, ranks: {type: StatefulSet}}]"),
    ("inference", "{pools: [{name: default, ranksPerReplica: 2, ranks: {type: StatefulSet}}]}"),
    ("serving.withinStaleness.maxStaleSteps", "4"),
    ("serving.withinStaleness", "{maxStaleSteps: 4}"),
    ("serving.type", "AfterFirstRefit"),
    ("strategy.rolling.maxUnavailable", "25%"),
    ("strategy.rolling", "{maxUnavailable: 25%}"),
    ("strategy.type", "AllAtOnce"),
];

/// What `key` below `path` can look like, as a line; the key alone where nothing is known.
pub(super) fn line(path: &FieldPath, key: &str) -> String {
    let whole = path.key(key).without_indices();
    let ends = |end: &str| whole == end || whole.strip_suffix(end).is_some_and(|rest| rest.ends_with('.'));
    match SAMPLES.iter().find(|(end, _)| ends(end)) {
        Some((_, value)) => format!("{key}: {value}"),
        None => key.to_owned(),
    }
}

/// What a required key of a `layout: v1` document looks like; `place` is what lacks it, empty for the document.
pub(super) fn layout_line(place: &str, key: &str) -> String {
    let rounds = place.ends_with("pad") || place.ends_with("grain");
    let value = match key {
        "layout" => "v1",
        "world" => "8",
        "grids" => "{all: [tp, dp]}",
        "stages" => "{axis: pp, layers: [[0, 24]]}",
        "axis" => "pp",
        "layers" => "[[0, 24]]",
        "rules" => r"[{hf: 'model\.norm\.weight', to: model.norm.weight}]",
        "prefix" => r"[{hf: 'model\.layers\.(?P<L>\d+)\.', to: 'model.layers.{L}.'}]",
        "hf" => r"'model\.norm\.weight'",
        "to" if rounds => "64",
        "to" => "model.norm.weight",
        "dim" => "0",
        "by" => "tp",
        "of" => "128",
        _ => return key.to_owned(),
    };
    format!("{key}: {value}")
}
