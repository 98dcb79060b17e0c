//! The scaler against a model of Kubernetes that it knows nothing of, in virtual time.

use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use super::*;

/// Seconds between two looks.
const LOOK: u64 = 5;

fn seconds(count: u64) -> Nanos {
    Nanos::from_millis(1000 * count)
}

fn settings() -> ScalingSettings {
    ScalingSettings {
        replicas_least: 2,
        replicas_most: 9,
        step_up: 3,
        step_down: 2,
        window: seconds(60),
        cooldown: seconds(15),
        drain_most: seconds(90),
    }
}

/// A replica of the model.
#[derive(Clone, Debug)]
struct Pod {
    name: String,
    ordinal: u64,
    age: u64,
    ending: Option<u64>,
    marked: bool,
    /// Seconds until it has nothing left, once it is being emptied.
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

/// Replicas, and a controller that makes them as many as asked for, as the documentation of ReplicaSets and StatefulSets
/// says: pods that are not ready go first, then those that cost less, then the younger ones; or the highest ordinal.
struct World {
    replicas: u32,
    pods: Vec<Pod>,
    removal: Removal,
    made: u64,
    /// What went wrong.
    wrong: Vec<String>,
}

impl World {
    fn new(replicas: u32, removal: Removal) -> World {
        let mut world = World { replicas, pods: Vec::new(), removal, made: 0, wrong: Vec::new() };
        world.control();
        world.pods.iter_mut().for_each(|pod| pod.age = START);
        world
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
                self.wrong.push(format!("{} goes with load {}", pod.name, pod.load));
            }
            alive -= 1;
        }
    }

    fn members(&self) -> Vec<Member> {
        let member = |pod: &Pod| Member {
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

    /// Lets seconds pass while the plan does without `draining`.
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

/// Something that happens, and how many looks it lasts.
#[derive(Clone, Debug)]
struct Scene {
    need: Option<u32>,
    looks: u64,
    /// Writes are refused.
    refused: bool,
    /// Backends cannot be emptied.
    stuck: bool,
    /// A pod is not ready for Kubernetes.
    flicker: bool,
    /// Somebody else asks for other replicas.
    by_hand: Option<u32>,
}

fn scene() -> impl Strategy<Value = Scene> {
    let need = prop_oneof![9 => (0u32..14).prop_map(Some), 1 => Just(None)];
    let rarely = || prop::bool::weighted(0.1);
    let by_hand = prop_oneof![19 => Just(None), 1 => (0u32..12).prop_map(Some)];
    (need, 1u64..40, rarely(), rarely(), rarely(), by_hand).prop_map(
        |(need, looks, refused, stuck, flicker, by_hand)| Scene {
            need,
            looks,
            refused,
            stuck,
            flicker,
            by_hand,
        },
    )
}

/// Every write, and what was needed when: all that the checker sees.
#[derive(Default)]
struct Log {
    /// Time, and replicas that the load took, within the bounds.
    needs: Vec<(Nanos, u32)>,
    /// Time, replicas before and after.
    writes: Vec<(Nanos, u32, u32)>,
}

fn check(settings: &ScalingSettings, log: &Log) {
    for (index, &(at, before, after)) in log.writes.iter().enumerate() {
        assert!(after <= settings.replicas_most.max(before), "{after} at {at} is too many");
        assert!(after >= settings.replicas_least.min(before), "{after} at {at} is too few");
        assert_ne!(before, after);
        let needs = |span: Nanos| {
            log.needs.iter().filter(move |(then, _)| *then <= at && at - *then < span)
        };
        let (_, now) = *log.needs.iter().rev().find(|(then, _)| *then <= at).unwrap();
        if after > before {
            assert!(after <= now, "{after} at {at} is more than {now}, which is needed");
            assert!(after - before <= settings.step_up);
        } else {
            let most = needs(settings.window).map(|(_, need)| *need).max().unwrap();
            assert!(after >= most, "{after} at {at} is less than {most}, needed within the window");
            assert!(before - after <= settings.step_down);
            assert!(at >= settings.window, "nothing was seen before {at}");
        }
        if let Some(&(last, _, _)) = index.checked_sub(1).map(|before| &log.writes[before]) {
            assert!(at - last >= settings.cooldown, "{last} and {at} are too near");
        }
    }
}

fn play(scenes: &[Scene], removal: Removal) -> (Log, World) {
    let settings = settings();
    let mut world = World::new(4, removal);
    let mut scaler = Scaler::new(settings.clone(), Nanos::ZERO);
    let mut log = Log::default();
    let mut now = 0;
    for scene in scenes {
        if let Some(replicas) = scene.by_hand {
            world.replicas = replicas;
            world.control();
            // Whoever does this by hand answers for what goes.
            world.wrong.clear();
        }
        for look in 0..scene.looks {
            for (index, pod) in world.pods.iter_mut().enumerate() {
                pod.flickers = scene.flicker && index == 0;
            }
            let members = world.members();
            let situation = Situation {
                replicas: world.replicas,
                need: scene.need,
                removal,
                members: &members,
            };
            let orders = scaler.step(seconds(now), &situation);
            let bounded = scene.need.unwrap_or(world.replicas);
            let bounded = bounded.clamp(settings.replicas_least, settings.replicas_most);
            assert_eq!(orders.wanted, bounded);
            log.needs.push((seconds(now), bounded));
            if let Some(replicas) = orders.replicas.filter(|_| !scene.refused) {
                log.writes.push((seconds(now), world.replicas, replicas));
                for pod in &mut world.pods {
                    pod.marked = orders.leaving.contains(&pod.name);
                }
                world.replicas = replicas;
                scaler.written(seconds(now), &orders);
                world.control();
            }
            world.pass(LOOK, &orders.draining, !scene.stuck);
            now += LOOK + look % 2;
        }
    }
    (log, world)
}

proptest! {
    // The same scenes in every run.
    #![proptest_config(ProptestConfig {
        cases: 2000,
        rng_seed: RngSeed::Fixed(25),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn replicas_follow_the_load_within_all_bounds(
        scenes in prop::collection::vec(scene(), 1..24),
        ordinal in any::<bool>(),
    ) {
        let removal = if ordinal { Removal::Ordinal } else { Removal::Marked };
        let (log, world) = play(&scenes, removal);
        check(&settings(), &log);
        prop_assert!(world.wrong.is_empty(), "{:?}", world.wrong);
    }

    #[test]
    fn what_is_needed_for_long_is_what_there_is(need in 0u32..14, ordinal in any::<bool>()) {
        let removal = if ordinal { Removal::Ordinal } else { Removal::Marked };
        let calm = |need, looks| Scene {
            need: Some(need),
            looks,
            refused: false,
            stuck: false,
            flicker: false,
            by_hand: None,
        };
        let (log, world) = play(&[calm(need, 120)], removal);
        prop_assert_eq!(world.replicas, need.clamp(2, 9), "{:?}", log.writes);
        prop_assert!(world.wrong.is_empty(), "{:?}", world.wrong);
    }
}

/// A StatefulSet's pods have the names of those before them: one that went and came back between two looks is another one.
#[test]
fn a_pod_with_the_name_of_one_that_went_is_another_one() {
    let scene = |need, looks, by_hand| Scene {
        need: Some(need),
        looks,
        refused: false,
        stuck: false,
        flicker: false,
        by_hand,
    };
    let scenes = [scene(8, 6, None), scene(0, 16, None), scene(0, 4, Some(7))];
    let (log, world) = play(&scenes, Removal::Ordinal);
    check(&settings(), &log);
    assert!(world.wrong.is_empty(), "{:?}", world.wrong);
}

fn member(name: &str, busy: f64) -> Member {
    let ordinal = name.rsplit('-').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    Member { name: name.to_string(), ordinal, joined: true, ready: true, busy, ..Member::default() }
}

fn draining(removal: Removal, members: &[Member]) -> Vec<String> {
    let settings = ScalingSettings { step_down: 1, ..settings() };
    let mut scaler = Scaler::new(settings, Nanos::ZERO);
    let replicas = members.len() as u32;
    let situation = Situation { replicas, need: Some(0), removal, members };
    scaler.step(Nanos::ZERO, &situation);
    let orders = scaler.step(seconds(100), &situation);
    assert_eq!(orders.replicas, None, "nobody is empty yet");
    orders.draining.into_iter().collect()
}

#[test]
fn the_least_busy_goes_where_one_can_choose_and_the_last_where_not() {
    let members = [member("b-0", 0.9), member("b-1", 0.1), member("b-2", 0.5)];
    assert_eq!(draining(Removal::Marked, &members), ["b-1"]);
    assert_eq!(draining(Removal::Ordinal, &members), ["b-2"]);
    // Ordinals are numbers, not text.
    let members: Vec<Member> = (0..11).map(|n| member(&format!("b-{n}"), 0.5)).collect();
    assert_eq!(draining(Removal::Ordinal, &members), ["b-10"]);
}

#[test]
fn what_cannot_be_emptied_stays_and_is_named() {
    let mut scaler = Scaler::new(settings(), Nanos::ZERO);
    let members = [member("a", 0.5), member("b", 0.6), member("c", 0.7)];
    let situation =
        Situation { replicas: 3, need: Some(2), removal: Removal::Marked, members: &members };
    let mut named = Vec::new();
    for now in (0..200).step_by(5) {
        let orders = scaler.step(seconds(now), &situation);
        assert_eq!(orders.replicas, None);
        named.extend(orders.stuck);
    }
    assert_eq!(named, ["a"]);
}

#[test]
fn a_replica_on_its_way_out_is_left_out_of_the_plan() {
    let mut scaler = Scaler::new(settings(), Nanos::ZERO);
    let mut going = member("a", 0.5);
    going.ending = true;
    let members = [going, member("b", 0.5), member("c", 0.5)];
    let situation =
        Situation { replicas: 3, need: Some(3), removal: Removal::Marked, members: &members };
    let orders = scaler.step(Nanos::ZERO, &situation);
    assert_eq!(orders.draining.into_iter().collect::<Vec<_>>(), ["a"]);
}

#[test]
fn nobody_goes_while_there_are_more_than_asked_for() {
    let mut scaler = Scaler::new(settings(), Nanos::ZERO);
    let mut members = [member("a", 0.5), member("b", 0.6), member("c", 0.7), member("d", 0.8)];
    members[0].empty = true;
    for now in (0..200).step_by(5) {
        let situation =
            Situation { replicas: 3, need: Some(2), removal: Removal::Marked, members: &members };
        let orders = scaler.step(seconds(now), &situation);
        assert_eq!((orders.replicas, orders.draining.len()), (None, 0), "at {now}");
    }
    let situation =
        Situation { replicas: 3, need: Some(2), removal: Removal::Marked, members: &members[..3] };
    assert_eq!(scaler.step(seconds(200), &situation).replicas, Some(2));
}
