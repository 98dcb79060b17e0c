use super::simulation::{Bug, Load, Outcome, Plan, Simulation};
use super::*;
use base::Random;

const MB: u64 = 1_000_000;

fn second(seconds: u64) -> Nanos {
    Nanos::from_millis(seconds * 1_000)
}

fn run(plan: Plan) -> Outcome {
    let outcome = Simulation::new(plan, DeviceGroupOptions::default()).finish();
    assert_eq!(outcome.violations, Vec::<String>::new());
    assert_eq!(outcome.submitted, outcome.done + outcome.refused);
    outcome
}

fn best_effort(model: usize, phases: &[(u64, f64)]) -> Load {
    let phases = phases.iter().map(|(until, rate)| (second(*until), *rate)).collect();
    Load { model, class: Class::BestEffort, phases }
}

fn plan(devices: usize, models: &[(f64, u64)], loads: Vec<Load>, end: u64) -> Plan {
    Plan {
        devices,
        memory: 1_000 * MB,
        models: models.to_vec(),
        loads,
        end: second(end),
        seed: 1,
        making: Nanos::from_millis(300),
        fails_every: 0,
        planted: None,
    }
}

#[test]
fn adds_replicas_under_load_and_removes_them() {
    // A device serves 100 requests per second. The rate is low, then above two devices, then low.
    let loads = vec![best_effort(0, &[(5, 30.0), (20, 250.0), (60, 20.0)])];
    let outcome = run(plan(4, &[(10.0, 100 * MB)], loads, 60));
    assert!(outcome.max_replicas[0] >= 3, "{:?}", outcome.max_replicas);
    assert_eq!(
        outcome.last_replicas,
        [1],
        "{}",
        outcome.trace.lines().filter(|l| !l.contains("submit")).collect::<Vec<_>>().join("\n")
    );
    assert_eq!(outcome.refused, 0);
}

#[test]
fn adds_replicas_for_requests_longer_than_an_interval() {
    // Two seconds per request, one request per second; later hardly any.
    let loads = vec![best_effort(0, &[(60, 1.0), (200, 0.02)])];
    let outcome = run(plan(3, &[(2_000.0, 100 * MB)], loads, 200));
    assert!(outcome.max_replicas[0] >= 2, "{:?}", outcome.max_replicas);
    assert_eq!(outcome.last_replicas, [1]);
}

#[test]
fn adds_no_replica_when_one_device_is_enough() {
    let loads = vec![best_effort(0, &[(20, 50.0)]), best_effort(1, &[(20, 50.0)])];
    let outcome = run(plan(2, &[(10.0, 100 * MB), (10.0, 100 * MB)], loads, 20));
    assert_eq!(outcome.max_replicas, [1, 1]);
    assert!(outcome.by_device.iter().all(|done| *done > 0), "each has a device of its own");
}

#[test]
fn a_failed_replica_loses_no_request() {
    let loads = vec![best_effort(0, &[(30, 150.0)])];
    let plan = Plan { fails_every: 2, ..plan(3, &[(10.0, 100 * MB)], loads, 30) };
    let outcome = run(plan);
    assert!(outcome.max_replicas[0] >= 2);
}

#[test]
fn equal_seeds_give_equal_runs() {
    let once = |seed| run(Plan { seed, ..random_plan(7) }).trace;
    assert_eq!(once(3), once(3));
    assert_ne!(once(3), once(4));
}

/// Random devices, models that exceed their memory, and changing loads.
fn random_plan(seed: u64) -> Plan {
    let mut random = Random::new(seed);
    let devices = 1 + random.below(4) as usize;
    let count = 1 + random.below(8) as usize;
    let models: Vec<(f64, u64)> = (0..count)
        .map(|_| (0.5 + random.unit_f64() * 8.0, (100 + random.below(400)) * MB))
        .collect();
    let mut loads = Vec::new();
    for (model, (millis, _)) in models.iter().enumerate() {
        let share = 1_000.0 / millis / count as f64 * devices as f64;
        let mut phase = |until: u64| (second(until), share * random.unit_f64() * 1.6);
        let phases = vec![phase(3), phase(6), phase(12)];
        let real_time = random.below(3) == 0;
        let class = if real_time { Class::RealTime } else { Class::BestEffort };
        loads.push(Load { model, class, phases });
    }
    let fails_every = random.below(4);
    let making = Nanos::from_millis(random.below(1_000));
    let memory = (500 + random.below(1_000)) * MB;
    let (end, planted) = (second(12), None);
    Plan { devices, memory, models, loads, end, seed, making, fails_every, planted }
}

