//! Zero to several replicas and back in virtual time: the real decisions, planner and waiting
//! requests over a model of Kubernetes, of backends and of frontends, with an independent checker.

use std::collections::BTreeMap;

use base::Random;

use super::super::scaler::Removal;
use super::super::target::Replica;
use super::*;
use crate::frontend::cold_start::{ColdStartSettings, WaitingRequests};
use crate::record::{
    BackendRecord, BackendState, LoadReport, LoadState, ModelLoad, ModelRecord, ProfileRecord,
    ScalingRecord,
};
use crate::scheduler::{Core, Decision, SchedulerSettings};
use crate::snapshot::ClusterSnapshot;

/// Milliseconds of one step of the simulation.
const STEP: u64 = 100;
/// Milliseconds between two steps of the planner, and two polls of the driver.
const PLAN: u64 = 500;
const POLL: u64 = 5000;
/// Seconds after which idle pools are emptied.
const ZERO_AFTER: u64 = 30;
/// Milliseconds that a waiting request has.
const WAIT: u64 = 60_000;
/// How long a frontend learns late of what the store has.
const LAG: u64 = 200;
const MODELS: [&str; 2] = ["m0", "m1"];
const POOLS: [(&str, f64); 2] = [("a", 1.0), ("b", 2.0)];

fn ms(count: u64) -> Nanos {
    Nanos::from_millis(count)
}

#[derive(Clone, Debug)]
struct Pod {
    name: String,
    pool: usize,
    /// When it joins.
    joins_at: u64,
    ending_since: Option<u64>,
    marked: bool,
    /// Models that it has, or loads, and when they are loaded.
    models: BTreeMap<String, u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waits,
    /// At a pod, until a time.
    Runs(usize, u64),
    Answered,
    Refused,
}

#[derive(Clone, Debug)]
struct Request {
    at: u64,
    model: &'static str,
    frontend: usize,
    stage: Stage,
    run_ms: u64,
    attempts: u32,
    has_waited: bool,
}

#[derive(Default)]
struct Frontend {
    waiting: WaitingRequests,
    last_at: Option<u64>,
    /// What it has seen of the routes, and of what was there a moment ago.
    routes: BTreeMap<String, Vec<String>>,
    pending: std::collections::VecDeque<(u64, BTreeMap<String, Vec<String>>)>,
    arrived: BTreeMap<&'static str, Vec<u64>>,
}

struct Simulation {
    now: u64,
    random: Random,
    pods: Vec<Pod>,
    replicas: [u32; 2],
    made: u64,
    frontends: Vec<Frontend>,
    /// Those without an outcome; others are only counted.
    requests: Vec<Request>,
    arrived: u64,
    answered: u64,
    refused: u64,
    snapshot: ClusterSnapshot,
    core: Core,
    pools: ReplicaPools,
    input: Option<ScalingInput>,
    draining: [BTreeSet<String>; 2],
    may_empty: bool,
    record: ScalingRecord,
    woken: bool,
    polled_at: u64,
    /// Pools whose pods never come.
    broken: [bool; 2],
    /// No scheduler leads before this time.
    leaderless_until: u64,
    /// Frontends do not reach the store before this time.
    store_lost_until: u64,
    /// Changes: when, and the replicas of both pools after it.
    writes: Vec<(u64, [u32; 2])>,
    errors: Vec<String>,
}

fn settings() -> Vec<PoolSettings> {
    let pool = |(kind, price): &(&str, f64)| PoolSettings {
        scaling: ScalingSettings {
            replicas_min: 0,
            replicas_max: 5,
            step_up: 5,
            step_down: 2,
            window: ms(20_000),
            cooldown: ms(5000),
            drain_timeout: ms(90_000),
        },
        kind: Some(kind.to_string()),
        price: *price,
        zero_after: ms(1000 * ZERO_AFTER),
        pending_limit: ms(25_000),
    };
    POOLS.iter().map(pool).collect()
}

