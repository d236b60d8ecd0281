//! A refit with everything looked up: the tensor table, and per side the layout and the pods that host its
//! ranks. Used offline (`plan`, `validate`), by `local`, and by a coordinator; agents never expand presets.

use crate::api::documents::{Document, Documents};
use crate::api::manifest::Manifest;
use crate::api::mistaken::Sort;
use crate::api::problem::{FieldPath, Problem, Refusal};
use crate::api::ranks::{self, Pod};
use crate::api::refit::WeightRefitSpec;
use crate::api::source::{ConfigMapKey, KeySource, Layout as LayoutSource, Model, PresetRef};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use weightrefit_core::id::Rank;
use weightrefit_core::layout::{self, Layout, preset};
use weightrefit_core::model::{self, ModelConfig, TensorTable};
use weightrefit_core::plan::{Plan, PlanError, Planner, Sources};

/// What is not in the documents.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The tensors, instead of those that `spec.model` names; presets still read its config.
    pub tensors: Option<TensorTable>,
    /// Replicas of each pool; default its `minReplicas`.
    pub replicas: Option<u32>,
    /// Takes pools whose layout their engines record; until they have, it holds nothing.
    pub open_pools: bool,
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
    /// What was taken for granted, in sentences that name the field.
    pub notes: Vec<String>,
}

/// One side, or one pool of it.
#[derive(Debug)]
pub struct Side {
    /// Where each element lies on each rank.
    pub layout: Layout,
    /// Where that was written.
    pub origin: Origin,
    /// Who hosts the ranks.
    pub pods: Vec<Pod>,
    /// The field that holds the layout, for messages.
    path: FieldPath,
}

/// Where a layout was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type")]
pub enum Origin {
    /// A shipped document.
    Preset {
        /// Its name.
        name: String,
        /// Its revision.
        revision: i32,
    },
    /// In the resource.
    Inline,
    /// In a ConfigMap.
    ConfigMap {
        /// Name of the ConfigMap.
        name: String,
        /// The key.
        key: String,
    },
    /// The engines will record it.
    Registered,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Preset { name, revision } => write!(f, "{name} r{revision}"),
            Self::Inline => f.write_str("inline"),
            Self::ConfigMap { name, key } => write!(f, "ConfigMap {name}, {key}"),
            Self::Registered => f.write_str("registered"),
        }
    }
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
    refit: &Document<Manifest>,
    options: &Options,
) -> Result<ResolvedRefit, Refusal> {
    let lookup = Lookup { documents, refit };
    let Manifest { metadata, spec, .. } = &refit.value;
    let at = FieldPath::of("spec");
    let model = at.key("model");
    let config = lookup.config(&model, &spec.model);
    let tensors = match &options.tensors {
        // Then only a preset needs the config.
        Some(tensors) => tensors.clone(),
        None => lookup.tensors(&model, &spec.model, config.clone()?.as_ref())?,
    };
    let mut notes = Vec::new();
    notes.extend(config.iter().flatten().flat_map(|config| config.assumed.clone()));
    let sides = Sides { lookup: &lookup, tensors: &tensors, config: &config };
    let path = at.key("training.layout");
    let world = Ranks { count: spec.training.world_size, field: "worldSize" };
    let layout = sides.layout(&path, &spec.training.layout, world, false, &mut notes)?;
    let training = Side::new(layout, ranks::training_pods(&spec.training));
    let mut pools = Vec::new();
    for (index, pool) in spec.inference.pools.iter().enumerate() {
        let path = at.key("inference.pools").index(index).key("layout");
        let ranks = Ranks { count: pool.ranks_per_replica, field: "ranksPerReplica" };
        let layout = sides.layout(&path, &pool.layout, ranks, options.open_pools, &mut notes)?;
        let replicas = options.replicas.unwrap_or(pool.min_replicas.unsigned_abs());
        let side = Side::new(layout, ranks::pool_pods(pool, replicas));
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
        notes,
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
        self.plan_of(|pool| (0..self.pools[pool].replicas).map(|replica| replica.to_string()).collect())
    }

    /// The plan for replicas of these names, by index of the pool.
    ///
    /// # Errors
    /// When a layout is inconsistent or the sides do not fit each other.
    pub fn plan_of(&self, names: impl Fn(usize) -> Vec<String>) -> Result<Plan, NoPlan> {
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
        for (index, pool) in self.pools.iter().enumerate() {
            planner.add_pool(&pool.name, names(index), pool.side.layout.digest())?;
            pool.side.each_rank(|regions| planner.add_rank(regions))?;
        }
        Ok(planner.plan()?)
    }
}

