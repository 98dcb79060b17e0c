//! Latency histograms that merge, with a fixed relative error.

use crate::Nanos;

/// Spans from a nanosecond to an hour at three significant digits.
#[derive(Clone, Debug)]
pub struct Histogram {
    inner: hdrhistogram::Histogram<u64>,
}

const MAX_NS: u64 = 3_600_000_000_000;

impl Histogram {
    /// An empty histogram.
    pub fn new() -> Histogram {
        let inner = hdrhistogram::Histogram::new_with_bounds(1, MAX_NS, 3)
            .expect("constant bounds are valid");
        Histogram { inner }
    }

    /// Counts one span; spans longer than an hour count as an hour.
    pub fn record(&mut self, span: Nanos) {
        self.inner.saturating_record(span.0.max(1));
    }

    /// Adds all counts of `other`.
    pub fn merge(&mut self, other: &Histogram) {
        self.inner.add(&other.inner).expect("all histograms share one range");
    }

    /// How many spans were counted.
    pub fn count(&self) -> u64 {
        self.inner.len()
    }

    /// The span that `fraction` of all counted ones do not exceed.
    pub fn quantile(&self, fraction: f64) -> Nanos {
        Nanos(self.inner.value_at_quantile(fraction))
    }

    /// The arithmetic mean.
    pub fn mean(&self) -> Nanos {
        Nanos(self.inner.mean() as u64)
    }

    /// The longest counted span.
    pub fn max(&self) -> Nanos {
        Nanos(self.inner.max())
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

/// The bucket of a time for counts of a fixed size; bucket `n` begins at `2^(n/8)` microseconds.
pub fn time_bucket(time: Nanos) -> u32 {
    let micros = time.0 as f64 / 1e3;
    (micros.max(1.0).log2() * 8.0).floor() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_of_times_grow_by_an_eighth_of_an_octave() {
        let bucket = |micros| time_bucket(Nanos::from_micros(micros));
        assert_eq!([0, 1, 2, 1_024, 1_100].map(bucket), [0, 0, 8, 80, 80]);
    }

    #[test]
    fn quantiles_are_within_a_thousandth() {
        let mut histogram = Histogram::new();
        (1..=1000).for_each(|us| histogram.record(Nanos::from_micros(us)));
        let p99 = histogram.quantile(0.99).0 as f64;
        assert!((p99 / 990_000.0 - 1.0).abs() < 2e-3, "{p99}");
        let mut merged = Histogram::new();
        merged.merge(&histogram);
        merged.merge(&histogram);
        assert_eq!(merged.count(), 2000);
    }
}
