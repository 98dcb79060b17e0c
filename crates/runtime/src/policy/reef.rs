//! REEF: reset-based preemption and dynamic kernel padding.

use device::{DeviceCapabilities, PreemptMode};

use super::{
    CoRun, PaddingRules, Policy, PreemptionPoint, Progress, RealTimeStart, Rules, Streams,
};

/// Queues are reset and running kernels killed, then real time starts; chosen best-effort kernels are fused
/// with its own.
#[derive(Clone, Copy, Debug)]
pub struct Reef {
    /// Kernels of a stream that the hardware holds.
    pub queue_capacity: usize,
}

impl Policy for Reef {
    fn name(&self) -> &'static str {
        "reef"
    }

    fn is_supported(&self, device: DeviceCapabilities) -> bool {
        device.queue_reset && device.block_budgets
    }

    fn rules(&self, _device: DeviceCapabilities) -> Rules {
        Rules {
            streams: Streams::Split,
            preempt: Some(PreemptMode::Kill),
            start: RealTimeStart::AfterPreemption,
            co_run: CoRun::Padding(PaddingRules::REEF),
            high_priority: true,
            best_effort: true,
        }
    }

    /// Nobody knows which kernel was killed, only that it is at most a queue's length before the last one that
    /// was handed over, and not before the one the launch began with.
    fn restore(&self, left: PreemptionPoint, known: Progress) -> Progress {
        let step = left.transmitted.saturating_sub(self.queue_capacity).max(known.step);
        Progress { step, tile: 0 }
    }
}
