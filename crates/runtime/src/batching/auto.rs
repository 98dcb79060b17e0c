//! Atoll's own batching policy: no request waits while a worker is idle, and batches are as large
//! as measured times justify.

use base::Nanos;

use super::{BatchPolicy, BatchProfile, Decision, ModelView};

/// A batch twice as large pays off if it takes at most this share of the time of two.
const PAYS_OFF: f64 = 0.9;

/// One of so many decisions tries the next larger size, since times change.
const TRY_EVERY: u32 = 256;

/// Gives each idle worker the largest batch that can be filled, pays off and fits the SLO. Requests
/// that find all workers busy make the next batch larger, so batches grow with the load.
#[derive(Clone, Debug)]
pub struct Auto {
    /// Batch sizes, ascending.
    pub sizes: Vec<usize>,
    /// The SLO. A batch takes at most half of it: a request that just missed a batch waits for it
    /// and runs in the next.
    pub objective: Option<Nanos>,
    /// Batches that may run at once, each then slower by this factor.
    pub concurrent: usize,
    decided: u32,
}

impl Auto {
    /// A policy with powers of two up to `batch_max`.
    pub fn new(batch_max: usize, objective: Option<Nanos>, concurrent: usize) -> Auto {
        let doubled = |size: &usize| size.checked_mul(2).filter(|size| *size <= batch_max);
        let mut sizes: Vec<usize> = std::iter::successors(Some(1), doubled).collect();
        if sizes.last() != Some(&batch_max) && batch_max > 1 {
            sizes.push(batch_max);
        }
        Auto { sizes, objective, concurrent, decided: 0 }
    }

    /// The largest batch that pays off. Unknown sizes count as free, so that they are tried.
    fn largest(&self, profile: &BatchProfile, further: bool) -> usize {
        let worth = |small: usize, large: usize| {
            let (one, other) = (profile.latency(small).0 as f64, profile.latency(large).0 as f64);
            let taken = profile.latency(large).0.saturating_mul(self.concurrent as u64);
            let fits = self.objective.is_none_or(|objective| taken <= objective.0 / 2);
            (fits, other <= one * (large as f64 / small as f64) * PAYS_OFF)
        };
        let mut largest = self.sizes[0];
        let mut further = further;
        for pair in self.sizes.windows(2) {
            let (fits, worth) = worth(pair[0], pair[1]);
            if !fits || (!worth && !std::mem::take(&mut further)) {
                break;
            }
            largest = pair[1];
        }
        largest
    }
}

impl BatchPolicy for Auto {
    fn name(&self) -> &'static str {
        "auto"
    }

    fn decide(&mut self, _: Nanos, model: &ModelView<'_>, decisions: &mut Vec<Decision>) {
        let mut remaining = model.waiting.len();
        let idle = model.workers.iter().enumerate().filter(|(_, worker)| !worker.busy);
        for (worker, facts) in idle {
            if remaining == 0 {
                return;
            }
            self.decided = self.decided.wrapping_add(1);
            let largest = self.largest(model.profile, self.decided.is_multiple_of(TRY_EVERY));
            let fits = |size: &&usize| **size <= remaining.min(largest).min(facts.batch);
            let count = self.sizes.iter().rev().find(fits).copied().unwrap_or(1);
            decisions.push(Decision::Launch { worker, count });
            remaining -= count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batching::{WaitingRequest, Worker};

    fn counts(profile: &BatchProfile, waiting: usize, objective: Option<Nanos>) -> Vec<usize> {
        let waiting =
            vec![WaitingRequest { arrived: Nanos(0), deadline: Nanos::MAX }; waiting].into();
        let workers = [Worker { batch: 32, busy: false }; 2];
        let view = ModelView { waiting: &waiting, workers: &workers, profile, running: 0 };
        let mut decisions = Vec::new();
        Auto::new(32, objective, 1).decide(Nanos(0), &view, &mut decisions);
        let count = |decision: &Decision| match decision {
            Decision::Launch { count, .. } => *count,
            other => panic!("{other:?}"),
        };
        decisions.iter().map(count).collect()
    }

    #[test]
    fn batches_are_as_large_as_times_justify() {
        let flat = BatchProfile::linear(Nanos(10), Nanos(1_000), 32);
        assert_eq!(counts(&flat, 1, None), [1]);
        assert_eq!(counts(&flat, 7, None), [4, 2]);
        assert_eq!(counts(&flat, 100, None), [32, 32]);
        // On a device where two take as long as one after another, batches do not pay off.
        let steep = BatchProfile::linear(Nanos(1_000), Nanos(10), 32);
        assert_eq!(counts(&steep, 100, None), [1, 1]);
    }

    #[test]
    fn the_slo_bounds_batches() {
        let profile = BatchProfile::linear(Nanos(100), Nanos(1_000), 32);
        assert_eq!(counts(&profile, 100, Some(Nanos(4_000))), [8, 8]);
        assert_eq!(counts(&profile, 100, Some(Nanos(10))), [1, 1], "no request is refused");
    }

    #[test]
    fn tries_larger_batches_again() {
        let steep = BatchProfile::linear(Nanos(1_000), Nanos(10), 32);
        let waiting = vec![WaitingRequest { arrived: Nanos(0), deadline: Nanos::MAX }; 8].into();
        let workers = [Worker { batch: 32, busy: false }];
        let view = ModelView { waiting: &waiting, workers: &workers, profile: &steep, running: 0 };
        let (mut policy, mut decisions) = (Auto::new(32, None, 1), Vec::new());
        (0..2 * TRY_EVERY).for_each(|_| policy.decide(Nanos(0), &view, &mut decisions));
        let larger = decisions.iter().filter(|d| matches!(d, Decision::Launch { count: 2, .. }));
        assert_eq!(larger.count(), 2);
    }
}
