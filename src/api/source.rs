//! Where a refit's tensors and layouts are told: in a ConfigMap, in the resource, by a preset, or by clients that
//! register.

use crate::api::schema::{self, CONFIG_MAP_KEY, DNS_SUBDOMAIN};
use crate::limits;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Which tensors the model has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = schema::all(&[
    schema::union(&[("HuggingFaceConfig", "huggingFaceConfig"), ("TensorTable", "tensorTable")]),
    schema::rules(&[("self == oldSelf", "model is immutable: another model is another WeightRefit")]),
])))]
pub struct Model {
    /// type: where the tensors' names, shapes and dtypes come from. Required. Immutable. Example: `TensorTable`.
    #[serde(rename = "type")]
    pub kind: ModelType,
    /// huggingFaceConfig: the model's `config.json`. Required for, and only for, type HuggingFaceConfig. Immutable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugging_face_config: Option<KeySource>,
    /// tensorTable: `{"tensors": [{"name", "shape", "dtype"}]}` as JSON. Required for, and only for, type
    /// TensorTable. Immutable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor_table: Option<KeySource>,
}

/// Kinds of [`Model`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ModelType {
    /// The table follows from the model's `config.json`.
    HuggingFaceConfig,
    /// The table is given.
    TensorTable,
    /// The trainer registers it.
    Registered,
}

/// A value in a ConfigMap of the refit's namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KeySource {
    /// configMapKeyRef: the ConfigMap, of the refit's namespace, and its key. Required. Immutable.
    pub config_map_key_ref: ConfigMapKey,
}

/// One key of one ConfigMap.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ConfigMapKey {
    /// name: of the ConfigMap. Required; at most 253 bytes. Mutable where the field that holds it is. Example:
    /// `qwen3-30b-config`.
    #[schemars(length(max = limits::OBJECT_NAME_MAX), regex(pattern = DNS_SUBDOMAIN))]
    pub name: String,
    /// key: under `data`, or under `binaryData`, whose bytes may be gzip. Required; at most 253 bytes. Mutable where
    /// the field that holds it is. Example: `config.json`.
    #[schemars(length(max = limits::KEY_MAX), regex(pattern = CONFIG_MAP_KEY))]
    pub key: String,
}

/// Where each element lies on each rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = schema::union(&[
    ("Preset", "preset"),
    ("Inline", "inline"),
    ("ConfigMap", "configMap"),
])))]
pub struct Layout {
    /// type: where the layout comes from. Required. Mutable. Example: `Preset`.
    #[serde(rename = "type")]
    pub kind: LayoutType,
    /// preset: a document that weightrefit ships. Required for, and only for, type Preset. Mutable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<PresetRef>,
    /// inline: a `layout: v1` document; condition Accepted tells what is wrong with it. Required for, and only for,
    /// type Inline; at most 32 keys. Mutable. Example: `{layout: v1, world: 2, sizes: {tp: 2}, grids: {all: [tp]}, …}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::free_object")]
    pub inline: Option<serde_json::Map<String, serde_json::Value>>,
    /// configMap: a `layout: v1` document in a ConfigMap of the refit's namespace. Required for, and only for, type
    /// ConfigMap. Mutable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_map: Option<ConfigMapKey>,
}

impl Default for Layout {
    fn default() -> Self {
        Self { kind: LayoutType::Registered, preset: None, inline: None, config_map: None }
    }
}

/// Kinds of [`Layout`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum LayoutType {
    /// A shipped document.
    Preset,
    /// A document in the resource.
    Inline,
    /// A document in a ConfigMap.
    ConfigMap,
    /// What clients register.
    Registered,
}

/// A shipped layout document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PresetRef {
    /// name: as `weightrefit layout presets` lists it. Required; at most 253 bytes. Mutable. Example:
    /// `vllm/qwen3-moe`.
    #[schemars(length(min = 1, max = limits::KEY_MAX))]
    pub name: String,
    /// revision: of the document, so that a newer weightrefit does not change the layout unasked. Required; 1 to
    /// 1,000,000. Mutable. Example: `1`.
    #[schemars(range(min = 1, max = limits::REVISION_MAX))]
    pub revision: i32,
    /// sizes: of the parallel axes, in place of the document's own; an axis that is left out is 1, or follows
    /// from the number of ranks. Default none; at most 16 axes, 1 to 8,192 each. Mutable. Example: `{tp: 2, pp: 2, ep: 8}`.
    #[serde(default)]
    #[schemars(schema_with = "schema::axis_sizes")]
    pub sizes: BTreeMap<String, i32>,
}
