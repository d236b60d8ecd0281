//! How bytes travel, as the status says it.

use super::*;

#[test]
fn how_bytes_travel_is_told_with_what_is_in_the_way_of_nccl() {
    let rows: &[(&str, Change, &str)] = &[
        ("never by NCCL", |_| {}, "True Tcp: TCP on all 4 ranks, protected by TLS."),
        (
            "by NCCL",
            |world| {
                world.carrier(0, "nccl", "").carrier(1, "nccl", "");
            },
            "True Nccl: NCCL for all 2 replicas, in clear; control in TLS.",
        ),
        (
            "one without a GPU",
            |world| {
                world.carrier(0, "nccl", "").carrier(1, "tcp", "GpuNotVisible");
            },
            "True Mixed: NCCL for 1 of 2 replicas, in clear; TCP for 1, protected by TLS, first default/engine-1: \
             GpuNotVisible: why.",
        ),
        (
            "none with a GPU",
            |world| {
                world.carrier(0, "tcp", "GpuNotVisible").carrier(1, "tcp", "VersionSkew");
            },
            "True Tcp: TCP on all 4 ranks, protected by TLS; not NCCL: first default/engine-0: GpuNotVisible: why.",
        ),
        (
            "one is being formed",
            |world| {
                world.carrier(0, "tcp", "GpuNotVisible").carrier(1, "forming", "");
            },
            "False Forming: Communicators of 1 of 2 replicas are being formed, first default/engine-1.",
        ),
        (
            "NCCL is a must",
            |world| {
                world.spec.transfer.transport = Transport::Nccl;
                world.carrier(0, "tcp", "VersionSkew").carrier(1, "forming", "");
            },
            "False NcclMissing: 1 of 2 replicas cannot use NCCL, first default/engine-0: VersionSkew: why.",
        ),
    ];
    for (what, change, want) in rows {
        let mut world = World::serving(8);
        change(&mut world);
        let status = world.peek();
        let Condition { status, reason, message, .. } =
            find(&status, ConditionType::CommunicatorsReady).expect("the condition");
        assert_eq!(format!("{status:?} {reason}: {message}"), *want, "{what}");
    }
}
