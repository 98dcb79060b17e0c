//! The checker sees the events and actions of the core and the state of the device, and knows
//! nothing of the core's internals.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use base::Nanos;
use device::sim::{FaultKind, Gpu, ModelProfile, ProfileSet};
use device::{PreemptMode, PreemptionLevel};
use model::config::Class;
use runtime::core::{End, RequestId};
use runtime::order::{ExecutionOrder, OrderedRequest};
use runtime::policy::{CoRun, RealTimeStart, Rules, Streams};

use crate::scenario::Scenario;

/// With a best-effort share, a best-effort request that does not start for so long starves.
const STARVED: Nanos = Nanos::from_millis(2_000);

/// Number of ended requests remembered, to tell one that ends twice from one that never arrived.
const ENDED_MAX: usize = 1 << 16;

/// What must hold on a device under a policy.
#[derive(Clone, Debug)]
pub struct CheckerLimits {
    /// Max wait of real time for best effort; `None` if the policy guarantees none.
    pub wait: Option<Nanos>,
    /// How long best effort may hold SMs that real time needs; `None` if the policy guarantees
    /// nothing.
    pub grace: Option<Nanos>,
    /// Bytes for weights.
    pub memory: u64,
    /// SMs of the device.
    pub sms: u32,
    /// The execution order of real time.
    pub order: &'static dyn ExecutionOrder,
    /// Device time of a request alone, by model, for orders that need it.
    pub run_times: Vec<Nanos>,
    /// How long a best-effort request may wait for its first launch; `None` without a best-effort
    /// share.
    pub starvation: Option<Nanos>,
    /// Whether best effort runs at all; otherwise its requests wait until the run ends.
    pub best_effort: bool,
    /// Streams of real time.
    pub rt_streams: Range<usize>,
    /// All streams.
    pub streams: usize,
    /// SMs that every kernel needs, by model.
    pub needs: Vec<Vec<u32>>,
}

impl CheckerLimits {
    /// The limits of a scenario.
    pub fn new(
        scenario: &Scenario,
        set: &ProfileSet,
        (rules, order): (&Rules, &'static dyn ExecutionOrder),
        rt_streams: Range<usize>,
        streams: usize,
        watchdog: Nanos,
    ) -> CheckerLimits {
        let gpu = &set.gpu;
        let slow = scenario.faults.iter().map(|fault| match fault.kind {
            FaultKind::SlowKernel { factor } => factor,
            _ => 1.0,
        });
        // Kernels that share a device slow each other down: they wait for SMs and for memory.
        let crowd = slow.fold(1.0, f64::max) * 3.0 * streams as f64;
        let kernels = || set.models.iter().flat_map(|model| &model.kernels);
        let slowed = |ns: u64| Nanos((ns as f64 * crowd) as u64);
        let block = slowed(kernels().map(|kernel| kernel.block_ns).max().unwrap_or(0));
        let kernel = slowed(kernels().map(|kernel| kernel.time_on(gpu.sms).0).max().unwrap_or(0));
        let fragile = kernels().any(|kernel| !kernel.idempotent);
        let evict = Nanos(gpu.evict_ns * (gpu.queue_capacity as u64 + 1));
        let resets = Nanos((gpu.host_reset_ns + gpu.kill_ns) * streams as u64);
        let left = match rules.preempt {
            None => None,
            Some(_) if fragile => Some(kernel),
            Some(PreemptMode::Kill) if gpu.kills => Some(resets),
            Some(PreemptMode::Kill | PreemptMode::BetweenLaunches) => Some(kernel),
            Some(PreemptMode::InsideTile | PreemptMode::TileBoundary) => match gpu.preemption() {
                PreemptionLevel::None => None,
                PreemptionLevel::BetweenLaunches => Some(kernel),
                PreemptionLevel::TileBoundaries => Some(block),
                PreemptionLevel::InsideTile => Some(Nanos(gpu.preempt_ns)),
            },
        };
        // Real time waits until the queues are empty, or until the dispatcher switches to it.
        let queues = match rules.start {
            RealTimeStart::AfterPreemption => evict,
            RealTimeStart::AtOnce => Nanos(gpu.switch_ns[1]),
        };
        let silent = scenario.faults.iter().any(|fault| fault.kind == FaultKind::LostCompletion);
        let silence = if silent { watchdog } else { Nanos::ZERO };
        let split = rules.streams == Streams::Split && rules.best_effort;
        let promised = left.filter(|_| split && scenario.best_effort_share_percent == 0);
        let run_time = |model: &ModelProfile| {
            let times = model.kernels.iter().map(|k| k.time_on(gpu.sms) + Nanos(gpu.gap_ns));
            times.fold(Nanos::ZERO, |sum, time| sum + time)
        };
        CheckerLimits {
            wait: promised.map(|left| left + queues + silence + Nanos(gpu.launch_ns + 1_000)),
            grace: left.filter(|_| split && rules.co_run != CoRun::All),
            memory: gpu.memory_bytes,
            sms: gpu.sms,
            order,
            run_times: set.models.iter().map(run_time).collect(),
            starvation: (scenario.best_effort_share_percent > 0)
                .then_some(STARVED + silence + silence),
            best_effort: rules.best_effort,
            rt_streams,
            streams,
            needs: set.models.iter().map(|m| m.kernels.iter().map(|k| k.sms()).collect()).collect(),
        }
    }
}

#[derive(Clone, Debug)]
struct TrackedRequest {
    model: usize,
    class: Class,
    key: (u32, u64, u64),
    arrived_at: Nanos,
    copied: bool,
    launched: bool,
    /// When it could have started without best effort; `None` if other real time was before it.
    unblocked_since: Option<Nanos>,
}

/// Checks a trace and collects violations.
#[derive(Debug)]
pub struct Checker {
    limits: CheckerLimits,
    open: BTreeMap<u64, TrackedRequest>,
    /// Requests that ended most recently.
    ended: BTreeSet<u64>,
    loaded: Vec<bool>,
    /// Whether weights are loaded and evicted.
    managed: bool,
    /// Since when best effort holds SMs that real time needs.
    over_since: Option<Nanos>,
    running_rt: Option<(u64, usize)>,
    violations: Vec<String>,
}

impl Checker {
    /// A checker that has seen nothing.
    pub fn new(limits: CheckerLimits, models: usize, managed: bool) -> Checker {
        Checker {
            limits,
            open: BTreeMap::new(),
            ended: BTreeSet::new(),
            loaded: vec![!managed; models],
            managed,
            over_since: None,
            running_rt: None,
            violations: Vec::new(),
        }
    }

