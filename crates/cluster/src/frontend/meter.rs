//! What a frontend sees of a model.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use base::{Histogram, Nanos};

use crate::record::{ModelLoad, QueryLoad, StageLoad};

/// Seconds of the quick average.
const FAST_SECONDS: f64 = 2.0;
/// Time over which the slow average forgets, in seconds.
const SLOW_SECONDS: f64 = 10.0;

/// Arrivals as two averages.
#[derive(Clone, Debug, Default)]
pub struct Rates {
    /// Counts at times, the last of the quick average's window.
    samples: VecDeque<(Nanos, u64)>,
    slow: f64,
    /// Seconds of experience, for the slow average begins without any.
    age: f64,
}

impl Rates {
    /// `count` requests have come until `now`; returns the quick rate, the seconds it speaks of and the slow rate.
    pub fn tick(&mut self, now: Nanos, count: u64) -> (f64, f64, f64) {
        let seconds = |from: Nanos| (now - from).0 as f64 / 1e9;
        if let Some(&(last, before)) = self.samples.back() {
            let span = seconds(last);
            if span > 0.0 {
                let rate = count.saturating_sub(before) as f64 / span;
                self.age += span;
                // A plain mean at first, a forgetting one afterwards.
                let part = (span / self.age.min(SLOW_SECONDS)).min(1.0);
                self.slow += (rate - self.slow) * part;
            }
        }
        self.samples.push_back((now, count));
        while self.samples.len() > 2 && seconds(self.samples[1].0) >= FAST_SECONDS * 0.99 {
            self.samples.pop_front();
        }
        let &(first, before) = self.samples.front().unwrap_or(&(now, count));
        let window = seconds(first).max(1e-3);
        let fast = if first == now { 0.0 } else { count.saturating_sub(before) as f64 / window };
        (fast, window, self.slow)
    }
}

/// Counts of one model.
#[derive(Debug, Default)]
pub struct Meter {
    arrived: AtomicU64,
    answered: AtomicU64,
    late: AtomicU64,
    refused: AtomicU64,
    retried: AtomicU64,
    recent: Mutex<RecentLoad>,
}

#[derive(Debug, Default)]
struct RecentLoad {
    rates: Rates,
    latency: RecentTimes,
}

/// How long times count as recent.
const RECENT: Nanos = Nanos::from_millis(10_000);

/// Recent times.
#[derive(Debug, Default)]
struct RecentTimes {
    current: Histogram,
    previous: Histogram,
    turned_at: Nanos,
}

impl RecentTimes {
    fn record(&mut self, time: Nanos) {
        self.current.record(time);
    }

    /// 99 of 100 recent ones were at most this, in milliseconds; 0 where there were none.
    fn p99_ms(&mut self, now: Nanos) -> f64 {
        let mut all = self.previous.clone();
        all.merge(&self.current);
        if now - self.turned_at > RECENT {
            self.previous = std::mem::take(&mut self.current);
            self.turned_at = now;
        }
        let ms = if all.count() > 0 { all.quantile(0.99).0 as f64 / 1e6 } else { 0.0 };
        (ms * 100.0).round() / 100.0
    }
}

fn tenths(rate: f64) -> f64 {
    (rate * 10.0).round() / 10.0
}

impl Meter {
    /// So many requests came.
    pub fn arrive(&self, count: u64) {
        self.arrived.fetch_add(count, Relaxed);
    }

    /// So many requests were answered together after `latency`; their objective was `objective`.
    pub fn answer(&self, latency: Nanos, objective: Option<Nanos>, count: u64) {
        self.answered.fetch_add(count, Relaxed);
        if objective.is_some_and(|objective| latency > objective) {
            self.late.fetch_add(count, Relaxed);
        }
        self.lock().latency.record(latency);
    }

    /// So many requests were refused or given up.
    pub fn refuse(&self, count: u64) {
        self.refused.fetch_add(count, Relaxed);
    }