fn planning() -> SchedulerSettings {
    let mut settings = SchedulerSettings::default();
    settings.placement.copies = 1;
    settings
}

impl Simulation {
    fn new(seed: u64, broken: [bool; 2]) -> Simulation {
        let mut snapshot = ClusterSnapshot::default();
        for model in MODELS {
            let config = model::ModelConfig { timeout_ms: Some(200), ..Default::default() };
            let digest = format!("sha-{model}");
            for (kind, _) in POOLS {
                let curve = vec![(1, 20.0), (4, 40.0)];
                let profile = ProfileRecord { curve, ..ProfileRecord::default() };
                snapshot.profiles.insert((kind.to_string(), digest.clone()), profile);
            }
            let record =
                ModelRecord { version: 1, digest, enabled: true, config, ..Default::default() };
            snapshot.models.insert(model.to_string(), record);
        }
        let core = Core::resume(planning(), Nanos::ZERO, &snapshot);
        Simulation {
            now: 0,
            random: Random::new(seed),
            pods: Vec::new(),
            replicas: [0, 0],
            made: 0,
            frontends: vec![Frontend::default(), Frontend::default()],
            requests: Vec::new(),
            arrived: 0,
            answered: 0,
            refused: 0,
            snapshot,
            core,
            pools: ReplicaPools::new(settings(), &[], Nanos::ZERO),
            input: None,
            draining: [BTreeSet::new(), BTreeSet::new()],
            may_empty: false,
            record: ScalingRecord::default(),
            woken: false,
            polled_at: 0,
            broken,
            leaderless_until: 0,
            store_lost_until: 0,
            writes: Vec::new(),
            errors: Vec::new(),
        }
    }

    /// Runs for `seconds` with `rate` requests per second.
    fn run(&mut self, seconds: u64, rate: f64) {
        let until = self.now + 1000 * seconds;
        while self.now < until {
            self.arrive(rate);
            self.kubernetes();
            self.backends();
            self.frontends();
            if self.now >= self.leaderless_until && self.now.is_multiple_of(PLAN) {
                self.plan();
            }
            self.drive();
            self.now += STEP;
        }
    }

    fn arrive(&mut self, rate: f64) {
        let chance = rate * STEP as f64 / 1000.0;
        let whole = chance.floor() as u64;
        let count = whole + u64::from(self.random.unit_f64() < chance - whole as f64);
        for _ in 0..count {
            let model = MODELS[self.random.below(2) as usize];
            let frontend = self.random.below(2) as usize;
            let run_ms = 20 + self.random.below(400);
            let (at, stage) = (self.now, Stage::Waits);
            self.arrived += 1;
            self.requests.push(Request {
                at,
                model,
                frontend,
                stage,
                run_ms,
                attempts: 0,
                has_waited: false,
            });
            let index = self.requests.len() - 1;
            let of = &mut self.frontends[frontend];
            of.last_at = Some(at);
            of.arrived.entry(model).or_default().push(at);
            self.send_or_wait(index);
        }
    }

    /// Sends a request to a backend of its frontend's routes, or lets it wait.
    fn send_or_wait(&mut self, index: usize) {
        let request = self.requests[index].clone();
        let frontend = &mut self.frontends[request.frontend];
        let targets = frontend.routes.get(request.model).cloned().unwrap_or_default();
        let holds = |pod: &Pod| {
            let loaded = pod.models.get(request.model).is_some_and(|at| *at <= self.now);
            targets.contains(&pod.name) && loaded
        };
        let found = self.pods.iter().position(holds);
        match found {
            Some(pod) => {
                if request.has_waited {
                    frontend.waiting.leave(ms(self.now), request.model);
                }
                let stage = Stage::Runs(pod, self.now + request.run_ms);
                self.requests[index].stage = stage;
                self.requests[index].has_waited = false;
            }
            None if !targets.is_empty() => {
                // It was sent to a backend that has just unloaded the model.
                let attempts = &mut self.requests[index].attempts;
                *attempts += 1;
                if *attempts > 20 {
                    self.errors.push(format!("{}: a request found no backend", self.now));
                }
            }
            None if !request.has_waited => {
                // The bounds have tests of their own.
                let limits = ColdStartSettings {
                    model_max: 1_000_000,
                    total_max: 1_000_000,
                    ..ColdStartSettings::default()
                };
                let entered = frontend.waiting.enter(ms(self.now), request.model, &limits);
                self.requests[index].has_waited = entered;
                if !entered {
                    self.requests[index].stage = Stage::Refused;
                }
            }
            None => {}
        }
    }

