//! Batches of one machine of a backend pool.

use base::Nanos;

use super::{BatchPolicy, Decision, EarlyDrop, ModelView, StaggeredBatch};

/// One batch at a time. It starts with `least` requests, or when the first one cannot wait longer.
/// Frontends fill one machine after the other: a machine that started with fewer would be busy when
/// it is filled.
#[derive(Clone, Copy, Debug)]
pub struct Staggered {
    /// The batches of the pool.
    pub batches: StaggeredBatch,
}

impl BatchPolicy for Staggered {
    fn name(&self) -> &'static str {
        "staggered"
    }

    fn decide(&mut self, now: Nanos, model: &ModelView<'_>, decisions: &mut Vec<Decision>) {
        if model.running > 0 || model.waiting.is_empty() {
            return;
        }
        let rule = EarlyDrop { batch: self.batches.batch };
        let (dropped, count) = rule.window(now, model).unwrap_or((model.waiting.len(), 0));
        if dropped > 0 {
            decisions.push(Decision::Drop { count: dropped });
        }
        let Some(first) = model.waiting.get(dropped) else { return };
        // Without an SLO, waiting pays off for one batch time at most.
        let last = first.deadline - model.profile.latency(count + 1);
        let start_by = last.min(first.arrived + model.profile.latency(self.batches.batch));
        if count < self.batches.least && now < start_by {
            decisions.push(Decision::WakeAt(start_by));
            return;
        }
        // The smallest worker that fits, or the largest.
        let idle = || (0..model.workers.len()).filter(|&index| !model.workers[index].busy);
        let batch = |index: &usize| model.workers[*index].batch;
        let holds = idle().filter(|index| batch(index) >= count).min_by_key(batch);
        if let Some(worker) = holds.or_else(|| idle().max_by_key(batch)) {
            let count = count.min(model.workers[worker].batch);
            decisions.push(Decision::Launch { worker, count });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::super::{BatchProfile, WaitingRequest, Worker};
    use super::*;

    fn decide(now: u64, waiting: &[(u64, u64)], running: usize) -> Vec<Decision> {
        let waiting: VecDeque<WaitingRequest> = waiting
            .iter()
            .map(|&(arrived, deadline)| WaitingRequest {
                arrived: Nanos(arrived),
                deadline: Nanos(deadline),
            })
            .collect();
        let profile = BatchProfile::linear(Nanos(10), Nanos(20), 8);
        let worker = |batch| Worker { batch, busy: false };
        let workers = [1, 1, 2, 4, 8].map(worker);
        let view = ModelView { waiting: &waiting, workers: &workers, profile: &profile, running };
        let mut decisions = Vec::new();
        let batches = StaggeredBatch { batch: 8, least: 3 };
        Staggered { batches }.decide(Nanos(now), &view, &mut decisions);
        decisions
    }

    #[test]
    fn waits_for_the_minimum_until_the_first_must_start() {
        assert_eq!(decide(0, &[], 0), []);
        assert_eq!(decide(5, &[(0, 150)], 0), [Decision::WakeAt(Nanos(100))]);
        // Two requests take 40, which the first has time for until 60.
        assert_eq!(decide(5, &[(0, 100)], 0), [Decision::WakeAt(Nanos(60))]);
        assert_eq!(decide(60, &[(0, 100)], 0), [Decision::Launch { worker: 0, count: 1 }]);
        let three = [(0, 200), (1, 201), (2, 202)];
        assert_eq!(decide(5, &three, 0), [Decision::Launch { worker: 3, count: 3 }]);
        assert_eq!(decide(5, &three, 2), []);
    }

    #[test]
    fn wait_is_bounded_and_late_requests_are_dropped() {
        assert_eq!(decide(5, &[(0, u64::MAX)], 0), [Decision::WakeAt(Nanos(100))]);
        let launch = Decision::Launch { worker: 0, count: 1 };
        assert_eq!(decide(100, &[(0, u64::MAX)], 0), [launch]);
        let late = [(0, 10), (0, 400), (0, 400), (0, 400)];
        let launch = Decision::Launch { worker: 3, count: 3 };
        assert_eq!(decide(5, &late, 0), [Decision::Drop { count: 1 }, launch]);
        assert_eq!(decide(5, &[(0, 10)], 0), [Decision::Drop { count: 1 }]);
    }
}
