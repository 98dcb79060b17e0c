//! Loads, scenarios in virtual time with checkers, published experiments, and reports with plots.

pub mod arrival;
pub mod batching;
pub mod checker;
pub mod cluster_sim;
pub mod disb;
pub mod live;
pub mod load;
pub mod outcome;
pub mod padding;
pub mod plot;
pub mod preemption;
pub mod random;
pub mod recorded_run;
pub mod report;
pub mod scenario;
pub mod scenario_check;
pub mod simulation;
pub mod swap;
pub mod timeline;
