//! All tasks at once, with real time on streams of high priority.

use device::DeviceCapabilities;

use super::{FreeStreams, Policy, Rules};

/// Blocks of real time are placed first; running blocks are not preempted.
#[derive(Clone, Copy, Debug)]
pub struct PriorityStreams;

impl Policy for PriorityStreams {
    fn name(&self) -> &'static str {
        "priority_streams"
    }

    fn rules(&self, device: DeviceCapabilities) -> Rules {
        Rules { high_priority: true, ..FreeStreams.rules(device) }
    }
}
