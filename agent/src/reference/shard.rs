//! What one rank's local tensors must hold, element by element, taken from the weights file through the rank's
//! pieces: neither plan nor digest has a part in it.

use super::rule::{self, Step};
use super::weights::{Weights, WeightsError};
use weightrefit_core::dtype::DType;
use weightrefit_core::id::TensorId;
use weightrefit_core::model::TensorMeta;
use weightrefit_core::region::{LocalTensor, Piece, RankRegions, Run};

/// A rank's local tensors as the file has them.
pub(super) struct Shard {
    /// In the order of the rank's local tensors.
    pub(super) locals: Vec<LocalShard>,
}

/// One local tensor.
pub(super) struct LocalShard {
    pub(super) tensor: LocalTensor,
    base: Base,
    /// Per local element.
    origins: Vec<Origin>,
}

/// Where a local element comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// Nowhere: it is padding and must be zero.
    Pad,
    /// From the file, by way of a trainer that stores it in this type.
    Trained(DType),
}

/// The file's elements in local order.
enum Base {
    Floats(Vec<f32>),
    Integers(Vec<i64>),
}

/// How live bytes compare with the file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Comparison {
    /// Elements that have a source.
    pub(super) checked: u64,
    /// Of those, how many differ.
    pub(super) mismatched: u64,
    /// Elements of padding.
    pub(super) pads: u64,
    /// Of those, how many are not zero.
    pub(super) pads_not_zero: u64,
}

/// A shard that cannot be built.
#[derive(Debug, thiserror::Error)]
pub(super) enum ShardError {
    /// The file.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// No arithmetic for this type.
    #[error("tensor `{name}` of dtype {found} cannot be stored as {storage} by the reference trainer")]
    DType { name: String, found: DType, storage: DType },
    /// No training rank has it.
    #[error("tensor `{0}` is held by no training rank")]
    NoSource(String),
}

impl Shard {
    /// Reads the elements of a rank. `origin` gives the tensor of the file that carries a tensor's bytes and the type
    /// that the trainer stores it in, or else its name.
    pub(super) fn load(
        weights: &Weights,
        regions: &RankRegions,
        origin: impl Fn(TensorId) -> Result<(TensorMeta, DType), String>,
    ) -> Result<Self, ShardError> {
        let mut locals: Vec<_> = regions.locals.iter().cloned().map(LocalShard::empty).collect();
        for piece in &regions.pieces {
            let (meta, trained) = origin(piece.tensor).map_err(ShardError::NoSource)?;
            let tensor = weights.tensor(&meta)?;
            let local = &mut locals[piece.local.0 as usize];
            let origin = Origin::Trained(trained);
            let floats = rule::is_float(tensor.dtype) && rule::is_float(local.tensor.dtype);
            let integers = rule::is_integer(tensor.dtype) && tensor.dtype == local.tensor.dtype;
            if !floats && !integers {
                let storage = local.tensor.dtype;
                return Err(ShardError::DType { name: meta.name, found: tensor.dtype, storage });
            }
            let size = tensor.dtype.size() as usize;
            let walk = Walk::new(piece, &tensor.shape, &local.tensor.shape);
            walk.each(|hf, at| {
                let bytes = &tensor.bytes[hf * size..][..size];
                local.origins[at] = origin;
                match &mut local.base {
                    Base::Floats(values) => {
                        values[at] = rule::decode_float(tensor.dtype, little_endian(bytes) as u32)
                    }
                    Base::Integers(values) => values[at] = sign_extended(tensor.dtype, little_endian(bytes)),
                }
            });
        }
        Ok(Self { locals })
    }
}

impl LocalShard {
    fn empty(tensor: LocalTensor) -> Self {
        let elements = tensor.shape.iter().product::<u64>() as usize;
        let base = match rule::is_integer(tensor.dtype) {
            true => Base::Integers(vec![0; elements]),
            false => Base::Floats(vec![0.0; elements]),
        };
        Self { tensor, base, origins: vec![Origin::Pad; elements] }
    }

    /// Bytes of the local tensor.
    pub(super) fn bytes(&self) -> usize {
        self.origins.len() * self.tensor.dtype.size() as usize
    }