    /// The controllers: pods are made and ended, pods that have ended are removed.
    fn kubernetes(&mut self) {
        for (pool, described) in POOLS.iter().enumerate() {
            let alive = |pod: &&mut Pod| pod.pool == pool && pod.ending_since.is_none();
            let mut count = self.pods.iter_mut().filter(alive).count() as u32;
            while count < self.replicas[pool] {
                let start = match self.broken[pool] {
                    true => u64::MAX / 2,
                    false => 3000 + self.random.below(9000),
                };
                let name = format!("{}-{}", described.0, self.made);
                self.made += 1;
                self.pods.push(Pod {
                    name,
                    pool,
                    joins_at: self.now + start,
                    ending_since: None,
                    marked: false,
                    models: BTreeMap::new(),
                });
                count += 1;
            }
            while count > self.replicas[pool] {
                let now = self.now;
                let order =
                    |pod: &&mut Pod| (pod.joins_at <= now, !pod.marked, u64::MAX - pod.joins_at);
                let alive = self.pods.iter_mut().filter(alive);
                let Some(pod) = alive.min_by_key(order) else { break };
                pod.ending_since = Some(now);
                let (name, joined) = (pod.name.clone(), pod.joins_at <= now);
                self.check_removal(&name, joined);
                count -= 1;
            }
        }
    }

    /// The checker of removals: no request runs on the pod, and none waits anywhere.
    fn check_removal(&mut self, name: &str, joined: bool) {
        let open = self.requests.iter().filter(|request| match request.stage {
            Stage::Runs(pod, _) => self.pods[pod].name == name,
            // The leader learns of a request within a moment.
            Stage::Waits => joined && self.now - request.at > 1000 && self.is_reached(),
            _ => false,
        });
        let open = open.count();
        if open > 0 {
            self.errors.push(format!("{}: {name} is removed with {open} open requests", self.now));
        }
    }

    /// Backends join, load and unload what is assigned, and answer.
    fn backends(&mut self) {
        let now = self.now;
        for pod in &mut self.pods {
            let lives =
                pod.joins_at <= now && pod.ending_since.is_none_or(|since| now - since < 2000);
            if !lives {
                self.snapshot.backends.remove(&pod.name);
                self.snapshot.states.remove(&pod.name);
                continue;
            }
            let device = POOLS[pod.pool].0.to_string();
            let record = BackendRecord { device, ..BackendRecord::default() };
            self.snapshot.backends.insert(pod.name.clone(), record);
            let assigned = self.snapshot.assignments.get(&pod.name);
            let assigned: BTreeSet<&str> = assigned
                .iter()
                .flat_map(|assignment| assignment.models.iter().map(|m| m.model.as_str()))
                .collect();
            pod.models.retain(|model, _| assigned.contains(model.as_str()));
            for model in assigned {
                pod.models.entry(model.to_string()).or_insert(now + 1500);
            }
            let state = |(model, at): (&String, &u64)| match *at <= now {
                true => (model.clone(), LoadState::Ready { version: 1 }),
                false => (model.clone(), LoadState::Loading),
            };
            let models = pod.models.iter().map(state).collect();
            let state = BackendState { models, ..BackendState::default() };
            self.snapshot.states.insert(pod.name.clone(), state);
        }
        for request in &mut self.requests {
            if let Stage::Runs(_, until) = request.stage
                && until <= now
            {
                request.stage = Stage::Answered;
                self.frontends[request.frontend].waiting.answered(ms(now), request.model);
            }
        }
    }

