//! A document resolved against its world: prefixes and suffix expanded, expressions evaluated, names looked
//! up. Nothing here knows the model.

use super::document::{At, Cut, Division, Document, Entry, Expert, Prefix, RoundUp, Rule};
use super::error::{LayoutError, RuleId};
use super::expression;
use super::grid::{Axis, Grids};
use super::pattern::{Only, Part, Pattern, Template};
use super::stages::StageMap;
use crate::dtype::DType;
use crate::limits::TENSOR_NAME_BYTES_MAX;
use std::collections::BTreeMap;

/// A document ready to be bound to a tensor table.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) grids: Grids,
    pub(super) stages: StageMap,
    pub(super) alias: BTreeMap<String, String>,
    pub(super) ignore: Vec<Pattern>,
    pub(super) dtype: Option<DType>,
    pub(super) rules: Vec<SideRule>,
}

#[derive(Debug)]
pub(super) struct SideRule {
    pub(super) id: RuleId,
    pub(super) pattern: Pattern,
    pub(super) to: Template,
    pub(super) grid: usize,
    pub(super) stage: Axis,
    pub(super) holds: Holds,
    pub(super) only: Option<Only>,
    pub(super) cuts: Vec<SideCut>,
    /// Absent: alone in its local tensor.
    pub(super) pack: Option<SidePack>,
    pub(super) expert: Option<SideExpert>,
    pub(super) pad: Option<SideRoundUp>,
    pub(super) grain: Option<SideRoundUp>,
    pub(super) dtype: Option<DType>,
    pub(super) post: Option<String>,
}

