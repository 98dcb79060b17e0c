//! The status of a cluster, as JSON and as text.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt::Write;

use api::canary::CanaryState;
use serde::Serialize;

mod avoided;

use avoided::AvoidedBackends;

use crate::query::spec::{QuerySpec, StageSpec};
use crate::record::canary::split_served;
use crate::record::{
    AssignmentRole, ColdStartLoad, LoadState, ModelLoad, ModelRecord, PlanRecord, QueryLoad,
    ReplicaPoolRecord, ScalingRecord,
};
use crate::snapshot::ClusterSnapshot;
use crate::store::StoreSpace;

/// One backend.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BackendRow {
    /// Its name.
    pub name: String,
    /// Its kind of device.
    pub device: String,
    /// Address of its gRPC server.
    pub grpc: String,
    /// Length of its duty cycle in milliseconds.
    pub cycle_ms: f64,
    /// Share of the duty cycle that the plan uses.
    pub occupancy: f64,
    /// Frontends that avoid it because of its replies.
    pub ejected_by: Vec<String>,
    /// Whether the plan does without it because frontends avoided it.
    pub avoided: bool,
    /// Its assigned models.
    pub models: Vec<AssignedModelRow>,
}

/// A model assigned to a backend.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AssignedModelRow {
    /// The model.
    pub model: String,
    /// Why it is assigned.
    #[serde(rename = "part")]
    pub role: AssignmentRole,
    /// Requests per batch.
    pub batch: u32,
    /// Planned requests per second.
    pub rate: f64,
    /// Its state.
    pub state: &'static str,
    /// Why it failed, where it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// One model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelRow {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: u64,
    /// Whether it is served.
    pub enabled: bool,
    /// Backends that serve it.
    pub backends: Vec<String>,
    /// Requests per second, over all frontends.
    pub rate: f64,
    /// Requests received.
    pub arrived: u64,
    /// Replies after the SLO.
    pub late: u64,
    /// Requests refused or cancelled.
    pub refused: u64,
    /// Requests sent to a second backend.
    pub retried: u64,
    /// 99th percentile of latency in milliseconds, of the worst frontend.
    pub p99_ms: f64,
}

/// The status of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Status {
    /// The leader's name.
    pub leader: Option<String>,
    /// The plan's summary.
    pub plan: Option<PlanRecord>,
    /// The scaling record, where backends are scaled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scaling: Option<ScalingRecord>,
    /// Requests that wait until a backend has their model.
    pub waiting: u64,
    /// Cold starts, over all frontends, once there was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cold_starts: Option<ColdStartLoad>,
    /// Frontends, with the addresses of their REST servers.
    pub frontends: BTreeMap<String, String>,
    /// Backends.
    pub backends: Vec<BackendRow>,
    /// Models.
    pub models: Vec<ModelRow>,
    /// Queries.
    pub queries: Vec<QueryRow>,
    /// Canaries, and the last ones that were decided.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub canaries: Vec<CanaryRow>,
    /// What is wrong.
    pub problems: Vec<ClusterProblem>,
}

/// Something that is wrong, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ClusterProblem {
    /// What is wrong.
    pub what: String,
    /// What to do.
    pub advice: String,
}

impl ClusterProblem {
    /// A problem.
    pub fn new(what: impl Into<String>, advice: impl Into<String>) -> ClusterProblem {
        ClusterProblem { what: what.into(), advice: advice.into() }
    }
}

/// A canary, or the last one of its model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CanaryRow {
    /// The model.
    pub model: String,
    /// The canary's version.
    pub version: u64,
    /// The version in force.
    pub in_force: u64,
    /// Its state.
    pub state: CanaryState,
    /// Its share of the requests, from 0 to 1; 0 when it was decided.
    pub share: f64,
    /// What is missing for a promotion, or why it was decided so.
    pub why: String,
}

