//! The report of a soak.

use std::collections::BTreeMap;

use base::{Bytes, Histogram};
use model::config::Class;
use serde::Serialize;

use super::churn::ChurnStats;
use super::memory::{ResourceGrowth, ResourceSeries};
use super::{SoakLog, SoakObservations};
use crate::live::observer::TraceChecker;
use crate::live::report::Latency;

/// A workload that ran for a long time with churn.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SoakReport {
    /// The workload.
    pub workload: String,
    /// `literal` or `scaled`.
    pub rates: String,
    /// The execution policy.
    pub policy: String,
    /// Length in seconds.
    pub seconds: f64,
    /// How often its trace was repeated; `None` if it has none.
    pub trace_repetitions: Option<f64>,
    /// Share of the device, in percent, that real time alone should use.
    pub rt_share_pct: f64,
    /// Real-time replies.
    pub rt_answers: u64,
    /// Best-effort replies to the workload's clients and to churn.
    pub be_answers: u64,
    /// Real-time requests sent late.
    pub rt_late: u64,
    /// Real-time periods dropped.
    pub rt_dropped: u64,
    /// Number of preemptions.
    pub preemptions: u64,
    /// Temporary copies loaded.
    pub loads: u64,
    /// Temporary copies unloaded.
    pub unloads: u64,
    /// Models in use that were replaced by another copy.
    pub reloads: u64,
    /// Requests cancelled.
    pub cancellations: u64,
    /// Expected rejections by name: of cancelled requests, and of requests after an unload.
    pub expected_errors: BTreeMap<String, u64>,
    /// All other failures, by kind.
    pub unexpected_errors: BTreeMap<String, u64>,
    /// Message of the first of them.
    pub first_unexpected: Option<String>,
    /// Replies whose bits differ from those of an undisturbed run.
    pub wrong_outputs: u64,
    /// Events and actions that were checked.
    pub checked_entries: u64,
    /// Violations in them.
    pub violations: Vec<String>,
    /// Real-time latency.
    pub rt: Latency,
    /// Of requests sent in the first tenth.
    pub rt_first_tenth: Latency,
    /// Of requests sent in the last tenth.
    pub rt_last_tenth: Latency,
    /// Resources, sampled between loads, and whether they grew.
    pub memory: Vec<ResourceGrowth>,
    #[serde(skip)]
    tenths: [Histogram; 3],
}

impl SoakReport {
    pub(super) fn new(series: &ResourceSeries) -> SoakReport {
        SoakReport { memory: series.growth(), ..SoakReport::default() }
    }

    /// Adds a client's log.
    pub(super) fn add_client(&mut self, class: Class, log: &SoakLog) {
        if class == Class::RealTime {
            self.rt_answers += log.all.count();
            self.rt_late += log.late;
            self.rt_dropped += log.dropped;
            let parts = [&log.all, &log.first, &log.last];
            self.tenths.iter_mut().zip(parts).for_each(|(all, part)| all.merge(part));
            [self.rt, self.rt_first_tenth, self.rt_last_tenth] =
                [0, 1, 2].map(|at| Latency::counted(&self.tenths[at]));
        } else {
            self.be_answers += log.all.count();
        }
        self.wrong_outputs += log.wrong;
        for (kind, count) in &log.errors {
            *self.unexpected_errors.entry((*kind).to_string()).or_default() += count;
        }
        if self.first_unexpected.is_none() {
            self.first_unexpected.clone_from(&log.first_error);
        }
    }

    /// Adds what churn did.
    pub(super) fn add_churn(&mut self, done: ChurnStats) {
        (self.loads, self.unloads, self.reloads) = (done.loads, done.unloads, done.reloads);
        self.cancellations = done.cancellations;
        self.be_answers += done.replies;
        self.wrong_outputs += done.wrong;
        for (kind, count) in done.expected {
            *self.expected_errors.entry(kind.to_string()).or_default() += count;
        }
        for (kind, count) in done.unexpected {
            *self.unexpected_errors.entry(kind.to_string()).or_default() += count;
        }
        self.first_unexpected = self.first_unexpected.take().or(done.first_unexpected);
    }

    /// Adds the checker's result.
    pub(super) fn add_check(&mut self, check: &mut TraceChecker) {
        self.checked_entries = check.entries();
        self.violations = check.finish();
        if !check.is_whole() {
            self.violations.push("the trace came faster than it could be checked".to_string());
        }
    }

    /// Why the soak failed; empty if it did not.
    pub fn failures(&self) -> Vec<String> {
        let mut failures = Vec::new();
        if !self.unexpected_errors.is_empty() {
            let first = self.first_unexpected.as_deref().unwrap_or("no reason was given");
            failures.push(format!("errors {:?}, the first: {first}", self.unexpected_errors));
        }
        if self.wrong_outputs > 0 {
            failures
                .push(format!("{} outputs differ from an undisturbed run's", self.wrong_outputs));
        }
        if !self.violations.is_empty() {
            failures.push(format!("the checkers found {:?}", self.violations));
        }
        for growth in &self.memory {
            let ResourceGrowth { what, warm_tenth, last_tenth, allowed, .. } = growth;
            match growth.grown {
                Some(false) => {}
                Some(true) => failures.push(format!(
                    "{what} grew from {warm_tenth} after the warm-up to {last_tenth} at the end, \
                     {allowed} are allowed"
                )),
                None => failures.push(format!("{what} were read too rarely to detect growth")),
            }
        }
        failures
    }
}

/// A progress line.
pub(super) fn line(elapsed: f64, observations: &SoakObservations, done: &ChurnStats) -> String {
    let held = |what: &str| {
        observations.series.latest(what).map_or("-".to_string(), |bytes| Bytes(bytes).to_string())
    };
    let [real_time, best_effort] = observations.check.arrivals();
    format!(
        "{elapsed:.0} s: {real_time} real-time and {best_effort} best-effort requests, {} loads, \
         {} reloads, {} cancelled, \
         {} wrong, {} errors; device {}, process {}",
        done.loads,
        done.reloads,
        done.cancellations,
        done.wrong,
        done.unexpected.values().sum::<u64>(),
        held("device bytes"),
        held("process bytes"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_soak_fails_for_each_reason() {
        let growth = |grown| ResourceGrowth {
            what: "device bytes",
            samples: 9,
            first_tenth: 1,
            warm_tenth: 1,
            last_tenth: 9,
            max: 9,
            allowed: 2,
            grown,
        };
        let good = SoakReport { memory: vec![growth(Some(false))], ..SoakReport::default() };
        assert!(good.failures().is_empty());
        let fails = |report: SoakReport, word: &str| {
            let failures = report.failures();
            assert!(failures.len() == 1 && failures[0].contains(word), "{failures:?}");
        };
        fails(SoakReport { memory: vec![growth(Some(true))], ..good.clone() }, "grew");
        fails(SoakReport { memory: vec![growth(None)], ..good.clone() }, "rarely");
        fails(SoakReport { wrong_outputs: 1, ..good.clone() }, "differ");
        fails(SoakReport { violations: vec!["x".to_string()], ..good.clone() }, "checkers");
        let errors = BTreeMap::from([("unloaded".to_string(), 2)]);
        fails(SoakReport { unexpected_errors: errors.clone(), ..good.clone() }, "unloaded");
        assert!(SoakReport { expected_errors: errors, ..good }.failures().is_empty());
    }
}
