//! The global scheduler: load in, plans out, in epochs.
//!
//! [`Core`] is pure: a [`ClusterSnapshot`] comes in, a [`Decision`] goes out. [`agent`] connects it
//! to the store in the process that leads; the simulator drives the same core in virtual time.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use base::Nanos;
use model::config::Class;

use crate::query::spec::QuerySpec;
use crate::record::canary::{served_name, split_served};
use crate::record::{
    AVOIDED_MAX, AssignedModel, Assignment, AssignmentRole, LoadState, PlanRecord, RouteRecord,
    SplitRecord, TargetRecord,
};
use crate::scaling::replica_estimate::{BackendUsage, ScalingInput};
use crate::snapshot::ClusterSnapshot;

pub mod agent;
pub mod canary_judge;
pub mod canary_rule;
pub mod demand;
pub mod deployment;
mod ejected_backends;
mod emptying;
mod lost_records;
pub mod maintenance;
pub mod packing;
pub mod placement;
pub mod plan;
pub mod pooling;
pub mod prefix_batching;
mod refused_models;
pub mod service;
pub mod splitting;

use deployment::{DeploymentState, DeploymentStep, ModelFacts};
use ejected_backends::EjectedBackends;
use emptying::{Emptying, Withdrawal};
use lost_records::held_without_record;
use placement::PlacementSettings;
use plan::{Curves, Demand, DutyCycle, LoadedModels, Machine, PlacedPart, Placement};
use pooling::{BackendPools, LoadFactors};
use refused_models::RefusedModels;

/// Settings of the scheduler.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerSettings {
    /// Time between two plans without a special reason.
    pub epoch: Nanos,
    /// Minimum time between two plans because of load.
    pub spacing: Nanos,
    /// How long the majority of backends must be missing before the scheduler acts on it: their
    /// leases may have expired although they still serve.
    pub grace: Nanos,
    /// SLO of models that name none, in milliseconds.
    pub slo_ms: f64,
    /// Requests per second that every model is planned for at least.
    pub rate_min: f64,
    /// How placements are made.
    pub placement: PlacementSettings,
}

impl Default for SchedulerSettings {
    fn default() -> Self {
        SchedulerSettings {
            epoch: Nanos::from_millis(30_000),
            spacing: Nanos::from_millis(10_000),
            grace: Nanos::from_millis(10_000),
            slo_ms: 1000.0,
            rate_min: 1.0,
            placement: PlacementSettings::default(),
        }
    }
}

/// Minimum time between plans for reasons other than load and loss, so that simultaneous changes
/// lead to one plan.
const PLAN_SPACING: Nanos = Nanos::from_millis(1000);
/// How long a plan may be prepared before it takes over part by part: a backend that loads for ever
/// does not hold it up.
const PREPARE_MAX: Nanos = Nanos::from_millis(30_000);
/// Relative change of a model's rate that counts as a rise.
const RATE_CHANGE: f64 = 0.1;
/// Gain in capacity, or in the number of machines, that is worth moving models.
const GAIN_SLACK: f64 = 1.5;
const GAIN_MACHINES: f64 = 0.85;

/// What the store is to contain.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// For every backend that has joined.
    pub assignments: BTreeMap<String, Assignment>,
    /// For every model that is ready somewhere.
    pub routes: BTreeMap<String, RouteRecord>,
    /// For every query.
    pub splits: BTreeMap<String, SplitRecord>,
    /// The summary.
    pub plan: PlanRecord,
}