    /// Frontends learn of routes, send or refuse what waits, and report.
    fn frontends(&mut self) {
        let now = self.now;
        let reached = now >= self.store_lost_until;
        let routes: BTreeMap<String, Vec<String>> = self
            .snapshot
            .routes
            .iter()
            .map(|(model, route)| {
                let targets = route.targets.iter().map(|target| target.backend.clone());
                (model.clone(), targets.collect())
            })
            .collect();
        for frontend in &mut self.frontends {
            if reached {
                frontend.pending.push_back((now + LAG, routes.clone()));
            }
            while frontend.pending.front().is_some_and(|(at, _)| *at <= now) {
                if let Some((_, routes)) = frontend.pending.pop_front() {
                    frontend.routes = routes;
                }
            }
        }
        for index in 0..self.requests.len() {
            if self.requests[index].stage != Stage::Waits {
                continue;
            }
            self.send_or_wait(index);
            let request = &mut self.requests[index];
            if request.stage == Stage::Waits && now - request.at >= WAIT {
                request.stage = Stage::Refused;
                if request.has_waited {
                    self.frontends[request.frontend].waiting.leave(ms(now), request.model);
                }
            }
        }
        for request in &self.requests {
            match request.stage {
                Stage::Answered => self.answered += 1,
                Stage::Refused => self.refused += 1,
                _ => {}
            }
        }
        self.requests.retain(|request| matches!(request.stage, Stage::Waits | Stage::Runs(..)));
        if reached {
            for index in 0..self.frontends.len() {
                let report = self.report(index);
                self.snapshot.loads.insert(format!("f{index}"), report);
            }
        }
    }

    fn report(&mut self, index: usize) -> LoadReport {
        let now = self.now;
        let is_open = |stage: Stage| matches!(stage, Stage::Waits | Stage::Runs(..));
        let busy = self.requests.iter().any(|r| r.frontend == index && is_open(r.stage));
        let frontend = &mut self.frontends[index];
        let mut report = LoadReport::default();
        for (model, times) in &mut frontend.arrived {
            times.retain(|at| now - at < 10_000);
            let recent = times.iter().filter(|at| now - **at < 1000).count() as f64;
            let slow = times.len() as f64 / 10.0;
            let load = ModelLoad { fast: recent, window: 1.0, slow, ..ModelLoad::default() };
            report.models.insert(model.to_string(), load);
        }
        frontend.waiting.fill(&mut report, ms(now), busy, frontend.last_at.map(ms));
        report
    }

    fn plan(&mut self) {
        let draining = self.draining.iter().flatten().cloned().collect();
        self.core.drain(draining, self.may_empty);
        let Some(decision) = self.core.step(ms(self.now), &self.snapshot) else { return };
        self.input = Some(self.core.scaling_input(&self.snapshot));
        let Decision { assignments, routes, splits, plan } = decision;
        self.snapshot.assignments = assignments;
        self.snapshot.routes = routes;
        self.snapshot.splits = splits;
        self.snapshot.plan = Some(plan);
    }

