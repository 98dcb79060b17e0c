//! All tasks at once on streams of their own, as TensorRT runs them.

use device::DeviceCapabilities;

use super::{CoRun, Policy, RealTimeStart, Rules, Streams};

/// No task waits for another; the hardware shares the SMs.
#[derive(Clone, Copy, Debug)]
pub struct FreeStreams;

impl Policy for FreeStreams {
    fn name(&self) -> &'static str {
        "free_streams"
    }

    fn rules(&self, _device: DeviceCapabilities) -> Rules {
        Rules {
            streams: Streams::Many,
            preempt: None,
            start: RealTimeStart::AtOnce,
            co_run: CoRun::All,
            high_priority: false,
            best_effort: true,
        }
    }
}
