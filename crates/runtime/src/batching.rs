//! Batching policies: when a batch of a model starts and how large it is.
//!
//! A policy is one short file. It gets the waiting requests of one model, its workers and the batch
//! times, and returns what to launch, what to drop and when to decide again. It has no clock and no
//! device, so the same code runs in production and in virtual time.

mod adaptive;
mod auto;
mod deferred;
mod early_drop;
mod elastic;
mod lazy_drop;
mod profile;
mod staggered;
mod window;

use std::collections::VecDeque;
use std::fmt::Debug;

use base::Nanos;

pub use adaptive::{Adaptive, AdaptiveOptions};
pub use auto::Auto;
pub use deferred::Deferred;
pub use early_drop::EarlyDrop;
pub use elastic::Elastic;
pub use lazy_drop::LazyDrop;
pub use profile::BatchProfile;
pub use staggered::Staggered;
pub use window::Window;

/// Batches of a model whose requests are distributed over a backend pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaggeredBatch {
    /// Maximum number of requests of a batch.
    pub batch: usize,
    /// Number of requests with which a batch may start early.
    pub least: usize,
}

/// A waiting request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingRequest {
    /// Its arrival.
    pub arrived: Nanos,
    /// Its deadline.
    pub deadline: Nanos,
}

/// Runs one batch at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worker {
    /// Its largest batch.
    pub batch: usize,
    /// Whether it is running one.
    pub busy: bool,
}

/// State of one model for a policy.
#[derive(Debug)]
pub struct ModelView<'a> {
    /// Waiting requests, earliest deadline first.
    pub waiting: &'a VecDeque<WaitingRequest>,
    /// Its workers, the preferred one first.
    pub workers: &'a [Worker],
    /// The batch times.
    pub profile: &'a BatchProfile,
    /// Running requests.
    pub running: usize,
}

impl ModelView<'_> {
    /// The first idle worker.
    pub fn idle_worker(&self) -> Option<usize> {
        self.workers.iter().position(|worker| !worker.busy)
    }
}

/// A decision. Decisions are carried out in order; each refers to the queue after the previous one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Drop the first `count` requests: their deadlines cannot be met at a reasonable cost.
    Drop {
        /// How many.
        count: usize,
    },
    /// Run the first `count` requests as one batch on an idle worker.
    Launch {
        /// Index of the worker.
        worker: usize,
        /// How many.
        count: usize,
    },
    /// Decide again at this time, unless something happens before.
    WakeAt(Nanos),
}

/// A batching policy for one model.
pub trait BatchPolicy: Debug + Send {
    /// The name users know it by.
    fn name(&self) -> &'static str;

    /// Called after every arrival, end of a batch and wake-up. Appends to `decisions`.
    fn decide(&mut self, now: Nanos, model: &ModelView<'_>, decisions: &mut Vec<Decision>);
}

#[cfg(test)]
mod tests;
