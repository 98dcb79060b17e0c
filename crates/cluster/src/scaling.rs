//! How many backends there are: as many as the plan needs, by asking whoever runs the machines.
//!
//! [`scaler`] decides and is pure: what the load takes and who is there comes in, replicas and backends to empty come out.
//! [`need`] says what the load takes. [`driver`] carries both between the leading scheduler and a [`target`];
//! [`kubernetes`] is the one there is.

pub mod driver;
pub mod kubernetes;
pub mod replica_estimate;
pub mod scaler;
pub mod target;
