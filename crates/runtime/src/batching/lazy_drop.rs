//! Clipper's lazy drop: the oldest request decides, and is dropped only when it is late.

use base::Nanos;

use super::{BatchPolicy, Decision, ModelView};

/// Runs the largest batch that the remaining time of the oldest request allows.
#[derive(Clone, Copy, Debug)]
pub struct LazyDrop {
    /// The largest batch.
    pub batch_max: usize,
}

impl BatchPolicy for LazyDrop {
    fn name(&self) -> &'static str {
        "lazy_drop"
    }

    fn decide(&mut self, now: Nanos, model: &ModelView<'_>, decisions: &mut Vec<Decision>) {
        let Some(worker) = model.idle_worker() else { return };
        let late = model.waiting.iter().take_while(|request| request.deadline <= now).count();
        if late > 0 {
            decisions.push(Decision::Drop { count: late });
        }
        let Some(oldest) = model.waiting.get(late) else { return };
        let fits = model.profile.largest_within(oldest.deadline - now).max(1);
        let count = fits.min(self.batch_max).min(model.waiting.len() - late);
        decisions.push(Decision::Launch { worker, count });
    }
}
