//! Device groups in virtual time: the real router, a real core per device, simulated GPUs, seeded
//! clients, and a checker that does not know how any of them decides.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use base::{Nanos, Random};
use device::DeviceCapabilities;
use device::sim::{
    Gpu, GpuEvent, GpuProfile, GpuSegment, KernelProfile, ModelProfile, StreamOptions, TaskId,
};
use model::config::Class;

use super::DeviceGroupOptions;
use super::router::{
    GroupModelId, ModelFacts, ReplicaChange, ReplicaState, RequestEnd, RoutedRequest, Router,
};
use crate::core::{
    Action, Core, CoreOptions, End, Event, ModelId, QueueLayout, RequestId, SimAction, SimEvent,
};
use crate::policy::padding::PaddingDevice;
use crate::policy::{PreemptionPoint, by_name};

/// Requests of one model, with a rate that changes.
#[derive(Clone, Debug)]
pub(super) struct Load {
    pub(super) model: usize,
    pub(super) class: Class,
    /// End of the phase, and requests per second.
    pub(super) phases: Vec<(Nanos, f64)>,
}

#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) devices: usize,
    /// Bytes for weights of each device.
    pub(super) memory: u64,
    /// Milliseconds of a request on a whole device, and bytes of weights.
    pub(super) models: Vec<(f64, u64)>,
    pub(super) loads: Vec<Load>,
    pub(super) end: Nanos,
    pub(super) seed: u64,
    /// Time to load a replica.
    pub(super) making: Nanos,
    /// Every n-th replica cannot be loaded; 0 for none.
    pub(super) fails_every: u64,
    /// A bug that the checker must notice.
    pub(super) planted: Option<Bug>,
}

/// A bug that the checker must notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bug {
    /// Some requests go to a device that does not hold their model.
    Elsewhere,
    /// Some replies are lost.
    Forgotten,
    /// Some replies are sent twice.
    Twice,
    /// Real time goes to the worst device.
    Late,
}

/// Results of a run.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) submitted: u64,
    pub(super) done: u64,
    pub(super) refused: u64,
    /// Completed requests by device.
    pub(super) by_device: Vec<u64>,
    /// Maximum number of replicas of a model, and at the end.
    pub(super) max_replicas: Vec<usize>,
    pub(super) last_replicas: Vec<usize>,
    /// Latencies of each model.
    pub(super) latencies: Vec<Vec<Nanos>>,
    pub(super) violations: Vec<String>,
    /// All decisions, to compare two runs.
    pub(super) trace: String,
}

struct Live {
    id: RequestId,
    number: u64,
    model: usize,
    routed: RoutedRequest,
    arrived: Nanos,
    busy: Nanos,
    task: Option<TaskId>,
}

struct Device {
    core: Core,
    gpu: Gpu,
    live: BTreeMap<usize, Live>,
}

/// Keeps its own account of replicas and requests.
#[derive(Default)]
struct Checker {
    holds: BTreeSet<(usize, usize)>,
    open: BTreeMap<u64, (usize, usize, Class)>,
    completed: BTreeSet<u64>,
    violations: Vec<String>,
}

impl Checker {
    fn fault(&mut self, now: Nanos, what: String) {
        if self.violations.len() < 20 {
            self.violations.push(format!("{}: {what}", now.0));
        }
    }

    fn routed(
        &mut self,
        now: Nanos,
        number: u64,
        (model, device): (usize, usize),
        class: Class,
        there: &[usize],
    ) {
        if !self.holds.contains(&(model, device)) {
            self.fault(
                now,
                format!("request {number} of {model} went to {device}, which does not hold it"),
            );
        }
        let ahead = |device_state: usize| {
            self.open
                .values()
                .filter(|(_, device, class)| *device == device_state && *class == Class::RealTime)
                .count()
        };
        let idle = there.iter().find(|device_state| ahead(**device_state) == 0);
        if class == Class::RealTime
            && there.contains(&device)
            && ahead(device) > 0
            && let Some(idle) = idle
        {
            self.fault(
                now,
                format!("request {number} waits on {device} while {idle} has no real time"),
            );
        }
        if self.open.insert(number, (model, device, class)).is_some() {
            self.fault(now, format!("request {number} was routed twice"));
        }
    }

