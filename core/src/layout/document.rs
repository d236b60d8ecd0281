//! The document `layout: v1` as typed data, before anything is resolved against a world or a model.

use super::error::LayoutError;
use super::read::{Fields, Node};
use super::recording::RecordedTensor;
use crate::dtype::{DType, UnknownDType};
use crate::limits::{DOCUMENT_BYTES_MAX, RULES_MAX};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// A list of names, in document order.
pub type Named<T> = Vec<(String, T)>;

/// One side's layout: where each element of each HF tensor lies on each rank of the side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Integers that expressions can name.
    pub vars: BTreeMap<String, u64>,
    /// Sizes of axes; at most one axis of a grid may be absent and follows from `world`.
    pub sizes: BTreeMap<String, u64>,
    /// Number of ranks.
    pub world: u64,
    /// Axes of each grid, the fastest first; the first grid is the default of rules.
    pub grids: Named<Vec<String>>,
    /// Composite axes and their parts, the fastest first; a part may be an earlier composite axis.
    pub axes: Named<Vec<String>>,
    /// Which layers each pipeline stage holds.
    pub stages: Stages,
    /// HF name to the HF name whose bytes it shares.
    pub alias: BTreeMap<String, String>,
    /// What `~` in a rule stands for.
    pub suffix: Option<Suffix>,
    /// Patterns of HF names that this side does not hold.
    pub ignore: Vec<String>,
    /// Storage dtype where a rule has none; absent: the tensor table's.
    pub dtype: Option<DType>,
    /// In order; the first match wins.
    pub rules: Vec<Entry>,
    /// What each rank has recorded, in place of rules; empty where rules say it.
    pub ranks: Vec<Vec<RecordedTensor>>,
}

/// Layers of the pipeline stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stages {
    /// The axis whose coordinate is the stage.
    pub axis: String,
    /// Per coordinate its chunks (one without interleaving), each the half-open range of its layers.
    pub layers: Vec<Vec<(u64, u64)>>,
}

/// What `~` stands for in `hf` and in `to`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suffix {
    /// Pattern.
    pub hf: String,
    /// Template.
    pub to: String,
}

/// A rule, or a group that is tried under each of its prefixes in turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// One rule.
    Rule(Box<Rule>),
    /// All rules under the first prefix, then all under the second, and so on.
    Group(Vec<Prefix>, Vec<Rule>),
}

/// What stands before `hf` and `to` of the rules of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefix {
    /// Pattern.
    pub hf: String,
    /// Template.
    pub to: String,
    /// Overrides `at` of the rules.
    pub at: Option<At>,
}

/// Pipeline stages that hold a tensor without layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct At {
    /// The first one.
    pub first: bool,
    /// The last one.
    pub last: bool,
    /// Every one.
    pub all: bool,
}

/// How HF tensors that `hf` matches lie in local tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Pattern of the whole HF name; groups `L` (layer) and `e` (expert) have a meaning.
    pub hf: String,
    /// Template of the local name.
    pub to: String,
    /// Grid of the coordinates; absent: the first.
    pub grid: Option<String>,
    /// Stages; absent: the owner of `L`, or all where `hf` has no `L`.
    pub at: Option<At>,
    /// Condition on a numeric group, as `L<3`.
    pub only: Option<String>,
    /// Cuts, each of what the one before left.
    pub cut: Vec<Cut>,
    /// Place among the tensors that share the local tensor.
    pub pack: Option<Pack>,
    /// Owner of an expert.
    pub expert: Option<Expert>,
    /// Global extent rounded up before the cuts.
    pub pad: Option<RoundUp>,
    /// Local extent rounded up after the cuts.
    pub grain: Option<RoundUp>,
    /// Storage dtype.
    pub dtype: Option<DType>,
    /// Label of the step that the receiving agent runs after the write.
    pub post: Option<String>,
}

/// One cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// HF dim.
    pub dim: u64,
    /// Axis.
    pub by: String,
    /// How an extent is divided.
    pub kind: Division,
    /// Expression of the indivisible size; absent: 1.
    pub unit: Option<String>,
    /// Fewer units than coordinates: neighbours share a unit.
    pub spread: bool,
}

