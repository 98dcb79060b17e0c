//! Checkers: they see what goes into the core and what comes out of it and of the device, and know nothing of its insides.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use base::Nanos;
use device::sim::{FaultKind, Gpu, ProfileSet};
use device::{PreemptMode, PreemptionLevel};
use model::config::Class;
use runtime::core::{End, RealTimeOrder, RequestId};
use runtime::policy::{CoRun, Rules, Start, Streams};

use crate::scenario::Scenario;

/// Under a share, a best-effort request that is not started for so long starves.
const STARVED: Nanos = Nanos::from_millis(2_000);

/// Requests that ended which are remembered, to tell one that ends twice from one that never came.
const ENDED_MAX: usize = 1 << 16;

/// What the promises come to on this device, under this policy.
#[derive(Clone, Debug)]
pub struct CheckerLimits {
    /// Longest wait of real time for best effort; `None` where there is no promise.
    pub wait: Option<Nanos>,
    /// How long best effort may hold what real time needs; `None` where there is no promise.
    pub grace: Option<Nanos>,
    /// Bytes for weights.
    pub memory: u64,
    /// Multiprocessors.
    pub sms: u32,
    /// Whether deadlines order real time.
    pub earliest_deadline_first: bool,
    /// How long a best-effort request may wait for its first launch; `None` where it is promised no share.
    pub starvation: Option<Nanos>,
    /// Streams of real time.
    pub rt_streams: Range<usize>,
    /// All streams.
    pub streams: usize,
    /// Multiprocessors every kernel needs, by model.
    pub needs: Vec<Vec<u32>>,
}

impl CheckerLimits {
    /// The promises of a scenario.
    pub fn new(
        scenario: &Scenario,
        set: &ProfileSet,
        rules: &Rules,
        rt_streams: Range<usize>,
        streams: usize,
        watchdog: Nanos,
    ) -> CheckerLimits {
        let gpu = &set.gpu;
        let slow = scenario.faults.iter().map(|fault| match fault.kind {
            FaultKind::SlowKernel { factor } => factor,
            _ => 1.0,
        });
        // Kernels that share a device slow each other: by what they wait for multiprocessors and for memory.
        let crowd = slow.fold(1.0, f64::max) * 3.0 * streams as f64;
        let kernels = || set.models.iter().flat_map(|model| &model.kernels);
        let stretch = |ns: u64| Nanos((ns as f64 * crowd) as u64);
        let block = stretch(kernels().map(|kernel| kernel.block_ns).max().unwrap_or(0));
        let kernel = stretch(kernels().map(|kernel| kernel.time_on(gpu.sms).0).max().unwrap_or(0));
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
                PreemptionLevel::InsideTile => Some(Nanos(gpu.leave_ns)),
            },
        };
        // Real time waits until the queues are empty, or the dispatcher turns to it from theirs.
        let queues = match rules.start {
            Start::AfterPreemption => evict,
            Start::AtOnce => Nanos(gpu.switch_ns[1]),
        };
        let silent = scenario.faults.iter().any(|fault| fault.kind == FaultKind::LostCompletion);
        let silence = if silent { watchdog } else { Nanos::ZERO };
        let split = rules.streams == Streams::Split && rules.best_effort;
        let promised = left.filter(|_| split && scenario.best_effort_share_percent == 0);
        CheckerLimits {
            wait: promised.map(|left| left + queues + silence + Nanos(gpu.launch_ns + 1_000)),
            grace: left.filter(|_| split && rules.co_run != CoRun::All),
            memory: gpu.memory_bytes,
            sms: gpu.sms,
            earliest_deadline_first: scenario.order() == RealTimeOrder::EarliestDeadline,
            starvation: (scenario.best_effort_share_percent > 0)
                .then_some(STARVED + silence + silence),
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
    asked: Nanos,
    copied: bool,
    launched: bool,
    /// When it could have started had there been no best effort; `None` when other real time was before it.
    clear_since: Option<Nanos>,
}

/// The checkers and what they found.
#[derive(Debug)]
pub struct Checker {
    limits: CheckerLimits,
    open: BTreeMap<u64, TrackedRequest>,
    /// Those that ended last.
    ended: BTreeSet<u64>,
    loaded: Vec<bool>,
    /// Whether weights come and go.
    managed: bool,
    /// Since when best effort holds what real time needs.
    over_since: Option<Nanos>,
    running_rt: Option<(u64, usize)>,
    found: Vec<String>,
}