    fn replied(&mut self, now: Nanos, number: u64) {
        if self.open.remove(&number).is_none() || !self.completed.insert(number) {
            self.fault(now, format!("request {number} got two replies"));
        }
    }

    fn gone(&mut self, now: Nanos, model: usize, device: usize) {
        if !self.holds.remove(&(model, device)) {
            self.fault(now, format!("{model} was removed from {device}, which did not have it"));
        }
        let open = self.open.values().filter(|(m, d, _)| (*m, *d) == (model, device)).count();
        if open > 0 {
            self.fault(now, format!("{model} was removed from {device} under {open} requests"));
        }
    }

    fn memory(&mut self, now: Nanos, device: usize, held: u64, budget: u64) {
        if held > budget {
            self.fault(now, format!("{held} bytes on {device}, which has {budget}"));
        }
    }
}

pub(super) struct Simulation {
    plan: Plan,
    router: Router,
    devices: Vec<Device>,
    keys: Vec<GroupModelId>,
    profiles: Vec<Arc<ModelProfile>>,
    /// Next request of each load.
    next: Vec<Option<Nanos>>,
    random: Random,
    making: Vec<(Nanos, GroupModelId, usize)>,
    makes: u64,
    number: u64,
    now: Nanos,
    checker: Checker,
    outcome: Outcome,
}

fn gpu_profile(memory_bytes: u64) -> GpuProfile {
    GpuProfile { memory_bytes, ..device::sim::builtin::h200().gpu }
}

/// A model that fills a device for so long.
fn profile(index: usize, (millis, weight_bytes): (f64, u64), gpu: &GpuProfile) -> ModelProfile {
    let kernel = KernelProfile {
        blocks: gpu.sms,
        block_ns: (millis * 1e6 / 4.0) as u64,
        occupancy: 1,
        memory_share: 0.1,
        idempotent: true,
    };
    ModelProfile {
        name: format!("m{index}"),
        kernels: vec![kernel; 4],
        input_bytes: 1_000,
        weight_bytes,
    }
}

const QUEUES: QueueLayout = QueueLayout { shared: 0, real_time: 1, best_effort: 2, yielding: 0 };

impl Simulation {
    pub(super) fn new(plan: Plan, options: DeviceGroupOptions) -> Simulation {
        let gpu = gpu_profile(plan.memory);
        let profiles: Vec<Arc<ModelProfile>> = plan
            .models
            .iter()
            .enumerate()
            .map(|(index, facts)| Arc::new(profile(index, *facts, &gpu)))
            .collect();
        let stream = |index: usize| StreamOptions { high_priority: index == 0, capacity: 1 };
        let streams: Vec<StreamOptions> = (0..3).map(stream).collect();
        let device = |_| Device {
            core: Core::with_policy(
                CoreOptions {
                    queues: QUEUES,
                    memory_bytes: Some(plan.memory),
                    max_concurrent_loads: 2,
                    load_patience: Nanos::from_millis(5),
                    drain_after: Nanos::from_millis(50),
                    capabilities: DeviceCapabilities { input_copies: false, ..gpu.capabilities() },
                    padding_device: PaddingDevice {
                        sms: gpu.sms,
                        launch: Nanos(gpu.launch_ns),
                        gap: Nanos(gpu.gap_ns),
                        inside_tile: true,
                    },
                    ..CoreOptions::default()
                },
                by_name("atoll", 4).expect("our own"),
            ),
            gpu: Gpu::new(gpu.clone(), profiles.clone(), &streams, Vec::new()),
            live: BTreeMap::new(),
        };
        let router = Router::new(options, &vec![plan.memory; plan.devices]);
        let mut simulation = Simulation {
            devices: (0..plan.devices).map(device).collect(),
            next: vec![None; plan.loads.len()],
            random: Random::new(plan.seed),
            outcome: Outcome {
                by_device: vec![0; plan.devices],
                max_replicas: vec![0; plan.models.len()],
                latencies: vec![Vec::new(); plan.models.len()],
                ..Outcome::default()
            },
            plan,
            router,
            keys: Vec::new(),
            profiles,
            making: Vec::new(),
            makes: 0,
            number: 0,
            now: Nanos::ZERO,
            checker: Checker::default(),
        };
        simulation.place_models();
        (0..simulation.next.len())
            .for_each(|load| simulation.next[load] = simulation.next_request(load, Nanos::ZERO));
        simulation
    }

