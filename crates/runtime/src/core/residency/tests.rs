//! More models than memory, in virtual time: a device that loads one model after another, and a
//! checker that sees only events and actions.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use base::{Nanos, Random};
use device::DeviceCapabilities;
use model::config::Class;

use crate::core::{
    Action, Core, CoreOptions, End, Event, ModelId, QueueLayout, RequestId, SimAction,
};
use crate::policy::PreemptionPoint;

const STEPS: usize = 10;
const MEMORY: u64 = 1_000;
const BYTE: Nanos = Nanos(10_000);

/// A model as seen from outside.
#[derive(Clone, Debug, Default)]
struct ModelRecord {
    bytes: u64,
    pinned: bool,
    /// Bytes it holds, from its load action to its evict action.
    held: u64,
    runnable: bool,
    running: usize,
    grown: bool,
    removed: bool,
}

/// Checks the memory budget.
#[derive(Default)]
struct Checker {
    models: BTreeMap<u32, ModelRecord>,
    max_held: u64,
}

impl Checker {
    fn held(&self) -> u64 {
        self.models.values().map(|model| model.held).sum()
    }

    fn load(&mut self, model: ModelId) {
        let known = self.models.get_mut(&model.0).expect("a known model");
        assert_eq!(known.held, 0, "{model:?} is loaded twice");
        (known.held, known.runnable, known.grown) = (known.bytes, false, false);
        self.max_held = self.max_held.max(self.held());
        assert!(self.held() <= MEMORY, "{} of {MEMORY} bytes are held", self.held());
    }

    fn evict(&mut self, model: ModelId) {
        let known = self.models.get_mut(&model.0).expect("a known model");
        assert!(known.held > 0, "{model:?} is evicted and not there");
        assert_eq!(known.running, 0, "{model:?} is evicted while it runs");
        assert!(!known.pinned || known.removed || known.grown, "{model:?} is pinned and evicted");
        (known.held, known.runnable) = (0, false);
    }

    fn launch(&mut self, model: ModelId) {
        let known = self.models.get_mut(&model.0).expect("a known model");
        assert!(known.runnable, "{model:?} runs without its weights");
        assert!(!known.grown, "{model:?} runs without what was added to its weights");
        known.running += 1;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Arrives(u32, u64, u8),
    Ends(usize, u64),
}

struct Simulation {
    core: Core,
    now: Nanos,
    random: Random,
    checker: Checker,
    /// Future events; the number makes them unique.
    due: BTreeSet<(Nanos, u64, Due)>,
    number: u64,
    /// Loads and evictions so far, by model: reports of an earlier load are void.
    orders: HashMap<u32, u64>,
    copying_until: Nanos,
    queues: Vec<Option<(RequestId, ModelId, u64)>>,
    open: HashMap<RequestId, (ModelId, Nanos)>,
    ended: HashMap<End, usize>,
    longest: Nanos,
    refuse_percent: u64,
    loads: usize,
    urgent_loads: usize,
    step_time: Nanos,
}

impl Simulation {
    fn new(seed: u64, queues: QueueLayout) -> Simulation {
        let options = CoreOptions {
            // Padding, as on the simulated GPU.
            capabilities: DeviceCapabilities {
                block_budgets: true,
                ..DeviceCapabilities::default()
            },
            queues,
            max_requests: 4_096,
            memory_bytes: Some(MEMORY),
            max_concurrent_loads: 2,
            load_patience: Nanos::from_millis(5),
            drain_after: Nanos::from_millis(50),
            ..CoreOptions::default()
        };
        let count = queues.shared + queues.real_time + queues.best_effort;
        Simulation {
            core: Core::new(options),
            now: Nanos::ZERO,
            random: Random::new(seed),
            checker: Checker::default(),
            due: BTreeSet::new(),
            number: 0,
            orders: HashMap::new(),
            copying_until: Nanos::ZERO,
            queues: vec![None; count],
            open: HashMap::new(),
            ended: HashMap::new(),
            longest: Nanos::ZERO,
            refuse_percent: 0,
            loads: 0,
            urgent_loads: 0,
            step_time: Nanos::from_micros(200),
        }
    }