#[test]
fn random_loads_break_no_rule() {
    let mut replicated = 0;
    for seed in 0..24 {
        let outcome = run(random_plan(seed));
        replicated += outcome.max_replicas.iter().filter(|max| **max > 1).count();
    }
    assert!(replicated > 5, "{replicated} models were ever replicated: too few");
}

#[test]
fn checker_finds_planted_bugs() {
    let real_time = Load { model: 0, class: Class::RealTime, phases: vec![(second(6), 400.0)] };
    let loads = vec![real_time, best_effort(1, &[(6, 20.0)])];
    let sound = plan(3, &[(5.0, 100 * MB), (1.0, 100 * MB)], loads, 6);
    assert!(run(sound.clone()).max_replicas[0] > 1);
    for bug in [Bug::Elsewhere, Bug::Forgotten, Bug::Twice, Bug::Late] {
        let plan = Plan { planted: Some(bug), ..sound.clone() };
        let outcome = Simulation::new(plan, DeviceGroupOptions::default()).finish();
        assert!(!outcome.violations.is_empty(), "{bug:?} was not noticed");
    }
}

#[test]
fn real_time_is_as_fast_beside_saturating_best_effort() {
    let real_time =
        |rate| Load { model: 0, class: Class::RealTime, phases: vec![(second(20), rate)] };
    let models = [(2.0, 100 * MB), (10.0, 100 * MB)];
    let alone = run(plan(2, &models, vec![real_time(50.0)], 20));
    let flood = best_effort(1, &[(20, 500.0)]);
    let beside = run(plan(2, &models, vec![real_time(50.0), flood], 20));
    let middle = |outcome: &Outcome| {
        let mut all = outcome.latencies[0].clone();
        all.sort_unstable();
        all[all.len() / 2].0 as f64
    };
    assert!(beside.max_replicas[1] == 2, "best effort uses both");
    let (alone, beside) = (middle(&alone), middle(&beside));
    assert!(beside < alone * 1.1, "{alone} alone, {beside} beside");
}

mod routing {
    use super::super::router::{ModelFacts, ReplicaChange, ReplicaState, RequestEnd, Router};
    use super::*;

    fn facts() -> ModelFacts {
        ModelFacts { class: Class::BestEffort, pinned: false, held_back: Nanos::ZERO }
    }

    fn done(wait_ms: u64, cost_ms: u64) -> RequestEnd {
        RequestEnd::Done { wait: Nanos::from_millis(wait_ms), cost: Nanos::from_millis(cost_ms) }
    }

    /// A model on both of two devices; its home is the first.
    fn twice() -> (Router, super::super::router::GroupModelId) {
        let mut router = Router::new(DeviceGroupOptions::default(), &[1_000, 1_000]);
        let model = router.add(0, 100, facts());
        for interval in 1..=2 {
            for _ in 0..50 {
                let routed = router.route(Nanos::ZERO, model, None, |_| true).expect("it is there");
                assert_eq!(routed.device, 0, "its home is the only replica");
                router.ended(Nanos::ZERO, routed, done(50, 10));
            }
            let changes = router.evaluate(Nanos::from_millis(500 * interval));
            let made = vec![ReplicaChange::Add(model, 1)];
            assert_eq!(changes, if interval == 2 { made } else { vec![] });
        }
        assert!(router.replica_added(model, 1));
        (router, model)
    }

