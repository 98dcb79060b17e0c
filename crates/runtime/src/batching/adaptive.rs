//! Rafiqi's adaptive threshold: batches grow slowly with the load and shrink quickly.

use base::Nanos;

use super::{BatchPolicy, Decision, ModelView};

/// Settings of [`Adaptive`], with the paper's values as default.
#[derive(Clone, Copy, Debug)]
pub struct AdaptiveOptions {
    /// Weight of the old threshold when it grows.
    pub alpha: f64,
    /// Time between two decisions.
    pub quantum: Nanos,
    /// Maximum of the threshold.
    pub threshold_max: f64,
    /// The largest batch.
    pub batch_max: usize,
    /// Whether the quantum follows the time of a single request.
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

/// Decides once per quantum: if more requests wait than the threshold, all run as one batch. More
/// arrivals than the threshold raise it by exponential averaging; fewer halve it.
#[derive(Clone, Debug)]
pub struct Adaptive {
    options: AdaptiveOptions,
    threshold: f64,
    quantum: Nanos,
    next_decision: Nanos,
    /// Requests that arrived before this time are counted.
    counted_until: Nanos,
}

impl Adaptive {
    /// A policy without a threshold at first.
    pub fn new(options: AdaptiveOptions) -> Adaptive {
        Adaptive {
            options,
            threshold: 0.0,
            quantum: options.quantum,
            next_decision: Nanos::ZERO,
            counted_until: Nanos::ZERO,
        }
    }

    /// The current threshold.
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
        if now < self.next_decision {
            decisions.push(Decision::WakeAt(self.next_decision));
            return;
        }
        let came =
            model.waiting.iter().rev().take_while(|r| r.arrived >= self.counted_until).count();
        self.counted_until = now + Nanos(1);
        self.update(came);
        self.update_quantum(model.profile.latency(1));
        self.next_decision = now + self.quantum;
        let mut remaining = model.waiting.len();
        for (worker, _) in model.workers.iter().enumerate().filter(|(_, worker)| !worker.busy) {
            if remaining == 0 || (remaining as f64) < self.threshold {
                break;
            }
            let count = remaining.min(self.options.batch_max);
            decisions.push(Decision::Launch { worker, count });
            remaining -= count;
        }
        if remaining > 0 {
            decisions.push(Decision::WakeAt(self.next_decision));
        }
    }
}
