//! Policies: how real time and best effort share one device.
//!
//! A policy is mostly data: the rules that the core follows on a device with given capabilities. It
//! has code only for where a preempted task resumes, because that depends on what is known after
//! the preemption.

mod atoll;
mod atoll_alone;
mod free_streams;
pub mod padding;
mod priority_streams;
mod reef;
mod reef_n;
mod rt_only;
mod sequential;

use std::fmt::Debug;

use device::{DeviceCapabilities, PreemptMode};

pub use self::atoll::Atoll;
pub use self::atoll_alone::AtollAlone;
pub use self::free_streams::FreeStreams;
pub use self::padding::PaddingRules;
pub use self::priority_streams::PriorityStreams;
pub use self::reef::Reef;
pub use self::reef_n::ReefN;
pub use self::rt_only::RtOnly;
pub use self::sequential::Sequential;

/// A position in a task: all kernels before `step` are done, and `tile` tiles of `step`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResumePoint {
    /// The kernel.
    pub step: usize,
    /// The tile.
    pub tile: u32,
}

/// What is known of a preempted segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PreemptionPoint {
    /// The first kernel that is not complete.
    pub step: usize,
    /// Completed tiles of it; 0 where the device cannot tell.
    pub tile: u32,
    /// The last kernel that was sent to the hardware.
    pub transmitted: usize,
}

impl PreemptionPoint {
    /// A point between two steps.
    pub fn before(step: usize) -> PreemptionPoint {
        PreemptionPoint { step, tile: 0, transmitted: step }
    }
}

/// The streams that a policy uses on a device with several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Streams {
    /// One for both classes: one task at a time.
    One,
    /// One for real time, several for best effort.
    Split,
    /// Several for each.
    Many,
}

/// When a real-time task may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RealTimeStart {
    /// At once; it gets the SMs as best effort exits.
    AtOnce,
    /// When best effort is preempted.
    AfterPreemption,
}

/// What best effort may do while real time runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CoRun {
    /// Nothing.
    None,
    /// Selected kernels on idle SMs.
    Padding(PaddingRules),
    /// One task of an admitted co-run pair.
    AdmittedPair,
    /// Everything.
    All,
}

/// The rules that the core follows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// Streams in use.
    pub streams: Streams,
    /// How best effort is preempted for real time; `None` when it is not.
    pub preempt: Option<PreemptMode>,
    /// When real time starts.
    pub start: RealTimeStart,
    /// What runs beside it.
    pub co_run: CoRun,
    /// Whether the streams of real time have priority on the device.
    pub high_priority: bool,
    /// Whether best effort runs at all.
    pub best_effort: bool,
}

/// How real time and best effort share a device.
pub trait Policy: Debug + Send {
    /// The name users know it by.
    fn name(&self) -> &'static str;

    /// Whether a device with these capabilities can carry out its rules.
    fn is_supported(&self, _device: DeviceCapabilities) -> bool {
        true
    }

    /// The rules that the core follows on a device with these capabilities.
    fn rules(&self, device: DeviceCapabilities) -> Rules;

    /// Where a preempted task resumes. Everything before `known` is certainly done.
    fn restore(&self, point: PreemptionPoint, _known: ResumePoint) -> ResumePoint {
        ResumePoint { step: point.step, tile: point.tile }
    }
}

/// The names of all policies; the product's own is the first.
pub const NAMES: [&str; 8] = [
    "atoll",
    "atoll_alone",
    "reef",
    "reef_n",
    "sequential",
    "free_streams",
    "priority_streams",
    "rt_only",
];

/// The policy of that name. `queue_capacity` is the number of kernels of a stream that the hardware
/// queues.
pub fn by_name(name: &str, queue_capacity: usize) -> Option<Box<dyn Policy>> {
    Some(match name {
        "atoll" => Box::new(Atoll),
        "atoll_alone" => Box::new(AtollAlone),
        "reef" => Box::new(Reef { queue_capacity }),
        "reef_n" => Box::new(ReefN),
        "sequential" => Box::new(Sequential),
        "free_streams" => Box::new(FreeStreams),
        "priority_streams" => Box::new(PriorityStreams),
        "rt_only" => Box::new(RtOnly),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use device::sim::builtin;

    use super::*;

    #[test]
    fn rules_need_no_more_than_the_device_can_do() {
        let (device, simulated) =
            (DeviceCapabilities::default(), builtin::mi50().gpu.capabilities());
        for name in NAMES {
            let policy = by_name(name, 4).expect("a known policy");
            assert!(policy.is_supported(simulated), "{name}");
            if policy.is_supported(device) {
                let rules = policy.rules(device);
                assert!(!matches!(rules.co_run, CoRun::Padding(_)), "{name} pads");
                assert_ne!(rules.preempt, Some(PreemptMode::Kill), "{name} kills");
            }
        }
        assert!(!Reef { queue_capacity: 4 }.is_supported(device));
    }

    #[test]
    fn atoll_pads_where_queues_have_budgets_and_admits_pairs_elsewhere() {
        let budgets = DeviceCapabilities { block_budgets: true, ..DeviceCapabilities::default() };
        assert_eq!(Atoll.rules(budgets).co_run, CoRun::Padding(PaddingRules::ATOLL));
        assert_eq!(Atoll.rules(DeviceCapabilities::default()).co_run, CoRun::AdmittedPair);
    }
}
