//! From what backends hold to what the placement wants, so that no model is without an answer on the way.
//!
//! A backend keeps a model that leaves it, as a shadow, until all who take over are ready. Where memory does not
//! allow both, the newcomer waits; where all wait for each other, a shadow is set up on a backend with room first.

use std::collections::{BTreeMap, BTreeSet};

use super::placement::{PlacedPart, Placement};
use crate::record::{BackendState, Part, Standing};

/// A model as deployments see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelFacts {
    /// The version to serve.
    pub version: u64,
    /// Memory it takes.
    pub memory_bytes: u64,
}

/// What a deployment starts from.
pub struct Situation<'a> {
    /// Where to go.
    pub placement: &'a Placement,
    /// What backends are told to hold now.
    pub told: &'a BTreeMap<String, BTreeSet<String>>,
    /// What they say they hold.
    pub states: &'a BTreeMap<String, BackendState>,
    /// Their memory; 0 for no bound.
    pub memory: &'a BTreeMap<String, u64>,
    /// The models to serve.
    pub models: &'a BTreeMap<String, ModelFacts>,
}

/// What a backend is told to hold: why, and with which batch and rate.
pub type Told = BTreeMap<String, (Part, u32, f64)>;

/// The next step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// What backends are told to hold.
    pub told: BTreeMap<String, Told>,
    /// Who can answer for a model now, and its part of the requests.
    pub routes: BTreeMap<String, Vec<(String, f64)>>,
    /// Models that had to leave their last backend before another was ready.
    pub forced: Vec<String>,
    /// Whether nothing is left to do.
    pub settled: bool,
}

impl<'a> Situation<'a> {
    fn standing(&self, backend: &str, model: &str) -> Option<&'a Standing> {
        self.states.get(backend)?.models.get(model)
    }

    fn is_ready(&self, backend: &str, model: &str) -> bool {
        matches!(self.standing(backend, model), Some(Standing::Ready { .. }))
    }

    fn is_told(&self, backend: &str, model: &str) -> bool {
        self.told.get(backend).is_some_and(|models| models.contains(model))
    }

    /// Whether this backend need not be waited for: ready with the right version, or unable to be.
    fn is_done(&self, backend: &str, model: &str) -> bool {
        let wanted = self.models.get(model).map_or(0, |facts| facts.version);
        match self.standing(backend, model) {
            Some(Standing::Ready { version }) => *version >= wanted,
            Some(Standing::Failed { version, .. }) => *version >= wanted,
            _ => false,
        }
    }

    fn wanted(&self, backend: &str) -> &'a [PlacedPart] {
        self.placement.places.get(backend).map_or(&[], |place| &place.parts)
    }

    fn bytes(&self, model: &str) -> u64 {
        self.models.get(model).map_or(0, |facts| facts.memory_bytes)
    }

    /// Models that all who are to serve them do, and at least one really.
    fn satisfied(&self) -> BTreeSet<&'a str> {
        let mut open: BTreeMap<&str, (bool, bool)> = BTreeMap::new();
        for (backend, place) in &self.placement.places {
            for part in &place.parts {
                let (all, any) = open.entry(&part.model).or_insert((true, false));
                *all &= part.rate <= 0.0 || self.is_done(backend, &part.model);
                *any |= self.is_ready(backend, &part.model);
            }
        }
        open.into_iter().filter(|(_, (all, any))| *all && *any).map(|(model, _)| model).collect()
    }
}

/// The next step from a situation. Calling it again when a backend reports something leads to the placement.
pub fn step(situation: &Situation<'_>) -> Step {
    let satisfied = situation.satisfied();
    let mut step = Step { settled: true, ..Step::default() };
    let mut waiting: Vec<(&str, &PlacedPart)> = Vec::new();
    for backend in situation.memory.keys() {
        let told = step.told.entry(backend.clone()).or_default();
        keep_leaving(situation, backend, &satisfied, told);
        step.settled &= told.is_empty();
        for part in situation.wanted(backend) {
            let held = situation.is_told(backend, &part.model);
            step.settled &= situation.is_done(backend, &part.model);
            if held || fits(situation, backend, told, &part.model) {
                let why = if part.rate > 0.0 { Part::Serving } else { Part::Standby };
                told.insert(part.model.clone(), (why, part.batch, part.rate));
            } else {
                waiting.push((backend, part));
            }
        }
    }
    step.settled &= waiting.is_empty();
    if !waiting.is_empty() && !in_motion(situation, &step) {
        unlock(situation, &waiting, &mut step);
    }
    step.routes = routes(situation, &step.told);
    step
}

/// Models that are to leave `backend` stay while others are not ready.
fn keep_leaving(
    situation: &Situation<'_>,
    backend: &str,
    satisfied: &BTreeSet<&str>,
    told: &mut Told,
) {
    let wanted: BTreeSet<&str> =
        situation.wanted(backend).iter().map(|part| part.model.as_str()).collect();
    for model in situation.told.get(backend).into_iter().flatten() {
        let leaves = !wanted.contains(model.as_str());
        let known = situation.models.contains_key(model);
        let failed = matches!(situation.standing(backend, model), Some(Standing::Failed { .. }));
        if leaves && known && !failed && !satisfied.contains(model.as_str()) {
            told.insert(model.clone(), (Part::Shadow, 1, 0.0));
        }
    }
}