/// Decides on plans and deploys them step by step.
pub struct Core {
    settings: SchedulerSettings,
    /// The plan, extended since. It is in force unless it is still being prepared.
    placement: Placement,
    /// The placement in force while the plan is being prepared, and since when.
    in_force: Option<(Placement, Nanos)>,
    /// Whether the last step found the plan deployed.
    settled: bool,
    /// Machines and rates that the placement was made for.
    machines: BTreeSet<String>,
    rates: BTreeMap<String, f64>,
    /// Models that existed at the last step.
    models: BTreeSet<String>,
    /// Versions that backends could not load, by backend and model.
    refused: RefusedModels,
    /// Number of curves known at that time.
    measured: usize,
    /// Queries, and their budgets at that time.
    queries: BTreeMap<String, QuerySpec>,
    splits: BTreeMap<String, SplitRecord>,
    assigned: BTreeMap<String, BTreeSet<String>>,
    /// Backends that are to be drained.
    draining: BTreeSet<String>,
    /// Whether anybody uses the cluster, and the withdrawal of the last backends when nobody does.
    emptying: Emptying,
    /// Backends that frontends avoid, and those of them that the plan does without.
    ejected: EjectedBackends,
    avoided: BTreeSet<String>,
    planned_at: Option<Nanos>,
    /// Whether the placement has been extended since the plan.
    extended: bool,
    /// When the majority of backends was last present.
    seen_at: Nanos,
    load_factors: LoadFactors,
    plan: PlanRecord,
}

impl Core {
    /// Creates a core that continues the plan of an earlier leader, as far as `snapshot` has it.
    pub fn resume(settings: SchedulerSettings, now: Nanos, snapshot: &ClusterSnapshot) -> Core {
        let mut core = Core {
            settings,
            placement: Placement::default(),
            in_force: None,
            settled: false,
            machines: snapshot.assignments.keys().cloned().collect(),
            rates: BTreeMap::new(),
            models: BTreeSet::new(),
            refused: RefusedModels::default(),
            measured: 0,
            queries: snapshot.queries.clone(),
            splits: snapshot.splits.clone(),
            assigned: BTreeMap::new(),
            draining: BTreeSet::new(),
            emptying: Emptying::default(),
            ejected: EjectedBackends::default(),
            avoided: BTreeSet::new(),
            planned_at: None,
            extended: false,
            seen_at: now,
            load_factors: LoadFactors::default(),
            plan: snapshot.plan.clone().unwrap_or_default(),
        };
        // Where the summary is lost, numbers go on from what is there.
        let epochs = snapshot.assignments.values().map(|assignment| assignment.epoch);
        let epochs = epochs.chain(snapshot.routes.values().map(|route| route.epoch));
        core.plan.epoch = epochs.chain([core.plan.epoch]).max().unwrap_or(0);
        core.placement.scale = core.plan.scale;
        for (backend, assignment) in &snapshot.assignments {
            let models = assignment.models.iter().map(|share| share.model.clone()).collect();
            core.assigned.insert(backend.clone(), models);
            let keep_current =
                assignment.models.iter().filter(|share| share.role != AssignmentRole::Shadow);
            let parts: Vec<PlacedPart> = keep_current
                .map(|share| PlacedPart {
                    model: share.model.clone(),
                    batch: share.batch,
                    rate: share.rate,
                })
                .collect();
            if !parts.is_empty() {
                let cycle = DutyCycle { cycle_ms: assignment.cycle_ms, parts };
                core.placement.duty_cycles.insert(backend.clone(), cycle);
            }
        }
        core
    }

    /// The placement in force.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Plans without these backends from the next step on: their models move to others, without a
    /// gap. All backends are emptied only with `may_empty`, and only while there are no requests.
    pub fn drain(&mut self, backends: BTreeSet<String>, may_empty: bool) {
        self.draining = backends;
        self.emptying.allow(may_empty);
    }

