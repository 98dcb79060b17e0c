//! Estimates the replicas that the load needs: the fewest on which the scheduler's own placement
//! serves all load with its headroom.

use std::collections::{BTreeMap, BTreeSet};

use crate::scheduler::placement::{self, PlacementSettings};
use crate::scheduler::plan::{Curves, Demand, LoadedModels, Machine, Placement};

/// Load and machines, as the leading scheduler knows them.
#[derive(Clone, Debug, Default)]
pub struct ScalingInput {
    /// Backends that have joined.
    pub machines: Vec<Machine>,
    /// Rate and SLO of each model.
    pub demands: Vec<Demand>,
    /// Measured latencies.
    pub curves: Curves,
    /// Settings of placements.
    pub placement: PlacementSettings,
    /// Requests per second that every model is planned for at least.
    pub rate_min: f64,
    /// Whether any frontend reports load.
    pub reported: bool,
    /// Use of backends, by name.
    pub usage: BTreeMap<String, BackendUsage>,
}

/// How the plan uses a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BackendUsage {
    /// Whether it holds no model and is assigned none.
    pub empty: bool,
    /// Share of its time that the plan uses.
    pub busy: f64,
}

/// A gain in served rate below this factor does not count.
const GAIN_MIN: f64 = 1.02;

/// The number of replicas that serve the demands of `input`, at most `max`. `replicas` names the
/// existing ones among its backends; other backends are used but never scaled. `None` where it
/// cannot be known: no frontend reports load, or no replica has joined that shows their kind of
/// machine.
pub fn estimate_replicas(
    input: &ScalingInput,
    replicas: &BTreeSet<String>,
    max: u32,
) -> Option<u32> {
    if !input.reported {
        return None;
    }
    let (own, others): (Vec<&Machine>, Vec<&Machine>) =
        input.machines.iter().partition(|machine| replicas.contains(&machine.name));
    let replica = own.first()?;
    let others: Vec<Machine> = others.into_iter().cloned().collect();
    let trial = Trial { demands: demands(input, &replica.device), input, others, replica };
    let max = max as usize;
    let all = trial.place(max);
    if !trial.suffices(&all) {
        // Replicas that would not help are not requested.
        let now = trial.place(own.len().min(max));
        let helps = all.slack(&trial.demands) > now.slack(&trial.demands) * GAIN_MIN;
        let count = if helps { max } else { own.len().min(max) };
        return u32::try_from(count).ok();
    }
    let mut count = all.used().saturating_sub(trial.others.len());
    while count < max && !trial.suffices(&trial.place(count)) {
        count += (count / 16).max(1);
    }
    u32::try_from(count.min(max)).ok()
}

/// Unmeasured models count only with their minimum rate.
fn demands(input: &ScalingInput, device: &str) -> Vec<Demand> {
    let demand = |demand: &Demand| {
        let known = input.curves.contains_key(&(device.to_string(), demand.model.clone()));
        let rate = if known { demand.rate } else { demand.rate.min(input.rate_min) };
        Demand { rate, ..demand.clone() }
    };
    input.demands.iter().map(demand).collect()
}

/// Placements on hypothetical machines.
struct Trial<'a> {
    input: &'a ScalingInput,
    demands: Vec<Demand>,
    others: Vec<Machine>,
    /// A machine as every replica is.
    replica: &'a Machine,
}