/// How an extent (or the experts) are divided over an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Division {
    /// Equal parts; a remainder is an error.
    Even,
    /// Parts of `ceil(N / n)`, the last ones shorter or empty (`torch.chunk`).
    Chunk,
    /// The first `N % n` parts one longer.
    Balanced,
    /// Expert `e` on coordinate `e % n`; experts only.
    RoundRobin,
}

/// Place among the tensors that share a local tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pack {
    /// Order among them.
    pub slot: u64,
    /// HF dim along which they are joined.
    pub dim: u64,
    /// Expression of the stripe; absent: cut each, then stack.
    pub stripe: Option<String>,
}

/// Owner of an expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expert {
    /// Axis.
    pub by: String,
    /// Expression of the number of experts.
    pub of: String,
    /// How the experts are divided.
    pub kind: Division,
    /// Experts of one rank share a local tensor with a leading axis.
    pub stack: bool,
}

/// Extent of `dim` rounded up to a multiple of the expression `to`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoundUp {
    /// HF dim.
    pub dim: u64,
    /// Expression.
    pub to: String,
}

const DIVISIONS: [(&str, Division); 4] = [
    ("even", Division::Even),
    ("chunk", Division::Chunk),
    ("balanced", Division::Balanced),
    ("round_robin", Division::RoundRobin),
];

impl Division {
    pub(super) fn word(self) -> &'static str {
        DIVISIONS.iter().find(|(_, kind)| *kind == self).map_or("", |(word, _)| word)
    }
}

impl At {
    /// Every stage.
    pub const ALL: Self = Self { first: false, last: false, all: true };
    /// The first stage.
    pub const FIRST: Self = Self { first: true, last: false, all: false };
    /// The first and the last stage.
    pub const ENDS: Self = Self { first: true, last: true, all: false };
}

impl Document {
    /// Reads YAML, of which JSON is a part. Anchors are fine; duplicate keys are refused.
    ///
    /// # Errors
    /// The first thing that is not YAML or not in the vocabulary, by its place.
    pub fn parse(text: &str) -> Result<Self, LayoutError> {
        if text.len() > DOCUMENT_BYTES_MAX {
            return Err(LayoutError::TooLong { found: text.len() });
        }
        let options = serde_saphyr::options! {
            strict_booleans: true,
            leading_zero_numbers_as_strings: true,
            reject_unsupported_tags: true,
            with_snippet: false,
        };
        let value: Value = serde_saphyr::from_str_with_options(text, options)
            .map_err(|error| LayoutError::Yaml { reason: error.to_string().replace('\n', " ") })?;
        Self::from_value(&value)
    }

    /// Reads a document that is already a JSON value, as an inline layout of a resource is.
    ///
    /// # Errors
    /// The first thing that is not in the vocabulary, by its place.
    pub fn from_value(value: &Value) -> Result<Self, LayoutError> {
        if value.get("ranks").is_some() {
            return recorded(value);
        }
        let root = Node::root(value).fields(&[
            "layout", "vars", "sizes", "world", "grids", "axes", "stages", "alias", "suffix", "ignore",
            "dtype", "rules",
        ])?;
        version(&root)?;
        let mut rules = Vec::new();
        let mut count = 0_usize;
        for node in root.required("rules")?.list()? {
            let entry = entry(&node)?;
            count = count.saturating_add(match &entry {
                Entry::Rule(_) => 1,
                Entry::Group(prefixes, rules) => prefixes.len().saturating_mul(rules.len()),
            });
            rules.push(entry);
        }
        if count > RULES_MAX {
            return Err(LayoutError::TooMany { place: "rules".to_owned(), found: count, most: RULES_MAX });
        }
        Ok(Self {
            vars: root.parse("vars", integers)?.unwrap_or_default(),
            sizes: root.parse("sizes", integers)?.unwrap_or_default(),
            world: root.required("world")?.integer()?,
            grids: name_lists(&root.required("grids")?)?,
            axes: root.parse("axes", |node| name_lists(&node))?.unwrap_or_default(),
            stages: stages(&root.required("stages")?)?,
            alias: root.parse("alias", alias)?.unwrap_or_default(),
            suffix: root.parse("suffix", suffix)?,
            ignore: root.parse("ignore", |node| texts(&node))?.unwrap_or_default(),
            dtype: root.parse("dtype", dtype)?,
            rules,
            ranks: Vec::new(),
        })
    }