    fn place_models(&mut self) {
        for model in 0..self.profiles.len() {
            let bytes = self.profiles[model].weight_bytes;
            let home = self.router.home_for(Nanos::ZERO, bytes).expect("it fits");
            let facts =
                ModelFacts { class: Class::BestEffort, pinned: false, held_back: Nanos::ZERO };
            let key = self.router.add(home, bytes, facts);
            assert_eq!(key.slot(), model);
            self.keys.push(key);
            self.hold(model, home);
        }
    }

    /// Adds a model to a device.
    fn hold(&mut self, model: usize, device: usize) {
        self.checker.holds.insert((model, device));
        let id = ModelId(model as u32);
        let steps = self.profiles[model].kernels.len();
        self.feed(device, Event::ModelAdded { model: id, steps, queue_capacity: 100_000 });
        let kernels = Arc::from(self.profiles[model].kernels.as_slice());
        let weight_bytes = self.profiles[model].weight_bytes;
        self.feed(device, Event::Sim(SimEvent::ModelProfiled { model: id, kernels, weight_bytes }));
        self.feed(device, Event::Preload { model: id });
    }

    fn next_request(&mut self, load: usize, after: Nanos) -> Option<Nanos> {
        let mut at = after;
        loop {
            let phases = &self.plan.loads[load].phases;
            let (until, rate) = *phases.iter().find(|(until, _)| *until > at)?;
            if rate <= 0.0 {
                at = until;
                continue;
            }
            let gap = -(1.0 - self.random.unit_f64()).ln() / rate;
            let next = at + Nanos((gap * 1e9) as u64);
            if next <= until {
                return Some(next);
            }
            at = until;
        }
    }

    pub(super) fn finish(mut self) -> Outcome {
        let last = self.plan.end + Nanos::from_millis(60_000);
        while let Some(next) = self.next_time().filter(|next| *next <= last) {
            self.now = self.now.max(next);
            for device in 0..self.devices.len() {
                let mut events = Vec::new();
                self.devices[device].gpu.advance(self.now, &mut events);
                for (_, event) in events {
                    self.device_event(device, event);
                }
                let timer = self.devices[device].core.next_timer();
                if timer.is_some_and(|timer| timer <= self.now) {
                    self.feed(device, Event::Timer);
                }
            }
            self.replicas_due();
            self.clients_due();
            for device in 0..self.devices.len() {
                let held = self.devices[device].gpu.resident_bytes();
                self.checker.memory(self.now, device, held, self.plan.memory);
            }
        }
        let open: Vec<u64> = self.checker.open.keys().copied().collect();
        if !open.is_empty() {
            self.checker.fault(self.now, format!("requests without a reply: {open:?}"));
        }
        self.outcome.last_replicas =
            self.keys.iter().map(|key| self.router.replicas(*key).len()).collect();
        self.outcome.violations = self.checker.violations;
        self.outcome
    }

    fn next_time(&self) -> Option<Nanos> {
        let devices = self.devices.iter();
        let busy = devices.clone().any(|device| !device.live.is_empty());
        let due = devices.flat_map(|d| d.gpu.next_event().into_iter().chain(d.core.next_timer()));
        let requests = self.next.iter().flatten().copied();
        let making = self.making.iter().map(|(at, _, _)| *at);
        let evaluated_at = Some(self.router.next_evaluation());
        let evaluated_at = evaluated_at.filter(|_| busy || self.now < self.plan.end);
        due.chain(requests).chain(making).chain(evaluated_at).min()
    }

