//! What viewers of a frontend see: models and backends, by the requests that went through it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use api::monitor::{LiveCursor, LiveUpdate, Monitor, RequestCounts};
use base::Nanos;
use serde_json::{Value, json};

use super::Inner;
use super::backend_link::BackendLink;
use super::routing_table::{ModelEntry, RoutingTable};
use super::status::state_text;

/// The monitor of a frontend. It has no devices and no spans: those are at its backends.
pub(super) struct FrontendMonitor(pub(super) Arc<Inner>);

/// What a viewer has seen, and what it sees now.
struct Seen {
    before: BTreeMap<String, RequestCounts>,
    now: BTreeMap<String, RequestCounts>,
    first: bool,
}

impl Seen {
    /// The counts of a source since the last update; none at the first one, which has no begin.
    fn since(&mut self, source: String, counts: RequestCounts) -> RequestCounts {
        let since = match (self.first, self.before.get(&source)) {
            (true, _) => RequestCounts::default(),
            (false, Some(before)) => counts.since(before),
            (false, None) => counts.clone(),
        };
        if counts != RequestCounts::default() {
            self.now.insert(source, counts);
        }
        since
    }
}

fn counts_json(counts: &RequestCounts) -> Value {
    let latency: Vec<Value> =
        counts.latency.iter().map(|(bucket, count)| json!([bucket, count])).collect();
    json!({
        "done": counts.done(),
        "failed": counts.failed,
        "kept": counts.kept,
        "missed": counts.missed,
        "latency": latency,
    })
}

fn model_json(name: &str, entry: &ModelEntry) -> Value {
    let pending: usize = entry.targets.iter().map(|target| target.outstanding.count()).sum();
    let counts = entry.meter.live.read();
    json!({
        "name": name,
        "version": entry.record.version.to_string(),
        "class": entry.record.config.class.as_str(),
        "priority": entry.record.config.priority,
        "slo_ms": entry.record.config.slo_ms.or(entry.record.config.timeout_ms),
        "pending": pending,
        "inferences": counts.done(),
        "backends": entry.targets.len(),
        "resident": [],
    })
}

/// The requests of a model since the last update, if there were any.
fn flow_json(name: &str, entry: &ModelEntry, seen: &mut Seen) -> Option<Value> {
    let counts = seen.since(format!("model {name}"), entry.meter.live.read());
    if counts == RequestCounts::default() {
        return None;
    }
    let mut flow = counts_json(&counts);
    flow["model"] = name.into();
    flow["class"] = entry.record.config.class.as_str().into();
    // What waits, and what is batched with what, backends know.
    flow["wait"] = json!([]);
    flow["rows"] = json!([]);
    Some(flow)
}

/// A backend of the summary, with what this frontend knows of it.
fn backend_json(backend: &Value, links: &[Arc<BackendLink>], now: Nanos, seen: &mut Seen) -> Value {
    let link = links.iter().find(|link| backend["address"] == *link.address);
    let counts = link.map(|link| link.live.read()).unwrap_or_default();
    let name = backend["name"].as_str().unwrap_or_default();
    let mut figures = counts_json(&seen.since(format!("backend {name}"), counts));
    for field in ["name", "address", "http", "device", "models"] {
        figures[field] = backend[field].clone();
    }
    figures["state"] = state_text(link.map(|link| link.service(now).0)).into();
    figures["in_flight"] = link.map_or(0, |link| link.outstanding.load(Relaxed)).into();
    figures
}

fn figures(
    table: &RoutingTable,
    links: &[Arc<BackendLink>],
    (now, since): (Nanos, Nanos),
    seen: &mut Seen,
) -> Value {
    let models: BTreeMap<_, _> = table.models.iter().collect();
    let flows: Vec<Value> =
        models.iter().filter_map(|(name, entry)| flow_json(name, entry, seen)).collect();
    let models: Vec<Value> =
        models.into_iter().map(|(name, entry)| model_json(name, entry)).collect();
    let backends = table.summary["backends"].as_array().map(Vec::as_slice).unwrap_or_default();
    let backends: Vec<Value> =
        backends.iter().map(|backend| backend_json(backend, links, now, seen)).collect();
    json!({
        "now_ns": now.0,
        "interval_ns": (now - since).0,
        "lost": 0,
        "devices": [],
        "models": models,
        "names": [],
        "flows": flows,
        "frontends": table.frontends,
        "backends": backends,
    })
}

