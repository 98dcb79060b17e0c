//! Nexus's early drop: requests with so little time that they would force a small batch are
//! dropped.

use base::Nanos;

use super::{BatchPolicy, Decision, ModelView, WaitingRequest};

/// Slides a window of the session's batch size over the queue, stops at the first request with time
/// for the whole window, and drops all before it.
#[derive(Clone, Copy, Debug)]
pub struct EarlyDrop {
    /// The session's batch size; see [`super::BatchProfile::batch_for_objective`].
    pub batch: usize,
}

impl EarlyDrop {
    /// Requests before the window, and its length; `None` when no request has enough time.
    pub(super) fn window(&self, now: Nanos, model: &ModelView<'_>) -> Option<(usize, usize)> {
        let waiting = model.waiting.len();
        let fits = |(skipped, first): (usize, &WaitingRequest)| {
            let count = self.batch.min(waiting - skipped);
            (now + model.profile.latency(count) <= first.deadline).then_some((skipped, count))
        };
        model.waiting.iter().enumerate().find_map(fits)
    }
}

impl BatchPolicy for EarlyDrop {
    fn name(&self) -> &'static str {
        "early_drop"
    }

    fn decide(&mut self, now: Nanos, model: &ModelView<'_>, decisions: &mut Vec<Decision>) {
        let Some(worker) = model.idle_worker() else { return };
        let (dropped, count) = self.window(now, model).unwrap_or((model.waiting.len(), 0));
        if dropped > 0 {
            decisions.push(Decision::Drop { count: dropped });
        }
        if count > 0 {
            decisions.push(Decision::Launch { worker, count });
        }
    }
}
