//! Rafiqi's adaptive threshold: batches grow slowly with the load and shrink fast when it goes.

use base::Nanos;

use super::{BatchPolicy, Decision, ModelView};

/// Settings of [`Adaptive`], with the paper's values as default.
#[derive(Clone, Copy, Debug)]
pub struct AdaptiveOptions {
    /// The weight of the old threshold when it grows.
    pub alpha: f64,
    /// Time between two looks at the queue.
    pub quantum: Nanos,
    /// The threshold never exceeds this.
    pub threshold_max: f64,
    /// The largest batch.
    pub batch_max: usize,
    /// Let the quantum follow the time of a single request.
    pub adapt_quantum: bool,
}

impl Default for AdaptiveOptions {
    fn default() -> Self {
        AdaptiveOptions {
            alpha: 0.5,
            quantum: Nanos::from_millis(5),
            threshold_max: 128.0,
            batch_max: 128,
            adapt_quantum: false,
        }
    }
}

/// Looks once a quantum: with more requests waiting than the threshold, all go as one batch. Requests
/// of the last quantum above the threshold pull it up by exponential averaging; fewer halve it.
#[derive(Clone, Debug)]
pub struct Adaptive {
    options: AdaptiveOptions,
    threshold: f64,
    quantum: Nanos,
    next_look: Nanos,
    /// Requests that came before this time are counted.
    counted_until: Nanos,
}

impl Adaptive {
    /// A policy that begins with no threshold.
    pub fn new(options: AdaptiveOptions) -> Adaptive {
        Adaptive {
            options,
            threshold: 0.0,
            quantum: options.quantum,
            next_look: Nanos::ZERO,
            counted_until: Nanos::ZERO,
        }
    }

    /// The present threshold.
    pub fn threshold(&self) -> f64 {
        self.threshold
    }

    fn update(&mut self, came: usize) {
        let came = came as f64;
        if came > self.threshold {
            let grown = self.options.alpha * self.threshold + (1.0 - self.options.alpha) * came;
            self.threshold = grown.min(self.options.threshold_max);
        } else if came < self.threshold {
            self.threshold /= 2.0;
            if self.threshold < 1.0 {
                self.threshold = 0.0;
            }
        }
    }

    fn update_quantum(&mut self, single: Nanos) {
        if self.options.adapt_quantum {
            let (old, new) = (self.quantum.0 as f64, single.0 as f64);
            let mixed = self.options.alpha * old + (1.0 - self.options.alpha) * new;
            self.quantum = Nanos((mixed as u64).max(1));
        }
    }
}

impl BatchPolicy for Adaptive {
    fn name(&self) -> &'static str {
        "adaptive"
    }

    fn decide(&mut self, now: Nanos, model: &ModelView<'_>, decisions: &mut Vec<Decision>) {
        if now < self.next_look {
            decisions.push(Decision::WakeAt(self.next_look));
            return;
        }
        let came =
            model.waiting.iter().rev().take_while(|r| r.arrived >= self.counted_until).count();
        self.counted_until = now + Nanos(1);
        self.update(came);
        self.update_quantum(model.profile.latency(1));
        self.next_look = now + self.quantum;
        let mut left = model.waiting.len();
        for (worker, _) in model.workers.iter().enumerate().filter(|(_, worker)| !worker.busy) {
            if left == 0 || (left as f64) < self.threshold {
                break;
            }
            let count = left.min(self.options.batch_max);
            decisions.push(Decision::Launch { worker, count });
            left -= count;
        }
        if left > 0 {
            decisions.push(Decision::WakeAt(self.next_look));
        }
    }
}
