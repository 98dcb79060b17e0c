use crate::record::{
    BackendRecord, BackendState, LoadReport, ModelLoad, ModelRecord, ProfileRecord,
};

use super::*;

fn seconds(count: u64) -> Nanos {
    Nanos::from_millis(1000 * count)
}

fn cluster(backends: usize, models: &[(&str, f64)]) -> ClusterSnapshot {
    let mut snapshot = ClusterSnapshot::default();
    for index in 0..backends {
        let device = "cpu".to_string();
        let record = BackendRecord { grpc: format!("h:{index}"), device, ..Default::default() };
        snapshot.backends.insert(format!("b{index}"), record);
        snapshot.states.insert(format!("b{index}"), BackendState::default());
    }
    for (name, _) in models {
        let config = model::ModelConfig { timeout_ms: Some(100), ..Default::default() };
        let digest = format!("sha-{name}");
        let record = ModelRecord {
            version: 1,
            digest: digest.clone(),
            bytes: 1,
            enabled: true,
            config,
            ..ModelRecord::default()
        };
        snapshot.models.insert(name.to_string(), record);
        let curve = vec![(1, 5.0), (4, 8.0), (16, 20.0)];
        let profile = ProfileRecord { curve, memory_bytes: 1, marks: Vec::new() };
        snapshot.profiles.insert(("cpu".to_string(), digest), profile);
    }
    set_load(&mut snapshot, models);
    snapshot
}

fn set_load(snapshot: &mut ClusterSnapshot, models: &[(&str, f64)]) {
    let load = |rate| ModelLoad { fast: rate, slow: rate, window: 2.0, ..Default::default() };
    let models = models.iter().map(|(name, rate)| (name.to_string(), load(*rate))).collect();
    snapshot.loads.insert("f".to_string(), LoadReport { models, ..Default::default() });
}

/// Backends carry out their assignments.
fn apply(snapshot: &mut ClusterSnapshot, decision: &Decision) {
    for (backend, assignment) in &decision.assignments {
        let ready = |assigned: &AssignedModel| {
            (assigned.model.clone(), LoadState::Ready { version: assigned.version })
        };
        let models = assignment.models.iter().map(ready).collect();
        snapshot.states.insert(backend.clone(), BackendState { models, ..BackendState::default() });
    }
}

fn settle(core: &mut Core, now: Nanos, snapshot: &mut ClusterSnapshot) -> Decision {
    let mut decision = core.step(now, snapshot).unwrap();
    for _ in 0..10 {
        apply(snapshot, &decision);
        decision = core.step(now, snapshot).unwrap();
    }
    decision
}

#[test]
fn routes_models_once_backends_are_ready() {
    let mut snapshot = cluster(3, &[("a", 100.0), ("b", 10.0)]);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &snapshot);
    let first = core.step(Nanos::ZERO, &snapshot).unwrap();
    assert!(first.routes.is_empty());
    assert_eq!((first.plan.epoch, first.plan.reason.as_str()), (1, "start"));
    let decision = settle(&mut core, Nanos::ZERO, &mut snapshot);
    for model in ["a", "b"] {
        assert!(decision.routes[model].targets.len() >= 2, "{decision:?}");
        assert!(decision.routes[model].targets.iter().any(|target| target.weight > 0.0));
    }
    assert_eq!(decision.plan.epoch, 1);
}

#[test]
fn replaces_a_lost_backend_at_once() {
    let mut snapshot = cluster(4, &[("a", 100.0), ("b", 10.0)]);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &snapshot);
    settle(&mut core, Nanos::ZERO, &mut snapshot);
    snapshot.backends.remove("b0");
    snapshot.states.remove("b0");
    let decision = core.step(Nanos::from_millis(10), &snapshot).unwrap();
    assert_eq!(decision.plan.reason, "backend lost");
    assert!(!decision.assignments.contains_key("b0"));
    for (model, route) in &decision.routes {
        assert!(!route.targets.is_empty(), "{model}");
        assert!(route.targets.iter().all(|target| target.backend != "b0"), "{route:?}");
    }
}

#[test]
fn waits_before_acting_on_the_loss_of_all_backends() {
    let mut snapshot = cluster(4, &[("a", 100.0)]);
    let settings = SchedulerSettings::default();
    let mut core = Core::resume(settings.clone(), Nanos::ZERO, &snapshot);
    settle(&mut core, Nanos::ZERO, &mut snapshot);
    snapshot.backends.clear();
    assert_eq!(core.step(seconds(1), &snapshot), None);
    assert!(core.step(seconds(1) + settings.grace, &snapshot).is_some());
}

