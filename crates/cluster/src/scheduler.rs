//! The global scheduler: load in, plans out, in epochs.
//!
//! [`Core`] decides and is pure: what it sees comes in as a [`View`], what it wants goes out as a [`Decision`].
//! [`agent`] carries it between the store and the core, in whichever process leads; the simulator drives the same
//! core in virtual time.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use base::Nanos;
use model::config::Class;

use crate::query::spec::QuerySpec;
use crate::record::{
    Assignment, Part, PlanRecord, RouteRecord, Share, SplitRecord, Standing, TargetRecord,
};
use crate::scaling::need::{Duty, Outlook};
use crate::view::View;

pub mod agent;
pub mod demand;
pub mod deployment;
pub mod kinship;
pub mod packing;
pub mod placement;
pub mod pooling;
pub mod splitting;

use deployment::{ModelFacts, Situation, Step};
use placement::{
    Curves, Demand, Holdings, Machine, Place, PlacedPart, Placement, PlacementSettings,
};
use pooling::{Paces, Pools};

/// How the scheduler works.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerSettings {
    /// Time between two plans when nothing special happens.
    pub epoch: Nanos,
    /// Least time between two plans because of load.
    pub spacing: Nanos,
    /// How long many backends must be gone at once before that is believed: the store may have lost sight of them.
    pub grace: Nanos,
    /// Objective of models that name none, in milliseconds.
    pub slo_ms: f64,
    /// Requests a second that every model is ready for.
    pub rate_least: f64,
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
            rate_least: 1.0,
            placement: PlacementSettings::default(),
        }
    }
}

/// Least time between plans for reasons other than load and loss, so that those that come together make one.
const SETTLING: Nanos = Nanos::from_millis(1000);
/// A change of a model's rate beyond this share is one.
const CHANGE: f64 = 0.1;
/// A placement with this much more room, or this many fewer machines, is worth moving for.
const WORTH_ROOM: f64 = 1.5;
const WORTH_FEWER: f64 = 0.85;

/// What is to be in the store.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// For every backend that is there.
    pub assignments: BTreeMap<String, Assignment>,
    /// For every model that can be answered for.
    pub routes: BTreeMap<String, RouteRecord>,
    /// For every query.
    pub splits: BTreeMap<String, SplitRecord>,
    /// In short.
    pub plan: PlanRecord,
}

/// Decides.
pub struct Core {
    settings: SchedulerSettings,
    /// What is in force: the plan, and machines that help out since.
    placement: Placement,
    /// Machines and rates the placement was made for.
    machines: BTreeSet<String>,
    rates: BTreeMap<String, f64>,
    /// Curves that were known then.
    measured: usize,
    /// Queries, and their budgets of then.
    queries: BTreeMap<String, QuerySpec>,
    splits: BTreeMap<String, SplitRecord>,
    told: BTreeMap<String, BTreeSet<String>>,
    /// Backends that are to be left with nothing.
    draining: BTreeSet<String>,
    planned_at: Option<Nanos>,
    /// Whether machines help out since then.
    helped: bool,
    /// When most backends were last seen.
    seen_at: Nanos,
    paces: Paces,
    plan: PlanRecord,
}

impl Core {
    /// A core that goes on from what `view` holds of an earlier leader's plan.
    pub fn resume(settings: SchedulerSettings, now: Nanos, view: &View) -> Core {
        let mut core = Core {
            settings,
            placement: Placement::default(),
            machines: view.assignments.keys().cloned().collect(),
            rates: BTreeMap::new(),
            measured: 0,
            queries: view.queries.clone(),
            splits: view.splits.clone(),
            told: BTreeMap::new(),
            draining: BTreeSet::new(),
            planned_at: None,
            helped: false,
            seen_at: now,
            paces: Paces::default(),
            plan: view.plan.clone().unwrap_or_default(),
        };
        core.placement.scale = core.plan.scale;
        for (backend, assignment) in &view.assignments {
            let models = assignment.shares.iter().map(|share| share.model.clone()).collect();
            core.told.insert(backend.clone(), models);
            let kept = assignment.shares.iter().filter(|share| share.part != Part::Shadow);
            let parts: Vec<PlacedPart> = kept
                .map(|share| PlacedPart {
                    model: share.model.clone(),
                    batch: share.batch,
                    rate: share.rate,
                })
                .collect();
            if !parts.is_empty() {
                let place = Place { cycle_ms: assignment.cycle_ms, parts };
                core.placement.places.insert(backend.clone(), place);
            }
        }
        core
    }

