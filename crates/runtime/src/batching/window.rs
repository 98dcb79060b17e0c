//! A fixed maximum batch and maximum wait, as in TensorFlow Serving and Triton.

use base::Nanos;

use super::{BatchPolicy, Decision, ModelView};

/// Launches when the batch is full or the oldest request has waited for `wait_max`.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// The largest batch.
    pub batch_max: usize,
    /// The maximum wait.
    pub wait_max: Nanos,
}

impl BatchPolicy for Window {
    fn name(&self) -> &'static str {
        "window"
    }

    fn decide(&mut self, now: Nanos, model: &ModelView<'_>, decisions: &mut Vec<Decision>) {
        let mut remaining = model.waiting.len();
        let idle = model.workers.iter().enumerate().filter(|(_, worker)| !worker.busy);
        for (worker, _) in idle {
            let Some(front) = model.waiting.get(model.waiting.len() - remaining) else { return };
            let due = front.arrived + self.wait_max;
            if remaining < self.batch_max && now < due {
                decisions.push(Decision::WakeAt(due));
                return;
            }
            let count = remaining.min(self.batch_max);
            decisions.push(Decision::Launch { worker, count });
            remaining -= count;
        }
    }
}
