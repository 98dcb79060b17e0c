//! The core in virtual time, with a device of fixed step times and checkers that do not know the
//! internals of the core.

use std::collections::{BTreeMap, HashMap, VecDeque};

use base::Random;

use super::*;

/// Time of one step, by model.
const STEP: [Nanos; 3] = [Nanos(1_000), Nanos(5_000), Nanos(20_000)];
const STEPS: [usize; 3] = [4, 10, 50];

#[derive(Clone, Copy, Debug)]
struct OnQueue {
    request: RequestId,
    model: usize,
    next_step: usize,
    step_ends: Nanos,
    since: Nanos,
    preempted: bool,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    model: usize,
    class: Class,
    priority: u32,
    deadline: Nanos,
    arrived: Nanos,
    next_step: usize,
    busy: Nanos,
    end: Option<(Nanos, End)>,
}

/// A device that preempts between steps, in virtual time, and a log of what happened.
struct Simulation {
    core: Core,
    now: Nanos,
    queues: Vec<Option<OnQueue>>,
    seen: HashMap<RequestId, Seen>,
    freed: Vec<ModelId>,
    preemptions: usize,
    actions: Vec<Action>,
}

impl Simulation {
    fn new(options: CoreOptions, queue_capacity: usize) -> Simulation {
        let queues = vec![None; options.queues.shared];
        let mut simulation = Simulation {
            core: Core::new(options),
            now: Nanos::ZERO,
            queues,
            seen: HashMap::new(),
            freed: Vec::new(),
            preemptions: 0,
            actions: Vec::new(),
        };
        for (index, steps) in STEPS.into_iter().enumerate() {
            let model = ModelId(index as u32);
            simulation.event(Event::ModelAdded { model, steps, queue_capacity });
        }
        simulation
    }

