//! Preemption of best effort, and keeping best effort out of the driver while RT uses it.
//!
//! A preemption is [`Queue::preempt`](device::Queue::preempt) on the queue, then
//! `QueuePreemption::preempt` for the work in it, then `EpochCounter::preempt` for the run that is
//! on the device, then `EpochCounters::flush`, which writes the counter to the device. Kernels
//! exit once the counter passes the epoch they were launched with.

pub(crate) mod best_effort_variant;
pub(crate) mod driver_backoff;
pub(crate) mod epoch_counters;
pub(crate) mod queue_preemption;
pub(crate) mod rt_activity;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use driver_backoff::DriverBackoff;
use epoch_counters::EpochCounters;
use rt_activity::RtActivity;

/// What RT and best effort of one device share to preempt and to stay out of each other's way.
pub(crate) struct PreemptionServices {
    pub(crate) epoch_counters: Arc<EpochCounters>,
    pub(crate) driver_backoff: Arc<DriverBackoff>,
    pub(crate) rt_activity: Arc<RtActivity>,
    /// Number of queues that run best effort now.
    pub(crate) best_effort_runs: AtomicUsize,
}
