//! Faults of the simulated GPU.

use base::Nanos;
use serde::{Deserialize, Serialize};

use super::{Gpu, GpuEvent};

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum FaultKind {
    /// The next kernel takes this many times as long.
    SlowKernel {
        /// How many times.
        factor: f64,
    },
    /// The next completion of a segment is lost.
    LostCompletion,
    /// The device is lost and comes back empty.
    DeviceReset,
    /// Copies stall.
    CopyStall {
        /// For how long, in microseconds.
        span_us: u64,
    },
}

/// A fault at a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fault {
    /// When.
    pub at: Nanos,
    /// What.
    pub kind: FaultKind,
}

impl Gpu {
    pub(super) fn apply_faults(&mut self) {
        while let Some(fault) = self.faults.front().copied().filter(|fault| fault.at <= self.now) {
            self.faults.pop_front();
            match fault.kind {
                FaultKind::DeviceReset if self.ready_again_at.is_none() => self.reset(self.now),
                FaultKind::DeviceReset => {}
                FaultKind::CopyStall { span_us } => self.stall_copies(Nanos::from_micros(span_us)),
                kind => self.armed.push(kind),
            }
        }
    }

    fn stall_copies(&mut self, span: Nanos) {
        self.copy_free = self.copy_free.max(self.now) + span;
        for (ends, _) in &mut self.copies {
            *ends += span;
        }
    }

    /// Slowdown of the kernel that is dispatched now.
    pub(super) fn armed_slowdown(&mut self) -> f64 {
        let slow = |kind: &FaultKind| matches!(kind, FaultKind::SlowKernel { .. });
        match self.armed.iter().position(slow).map(|index| self.armed.remove(index)) {
            Some(FaultKind::SlowKernel { factor }) => factor.max(1.0),
            _ => 1.0,
        }
    }

    /// Whether the completion that is due now is lost.
    pub(super) fn completion_is_lost(&mut self, stream: usize) -> bool {
        let lost = |kind: &FaultKind| matches!(kind, FaultKind::LostCompletion);
        if let Some(index) = self.armed.iter().position(lost) {
            self.armed.remove(index);
            self.streams[stream].stuck = true;
        }
        let stuck = self.streams[stream].stuck;
        if stuck {
            self.events.retain(
                |event| !matches!(event, GpuEvent::Preempted { stream: s, .. } if *s == stream),
            );
        }
        stuck
    }
}
