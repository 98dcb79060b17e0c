//! Moves backends from the models they hold to those of a placement, without leaving a model
//! unserved.
//!
//! A backend keeps a model that moves away, as a shadow, until its successors are ready. Where
//! memory does not allow both, the new model waits; where all wait for each other, a shadow is
//! first created on a backend with free memory.

use std::collections::{BTreeMap, BTreeSet};

use super::plan::{PlacedPart, Placement};
use crate::record::{AssignmentRole, BackendState, LoadState};

/// What deployment needs to know of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelFacts {
    /// The version to serve.
    pub version: u64,
    /// Memory it needs.
    pub memory_bytes: u64,
}

/// Backends that must serve the version in force before those that cannot get no more requests.
const CURRENT_MIN: usize = 2;

/// Input of a deployment step.
#[derive(Clone, Copy)]
pub struct DeploymentState<'a> {
    /// The placement to reach.
    pub placement: &'a Placement,
    /// Models assigned to backends now.
    pub assigned: &'a BTreeMap<String, BTreeSet<String>>,
    /// Models that backends report.
    pub states: &'a BTreeMap<String, BackendState>,
    /// Memory of backends; 0 for no limit.
    pub memory: &'a BTreeMap<String, u64>,
    /// The models to serve.
    pub models: &'a BTreeMap<String, ModelFacts>,
}

/// Models assigned to a backend: role, batch and rate.
pub type PlannedModels = BTreeMap<String, (AssignmentRole, u32, f64)>;

/// The next deployment step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeploymentStep {
    /// Models to assign to backends.
    pub assigned: BTreeMap<String, PlannedModels>,
    /// Backends that can serve a model now, and their shares of its requests.
    pub routes: BTreeMap<String, Vec<(String, f64)>>,
    /// Models that are unloaded from their last backend before another one is ready.
    pub forced: Vec<String>,
    /// Whether the placement is reached.
    pub settled: bool,
}

impl<'a> DeploymentState<'a> {
    fn load_state(&self, backend: &str, model: &str) -> Option<&'a LoadState> {
        self.states.get(backend)?.models.get(model)
    }

    fn is_ready(&self, backend: &str, model: &str) -> bool {
        matches!(self.load_state(backend, model), Some(LoadState::Ready { .. }))
    }

    /// Whether a backend serves the version in force.
    fn is_current(&self, backend: &str, model: &str) -> bool {
        let planned = self.models.get(model).map_or(0, |facts| facts.version);
        let state = self.load_state(backend, model);
        matches!(state, Some(LoadState::Ready { version }) if *version == planned)
    }

    /// Whether a backend serves another version because it cannot load the one in force.
    fn has_refused(&self, backend: &str, model: &str) -> bool {
        let planned = self.models.get(model).map_or(0, |facts| facts.version);
        let failed = self.states.get(backend).and_then(|state| state.failed.get(model));
        failed.is_some_and(|failed| failed.version == planned) && !self.is_current(backend, model)
    }

    fn is_assigned(&self, backend: &str, model: &str) -> bool {
        self.assigned.get(backend).is_some_and(|models| models.contains(model))
    }

    /// Whether this backend need not be waited for: it is ready with the right version, or failed
    /// to load it.
    fn is_done(&self, backend: &str, model: &str) -> bool {
        let planned = self.models.get(model).map_or(0, |facts| facts.version);
        match self.load_state(backend, model) {
            Some(LoadState::Ready { version }) => {
                let state = self.states.get(backend);
                let failed = state.and_then(|state| state.failed.get(model));
                *version >= planned || failed.is_some_and(|failed| failed.version >= planned)
            }
            Some(LoadState::Failed { version, .. }) => *version >= planned,
            _ => false,
        }
    }

    fn planned(&self, backend: &str) -> &'a [PlacedPart] {
        self.placement.duty_cycles.get(backend).map_or(&[], |cycle| &cycle.parts)
    }

    fn bytes(&self, model: &str) -> u64 {
        self.models.get(model).map_or(0, |facts| facts.memory_bytes)
    }

    /// Models whose successors are all done, at least one of them ready.
    fn taken_over(&self) -> BTreeSet<&'a str> {
        let mut open: BTreeMap<&str, (bool, bool)> = BTreeMap::new();
        for (backend, cycle) in &self.placement.duty_cycles {
            for part in &cycle.parts {
                let (all, any) = open.entry(&part.model).or_insert((true, false));
                *all &= part.rate <= 0.0 || self.is_done(backend, &part.model);
                *any |= self.is_ready(backend, &part.model);
            }
        }
        open.into_iter().filter(|(_, (all, any))| *all && *any).map(|(model, _)| model).collect()
    }
}