    /// The driver: a poll when it is due, or when requests begin to wait.
    fn drive(&mut self) {
        let Some(input) = self.input.clone() else { return };
        if self.now < self.leaderless_until {
            return;
        }
        let wakes = input.activity.waiting > 0 && !self.woken;
        self.woken = input.activity.waiting > 0;
        if self.now - self.polled_at < POLL && !wakes {
            return;
        }
        self.polled_at = self.now;
        let scales: Vec<Scale> = (0..POOLS.len()).map(|pool| self.scale(pool)).collect();
        let views: Vec<PoolView<'_>> =
            scales.iter().map(|scale| Some((scale, Removal::Marked))).collect();
        let decision = self.pools.step(ms(self.now), &input, &views);
        self.may_empty = decision.may_empty;
        for (index, decision) in decision.pools.iter().flatten().enumerate() {
            self.draining[index].clone_from(&decision.scaling.draining);
            for pod in self.pods.iter_mut().filter(|pod| pod.pool == index) {
                pod.marked = decision.scaling.removing.contains(&pod.name);
            }
            if let Some(replicas) = decision.scaling.replicas {
                self.replicas[index] = replicas;
                self.pools.applied(ms(self.now), index, &decision.scaling);
                self.writes.push((self.now, self.replicas));
            }
        }
        let pool = |index: usize| {
            let like = self.pools.like(index).cloned();
            ReplicaPoolRecord {
                target: POOLS[index].0.to_string(),
                kind: like.as_ref().map_or(String::new(), |like| like.device.clone()),
                ..ReplicaPoolRecord::default()
            }
        };
        self.record.pools = (0..POOLS.len()).map(pool).collect();
    }

    fn scale(&self, pool: usize) -> Scale {
        let lives = |pod: &&Pod| {
            let gone = pod.ending_since.is_some_and(|since| self.now - since >= 4000);
            pod.pool == pool && !gone
        };
        let replica = |pod: &Pod| Replica {
            name: pod.name.clone(),
            ready: pod.joins_at <= self.now,
            ending: pod.ending_since.is_some(),
            marked: pod.marked,
            ..Replica::default()
        };
        Scale {
            replicas: self.replicas[pool],
            version: String::new(),
            members: self.pods.iter().filter(lives).map(replica).collect(),
        }
    }

    /// Another scheduler leads after a while, and knows only what the store has.
    fn change_leader(&mut self, after: u64) {
        self.leaderless_until = self.now + after;
        let now = ms(self.leaderless_until);
        self.core = Core::resume(planning(), now, &self.snapshot);
        let before: Vec<Option<ReplicaPoolRecord>> =
            self.record.pools.iter().cloned().map(Some).collect();
        self.pools = ReplicaPools::new(settings(), &before, now);
        (self.input, self.woken, self.may_empty) = (None, false, false);
        self.draining = [BTreeSet::new(), BTreeSet::new()];
    }

    fn is_reached(&self) -> bool {
        self.now >= self.store_lost_until
    }

    fn total(&self) -> u32 {
        self.replicas.iter().sum()
    }

    fn waiting(&self) -> usize {
        self.requests.iter().filter(|request| request.stage == Stage::Waits).count()
    }

    /// The checker of the whole history.
    fn check(&self) {
        assert!(self.errors.is_empty(), "{:?}", self.errors);
        // The last requests are over: each has one outcome.
        assert_eq!(self.requests.len(), 0, "{:?}", self.requests);
        assert_eq!(self.arrived, self.answered + self.refused);
        let waiting: usize = self.frontends.iter().map(|frontend| frontend.waiting.total()).sum();
        assert_eq!(waiting, 0, "who waits leaves");
        // After a start from zero nothing goes to zero again for the whole time.
        let mut started = None;
        let mut total = 0;
        for (at, replicas) in &self.writes {
            let next: u32 = replicas.iter().sum();
            match (total, next) {
                (0, 1..) => started = Some(*at),
                (_, 0) => {
                    let since = started.take().map_or(u64::MAX, |started| at - started);
                    assert!(since >= 1000 * ZERO_AFTER, "to zero {since} ms after a start");
                }
                _ => {}
            }
            total = next;
        }
    }
}