    /// The document of ranks that recorded what they hold.
    #[must_use]
    pub fn recorded(ranks: Vec<Vec<RecordedTensor>>, alias: BTreeMap<String, String>) -> Self {
        let none = "none".to_owned();
        Self {
            vars: BTreeMap::new(),
            sizes: BTreeMap::new(),
            world: ranks.len() as u64,
            grids: vec![("recorded".to_owned(), vec!["rank".to_owned()])],
            axes: vec![(none.clone(), Vec::new())],
            stages: Stages { axis: none, layers: vec![vec![(0, 0)]] },
            alias,
            suffix: None,
            ignore: Vec::new(),
            dtype: None,
            rules: Vec::new(),
            ranks,
        }
    }
}

fn version(root: &Fields<'_>) -> Result<(), LayoutError> {
    let version = root.required("layout")?.text()?;
    match version.as_str() {
        "v1" => Ok(()),
        _ => Err(LayoutError::Version { found: version.chars().take(80).collect() }),
    }
}

fn recorded(value: &Value) -> Result<Document, LayoutError> {
    let root = Node::root(value).fields(&["layout", "alias", "ranks"])?;
    version(&root)?;
    let alias = root.parse("alias", alias)?.unwrap_or_default();
    // Bounds the number of ranks before anything of them is read.
    root.required("ranks")?.list()?;
    let ranks = Vec::deserialize(&value["ranks"]);
    let ranks = ranks.map_err(|error| LayoutError::Recording { reason: error.to_string() })?;
    Ok(Document::recorded(ranks, alias))
}

fn integers(node: Node<'_>) -> Result<BTreeMap<String, u64>, LayoutError> {
    node.entries()?.into_iter().map(|(key, node)| Ok((key.to_owned(), node.integer()?))).collect()
}

fn alias(node: Node<'_>) -> Result<BTreeMap<String, String>, LayoutError> {
    node.entries()?.into_iter().map(|(key, node)| Ok((key.to_owned(), node.text()?))).collect()
}

fn texts(node: &Node<'_>) -> Result<Vec<String>, LayoutError> {
    node.list()?.iter().map(Node::text).collect()
}

fn name_lists(node: &Node<'_>) -> Result<Named<Vec<String>>, LayoutError> {
    node.entries()?.into_iter().map(|(key, node)| Ok((key.to_owned(), texts(&node)?))).collect()
}

fn dtype(node: Node<'_>) -> Result<DType, LayoutError> {
    let text = node.text()?;
    text.parse().map_err(|unknown: UnknownDType| LayoutError::UnknownWord {
        place: node.place().to_owned(),
        nearest: unknown.nearest.name().to_owned(),
        word: text.chars().take(80).collect(),
    })
}

fn suffix(node: Node<'_>) -> Result<Suffix, LayoutError> {
    let fields = node.fields(&["hf", "to"])?;
    Ok(Suffix { hf: fields.required("hf")?.text()?, to: fields.required("to")?.text()? })
}

fn stages(node: &Node<'_>) -> Result<Stages, LayoutError> {
    let fields = node.fields(&["axis", "layers"])?;
    let range = |node: &Node<'_>| {
        let ends = node.list()?.iter().map(Node::integer).collect::<Result<Vec<_>, _>>()?;
        match ends[..] {
            [low, high] if low <= high => Ok((low, high)),
            _ => Err(LayoutError::StageRange { place: node.place().to_owned() }),
        }
    };
    let stage = |node: &Node<'_>| {
        let parts = node.list()?;
        if parts.first().is_some_and(|part| part.list().is_ok()) {
            return parts.iter().map(range).collect();
        }
        Ok(vec![range(node)?])
    };
    let layers = fields.required("layers")?.list()?.iter().map(stage).collect::<Result<_, _>>()?;
    Ok(Stages { axis: fields.required("axis")?.text()?, layers })
}

