//! The scaler against an independent model of Kubernetes, in virtual time.

use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use super::*;

/// Seconds between two polls.
const POLL: u64 = 5;

fn seconds(count: u64) -> Nanos {
    Nanos::from_millis(1000 * count)
}

fn settings() -> ScalingSettings {
    ScalingSettings {
        replicas_min: 2,
        replicas_max: 9,
        step_up: 3,
        step_down: 2,
        window: seconds(60),
        cooldown: seconds(15),
        drain_timeout: seconds(90),
    }
}

/// A replica of the simulation.
#[derive(Clone, Debug)]
struct Pod {
    name: String,
    ordinal: u64,
    age: u64,
    ending: Option<u64>,
    marked: bool,
    /// Seconds until it is drained.
    load: u64,
    flickers: bool,
}

const START: u64 = 12;
const LOADED: u64 = 20;

impl Pod {
    fn joined(&self) -> bool {
        self.age >= START && self.ending.is_none_or(|since| since < 3)
    }

    fn ready(&self) -> bool {
        self.age >= START && !self.flickers
    }
}

/// Replicas, and a controller that makes them match the requested number as the documentation of
/// ReplicaSets and StatefulSets describes: pods that are not ready are removed first, then those
/// with a lower cost, then the younger ones; or the highest ordinal.
struct Simulation {
    replicas: u32,
    pods: Vec<Pod>,
    removal: Removal,
    made: u64,
    /// Violations found.
    errors: Vec<String>,
}

impl Simulation {
    fn new(replicas: u32, removal: Removal) -> Simulation {
        let mut simulation =
            Simulation { replicas, pods: Vec::new(), removal, made: 0, errors: Vec::new() };
        simulation.control();
        simulation.pods.iter_mut().for_each(|pod| pod.age = START);
        simulation
    }

    fn control(&mut self) {
        let mut alive = self.pods.iter().filter(|pod| pod.ending.is_none()).count();
        while alive < self.replicas as usize {
            let taken = |ordinal: u64| self.pods.iter().any(|pod| pod.ordinal == ordinal);
            let ordinal = match self.removal {
                Removal::Ordinal => (0..).find(|&n| !taken(n)).unwrap(),
                Removal::Marked => self.made,
            };
            self.made += 1;
            self.pods.push(Pod {
                name: format!("pod-{ordinal}"),
                ordinal,
                age: 0,
                ending: None,
                marked: false,
                load: LOADED,
                flickers: false,
            });
            alive += 1;
        }
        while alive > self.replicas as usize {
            let removal = self.removal;
            let order = |pod: &&mut Pod| match removal {
                Removal::Ordinal => (false, false, u64::MAX - pod.ordinal),
                Removal::Marked => (pod.ready(), !pod.marked, pod.age),
            };
            let living = self.pods.iter_mut().filter(|pod| pod.ending.is_none());
            let pod = living.min_by_key(order).unwrap();
            pod.ending = Some(0);
            if pod.age >= START && pod.load > 0 {
                self.errors.push(format!("{} is removed with load {}", pod.name, pod.load));
            }
            alive -= 1;
        }
    }

    fn replicas_present(&self) -> Vec<ReplicaState> {
        let member = |pod: &Pod| ReplicaState {
            name: pod.name.clone(),
            ordinal: pod.ordinal,
            joined: pod.joined(),
            ready: pod.ready(),
            ending: pod.ending.is_some(),
            empty: pod.load == 0,
            busy: pod.load as f64,
        };
        self.pods.iter().map(member).collect()
    }

    /// Advances time by `span` seconds while the plan does without `draining`.
    fn pass(&mut self, span: u64, draining: &BTreeSet<String>, drains: bool) {
        for pod in &mut self.pods {
            pod.age += span;
            pod.ending = pod.ending.map(|since| since + span);
            match draining.contains(&pod.name) {
                true if drains => pod.load = pod.load.saturating_sub(span),
                true => {}
                false => pod.load = LOADED,
            }
        }
        self.pods.retain(|pod| pod.ending.is_none_or(|since| since < 10));
        self.control();
    }
}

