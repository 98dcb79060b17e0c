//! The queues that a policy needs on a device.

use device::{DeviceCapabilities, PreemptionLevel, QueueOptions};

use super::{NodeError, NodeOptions};
use crate::core::QueueLayout;
use crate::policy::{self, CoRun, NAMES, Policy, RealTimeStart, Rules, Streams};

/// Kernels of a stream that the hardware queues, for policies that depend on it.
const QUEUE_CAPACITY: usize = 4;

/// The policy of that name, or why the node cannot run under it.
pub(super) fn policy(name: &str, device: DeviceCapabilities) -> Result<Box<dyn Policy>, NodeError> {
    let policy = policy::by_name(name, QUEUE_CAPACITY)
        .ok_or_else(|| NodeError::UnknownPolicy(name.to_string(), NAMES.join(", ")))?;
    match policy.is_supported(device) {
        true => Ok(policy),
        false => Err(NodeError::PolicyNotSupported(name.to_string())),
    }
}

/// The purpose of each queue of a device.
///
/// A device that preempts only between steps makes real time wait for the running step on any
/// queue, so all queues take both classes. Where preemption is faster, one queue is reserved for
/// real time, or several for concurrent batches of one model: its work goes first and is never
/// preempted. A policy that waits until best effort is preempted needs that queue on any device.
pub(super) fn layout(
    rules: &Rules,
    level: PreemptionLevel,
    queues: usize,
    options: &NodeOptions,
) -> QueueLayout {
    let queues = queues.max(1);
    let apart =
        level > PreemptionLevel::BetweenLaunches || rules.start == RealTimeStart::AfterPreemption;
    match rules.streams {
        Streams::One => QueueLayout { shared: 1, real_time: 0, best_effort: 0, yielding: 0 },
        Streams::Split if apart => {
            let real_time = options.concurrent_rt_batches.max(1);
            let yielding = usize::from(options.preempt_real_time && rules.preempt.is_some());
            QueueLayout { shared: 0, real_time, best_effort: (queues - 1).max(1), yielding }
        }
        Streams::Split => QueueLayout { shared: queues, real_time: 0, best_effort: 0, yielding: 0 },
        Streams::Many => QueueLayout {
            shared: 0,
            real_time: options.real_time_queues.max(1),
            best_effort: options.best_effort_queues.max(1),
            yielding: 0,
        },
    }
}

/// Whether best effort is preempted when real time is announced: where preemption is fast and real
/// time has its own queue.
pub(super) fn announces_arrivals(rules: &Rules, layout: QueueLayout) -> bool {
    layout.shared == 0 && rules.preempt.is_some() && rules.co_run != CoRun::All
}

/// The options of the queues of `layout`, in its order. Only queues that the policy preempts are
/// preemptible; the others use faster kernels.
pub(super) fn queue_options(
    rules: &Rules,
    layout: QueueLayout,
) -> impl Iterator<Item = QueueOptions> {
    let real_time = layout.shared..layout.shared + layout.real_time;
    let (high_priority, preempts) = (rules.high_priority, rules.preempt.is_some());
    let yielding = real_time.end + layout.best_effort;
    (0..yielding + layout.yielding).map(move |queue| QueueOptions {
        id: queue as u32,
        capacity: 1,
        high_priority: high_priority && (real_time.contains(&queue) || queue >= yielding),
        preemptible: preempts && !real_time.contains(&queue),
    })
}