/// Computes the next step. Repeated after every report of a backend, it reaches the placement.
pub fn step(state: &DeploymentState<'_>) -> DeploymentStep {
    let taken_over = state.taken_over();
    let mut step = DeploymentStep { settled: true, ..DeploymentStep::default() };
    let mut waiting: Vec<(&str, &PlacedPart)> = Vec::new();
    for backend in state.memory.keys() {
        let assigned = step.assigned.entry(backend.clone()).or_default();
        keep_shadows(state, backend, &taken_over, assigned);
        step.settled &= assigned.is_empty();
        for part in state.planned(backend) {
            let held = state.is_assigned(backend, &part.model);
            step.settled &= state.is_done(backend, &part.model);
            if held || fits(state, backend, assigned, &part.model) {
                let why =
                    if part.rate > 0.0 { AssignmentRole::Serving } else { AssignmentRole::Standby };
                assigned.insert(part.model.clone(), (why, part.batch, part.rate));
            } else {
                waiting.push((backend, part));
            }
        }
    }
    step.settled &= waiting.is_empty();
    if !waiting.is_empty() && !has_pending_changes(state, &step) {
        break_deadlock(state, &waiting, &mut step);
    }
    step.routes = routes(state, &step.assigned);
    step
}

/// The step that prepares a placement while `before`, the one in force, still serves: backends load
/// what they will need, and every share and batch stays as it is, so that old and new work do not
/// compete. `None` when everything is ready, so that the placement can take over at once, or when
/// memory does not allow both.
pub fn prepare(state: &DeploymentState<'_>, before: &Placement) -> Option<DeploymentStep> {
    let mut step = DeploymentStep::default();
    let mut prepared = true;
    let in_force = DeploymentState { placement: before, ..*state };
    for backend in state.memory.keys() {
        let assigned = step.assigned.entry(backend.clone()).or_default();
        for part in in_force.planned(backend) {
            let role =
                if part.rate > 0.0 { AssignmentRole::Serving } else { AssignmentRole::Standby };
            assigned.insert(part.model.clone(), (role, part.batch, part.rate));
        }
    }
    step.routes = routes(&in_force, &step.assigned);
    for (backend, assigned) in &mut step.assigned {
        for part in state.planned(backend) {
            prepared &= part.rate <= 0.0 || state.is_done(backend, &part.model);
            if assigned.contains_key(&part.model) {
                continue;
            }
            let held = state.is_assigned(backend, &part.model);
            if !held && !fits(state, backend, assigned, &part.model) {
                return None;
            }
            assigned.insert(part.model.clone(), (AssignmentRole::Standby, part.batch, 0.0));
        }
    }
    (!prepared).then_some(step)
}

/// Keeps models that move away from `backend` while their successors are not ready.
fn keep_shadows(
    state: &DeploymentState<'_>,
    backend: &str,
    taken_over: &BTreeSet<&str>,
    assigned: &mut PlannedModels,
) {
    let planned: BTreeSet<&str> =
        state.planned(backend).iter().map(|part| part.model.as_str()).collect();
    for model in state.assigned.get(backend).into_iter().flatten() {
        let leaves = !planned.contains(model.as_str());
        let known = state.models.contains_key(model);
        let failed = matches!(state.load_state(backend, model), Some(LoadState::Failed { .. }));
        if leaves && known && !failed && !taken_over.contains(model.as_str()) {
            assigned.insert(model.clone(), (AssignmentRole::Shadow, 1, 0.0));
        }
    }
}

fn fits(state: &DeploymentState<'_>, backend: &str, assigned: &PlannedModels, model: &str) -> bool {
    let max = state.memory.get(backend).copied().unwrap_or(0);
    // A model that is being unloaded occupies memory until the backend reports otherwise.
    let mut held: BTreeSet<&str> = assigned.keys().map(String::as_str).collect();
    if let Some(state) = state.states.get(backend) {
        let there = state.models.iter().filter(|(_, s)| !matches!(s, LoadState::Failed { .. }));
        held.extend(there.map(|(model, _)| model.as_str()));
    }
    held.insert(model);
    max == 0 || held.iter().map(|model| state.bytes(model)).sum::<u64>() <= max
}

