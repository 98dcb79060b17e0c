//! Deferred batching: starts as late as the deadline allows while waiting can make the batch
//! larger.

use base::Nanos;

use super::{BatchPolicy, Decision, EarlyDrop, ModelView};

/// Chooses its window as [`EarlyDrop`] does, but a small batch waits for more requests, at most
/// until one more request would not fit any more.
#[derive(Clone, Copy, Debug)]
pub struct Deferred {
    /// The session's batch size; see [`super::BatchProfile::batch_for_objective`].
    pub batch: usize,
    /// Safety margin of every deadline.
    pub margin: Nanos,
}

impl BatchPolicy for Deferred {
    fn name(&self) -> &'static str {
        "deferred"
    }

    fn decide(&mut self, now: Nanos, model: &ModelView<'_>, decisions: &mut Vec<Decision>) {
        let Some(worker) = model.idle_worker() else { return };
        let rule = EarlyDrop { batch: self.batch };
        let Some((dropped, count)) = rule.window(now, model) else {
            if !model.waiting.is_empty() {
                decisions.push(Decision::Drop { count: model.waiting.len() });
            }
            return;
        };
        if dropped > 0 {
            decisions.push(Decision::Drop { count: dropped });
        }
        let first = model.waiting[dropped];
        let next = model.profile.latency(count + 1) + self.margin;
        // A worker that starts late is busy late. So only batches that are small compared with a
        // full one wait, and only for half of the time by which they are shorter: the rest is for
        // requests that arrive meanwhile.
        let small = count * 8 <= self.batch;
        let shorter = model.profile.latency(self.batch) - next;
        let start_by = (first.deadline - next).min(first.arrived + Nanos(shorter.0 / 2));
        if small && now < start_by {
            decisions.push(Decision::WakeAt(start_by));
            return;
        }
        decisions.push(Decision::Launch { worker, count });
    }
}