    /// The tensor at a step, as little-endian bytes in its storage type.
    pub(super) fn at(&self, step: Step) -> Vec<u8> {
        let size = self.tensor.dtype.size() as usize;
        let mut out = Vec::with_capacity(self.bytes());
        for index in 0..self.origins.len() {
            out.extend_from_slice(&self.element(index, step).to_le_bytes()[..size]);
        }
        out
    }

    /// Compares live bytes, element by element, with the tensor at a step.
    pub(super) fn compare(&self, step: Step, live: &[u8]) -> Comparison {
        let size = self.tensor.dtype.size() as usize;
        let mut result = Comparison::default();
        for (index, bytes) in live.chunks_exact(size).enumerate() {
            let differs = u64::from(little_endian(bytes) != self.element(index, step));
            match self.origins[index] {
                Origin::Pad => {
                    result.pads += 1;
                    result.pads_not_zero += differs;
                }
                Origin::Trained(_) => {
                    result.checked += 1;
                    result.mismatched += differs;
                }
            }
        }
        // Missing bytes are as wrong as different ones.
        result.mismatched += (self.origins.len() - live.len() / size) as u64;
        result
    }

    /// Bits of one element, in the low bytes.
    fn element(&self, index: usize, step: Step) -> u64 {
        let Origin::Trained(trained) = self.origins[index] else { return 0 };
        match &self.base {
            Base::Floats(values) => {
                let stored = rule::encode_float(trained, step.float(values[index]));
                u64::from(rule::encode_float(self.tensor.dtype, rule::decode_float(trained, stored)))
            }
            Base::Integers(values) => {
                let bits = self.tensor.dtype.size() * 8;
                (step.integer(values[index]) as u64) & (u64::MAX >> (64 - bits))
            }
        }
    }
}

impl Comparison {
    /// Adds another tensor's.
    pub(super) fn add(&mut self, other: Self) {
        self.checked += other.checked;
        self.mismatched += other.mismatched;
        self.pads += other.pads;
        self.pads_not_zero += other.pads_not_zero;
    }
}

fn little_endian(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

fn sign_extended(dtype: DType, bits: u64) -> i64 {
    match dtype {
        DType::I8 => i64::from(bits as i8),
        DType::I16 => i64::from(bits as i16),
        DType::I32 => i64::from(bits as i32),
        _ => bits as i64,
    }
}

/// Goes through a piece's elements.
struct Walk<'a> {
    dims: &'a [Vec<Run>],
    hf_strides: Vec<usize>,
    local_strides: Vec<usize>,
    first_local: usize,
}

impl<'a> Walk<'a> {
    fn new(piece: &'a Piece, hf_shape: &[u64], local_shape: &[u64]) -> Self {
        let local = strides(local_shape);
        let (first_local, local) = match piece.lead {
            Some(lead) => (lead as usize * local[0], &local[1..]),
            None => (0, &local[..]),
        };
        let mut local_strides = local.to_vec();
        if let Some(permute) = &piece.permute {
            // Local dim i is HF dim permute[i].
            permute.iter().zip(local).for_each(|(hf, stride)| local_strides[usize::from(*hf)] = *stride);
        }
        Self { dims: &piece.dims, hf_strides: strides(hf_shape), local_strides, first_local }
    }

    fn each(&self, mut visit: impl FnMut(usize, usize)) {
        self.dim(0, 0, self.first_local, &mut visit);
    }

    fn dim(&self, dim: usize, hf: usize, local: usize, visit: &mut impl FnMut(usize, usize)) {
        let Some(runs) = self.dims.get(dim) else { return visit(hf, local) };
        let (hf_stride, local_stride) = (self.hf_strides[dim], self.local_strides[dim]);
        for run in runs {
            for i in 0..run.len {
                let hf = hf + (run.hf + i) as usize * hf_stride;
                let local = local + (run.local + i) as usize * local_stride;
                self.dim(dim + 1, hf, local, visit);
            }
        }
    }
}