    fn replicas_due(&mut self) {
        let now = self.now;
        let (due, rest): (Vec<_>, Vec<_>) = self.making.iter().partition(|(at, _, _)| *at <= now);
        self.making = rest;
        for (_, key, device) in due {
            self.makes += 1;
            if self.plan.fails_every > 0 && self.makes.is_multiple_of(self.plan.fails_every) {
                self.router.replica_failed(now, key, device);
                continue;
            }
            self.hold(key.slot(), device);
            assert!(self.router.replica_added(key, device), "models stay");
            self.note(format!("made {} {device}", key.slot()));
        }
        if self.router.next_evaluation() <= now {
            for change in self.router.evaluate(now) {
                self.change(change);
            }
            for (model, key) in self.keys.iter().enumerate() {
                let views = self.router.replicas(*key);
                let max = &mut self.outcome.max_replicas[model];
                *max = views.len().max(*max);
            }
        }
    }

    fn change(&mut self, change: ReplicaChange) {
        match change {
            ReplicaChange::Add(key, device) => {
                self.note(format!("make {} {device}", key.slot()));
                let bytes = self.profiles[key.slot()].weight_bytes;
                if bytes > self.plan.memory || self.checker.holds.contains(&(key.slot(), device)) {
                    self.checker.fault(self.now, format!("an impossible replica: {change:?}"));
                }
                self.making.push((self.now + self.plan.making, key, device));
            }
            ReplicaChange::Remove(key, device) => {
                self.note(format!("take {} {device}", key.slot()));
                self.checker.gone(self.now, key.slot(), device);
                self.feed(device, Event::ModelRemoved { model: ModelId(key.slot() as u32) });
            }
        }
    }

    fn note(&mut self, what: String) {
        self.outcome.trace.push_str(&format!("{} {what}\n", self.now.0));
    }

    fn clients_due(&mut self) {
        for load in 0..self.next.len() {
            while let Some(at) = self.next[load].filter(|at| *at <= self.now && *at < self.plan.end)
            {
                self.next[load] = self.next_request(load, at);
                self.submit(load);
            }
            self.next[load] = self.next[load].filter(|at| *at < self.plan.end);
        }
    }

    fn submit(&mut self, load: usize) {
        let Load { model, class, .. } = self.plan.loads[load];
        self.number += 1;
        self.outcome.submitted += 1;
        let devices = &self.devices;
        let resident = |device: usize| {
            let weights = devices[device].core.weights_of(ModelId(model as u32));
            weights.is_some_and(|(_, there)| there)
        };
        let there: Vec<usize> = (0..devices.len())
            .filter(|device| self.checker.holds.contains(&(model, *device)) && resident(*device))
            .filter(|device| {
                let views = self.router.replicas(self.keys[model]);
                views.iter().any(|v| v.device == *device && v.state == ReplicaState::Serving)
            })
            .collect();
        let routed = self.router.route(self.now, self.keys[model], Some(class), resident);
        let routed = routed.expect("a model is always somewhere");
        let odd = self.number.is_multiple_of(50);
        let device = match self.plan.planted {
            Some(Bug::Elsewhere) if odd => (routed.device + 1) % self.devices.len(),
            Some(Bug::Late) if class == Class::RealTime => self.fullest(model, routed.device),
            _ => routed.device,
        };
        self.checker.routed(self.now, self.number, (model, device), class, &there);
        self.note(format!("submit {model} {device}"));
        let id = self.devices[device].core.next_request_id().expect("below the limit");
        let live = Live {
            id,
            number: self.number,
            model,
            routed,
            arrived: self.now,
            busy: Nanos::ZERO,
            task: None,
        };
        self.devices[device].live.insert(id.slot(), live);
        let (model, deadline) = (ModelId(model as u32), Nanos::MAX);
        self.feed(device, Event::Arrival { request: id, model, class, priority: 1, deadline });
    }

