//! The checker finds nothing in a thousand random scenarios, and finds planted bugs.

use bench::random;
use bench::recorded_run::{self, MAX_SPANS};
use bench::scenario::Scenario;
use bench::simulation::{PlantedBug, Simulation, SimulationOptions, SimulationOutcome};

fn run(seed: u64, policy: Option<&str>, options: SimulationOptions) -> SimulationOutcome {
    let (mut scenario, set) = random::scenario(seed);
    if let Some(policy) = policy {
        scenario.policy = policy.to_string();
    }
    Simulation::with_profiles(&scenario, &set, options).unwrap().finish()
}

const CHECKED: SimulationOptions = SimulationOptions {
    check: true,
    trace: false,
    spans: false,
    recorded_spans: 0,
    planted_bug: None,
};

#[test]
fn a_thousand_random_scenarios_have_no_violation() {
    let mut replies = 0;
    let mut bad = Vec::new();
    for seed in 0..1_000 {
        let outcome = run(seed, None, CHECKED);
        replies += outcome.rt_in_time + outcome.be_in_time;
        if !outcome.violations.is_empty() {
            let (scenario, set) = random::scenario(seed);
            let faults =
                scenario.faults.iter().map(|f| format!("{:?}", f.kind)).collect::<Vec<_>>();
            bad.push(format!(
                "seed {seed} {} level {} kills {} {faults:?}: {}",
                scenario.policy, set.gpu.level, set.gpu.kills, outcome.violations[0]
            ));
        }
    }
    assert!(replies > 100_000, "the scenarios do little: {replies} replies");
    assert!(bad.is_empty(), "{} of 1000:\n{}", bad.len(), bad[..bad.len().min(12)].join("\n"));
}

/// In how many of the first hundred scenarios a planted bug is found.
fn found(bug: PlantedBug, policy: Option<&str>, word: &str) -> usize {
    let options = SimulationOptions { planted_bug: Some(bug), ..CHECKED };
    let caught = |seed: &u64| {
        let outcome = run(*seed, policy, options);
        outcome.violations.iter().any(|violation| violation.contains(word))
    };
    (0..100).filter(caught).count()
}

#[test]
fn planted_bugs_are_found() {
    assert!(found(PlantedBug::Restore, Some("atoll"), "wrong output") > 20);
    assert!(found(PlantedBug::Restore, Some("reef"), "wrong output") > 20);
    assert!(found(PlantedBug::Budget, Some("atoll"), "multiprocessors") > 5);
    assert!(found(PlantedBug::ExactlyOnce, None, "twice") > 20);
    assert!(found(PlantedBug::EarliestDeadline, None, "overtook") > 5);
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let options = SimulationOptions { trace: true, ..CHECKED };
    for seed in 0..20 {
        let (first, second) = (run(seed, None, options), run(seed, None, options));
        assert!(first.trace.len() > 1_000, "seed {seed}: {} bytes", first.trace.len());
        assert_eq!(first.trace, second.trace, "seed {seed}");
    }
}

#[test]
fn a_trace_for_viewers_has_every_reply() {
    let options = SimulationOptions { recorded_spans: MAX_SPANS, ..CHECKED };
    for seed in 0..10 {
        let outcome = run(seed, None, options);
        let text = recorded_run::trace(outcome.recorded.as_slice());
        let trace: serde_json::Value = serde_json::from_str(&text).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let done = |event: &&serde_json::Value| {
            event["ph"] == "b"
                && event["args"]["end"] == "done"
                && event["args"]["request"].is_u64()
        };
        let replies = events.iter().filter(done).count() as u64;
        assert!(replies >= outcome.rt_done + outcome.be_in_time, "seed {seed}: {replies}");
        let open = |phase: &str| events.iter().filter(|event| event["ph"] == phase).count();
        assert_eq!(open("b"), open("e"), "seed {seed}");
    }
}

#[test]
fn best_effort_gets_its_share_under_saturating_real_time() {
    for policy in ["atoll", "reef", "reef_n"] {
        let work = |share: u32| {
            let text = format!(
                "policy = '{policy}'\nseconds = 2.0\nbest_effort_share_percent = {share}\n
                [[clients]]\nname = 'rt'\nmodel = 'inceptionv3'\nclass = 'real_time'
                arrival = {{ kind = 'uniform', rate = 200.0 }}\n
                [[clients]]\nname = 'be'\nmodel = 'resnet152'\nclass = 'best_effort'
                arrival = {{ kind = 'closed_loop' }}"
            );
            let scenario: Scenario = toml::from_str(&text).unwrap();
            let outcome = bench::simulation::run(&scenario, CHECKED).unwrap();
            assert_eq!(outcome.violations, Vec::<String>::new(), "{policy}");
            outcome.be_in_time
        };
        let (without, with) = (work(0), work(30));
        // 30 % of two seconds are enough for 44 requests of 13.6 ms.
        assert!(with >= 30 && with > without, "{policy}: {without} without, {with} with a share");
    }
}

