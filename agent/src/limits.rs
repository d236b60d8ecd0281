//! Every bound of the agent, with its reason.

use std::time::Duration;

/// Heartbeats on a stream between agents: five fit into the time after which a peer counts as lost.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// Silence after which a peer is lost (protocol page §4).
pub const PEER_SILENCE_MAX: Duration = Duration::from_secs(5);
const _: () = assert!(PEER_SILENCE_MAX.as_millis() >= 5 * HEARTBEAT_INTERVAL.as_millis());