/// A stage of a query.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StageRow {
    /// Its name.
    pub name: String,
    /// Its model.
    pub model: String,
    /// Its share of the SLO in milliseconds.
    pub budget_ms: f64,
    /// Requests to this stage per query request.
    pub fan_out: f64,
    /// 99th percentile of latency in milliseconds, of the worst frontend.
    pub p99_ms: f64,
}

/// One query.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QueryRow {
    /// Its name.
    pub name: String,
    /// Its SLO in milliseconds.
    pub slo_ms: f64,
    /// Requests per second, over all frontends.
    pub rate: f64,
    /// Requests received.
    pub arrived: u64,
    /// Replies after the SLO.
    pub late: u64,
    /// Requests refused or cancelled.
    pub refused: u64,
    /// 99th percentile of latency in milliseconds, of the worst frontend.
    pub p99_ms: f64,
    /// Its stages.
    pub stages: Vec<StageRow>,
}

impl Status {
    /// The status that `snapshot` describes.
    pub fn of(snapshot: &ClusterSnapshot) -> Status {
        let frontends = snapshot.frontends.iter();
        let (names, avoided) = (snapshot.backends.keys(), AvoidedBackends::of(snapshot));
        Status {
            leader: snapshot.leader.clone(),
            plan: snapshot.plan.clone(),
            scaling: snapshot.scaling.clone(),
            waiting: snapshot
                .loads
                .values()
                .flat_map(|load| load.waiting.values())
                .fold(0, |sum, count| sum.saturating_add(*count)),
            cold_starts: cold_starts(snapshot),
            frontends: frontends
                .map(|(name, record)| (name.clone(), record.http.clone()))
                .collect(),
            backends: names.map(|name| backend_row(snapshot, &avoided, name)).collect(),
            models: snapshot.models.keys().map(|name| model_row(snapshot, name)).collect(),
            queries: snapshot
                .queries
                .iter()
                .map(|(name, spec)| query_row(snapshot, name, spec))
                .collect(),
            canaries: canary_rows(snapshot),
            problems: problems(snapshot),
        }
    }

    /// Adds the problems of values that are damaged, by key, with the reason.
    pub fn add_damaged(&mut self, damaged: &BTreeMap<String, String>) {
        let problem = |(key, why): (&String, &String)| {
            let advice = "its owner writes it again within seconds; if it stays, find who writes \
                          it, or delete the key";
            ClusterProblem::new(format!("the record {key} is damaged: {why}"), advice)
        };
        self.problems.extend(damaged.iter().map(problem));
    }

    /// Adds the problem of a store that is full, or nearly.
    pub fn add_space(&mut self, space: StoreSpace, quota_bytes: u64) {
        let (mib, quota_mib) = (space.bytes >> 20, quota_bytes >> 20);
        let advice = "the leader makes space within a minute; else compact and defragment etcd";
        if space.full {
            self.problems.push(ClusterProblem::new("the store is full and refuses writes", advice));
        } else if space.bytes as f64 > QUOTA_NEAR * quota_bytes as f64 {
            let what = format!("the store has {mib} of {quota_mib} MiB");
            self.problems.push(ClusterProblem::new(what, advice));
        }
    }
}

/// Cold starts over all frontends: the latest is that of the frontend that had most.
fn cold_starts(snapshot: &ClusterSnapshot) -> Option<ColdStartLoad> {
    let all = snapshot.loads.values().filter_map(|load| load.cold_starts);
    all.reduce(|a, b| ColdStartLoad {
        count: a.count.saturating_add(b.count),
        last_ms: if a.count >= b.count { a.last_ms } else { b.last_ms },
        max_ms: a.max_ms.max(b.max_ms),
    })
}

/// Share of the quota from which a store is nearly full.
const QUOTA_NEAR: f64 = 0.8;