    /// The placement that stands.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Plans without these backends from the next step on: what they hold goes to others, in order.
    pub fn drain(&mut self, backends: BTreeSet<String>) {
        self.draining = backends;
    }

    /// What scaling has to know.
    pub fn outlook(&self, view: &View) -> Outlook {
        let curves = curves(view);
        let duty = |(name, record): (&String, &crate::record::BackendRecord)| {
            let told = self.told.get(name).is_none_or(BTreeSet::is_empty);
            let holds = view.states.get(name).is_none_or(|state| state.models.is_empty());
            // One that is not being emptied may be told something the next moment.
            let empty = told && holds && self.draining.contains(name);
            let place = self.placement.places.get(name);
            let busy = place.map_or(0.0, |place| busy(place, &record.device, &curves));
            (name.clone(), Duty { empty, busy })
        };
        Outlook {
            machines: machines(view),
            demands: self.demands(view),
            placement: self.settings.placement.clone(),
            rate_least: self.settings.rate_least,
            reported: !view.loads.is_empty(),
            duties: view.backends.iter().map(duty).collect(),
            curves,
        }
    }

    /// What is to be in the store now; nothing while it is unclear who is there.
    pub fn step(&mut self, now: Nanos, view: &View) -> Option<Decision> {
        let lost = self.machines.iter().filter(|name| !view.backends.contains_key(*name)).count();
        if 2 * lost <= self.machines.len() {
            self.seen_at = now;
        } else if now - self.seen_at < self.settings.grace {
            return None;
        }
        let present = machines(view);
        let machines = self.staying(&present);
        let mut demands = self.demands(view);
        let curves = curves(view);
        let reason = match self.queries != view.queries {
            true => Some("queries changed"),
            false => self.reason(now, lost, &machines, &demands, curves.len()),
        };
        if let Some(reason) = reason {
            self.queries.clone_from(&view.queries);
            self.splits = splitting::splits(view, &machines, &curves);
            demands = self.demands(view);
            self.replan(now, reason, &machines, &demands, &curves);
        } else if self.placement.slack(&demands) < 1.0 {
            self.help(&machines, &demands, &curves);
        }
        Some(self.deploy(view, &present, &demands, &curves))
    }