#[test]
fn execution_orders_are_selected_by_name_and_kept() {
    let text = "seconds = 1.0\nexecution_order = 'least_laxity'\n
        [[clients]]\nname = 'long'\nmodel = 'resnet152'\nclass = 'real_time'\ndeadline_ms = 60.0
        arrival = { kind = 'uniform', rate = 40.0 }\n
        [[clients]]\nname = 'short'\nmodel = 'densenet201'\nclass = 'real_time'\ndeadline_ms = 55.0
        arrival = { kind = 'poisson', rate = 150.0 }";
    let run = |text: &str| {
        let scenario: Scenario = toml::from_str(text).unwrap();
        let options = SimulationOptions { trace: true, ..CHECKED };
        bench::simulation::run(&scenario, options)
    };
    let least_laxity = run(text).unwrap();
    assert_eq!(least_laxity.violations, Vec::<String>::new());
    let edf = run(&text.replace("least_laxity", "edf")).unwrap();
    assert_eq!(edf.violations, Vec::<String>::new());
    assert_ne!(least_laxity.trace, edf.trace, "the orders differ");
    let unknown = run(&text.replace("least_laxity", "shortest")).unwrap_err();
    assert!(unknown.to_string().contains("edf, fifo, least_laxity"), "{unknown}");
}

fn scenario(text: &str) -> Scenario {
    Scenario::from_toml("scenario", text).unwrap()
}

#[test]
fn real_time_alone_beside_best_effort_leaves_it_pending() {
    let scenario = scenario(
        "policy = 'rt_only'\nseconds = 0.5\n
        [[clients]]\nname = 'rt'\nmodel = 'inceptionv3'\nclass = 'real_time'
        arrival = { kind = 'uniform', rate = 100.0 }\n
        [[clients]]\nname = 'be'\nmodel = 'resnet152'\nclass = 'best_effort'
        arrival = { kind = 'poisson', rate = 20.0 }",
    );
    let outcome = bench::simulation::run(&scenario, CHECKED).unwrap();
    // Best effort that never runs was reported as a violation.
    assert_eq!(outcome.violations, Vec::<String>::new());
    assert_eq!((outcome.rt.good, outcome.rt.arrivals), (50, 50));
    assert!(outcome.be.arrivals > 0 && outcome.be.pending == outcome.be.arrivals);
}

#[test]
fn every_request_has_one_outcome() {
    // More than the device does, with deadlines, a short queue, cancels and a lost device.
    let scenario = scenario(
        "policy = 'atoll'\nseconds = 1.0\nqueue_capacity = 4\n
        [[clients]]\nname = 'rt'\nmodel = 'vgg19'\nclass = 'real_time'\ndeadline_ms = 12
        arrival = { kind = 'poisson', rate = 400.0 }\n
        [[clients]]\nname = 'be'\nmodel = 'resnet152'\nclass = 'best_effort'\ncancel_percent = 30
        arrival = { kind = 'poisson', rate = 400.0 }\n
        [[faults]]\nat_ms = 500\nkind = 'device_reset'",
    );
    let outcome = bench::simulation::run(&scenario, CHECKED).unwrap();
    assert_eq!(outcome.violations, Vec::<String>::new());
    for counts in [&outcome.rt, &outcome.be] {
        assert_eq!(counts.arrivals, counts.good + counts.bad(), "{counts:?}");
        assert_eq!((counts.pending, counts.violation(0)), (0, None), "{counts:?}");
    }
    let (rt, be) = (outcome.rt, outcome.be);
    assert!(rt.good > 0 && rt.late > 0 && be.refused > 0 && be.cancelled > 0, "{rt:?} {be:?}");
    let alone = bench::simulation::run(&scenario.real_time_alone(), CHECKED).unwrap();
    let report = bench::report::SimulationReport::new("w", "atoll", &outcome, &alone);
    let table = bench::report::outcome_table(&[report]);
    assert!(table.contains("cancelled") && table.contains(&rt.arrivals.to_string()), "{table}");
}