/// Whether some backend has not carried out its assignment yet.
fn has_pending_changes(state: &DeploymentState<'_>, step: &DeploymentStep) -> bool {
    step.assigned.iter().any(|(backend, assigned)| {
        let loads = assigned.keys().any(|model| !state.is_done(backend, model));
        let unloads = state.states.get(backend).is_some_and(|state| {
            let there = state.models.iter().filter(|(_, s)| !matches!(s, LoadState::Failed { .. }));
            there.into_iter().any(|(model, _)| !assigned.contains_key(model))
        });
        loads || unloads
    })
}

/// Frees memory for one of the backends that wait for each other.
fn break_deadlock(
    state: &DeploymentState<'_>,
    waiting: &[(&str, &PlacedPart)],
    step: &mut DeploymentStep,
) {
    for (backend, _) in waiting {
        let shadows = |assigned: &PlannedModels| -> Vec<String> {
            let shadow = |(_, (part, _, _)): &(&String, &(AssignmentRole, u32, f64))| {
                *part == AssignmentRole::Shadow
            };
            assigned.iter().filter(shadow).map(|(model, _)| model.clone()).collect()
        };
        let shadows_here = step.assigned.get(*backend).map(shadows).unwrap_or_default();
        for model in shadows_here {
            let elsewhere = |other: &&String| {
                other.as_str() != *backend
                    && state.is_ready(other, &model)
                    && step
                        .assigned
                        .get(*other)
                        .is_some_and(|assigned| assigned.contains_key(&model))
            };
            if state.memory.keys().any(|other| elsewhere(&other)) {
                step.assigned.entry(backend.to_string()).or_default().remove(&model);
                return;
            }
            let free = state.memory.keys().find(|other| {
                let assigned = step.assigned.get(*other);
                other.as_str() != *backend
                    && assigned.is_some_and(|assigned| !assigned.contains_key(&model))
                    && assigned.is_some_and(|assigned| fits(state, other, assigned, &model))
            });
            if let Some(other) = free.cloned() {
                step.assigned
                    .entry(other)
                    .or_default()
                    .insert(model, (AssignmentRole::Shadow, 1, 0.0));
                return;
            }
        }
    }
    // No free memory anywhere: a model is unloaded first, and its requests are refused meanwhile.
    for (backend, _) in waiting {
        let assigned = step.assigned.entry(backend.to_string()).or_default();
        let shadow = assigned.iter().find(|(_, (part, _, _))| *part == AssignmentRole::Shadow);
        if let Some(model) = shadow.map(|(model, _)| model.clone()) {
            assigned.remove(&model);
            step.forced.push(model);
            return;
        }
    }
}

/// Backends that can serve now. A ready backend of the placement gets its share; the share of those
/// that are not ready goes to other backends that hold the model.
fn routes(
    state: &DeploymentState<'_>,
    assigned: &BTreeMap<String, PlannedModels>,
) -> BTreeMap<String, Vec<(String, f64)>> {
    let mut routes: BTreeMap<String, Vec<(String, f64)>> = BTreeMap::new();
    let mut missing: BTreeMap<&str, f64> = BTreeMap::new();
    for (backend, cycle) in &state.placement.duty_cycles {
        for part in &cycle.parts {
            if !state.is_ready(backend, &part.model) {
                *missing.entry(&part.model).or_default() += part.rate;
            }
        }
    }
    for (backend, assigned) in assigned {
        for (model, (_, _, rate)) in assigned {
            if state.is_ready(backend, model) {
                let targets = routes.entry(model.clone()).or_default();
                targets.push((backend.clone(), *rate));
            }
        }
    }
    for (model, targets) in &mut routes {
        let current = targets.iter().filter(|(backend, _)| state.is_current(backend, model));
        if current.count() >= CURRENT_MIN {
            // Only those that cannot have the version in force: the others are about to.
            targets.retain(|(backend, _)| !state.has_refused(backend, model));
        }
        let unserved = missing.get(model.as_str()).copied().unwrap_or(0.0);
        let standbys = targets.iter().filter(|(_, weight)| *weight <= 0.0).count();
        if unserved > 0.0 && standbys > 0 {
            let idle = targets.iter_mut().filter(|(_, weight)| *weight <= 0.0);
            idle.for_each(|(_, weight)| *weight = unserved / standbys as f64);
        } else if targets.iter().all(|(_, weight)| *weight <= 0.0) {
            targets.iter_mut().for_each(|(_, weight)| *weight = 1.0);
        }
    }
    routes
}

#[cfg(test)]
mod tests {
    use base::Random;

    use super::super::plan::DutyCycle;
    use super::*;

