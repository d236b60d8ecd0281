//! A document bound to a tensor table: patterns are matched here, once per tensor.

use super::document::Document;
use super::error::LayoutError;
use super::evaluate::{self, RankLayout};
use super::pattern::Part;
use super::recording;
use super::resolve::{Holds, Side, SideRule};
use super::stages::LayerHome;
use crate::id::{Rank, TensorId};
use crate::model::{TensorMeta, TensorTable};
use crate::region::RankRegions;
use std::collections::BTreeMap;

/// A document bound to a tensor table.
#[derive(Debug)]
pub struct Layout {
    pub(super) side: Side,
    pub(super) table: TensorTable,
    /// Tensors that the side holds, in table order; aliases and ignored ones are absent.
    pub(super) held: Vec<TensorId>,
    /// Their rules; empty where the layout was recorded.
    pub(super) bound: Vec<Bound>,
    /// What each rank recorded; `None` where rules say it.
    pub(super) recorded: Option<Vec<RankLayout>>,
    /// Per tensor of the table the one that carries its bytes.
    carrier: Vec<TensorId>,
}

/// A tensor and its rule.
#[derive(Debug)]
pub(super) struct Bound {
    pub(super) tensor: TensorId,
    /// Index in `side.rules`.
    pub(super) rule: usize,
    /// Present where the rule holds by layer.
    pub(super) home: Option<LayerHome>,
    /// The group `e`, where the rule has `expert`.
    pub(super) expert: Option<u64>,
    /// Local name; its holes depend on the rank.
    pub(super) name: Vec<Part>,
}

impl Layout {
    /// Binds a document to the tensors of a model.
    ///
    /// # Errors
    /// What is wrong with the document by itself, a tensor without rule, and a rule that does not fit its tensor.
    pub fn new(document: &Document, table: &TensorTable) -> Result<Self, LayoutError> {
        let side = Side::new(document)?;
        let mut carrier = Vec::with_capacity(table.len());
        let mut bound = Vec::with_capacity(table.len());
        // Aliases whose target is not in the table: the first one in table order carries the bytes.
        let mut absent = BTreeMap::<&str, TensorId>::new();
        for (id, tensor) in table.iter() {
            let target = side.alias.get(&tensor.name).map(String::as_str);
            let name = target.unwrap_or(&tensor.name);
            let carried_by = match target {
                None => id,
                Some(target) => table.find(target).unwrap_or_else(|| *absent.entry(target).or_insert(id)),
            };
            carrier.push(carried_by);
            if carried_by != id {
                same_as_carrier(tensor, &table[carried_by])?;
            } else if document.ranks.is_empty()
                && let Some(found) = find(&side, tensor, name)?
            {
                bound.push(Bound { tensor: id, ..found });
            }
        }
        all_experts(&side, &bound)?;
        let mut held: Vec<_> = bound.iter().map(|bound| bound.tensor).collect();
        let mut recorded = None;
        if !document.ranks.is_empty() {
            let ranks = recording::bind(&document.ranks, table, &carrier)?;
            held =
                ranks.iter().flat_map(|rank| rank.regions.pieces.iter().map(|piece| piece.tensor)).collect();
            held.sort_unstable();
            held.dedup();
            recorded = Some(ranks);
        }
        Ok(Self { side, table: table.clone(), held, bound, recorded, carrier })
    }

    /// Number of ranks.
    #[must_use]
    pub fn world(&self) -> u32 {
        // Bounded by RANKS_MAX.
        self.side.grids.world as u32
    }

    /// All ranks in order.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.world()).map(Rank)
    }

    /// Each grid with its axes and their sizes, the fastest first.
    pub fn grids(&self) -> impl ExactSizeIterator<Item = (&str, &[(String, u64)])> {
        self.side.grids.grids.iter().map(|grid| (grid.name.as_str(), grid.axes.as_slice()))
    }

    /// The table that the layout is bound to.
    #[must_use]
    pub fn table(&self) -> &TensorTable {
        &self.table
    }

    /// The tensor whose bytes `tensor` shares on this side: its target where it is an alias, else itself.
    /// Pieces name only such tensors. Panics on an id of another table.
    #[must_use]
    pub fn alias(&self, tensor: TensorId) -> TensorId {
        self.carrier[tensor.0 as usize]
    }

    /// Whether some rank of this side may hold the tensor (after its alias); false where it is ignored.
    #[must_use]
    pub fn holds(&self, tensor: TensorId) -> bool {
        let Some(carrier) = self.carrier.get(tensor.0 as usize) else { return false };
        self.held.binary_search(carrier).is_ok()
    }

    /// What one rank holds.
    ///
    /// # Errors
    /// An extent that a cut does not divide, slots or stacks with holes or claimed twice, dtypes that differ.
    pub fn rank_regions(&self, rank: Rank) -> Result<RankRegions, LayoutError> {
        Ok(self.rank(rank)?.regions)
    }

    /// What one rank holds, and what its agent must do after a write.
    ///
    /// # Errors
    /// As [`Self::rank_regions`].
    pub fn rank(&self, rank: Rank) -> Result<RankLayout, LayoutError> {
        evaluate::rank(self, rank)
    }
}