fn fits(situation: &Situation<'_>, backend: &str, told: &Told, model: &str) -> bool {
    let most = situation.memory.get(backend).copied().unwrap_or(0);
    // What a backend was told to drop is still there until it says otherwise.
    let mut held: BTreeSet<&str> = told.keys().map(String::as_str).collect();
    if let Some(state) = situation.states.get(backend) {
        let there = state.models.iter().filter(|(_, s)| !matches!(s, Standing::Failed { .. }));
        held.extend(there.map(|(model, _)| model.as_str()));
    }
    held.insert(model);
    most == 0 || held.iter().map(|model| situation.bytes(model)).sum::<u64>() <= most
}

/// Whether some backend still has to do what it is told.
fn in_motion(situation: &Situation<'_>, step: &Step) -> bool {
    step.told.iter().any(|(backend, told)| {
        let loads = told.keys().any(|model| !situation.is_done(backend, model));
        let unloads = situation.states.get(backend).is_some_and(|state| {
            let there = state.models.iter().filter(|(_, s)| !matches!(s, Standing::Failed { .. }));
            there.into_iter().any(|(model, _)| !told.contains_key(model))
        });
        loads || unloads
    })
}

/// Makes room for one of those who wait for each other.
fn unlock(situation: &Situation<'_>, waiting: &[(&str, &PlacedPart)], step: &mut Step) {
    for (backend, _) in waiting {
        let shadows = |told: &Told| -> Vec<String> {
            let shadow = |(_, (part, _, _)): &(&String, &(Part, u32, f64))| *part == Part::Shadow;
            told.iter().filter(shadow).map(|(model, _)| model.clone()).collect()
        };
        let leaving = step.told.get(*backend).map(shadows).unwrap_or_default();
        for model in leaving {
            let elsewhere = |other: &&String| {
                other.as_str() != *backend
                    && situation.is_ready(other, &model)
                    && step.told.get(*other).is_some_and(|told| told.contains_key(&model))
            };
            if situation.memory.keys().any(|other| elsewhere(&other)) {
                step.told.entry(backend.to_string()).or_default().remove(&model);
                return;
            }
            let room = situation.memory.keys().find(|other| {
                let told = step.told.get(*other);
                other.as_str() != *backend
                    && told.is_some_and(|told| !told.contains_key(&model))
                    && told.is_some_and(|told| fits(situation, other, told, &model))
            });
            if let Some(other) = room.cloned() {
                step.told.entry(other).or_default().insert(model, (Part::Shadow, 1, 0.0));
                return;
            }
        }
    }
    // No room anywhere: somebody has to go first, and its requests are refused meanwhile.
    for (backend, _) in waiting {
        let told = step.told.entry(backend.to_string()).or_default();
        let shadow = told.iter().find(|(_, (part, _, _))| *part == Part::Shadow);
        if let Some(model) = shadow.map(|(model, _)| model.clone()) {
            told.remove(&model);
            step.forced.push(model);
            return;
        }
    }
}

/// Who can answer now. What the placement wants and is ready gets its part; the part of those who are not ready
/// goes to whoever else holds the model.
fn routes(
    situation: &Situation<'_>,
    told: &BTreeMap<String, Told>,
) -> BTreeMap<String, Vec<(String, f64)>> {
    let mut routes: BTreeMap<String, Vec<(String, f64)>> = BTreeMap::new();
    let mut missing: BTreeMap<&str, f64> = BTreeMap::new();
    for (backend, place) in &situation.placement.places {
        for part in &place.parts {
            if !situation.is_ready(backend, &part.model) {
                *missing.entry(&part.model).or_default() += part.rate;
            }
        }
    }
    for (backend, told) in told {
        for (model, (_, _, rate)) in told {
            if situation.is_ready(backend, model) {
                let targets = routes.entry(model.clone()).or_default();
                targets.push((backend.clone(), *rate));
            }
        }
    }
    for (model, targets) in &mut routes {
        let lacking = missing.get(model.as_str()).copied().unwrap_or(0.0);
        let helpers = targets.iter().filter(|(_, weight)| *weight <= 0.0).count();
        if lacking > 0.0 && helpers > 0 {
            let idle = targets.iter_mut().filter(|(_, weight)| *weight <= 0.0);
            idle.for_each(|(_, weight)| *weight = lacking / helpers as f64);
        } else if targets.iter().all(|(_, weight)| *weight <= 0.0) {
            targets.iter_mut().for_each(|(_, weight)| *weight = 1.0);
        }
    }
    routes
}

#[cfg(test)]
mod tests {
    use base::Random;

    use super::super::placement::Place;
    use super::*;

