//! Presets: documents for known trainers and engines, completed by sizes, a world and a model config.
//!
//! A preset never guesses: what does not follow from these three is refused, and the document is then given inline.

use super::document::{At, Document, Entry, Rule};
use super::error::LayoutError;
use crate::model::{Attention, ModelConfig};
use crate::nearest::nearest;
use std::collections::BTreeMap;

/// The only revision so far of every preset.
pub const REVISION: u32 = 1;

/// A document and what is known about it.
struct Preset {
    name: &'static str,
    text: &'static str,
    /// Axes to which the document gives a size, but which follow from the world when a user gives none.
    inferred: &'static [&'static str],
    tie: Tie,
    /// Layers and leading dense layers that the document has written into its patterns.
    written_for: Option<(u64, u64)>,
    /// Whether it can be used without a model config.
    any_model: bool,
}

/// What a preset does where the model ties its embeddings.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tie {
    /// `lm_head` is an alias of the embedding.
    Alias,
    /// That, and the last stage holds the embedding too.
    AliasAtEnds,
    /// No such model is known.
    Refused,
}

macro_rules! preset {
    ($name:literal, $file:literal, $inferred:expr, $tie:ident, $written_for:expr) => {
        Preset {
            name: $name,
            text: include_str!(concat!("../../presets/", $file, ".yaml")),
            inferred: &$inferred,
            tie: Tie::$tie,
            written_for: $written_for,
            any_model: false,
        }
    };
}

const PRESETS: [Preset; 8] = [
    preset!("megatron/qwen3-moe", "megatron-qwen3-moe", [], Refused, None),
    preset!("megatron/qwen-dense", "megatron-qwen-dense", [], Alias, None),
    preset!("megatron/deepseek-v3", "megatron-deepseek-v3", [], Refused, Some((61, 3))),
    preset!("vllm/qwen3-moe", "vllm-qwen3-moe", ["dp"], Refused, None),
    preset!("vllm/qwen-dense", "vllm-qwen-dense", ["dp"], AliasAtEnds, None),
    preset!("vllm/deepseek-v3", "vllm-deepseek-v3", ["dp"], Refused, Some((61, 3))),
    preset!("sglang/qwen3-moe", "sglang-qwen3-moe", ["tp"], Refused, None),
    Preset { any_model: true, ..preset!("fsdp2/hf", "fsdp2-hf", [], Alias, None) },
];

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// The names of all presets.
pub fn names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|preset| preset.name)
}

/// The document of a preset as it is written, with its example sizes; `None` for an unknown name.
#[must_use]
pub fn text(name: &str) -> Option<&'static str> {
    PRESETS.iter().find(|preset| preset.name == name).map(|preset| preset.text)
}

/// The document of a preset for these sizes, this world and this model. An axis without size is 1, or follows from
/// the world where the document infers it (`dp`, `edp`, `dp_replicate`; SGLang's `tp`).
///
/// # Errors
/// An unknown preset, revision or axis, a fact that the model config lacks, or layers that do not divide.
pub fn resolve(
    name: &str,
    revision: u32,
    sizes: &BTreeMap<String, u64>,
    world: u64,
    model: Option<&ModelConfig>,
) -> Result<Document, LayoutError> {
    let preset =
        PRESETS.iter().find(|preset| preset.name == name).ok_or_else(|| LayoutError::UnknownPreset {
            name: name.chars().take(80).collect(),
            nearest: nearest(name, names()).unwrap_or_default().to_owned(),
        })?;
    if revision != REVISION {
        return Err(LayoutError::PresetRevision { name: preset.name, found: revision, known: REVISION });
    }
    let mut document = Document::parse(preset.text)?;
    document.world = world;
    document.sizes = preset.sizes(&document, sizes)?;
    preset.vars(&mut document, model)?;
    if let Some(model) = model {
        preset.stages(&mut document, model)?;
        preset.tie(&mut document, model)?;
    }
    Ok(document)
}

