//! Whole refits through real agents: two processes, real sockets, one tensor.

use crate::support::client::{Client, Engine, Trainer};
use crate::support::coordinator::Coordinator;
use crate::support::{Agent, tiny_refit, wait_for};
use weightrefit_core::round::message::ContentSum;
use weightrefit_proto::report::RoundOutcome;
use weightrefit_proto::socket::{AgentFrame, ClientFrame, ReleaseKind, Role};

#[test]
fn published_weights_arrive_verified_and_are_committed() {
    let coordinator = Coordinator::start(tiny_refit());
    let trainer_agent = Agent::start(&coordinator, "trainer", &["training/0"]);
    let claims = ["inference/default/a/0", "inference/default/a/1"];
    let mut engine_agent = Agent::start(&coordinator, "engine", &claims);
    let trainer = Trainer::start(&trainer_agent.socket, 0, &[8, 4]);
    let mut engines = [0, 1].map(|rank| Engine::start(&engine_agent.socket, "a", rank, &[4, 4]));
    coordinator.configure(1, &["trainer", "engine"]);
    let mut trainer = trainer.registered();
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
