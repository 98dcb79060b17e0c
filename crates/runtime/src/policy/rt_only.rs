//! Real time alone: the baseline of every other policy's latency.

use device::DeviceCapabilities;

use super::{CoRun, Policy, RealTimeStart, Rules, Streams};

/// Best effort never runs.
#[derive(Clone, Copy, Debug)]
pub struct RtOnly;

impl Policy for RtOnly {
    fn name(&self) -> &'static str {
        "rt_only"
    }

    fn rules(&self, _device: DeviceCapabilities) -> Rules {
        Rules {
            streams: Streams::Split,
            preempt: None,
            start: RealTimeStart::AtOnce,
            co_run: CoRun::None,
            high_priority: true,
            best_effort: false,
        }
    }
}