impl Monitor for FrontendMonitor {
    fn update(&self, cursor: &mut LiveCursor, _with_spans: bool) -> LiveUpdate {
        let now = self.0.clock.now();
        let first = cursor.at == Nanos::ZERO;
        let since = if first { now } else { cursor.at };
        cursor.at = now.max(Nanos(1));
        let before = std::mem::take(&mut cursor.counts);
        let mut seen = Seen { before, now: BTreeMap::new(), first };
        let figures = figures(&self.0.table(), &self.0.links.all(), (now, since), &mut seen);
        cursor.counts = seen.now;
        LiveUpdate { figures, spans: Vec::new() }
    }

    fn trace(&self, _window: Nanos) -> Option<String> {
        None
    }

    fn explain(&self, _device: usize, _request: u64) -> Option<Value> {
        None
    }
}

#[cfg(test)]
mod tests {
    use model::config::ModelConfig;

    use super::*;
    use crate::frontend::backend_link::BackendLinks;
    use crate::record::{BackendRecord, ModelRecord, RouteRecord, TargetRecord};
    use crate::snapshot::ClusterSnapshot;

    fn table(links: &BackendLinks) -> RoutingTable {
        let mut snapshot = ClusterSnapshot::default();
        let config = ModelConfig { slo_ms: Some(5), ..ModelConfig::default() };
        let record = ModelRecord { version: 1, enabled: true, config, ..ModelRecord::default() };
        snapshot.models.insert("m".to_string(), record);
        for (name, address) in [("a", "10.0.0.1:1"), ("b", "10.0.0.1:2")] {
            let backend = BackendRecord { grpc: address.to_string(), ..BackendRecord::default() };
            snapshot.backends.insert(name.to_string(), backend);
        }
        let target = TargetRecord {
            backend: "a".to_string(),
            grpc: "10.0.0.1:1".to_string(),
            http: String::new(),
            weight: 1.0,
            batch: 1,
            batch_ms: 1.0,
            cycle_ms: 1.0,
            min_batch: 0,
            version: 1,
        };
        let route = RouteRecord { targets: vec![target], ..RouteRecord::default() };
        snapshot.routes.insert("m".to_string(), route);
        RoutingTable::build(&snapshot, &RoutingTable::default(), links, Nanos(5))
    }

    #[test]
    fn a_viewer_sees_what_ended_since_it_last_looked() {
        let links = BackendLinks::default();
        let table = table(&links);
        let (entry, link) = (&table.models["m"], &links.all()[0]);
        let meter = &entry.meter;
        let mut before = BTreeMap::new();
        let mut look = |first| {
            let mut seen =
                Seen { before: std::mem::take(&mut before), now: BTreeMap::new(), first };
            let figures = figures(&table, &links.all(), (Nanos(9), Nanos(7)), &mut seen);
            before = seen.now;
            figures
        };
        meter.answer(Nanos::from_millis(1), None, 4);
        assert_eq!(look(true)["flows"], json!([]));
        meter.answer(Nanos::from_millis(2), None, 3);
        entry.count_answered(Nanos::from_millis(2), None, 2);
        entry.count_answered(Nanos::from_millis(6), None, 1);
        entry.refuse(None, 1);
        link.live.answer(Nanos::from_millis(2), 1);
        let seen = look(false);
        let flow = &seen["flows"][0];
        assert_eq!(
            (&flow["model"], &flow["done"], &flow["failed"]),
            (&"m".into(), &3.into(), &1.into())
        );
        assert_eq!(flow["latency"], json!([[87, 3]]));
        // What was refused has not kept its SLO.
        assert_eq!((&flow["kept"], &flow["missed"]), (&2.into(), &2.into()));
        assert_eq!((&seen["backends"][0]["done"], &seen["interval_ns"]), (&1.into(), &2.into()));
        let states = [0, 1].map(|at| seen["backends"][at]["state"].clone());
        assert_eq!(states, ["serving", "not routed"]);
        let later = look(false);
        assert_eq!((&later["flows"], &later["backends"][0]["done"]), (&json!([]), &0.into()));
        assert_eq!(later["models"][0]["inferences"], 7);
    }
}