fn at(node: Node<'_>) -> Result<At, LayoutError> {
    let nodes = if node.is_text() { vec![node] } else { node.list()? };
    let mut at = At::default();
    for node in &nodes {
        let words = [("first", At::FIRST), ("last", At { last: true, ..At::default() }), ("all", At::ALL)];
        let word = node.word(&words)?;
        at = At { first: at.first || word.first, last: at.last || word.last, all: at.all || word.all };
    }
    Ok(if at.all { At::ALL } else { at })
}

fn entry(node: &Node<'_>) -> Result<Entry, LayoutError> {
    let is_group = node.entries()?.iter().any(|(key, _)| *key == "prefix");
    if !is_group {
        return Ok(Entry::Rule(Box::new(rule(node)?)));
    }
    let fields = node.fields(&["prefix", "rules"])?;
    let prefix = |node: &Node<'_>| {
        let fields = node.fields(&["hf", "to", "at"])?;
        let (hf, to) = (fields.required("hf")?.text()?, fields.required("to")?.text()?);
        Ok(Prefix { hf, to, at: fields.parse("at", at)? })
    };
    let prefixes = fields.required("prefix")?.list()?.iter().map(prefix).collect::<Result<_, _>>()?;
    let rules = fields.required("rules")?.list()?.iter().map(rule).collect::<Result<_, _>>()?;
    Ok(Entry::Group(prefixes, rules))
}

fn rule(node: &Node<'_>) -> Result<Rule, LayoutError> {
    let fields = node.fields(&[
        "hf", "to", "grid", "at", "only", "cut", "pack", "expert", "pad", "grain", "dtype", "post",
    ])?;
    let text = |node: Node<'_>| node.text();
    let cuts = |node: Node<'_>| node.list()?.iter().map(cut).collect();
    Ok(Rule {
        hf: fields.required("hf")?.text()?,
        to: fields.required("to")?.text()?,
        grid: fields.parse("grid", text)?,
        at: fields.parse("at", at)?,
        only: fields.parse("only", text)?,
        cut: fields.parse("cut", cuts)?.unwrap_or_default(),
        pack: fields.parse("pack", pack)?,
        expert: fields.parse("expert", expert)?,
        pad: fields.parse("pad", round_up)?,
        grain: fields.parse("grain", round_up)?,
        dtype: fields.parse("dtype", dtype)?,
        post: fields.parse("post", text)?,
    })
}

fn spread(fields: &Fields<'_>) -> Result<bool, LayoutError> {
    Ok(fields.parse("spread", |node| node.boolean())?.unwrap_or(false))
}

fn cut(node: &Node<'_>) -> Result<Cut, LayoutError> {
    let fields = node.fields(&["dim", "by", "kind", "unit", "spread"])?;
    Ok(Cut {
        dim: fields.required("dim")?.integer()?,
        by: fields.required("by")?.text()?,
        kind: fields.parse("kind", |node| node.word(&DIVISIONS[..3]))?.unwrap_or(Division::Even),
        unit: fields.parse("unit", |node| node.expression())?,
        spread: spread(&fields)?,
    })
}

fn pack(node: Node<'_>) -> Result<Pack, LayoutError> {
    let fields = node.fields(&["slot", "dim", "stripe"])?;
    Ok(Pack {
        slot: fields.parse("slot", |node| node.integer())?.unwrap_or(0),
        dim: fields.parse("dim", |node| node.integer())?.unwrap_or(0),
        stripe: fields.parse("stripe", |node| node.expression())?,
    })
}

fn expert(node: Node<'_>) -> Result<Expert, LayoutError> {
    let fields = node.fields(&["by", "of", "kind", "stack"])?;
    Ok(Expert {
        by: fields.required("by")?.text()?,
        of: fields.required("of")?.expression()?,
        kind: fields.parse("kind", |node| node.word(&DIVISIONS))?.unwrap_or(Division::Even),
        stack: fields.parse("stack", |node| node.boolean())?.unwrap_or(false),
    })
}

fn round_up(node: Node<'_>) -> Result<RoundUp, LayoutError> {
    let fields = node.fields(&["dim", "to"])?;
    Ok(RoundUp { dim: fields.required("dim")?.integer()?, to: fields.required("to")?.expression()? })
}
