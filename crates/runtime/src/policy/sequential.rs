//! One task at a time, as Clockwork does.

use device::DeviceCapabilities;

use super::{CoRun, Policy, RealTimeStart, Rules, Streams};

/// Real time goes first but waits for the running task.
#[derive(Clone, Copy, Debug)]
pub struct Sequential;

impl Policy for Sequential {
    fn name(&self) -> &'static str {
        "sequential"
    }

    fn rules(&self, _device: DeviceCapabilities) -> Rules {
        Rules {
            streams: Streams::One,
            preempt: None,
            start: RealTimeStart::AfterPreemption,
            co_run: CoRun::None,
            high_priority: false,
            best_effort: true,
        }
    }
}