    fn report(&mut self, now: Nanos, what: String) {
        if self.violations.len() < 20 {
            self.violations.push(format!("{now}: {what}"));
        }
    }

    /// A request arrived.
    pub fn arrived(
        &mut self,
        now: Nanos,
        request: RequestId,
        model: usize,
        class: Class,
        priority: u32,
        deadline: Nanos,
    ) {
        let remaining = self.limits.run_times.get(model).copied();
        let ordered = OrderedRequest { deadline, remaining };
        let key = (priority, self.limits.order.key(&ordered), request.order());
        let tracked = TrackedRequest {
            model,
            class,
            key,
            arrived_at: now,
            copied: false,
            launched: false,
            unblocked_since: None,
        };
        if self.open.insert(request.order(), tracked).is_some() {
            self.report(now, format!("request {} came twice", request.order()));
        }
    }

    fn ready(&self, tracked: &TrackedRequest) -> bool {
        tracked.class == Class::RealTime
            && tracked.copied
            && !tracked.launched
            && self.loaded[tracked.model]
    }

    /// A request's inputs are on the device.
    pub fn input_ready(&mut self, now: Nanos, request: RequestId) {
        if let Some(tracked) = self.open.get_mut(&request.order()) {
            tracked.copied = true;
        }
        self.mark_unblocked(now, request.order());
    }

    /// Records since when a real-time request waits for nothing but best effort.
    fn mark_unblocked(&mut self, now: Nanos, order: u64) {
        let Some(tracked) = self.open.get(&order) else { return };
        let alone = self.ready(tracked)
            && self.running_rt.is_none()
            && self.open.iter().all(|(other, tracked)| *other == order || !self.ready(tracked));
        if alone && let Some(tracked) = self.open.get_mut(&order) {
            tracked.unblocked_since = Some(now);
        }
    }

    /// A model's weights are on the device.
    pub fn loaded(&mut self, _: Nanos, model: usize) {
        self.loaded[model] = true;
    }

    /// A model's weights were evicted.
    pub fn evicted(&mut self, model: usize) {
        self.loaded[model] = false;
        for tracked in self.open.values_mut().filter(|tracked| tracked.model == model) {
            tracked.unblocked_since = None;
        }
    }

    /// The device was lost.
    pub fn device_lost(&mut self, _: Nanos) {
        self.loaded.fill(!self.managed);
        self.running_rt = None;
        self.over_since = None;
        for tracked in self.open.values_mut() {
            (tracked.copied, tracked.launched, tracked.unblocked_since) = (false, false, None);
        }
    }

