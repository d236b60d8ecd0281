//! Figures of every refit for `/metrics`, as they are when somebody asks: what is gone leaves no series behind.
//!
//! Labels are a refit's names and words of closed sets, so series grow with refits only. The process that leads has
//! them; the others have none.

use crate::api::status::{TrainingState, WeightRefitStatus};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntGaugeVec, Opts};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Labels that name the refit.
const REFIT: [&str; 2] = ["refit_namespace", "refit"];

/// What is known of each refit; clones know the same.
#[derive(Debug, Clone, Default)]
pub struct Figures(Arc<Mutex<BTreeMap<(String, String), Known>>>);

#[derive(Debug)]
struct Known {
    /// UID of the object: a later one of the same name is another refit.
    uid: String,
    conditions: Vec<[String; 3]>,
    training: Option<(TrainingState, [i32; 2])>,
    replicas: Option<[i32; 5]>,
    steps: Vec<(&'static str, i64)>,
}

impl Figures {
    /// What the refit's status says now, whether or not it is written already.
    pub fn tell(&self, (namespace, name): (&str, &str), uid: &str, status: &WeightRefitStatus) {
        let (training, inference) = (status.training.as_ref(), status.inference.as_ref());
        let condition = |condition: &crate::api::condition::Condition| {
            [condition.kind.clone(), format!("{:?}", condition.status), condition.reason.clone()]
        };
        let steps = [
            ("published", training.and_then(|training| training.published)),
            ("committed", inference.and_then(|inference| inference.committed)),
            ("oldest_serving", inference.and_then(|inference| inference.oldest_serving)),
        ];
        let known = Known {
            uid: uid.to_owned(),
            conditions: status.conditions.iter().map(condition).collect(),
            training: training.map(|training| (training.state, [training.ranks, training.connected_ranks])),
            replicas: inference.map(|inference| {
                [
                    inference.desired_replicas,
                    inference.replicas,
                    inference.current_replicas,
                    inference.serving_replicas,
                    inference.fenced_replicas,
                ]
            }),
            steps: steps.into_iter().filter_map(|(of, version)| Some((of, version?.step))).collect(),
        };
        self.all().insert((namespace.to_owned(), name.to_owned()), known);
    }

    /// The refit is gone.
    pub fn forget(&self, (namespace, name): (&str, &str), uid: &str) {
        let key = (namespace.to_owned(), name.to_owned());
        let mut all = self.all();
        if all.get(&key).is_some_and(|known| known.uid == uid) {
            all.remove(&key);
        }
    }

    /// For the registry of whoever serves metrics.
    #[must_use]
    pub fn collector(&self) -> Box<dyn Collector> {
        Box::new(Series { figures: self.clone(), described: Families::empty() })
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<(String, String), Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes the series anew for each scrape.
struct Series {
    figures: Figures,
    described: Families,
}

impl Collector for Series {
    fn desc(&self) -> Vec<&Desc> {
        self.described.each().into_iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let families = Families::empty();
        for ((namespace, name), known) in self.figures.all().iter() {
            families.fill([namespace, name], known);
        }
        families.each().into_iter().flat_map(Collector::collect).collect()
    }
}

struct Families {
    condition: IntGaugeVec,
    training_state: IntGaugeVec,
    training_ranks: IntGaugeVec,
    replicas: IntGaugeVec,
    step: IntGaugeVec,
}

impl Families {
    fn empty() -> Self {
        let family = |name: &str, help: &str, labels: &[&str]| {
            let opts = Opts::new(format!("weightrefit_operator_refit_{name}"), help);
            let labels = [&REFIT, labels].concat();
            IntGaugeVec::new(opts, &labels).expect("name and labels are well formed")
        };
        Self {
            condition: family(
                "condition",
                "Constant 1 for each condition as it stands.",
                &["condition", "status", "reason"],
            ),
            training_state: family("training_state", "Constant 1 for where the trainer stands.", &["state"]),
            training_ranks: family("training_ranks", "Training ranks: known, connected.", &["state"]),
            replicas: family("replicas", "Replicas: desired, known, current, serving, fenced.", &["state"]),
            step: family("step", "Steps: published, committed, oldest that is served.", &["of"]),
        }
    }

    fn each(&self) -> [&dyn Collector; 5] {
        // All fields by name, so that none is forgotten.
        let Self { condition, training_state, training_ranks, replicas, step } = self;
        [condition, training_state, training_ranks, replicas, step]
    }

    fn fill(&self, [namespace, name]: [&str; 2], known: &Known) {
        for [condition, status, reason] in &known.conditions {
            self.condition.with_label_values(&[namespace, name, condition, status, reason]).set(1);
        }
        if let Some((state, ranks)) = known.training {
            self.training_state.with_label_values(&[namespace, name, &format!("{state:?}")]).set(1);
            for (state, count) in ["known", "connected"].into_iter().zip(ranks) {
                self.training_ranks.with_label_values(&[namespace, name, state]).set(count.into());
            }
        }
        let states = ["desired", "known", "current", "serving", "fenced"];
        for (state, count) in states.into_iter().zip(known.replicas.into_iter().flatten()) {
            self.replicas.with_label_values(&[namespace, name, state]).set(count.into());
        }
        for (of, step) in &known.steps {
            self.step.with_label_values(&[namespace, name, *of]).set(*step);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus::{Registry, TextEncoder};

    #[test]
    fn series_follow_the_status_and_leave_with_the_refit() {
        let (figures, registry) = (Figures::default(), Registry::new());
        registry.register(figures.collector()).unwrap();
        let text = || TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        assert_eq!(text(), "");
        let example = include_str!("../../tests/resource/status.json");
        let mut status: WeightRefitStatus = serde_json::from_str(example).unwrap();
        let refit = ("rl", "qwen3-30b");
        figures.tell(refit, "one", &status);
        let names = r#"refit="qwen3-30b",refit_namespace="rl""#;
        let (kind, state) = (status.conditions[0].kind.clone(), status.conditions[0].status);
        let is_told = |text: &str, reason: &str| {
            let labels = format!(
                r#"condition="{kind}",reason="{reason}",refit="qwen3-30b",refit_namespace="rl",status="{state:?}""#
            );
            text.contains(&format!("weightrefit_operator_refit_condition{{{labels}}} 1\n"))
        };
        let first = text();
        for line in [
            format!("weightrefit_operator_refit_replicas{{{names},state=\"fenced\"}} 1\n"),
            format!("weightrefit_operator_refit_step{{of=\"published\",{names}}} 121\n"),
            format!("weightrefit_operator_refit_training_state{{{names},state=\"Running\"}} 1\n"),
        ] {
            assert!(first.contains(&line), "{line} in {first}");
        }
        let before = std::mem::replace(&mut status.conditions[0].reason, "Another".into());
        assert!(is_told(&first, &before), "{first}");
        figures.tell(refit, "two", &status);
        assert!(is_told(&text(), "Another") && !is_told(&text(), &before), "{}", text());
        // The end of an older object of the name comes late.
        figures.forget(refit, "one");
        assert!(is_told(&text(), "Another"));
        figures.forget(refit, "two");
        assert_eq!(text(), "");
    }
}
