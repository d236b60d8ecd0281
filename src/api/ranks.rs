//! How pods become ranks and replicas: a pure function of the resource, used wherever somebody must know how
//! many agents there are and what each hosts.
//!
//! A pod's ordinal counts in units of its ranks: rank base = ordinal × ranksPerPod, cut into replicas of
//! ranksPerReplica ranks. A replica is a whole number of pods or a pod a whole number of replicas (`check`).

use crate::api::refit::{Pool, Training};
use crate::api::workload::RanksType;
use weightrefit_core::id::Rank;

/// One pod and what its agent hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Name: `<owner>-<ordinal>`.
    pub name: String,
    /// The ranks it hosts, in order.
    pub ranks: Vec<Hosted>,
}

/// A rank in a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hosted {
    /// Name of its replica; `None` on the training side.
    pub replica: Option<String>,
    /// The rank: of the training world, or inside the replica.
    pub rank: Rank,
}

/// The pods of the training side.
#[must_use]
pub fn training_pods(training: &Training) -> Vec<Pod> {
    let owner = training.workload_ref.as_ref().map_or("trainer", |workload| workload.name.as_str());
    let pods = count(training.world_size).div_ceil(per_training_pod(training));
    let pod = |ordinal| Pod { name: format!("{owner}-{ordinal}"), ranks: training_ranks(training, ordinal) };
    (0..pods).map(pod).collect()
}

/// The training ranks of the pod of this ordinal: none beyond the world.
#[must_use]
pub fn training_ranks(training: &Training, ordinal: u32) -> Vec<Hosted> {
    let world = u64::from(count(training.world_size));
    let places = places(ordinal, per_training_pod(training));
    let hosted = |place| Hosted { replica: None, rank: rank(place) };
    places.take_while(|place| *place < world).map(hosted).collect()
}

/// The pods of `replicas` replicas of `pool`.
#[must_use]
pub fn pool_pods(pool: &Pool, replicas: u32) -> Vec<Pod> {
    let owner = owner(pool);
    let mut left = replicas as usize * count(pool.ranks_per_replica) as usize;
    let mut pods = Vec::new();
    while left > 0 {
        let ordinal = u32::try_from(pods.len()).expect("there are fewer pods than ranks");
        let name = format!("{owner}-{ordinal}");
        let mut ranks = match pool.ranks.kind {
            RanksType::Deployment => replicas_of_pod(pool, &name),
            _ => pool_ranks(pool, owner, ordinal),
        };
        ranks.truncate(left);
        left -= ranks.len();
        pods.push(Pod { name, ranks });
    }
    pods
}

/// What the pod of this ordinal holds of the replicas that `owner`'s pods make up; replicas are counted.
#[must_use]
pub fn pool_ranks(pool: &Pool, owner: &str, ordinal: u32) -> Vec<Hosted> {
    let per_replica = u64::from(count(pool.ranks_per_replica));
    let hosted = |place| {
        let replica = format!("{owner}-{}", place / per_replica);
        Hosted { replica: Some(replica), rank: rank(place % per_replica) }
    };
    places(ordinal, per_pod(pool)).map(hosted).collect()
}

/// What the pod of this index holds of the replicas that the pods of a group make up: mostly one, named by the group.
#[must_use]
pub fn group_ranks(pool: &Pool, group: &str, index: u32) -> Vec<Hosted> {
    let per_replica = u64::from(count(pool.ranks_per_replica));
    let hosted = |place| {
        let replica = match place / per_replica {
            0 => group.to_owned(),
            number => format!("{group}-{number}"),
        };
        Hosted { replica: Some(replica), rank: rank(place % per_replica) }
    };
    places(index, per_pod(pool)).map(hosted).collect()
}

