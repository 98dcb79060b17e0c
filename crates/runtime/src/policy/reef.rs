//! REEF: reset-based preemption and dynamic kernel padding.

use device::{DeviceCapabilities, PreemptMode};

use super::{
    CoRun, PaddingRules, Policy, PreemptionPoint, RealTimeStart, ResumePoint, Rules, Streams,
};

/// Resets queues and kills running kernels, then starts real time. Selected best-effort kernels are
/// fused with real-time kernels.
#[derive(Clone, Copy, Debug)]
pub struct Reef {
    /// Kernels of a stream that the hardware queues.
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

    /// The killed kernel is not known: it is at most a queue's length before the last one that was
    /// sent, and not before the first one of the launch.
    fn restore(&self, point: PreemptionPoint, known: ResumePoint) -> ResumePoint {
        let step = point.transmitted.saturating_sub(self.queue_capacity).max(known.step);
        ResumePoint { step, tile: 0 }
    }
}