/// Conditions that last for a number of polls.
#[derive(Clone, Debug)]
struct Phase {
    need: Option<u32>,
    polls: u64,
    /// Writes are refused.
    refused: bool,
    /// Backends cannot be drained.
    stuck: bool,
    /// A pod is not ready.
    flicker: bool,
    /// An operator requests this number of replicas.
    by_hand: Option<u32>,
}

fn phase() -> impl Strategy<Value = Phase> {
    let need = prop_oneof![9 => (0u32..14).prop_map(Some), 1 => Just(None)];
    let rarely = || prop::bool::weighted(0.1);
    let by_hand = prop_oneof![19 => Just(None), 1 => (0u32..12).prop_map(Some)];
    (need, 1u64..40, rarely(), rarely(), rarely(), by_hand).prop_map(
        |(need, polls, refused, stuck, flicker, by_hand)| Phase {
            need,
            polls,
            refused,
            stuck,
            flicker,
            by_hand,
        },
    )
}

/// All writes and needs: the input of the checker.
#[derive(Default)]
struct ChangeLog {
    /// Time, and replicas that the load needs, within the bounds.
    needs: Vec<(Nanos, u32)>,
    /// Time, replicas before and after.
    writes: Vec<(Nanos, u32, u32)>,
}

fn check(settings: &ScalingSettings, log: &ChangeLog) {
    for (index, &(at, before, after)) in log.writes.iter().enumerate() {
        assert!(after <= settings.replicas_max.max(before), "{after} at {at} is too many");
        assert!(after >= settings.replicas_min.min(before), "{after} at {at} is too few");
        assert_ne!(before, after);
        let needs = |span: Nanos| {
            log.needs.iter().filter(move |(then, _)| *then <= at && at - *then < span)
        };
        let (_, now) = *log.needs.iter().rev().find(|(then, _)| *then <= at).unwrap();
        if after > before {
            assert!(after <= now, "{after} at {at} is more than {now}, which is needed");
            assert!(after - before <= settings.step_up);
        } else {
            let max = needs(settings.window).map(|(_, need)| *need).max().unwrap();
            assert!(after >= max, "{after} at {at} is less than {max}, needed within the window");
            assert!(before - after <= settings.step_down);
            assert!(at >= settings.window, "nothing was seen before {at}");
        }
        if let Some(&(last, _, _)) = index.checked_sub(1).map(|before| &log.writes[before]) {
            assert!(at - last >= settings.cooldown, "{last} and {at} are too near");
        }
    }
}

fn simulate(phases: &[Phase], removal: Removal) -> (ChangeLog, Simulation) {
    let settings = settings();
    let mut simulation = Simulation::new(4, removal);
    let mut scaler = Scaler::new(settings.clone(), Nanos::ZERO);
    let mut log = ChangeLog::default();
    let mut now = 0;
    for phase in phases {
        if let Some(replicas) = phase.by_hand {
            simulation.replicas = replicas;
            simulation.control();
            // The operator is responsible for what this removes.
            simulation.errors.clear();
        }
        for poll in 0..phase.polls {
            for (index, pod) in simulation.pods.iter_mut().enumerate() {
                pod.flickers = phase.flicker && index == 0;
            }
            let replicas_present = simulation.replicas_present();
            let input = ScalerInput {
                replicas: simulation.replicas,
                need: phase.need,
                removal,
                replicas_present: &replicas_present,
                urgent: false,
                hold: false,
            };
            let decision = scaler.step(seconds(now), &input);
            let bounded = phase.need.unwrap_or(simulation.replicas);
            let bounded = bounded.clamp(settings.replicas_min, settings.replicas_max);
            assert_eq!(decision.wanted, bounded);
            log.needs.push((seconds(now), bounded));
            if let Some(replicas) = decision.replicas.filter(|_| !phase.refused) {
                log.writes.push((seconds(now), simulation.replicas, replicas));
                for pod in &mut simulation.pods {
                    pod.marked = decision.removing.contains(&pod.name);
                }
                simulation.replicas = replicas;
                scaler.applied(seconds(now), &decision);
                simulation.control();
            }
            simulation.pass(POLL, &decision.draining, !phase.stuck);
            now += POLL + poll % 2;
        }
    }
    (log, simulation)
}

