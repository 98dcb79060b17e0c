//! Models that single backends cannot load, although others can: they lack the file, or the memory.
//! Plans give such a model to other backends.

use std::collections::BTreeMap;

use super::plan::{Machine, PlacedPart, Placement};
use crate::record::{BackendState, LoadState};
use crate::snapshot::ClusterSnapshot;

/// Versions that could not be loaded, by backend and model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RefusedModels(BTreeMap<String, BTreeMap<String, u64>>);

/// The version of a model that a backend could not load.
fn failed_version(state: &BackendState, model: &str) -> Option<u64> {
    if let Some(update) = state.failed.get(model) {
        return Some(update.version);
    }
    match state.models.get(model) {
        Some(LoadState::Failed { version, .. }) => Some(*version),
        _ => None,
    }
}

/// Whether another machine than `backend` has a part of `model`.
fn is_elsewhere(placement: &Placement, backend: &str, model: &str) -> bool {
    let others = placement.duty_cycles.iter().filter(|(name, _)| *name != backend);
    others.flat_map(|(_, cycle)| &cycle.parts).any(|part| part.model == model)
}

impl RefusedModels {
    /// Takes what backends report. A refusal is remembered while the backend stays and the version
    /// is in force, also when the backend no longer reports it.
    pub fn update(&mut self, snapshot: &ClusterSnapshot) {
        let is_in_force = |model: &str, version: u64| {
            snapshot.models.get(model).is_some_and(|record| record.version == version)
        };
        self.0.retain(|backend, _| snapshot.backends.contains_key(backend));
        for models in self.0.values_mut() {
            models.retain(|model, version| is_in_force(model, *version));
        }
        for (backend, state) in &snapshot.states {
            for model in state.models.keys() {
                let serves = matches!(
                    state.models.get(model),
                    Some(LoadState::Ready { version }) if is_in_force(model, *version)
                );
                let failed = failed_version(state, model).filter(|v| is_in_force(model, *v));
                let refused = self.0.entry(backend.clone()).or_default();
                match failed {
                    _ if serves => {
                        refused.remove(model);
                    }
                    Some(version) => {
                        refused.insert(model.clone(), version);
                    }
                    None => {}
                }
            }
        }
    }

    fn contains(&self, backend: &str, model: &str) -> bool {
        self.0.get(backend).is_some_and(|models| models.contains_key(model))
    }

    /// Where a part of `model` on `from` can go instead: a machine of the same kind that has not
    /// refused the model and does not serve it, the one with the fewest parts.
    fn substitute<'a>(
        &self,
        placement: &Placement,
        machines: &'a [Machine],
        from: &str,
        model: &str,
    ) -> Option<&'a Machine> {
        let kind = machines.iter().find(|machine| machine.name == from)?.device.as_str();
        let parts = |name: &str| placement.duty_cycles.get(name).map_or(&[][..], |c| &c.parts);
        let serves = |name: &str| parts(name).iter().any(|p| p.model == model && p.rate > 0.0);
        let others = machines.iter().filter(|machine| {
            machine.device == kind && machine.name != from && !serves(&machine.name)
        });
        let willing = others.filter(|machine| !self.contains(&machine.name, model));
        willing.min_by_key(|machine| parts(&machine.name).len())
    }

    /// Whether a part of the placement could be on a machine that has not refused it.
    pub fn concerns(&self, placement: &Placement, machines: &[Machine]) -> bool {
        placement.duty_cycles.iter().any(|(backend, cycle)| {
            let refused = |part: &&PlacedPart| self.contains(backend, &part.model);
            cycle
                .parts
                .iter()
                .filter(refused)
                .any(|part| self.substitute(placement, machines, backend, &part.model).is_some())
        })
    }

    /// Moves the parts that backends have refused to others. Where every backend has refused a
    /// model, it stays where it is.
    pub fn move_parts(&self, placement: &mut Placement, machines: &[Machine]) {
        let names: Vec<String> = placement.duty_cycles.keys().cloned().collect();
        for backend in names {
            let Some(cycle) = placement.duty_cycles.get(&backend) else { continue };
            let (cycle_ms, parts) = (cycle.cycle_ms, cycle.parts.clone());
            for part in parts.into_iter().filter(|part| self.contains(&backend, &part.model)) {
                let other = self.substitute(placement, machines, &backend, &part.model);
                let other = other.map(|machine| machine.name.clone());
                let is_spare = part.rate <= 0.0 && is_elsewhere(placement, &backend, &part.model);
                if other.is_none() && !is_spare {
                    continue;
                }
                if let Some(cycle) = placement.duty_cycles.get_mut(&backend) {
                    cycle.parts.retain(|p| p.model != part.model);
                }
                let Some(other) = other else { continue };
                let cycle = placement.duty_cycles.entry(other).or_default();
                // A standby that takes over serves.
                cycle.parts.retain(|p| p.model != part.model);
                cycle.parts.push(part);
                cycle.parts.sort_by(|a, b| a.model.cmp(&b.model));
                cycle.cycle_ms = cycle.cycle_ms.max(cycle_ms);
            }
        }
        placement.duty_cycles.retain(|_, cycle| !cycle.parts.is_empty());
    }
}
