//! Totals of requests and runs, for viewers: they count also what the ring of spans dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use base::Nanos;
use base::histogram::time_bucket;
use model::config::Class;

use super::{ModelEntry, ModelKey, Node, State};
use crate::core::{End, RequestId};
use crate::spans::{RequestSpan, RunEnd, RunSpan};

/// Buckets of times; the last one is for those of about an hour and longer.
const TIME_BUCKETS: usize = 256;
/// Rows of a batch that are counted one by one.
const EXACT_ROWS: u32 = 128;
/// Buckets of larger batches, each an eighth of an octave wide.
const LARGE_BATCHES: usize = 72;

/// Changed under the node's lock, read without it.
type Counter = AtomicU64;

fn counters(count: usize) -> Box<[Counter]> {
    (0..count).map(|_| Counter::new(0)).collect()
}

fn bucket_of(time: Nanos) -> usize {
    (time_bucket(time) as usize).min(TIME_BUCKETS - 1)
}

fn rows_bucket(rows: u32) -> usize {
    if rows <= EXACT_ROWS {
        return rows.max(1) as usize - 1;
    }
    let eighths = (f64::from(rows) / f64::from(EXACT_ROWS)).log2() * 8.0;
    EXACT_ROWS as usize + (eighths as usize).min(LARGE_BATCHES - 1)
}

/// The rows that a bucket stands for: the least of a large one.
fn bucket_rows(bucket: usize) -> u32 {
    match bucket.checked_sub(EXACT_ROWS as usize) {
        None => bucket as u32 + 1,
        Some(eighths) => (f64::from(EXACT_ROWS) * (eighths as f64 / 8.0).exp2()).round() as u32,
    }
}

/// Counts that are not zero, by bucket.
fn filled(counters: &[Counter]) -> impl Iterator<Item = (usize, u64)> {
    let counts = counters.iter().map(|count| count.load(Relaxed)).enumerate();
    counts.filter(|(_, count)| *count > 0)
}

/// Requests of one model and class that ended, since the model was added.
#[derive(Debug)]
pub struct RequestTotals {
    /// Answered and not answered ones.
    ended: Counter,
    failed: Counter,
    kept: Counter,
    missed: Counter,
    latency: Box<[Counter]>,
    wait: Box<[Counter]>,
    rows: Box<[Counter]>,
}

impl Default for RequestTotals {
    fn default() -> Self {
        RequestTotals {
            ended: Counter::new(0),
            failed: Counter::new(0),
            kept: Counter::new(0),
            missed: Counter::new(0),
            latency: counters(TIME_BUCKETS),
            wait: counters(TIME_BUCKETS),
            rows: counters(EXACT_ROWS as usize + LARGE_BATCHES),
        }
    }
}

impl RequestTotals {
    fn count(&self, request: &RequestSpan, objective: Option<Nanos>) {
        let total = request.answered.since(request.arrived);
        if request.deadline < Nanos::MAX || objective.is_some() {
            let in_time =
                request.answered <= request.deadline && objective.is_none_or(|slo| total <= slo);
            match (request.end, in_time) {
                (End::Done, true) => self.kept.fetch_add(1, Relaxed),
                // Its client did not wait for it.
                (End::Cancelled, true) => 0,
                _ => self.missed.fetch_add(1, Relaxed),
            };
        }
        if request.end == End::Done {
            self.latency[bucket_of(total)].fetch_add(1, Relaxed);
            let wait = request.started.since(request.arrived);
            self.wait[bucket_of(wait)].fetch_add(1, Relaxed);
            self.rows[rows_bucket(request.rows)].fetch_add(1, Relaxed);
        } else {
            self.failed.fetch_add(1, Relaxed);
        }
        self.ended.fetch_add(1, Relaxed);
    }

    /// How many ended.
    pub fn ended(&self) -> u64 {
        self.ended.load(Relaxed)
    }

    /// Those that were not answered.
    pub fn failed(&self) -> u64 {
        self.failed.load(Relaxed)
    }

    /// Those with a deadline or an SLO that were answered in time.
    pub fn kept(&self) -> u64 {
        self.kept.load(Relaxed)
    }

    /// Those with a deadline or an SLO that were answered late, or not at all: refused, failed, or
    /// given up after it. What a client gave up before is neither kept nor missed.
    pub fn missed(&self) -> u64 {
        self.missed.load(Relaxed)
    }

    /// Answered ones by bucket of the time that they took.
    pub fn latency(&self) -> impl Iterator<Item = (u32, u64)> {
        filled(&self.latency).map(|(bucket, count)| (bucket as u32, count))
    }

    /// Answered ones by bucket of the time until they started.
    pub fn wait(&self) -> impl Iterator<Item = (u32, u64)> {
        filled(&self.wait).map(|(bucket, count)| (bucket as u32, count))
    }

    /// Answered ones by rows of their batch.
    pub fn rows(&self) -> impl Iterator<Item = (u32, u64)> {
        filled(&self.rows).map(|(bucket, count)| (bucket_rows(bucket), count))
    }
}

/// What a device did since its node started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceTotals {
    /// Time of runs of real time and of best effort, with those that still run.
    pub busy: [Nanos; 2],
    /// Preemptions of best effort for real time.
    pub preemptions: u64,
    /// Preemptions by bucket of the time that leaving took.
    leaving: [u64; TIME_BUCKETS],
}