impl Side {
    fn new((path, origin, layout): (FieldPath, Origin, Layout), pods: Vec<Pod>) -> Self {
        Self { layout, origin, pods, path }
    }

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
    refit: &'a Document<Manifest>,
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
        ModelConfig::read(&text).map(Some).map_err(|error| {
            self.refit.refuse(path, Sort::ModelConfig.mistaken(&text).unwrap_or_else(|| error.into()))
        })
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
                let table = model::read_list(&text);
                if let (Err(_), Some(problem)) = (&table, Sort::TensorList.mistaken(&text)) {
                    return Err(self.refit.refuse(path, problem));
                }
                (path, table)
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
    config: &'a Result<Option<ModelConfig>, Refusal>,
}

impl Sides<'_> {
    /// The layout, where it was written, and the field that says so.
    fn layout(
        &self,
        path: &FieldPath,
        source: &LayoutSource,
        ranks: Ranks,
        is_open: bool,
        notes: &mut Vec<String>,
    ) -> Result<(FieldPath, Origin, Layout), Refusal> {
        let refuse = |path: FieldPath, problem: Problem| self.lookup.refit.refuse(path, problem);
        let (path, origin, document) = match (&source.preset, &source.inline, &source.config_map) {
            (_, Some(inline), _) => {
                (path.key("inline"), Origin::Inline, layout::Document::from_value(&inline.clone().into()))
            }
            (_, _, Some(key)) => {
                let path = path.key("configMap");
                let text = self.lookup.key_text(&path, key)?;
                let document = layout::Document::parse(&text);
                if let (Err(_), Some(problem)) = (&document, Sort::Layout.mistaken(&text)) {
                    return Err(refuse(path, problem));
                }
                (path, Origin::ConfigMap { name: key.name.clone(), key: key.key.clone() }, document)
            }
            (Some(preset), ..) => {
                let path = path.key("preset");
                let layout = self.preset(&path, preset, ranks)?;
                notes.extend(without_sizes(&path, preset, &layout));
                let origin = Origin::Preset { name: preset.name.clone(), revision: preset.revision };
                return Ok((path, origin, layout));
            }
            (None, None, None) if is_open => {
                let nothing = vec![Vec::new(); ranks.count.unsigned_abs() as usize];
                let document = layout::Document::recorded(nothing, BTreeMap::new());
                (path.key("type"), Origin::Registered, Ok(document))
            }
            (None, None, None) => {
                let hint = "Only pools have it, where engines run: choose type Preset, Inline or ConfigMap.";
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
        Ok((path, origin, layout))
    }

    /// A preset, whose world is that of its side.
    fn preset(&self, path: &FieldPath, preset: &PresetRef, ranks: Ranks) -> Result<Layout, Refusal> {
        let config = self.config.as_ref().map_err(Clone::clone)?.as_ref();
        let world = u64::from(ranks.count.unsigned_abs());
        let sizes = preset.sizes.iter().map(|(axis, size)| (axis.clone(), u64::from(size.unsigned_abs())));
        let sizes: BTreeMap<_, _> = sizes.collect();
        // The first rank shows already whether the cuts come out.
        let bound = |sizes: &BTreeMap<String, u64>| {
            let revision = preset.revision.unsigned_abs();
            let document = preset::resolve(&preset.name, revision, sizes, world, config)?;
            let layout = Layout::new(&document, self.tensors)?;
            layout.rank_regions(Rank(0)).map(|_| layout)
        };
        bound(&sizes).map_err(|error| {
            let fitting = error.fitting_sizes().and_then(|(axis, _)| {
                let fits = |size: &u64| {
                    let mut sizes = sizes.clone();
                    sizes.insert(axis.to_owned(), *size);
                    world.is_multiple_of(*size) && bound(&sizes).is_ok()
                };
                let fitting: Vec<u64> = (1..=world).filter(fits).collect();
                (!fitting.is_empty()).then(|| (axis.to_owned(), fitting))
            });
            let problem = match fitting {
                Some((axis, sizes)) => Problem::PresetSize { error: error.into(), axis, sizes },
                None => error.into(),
            };
            self.lookup.refit.refuse(path.clone(), problem)
        })
    }
}

/// Whoever gives a preset no sizes may expect those of its example; they all are 1.
fn without_sizes(path: &FieldPath, preset: &PresetRef, layout: &Layout) -> Option<String> {
    if !preset.sizes.is_empty() || layout.world() == 1 {
        return None;
    }
    let axes = layout.grids().flat_map(|(_, axes)| axes);
    let larger = axes.filter(|(_, size)| *size > 1).map(|(axis, size)| format!("{axis} {size}"));
    let larger: Vec<String> = larger.collect();
    Some(format!(
        "{path} has no `sizes`: every axis is 1, but for {} from the number of ranks",
        larger.join(" and ")
    ))
}
