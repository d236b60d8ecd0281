//! Why a condition has its status: one closed enum per condition, with a sentence and what a person can do.
//!
//! A reason that is also a code (`weightrefit explain`) has no remedy of its own: the code's is its.

use crate::api::condition::ConditionType;
use weightrefit_core::code::Code;

/// A reason of one condition type.
pub trait Reason: Copy {
    /// The condition that has it.
    const CONDITION: ConditionType;

    /// The reason as conditions name it.
    fn name(self) -> &'static str;

    /// What it means.
    fn sentence(self) -> &'static str;
}

/// A reason as people look it up.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// The condition that has it.
    pub condition: ConditionType,
    /// Its name.
    pub name: &'static str,
    /// What it means.
    pub sentence: &'static str,
    /// Empty where the code of the same name has one.
    own_remedy: &'static str,
}

impl Entry {
    /// What a person can do.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self.own_remedy {
            "" => self.name.parse::<Code>().map_or("", Code::remedy),
            own => own,
        }
    }
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $kind:ident of $condition:ident { $($name:ident: $sentence:literal $(, $remedy:literal)?;)* })*) => {
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

        /// Every reason.
        pub const ALL: &[Entry] = &[
            $($(Entry {
                condition: ConditionType::$condition,
                name: stringify!($name),
                sentence: $sentence,
                own_remedy: concat!($($remedy)?),
            },)*)*
        ];
    };
}

