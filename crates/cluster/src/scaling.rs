//! Scales the number of backends to what the plan needs.
//!
//! [`scaler`] is the pure decision for one workload: estimated need and present replicas in,
//! requested replicas and backends to drain out. [`replica_estimate`] computes the needs, and
//! [`replica_pools`] decides on all workloads together, also when the cluster is scaled to zero
//! ([`activity`]) and what to do where replicas do not come ([`growth`]). [`driver`] connects it to
//! the leading scheduler and to [`target`]s; [`kubernetes`] is the only implementation.

pub mod activity;
pub mod driver;
pub mod growth;
pub mod kubernetes;
pub mod pool_spec;
pub mod replica_estimate;
pub mod replica_pools;
pub mod scaler;
pub mod target;