    /// Backends that carry out their assignments one model at a time, in random order.
    struct Simulation {
        memory: BTreeMap<String, u64>,
        states: BTreeMap<String, BackendState>,
        assigned: BTreeMap<String, BTreeSet<String>>,
        models: BTreeMap<String, ModelFacts>,
        random: Random,
    }

    fn placement(random: &mut Random, backends: usize, models: usize, max: usize) -> Placement {
        let mut duty_cycles: BTreeMap<String, DutyCycle> = BTreeMap::new();
        for model in 0..models {
            for _ in 0..=random.below(2) {
                let start = random.below(backends as u64) as usize;
                let open = (0..backends).map(|step| format!("b{}", (start + step) % backends));
                let model = format!("m{model:02}");
                let free = open
                    .filter(|name| {
                        duty_cycles.get(name).is_none_or(|cycle| cycle.parts.len() < max)
                    })
                    .find(|name| {
                        let parts = duty_cycles.get(name).map_or(&[][..], |cycle| &cycle.parts);
                        parts.iter().all(|part| part.model != model)
                    });
                if let Some(name) = free {
                    let cycle = duty_cycles.entry(name).or_default();
                    cycle.parts.push(PlacedPart { model, batch: 1, rate: 1.0 });
                }
            }
        }
        Placement { duty_cycles, ..Placement::default() }
    }

    impl Simulation {
        fn next(&mut self, placement: &Placement) -> DeploymentStep {
            let state = DeploymentState {
                placement,
                assigned: &self.assigned,
                states: &self.states,
                memory: &self.memory,
                models: &self.models,
            };
            let step = step(&state);
            self.assigned = step
                .assigned
                .iter()
                .map(|(backend, assigned)| (backend.clone(), assigned.keys().cloned().collect()))
                .collect();
            step
        }

        /// One backend loads or unloads one model; checks that memory is never exceeded.
        fn act(&mut self) {
            let names: Vec<String> = self.memory.keys().cloned().collect();
            let name = &names[self.random.below(names.len() as u64) as usize];
            let assigned = self.assigned.get(name).cloned().unwrap_or_default();
            let state = self.states.entry(name.clone()).or_default();
            if let Some(model) =
                state.models.keys().find(|model| !assigned.contains(*model)).cloned()
            {
                state.models.remove(&model);
            } else if let Some(model) = assigned.iter().find(|m| !state.models.contains_key(*m)) {
                state.models.insert(model.clone(), LoadState::Ready { version: 1 });
            }
            let bytes: u64 = state.models.keys().map(|m| self.models[m].memory_bytes).sum();
            assert!(bytes <= self.memory[name], "{name} holds {bytes}");
        }
    }

