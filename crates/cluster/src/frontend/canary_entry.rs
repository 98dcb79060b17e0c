//! A canary in the routing table, and what is counted of it and of the version in force.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use base::Nanos;

use super::routing_table::ModelEntry;
use crate::record::canary::{CanaryLoad, CanaryProgress, CanaryRecord, VersionCounts};

/// A canary as a frontend serves it.
pub struct CanaryEntry {
    /// Its record.
    pub record: CanaryRecord,
    /// Its backends.
    pub entry: Arc<ModelEntry>,
    /// What is counted of it and of the version in force.
    pub meter: Arc<CanaryMeter>,
    /// What the leader knows.
    pub progress: CanaryProgress,
}

/// Which of two versions a request was drawn for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drawn {
    /// The version in force.
    Stable,
    /// The canary.
    Canary,
}

/// Counts of one canary and of the version in force. Requests that chose their version are not
/// among them: they are not drawn at random, so they say nothing about a difference.
#[derive(Debug, Default)]
pub struct CanaryMeter {
    number: u64,
    counts: Mutex<(VersionCounts, VersionCounts)>,
    fallbacks: AtomicU64,
}

impl CanaryMeter {
    /// For the canary `number`.
    pub fn new(number: u64) -> CanaryMeter {
        CanaryMeter { number, ..CanaryMeter::default() }
    }

    /// Number of the canary.
    pub fn number(&self) -> u64 {
        self.number
    }

    fn change(&self, drawn: Drawn, change: impl FnOnce(&mut VersionCounts)) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        match drawn {
            Drawn::Stable => change(&mut counts.0),
            Drawn::Canary => change(&mut counts.1),
        }
    }

    /// Counts a reply after `latency`.
    pub fn reply(&self, drawn: Drawn, latency: Nanos, objective: Option<Nanos>) {
        let late = objective.is_some_and(|objective| latency > objective);
        self.change(drawn, |counts| counts.reply(latency, late));
    }

    /// Counts a failure.
    pub fn fail(&self, drawn: Drawn) {
        self.change(drawn, VersionCounts::fail);
    }

    /// Requests that the version in force answered because the canary did not.
    pub fn fallbacks(&self) -> u64 {
        self.fallbacks.load(Relaxed)
    }

    /// Counts such a request.
    pub fn fall_back(&self) {
        self.fallbacks.fetch_add(1, Relaxed);
    }

    /// The counts, to report.
    pub fn load(&self) -> CanaryLoad {
        let (stable, canary) = self.counts.lock().unwrap_or_else(PoisonError::into_inner).clone();
        CanaryLoad { number: self.number, stable, canary }
    }
}