#[test]
fn spaces_plans_caused_by_load() {
    let mut snapshot = cluster(8, &[("a", 50.0), ("b", 10.0)]);
    let mut settings = SchedulerSettings::default();
    settings.placement.spread = false;
    let mut core = Core::resume(settings, Nanos::ZERO, &snapshot);
    settle(&mut core, Nanos::ZERO, &mut snapshot);
    set_load(&mut snapshot, &[("a", 2500.0), ("b", 10.0)]);
    assert_eq!(core.step(seconds(5), &snapshot).unwrap().plan.epoch, 1);
    let decision = core.step(seconds(10), &snapshot).unwrap();
    assert_eq!((decision.plan.epoch, decision.plan.reason.as_str()), (2, "load rose"));
    assert!(core.placement().slack(&core.demands(&snapshot)) >= 1.0);
    let decision = settle(&mut core, seconds(11), &mut snapshot);
    assert!(decision.plan.used >= 3, "{decision:?}");
}

#[test]
fn limits_load_beyond_capacity() {
    let mut snapshot = cluster(1, &[("a", 5000.0)]);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &snapshot);
    let decision = settle(&mut core, Nanos::ZERO, &mut snapshot);
    let limit = decision.routes["a"].rate_max.unwrap();
    assert!(limit > 500.0 && limit < 900.0, "{limit}");
    assert!(decision.plan.scale < 1.0);
}

#[test]
fn next_leader_continues_the_plan() {
    let mut snapshot = cluster(4, &[("a", 300.0), ("b", 100.0), ("c", 1.0)]);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &snapshot);
    let before = settle(&mut core, Nanos::ZERO, &mut snapshot);
    snapshot.assignments = before.assignments.clone();
    snapshot.plan = Some(before.plan.clone());
    let mut next = Core::resume(SchedulerSettings::default(), seconds(3), &snapshot);
    let after = next.step(seconds(3), &snapshot).unwrap();
    assert_eq!(after.plan.moves, before.plan.moves);
    let shape = |decision: &Decision| -> Vec<(String, Vec<String>)> {
        let held =
            |a: &Assignment| a.models.iter().map(|assigned| assigned.model.clone()).collect();
        decision.assignments.iter().map(|(name, a)| (name.clone(), held(a))).collect()
    };
    assert_eq!(shape(&after), shape(&before));
}

#[test]
fn unloads_a_disabled_model() {
    let mut snapshot = cluster(2, &[("a", 10.0), ("b", 10.0)]);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &snapshot);
    settle(&mut core, Nanos::ZERO, &mut snapshot);
    snapshot.models.get_mut("a").unwrap().enabled = false;
    let decision = settle(&mut core, seconds(2), &mut snapshot);
    assert!(!decision.routes.contains_key("a") && decision.routes.contains_key("b"));
    let held = decision.assignments.values().flat_map(|a| &a.models);
    assert!(held.into_iter().all(|assigned| assigned.model != "a"));
}

#[test]
fn idle_machines_serve_a_rise_between_plans() {
    let mut settings = SchedulerSettings::default();
    settings.placement.spread = false;
    let mut snapshot = cluster(6, &[("a", 300.0), ("b", 10.0)]);
    let mut core = Core::resume(settings, Nanos::ZERO, &snapshot);
    settle(&mut core, Nanos::ZERO, &mut snapshot);
    let used = core.placement().used();
    let before = core.placement().clone();
    set_load(&mut snapshot, &[("a", 1500.0), ("b", 10.0)]);
    let decision = core.step(seconds(3), &snapshot).unwrap();
    assert_eq!(decision.plan.epoch, 1, "no new plan is due yet");
    assert!(core.placement().used() > used, "{:?}", core.placement());
    assert!(core.placement().slack(&core.demands(&snapshot)) >= 1.0);
    for (name, cycle) in
        before.duty_cycles.iter().filter(|(_, p)| p.parts.iter().any(|p| p.rate > 0.0))
    {
        assert_eq!(core.placement().duty_cycles[name], *cycle, "what runs does not move");
    }
    let machines = machines(&snapshot);
    let errors =
        placement::check(&machines, &core.demands(&snapshot), &curves(&snapshot), core.placement());
    assert!(errors.is_empty(), "{errors:?}");
    // Repeated, it changes nothing.
    let after = core.placement().clone();
    core.step(seconds(4), &snapshot).unwrap();
    assert_eq!(*core.placement(), after);
}