#[test]
fn from_zero_to_several_and_back_without_a_refusal() {
    let mut simulation = Simulation::new(3, [false, false]);
    simulation.run(60, 0.0);
    assert_eq!((simulation.total(), simulation.writes.len()), (0, 0), "nobody asks for anything");
    let began = simulation.now;
    simulation.run(5, 300.0);
    let (first, _) = simulation.writes[0];
    assert!(
        first - began <= 1200,
        "asked for replicas {} ms after the first request",
        first - began
    );
    simulation.run(60, 300.0);
    assert!(simulation.total() >= 3, "{:?}", simulation.writes);
    assert_eq!(simulation.replicas[1], 0, "the dearer pool is not needed");
    simulation.run(120, 2.0);
    assert_eq!(simulation.total(), 1, "{:?}", simulation.writes);
    simulation.run(150, 0.0);
    assert_eq!(simulation.total(), 0, "{:?}", simulation.writes);
    assert!(simulation.snapshot.backends.is_empty());
    assert_eq!(simulation.refused, 0);
    simulation.check();
}

#[test]
fn a_pool_that_does_not_come_costs_time_and_no_request_of_the_next() {
    let mut simulation = Simulation::new(4, [true, false]);
    simulation.run(20, 0.0);
    simulation.run(70, 5.0);
    assert!(simulation.replicas[1] >= 1, "{:?}", simulation.writes);
    assert!(simulation.pools.stalled(0).is_some());
    simulation.run(60, 5.0);
    assert_eq!(simulation.waiting(), 0);
    simulation.run(100, 0.0);
    assert_eq!(simulation.total(), 0, "{:?}", simulation.writes);
    simulation.check();
    assert_eq!(simulation.refused, 0, "the limit of the pool is below that of requests");
}

#[test]
fn waiting_requests_survive_a_change_of_leader() {
    let mut simulation = Simulation::new(5, [false, false]);
    simulation.run(30, 0.0);
    // The leader is gone when the first requests come, and the next one finds them waiting.
    simulation.change_leader(8000);
    simulation.run(5, 4.0);
    assert!(simulation.writes.is_empty());
    simulation.run(40, 0.0);
    let waited = simulation.writes[0].0 - simulation.leaderless_until;
    assert!(waited <= 1000, "{waited} ms");
    assert_eq!((simulation.refused, simulation.requests.len()), (0, 0));
    // Another one while the first replica starts, and one while it is emptied.
    simulation.run(100, 0.0);
    assert_eq!(simulation.total(), 0);
    simulation.run(2, 4.0);
    simulation.change_leader(3000);
    simulation.run(40, 0.0);
    simulation.change_leader(3000);
    simulation.run(150, 0.0);
    assert_eq!((simulation.refused, simulation.total()), (0, 0), "{:?}", simulation.writes);
    simulation.check();
}

#[test]
fn without_the_store_waiting_requests_are_refused_in_time() {
    let mut simulation = Simulation::new(6, [false, false]);
    simulation.run(30, 0.0);
    simulation.store_lost_until = simulation.now + 90_000;
    simulation.run(10, 3.0);
    simulation.run(75, 0.0);
    assert_eq!(simulation.requests.len(), 0);
    assert!(simulation.refused > 10);
    // It is back: the next request starts a backend.
    simulation.run(60, 0.0);
    let refused = simulation.refused;
    simulation.run(10, 3.0);
    simulation.run(200, 0.0);
    assert_eq!((simulation.refused, simulation.total()), (refused, 0));
    simulation.check();
}

#[test]
fn random_histories_keep_every_request() {
    for seed in 0..24 {
        let mut random = Random::new(1000 + seed);
        let mut simulation = Simulation::new(seed, [false, random.below(4) == 0]);
        for _ in 0..6 {
            let rate = [0.0, 0.0, 0.2, 3.0, 40.0, 250.0][random.below(6) as usize];
            if random.below(4) == 0 {
                simulation.change_leader(1000 * random.below(10));
            }
            simulation.run(5 + random.below(90), rate);
        }
        simulation.run(240, 0.0);
        assert_eq!(simulation.total(), 0, "{seed}: {:?}", simulation.writes);
        assert_eq!(simulation.refused, 0, "{seed}");
        simulation.check();
    }
}