/// A number of experts other than the model's would leave ranks without any, and give the others wrong ones.
fn all_experts(side: &Side, bound: &[Bound]) -> Result<(), LayoutError> {
    let mut found = vec![None; side.rules.len()];
    for bound in bound {
        found[bound.rule] = found[bound.rule].max(bound.expert);
    }
    for (rule, highest) in side.rules.iter().zip(found) {
        if let (Some(expert), Some(highest)) = (&rule.expert, highest)
            && highest + 1 != expert.of
        {
            return Err(LayoutError::ExpertsMissing { rule: rule.id, of: expert.of, highest });
        }
    }
    Ok(())
}

fn same_as_carrier(tensor: &TensorMeta, target: &TensorMeta) -> Result<(), LayoutError> {
    if tensor.shape == target.shape && tensor.dtype == target.dtype {
        return Ok(());
    }
    let show = |tensor: &TensorMeta| format!("{} {:?}", tensor.dtype, tensor.shape);
    Err(LayoutError::AliasDiffers {
        name: tensor.name.clone(),
        is: show(tensor),
        target: target.name.clone(),
        target_is: show(target),
    })
}

/// The rule of the tensor, under the name that its alias stands for; `None` where the name is ignored.
fn find(side: &Side, tensor: &TensorMeta, name: &str) -> Result<Option<Bound>, LayoutError> {
    for (index, rule) in side.rules.iter().enumerate() {
        // Captures cost several times what a plain match does, and nearly all rules fail.
        if !rule.pattern.is_match(name) {
            continue;
        }
        let Some(captures) = rule.pattern.captures(name) else { continue };
        let number = |group: &str| -> Result<u64, LayoutError> {
            let text = captures.name(group).map_or("", |found| found.as_str());
            let digits = !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit());
            text.parse().ok().filter(|_| digits).ok_or_else(|| LayoutError::GroupNumber {
                rule: rule.id,
                tensor: tensor.name.clone(),
                group: group.to_owned(),
                text: text.to_owned(),
            })
        };
        if let Some(only) = &rule.only
            && !only.admits(number(&only.group)?)
        {
            continue;
        }
        dims_exist(rule, tensor)?;
        let home = match rule.holds {
            Holds::At(_) => None,
            Holds::LayerOwner => {
                let layer = number("L")?;
                let lost =
                    || LayoutError::LayerWithoutStage { rule: rule.id, tensor: tensor.name.clone(), layer };
                Some(side.stages.home(layer).ok_or_else(lost)?)
            }
        };
        let expert = rule.expert.as_ref().map(|expert| {
            let found = number("e")?;
            let outside = || LayoutError::ExpertOutside {
                rule: rule.id,
                tensor: tensor.name.clone(),
                expert: found,
                of: expert.of,
            };
            Some(found).filter(|found| *found < expert.of).ok_or_else(outside)
        });
        let name = rule.to.fill(&captures, rule.id, &tensor.name)?;
        return Ok(Some(Bound { tensor: TensorId(0), rule: index, home, expert: expert.transpose()?, name }));
    }
    if side.ignore.iter().any(|pattern| pattern.is_match(name)) {
        return Ok(None);
    }
    Err(LayoutError::NoRule { tensor: tensor.name.clone() })
}

fn dims_exist(rule: &SideRule, tensor: &TensorMeta) -> Result<(), LayoutError> {
    let rounded = [("pad", rule.pad), ("grain", rule.grain)];
    let rounded = rounded.into_iter().filter_map(|(key, round_up)| Some((key, round_up?.dim)));
    let packed = rule.pack.iter().map(|pack| ("pack", pack.dim));
    let cut = rule.cuts.iter().map(|cut| ("cut", cut.dim));
    for (key, dim) in cut.chain(packed).chain(rounded) {
        if dim >= tensor.shape.len() {
            let (rule, tensor, shape) = (rule.id, tensor.name.clone(), tensor.shape.clone());
            return Err(LayoutError::NoSuchDim { rule, tensor, key, dim, shape });
        }
    }
    Ok(())
}
