//! How far a backend is with its turns, as far as one who sends to it can tell from what was sent and what came back.

use base::Nanos;

/// A backend that does nothing but one model, seen from a frontend: some requests run, the others gather for the next turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchProgress {
    running: usize,
    waiting: usize,
    /// When what runs began.
    started: Nanos,
}

/// A turn as it is planned, as far as one frontend fills it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPlan {
    /// Requests it takes at most.
    pub batch: usize,
    /// Requests that let it begin before the first of them has to.
    pub min_batch: usize,
    /// How long a full one runs.
    pub full_time: Nanos,
}

impl BatchProgress {
    /// A request was sent: it waits for others, or completes what a turn begins with.
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

    /// A request was answered. The last one of a turn lets the next begin with what has gathered. An answer from one that
    /// seemed to wait means that the first request there could not wait any longer.
    pub fn completed(&mut self, now: Nanos, plan: BatchPlan) {
        if self.running == 0 {
            self.running = std::mem::take(&mut self.waiting);
        }
        self.running = self.running.saturating_sub(1);
        self.begin(now, plan);
    }

    /// A request was given up before its turn.
    pub fn dropped(&mut self, now: Nanos, plan: BatchPlan) {
        match self.waiting {
            0 => self.completed(now, plan),
            _ => self.waiting -= 1,
        }
    }

    /// Requests for the next turn.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// When the next turn is expected to begin. About half of a full turn's time is taken by a batch of any size.
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
    fn turns_follow_from_what_is_sent_and_answered() {
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
    fn a_turn_waits_for_what_it_begins_with_and_for_no_longer_than_it_can() {
        let plan = BatchPlan { min_batch: 3, ..PLAN };
        let mut progress = BatchProgress::default();
        (0..2).for_each(|_| progress.sent(Nanos(5), plan));
        assert_eq!((progress.waiting(), progress.next_start(Nanos(6), plan)), (2, Nanos(6)));
        progress.sent(Nanos(7), plan);
        assert_eq!((progress.waiting(), progress.next_start(Nanos(8), plan)), (0, Nanos(77)));
        (0..3).for_each(|_| progress.completed(Nanos(77), plan));
        // Two more went without a third, when the first had to.
        (0..2).for_each(|_| progress.sent(Nanos(80), plan));
        progress.completed(Nanos(150), plan);
        assert_eq!((progress.running, progress.waiting), (1, 0));
    }
}
