use crate::record::{
    BackendRecord, BackendState, LoadReport, ModelLoad, ModelRecord, ProfileRecord,
};

use super::*;

fn seconds(count: u64) -> Nanos {
    Nanos::from_millis(1000 * count)
}

fn view(backends: usize, models: &[(&str, f64)]) -> View {
    let mut view = View::default();
    for index in 0..backends {
        let device = "cpu".to_string();
        let record = BackendRecord { grpc: format!("h:{index}"), device, ..Default::default() };
        view.backends.insert(format!("b{index}"), record);
        view.states.insert(format!("b{index}"), BackendState::default());
    }
    for (name, _) in models {
        let config = model::ModelConfig { timeout_ms: Some(100), ..Default::default() };
        let digest = format!("sha-{name}");
        let record =
            ModelRecord { version: 1, digest: digest.clone(), bytes: 1, enabled: true, config };
        view.models.insert(name.to_string(), record);
        let curve = vec![(1, 5.0), (4, 8.0), (16, 20.0)];
        let profile = ProfileRecord { curve, memory_bytes: 1, marks: Vec::new() };
        view.profiles.insert(("cpu".to_string(), digest), profile);
    }
    ask(&mut view, models);
    view
}

fn ask(view: &mut View, models: &[(&str, f64)]) {
    let load = |rate| ModelLoad { fast: rate, slow: rate, window: 2.0, ..Default::default() };
    let models = models.iter().map(|(name, rate)| (name.to_string(), load(*rate))).collect();
    view.loads.insert("f".to_string(), LoadReport { models, ..Default::default() });
}

/// Backends do what they are told.
fn obey(view: &mut View, decision: &Decision) {
    for (backend, assignment) in &decision.assignments {
        let ready =
            |share: &Share| (share.model.clone(), Standing::Ready { version: share.version });
        let models = assignment.shares.iter().map(ready).collect();
        view.states.insert(backend.clone(), BackendState { models });
    }
}

fn settle(core: &mut Core, now: Nanos, view: &mut View) -> Decision {
    let mut decision = core.step(now, view).unwrap();
    for _ in 0..10 {
        obey(view, &decision);
        decision = core.step(now, view).unwrap();
    }
    decision
}

#[test]
fn models_become_routes_once_backends_hold_them() {
    let mut view = view(3, &[("a", 100.0), ("b", 10.0)]);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &view);
    let first = core.step(Nanos::ZERO, &view).unwrap();
    assert!(first.routes.is_empty());
    assert_eq!((first.plan.epoch, first.plan.reason.as_str()), (1, "start"));
    let decision = settle(&mut core, Nanos::ZERO, &mut view);
    for model in ["a", "b"] {
        assert!(decision.routes[model].targets.len() >= 2, "{decision:?}");
        assert!(decision.routes[model].targets.iter().any(|target| target.weight > 0.0));
    }
    assert_eq!(decision.plan.epoch, 1);
}

#[test]
fn a_lost_backend_is_replaced_at_once() {
    let mut view = view(4, &[("a", 100.0), ("b", 10.0)]);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &view);
    settle(&mut core, Nanos::ZERO, &mut view);
    view.backends.remove("b0");
    view.states.remove("b0");
    let decision = core.step(Nanos::from_millis(10), &view).unwrap();
    assert_eq!(decision.plan.reason, "backend lost");
    assert!(!decision.assignments.contains_key("b0"));
    for (model, route) in &decision.routes {
        assert!(!route.targets.is_empty(), "{model}");
        assert!(route.targets.iter().all(|target| target.backend != "b0"), "{route:?}");
    }
}

#[test]
fn losing_sight_of_everybody_is_not_believed_at_once() {
    let mut view = view(4, &[("a", 100.0)]);
    let settings = SchedulerSettings::default();
    let mut core = Core::resume(settings.clone(), Nanos::ZERO, &view);
    settle(&mut core, Nanos::ZERO, &mut view);
    view.backends.clear();
    assert_eq!(core.step(seconds(1), &view), None);
    assert!(core.step(seconds(1) + settings.grace, &view).is_some());
}

#[test]
fn load_makes_plans_no_more_often_than_the_spacing() {
    let mut view = view(8, &[("a", 50.0), ("b", 10.0)]);
    let mut settings = SchedulerSettings::default();
    settings.placement.spread = false;
    let mut core = Core::resume(settings, Nanos::ZERO, &view);
    settle(&mut core, Nanos::ZERO, &mut view);
    ask(&mut view, &[("a", 2500.0), ("b", 10.0)]);
    assert_eq!(core.step(seconds(5), &view).unwrap().plan.epoch, 1);
    let decision = core.step(seconds(10), &view).unwrap();
    assert_eq!((decision.plan.epoch, decision.plan.reason.as_str()), (2, "load rose"));
    assert!(core.placement().slack(&core.demands(&view)) >= 1.0);
    let decision = settle(&mut core, seconds(11), &mut view);
    assert!(decision.plan.used >= 3, "{decision:?}");
}