    /// Backends that do what they are told, one thing at a time, in random order.
    struct World {
        memory: BTreeMap<String, u64>,
        states: BTreeMap<String, BackendState>,
        told: BTreeMap<String, BTreeSet<String>>,
        models: BTreeMap<String, ModelFacts>,
        random: Random,
    }

    fn placement(random: &mut Random, backends: usize, models: usize, most: usize) -> Placement {
        let mut places: BTreeMap<String, Place> = BTreeMap::new();
        for model in 0..models {
            for _ in 0..=random.below(2) {
                let start = random.below(backends as u64) as usize;
                let open = (0..backends).map(|step| format!("b{}", (start + step) % backends));
                let model = format!("m{model:02}");
                let place = open
                    .filter(|name| places.get(name).is_none_or(|place| place.parts.len() < most))
                    .find(|name| {
                        let parts = places.get(name).map_or(&[][..], |place| &place.parts);
                        parts.iter().all(|part| part.model != model)
                    });
                if let Some(name) = place {
                    let place = places.entry(name).or_default();
                    place.parts.push(PlacedPart { model, batch: 1, rate: 1.0 });
                }
            }
        }
        Placement { places, ..Placement::default() }
    }

    impl World {
        fn next(&mut self, placement: &Placement) -> Step {
            let situation = Situation {
                placement,
                told: &self.told,
                states: &self.states,
                memory: &self.memory,
                models: &self.models,
            };
            let step = step(&situation);
            self.told = step
                .told
                .iter()
                .map(|(backend, told)| (backend.clone(), told.keys().cloned().collect()))
                .collect();
            step
        }

        /// One backend does one thing; checks that memory is never exceeded.
        fn act(&mut self) {
            let names: Vec<String> = self.memory.keys().cloned().collect();
            let name = &names[self.random.below(names.len() as u64) as usize];
            let told = self.told.get(name).cloned().unwrap_or_default();
            let state = self.states.entry(name.clone()).or_default();
            if let Some(model) = state.models.keys().find(|model| !told.contains(*model)).cloned() {
                state.models.remove(&model);
            } else if let Some(model) = told.iter().find(|m| !state.models.contains_key(*m)) {
                state.models.insert(model.clone(), Standing::Ready { version: 1 });
            }
            let bytes: u64 = state.models.keys().map(|m| self.models[m].memory_bytes).sum();
            assert!(bytes <= self.memory[name], "{name} holds {bytes}");
        }
    }

    #[test]
    fn no_model_is_without_an_answer_while_others_take_over() {
        let mut forced = 0;
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let (backends, models) = (2 + random.below(5) as usize, 3 + random.below(8) as usize);
            let most = (2 * models).div_ceil(backends) + 1;
            let facts = ModelFacts { version: 1, memory_bytes: 10 };
            let mut world = World {
                memory: (0..backends).map(|i| (format!("b{i}"), 10 * most as u64)).collect(),
                states: (0..backends).map(|i| (format!("b{i}"), BackendState::default())).collect(),
                told: BTreeMap::new(),
                models: (0..models).map(|i| (format!("m{i:02}"), facts)).collect(),
                random: Random::new(seed + 1000),
            };
            let mut served: BTreeSet<String> = BTreeSet::new();
            for _ in 0..4 {
                let target = placement(&mut random, backends, models, most);
                let mut settled = false;
                for _ in 0..2000 {
                    let step = world.next(&target);
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
                    world.act();
                }
                assert!(settled, "seed {seed}: it does not end");
                for (name, place) in &target.places {
                    let held: BTreeSet<&String> = world.states[name].models.keys().collect();
                    let wanted: BTreeSet<&String> = place.parts.iter().map(|p| &p.model).collect();
                    assert!(wanted.is_subset(&held), "seed {seed}: {name}");
                }
                let placed: BTreeSet<String> = target
                    .places
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
    fn the_part_of_a_backend_that_is_not_ready_goes_to_those_who_hold_the_model() {
        let part = |rate| PlacedPart { model: "m".to_string(), batch: 4, rate };
        let place = |rate| Place { cycle_ms: 10.0, parts: vec![part(rate)] };
        let placement = Placement {
            places: [("a".to_string(), place(30.0)), ("b".to_string(), place(10.0))].into(),
            ..Placement::default()
        };
        let ready = BackendState { models: [("m".into(), Standing::Ready { version: 1 })].into() };
        let names = ["a", "b", "c"].map(str::to_string);
        let situation = Situation {
            placement: &placement,
            told: &[("c".to_string(), ["m".to_string()].into())].into(),
            states: &[("b".to_string(), ready.clone()), ("c".to_string(), ready)].into(),
            memory: &names.into_iter().map(|name| (name, 0)).collect(),
            models: &[("m".to_string(), ModelFacts { version: 1, memory_bytes: 0 })].into(),
        };
        let step = step(&situation);
        assert_eq!(step.told["c"]["m"].0, Part::Shadow);
        assert_eq!(step.routes["m"], [("b".to_string(), 10.0), ("c".to_string(), 30.0)]);
    }
}
