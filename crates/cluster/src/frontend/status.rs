//! The cluster as a frontend sees it, for the console.

use std::sync::atomic::Ordering::Relaxed;

use serde_json::{Value, json};

use super::routing_table::RoutingTable;
use crate::record::canary::{served_name, split_served};
use crate::record::{LoadState, ModelRecord};
use crate::snapshot::ClusterSnapshot;

/// Backends, routes and the plan's summary, without what changes with every request.
pub(super) fn summary(snapshot: &ClusterSnapshot) -> Value {
    let backends: Vec<Value> = snapshot
        .backends
        .iter()
        .map(|(name, backend)| {
            let state = snapshot.states.get(name);
            let ready = state.into_iter().flat_map(|state| &state.models);
            let ready = ready.filter(|(_, state)| matches!(state, LoadState::Ready { .. }));
            json!({
                "name": name,
                "address": backend.grpc,
                "http": backend.http,
                "device": backend.device,
                "models": ready.map(|(model, _)| model).collect::<Vec<_>>(),
            })
        })
        .collect();
    let own = snapshot.models.iter().filter(|(name, _)| split_served(name).1.is_none());
    let models: Vec<Value> = own
        .map(|(name, record)| {
            let targets = snapshot.routes.get(name).map(|route| route.targets.as_slice());
            let targets = targets.unwrap_or_default();
            let total: f64 = targets.iter().map(|target| target.weight).sum();
            let route = |target: &crate::record::TargetRecord| {
                let share = if total > 0.0 { target.weight / total } else { 0.0 };
                json!({ "backend": target.backend, "share": share, "batch": target.batch })
            };
            json!({
                "name": name,
                "version": record.version,
                "enabled": record.enabled,
                "slo_ms": record.config.slo_ms,
                "routes": targets.iter().map(route).collect::<Vec<_>>(),
                "canary": canary(snapshot, name, record),
            })
        })
        .collect();
    let plan = snapshot.plan.as_ref();
    json!({
        "leader": snapshot.leader,
        "epoch": plan.map(|plan| plan.epoch),
        "reason": plan.map(|plan| plan.reason.clone()),
        "bound": plan.map(|plan| plan.bound),
        "used": plan.map(|plan| plan.used),
        "scale": plan.map(|plan| plan.scale),
        "frontends": snapshot.frontends.len(),
        "backends": backends,
        "models": models,
    })
}

/// The canary of a model, or null.
fn canary(snapshot: &ClusterSnapshot, name: &str, record: &ModelRecord) -> Value {
    let Some(canary) = &record.canary else { return Value::Null };
    let route = snapshot.routes.get(&served_name(name, canary.version));
    let backends = route.map_or(&[][..], |route| &route.targets).iter().map(|t| &t.backend);
    json!({
        "version": canary.version,
        "share": canary.share,
        "promoted": canary.promoted,
        "backends": backends.collect::<Vec<_>>(),
        "why": snapshot.canaries.get(name).map(|progress| &progress.why),
    })
}

/// The summary with the requests of this frontend that are in flight.
pub(super) fn status(table: &RoutingTable) -> Value {
    let mut status = table.summary.clone();
    for backend in status["backends"].as_array_mut().into_iter().flatten() {
        let targets = table.models.values().flat_map(|entry| &entry.targets);
        let mut links = targets.map(|target| &target.link);
        let link = links.find(|link| backend["address"] == *link.address);
        backend["in_flight"] = json!(link.map_or(0, |link| link.outstanding.load(Relaxed)));
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{BackendRecord, RouteRecord, TargetRecord};

    #[test]
    fn shares_of_a_route_are_relative_to_all_of_it() {
        let target = |backend: &str, weight| TargetRecord {
            backend: backend.to_string(),
            grpc: String::new(),
            http: String::new(),
            weight,
            batch: 8,
            batch_ms: 1.0,
            cycle_ms: 2.0,
            min_batch: 0,
            version: 1,
        };
        let mut snapshot = ClusterSnapshot::default();
        let backend = BackendRecord {
            grpc: "a:1".to_string(),
            http: String::new(),
            device: "cpu".to_string(),
            memory_bytes: 0,
        };
        snapshot.backends.insert("a".to_string(), backend);
        let record: ModelRecord = serde_json::from_value(
            json!({ "version": 1, "digest": "", "bytes": 1, "enabled": true }),
        )
        .expect("a record");
        snapshot.models.insert("m".to_string(), record);
        let targets = vec![target("a", 3.0), target("b", 1.0)];
        snapshot.routes.insert("m".to_string(), RouteRecord { targets, ..RouteRecord::default() });
        let summary = summary(&snapshot);
        assert_eq!(summary["models"][0]["routes"][0]["share"], 0.75);
        assert_eq!(summary["epoch"], Value::Null);
        let table = RoutingTable { summary, ..RoutingTable::default() };
        assert_eq!(status(&table)["backends"][0]["in_flight"], 0);
    }
}