proptest! {
    // The same phases in every run.
    #![proptest_config(ProptestConfig {
        cases: 2000,
        rng_seed: RngSeed::Fixed(25),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn replicas_follow_the_load_within_bounds(
        phases in prop::collection::vec(phase(), 1..24),
        ordinal in any::<bool>(),
    ) {
        let removal = if ordinal { Removal::Ordinal } else { Removal::Marked };
        let (log, simulation) = simulate(&phases, removal);
        check(&settings(), &log);
        prop_assert!(simulation.errors.is_empty(), "{:?}", simulation.errors);
    }

    #[test]
    fn constant_need_is_reached(need in 0u32..14, ordinal in any::<bool>()) {
        let removal = if ordinal { Removal::Ordinal } else { Removal::Marked };
        let calm = |need, polls| Phase {
            need: Some(need),
            polls,
            refused: false,
            stuck: false,
            flicker: false,
            by_hand: None,
        };
        let (log, simulation) = simulate(&[calm(need, 120)], removal);
        prop_assert_eq!(simulation.replicas, need.clamp(2, 9), "{:?}", log.writes);
        prop_assert!(simulation.errors.is_empty(), "{:?}", simulation.errors);
    }
}

/// Pods of a StatefulSet reuse names: one that was removed and created again between two polls is a
/// new replica.
#[test]
fn reused_pod_name_is_a_new_replica() {
    let phase = |need, polls, by_hand| Phase {
        need: Some(need),
        polls,
        refused: false,
        stuck: false,
        flicker: false,
        by_hand,
    };
    let phases = [phase(8, 6, None), phase(0, 16, None), phase(0, 4, Some(7))];
    let (log, simulation) = simulate(&phases, Removal::Ordinal);
    check(&settings(), &log);
    assert!(simulation.errors.is_empty(), "{:?}", simulation.errors);
}

fn member(name: &str, busy: f64) -> ReplicaState {
    let ordinal = name.rsplit('-').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    ReplicaState {
        name: name.to_string(),
        ordinal,
        joined: true,
        ready: true,
        busy,
        ..ReplicaState::default()
    }
}

fn draining(removal: Removal, replicas_present: &[ReplicaState]) -> Vec<String> {
    let settings = ScalingSettings { step_down: 1, ..settings() };
    let mut scaler = Scaler::new(settings, Nanos::ZERO);
    let replicas = replicas_present.len() as u32;
    let input = ScalerInput {
        replicas,
        need: Some(0),
        removal,
        replicas_present,
        urgent: false,
        hold: false,
    };
    scaler.step(Nanos::ZERO, &input);
    let decision = scaler.step(seconds(100), &input);
    assert_eq!(decision.replicas, None, "no backend is drained yet");
    decision.draining.into_iter().collect()
}

#[test]
fn drains_the_least_busy_replica_or_the_last_ordinal() {
    let replicas_present = [member("b-0", 0.9), member("b-1", 0.1), member("b-2", 0.5)];
    assert_eq!(draining(Removal::Marked, &replicas_present), ["b-1"]);
    assert_eq!(draining(Removal::Ordinal, &replicas_present), ["b-2"]);
    // Ordinals are numbers, not text.
    let replicas_present: Vec<ReplicaState> =
        (0..11).map(|n| member(&format!("b-{n}"), 0.5)).collect();
    assert_eq!(draining(Removal::Ordinal, &replicas_present), ["b-10"]);
}

#[test]
fn reports_drains_that_time_out() {
    let mut scaler = Scaler::new(settings(), Nanos::ZERO);
    let replicas_present = [member("a", 0.5), member("b", 0.6), member("c", 0.7)];
    let input = ScalerInput {
        replicas: 3,
        need: Some(2),
        removal: Removal::Marked,
        replicas_present: &replicas_present,
        urgent: false,
        hold: false,
    };
    let mut named = Vec::new();
    for now in (0..200).step_by(5) {
        let decision = scaler.step(seconds(now), &input);
        assert_eq!(decision.replicas, None);
        named.extend(decision.stuck);
    }
    assert_eq!(named, ["a"]);
}