reasons! {
    /// Reasons of Accepted.
    AcceptedReason of Accepted {
        Valid: "The resource and all it names is valid.",
            "None needed.";
        Unsupported: "A field asks for what this version cannot do.";
        NoConfigMap: "A ConfigMap that the resource names does not exist.",
            "Create the ConfigMap that the message names in the namespace of the refit, or correct its name.";
        NoConfigMapKey: "A ConfigMap lacks the key that the resource names.",
            "Add the key that the message names to the ConfigMap, or correct it in the resource.";
        ConfigMapTooLarge: "A ConfigMap's value expands beyond what is read.",
            "Store less under the key: a tensor table or config.json of a real model takes a few MiB.";
        ConfigMapRejected: "A ConfigMap's value is not what the field needs.",
            "Correct the value at the place that the message names; `weightrefit validate -f` says the same of files.";
        ModelRejected: "The model's tensors cannot be told from what the resource names.",
            "Correct `spec.model` or the document that it names; `weightrefit plan -f` says the same of files.";
        LayoutRejected: "A layout is malformed or does not fit the model.";
        CoverageGap: "An inference rank needs elements that no training rank holds.";
        CoverageOverlap: "Two pieces of one rank claim the same element.";
        DtypeMismatch: "The two sides store a tensor in dtypes between which there is no cast.";
        Unreadable: "The API server did not give what the resource names.",
            "None needed if it passes: it is asked again. If it lasts, see whether the API server answers the operator (`kubectl logs` of its pod).";
    }
    /// Reasons of Authorized.
    AuthorizedReason of Authorized {
        Permitted: "Every pod that claims the refit may take part.",
            "None needed.";
        NoPods: "No pod claims the refit yet.",
            "Put label weightrefit.dev/refit on the pod templates, and weightrefit.dev/refit-namespace where pods live in another namespace.";
        Unauthorized: "A pod's account lacks the verb publish or receive on the refit.";
        ReviewFailed: "The API server did not say whether the pods may take part.",
            "None needed if it passes: it is asked again. If it lasts, see whether the operator may create subjectaccessreviews.";
    }
    /// Reasons of MembersResolved.
    MembersResolvedReason of MembersResolved {
        Complete: "All training ranks and at least minReplicas replicas of every pool are known.",
            "None needed.";
        TrainerCompleted: "The trainer has finished, and at least minReplicas replicas of every pool are known.",
            "None needed; engines serve on, and a new trainer goes on with a larger run.";
        RankGap: "A training rank has no pod.";
        NotEnoughReady: "Fewer whole replicas than minReplicas are known.";
        DuplicateRank: "Two pods claim the same rank.";
        PodRejected: "A pod claims the refit and cannot be any of its ranks.",
            "Correct the labels of the pods that the message names, on their template, or `ranks` in the resource.";
        NotAccepted: "Ranks follow from a resource that is not accepted.",
            "See condition Accepted.";
    }
    /// Reasons of CommunicatorsReady.
    CommunicatorsReadyReason of CommunicatorsReady {
        Tcp: "All members are connected; bytes travel by TCP.",
            "None needed.";
        Nccl: "All members are connected; bytes travel by NCCL.",
            "None needed.";
        Mixed: "All members are connected; bytes of some replicas travel by NCCL, those of others by TCP.",
            "None needed. The message says what the others lack, as a code: `weightrefit explain CODE`.";
        Forming: "Communicators of replicas are being formed.",
            "None needed if it passes. If it lasts, read the agent logs of the replicas' pods and of the leader's.";
        NcclMissing: "The resource asks for NCCL, and replicas cannot use it; they take part in no round.",
            "The message has the code: `weightrefit explain CODE`. With transport Auto they would take TCP.";
        NoMembership: "There is no membership yet.",
            "See MembersResolved and Authorized: a membership is made when both hold.";
        AgentsMissing: "Members' agents are not connected.",
            "See whether the pods that the message names run and have a container weightrefit-agent, and read its log; a pod that was created before the webhook has none: delete it, its owner makes another.";
        Configuring: "Members have not answered to the newest membership yet.",
            "None needed if it passes. If it lasts, read the agent logs of the pods that the message names.";
        Refused: "An agent refused the membership.",
            "The message has the code of the refusal: `weightrefit explain CODE`.";
    }
    /// Reasons of Ready.
    ReadyReason of Ready {
        Refitting: "Every pool has at least minReplicas serving replicas, and what they need is there.",
            "None needed.";
        NotAccepted: "The resource is not accepted.",
            "See condition Accepted.";
        Unauthorized: "Not every pod may take part.";
        MembersMissing: "Ranks or replicas are missing.",
            "See condition MembersResolved.";
        NotEnoughServing: "Fewer than minReplicas replicas of some pool serve.",
            "See `status.behind`: it says of each replica why it does not serve. After a start it is enough to wait for the first publication.";
    }
    /// Reasons of InSync.
    InSyncReason of InSync {
        Current: "Every replica is within one committed round of the newest.",
            "None needed.";
        NothingCommitted: "No version has been committed yet.",
            "Wait for the first publication; if the trainer has published, see `status.lastFailedRound`.";
        ReplicasFenced: "Replicas are kept from serving.",
            "See `status.behind`; each replica has a code: `weightrefit explain CODE`. The next round brings a full refit to those that can take it.";
        ReplicasBehind: "Replicas are more than one committed round behind.",
            "See `status.behind`; the next round brings them up. If it does not, compare the time of a round with that of a training step.";
    }
    /// Reasons of Degraded.
    DegradedReason of Degraded {
        AsExpected: "Nothing is wrong.",
            "None needed.";
        ChangeRefused: "Rounds go on with an older generation, because the newest is not accepted.",
            "Correct what condition Accepted names, or take the change back.";
        RegistrationRefused: "A client's tensors do not fit its layout.",
            "The message lists the first tensors that differ: correct the layout or what the client registers.";
        AgentRefused: "A pod's agent was refused.",
            "The message names the pod and the code: `weightrefit explain CODE`.";
        RoundFailed: "The last round was aborted.",
            "See `status.lastFailedRound`: its reason is a code, `weightrefit explain CODE`. The next publication opens another round.";
        ReplicasFenced: "Replicas are kept from serving.",
            "See `status.behind`; each replica has a code: `weightrefit explain CODE`.";
        GateNotWritten: "A readiness gate that a pod asks for is not written, so that the pod may never become ready.",
            "Set `readinessGate.enabled` of the chart, or take the readiness gate weightrefit.dev/WeightsCurrent out of the engines' template.";
        AgentsLost: "Members' agents are not connected.",
            "See whether the pods that the message names run; rounds go on without replicas that are lost, and wait for training ranks.";
    }
    /// Reasons of Reconciling.
    ReconcilingReason of Reconciling {
        Forming: "The first membership is being formed.",
            "None needed if it passes. If it lasts, see MembersResolved and CommunicatorsReady.";
        Changing: "A change waits for a round boundary or for agents.",
            "None needed: a change takes effect between two rounds.";
    }
    /// Reasons of Stalled.
    StalledReason of Stalled {
        NotAccepted: "The resource, or what it names, must be corrected.",
            "See condition Accepted.";
        Unauthorized: "Somebody must permit the pods' accounts to take part.";
        PodRejected: "A pod's labels or its workload must be corrected.",
            "See condition MembersResolved.";
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
            assert!(ALL.iter().any(|entry| entry.condition == *kind), "{}", kind.name());
        }
        let names: BTreeSet<_> = ALL.iter().map(|entry| (entry.condition, entry.name)).collect();
        assert_eq!(names.len(), ALL.len(), "each once");
        for entry in ALL {
            let Entry { name, sentence, own_remedy, .. } = *entry;
            assert!(name.len() <= limits::REASON_MAX && sentence.ends_with('.'), "{name}: {sentence}");
            assert!(entry.remedy().ends_with('.'), "{name}: {}", entry.remedy());
            let is_code = name.parse::<Code>().is_ok();
            assert_eq!(own_remedy.is_empty(), is_code, "{name} has either a remedy or a code that has one");
        }
    }
}
