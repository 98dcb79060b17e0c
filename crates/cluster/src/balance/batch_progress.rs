//! Estimates the progress of a backend's batches from the requests sent to it and its replies.

use base::Nanos;

/// Batches of a backend that serves only one model, as a frontend sees them: some requests run, the
/// others wait for the next batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchProgress {
    running: usize,
    waiting: usize,
    /// When the running batch started.
    started: Nanos,
}

/// A planned batch, as far as one frontend fills it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPlan {
    /// Maximum number of requests.
    pub batch: usize,
    /// Number of requests at which it starts without waiting for more.
    pub min_batch: usize,
    /// How long a full batch runs.
    pub full_time: Nanos,
}

impl BatchProgress {
    /// A request was sent: it waits for others, or completes a batch that starts.
    pub fn sent(&mut self, now: Nanos, plan: BatchPlan) {
        self.waiting += 1;
        self.begin(now, plan);
    }

    fn begin(&mut self, now: Nanos, plan: BatchPlan) {
        if self.running == 0 && self.waiting >= plan.min_batch.max(1) {
            self.running = self.waiting.min(plan.batch.max(1));
            self.waiting -= self.running;
            self.started = now;
        }
    }

    /// A request completed. The last one of a batch starts the next batch with the requests that
    /// wait. A reply while no batch seemed to run means that the first waiting request could not
    /// wait longer.
    pub fn completed(&mut self, now: Nanos, plan: BatchPlan) {
        if self.running == 0 {
            self.running = std::mem::take(&mut self.waiting);
        }
        self.running = self.running.saturating_sub(1);
        self.begin(now, plan);
    }

    /// A request was dropped before its batch started.
    pub fn dropped(&mut self, now: Nanos, plan: BatchPlan) {
        match self.waiting {
            0 => self.completed(now, plan),
            _ => self.waiting -= 1,
        }
    }

    /// Requests that wait for the next batch.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// When the next batch is expected to start. A batch of any size takes at least half of the
    /// time of a full one.
    pub fn next_start(&self, now: Nanos, plan: BatchPlan) -> Nanos {
        if self.running == 0 {
            return now;
        }
        let batch = plan.batch.max(1) as u64;
        let part = batch + (self.running as u64).min(batch);
        now.max(self.started + Nanos(plan.full_time.0 / (2 * batch) * part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: BatchPlan = BatchPlan { batch: 4, min_batch: 1, full_time: Nanos(80) };

    #[test]
    fn tracks_batches_by_requests_and_replies() {
        let mut progress = BatchProgress::default();
        progress.sent(Nanos(10), PLAN);
        assert_eq!((progress.waiting(), progress.next_start(Nanos(11), PLAN)), (0, Nanos(60)));
        (0..5).for_each(|_| progress.sent(Nanos(20), PLAN));
        assert_eq!(progress.waiting(), 5);
        progress.completed(Nanos(55), PLAN);
        assert_eq!((progress.waiting(), progress.next_start(Nanos(56), PLAN)), (1, Nanos(135)));
        progress.dropped(Nanos(60), PLAN);
        (0..4).for_each(|_| progress.completed(Nanos(135), PLAN));
        assert_eq!((progress.waiting(), progress.next_start(Nanos(140), PLAN)), (0, Nanos(140)));
        progress.dropped(Nanos(150), PLAN);
        assert_eq!((progress.running, progress.waiting), (0, 0));
    }

    #[test]
    fn batch_waits_for_its_minimum_but_not_forever() {
        let plan = BatchPlan { min_batch: 3, ..PLAN };
        let mut progress = BatchProgress::default();
        (0..2).for_each(|_| progress.sent(Nanos(5), plan));
        assert_eq!((progress.waiting(), progress.next_start(Nanos(6), plan)), (2, Nanos(6)));
        progress.sent(Nanos(7), plan);
        assert_eq!((progress.waiting(), progress.next_start(Nanos(8), plan)), (0, Nanos(77)));
        (0..3).for_each(|_| progress.completed(Nanos(77), plan));
        // Two more started without a third one, because the first could not wait longer.
        (0..2).for_each(|_| progress.sent(Nanos(80), plan));
        progress.completed(Nanos(150), plan);
        assert_eq!((progress.running, progress.waiting), (1, 0));
    }
}
