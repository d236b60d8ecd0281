//! What a real operator's `/metrics` say after a round, recorded: dashboards and alerts are tested against it.
//!
//! `REWRITE=1 cargo test --test cluster exposition` records anew.

use crate::operator::is_true;
use crate::world::{World, condition};
use serde_json::json;
use std::collections::BTreeSet;

const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/observability/operator.prom");

/// Names of series with the names of their labels; values are of the one run.
fn shapes(text: &str) -> BTreeSet<String> {
    let samples = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let shape = |line: &str| {
        let series = line.rsplit_once(' ').expect("a value").0;
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let mut keys: Vec<&str> =
            labels.split("=\"").filter_map(|part| part.rsplit([',', '}']).next()).collect();
        keys.retain(|key| !key.is_empty() && !key.contains('"'));
        format!("{name} {}", keys.join(" "))
    };
    samples.map(shape).collect()
}

#[test]
fn metrics_of_an_operator_have_the_names_and_labels_that_were_recorded() {
    let mut world = World::consenting("tests");
    world.start_injecting_operator();
    world.apply();
    world.start_pods();
    world.wait_for_status("all are connected", |status| is_true(status, "CommunicatorsReady"));
    world.refit(0);
    world.wait_for_status("the round is told", |status| condition(status, "InSync").0 == "True");
    let odd = json!({"weightrefit.dev/refit": "tiny", "weightrefit.dev/side": "sideways"});
    world.try_create(&world.bare_pod("odd-0", odd), true).expect_err("refused");
    let answer = world.metrics();
    let (_, text) = answer.split_once("\r\n\r\n").expect("a head");
    if std::env::var_os("REWRITE").is_some() {
        return std::fs::write(RECORDED, text).expect("a writable file");
    }
    let recorded = std::fs::read_to_string(RECORDED).expect("a recording");
    assert_eq!(shapes(text), shapes(&recorded), "run `REWRITE=1 cargo test --test cluster exposition`");
    assert!(
        text.contains(r#"weightrefit_operator_webhook_requests_total{outcome="refused",reason="Labels"} 1"#)
    );
}