/// Which stages hold the tensors of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holds {
    /// The stage that owns the layer `L`.
    LayerOwner,
    At(At),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SideCut {
    pub(super) dim: usize,
    pub(super) axis: Axis,
    pub(super) kind: Division,
    pub(super) unit: u64,
    pub(super) spread: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SidePack {
    pub(super) slot: u64,
    pub(super) dim: usize,
    pub(super) stripe: Option<u64>,
}

#[derive(Debug)]
pub(super) struct SideExpert {
    pub(super) axis: Axis,
    pub(super) of: u64,
    pub(super) kind: Division,
    pub(super) stack: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SideRoundUp {
    pub(super) dim: usize,
    pub(super) to: u64,
}

impl Side {
    pub(super) fn new(document: &Document) -> Result<Self, LayoutError> {
        let grids = Grids::resolve(document)?;
        let stages = StageMap::new(&document.stages)?;
        for (name, target) in &document.alias {
            if document.alias.contains_key(target) {
                return Err(LayoutError::AliasChain { name: name.clone(), target: target.clone() });
            }
        }
        let ignore = |(i, text): (usize, &String)| Pattern::new(text, &format!("ignore[{i}]"));
        let resolver = Resolver { document, grids: &grids, stages: &stages };
        let rules = resolver.rules()?;
        stages.same_in_all_grids(&grids, rules.iter().map(|rule| (rule.grid, &rule.stage)))?;
        Ok(Self {
            ignore: document.ignore.iter().enumerate().map(ignore).collect::<Result<_, _>>()?,
            alias: document.alias.clone(),
            dtype: document.dtype,
            rules,
            stages,
            grids,
        })
    }
}

struct Resolver<'a> {
    document: &'a Document,
    grids: &'a Grids,
    stages: &'a StageMap,
}

impl Resolver<'_> {
    fn rules(&self) -> Result<Vec<SideRule>, LayoutError> {
        let none = Prefix { hf: String::new(), to: String::new(), at: None };
        let mut out = Vec::new();
        for (entry, source) in self.document.rules.iter().enumerate() {
            match source {
                Entry::Rule(rule) => out.push(self.rule(RuleId { entry, inner: None }, &none, rule)?),
                Entry::Group(prefixes, rules) => {
                    for prefix in prefixes {
                        for (inner, rule) in rules.iter().enumerate() {
                            out.push(self.rule(RuleId { entry, inner: Some(inner) }, prefix, rule)?);
                        }
                    }
                }
            }
        }
        // Under one prefix of a group the group of `only` may be absent: the rule is then meant for another one, and
        // matches nothing here.
        let named = |rule: &SideRule| rule.only.as_ref().is_none_or(|only| rule.pattern.has(&only.group));
        let lost = out.iter().find(|rule| !out.iter().any(|other| other.id == rule.id && named(other)));
        if let Some(SideRule { id, only: Some(only), .. }) = lost {
            return Err(LayoutError::OnlyGroup { rule: *id, group: only.group.clone() });
        }
        out.retain(named);
        Ok(out)
    }

    fn rule(&self, id: RuleId, prefix: &Prefix, rule: &Rule) -> Result<SideRule, LayoutError> {
        let place = |key: &str| format!("{id}.{key}");
        let hf = self.expand(id, &prefix.hf, &rule.hf, |suffix| &suffix.hf)?;
        let to = self.expand(id, &prefix.to, &rule.to, |suffix| &suffix.to)?;
        let pattern = Pattern::new(&hf, &place("hf"))?;
        if let Some(group) = ["l", "v", "le"].into_iter().find(|group| pattern.has(group)) {
            return Err(LayoutError::ReservedGroup { rule: id, group });
        }
        if to.is_empty() || to.len() > TENSOR_NAME_BYTES_MAX {
            return Err(LayoutError::NameLength { place: place("to"), found: to.len() });
        }
        let to = Template::new(&to, &pattern, id)?;
        let holds = match (prefix.at.or(rule.at), pattern.has("L")) {
            (Some(_), true) => return Err(LayoutError::LayerAndStage { rule: id }),
            (Some(at), false) => Holds::At(at),
            (None, true) => Holds::LayerOwner,
            (None, false) => Holds::At(At::ALL),
        };
        let needs = |part: Part, hole, group, given: bool| {
            if to.parts.contains(&part) && !given {
                return Err(LayoutError::HoleNeeds { rule: id, hole, needs: group });
            }
            Ok(())
        };
        needs(Part::LocalLayer, "{l}", "a group `L` in `hf`", holds == Holds::LayerOwner)?;
        needs(Part::Chunk, "{v}", "a group `L` in `hf`", holds == Holds::LayerOwner)?;
        needs(Part::LocalExpert, "{le}", "the key `expert`", rule.expert.is_some())?;
        let grid = rule.grid.as_ref().map_or(Ok(0), |name| self.grids.index(name, &place("grid")))?;
        let stage = self.grids.axis(grid, &self.stages.axis, "stages.axis")?;
        self.stages.one_entry_per_stage(stage.size)?;
        let cut = |(i, cut)| self.cut(id, grid, i, cut);
        let cuts = rule.cut.iter().enumerate().map(cut).collect::<Result<Vec<_>, _>>()?;
        let pack = rule.pack.as_ref().map(|pack| {
            let stripe = pack.stripe.as_ref().map(|text| self.size(&place("pack.stripe"), text));
            Ok(SidePack {
                slot: pack.slot,
                dim: dim(&place("pack.dim"), pack.dim)?,
                stripe: stripe.transpose()?,
            })
        });
        let pack = pack.transpose()?;
        let pad = self.round_up(&place("pad"), rule.pad.as_ref())?;
        let grain = self.round_up(&place("grain"), rule.grain.as_ref())?;
        if let Some(SidePack { dim, stripe: Some(_), .. }) = pack {
            if pad.is_some() || grain.is_some() {
                return Err(LayoutError::StripePad {
                    rule: id,
                    key: if pad.is_some() { "pad" } else { "grain" },
                });
            }
            if let Some(cut) = cuts.iter().find(|cut| cut.dim != dim) {
                return Err(LayoutError::StripeCut { rule: id, dim: cut.dim, joined: dim });
            }
        }
        if rule.post.as_ref().is_some_and(|post| post.is_empty() || post.len() > TENSOR_NAME_BYTES_MAX) {
            return Err(LayoutError::NameLength {
                place: place("post"),
                found: rule.post.as_ref().map_or(0, String::len),
            });
        }
        Ok(SideRule {
            id,
            to,
            grid,
            stage,
            holds,
            only: rule.only.as_ref().map(|text| Only::new(text, id)).transpose()?,
            cuts,
            pack,
            expert: rule.expert.as_ref().map(|expert| self.expert(id, grid, &pattern, expert)).transpose()?,
            pad,
            grain,
            dtype: rule.dtype,
            post: rule.post.clone(),
            pattern,
        })
    }

    /// Prefix and text joined, with `~` replaced.
    fn expand(
        &self,
        rule: RuleId,
        prefix: &str,
        text: &str,
        side: impl Fn(&super::document::Suffix) -> &String,
    ) -> Result<String, LayoutError> {
        let joined = format!("{prefix}{text}");
        match &self.document.suffix {
            Some(suffix) => Ok(joined.replace('~', side(suffix))),
            None if joined.contains('~') => Err(LayoutError::NoSuffix { rule }),
            None => Ok(joined),
        }
    }

    fn cut(&self, rule: RuleId, grid: usize, index: usize, cut: &Cut) -> Result<SideCut, LayoutError> {
        let place = |key: &str| format!("{rule}.cut[{index}].{key}");
        let unit = cut.unit.as_ref().map_or(Ok(1), |text| self.size(&place("unit"), text))?;
        if cut.spread && cut.kind != Division::Even {
            return Err(LayoutError::KindWith {
                place: place("spread"),
                key: "spread",
                kind: cut.kind.word(),
            });
        }
        if unit != 1 && cut.kind == Division::Balanced {
            return Err(LayoutError::KindWith { place: place("unit"), key: "unit", kind: cut.kind.word() });
        }
        let axis = self.grids.axis(grid, &cut.by, &place("by"))?;
        Ok(SideCut { dim: dim(&place("dim"), cut.dim)?, axis, kind: cut.kind, unit, spread: cut.spread })
    }

    fn expert(
        &self,
        rule: RuleId,
        grid: usize,
        pattern: &Pattern,
        expert: &Expert,
    ) -> Result<SideExpert, LayoutError> {
        if !pattern.has("e") {
            return Err(LayoutError::ExpertGroup { rule });
        }
        let axis = self.grids.axis(grid, &expert.by, &format!("{rule}.expert.by"))?;
        let of = self.size(&format!("{rule}.expert.of"), &expert.of)?;
        if expert.kind == Division::Even && !of.is_multiple_of(axis.size) {
            return Err(LayoutError::ExpertsUneven { rule, of, axis: axis.name, parts: axis.size });
        }
        Ok(SideExpert { axis, of, kind: expert.kind, stack: expert.stack })
    }

    fn round_up(&self, place: &str, given: Option<&RoundUp>) -> Result<Option<SideRoundUp>, LayoutError> {
        let resolve = |given: &RoundUp| {
            let dim = dim(&format!("{place}.dim"), given.dim)?;
            Ok(SideRoundUp { dim, to: self.size(&format!("{place}.to"), &given.to)? })
        };
        given.map(resolve).transpose()
    }

    /// The value of an expression that must be at least 1.
    fn size(&self, place: &str, text: &str) -> Result<u64, LayoutError> {
        let place = || place.to_owned();
        match expression::evaluate(text, &self.document.vars) {
            Ok(0) => Err(LayoutError::Zero { place: place(), text: text.to_owned() }),
            Ok(value) => Ok(value),
            Err(reason) => {
                let text = text.chars().take(80).collect();
                Err(LayoutError::Expression { place: place(), text, reason })
            }
        }
    }
}

fn dim(place: &str, dim: u64) -> Result<usize, LayoutError> {
    let found = usize::try_from(dim).ok().filter(|dim| *dim < crate::limits::HF_DIMS_MAX);
    found.ok_or_else(|| LayoutError::DimTooLarge { place: place.to_owned(), dim })
}
