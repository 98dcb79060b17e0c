//! The batcher in virtual time under random loads, with a checker that does not know its internals.

use std::collections::HashMap;

use base::Random;
use device::PreemptionLevel;
use model::config::{Batching, BatchingPolicy, ModelConfig};

use super::*;
use crate::core::{Core, CoreOptions};

/// A request, for the checker.
#[derive(Clone, Debug)]
struct Request {
    key: GroupKey,
    rows: usize,
    arrived: Nanos,
    deadline: Nanos,
    formed: Option<RequestId>,
    ended: bool,
}

/// Follows every request from arrival to end.
#[derive(Default)]
struct Checker {
    requests: Vec<Request>,
    waiting: Vec<usize>,
}

impl Checker {
    fn arrived(&mut self, key: GroupKey, rows: usize, arrived: Nanos, deadline: Nanos) {
        self.waiting.push(self.requests.len());
        self.requests.push(Request { key, rows, arrived, deadline, formed: None, ended: false });
    }

    /// A batch was formed of these.
    fn formed(&mut self, now: Nanos, job: RequestId, members: &[usize], batch_max: usize) {
        let first = self.requests[members[0]].clone();
        let rows: usize = members.iter().map(|index| self.requests[*index].rows).sum();
        assert!(rows <= batch_max || members.len() == 1, "{rows} rows of at most {batch_max}");
        for (position, index) in members.iter().enumerate() {
            let request = &mut self.requests[*index];
            assert_eq!(request.key, first.key, "two groups in one batch");
            assert!(!request.ended && request.formed.is_none(), "request {index} runs twice");
            assert!(request.deadline >= now, "request {index} is late already");
            request.formed = Some(job);
            let at = self.waiting.iter().position(|other| other == index).expect("it waited");
            self.waiting.remove(at);
            assert!(!members[..position].contains(index));
        }
        // No request of the group that goes first was skipped.
        let last = &self.requests[*members.last().expect("a member")];
        let order = |request: &Request| match request.key.class {
            Class::RealTime => (request.deadline, request.arrived),
            Class::BestEffort => (Nanos::ZERO, request.arrived),
        };
        for index in &self.waiting {
            let other = &self.requests[*index];
            let overtaken = other.key == first.key && order(other) < order(last);
            assert!(!overtaken, "request {index} was overtaken");
        }
    }

    fn ended(&mut self, index: usize) {
        let request = &mut self.requests[index];
        assert!(!std::mem::replace(&mut request.ended, true), "request {index} ended twice");
        self.waiting.retain(|other| *other != index);
    }

    fn finish(&self) {
        let open = self.requests.iter().find(|request| !request.ended);
        assert!(open.is_none(), "never ended: {open:?}");
    }
}

/// A device that runs a few batches at once in virtual time, in place of the core.
struct Simulation {
    now: Nanos,
    batcher: Batcher<usize>,
    ids: Core,
    checker: Checker,
    random: Random,
    max_running: usize,
    slots: VecDeque<RequestId>,
    running: Vec<(Nanos, RequestId)>,
    members: HashMap<usize, MemberId>,
    batch_max: usize,
    /// Whether settings change meanwhile.
    changing: bool,
    largest: usize,
    batches: usize,
}

fn config(policy: BatchingPolicy, random: &mut Random) -> ModelConfig {
    let slo = [None, Some(1), Some(3)][random.below(3) as usize];
    let batching = Batching { policy, max_wait_us: 200, ..Batching::default() };
    ModelConfig { slo_ms: slo, batching, queue_capacity: 64, ..ModelConfig::default() }
}

impl Simulation {
    fn new(policy: BatchingPolicy, seed: u64) -> Simulation {
        let mut random = Random::new(seed);
        let rules = Rules::of(&config(policy, &mut random), PreemptionLevel::BetweenLaunches)
            .expect("it batches");
        Simulation {
            now: Nanos(0),
            batch_max: rules.batch_max(),
            batcher: Batcher::new(rules, 64),
            ids: Core::new(CoreOptions::default()),
            checker: Checker::default(),
            max_running: 1 + random.below(3) as usize,
            random,
            slots: VecDeque::new(),
            running: Vec::new(),
            members: HashMap::new(),
            changing: false,
            largest: 0,
            batches: 0,
        }
    }