fn strides(shape: &[u64]) -> Vec<usize> {
    let mut out = vec![1; shape.len()];
    for dim in (0..shape.len().saturating_sub(1)).rev() {
        out[dim] = out[dim + 1] * shape[dim + 1] as usize;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightrefit_core::id::LocalId;

    /// A file of `w`, f32 `[3, 2]`, holding 1 to 6.
    fn weights() -> (tempfile::TempDir, Weights, TensorMeta) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("w.safetensors");
        let header = br#"{"w":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]}}"#;
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(header);
        (1..=6_u8).for_each(|value| file.extend_from_slice(&f32::from(value).to_le_bytes()));
        std::fs::write(&path, file).unwrap();
        let meta = TensorMeta { name: "w".into(), shape: vec![3, 2], dtype: DType::F32 };
        (directory, Weights::open(&path).unwrap(), meta)
    }

    fn shard(local: LocalTensor, piece: Piece) -> LocalShard {
        let (_directory, weights, meta) = weights();
        let regions = RankRegions { locals: vec![local], pieces: vec![piece] };
        let shard = Shard::load(&weights, &regions, |_| Ok((meta.clone(), DType::F32))).unwrap();
        shard.locals.into_iter().next().unwrap()
    }

    fn run(local: u64, hf: u64, len: u64) -> Vec<Run> {
        vec![Run { local, hf, len }]
    }

    fn local(shape: &[u64], dtype: DType) -> LocalTensor {
        LocalTensor { name: "l".into(), shape: shape.to_vec(), dtype }
    }

    fn piece(lead: Option<u64>, dims: Vec<Vec<Run>>, permute: Option<Vec<u8>>) -> Piece {
        Piece { tensor: TensorId(0), local: LocalId(0), lead, dims, permute }
    }

    fn floats(bytes: &[u8]) -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    #[test]
    fn elements_lie_where_the_piece_says_and_the_rest_is_padding() {
        let rows = shard(local(&[3, 2], DType::F32), piece(None, vec![run(1, 1, 2), run(0, 0, 2)], None));
        assert_eq!(floats(&rows.at(Step(0))), [0.0, 0.0, 3.0, 4.0, 5.0, 6.0]);
        let columns = shard(local(&[3, 1], DType::F32), piece(None, vec![run(0, 0, 3), run(0, 1, 1)], None));
        assert_eq!(floats(&columns.at(Step(0))), [2.0, 4.0, 6.0]);
        let dims = vec![run(0, 0, 3), run(0, 0, 2)];
        let stacked = shard(local(&[2, 2, 3], DType::F32), piece(Some(1), dims, Some(vec![1, 0])));
        assert_eq!(floats(&stacked.at(Step(0)))[..6], [0.0; 6]);
        assert_eq!(floats(&stacked.at(Step(0)))[6..], [1.0, 3.0, 5.0, 2.0, 4.0, 6.0]);
    }

    #[test]
    fn every_wrong_element_and_pad_is_counted() {
        let dims = vec![run(0, 0, 3), run(0, 0, 2)];
        let shard = shard(local(&[4, 2], DType::Bf16), piece(None, dims, None));
        let right = shard.at(Step(5));
        let compared = |live: &[u8]| shard.compare(Step(5), live);
        let all = Comparison { checked: 6, mismatched: 0, pads: 2, pads_not_zero: 0 };
        assert_eq!(compared(&right), all);
        for byte in 0..right.len() {
            let mut wrong = right.clone();
            wrong[byte] ^= 1;
            let expected = match byte < 12 {
                true => Comparison { mismatched: 1, ..all },
                false => Comparison { pads_not_zero: 1, ..all },
            };
            assert_eq!(compared(&wrong), expected, "byte {byte}");
        }
        assert_eq!(compared(&right[..8]).mismatched, 4, "missing elements are wrong");
        assert_ne!(shard.at(Step(6)), right);
    }

    #[test]
    fn a_tensor_of_another_shape_is_refused() {
        let (_directory, weights, meta) = weights();
        let other = TensorMeta { shape: vec![2, 3], ..meta.clone() };
        assert!(matches!(weights.tensor(&other), Err(WeightsError::Differs { .. })));
        let missing = TensorMeta { name: "v".into(), ..meta };
        assert!(matches!(weights.tensor(&missing), Err(WeightsError::Missing { .. })));
    }
}