/// The whole replicas of a pod of a Deployment: named by the pod, because nothing else of it lasts.
#[must_use]
pub fn replicas_of_pod(pool: &Pool, pod: &str) -> Vec<Hosted> {
    let per_replica = count(pool.ranks_per_replica);
    let replicas = (per_pod(pool) / per_replica).max(1);
    let name = |replica| match replicas {
        1 => pod.to_owned(),
        _ => format!("{pod}/{replica}"),
    };
    let of_replica = |replica| {
        let hosted = move |rank| Hosted { replica: Some(name(replica)), rank: Rank(rank) };
        (0..per_replica).map(hosted)
    };
    (0..replicas).flat_map(of_replica).collect()
}

/// Ranks of each of the trainer's pods.
#[must_use]
pub fn per_training_pod(training: &Training) -> u32 {
    count(training.ranks.ranks_per_pod.unwrap_or(1))
}

/// Ranks of each pod of the pool.
#[must_use]
pub fn per_pod(pool: &Pool) -> u32 {
    count(pool.ranks.ranks_per_pod.unwrap_or(pool.ranks_per_replica))
}

/// Places of a pod's ranks among those of all pods of its owner.
fn places(ordinal: u32, per_pod: u32) -> std::ops::Range<u64> {
    let first = u64::from(ordinal) * u64::from(per_pod);
    first..first + u64::from(per_pod)
}

fn rank(place: u64) -> Rank {
    Rank(u32::try_from(place).expect("it is below a number of ranks"))
}

fn owner(pool: &Pool) -> &str {
    pool.workload_ref.as_ref().map_or(pool.name.as_str(), |workload| workload.name.as_str())
}

/// Checked documents have no number below 1 here.
fn count(number: i32) -> u32 {
    u32::try_from(number).unwrap_or_default().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(kind: &str, per_replica: i32, per_pod: Option<i32>) -> Pool {
        let per_pod = per_pod.map(|n| format!(", \"ranksPerPod\": {n}")).unwrap_or_default();
        let json = format!(
            r#"{{"name": "default", "ranksPerReplica": {per_replica}, "ranks": {{"type": "{kind}"{per_pod}}},
                "workloadRef": {{"apiVersion": "apps/v1", "kind": "{kind}", "name": "vllm"}}}}"#
        );
        serde_json::from_str(&json).expect(&json)
    }

    /// One pod a word: `pod=replica:ranks`.
    fn shown(pods: &[Pod]) -> String {
        let pod = |pod: &Pod| {
            let rank =
                |hosted: &Hosted| format!("{}:{}", hosted.replica.as_deref().unwrap_or("-"), hosted.rank);
            format!("{}={}", pod.name, pod.ranks.iter().map(rank).collect::<Vec<_>>().join(","))
        };
        pods.iter().map(pod).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn pods_host_the_ranks_of_their_ordinal() {
        for (kind, per_replica, per_pod, replicas, want) in [
            ("StatefulSet", 2, None, 2, "vllm-0=vllm-0:0,vllm-0:1 vllm-1=vllm-1:0,vllm-1:1"),
            ("StatefulSet", 4, Some(2), 1, "vllm-0=vllm-0:0,vllm-0:1 vllm-1=vllm-0:2,vllm-0:3"),
            ("IndexedJob", 1, Some(2), 3, "vllm-0=vllm-0:0,vllm-1:0 vllm-1=vllm-2:0"),
            ("Deployment", 1, None, 2, "vllm-0=vllm-0:0 vllm-1=vllm-1:0"),
            ("Deployment", 1, Some(2), 2, "vllm-0=vllm-0/0:0,vllm-0/1:0"),
            ("LeaderWorkerSet", 2, Some(1), 1, "vllm-0=vllm-0:0 vllm-1=vllm-0:1"),
        ] {
            assert_eq!(shown(&pool_pods(&pool(kind, per_replica, per_pod), replicas)), want, "{kind}");
        }
    }

    #[test]
    fn training_pods_share_the_world() {
        let json = r#"{"worldSize": 4, "ranks": {"type": "StatefulSet", "ranksPerPod": 2}}"#;
        let training: Training = serde_json::from_str(json).expect(json);
        assert_eq!(shown(&training_pods(&training)), "trainer-0=-:0,-:1 trainer-1=-:2,-:3");
    }
}
