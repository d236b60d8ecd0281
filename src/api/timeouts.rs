//! How long each phase of a round may take.

use crate::limits;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Most seconds of each phase of a round; past it the replica concerned, or the round, fails with that phase's code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Timeouts {
    /// publishSeconds: from the first to the last rank that publishes one step. Default 60; 1 to 86,400 seconds. Mutable. Example: `120`.
    #[schemars(range(min = 1, max = limits::TIMEOUT_SECONDS_MAX))]
    pub publish_seconds: i32,
    /// prepareSeconds: until every participant has answered the proposal. Default 10; 1 to 86,400 seconds. Mutable. Example: `20`.
    #[schemars(range(min = 1, max = limits::TIMEOUT_SECONDS_MAX))]
    pub prepare_seconds: i32,
    /// pauseSeconds: until an engine has paused. Default 30; 1 to 86,400 seconds. Mutable. Example: `60`.
    #[schemars(range(min = 1, max = limits::TIMEOUT_SECONDS_MAX))]
    pub pause_seconds: i32,
    /// transferSeconds: until all bytes have arrived. Default 120; 1 to 86,400 seconds. Mutable. Example: `240`.
    #[schemars(range(min = 1, max = limits::TIMEOUT_SECONDS_MAX))]
    pub transfer_seconds: i32,
    /// verifySeconds: until the digests of what arrived are compared. Default 30; 1 to 86,400 seconds. Mutable. Example: `60`.
    #[schemars(range(min = 1, max = limits::TIMEOUT_SECONDS_MAX))]
    pub verify_seconds: i32,
    /// commitSeconds: until a replica serves the arrived weights. Default 30; 1 to 86,400 seconds. Mutable. Example: `60`.
    #[schemars(range(min = 1, max = limits::TIMEOUT_SECONDS_MAX))]
    pub commit_seconds: i32,
    /// resumeSeconds: until an engine has resumed. Default 10; 1 to 86,400 seconds. Mutable. Example: `20`.
    #[schemars(range(min = 1, max = limits::TIMEOUT_SECONDS_MAX))]
    pub resume_seconds: i32,
    /// totalSeconds: of the whole round. Default 300; 1 to 86,400 seconds. Mutable. Example: `600`.
    #[schemars(range(min = 1, max = limits::TIMEOUT_SECONDS_MAX))]
    pub total_seconds: i32,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            publish_seconds: 60,
            prepare_seconds: 10,
            pause_seconds: 30,
            transfer_seconds: 120,
            verify_seconds: 30,
            commit_seconds: 30,
            resume_seconds: 10,
            total_seconds: 300,
        }
    }
}
