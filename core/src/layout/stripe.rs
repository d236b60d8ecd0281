//! Striped packs: stripes of all tensors are interleaved first, then the joined dim is cut (Megatron's
//! `linear_qkv`, GLU interleave). Every group of stripes holds one stripe of each slot in order.

use super::error::LayoutError;
use super::evaluate::{Cell, Context, Held};
use super::spans;
use crate::limits::RUNS_MAX;
use crate::region::Run;

/// One slot: its stripe, and where it begins within a group.
struct Stripe {
    width: u64,
    start: u64,
}

pub(super) fn interleave(context: &Context<'_>, held: &[Held<'_>]) -> Result<Cell, LayoutError> {
    let joined = context.joined_dim(held)?;
    let first = &held[0];
    let shape = |held: &Held<'_>| &context.layout.table[held.tensor].shape;
    let mut stripes = Vec::with_capacity(held.len());
    let mut height = 0_u64;
    let mut groups = 0;
    for slot in held {
        let width = slot.at.rule.pack.and_then(|pack| pack.stripe);
        let width = width.ok_or_else(|| LayoutError::StripeMissing {
            local: local(first),
            rule: slot.rule(),
            with: held
                .iter()
                .find(|h| h.at.rule.pack.is_some_and(|p| p.stripe.is_some()))
                .unwrap_or(first)
                .rule(),
        })?;
        context.same_but_joined(first, shape(first), slot, shape(slot), joined)?;
        let extent = shape(slot)[joined];
        if stripes.is_empty() {
            groups = extent / width;
        }
        if groups.checked_mul(width) != Some(extent) {
            let tensor = context.name(slot.tensor);
            return Err(LayoutError::StripeTiles {
                rule: slot.rule(),
                tensor,
                dim: joined,
                extent,
                width,
                groups,
            });
        }
        if slot.at.rule.cuts != first.at.rule.cuts {
            return Err(LayoutError::StripeCuts {
                local: local(first),
                first: first.rule(),
                second: slot.rule(),
            });
        }
        stripes.push(Stripe { width, start: height });
        height = height.checked_add(width).ok_or_else(|| too_large(context, first))?;
    }
    let total = height.checked_mul(groups).ok_or_else(|| too_large(context, first))?;
    let (low, high) = cut(context, first, total)?;
    let mut out = Cell { shape: shape(first).clone(), pieces: Vec::new() };
    out.shape[joined] = high - low;
    if low == high {
        return Ok(out);
    }
    let touched = low / height..high.div_ceil(height);
    if touched.end - touched.start > RUNS_MAX {
        return Err(LayoutError::TooManyRuns { local: local(first), rank: context.rank });
    }
    for (slot, stripe) in held.iter().zip(&stripes) {
        let mut runs: Vec<Run> = Vec::new();
        for group in touched.clone() {
            let start = group * height + stripe.start;
            let (from, to) = (low.max(start), high.min(start + stripe.width));
            if from >= to {
                continue;
            }
            let run = Run { local: from - low, hf: group * stripe.width + (from - start), len: to - from };
            match runs.last_mut() {
                // Only where the slot is alone: its stripes then touch.
                Some(last) if last.local + last.len == run.local && last.hf + last.len == run.hf => {
                    last.len += run.len
                }
                _ => runs.push(run),
            }
        }
        let whole = |len: u64| if len == 0 { Vec::new() } else { vec![Run { local: 0, hf: 0, len }] };
        let mut dims: Vec<Vec<Run>> = shape(slot).iter().map(|len| whole(*len)).collect();
        dims[joined] = runs;
        if dims.iter().all(|runs| !runs.is_empty()) {
            out.pieces.push((slot.tensor, dims));
        }
    }
    Ok(out)
}

/// What this rank gets of the joined dim.
fn cut(context: &Context<'_>, first: &Held<'_>, total: u64) -> Result<(u64, u64), LayoutError> {
    let (mut low, mut high) = (0, total);
    for (cut, by) in first.at.rule.cuts.iter().zip(&first.at.cuts) {
        let (from, to) = spans::part(high - low, *by).map_err(|reason| LayoutError::Uncut {
            rule: first.rule(),
            tensor: context.name(first.tensor),
            rank: context.rank,
            dim: cut.dim,
            axis: cut.axis.name.clone(),
            reason,
        })?;
        (low, high) = (low + from, low + to);
    }
    Ok((low, high))
}

fn local(held: &Held<'_>) -> String {
    held.name().to_owned()
}

fn too_large(context: &Context<'_>, held: &Held<'_>) -> LayoutError {
    let shape = context.layout.table[held.tensor].shape.clone();
    LayoutError::LocalSize { local: local(held), rank: context.rank, shape }
}