    /// Those that are not to be left with nothing; all, where that would be nobody: somebody has to serve.
    fn staying<'a>(&self, present: &'a [Machine]) -> Cow<'a, [Machine]> {
        let stays = |machine: &&Machine| !self.draining.contains(&machine.name);
        match self.draining.is_empty() || !present.iter().any(|machine| stays(&machine)) {
            true => Cow::Borrowed(present),
            false => present.iter().filter(stays).cloned().collect(),
        }
    }

    fn demands(&self, view: &View) -> Vec<Demand> {
        let rates = demand::rates(view.loads.values());
        let memory: BTreeMap<&str, u64> = view
            .profiles
            .iter()
            .map(|((_, digest), profile)| (digest.as_str(), profile.memory_bytes))
            .collect();
        let budgets = splitting::budgets(&self.queries, &self.splits);
        let enabled = view.models.iter().filter(|(_, model)| model.enabled);
        let mut demands: Vec<Demand> = enabled
            .map(|(name, model)| {
                let known = memory.get(model.digest.as_str()).copied().filter(|bytes| *bytes > 0);
                let asked = budgets.get(name.as_str());
                let own_ms = model.config.timeout_ms.map(|ms| ms as f64);
                let objectives = own_ms.into_iter().chain(asked.map(|asked| asked.budget_ms));
                Demand {
                    model: name.clone(),
                    rate: rates.get(name).copied().unwrap_or(0.0).max(self.settings.rate_least),
                    slo_ms: objectives.reduce(f64::min).unwrap_or(self.settings.slo_ms),
                    real_time: model.config.class == Class::RealTime
                        || asked.is_some_and(|asked| asked.real_time),
                    memory_bytes: known.unwrap_or(model.bytes),
                    family: None,
                }
            })
            .collect();
        assign_families(view, &mut demands);
        demands
    }

    /// Why to plan now, if there is a reason.
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
        let stays = |name: &String| machines.iter().any(|machine| machine.name == *name);
        if self.draining.iter().any(|name| self.placement.places.contains_key(name) && !stays(name))
        {
            return Some("backend drained");
        }
        if !self.placement.covers(machines, demands) {
            return Some("models changed");
        }
        if age < SETTLING {
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
            demand.rate > before * (1.0 + CHANGE)
        };
        let short = self.placement.slack(demands) < 1.0 && demands.iter().any(changed);
        if (short || self.helped) && age >= self.settings.spacing {
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
            placement::place(machines, demands, curves, &self.told, &self.settings.placement);
        let bound = fresh.bound;
        let mut chosen = self.kept(&fresh, machines, demands, curves, reason).unwrap_or(fresh);
        chosen.bound = bound;
        self.plan.moves += moves(&chosen, &self.told);
        self.placement = chosen;
        self.machines = machines.iter().map(|machine| machine.name.clone()).collect();
        self.rates = demands.iter().map(|demand| (demand.model.clone(), demand.rate)).collect();
        self.measured = curves.len();
        self.planned_at = Some(now);
        self.helped = false;
        self.plan.epoch += 1;
        self.plan.reason = reason.to_string();
    }

    /// Machines without work help where load has outgrown the plan and the next one is not due: nothing that runs moves
    /// for it.
    fn help(&mut self, machines: &[Machine], demands: &[Demand], curves: &Curves) {
        let risen = |demand: &&Demand| {
            let before = self.rates.get(&demand.model).copied().unwrap_or(0.0);
            demand.rate > before * (1.0 + CHANGE)
        };
        let risen: Vec<Demand> = demands.iter().filter(risen).cloned().collect();
        let mut placement = self.placement.clone();
        let settings = &self.settings.placement;
        if placement::extend(&mut placement, machines, &risen, curves, &self.told, settings, 1.0) {
            self.plan.moves += moves(&placement, &self.told);
            self.placement = placement;
            self.helped = true;
        }
    }

    /// What stands, with repairs where machines came or went, if it is good enough that moving to `fresh` is not worth
    /// it.
    fn kept(
        &self,
        fresh: &Placement,
        machines: &[Machine],
        demands: &[Demand],
        curves: &Curves,
        reason: &str,
    ) -> Option<Placement> {
        let settings = &self.settings.placement;
        let stands = match reason {
            // Objectives may have changed with these, not only rates.
            "model measured" | "queries changed" => return None,
            "backend lost" | "backend joined" | "backend drained" => {
                let placement = &self.placement;
                placement::repair(placement, machines, demands, curves, &self.told, settings)?
            }
            _ => self.placement.clone(),
        };
        let enough = stands.slack(demands) >= 1.0 + settings.headroom / 2.0;
        let gains = match settings.spread {
            true => fresh.slack(demands) > stands.slack(demands) * WORTH_ROOM,
            false => (fresh.used() as f64) < stands.used() as f64 * WORTH_FEWER,
        };
        (enough && !gains && stands.covers(machines, demands)).then_some(stands)
    }

    fn deploy(
        &mut self,
        view: &View,
        machines: &[Machine],
        demands: &[Demand],
        curves: &Curves,
    ) -> Decision {
        let memory =
            machines.iter().map(|machine| (machine.name.clone(), machine.memory_bytes)).collect();
        let facts = |demand: &Demand| {
            let version = view.models.get(&demand.model).map_or(0, |model| model.version);
            let facts = ModelFacts { version, memory_bytes: demand.memory_bytes };
            (demand.model.clone(), facts)
        };
        let models = demands.iter().map(facts).collect();
        let situation = Situation {
            placement: &self.placement,
            told: &self.told,
            states: &view.states,
            memory: &memory,
            models: &models,
        };
        let step = deployment::step(&situation);
        for model in &step.forced {
            tracing::warn!(model, "no room for a shadow: requests may be refused for a moment");
        }
        let pools = match self.settings.placement.pooled {
            true => self.paces.pools(&self.placement, machines, demands, curves),
            false => Pools::default(),
        };
        let decision = Decision {
            assignments: self.assignments(&step, &models, &pools),
            routes: self.routes(view, &step, demands, curves, &pools),
            splits: self.splits.clone(),
            plan: self.summary(view, machines.len(), demands),
        };
        self.told = step
            .told
            .into_iter()
            .map(|(backend, told)| (backend, told.into_keys().collect()))
            .collect();
        decision
    }

    fn assignments(
        &self,
        step: &Step,
        models: &BTreeMap<String, ModelFacts>,
        pools: &Pools,
    ) -> BTreeMap<String, Assignment> {
        let assignment = |(backend, told): (&String, &deployment::Told)| {
            let share = |(model, (part, batch, rate)): (&String, &(Part, u32, f64))| Share {
                model: model.clone(),
                version: models.get(model).map_or(0, |facts| facts.version),
                part: *part,
                batch: *batch,
                rate: *rate,
                least: pools.least(backend, model),
            };
            let cycle_ms = self.placement.places.get(backend).map_or(0.0, |place| place.cycle_ms);
            let shares = told.iter().map(share).collect();
            (backend.clone(), Assignment { epoch: self.plan.epoch, cycle_ms, shares })
        };
        step.told.iter().map(assignment).collect()
    }

    fn routes(
        &self,
        view: &View,
        step: &Step,
        demands: &[Demand],
        curves: &Curves,
        pools: &Pools,
    ) -> BTreeMap<String, RouteRecord> {
        let planned = self.placement.rates();
        // A rate beyond the plan is the next plan's to serve; only what no plan can serve is held back.
        let short = self.placement.scale < 1.0;
        let measured: BTreeSet<&str> = curves.keys().map(|(_, model)| model.as_str()).collect();
        let limits: BTreeMap<&str, f64> = demands
            .iter()
            .filter_map(|demand| {
                let rate = planned.get(demand.model.as_str()).copied().unwrap_or(0.0);
                // Nobody is held back by a guess.
                let known = measured.contains(demand.model.as_str());
                (short && known && rate < demand.rate).then_some((demand.model.as_str(), rate))
            })
            .collect();
        let route = |(model, targets): (&String, &Vec<(String, f64)>)| {
            let target = |(backend, weight): &(String, f64)| {
                let record = view.backends.get(backend)?;
                let told = step.told.get(backend)?.get(model)?;
                let place = self.placement.places.get(backend);
                let curve = curves.get(&(record.device.clone(), model.clone()));
                let time = curve.and_then(|c| c.iter().find(|(batch, _)| *batch >= told.1));
                Some(TargetRecord {
                    backend: backend.clone(),
                    grpc: record.grpc.clone(),
                    http: record.http.clone(),
                    weight: *weight,
                    batch: told.1,
                    batch_ms: time.map_or(0.0, |(_, ms)| *ms),
                    cycle_ms: place.map_or(0.0, |place| place.cycle_ms),
                    least: pools.least(backend, model),
                })
            };
            let targets = targets.iter().filter_map(target).collect();
            let rate_max = limits.get(model.as_str()).copied();
            (model.clone(), RouteRecord { epoch: self.plan.epoch, targets, rate_max })
        };
        step.routes.iter().map(route).collect()
    }

    fn summary(&mut self, view: &View, backends: usize, demands: &[Demand]) -> PlanRecord {
        let mut failed = BTreeMap::new();
        for (model, record) in &view.models {
            let standings = || view.states.values().filter_map(|state| state.models.get(model));
            let ready = standings().any(|standing| matches!(standing, Standing::Ready { .. }));
            let reason = standings().find_map(|standing| match standing {
                Standing::Failed { version, reason } if *version >= record.version => Some(reason),
                _ => None,
            });
            if let (false, Some(reason)) = (ready, reason) {
                failed.insert(model.clone(), reason.clone());
            }
        }
        let mut families: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for demand in demands {
            if let Some(family) = &demand.family {
                families.entry(&family.name).or_default().push(demand.model.clone());
            }
        }
        self.plan.families = families.into_values().collect();
        let slack = self.placement.slack(demands);
        self.plan.used = self.placement.used();
        self.plan.backends = backends;
        self.plan.bound = self.placement.bound;
        self.plan.scale = if slack.is_finite() { (slack * 100.0).round() / 100.0 } else { 0.0 };
        self.plan.unattainable.clone_from(&self.placement.unattainable);
        self.plan.failed = failed;
        self.plan.clone()
    }
}