/// What is wrong with a cluster.
pub(crate) fn problems(snapshot: &ClusterSnapshot) -> Vec<ClusterProblem> {
    let mut problems = Vec::new();
    let mut add = |what: String, advice: &str| problems.push(ClusterProblem::new(what, advice));
    if snapshot.leader.is_none() {
        add("no scheduler leads".to_string(), "start atoll cluster scheduler, or read its log");
    } else if snapshot.plan.is_none() {
        add("there is no plan".to_string(), "wait a moment; then read the leader's log");
    }
    // Scaled to zero on purpose: a request starts a backend.
    let is_at_zero = snapshot.backends.is_empty()
        && snapshot.scaling.as_ref().is_some_and(|scaling| {
            scaling.replicas == 0 && scaling.wanted == 0 && !scaling.pools.is_empty()
        });
    if snapshot.backends.is_empty() && !is_at_zero {
        add("no backend has joined".to_string(), "start atoll cluster backend, or read its log");
    }
    if snapshot.frontends.is_empty() {
        add("no frontend has joined".to_string(), "start atoll cluster frontend, or read its log");
    }
    for (name, record) in snapshot.models.iter().filter(|(_, record)| record.enabled) {
        let targets = snapshot.routes.get(name).map_or(&[][..], |route| &route.targets);
        let plan = snapshot.plan.as_ref();
        let failed = plan.and_then(|plan| plan.failed.get(name));
        match failed {
            // Its model is served: that is seen with the canary.
            _ if split_served(name).1.is_some() => {}
            Some(why) if targets.is_empty() => add(
                format!("model '{name}' cannot be loaded: {why}"),
                "register a version that can, roll it back, or delete it",
            ),
            Some(why) => add(
                format!("version {} of model '{name}' cannot be loaded: {why}", record.version),
                "an older version serves; roll it back, or register another one",
            ),
            None if targets.is_empty() && !is_at_zero => add(
                format!("no backend serves model '{name}'"),
                "wait until it is loaded; atoll cluster top shows which backend loads it",
            ),
            None => {}
        }
    }
    for pool in snapshot.scaling.iter().flat_map(|scaling| &scaling.pools) {
        if let Some(why) = &pool.stalled {
            add(
                format!("replicas of {} do not come: {why}", pool.target),
                "look at its pods, nodes and quota (kubectl describe); other pools are used until \
                 then, where there are any",
            );
        }
    }
    for (backend, state) in &snapshot.states {
        for model in state.models.keys().filter(|model| !snapshot.models.contains_key(*model)) {
            if split_served(model).1.is_some() {
                continue;
            }
            let what = format!("{backend} holds model '{model}', which has no record");
            add(what, "backends write lost records again; it is unloaded if it was deleted");
        }
    }
    if let Some(plan) = snapshot.plan.as_ref().filter(|plan| plan.backends > 0 && plan.scale > 0.0)
        && plan.scale < 1.0
    {
        let what = format!("the plan has {:.0} % of the capacity for the load", 100.0 * plan.scale);
        add(what, "add backends: requests beyond the plan are refused");
    }
    problems.extend(AvoidedBackends::of(snapshot).problems(snapshot));
    problems
}