    /// The device with the most requests, of those that hold `model`.
    fn fullest(&self, model: usize, chosen: usize) -> usize {
        let holds = |device: &usize| self.checker.holds.contains(&(model, *device));
        let devices = (0..self.devices.len()).filter(holds);
        devices.max_by_key(|device| self.devices[*device].live.len()).unwrap_or(chosen)
    }

    fn device_event(&mut self, device: usize, event: GpuEvent) {
        let mut count = |token: u64, busy: Nanos| {
            if let Some(live) = self.devices[device].live.get_mut(&(token as usize)) {
                live.busy += busy;
            }
        };
        match event {
            GpuEvent::Done { stream, token, busy } => {
                count(token, busy);
                self.feed(device, Event::SegmentDone { queue: stream, busy });
            }
            GpuEvent::Preempted { stream, token, step, tile, transmitted, busy } => {
                count(token, busy);
                let point = PreemptionPoint { step, tile, transmitted };
                self.feed(device, Event::SegmentPreempted { queue: stream, point, busy });
            }
            GpuEvent::StepReady { stream, step } => {
                self.feed(device, Event::Sim(SimEvent::StepReady { queue: stream, step }));
            }
            GpuEvent::Loaded { model } => {
                self.feed(device, Event::LoadDone { model: ModelId(model as u32) });
            }
            _ => {}
        }
    }

    fn feed(&mut self, device: usize, event: Event) {
        let mut actions = Vec::new();
        self.devices[device].core.step(self.now, event, &mut actions);
        for action in actions {
            self.act(device, action);
        }
    }

    fn act(&mut self, device: usize, action: Action) {
        let (now, device_state) = (self.now, &mut self.devices[device]);
        match action {
            Action::Launch { queue, request, steps, tile } => {
                let live = device_state.live.get_mut(&request.slot()).expect("it is pending");
                assert_eq!(live.id, request);
                let model = live.model;
                let create = || device_state.gpu.create_task(model, request.order());
                let task = *live.task.get_or_insert_with(create);
                let segment = GpuSegment { token: request.slot() as u64, task, model, steps, tile };
                assert!(device_state.gpu.enqueue(now, queue, segment).is_ok(), "a queue takes one");
            }
            Action::Preempt { queue, how } => device_state.gpu.preempt(now, queue, how),
            // The simulated GPU has budgets instead of a partition.
            Action::Confine { .. } => {}
            Action::Sim(SimAction::SetBudget { queue, hold, take, expiry }) => {
                device_state.gpu.set_budget(now, queue, hold, take, expiry);
            }
            Action::Sim(SimAction::Pad { queue, step, sms, blocks }) => {
                device_state.gpu.pad(now, queue, step, sms, blocks);
            }
            Action::Load { model, .. } => device_state.gpu.load(now, model.0 as usize),
            Action::Evict { model } => device_state.gpu.evict(model.0 as usize),
            Action::FreeModel { model } => device_state.gpu.evict(model.0 as usize),
            Action::End { request, end } => self.ended(device, request, end),
            _ => {}
        }
    }

    fn ended(&mut self, device: usize, request: RequestId, end: End) {
        let device_state = &mut self.devices[device];
        let Some(live) = device_state.live.remove(&request.slot()) else {
            self.checker.fault(self.now, "an unknown request ended".to_string());
            return;
        };
        if let Some(task) = live.task {
            device_state.gpu.drop_task(task);
        }
        let odd = live.number.is_multiple_of(50);
        let times = match self.plan.planted {
            Some(Bug::Forgotten) if odd => 0,
            Some(Bug::Twice) if odd => 2,
            _ => 1,
        };
        (0..times).for_each(|_| self.checker.replied(self.now, live.number));
        let ended = match end {
            End::Done => {
                self.outcome.done += 1;
                self.outcome.by_device[device] += 1;
                self.outcome.latencies[live.model].push(self.now - live.arrived);
                let wait = (self.now - live.arrived) - live.busy;
                RequestEnd::Done { wait, cost: live.busy }
            }
            _ => {
                self.outcome.refused += 1;
                RequestEnd::Refused
            }
        };
        if let Some(change) = self.router.ended(self.now, live.routed, ended) {
            self.change(change);
        }
    }
}
