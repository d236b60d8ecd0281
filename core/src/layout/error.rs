//! Why a layout is refused. Places in the document are paths from its root, as `rules[6].cut[0].by`.

use super::expression::ExpressionError;
use super::spans::{CutError, sizes_near};
use crate::code::Code;
use crate::dtype::DType;
use crate::id::Rank;
use crate::limits::{DOCUMENT_BYTES_MAX, HF_DIMS_MAX, RANKS_MAX, RUNS_MAX, TENSOR_NAME_BYTES_MAX};
use std::fmt;

/// A rule of a document, shown as its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RuleId {
    /// Index in `rules`.
    pub entry: usize,
    /// Index in `rules` of the group, where the entry is one.
    pub inner: Option<usize>,
}

impl fmt::Display for RuleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rules[{}]", self.entry)?;
        self.inner.map_or(Ok(()), |inner| write!(f, ".rules[{inner}]"))
    }
}

fn at(place: &str) -> String {
    if place.is_empty() { "the document".to_owned() } else { format!("`{place}`") }
}

/// Why a layout is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the sentence of each variant says what its fields are")]
pub enum LayoutError {
    // The text.
    #[error("the document has {found} bytes, at most {DOCUMENT_BYTES_MAX} are read")]
    TooLong { found: usize },
    #[error("the document is not YAML: {reason}")]
    Yaml { reason: String },
    #[error("layout is `{found}`, only `v1` is known")]
    Version { found: String },
    #[error("{} has the unknown key `{key}`, nearest is `{nearest}`", at(place))]
    UnknownKey { place: String, key: String, nearest: String },
    #[error("{} lacks the key `{key}`", at(place))]
    MissingKey { place: String, key: &'static str },
    #[error("{} is {found}, expected {expected}", at(place))]
    WrongType { place: String, expected: &'static str, found: String },
    #[error("`{place}` is `{word}`, nearest known word is `{nearest}`")]
    UnknownWord { place: String, word: String, nearest: String },
    #[error("{} has {found} entries, at most {most} are read", at(place))]
    TooMany { place: String, found: usize, most: usize },
    #[error("`{place}` is no range [low, high] with low <= high")]
    StageRange { place: String },

    // Sizes, grids, axes and stages.
    #[error("world is {found}, 1 to {RANKS_MAX} ranks are allowed")]
    World { found: u64 },
    #[error("`grids` is empty")]
    NoGrid,
    #[error("`sizes.{axis}` is 0")]
    SizeZero { axis: String },
    #[error("`sizes.{axis}` is an axis of no grid, nearest is `{nearest}`")]
    UnusedSize { axis: String, nearest: String },
    #[error("`{place}` has `{name}` twice")]
    Twice { place: String, name: String },
    #[error("`grids.{grid}` has two axes without a size, `{first}` and `{second}`")]
    TwoFreeAxes { grid: String, first: String, second: String },
    #[error("the sizes of `grids.{grid}` multiply to {product}, world is {world}")]
    GridWorld { grid: String, product: u64, world: u64 },
    #[error("`{place}` names the axis `{axis}` that no grid has, nearest is `{nearest}`")]
    UnknownAxis { place: String, axis: String, nearest: String },
    #[error("`{place}` names the grid `{grid}` that does not exist, nearest is `{nearest}`")]
    UnknownGrid { place: String, grid: String, nearest: String },
    #[error("`{place}` names the axis `{axis}` that grid `{grid}` does not have, nearest is `{nearest}`")]
    AxisOutsideGrid { place: String, axis: String, grid: String, nearest: String },
    #[error("`stages.layers` has {found} entries, axis `{axis}` has size {size}")]
    StageCount { axis: String, size: u64, found: usize },
    #[error("layer {layer} is in two ranges of `stages.layers`, of stages {first} and {second}")]
    StageOverlap { layer: u64, first: u64, second: u64 },
    #[error("rank {rank} has different coordinates on `{axis}` in the grids `{first}` and `{second}`")]
    StageDiffers { rank: Rank, axis: String, first: String, second: String },

    // Rules by themselves.
    #[error("`{place}` is `{text}`: {reason}")]
    Expression { place: String, text: String, reason: ExpressionError },
    #[error("`{place}` is `{text}`, which is 0")]
    Zero { place: String, text: String },
    #[error("`{place}` is {dim}, tensors have at most {HF_DIMS_MAX} dims")]
    DimTooLarge { place: String, dim: u64 },
    #[error("`{place}` is no regular expression: {reason}")]
    Pattern { place: String, reason: String },
    #[error("`{place}` has {found} bytes, 1 to {TENSOR_NAME_BYTES_MAX} are allowed")]
    NameLength { place: String, found: usize },
    #[error("{rule} uses `~`, but the document has no `suffix`")]
    NoSuffix { rule: RuleId },
    #[error("{rule} has a group `{group}`, a name that stands for a local number")]
    ReservedGroup { rule: RuleId, group: &'static str },
    #[error("{rule} has a brace without its partner in `{to}`")]
    Brace { rule: RuleId, to: String },
    #[error("{rule} has `{{{hole}}}` in `to`, which is no group of `hf`, nearest is `{nearest}`")]
    UnknownHole { rule: RuleId, hole: String, nearest: String },
    #[error("{rule} has `{hole}` in `to`, which needs {needs}")]
    HoleNeeds { rule: RuleId, hole: &'static str, needs: &'static str },
    #[error("{rule} has both a group `L` and `at`")]
    LayerAndStage { rule: RuleId },
    #[error("{rule} has `only: {text}`, expected a group, `<` or `>=`, and a number")]
    OnlySyntax { rule: RuleId, text: String },
    #[error("{rule} has `only` on the group `{group}`, which its `hf` does not have")]
    OnlyGroup { rule: RuleId, group: String },
    #[error("{rule} has `expert`, but its `hf` has no group `e`")]
    ExpertGroup { rule: RuleId },
    #[error("{rule} divides {of} experts evenly over {parts} coordinates of `{axis}`")]
    ExpertsUneven { rule: RuleId, of: u64, axis: String, parts: u64 },
    #[error("`{place}` cannot stand beside `kind: {kind}`: `{key}` has no meaning there")]
    KindWith { place: String, key: &'static str, kind: &'static str },
    #[error("{rule} has `{key}` beside `pack.stripe`, which v1 does not allow")]
    StripePad { rule: RuleId, key: &'static str },
    #[error("{rule} cuts dim {dim} beside `pack.stripe` on dim {joined}, which v1 does not allow")]
    StripeCut { rule: RuleId, dim: usize, joined: usize },
    #[error("alias `{name}` names `{target}`, which is an alias itself")]
    AliasChain { name: String, target: String },

    // Rules and the tensors of the model.
    #[error("tensor `{tensor}` matches no rule and no `ignore`")]
    NoRule { tensor: String },
    #[error("tensor `{name}` ({is}) is an alias of `{target}` ({target_is})")]
    AliasDiffers { name: String, is: String, target: String, target_is: String },
    #[error("{rule} has `{key}` on dim {dim}, tensor `{tensor}` has shape {shape:?}")]
    NoSuchDim { rule: RuleId, tensor: String, key: &'static str, dim: usize, shape: Vec<u64> },
    #[error("{rule} finds `{text}` as group `{group}` of tensor `{tensor}`, expected a number")]
    GroupNumber { rule: RuleId, tensor: String, group: String, text: String },
    #[error("{rule} uses the group `{group}` in `to`, which took no part in the match of tensor `{tensor}`")]
    GroupUnmatched { rule: RuleId, tensor: String, group: String },
    #[error("{rule} has {of} experts, tensor `{tensor}` is expert {expert}")]
    ExpertOutside { rule: RuleId, tensor: String, expert: u64, of: u64 },
    #[error("{rule} has {of} experts, the highest of the model's tensors is expert {highest}")]
    ExpertsMissing { rule: RuleId, of: u64, highest: u64 },
    #[error("{rule}: layer {layer} of tensor `{tensor}` is in no range of `stages.layers`")]
    LayerWithoutStage { rule: RuleId, tensor: String, layer: u64 },

    // One rank.
    #[error("rank {rank} is outside the world of {world}")]
    RankOutside { rank: Rank, world: u32 },
    #[error("{rule} cannot cut dim {dim} of tensor `{tensor}` by `{axis}` on rank {rank}: {reason}")]
    Uncut { rule: RuleId, tensor: String, rank: Rank, dim: usize, axis: String, reason: CutError },
    #[error("local tensor `{local}` of shape {shape:?} on rank {rank} has more bytes than 63 bits count")]
    LocalSize { local: String, rank: Rank, shape: Vec<u64> },
    #[error("a rank has more local tensors than 32 bits count")]
    TooManyLocals,
    #[error("local tensor `{local}` on rank {rank} needs more than {RUNS_MAX} runs of one tensor")]
    TooManyRuns { local: String, rank: Rank },
    #[error("local tensor `{local}` on rank {rank} has no slot {slot}: the next is slot {found}, `{tensor}`")]
    SlotHole { local: String, rank: Rank, slot: u64, found: u64, tensor: String },
    #[error(
        "tensors `{first}` and `{second}` both take slot {slot} of local tensor `{local}` on rank {rank}"
    )]
    SlotTwice { local: String, rank: Rank, slot: u64, first: String, second: String },
    #[error("local tensor `{local}` is joined along dim {} by {} and along dim {} by {}", first.1, first.0, second.1, second.0)]
    PackDims { local: String, first: (RuleId, usize), second: (RuleId, usize) },
    #[error("local tensor `{local}` on rank {rank} joins `{}` of extents {:?} and `{}` of {:?}", first.0, first.1, second.0, second.1)]
    PackShapes { local: String, rank: Rank, first: Box<(String, Vec<u64>)>, second: Box<(String, Vec<u64>)> },
    #[error("local tensor `{local}` is striped by {with}, but {rule} has no `stripe`")]
    StripeMissing { local: String, rule: RuleId, with: RuleId },
    #[error(
        "{rule}: dim {dim} of tensor `{tensor}` has extent {extent}, which {groups} stripes of {width} do not tile"
    )]
    StripeTiles { rule: RuleId, tensor: String, dim: usize, extent: u64, width: u64, groups: u64 },
    #[error("local tensor `{local}` is striped with different cuts by {first} and {second}")]
    StripeCuts { local: String, first: RuleId, second: RuleId },
    #[error("local tensor `{local}` is stacked in different ways by {first} and {second}")]
    StackMixed { local: String, first: RuleId, second: RuleId },
    #[error(
        "local tensor `{local}` on rank {rank} has {count} stacked experts, but no tensor for index {lead}"
    )]
    StackHole { local: String, rank: Rank, lead: u64, count: u64 },
    #[error(
        "local tensor `{local}` on rank {rank} has extents {first:?} at index 0 and {found:?} at index {lead}"
    )]
    LeadShapes { local: String, rank: Rank, first: Vec<u64>, lead: u64, found: Vec<u64> },
    #[error("local tensor `{local}` on rank {rank} holds `{}` as {} and `{}` as {}", first.0, first.1, second.0, second.1)]
    LocalDtypes { local: String, rank: Rank, first: (String, DType), second: (String, DType) },
    #[error("local tensor `{local}` has different `post` in {first} and {second}")]
    LocalPosts { local: String, first: RuleId, second: RuleId },

    // Recorded ranks.
    #[error("`ranks` cannot be read: {reason}")]
    Recording { reason: String },
    #[error("local tensor `{local}` of rank {rank} {problem}")]
    Recorded { local: String, rank: Rank, problem: String },

    // All ranks.
    #[error("no rank holds {missing} of the {elements} elements of tensor `{tensor}`")]
    TensorGap { tensor: String, missing: u64, elements: u64 },
    #[error("ranks {first} and {second} hold parts of tensor `{tensor}` that overlap without being equal")]
    TensorOverlap { tensor: String, first: Rank, second: Rank },

    // Presets.
    #[error("there is no preset `{name}`, nearest is `{nearest}`")]
    UnknownPreset { name: String, nearest: String },
    #[error("preset `{name}` has no revision {found}, the newest is {known}")]
    PresetRevision { name: &'static str, found: u32, known: u32 },
    #[error("preset `{name}` has no axis `{axis}`, nearest is `{nearest}`")]
    PresetAxis { name: &'static str, axis: String, nearest: String },
    #[error("preset `{name}` needs the model's config, which is not given")]
    PresetNeedsModel { name: &'static str },
    #[error("preset `{name}` needs `{var}`, which the model's config does not have")]
    PresetFact { name: &'static str, var: String },
    #[error(
        "preset `{name}` is written for {layers} layers, {dense} of them dense; the model has {found}, {found_dense} dense"
    )]
    PresetLayers { name: &'static str, layers: u64, dense: u64, found: u64, found_dense: u64 },
    #[error(
        "preset `{name}` splits layers evenly, but {layers} layers do not divide into {stages} stages of `{axis}`"
    )]
    StagesUneven { name: &'static str, layers: u64, axis: String, stages: u64 },
    #[error("preset `{name}` is written for models without tied embeddings, this one ties them")]
    PresetTied { name: &'static str },
}

impl LayoutError {
    /// The stable code.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::LocalDtypes { .. } => Code::DtypeMismatch,
            Self::SlotTwice { .. } | Self::TensorOverlap { .. } => Code::CoverageOverlap,
            Self::TensorGap { .. } | Self::StackHole { .. } | Self::SlotHole { .. } => Code::CoverageGap,
            _ => Code::LayoutRejected,
        }
    }

    /// The axis whose size does not divide what it cuts, and sizes near it that do; `None` where no size helps.
    #[must_use]
    pub fn fitting_sizes(&self) -> Option<(&str, Vec<u64>)> {
        let divisors = |total: u64, parts| sizes_near(total, parts, |size| total.is_multiple_of(size));
        let (axis, sizes) = match self {
            Self::Uncut { axis, reason, .. } => (axis, reason.fitting_sizes()),
            Self::ExpertsUneven { axis, of, parts, .. } => (axis, divisors(*of, *parts)),
            Self::StagesUneven { axis, layers, stages, .. } => (axis, divisors(*layers, *stages)),
            _ => return None,
        };
        (!sizes.is_empty()).then_some((axis, sizes))
    }
}