    fn event(&mut self, event: Event) {
        let mut actions = std::mem::take(&mut self.actions);
        self.core.step(self.now, event, &mut actions);
        for action in actions.drain(..) {
            self.act(action);
        }
        self.actions = actions;
        self.check_order();
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Launch { queue, request, steps, .. } => {
                assert!(self.queues[queue].is_none(), "launched on a busy queue");
                let seen = &self.seen[&request];
                assert!(seen.end.is_none(), "launched after its end");
                assert_eq!(steps, seen.next_step..STEPS[seen.model], "wrong steps");
                self.queues[queue] = Some(OnQueue {
                    request,
                    model: seen.model,
                    next_step: steps.start,
                    step_ends: self.now + STEP[seen.model],
                    since: self.now,
                    preempted: false,
                });
            }
            Action::Preempt { queue, .. } => {
                self.preemptions += 1;
                self.queues[queue].as_mut().expect("preempted an idle queue").preempted = true;
            }
            Action::End { request, end } => {
                let seen = self.seen.get_mut(&request).expect("ended an unknown request");
                assert!(seen.end.is_none(), "ended twice");
                seen.end = Some((self.now, end));
                if end == End::Done {
                    assert_eq!(seen.next_step, STEPS[seen.model], "done before its last step");
                    assert!(self.now < seen.deadline, "late and done");
                }
            }
            Action::FreeModel { model } => self.freed.push(model),
            other => panic!("{other:?} is not expected"),
        }
    }

    /// While real time waits, no best effort starts or keeps a queue, and real time starts in
    /// order.
    fn check_order(&self) {
        let running: Vec<RequestId> =
            self.queues.iter().flatten().map(|on_queue| on_queue.request).collect();
        let key = |id: &RequestId| {
            let seen = &self.seen[id];
            (seen.priority, seen.deadline, id.order())
        };
        let waiting: Vec<&RequestId> = self
            .seen
            .iter()
            .filter(|(id, seen)| {
                seen.end.is_none() && seen.class == Class::RealTime && !running.contains(id)
            })
            .map(|(id, _)| id)
            .collect();
        if waiting.is_empty() {
            return;
        }
        assert!(self.queues.iter().all(Option::is_some), "real time waits beside an idle queue");
        if self.core.options.best_effort_share_percent == 0 {
            let staying = self.queues.iter().flatten().filter(|on_queue| {
                !on_queue.preempted && self.seen[&on_queue.request].class == Class::BestEffort
            });
            let preempting =
                self.queues.iter().flatten().filter(|on_queue| on_queue.preempted).count();
            assert!(
                staying.count() == 0 || preempting >= waiting.len(),
                "best effort runs while real time waits"
            );
        }
        // A request that started now must not be behind a waiting one.
        for on_queue in self.queues.iter().flatten().filter(|q| q.since == self.now) {
            let seen = &self.seen[&on_queue.request];
            if seen.class == Class::RealTime && seen.arrived < self.now {
                for other in waiting.iter().filter(|id| self.seen[id].arrived < self.now) {
                    assert!(key(&on_queue.request) < key(other), "overtaken inside real time");
                }
            }
        }
    }

    fn arrive(
        &mut self,
        model: usize,
        class: Class,
        priority: u32,
        timeout: Nanos,
    ) -> Option<RequestId> {
        let request = self.core.next_request_id()?;
        let deadline = self.now + timeout;
        let seen = Seen {
            model,
            class,
            priority,
            deadline,
            arrived: self.now,
            next_step: 0,
            busy: Nanos::ZERO,
            end: None,
        };
        self.seen.insert(request, seen);
        let model = ModelId(model as u32);
        self.event(Event::Arrival { request, model, class, priority, deadline });
        Some(request)
    }

    /// Time of the next event.
    fn next_time(&self) -> Option<Nanos> {
        let steps = self.queues.iter().flatten().map(|on_queue| on_queue.step_ends);
        steps.chain(self.core.next_timer()).min()
    }

    fn run_until(&mut self, end: Nanos) {
        while let Some(next) = self.next_time().filter(|next| *next <= end) {
            self.now = self.now.max(next);
            for queue in 0..self.queues.len() {
                if self.queues[queue].is_some_and(|on_queue| on_queue.step_ends <= self.now) {
                    self.finish_step(queue);
                }
            }
            if self.core.next_timer().is_some_and(|timer| timer <= self.now) {
                self.event(Event::Timer);
                assert!(
                    self.core.next_timer().is_none_or(|timer| timer > self.now),
                    "a timer stays due"
                );
            }
        }
        self.now = self.now.max(end);
    }

    fn finish_step(&mut self, queue: usize) {
        let mut on_queue = self.queues[queue].expect("a busy queue");
        on_queue.next_step += 1;
        let seen = self.seen.get_mut(&on_queue.request).expect("a known request");
        seen.next_step = on_queue.next_step;
        seen.busy += STEP[on_queue.model];
        let busy = self.now - on_queue.since;
        if on_queue.next_step == STEPS[on_queue.model] {
            self.queues[queue] = None;
            self.event(Event::SegmentDone { queue, busy });
        } else if on_queue.preempted {
            self.queues[queue] = None;
            self.event(Event::SegmentPreempted {
                queue,
                point: PreemptionPoint::before(on_queue.next_step),
                busy,
            });
        } else {
            on_queue.step_ends = self.now + STEP[on_queue.model];
            self.queues[queue] = Some(on_queue);
        }
    }

    fn ends(&self) -> BTreeMap<String, usize> {
        let mut ends = BTreeMap::new();
        for seen in self.seen.values() {
            *ends.entry(format!("{:?}", seen.end.map(|(_, end)| end))).or_default() += 1;
        }
        ends
    }
}

#[test]
fn real_time_waits_at_most_one_step_of_best_effort() {
    let mut simulation = Simulation::new(CoreOptions::default(), 64);
    simulation.arrive(2, Class::BestEffort, 1, Nanos::MAX);
    simulation.run_until(Nanos(3_000));
    let request = simulation.arrive(0, Class::RealTime, 1, Nanos::MAX).unwrap();
    simulation.run_until(Nanos(10_000_000));
    let (ended, end) = simulation.seen[&request].end.unwrap();
    assert_eq!(end, End::Done);
    // Best effort is inside its first step until 20,000; then the four steps of real time follow.
    assert_eq!(ended, Nanos(20_000 + 4_000));
    assert_eq!(simulation.preemptions, 1);
    assert_eq!(simulation.ends(), BTreeMap::from([("Some(Done)".to_string(), 2)]));
}

