//! Measures the load of models and queries at one frontend.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use base::{Histogram, Nanos};

use super::live_counts::LiveCounts;
use crate::balance::patience::TypicalLatency;
use crate::record::{ModelLoad, QueryLoad, StageLoad};

/// Seconds of the fast average.
const FAST_SECONDS: f64 = 1.0;
/// Time constant of the slow average in seconds.
const SLOW_SECONDS: f64 = 10.0;

/// Arrival rates as two averages.
#[derive(Clone, Debug, Default)]
pub struct Rates {
    /// Counts by time, within the window of the fast average.
    samples: VecDeque<(Nanos, u64)>,
    slow: f64,
    /// Seconds observed so far; the slow average starts without any.
    age: f64,
}

impl Rates {
    /// Adds that `count` requests have arrived until `now`. Returns the fast rate, the seconds it
    /// covers, and the slow rate.
    pub fn tick(&mut self, now: Nanos, count: u64) -> (f64, f64, f64) {
        let seconds = |from: Nanos| (now - from).0 as f64 / 1e9;
        if let Some(&(last, before)) = self.samples.back() {
            let span = seconds(last);
            if span > 0.0 {
                let rate = count.saturating_sub(before) as f64 / span;
                self.age += span;
                // A plain mean at first, an exponential one afterwards.
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
    hedged: AtomicU64,
    /// Of replies of backends, in nanoseconds.
    typical: AtomicU64,
    /// The same requests, for viewers.
    pub live: LiveCounts,
    /// Held by the request that tries whether a backend is there after a start.
    pub start_turn: tokio::sync::Mutex<()>,
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

    /// 99th percentile of recent times in milliseconds; 0 without any.
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
    /// Counts requests that arrived.
    pub fn arrive(&self, count: u64) {
        self.arrived.fetch_add(count, Relaxed);
    }

    /// Counts requests that were answered together after `latency`.
    pub fn answer(&self, latency: Nanos, objective: Option<Nanos>, count: u64) {
        self.answered.fetch_add(count, Relaxed);
        if objective.is_some_and(|objective| latency > objective) {
            self.late.fetch_add(count, Relaxed);
        }
        self.live.answer(latency, count);
        self.lock().latency.record(latency);
    }

    /// Counts requests that were refused or cancelled.
    pub fn refuse(&self, count: u64) {
        self.live.fail(count);
        self.refused.fetch_add(count, Relaxed);
    }

    /// Counts a request that was sent to a second backend.
    pub fn retry(&self) {
        self.retried.fetch_add(1, Relaxed);
    }

    /// Counts a request that a second backend got before the first one replied.
    pub fn hedge(&self) {
        self.hedged.fetch_add(1, Relaxed);
    }

    /// Requests that a second backend got before the first one replied.
    pub fn hedged(&self) -> u64 {
        self.hedged.load(Relaxed)
    }

    /// Records how long a backend took to reply. An update that another one overtakes is lost,
    /// which does not matter to an estimate.
    pub fn replied(&self, latency: Nanos) {
        self.typical.store(self.typical().after(latency).as_nanos(), Relaxed);
    }

    /// The typical latency of backends' replies.
    pub fn typical(&self) -> TypicalLatency {
        TypicalLatency::from_nanos(self.typical.load(Relaxed))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, RecentLoad> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The load to report at `now`.
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
    /// Its requests.
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
    /// A meter for a query whose stages have these names.
    pub fn new(names: Vec<String>) -> QueryMeter {
        let stages = names.iter().map(|_| RecentStage::default()).collect();
        let recent = Mutex::new(RecentQuery { stages, ..RecentQuery::default() });
        QueryMeter { requests: Meter::default(), names, recent }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, RecentQuery> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts requests that one query request sent to a stage, which together took `time`.
    pub fn stage(&self, stage: usize, requests: u64, time: Nanos) {
        if let Some(stage) = self.lock().stages.get_mut(stage) {
            stage.requests += requests;
            stage.times.record(time);
        }
    }

    /// Counts a query request that completed all stages and spent `between` outside of them.
    pub fn complete(&self, between: Nanos) {
        let mut recent = self.lock();
        recent.completed += 1;
        recent.between.record(between);
    }

    /// Counts and times at `now`, without rates: a read must not change what is reported.
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

    /// The load to report at `now`.
    pub fn report(&self, now: Nanos) -> QueryLoad {
        let requests = self.requests.report(now);
        let mut recent = self.lock();
        let recent = &mut *recent;
        let (_, _, completed) = recent.completed_rates.tick(now, recent.completed);
        let stage = |(name, stage): (&String, &mut RecentStage)| {
            let (_, _, slow) = stage.rates.tick(now, stage.requests);
            // Ratios of rates are needed, so small ones are not rounded away.
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

/// Admits requests up to a rate, with bursts of a tenth of a second.
#[derive(Debug, Default)]
pub struct RateLimit {
    state: Mutex<(Nanos, f64)>,
}

/// Burst size in seconds of the full rate.
const BURST_SECONDS: f64 = 0.1;

impl RateLimit {
    /// Whether `count` more requests are admitted at `now` under `rate` per second. While the
    /// backends are `underloaded` they are, whatever the rate: a plan that lacks machines is no
    /// reason to keep idle ones idle.
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
    fn fast_average_follows_a_step_first() {
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
    fn fan_outs_follow_from_completed_requests() {
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
    fn rate_limit_holds_over_time() {
        let limit = RateLimit::default();
        let admitted = (0..10_000u64)
            .filter(|ms| limit.admit(Nanos::from_millis(*ms), 100.0, 1, false))
            .count();
        assert!((990..=1011).contains(&admitted), "{admitted}");
    }

    #[test]
    fn underloaded_backends_get_requests_beyond_the_rate() {
        let limit = RateLimit::default();
        let now = Nanos::from_millis;
        assert!((0..100u64).all(|ms| limit.admit(now(ms), 0.1, 1, true)));
        assert!(!limit.admit(now(101), 0.1, 1, false));
    }
}