    /// Changes the settings, as a client may at any time.
    fn change_settings(&mut self) {
        let policy = POLICIES[self.random.below(POLICIES.len() as u64) as usize];
        let mut config = config(policy, &mut self.random);
        config.batching.max_batch = [0, 1, 3, 16][self.random.below(4) as usize];
        let level = PreemptionLevel::BetweenLaunches;
        let rules = Rules::of(&config, level).expect("it batches");
        self.batch_max = rules.batch_max();
        self.batcher.set_rules(rules, 64);
    }

    /// Time of a batch: a large fixed part, a small part per row.
    fn time(rows: usize) -> Nanos {
        Nanos::from_micros(100 + 10 * rows as u64)
    }

    fn arrive(&mut self, groups: u64) {
        let pick = self.random.below(groups);
        let key = GroupKey {
            class: if pick.is_multiple_of(2) { Class::RealTime } else { Class::BestEffort },
            priority: 1 + (pick / 4) as u32,
            sizes: vec![("tokens".to_string(), 8 + (pick / 2 % 2) as usize)],
        };
        let rows = if self.random.below(4) == 0 { 1 + self.random.below(5) as usize } else { 1 };
        let deadline = match self.random.below(3) {
            0 => self.now + Nanos::from_micros(self.random.below(2_000)),
            _ => Nanos::MAX,
        };
        let index = self.checker.requests.len();
        let ready = if self.random.below(8) == 0 { Some(vec![1, 2]) } else { None };
        let before = self.checker.waiting.len();
        match self.batcher.arrive(self.now, key.clone(), (rows, deadline), index, || ready) {
            Ok(id) => {
                assert!(before < 64, "more wait than allowed");
                self.checker.arrived(key, rows, self.now, deadline);
                self.members.insert(index, id);
            }
            Err((Refusal::Full, back)) => assert_eq!((back, before), (index, 64)),
            Err((Refusal::Alone, _)) => panic!("there are few groups"),
        }
    }

    fn end(&mut self, members: Vec<Member<usize>>) {
        for member in members {
            self.members.remove(&member.payload);
            self.checker.ended(member.payload);
        }
    }

    /// Carries out the decisions of the batcher, as a node does.
    fn update_batcher(&mut self) {
        loop {
            let (mut late, mut idle) = (Vec::new(), Vec::new());
            self.batcher.expire(self.now, &mut late, &mut idle);
            assert!(late.iter().all(|member| member.deadline <= self.now), "too early");
            let mut given_up = Vec::new();
            let wanted = self.batcher.decide(self.now, &mut given_up);
            late.extend(given_up);
            self.end(late);
            let freed = !idle.is_empty();
            self.cancel_jobs(idle);
            if let Some(wanted) = wanted {
                let job = self.ids.next_request_id().expect("below the limit");
                self.batcher.slot_opened(wanted.group, Some(job));
                self.slots.push_back(job);
            }
            let started = self.start_some();
            if wanted.is_none() && !started && !freed {
                return;
            }
        }
    }

    fn cancel_jobs(&mut self, idle: Vec<RequestId>) {
        for job in idle {
            self.slots.retain(|other| *other != job);
            self.running.retain(|(_, other)| *other != job);
            match self.batcher.finish(self.now, job, false) {
                BatchEnd::Unstarted => {}
                BatchEnd::Started { members, .. } => assert!(members.is_empty()),
            }
        }
    }

    fn start_some(&mut self) -> bool {
        let mut started = false;
        while self.running.len() < self.max_running
            && let Some(job) = self.slots.pop_front()
        {
            started = true;
            if self.random.below(200) == 0 {
                let refused = self.batcher.refuse(job);
                self.end(refused);
                continue;
            }
            let formed = self.batcher.start(self.now, job);
            let members: Vec<usize> = self.batcher.members_of(job).map(|m| m.payload).collect();
            let latest = members.iter().map(|m| self.checker.requests[*m].deadline).max();
            assert_eq!(Some(formed.deadline), latest, "a job lives as long as any member");
            self.checker.formed(self.now, job, &members, self.batch_max);
            self.largest = self.largest.max(formed.rows);
            self.batches += 1;
            self.running.push((self.now + Simulation::time(formed.rows), job));
        }
        started
    }

    fn complete(&mut self) {
        let over = |(at, _): &(Nanos, RequestId)| *at <= self.now;
        let Some(at) = self.running.iter().position(over) else { return };
        let (_, job) = self.running.swap_remove(at);
        match self.batcher.finish(self.now, job, true) {
            BatchEnd::Unstarted => panic!("a job that ran was never started"),
            BatchEnd::Started { members, .. } => self.end(members),
        }
    }