#[test]
fn starts_earliest_deadline_first_within_a_priority() {
    let mut simulation = Simulation::new(CoreOptions::default(), 64);
    let order =
        [(2, 900_000), (1, 800_000), (1, 100_000), (1, 500_000)].map(|(priority, timeout)| {
            simulation.arrive(0, Class::RealTime, priority, Nanos(timeout)).unwrap()
        });
    simulation.run_until(Nanos(1_000_000));
    let ended = order.map(|request| simulation.seen[&request].end.unwrap().0);
    // The first one was alone on arrival; then priority 1 by deadline.
    assert_eq!(ended, [Nanos(4_000), Nanos(16_000), Nanos(8_000), Nanos(12_000)]);
}

#[test]
fn ends_late_requests_while_another_runs() {
    let mut simulation = Simulation::new(CoreOptions::default(), 64);
    simulation.arrive(2, Class::RealTime, 1, Nanos::MAX);
    let late = simulation.arrive(0, Class::RealTime, 1, Nanos(7_000)).unwrap();
    simulation.run_until(Nanos(2_000_000));
    assert_eq!(simulation.seen[&late].end, Some((Nanos(7_000), End::DeadlineExceeded)));
}

#[test]
fn respects_queue_and_request_limits() {
    let options = CoreOptions { max_requests: 4, ..CoreOptions::default() };
    let mut simulation = Simulation::new(options, 2);
    let ids: Vec<_> =
        (0..4).map(|_| simulation.arrive(1, Class::BestEffort, 1, Nanos::MAX)).collect();
    // One runs, two wait, the fourth finds the model's queue full and ends at once.
    assert_eq!(simulation.seen[&ids[3].unwrap()].end, Some((Nanos::ZERO, End::QueueFull)));
    assert!(simulation.core.next_request_id().is_some());
    assert!(simulation.core.next_request_id().is_none(), "the global bound holds");
}

#[test]
fn frees_a_removed_model_after_its_last_request() {
    let mut simulation = Simulation::new(CoreOptions::default(), 64);
    simulation.arrive(1, Class::BestEffort, 1, Nanos::MAX);
    simulation.event(Event::ModelRemoved { model: ModelId(1) });
    assert!(simulation.freed.is_empty());
    let refused = simulation.arrive(1, Class::BestEffort, 1, Nanos::MAX).unwrap();
    assert_eq!(simulation.seen[&refused].end.unwrap().1, End::NoSuchModel);
    simulation.run_until(Nanos(1_000_000));
    assert_eq!(simulation.freed, vec![ModelId(1)]);
}

#[test]
fn best_effort_models_share_the_time() {
    let mut simulation = Simulation::new(CoreOptions::default(), 4096);
    for _ in 0..2000 {
        simulation.arrive(1, Class::BestEffort, 1, Nanos::MAX);
        simulation.arrive(2, Class::BestEffort, 1, Nanos::MAX);
    }
    simulation.run_until(Nanos(80_000_000));
    let used = |model| -> u64 {
        simulation.seen.values().filter(|seen| seen.model == model).map(|seen| seen.busy.0).sum()
    };
    let ratio = used(1) as f64 / used(2) as f64;
    assert!((0.9..1.1).contains(&ratio), "time used differs by {ratio}");
}

#[test]
fn best_effort_keeps_its_share_under_saturating_real_time() {
    let options = CoreOptions {
        best_effort_share_percent: 20,
        best_effort_slice: Nanos(100_000),
        ..CoreOptions::default()
    };
    let mut simulation = Simulation::new(options, 1_000_000);
    for _ in 0..4000 {
        simulation.arrive(1, Class::RealTime, 1, Nanos::MAX);
        simulation.arrive(2, Class::BestEffort, 1, Nanos::MAX);
    }
    simulation.run_until(Nanos(100_000_000));
    let used: u64 =
        simulation.seen.values().filter(|seen| seen.model == 2).map(|seen| seen.busy.0).sum();
    let share = used as f64 / 100_000_000.0;
    assert!((0.17..0.25).contains(&share), "best effort got {share}");
}

