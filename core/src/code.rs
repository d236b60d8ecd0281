//! Stable error codes: one enum shared by resource conditions, metrics labels, gRPC details, the CLI and
//! Python. Each code has a sentence (what happened), a remedy (what to do) and one policy.

use serde::{Deserialize, Serialize};
use std::fmt;

/// What the system does by itself after an error of this kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Nothing until the resource, a layout or a registration changes.
    WaitForChange,
    /// The same step is tried again, with back-off.
    Retry,
    /// The replica concerned leaves the round and stays fenced until a later round brings it up.
    DropReplica,
    /// The round ends as Aborted; the next publication or retry opens another one.
    AbortRound,
    /// The process concerned stops, because going on could harm.
    Stop,
}

macro_rules! codes {
    ($($name:ident: $policy:ident, $sentence:literal, $remedy:literal;)*) => {
        /// Stable error code.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Code {
            $(#[doc = $sentence] $name,)*
        }

        impl Code {
            /// All codes, in the order of their declaration.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The code as text, as in conditions and metrics labels.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* }
            }

            /// What happened, in one sentence.
            #[must_use]
            pub const fn sentence(self) -> &'static str {
                match self { $(Self::$name => $sentence,)* }
            }

            /// What a person can do about it.
            #[must_use]
            pub const fn remedy(self) -> &'static str {
                match self { $(Self::$name => $remedy,)* }
            }

            /// What the system does by itself.
            #[must_use]
            pub const fn policy(self) -> Policy {
                match self { $(Self::$name => Policy::$policy,)* }
            }
        }
    };
}

