//! Traces of runs of a benchmark: each run is a process of its own in viewers.

use std::collections::BTreeMap;

use runtime::ModelKey;
use runtime::spans::Span;
use runtime::spans::trace_events::{self, DeviceTrace};

/// Maximum number of spans in a trace: viewers open no more.
pub const MAX_SPANS: usize = 1_000_000;

/// Requests of a trace that say why they took as long as they did.
const MAX_EXPLAINED: usize = 20_000;

/// What was recorded of one run.
#[derive(Clone, Debug, Default)]
pub struct RecordedRun {
    /// What ran, and where.
    pub name: String,
    /// Names of its models.
    pub models: BTreeMap<ModelKey, String>,
    /// Requests, runs, copies and loads.
    pub spans: Vec<Span>,
    /// Those beyond the limit.
    pub lost: u64,
}

/// Spans of each of `runs` runs that share a trace.
pub fn spans_of_each(runs: usize) -> usize {
    MAX_SPANS / runs.max(1)
}

/// The runs in the trace event format.
pub fn trace(runs: &[RecordedRun]) -> String {
    let names: Vec<_> = runs
        .iter()
        .map(|run| move |model: ModelKey| run.models.get(&model).cloned().unwrap_or_default())
        .collect();
    let traces: Vec<DeviceTrace<'_>> = runs
        .iter()
        .zip(&names)
        .map(|(run, model_name)| DeviceTrace {
            name: &run.name,
            spans: &run.spans,
            model_name,
            lost: run.lost,
        })
        .collect();
    trace_events::write(&traces, MAX_EXPLAINED / runs.len().max(1))
}
