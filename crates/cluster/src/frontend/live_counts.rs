//! Counts of requests by the time that they took, for viewers.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use api::monitor::RequestCounts;
use base::Nanos;
use base::histogram::time_bucket;

/// Buckets of times; the last one is for those of about an hour and longer.
const BUCKETS: usize = 256;

/// Requests that ended, counted without a lock.
#[derive(Debug, Default)]
pub struct LiveCounts {
    failed: AtomicU64,
    kept: AtomicU64,
    missed: AtomicU64,
    /// Absent before the first request: most models of a large cluster have none here.
    latency: OnceLock<Box<[AtomicU64]>>,
}

impl LiveCounts {
    /// Counts requests that were answered together after `latency`.
    pub fn answer(&self, latency: Nanos, count: u64) {
        let buckets = || (0..BUCKETS).map(|_| AtomicU64::new(0)).collect();
        let bucket = (time_bucket(latency) as usize).min(BUCKETS - 1);
        self.latency.get_or_init(buckets)[bucket].fetch_add(count, Relaxed);
    }

    /// Counts requests that were not answered.
    pub fn fail(&self, count: u64) {
        self.failed.fetch_add(count, Relaxed);
    }

    /// Counts requests that were answered within their SLO.
    pub fn keep(&self, count: u64) {
        self.kept.fetch_add(count, Relaxed);
    }

    /// Counts requests that were answered after their SLO, or not at all.
    pub fn miss(&self, count: u64) {
        self.missed.fetch_add(count, Relaxed);
    }

    /// What was counted so far.
    pub fn read(&self) -> RequestCounts {
        let buckets = self.latency.get().map(|buckets| &buckets[..]).unwrap_or_default();
        let counts = buckets.iter().zip(0u32..).map(|(count, at)| (at, count.load(Relaxed)));
        RequestCounts {
            latency: counts.filter(|(_, count)| *count > 0).collect(),
            failed: self.failed.load(Relaxed),
            kept: self.kept.load(Relaxed),
            missed: self.missed.load(Relaxed),
            ..RequestCounts::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_times_have_a_bucket() {
        let counts = LiveCounts::default();
        assert_eq!(counts.read(), RequestCounts::default());
        for time in [Nanos::ZERO, Nanos::from_millis(1), Nanos::MAX] {
            counts.answer(time, 2);
        }
        counts.fail(1);
        counts.keep(5);
        counts.miss(3);
        let read = counts.read();
        assert_eq!((read.done(), read.failed, read.kept, read.missed), (6, 1, 5, 3));
        assert_eq!(read.latency.keys().copied().collect::<Vec<_>>(), [0, 79, 255]);
    }
}