    fn cancel_one(&mut self) {
        let mut known: Vec<_> = self.members.iter().map(|(index, id)| (*index, *id)).collect();
        known.sort_unstable();
        if let Some((_, id)) = known.get(self.random.below(known.len().max(1) as u64) as usize) {
            let mut idle = Vec::new();
            let gone = self.batcher.take(*id, &mut idle).expect("it is pending");
            self.end(vec![gone]);
            self.cancel_jobs(idle);
        }
    }

    /// The next event.
    fn next(&self) -> Option<Nanos> {
        let ends = self.running.iter().map(|(at, _)| *at);
        ends.chain(self.batcher.next_timer()).min()
    }

    fn run(&mut self, arrivals: usize, gap_us: f64, groups: u64) {
        for _ in 0..arrivals {
            let at = self.now + Nanos((self.random.exponential(gap_us * 1e3)) as u64);
            self.advance(at);
            self.arrive(groups);
            if self.random.below(20) == 0 {
                self.cancel_one();
            }
            if self.random.below(100) == 0 {
                let slow = 1 + self.random.below(20);
                let time = |rows: usize| Nanos(Simulation::time(rows).0 * slow);
                self.batcher.set_profile(&[1, 2, 4, 8, 16].map(|rows| (rows, time(rows))));
            }
            if self.random.below(50) == 0 {
                let (batch, least) = (1 + self.random.below(40), 1 + self.random.below(20));
                let staggered = StaggeredBatch { batch: batch as usize, least: least as usize };
                let staggered = Some(staggered).filter(|_| self.random.below(3) > 0);
                self.batcher.set_staggered_batch(staggered);
            }
            if self.changing && self.random.below(10) == 0 {
                self.change_settings();
            }
            self.update_batcher();
        }
        self.advance(Nanos::MAX);
        self.checker.finish();
        assert_eq!((self.batcher.pending(), self.batcher.jobs()), (0, 0));
    }

    fn advance(&mut self, until: Nanos) {
        for _ in 0..1_000_000 {
            let Some(next) = self.next().filter(|next| *next <= until) else {
                if until < Nanos::MAX {
                    self.now = until;
                }
                return;
            };
            self.now = self.now.max(next);
            self.complete();
            self.update_batcher();
        }
        panic!("time does not advance");
    }
}

const POLICIES: [BatchingPolicy; 7] = [
    BatchingPolicy::Auto,
    BatchingPolicy::Elastic,
    BatchingPolicy::Adaptive,
    BatchingPolicy::Window,
    BatchingPolicy::EarlyDrop,
    BatchingPolicy::LazyDrop,
    BatchingPolicy::Deferred,
];

#[test]
fn every_request_ends_once_in_order_and_in_its_group() {
    for policy in POLICIES {
        for seed in 1..=40 {
            println!("{policy:?} with seed {seed}");
            let mut simulation = Simulation::new(policy, seed);
            let gap = [5.0, 40.0, 400.0][seed as usize % 3];
            simulation.run(400, gap, 1 + seed % 8);
        }
    }
}

#[test]
fn settings_that_change_lose_no_request() {
    for policy in POLICIES {
        for seed in 1..=40 {
            println!("{policy:?} with seed {seed}");
            let mut simulation = Simulation::new(policy, seed);
            simulation.changing = true;
            let gap = [5.0, 40.0, 400.0][seed as usize % 3];
            simulation.run(400, gap, 1 + seed % 8);
        }
    }
}

#[test]
fn chooses_workers_by_batch_times_and_slo() {
    let measured = [1, 2, 4, 8, 16].map(|rows| (rows, Nanos::from_micros(100 * rows as u64)));
    let sizes = |slo_ms, workers: &[usize], policy| {
        let batching = Batching { policy, workers: workers.to_vec(), ..Batching::default() };
        let config = ModelConfig { slo_ms, batching, ..ModelConfig::default() };
        let rules = Rules::of(&config, PreemptionLevel::InsideTile).expect("it batches");
        let mut batcher: Batcher<usize> = Batcher::new(rules, 64);
        let before = batcher.max_batch();
        batcher.set_profile(&measured);
        (before, batcher.max_batch())
    };
    // Half of the SLO is for the batch that was just missed: 500 us are five rows.
    assert_eq!(sizes(Some(1), &[], BatchingPolicy::Elastic), (16, 4));
    assert_eq!(sizes(Some(1), &[], BatchingPolicy::Auto), (32, 32), "a policy with its own rule");
    assert_eq!(sizes(None, &[], BatchingPolicy::Elastic), (16, 16), "without an SLO");
    assert_eq!(sizes(Some(1), &[8], BatchingPolicy::Elastic), (8, 8), "configured");
    assert_eq!(sizes(Some(1), &[], BatchingPolicy::Window), (32, 32), "another one");
}

