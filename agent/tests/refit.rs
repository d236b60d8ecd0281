//! Whole refits through real agents: two processes, real sockets, one tensor.

mod support;

use serde_json::json;
use support::client::{Client, Engine, Trainer};
use support::coordinator::Coordinator;
use support::{Agent, wait_for};
use weightrefit_core::dtype::DType;
use weightrefit_core::round::message::{ContentSum, Timeouts};
use weightrefit_proto::refit::{OnReplicaFailure, Policy, Pool, Refit, Tensor};
use weightrefit_proto::report::RoundOutcome;
use weightrefit_proto::socket::{AgentFrame, ClientFrame, ReleaseKind, Role};

/// One f32 tensor of 8 × 4: whole on the one training rank, cut by rows on two inference ranks.
fn refit() -> Refit {
    let layout = |world: u64, cut: serde_json::Value| {
        json!({
            "layout": "v1", "sizes": {"tp": world}, "world": world, "grids": {"all": ["tp"]}, "axes": {"none": []},
            "stages": {"axis": "none", "layers": [[0, 1]]},
            "rules": [{"hf": "w", "to": "w", "cut": cut}],
        })
    };
    let by_rows = json!([{"dim": 0, "by": "tp"}]);
    let timeouts = Timeouts {
        publish_ms: 10_000,
        prepare_ms: 10_000,
        pause_ms: 10_000,
        transfer_ms: 10_000,
        verify_ms: 10_000,
        commit_ms: 10_000,
        resume_ms: 10_000,
        total_ms: 60_000,
    };
    Refit {
        tensors: vec![Tensor { name: "w".into(), shape: vec![8, 4], dtype: DType::F32 }],
        training: layout(1, by_rows.clone()),
        pools: vec![Pool { name: "default".into(), layout: layout(2, by_rows), min_replicas: 1 }],
        policy: Policy {
            timeouts,
            on_replica_failure: OnReplicaFailure::FenceReplica,
            encrypt_bytes: true,
            verify: true,
        },
    }
}

#[test]
fn published_weights_arrive_verified_and_are_committed() {
    let coordinator = Coordinator::start(refit());
    let trainer_agent = Agent::start(&coordinator, "trainer", &["training/0"]);
    let claims = ["inference/default/a/0", "inference/default/a/1"];
    let mut engine_agent = Agent::start(&coordinator, "engine", &claims);
    let mut trainer = Trainer::start(&trainer_agent.socket, 0, &[8, 4]);
    let mut engines = [0, 1].map(|rank| Engine::start(&engine_agent.socket, "a", rank, &[4, 4]));
    coordinator.configure(1, &["trainer", "engine"]);
    assert_eq!(trainer.client.expect("registration"), AgentFrame::Registered {});
    let mut driver = Client::hello(&trainer_agent.socket, 1, Role::Driver {}).welcome();
    assert_eq!(trainer_agent.get("/readyz").0, 200, "ranks that do not serve are ready");
    for step in 1..=3 {
        let values: Vec<f32> = (0..32_u16).map(|n| f32::from(n) + 100.0 * step as f32).collect();
        driver.send(&ClientFrame::Refit { request: step as u64, step, timeout_ms: 30_000 }, &[]);
        trainer.publish(step, &values);
        std::thread::scope(|scope| {
            for engine in &mut engines {
                scope.spawn(|| engine.refit());
            }
        });
        let live: Vec<f32> = engines.iter().flat_map(|engine| engine.live.clone()).collect();
        assert_eq!(live, values);
        let sums = engines.each_ref().map(|engine| engine.record.live.expect("is live").sum);
        assert!(sums[0] == sums[1] && sums[0] != ContentSum::default(), "verified by content");
        let released = AgentFrame::Released { step, outcome: ReleaseKind::Read };
        assert_eq!(trainer.client.expect("release"), released);
        let AgentFrame::Report { request, report } = driver.expect("report") else { panic!("no report") };
        assert_eq!(
            (request, report.outcome, report.version.step),
            (step as u64, RoundOutcome::Committed, step)
        );
        assert_eq!((report.bytes.sent, report.bytes.received, report.bytes.skipped), (128, 128, 0));
        assert_eq!(coordinator.round(step), *report);
    }
    assert_eq!(engine_agent.get("/readyz").0, 200);
    assert_eq!(trainer_agent.metric(r#"weightrefit_agent_rounds_total{outcome="Committed",reason=""}"#), 3.0);
    assert_eq!(engine_agent.metric(r#"weightrefit_agent_received_bytes_total{transport="tcp"}"#), 384.0);
    assert_eq!(engine_agent.metric(r#"weightrefit_agent_minimum_bytes_total{transport="tcp"}"#), 384.0);
    drop(engines);
    wait_for("unreadiness", || (engine_agent.get("/readyz").0 == 503).then_some(()));
    engine_agent.signal(rustix::process::Signal::TERM);
    assert!(engine_agent.wait().success(), "a drained agent ends well");
}