    /// The input of replica estimation.
    pub fn scaling_input(&self, snapshot: &ClusterSnapshot) -> ScalingInput {
        let curves = curves(snapshot);
        let usage_of = |(name, record): (&String, &crate::record::BackendRecord)| {
            let assigned = self.assigned.get(name).is_none_or(BTreeSet::is_empty);
            let holds = snapshot.states.get(name).is_none_or(|state| state.models.is_empty());
            // A backend that is not draining may get an assignment at any time.
            let empty = assigned && holds && self.draining.contains(name);
            let cycle = self.placement.duty_cycles.get(name);
            let busy = cycle.map_or(0.0, |cycle| busy(cycle, &record.device, &curves));
            (name.clone(), BackendUsage { empty, busy })
        };
        ScalingInput {
            machines: machines(snapshot),
            demands: self.demands(snapshot),
            placement: self.settings.placement.clone(),
            rate_min: self.settings.rate_min,
            reported: !snapshot.loads.is_empty(),
            activity: self.emptying.activity(),
            usage: snapshot.backends.iter().map(usage_of).collect(),
            curves,
        }
    }

    /// What the store is to contain now; `None` while it is unclear which backends are present.
    pub fn step(&mut self, now: Nanos, snapshot: &ClusterSnapshot) -> Option<Decision> {
        let lost =
            self.machines.iter().filter(|name| !snapshot.backends.contains_key(*name)).count();
        if 2 * lost <= self.machines.len() {
            self.seen_at = now;
        } else if now - self.seen_at < self.settings.grace {
            return None;
        }
        let lost_records = held_without_record(snapshot);
        self.adopt(snapshot, &lost_records);
        self.refused.update(snapshot);
        let present = machines(snapshot);
        let all_drained = present.iter().all(|machine| self.draining.contains(&machine.name));
        let withdrawal = self.emptying.update(now, snapshot, all_drained && !present.is_empty());
        if withdrawal == Some(Withdrawal::Models) {
            return Some(self.empty(snapshot, &present));
        }
        self.avoided = self.ejected.update(now, snapshot);
        let machines = self.retained(&present);
        let mut demands = self.demands(snapshot);
        let curves = curves(snapshot);
        let reason = match self.queries != snapshot.queries {
            true => Some("queries changed"),
            false => self.reason(now, lost, &machines, &demands, curves.len()),
        };
        if let Some(reason) = reason {
            self.queries.clone_from(&snapshot.queries);
            self.splits = splitting::splits(snapshot, &machines, &curves);
            demands = self.demands(snapshot);
            self.replan(now, reason, &machines, &demands, &curves);
        } else if self.placement.slack(&demands) < 1.0 {
            self.extend_placement(&machines, &demands, &curves);
        }
        let mut decision = self.deploy(now, snapshot, &present, &demands, &curves, lost_records);
        if withdrawal.is_some() || (present.is_empty() && self.emptying.is_scaled()) {
            decision.routes = self.withdrawn_routes(snapshot);
        }
        Some(decision)
    }

    /// Routes that say of every model that no backend serves it: frontends keep requests until one
    /// does. A route that is missing would count as lost.
    fn withdrawn_routes(&self, snapshot: &ClusterSnapshot) -> BTreeMap<String, RouteRecord> {
        let route = RouteRecord { epoch: self.plan.epoch, ..RouteRecord::default() };
        let enabled = snapshot.models.iter().filter(|(_, model)| model.enabled);
        enabled.map(|(name, _)| (name.clone(), route.clone())).collect()
    }

    /// Takes all models from all backends.
    fn empty(&mut self, snapshot: &ClusterSnapshot, present: &[Machine]) -> Decision {
        (self.placement, self.in_force) = (Placement::default(), None);
        // They are about to be removed, which is no loss.
        self.machines.clear();
        let name = |machine: &Machine| machine.name.clone();
        self.assigned = present.iter().map(|m| (name(m), BTreeSet::new())).collect();
        let assignment = Assignment { epoch: self.plan.epoch, ..Assignment::default() };
        Decision {
            assignments: present.iter().map(|m| (name(m), assignment.clone())).collect(),
            routes: self.withdrawn_routes(snapshot),
            splits: self.splits.clone(),
            plan: self.summarize(snapshot, present.len(), &[]),
        }
    }