#[test]
fn batches_grow_with_the_load() {
    for policy in POLICIES {
        let run = |gap_us: f64| {
            let mut simulation = Simulation::new(policy, 4);
            (simulation.max_running, simulation.random) = (1, Random::new(9));
            simulation.run(500, gap_us, 1);
            (simulation.largest, simulation.batches)
        };
        let ((slow, many), (fast, few)) = (run(5_000.0), run(8.0));
        assert!(fast > slow, "{policy:?}: {slow} rows at most, then {fast}");
        assert!(few < many, "{policy:?}: {many} batches, then {few}");
    }
}

#[test]
fn no_request_waits_while_a_worker_is_idle() {
    for policy in [BatchingPolicy::Auto, BatchingPolicy::Elastic] {
        let mut simulation = Simulation::new(policy, 3);
        simulation.max_running = 2;
        for _ in 0..200 {
            let at = simulation.now + Nanos::from_micros(30);
            simulation.advance(at);
            simulation.arrive(1);
            simulation.update_batcher();
            let idle = simulation.running.len() < simulation.max_running;
            assert!(!idle || simulation.checker.waiting.is_empty(), "{policy:?}");
        }
    }
}

#[test]
fn requests_join_a_slot_until_it_starts() {
    let config = ModelConfig::default();
    let mut batcher: Batcher<u32> =
        Batcher::new(Rules::of(&config, PreemptionLevel::BetweenLaunches).expect("auto"), 64);
    let mut ids = Core::new(CoreOptions::default());
    let key = GroupKey { class: Class::BestEffort, priority: 1, sizes: Vec::new() };
    let arrive = |batcher: &mut Batcher<u32>, at: u64, payload: u32| {
        let taken = batcher.arrive(Nanos(at), key.clone(), (1, Nanos::MAX), payload, || None);
        taken.expect("below the capacity");
    };
    arrive(&mut batcher, 0, 0);
    let wanted = batcher.decide(Nanos(0), &mut Vec::new()).expect("a batch");
    let job = ids.next_request_id().expect("an id");
    batcher.slot_opened(wanted.group, Some(job));
    for payload in 1..4 {
        arrive(&mut batcher, u64::from(payload), payload);
    }
    assert_eq!(batcher.decide(Nanos(4), &mut Vec::new()), None, "one job waits already");
    assert_eq!(batcher.start(Nanos(9), job).rows, 4);
    assert_eq!(batcher.members_of(job).map(|m| m.payload).collect::<Vec<_>>(), [0, 1, 2, 3]);
}

#[test]
fn uses_only_prepared_batch_sizes() {
    let batching = Batching { policy: BatchingPolicy::Elastic, ..Batching::default() };
    let config = ModelConfig { batching, ..ModelConfig::default() };
    let mut batcher: Batcher<u32> =
        Batcher::new(Rules::of(&config, PreemptionLevel::BetweenLaunches).expect("elastic"), 64);
    let mut ids = Core::new(CoreOptions::default());
    let key = GroupKey { class: Class::RealTime, priority: 1, sizes: Vec::new() };
    for payload in 0..8 {
        let ready = || Some(vec![1, 2]);
        assert!(batcher.arrive(Nanos(0), key.clone(), (1, Nanos::MAX), payload, ready).is_ok());
    }
    let mut start = |batcher: &mut Batcher<u32>| {
        let wanted = batcher.decide(Nanos(0), &mut Vec::new())?;
        let job = ids.next_request_id()?;
        batcher.slot_opened(wanted.group, Some(job));
        Some(batcher.start(Nanos(0), job).rows)
    };
    assert_eq!(start(&mut batcher), Some(2));
    batcher.set_ready(&[], Some(&[1, 2, 4]));
    let rest: Vec<_> = std::iter::from_fn(|| start(&mut batcher)).collect();
    assert_eq!(rest, [1, 1, 4]);
}