    #[test]
    fn counts_load_time_of_absent_weights() {
        let (mut router, model) = twice();
        // A load of 100 bytes takes half the time of a request.
        router.set_speed(1, 20_000);
        let mut go = |there: [bool; 2]| {
            router.route(Nanos::ZERO, model, None, |device| there[device]).expect("there").device
        };
        assert_eq!(go([false, true]), 1, "weights that are there");
        assert_eq!(go([true, false]), 0);
        assert_eq!(go([true, true]), 0, "both have one ahead");
        assert_eq!(go([true, false]), 1, "two ahead are longer than the load");
    }

    #[test]
    fn avoids_a_faulted_device_for_a_while() {
        let (mut router, model) = twice();
        let routed = router.route(Nanos::ZERO, model, None, |_| true).expect("there");
        assert_eq!(routed.device, 0);
        router.ended(Nanos::ZERO, routed, RequestEnd::Faulted);
        for _ in 0..5 {
            let other = router.route(Nanos::ZERO, model, None, |_| true).expect("there");
            assert_eq!(other.device, 1);
        }
        let later = second(6);
        assert_eq!(router.route(later, model, None, |_| true).map(|t| t.device), Some(0));
    }

    #[test]
    fn adds_a_replica_when_the_only_device_is_faulted() {
        let mut router = Router::new(DeviceGroupOptions::default(), &[1_000, 1_000]);
        let model = router.add(0, 100, facts());
        let routed = router.route(Nanos::ZERO, model, None, |_| true).expect("there");
        router.ended(Nanos::ZERO, routed, RequestEnd::Faulted);
        assert_eq!(router.evaluate(Nanos::from_millis(500)), [ReplicaChange::Add(model, 1)]);
    }

    #[test]
    fn removes_a_replica_after_its_last_request() {
        let (mut router, model) = twice();
        let first = router.route(Nanos::ZERO, model, None, |_| true).expect("there");
        let second = router.route(Nanos::ZERO, model, None, |_| true).expect("there");
        assert_eq!((first.device, second.device), (0, 1));
        router.ended(Nanos::ZERO, first, done(0, 10));
        for interval in 3..30 {
            assert_eq!(router.evaluate(Nanos::from_millis(500 * interval)), []);
        }
        let state: Vec<_> = router.replicas(model).iter().map(|view| view.state).collect();
        assert_eq!(state, [ReplicaState::Serving, ReplicaState::Draining]);
        let third = router.route(Nanos::ZERO, model, None, |_| true).expect("there");
        assert_eq!(third.device, 0, "a draining replica accepts no requests");
        let gone = router.ended(Nanos::ZERO, second, done(0, 10));
        assert_eq!(gone, Some(ReplicaChange::Remove(model, 1)));
        assert_eq!(router.changes().removed, 1);
    }

    #[test]
    fn places_models_only_where_they_fit() {
        let mut router = Router::new(DeviceGroupOptions::default(), &[1_000, 600]);
        let pinned = ModelFacts { pinned: true, ..facts() };
        assert_eq!(router.home_for(Nanos::ZERO, 700), Some(0));
        router.add(0, 700, pinned);
        assert_eq!(router.home_for(Nanos::ZERO, 600), Some(1));
        assert_eq!(router.home_for(Nanos::ZERO, 601), None, "300 and 600 are free");
        assert_eq!(router.max_free(), 600);
        router.add(1, 500, facts());
        assert_eq!(router.home_for(Nanos::ZERO, 200), Some(0), "prefers a device without eviction");
        assert_eq!(router.home_for(Nanos::ZERO, 400), Some(1), "or any where it fits");
    }

    #[test]
    fn routed_requests_of_a_removed_model_still_end() {
        let (mut router, model) = twice();
        let routed = router.route(Nanos::ZERO, model, None, |_| true).expect("there");
        assert_eq!(router.remove(model), [0, 1]);
        assert_eq!(router.route(Nanos::ZERO, model, None, |_| true), None);
        assert_eq!(router.ended(Nanos::ZERO, routed, done(0, 10)), None);
        let next = router.add(1, 100, facts());
        assert_ne!(next, model);
        assert_eq!(router.route(Nanos::ZERO, next, None, |_| true).map(|t| t.device), Some(1));
    }
}