#[test]
fn too_much_load_is_limited_at_the_frontends() {
    let mut view = view(1, &[("a", 5000.0)]);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &view);
    let decision = settle(&mut core, Nanos::ZERO, &mut view);
    let limit = decision.routes["a"].rate_max.unwrap();
    assert!(limit > 500.0 && limit < 900.0, "{limit}");
    assert!(decision.plan.scale < 1.0);
}

#[test]
fn another_leader_goes_on_with_the_plan() {
    let mut view = view(4, &[("a", 300.0), ("b", 100.0), ("c", 1.0)]);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &view);
    let before = settle(&mut core, Nanos::ZERO, &mut view);
    view.assignments = before.assignments.clone();
    view.plan = Some(before.plan.clone());
    let mut next = Core::resume(SchedulerSettings::default(), seconds(3), &view);
    let after = next.step(seconds(3), &view).unwrap();
    assert_eq!(after.plan.moves, before.plan.moves);
    let shape = |decision: &Decision| -> Vec<(String, Vec<String>)> {
        let held = |a: &Assignment| a.shares.iter().map(|share| share.model.clone()).collect();
        decision.assignments.iter().map(|(name, a)| (name.clone(), held(a))).collect()
    };
    assert_eq!(shape(&after), shape(&before));
}

#[test]
fn a_disabled_model_goes() {
    let mut view = view(2, &[("a", 10.0), ("b", 10.0)]);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &view);
    settle(&mut core, Nanos::ZERO, &mut view);
    view.models.get_mut("a").unwrap().enabled = false;
    let decision = settle(&mut core, seconds(2), &mut view);
    assert!(!decision.routes.contains_key("a") && decision.routes.contains_key("b"));
    let held = decision.assignments.values().flat_map(|a| &a.shares);
    assert!(held.into_iter().all(|share| share.model != "a"));
}

#[test]
fn a_rise_between_plans_is_met_at_once_by_machines_without_work() {
    let mut settings = SchedulerSettings::default();
    settings.placement.spread = false;
    let mut view = view(6, &[("a", 300.0), ("b", 10.0)]);
    let mut core = Core::resume(settings, Nanos::ZERO, &view);
    settle(&mut core, Nanos::ZERO, &mut view);
    let used = core.placement().used();
    let before = core.placement().clone();
    ask(&mut view, &[("a", 1500.0), ("b", 10.0)]);
    let decision = core.step(seconds(3), &view).unwrap();
    assert_eq!(decision.plan.epoch, 1, "no new plan is due yet");
    assert!(core.placement().used() > used, "{:?}", core.placement());
    assert!(core.placement().slack(&core.demands(&view)) >= 1.0);
    for (name, place) in before.places.iter().filter(|(_, p)| p.parts.iter().any(|p| p.rate > 0.0))
    {
        assert_eq!(core.placement().places[name], *place, "what runs does not move");
    }
    let machines = machines(&view);
    let wrong = placement::check(&machines, &core.demands(&view), &curves(&view), core.placement());
    assert!(wrong.is_empty(), "{wrong:?}");
    // Asked again, nothing more happens.
    let after = core.placement().clone();
    core.step(seconds(4), &view).unwrap();
    assert_eq!(*core.placement(), after);
}

