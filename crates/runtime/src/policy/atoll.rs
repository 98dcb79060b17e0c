//! Atoll's own policy.

use device::{DeviceCapabilities, PreemptMode};

use super::{CoRun, PaddingRules, Policy, RealTimeStart, Rules, Streams};

/// Real time starts at once. The epoch counters of best effort are incremented at the same time:
/// its blocks exit inside their tiles and resume later from the same tile.
///
/// What runs beside real time depends on the device. Where queues have block budgets, best effort
/// pads the SMs that a real-time kernel does not use. Other devices cannot divide SMs kernel by
/// kernel: there one best-effort task continues, if its model and the real-time model are an
/// admitted co-run pair.
#[derive(Clone, Copy, Debug)]
pub struct Atoll;

impl Policy for Atoll {
    fn name(&self) -> &'static str {
        "atoll"
    }

    fn rules(&self, device: DeviceCapabilities) -> Rules {
        let co_run = match device.block_budgets {
            true => CoRun::Padding(PaddingRules::ATOLL),
            false => CoRun::AdmittedPair,
        };
        Rules {
            streams: Streams::Split,
            preempt: Some(PreemptMode::InsideTile),
            start: RealTimeStart::AtOnce,
            co_run,
            high_priority: true,
            best_effort: true,
        }
    }
}
