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
