//! Memberships: canonical order, digest, what is refused, which Configure an agent takes, and which membership a
//! coordinator makes when.

use weightrefit_core::code::Code;
use weightrefit_core::id::{Epoch, Incarnation, MemberId, Rank, Sha256};
use weightrefit_core::limits::JOIN_SETTLE_MS;
use weightrefit_core::membership::accept::{Acceptance, ConfigureError, accept};
use weightrefit_core::membership::roster::{
    Basis, Cause, Joining, PoolSpec, Recorded, Roster, RosterError, Spec, Standing,
};
use weightrefit_core::membership::{Member, Membership, MembershipError, Seat, VersionFloor};

/// `t3` or `pool/replica/rank`.
fn seat(text: &str) -> Seat {
    match text.split('/').collect::<Vec<_>>()[..] {
        [training] => Seat::Training { rank: Rank(training[1..].parse().expect("a rank")) },
        [pool, replica, rank] => {
            let rank = Rank(rank.parse().expect("a rank"));
            Seat::Inference { pool: pool.into(), replica: replica.into(), rank }
        }
        _ => panic!("{text}"),
    }
}

fn member(text: &str, incarnation: u128) -> Member {
    Member {
        seat: seat(text),
        pod_uid: format!("pod-{incarnation}"),
        incarnation: Incarnation(incarnation),
        key: Sha256([u8::try_from(incarnation).expect("small"); 32]),
        round_addresses: vec![format!("10.0.0.{incarnation}:1")],
        byte_addresses: vec![format!("10.0.0.{incarnation}:2")],
    }
}

fn floor(run: u64) -> Option<VersionFloor> {
    Some(VersionFloor { run, step: 2 })
}

fn membership(epoch: u64, seats: &[(&str, u128)]) -> Result<Membership, MembershipError> {
    let members = seats.iter().map(|(text, incarnation)| member(text, *incarnation)).collect();
    Membership::new("uid", Epoch(epoch), floor(3), vec!["b".into(), "a".into()], members)
}

#[test]
fn members_stand_in_canonical_order_and_the_first_leads() {
    let seats =
        [("a/r/0", 5), ("b/r10/0", 3), ("t1", 2), ("b/r9/1", 4), ("b/r9/0", 4), ("t0", 1), ("b/r10/1", 3)];
    let membership = membership(1, &seats).expect("whole");
    let names: Vec<_> = membership.members().iter().map(|member| member.seat.to_string()).collect();
    let want = "training/0 training/1 inference/b/r10/0 inference/b/r10/1 inference/b/r9/0 inference/b/r9/1 inference/a/r/0";
    assert_eq!(names.join(" "), want, "pools in the resource's order, replicas bytewise");
    assert_eq!(membership.leader(), MemberId(0));
    let replicas: Vec<_> =
        membership.replicas().into_iter().map(|r| (r.pool, r.name, r.ranks.len())).collect();
    assert_eq!(replicas, [(0, "r10".into(), 2), (0, "r9".into(), 2), (1, "r".into(), 1)]);
}

#[test]
fn a_membership_reads_back_as_it_was_and_lies_are_refused() {
    let membership = membership(7, &[("t0", 1), ("b/r/0", 2), ("b/r/1", 2)]).expect("whole");
    let json = serde_json::to_string(&membership).expect("text");
    assert_eq!(serde_json::from_str::<Membership>(&json).expect("the same"), membership);
    for (old, new) in [
        ("\"rank\":1", "\"rank\":2"),
        ("\"leader\":0", "\"leader\":1"),
        ("\"pools\":[\"b\"", "\"pools\":[\"c\""),
    ] {
        assert!(
            json.contains(old) && serde_json::from_str::<Membership>(&json.replace(old, new)).is_err(),
            "{new}"
        );
    }
}