/// Share of a machine's time that its turns take.
fn busy(place: &Place, device: &str, curves: &Curves) -> f64 {
    let serving = place.parts.iter().filter(|part| part.rate > 0.0);
    let turn_ms = |part: &PlacedPart| {
        let curve = curves.get(&(device.to_string(), part.model.clone()))?;
        curve.iter().find(|(batch, _)| *batch >= part.batch).map(|(_, ms)| *ms)
    };
    let sum_ms: f64 = serving.filter_map(turn_ms).sum();
    if place.cycle_ms > 0.0 { sum_ms / place.cycle_ms } else { 0.0 }
}

fn machines(view: &View) -> Vec<Machine> {
    let machine = |(name, record): (&String, &crate::record::BackendRecord)| Machine {
        name: name.clone(),
        device: record.device.clone(),
        memory_bytes: record.memory_bytes,
    };
    view.backends.iter().map(machine).collect()
}

fn assign_families(view: &View, demands: &mut [Demand]) {
    let by_digest: BTreeMap<&str, &[(String, f64)]> = view
        .profiles
        .iter()
        .filter(|(_, profile)| !profile.marks.is_empty())
        .map(|((_, digest), profile)| (digest.as_str(), profile.marks.as_slice()))
        .collect();
    if by_digest.is_empty() {
        return;
    }
    let marks: BTreeMap<&str, &[(String, f64)]> = view
        .models
        .iter()
        .filter_map(|(name, model)| Some((name.as_str(), *by_digest.get(model.digest.as_str())?)))
        .collect();
    // As nodes have it: who shares batches must want them made in the same way.
    let alike = |a: &str, b: &str| match (view.models.get(a), view.models.get(b)) {
        (Some(a), Some(b)) => {
            let (a, b) = (&a.config, &b.config);
            let whole = a.batching.policy == model::config::BatchingPolicy::None
                || (a.class == Class::RealTime && a.slo_ms.is_none() && a.timeout_ms.is_none());
            !whole
                && a.class == b.class
                && a.timeout_ms.is_none() == b.timeout_ms.is_none()
                && (&a.batching, a.slo_ms, a.max_batch_size)
                    == (&b.batching, b.slo_ms, b.max_batch_size)
        }
        _ => false,
    };
    kinship::assign(demands, &marks, alike);
}

fn curves(view: &View) -> Curves {
    let devices: BTreeSet<&str> = view.backends.values().map(|b| b.device.as_str()).collect();
    let mut curves = Curves::new();
    for (name, model) in view.models.iter().filter(|(_, model)| model.enabled) {
        for device in &devices {
            let key = (device.to_string(), model.digest.clone());
            if let Some(profile) = view.profiles.get(&key).filter(|p| !p.curve.is_empty()) {
                curves.insert((device.to_string(), name.clone()), profile.curve.clone());
            }
        }
    }
    curves
}

/// Loads that a placement causes.
fn moves(placement: &Placement, held: &Holdings) -> u64 {
    let new = |(name, place): (&String, &Place)| {
        let held = held.get(name);
        let new = |part: &&PlacedPart| held.is_none_or(|held| !held.contains(&part.model));
        place.parts.iter().filter(new).count() as u64
    };
    placement.places.iter().map(new).sum()
}

#[cfg(test)]
#[path = "scheduler/tests.rs"]
mod tests;
