//! Everything at once, with real time on streams of higher priority.

use device::DeviceCapabilities;

use super::{FreeStreams, Policy, Rules};

/// Blocks of real time are placed first; what runs is not touched.
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