#[test]
fn the_digest_covers_members_but_neither_epoch_nor_floor() {
    let seats = [("t0", 1), ("b/r/0", 2)];
    let digest = membership(1, &seats).expect("whole").digest();
    assert_eq!(membership(2, &seats).expect("whole").digest(), digest);
    assert_eq!(digest.to_string(), include_str!("../../testdata/round/membership_digest.txt").trim());
    assert_ne!(membership(1, &[("t0", 1), ("b/r/0", 3)]).expect("whole").digest(), digest);
    assert_ne!(membership(1, &[("t0", 1), ("a/r/0", 2)]).expect("whole").digest(), digest);
    let mut members: Vec<_> = membership(1, &seats).expect("whole").members().to_vec();
    members[1].byte_addresses.push("10.0.0.9:2".into());
    let moved = Membership::new("uid", Epoch(1), floor(3), vec!["b".into()], members).expect("whole");
    assert_ne!(moved.digest(), digest);
}

#[test]
fn what_is_no_membership_is_refused_by_name() {
    let refused = |seats: &[(&str, u128)]| membership(1, seats).expect_err("not a membership");
    assert_eq!(refused(&[("t0", 1), ("t2", 2)]).code(), Code::RankGap);
    assert_eq!(refused(&[("t1", 1)]).code(), Code::RankGap);
    assert_eq!(refused(&[("t0", 1), ("t0", 2)]).code(), Code::DuplicateRank);
    assert_eq!(refused(&[("b/r/1", 1)]).code(), Code::RankGap);
    let sizes = refused(&[("b/r/0", 1), ("b/s/0", 2), ("b/s/1", 2)]);
    assert_eq!(sizes.to_string(), "replica `s` of pool `b` has 2 ranks, its pool has 1");
    assert_eq!(refused(&[("c/r/0", 1)]).to_string(), "the pool of inference/c/r/0 is not one of the refit");
    assert!(matches!(refused(&[]), MembershipError::Size { members: 0 }));
    let mut two = vec![member("t0", 1), member("t1", 1)];
    two[1].key = Sha256([9; 32]);
    let error = Membership::new("uid", Epoch(1), None, Vec::new(), two).expect_err("one agent, two keys");
    assert_eq!(error.code(), Code::Unauthenticated);
}

#[test]
fn i4_one_epoch_names_one_membership_and_only_its_own_incarnation_takes_it() {
    let seats = [seat("b/r/0"), seat("b/r/1")];
    let members = |second: u128| [("t0", second), ("b/r/0", 2), ("b/r/1", 2)];
    let offered = |epoch, second| membership(epoch, &members(second)).expect("whole");
    let take =
        |newest: Option<&Membership>, offered: &Membership| accept(Incarnation(2), &seats, newest, offered);
    let current = offered(5, 1);
    assert_eq!(take(None, &current), Ok(Acceptance::New));
    assert_eq!(take(Some(&current), &current), Ok(Acceptance::Again));
    assert_eq!(take(Some(&current), &offered(6, 1)), Ok(Acceptance::New));
    assert!(matches!(take(Some(&current), &offered(4, 1)), Err(ConfigureError::OlderEpoch { .. })));
    assert!(matches!(take(Some(&current), &offered(5, 9)), Err(ConfigureError::OtherDigest { .. })));
    let restarted = accept(Incarnation(3), &seats, None, &current);
    assert!(matches!(restarted, Err(ConfigureError::OtherIncarnation { .. })), "{restarted:?}");
    let absent = accept(Incarnation(2), &[seat("b/s/0")], None, &current);
    assert!(matches!(absent, Err(ConfigureError::NotNamed { .. })), "{absent:?}");
}

fn joining(incarnation: u128, pod: &str, seats: &[&str]) -> Joining {
    let Member { key, round_addresses, byte_addresses, .. } = member("t0", incarnation);
    Joining {
        incarnation: Incarnation(incarnation),
        pod_uid: format!("uid of {pod}"),
        pod: pod.into(),
        created_s: 0,
        key,
        seats: seats.iter().map(|text| seat(text)).collect(),
        round_addresses,
        byte_addresses,
        epoch_seen: Epoch(0),
        version_seen: None,
    }
}

