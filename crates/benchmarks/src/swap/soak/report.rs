//! Results of a soak's operations, and memory in use between rounds.

use std::collections::BTreeMap;

use api::{ApiError, ErrorKind};
use base::{Bytes, Histogram, Nanos};
use serde::Serialize;

/// How much more memory the driver may use at the end: it frees in pages of its own.
const SYSTEM_SLACK: u64 = 64 << 20;

/// Results of one kind of operation.
#[derive(Debug, Default, Serialize)]
pub(super) struct OperationOutcomes {
    pub(super) asked: u64,
    pub(super) done: u64,
    /// Documented errors that a model is not loaded, by kind.
    pub(super) documented: BTreeMap<String, u64>,
    pub(super) failed: u64,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    pub(super) max_ms: f64,
    #[serde(skip)]
    times: Histogram,
}

/// Results of all operations.
#[derive(Debug, Default)]
pub(super) struct OperationStats {
    pub(super) kinds: BTreeMap<&'static str, OperationOutcomes>,
    pub(super) first_failure: Option<String>,
    pub(super) wrong: u64,
}

/// The expected result of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpectedResult {
    /// It succeeds, or the model is not loaded at the moment, or an unload cancels it.
    Done,
    /// It is refused with exactly this error.
    Refused(ErrorKind),
}

impl OperationStats {
    pub(super) fn record(
        &mut self,
        what: &'static str,
        due: ExpectedResult,
        elapsed: Nanos,
        result: Result<(), ApiError>,
    ) {
        let outcomes = self.kinds.entry(what).or_default();
        outcomes.asked += 1;
        outcomes.times.record(elapsed);
        let failure = match (due, result) {
            (ExpectedResult::Done, Ok(())) => {
                outcomes.done += 1;
                return;
            }
            (ExpectedResult::Done, Err(err))
                if matches!(
                    err.kind,
                    ErrorKind::NotFound | ErrorKind::Unavailable | ErrorKind::Cancelled
                ) =>
            {
                *outcomes.documented.entry(format!("{:?}", err.kind)).or_default() += 1;
                return;
            }
            (ExpectedResult::Refused(kind), Err(err)) if err.kind == kind => {
                *outcomes.documented.entry(format!("{kind:?}")).or_default() += 1;
                return;
            }
            (ExpectedResult::Refused(kind), Ok(())) => {
                format!("{what}: done, though {kind:?} was due")
            }
            (_, Err(err)) => format!("{what}: {:?}: {err}", err.kind),
        };
        outcomes.failed += 1;
        self.first_failure.get_or_insert(failure);
    }

    pub(super) fn merge(&mut self, other: OperationStats) {
        for (what, outcomes) in other.kinds {
            let mine = self.kinds.entry(what).or_default();
            mine.asked += outcomes.asked;
            mine.done += outcomes.done;
            mine.failed += outcomes.failed;
            mine.times.merge(&outcomes.times);
            for (kind, count) in outcomes.documented {
                *mine.documented.entry(kind).or_default() += count;
            }
        }
        self.first_failure = self.first_failure.take().or(other.first_failure);
        self.wrong += other.wrong;
    }

    /// Computes quantiles of the times.
    pub(super) fn time(&mut self) {
        let ms = |nanos: Nanos| (nanos.0 as f64 / 1e4).round() / 100.0;
        for outcomes in self.kinds.values_mut() {
            outcomes.p50_ms = ms(outcomes.times.quantile(0.5));
            outcomes.p99_ms = ms(outcomes.times.quantile(0.99));
            outcomes.max_ms = ms(outcomes.times.max());
        }
    }
}

/// Memory in use while no model is loaded.
#[derive(Debug, Default, Serialize)]
pub(super) struct MemorySample {
    pub(super) when: String,
    /// Weights on the device, as it reports.
    pub(super) weights_bytes: u64,
    /// Memory used by all processes, as the GPU's tools report.
    pub(super) system_bytes: Option<u64>,
    /// Memory of this process.
    pub(super) process_bytes: Option<u64>,
    /// What a GPU's memory is used for, as far as known.
    pub(super) holdings: Option<cuda::MemoryReport>,
}

