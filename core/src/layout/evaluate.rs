//! One rank of a bound layout: which tensors it holds, and where their elements lie in its local tensors.
//!
//! Order of one tensor: stage, expert, spans of each dim, pad, cuts, grain, place among the packed.

use super::bind::{Bound, Layout};
use super::document::{At, Division};
use super::error::{LayoutError, RuleId};
use super::pattern::Part;
use super::resolve::{Holds, SideRule};
use super::spans::{self, CutBy, Span};
use super::stripe;
use crate::dtype::DType;
use crate::id::{LocalId, Rank, TensorId};
use crate::limits::{TENSOR_BYTES_MAX, TENSOR_NAME_BYTES_MAX};
use crate::region::{LocalTensor, Piece, RankRegions, Run};

/// What one rank holds. All lists are indexed by [`LocalId`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RankLayout {
    /// Local tensors and pieces.
    pub regions: RankRegions,
    /// Label of the step that the agent runs after a write to the local tensor.
    pub post: Vec<Option<String>>,
    /// Elements of the local tensor that no piece claims, because a pad or grain rounded its extents up.
    pub pads: Vec<u64>,
}

/// A rule on one rank: everything that does not depend on the tensor.
pub(super) struct RuleAt<'a> {
    pub(super) rule: &'a SideRule,
    stage: u64,
    owned: Owned,
    pub(super) cuts: Vec<CutBy>,
}

/// The experts that a rank owns.
#[derive(Clone, Copy)]
enum Owned {
    NoExperts,
    Range { low: u64, count: u64 },
    EveryNth { index: u64, parts: u64, count: u64 },
}

/// A tensor that the rank holds.
pub(super) struct Held<'a> {
    name: String,
    /// (index, extent) of the stacked leading axis.
    lead: Option<(u64, u64)>,
    slot: u64,
    pub(super) tensor: TensorId,
    pub(super) at: &'a RuleAt<'a>,
}

/// What the tensors of one local tensor (of one index of its leading axis) fill.
pub(super) struct Cell {
    /// Local extents, without the leading axis.
    pub(super) shape: Vec<u64>,
    /// Per tensor its dims; only those with elements.
    pub(super) pieces: Vec<(TensorId, Vec<Vec<Run>>)>,
}

/// Errors of one local tensor name its rank.
pub(super) struct Context<'a> {
    pub(super) layout: &'a Layout,
    pub(super) rank: Rank,
}

pub(super) fn rank(layout: &Layout, rank: Rank) -> Result<RankLayout, LayoutError> {
    if rank.0 >= layout.world() {
        return Err(LayoutError::RankOutside { rank, world: layout.world() });
    }
    if let Some(recorded) = &layout.recorded {
        return Ok(recorded[rank.0 as usize].clone());
    }
    let at: Vec<_> = layout.side.rules.iter().map(|rule| RuleAt::new(rule, rank)).collect();
    let mut held = Vec::new();
    for bound in &layout.bound {
        held.extend(at[bound.rule].hold(bound));
    }
    held.sort_by(|a, b| (&a.name, a.lead, a.slot, a.tensor).cmp(&(&b.name, b.lead, b.slot, b.tensor)));
    let context = Context { layout, rank };
    let mut out = RankLayout::default();
    for local in held.chunk_by(|a, b| a.name == b.name) {
        context.local(local, &mut out)?;
    }
    out.regions.pieces.sort_by_key(|piece| (piece.tensor, piece.local, piece.lead));
    Ok(out)
}

impl<'a> RuleAt<'a> {
    fn new(rule: &'a SideRule, rank: Rank) -> Self {
        let owned = match &rule.expert {
            None => Owned::NoExperts,
            Some(expert) => {
                let (index, parts) = (expert.axis.coordinate(rank), expert.axis.size);
                if expert.kind == Division::RoundRobin {
                    let count = expert.of / parts + u64::from(index < expert.of % parts);
                    Owned::EveryNth { index, parts, count }
                } else {
                    let by = CutBy { kind: expert.kind, unit: 1, spread: false, index, parts };
                    let (low, high) = spans::part(expert.of, by).expect(
                        "an uneven `even` is refused when the document is resolved; no other kind fails",
                    );
                    Owned::Range { low, count: high - low }
                }
            }
        };
        let cut = |cut: &super::resolve::SideCut| CutBy {
            kind: cut.kind,
            unit: cut.unit,
            spread: cut.spread,
            index: cut.axis.coordinate(rank),
            parts: cut.axis.size,
        };
        let cuts = rule.cuts.iter().map(cut).collect();
        Self { rule, stage: rule.stage.coordinate(rank), owned, cuts }
    }