#[test]
fn what_a_lost_backend_did_goes_to_idle_ones_and_nothing_else_moves() {
    let mut settings = SchedulerSettings::default();
    settings.placement.spread = false;
    let mut view = view(8, &[("a", 1500.0), ("b", 700.0), ("c", 10.0)]);
    let mut core = Core::resume(settings, Nanos::ZERO, &view);
    settle(&mut core, Nanos::ZERO, &mut view);
    let before = core.placement().clone();
    let serves = |place: &Place| place.parts.iter().any(|part| part.rate > 0.0);
    let lost = before.places.iter().find(|(_, place)| serves(place)).unwrap().0.clone();
    view.backends.remove(&lost);
    view.states.remove(&lost);
    core.step(seconds(1), &view).unwrap();
    let after = core.placement();
    assert!(after.covers(&machines(&view), &core.demands(&view)));
    assert!(after.slack(&core.demands(&view)) >= 1.0, "{after:?}");
    for (name, place) in before.places.iter().filter(|(name, p)| **name != lost && serves(p)) {
        let kept: Vec<&PlacedPart> =
            after.places[name].parts.iter().filter(|p| p.rate > 0.0).collect();
        let were: Vec<&PlacedPart> = place.parts.iter().filter(|p| p.rate > 0.0).collect();
        assert_eq!(kept, were);
    }
    let wrong = placement::check(&machines(&view), &core.demands(&view), &curves(&view), after);
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn models_that_begin_alike_are_planned_as_one_and_held_together() {
    let names = ["a", "b", "c", "d"];
    let rates: Vec<(&str, f64)> = names.iter().map(|name| (*name, 50.0)).collect();
    let used = |alike: bool| {
        let mut view = view(12, &rates);
        for profile in view.profiles.values_mut() {
            profile.curve = vec![(1, 20.0), (4, 21.0), (16, 24.0)];
            profile.marks = if alike { vec![("trunk".to_string(), 0.95)] } else { Vec::new() };
        }
        let placement = PlacementSettings { spread: false, copies: 1, ..Default::default() };
        let settings = SchedulerSettings { placement, ..Default::default() };
        let mut core = Core::resume(settings, seconds(0), &view);
        let decision = settle(&mut core, seconds(0), &mut view);
        let (machines, demands, curves) = (machines(&view), core.demands(&view), curves(&view));
        let wrong = placement::check(&machines, &demands, &curves, core.placement());
        assert!(wrong.is_empty(), "{wrong:?}");
        assert!(core.placement().slack(&demands) >= 1.0);
        (decision.plan.used, decision.plan.families.clone(), decision)
    };
    let (apart, none, _) = used(false);
    let (together, families, decision) = used(true);
    assert!(none.is_empty());
    assert_eq!(families, [names.map(str::to_string).to_vec()]);
    assert!(together < apart, "{together} and {apart}");
    let serving = decision.assignments.values().filter(|a| a.shares.iter().any(|s| s.rate > 0.0));
    for assignment in serving {
        let held: Vec<&str> = assignment.shares.iter().map(|share| share.model.as_str()).collect();
        assert_eq!(held, names, "a machine of the family holds all of it");
    }
}

#[test]
fn a_backend_is_emptied_in_order_before_it_goes() {
    let mut view = view(4, &[("a", 300.0), ("b", 100.0), ("c", 1.0)]);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &view);
    settle(&mut core, Nanos::ZERO, &mut view);
    let held = |core: &Core, view: &View| core.outlook(view).duties["b1"];
    assert!(!held(&core, &view).empty && held(&core, &view).busy > 0.0);
    core.drain(["b1".to_string()].into());
    let mut decision = core.step(seconds(2), &view).unwrap();
    assert_eq!(decision.plan.reason, "backend drained");
    for _ in 0..10 {
        for model in ["a", "b", "c"] {
            let ready = |target: &TargetRecord| {
                let standing = view.states[&target.backend].models.get(model);
                matches!(standing, Some(Standing::Ready { .. }))
            };
            assert!(decision.routes[model].targets.iter().any(ready), "{model}: {decision:?}");
        }
        obey(&mut view, &decision);
        decision = core.step(seconds(2), &view).unwrap();
    }
    assert!(decision.assignments["b1"].shares.is_empty(), "{decision:?}");
    assert!(held(&core, &view).empty);
    // It is no loss when it goes, and no gain when one that is still drained stays.
    let epoch = decision.plan.epoch;
    assert_eq!(core.step(seconds(4), &view).unwrap().plan.epoch, epoch);
    view.backends.remove("b1");
    view.states.remove("b1");
    assert_eq!(core.step(seconds(5), &view).unwrap().plan.epoch, epoch);
}

#[test]
fn a_backend_that_stays_after_all_is_used_again() {
    let mut view = view(3, &[("a", 300.0), ("b", 100.0)]);
    let mut core = Core::resume(SchedulerSettings::default(), Nanos::ZERO, &view);
    settle(&mut core, Nanos::ZERO, &mut view);
    core.drain(["b0".to_string()].into());
    settle(&mut core, seconds(2), &mut view);
    assert!(!core.placement().places.contains_key("b0"));
    core.drain(BTreeSet::new());
    let decision = settle(&mut core, seconds(4), &mut view);
    assert_eq!(decision.plan.reason, "backend joined");
    assert!(!core.outlook(&view).duties["b0"].empty);
    // All at once cannot go.
    core.drain(["b0", "b1", "b2"].map(str::to_string).into());
    let decision = settle(&mut core, seconds(6), &mut view);
    assert!(decision.routes.values().all(|route| !route.targets.is_empty()));
}