codes! {
    RankGap: WaitForChange, "A rank between 0 and the size of its side has no pod.", "Start the missing pod, or correct worldSize, ranksPerReplica or ranksPerPod.";
    DuplicateRank: WaitForChange, "Two pods or clients claim the same rank.", "Delete the older one, or correct the rank labels so that each rank is claimed once.";
    MixedRevision: WaitForChange, "Pods of one replica run different revisions of their workload.", "Wait for the rollout to finish, or roll it back.";
    NotEnoughReady: WaitForChange, "Fewer replicas are ready than minReplicas asks for.", "Start more replicas, or lower minReplicas.";
    Unauthorized: WaitForChange, "The pod's account may not take part in this refit.", "Grant the verb publish or receive on the WeightRefit to the pod's service account.";
    Unauthenticated: Stop, "The peer's certificate, key or token is not the one that the membership names.", "Restart the pod so that it enrols again; if it repeats, look for a second process on that address.";
    LayoutRejected: WaitForChange, "A layout document is malformed or does not fit the model.", "Correct the place that the message names; `weightrefit layout pieces` shows what a document yields.";
    CoverageGap: WaitForChange, "An element that a destination needs is held by no source.", "Add the missing rule to the training layout, or put the tensor under `ignore` of the inference layout.";
    CoverageOverlap: WaitForChange, "Two pieces of one rank claim the same local element.", "Correct the slots or cuts of the rules that the message names.";
    DtypeMismatch: WaitForChange, "Source and destination store a tensor in dtypes between which no cast is allowed.", "Store the tensor in a castable dtype on one side (f32, f16 and bf16 to f32 or from f32).";
    RegistrationMismatch: WaitForChange, "The tensors that a client registered differ from its layout.", "Correct the layout, or register the tensors that it names; the first five differences are listed.";
    PlanMismatch: AbortRound, "Two agents computed different plans.", "Run the same weightrefit version in all pods; if it repeats, report it with `weightrefit plan -o json` of both.";
    PublishSkew: AbortRound, "Training ranks published different steps or belong to different starts of the trainer.", "Publish the same step on every rank, and restart all trainer ranks together.";
    PrepareTimeout: DropReplica, "A participant did not answer the proposal in time.", "Look at that agent's log and network; raise prepareSeconds if the pod is merely slow.";
    PauseTimeout: DropReplica, "An engine did not pause in time.", "Look at the engine's longest step; raise pauseSeconds or choose inFlight Keep.";
    TransferTimeout: DropReplica, "The bytes did not all arrive in time.", "Compare the link rate in the metrics with what the network should give; raise transferSeconds if it is as expected.";
    VerifyTimeout: DropReplica, "The digest of what arrived was not ready in time.", "Give the agent more CPU, or raise verifySeconds.";
    PeerLost: DropReplica, "The connection to a peer broke and its heartbeats ended.", "Look at that pod: it was restarted, evicted or cut off.";
    DigestMismatch: DropReplica, "What arrived differs from what was published.", "Nothing was committed; look for faulty memory or network on the rank that the message names if it repeats.";
    ReplicaDivergence: AbortRound, "Training replicas that should hold the same elements hold different ones.", "Restart the trainer from a checkpoint; its data-parallel ranks have drifted apart.";
    SourceChanged: AbortRound, "The trainer wrote to a published buffer before its release.", "Wait for the release (or use a snapshot publish mode) before the next optimizer step.";
    ServedWeightsChanged: DropReplica, "The weights that an engine serves were changed by somebody else.", "Stop what writes to the engine's parameters (a reload, an adapter merge) while the refit owns them.";
    ApplyFailed: DropReplica, "The engine could not apply the new weights.", "Look at the engine's log; the replica stays fenced until a full refit succeeds.";
    PointerMoved: DropReplica, "The engine moved a parameter after it was registered.", "Register again after the engine has finished loading, sleeping or compiling.";
    CommitTimeout: DropReplica, "A replica did not finish its commit in time.", "Look at the engine's log; the replica stays fenced until its outcome is known.";
    ResumeTimeout: DropReplica, "An engine did not resume in time after the commit.", "Look at the engine's log; its weights are right, but it is not serving.";
    EngineRefused: DropReplica, "The engine refused a request of its agent.", "Look at the refusal in the message: most often the engine is asleep, reloading or not paused.";
    EngineCold: DropReplica, "The engine process was restarted and has no verified weights.", "None needed: the next round brings a full refit.";
    NoSource: AbortRound, "No live rank can send the version that a replica needs.", "Wait for the trainer's next publication.";
    SourceGone: AbortRound, "A source no longer offers the version that was asked for.", "None needed: the next publication opens a new round.";
    StaleEpoch: Retry, "The message belongs to another epoch, membership or incarnation.", "None needed: the sender gets the current membership; if it repeats, look for two coordinators.";
    NotConfigured: Retry, "The agent has no membership yet.", "None needed: it is asked again; if it lasts, look at its connection to the coordinator.";
    Busy: Retry, "The participant is still in another round or in recovery.", "None needed: it is asked again.";
    StagingExhausted: WaitForChange, "Staging memory for the new weights does not fit.", "Raise the memory limit by the amount that the message names, or use commit mode InPlace with Rolling.";
    TransportUnavailable: AbortRound, "The transport asked for cannot be used here.", "Use transport Auto, or correct what the message names.";
    NcclError: DropReplica, "NCCL returned an error.", "Look at the agent's log for NCCL's own message; the replica's communicator is rebuilt.";
    GpuNotVisible: WaitForChange, "The agent or executor cannot see the GPU that holds the tensors.", "Use the InProcess profile, or give the agent the same GPU by a resource claim.";
    MemlockTooLow: WaitForChange, "The limit on locked memory is too low.", "Raise the memlock limit of the container runtime.";
    ShmTooSmall: WaitForChange, "Shared memory is too small.", "Mount an emptyDir with medium Memory at /dev/shm.";
    InterfaceNotFound: WaitForChange, "The network interface named in the settings does not exist.", "Correct the interface name, or leave it out.";
    NoCommonFamily: WaitForChange, "The members have no IP family in common.", "Give every pod an address of one family.";
    CpuThrottled: Retry, "The agent is throttled by its CPU limit.", "Raise or remove the agent's CPU limit.";
    MeshInterceptsPeers: WaitForChange, "A service mesh intercepts connections between agents.", "Exclude the agent's ports from the mesh; the agents encrypt by themselves.";
    VersionSkew: WaitForChange, "Agents too old or too new for each other share a refit.", "Restart the pods that the message names, so that they get the current agent.";
    VersionRegressed: AbortRound, "A version older than the one served was proposed.", "None needed: the leader asks again with a newer run; if it repeats, look for two trainers.";
    AgentWedged: Stop, "A transfer could not be stopped, so its memory cannot be trusted.", "An agent restarts by itself; a rank's process that says so has to be ended. Report it if it repeats.";
    Cancelled: AbortRound, "The round was cancelled by a user, a pause or a shutdown.", "None needed.";
    Unsupported: WaitForChange, "The request asks for something that this version cannot do.", "Change the field that the message names to a supported value.";
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Code {
    type Err = UnknownCode;
    fn from_str(text: &str) -> Result<Self, UnknownCode> {
        let found = Self::ALL.iter().copied().find(|code| code.name().eq_ignore_ascii_case(text));
        found.ok_or_else(|| UnknownCode(text.chars().take(80).collect()))
    }
}

/// The text names no error code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown error code `{0}`")]
pub struct UnknownCode(pub String);
