//! What a head does with the reports of all ranks of its replica in a new epoch (protocol page §8). It needs no
//! leader and no trainer.
//!
//! Invariants:
//! - C1 (I9): nothing is decided before all ranks have reported under this membership.
//! - C2: a rank that is Dirty or Cold, or of another layout, is never finished from staging.
//! - C3: nothing resumes on less than the largest version that any rank has live.

use super::message::{EngineState, Report, Version};

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Verdict {
    /// R1, R2: all hold the same version; those that are paused resume.
    Same(Version),
    /// R3: all are whole and hold the top version, live or staged: finish it.
    Finish(Version),
    /// R4: stays as it is until a full refit.
    Held,
}

/// Judges the reports of all ranks of one replica.
pub(super) fn judge<'a>(reports: impl Iterator<Item = &'a Report> + Clone) -> Verdict {
    let live = |report: &Report| match report.engine {
        Some(engine) if !matches!(engine.state, EngineState::Dirty | EngineState::Cold) => engine.live,
        _ => None, // C2
    };
    let mut top: Option<Version> = None;
    for report in reports.clone() {
        match live(report) {
            None => return Verdict::Held,
            Some(version) if top.is_none_or(|top| top.name() < version.name()) => top = Some(version),
            Some(_) => {}
        }
    }
    let Some(top) = top else { return Verdict::Held };
    let staged = |report: &Report| {
        report.staging.is_some_and(|tag| tag.sealed && tag.authorised && tag.version == top)
    };
    if reports.clone().all(|report| live(report) == Some(top)) {
        Verdict::Same(top)
    } else if reports.clone().all(|report| live(report) == Some(top) || staged(report)) {
        Verdict::Finish(top) // C3
    } else {
        Verdict::Held
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{ContentSum, Epoch, Incarnation};
    use crate::round::message::{EngineRecord, RoundKey, StagingTag};

    fn version(step: i64) -> Version {
        Version { run: 0, step, origin: Epoch(1), sum: ContentSum([1; 16]) }
    }

    /// `serving 1`, `quiet 1 staged 2`, `dirty - staged 2`, `cold -`, `quiet 1 unauthorised 2`, `gone`.
    fn report(text: &str) -> Report {
        let words: Vec<_> = text.split(' ').collect();
        let state = match words[0] {
            "gone" => return Report::default(),
            "serving" => EngineState::Serving,
            "quiet" => EngineState::Quiet,
            "applied" => EngineState::Applied,
            "dirty" => EngineState::Dirty,
            "cold" => EngineState::Cold,
            other => panic!("{other}"),
        };
        let live = words[1].parse().ok().map(version);
        let engine = Some(EngineRecord { instance: Incarnation(1), live, state, round: RoundKey::default() });
        let staging = words.get(2).map(|kind| {
            let version = version(words[3].parse().expect("step"));
            StagingTag { version, sealed: *kind != "unsealed", authorised: *kind == "staged" }
        });
        Report { engine, staging, publication: None }
    }

    #[test]
    fn reports_are_judged_as_the_table_says() {
        for line in include_str!("../../testdata/round/recovery_table.txt").lines() {
            let Some((reports, want)) = line.split_once(" => ") else {
                assert!(line.is_empty() || line.starts_with('#'), "{line}");
                continue;
            };
            let reports: Vec<_> = reports.split(", ").map(report).collect();
            let got = match judge(reports.iter()) {
                Verdict::Same(version) => format!("same {}", version.step),
                Verdict::Finish(version) => format!("finish {}", version.step),
                Verdict::Held => "held".to_owned(),
            };
            assert_eq!(got, want, "{line}");
            let mirrored = judge(reports.iter().rev().collect::<Vec<_>>().into_iter());
            assert_eq!(mirrored, judge(reports.iter()), "order of ranks matters: {line}");
        }
    }
}