/// Random loads with cancellations, removals and a drain, with the checks of [`Simulation`].
fn random_load(seed: u64) {
    let mut random = Random::new(seed);
    let options = CoreOptions {
        queues: QueueLayout {
            shared: 1 + random.below(3) as usize,
            real_time: 0,
            best_effort: 0,
            yielding: 0,
        },
        max_requests: 50,
        best_effort_share_percent: [0, 0, 10, 50][random.below(4) as usize],
        best_effort_slice: Nanos(50_000),
        ..CoreOptions::default()
    };
    let mut simulation = Simulation::new(options, 1 + random.below(20) as usize);
    let mut ids = Vec::new();
    for _ in 0..300 {
        match random.below(20) {
            0 if !ids.is_empty() => {
                let index = random.below(ids.len() as u64) as usize;
                simulation.event(Event::Cancel { request: ids[index] });
            }
            1 if simulation.now > Nanos(3_000_000) => {
                simulation.event(Event::ModelRemoved { model: ModelId(random.below(3) as u32) });
            }
            _ => {
                let model = random.below(3) as usize;
                let class = if random.below(2) == 0 { Class::RealTime } else { Class::BestEffort };
                let timeout = match random.below(3) {
                    0 => Nanos::MAX,
                    _ => Nanos(random.below(2_000_000)),
                };
                ids.extend(simulation.arrive(model, class, 1 + random.below(3) as u32, timeout));
            }
        }
        let pause = Nanos(random.below(100_000));
        simulation.run_until(simulation.now + pause);
    }
    simulation.event(Event::Drain);
    simulation.run_until(simulation.now + Nanos(1_000_000_000));
    assert_eq!(simulation.core.pending(), 0, "seed {seed}: something never ended");
    let unfinished = simulation.seen.values().filter(|seen| seen.end.is_none()).count();
    assert_eq!(unfinished, 0, "seed {seed}: {:?}", simulation.ends());
}

#[test]
fn every_request_ends_exactly_once() {
    (0..200).for_each(random_load);
}

/// A core with a real-time model, a mild and a harsh best-effort model that run endlessly, and two
/// best-effort queues.
struct Pair {
    core: Core,
    now: Nanos,
    /// Running request of each best-effort queue.
    running: [Option<RequestId>; 2],
    /// Preemptions of the mild and of the harsh model.
    preemptions_by_model: [usize; 2],
    model_of: HashMap<RequestId, usize>,
    /// By queue, whether it is confined.
    confined: [bool; 2],
    partition: bool,
}

/// A device that confines queues to a partition.
const PARTITION: DeviceCapabilities = DeviceCapabilities {
    sm_partition: true,
    block_budgets: false,
    queue_reset: false,
    input_copies: false,
};

const MILD: usize = 1;
const HARSH: usize = 2;

impl Pair {
    fn new() -> Pair {
        Pair::with(CoreOptions::default())
    }

    fn with(options: CoreOptions) -> Pair {
        let queues = QueueLayout { shared: 0, real_time: 1, best_effort: 2, yielding: 0 };
        let options = CoreOptions { queues, ..options };
        let mut pair = Pair {
            core: Core::with_policy(options.clone(), Box::new(Atoll)),
            now: Nanos::ZERO,
            running: [None; 2],
            preemptions_by_model: [0; 2],
            confined: [false; 2],
            partition: options.capabilities.sm_partition,
            model_of: HashMap::new(),
        };
        for model in 0..3 {
            let model = ModelId(model);
            pair.step(Event::ModelAdded { model, steps: 4, queue_capacity: 10 });
        }
        pair.arrive(MILD, Class::BestEffort);
        pair.arrive(HARSH, Class::BestEffort);
        pair
    }

    fn arrive(&mut self, model: usize, class: Class) {
        let request = self.core.next_request_id().expect("below the limit");
        self.model_of.insert(request, model);
        let (model, deadline) = (ModelId(model as u32), Nanos::MAX);
        self.step(Event::Arrival { request, model, class, priority: 1, deadline });
    }

