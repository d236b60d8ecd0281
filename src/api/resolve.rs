//! A refit with everything looked up: the tensor table, and per side the layout and the pods that host its
//! ranks. Used offline (`plan`, `validate`), by `local`, and by a coordinator; agents never expand presets.

use crate::api::documents::{Document, Documents};
use crate::api::problem::{FieldPath, Problem, Refusal};
use crate::api::ranks::{self, Pod};
use crate::api::refit::{
    ConfigMapKey, KeySource, Layout as LayoutSource, Model, WeightRefit, WeightRefitSpec,
};
use std::collections::BTreeMap;
use weightrefit_core::layout::{self, Layout, preset};
use weightrefit_core::model::{self, ModelConfig, TensorTable};
use weightrefit_core::plan::{Plan, PlanError, Planner, Sources};

/// What is not in the documents.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The tensors, in place of `spec.model`.
    pub tensors: Option<TensorTable>,
    /// Replicas of each pool; default its `minReplicas`.
    pub replicas: Option<u32>,
}

/// A refit with everything looked up.
#[derive(Debug)]
pub struct ResolvedRefit {
    /// Name of the resource.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its uid; `None` offline.
    pub uid: Option<String>,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
    /// The checked specification, for policies and timeouts.
    pub spec: WeightRefitSpec,
    /// All tensors of the model.
    pub tensors: TensorTable,
    /// The training side.
    pub training: Side,
    /// The pools, in the order of the resource.
    pub pools: Vec<ResolvedPool>,
}

/// One side, or one pool of it.
#[derive(Debug)]
pub struct Side {
    /// Where each element lies on each rank.
    pub layout: Layout,
    /// Who hosts the ranks.
    pub pods: Vec<Pod>,
    /// The field that holds the layout, for messages.
    path: FieldPath,
}

/// One pool.
#[derive(Debug)]
pub struct ResolvedPool {
    /// Its name.
    pub name: String,
    /// Number of its replicas.
    pub replicas: u32,
    /// Layout of each replica, and the pods of all.
    pub side: Side,
}

/// Looks everything up that `refit` names.
///
/// # Errors
/// With the first field that names something that is absent, malformed, or beyond this version.
pub fn resolve(
    documents: &Documents,
    refit: &Document<WeightRefit>,
    options: &Options,
) -> Result<ResolvedRefit, Refusal> {
    let lookup = Lookup { documents, refit };
    let WeightRefit { metadata, spec, .. } = &refit.value;
    let at = FieldPath::of("spec");
    let model = at.key("model");
    let config = lookup.config(&model, &spec.model)?;
    let tensors = match &options.tensors {
        Some(tensors) => tensors.clone(),
        None => lookup.tensors(&model, &spec.model, config.as_ref())?,
    };
    let sides = Sides { lookup: &lookup, tensors: &tensors, config: config.as_ref() };
    let path = at.key("training.layout");
    let world = Ranks { count: spec.training.world_size, field: "worldSize" };
    let (path, layout) = sides.layout(&path, &spec.training.layout, world)?;
    let training = Side { layout, pods: ranks::training_pods(&spec.training), path };
    let mut pools = Vec::new();
    for (index, pool) in spec.inference.pools.iter().enumerate() {
        let path = at.key("inference.pools").index(index).key("layout");
        let ranks = Ranks { count: pool.ranks_per_replica, field: "ranksPerReplica" };
        let (path, layout) = sides.layout(&path, &pool.layout, ranks)?;
        let replicas = options.replicas.unwrap_or(pool.min_replicas.unsigned_abs());
        let side = Side { layout, pods: ranks::pool_pods(pool, replicas), path };
        pools.push(ResolvedPool { name: pool.name.clone(), replicas, side });
    }
    Ok(ResolvedRefit {
        name: metadata.name.clone(),
        namespace: metadata.namespace.clone(),
        uid: metadata.uid.clone(),
        annotations: metadata.annotations.clone(),
        spec: spec.clone(),
        tensors,
        training,
        pools,
    })
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum NoPlan {
    /// A layout does not hold together.
    #[error("{path}")]
    Layout {
        /// The field that holds it.
        path: FieldPath,
        /// Why.
        source: Box<layout::LayoutError>,
    },
    /// The sides do not fit each other.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl NoPlan {
    /// The stable code.
    #[must_use]
    pub const fn code(&self) -> weightrefit_core::code::Code {
        match self {
            Self::Layout { source, .. } => source.code(),
            Self::Plan(error) => error.code(),
        }
    }
}

impl ResolvedRefit {
    /// The plan, with replicas named `0`, `1`, … in each pool.
    ///
    /// # Errors
    /// When a layout is inconsistent or the sides do not fit each other.
    pub fn plan(&self) -> Result<Plan, NoPlan> {
        let tensors = &self.tensors;
        let Side { layout, .. } = &self.training;
        let aliased = tensors.iter().filter(|(id, _)| layout.alias(*id) != *id);
        let alias = aliased
            .map(|(id, tensor)| (tensor.name.clone(), tensors[layout.alias(id)].name.clone()))
            .collect();
        let shapes = tensors.iter().map(|(_, tensor)| (tensor.name.as_str(), tensor.shape.as_slice()));
        let mut sources = Sources::new(shapes, &alias, layout.digest())?;
        self.training.each_rank(|regions| sources.add_rank(regions))?;
        let mut planner = Planner::new(sources);
        for pool in &self.pools {
            let names = (0..pool.replicas).map(|replica| replica.to_string()).collect();
            planner.add_pool(&pool.name, names, pool.side.layout.digest())?;
            pool.side.each_rank(|regions| planner.add_rank(regions))?;
        }
        Ok(planner.plan()?)
    }
}

impl Side {
    /// Checks the layout on all ranks.
    ///
    /// # Errors
    /// When some rank's local tensors have holes or overlaps, or the ranks together do not hold the model.
    pub fn check(&self) -> Result<(), NoPlan> {
        self.layout.check().map_err(|error| self.inconsistent(error))
    }

    fn inconsistent(&self, error: layout::LayoutError) -> NoPlan {
        NoPlan::Layout { path: self.path.clone(), source: Box::new(error) }
    }

    fn each_rank(
        &self,
        mut add: impl FnMut(&weightrefit_core::region::RankRegions) -> Result<(), PlanError>,
    ) -> Result<(), NoPlan> {
        for rank in self.layout.ranks() {
            add(&self.layout.rank_regions(rank).map_err(|error| self.inconsistent(error))?)?;
        }
        Ok(())
    }
}

/// The size of a side, and the field that says it.
#[derive(Clone, Copy)]
struct Ranks {
    count: i32,
    field: &'static str,
}

struct Lookup<'a> {
    documents: &'a Documents,
    refit: &'a Document<WeightRefit>,
}