fn basis(generation: u64) -> Basis {
    Basis { generation, resolved: Sha256([1; 32]) }
}

fn spec(generation: u64, training_ranks: u32) -> Spec {
    let pool = PoolSpec { name: "b".into(), ranks_per_replica: 2, min_replicas: 1 };
    Spec { basis: basis(generation), training_ranks, pools: vec![pool] }
}

/// Later than everything that settles.
const SETTLED_MS: u64 = 60_000;

/// What is due when joins have settled, enacted.
fn next(roster: &mut Roster, open: bool) -> Option<(u64, Option<Cause>, usize)> {
    let next = roster.next(SETTLED_MS, open).expect("bounded")?;
    roster.enact(next.membership.clone());
    Some((next.membership.epoch().0, next.cause, next.membership.members().len()))
}

fn formed() -> Roster {
    let mut roster = Roster::new("uid", spec(1, 1), None);
    roster.join(0, joining(1, "p1", &["t0"])).expect("fits");
    roster.join(0, joining(2, "p2", &["b/r/0", "b/r/1"])).expect("fits");
    assert_eq!(next(&mut roster, false), Some((1, Some(Cause::Created), 3)));
    roster
}

#[test]
fn a_membership_needs_all_training_ranks_and_whole_replicas() {
    let mut roster = Roster::new("uid", spec(1, 2), None);
    roster.join(0, joining(1, "p1", &["t0"])).expect("fits");
    roster.join(0, joining(2, "p2", &["b/r/0"])).expect("fits");
    let missing = vec![seat("t1"), seat("b/r/1")];
    assert_eq!(roster.standing(), Standing::Forming { missing });
    assert_eq!(next(&mut roster, false), None);
    roster.join(5, joining(3, "p3", &["t1"])).expect("fits");
    roster.join(7, joining(4, "p4", &["b/r/1"])).expect("fits");
    assert_eq!(roster.standing(), Standing::Complete);
    assert_eq!(roster.next(6 + JOIN_SETTLE_MS, false), Ok(None), "joins have not settled");
    assert_eq!(next(&mut roster, false), Some((1, Some(Cause::Created), 4)));
    assert_eq!(next(&mut roster, false), None, "nothing changes");
}

#[test]
fn joins_wait_for_a_round_boundary_but_a_lost_training_rank_does_not() {
    let mut roster = formed();
    roster.join(9, joining(3, "p3", &["b/s/0", "b/s/1"])).expect("fits");
    assert_eq!(next(&mut roster, true), None, "a round is open");
    assert_eq!(next(&mut roster, false), Some((2, Some(Cause::ReplicaJoined), 5)));
    roster.join(10, joining(4, "p3", &["b/s/0", "b/s/1"])).expect("a new process of the same pod");
    assert_eq!(next(&mut roster, false), Some((3, Some(Cause::MemberReplaced), 5)));
    roster.depart(Incarnation(4));
    assert_eq!(next(&mut roster, false), None, "a lost inference replica leaves inside the epoch");
    roster.depart(Incarnation(1));
    assert_eq!(next(&mut roster, true), None, "nobody trains");
    roster.join(11, joining(5, "p5", &["t0"])).expect("fits");
    assert_eq!(next(&mut roster, true), Some((4, Some(Cause::TrainingRankLost), 3)));
    roster.respec(spec(2, 1));
    assert_eq!(next(&mut roster, false), Some((5, Some(Cause::SpecChanged), 3)));
    roster.respec(spec(2, 0));
    assert_eq!(next(&mut roster, false), Some((6, Some(Cause::TrainingChanged), 2)));
}