    fn add(&mut self, model: u32, bytes: u64, pinned: bool) {
        let id = ModelId(model);
        self.checker.models.insert(model, ModelRecord { bytes, pinned, ..ModelRecord::default() });
        self.feed(Event::ModelAdded { model: id, steps: STEPS, queue_capacity: 64 });
        self.feed(Event::ModelWeights { model: id, bytes, pinned });
    }

    fn submit(&mut self, model: u32, class: Class, deadline: Nanos) -> Option<RequestId> {
        let request = self.core.next_request_id()?;
        let model = ModelId(model);
        self.open.insert(request, (model, self.now));
        self.feed(Event::Arrival { request, model, class, priority: 1, deadline });
        Some(request)
    }

    fn later(&mut self, after: Nanos, due: Due) {
        self.number += 1;
        self.due.insert((self.now + after, self.number, due));
    }

    fn feed(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.core.step(self.now, event, &mut actions);
        for action in actions {
            self.act(action);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Load { model, urgent } => {
                self.urgent_loads += usize::from(urgent);
                self.load(model);
            }
            Action::Evict { model } => {
                self.checker.evict(model);
                *self.orders.entry(model.0).or_default() += 1;
            }
            Action::Launch { queue, request, steps, .. } => {
                let (model, _) = self.open[&request];
                self.checker.launch(model);
                assert!(self.queues[queue].is_none(), "a queue runs two");
                self.number += 1;
                self.queues[queue] = Some((request, model, self.number));
                let time = Nanos(self.step_time.0 * steps.len() as u64);
                self.later(time, Due::Ends(queue, self.number));
            }
            Action::Preempt { queue, .. } => {
                if let Some((_, _, number)) = self.queues[queue] {
                    self.later(Nanos(20_000), Due::Ends(queue, number));
                }
            }
            Action::End { request, end } => {
                let (_, since) = self.open.remove(&request).expect("ends once");
                self.longest = self.longest.max(self.now - since);
                *self.ended.entry(end).or_default() += 1;
            }
            Action::FreeModel { model } => {
                let known = self.checker.models.remove(&model.0).expect("a known model");
                assert_eq!((known.held, known.running), (0, 0), "bytes of {model:?} are lost");
            }
            // Padding does not affect memory.
            Action::Sim(SimAction::SetBudget { .. } | SimAction::Pad { .. }) => {}
            other => panic!("{other:?} was not expected"),
        }
    }

    fn load(&mut self, model: ModelId) {
        self.checker.load(model);
        self.loads += 1;
        let order = self.orders.entry(model.0).or_default();
        *order += 1;
        let order = *order;
        let bytes = self.checker.models[&model.0].held;
        let begins = self.copying_until.max(self.now);
        if self.random.below(100) < self.refuse_percent {
            return self.later(begins - self.now, Due::Arrives(model.0, order, 2));
        }
        self.copying_until = begins + Nanos(BYTE.0 * bytes);
        let whole = self.copying_until - self.now;
        let part = Nanos(whole.0 - Nanos(BYTE.0 * bytes).0 / 3);
        if self.random.below(2) == 0 {
            self.later(part, Due::Arrives(model.0, order, 0));
        }
        self.later(whole, Due::Arrives(model.0, order, 1));
    }

    /// Processes the next event; `false` when there is none.
    fn step(&mut self) -> bool {
        let next = self.due.first().map(|(at, ..)| *at);
        let timer = self.core.next_timer();
        match (next, timer) {
            (None, None) => return false,
            (Some(at), timer) if timer.is_none_or(|timer| at <= timer) => {
                self.now = self.now.max(at);
                let Some((_, _, due)) = self.due.pop_first() else { return false };
                self.happen(due);
            }
            (_, Some(at)) => {
                self.now = self.now.max(at);
                self.feed(Event::Timer);
            }
            (Some(_), None) => return false,
        }
        true
    }