    /// Feeds the core; preempted work completes at once.
    fn step(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let mut actions = Vec::new();
            self.core.step(self.now, event, &mut actions);
            for action in actions {
                match action {
                    Action::Launch { queue, request, .. } if queue > 0 => {
                        assert_eq!(self.running[queue - 1].replace(request), None);
                    }
                    Action::Confine { queue, confined } => {
                        let before = std::mem::replace(&mut self.confined[queue - 1], confined);
                        assert_ne!(before, confined, "no command is repeated");
                    }
                    Action::Preempt { queue, .. } => {
                        let request = self.running[queue - 1].take().expect("it runs");
                        self.preemptions_by_model[self.model_of[&request] - 1] += 1;
                        let (point, busy) = (PreemptionPoint::before(0), Nanos(1));
                        events.push_back(Event::SegmentPreempted { queue, point, busy });
                    }
                    _ => {}
                }
            }
        }
    }

    /// After so many real-time requests the mild model co-runs and the harsh one does not.
    fn learns_within(mut self, requests: usize) {
        (0..requests).for_each(|_| self.real_time());
        self.preemptions_by_model = [0; 2];
        (0..1_600).for_each(|_| self.real_time());
        let [mild, harsh] = self.preemptions_by_model;
        assert!(mild <= 120, "the mild one was preempted {mild} times of 1600");
        assert!(harsh >= 1_590, "the harsh one was preempted {harsh} times of 1600");
    }

    /// One real-time request, slowed down by what runs beside it.
    fn real_time(&mut self) {
        self.arrive(0, Class::RealTime);
        let beside: Vec<usize> =
            self.running.iter().flatten().map(|request| self.model_of[request]).collect();
        assert!(beside.len() <= 1, "at most one co-runner: {beside:?}");
        if self.partition {
            let free = |(run, confined): (&Option<RequestId>, &bool)| run.is_some() && !confined;
            let free = self.running.iter().zip(&self.confined).any(free);
            assert!(!free, "the co-runner is confined");
        }
        let busy = match beside[..] {
            [] => 100_000,
            [MILD] => 100_500,
            _ => 150_000,
        };
        self.now += Nanos(busy);
        self.step(Event::SegmentDone { queue: 0, busy: Nanos(busy) });
        assert!(self.running.iter().all(Option::is_some), "best effort resumes afterwards");
        assert_eq!(self.confined, [false; 2], "and is not confined");
        self.now += Nanos(50_000);
    }
}

#[test]
fn keeps_an_admitted_co_runner() {
    Pair::new().learns_within(20_000);
}

#[test]
fn confines_the_co_runner_to_the_partition_and_releases_it() {
    Pair::with(CoreOptions { capabilities: PARTITION, ..CoreOptions::default() })
        .learns_within(4_000);
}

#[test]
fn admits_no_pair_without_an_allowed_slowdown() {
    let options =
        CoreOptions { capabilities: PARTITION, max_rt_slowdown: 0.0, ..CoreOptions::default() };
    let mut pair = Pair::with(options);
    for round in 1..2_000 {
        pair.real_time();
        assert_eq!(pair.preemptions_by_model, [round; 2]);
    }
}

/// Launches (with queue) and ends (`None`) since the last call, with their requests.
fn seen(core: &mut Core, now: u64, event: Event) -> Vec<(Option<usize>, RequestId)> {
    let mut actions = Vec::new();
    core.step(Nanos(now), event, &mut actions);
    let seen = |action: Action| match action {
        Action::Launch { queue, request, .. } => Some((Some(queue), request)),
        Action::End { request, .. } => Some((None, request)),
        _ => None,
    };
    actions.into_iter().filter_map(seen).collect()
}

fn real_time(core: &mut Core, model: u32, deadline: u64) -> (RequestId, Event) {
    let request = core.next_request_id().expect("below the limit");
    let (model, class, deadline) = (ModelId(model), Class::RealTime, Nanos(deadline));
    (request, Event::Arrival { request, model, class, priority: 1, deadline })
}

