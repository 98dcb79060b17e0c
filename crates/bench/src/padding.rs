//! The report of `atoll bench padding`: real time next to co-running best effort, by method.

mod report;

pub use report::{
    MethodReport, MethodSummary, PaddingReport, PairReport, SlowdownRatios, TimingSummary,
    summaries, table,
};