    /// A request was enqueued on the device.
    pub fn launched(&mut self, now: Nanos, request: RequestId) {
        let order = request.order();
        let Some(tracked) = self.open.get(&order).cloned() else {
            return self.report(now, format!("request {order} launched after its end"));
        };
        if !self.loaded[tracked.model] {
            self.report(now, format!("request {order} launched without its weights"));
        }
        if tracked.class == Class::RealTime {
            let first = self.open.values().filter(|other| self.ready(other)).map(|o| o.key).min();
            if first.is_some_and(|first| first < tracked.key) {
                self.report(now, format!("real-time request {order} overtook {first:?}"));
            }
            self.running_rt = Some((order, tracked.model));
            // Other real-time requests now wait for this one.
            let others = self.open.iter_mut().filter(|(other, _)| **other != order);
            others.for_each(|(_, other)| other.unblocked_since = None);
        } else if let Some(limit) = self.limits.starvation
            && !tracked.launched
            && now > tracked.arrived_at + limit
        {
            self.report(
                now,
                format!("best-effort request {order} starved since {}", tracked.arrived_at),
            );
        }
        if let Some(tracked) = self.open.get_mut(&order) {
            tracked.launched = true;
        }
    }

    /// The first block of a request runs.
    pub fn started(&mut self, now: Nanos, request: RequestId) {
        let Some(tracked) = self.open.get_mut(&request.order()) else { return };
        let Some(since) = tracked.unblocked_since.take() else { return };
        if let Some(limit) = self.limits.wait
            && now > since + limit
        {
            let waited = now - since;
            let order = request.order();
            self.report(now, format!("real-time request {order} waited {waited}, {limit} allowed"));
        }
    }

    /// A request ended.
    pub fn ended(&mut self, now: Nanos, request: RequestId, _: End) {
        let order = request.order();
        if self.open.remove(&order).is_none() {
            let twice = if self.ended.contains(&order) { "twice" } else { "without having come" };
            self.report(now, format!("request {order} ended {twice}"));
        }
        self.ended.insert(order);
        if self.ended.len() > ENDED_MAX {
            self.ended.pop_first();
        }
        if self.running_rt.is_some_and(|(running, _)| running == order) {
            self.running_rt = None;
        }
    }

    /// A task's output differs from that of an undisturbed one.
    pub fn wrong_output(&mut self, now: Nanos, request: RequestId) {
        self.report(now, format!("request {} has a wrong output", request.order()));
    }

    /// Checks the bytes of weights on the device.
    pub fn memory(&mut self, now: Nanos, bytes: u64) {
        if bytes > self.limits.memory {
            self.report(now, format!("{bytes} bytes of weights, {} allowed", self.limits.memory));
        }
    }

    /// Checks the number of waiting requests of one model.
    pub fn queue_length(&mut self, now: Nanos, length: usize, bound: usize) {
        if length > bound {
            self.report(now, format!("{length} requests wait, {bound} may"));
        }
    }

    /// Checks that best effort holds no SMs that real time needs for longer than the preemption
    /// level allows.
    pub fn check_device(&mut self, now: Nanos, gpu: &Gpu) {
        for stream in 0..self.limits.streams {
            if gpu.queued(stream) > 1 {
                self.report(now, format!("stream {stream} holds {} segments", gpu.queued(stream)));
            }
        }
        let Some(grace) = self.limits.grace else { return };
        let rt = self.limits.rt_streams.start;
        let step = gpu.current_step(rt);
        let (Some(step), Some((_, model))) = (step, self.running_rt) else {
            self.over_since = None;
            return;
        };
        let need = f64::from(self.limits.needs[model][step].min(self.limits.sms));
        let held: f64 = (0..self.limits.streams)
            .filter(|stream| !self.limits.rt_streams.contains(stream))
            .map(|stream| gpu.held_sms(stream))
            .sum();
        if held + need <= f64::from(self.limits.sms) + 1e-6 {
            self.over_since = None;
            return;
        }
        let since = *self.over_since.get_or_insert(now);
        if now > since + grace + Nanos(1) {
            self.over_since = Some(Nanos::MAX);
            self.report(now, format!("best effort holds {held:.1} multiprocessors beside {need}"));
        }
    }

    /// All violations, including requests that never ended.
    pub fn finish(&mut self, now: Nanos) -> Vec<String> {
        let served =
            |tracked: &TrackedRequest| self.limits.best_effort || tracked.class == Class::RealTime;
        let open = self.open.iter().filter(|(_, tracked)| served(tracked));
        let unanswered: Vec<u64> = open.clone().map(|(order, _)| *order).take(3).collect();
        let count = open.count();
        if count > 0 {
            self.report(now, format!("{count} requests never ended, among them {unanswered:?}"));
        }
        std::mem::take(&mut self.violations)
    }
}