fn backend_row(snapshot: &ClusterSnapshot, avoided: &AvoidedBackends, name: &str) -> BackendRow {
    let record = snapshot.backends.get(name).cloned().unwrap_or_default();
    let assignment = snapshot.assignments.get(name).cloned().unwrap_or_default();
    let state = snapshot.states.get(name).cloned().unwrap_or_default();
    let mut busy_ms = 0.0;
    for assigned in assignment.models.iter().filter(|assigned| assigned.rate > 0.0) {
        let digest = snapshot.models.get(&assigned.model).map(|model| model.digest.clone());
        let profile = digest.and_then(|d| snapshot.profiles.get(&(record.device.clone(), d)));
        let time = profile.and_then(|p| p.curve.iter().find(|(batch, _)| *batch >= assigned.batch));
        busy_ms += time.map_or(0.0, |(_, ms)| *ms);
    }
    let held = assignment.models.into_iter().map(|assigned| AssignedModelRow {
        state: match state.models.get(&assigned.model) {
            Some(LoadState::Ready { .. }) => "ready",
            Some(LoadState::Loading) => "loading",
            Some(LoadState::Failed { .. }) => "failed",
            None => "waiting",
        },
        reason: match state.models.get(&assigned.model) {
            Some(LoadState::Failed { reason, .. }) => Some(reason.clone()),
            _ => None,
        },
        model: assigned.model,
        role: assigned.role,
        batch: assigned.batch,
        rate: assigned.rate,
    });
    BackendRow {
        name: name.to_string(),
        ejected_by: avoided.ejected_by(&record.grpc),
        avoided: avoided.is_planned_without(name),
        device: record.device,
        grpc: record.grpc,
        cycle_ms: assignment.cycle_ms,
        occupancy: if assignment.cycle_ms > 0.0 { busy_ms / assignment.cycle_ms } else { 0.0 },
        models: held.collect(),
    }
}

fn model_row(snapshot: &ClusterSnapshot, name: &str) -> ModelRow {
    let mut sum = ModelLoad::default();
    for load in snapshot.loads.values().filter_map(|report| report.models.get(name)) {
        sum.fast += load.fast;
        sum.arrived += load.arrived;
        sum.late += load.late;
        sum.refused += load.refused;
        sum.retried += load.retried;
        sum.p99_ms = sum.p99_ms.max(load.p99_ms);
    }
    let targets = snapshot.routes.get(name).map_or(&[][..], |route| &route.targets);
    let model = snapshot.models.get(name);
    ModelRow {
        name: name.to_string(),
        version: model.map_or(0, |model| model.version),
        enabled: model.is_some_and(|model| model.enabled),
        backends: targets.iter().map(|target| target.backend.clone()).collect(),
        rate: sum.fast,
        arrived: sum.arrived,
        late: sum.late,
        refused: sum.refused,
        retried: sum.retried,
        p99_ms: sum.p99_ms,
    }
}

/// Canaries, and the last ones that were decided.
pub(crate) fn canary_rows(snapshot: &ClusterSnapshot) -> Vec<CanaryRow> {
    let row = |(name, record): (&String, &ModelRecord)| {
        let ended = record.ended_canary.as_ref();
        let why = ended.map(|ended| ended.reason.clone()).unwrap_or_default();
        let (version, state, share, why) = match (&record.canary, ended) {
            (Some(canary), _) if canary.promoted => {
                (canary.version, CanaryState::Promoting, canary.share, why)
            }
            (Some(canary), _) => {
                let progress = snapshot.canaries.get(name);
                let why = progress.map_or("it has no backend yet", |progress| &progress.why);
                (canary.version, CanaryState::Running, canary.share, why.to_string())
            }
            (None, Some(ended)) => (ended.version, ended.outcome.state(), 0.0, why),
            (None, None) => return None,
        };
        let (model, in_force) = (name.clone(), record.version);
        Some(CanaryRow { model, version, in_force, state, share, why })
    };
    snapshot.models.iter().filter_map(row).collect()
}

fn write_canaries(text: &mut String, canaries: &[CanaryRow], most: usize) {
    // What ended well needs no line.
    let shown = |row: &&CanaryRow| {
        matches!(row.state, CanaryState::Running | CanaryState::Promoting | CanaryState::RolledBack)
    };
    let shown: Vec<&CanaryRow> = canaries.iter().filter(shown).collect();
    for row in shown.iter().take(most) {
        let CanaryRow { model, version, in_force, share, why, .. } = row;
        let state = match row.state {
            CanaryState::Promoting => "is replacing the version before".to_string(),
            CanaryState::RolledBack => format!("was rolled back to {in_force}"),
            _ => format!("has {:.1} % beside {in_force}", 100.0 * share),
        };
        let _ = writeln!(text, "canary {model} version {version} {state}: {why}");
    }
    write_rest(text, shown.len().saturating_sub(most), "canaries");
}