impl Preset {
    fn sizes(
        &self,
        document: &Document,
        given: &BTreeMap<String, u64>,
    ) -> Result<BTreeMap<String, u64>, LayoutError> {
        let axes = || document.grids.iter().flat_map(|(_, axes)| axes.iter().map(String::as_str));
        if let Some(axis) = given.keys().find(|axis| !axes().any(|known| known == *axis)) {
            let nearest = nearest(axis, axes()).unwrap_or_default().to_owned();
            return Err(LayoutError::PresetAxis { name: self.name, axis: axis.clone(), nearest });
        }
        let ones = document.sizes.keys().filter(|axis| !self.inferred.contains(&axis.as_str()));
        let mut sizes: BTreeMap<_, _> = ones.map(|axis| (axis.clone(), 1)).collect();
        sizes.extend(given.iter().map(|(axis, size)| (axis.clone(), *size)));
        Ok(sizes)
    }

    fn vars(&self, document: &mut Document, model: Option<&ModelConfig>) -> Result<(), LayoutError> {
        if model.is_none() && !self.any_model {
            return Err(LayoutError::PresetNeedsModel { name: self.name });
        }
        for (var, value) in &mut document.vars {
            if let Some(size) = document.sizes.get(var) {
                *value = *size;
                continue;
            }
            match model.map_or(Fact::Unrelated, |model| fact(model, var)) {
                Fact::Is(fact) => *value = fact,
                Fact::Unrelated => {}
                Fact::Absent if self.any_model => {}
                Fact::Absent => return Err(LayoutError::PresetFact { name: self.name, var: var.clone() }),
            }
        }
        Ok(())
    }

    /// Layers in equal numbers over the stages.
    fn stages(&self, document: &mut Document, model: &ModelConfig) -> Result<(), LayoutError> {
        let dense = model.experts.as_ref().map_or(0, |experts| experts.leading_dense_layers());
        if let Some((layers, leading)) = self.written_for.filter(|written| *written != (model.layers, dense))
        {
            let (found, found_dense) = (model.layers, dense);
            return Err(LayoutError::PresetLayers {
                name: self.name,
                layers,
                dense: leading,
                found,
                found_dense,
            });
        }
        let axis = document.stages.axis.clone();
        // A composite axis of a preset's stages has no parts, hence size 1.
        let stages = document.sizes.get(&axis).copied().unwrap_or(1).max(1);
        if !model.layers.is_multiple_of(stages) {
            return Err(LayoutError::StagesUneven { name: self.name, layers: model.layers, axis, stages });
        }
        let per_stage = model.layers / stages;
        document.stages.layers =
            (0..stages).map(|stage| vec![(stage * per_stage, (stage + 1) * per_stage)]).collect();
        Ok(())
    }

    fn tie(&self, document: &mut Document, model: &ModelConfig) -> Result<(), LayoutError> {
        match (self.tie, model.tied) {
            (Tie::Refused, true) => return Err(LayoutError::PresetTied { name: self.name }),
            (Tie::Refused, false) => {}
            (_, true) => {
                document.alias.insert(HEAD.to_owned(), EMBEDDING.to_owned());
            }
            (_, false) => {
                document.alias.remove(HEAD);
            }
        }
        if self.tie == Tie::AliasAtEnds {
            let at = if model.tied { At::ENDS } else { At::FIRST };
            let rules = document.rules.iter_mut().filter_map(|entry| match entry {
                Entry::Rule(rule) => Some(rule.as_mut()),
                Entry::Group(..) => None,
            });
            rules.filter(|rule: &&mut Rule| rule.to == EMBEDDING).for_each(|rule| rule.at = Some(at));
        }
        Ok(())
    }
}

/// What a model config says about a variable.
enum Fact {
    Is(u64),
    /// The model has no such thing, as a dense one has no experts.
    Absent,
    /// No fact of a model, as the paddings `vpad` and `b`.
    Unrelated,
}

fn fact(model: &ModelConfig, var: &str) -> Fact {
    let known = match (var, &model.attention) {
        ("nq", Attention::Grouped { heads, .. }) => Some(*heads),
        ("nkv", Attention::Grouped { kv_heads, .. }) => Some(*kv_heads),
        ("d", Attention::Grouped { head_dim, .. }) => Some(*head_dim),
        ("nq" | "nkv" | "d", Attention::Latent { .. }) => None,
        ("E", _) => model.experts.as_ref().map(|experts| experts.count),
        ("V", _) => Some(model.vocab),
        _ => return Fact::Unrelated,
    };
    known.map_or(Fact::Absent, Fact::Is)
}