#[test]
fn runs_only_one_real_time_model_at_a_time() {
    let queues = QueueLayout { shared: 0, real_time: 3, best_effort: 1, yielding: 0 };
    let mut core = Core::new(CoreOptions { queues, ..CoreOptions::default() });
    for model in [0, 1].map(ModelId) {
        seen(&mut core, 0, Event::ModelAdded { model, steps: 1, queue_capacity: 9 });
    }
    seen(&mut core, 0, Event::ModelConcurrency { model: ModelId(0), max_running: 2 });
    let arrive = |core: &mut Core, model: u32| {
        let (request, event) = real_time(core, model, u64::MAX);
        (request, seen(core, 1, event))
    };
    let (one, launched) = arrive(&mut core, 0);
    assert_eq!(launched, [(Some(0), one)]);
    let (two, launched) = arrive(&mut core, 0);
    assert_eq!(launched, [(Some(1), two)]);
    let (three, launched) = arrive(&mut core, 0);
    assert_eq!(launched, [], "two at once is its concurrency");
    let (other, launched) = arrive(&mut core, 1);
    assert_eq!(launched, []);
    let done = |queue| Event::SegmentDone { queue, busy: Nanos(1) };
    assert_eq!(seen(&mut core, 2, done(0)), [(None, one), (Some(0), three)]);
    assert_eq!(seen(&mut core, 3, done(1)), [(None, two)], "another model waits for the device");
    assert_eq!(seen(&mut core, 4, done(0)), [(None, three), (Some(0), other)]);
    let (last, launched) = arrive(&mut core, 1);
    assert_eq!(launched, [], "one at a time by default");
    assert_eq!(seen(&mut core, 5, done(0)), [(None, other), (Some(0), last)]);
}

#[test]
fn a_batch_has_the_latest_deadline_of_its_members() {
    let mut core = Core::new(CoreOptions::default());
    let model = ModelId(0);
    seen(&mut core, 0, Event::ModelAdded { model, steps: 1, queue_capacity: 9 });
    let (job, event) = real_time(&mut core, 0, 100);
    assert_eq!(seen(&mut core, 1, event), [(Some(0), job)]);
    assert_eq!(core.next_timer(), Some(Nanos(100)));
    let deadline = Nanos(300);
    seen(&mut core, 2, Event::BatchFormed { request: job, rows: 4, deadline });
    assert_eq!(core.next_timer(), Some(Nanos(300)));
    assert_eq!(seen(&mut core, 150, Event::Timer), []);
    let mut actions = Vec::new();
    core.step(Nanos(200), Event::SegmentDone { queue: 0, busy: Nanos(199) }, &mut actions);
    assert_eq!(actions, [Action::End { request: job, end: End::Done }]);
    assert_eq!(core.next_timer(), None);
}

#[test]
fn best_effort_is_preempted_for_announced_requests() {
    let mut pair = Pair::new();
    pair.step(Event::ArrivalExpected { model: ModelId(0) });
    assert_eq!(
        (pair.running, pair.preemptions_by_model),
        ([None; 2], [1, 1]),
        "both are preempted, and none starts"
    );
    // It never arrives.
    pair.step(Event::ExpectationEnded);
    assert!(pair.running.iter().all(Option::is_some), "best effort resumes");
    // Two are announced; the first arrives and is done before the second arrives.
    pair.step(Event::ArrivalExpected { model: ModelId(0) });
    pair.step(Event::ArrivalExpected { model: ModelId(0) });
    pair.arrive(0, Class::RealTime);
    pair.step(Event::ExpectationEnded);
    assert_eq!(pair.running, [None; 2]);
    pair.step(Event::SegmentDone { queue: 0, busy: Nanos(1) });
    assert_eq!(pair.running, [None; 2], "one is still announced");
    pair.step(Event::ExpectationEnded);
    assert!(pair.running.iter().all(Option::is_some));
    // One too many has no effect.
    pair.step(Event::ExpectationEnded);
    assert!(pair.running.iter().all(Option::is_some));
}

