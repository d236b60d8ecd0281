//! Every bound of `core`, with its reason.

/// Most members of one refit: planning is measured to 4,096 training and 2,048 inference ranks; eight times
/// that keeps a lying peer from filling memory.
pub const MEMBERS_MAX: usize = 49_152;

/// Most pools of one refit: a person lists them in one resource.
pub const POOLS_MAX: usize = 64;

/// Longest name or address: Kubernetes names end at 253 bytes, `host:port` of such a name just above.
pub const NAME_BYTES_MAX: usize = 320;

/// Most addresses per member and kind: a pod has a few interfaces of two families.
pub const ADDRESSES_MAX: usize = 16;

/// A joining agent waits this long for others before a new epoch, so that a rollout makes few epochs.
pub const JOIN_SETTLE_MS: u64 = 2_000;

/// A coordinator that starts again waits this long for members of the recorded epoch before it makes another: agents
/// dial again at most 5 s after their last attempt, and then enrol.
pub const RESTART_SETTLE_MS: u64 = 10_000;

/// An epoch or a run that an agent reports may be this far above all others: a record that was lost is made up for,
/// and to exhaust 64 bits a liar would have to join four billion times.
pub const LEAP_MAX: u64 = 1 << 32;

/// What is unanswered is asked again after this: connections lose suffixes only when they break, so this bounds
/// the damage of a reconnect, not the pace of a round.
pub const RESEND_MS: u64 = 1_000;

/// First wait before a participant that was busy is asked again; doubles up to [`RESEND_MS`].
pub const BUSY_RETRY_MS: u64 = 50;

/// A member's own deadline comes this much after the leader's, so that in a sick round the leader speaks first.
pub const MEMBER_GRACE_MS: u64 = 5_000;

/// The leader waits this much longer than a head for what the head decides, for the message to travel. With all
/// phases of a round this stays under the 5 s that a round may take beyond its timeouts.
pub const LEADER_GRACE_MS: u64 = 2_000;
const _: () = assert!(2 * LEADER_GRACE_MS < MEMBER_GRACE_MS && BUSY_RETRY_MS < RESEND_MS);

/// Longest world token: the launcher's restart id or 128 random bits as text.
pub const WORLD_BYTES_MAX: usize = 64;

/// Bytes of a layout document as text: the limit of a ConfigMap, where documents live.
pub const DOCUMENT_BYTES_MAX: usize = 1 << 20;
/// Rules of a document after prefix groups are expanded; the largest known document has 44.
pub const RULES_MAX: usize = 4096;
/// Entries of any other list or map of a document (alias, ignore, sizes, axes, stages).
pub const ENTRIES_MAX: usize = 1 << 16;
/// Bytes of one compiled regular expression: `\d+` alone takes a few KiB because it knows all scripts.
pub const PATTERN_BYTES_MAX: usize = 256 << 10;
/// Bytes of an expression, so that its depth (one call per open parenthesis) stays small as well.
pub const EXPRESSION_BYTES_MAX: usize = 256;
/// Ranks of one side: several times the largest training run known.
pub const RANKS_MAX: u64 = 1 << 16;
/// Tensors of a table: DeepSeek-V3 in FP8 has 91,991.
pub const TENSORS_MAX: usize = 1 << 20;
/// Bytes of the name of a tensor, HF or local.
pub const TENSOR_NAME_BYTES_MAX: usize = 1024;
/// Dims of an HF tensor: one fewer than a move can hold, because a local tensor may add a stacked axis.
pub const HF_DIMS_MAX: usize = crate::plan::moves::DIMS_MAX - 1;
/// Bytes of one tensor: byte offsets then fit `i64`, which files and CUDA use.
pub const TENSOR_BYTES_MAX: u64 = i64::MAX as u64;
/// Runs of one dim of one piece: a rotary order that moves every row of the largest head count needs 32,768.
pub const RUNS_MAX: u64 = 1 << 20;
/// Dense boxes of one piece, the product of its runs: a million fit in memory, and no layout known has runs in
/// more than one dim of a tensor.
pub const PIECE_BOXES_MAX: u64 = 1 << 20;
/// Bytes of a safetensors header: the limit of the format's own library.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Layers of a model config.
pub const LAYERS_MAX: u64 = 1 << 12;
/// Routed experts of a model config.
pub const EXPERTS_MAX: u64 = 1 << 14;

const _: () = assert!(RANKS_MAX <= u32::MAX as u64 && TENSORS_MAX <= u32::MAX as usize);
