//! Atoll's own policy.

use device::Leave;

use super::{Beside, PaddingRules, Policy, Rules, Start, Streams};

/// An epoch makes best effort leave inside its tiles while real time is already on its way; it goes on from the
/// very tile, and meanwhile pads what real time leaves.
#[derive(Clone, Copy, Debug)]
pub struct Atoll;

impl Policy for Atoll {
    fn name(&self) -> &'static str {
        "atoll"
    }

    fn rules(&self) -> Rules {
        Rules {
            streams: Streams::Split,
            leave: Some(Leave::InsideTile),
            start: Start::AtOnce,
            beside: Beside::Padding(PaddingRules::ATOLL),
            high_priority: true,
            best_effort: true,
        }
    }
}
