use base::Random;

use super::*;

fn machines(count: usize, memory_bytes: u64) -> Vec<Machine> {
    let machine = |index: usize| Machine {
        name: format!("m{index:03}"),
        device: "cpu".to_string(),
        memory_bytes,
    };
    (0..count).map(machine).collect()
}

fn demand(model: &str, rate: f64, real_time: bool) -> Demand {
    let model = model.to_string();
    Demand { model, rate, slo_ms: 100.0, real_time, memory_bytes: 10, prefix_group: None }
}

fn curves(models: &[Demand]) -> Curves {
    let curve = vec![(1, 5.0), (2, 6.0), (4, 8.0), (8, 12.0), (16, 20.0)];
    models.iter().map(|d| (("cpu".to_string(), d.model.clone()), curve.clone())).collect()
}

fn loaded_models(placement: &Placement) -> LoadedModels {
    let models = |cycle: &DutyCycle| cycle.parts.iter().map(|part| part.model.clone()).collect();
    placement.duty_cycles.iter().map(|(name, cycle)| (name.clone(), models(cycle))).collect()
}

#[test]
fn places_random_clusters_legally() {
    let mut random = Random::new(7);
    for round in 0..60 {
        let machines = machines(1 + random.below(12) as usize, 400);
        let demands: Vec<Demand> = (0..1 + random.below(15))
            .map(|index| {
                // Some fill several machines.
                let rate = if random.below(4) == 0 { 4000.0 } else { 300.0 };
                let rate = 1.0 + random.unit_f64() * rate;
                let slo_ms = if random.below(2) == 0 { 100.0 } else { 36.0 };
                Demand { slo_ms, ..demand(&format!("d{index}"), rate, index % 2 == 0) }
            })
            .collect();
        let curves = curves(&demands);
        let settings = PlacementSettings { spread: round % 2 == 0, ..PlacementSettings::default() };
        let placement = place(&machines, &demands, &curves, &LoadedModels::new(), &settings);
        let errors = check(&machines, &demands, &curves, &placement);
        assert!(errors.is_empty(), "round {round}: {errors:?}");
        let copies = machines.len().min(2);
        for demand in &demands {
            let has =
                |cycle: &&DutyCycle| cycle.parts.iter().any(|part| part.model == demand.model);
            let count = placement.duty_cycles.values().filter(has).count();
            assert!(count >= copies, "round {round}: {} has {count} copies", demand.model);
        }
    }
}

#[test]
fn serves_the_whole_rate_with_headroom() {
    let demands = [demand("a", 500.0, true), demand("b", 100.0, false)];
    let settings = PlacementSettings { spread: false, ..PlacementSettings::default() };
    let placement =
        place(&machines(4, 0), &demands, &curves(&demands), &LoadedModels::new(), &settings);
    assert!((placement.slack(&demands) - 1.2).abs() < 1e-6, "{placement:?}");
    assert!(placement.used() <= 2);
}

#[test]
fn cuts_best_effort_first() {
    // A machine serves at most 800 requests per second of such a model.
    let demands = [demand("rt", 600.0, true), demand("be", 2000.0, false)];
    let settings = PlacementSettings::default();
    let placement =
        place(&machines(2, 0), &demands, &curves(&demands), &LoadedModels::new(), &settings);
    let rates = placement.rates();
    assert!(rates["rt"] >= 600.0, "{rates:?}");
    assert!(rates["be"] < 2000.0 && rates["be"] > 300.0, "{rates:?}");
    assert!(placement.scale < 1.0);
}

#[test]
fn small_changes_cause_few_loads() {
    let mut demands: Vec<Demand> =
        (0..10).map(|i| demand(&format!("d{i}"), 150.0 + 10.0 * f64::from(i), true)).collect();
    let curves = curves(&demands);
    let settings = PlacementSettings { spread: false, ..PlacementSettings::default() };
    let machines = machines(8, 0);
    let before = place(&machines, &demands, &curves, &LoadedModels::new(), &settings);
    let held = loaded_models(&before);
    demands[3].rate *= 1.1;
    let after = loaded_models(&place(&machines, &demands, &curves, &held, &settings));
    let loads: usize = after
        .iter()
        .map(|(name, models)| models.difference(held.get(name).unwrap_or(&BTreeSet::new())).count())
        .sum();
    assert!(loads <= 4, "{loads} loads");
}

#[test]
fn serves_and_reports_unattainable_slos() {
    let demands = [Demand { slo_ms: 3.0, ..demand("tight", 10.0, true) }];
    let settings = PlacementSettings::default();
    let placement =
        place(&machines(2, 0), &demands, &curves(&demands), &LoadedModels::new(), &settings);
    assert_eq!(placement.unattainable, ["tight"]);
    assert!(placement.slack(&demands) >= 1.0);
}

#[test]
fn places_unmeasured_models_on_mixed_machines() {
    let mut machines = machines(3, 0);
    machines[2].device = "gpu".to_string();
    let demands = [demand("new", 5.0, true), demand("old", 700.0, true)];
    let known = curves(&demands[1..]);
    let placement =
        place(&machines, &demands, &known, &LoadedModels::new(), &PlacementSettings::default());
    assert!(placement.slack(&demands) >= 1.0, "{placement:?}");
}
