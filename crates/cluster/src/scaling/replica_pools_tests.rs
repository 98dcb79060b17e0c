//! Single situations of several pools; [`super::zero_tests`] has whole histories.

use std::collections::BTreeMap;

use super::super::activity::Activity;
use super::super::replica_estimate::BackendUsage;
use super::super::scaler::Removal;
use super::super::target::Replica;
use super::*;
use crate::scheduler::placement::PlacementSettings;
use crate::scheduler::plan::{Curves, Demand};

fn seconds(count: u64) -> Nanos {
    Nanos::from_millis(1000 * count)
}

/// Two pools of kinds `a` and `b`, where a replica of `b` costs more.
fn pools() -> ReplicaPools {
    let pool = |kind: &str, price: f64| PoolSettings {
        scaling: ScalingSettings {
            replicas_min: 0,
            replicas_max: 6,
            step_up: 6,
            step_down: 6,
            window: seconds(60),
            cooldown: seconds(10),
            drain_timeout: seconds(90),
        },
        kind: Some(kind.to_string()),
        price,
        zero_after: seconds(120),
        pending_limit: seconds(100),
    };
    ReplicaPools::new(vec![pool("a", 1.0), pool("b", 2.0)], &[], Nanos::ZERO)
}

/// The backends `joined`, with their kinds, under `rate` requests per second.
fn input(joined: &[(&str, &str)], rate: f64) -> ScalingInput {
    let curve = vec![(1, 5.0), (4, 8.0), (16, 20.0)];
    let machine = |(name, device): &(&str, &str)| Machine {
        name: name.to_string(),
        device: device.to_string(),
        memory_bytes: 0,
    };
    let usage = |(name, _): &(&str, &str)| (name.to_string(), BackendUsage::default());
    let key = |kind: &str| (kind.to_string(), "m".to_string());
    let demand = Demand { model: "m".to_string(), rate, slo_ms: 100.0, ..Demand::default() };
    ScalingInput {
        machines: joined.iter().map(machine).collect(),
        demands: vec![demand],
        curves: Curves::from([(key("a"), curve.clone()), (key("b"), curve)]),
        placement: PlacementSettings { copies: 1, ..PlacementSettings::default() },
        rate_min: 1.0,
        reported: true,
        activity: Activity { active: rate > 0.0, ..Activity::default() },
        usage: joined.iter().map(usage).collect::<BTreeMap<_, _>>(),
    }
}

fn scale(replicas: u32, pods: &[&str]) -> Scale {
    let pod = |name: &&str| Replica { name: name.to_string(), ready: true, ..Replica::default() };
    Scale { replicas, version: "1".to_string(), members: pods.iter().map(pod).collect() }
}

fn step(
    pools: &mut ReplicaPools,
    at: u64,
    input: &ScalingInput,
    scales: [&Scale; 2],
) -> PoolsDecision {
    let views = scales.map(|scale| Some((scale, Removal::Marked)));
    let decision = pools.step(seconds(at), input, &views);
    for (index, pool) in decision.pools.iter().enumerate() {
        if let Some(pool) = pool
            && pool.scaling.replicas.is_some()
        {
            pools.applied(seconds(at), index, &pool.scaling);
        }
    }
    decision
}

fn requested(decision: &PoolsDecision) -> [Option<u32>; 2] {
    [0, 1].map(|index| decision.pools[index].as_ref().and_then(|pool| pool.scaling.replicas))
}

#[test]
fn a_pool_whose_replicas_do_not_come_is_named_and_another_is_asked() {
    let mut pools = pools();
    let load = input(&[], 2000.0);
    let nothing = scale(0, &[]);
    let first = step(&mut pools, 0, &load, [&nothing, &nothing]);
    let [Some(count), None] = requested(&first) else { panic!("{first:?}") };
    assert!(count >= 3, "{count}");
    // One pod has no node, the others do not even exist.
    let mut pending = scale(count, &["a-1"]);
    pending.members[0].ready = false;
    pending.members[0].unscheduled = Some("0/3 nodes are available".to_string());
    for at in (5..100).step_by(5) {
        let decision = step(&mut pools, at, &load, [&pending, &nothing]);
        assert_eq!(requested(&decision), [None, None], "at {at}");
    }
    let decision = step(&mut pools, 105, &load, [&pending, &nothing]);
    let stalled = decision.pools[0].as_ref().and_then(|pool| pool.newly_stalled.clone());
    assert!(stalled.as_ref().is_some_and(|why| why.contains("0/3 nodes")), "{stalled:?}");
    assert_eq!(requested(&decision)[1], Some(count), "the dearer pool is asked");
    assert_eq!(pools.stalled(0), stalled.as_ref());
    // It serves; the first one is not asked again before its pause has passed.
    let names: Vec<String> = (0..count).map(|number| format!("b-{number}")).collect();
    let joined: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "b")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (serving, load) = (scale(count, &names), input(&joined, 2000.0));
    let mut replicas = count;
    for at in (110..700).step_by(5) {
        let view = if replicas == 0 { nothing.clone() } else { pending.clone() };
        let view = Scale { replicas, ..view };
        let decision = step(&mut pools, at, &load, [&view, &serving]);
        if let Some(fewer) = requested(&decision)[0] {
            assert!(fewer < replicas, "at {at}");
            replicas = fewer;
        }
        assert_eq!(requested(&decision)[1], None, "at {at}");
    }
    assert_eq!(replicas, 0, "the request that nobody fulfils was taken back");
}

