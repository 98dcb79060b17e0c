//! Preemption of best effort.

pub(crate) mod best_effort_variant;
pub(crate) mod driver_backoff;
pub(crate) mod epoch_counters;
pub(crate) mod rt_activity;
