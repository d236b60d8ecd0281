//! What the controllers of workloads write on their pods to tell them apart, and what it makes of a pod: a pure function
//! of its labels and annotations.
//!
//! | kind | group | index in the group |
//! |---|---|---|
//! | IndexedJob | `batch.kubernetes.io/job-name` | `batch.kubernetes.io/job-completion-index` |
//! | JobSet | the same: one job of the replicated job | the same |
//! | LeaderWorkerSet | `leaderworkerset.sigs.k8s.io/name` and `/group-index` | `/worker-index` |
//! | PodCliqueSet | `grove.io/podclique` | `grove.io/podclique-pod-index` |
//!
//! In a pool a group is a replica, or several of them one after the other. The training world is one group, or the
//! groups of a JobSet or LeaderWorkerSet in their order.

use super::pod_facts::PodFacts;
use super::seats::SeatError;
use crate::api::workload::{Ranks, RanksType};

const JOB_NAME: &str = "batch.kubernetes.io/job-name";
const COMPLETION_INDEX: &str = "batch.kubernetes.io/job-completion-index";
const JOB_INDEX: &str = "jobset.sigs.k8s.io/job-index";
const REPLICATED_JOB: &str = "jobset.sigs.k8s.io/replicatedjob-name";
const REPLICATED_JOB_REPLICAS: &str = "jobset.sigs.k8s.io/replicatedjob-replicas";
const LWS_NAME: &str = "leaderworkerset.sigs.k8s.io/name";
const GROUP_INDEX: &str = "leaderworkerset.sigs.k8s.io/group-index";
const WORKER_INDEX: &str = "leaderworkerset.sigs.k8s.io/worker-index";
const GROUP_SIZE: &str = "leaderworkerset.sigs.k8s.io/size";
const CLIQUE: &str = "grove.io/podclique";
const CLIQUE_INDEX: &str = "grove.io/podclique-pod-index";
const CLIQUE_SET_INDEX: &str = "grove.io/podcliqueset-replica-index";

/// Annotations that are kept beside a pod's labels.
pub(super) const ANNOTATIONS: [&str; 1] = [GROUP_SIZE];

/// A group of pods and which of them a pod is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    /// Name of the group, unique in the namespace.
    pub(super) group: String,
    /// Which of its pods it is.
    pub(super) index: u32,
}

/// The group of a pod of a pool.
///
/// # Errors
/// A mark is missing or malformed.
pub(super) fn in_group(ranks: &Ranks, pod: &PodFacts) -> Result<Place, SeatError> {
    let (group, index) = match ranks.kind {
        RanksType::LeaderWorkerSet => {
            // Later versions have hashes for indices, which name a group as well.
            let group = format!("{}-{}", mark(pod, LWS_NAME)?, mark(pod, GROUP_INDEX)?);
            (group, WORKER_INDEX)
        }
        RanksType::PodCliqueSet => (mark(pod, CLIQUE)?.to_owned(), CLIQUE_INDEX),
        RanksType::JobSet => {
            of_named_job(ranks, pod)?;
            (mark(pod, JOB_NAME)?.to_owned(), COMPLETION_INDEX)
        }
        _ => (mark(pod, JOB_NAME)?.to_owned(), COMPLETION_INDEX),
    };
    Ok(Place { group, index: number(pod, index)? })
}

/// Which of the `pods` that make up the training world it is.
///
/// # Errors
/// A mark is missing, malformed, or of another world.
pub(super) fn in_world(ranks: &Ranks, pod: &PodFacts, pods: u32) -> Result<u32, SeatError> {
    let (group, size, index) = match ranks.kind {
        RanksType::LeaderWorkerSet => (GROUP_INDEX, number(pod, GROUP_SIZE)?, WORKER_INDEX),
        RanksType::PodCliqueSet => {
            // How many pods the replica before it has is told nowhere on the pod.
            (CLIQUE_SET_INDEX, 0, CLIQUE_INDEX)
        }
        RanksType::JobSet => {
            of_named_job(ranks, pod)?;
            let jobs = number(pod, REPLICATED_JOB_REPLICAS)?;
            match pods.checked_div(jobs) {
                Some(size) if size * jobs == pods => (JOB_INDEX, size, COMPLETION_INDEX),
                _ => return Err(wrong(pod, REPLICATED_JOB_REPLICAS)),
            }
        }
        _ => return number(pod, COMPLETION_INDEX),
    };
    let (group_number, index_number) = (number(pod, group)?, number(pod, index)?);
    if group_number > 0 && size == 0 {
        return Err(wrong(pod, group));
    }
    // A group with more pods than its share would take the ranks of the next.
    if size > 0 && index_number >= size {
        return Err(wrong(pod, index));
    }
    let ordinal = group_number.checked_mul(size).and_then(|before| before.checked_add(index_number));
    ordinal.ok_or_else(|| wrong(pod, group))
}

/// Replica that labels of the user's own tell, and which of its pods it is, or of the world's; a pod that is told none is
/// a replica.
///
/// # Errors
/// A label is missing, or the rank none that a pod begins with.
pub(super) fn told(ranks: &Ranks, pod: &PodFacts, per_pod: u32) -> Result<Place, SeatError> {
    let keys = ranks.label.as_ref().expect("the type's member is there, by the resource's rules");
    let first = number(pod, &keys.rank_key)?;
    let index = first.checked_div(per_pod).filter(|index| index * per_pod == first);
    let replica = keys.replica_key.as_ref().map_or(Ok(pod.name.as_str()), |key| mark(pod, key))?;
    Ok(Place { group: replica.to_owned(), index: index.ok_or_else(|| wrong(pod, &keys.rank_key))? })
}

/// Other jobs of the set are no ranks, though their pods may carry the claim label.
fn of_named_job(ranks: &Ranks, pod: &PodFacts) -> Result<(), SeatError> {
    let job = mark(pod, REPLICATED_JOB)?;
    let mut named = ranks.job_set.iter().flat_map(|set| &set.replicated_jobs);
    if named.any(|name| name == job) { Ok(()) } else { Err(wrong(pod, REPLICATED_JOB)) }
}

fn mark<'p>(pod: &'p PodFacts, name: &str) -> Result<&'p str, SeatError> {
    let mark = pod.marks.get(name).map(String::as_str).filter(|mark| !mark.is_empty());
    mark.ok_or_else(|| wrong(pod, name))
}

fn number(pod: &PodFacts, name: &str) -> Result<u32, SeatError> {
    decimal(mark(pod, name)?).ok_or_else(|| wrong(pod, name))
}

/// A number as Kubernetes writes it: decimal, without sign or leading zeros.
pub(super) fn decimal(text: &str) -> Option<u32> {
    let is_plain = text == "0" || (!text.starts_with('0') && text.bytes().all(|b| b.is_ascii_digit()));
    if is_plain { text.parse().ok() } else { None }
}

fn wrong(pod: &PodFacts, name: &str) -> SeatError {
    let value = pod.marks.get(name).map_or("", String::as_str);
    SeatError::Mark { pod: pod.shown(), name: name.to_owned(), value: value.to_owned() }
}