    fn happen(&mut self, due: Due) {
        match due {
            Due::Arrives(model, order, what) => {
                if self.orders.get(&model) != Some(&order) {
                    return;
                }
                let id = ModelId(model);
                let known = self.checker.models.get_mut(&model).expect("a known model");
                known.runnable = what < 2;
                match what {
                    0 => self.feed(Event::LoadRunnable { model: id }),
                    1 => self.feed(Event::LoadDone { model: id }),
                    _ => {
                        known.held = 0;
                        *self.orders.entry(model).or_default() += 1;
                        self.feed(Event::LoadFailed { model: id });
                    }
                }
            }
            Due::Ends(queue, number) => {
                if self.queues[queue].is_none_or(|(_, _, running)| running != number) {
                    return;
                }
                let (_, model, _) = self.queues[queue].take().expect("checked above");
                self.checker.models.get_mut(&model.0).expect("it runs").running -= 1;
                let busy = Nanos(self.step_time.0 * STEPS as u64);
                let preempted = self.random.below(4) == 0;
                match preempted {
                    true => {
                        let point =
                            PreemptionPoint::before(self.random.below(STEPS as u64) as usize);
                        self.feed(Event::SegmentPreempted {
                            queue,
                            point,
                            busy: Nanos(busy.0 / 2),
                        });
                    }
                    false => self.feed(Event::SegmentDone { queue, busy }),
                }
            }
        }
    }

    fn run_until(&mut self, end: Nanos) {
        while self.due.first().is_some_and(|(at, ..)| *at <= end)
            || self.core.next_timer().is_some_and(|at| at <= end)
        {
            if !self.step() {
                break;
            }
        }
        self.now = self.now.max(end);
    }

