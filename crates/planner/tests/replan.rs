//! Re-planning: few moves, close to a new plan, and a safe transition.

mod common;

use base::{MonotonicClock, Random};
use planner::certified::Solution;
use planner::replan::steps::{align, replay, steps};
use planner::replan::{ChangeCosts, replan};
use planner::{Plan, PlanRules, Problem, SearchControl, Sharing, certified, check, scenario};

#[test]
fn one_percent_of_ten_thousand_services_changes() {
    let mut random = Random::new(11);
    let Some(mut problem) =
        common::problem(scenario::random_services(10_000, &mut random), PlanRules::default())
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
        let Some(mut problem) =
            common::problem(scenario::random_services(40, &mut random), PlanRules::default())
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
    let costs = ChangeCosts { moves_max: Some(0), ..ChangeCosts::default() };
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

fn plan_of(problem: &Problem) -> Solution {
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    certified::plan(problem, &mut SearchControl::new(&clock, &mut report)).unwrap()
}

#[test]
fn unchanged_services_of_any_plan_are_not_moved() {
    let mut random = Random::new(31);
    for round in 0..16 {
        for sharing in [Sharing::None, Sharing::Time] {
            let count = 2 + random.below(11) as usize;
            let rules = PlanRules { sharing, ..PlanRules::default() };
            let Some(problem) =
                common::problem(scenario::random_services(count, &mut random), rules)
            else {
                return;
            };
            let first = plan_of(&problem);
            let clock = MonotonicClock::new();
            let mut report = |_| true;
            let mut control = SearchControl::new(&clock, &mut report);
            let costs = ChangeCosts::default();
            let next = replan(&problem, &first.plan, &first.prices, costs, &mut control).unwrap();
            assert!(next.changed.is_empty() && next.moved.is_empty(), "round {round}");
            assert!(steps(&problem, &first.plan, &next.plan).is_empty(), "round {round}");
        }
    }
}

/// Re-plans one change after the other; returns the services moved.
fn chain(count: usize, changes: usize, sharing: Sharing, moves_max: Option<usize>) -> usize {
    let mut random = Random::new(17);
    let rules = PlanRules { sharing, ..PlanRules::default() };
    let Some(mut problem) = common::problem(scenario::random_services(count, &mut random), rules)
    else {
        return 0;
    };
    let base = problem.services.clone();
    let first = plan_of(&problem);
    let (mut plan, mut prices, mut moved) = (first.plan, first.prices, 0);
    for round in 0..changes {
        for _ in 0..1 + count / 10 {
            let at = random.below(count as u64) as usize;
            problem.services[at].rate = base[at].rate * (0.3 + 1.4 * random.unit_f64());
        }
        let fresh = plan_of(&problem);
        let clock = MonotonicClock::new();
        let mut report = |_| true;
        let mut control = SearchControl::new(&clock, &mut report);
        let costs = ChangeCosts { moves_max, ..ChangeCosts::default() };
        let next = replan(&problem, &plan, &prices, costs, &mut control).unwrap();
        let violations = check(&problem, &next.plan);
        assert!(violations.is_empty(), "round {round}: {violations:?}");
        let (gpus, least) = (next.gpus(), fresh.plan.gpus.len());
        let allowed = (least + 1).max(least * 102 / 100);
        assert!(moves_max.is_some() || gpus <= allowed, "round {round}: {gpus}, fresh {least}");
        assert!(moves_max.is_none_or(|max| next.moved.len() <= max), "round {round}");
        moved += next.moved.len();
        let wrong = replay(&problem, &plan, &next.plan, &steps(&problem, &plan, &next.plan));
        assert!(wrong.is_empty(), "round {round}: {:?}", wrong.first());
        (plan, prices) = (next.plan, fresh.prices);
    }
    if moves_max.is_some() {
        return moved;
    }
    // What such a chain has become is changed by nothing but a change.
    let clock = MonotonicClock::new();
    let mut report = |_| true;
    let mut control = SearchControl::new(&clock, &mut report);
    let next = replan(&problem, &plan, &prices, ChangeCosts::default(), &mut control).unwrap();
    assert!(next.changed.is_empty() && next.moved.is_empty(), "{:?}", next.changed);
    assert!(steps(&problem, &plan, &next.plan).is_empty());
    moved
}

#[test]
fn chained_changes_stay_close_to_new_plans() {
    let moved = chain(50, 200, Sharing::None, None);
    println!("50 services, 200 changes: {moved} untouched services moved");
}

#[test]
fn chained_changes_of_shared_slices_stay_close_to_new_plans() {
    for count in [10, 30] {
        let moved = chain(count, 200, Sharing::Time, None);
        println!("{count} services that share slices, 200 changes: {moved} untouched moved");
    }
}

#[test]
fn a_budget_of_moves_is_kept() {
    assert_eq!(chain(40, 15, Sharing::None, Some(0)), 0);
    chain(40, 15, Sharing::None, Some(2));
}