#[test]
fn an_epoch_is_above_all_that_anybody_has_heard_of() {
    let mut roster = formed();
    roster.hear(Epoch(40), floor(6)).expect("plausible");
    roster.hear(Epoch(39), floor(5)).expect("plausible");
    roster.join(9, joining(3, "p3", &["b/s/0", "b/s/1"])).expect("fits");
    assert_eq!(next(&mut roster, false), Some((41, Some(Cause::ReplicaJoined), 5)));
    assert_eq!(roster.current().map(|membership| membership.floor()), Some(floor(6)));
}

#[test]
fn after_a_restart_of_the_coordinator_the_recorded_membership_goes_on() {
    let before = formed();
    let current = before.current().expect("formed").clone();
    let recorded = Recorded::of(&current, basis(1));
    let rejoined = |second: Joining| {
        let mut roster = Roster::new("uid", spec(1, 1), Some(recorded));
        roster.join(0, joining(1, "p1", &["t0"])).expect("fits");
        roster.join(0, second).expect("fits");
        next(&mut roster, false)
    };
    assert_eq!(rejoined(joining(2, "p2", &["b/r/0", "b/r/1"])), Some((1, None, 3)));
    assert_eq!(rejoined(joining(7, "p2", &["b/r/0", "b/r/1"])), Some((2, Some(Cause::MemberReplaced), 3)));
}

#[test]
fn what_a_membership_is_made_of_makes_a_new_epoch_even_while_nobody_coordinates() {
    let recorded = Recorded::of(formed().current().expect("formed"), basis(1));
    for (now, want) in [
        (basis(1), (1, None, 3)),
        (basis(2), (2, Some(Cause::SpecChanged), 3)),
        (Basis { resolved: Sha256([2; 32]), ..basis(1) }, (2, Some(Cause::SpecChanged), 3)),
    ] {
        let mut roster = Roster::new("uid", Spec { basis: now, ..spec(1, 1) }, Some(recorded));
        roster.join(0, joining(1, "p1", &["t0"])).expect("fits");
        roster.join(0, joining(2, "p2", &["b/r/0", "b/r/1"])).expect("fits");
        assert_eq!(next(&mut roster, false), Some(want), "{now:?}");
    }
}

#[test]
fn after_a_restart_of_the_coordinator_members_have_time_to_come_back() {
    let mut before = formed();
    before.join(9, joining(3, "p3", &["b/s/0", "b/s/1"])).expect("fits");
    assert_eq!(next(&mut before, false), Some((2, Some(Cause::ReplicaJoined), 5)));
    let recorded = Recorded::of(before.current().expect("formed"), basis(1));
    let rejoined = || {
        let mut roster = Roster::new("uid", spec(1, 1), Some(recorded));
        roster.join(0, joining(1, "p1", &["t0"])).expect("fits");
        roster.join(0, joining(2, "p2", &["b/r/0", "b/r/1"])).expect("fits");
        let settled = roster.next_deadline_ms(0);
        assert_eq!(roster.next(settled, false), Ok(None), "the third may still come");
        (roster.next_deadline_ms(settled), roster)
    };
    let (_, mut roster) = rejoined();
    roster.join(4_000, joining(3, "p3", &["b/s/0", "b/s/1"])).expect("fits");
    let due = roster.next(roster.next_deadline_ms(4_000), false).expect("bounded").expect("due");
    assert_eq!((due.membership.epoch(), due.cause), (Epoch(2), None));
    let (deadline, roster) = rejoined();
    let due = roster.next(deadline, false).expect("bounded").expect("due");
    assert_eq!((due.membership.epoch(), due.cause), (Epoch(3), Some(Cause::MemberReplaced)));
}

