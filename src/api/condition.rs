//! The conditions of a refit's status: what holds, since when, and why.

use crate::api::schema;
use crate::limits;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One condition. Its type and reason are open text: clients meet newer operators.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// type: what the condition is about.
    #[serde(rename = "type")]
    #[schemars(schema_with = "schema::condition_type")]
    pub kind: String,
    /// status: whether it holds.
    pub status: ConditionStatus,
    /// observedGeneration: generation of the resource that the condition was computed from.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = limits::COUNTER_MAX))]
    pub observed_generation: Option<i64>,
    /// lastTransitionTime: when status changed last.
    #[schemars(schema_with = "schema::time")]
    pub last_transition_time: Time,
    /// reason: why, as one stable word; each has a line in the runbooks. Example: `NotEnoughReady`.
    #[schemars(length(min = 1, max = limits::REASON_MAX), regex(pattern = schema::REASON))]
    pub reason: String,
    /// message: what, where, since when, what follows, and what to do next; at most 512 characters.
    #[schemars(length(max = limits::MESSAGE_MAX))]
    pub message: String,
}

impl Condition {
    /// The status that it has where all is well; `None` for Reconciling, of which neither is bad news.
    #[must_use]
    pub fn wanted(&self) -> Option<ConditionStatus> {
        let is = |kinds: &[ConditionType]| kinds.iter().any(|kind| kind.name() == self.kind);
        if is(&[ConditionType::Reconciling]) {
            return None;
        }
        let bad_when_true = is(&[ConditionType::Degraded, ConditionType::Stalled]);
        Some(if bad_when_true { ConditionStatus::False } else { ConditionStatus::True })
    }

    /// Whether it says that something is not as it should be.
    #[must_use]
    pub fn is_trouble(&self) -> bool {
        let is_true = |status| status == ConditionStatus::True;
        self.wanted().is_some_and(|wanted| is_true(self.status) != is_true(wanted))
    }
}

/// Whether a condition holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ConditionStatus {
    /// It holds.
    True,
    /// It does not hold.
    False,
    /// The operator cannot tell.
    Unknown,
}

macro_rules! condition_types {
    ($($name:ident: $meaning:literal;)*) => {
        /// What conditions are about.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum ConditionType {
            $(#[doc = $meaning] $name,)*
        }

        impl ConditionType {
            /// All types.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The type as conditions name it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* }
            }

            /// When it is True.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$name => $meaning,)* }
            }
        }
    };
}

condition_types! {
    Ready: "The summary: Accepted, Authorized and MembersResolved hold and every pool has minReplicas serving replicas.";
    Accepted: "The resource and all it names is valid, and this version can do what it asks for.";
    Authorized: "Every pod that claims the refit may take part in it.";
    MembersResolved: "All training ranks and at least minReplicas whole replicas of every pool are known.";
    CommunicatorsReady: "All members are connected and have agreed on how bytes travel.";
    InSync: "No replica is fenced, and the oldest serving replica is within one committed round of the newest.";
    Degraded: "Something is wrong, though rounds may go on.";
    Reconciling: "The operator is bringing a change about; present only while True.";
    Stalled: "A person must act before anything goes on; present only while True.";
}