    #[test]
    fn every_model_stays_routed_during_deployment() {
        let mut forced = 0;
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let (backends, models) = (2 + random.below(5) as usize, 3 + random.below(8) as usize);
            let max = (2 * models).div_ceil(backends) + 1;
            let facts = ModelFacts { version: 1, memory_bytes: 10 };
            let mut simulation = Simulation {
                memory: (0..backends).map(|i| (format!("b{i}"), 10 * max as u64)).collect(),
                states: (0..backends).map(|i| (format!("b{i}"), BackendState::default())).collect(),
                assigned: BTreeMap::new(),
                models: (0..models).map(|i| (format!("m{i:02}"), facts)).collect(),
                random: Random::new(seed + 1000),
            };
            let mut served: BTreeSet<String> = BTreeSet::new();
            for _ in 0..4 {
                let target = placement(&mut random, backends, models, max);
                let mut settled = false;
                for _ in 0..2000 {
                    let step = simulation.next(&target);
                    forced += step.forced.len();
                    step.forced.iter().for_each(|model| {
                        served.remove(model);
                    });
                    for model in &served {
                        assert!(step.routes.contains_key(model), "seed {seed}: {model} is lost");
                    }
                    served.extend(step.routes.keys().cloned());
                    settled = step.settled;
                    if settled {
                        break;
                    }
                    simulation.act();
                }
                assert!(settled, "seed {seed}: it does not end");
                for (name, cycle) in &target.duty_cycles {
                    let held: BTreeSet<&String> = simulation.states[name].models.keys().collect();
                    let planned: BTreeSet<&String> = cycle.parts.iter().map(|p| &p.model).collect();
                    assert!(planned.is_subset(&held), "seed {seed}: {name}");
                }
                let placed: BTreeSet<String> = target
                    .duty_cycles
                    .values()
                    .flat_map(|p| &p.parts)
                    .map(|p| p.model.clone())
                    .collect();
                served.retain(|model| placed.contains(model));
            }
        }
        assert!(forced < 40, "{forced} models had to go first");
    }

    #[test]
    fn shadows_get_the_share_of_backends_that_are_not_ready() {
        let part = |rate| PlacedPart { model: "m".to_string(), batch: 4, rate };
        let cycle = |rate| DutyCycle { cycle_ms: 10.0, parts: vec![part(rate)] };
        let placement = Placement {
            duty_cycles: [("a".to_string(), cycle(30.0)), ("b".to_string(), cycle(10.0))].into(),
            ..Placement::default()
        };
        let ready = BackendState {
            models: [("m".into(), LoadState::Ready { version: 1 })].into(),
            ..BackendState::default()
        };
        let names = ["a", "b", "c"].map(str::to_string);
        let state = DeploymentState {
            placement: &placement,
            assigned: &[("c".to_string(), ["m".to_string()].into())].into(),
            states: &[("b".to_string(), ready.clone()), ("c".to_string(), ready)].into(),
            memory: &names.into_iter().map(|name| (name, 0)).collect(),
            models: &[("m".to_string(), ModelFacts { version: 1, memory_bytes: 0 })].into(),
        };
        let step = step(&state);
        assert_eq!(step.assigned["c"]["m"].0, AssignmentRole::Shadow);
        assert_eq!(step.routes["m"], [("b".to_string(), 10.0), ("c".to_string(), 30.0)]);
    }

    /// `a` serves `m` and `b` takes it over, beside `n`, which stays.
    #[test]
    fn a_prepared_placement_takes_over_at_once() {
        let part = |model: &str, rate| PlacedPart { model: model.to_string(), batch: 4, rate };
        let cycle = |parts| DutyCycle { cycle_ms: 10.0, parts };
        let placement = |a: Vec<PlacedPart>, b: Vec<PlacedPart>| Placement {
            duty_cycles: [("a".to_string(), cycle(a)), ("b".to_string(), cycle(b))].into(),
            ..Placement::default()
        };
        let before = placement(vec![part("m", 30.0)], vec![part("n", 5.0)]);
        let after = placement(vec![part("n", 5.0)], vec![part("m", 40.0), part("n", 5.0)]);
        let load_states = |models: &[(&str, LoadState)]| BackendState {
            models: models.iter().map(|(model, s)| (model.to_string(), s.clone())).collect(),
            ..BackendState::default()
        };
        let ready = LoadState::Ready { version: 1 };
        let states: BTreeMap<String, BackendState> = [
            ("a".to_string(), load_states(&[("m", ready.clone()), ("n", ready.clone())])),
            ("b".to_string(), load_states(&[("m", LoadState::Loading), ("n", ready.clone())])),
        ]
        .into();
        let facts = ModelFacts { version: 1, memory_bytes: 10 };
        let models = ["m", "n"].map(|model| (model.to_string(), facts)).into();
        let assigned =
            ["a", "b"].map(|name| (name.to_string(), ["m".to_string(), "n".to_string()].into()));
        let (assigned, small, large) = (assigned.into(), 10, 20);
        let memory = |bytes: u64| ["a", "b"].map(|name| (name.to_string(), bytes)).into();
        let (small, large) = (memory(small), memory(large));
        let state = |states, memory| DeploymentState {
            placement: &after,
            assigned: &assigned,
            states,
            memory,
            models: &models,
        };
        // While `b` loads, everything is served as before.
        let step = prepare(&state(&states, &large), &before).unwrap();
        assert_eq!(step.routes["m"], [("a".to_string(), 30.0)]);
        assert_eq!(step.routes["n"], [("b".to_string(), 5.0)]);
        assert_eq!(step.assigned["b"]["m"], (AssignmentRole::Standby, 4, 0.0));
        assert_eq!(step.assigned["b"]["n"], (AssignmentRole::Serving, 4, 5.0));
        let nothing = BTreeMap::new();
        let new = DeploymentState { assigned: &nothing, ..state(&states, &small) };
        assert_eq!(prepare(&new, &before), None, "no memory for both");
        let mut loaded = states.clone();
        loaded.insert("b".to_string(), load_states(&[("m", ready.clone()), ("n", ready)]));
        assert_eq!(prepare(&state(&loaded, &large), &before), None, "it takes over");
        assert_eq!(super::step(&state(&loaded, &large)).routes["m"], [("b".to_string(), 40.0)]);
    }
}