fn query_row(snapshot: &ClusterSnapshot, name: &str, spec: &QuerySpec) -> QueryRow {
    let loads: Vec<&QueryLoad> =
        snapshot.loads.values().filter_map(|report| report.queries.get(name)).collect();
    let sum = |of: fn(&ModelLoad) -> u64| loads.iter().map(|load| of(&load.requests)).sum();
    let worst = |times: &mut dyn Iterator<Item = f64>| times.fold(0.0, f64::max);
    let split = snapshot.splits.get(name);
    let stage = |stage: &StageSpec| {
        let budget = split.and_then(|split| split.stages.get(&stage.name));
        let mut seen = loads.iter().filter_map(|load| Some(load.stages.get(&stage.name)?.p99_ms));
        StageRow {
            name: stage.name.clone(),
            model: stage.model.clone(),
            budget_ms: budget.map_or(0.0, |budget| budget.budget_ms),
            fan_out: budget.map_or(0.0, |budget| budget.fan_out),
            p99_ms: worst(&mut seen),
        }
    };
    QueryRow {
        name: name.to_string(),
        slo_ms: spec.slo_ms,
        rate: loads.iter().map(|load| load.requests.fast).sum(),
        arrived: sum(|load| load.arrived),
        late: sum(|load| load.late),
        refused: sum(|load| load.refused),
        p99_ms: worst(&mut loads.iter().map(|load| load.requests.p99_ms)),
        stages: spec.stages.iter().map(stage).collect(),
    }
}

/// Width of a backend's bar in characters.
const BAR: usize = 24;
/// Models, problems and models of one backend that a short text lists.
const SHORT_ROWS: usize = 20;
const SHORT_HELD: usize = 6;

