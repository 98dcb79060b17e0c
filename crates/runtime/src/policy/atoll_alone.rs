//! Atoll's own policy without padding.

use device::DeviceCapabilities;

use super::{Atoll, CoRun, Policy, Rules};

/// As [`Atoll`], but nothing of best effort goes on beside real time.
#[derive(Clone, Copy, Debug)]
pub struct AtollAlone;

impl Policy for AtollAlone {
    fn name(&self) -> &'static str {
        "atoll_alone"
    }

    fn rules(&self, device: DeviceCapabilities) -> Rules {
        Rules { co_run: CoRun::None, ..Atoll.rules(device) }
    }
}
