//! What a piece must satisfy before the planner trusts it. Pieces of registered layouts come from clients.

use super::error::{Holder, PlanError};
use super::moves::DIMS_MAX;
use crate::limits::PIECE_BOXES_MAX;
use crate::region::{LocalTensor, Piece, Run};

/// Bytes of a row-major tensor; `TooLarge` past 2^63, so that sums of a few stay in u64.
pub(crate) fn tensor_bytes(name: &str, shape: &[u64], element: u64) -> Result<u64, PlanError> {
    // The non-zero extents alone must fit too: strides are computed from them.
    let checked = |keep_zeros: bool| {
        shape.iter().filter(|&&n| keep_zeros || n > 0).try_fold(element, |all, &n| all.checked_mul(n))
    };
    match (checked(false), checked(true)) {
        (Some(0..=0x7fff_ffff_ffff_ffff), Some(bytes)) => Ok(bytes),
        _ => Err(PlanError::TooLarge { what: format!("the size of `{name}` {shape:?}") }),
    }
}

pub(super) fn piece(
    holder: &Holder,
    tensor: &str,
    hf: &[u64],
    locals: &[LocalTensor],
    piece: &Piece,
) -> Result<(), PlanError> {
    problem(hf, locals, piece).map_or(Ok(()), |problem| {
        Err(PlanError::MalformedPiece { tensor: tensor.into(), holder: holder.clone(), problem })
    })
}

/// Says what is wrong with `piece` of a tensor of shape `hf`, if anything.
pub(crate) fn problem(hf: &[u64], locals: &[LocalTensor], piece: &Piece) -> Option<String> {
    let Some(local) = locals.get(piece.local.0 as usize) else {
        return Some(format!("local tensor {} of {}", piece.local, locals.len()));
    };
    if piece.dims.len() != hf.len() {
        return Some(format!("it has {} dims, the tensor {}", piece.dims.len(), hf.len()));
    }
    let stacked = usize::from(piece.lead.is_some());
    if local.shape.len() != hf.len() + stacked || local.shape.len() > DIMS_MAX {
        return Some(format!(
            "local tensor `{}` has {} dims, the piece {} (most are {DIMS_MAX})",
            local.name,
            local.shape.len(),
            hf.len() + stacked
        ));
    }
    if piece.lead.is_some_and(|lead| lead >= local.shape[0]) {
        return Some(format!("lead {:?} of {} in `{}`", piece.lead, local.shape[0], local.name));
    }
    let boxes = piece.dims.iter().try_fold(1, |all: u64, runs| all.checked_mul(runs.len() as u64));
    if boxes.is_none_or(|boxes| boxes > PIECE_BOXES_MAX) {
        return Some(format!("its runs make more than {PIECE_BOXES_MAX} boxes"));
    }
    let order: Vec<usize> = match &piece.permute {
        None => (0..hf.len()).collect(),
        Some(permute) => permute.iter().map(|&d| usize::from(d)).collect(),
    };
    let mut sorted = order.clone();
    sorted.sort_unstable();
    if !sorted.iter().copied().eq(0..hf.len()) {
        return Some(format!("permute {order:?} does not name each of {} dims once", hf.len()));
    }
    order.iter().enumerate().find_map(|(at, &d)| {
        runs_problem(&piece.dims[d], hf[d], local.shape[at + stacked])
            .map(|problem| format!("dim {d}: {problem} (in `{}`)", local.name))
    })
}

fn runs_problem(runs: &[Run], hf: u64, local: u64) -> Option<String> {
    let mut free = 0;
    for run in runs {
        let fits = |start: u64, extent: u64| start.checked_add(run.len).is_some_and(|end| end <= extent);
        if run.len == 0 || run.local < free || !fits(run.hf, hf) || !fits(run.local, local) {
            return Some(format!(
                "run of {} at HF {} and local {} does not fit (HF extent {hf}, local {free}..{local})",
                run.len, run.hf, run.local
            ));
        }
        free = run.local + run.len;
    }
    None
}

/// The runs with neighbours joined that are adjacent in both the local and the HF tensor.
pub(crate) fn joined(runs: &[Run]) -> Vec<Run> {
    let mut out: Vec<Run> = Vec::with_capacity(runs.len());
    for run in runs {
        match out.last_mut() {
            Some(last) if last.local + last.len == run.local && last.hf + last.len == run.hf => {
                last.len += run.len;
            }
            _ => out.push(*run),
        }
    }
    out
}
