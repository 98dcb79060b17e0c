//! REEF-N: the part of REEF that works with a closed driver.

use device::{DeviceCapabilities, PreemptMode};

use super::{CoRun, Policy, RealTimeStart, Rules, Streams};

/// A flag at kernel entry empties the bounded queues; real time waits for the running kernel.
#[derive(Clone, Copy, Debug)]
pub struct ReefN;

impl Policy for ReefN {
    fn name(&self) -> &'static str {
        "reef_n"
    }

    fn rules(&self, _device: DeviceCapabilities) -> Rules {
        Rules {
            streams: Streams::Split,
            preempt: Some(PreemptMode::BetweenLaunches),
            start: RealTimeStart::AfterPreemption,
            co_run: CoRun::None,
            high_priority: true,
            best_effort: true,
        }
    }
}
