//! Every bound of this package, with its reason.

/// Ranks of the training world or of one inference replica: planning is measured to 4,096 × 2,048 ranks, and
/// one power of two above the largest leaves room without letting a typo allocate the machine away.
pub const RANKS_MAX: i32 = 8_192;

/// Replicas of one pool: status is proven to stay under 8 KB with this many.
pub const REPLICAS_MAX: i32 = 1_024;

/// Pools of one refit: each costs a layout and a digest per tensor; real fleets have two or three.
pub const POOLS_MAX: usize = 16;

/// Any single timeout and hold: a day. Longer is no timeout but a wedged fleet that nobody is told of.
pub const TIMEOUT_SECONDS_MAX: i32 = 86_400;

/// Steps that a replica may stay behind: far above any lag that still trains.
pub const LAG_STEPS_MAX: i32 = 1_000_000;

/// Bytes of a Kubernetes object name (DNS subdomain).
pub const OBJECT_NAME_MAX: usize = 253;

/// Bytes of a pool name and of a label value (DNS label).
pub const LABEL_MAX: usize = 63;

/// Bytes of a preset's name and of a ConfigMap key.
pub const KEY_MAX: usize = 253;

/// Size of one parallel axis in a preset: an axis is never larger than its side.
pub const AXIS_SIZE_MAX: i32 = RANKS_MAX;

/// Bytes of one file given with `-f`, `--document` or `--recording`: a ConfigMap holds 1 MiB, so this is some
/// sixty of them; a larger file is not a manifest but a mistake (a weights file, most likely).
pub const INPUT_FILE_BYTES_MAX: u64 = 64 << 20;

/// Bytes that gzip data of a ConfigMap may expand to: a tensor table of a million tensors, and no zip bomb.
pub const INFLATED_BYTES_MAX: u64 = 256 << 20;

/// Bytes of JSON at the head of a safetensors file; the format's own limit.
pub const SAFETENSORS_HEADER_BYTES_MAX: u64 = 100_000_000;

/// Shards that an index file may name: the largest published checkpoints have a few hundred.
pub const WEIGHT_SHARDS_MAX: usize = 16_384;

const _: () = assert!(AXIS_SIZE_MAX <= RANKS_MAX && LABEL_MAX <= OBJECT_NAME_MAX);