#[test]
fn best_effort_waits_until_real_time_replies_are_sent() {
    let queues = QueueLayout { shared: 0, real_time: 1, best_effort: 1, yielding: 0 };
    let model = ModelId(0);
    let done = |queue| Event::SegmentDone { queue, busy: Nanos(1) };
    for resumes in [Event::RepliesSent, Event::Timer] {
        let options =
            CoreOptions { queues, reply_before_best_effort: true, ..CoreOptions::default() };
        let mut core = Core::with_policy(options, Box::new(Atoll));
        seen(&mut core, 0, Event::ModelAdded { model, steps: 1, queue_capacity: 9 });
        let (one, event) = real_time(&mut core, 0, u64::MAX);
        assert_eq!(seen(&mut core, 1, event), [(Some(0), one)]);
        let (two, event) = real_time(&mut core, 0, u64::MAX);
        assert_eq!(seen(&mut core, 2, event), []);
        let waits = core.next_request_id().expect("below the limit");
        let (class, deadline) = (Class::BestEffort, Nanos::MAX);
        let event = Event::Arrival { request: waits, model, class, priority: 1, deadline };
        assert_eq!(seen(&mut core, 3, event), []);
        assert_eq!(seen(&mut core, 4, done(0)), [(None, one), (Some(0), two)]);
        assert!(!core.awaits_replies(), "real time continues, and best effort waits for that");
        assert_eq!(seen(&mut core, 5, done(0)), [(None, two)]);
        assert!(core.awaits_replies());
        assert_eq!(seen(&mut core, 6, resumes), [(Some(1), waits)]);
        assert!(!core.awaits_replies());
        assert_eq!(seen(&mut core, 7, done(1)), [(None, waits)]);
        assert!(!core.awaits_replies(), "best effort waits for no reply");
        let (last, event) = real_time(&mut core, 0, u64::MAX);
        assert_eq!(seen(&mut core, 8, event), [(Some(0), last)]);
        assert_eq!(seen(&mut core, 9, done(0)), [(None, last)]);
        assert!(!core.awaits_replies(), "nothing waits");
    }
}

/// One fast real-time queue, one best-effort queue and one preemptible real-time queue, on a device
/// that takes a while to preempt.
struct PriorityHarness {
    core: Core,
    now: Nanos,
    /// By queue: the request, its remaining time, and whether it is preempted.
    running: [Option<(RequestId, u64, bool)>; 3],
    /// Remaining time of every pending request.
    rest: HashMap<RequestId, u64>,
    ended: Vec<(RequestId, End, Nanos)>,
}

/// Time of a run, and of a preemption.
const RUN: u64 = 1_000;
const PREEMPTION: u64 = 20;

impl PriorityHarness {
    fn new() -> PriorityHarness {
        let queues = QueueLayout { shared: 0, real_time: 1, best_effort: 1, yielding: 1 };
        let options = CoreOptions { queues, ..CoreOptions::default() };
        let mut harness = PriorityHarness {
            core: Core::with_policy(options, Box::new(Atoll)),
            now: Nanos::ZERO,
            running: [None; 3],
            rest: HashMap::new(),
            ended: Vec::new(),
        };
        for model in [0, 1].map(ModelId) {
            harness.step(Event::ModelAdded { model, steps: 4, queue_capacity: 1_000 });
        }
        harness
    }

    fn arrive(&mut self, model: u32, priority: u32, deadline: u64) -> RequestId {
        let request = self.core.next_request_id().expect("below the limit");
        self.rest.insert(request, RUN);
        let (model, class, deadline) = (ModelId(model), Class::RealTime, Nanos(deadline));
        self.step(Event::Arrival { request, model, class, priority, deadline });
        request
    }

    fn step(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.core.step(self.now, event, &mut actions);
        for action in actions {
            match action {
                Action::Launch { queue, request, .. } => {
                    let rest = self.rest[&request];
                    assert!(self.running[queue].replace((request, rest, false)).is_none());
                }
                Action::Preempt { queue, .. } => {
                    assert_eq!(queue, 2, "only the preemptible queue is preempted");
                    let running = self.running[queue].as_mut().expect("it runs");
                    (running.1, running.2) = (running.1.min(PREEMPTION), true);
                }
                Action::End { request, end } => {
                    self.rest.remove(&request);
                    self.ended.push((request, end, self.now));
                }
                _ => {}
            }
        }
        let staying = self.running.iter().flatten().filter(|(_, _, preempted)| !preempted).count();
        assert!(staying <= 1, "real time runs alone");
    }

