//! Which of the documents that this project reads a text is, by the keys that only it has: for hints where one was
//! given in place of another.

use crate::api::problem::Problem;
use crate::api::yaml::Node;

/// A sort of document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sort {
    /// A Kubernetes object.
    Resource,
    /// A `layout: v1` document.
    Layout,
    /// A model's `config.json`.
    ModelConfig,
    /// `{"tensors": […]}`.
    TensorList,
    /// A `model.safetensors.index.json`.
    WeightsIndex,
}

/// Keys and what they betray, the surest first.
const MARKS: [(&str, Sort); 6] = [
    ("kind", Sort::Resource),
    ("layout", Sort::Layout),
    ("weight_map", Sort::WeightsIndex),
    ("model_type", Sort::ModelConfig),
    ("architectures", Sort::ModelConfig),
    ("tensors", Sort::TensorList),
];

impl Sort {
    /// What the node is; `None` where no key says.
    pub(super) fn of(node: &Node) -> Option<Self> {
        MARKS.iter().find(|(key, _)| node.get(key).is_some()).map(|(_, sort)| *sort)
    }

    /// The problem of a text that should have been `self` and is something else that is known.
    pub(crate) fn mistaken(self, text: &str) -> Option<Problem> {
        let documents = Node::documents(text).ok()?;
        let found = Self::of(documents.first()?).filter(|found| *found != self)?;
        Some(Problem::OtherSort { found, wanted: self })
    }

    /// With its article.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Resource => "a Kubernetes resource",
            Self::Layout => "a `layout: v1` document",
            Self::ModelConfig => "a model's config.json",
            Self::TensorList => "a list of tensors",
            Self::WeightsIndex => "an index of weights files",
        }
    }

    /// Where it belongs.
    pub(super) const fn place(self) -> &'static str {
        match self {
            Self::Resource => "A WeightRefit and its ConfigMaps are given with `-f`.",
            Self::Layout => {
                "A layout document is shown by `weightrefit layout pieces --document FILE --tensors FILE`; in a \
                 WeightRefit it stands under `layout: {type: Inline, inline: …}`, or in a ConfigMap."
            }
            Self::ModelConfig => {
                "config.json goes into a ConfigMap that the WeightRefit names: `model: {type: HuggingFaceConfig, \
                 huggingFaceConfig: {configMapKeyRef: {name: NAME, key: config.json}}}`."
            }
            Self::TensorList => {
                "A list of tensors is given with `--tensors`, or as the ConfigMap of `model: {type: TensorTable, …}`."
            }
            Self::WeightsIndex => "An index is given with `--tensors`, in the folder of its weights files.",
        }
    }
}
