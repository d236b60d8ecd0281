//! Two that write the epoch of one refit.

use crate::bed::Bed;
use kube::Api;
use std::sync::Arc;
use weightrefit::api::refit::WeightRefit;
use weightrefit::controller::record::StatusRecord;
use weightrefit::coordinator::EpochRecord;
use weightrefit_core::id::{Epoch, Incarnation, Rank, Sha256};
use weightrefit_core::membership::roster::{Basis, Cause, Next};
use weightrefit_core::membership::{Member, Membership, Seat, VersionFloor};

fn next(uid: &str, epoch: u64, port: u16) -> Next {
    let member = Member {
        seat: Seat::Training { rank: Rank(0) },
        pod_uid: "uid".into(),
        incarnation: Incarnation(1),
        key: Sha256([0; 32]),
        round_addresses: vec![format!("127.0.0.1:{port}")],
        byte_addresses: vec!["127.0.0.1:2".into()],
    };
    let floor = Some(VersionFloor { run: 1, step: 2 });
    let membership = Membership::new(uid, Epoch(epoch), floor, vec!["default".into()], vec![member]);
    let membership = Arc::new(membership.expect("valid"));
    Next {
        membership,
        basis: Basis { generation: 1, resolved: Sha256([0; 32]) },
        cause: Some(Cause::Created),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_writers_of_one_epoch_one_wins_and_the_other_learns_what_it_wrote() {
    let bed = tokio::task::spawn_blocking(Bed::shared).await.expect("a bed");
    tokio::task::spawn_blocking(|| {
        bed.define_refits();
        bed.create_namespace("epochs");
        bed.send(
            "apply",
            include_str!("../local/tiny.yaml").replace("namespace: tests", "namespace: epochs"),
        );
    })
    .await
    .expect("it is created");
    let api: Api<WeightRefit> = Api::namespaced(bed.client().await, "epochs");
    let refit = api.get("tiny").await.expect("is there");
    let uid = refit.metadata.uid.clone().expect("a uid");
    let writer = || StatusRecord::new(api.clone(), &refit, Arc::new(|_: &str| Some("rl/trainer-0".into())));
    let (mut first, mut second) = (writer(), writer());
    assert_eq!(first.recorded(), None);

    // Both read before either writes: only the precondition tells them apart.
    let (one, other) = (next(&uid, 1, 1), next(&uid, 1, 2));
    let (one, other) = tokio::join!(first.record(&one), second.record(&other));
    assert_eq!((one.is_ok(), other.is_ok()), (one.is_ok(), one.is_err()), "{one:?} {other:?}");
    let (winner, mut loser) = if one.is_ok() { (first, second) } else { (second, first) };
    let written = api.get("tiny").await.expect("is there").status.and_then(|status| status.membership);
    let written = written.expect("an epoch");
    assert_eq!(winner.recorded().map(|recorded| recorded.digest.to_string()), Some(written.digest));
    assert_eq!(written.leader, "rl/trainer-0");

    let error = loser.record(&next(&uid, 1, 3)).await.expect_err("it lost");
    let told =
        ["somebody else wrote it", "is not above 1"].iter().any(|told| error.to_string().contains(told));
    assert!(told, "as it has heard of the other's before or not: {error}");
    assert_eq!(loser.recorded(), winner.recorded(), "what the other wrote is known");
    loser.record(&next(&uid, 2, 3)).await.expect("the next epoch is free");

    // Another object of this name is another relation.
    tokio::task::spawn_blocking(|| {
        let documents = include_str!("../local/tiny.yaml").replace("namespace: tests", "namespace: epochs");
        bed.replace_by_force(&documents);
    })
    .await
    .expect("it is replaced");
    let error = loser.record(&next(&uid, 3, 3)).await.expect_err("it is gone");
    assert!(error.to_string().contains("made anew"), "{error}");
}
