//! Scales the number of backends to what the plan needs.
//!
//! [`scaler`] is the pure decision: estimated need and present replicas in, requested replicas and
//! backends to drain out. [`replica_estimate`] computes the need. [`driver`] connects both to the
//! leading scheduler and to a [`target`]; [`kubernetes`] is the only implementation.

pub mod driver;
pub mod kubernetes;
pub mod replica_estimate;
pub mod scaler;
pub mod target;
