//! Values in the cluster's store, which other releases and other hands may have written.

use std::collections::BTreeMap;

use base::Nanos;
use bytes::Bytes;
use cluster::scheduler::{Core, SchedulerSettings};
use cluster::snapshot::ClusterSnapshot;
use cluster::status::{self, Status};

/// Words of records.
pub(super) const WORDS: &[&str] = &[
    "leader",
    "plan",
    "scaling",
    "backends/b0",
    "states/b0",
    "frontends/f",
    "loads/f",
    "models/m",
    "profiles/cpu/d",
    "assignments/b0",
    "routes/m",
    "queries/q",
    "splits/q",
    "candidates/m",
    "grpc",
    "http",
    "device",
    "cpu",
    "memory_bytes",
    "models",
    "state",
    "ready",
    "loading",
    "failed",
    "version",
    "reason",
    "fast",
    "window",
    "slow",
    "arrived",
    "curve",
    "marks",
    "role",
    "batch",
    "rate",
    "cycle_ms",
    "enabled",
    "digest",
    "config",
    "timeout_ms",
    "slo_ms",
    "stages",
    "budget_ms",
    "reserve_ms",
    "fan_out",
    "scale",
];

/// Most lines that count: a plan for more takes its time by right.
const LINES_MAX: usize = 24;

/// One record per line: its key, a space and its value.
fn entries(data: &[u8]) -> BTreeMap<String, Bytes> {
    let lines = data.split(|&byte| byte == b'\n').take(LINES_MAX);
    let entry = |line: &[u8]| {
        let space = line.iter().position(|&byte| byte == b' ')?;
        let key = String::from_utf8_lossy(&line[..space]).into_owned();
        Some((key, Bytes::copy_from_slice(&line[space + 1..])))
    };
    lines.filter_map(entry).collect()
}

/// Records are decoded, shown and written again.
pub(super) fn records(data: &[u8]) {
    let entries = entries(data);
    let snapshot = ClusterSnapshot::read(&entries);
    let _ = ClusterSnapshot::read_routes(&entries);
    let status = Status::of(&snapshot);
    let _ = status::render(&status, true);
    serde_json::to_vec(&snapshot).expect("records have a JSON form");
}

/// A scheduler takes over the records and plans with them.
pub(super) fn scheduler(data: &[u8]) {
    let mut snapshot = ClusterSnapshot::read(&entries(data));
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &snapshot);
    for second in [1, 2, 20, 60] {
        let now = Nanos::from_millis(1000 * second);
        if let Some(decision) = core.step(now, &snapshot) {
            // What the agent writes is what the next step reads.
            snapshot.assignments = decision.assignments;
            snapshot.routes = decision.routes;
            snapshot.splits = decision.splits;
            snapshot.plan = Some(decision.plan);
        }
        let _ = core.scaling_input(&snapshot);
    }
}
