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
    let per_pod = count(training.ranks.ranks_per_pod.unwrap_or(1));
    let hosted = |rank| Hosted { replica: None, rank: Rank(rank) };
    let ranks: Vec<Hosted> = (0..count(training.world_size)).map(hosted).collect();
    pods(owner, per_pod as usize, &ranks)
}

/// The pods of `replicas` replicas of `pool`.
#[must_use]
pub fn pool_pods(pool: &Pool, replicas: u32) -> Vec<Pod> {
    let owner = owner(pool);
    let per_replica = count(pool.ranks_per_replica);
    let per_pod = pool.ranks.ranks_per_pod.map_or(per_replica, count);
    let mut ranks = Vec::new();
    for replica in 0..replicas {
        let name = replica_name(pool, replica);
        ranks.extend((0..per_replica).map(|rank| Hosted { replica: Some(name.clone()), rank: Rank(rank) }));
    }
    pods(owner, per_pod as usize, &ranks)
}

fn owner(pool: &Pool) -> &str {
    pool.workload_ref.as_ref().map_or(pool.name.as_str(), |workload| workload.name.as_str())
}

/// A Deployment's replica is named by its pod, because nothing else of it lasts; elsewhere replicas are counted.
fn replica_name(pool: &Pool, replica: u32) -> String {
    let owner = owner(pool);
    let per_replica = count(pool.ranks_per_replica);
    let replicas_per_pod = pool.ranks.ranks_per_pod.map_or(1, |per_pod| count(per_pod) / per_replica);
    match pool.ranks.kind {
        RanksType::Deployment if replicas_per_pod > 1 => {
            format!("{owner}-{}/{}", replica / replicas_per_pod, replica % replicas_per_pod)
        }
        _ => format!("{owner}-{replica}"),
    }
}

fn pods(owner: &str, per_pod: usize, ranks: &[Hosted]) -> Vec<Pod> {
    let pod = |(ordinal, ranks): (usize, &[Hosted])| Pod {
        name: format!("{owner}-{ordinal}"),
        ranks: ranks.to_vec(),
    };
    ranks.chunks(per_pod).enumerate().map(pod).collect()
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
