//! What a frontend sees of a model.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use base::{Histogram, Nanos};

use crate::record::ModelLoad;

/// Seconds of the quick average.
const FAST_SECONDS: f64 = 2.0;
/// Time over which the slow average forgets, in seconds.
const SLOW_SECONDS: f64 = 10.0;

/// Arrivals as two averages.
#[derive(Clone, Debug, Default)]
pub struct Rates {
    /// Counts at times, the last of the quick average's window.
    marks: VecDeque<(Nanos, u64)>,
    slow: f64,
    /// Seconds of experience, for the slow average begins without any.
    age: f64,
}

impl Rates {
    /// `count` requests have come until `now`; returns the quick rate, the seconds it speaks of and the slow rate.
    pub fn tick(&mut self, now: Nanos, count: u64) -> (f64, f64, f64) {
        let seconds = |from: Nanos| (now - from).0 as f64 / 1e9;
        if let Some(&(last, before)) = self.marks.back() {
            let span = seconds(last);
            if span > 0.0 {
                let rate = count.saturating_sub(before) as f64 / span;
                self.age += span;
                // A plain mean at first, a forgetting one afterwards.
                let part = (span / self.age.min(SLOW_SECONDS)).min(1.0);
                self.slow += (rate - self.slow) * part;
            }
        }
        self.marks.push_back((now, count));
        while self.marks.len() > 2 && seconds(self.marks[1].0) >= FAST_SECONDS * 0.99 {
            self.marks.pop_front();
        }
        let &(first, before) = self.marks.front().unwrap_or(&(now, count));
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
    recent: Mutex<Recent>,
}

#[derive(Debug, Default)]
struct Recent {
    rates: Rates,
    latency: Histogram,
    previous: Histogram,
    turned_at: Nanos,
}

/// How long latencies count as recent.
const RECENT: Nanos = Nanos::from_millis(10_000);

impl Meter {
    /// A request came.
    pub fn arrive(&self) {
        self.arrived.fetch_add(1, Relaxed);
    }

    /// A request was answered after `latency`; its objective was `objective`.
    pub fn answer(&self, latency: Nanos, objective: Option<Nanos>) {
        self.answered.fetch_add(1, Relaxed);
        if objective.is_some_and(|objective| latency > objective) {
            self.late.fetch_add(1, Relaxed);
        }
        self.lock().latency.record(latency);
    }

    /// A request was refused or given up.
    pub fn refuse(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    /// A request went to a second backend.
    pub fn retry(&self) {
        self.retried.fetch_add(1, Relaxed);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Recent> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What to report at `now`.
    pub fn report(&self, now: Nanos) -> ModelLoad {
        let arrived = self.arrived.load(Relaxed);
        let mut recent = self.lock();
        let (fast, window, slow) = recent.rates.tick(now, arrived);
        let mut latency = recent.previous.clone();
        latency.merge(&recent.latency);
        if now - recent.turned_at > RECENT {
            recent.previous = std::mem::take(&mut recent.latency);
            recent.turned_at = now;
        }
        drop(recent);
        let tenths = |rate: f64| (rate * 10.0).round() / 10.0;
        let p99_ms = if latency.count() > 0 { latency.quantile(0.99).0 as f64 / 1e6 } else { 0.0 };
        ModelLoad {
            fast: tenths(fast),
            window: tenths(window),
            slow: tenths(slow),
            arrived,
            answered: self.answered.load(Relaxed),
            late: self.late.load(Relaxed),
            refused: self.refused.load(Relaxed),
            retried: self.retried.load(Relaxed),
            p99_ms: (p99_ms * 100.0).round() / 100.0,
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
    /// Whether one more may come at `now` under `rate` a second, when so many are `under_way`. Where none is, one may whatever the
    /// rate: a plan that is short of machines is no reason to leave those that are idle.
    pub fn admit(&self, now: Nanos, rate: f64, under_way: usize) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, tokens) = *state;
        let gained = (now - last).0 as f64 / 1e9 * rate;
        let most = (rate * BURST_SECONDS).max(1.0);
        let tokens = (tokens + gained).min(most);
        let admitted = tokens >= 1.0;
        *state = (now, if admitted { tokens - 1.0 } else { tokens });
        admitted || under_way == 0
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
    fn the_limit_holds_over_time() {
        let limit = RateLimit::default();
        let admitted =
            (0..10_000u64).filter(|ms| limit.admit(Nanos::from_millis(*ms), 100.0, 1)).count();
        assert!((990..=1011).contains(&admitted), "{admitted}");
    }

    #[test]
    fn whoever_asks_one_after_another_is_let_in_whatever_the_rate() {
        let limit = RateLimit::default();
        let now = Nanos::from_millis;
        assert!((0..100u64).all(|ms| limit.admit(now(ms), 0.1, 0)));
        assert!(!limit.admit(now(101), 0.1, 1));
    }
}
