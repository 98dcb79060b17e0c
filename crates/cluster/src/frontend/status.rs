//! The cluster as a frontend sees it, for the console.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

use base::Nanos;
use serde_json::{Value, json};

use super::routing_table::RoutingTable;
use crate::balance::backend_health::Availability;
use crate::record::canary::{served_name, split_served};
use crate::record::{LoadState, ModelRecord};
use crate::snapshot::ClusterSnapshot;
use crate::status::{canary_rows, problems};

/// Backends, routes and the plan's summary, without what changes with every request.
pub(super) fn summary(snapshot: &ClusterSnapshot) -> Value {
    let backends: Vec<Value> = snapshot
        .backends
        .iter()
        .map(|(name, backend)| {
            let state = snapshot.states.get(name);
            let held = || state.into_iter().flat_map(|state| &state.models);
            let ready = held().filter(|(_, state)| matches!(state, LoadState::Ready { .. }));
            json!({
                "name": name,
                "address": backend.grpc,
                "http": backend.http,
                "device": backend.device,
                "models": ready.map(|(model, _)| model).collect::<Vec<_>>(),
                "reasons": reasons(snapshot, name, held()),
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
    let addresses: BTreeMap<&String, &String> =
        snapshot.frontends.iter().map(|(name, record)| (name, &record.http)).collect();
    json!({
        "leader": snapshot.leader,
        "epoch": plan.map(|plan| plan.epoch),
        "reason": plan.map(|plan| plan.reason.clone()),
        "bound": plan.map(|plan| plan.bound),
        "used": plan.map(|plan| plan.used),
        "scale": plan.map(|plan| plan.scale),
        "frontends": snapshot.frontends.len(),
        "frontend_addresses": addresses,
        "canaries": canary_rows(snapshot),
        "problems": problems(snapshot),
        "backends": backends,
        "models": models,
    })
}

/// Why a backend serves less than it could: the plan avoids it, or models failed there.
fn reasons<'a>(
    snapshot: &ClusterSnapshot,
    backend: &str,
    held: impl Iterator<Item = (&'a String, &'a LoadState)>,
) -> Vec<String> {
    let avoided = snapshot.plan.iter().flat_map(|plan| &plan.avoided).any(|name| name == backend);
    let avoided = avoided.then(|| "the plan does without it: frontends avoided it".to_string());
    let failed = held.filter_map(|(model, state)| match state {
        LoadState::Failed { version, reason } => {
            Some(format!("version {version} of '{model}' failed: {reason}"))
        }
        _ => None,
    });
    let updates = snapshot.states.get(backend).into_iter().flat_map(|state| &state.failed);
    let updates = updates.map(|(model, update)| {
        let (version, reason) = (update.version, &update.reason);
        format!("version {version} of '{model}' failed, and an older one serves: {reason}")
    });
    avoided.into_iter().chain(failed).chain(updates).collect()
}

/// The state of a backend as a frontend sees it; `None` where no route leads to it.
pub(super) fn state_text(availability: Option<Availability>) -> &'static str {
    match availability {
        Some(Availability::Serving) => "serving",
        Some(Availability::Ejected) => "ejected",
        Some(Availability::ProbeDue) => "on probation",
        None => "not routed",
    }
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

/// The summary with what this frontend knows of backends: requests in flight, and whether they
/// serve.
pub(super) fn status(table: &RoutingTable, now: Nanos) -> Value {
    let mut status = table.summary.clone();
    for backend in status["backends"].as_array_mut().into_iter().flatten() {
        let targets = table.models.values().flat_map(|entry| &entry.targets);
        let mut links = targets.map(|target| &target.link);
        let link = links.find(|link| backend["address"] == *link.address);
        backend["in_flight"] = json!(link.map_or(0, |link| link.outstanding.load(Relaxed)));
        backend["state"] = state_text(link.map(|link| link.service(now).0)).into();
        let ejected = link.and_then(|link| link.health().ejected_for());
        if let (Some(reason), Some(reasons)) = (ejected, backend["reasons"].as_array_mut()) {
            reasons.insert(0, format!("{}: {}", reason.as_str(), reason.sentence()).into());
        }
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frontend::backend_link::BackendLinks;
    use crate::record::{
        BackendRecord, BackendState, FrontendRecord, PlanRecord, RouteRecord, TargetRecord,
    };

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
        assert_eq!(status(&table, Nanos(1))["backends"][0]["in_flight"], 0);
    }

    #[test]
    fn backends_say_why_they_do_not_serve() {
        let target = |backend: &str| TargetRecord {
            backend: backend.to_string(),
            grpc: format!("{backend}:1"),
            http: String::new(),
            weight: 1.0,
            batch: 1,
            batch_ms: 1.0,
            cycle_ms: 1.0,
            min_batch: 0,
            version: 1,
        };
        let mut snapshot = ClusterSnapshot::default();
        for name in ["a", "b", "c"] {
            let backend = BackendRecord { grpc: format!("{name}:1"), ..BackendRecord::default() };
            snapshot.backends.insert(name.to_string(), backend);
        }
        let record = ModelRecord { version: 2, enabled: true, ..ModelRecord::default() };
        snapshot.models.insert("m".to_string(), record);
        let targets = vec![target("a"), target("b")];
        snapshot.routes.insert("m".to_string(), RouteRecord { targets, ..RouteRecord::default() });
        let avoided = vec!["c".to_string()];
        snapshot.plan = Some(PlanRecord { avoided, ..PlanRecord::default() });
        let failed = LoadState::Failed { version: 2, reason: "no operator".to_string() };
        let mut state = BackendState::default();
        state.models.insert("m".to_string(), failed);
        snapshot.states.insert("b".to_string(), state);
        let frontend = FrontendRecord { http: "h:8000".to_string(), ..FrontendRecord::default() };
        snapshot.frontends.insert("f1".to_string(), frontend);
        let links = BackendLinks::default();
        let table = RoutingTable::build(&snapshot, &RoutingTable::default(), &links, Nanos(1));
        let now = Nanos::from_millis(10);
        let link = table.models["m"].targets[0].link.clone();
        link.judge(now, |health| health.slow(now));
        let status = status(&table, now);
        assert_eq!(status["frontend_addresses"], json!({ "f1": "h:8000" }));
        let seen = |index: usize| {
            let backend = &status["backends"][index];
            (backend["state"].as_str(), backend["reasons"].clone())
        };
        let slow = "slow: its replies take far longer than those of its peers";
        assert_eq!(seen(0), (Some("ejected"), json!([slow])));
        let failed = "version 2 of 'm' failed: no operator";
        assert_eq!(seen(1), (Some("serving"), json!([failed])));
        let avoided = "the plan does without it: frontends avoided it";
        assert_eq!(seen(2), (Some("not routed"), json!([avoided])));
        let problems = status["problems"].as_array().expect("problems");
        assert!(problems.iter().any(|problem| problem["what"] == "no scheduler leads"));
    }
}
