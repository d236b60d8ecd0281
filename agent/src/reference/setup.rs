//! From the resolved refit and the weights file to what one rank holds.

use super::shard::Shard;
use super::weights::Weights;
use super::{RankArgs, ReferenceError};
use std::collections::BTreeMap;
use weightrefit_core::dtype::DType;
use weightrefit_core::id::{Rank, TensorId};
use weightrefit_core::layout::recording::{self, RecordedTensor};
use weightrefit_core::layout::{Document, Layout};
use weightrefit_core::model::TensorTable;
use weightrefit_core::region::RankRegions;
use weightrefit_proto::refit;
use weightrefit_proto::socket::{ClientFrame, Memory, Tensor};

/// Tensors of one registration page: well below a frame's 16 MiB at the longest names.
const PAGE_TENSORS: usize = 4096;

/// The refit and the file.
pub(super) struct Refit {
    refit: refit::Refit,
    table: TensorTable,
    training: Layout,
    weights: Weights,
}

impl Refit {
    pub(super) fn read(args: &RankArgs) -> Result<Self, ReferenceError> {
        let failed = |reason: String| ReferenceError::Refit { path: args.refit.clone(), reason };
        let json = std::fs::read(&args.refit).map_err(|error| failed(error.to_string()))?;
        let refit: refit::Refit = serde_json::from_slice(&json).map_err(|error| failed(error.to_string()))?;
        let table = refit.table()?;
        let training = Layout::new(&Document::from_value(&refit.training)?, &table)?;
        let weights = Weights::open(&args.weights)?;
        Ok(Self { refit, table, training, weights })
    }

    pub(super) fn training_shard(&self, rank: Rank) -> Result<Shard, ReferenceError> {
        self.shard(&self.training.rank_regions(rank)?)
    }

    /// The shard, the same as a loader would have recorded it, and the number of ranks of a replica.
    pub(super) fn inference_shard(
        &self,
        pool: &str,
        rank: Rank,
    ) -> Result<(Shard, Vec<RecordedTensor>, u32), ReferenceError> {
        let found = self.refit.pools.iter().find(|candidate| candidate.name == pool);
        let pool = found.ok_or_else(|| ReferenceError::Absent(format!("pool `{pool}`")))?;
        let layout = Layout::new(&Document::from_value(&pool.layout)?, &self.table)?;
        let regions = layout.rank_regions(rank)?;
        Ok((self.shard(&regions)?, recording::record(&regions, &self.table), layout.world()))
    }

    /// A tensor that the training side keeps under another name has the bytes of that other one.
    fn shard(&self, regions: &RankRegions) -> Result<Shard, ReferenceError> {
        let stored = self.trained_dtypes()?;
        let origin = |tensor| {
            let carrier = self.training.alias(tensor);
            let dtype = stored.get(&carrier).copied()?;
            Some((self.table[carrier].clone(), dtype))
        };
        Ok(Shard::load(&self.weights, regions, |tensor| {
            origin(tensor).ok_or_else(|| self.table[tensor].name.clone())
        })?)
    }

    /// The type that each tensor has in the trainer's memory.
    fn trained_dtypes(&self) -> Result<BTreeMap<TensorId, DType>, ReferenceError> {
        let mut dtypes = BTreeMap::new();
        for rank in self.training.ranks() {
            let regions = self.training.rank_regions(rank)?;
            for piece in &regions.pieces {
                dtypes.insert(piece.tensor, regions.locals[piece.local.0 as usize].dtype);
            }
        }
        Ok(dtypes)
    }
}

/// A registration, page by page.
pub(super) fn pages(
    tensors: Vec<Tensor>,
    memories: Vec<Memory>,
    mut staging_device: Option<String>,
) -> Vec<ClientFrame> {
    let chunks: Vec<Vec<Tensor>> = tensors.chunks(PAGE_TENSORS).map(<[Tensor]>::to_vec).collect();
    let pages = chunks.len() as u32;
    let mut memories = Some(memories);
    let page = |(page, tensors)| {
        let memories = memories.take().unwrap_or_default();
        let (staging_device, groups) = (staging_device.take(), Vec::new());
        ClientFrame::Register { page, pages, memories, tensors, staging_device, groups }
    };
    (0..pages).zip(chunks).map(page).collect()
}
