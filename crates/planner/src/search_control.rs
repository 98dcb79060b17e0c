//! Time, cancellation and progress reports of a solver.

use base::{Clock, Nanos};

/// Progress of a solver.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SearchProgress {
    /// Current phase.
    pub phase: &'static str,
    /// GPUs of the best plan so far.
    pub gpus: Option<usize>,
    /// Proven lower bound so far.
    pub bound: f64,
}

/// Gives a solver the time, reports its progress and stops it. Solvers poll it.
pub struct SearchControl<'a> {
    clock: &'a dyn Clock,
    report: &'a mut dyn FnMut(SearchProgress) -> bool,
    start: Nanos,
    stopped: bool,
}

impl<'a> SearchControl<'a> {
    /// A control whose `report` returns whether to continue.
    pub fn new(
        clock: &'a dyn Clock,
        report: &'a mut dyn FnMut(SearchProgress) -> bool,
    ) -> SearchControl<'a> {
        SearchControl { start: clock.now(), clock, report, stopped: false }
    }

    /// Reports progress; returns whether to continue.
    pub fn should_continue(
        &mut self,
        phase: &'static str,
        gpus: Option<usize>,
        bound: f64,
    ) -> bool {
        if !self.stopped {
            self.stopped = !(self.report)(SearchProgress { phase, gpus, bound });
        }
        !self.stopped
    }

    /// Whether the caller stopped the solver.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Seconds since the control was created.
    pub fn seconds(&self) -> f64 {
        self.clock.now().0.saturating_sub(self.start.0) as f64 / 1e9
    }
}