impl Trial<'_> {
    fn place(&self, replicas: usize) -> Placement {
        let mut machines = self.others.clone();
        // Names that no backend can have.
        machines.extend((0..replicas).map(|number| Machine {
            name: format!("/replica/{number:06}"),
            ..self.replica.clone()
        }));
        let settings = PlacementSettings { spread: false, ..self.input.placement.clone() };
        let held = LoadedModels::new();
        placement::place(&machines, &self.demands, &self.input.curves, &held, &settings)
    }

    /// Whether everything is served with the headroom, with the required number of copies.
    fn suffices(&self, placement: &Placement) -> bool {
        let settings = &self.input.placement;
        // Duty cycles list standbys too: either every model has its copies, or there are too few
        // machines.
        let mut copies: BTreeMap<&str, usize> = BTreeMap::new();
        for part in placement.duty_cycles.values().flat_map(|cycle| &cycle.parts) {
            *copies.entry(&part.model).or_default() += 1;
        }
        let copied = self.demands.iter().all(|demand| {
            copies.get(demand.model.as_str()).copied().unwrap_or(0) >= settings.copies
        });
        copied && placement.scale >= 1.0 + settings.headroom - 1e-9
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(own: usize, others: usize, rates: &[f64]) -> ScalingInput {
        let machine = |name: String| Machine { name, device: "gpu".to_string(), memory_bytes: 0 };
        let mut machines: Vec<Machine> = (0..own).map(|n| machine(format!("own-{n}"))).collect();
        machines.extend((0..others).map(|n| machine(format!("other-{n}"))));
        let mut input = ScalingInput {
            machines,
            reported: true,
            rate_min: 1.0,
            placement: PlacementSettings { copies: 1, ..PlacementSettings::default() },
            ..ScalingInput::default()
        };
        for (index, &rate) in rates.iter().enumerate() {
            let name = format!("m{index}");
            let key = ("gpu".to_string(), name.clone());
            input.curves.insert(key, vec![(1, 5.0), (4, 8.0), (16, 20.0)]);
            let demand = Demand { model: name, rate, slo_ms: 100.0, ..Demand::default() };
            input.demands.push(demand);
        }
        input
    }

    fn own(input: &ScalingInput) -> BTreeSet<String> {
        let own = input.machines.iter().filter(|machine| machine.name.starts_with("own"));
        own.map(|machine| machine.name.clone()).collect()
    }

    fn estimate(input: &ScalingInput, max: u32) -> Option<u32> {
        estimate_replicas(input, &own(input), max)
    }

    #[test]
    fn estimates_the_fewest_replicas_that_serve_the_load() {
        for rates in [&[100.0][..], &[500.0, 300.0], &[5000.0, 10.0, 900.0], &[1.0; 12]] {
            let input = input(2, 0, rates);
            let count = estimate(&input, 64).unwrap() as usize;
            // The scheduler's own placement and its checker agree that this many suffice, and that
            // one fewer does not.
            let serves = |count: usize| {
                let machine =
                    |n: usize| Machine { name: format!("x{n}"), ..input.machines[0].clone() };
                let machines: Vec<Machine> = (0..count).map(machine).collect();
                let settings = PlacementSettings { spread: false, ..input.placement.clone() };
                let placed = placement::place(
                    &machines,
                    &input.demands,
                    &input.curves,
                    &LoadedModels::new(),
                    &settings,
                );
                let errors = placement::check(&machines, &input.demands, &input.curves, &placed);
                errors.is_empty() && placed.slack(&input.demands) >= 1.2 - 1e-6
            };
            assert!(serves(count), "{rates:?} on {count}");
            assert!(count == 0 || !serves(count - 1), "{rates:?} on one fewer than {count}");
        }
    }

    #[test]
    fn more_load_never_needs_fewer_replicas() {
        let mut before = 0;
        for step in 1..40 {
            let now = estimate(&input(1, 0, &[f64::from(step) * 200.0, 50.0]), 64).unwrap();
            assert!(now >= before, "{step}: {now} after {before}");
            before = now;
        }
        assert!(before > 8);
    }

    #[test]
    fn counts_backends_outside_of_the_workload() {
        let alone = estimate(&input(1, 0, &[3000.0]), 64).unwrap();
        let helped = estimate(&input(1, 3, &[3000.0]), 64).unwrap();
        assert_eq!(alone - helped, 3);
        assert_eq!(estimate(&input(1, 64, &[3000.0]), 64), Some(0));
    }

    #[test]
    fn copies_need_as_many_replicas() {
        let mut input = input(1, 0, &[1.0]);
        input.placement.copies = 3;
        assert_eq!(estimate(&input, 64), Some(3));
    }

    #[test]
    fn overload_needs_all_replicas_and_missing_reports_none() {
        assert_eq!(estimate(&input(2, 0, &[1e6]), 16), Some(16));
        // Without load reports.
        let mut silent = input(2, 0, &[100.0]);
        silent.reported = false;
        assert_eq!(estimate(&silent, 16), None);
        assert_eq!(estimate(&input(0, 2, &[100.0]), 16), None);
    }

    #[test]
    fn unmeasured_models_need_no_extra_replicas() {
        let mut input = input(1, 0, &[5000.0]);
        input.curves.clear();
        assert_eq!(estimate(&input, 64), Some(1));
    }
}
