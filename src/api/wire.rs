//! A resolved refit as agents get it: documents in canonical form and policies in the protocol's units.

use crate::api::policy::{
    Encryption, InFlight, KvCache, OnReplicaFailure, Transfer, Transport, Verification,
};
use crate::api::resolve::{Origin, ResolvedRefit, Side};
use crate::api::timeouts::Timeouts;
use weightrefit_core::round::message;
use weightrefit_proto::refit::{self, Policy, Pool, Refit};

impl ResolvedRefit {
    /// What every agent of an epoch is told of this refit.
    #[must_use]
    pub fn for_agents(&self) -> Refit {
        let pools = self.pools.iter().zip(&self.spec.inference.pools).map(|(pool, spec)| Pool {
            name: pool.name.clone(),
            layout: document(&pool.side),
            min_replicas: spec.min_replicas.unsigned_abs(),
        });
        Refit {
            tensors: Refit::tensors_of(&self.tensors),
            training: document(&self.training),
            pools: pools.collect(),
            policy: Policy {
                timeouts: durations(self.spec.timeouts),
                on_replica_failure: match self.spec.commit.on_replica_failure {
                    OnReplicaFailure::FenceReplica => refit::OnReplicaFailure::FenceReplica,
                    OnReplicaFailure::AbortRound => refit::OnReplicaFailure::AbortRound,
                },
                encrypt_bytes: match self.spec.transfer.encryption {
                    // What travels by TCP is encrypted on a trusted fabric as well.
                    Encryption::Required | Encryption::TrustedFabric => true,
                    Encryption::Disabled => false,
                },
                fabric: fabric(self.spec.transfer),
                verify: match self.spec.transfer.verification {
                    Verification::Full => true,
                    Verification::Disabled => false,
                },
                in_flight: match self.spec.commit.in_flight {
                    InFlight::Keep => refit::InFlight::Keep,
                    InFlight::Drain => refit::InFlight::Drain,
                    InFlight::Abort => refit::InFlight::Abort,
                },
                kv_cache: match self.spec.commit.kv_cache {
                    KvCache::Reset => refit::KvCache::Reset,
                    KvCache::Keep => refit::KvCache::Keep,
                    KvCache::SaltByVersion => refit::KvCache::SaltByVersion,
                },
            },
        }
    }
}

/// NCCL cannot encrypt, so `Required` rules it out whatever the transport says.
const fn fabric(transfer: Transfer) -> refit::Fabric {
    match (transfer.encryption, transfer.transport) {
        (Encryption::Required, _) | (_, Transport::Tcp) => refit::Fabric::Never,
        (_, Transport::Auto) => refit::Fabric::Auto,
        (_, Transport::Nccl | Transport::NcclM2n) => refit::Fabric::Required,
    }
}

fn document(side: &Side) -> serde_json::Value {
    if side.origin == Origin::Registered {
        return serde_json::Value::Null; // the coordinator fills it in
    }
    serde_json::from_str(&side.layout.canonical()).expect("a canonical document is JSON, by its own contract")
}

fn durations(timeouts: Timeouts) -> message::Timeouts {
    // Checked documents have seconds from 1 to a day here.
    let ms = |seconds: i32| u64::from(seconds.unsigned_abs()) * 1000;
    let Timeouts {
        publish_seconds,
        prepare_seconds,
        pause_seconds,
        transfer_seconds,
        verify_seconds,
        commit_seconds,
        resume_seconds,
        total_seconds,
    } = timeouts;
    message::Timeouts {
        publish_ms: ms(publish_seconds),
        prepare_ms: ms(prepare_seconds),
        pause_ms: ms(pause_seconds),
        transfer_ms: ms(transfer_seconds),
        verify_ms: ms(verify_seconds),
        commit_ms: ms(commit_seconds),
        resume_ms: ms(resume_seconds),
        total_ms: ms(total_seconds),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encryption_required_never_meets_nccl() {
        use refit::Fabric::{Auto, Never, Required};
        let transports = [Transport::Auto, Transport::Tcp, Transport::Nccl, Transport::NcclM2n];
        let rows = [
            (Encryption::Required, [Never, Never, Never, Never]),
            (Encryption::TrustedFabric, [Auto, Never, Required, Required]),
            (Encryption::Disabled, [Auto, Never, Required, Required]),
        ];
        for (encryption, want) in rows {
            let found =
                transports.map(|transport| fabric(Transfer { transport, encryption, ..Transfer::default() }));
            assert_eq!(found, want, "{encryption:?}");
        }
    }
}