#[test]
fn moves_only_the_models_of_a_lost_backend() {
    let mut settings = SchedulerSettings::default();
    settings.placement.spread = false;
    let mut snapshot = cluster(8, &[("a", 1500.0), ("b", 700.0), ("c", 10.0)]);
    let mut core = Core::resume(settings, Nanos::ZERO, &snapshot);
    settle(&mut core, Nanos::ZERO, &mut snapshot);
    let before = core.placement().clone();
    let serves = |cycle: &DutyCycle| cycle.parts.iter().any(|part| part.rate > 0.0);
    let lost = before.duty_cycles.iter().find(|(_, cycle)| serves(cycle)).unwrap().0.clone();
    snapshot.backends.remove(&lost);
    snapshot.states.remove(&lost);
    core.step(seconds(1), &snapshot).unwrap();
    let after = core.placement();
    assert!(after.covers(&machines(&snapshot), &core.demands(&snapshot)));
    assert!(after.slack(&core.demands(&snapshot)) >= 1.0, "{after:?}");
    for (name, cycle) in before.duty_cycles.iter().filter(|(name, p)| **name != lost && serves(p)) {
        let kept: Vec<&PlacedPart> =
            after.duty_cycles[name].parts.iter().filter(|p| p.rate > 0.0).collect();
        let were: Vec<&PlacedPart> = cycle.parts.iter().filter(|p| p.rate > 0.0).collect();
        assert_eq!(kept, were);
    }
    let errors =
        placement::check(&machines(&snapshot), &core.demands(&snapshot), &curves(&snapshot), after);
    assert!(errors.is_empty(), "{errors:?}");
}

#[test]
fn places_models_with_a_common_prefix_together() {
    let names = ["a", "b", "c", "d"];
    let rates: Vec<(&str, f64)> = names.iter().map(|name| (*name, 50.0)).collect();
    let used = |compatible: bool| {
        let mut snapshot = cluster(12, &rates);
        for profile in snapshot.profiles.values_mut() {
            profile.curve = vec![(1, 20.0), (4, 21.0), (16, 24.0)];
            profile.marks =
                if compatible { vec![("prefix".to_string(), 0.95)] } else { Vec::new() };
        }
        let placement = PlacementSettings { spread: false, copies: 1, ..Default::default() };
        let settings = SchedulerSettings { placement, ..Default::default() };
        let mut core = Core::resume(settings, seconds(0), &snapshot);
        let decision = settle(&mut core, seconds(0), &mut snapshot);
        let (machines, demands, curves) =
            (machines(&snapshot), core.demands(&snapshot), curves(&snapshot));
        let errors = placement::check(&machines, &demands, &curves, core.placement());
        assert!(errors.is_empty(), "{errors:?}");
        assert!(core.placement().slack(&demands) >= 1.0);
        (decision.plan.used, decision.plan.prefix_groups.clone(), decision)
    };
    let (apart, none, _) = used(false);
    let (together, prefix_groups, decision) = used(true);
    assert!(none.is_empty());
    assert_eq!(prefix_groups, [names.map(str::to_string).to_vec()]);
    assert!(together < apart, "{together} and {apart}");
    let serving = decision.assignments.values().filter(|a| a.models.iter().any(|s| s.rate > 0.0));
    for assignment in serving {
        let held: Vec<&str> =
            assignment.models.iter().map(|assigned| assigned.model.as_str()).collect();
        assert_eq!(held, names, "a machine of the prefix group holds all of it");
    }
}

#[test]
fn drains_a_backend_without_a_gap() {
    let mut snapshot = cluster(4, &[("a", 300.0), ("b", 100.0), ("c", 1.0)]);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &snapshot);
    settle(&mut core, Nanos::ZERO, &mut snapshot);
    let held = |core: &Core, snapshot: &ClusterSnapshot| core.scaling_input(snapshot).usage["b1"];
    assert!(!held(&core, &snapshot).empty && held(&core, &snapshot).busy > 0.0);
    core.drain(["b1".to_string()].into(), false);
    let mut decision = core.step(seconds(2), &snapshot).unwrap();
    assert_eq!(decision.plan.reason, "backend drained");
    for _ in 0..10 {
        for model in ["a", "b", "c"] {
            let ready = |target: &TargetRecord| {
                let load_state = snapshot.states[&target.backend].models.get(model);
                matches!(load_state, Some(LoadState::Ready { .. }))
            };
            assert!(decision.routes[model].targets.iter().any(ready), "{model}: {decision:?}");
        }
        apply(&mut snapshot, &decision);
        decision = core.step(seconds(2), &snapshot).unwrap();
    }
    assert!(decision.assignments["b1"].models.is_empty(), "{decision:?}");
    assert!(held(&core, &snapshot).empty);
    // Its removal counts as no loss, and its presence while draining as no gain.
    let epoch = decision.plan.epoch;
    assert_eq!(core.step(seconds(4), &snapshot).unwrap().plan.epoch, epoch);
    snapshot.backends.remove("b1");
    snapshot.states.remove("b1");
    assert_eq!(core.step(seconds(5), &snapshot).unwrap().plan.epoch, epoch);
}