    /// A request went to a second backend.
    pub fn retry(&self) {
        self.retried.fetch_add(1, Relaxed);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, RecentLoad> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What to report at `now`.
    pub fn report(&self, now: Nanos) -> ModelLoad {
        let arrived = self.arrived.load(Relaxed);
        let (fast, window, slow) = self.lock().rates.tick(now, arrived);
        let rates = (tenths(fast), tenths(window), tenths(slow));
        ModelLoad { fast: rates.0, window: rates.1, slow: rates.2, arrived, ..self.counts(now) }
    }

    /// Counts and times at `now`, without rates.
    pub fn counts(&self, now: Nanos) -> ModelLoad {
        let p99_ms = self.lock().latency.p99_ms(now);
        ModelLoad {
            arrived: self.arrived.load(Relaxed),
            answered: self.answered.load(Relaxed),
            late: self.late.load(Relaxed),
            refused: self.refused.load(Relaxed),
            retried: self.retried.load(Relaxed),
            p99_ms,
            ..ModelLoad::default()
        }
    }
}

/// Counts of one query.
#[derive(Debug)]
pub struct QueryMeter {
    /// Its questions, as requests.
    pub requests: Meter,
    names: Vec<String>,
    recent: Mutex<RecentQuery>,
}

#[derive(Debug, Default)]
struct RecentQuery {
    completed: u64,
    completed_rates: Rates,
    between: RecentTimes,
    stages: Vec<RecentStage>,
}

#[derive(Debug, Default)]
struct RecentStage {
    requests: u64,
    rates: Rates,
    times: RecentTimes,
}

impl QueryMeter {
    /// For a query whose stages have these names.
    pub fn new(names: Vec<String>) -> QueryMeter {
        let stages = names.iter().map(|_| RecentStage::default()).collect();
        let recent = Mutex::new(RecentQuery { stages, ..RecentQuery::default() });
        QueryMeter { requests: Meter::default(), names, recent }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, RecentQuery> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A question made so many requests of a stage, which together took `time`.
    pub fn stage(&self, stage: usize, requests: u64, time: Nanos) {
        if let Some(stage) = self.lock().stages.get_mut(stage) {
            stage.requests += requests;
            stage.times.record(time);
        }
    }

    /// A question came through all stages and spent `between` outside of them.
    pub fn complete(&self, between: Nanos) {
        let mut recent = self.lock();
        recent.completed += 1;
        recent.between.record(between);
    }

    /// Counts and times at `now`, without rates: looking must not disturb what is reported.
    pub fn counts(&self, now: Nanos) -> QueryLoad {
        let requests = self.requests.counts(now);
        let mut recent = self.lock();
        let recent = &mut *recent;
        let stage = |(name, stage): (&String, &mut RecentStage)| {
            let load = StageLoad { p99_ms: stage.times.p99_ms(now), ..StageLoad::default() };
            (name.clone(), load)
        };
        QueryLoad {
            requests,
            completed: 0.0,
            between_ms: recent.between.p99_ms(now),
            stages: self.names.iter().zip(&mut recent.stages).map(stage).collect(),
        }
    }

    /// What to report at `now`.
    pub fn report(&self, now: Nanos) -> QueryLoad {
        let requests = self.requests.report(now);
        let mut recent = self.lock();
        let recent = &mut *recent;
        let (_, _, completed) = recent.completed_rates.tick(now, recent.completed);
        let stage = |(name, stage): (&String, &mut RecentStage)| {
            let (_, _, slow) = stage.rates.tick(now, stage.requests);
            // Ratios of rates are wanted, so small ones are not rounded away.
            let load = StageLoad { slow, p99_ms: stage.times.p99_ms(now) };
            (name.clone(), load)
        };
        QueryLoad {
            requests,
            completed,
            between_ms: recent.between.p99_ms(now),
            stages: self.names.iter().zip(&mut recent.stages).map(stage).collect(),
        }
    }
}

/// Lets in at most a rate, with bursts of a tenth of a second.
#[derive(Debug, Default)]
pub struct RateLimit {
    state: Mutex<(Nanos, f64)>,
}

/// Seconds of a full rate that may come at once.
const BURST_SECONDS: f64 = 0.1;

impl RateLimit {
    /// Whether `count` more may come at `now` under `rate` a second. Where the backends are `at_ease` they may whatever the
    /// rate: a plan that is short of machines is no reason to leave those that are idle.
    pub fn admit(&self, now: Nanos, rate: f64, count: u64, underloaded: bool) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, tokens) = *state;
        let gained = (now - last).0 as f64 / 1e9 * rate;
        let max = (rate * BURST_SECONDS).max(1.0);
        let tokens = (tokens + gained).min(max);
        let admitted = tokens >= 1.0;
        *state = (now, if admitted { tokens - count as f64 } else { tokens });
        admitted || underloaded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_in_the_quick_average_first() {
        let mut rates = Rates::default();
        let (mut count, mut last) = (0, (0.0, 0.0, 0.0));
        for second in 0..30u64 {
            last = rates.tick(Nanos::from_millis(1000 * second), count);
            count += 10;
        }
        assert!((last.0 - 10.0).abs() < 0.1 && (last.2 - 10.0).abs() < 0.1, "{last:?}");
        for second in 30..33u64 {
            count += 90;
            last = rates.tick(Nanos::from_millis(1000 * second), count);
        }
        assert!(last.0 >= 89.0 && last.2 < 50.0, "{last:?}");
    }

    #[test]
    fn fan_outs_follow_from_what_was_walked() {
        let meter = QueryMeter::new(vec!["find".to_string(), "read".to_string()]);
        let mut last = QueryLoad::default();
        for second in 0..20u64 {
            for _ in 0..5 {
                meter.stage(0, 1, Nanos::from_millis(2));
                meter.stage(1, 7, Nanos::from_millis(3));
                meter.complete(Nanos::from_millis(1));
            }
            last = meter.report(Nanos::from_millis(1000 * second));
        }
        assert!((last.stages["read"].slow / last.completed - 7.0).abs() < 1e-9, "{last:?}");
        assert!((last.completed - 5.0).abs() < 0.01 && last.between_ms >= 1.0, "{last:?}");
    }

    #[test]
    fn the_limit_holds_over_time() {
        let limit = RateLimit::default();
        let admitted = (0..10_000u64)
            .filter(|ms| limit.admit(Nanos::from_millis(*ms), 100.0, 1, false))
            .count();
        assert!((990..=1011).contains(&admitted), "{admitted}");
    }

    #[test]
    fn backends_at_ease_are_asked_whatever_the_rate() {
        let limit = RateLimit::default();
        let now = Nanos::from_millis;
        assert!((0..100u64).all(|ms| limit.admit(now(ms), 0.1, 1, true)));
        assert!(!limit.admit(now(101), 0.1, 1, false));
    }
}