#[test]
fn nothing_is_removed_while_another_pool_is_to_take_over() {
    let mut pools = pools();
    let joined = [("b-0", "b"), ("b-1", "b"), ("b-2", "b"), ("b-3", "b")];
    let serving = scale(4, &["b-0", "b-1", "b-2", "b-3"]);
    let load = input(&joined, 2000.0);
    let nothing = scale(0, &[]);
    let first = step(&mut pools, 0, &load, [&nothing, &serving]);
    let [Some(count), _] = requested(&first) else { panic!("the cheap pool is asked: {first:?}") };
    for at in (5..95).step_by(5) {
        let decision = step(&mut pools, at, &load, [&scale(count, &[]), &serving]);
        assert_eq!(requested(&decision), [None, None], "at {at}");
        let draining = decision.pools.iter().flatten().map(|pool| pool.scaling.draining.len());
        assert_eq!(draining.sum::<usize>(), 0, "at {at}");
    }
    let names: Vec<String> = (0..count).map(|number| format!("a-{number}")).collect();
    let both: Vec<(&str, &str)> =
        names.iter().map(|name| (name.as_str(), "a")).chain(joined).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let load = input(&both, 2000.0);
    let decision = step(&mut pools, 100, &load, [&scale(count, &names), &serving]);
    let draining = decision.pools[1].as_ref().map(|pool| pool.scaling.draining.len());
    assert_eq!(draining, Some(4), "now they are: {decision:?}");
}

#[test]
fn an_idle_cluster_is_emptied_after_its_time_and_stays_so() {
    let mut pools = pools();
    let (serving, nothing) = (scale(1, &["a-0"]), scale(0, &[]));
    let mut idle = input(&[("a-0", "a")], 0.0);
    for at in (0..120).step_by(5) {
        idle.activity.idle_for = Some(seconds(at));
        let decision = step(&mut pools, at, &idle, [&serving, &nothing]);
        assert!(!decision.may_empty && requested(&decision) == [None, None], "at {at}");
    }
    let mut emptied = false;
    for at in (120..220).step_by(5) {
        idle.activity.idle_for = Some(seconds(at));
        let decision = step(&mut pools, at, &idle, [&serving, &nothing]);
        assert!(decision.may_empty, "at {at}");
        assert_eq!(requested(&decision), [None, None], "it is not empty at {at}");
        emptied |= decision.pools[0].as_ref().is_some_and(|p| !p.scaling.draining.is_empty());
    }
    assert!(emptied);
    idle.usage.insert("a-0".to_string(), BackendUsage { empty: true, busy: 0.0 });
    assert_eq!(requested(&step(&mut pools, 220, &idle, [&serving, &nothing])), [Some(0), None]);
    // A new leader that finds nothing and nobody leaves it so, although it has seen no idle time.
    let mut next = super::tests::pools();
    let mut none = input(&[], 0.0);
    for idle_for in [None, Some(Nanos::ZERO)] {
        none.activity.idle_for = idle_for;
        let decision = step(&mut next, 400, &none, [&nothing, &nothing]);
        assert_eq!(requested(&decision), [None, None]);
    }
    // A request that waits starts the cheapest at once, and one that came starts it, too.
    none.activity = Activity { idle_for: None, active: true, waiting: 1 };
    let decision = step(&mut next, 401, &none, [&nothing, &nothing]);
    assert_eq!(requested(&decision), [Some(1), None]);
}

#[test]
fn replicas_of_another_kind_than_given_are_named() {
    let mut pools = pools();
    let load = input(&[("a-0", "b")], 10.0);
    let decision = step(&mut pools, 0, &load, [&scale(1, &["a-0"]), &scale(0, &[])]);
    assert_eq!(decision.pools[0].as_ref().unwrap().other_kind.as_deref(), Some("b"));
}

#[test]
fn a_pool_that_cannot_be_read_holds_the_others() {
    let mut pools = pools();
    let load = input(&[("b-0", "b"), ("b-1", "b")], 10.0);
    let serving = scale(2, &["b-0", "b-1"]);
    for at in (0..400).step_by(5) {
        let views = [None, Some((&serving, Removal::Marked))];
        let decision = pools.step(seconds(at), &load, &views);
        assert!(decision.pools[0].is_none() && !decision.may_empty);
        assert_eq!(decision.pools[1].as_ref().unwrap().scaling.replicas, None, "at {at}");
    }
}