#[test]
fn reuses_a_backend_that_is_no_longer_draining() {
    let mut snapshot = cluster(3, &[("a", 300.0), ("b", 100.0)]);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &snapshot);
    settle(&mut core, Nanos::ZERO, &mut snapshot);
    core.drain(["b0".to_string()].into(), false);
    settle(&mut core, seconds(2), &mut snapshot);
    assert!(!core.placement().duty_cycles.contains_key("b0"));
    core.drain(BTreeSet::new(), false);
    let decision = settle(&mut core, seconds(4), &mut snapshot);
    assert_eq!(decision.plan.reason, "backend joined");
    assert!(!core.scaling_input(&snapshot).usage["b0"].empty);
    // Not all backends can be drained.
    core.drain(["b0", "b1", "b2"].map(str::to_string).into(), false);
    let decision = settle(&mut core, seconds(6), &mut snapshot);
    assert!(decision.routes.values().all(|route| !route.targets.is_empty()));
}

/// A report that claims any rate costs the memory and the time of a plan for the machines there
/// are.
#[test]
fn plans_for_impossible_rates() {
    for packer in [packing::Packer::Squishy, packing::Packer::Certified, packing::Packer::Oblivious]
    {
        for rate in [4e9, 1e19, 1e308] {
            let mut snapshot = cluster(3, &[("a", rate), ("b", 10.0)]);
            let mut settings = SchedulerSettings::default();
            settings.placement.packer = packer;
            let mut core = Core::resume(settings, Nanos::ZERO, &snapshot);
            let decision = settle(&mut core, seconds(1), &mut snapshot);
            assert_eq!(decision.assignments.len(), 3, "{packer:?} {rate}");
            assert!(decision.routes.contains_key("a"), "{packer:?} {rate}");
        }
    }
}

/// A backend that most frontends avoid keeps its lease, but the plan does without it.
#[test]
fn plans_without_a_backend_that_frontends_avoid() {
    let mut snapshot = cluster(3, &[("a", 100.0), ("b", 10.0)]);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &snapshot);
    settle(&mut core, Nanos::ZERO, &mut snapshot);
    snapshot.loads.get_mut("f").unwrap().ejected = vec!["h:1".to_string()];
    settle(&mut core, seconds(10), &mut snapshot);
    let decision = settle(&mut core, seconds(14), &mut snapshot);
    assert_eq!(decision.plan.reason, "backend avoided");
    assert_eq!(decision.plan.avoided, ["b1"]);
    for (model, route) in &decision.routes {
        assert!(route.targets.iter().all(|target| target.backend != "b1"), "{model}: {route:?}");
        assert!(route.targets.len() >= 2, "{model}: {route:?}");
    }
    snapshot.loads.get_mut("f").unwrap().ejected.clear();
    let decision = settle(&mut core, seconds(60), &mut snapshot);
    assert_eq!(decision.plan.reason, "backend joined");
    assert!(decision.plan.avoided.is_empty());
}

/// The store is lost: a new leader knows nothing, backends join again one after the other, and the
/// records of models come back in between. What is loaded stays assigned until the plan holds.
#[test]
fn a_lost_store_moves_nothing_away() {
    let names = [("a", 300.0), ("b", 100.0), ("c", 1.0)];
    let mut before = cluster(4, &names);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &before);
    settle(&mut core, Nanos::ZERO, &mut before);
    let mut now = ClusterSnapshot::default();
    let mut core = Core::resume(SchedulerSettings::default(), seconds(1), &now);
    core.step(seconds(1), &now);
    for (step, backend) in ["b0", "b1", "b2", "b3"].into_iter().enumerate() {
        now.backends.insert(backend.to_string(), before.backends[backend].clone());
        now.states.insert(backend.to_string(), before.states[backend].clone());
        if step == 1 {
            now.models.clone_from(&before.models);
            now.profiles.clone_from(&before.profiles);
        }
        let decision = core.step(seconds(2), &now).unwrap();
        if step == 0 {
            continue;
        }
        for name in now.backends.keys() {
            let assigned: BTreeSet<&str> =
                decision.assignments[name].models.iter().map(|m| m.model.as_str()).collect();
            for (model, _) in names.iter().filter(|(m, _)| !assigned.contains(m)) {
                let held = before.states[name].models.contains_key(*model);
                let route = decision.routes.get(*model).map_or(0, |route| route.targets.len());
                assert!(!held || route > 0, "{name} drops {model}: {decision:?}");
            }
        }
    }
    assert!(names.iter().all(|(name, _)| core.plan.epoch > 0 && now.models.contains_key(*name)));
}

