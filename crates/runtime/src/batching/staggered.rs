//! A machine's turns as one of several that share a model's requests.

use base::Nanos;

use super::{BatchPolicy, Decision, EarlyDrop, ModelView, StaggeredBatch};

/// One batch at a time. It begins once `least` requests are there, or when the first of them can wait no longer: those who
/// send fill one machine after the other, and a machine that began with less would be busy when it is to be filled.
#[derive(Clone, Copy, Debug)]
pub struct Staggered {
    /// What a batch is made of.
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
        // Where nothing is promised, waiting is worth a turn at most.
        let last = first.deadline - model.profile.latency(count + 1);
        let start_by = last.min(first.arrived + model.profile.latency(self.batches.batch));
        if count < self.batches.least && now < start_by {
            decisions.push(Decision::WakeAt(start_by));
            return;
        }
        // The smallest worker that holds them all, or else the largest.
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
    fn it_waits_for_the_least_and_for_no_longer_than_the_first_can() {
        assert_eq!(decide(0, &[], 0), []);
        assert_eq!(decide(5, &[(0, 150)], 0), [Decision::WakeAt(Nanos(100))]);
        // One more would make two of 40, which the first has time for until 60.
        assert_eq!(decide(5, &[(0, 100)], 0), [Decision::WakeAt(Nanos(60))]);
        assert_eq!(decide(60, &[(0, 100)], 0), [Decision::Launch { worker: 0, count: 1 }]);
        let three = [(0, 200), (1, 201), (2, 202)];
        assert_eq!(decide(5, &three, 0), [Decision::Launch { worker: 3, count: 3 }]);
        assert_eq!(decide(5, &three, 2), []);
    }

    #[test]
    fn nobody_waits_for_ever_and_the_late_are_given_up() {
        assert_eq!(decide(5, &[(0, u64::MAX)], 0), [Decision::WakeAt(Nanos(100))]);
        let launch = Decision::Launch { worker: 0, count: 1 };
        assert_eq!(decide(100, &[(0, u64::MAX)], 0), [launch]);
        let late = [(0, 10), (0, 400), (0, 400), (0, 400)];
        let launch = Decision::Launch { worker: 3, count: 3 };
        assert_eq!(decide(5, &late, 0), [Decision::Drop { count: 1 }, launch]);
        assert_eq!(decide(5, &[(0, 10)], 0), [Decision::Drop { count: 1 }]);
    }
}
