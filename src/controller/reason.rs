//! Why a condition has its status: one closed enum per condition, one sentence each.

use crate::api::condition::ConditionType;

/// A reason of one condition type.
pub trait Reason: Copy {
    /// The condition that has it.
    const CONDITION: ConditionType;

    /// The reason as conditions name it.
    fn name(self) -> &'static str;

    /// What it means.
    fn sentence(self) -> &'static str;
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $kind:ident of $condition:ident { $($name:ident: $sentence:literal;)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy, PartialEq, Eq)]
            pub enum $kind { $(#[doc = $sentence] $name,)* }

            impl Reason for $kind {
                const CONDITION: ConditionType = ConditionType::$condition;

                fn name(self) -> &'static str {
                    match self { $(Self::$name => stringify!($name),)* }
                }

                fn sentence(self) -> &'static str {
                    match self { $(Self::$name => $sentence,)* }
                }
            }
        )*

        /// Every reason: its condition, its name, and what it means.
        pub const ALL: &[(ConditionType, &str, &str)] = &[
            $($((ConditionType::$condition, stringify!($name), $sentence),)*)*
        ];
    };
}

reasons! {
    /// Reasons of Accepted.
    AcceptedReason of Accepted {
        Valid: "The resource and all it names is valid.";
        Unsupported: "A field asks for what this version cannot do.";
        NoConfigMap: "A ConfigMap that the resource names does not exist.";
        NoConfigMapKey: "A ConfigMap lacks the key that the resource names.";
        ConfigMapTooLarge: "A ConfigMap's value expands beyond what is read.";
        ConfigMapRejected: "A ConfigMap's value is not what the field needs.";
        ModelRejected: "The model's tensors cannot be told from what the resource names.";
        LayoutRejected: "A layout is malformed or does not fit the model.";
        CoverageGap: "An inference rank needs elements that no training rank holds.";
        CoverageOverlap: "Two pieces of one rank claim the same element.";
        DtypeMismatch: "The two sides store a tensor in dtypes between which there is no cast.";
        Unreadable: "The API server did not give what the resource names.";
    }
    /// Reasons of Authorized.
    AuthorizedReason of Authorized {
        Permitted: "Every pod that claims the refit may take part.";
        NoPods: "No pod claims the refit yet.";
        Unauthorized: "A pod's account lacks the verb publish or receive on the refit.";
        ReviewFailed: "The API server did not say whether the pods may take part.";
    }
    /// Reasons of MembersResolved.
    MembersResolvedReason of MembersResolved {
        Complete: "All training ranks and at least minReplicas replicas of every pool are known.";
        TrainerCompleted: "The trainer has finished, and at least minReplicas replicas of every pool are known.";
        RankGap: "A training rank has no pod.";
        NotEnoughReady: "Fewer whole replicas than minReplicas are known.";
        DuplicateRank: "Two pods claim the same rank.";
        PodRejected: "A pod claims the refit and cannot be any of its ranks.";
        NotAccepted: "Ranks follow from a resource that is not accepted.";
    }
    /// Reasons of CommunicatorsReady.
    CommunicatorsReadyReason of CommunicatorsReady {
        Tcp: "All members are connected; bytes travel by TCP.";
        NoMembership: "There is no membership yet.";
        AgentsMissing: "Members' agents are not connected.";
        Configuring: "Members have not answered to the newest membership yet.";
        Refused: "An agent refused the membership.";
    }
    /// Reasons of Ready.
    ReadyReason of Ready {
        Refitting: "Every pool has at least minReplicas serving replicas, and what they need is there.";
        NotAccepted: "The resource is not accepted.";
        Unauthorized: "Not every pod may take part.";
        MembersMissing: "Ranks or replicas are missing.";
        NotEnoughServing: "Fewer than minReplicas replicas of some pool serve.";
    }
    /// Reasons of InSync.
    InSyncReason of InSync {
        Current: "Every replica is within one committed round of the newest.";
        NothingCommitted: "No version has been committed yet.";
        ReplicasFenced: "Replicas are kept from serving.";
        ReplicasBehind: "Replicas are more than one committed round behind.";
    }
    /// Reasons of Degraded.
    DegradedReason of Degraded {
        AsExpected: "Nothing is wrong.";
        ChangeRefused: "Rounds go on with an older generation, because the newest is not accepted.";
        RegistrationRefused: "A client's tensors do not fit its layout.";
        AgentRefused: "A pod's agent was refused.";
        RoundFailed: "The last round was aborted.";
        ReplicasFenced: "Replicas are kept from serving.";
        AgentsLost: "Members' agents are not connected.";
    }
    /// Reasons of Reconciling.
    ReconcilingReason of Reconciling {
        Forming: "The first membership is being formed.";
        Changing: "A change waits for a round boundary or for agents.";
    }
    /// Reasons of Stalled.
    StalledReason of Stalled {
        NotAccepted: "The resource, or what it names, must be corrected.";
        Unauthorized: "Somebody must permit the pods' accounts to take part.";
        PodRejected: "A pod's labels or its workload must be corrected.";
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits;
    use std::collections::BTreeSet;

    #[test]
    fn every_condition_has_reasons_and_every_reason_reads_well() {
        for kind in ConditionType::ALL {
            assert!(ALL.iter().any(|(of, ..)| of == kind), "{}", kind.name());
        }
        let names: BTreeSet<_> = ALL.iter().map(|(kind, name, _)| (kind, name)).collect();
        assert_eq!(names.len(), ALL.len(), "each once");
        for (_, name, sentence) in ALL {
            assert!(name.len() <= limits::REASON_MAX && sentence.ends_with('.'), "{name}: {sentence}");
        }
    }
}