    /// What backends hold although this leader has not assigned it counts as assigned, where the
    /// backend or the model is new here: after a loss of the store it stays in service until the
    /// plan has moved it.
    fn adopt(&mut self, snapshot: &ClusterSnapshot, lost_records: &BTreeMap<String, ModelFacts>) {
        for (backend, state) in &snapshot.states {
            let is_new = !self.assigned.contains_key(backend);
            let assigned = self.assigned.entry(backend.clone()).or_default();
            for (model, state) in &state.models {
                let is_known =
                    snapshot.models.contains_key(model) || lost_records.contains_key(model);
                let is_unseen = is_new || !self.models.contains(model);
                if is_known && is_unseen && !matches!(state, LoadState::Failed { .. }) {
                    assigned.insert(model.clone());
                }
            }
        }
        self.models = snapshot.models.keys().cloned().collect();
    }

    /// The machines that are neither draining nor avoided; all of them where none is left, because
    /// requests must still be served.
    fn retained<'a>(&self, present: &'a [Machine]) -> Cow<'a, [Machine]> {
        let is_retained = |machine: &&Machine| {
            !self.draining.contains(&machine.name) && !self.avoided.contains(&machine.name)
        };
        let all_retained = self.draining.is_empty() && self.avoided.is_empty();
        match all_retained || !present.iter().any(|machine| is_retained(&machine)) {
            true => Cow::Borrowed(present),
            false => present.iter().filter(is_retained).cloned().collect(),
        }
    }

    fn demands(&self, snapshot: &ClusterSnapshot) -> Vec<Demand> {
        let rates = demand::rates(snapshot.loads.values());
        let memory: BTreeMap<&str, u64> = snapshot
            .profiles
            .iter()
            .map(|((_, digest), profile)| (digest.as_str(), profile.memory_bytes))
            .collect();
        let budgets = splitting::budgets(&self.queries, &self.splits, &snapshot.loads);
        let enabled = snapshot.models.iter().filter(|(_, model)| model.enabled);
        let mut demands: Vec<Demand> = enabled
            .map(|(name, model)| {
                let known = memory.get(model.digest.as_str()).copied().filter(|bytes| *bytes > 0);
                let query_demand = budgets.get(name.as_str());
                let own_ms = model.config.timeout_ms.map(|ms| ms as f64);
                let objectives = own_ms
                    .into_iter()
                    .chain(query_demand.map(|query_demand| query_demand.budget_ms));
                Demand {
                    model: name.clone(),
                    rate: expected_rate(snapshot, &rates, name).max(self.settings.rate_min),
                    slo_ms: objectives.reduce(f64::min).unwrap_or(self.settings.slo_ms),
                    real_time: model.config.class == Class::RealTime
                        || query_demand.is_some_and(|query_demand| query_demand.real_time),
                    memory_bytes: known.unwrap_or(model.bytes),
                    prefix_group: None,
                }
            })
            .collect();
        assign_prefix_groups(snapshot, &mut demands);
        demands
    }

    /// The reason to plan now, if there is one.
    fn reason(
        &self,
        now: Nanos,
        lost: usize,
        machines: &[Machine],
        demands: &[Demand],
        measured: usize,
    ) -> Option<&'static str> {
        let Some(planned_at) = self.planned_at else { return Some("start") };
        let age = now - planned_at;
        if lost > 0 {
            return Some("backend lost");
        }
        let is_retained = |name: &String| machines.iter().any(|machine| machine.name == *name);
        let is_left =
            |name: &String| self.placement.duty_cycles.contains_key(name) && !is_retained(name);
        if self.draining.iter().any(is_left) {
            return Some("backend drained");
        }
        if self.avoided.iter().any(is_left) {
            return Some("backend avoided");
        }
        if machines.is_empty() && self.placement.duty_cycles.is_empty() {
            // Nothing can be planned before a backend joins.
            return None;
        }
        if !self.placement.covers(machines, demands) {
            return Some("models changed");
        }
        if self.refused.concerns(&self.placement, machines) {
            return Some("model refused");
        }
        if age < PLAN_SPACING {
            return None;
        }
        if machines.iter().any(|machine| !self.machines.contains(&machine.name)) {
            return Some("backend joined");
        }
        if measured > self.measured {
            return Some("model measured");
        }
        let changed = |demand: &Demand| {
            let before = self.rates.get(&demand.model).copied().unwrap_or(0.0);
            demand.rate > before * (1.0 + RATE_CHANGE)
        };
        let short = self.placement.slack(demands) < 1.0 && demands.iter().any(changed);
        if (short || self.extended) && age >= self.settings.spacing {
            return Some("load rose");
        }
        (age >= self.settings.epoch).then_some("epoch")
    }

    fn replan(
        &mut self,
        now: Nanos,
        reason: &'static str,
        machines: &[Machine],
        demands: &[Demand],
        curves: &Curves,
    ) {
        let fresh =
            placement::place(machines, demands, curves, &self.assigned, &self.settings.placement);
        let bound = fresh.bound;
        let mut chosen =
            self.keep_current(&fresh, machines, demands, curves, reason).unwrap_or(fresh);
        chosen.bound = bound;
        self.refused.move_parts(&mut chosen, machines);
        self.plan.moves += moves(&chosen, &self.assigned);
        let before = std::mem::replace(&mut self.placement, chosen);
        if before.covers(machines, demands) && matches!(reason, "epoch" | "load rose") {
            // One that is being prepared never came into force.
            if self.in_force.is_none() && self.settled && before != self.placement {
                self.in_force = Some((before, now));
            }
        } else {
            self.in_force = None;
        }
        self.machines = machines.iter().map(|machine| machine.name.clone()).collect();
        self.rates = demands.iter().map(|demand| (demand.model.clone(), demand.rate)).collect();
        self.measured = curves.len();
        self.planned_at = Some(now);
        self.extended = false;
        self.plan.epoch += 1;
        self.plan.reason = reason.to_string();
    }

    /// Adds idle machines where the load has outgrown the plan and the next plan is not due. Models
    /// that serve do not move.
    fn extend_placement(&mut self, machines: &[Machine], demands: &[Demand], curves: &Curves) {
        let risen = |demand: &&Demand| {
            let before = self.rates.get(&demand.model).copied().unwrap_or(0.0);
            demand.rate > before * (1.0 + RATE_CHANGE)
        };
        let risen: Vec<Demand> = demands.iter().filter(risen).cloned().collect();
        let mut placement = self.placement.clone();
        let settings = &self.settings.placement;
        if placement::extend(
            &mut placement,
            machines,
            &risen,
            curves,
            &self.assigned,
            settings,
            1.0,
        ) {
            self.plan.moves += moves(&placement, &self.assigned);
            self.placement = placement;
            self.extended = true;
        }
    }

    /// The current placement, repaired where machines came or went, if it is good enough that
    /// moving to `fresh` is not worth it.
    fn keep_current(
        &self,
        fresh: &Placement,
        machines: &[Machine],
        demands: &[Demand],
        curves: &Curves,
        reason: &str,
    ) -> Option<Placement> {
        let settings = &self.settings.placement;
        let current = match reason {
            // SLOs may have changed too, not only rates.
            "model measured" | "queries changed" => return None,
            "backend lost" | "backend joined" | "backend drained" | "backend avoided" => {
                let placement = &self.placement;
                placement::repair(placement, machines, demands, curves, &self.assigned, settings)?
            }
            _ => self.placement.clone(),
        };
        let enough = current.slack(demands) >= 1.0 + settings.headroom / 2.0;
        let gains = match settings.spread {
            true => fresh.slack(demands) > current.slack(demands) * GAIN_SLACK,
            false => (fresh.used() as f64) < current.used() as f64 * GAIN_MACHINES,
        };
        (enough && !gains && current.covers(machines, demands)).then_some(current)
    }

    fn deploy(
        &mut self,
        now: Nanos,
        snapshot: &ClusterSnapshot,
        machines: &[Machine],
        demands: &[Demand],
        curves: &Curves,
        lost_records: BTreeMap<String, ModelFacts>,
    ) -> Decision {
        let memory =
            machines.iter().map(|machine| (machine.name.clone(), machine.memory_bytes)).collect();
        let facts = |demand: &Demand| {
            let version = snapshot.models.get(&demand.model).map_or(0, |model| model.version);
            let facts = ModelFacts { version, memory_bytes: demand.memory_bytes };
            (demand.model.clone(), facts)
        };
        let models = demands.iter().map(facts).chain(lost_records).collect();
        let state = DeploymentState {
            placement: &self.placement,
            assigned: &self.assigned,
            states: &snapshot.states,
            memory: &memory,
            models: &models,
        };
        let preparing = self.in_force.as_ref().filter(|(_, since)| now - *since < PREPARE_MAX);
        let prepared = preparing.and_then(|(before, _)| deployment::prepare(&state, before));
        let is_prepared = prepared.is_none();
        let step = prepared.unwrap_or_else(|| deployment::step(&state));
        if is_prepared {
            self.in_force = None;
        }
        self.settled = step.settled;
        let in_force = self.in_force.as_ref().map_or(&self.placement, |(before, _)| before);
        for model in &step.forced {
            tracing::warn!(model, "no memory for a shadow; requests may be refused for a moment");
        }
        let pools = match self.settings.placement.pooled {
            true => self.load_factors.pools(in_force, machines, demands, curves),
            false => BackendPools::default(),
        };
        let decision = Decision {
            assignments: self.assignments(in_force, &step, &models, &pools),
            routes: self.routes(in_force, snapshot, &step, demands, curves, &pools),
            splits: self.splits.clone(),
            plan: self.summarize(snapshot, machines.len(), demands),
        };
        self.assigned = step
            .assigned
            .into_iter()
            .map(|(backend, assigned)| (backend, assigned.into_keys().collect()))
            .collect();
        decision
    }

    fn assignments(
        &self,
        in_force: &Placement,
        step: &DeploymentStep,
        models: &BTreeMap<String, ModelFacts>,
        pools: &BackendPools,
    ) -> BTreeMap<String, Assignment> {
        let assignment = |(backend, assigned): (&String, &deployment::PlannedModels)| {
            let share = |(model, (role, batch, rate)): (&String, &(AssignmentRole, u32, f64))| {
                AssignedModel {
                    model: model.clone(),
                    version: models.get(model).map_or(0, |facts| facts.version),
                    role: *role,
                    batch: *batch,
                    rate: *rate,
                    min_batch: pools.min_batch(backend, model),
                }
            };
            let cycle_ms = in_force.duty_cycles.get(backend).map_or(0.0, |cycle| cycle.cycle_ms);
            let models = assigned.iter().map(share).collect();
            (backend.clone(), Assignment { epoch: self.plan.epoch, cycle_ms, models })
        };
        step.assigned.iter().map(assignment).collect()
    }

    fn routes(
        &self,
        in_force: &Placement,
        snapshot: &ClusterSnapshot,
        step: &DeploymentStep,
        demands: &[Demand],
        curves: &Curves,
        pools: &BackendPools,
    ) -> BTreeMap<String, RouteRecord> {
        let planned = self.placement.rates();
        // A rate beyond the plan is for the next plan; only a rate that no plan can serve is
        // limited.
        let short = self.placement.scale < 1.0;
        let measured: BTreeSet<&str> = curves.keys().map(|(_, model)| model.as_str()).collect();
        let limits: BTreeMap<&str, f64> = demands
            .iter()
            .filter_map(|demand| {
                let rate = planned.get(demand.model.as_str()).copied().unwrap_or(0.0);
                // An unmeasured model is not limited.
                let known = measured.contains(demand.model.as_str());
                (short && known && rate < demand.rate).then_some((demand.model.as_str(), rate))
            })
            .collect();
        let route = |(model, targets): (&String, &Vec<(String, f64)>)| {
            let target = |(backend, weight): &(String, f64)| {
                let record = snapshot.backends.get(backend)?;
                let assigned = step.assigned.get(backend)?.get(model)?;
                let cycle = in_force.duty_cycles.get(backend);
                let curve = curves.get(&(record.device.clone(), model.clone()));
                let time = curve.and_then(|c| c.iter().find(|(batch, _)| *batch >= assigned.1));
                Some(TargetRecord {
                    backend: backend.clone(),
                    grpc: record.grpc.clone(),
                    http: record.http.clone(),
                    weight: *weight,
                    batch: assigned.1,
                    batch_ms: time.map_or(0.0, |(_, ms)| *ms),
                    cycle_ms: cycle.map_or(0.0, |cycle| cycle.cycle_ms),
                    min_batch: pools.min_batch(backend, model),
                    version: version_on(snapshot, backend, model),
                })
            };
            let targets = targets.iter().filter_map(target).collect();
            let rate_max = limits.get(model.as_str()).copied();
            (model.clone(), RouteRecord { epoch: self.plan.epoch, targets, rate_max })
        };
        step.routes.iter().map(route).collect()
    }

    fn summarize(
        &mut self,
        snapshot: &ClusterSnapshot,
        backends: usize,
        demands: &[Demand],
    ) -> PlanRecord {
        let (mut failed, mut failed_versions) = (BTreeMap::new(), BTreeMap::new());
        for (model, record) in &snapshot.models {
            let load_states =
                || snapshot.states.values().filter_map(|state| state.models.get(model));
            let ready = load_states().any(|load_state| {
                matches!(load_state, LoadState::Ready { version } if *version == record.version)
            });
            let reason = load_states().find_map(|load_state| match load_state {
                LoadState::Failed { version, reason } if *version == record.version => Some(reason),
                _ => None,
            });
            let mut updates = snapshot.states.values().filter_map(|state| state.failed.get(model));
            let update = updates.rfind(|update| update.version == record.version);
            let reason = reason.or(update.map(|update| &update.reason));
            if let (false, Some(reason)) = (ready, reason) {
                failed.insert(model.clone(), reason.clone());
                failed_versions.insert(model.clone(), record.version);
            }
        }
        let mut prefix_groups: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for demand in demands {
            if let Some(prefix_group) = &demand.prefix_group {
                prefix_groups.entry(&prefix_group.name).or_default().push(demand.model.clone());
            }
        }
        self.plan.prefix_groups = prefix_groups.into_values().collect();
        let slack = self.placement.slack(demands);
        self.plan.used = self.placement.used();
        self.plan.backends = backends;
        self.plan.bound = self.placement.bound;
        self.plan.scale = if slack.is_finite() { (slack * 100.0).round() / 100.0 } else { 0.0 };
        self.plan.unattainable.clone_from(&self.placement.unattainable);
        self.plan.failed = failed;
        self.plan.failed_versions = failed_versions;
        self.plan.avoided = self.avoided.iter().take(AVOIDED_MAX).cloned().collect();
        self.plan.clone()
    }
}

