//! Batching: how many waiting requests of a model go to the device together, and when.
//!
//! A policy is a short file over one interface. It sees the waiting requests of one model, its idle
//! workers and what a batch costs, and says what to launch, what to drop and when to ask again. It
//! keeps no clock and touches no device, so the same code runs in production and in virtual time.

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

/// What batches of a model are made of on a machine that shares its requests with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaggeredBatch {
    /// Requests of a batch at most.
    pub batch: usize,
    /// Requests that let one begin before it has to.
    pub least: usize,
}

/// A request that waits, as a policy sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingRequest {
    /// When it came.
    pub arrived: Nanos,
    /// When its answer is of no more use.
    pub deadline: Nanos,
}

/// Something that runs one batch at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worker {
    /// The largest batch it takes.
    pub batch: usize,
    /// Whether it runs one now.
    pub busy: bool,
}

/// One model as a policy sees it.
#[derive(Debug)]
pub struct ModelView<'a> {
    /// Who waits, earliest deadline first.
    pub waiting: &'a VecDeque<WaitingRequest>,
    /// Who could run it, in the order the owner prefers.
    pub workers: &'a [Worker],
    /// What a batch costs.
    pub profile: &'a BatchProfile,
    /// Requests that are on the device now.
    pub running: usize,
}

impl ModelView<'_> {
    /// The first worker that does nothing.
    pub fn idle_worker(&self) -> Option<usize> {
        self.workers.iter().position(|worker| !worker.busy)
    }
}

/// What a policy decides. Decisions are carried out in order; each speaks of the queue as the ones
/// before it leave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Give up the first `count` requests: their deadlines cannot be met at a price worth paying.
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
    /// Ask again at this time, unless something happens before.
    WakeAt(Nanos),
}

/// Decides for one model.
pub trait BatchPolicy: Debug + Send {
    /// The name users know it by.
    fn name(&self) -> &'static str;

    /// Called whenever a request came, a batch ended or a wake-up is due. Appends to `decisions`.
    fn decide(&mut self, now: Nanos, model: &ModelView<'_>, decisions: &mut Vec<Decision>);
}

#[cfg(test)]
mod tests;