    /// Runs the device until `until` or until it is idle; preempted work keeps its progress.
    fn run(&mut self, until: u64) {
        loop {
            let remaining = |queue: &usize| self.running[*queue].map(|(_, rest, _)| rest);
            let soonest = (0..3).filter(|queue| remaining(queue).is_some()).min_by_key(remaining);
            let Some(queue) = soonest else { break };
            let (request, rest, preempted) = self.running[queue].expect("it runs");
            let slack = Nanos(until) - self.now;
            let passed = rest.min(slack.0);
            self.now += Nanos(passed);
            for running in self.running.iter_mut().flatten() {
                running.1 -= passed;
                if let Some(rest) = self.rest.get_mut(&running.0) {
                    *rest -= passed.min(*rest);
                }
            }
            if passed < rest {
                return;
            }
            self.running[queue] = None;
            let busy = Nanos(RUN);
            match preempted && self.rest.get(&request).is_some_and(|rest| *rest > 0) {
                true => self.step(Event::SegmentPreempted {
                    queue,
                    point: PreemptionPoint::before(1),
                    busy,
                }),
                false => self.step(Event::SegmentDone { queue, busy }),
            }
        }
        if until < u64::MAX {
            self.now = Nanos(until);
        }
    }

    fn end_of(&self, request: RequestId) -> (End, u64) {
        let of = self.ended.iter().find(|(ended, ..)| *ended == request);
        of.map(|(_, end, at)| (*end, at.0)).expect("it has ended")
    }
}

#[test]
fn higher_priority_preempts_real_time() {
    let mut harness = PriorityHarness::new();
    // Until a higher one arrives, a priority counts as the highest.
    let first = harness.arrive(0, 5, u64::MAX);
    assert!(harness.running[0].is_some());
    let urgent = harness.arrive(1, 1, u64::MAX);
    harness.run(u64::MAX);
    assert_eq!((harness.end_of(first).1, harness.end_of(urgent).1), (RUN, 2 * RUN));
    let at = harness.now.0;
    let low = harness.arrive(0, 5, u64::MAX);
    assert!(harness.running[2].is_some(), "it may be preempted");
    harness.run(at + 100);
    let urgent = harness.arrive(1, 1, u64::MAX);
    harness.run(u64::MAX);
    assert_eq!(harness.end_of(urgent), (End::Done, at + 100 + RUN), "it starts at once");
    let redone = RUN - 100 - PREEMPTION;
    assert_eq!(harness.end_of(low), (End::Done, at + 100 + RUN + redone), "no work is lost");
}

#[test]
fn preempts_real_time_only_to_save_a_deadline() {
    let mut harness = PriorityHarness::new();
    for model in [0, 1] {
        for _ in 0..40 {
            harness.arrive(model, 1, u64::MAX);
            harness.run(u64::MAX);
        }
    }
    let mut submitted = |slack: u64| {
        let at = harness.now.0;
        let low = harness.arrive(0, 5, u64::MAX);
        harness.run(at + 100);
        let urgent = harness.arrive(1, 1, at + 100 + slack);
        let stays = harness.running[2].is_some_and(|(_, _, preempted)| !preempted);
        harness.run(u64::MAX);
        assert_eq!(harness.end_of(low).0, End::Done);
        (stays, harness.end_of(urgent).0)
    };
    assert_eq!(submitted(3 * RUN), (true, End::Done), "there is time to wait");
    assert_eq!(submitted(RUN + 200), (false, End::Done), "it would be late behind the other");
    let (stays, _) = submitted(RUN / 2);
    assert!(stays, "it is late in any case");
}

#[test]
fn every_request_ends_once_with_priorities() {
    for seed in 0..40 {
        let mut random = Random::new(seed);
        let mut harness = PriorityHarness::new();
        let mut submitted = Vec::new();
        for _ in 0..200 {
            let deadline = match random.below(3) {
                0 => harness.now.0 + RUN / 2 + random.below(6 * RUN),
                _ => u64::MAX,
            };
            let (model, priority) = (random.below(2) as u32, 1 + random.below(3) as u32);
            submitted.push((harness.arrive(model, priority, deadline), deadline));
            let until = harness.now.0 + random.below(2 * RUN);
            harness.run(until);
        }
        harness.run(u64::MAX);
        for (request, deadline) in submitted {
            let ends = harness.ended.iter().filter(|(ended, ..)| *ended == request).count();
            assert_eq!(ends, 1, "seed {seed}: every request ends once");
            let (end, at) = harness.end_of(request);
            assert!(end == End::Done || at >= deadline, "seed {seed}: {end:?} at {at}");
        }
        assert!(harness.rest.is_empty() && harness.running == [None; 3], "seed {seed}");
    }
}