    /// `None` where the rank does not hold the tensor.
    fn hold(&'a self, bound: &Bound) -> Option<Held<'a>> {
        let on_stage = match (self.rule.holds, bound.home) {
            (Holds::At(At { first, last, all }), _) => {
                all || (first && self.stage == 0) || (last && self.stage + 1 == self.rule.stage.size)
            }
            (Holds::LayerOwner, home) => home.is_some_and(|home| home.stage == self.stage),
        };
        if !on_stage {
            return None;
        }
        let local_expert = match (self.owned, bound.expert) {
            (Owned::NoExperts, _) | (_, None) => None,
            (Owned::Range { low, count }, Some(e)) => {
                Some((e.checked_sub(low).filter(|local| *local < count)?, count))
            }
            (Owned::EveryNth { index, parts, count }, Some(e)) => {
                Some(((e % parts == index).then_some(e / parts)?, count))
            }
        };
        let mut name = String::new();
        for part in &bound.name {
            let number = match part {
                Part::Text(text) | Part::Group(text) => {
                    name.push_str(text);
                    continue;
                }
                Part::LocalLayer => bound.home.map(|home| home.local),
                Part::Chunk => bound.home.map(|home| home.chunk),
                Part::LocalExpert => local_expert.map(|(local, _)| local),
            };
            name.extend(number.map(|number| number.to_string()));
        }
        let stack = self.rule.expert.as_ref().is_some_and(|expert| expert.stack);
        let slot = self.rule.pack.map_or(0, |pack| pack.slot);
        Some(Held { name, lead: local_expert.filter(|_| stack), slot, tensor: bound.tensor, at: self })
    }
}

impl Held<'_> {
    pub(super) fn rule(&self) -> RuleId {
        self.at.rule.id
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

impl Context<'_> {
    pub(super) fn name(&self, tensor: TensorId) -> String {
        self.layout.table[tensor].name.clone()
    }

    /// Adds one local tensor; `held` are all tensors in it, by (lead, slot).
    fn local(&self, held: &[Held<'_>], out: &mut RankLayout) -> Result<(), LayoutError> {
        let first = &held[0];
        if first.name.is_empty() || first.name.len() > TENSOR_NAME_BYTES_MAX {
            return Err(LayoutError::NameLength {
                place: format!("{}.to", first.rule()),
                found: first.name.len(),
            });
        }
        let dtype = self.dtype(held)?;
        self.stacked(held)?;
        let local = LocalId(u32::try_from(out.regions.locals.len()).map_err(|_| LayoutError::TooManyLocals)?);
        let mut shape: Option<Vec<u64>> = None;
        let mut claimed = 0_u128;
        for slots in held.chunk_by(|a, b| a.lead == b.lead) {
            self.slots(slots)?;
            let striped = slots.iter().any(|h| h.at.rule.pack.is_some_and(|pack| pack.stripe.is_some()));
            let cell = if striped { stripe::interleave(self, slots)? } else { self.stack(slots)? };
            match &shape {
                Some(other) if *other != cell.shape => {
                    return Err(LayoutError::LeadShapes {
                        local: first.name.clone(),
                        rank: self.rank,
                        first: other.clone(),
                        lead: slots[0].lead.map_or(0, |(lead, _)| lead),
                        found: cell.shape,
                    });
                }
                _ => shape = Some(cell.shape),
            }
            for (tensor, dims) in cell.pieces {
                let lead = slots[0].lead.map(|(lead, _)| lead);
                let piece = Piece { tensor, local, lead, dims, permute: None };
                claimed += u128::from(elements(&piece));
                out.regions.pieces.push(piece);
            }
        }
        let mut shape = shape.unwrap_or_default();
        shape.splice(0..0, first.lead.map(|(_, count)| count));
        let size = shape.iter().try_fold(1_u64, |product, extent| product.checked_mul((*extent).max(1)));
        let fits =
            size.and_then(|size| size.checked_mul(dtype.size())).is_some_and(|b| b <= TENSOR_BYTES_MAX);
        if !fits {
            return Err(LayoutError::LocalSize { local: first.name.clone(), rank: self.rank, shape });
        }
        // Spans of one tensor do not overlap, nor do slots or leads: no more is claimed than there is (L2).
        let pads = u128::from(shape.iter().product::<u64>()).saturating_sub(claimed);
        out.pads.push(u64::try_from(pads).unwrap_or(u64::MAX));
        out.post.push(first.at.rule.post.clone());
        out.regions.locals.push(LocalTensor { name: first.name.clone(), shape, dtype });
        Ok(())
    }

    /// The storage dtype, which all tensors of a local tensor must share, as they must the label of its step.
    fn dtype(&self, held: &[Held<'_>]) -> Result<DType, LayoutError> {
        let dtype = |held: &Held<'_>| {
            let rule = held.at.rule.dtype.or(self.layout.side.dtype);
            rule.unwrap_or(self.layout.table[held.tensor].dtype)
        };
        let first = &held[0];
        for other in &held[1..] {
            if dtype(other) != dtype(first) {
                return Err(LayoutError::LocalDtypes {
                    local: first.name.clone(),
                    rank: self.rank,
                    first: (self.name(first.tensor), dtype(first)),
                    second: (self.name(other.tensor), dtype(other)),
                });
            }
            if other.at.rule.post != first.at.rule.post {
                return Err(LayoutError::LocalPosts {
                    local: first.name.clone(),
                    first: first.rule(),
                    second: other.rule(),
                });
            }
        }
        Ok(dtype(first))
    }

    /// All tensors are stacked, on every index of the leading axis, or none is.
    fn stacked(&self, held: &[Held<'_>]) -> Result<(), LayoutError> {
        let local = || held[0].name.clone();
        if let Some(other) = held.iter().find(|other| other.lead.is_some() != held[0].lead.is_some()) {
            let (first, second) = (held[0].rule(), other.rule());
            return Err(LayoutError::StackMixed { local: local(), first, second });
        }
        let Some((_, count)) = held[0].lead else { return Ok(()) };
        if let Some(other) = held.iter().find(|other| other.lead.is_some_and(|(_, other)| other != count)) {
            let (first, second) = (held[0].rule(), other.rule());
            return Err(LayoutError::StackMixed { local: local(), first, second });
        }
        let mut next = 0;
        for leads in held.chunk_by(|a, b| a.lead == b.lead) {
            if leads[0].lead.is_some_and(|(lead, _)| lead != next) {
                break;
            }
            next += 1;
        }
        if next != count {
            return Err(LayoutError::StackHole { local: local(), rank: self.rank, lead: next, count });
        }
        Ok(())
    }

    /// Slots are 0, 1, 2 and so on, each once.
    fn slots(&self, held: &[Held<'_>]) -> Result<(), LayoutError> {
        for (want, found) in held.iter().enumerate() {
            if found.slot == want as u64 {
                continue;
            }
            let (local, rank) = (found.name.clone(), self.rank);
            let before = want.checked_sub(1).map(|before| &held[before]);
            if let Some(before) = before.filter(|before| before.slot == found.slot) {
                let (first, second) = (self.name(before.tensor), self.name(found.tensor));
                return Err(LayoutError::SlotTwice { local, rank, slot: found.slot, first, second });
            }
            let tensor = self.name(found.tensor);
            return Err(LayoutError::SlotHole { local, rank, slot: want as u64, found: found.slot, tensor });
        }
        Ok(())
    }

    /// Each tensor cut by itself, then joined in order of slots.
    fn stack(&self, held: &[Held<'_>]) -> Result<Cell, LayoutError> {
        let joined = self.joined_dim(held)?;
        let mut pieces = Vec::with_capacity(held.len());
        let mut offset = 0_u64;
        let mut shape: Vec<u64> = Vec::new();
        for (slot, held_slot) in held.iter().enumerate() {
            let (dims, extents) = self.cut(held_slot)?;
            if slot == 0 {
                shape.clone_from(&extents);
            } else {
                self.same_but_joined(&held[0], &shape, held_slot, &extents, joined)?;
            }
            let runs: Vec<Vec<Run>> = dims
                .iter()
                .enumerate()
                .map(|(dim, spans)| runs(spans, if dim == joined { offset } else { 0 }))
                .collect();
            if runs.iter().all(|runs| !runs.is_empty()) {
                pieces.push((held_slot.tensor, runs));
            }
            if let Some(extent) = extents.get(joined) {
                let sum = offset.checked_add(*extent);
                let too_large = || LayoutError::LocalSize {
                    local: held_slot.name.clone(),
                    rank: self.rank,
                    shape: extents.clone(),
                };
                offset = sum.ok_or_else(too_large)?;
            }
        }
        if let Some(extent) = shape.get_mut(joined) {
            *extent = offset;
        }
        Ok(Cell { shape, pieces })
    }

    /// The dim along which the tensors are joined: 0 where there is only one without `pack`.
    pub(super) fn joined_dim(&self, held: &[Held<'_>]) -> Result<usize, LayoutError> {
        let dim = |held: &Held<'_>| held.at.rule.pack.map_or(0, |pack| pack.dim);
        match held.iter().find(|other| dim(other) != dim(&held[0])) {
            None => Ok(dim(&held[0])),
            Some(other) => Err(LayoutError::PackDims {
                local: other.name.clone(),
                first: (held[0].rule(), dim(&held[0])),
                second: (other.rule(), dim(other)),
            }),
        }
    }

    pub(super) fn same_but_joined(
        &self,
        first: &Held<'_>,
        shape: &[u64],
        other: &Held<'_>,
        extents: &[u64],
        joined: usize,
    ) -> Result<(), LayoutError> {
        let same = |(dim, (a, b)): (usize, (&u64, &u64))| a == b || dim == joined;
        if shape.len() == extents.len() && shape.iter().zip(extents).enumerate().all(same) {
            return Ok(());
        }
        Err(LayoutError::PackShapes {
            local: other.name.clone(),
            rank: self.rank,
            first: Box::new((self.name(first.tensor), shape.to_vec())),
            second: Box::new((self.name(other.tensor), extents.to_vec())),
        })
    }

    /// Spans of each dim after pad and cuts, and the extents after grain.
    fn cut(&self, held: &Held<'_>) -> Result<(Vec<Vec<Span>>, Vec<u64>), LayoutError> {
        let rule = held.at.rule;
        let shape = &self.layout.table[held.tensor].shape;
        let whole = |len: u64| if len == 0 { Vec::new() } else { vec![Span { hf: Some(0), len }] };
        let mut dims: Vec<Vec<Span>> = shape.iter().map(|len| whole(*len)).collect();
        let too_large =
            || LayoutError::LocalSize { local: held.name.clone(), rank: self.rank, shape: shape.clone() };
        if let Some(pad) = rule.pad {
            let padded = shape[pad.dim].checked_next_multiple_of(pad.to).ok_or_else(too_large)?;
            let extra = padded - shape[pad.dim];
            dims[pad.dim].extend((extra > 0).then_some(Span { hf: None, len: extra }));
        }
        for (cut, by) in rule.cuts.iter().zip(&held.at.cuts) {
            let spans = &mut dims[cut.dim];
            let (low, high) =
                spans::part(spans::extent(spans), *by).map_err(|reason| LayoutError::Uncut {
                    rule: rule.id,
                    tensor: self.name(held.tensor),
                    rank: self.rank,
                    dim: cut.dim,
                    axis: cut.axis.name.clone(),
                    reason,
                })?;
            *spans = spans::take(spans, low, high);
        }
        let mut extents: Vec<u64> = dims.iter().map(|spans| spans::extent(spans)).collect();
        if let Some(grain) = rule.grain {
            extents[grain.dim] =
                extents[grain.dim].checked_next_multiple_of(grain.to).ok_or_else(too_large)?;
        }
        Ok((dims, extents))
    }
}

fn runs(spans: &[Span], mut local: u64) -> Vec<Run> {
    let mut out = Vec::with_capacity(spans.len());
    for span in spans {
        out.extend(span.hf.map(|hf| Run { local, hf, len: span.len }));
        // Within the extent, which was summed before without overflow.
        local += span.len;
    }
    out
}

/// Number of elements of a piece; no more than its tensor has.
pub(super) fn elements(piece: &Piece) -> u64 {
    piece.dims.iter().map(|runs| runs.iter().map(|run| run.len).sum::<u64>()).product()
}