/// The rate to plan a model or a canary for. A canary gets its share as soon as it is there, and
/// the version in force gets all requests again as soon as the canary is not.
fn expected_rate(snapshot: &ClusterSnapshot, rates: &BTreeMap<String, f64>, name: &str) -> f64 {
    let rate = |name: &str| rates.get(name).copied().unwrap_or(0.0);
    let (model, version) = split_served(name);
    let Some(canary) = snapshot.models.get(model).and_then(|record| record.canary.as_ref()) else {
        return rate(name);
    };
    let all = rate(model) + rate(&served_name(model, canary.version));
    match version {
        None => all,
        Some(_) => rate(name).max(canary.share * all),
    }
}

/// The version of `model` that `backend` serves; 0 when it serves none.
fn version_on(snapshot: &ClusterSnapshot, backend: &str, model: &str) -> u64 {
    let state = snapshot.states.get(backend).and_then(|state| state.models.get(model));
    match state {
        Some(LoadState::Ready { version }) => *version,
        _ => 0,
    }
}

/// Share of a machine's time that its batches take.
fn busy(cycle: &DutyCycle, device: &str, curves: &Curves) -> f64 {
    let serving = cycle.parts.iter().filter(|part| part.rate > 0.0);
    let batch_ms = |part: &PlacedPart| {
        let curve = curves.get(&(device.to_string(), part.model.clone()))?;
        curve.iter().find(|(batch, _)| *batch >= part.batch).map(|(_, ms)| *ms)
    };
    let sum_ms: f64 = serving.filter_map(batch_ms).sum();
    if cycle.cycle_ms > 0.0 { sum_ms / cycle.cycle_ms } else { 0.0 }
}