    /// Runs until all requests have ended; fails if one never does.
    fn finish(&mut self) {
        for _ in 0..1_000_000 {
            if self.open.is_empty() || !self.step() {
                break;
            }
        }
        let (open, memory) = (&self.open, self.core.memory());
        assert!(open.is_empty(), "{open:?} never end: {memory:?}, {:?}", self.checker.models);
    }
}

fn layouts(seed: u64) -> QueueLayout {
    match seed % 3 {
        0 => QueueLayout { shared: 1, real_time: 0, best_effort: 0, yielding: 0 },
        1 => QueueLayout { shared: 4, real_time: 0, best_effort: 0, yielding: 0 },
        _ => QueueLayout { shared: 0, real_time: 1, best_effort: 3, yielding: 0 },
    }
}

fn class(random: &mut Random) -> Class {
    if random.below(3) == 0 { Class::RealTime } else { Class::BestEffort }
}

/// Random models, requests, cancellations, removals, growth and refusals.
fn random_run(seed: u64) -> Simulation {
    let mut simulation = Simulation::new(seed, layouts(seed));
    let mut random = Random::new(seed ^ 0x5eed);
    let models = 3 + random.below(12) as u32;
    simulation.refuse_percent = if seed.is_multiple_of(4) { 20 } else { 0 };
    for model in 0..models {
        let pinned = model == 0 && random.below(2) == 0;
        simulation.add(model, 50 + random.below(250), pinned);
    }
    let mut submitted: Vec<RequestId> = Vec::new();
    let mut next = models;
    for _ in 0..400 {
        let pause = Nanos(random.below(3_000_000));
        let until = simulation.now + pause;
        simulation.run_until(until);
        let there: Vec<u32> = simulation.checker.models.keys().copied().collect();
        let any = |random: &mut Random| there[random.below(there.len() as u64) as usize];
        match random.below(40) {
            0 => {
                let model = any(&mut random);
                simulation.checker.models.get_mut(&model).expect("it is there").removed = true;
                simulation.feed(Event::ModelRemoved { model: ModelId(model) });
                simulation.add(next, 50 + random.below(250), false);
                next += 1;
            }
            1 => {
                let model = any(&mut random);
                let known = simulation.checker.models.get_mut(&model).expect("it is there");
                if !known.removed && known.bytes < 300 {
                    known.bytes += 20;
                    known.grown = known.held > 0;
                    let event = Event::ModelWeights {
                        model: ModelId(model),
                        bytes: known.bytes,
                        pinned: known.pinned,
                    };
                    simulation.feed(event);
                }
            }
            2 => {
                let model = ModelId(any(&mut random));
                simulation.feed(Event::Preload { model });
            }
            3 if !submitted.is_empty() => {
                let request = submitted[random.below(submitted.len() as u64) as usize];
                simulation.feed(Event::Cancel { request });
            }
            _ => {
                let late = random.below(10) == 0;
                let deadline =
                    if late { simulation.now + Nanos::from_millis(20) } else { Nanos::MAX };
                let class = class(&mut random);
                submitted.extend(simulation.submit(any(&mut random), class, deadline));
            }
        }
    }
    simulation.finish();
    simulation
}

#[test]
fn stays_within_memory_under_random_loads() {
    let mut loads = 0;
    let mut done = 0;
    for seed in 0..400 {
        let simulation = random_run(seed);
        loads += simulation.loads;
        done += simulation.ended.get(&End::Done).copied().unwrap_or(0);
        let failed = simulation.ended.get(&End::Failed).copied().unwrap_or(0);
        if simulation.refuse_percent == 0 {
            assert_eq!(failed, 0, "seed {seed}: requests fail though everything fits one by one");
        }
        assert!(
            simulation.longest < Nanos::from_millis(20_000),
            "seed {seed}: {}",
            simulation.longest
        );
    }
    assert!(loads > 10_000 && done > 50_000, "{loads} loads and {done} requests try little");
}

#[test]
fn equal_seeds_give_equal_decisions() {
    let trace = |seed| {
        let simulation = random_run(seed);
        let mut ended: Vec<_> =
            simulation.ended.iter().map(|(end, n)| (format!("{end:?}"), *n)).collect();
        ended.sort();
        (simulation.loads, simulation.now, simulation.longest, ended)
    };
    assert_eq!(trace(17), trace(17));
}

/// Requests for `resident` saturate every queue; the time until one request of another model is
/// done.
fn wait_beside_a_busy_model(queues: QueueLayout, class: Class) -> Nanos {
    let mut simulation = Simulation::new(1, queues);
    simulation.add(0, 700, false);
    simulation.add(1, 700, false);
    for _ in 0..16 {
        simulation.submit(0, Class::BestEffort, Nanos::MAX);
    }
    simulation.run_until(Nanos::from_millis(100));
    let submitted = simulation.now;
    let request = simulation.submit(1, class, Nanos::MAX).expect("below the limit");
    while simulation.open.contains_key(&request) {
        assert!(simulation.now < submitted + Nanos::from_millis(10_000), "it starves");
        while simulation.open.len() < 16 {
            simulation.submit(0, Class::BestEffort, Nanos::MAX);
        }
        assert!(simulation.step());
    }
    simulation.now - submitted
}

#[test]
fn no_model_starves_beside_one_that_is_always_in_use() {
    for queues in [layouts(0), layouts(1), layouts(2)] {
        for class in [Class::RealTime, Class::BestEffort] {
            let waited = wait_beside_a_busy_model(queues, class);
            assert!(waited < Nanos::from_millis(200), "{queues:?} {class:?}: {waited}");
        }
    }
}

#[test]
fn best_effort_is_loaded_while_real_time_swaps_endlessly() {
    let mut simulation = Simulation::new(3, layouts(2));
    for model in 0..4 {
        simulation.add(model, 600, false);
    }
    let request = simulation.submit(3, Class::BestEffort, Nanos::MAX).expect("below the limit");
    let mut model = 0;
    while simulation.open.contains_key(&request) {
        assert!(simulation.now < Nanos::from_millis(10_000), "it starves");
        while simulation.open.len() < 4 {
            simulation.submit(model % 3, Class::RealTime, Nanos::MAX);
            model += 1;
        }
        assert!(simulation.step());
    }
}

#[test]
fn loads_pinned_models_at_once_and_keeps_them() {
    let mut simulation = Simulation::new(5, layouts(1));
    simulation.add(0, 600, true);
    simulation.run_until(Nanos::from_millis(50));
    assert!(simulation.core.weights_of(ModelId(0)).is_some_and(|(_, there)| there));
    simulation.add(1, 300, false);
    simulation.add(2, 300, false);
    // Too large beside the pinned models: refused at once.
    simulation.add(3, 500, false);
    for round in 0..20 {
        simulation.submit(1 + round % 2, Class::BestEffort, Nanos::MAX);
        let now = simulation.now;
        simulation.run_until(now + Nanos::from_millis(20));
    }
    simulation.submit(3, Class::RealTime, Nanos::MAX);
    simulation.finish();
    assert_eq!(simulation.ended.get(&End::Failed), Some(&1));
    assert_eq!(simulation.ended.get(&End::Done), Some(&20));
    assert!(simulation.core.weights_of(ModelId(0)).is_some_and(|(_, there)| there));
}

#[test]
fn preload_uses_free_memory_and_evicts_nothing() {
    let mut simulation = Simulation::new(7, layouts(1));
    for model in 0..5 {
        simulation.add(model, 300, false);
        simulation.feed(Event::Preload { model: ModelId(model) });
    }
    simulation.run_until(Nanos::from_millis(100));
    let there: Vec<bool> = (0..5)
        .map(|model| simulation.core.weights_of(ModelId(model)).is_some_and(|w| w.1))
        .collect();
    assert_eq!(there, [true, true, true, false, false]);
    assert_eq!(simulation.loads, 3);
}

#[test]
fn loads_for_real_time_are_urgent() {
    let mut simulation = Simulation::new(8, layouts(1));
    for model in 0..3 {
        simulation.add(model, 300, false);
    }
    simulation.feed(Event::Preload { model: ModelId(0) });
    simulation.submit(1, Class::BestEffort, Nanos::MAX);
    simulation.finish();
    assert_eq!((simulation.loads, simulation.urgent_loads), (2, 0));
    simulation.submit(2, Class::RealTime, Nanos::MAX);
    simulation.finish();
    assert_eq!((simulation.loads, simulation.urgent_loads), (3, 1));
}

#[test]
fn evicts_least_recently_used() {
    let mut simulation = Simulation::new(9, layouts(0));
    for model in 0..4 {
        simulation.add(model, 300, false);
    }
    for model in [0, 1, 2, 0, 3] {
        simulation.submit(model, Class::BestEffort, Nanos::MAX);
        simulation.finish();
    }
    let there: Vec<bool> = (0..4)
        .map(|model| simulation.core.weights_of(ModelId(model)).is_some_and(|w| w.1))
        .collect();
    assert_eq!(there, [true, false, true, true]);
}

#[test]
fn retries_a_refused_load_while_others_hold_memory() {
    let mut simulation = Simulation::new(11, layouts(1));
    simulation.add(0, 300, false);
    simulation.add(1, 300, false);
    simulation.submit(0, Class::BestEffort, Nanos::MAX);
    simulation.finish();
    simulation.refuse_percent = 100;
    let request = simulation.submit(1, Class::BestEffort, Nanos::MAX).expect("below the limit");
    let now = simulation.now;
    simulation.run_until(now + Nanos::from_millis(30));
    // The other model was evicted for it; with no other to evict, it fails with the device's
    // reason.
    assert!(!simulation.open.contains_key(&request));
    assert_eq!(simulation.ended.get(&End::Failed), Some(&1));
    simulation.refuse_percent = 0;
    simulation.submit(1, Class::BestEffort, Nanos::MAX);
    simulation.submit(0, Class::BestEffort, Nanos::MAX);
    simulation.finish();
    assert_eq!(simulation.ended.get(&End::Done), Some(&3));
}
