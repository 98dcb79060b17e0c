//! Learned batch times.

use base::Nanos;

use crate::batching::BatchProfile;

/// Weight of a new time.
const NEW: f64 = 1.0 / 8.0;

/// Mean times by batch size, with exponential forgetting.
#[derive(Clone, Debug)]
pub(super) struct LearnedProfile {
    /// By batch size minus one; zero where unknown.
    means: Vec<f64>,
    profile: BatchProfile,
}

impl LearnedProfile {
    /// No times of batches up to `batch_max`.
    pub(super) fn new(batch_max: usize) -> LearnedProfile {
        let means = vec![0.0; batch_max.max(1)];
        let profile = BatchProfile::linear(Nanos::ZERO, Nanos(1), batch_max);
        LearnedProfile { means, profile }
    }

    /// The known times, interpolated; beyond the largest, its time.
    pub(super) fn profile(&self) -> &BatchProfile {
        &self.profile
    }

    /// Sets measured times for sizes without a learned one.
    pub(super) fn seed(&mut self, measured: &[(usize, Nanos)]) {
        for (rows, time) in measured {
            let seen = rows.checked_sub(1).and_then(|index| self.means.get(index));
            if seen.is_some_and(|mean| *mean == 0.0) {
                self.record(*rows, *time);
            }
        }
    }

    /// A batch of `rows` took `time`.
    pub(super) fn record(&mut self, rows: usize, time: Nanos) {
        let Some(mean) = rows.checked_sub(1).and_then(|index| self.means.get_mut(index)) else {
            return;
        };
        let time = (time.0 as f64).max(1.0);
        *mean = if *mean == 0.0 { time } else { *mean + (time - *mean) * NEW };
        let known: Vec<(usize, f64)> =
            self.means.iter().copied().enumerate().filter(|(_, mean)| *mean > 0.0).collect();
        let at = |index: usize| {
            let after = known.partition_point(|(size, _)| *size < index);
            match (after.checked_sub(1).map(|before| known[before]), known.get(after)) {
                (Some((low, short)), Some((high, long))) => {
                    let share = (index - low) as f64 / (high - low) as f64;
                    short + (long - short) * share
                }
                (None, Some((_, mean))) => *mean,
                (Some((_, mean)), None) => mean,
                (None, None) => 1.0,
            }
        };
        let latencies = (0..self.means.len()).map(|index| Nanos(at(index) as u64)).collect();
        if let Some(profile) = BatchProfile::from_latencies(latencies) {
            self.profile = profile;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpolates_between_known_sizes() {
        let mut learned = LearnedProfile::new(8);
        learned.record(1, Nanos(100));
        assert_eq!(learned.profile().latency(8), Nanos(100), "unknown sizes cost no more");
        learned.record(5, Nanos(500));
        assert_eq!(learned.profile().latency(3), Nanos(300));
        learned.record(9, Nanos(1));
        learned.record(0, Nanos(1));
        assert_eq!(learned.profile().latency(8), Nanos(500));
        (0..100).for_each(|_| learned.record(5, Nanos(300)));
        assert!(learned.profile().latency(5) < Nanos(310));
    }
}