/// Two backends hold the file of the version in force, a third one does not: it is given other
/// work, and the model is served by those that can.
#[test]
fn a_model_moves_away_from_a_backend_that_cannot_load_it() {
    let mut snapshot = cluster(3, &[("a", 10.0)]);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &snapshot);
    let refuse = |snapshot: &mut ClusterSnapshot, decision: &Decision| {
        apply(snapshot, decision);
        if let Some(state) = snapshot.states.get_mut("b0")
            && state.models.contains_key("a")
        {
            let failed = LoadState::Failed { version: 1, reason: "no file".to_string() };
            state.models.insert("a".to_string(), failed);
        }
    };
    let mut decision = core.step(Nanos::ZERO, &snapshot).unwrap();
    for step in 0..20 {
        refuse(&mut snapshot, &decision);
        decision = core.step(seconds(40 * step), &snapshot).unwrap();
    }
    let holders = |backend: &str| decision.assignments[backend].models.len();
    assert_eq!((holders("b0"), holders("b1"), holders("b2")), (0, 1, 1), "{decision:?}");
    assert_eq!(decision.routes["a"].targets.len(), 2);
}

/// A version that one backend cannot load is served by the others alone, once there are enough.
#[test]
fn a_backend_that_kept_the_old_version_gets_no_requests() {
    let mut snapshot = cluster(3, &[("a", 500.0)]);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &snapshot);
    let decision = settle(&mut core, Nanos::ZERO, &mut snapshot);
    assert_eq!(decision.routes["a"].targets.len(), 3, "{decision:?}");
    if let Some(record) = snapshot.models.get_mut("a") {
        record.version = 2;
    }
    for (backend, state) in &mut snapshot.states {
        let (version, failed) = if backend == "b0" { (1, true) } else { (2, false) };
        state.models.insert("a".to_string(), LoadState::Ready { version });
        if failed {
            let update = crate::record::FailedUpdate { version: 2, reason: "no file".to_string() };
            state.failed.insert("a".to_string(), update);
        }
    }
    let decision = core.step(seconds(1), &snapshot).unwrap();
    let versions: BTreeSet<u64> =
        decision.routes["a"].targets.iter().map(|target| target.version).collect();
    assert_eq!(versions, [2].into(), "{decision:?}");
}

#[test]
fn a_store_that_is_being_rebuilt_takes_no_model_from_backends_that_serve_it() {
    let mut before = cluster(3, &[("a", 100.0), ("b", 10.0), ("c", 10.0)]);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &before);
    settle(&mut core, Nanos::ZERO, &mut before);
    let holders: Vec<String> = before
        .states
        .iter()
        .filter(|(_, state)| state.models.contains_key("b"))
        .map(|(name, _)| name.clone())
        .collect();
    assert!(holders.len() >= 2);
    // Backends have joined again with what they hold, and the record of 'b' is not back yet.
    let mut rebuilt = before.clone();
    let record = rebuilt.models.remove("b").unwrap();
    let mut next = Core::resume(SchedulerSettings::default(), seconds(3), &rebuilt);
    let assigned = |decision: &Decision| -> Vec<String> {
        let has = |a: &Assignment| a.models.iter().any(|assigned| assigned.model == "b");
        let with = decision.assignments.iter().filter(|(_, a)| has(a));
        with.map(|(name, _)| name.clone()).collect()
    };
    for second in 3..90 {
        let decision = next.step(seconds(second), &rebuilt).unwrap();
        assert_eq!(assigned(&decision), holders, "after {second} s");
        let routed = decision.routes["b"].targets.iter().map(|target| target.backend.clone());
        assert_eq!(routed.collect::<Vec<_>>(), holders, "after {second} s");
        apply(&mut rebuilt, &decision);
    }
    rebuilt.models.insert("b".to_string(), record);
    let decision = next.step(seconds(90), &rebuilt).unwrap();
    assert!(holders.iter().all(|name| assigned(&decision).contains(name)));
    assert!(decision.routes["b"].targets.len() >= 2);
    // A deletion is no loss.
    rebuilt.models.remove("b");
    rebuilt.deleted.insert("b".to_string());
    let decision = settle(&mut next, seconds(92), &mut rebuilt);
    assert!(assigned(&decision).is_empty() && !decision.routes.contains_key("b"));
}