/// The status as text for a terminal: problems, backends as bars of their duty cycles, then models.
/// Unless `all` are wanted, only the models with the most requests are listed where there are many.
pub fn render(status: &Status, all: bool) -> String {
    let mut text = String::new();
    let rows = if all { usize::MAX } else { SHORT_ROWS };
    for ClusterProblem { what, advice } in status.problems.iter().take(rows) {
        let _ = writeln!(text, "PROBLEM {what}\n        {advice}");
    }
    write_rest(&mut text, status.problems.len().saturating_sub(rows), "problems");
    let leader = status.leader.as_deref().unwrap_or("none");
    let _ = writeln!(text, "leader {leader}, {} frontends", status.frontends.len());
    if let Some(plan) = &status.plan {
        let _ = writeln!(
            text,
            "epoch {} ({}): {} of {} backends serve, at least {:.2} needed, capacity {:.2}x, \
             {} moves, {:.1} ms",
            plan.epoch,
            plan.reason,
            plan.used,
            plan.backends,
            plan.bound,
            plan.scale,
            plan.moves,
            plan.plan_ms
        );
        for model in &plan.unattainable {
            let _ = writeln!(text, "  no batch of '{model}' meets its SLO");
        }
        for (model, why) in &plan.failed {
            let _ = writeln!(text, "  '{model}' cannot be loaded: {why}");
        }
    }
    if let Some(scaling) = &status.scaling {
        write_scaling(&mut text, scaling);
    }
    if let Some(starts) = &status.cold_starts {
        let (last, max) = (starts.last_ms / 1e3, starts.max_ms / 1e3);
        let count = starts.count;
        let _ = writeln!(text, "{count} cold starts, last {last:.1} s, longest {max:.1} s");
    }
    if status.waiting > 0 {
        let _ = writeln!(text, "about {} requests wait for a backend", status.waiting);
    }
    for backend in &status.backends {
        let filled = ((backend.occupancy * BAR as f64).round() as usize).min(BAR);
        let bar = format!("{}{}", "#".repeat(filled), ".".repeat(BAR - filled));
        let _ = write!(
            text,
            "{:<14} {:<8} [{bar}] {:7.1} ms ",
            backend.name, backend.device, backend.cycle_ms
        );
        if backend.avoided || !backend.ejected_by.is_empty() {
            text.push_str(" AVOIDED");
        }
        let held_max = if all { usize::MAX } else { SHORT_HELD };
        for held in backend.models.iter().take(held_max) {
            let mark = match (held.role, held.state) {
                (_, "failed") => "!",
                (_, "loading" | "waiting") => "~",
                (AssignmentRole::Serving, _) => "",
                (AssignmentRole::Standby, _) => "+",
                (AssignmentRole::Shadow, _) => "-",
            };
            let _ = match held.role {
                AssignmentRole::Serving => {
                    write!(text, " {mark}{}x{}@{:.0}", held.model, held.batch, held.rate)
                }
                _ => write!(text, " {mark}{}", held.model),
            };
        }
        let more = backend.models.len().saturating_sub(held_max);
        if more > 0 {
            let _ = write!(text, " and {more} more");
        }
        text.push('\n');
        for held in &backend.models {
            if let Some(why) = &held.reason {
                let _ = writeln!(text, "  '{}' failed here: {why}", held.model);
            }
        }
    }
    let _ = writeln!(
        text,
        "{:<20} {:>9} {:>9} {:>8} {:>8} {:>8} {:>9}  backends",
        "model", "req/s", "requests", "late", "refused", "retried", "p99 ms"
    );
    let mut models: Vec<&ModelRow> = status.models.iter().collect();
    if models.len() > rows {
        // Those without a backend first, then by load.
        let order = |row: &&ModelRow| (row.enabled && row.backends.is_empty(), row.rate);
        models.sort_by(|a, b| order(b).partial_cmp(&order(a)).unwrap_or(Ordering::Equal));
    }
    for model in models.iter().take(rows) {
        let _ = writeln!(
            text,
            "{:<20} {:>9.1} {:>9} {:>8} {:>8} {:>8} {:>9.2}  {}",
            model.name,
            model.rate,
            model.arrived,
            model.late,
            model.refused,
            model.retried,
            model.p99_ms,
            if model.enabled { model.backends.join(" ") } else { "unloaded".to_string() }
        );
    }
    write_rest(&mut text, models.len().saturating_sub(rows), "models");
    write_canaries(&mut text, &status.canaries, rows);
    for query in &status.queries {
        let _ = writeln!(
            text,
            "query {}: {:.1}/s, {} requests, {} late, {} refused, p99 {:.2} of {} ms",
            query.name,
            query.rate,
            query.arrived,
            query.late,
            query.refused,
            query.p99_ms,
            query.slo_ms
        );
        for stage in &query.stages {
            let _ = writeln!(
                text,
                "  {:<18} {:<20} x{:<7.2} p99 {:>9.2} of {:>9.2} ms",
                stage.name, stage.model, stage.fan_out, stage.p99_ms, stage.budget_ms
            );
        }
    }
    text.push_str("+ standby, - shadow until others are ready, ~ loading, ! failed\n");
    text
}

fn write_rest(text: &mut String, count: usize, of: &str) {
    if count > 0 {
        let _ = writeln!(text, "... and {count} more {of}: --all, or --json");
    }
}