#[test]
fn terminating_replica_is_draining() {
    let mut scaler = Scaler::new(settings(), Nanos::ZERO);
    let mut terminating = member("a", 0.5);
    terminating.ending = true;
    let replicas_present = [terminating, member("b", 0.5), member("c", 0.5)];
    let input = ScalerInput {
        replicas: 3,
        need: Some(3),
        removal: Removal::Marked,
        replicas_present: &replicas_present,
        urgent: false,
        hold: false,
    };
    let decision = scaler.step(Nanos::ZERO, &input);
    assert_eq!(decision.draining.into_iter().collect::<Vec<_>>(), ["a"]);
}

#[test]
fn removes_nothing_while_replicas_exceed_the_request() {
    let mut scaler = Scaler::new(settings(), Nanos::ZERO);
    let mut replicas_present =
        [member("a", 0.5), member("b", 0.6), member("c", 0.7), member("d", 0.8)];
    replicas_present[0].empty = true;
    for now in (0..200).step_by(5) {
        let input = ScalerInput {
            replicas: 3,
            need: Some(2),
            removal: Removal::Marked,
            replicas_present: &replicas_present,
            urgent: false,
            hold: false,
        };
        let decision = scaler.step(seconds(now), &input);
        assert_eq!((decision.replicas, decision.draining.len()), (None, 0), "at {now}");
    }
    let input = ScalerInput {
        replicas: 3,
        need: Some(2),
        removal: Removal::Marked,
        replicas_present: &replicas_present[..3],
        urgent: false,
        hold: false,
    };
    assert_eq!(scaler.step(seconds(200), &input).replicas, Some(2));
}

#[test]
fn urgent_need_does_not_wait_for_the_cooldown_and_held_replicas_stay() {
    let settings = ScalingSettings { replicas_min: 0, ..settings() };
    let mut scaler = Scaler::new(settings, Nanos::ZERO);
    let step = |scaler: &mut Scaler, at, replicas, need, urgent, hold, present: &[ReplicaState]| {
        let input = ScalerInput {
            replicas,
            need: Some(need),
            removal: Removal::Marked,
            replicas_present: present,
            urgent,
            hold,
        };
        let decision = scaler.step(seconds(at), &input);
        if decision.replicas.is_some() {
            scaler.applied(seconds(at), &decision);
        }
        decision.replicas
    };
    assert_eq!(step(&mut scaler, 0, 0, 1, true, false, &[]), Some(1));
    // An operator set it back at once.
    assert_eq!(step(&mut scaler, 1, 0, 1, false, false, &[]), None, "the cooldown holds");
    assert_eq!(step(&mut scaler, 2, 0, 1, true, false, &[]), Some(1), "requests wait");
    let mut present = [member("a", 0.0)];
    present[0].empty = true;
    for at in (3..200).step_by(5) {
        assert_eq!(step(&mut scaler, at, 1, 0, false, true, &present), None, "held");
    }
    assert_eq!(step(&mut scaler, 200, 1, 0, false, false, &present), Some(0));
}

#[test]
fn requested_replicas_that_do_not_exist_are_taken_back() {
    for removal in [Removal::Marked, Removal::Ordinal] {
        let mut scaler =
            Scaler::new(ScalingSettings { replicas_min: 0, ..settings() }, Nanos::ZERO);
        let mut replicas = 3;
        for now in (0..200).step_by(5) {
            let input = ScalerInput {
                replicas,
                need: Some(0),
                removal,
                replicas_present: &[],
                urgent: false,
                hold: false,
            };
            let decision = scaler.step(seconds(now), &input);
            assert!(decision.removing.is_empty() && decision.draining.is_empty());
            if let Some(fewer) = decision.replicas {
                scaler.applied(seconds(now), &decision);
                replicas = fewer;
            }
        }
        assert_eq!(replicas, 0, "{removal:?}");
    }
}
