//! How a solver learns of time and of a wish to stop, and how its caller learns of its progress.

use base::{Clock, Nanos};

/// Where a solver stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// What it does now.
    pub phase: &'static str,
    /// GPUs of the best plan so far.
    pub gpus: Option<usize>,
    /// Proven lower bound so far.
    pub bound: f64,
}

/// Passed into a solver; asked now and then.
pub struct Watch<'a> {
    clock: &'a dyn Clock,
    report: &'a mut dyn FnMut(Progress) -> bool,
    start: Nanos,
    stopped: bool,
}

impl<'a> Watch<'a> {
    /// A watch whose `report` says whether to go on.
    pub fn new(clock: &'a dyn Clock, report: &'a mut dyn FnMut(Progress) -> bool) -> Watch<'a> {
        Watch { start: clock.now(), clock, report, stopped: false }
    }

    /// Reports, and says whether to go on.
    pub fn go_on(&mut self, phase: &'static str, gpus: Option<usize>, bound: f64) -> bool {
        if !self.stopped {
            self.stopped = !(self.report)(Progress { phase, gpus, bound });
        }
        !self.stopped
    }

    /// Whether the caller asked to stop.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Seconds since the watch was made.
    pub fn seconds(&self) -> f64 {
        self.clock.now().0.saturating_sub(self.start.0) as f64 / 1e9
    }
}