impl Checker {
    /// Nothing tracked so far.
    pub fn new(limits: CheckerLimits, models: usize, managed: bool) -> Checker {
        Checker {
            limits,
            open: BTreeMap::new(),
            ended: BTreeSet::new(),
            loaded: vec![!managed; models],
            managed,
            over_since: None,
            running_rt: None,
            found: Vec::new(),
        }
    }

    fn report(&mut self, now: Nanos, what: String) {
        if self.found.len() < 20 {
            self.found.push(format!("{now}: {what}"));
        }
    }

    /// A request came.
    pub fn arrived(
        &mut self,
        now: Nanos,
        request: RequestId,
        model: usize,
        class: Class,
        priority: u32,
        deadline: Nanos,
    ) {
        let late = if self.limits.earliest_deadline_first { deadline.0 } else { 0 };
        let key = (priority, late, request.order());
        let tracked = TrackedRequest {
            model,
            class,
            key,
            asked: now,
            copied: false,
            launched: false,
            clear_since: None,
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
        self.mark_clear(now, request.order());
    }

    /// Notes from when on a real-time request has only best effort before it.
    fn mark_clear(&mut self, now: Nanos, order: u64) {
        let Some(tracked) = self.open.get(&order) else { return };
        let alone = self.ready(tracked)
            && self.running_rt.is_none()
            && self.open.iter().all(|(other, tracked)| *other == order || !self.ready(tracked));
        if alone && let Some(tracked) = self.open.get_mut(&order) {
            tracked.clear_since = Some(now);
        }
    }

    /// A model's weights are on the device.
    pub fn loaded(&mut self, _: Nanos, model: usize) {
        self.loaded[model] = true;
    }

    /// A model's weights are gone.
    pub fn evicted(&mut self, model: usize) {
        self.loaded[model] = false;
        for tracked in self.open.values_mut().filter(|tracked| tracked.model == model) {
            tracked.clear_since = None;
        }
    }

    /// The device fell over.
    pub fn device_lost(&mut self, _: Nanos) {
        self.loaded.fill(!self.managed);
        self.running_rt = None;
        self.over_since = None;
        for tracked in self.open.values_mut() {
            (tracked.copied, tracked.launched, tracked.clear_since) = (false, false, None);
        }
    }

    /// A request is handed to the device.
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
            // Whoever still waits now waits for this one.
            let others = self.open.iter_mut().filter(|(other, _)| **other != order);
            others.for_each(|(_, other)| other.clear_since = None);
        } else if let Some(limit) = self.limits.starvation
            && !tracked.launched
            && now > tracked.asked + limit
        {
            self.report(
                now,
                format!("best-effort request {order} starved since {}", tracked.asked),
            );
        }
        if let Some(tracked) = self.open.get_mut(&order) {
            tracked.launched = true;
        }
    }

    /// The first block of a request runs.
    pub fn started(&mut self, now: Nanos, request: RequestId) {
        let Some(tracked) = self.open.get_mut(&request.order()) else { return };
        let Some(since) = tracked.clear_since.take() else { return };
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

    /// A task computed something else than an undisturbed one.
    pub fn wrong_output(&mut self, now: Nanos, request: RequestId) {
        self.report(now, format!("request {} has a wrong output", request.order()));
    }

    /// Weights on the device.
    pub fn memory(&mut self, now: Nanos, bytes: u64) {
        if bytes > self.limits.memory {
            self.report(now, format!("{bytes} bytes of weights, {} allowed", self.limits.memory));
        }
    }

    /// Requests of one model that wait.
    pub fn queue_length(&mut self, now: Nanos, length: usize, bound: usize) {
        if length > bound {
            self.report(now, format!("{length} requests wait, {bound} may"));
        }
    }

    /// Looks at the device: best effort holds nothing that real time needs for longer than the level allows.
    pub fn look(&mut self, now: Nanos, gpu: &Gpu) {
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

    /// What was found, with what is missing at the end.
    pub fn finish(&mut self, now: Nanos) -> Vec<String> {
        let unanswered: Vec<u64> = self.open.keys().copied().take(3).collect();
        if !unanswered.is_empty() {
            let count = self.open.len();
            self.report(now, format!("{count} requests never ended, among them {unanswered:?}"));
        }
        std::mem::take(&mut self.found)
    }
}
