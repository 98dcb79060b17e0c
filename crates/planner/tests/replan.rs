//! Re-planning: few moves, close to a new plan, and a safe transition.

mod common;

use base::{MonotonicClock, Random};
use planner::replan::steps::{align, replay, steps};
use planner::replan::{ChangeCosts, replan};
use planner::{Plan, PlanRules, SearchControl, Service, Sharing, certified, check, scenario};

fn services(count: usize, random: &mut Random) -> Vec<Service> {
    let base = scenario::services(5);
    (0..count)
        .map(|index| {
            let base = &base[random.below(11) as usize];
            Service {
                name: format!("{}-{index}", base.model),
                model: base.model.clone(),
                rate: base.rate * (0.2 + 1.1 * random.unit_f64()),
                slo_ms: base.slo_ms * (1.0 + 2.0 * random.unit_f64()),
            }
        })
        .collect()
}

#[test]
fn one_percent_of_ten_thousand_services_changes() {
    let mut random = Random::new(11);
    let Some(mut problem) = common::problem(services(10_000, &mut random), PlanRules::default())
    else {
        return;
    };
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let first = certified::plan(&problem, &mut SearchControl::new(&clock, &mut report)).unwrap();
    for _ in 0..100 {
        let at = random.below(10_000) as usize;
        problem.services[at].rate *= 0.5 + random.unit_f64();
    }
    let fresh = certified::plan(&problem, &mut SearchControl::new(&clock, &mut report)).unwrap();
    let mut control = SearchControl::new(&clock, &mut report);
    let next =
        replan(&problem, &first.plan, &first.prices, ChangeCosts::default(), &mut control).unwrap();
    println!(
        "replan: {} gpus (fresh {}, bound {:.1}), {} untouched moved, {} changed, {:.3} s",
        next.gpus(),
        fresh.plan.gpus.len(),
        next.bound,
        next.moved.len(),
        next.changed.len(),
        next.seconds
    );
    let violations = check(&problem, &next.plan);
    assert!(violations.is_empty(), "{:?}", &violations[..violations.len().min(5)]);
    assert!(next.moved.len() <= 50);
    assert!(next.gpus() as f64 <= fresh.plan.gpus.len() as f64 * 1.005);
    assert!(next.bound <= next.gpus() as f64 + 1e-6);
}

#[test]
fn transition_keeps_the_capacity_of_every_service() {
    let mut random = Random::new(5);
    for round in 0..20 {
        let Some(mut problem) = common::problem(services(40, &mut random), PlanRules::default())
        else {
            return;
        };
        let clock = MonotonicClock::new();
        let mut report = |_| true;
        let first =
            certified::plan(&problem, &mut SearchControl::new(&clock, &mut report)).unwrap();
        for service in &mut problem.services {
            service.rate *= 0.6 + 0.8 * random.unit_f64();
        }
        let mut control = SearchControl::new(&clock, &mut report);
        let costs = ChangeCosts::default();
        let next = replan(&problem, &first.plan, &first.prices, costs, &mut control).unwrap();
        let fresh =
            certified::plan(&problem, &mut SearchControl::new(&clock, &mut report)).unwrap();
        let aligned = align(&first.plan, &fresh.plan);
        assert!(check(&problem, &aligned).is_empty());
        for target in [next.plan, aligned] {
            let steps = steps(&problem, &first.plan, &target);
            let wrong = replay(&problem, &first.plan, &target, &steps);
            assert!(wrong.is_empty(), "round {round}: {:?}", &wrong[..wrong.len().min(3)]);
        }
    }
}

#[test]
fn unchanged_services_are_not_moved() {
    let Some(problem) = common::problem(scenario::services_times(5, 3), PlanRules::default())
    else {
        return;
    };
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let first = certified::plan(&problem, &mut SearchControl::new(&clock, &mut report)).unwrap();
    let mut control = SearchControl::new(&clock, &mut report);
    let costs = ChangeCosts { moves: 0.0, ..ChangeCosts::default() };
    let next = replan(&problem, &first.plan, &first.prices, costs, &mut control).unwrap();
    assert!(next.changed.is_empty() && next.moved.is_empty());
    assert!(steps(&problem, &first.plan, &next.plan).is_empty());
    assert_eq!(align(&first.plan, &first.plan), first.plan);
}

#[test]
fn unchanged_services_keep_their_shared_slices() {
    for number in 1..=6 {
        let rules = PlanRules { sharing: Sharing::Time, ..PlanRules::default() };
        let Some(problem) = common::problem(scenario::services(number), rules) else { return };
        let clock = MonotonicClock::new();
        let mut report = |_| true;
        let first =
            certified::plan(&problem, &mut SearchControl::new(&clock, &mut report)).unwrap();
        let current = Plan::from_file(&problem, &first.plan.to_file(&problem)).unwrap();
        let mut control = SearchControl::new(&clock, &mut report);
        let next = replan(&problem, &current, &first.prices, ChangeCosts::default(), &mut control)
            .unwrap();
        assert!(next.changed.is_empty() && next.moved.is_empty(), "S{number}: {:?}", next.changed);
        assert_eq!(next.gpus(), first.plan.gpus.len());
    }
}

#[test]
fn refuses_a_current_plan_with_an_impossible_share() {
    let Some(problem) = common::problem(scenario::services(1), PlanRules::default()) else {
        return;
    };
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let first = certified::plan(&problem, &mut SearchControl::new(&clock, &mut report)).unwrap();
    let mut file = first.plan.to_file(&problem);
    file[0].slices[0].services[0].rate = -5.0;
    let error = Plan::from_file(&problem, &file).unwrap_err().to_string();
    assert!(error.contains("-5 requests/s"), "{error}");
}