/// The report of a soak.
#[derive(Debug, Default, Serialize)]
pub(super) struct SoakReport {
    pub(super) device: String,
    pub(super) driver: Option<String>,
    pub(super) date: String,
    pub(super) command: String,
    pub(super) operations: u64,
    pub(super) clients: u64,
    pub(super) seconds: f64,
    /// By kind of operation.
    pub(super) kinds: BTreeMap<&'static str, OperationOutcomes>,
    pub(super) failures: u64,
    pub(super) first_failure: Option<String>,
    /// Replies that differ from those of the same model undisturbed.
    pub(super) wrong: u64,
    pub(super) most_registered: usize,
    pub(super) budget_bytes: u64,
    pub(super) most_held_bytes: u64,
    pub(super) loads: u64,
    pub(super) evictions: u64,
    /// At the start, after the warm-up, after each round, and after cached memory was freed.
    pub(super) rests: Vec<MemorySample>,
}

impl SoakReport {
    pub(super) fn add(&mut self, mut stats: OperationStats) {
        stats.time();
        self.failures = stats.kinds.values().map(|outcomes| outcomes.failed).sum();
        self.first_failure = stats.first_failure;
        self.wrong = stats.wrong;
        self.kinds = stats.kinds;
    }

    /// Why the soak failed, if it did.
    pub(super) fn verdict(&self) -> Result<(), String> {
        let SoakReport { failures, wrong, first_failure, .. } = self;
        if *failures + *wrong > 0 {
            let why = first_failure.as_deref().unwrap_or("replies differ");
            return Err(format!("{failures} failures, {wrong} wrong replies: {why}"));
        }
        if self.most_held_bytes > self.budget_bytes {
            let (peak, budget) = (Bytes(self.most_held_bytes), Bytes(self.budget_bytes));
            return Err(format!("{peak} of weights were on the device, {budget} are allowed"));
        }
        if let Some(rest) = self.rests.iter().find(|rest| rest.weights_bytes > 0) {
            let (left, when) = (Bytes(rest.weights_bytes), &rest.when);
            return Err(format!("{left} of weights were not released {when}"));
        }
        let (Some(warm), Some(last)) = (self.rests.get(1), self.rests.last()) else {
            return Err("nothing was measured".to_string());
        };
        match (warm.system_bytes, last.system_bytes) {
            (Some(before), Some(after)) if after > before + SYSTEM_SLACK => {
                let more = Bytes(after - before);
                Err(format!("the GPU's tools count {more} more than after the warm-up"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(kind: ErrorKind) -> Result<(), ApiError> {
        Err(ApiError::new(kind, "no"))
    }

    #[test]
    fn documented_errors_are_no_failures() {
        let mut stats = OperationStats::default();
        let mut record = |due, result| stats.record("infer", due, Nanos(1), result);
        record(ExpectedResult::Done, Ok(()));
        record(ExpectedResult::Done, refusal(ErrorKind::Unavailable));
        record(ExpectedResult::Refused(ErrorKind::NotFound), refusal(ErrorKind::NotFound));
        record(ExpectedResult::Refused(ErrorKind::NotFound), refusal(ErrorKind::Unavailable));
        record(ExpectedResult::Refused(ErrorKind::NotFound), Ok(()));
        record(ExpectedResult::Done, refusal(ErrorKind::Internal));
        let outcomes = &stats.kinds["infer"];
        assert_eq!((outcomes.asked, outcomes.done, outcomes.failed), (6, 1, 3));
        assert_eq!(outcomes.documented.values().sum::<u64>(), 2);
        let mut report = SoakReport { budget_bytes: 1, ..SoakReport::default() };
        report.add(stats);
        assert!(report.verdict().unwrap_err().contains("3 failures"));
    }

    #[test]
    fn memory_that_stays_in_use_fails() {
        let rest = |weights_bytes, system: u64| MemorySample {
            weights_bytes,
            system_bytes: Some(system << 20),
            ..MemorySample::default()
        };
        let report = |rests| SoakReport { budget_bytes: 1, rests, ..SoakReport::default() };
        assert!(report(vec![]).verdict().is_err());
        assert_eq!(report(vec![rest(0, 1), rest(0, 500), rest(0, 540)]).verdict(), Ok(()));
        assert!(report(vec![rest(0, 1), rest(0, 500), rest(0, 700)]).verdict().is_err());
        assert!(report(vec![rest(0, 1), rest(4, 1), rest(0, 1)]).verdict().is_err());
    }
}
