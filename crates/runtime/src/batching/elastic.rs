//! Ebird's elastic batching: workers of several sizes, started as soon as they can be filled.

use base::Nanos;

use super::{BatchPolicy, Decision, ModelView};

/// Algorithm 1 of the paper: gives each idle worker its batch while enough requests wait and fewer
/// than `inferences_max` run.
#[derive(Clone, Copy, Debug)]
pub struct Elastic {
    /// Maximum number of running inferences.
    pub inferences_max: usize,
}

impl Elastic {
    /// The workers the paper uses.
    pub const WORKERS: [usize; 6] = [1, 1, 2, 4, 8, 16];
}

impl BatchPolicy for Elastic {
    fn name(&self) -> &'static str {
        "elastic"
    }

    fn decide(&mut self, _: Nanos, model: &ModelView<'_>, decisions: &mut Vec<Decision>) {
        let alive_left = self.inferences_max.saturating_sub(model.running);
        let mut ready = model.waiting.len().min(alive_left);
        let mut idle: Vec<usize> =
            (0..model.workers.len()).filter(|index| !model.workers[*index].busy).collect();
        // The largest idle workers come first: the load decides how many are used.
        idle.sort_by_key(|index| std::cmp::Reverse(model.workers[*index].batch));
        for worker in idle {
            let batch = model.workers[worker].batch;
            if ready >= batch {
                decisions.push(Decision::Launch { worker, count: batch });
                ready -= batch;
            }
        }
    }
}
