//! Atoll's own policy without co-running best effort.

use device::DeviceCapabilities;

use super::{Atoll, CoRun, Policy, Rules};

/// As [`Atoll`], but best effort never co-runs with real time.
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