#[test]
fn of_two_pods_the_older_holds_a_rank_whoever_comes_first() {
    let old = || joining(8, "old", &["b/r/0", "b/r/1"]);
    let young = || Joining { created_s: 5, ..joining(9, "young", &["b/r/1", "b/r/0"]) };
    let want = "pod young claims inference/b/r/1, which the older pod old holds";
    let mut roster = Roster::new("uid", spec(1, 1), None);
    assert_eq!(roster.join(0, old()), Ok(vec![]));
    let refused = roster.join(0, young()).expect_err("held");
    assert_eq!((refused.code(), refused.to_string()), (Code::DuplicateRank, want.replace("/1", "/0")));
    let mut roster = Roster::new("uid", spec(1, 1), None);
    assert_eq!(roster.join(0, young()), Ok(vec![]));
    let replaced = roster.join(0, old()).expect("it is older");
    let [(Incarnation(9), why)] = &replaced[..] else { panic!("{replaced:?}") };
    assert_eq!((why.code(), why.to_string().as_str()), (Code::DuplicateRank, want));
    assert_eq!(roster.agents().keys().collect::<Vec<_>>(), [&Incarnation(8)]);
}

#[test]
fn a_pod_has_one_agent_its_newest() {
    let mut roster = formed();
    let again = roster.join(1, joining(2, "p2", &["b/r/0", "b/r/1"]));
    assert_eq!(again, Ok(vec![]), "the same process dials again");
    for seats in [&["b/r/0", "b/r/1"], &["b/s/0", "b/s/1"]] {
        let replaced = roster.join(1, joining(9, "p2", seats)).expect("its own pod's");
        let [(gone, RosterError::Replaced { pod })] = &replaced[..] else { panic!("{replaced:?}") };
        assert_eq!((gone, pod.as_str(), roster.agents().len()), (&Incarnation(2), "p2", 2));
        roster.join(1, joining(2, "p2", &["b/r/0", "b/r/1"])).expect("its own pod's");
    }
}

#[test]
fn what_would_harm_others_is_refused_and_changes_nothing() {
    type Change = fn(&mut Joining);
    let rows: &[(&str, Change, &str, &str)] = &[
        ("a rank beyond the world", |j| j.seats = vec![seat("t1")], "Unsupported", "training/1 is outside"),
        ("no such pool", |j| j.seats = vec![seat("x/r/0")], "Unsupported", "inference/x/r/0 is outside"),
        ("a rank twice", |j| j.seats.push(seat("b/s/0")), "Unsupported", "inference/b/s/0 is claimed twice"),
        ("no address", |j| j.round_addresses.clear(), "Unsupported", "has 0 addresses"),
        ("addresses", |j| j.byte_addresses = vec!["a:1".into(); 17], "Unsupported", "has 17 addresses"),
        ("an address", |j| j.byte_addresses = vec!["a".repeat(321)], "Unsupported", "address of 321 bytes"),
        ("a nameless replica", |j| j.seats = vec![seat("b//0")], "Unsupported", "replica of 0 bytes"),
        ("another's process", |j| j.incarnation = Incarnation(1), "Unauthenticated", "is an agent of pod p1"),
        ("an epoch", |j| j.epoch_seen = Epoch(u64::MAX), "StaleEpoch", "epoch 18446744073709551615 cannot"),
        ("a run", |j| j.version_seen = floor(u64::MAX), "StaleEpoch", "run 18446744073709551615 cannot"),
    ];
    let mut roster = formed();
    for (what, change, code, text) in rows {
        let mut liar = joining(9, "p9", &["b/s/0", "b/s/1"]);
        change(&mut liar);
        let error = roster.join(1, liar).expect_err(what);
        assert_eq!(error.code().name(), *code, "{what}");
        assert!(error.to_string().contains(text), "{what}: {error}");
    }
    assert!(roster.hear(Epoch(u64::MAX), None).is_err() && roster.hear(Epoch(1), floor(u64::MAX)).is_err());
    assert_eq!(next(&mut roster, false), None);
    roster.join(2, joining(9, "p9", &["b/s/0", "b/s/1"])).expect("the truth");
    assert_eq!(next(&mut roster, false), Some((2, Some(Cause::ReplicaJoined), 5)));
}
