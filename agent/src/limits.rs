//! Every bound of the agent, with its reason.

use std::time::Duration;

/// Heartbeats on a stream between agents: five fit into the time after which a peer counts as lost.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// Silence after which a peer is lost (protocol page §4).
pub const PEER_SILENCE_MAX: Duration = Duration::from_secs(5);
const _: () = assert!(PEER_SILENCE_MAX.as_millis() >= 5 * HEARTBEAT_INTERVAL.as_millis());

/// Time for one TCP and TLS connection: a peer that takes longer is as good as lost.
pub const DIAL_TIMEOUT: Duration = Duration::from_secs(5);

/// A projected token is about 1 KiB; enterprise issuers reach a few.
pub const TOKEN_BYTES_MAX: u64 = 16 << 10;

/// A bundle during rotation holds two or three authorities of about 1 KiB; private ones ship whole chains.
pub const TRUST_BUNDLE_BYTES_MAX: u64 = 1 << 20;

/// A chain and a bundle.
pub const ENROL_RESPONSE_BYTES_MAX: usize = 2 << 20;

/// Renewal never runs hot, even with certificates of seconds.
pub const RENEWAL_INTERVAL_MIN: Duration = Duration::from_secs(10);