impl Lookup<'_> {
    fn text(&self, path: &FieldPath, source: &KeySource) -> Result<String, Refusal> {
        let path = path.key("configMapKeyRef");
        self.key_text(&path, &source.config_map_key_ref)
    }

    fn key_text(&self, path: &FieldPath, key: &ConfigMapKey) -> Result<String, Refusal> {
        let bytes = self.documents.bytes(self.refit, path, key)?;
        String::from_utf8(bytes).map_err(|error| {
            let reason = error.utf8_error().to_string();
            self.refit.refuse(path.key("key"), Problem::Undecodable { key: key.key.clone(), reason })
        })
    }

    fn config(&self, path: &FieldPath, model: &Model) -> Result<Option<ModelConfig>, Refusal> {
        let Some(source) = &model.hugging_face_config else { return Ok(None) };
        let path = path.key("huggingFaceConfig");
        let text = self.text(&path, source)?;
        ModelConfig::read(&text).map(Some).map_err(|error| self.refit.refuse(path, error.into()))
    }

    fn tensors(
        &self,
        path: &FieldPath,
        model: &Model,
        config: Option<&ModelConfig>,
    ) -> Result<TensorTable, Refusal> {
        let (path, table) = match (config, &model.tensor_table) {
            (Some(config), _) => (path.key("huggingFaceConfig"), config.table()),
            (None, Some(source)) => {
                let path = path.key("tensorTable");
                let text = self.text(&path, source)?;
                (path, model::read_list(&text))
            }
            (None, None) => {
                let hint = "Give the tensors with `--tensors FILE`, or choose type HuggingFaceConfig or TensorTable.";
                let problem = Problem::Unsupported { value: "Registered".into(), hint };
                return Err(self.refit.refuse(path.key("type"), problem));
            }
        };
        table.map_err(|error| self.refit.refuse(path, error.into()))
    }
}

/// What the layouts of both sides are made of.
struct Sides<'a> {
    lookup: &'a Lookup<'a>,
    tensors: &'a TensorTable,
    config: Option<&'a ModelConfig>,
}

impl Sides<'_> {
    /// The layout, and the field that holds it.
    fn layout(
        &self,
        path: &FieldPath,
        source: &LayoutSource,
        ranks: Ranks,
    ) -> Result<(FieldPath, Layout), Refusal> {
        let refuse = |path: FieldPath, problem: Problem| self.lookup.refit.refuse(path, problem);
        let (path, document) = match (&source.preset, &source.inline, &source.config_map) {
            (_, Some(inline), _) => (path.key("inline"), layout::Document::from_value(inline)),
            (_, _, Some(key)) => {
                let path = path.key("configMap");
                let text = self.lookup.key_text(&path, key)?;
                (path, layout::Document::parse(&text))
            }
            (Some(preset), ..) => {
                let sizes =
                    preset.sizes.iter().map(|(axis, size)| (axis.clone(), u64::from(size.unsigned_abs())));
                let (revision, world) =
                    (preset.revision.unsigned_abs(), u64::from(ranks.count.unsigned_abs()));
                let document = preset::resolve(&preset.name, revision, &sizes.collect(), world, self.config);
                (path.key("preset"), document)
            }
            (None, None, None) => {
                let hint = "This version plans from documents: choose type Preset, Inline or ConfigMap.";
                let problem = Problem::Unsupported { value: "Registered".into(), hint };
                return Err(refuse(path.key("type"), problem));
            }
        };
        let bound = document.and_then(|document| Layout::new(&document, self.tensors));
        let layout = bound.map_err(|error| refuse(path.clone(), error.into()))?;
        if i64::from(layout.world()) != i64::from(ranks.count) {
            let Ranks { count, field } = ranks;
            return Err(refuse(path, Problem::OtherWorld { world: layout.world(), ranks: count, field }));
        }
        Ok((path, layout))
    }
}