impl Default for DeviceTotals {
    fn default() -> Self {
        DeviceTotals { busy: [Nanos::ZERO; 2], preemptions: 0, leaving: [0; TIME_BUCKETS] }
    }
}

impl DeviceTotals {
    fn count(&mut self, run: &RunSpan) {
        self.busy[class_index(run.class)] += run.ended.since(run.began);
        if run.preempted_for.is_some() {
            self.preemptions += u64::from(run.end == RunEnd::Preempted);
            self.leaving[bucket_of(run.ended.since(run.preempt_requested))] += 1;
        }
    }

    /// Preemptions by bucket of the time that leaving took.
    pub fn leaving(&self) -> impl Iterator<Item = (u32, u64)> {
        (0u32..).zip(self.leaving).filter(|(_, count)| *count > 0)
    }
}

fn class_index(class: Class) -> usize {
    match class {
        Class::RealTime => 0,
        Class::BestEffort => 1,
    }
}

/// The totals of a model by class; absent before the first request.
pub(super) type TotalsByClass = [Option<Arc<RequestTotals>>; 2];

impl ModelEntry {
    fn count_request(&mut self, request: &RequestSpan) {
        let totals = self.totals[class_index(request.class)].get_or_insert_default();
        totals.count(request, self.defaults.objective);
    }
}

impl State {
    /// Counts a request that ended.
    pub(super) fn count_request(&mut self, request: &RequestSpan) {
        if let Some(entry) = self.model_mut(request.model) {
            entry.count_request(request);
        }
    }

    /// Counts a run that ended.
    pub(super) fn count_run(&mut self, run: &RunSpan) {
        self.totals.count(run);
    }

    fn class_of(&self, request: RequestId) -> Option<usize> {
        self.job(request).map(|job| class_index(job.class))
    }
}

impl Node {
    /// Totals of requests, of each model and class that had some.
    pub fn request_totals(&self) -> Vec<(ModelKey, Class, Arc<RequestTotals>)> {
        let state = self.shared.lock();
        let mut all = Vec::new();
        for (slot, entry) in (0u32..).zip(&state.models) {
            let Some(entry) = entry else { continue };
            let key = ModelKey { slot, generation: entry.generation };
            for (class, totals) in [Class::RealTime, Class::BestEffort].iter().zip(&entry.totals) {
                all.extend(totals.iter().map(|totals| (key, *class, totals.clone())));
            }
        }
        all
    }

    /// Totals of the device.
    pub fn device_totals(&self) -> DeviceTotals {
        let state = self.shared.lock();
        let now = self.shared.clock.now();
        let mut totals = state.totals.clone();
        for run in state.record.queues.iter().flatten() {
            if let Some(class) = state.class_of(run.request) {
                totals.busy[class] += now.since(run.began);
            }
        }
        totals
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(end: End, took: u64, deadline: Nanos) -> RequestSpan {
        RequestSpan {
            number: 1,
            job: 1,
            model: ModelKey::new(0, 1),
            class: Class::RealTime,
            priority: 1,
            rows: 0,
            arrived: Nanos(100),
            staged: Nanos(100),
            started: Nanos(100),
            answered: Nanos(100 + took),
            deadline,
            end,
        }
    }

    #[test]
    fn only_what_was_answered_in_time_keeps_the_slo() {
        let totals = RequestTotals::default();
        let slo = Some(Nanos(50));
        totals.count(&request(End::Done, 50, Nanos::MAX), slo);
        assert_eq!((totals.kept(), totals.missed()), (1, 0));
        let ends = [End::Failed, End::DeadlineExceeded, End::QueueFull, End::ShuttingDown];
        ends.iter().for_each(|end| totals.count(&request(*end, 0, Nanos::MAX), slo));
        assert_eq!((totals.kept(), totals.missed()), (1, 4));
        totals.count(&request(End::Done, 51, Nanos::MAX), slo);
        totals.count(&request(End::Done, 20, Nanos(110)), slo);
        totals.count(&request(End::Cancelled, 60, Nanos::MAX), slo);
        assert_eq!((totals.kept(), totals.missed()), (1, 7));
        // Given up in time, and without an SLO: there is nothing to keep.
        totals.count(&request(End::Cancelled, 10, Nanos::MAX), slo);
        totals.count(&request(End::QueueFull, 0, Nanos::MAX), None);
        totals.count(&request(End::Done, 900, Nanos::MAX), None);
        assert_eq!((totals.kept(), totals.missed(), totals.ended()), (1, 7, 11));
        totals.count(&request(End::Done, 10, Nanos(110)), None);
        assert_eq!(totals.kept(), 2);
    }

    #[test]
    fn rows_are_counted_exactly_until_batches_are_large() {
        for rows in [1, 2, 127, 128] {
            assert_eq!(bucket_rows(rows_bucket(rows)), rows);
        }
        assert_eq!(rows_bucket(0), rows_bucket(1));
        for rows in [129, 200, 1_000, 60_000] {
            let counted = bucket_rows(rows_bucket(rows));
            assert!(counted <= rows && f64::from(counted) > f64::from(rows) * 0.9, "{counted}");
        }
        assert_eq!(rows_bucket(u32::MAX), EXACT_ROWS as usize + LARGE_BATCHES - 1);
    }
}