fn write_scaling(text: &mut String, scaling: &ScalingRecord) {
    let ScalingRecord { target, wanted, replicas, present, errors, .. } = scaling;
    let _ = write!(text, "{target}: {wanted} wanted, {replicas} requested, {present} present");
    if !scaling.draining.is_empty() {
        let _ = write!(text, ", draining: {}", scaling.draining.join(" "));
    }
    if *errors > 0 {
        let _ = write!(text, ", {errors} errors");
    }
    text.push('\n');
    for pool in scaling.pools.iter().filter(|_| scaling.pools.len() > 1) {
        let kind = if pool.kind.is_empty() { "?" } else { pool.kind.as_str() };
        let ReplicaPoolRecord { target, min, max, price, wanted, replicas, present, .. } = pool;
        let _ = writeln!(
            text,
            "  {target} ({kind}, {min} to {max}, price {price}): {wanted} wanted, {replicas} \
             requested, {present} present"
        );
    }
    for pool in &scaling.pools {
        if let Some(why) = &pool.stalled {
            let _ = writeln!(text, "  {}: {why}", pool.target);
        }
    }
    if let Some(error) = &scaling.error {
        let _ = writeln!(text, "  {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{AssignedModel, Assignment, BackendRecord};

    #[test]
    fn renders_every_backend_and_model() {
        let mut snapshot = ClusterSnapshot::default();
        let record = BackendRecord { device: "cpu".to_string(), ..Default::default() };
        snapshot.backends.insert("b1".to_string(), record);
        let assigned = AssignedModel {
            model: "m".to_string(),
            version: 1,
            role: AssignmentRole::Serving,
            batch: 4,
            rate: 30.0,
            min_batch: 0,
        };
        let assignment = Assignment { epoch: 1, cycle_ms: 50.0, models: vec![assigned] };
        snapshot.assignments.insert("b1".to_string(), assignment);
        snapshot.scaling = Some(ScalingRecord {
            target: "deployment/b".to_string(),
            wanted: 3,
            replicas: 2,
            present: 1,
            draining: vec!["b1".to_string()],
            errors: 4,
            error: Some("not allowed: x".to_string()),
            pools: Vec::new(),
        });
        let text = render(&Status::of(&snapshot), false);
        let scaling = "deployment/b: 3 wanted, 2 requested, 1 present, draining: b1, 4 errors";
        assert!(text.contains(scaling) && text.contains("  not allowed: x"), "{text}");
        assert!(text.contains("b1") && text.contains("~mx4@30"), "{text}");
    }

    #[test]
    fn a_lost_store_is_a_problem_with_advice() {
        let status = Status::of(&ClusterSnapshot::default());
        let text = render(&status, false);
        for what in ["no scheduler leads", "no backend has joined", "no frontend has joined"] {
            assert!(text.contains(&format!("PROBLEM {what}\n")), "{text}");
        }
        assert!(status.problems.iter().all(|problem| !problem.advice.is_empty()));
        let mut status = Status::default();
        status.add_damaged(&[("models/m".to_string(), "no JSON".to_string())].into());
        status.add_space(StoreSpace { bytes: 90, used_bytes: 1, full: false }, 100);
        status.add_space(StoreSpace { bytes: 70, used_bytes: 1, full: false }, 100);
        status.add_space(StoreSpace { bytes: 70, used_bytes: 1, full: true }, 100);
        assert_eq!(status.problems.len(), 3, "{:?}", status.problems);
        assert!(status.problems[0].what.contains("models/m"));
    }

    #[test]
    fn four_hundred_models_fit_a_screen() {
        let mut snapshot = ClusterSnapshot::default();
        snapshot.backends.insert("b1".to_string(), BackendRecord::default());
        let assigned = |index: usize| AssignedModel {
            model: format!("m{index:03}"),
            version: 1,
            role: AssignmentRole::Serving,
            batch: 4,
            rate: 1.0,
            min_batch: 0,
        };
        let models = (0..400).map(assigned).collect();
        let assignment = Assignment { epoch: 1, cycle_ms: 50.0, models };
        snapshot.assignments.insert("b1".to_string(), assignment);
        for index in 0..400 {
            let record = crate::record::ModelRecord { enabled: true, ..Default::default() };
            snapshot.models.insert(format!("m{index:03}"), record);
        }
        let status = Status::of(&snapshot);
        let short = render(&status, false);
        assert!(short.lines().count() < 80, "{short}");
        assert!(short.lines().all(|line| line.len() < 250), "{short}");
        assert!(short.contains("... and 380 more models"), "{short}");
        assert!(render(&status, true).contains("m399 "));
    }
}