fn machines(snapshot: &ClusterSnapshot) -> Vec<Machine> {
    let machine = |(name, record): (&String, &crate::record::BackendRecord)| Machine {
        name: name.clone(),
        device: record.device.clone(),
        memory_bytes: record.memory_bytes,
    };
    snapshot.backends.iter().map(machine).collect()
}

fn assign_prefix_groups(snapshot: &ClusterSnapshot, demands: &mut [Demand]) {
    let by_digest: BTreeMap<&str, &[(String, f64)]> = snapshot
        .profiles
        .iter()
        .filter(|(_, profile)| !profile.marks.is_empty())
        .map(|((_, digest), profile)| (digest.as_str(), profile.marks.as_slice()))
        .collect();
    if by_digest.is_empty() {
        return;
    }
    let marks: BTreeMap<&str, &[(String, f64)]> = snapshot
        .models
        .iter()
        .filter_map(|(name, model)| Some((name.as_str(), *by_digest.get(model.digest.as_str())?)))
        .collect();
    // The same rule as on nodes: models that share batches must form them in the same way.
    let compatible = |a: &str, b: &str| match (snapshot.models.get(a), snapshot.models.get(b)) {
        (Some(a), Some(b)) => {
            let (a, b) = (&a.config, &b.config);
            let unbatched = a.batching.policy == model::config::BatchingPolicy::None
                || (a.class == Class::RealTime && a.slo_ms.is_none() && a.timeout_ms.is_none());
            !unbatched
                && a.class == b.class
                && a.timeout_ms.is_none() == b.timeout_ms.is_none()
                && (&a.batching, a.slo_ms, a.max_batch_size)
                    == (&b.batching, b.slo_ms, b.max_batch_size)
        }
        _ => false,
    };
    prefix_batching::assign(demands, &marks, compatible);
}

fn curves(snapshot: &ClusterSnapshot) -> Curves {
    let devices: BTreeSet<&str> = snapshot.backends.values().map(|b| b.device.as_str()).collect();
    let mut curves = Curves::new();
    for (name, model) in snapshot.models.iter().filter(|(_, model)| model.enabled) {
        for device in &devices {
            let key = (device.to_string(), model.digest.clone());
            if let Some(profile) = snapshot.profiles.get(&key).filter(|p| !p.curve.is_empty()) {
                curves.insert((device.to_string(), name.clone()), profile.curve.clone());
            }
        }
    }
    curves
}

/// Loads that a placement causes.
fn moves(placement: &Placement, held: &LoadedModels) -> u64 {
    let new = |(name, cycle): (&String, &DutyCycle)| {
        let held = held.get(name);
        let new = |part: &&PlacedPart| held.is_none_or(|held| !held.contains(&part.model));
        cycle.parts.iter().filter(new).count() as u64
    };
    placement.duty_cycles.iter().map(new).sum()
}

#[cfg(test)]
#[path = "scheduler/tests.rs"]
mod tests;
