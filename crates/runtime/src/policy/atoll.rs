//! Atoll's own policy.

use device::PreemptMode;

use super::{CoRun, PaddingRules, Policy, RealTimeStart, Rules, Streams};

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
            preempt: Some(PreemptMode::InsideTile),
            start: RealTimeStart::AtOnce,
            co_run: CoRun::Padding(PaddingRules::ATOLL),
            high_priority: true,
            best_effort: true,
        }
    }
}
