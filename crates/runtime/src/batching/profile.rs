//! Batch times.

use base::Nanos;

/// Latency by batch size. Larger batches never take less time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchProfile {
    /// Latency of a batch of `index + 1`.
    latencies: Vec<Nanos>,
}

impl BatchProfile {
    /// A profile from measured latencies of batches 1, 2, 3, ...; made monotonic. `None` without
    /// measurements.
    pub fn from_latencies(mut latencies: Vec<Nanos>) -> Option<BatchProfile> {
        let mut longest = Nanos::ZERO;
        for latency in &mut latencies {
            longest = longest.max(*latency);
            *latency = longest;
        }
        (!latencies.is_empty()).then_some(BatchProfile { latencies })
    }

    /// The linear model `alpha * batch + beta` up to `batch_max`.
    pub fn linear(alpha: Nanos, beta: Nanos, batch_max: usize) -> BatchProfile {
        let latency = |batch: u64| Nanos(alpha.0.saturating_mul(batch)) + beta;
        BatchProfile { latencies: (1..=batch_max.max(1) as u64).map(latency).collect() }
    }

    /// The largest measured batch.
    pub fn batch_max(&self) -> usize {
        self.latencies.len()
    }

    /// Time of a batch; above the largest, its time.
    pub fn latency(&self, batch: usize) -> Nanos {
        let last = self.latencies.len() - 1;
        self.latencies[batch.saturating_sub(1).min(last)]
    }

    /// The largest batch within `budget`; 0 when none is.
    pub fn largest_within(&self, budget: Nanos) -> usize {
        self.latencies.partition_point(|latency| *latency <= budget)
    }

    /// The largest batch for a session with this SLO: a request that just missed a batch waits for
    /// it and runs in the next, so two must fit.
    pub fn batch_for_objective(&self, objective: Nanos) -> usize {
        self.largest_within(Nanos(objective.0 / 2)).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_give_the_largest_batch() {
        let profile = BatchProfile::linear(Nanos(10), Nanos(100), 8);
        assert_eq!(profile.latency(1), Nanos(110));
        assert_eq!(profile.latency(99), Nanos(180));
        assert_eq!(profile.largest_within(Nanos(109)), 0);
        assert_eq!(profile.largest_within(Nanos(135)), 3);
        assert_eq!(profile.batch_for_objective(Nanos(300)), 5);
    }

    #[test]
    fn dips_are_levelled() {
        let profile = BatchProfile::from_latencies(vec![Nanos(5), Nanos(3), Nanos(9)]).unwrap();
        assert_eq!(profile.latency(2), Nanos(5));
        assert_eq!(BatchProfile::from_latencies(vec![]), None);
    }
}
