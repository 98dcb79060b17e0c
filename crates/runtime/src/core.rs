//! The decision what runs next, as a pure state machine: events in, actions out.
//!
//! The core knows no device, no thread and no clock. Production, tests and simulation hand it the
//! time and what happened, and carry out what it says. Its rules:
//!
//! - Real-time work goes before best effort: by priority, then earliest deadline, then arrival.
//! - A real-time arrival that finds every queue busy makes a queue that runs best effort leave.
//! - Best effort is shared between models by deficit round robin over the time they use; inside a model
//!   it goes by priority, then arrival.
//! - While real time saturates the device, best effort earns a share of the time and is not made to
//!   leave before it has used up what it earned.
//! - Every request ends exactly once: done, failed, refused, late or cancelled.

mod co_run;
mod dispatch;
mod fair;
mod messages;
mod priority;
mod ready;
mod recovery;
mod requests;
mod residency;

use std::sync::Arc;

use base::Nanos;
use device::PreemptMode;
use device::sim::KernelProfile;
use model::config::Class;

use crate::policy::padding::{PaddingCandidate, PaddingDevice, PaddingGrant, PairSlowdowns};
use crate::policy::{Atoll, CoRun, Policy, PreemptionPoint, Progress, Rules};

use self::co_run::CoRunAdmission;
use self::fair::FairQueue;
pub use self::messages::{Action, End, Event};
use self::ready::ReadyHeap;
pub use self::requests::RequestId;
use self::requests::{Phase, RequestState, Requests};
pub use self::residency::MemoryState;
use self::residency::{LoadRequest, Weights};

/// A model as the core knows it: a small dense number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelId(pub u32);

/// Order inside a real-time priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RealTimeOrder {
    /// By arrival.
    Fifo,
    /// By deadline, then by arrival.
    EarliestDeadline,
}

/// Queues of a device, by what they are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLayout {
    /// Queues that take anything; numbered first.
    pub shared: usize,
    /// Queues of real time; numbered next.
    pub real_time: usize,
    /// Queues of best effort; numbered next.
    pub best_effort: usize,
    /// Queues of real time that leaves for real time of a higher priority; numbered last.
    pub yielding: usize,
}

/// A bug that tests plant to see whether their checkers notice it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// A request that is given up while it runs is answered at once, and once more when it has left.
    EndsTwice,
}

/// Settings of the core.
#[derive(Clone, Debug)]
pub struct CoreOptions {
    /// Queues of the device; each runs one segment at a time. Either all are shared or none is.
    pub queues: QueueLayout,
    /// Requests that may be under way at once.
    pub max_requests: usize,
    /// Share of time, in percent, that best effort earns while real time runs; at most 90.
    pub best_effort_share_percent: u32,
    /// Longest stretch that best effort may hold a queue against real time.
    pub best_effort_slice: Nanos,
    /// Order inside a real-time priority.
    pub real_time_order: RealTimeOrder,
    /// Whether inputs are copied to the device before a request can run.
    pub copies: bool,
    /// Bytes for weights; `None` when nothing has to be loaded.
    pub memory_bytes: Option<u64>,
    /// Loads that may be under way at once: they share one way to the device.
    pub max_concurrent_loads: usize,
    /// How long a load waits before it takes the place of a model that has requests waiting.
    pub load_patience: Nanos,
    /// How long it waits then before a model that is always in use starts no more work; and how long a model that was just
    /// loaded is spared.
    pub drain_after: Nanos,
    /// A segment that is not heard of for so long means that the device is to be reset.
    pub watchdog: Option<Nanos>,
    /// The device as padding sees it.
    pub room: PaddingDevice,
    /// Whether a co_runner is held to a partition of the device.
    pub partition: bool,
    /// How much longer real time may take beside a co_runner, as a share of what it takes alone.
    pub max_rt_slowdown: f64,
    /// Whether best effort is started only once the answer of the real-time request that ended is out ([`Core::awaits_replies`]).
    pub reply_before_best_effort: bool,
    /// Never set but by tests.
    pub mutation: Option<Mutation>,
}

impl Default for CoreOptions {
    fn default() -> Self {
        CoreOptions {
            queues: QueueLayout { shared: 1, real_time: 0, best_effort: 0, yielding: 0 },
            max_requests: 65_536,
            best_effort_share_percent: 0,
            best_effort_slice: Nanos::from_millis(10),
            real_time_order: RealTimeOrder::EarliestDeadline,
            copies: false,
            memory_bytes: None,
            max_concurrent_loads: usize::MAX,
            load_patience: Nanos::ZERO,
            drain_after: Nanos::from_millis(100),
            watchdog: None,
            room: PaddingDevice {
                sms: 1,
                launch: Nanos::ZERO,
                gap: Nanos::ZERO,
                inside_tile: false,
            },
            partition: false,
            max_rt_slowdown: co_run::MAX_RT_SLOWDOWN,
            reply_before_best_effort: false,
            mutation: None,
        }
    }
}

#[derive(Clone, Debug)]
struct ModelState {
    steps: usize,
    waiting: usize,
    pending: usize,
    queue_capacity: usize,
    max_running: usize,
    removed: bool,
    kernels: Arc<[KernelProfile]>,
    weights: Weights,
}

/// What a queue of the device is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueKind {
    Shared,
    RealTime,
    BestEffort,
}

#[derive(Clone, Debug)]
struct QueueState {
    kind: QueueKind,
    /// Its real-time work leaves for other.
    yields: bool,
    running: Option<Running>,
    /// Whether the device holds it to a budget.
    padded: bool,
    /// Whether it is held to the device's partition.
    confined: bool,
    hold: u32,
    take: u32,
    expiry: Option<(Nanos, u32)>,
    /// The kernel it is at, and since when.
    step: Option<usize>,
    step_since: Nanos,
    /// The best-effort model that runs beside the real-time task on it.
    co_runner: Option<ModelId>,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    request: RequestId,
    model: ModelId,
    class: Class,
    preempting: bool,
    /// Until then real time does not make it leave; zero when it may.
    entitled_until: Nanos,
    /// Since when the watchdog counts.
    since: Nanos,
}

/// The state machine.
#[derive(Debug)]
pub struct Core {
    options: CoreOptions,
    policy: Box<dyn Policy>,
    rules: Rules,
    models: Vec<Option<ModelState>>,
    requests: Requests,
    real_time: ReadyHeap,
    best_effort: FairQueue,
    deadlines: ReadyHeap,
    queues: Vec<QueueState>,
    /// Time best effort has earned and not yet used, in nanoseconds.
    best_effort_credit: u64,
    /// Until then best effort has the device to itself.
    slice_until: Option<Nanos>,
    /// Models to load, in no order.
    load_requests: Vec<LoadRequest>,
    /// When a load that waits for room may do more to get it.
    load_timer: Option<Nanos>,
    /// Real-time requests whose inputs are on their way.
    real_time_copies: usize,
    slowdowns: PairSlowdowns,
    /// Best-effort models beside the running real-time kernel, as bits.
    padding_models: u64,
    co_run: CoRunAdmission,
    /// The best-effort model that may stay beside the real-time task that was started last.
    co_runner: Option<ModelId>,
    /// The real-time model whose next task it was chosen for, until that starts.
    co_runner_for: Option<ModelId>,
    /// Real-time requests that are expected, and the model of the one announced last.
    expected: usize,
    expected_model: Option<ModelId>,
    /// The highest real-time priority that was seen; the smallest number.
    highest_priority: u32,
    /// Best effort waits for an answer of real time to be out.
    awaiting_replies: bool,
    lost: bool,
    draining: bool,
    candidates: Vec<PaddingCandidate>,
    grants: Vec<PaddingGrant>,
}

impl Core {
    /// A core with nothing to do and Atoll's own policy.
    pub fn new(options: CoreOptions) -> Core {
        Core::with_policy(options, Box::new(Atoll))
    }

    /// A core with nothing to do.
    pub fn with_policy(options: CoreOptions, policy: Box<dyn Policy>) -> Core {
        let QueueLayout { shared, real_time, best_effort, yielding } = options.queues;
        let slots = |kind, yields, count| std::iter::repeat_n(QueueState::new(kind, yields), count);
        let queues = slots(QueueKind::Shared, false, shared)
            .chain(slots(QueueKind::RealTime, false, real_time))
            .chain(slots(QueueKind::BestEffort, false, best_effort))
            .chain(slots(QueueKind::RealTime, true, yielding));
        Core {
            rules: policy.rules(),
            models: Vec::new(),
            requests: Requests::new(options.max_requests),
            real_time: ReadyHeap::default(),
            best_effort: FairQueue::default(),
            deadlines: ReadyHeap::default(),
            queues: queues.collect(),
            best_effort_credit: 0,
            slice_until: None,
            load_requests: Vec::new(),
            load_timer: None,
            real_time_copies: 0,
            slowdowns: PairSlowdowns::default(),
            padding_models: 0,
            co_run: CoRunAdmission::new(options.max_rt_slowdown, options.partition),
            co_runner: None,
            co_runner_for: None,
            expected: 0,
            expected_model: None,
            highest_priority: u32::MAX,
            awaiting_replies: false,
            lost: false,
            draining: false,
            candidates: Vec::new(),
            grants: Vec::new(),
            policy,
            options,
        }
    }

    /// The policy's name.
    pub fn policy_name(&self) -> &'static str {
        self.policy.name()
    }

    /// Numbers a new request, or `None` when as many are under way as may.
    pub fn next_request_id(&mut self) -> Option<RequestId> {
        self.requests.reserve()
    }

    /// When [`Event::Timer`] is due, if ever.
    pub fn next_timer(&self) -> Option<Nanos> {
        let deadline = self.deadlines.peek().map(|(key, _)| Nanos(key.1));
        let timers = [
            deadline,
            self.entitlement_end(),
            self.slice_until,
            self.watchdog_due(),
            self.load_timer,
        ];
        timers.into_iter().flatten().min()
    }

    /// How many requests are under way.
    pub fn pending(&self) -> usize {
        self.requests.len()
    }

    /// Requests of `model` that wait, and all that are under way.
    pub fn request_counts(&self, model: ModelId) -> (usize, usize) {
        self.model(model).map_or((0, 0), |state| (state.waiting, state.pending))
    }

    /// The model of the real-time request that is to start next, if one waits or is expected.
    pub fn next_real_time(&self) -> Option<ModelId> {
        let Some((_, request)) = self.real_time.peek() else { return self.expected_model };
        self.requests.get(request).map(|state| state.model)
    }

    /// Whether nobody waits for the answer of a request that still runs.
    pub fn is_given_up(&self, request: RequestId) -> bool {
        let phase = self.requests.get(request).map(|state| state.phase);
        matches!(phase, Some(Phase::Abandoned(_)))
    }

    /// Whether best effort that could be started waits for answers that the last event brought about. [`Event::RepliesSent`] is due when
    /// they are out; any other event starts it as well.
    pub fn awaits_replies(&self) -> bool {
        self.awaiting_replies
    }

    /// Takes `event` in at time `now` and appends what is to be done.
    pub fn step(&mut self, now: Nanos, event: Event, actions: &mut Vec<Action>) {
        self.awaiting_replies = false;
        match event {
            Event::ModelAdded { model, steps, queue_capacity } => {
                self.add_model(model, steps, queue_capacity);
            }
            Event::ModelProfiled { model, kernels, weight_bytes } => {
                self.profile_model(model, kernels, weight_bytes);
            }
            Event::ModelConcurrency { model, max_running } => {
                if let Some(state) = self.model_mut(model) {
                    state.max_running = max_running.max(1);
                }
            }
            Event::ModelWeights { model, bytes, pinned } => {
                self.set_weights(now, model, bytes, pinned);
            }
            Event::Preload { model } => self.request_load(now, model, None),
            Event::ModelRemoved { model } => self.remove_model(model, actions),
            Event::Arrival { request, model, class, priority, deadline } => {
                self.note_priority(class, priority);
                let state = RequestState {
                    model,
                    class,
                    priority,
                    deadline,
                    rows: 1,
                    progress: Progress::default(),
                    losses: 0,
                    copying: false,
                    phase: Phase::Preparing,
                };
                self.arrive(now, request, state, actions);
            }
            Event::BatchFormed { request, rows, deadline } => {
                return self.set_batch(request, rows, deadline);
            }
            Event::InputReady { request } => self.input_ready(now, request),
            Event::LoadRunnable { model } => self.load_runnable(now, model),
            Event::LoadFailed { model } => self.load_failed(now, model, actions),
            Event::LoadDone { model } => self.load_done(now, model),
            Event::StepReady { queue, step } => {
                return self.step_ready(now, queue, step, actions);
            }
            Event::SegmentDone { queue, busy } => {
                self.segment_done(now, queue, busy, actions);
                let kind = self.queues.get(queue).map(|slot| slot.kind);
                self.awaiting_replies =
                    self.options.reply_before_best_effort && kind == Some(QueueKind::RealTime);
            }
            Event::RepliesSent => {}
            Event::SegmentPreempted { queue, left, busy } => {
                self.segment_preempted(now, queue, left, busy, actions);
            }
            Event::SegmentFailed { queue, busy } => {
                if let Some(running) = self.release_queue(queue, busy) {
                    self.end(running.request, End::Failed, actions);
                }
            }
            Event::ArrivalExpected { model } => {
                (self.expected, self.expected_model) = (self.expected + 1, Some(model));
            }
            Event::ExpectationEnded => {
                self.expected = self.expected.saturating_sub(1);
                self.expected_model = self.expected_model.filter(|_| self.expected > 0);
            }
            Event::DeviceLost => self.device_lost(actions),
            Event::DeviceReady => self.device_ready(now, actions),
            Event::Cancel { request } => self.abandon(request, End::Cancelled, actions),
            Event::Timer => self.expire(now, actions),
            Event::Drain => self.draining = true,
        }
        self.dispatch(now, actions);
    }

    fn model(&self, model: ModelId) -> Option<&ModelState> {
        self.models.get(model.0 as usize)?.as_ref()
    }

    fn model_mut(&mut self, model: ModelId) -> Option<&mut ModelState> {
        self.models.get_mut(model.0 as usize)?.as_mut()
    }

    fn add_model(&mut self, model: ModelId, steps: usize, queue_capacity: usize) {
        let index = model.0 as usize;
        if index >= self.models.len() {
            self.models.resize(index + 1, None);
        }
        let fresh = ModelState {
            steps,
            waiting: 0,
            pending: 0,
            queue_capacity,
            max_running: 1,
            removed: false,
            kernels: Arc::from([]),
            weights: Weights::default(),
        };
        self.models[index] = Some(fresh);
        self.best_effort.ensure(model);
        self.co_run.forget(model);
    }

    fn profile_model(&mut self, model: ModelId, kernels: Arc<[KernelProfile]>, weight_bytes: u64) {
        let managed = self.options.memory_bytes.is_some();
        self.slowdowns.ensure(model.0 as usize, kernels.len());
        if let Some(state) = self.model_mut(model) {
            state.kernels = kernels;
            if managed {
                state.weights = Weights::absent(weight_bytes);
            }
        }
    }

    fn remove_model(&mut self, model: ModelId, actions: &mut Vec<Action>) {
        if let Some(state) = self.model_mut(model) {
            state.removed = true;
            self.free_if_unused(model, actions);
        }
    }

    fn free_if_unused(&mut self, model: ModelId, actions: &mut Vec<Action>) {
        if self.model(model).is_some_and(|state| state.removed && state.pending == 0) {
            self.free_weights(model, actions);
            self.models[model.0 as usize] = None;
            actions.push(Action::FreeModel { model });
        }
    }

    fn arrive(
        &mut self,
        now: Nanos,
        request: RequestId,
        state: RequestState,
        actions: &mut Vec<Action>,
    ) {
        let refusal = if self.draining {
            Some(End::ShuttingDown)
        } else {
            match self.model(state.model) {
                None => Some(End::NoSuchModel),
                Some(model) if model.removed => Some(End::NoSuchModel),
                Some(model) if model.waiting >= model.queue_capacity => Some(End::QueueFull),
                Some(model) if !self.can_ever_load(model) => Some(End::Failed),
                Some(_) if state.deadline <= now => Some(End::DeadlineExceeded),
                Some(_) => None,
            }
        };
        if let Some(end) = refusal {
            self.requests.release(request);
            actions.push(Action::End { request, end });
            return;
        }
        if state.deadline < Nanos::MAX {
            self.deadlines.push((0, state.deadline.0, request.order()), request);
        }
        if let Some(model) = self.model_mut(state.model) {
            model.pending += 1;
            model.waiting += 1;
        }
        self.requests.insert(request, state);
        self.prepare(now, request, actions);
    }

    /// A launched request computes so many rows and is of use until this deadline.
    fn set_batch(&mut self, request: RequestId, rows: usize, deadline: Nanos) {
        let Some(state) = self.requests.get_mut(request) else { return };
        (state.rows, state.deadline) = (rows, deadline);
        self.deadlines.remove(request);
        if deadline < Nanos::MAX {
            self.deadlines.push((0, deadline.0, request.order()), request);
        }
    }

    /// Puts a waiting request into the queue of its class.
    fn enqueue(&mut self, request: RequestId) {
        let Some(state) = self.requests.get_mut(request) else { return };
        state.phase = Phase::Waiting;
        let (model, class, priority) = (state.model, state.class, state.priority);
        let deadline = match self.options.real_time_order {
            RealTimeOrder::EarliestDeadline => state.deadline.0,
            RealTimeOrder::Fifo => 0,
        };
        match class {
            Class::RealTime => self.real_time.push((priority, deadline, request.order()), request),
            Class::BestEffort => {
                self.best_effort.push(model, (priority, 0, request.order()), request);
            }
        }
    }

    /// Takes a waiting request out of the queue of its class.
    fn dequeue(&mut self, request: RequestId) {
        let Some(state) = self.requests.get(request) else { return };
        let (model, class) = (state.model, state.class);
        match class {
            Class::RealTime => self.real_time.remove(request),
            Class::BestEffort => self.best_effort.remove(model, request),
        }
    }

    fn count_waiting(&mut self, model: ModelId, change: isize) {
        if let Some(model) = self.model_mut(model) {
            model.waiting = model.waiting.saturating_add_signed(change);
        }
    }

    /// Frees a queue and books the time its segment took.
    fn release_queue(&mut self, queue: usize, busy: Nanos) -> Option<Running> {
        let slot = self.queues.get_mut(queue)?;
        (slot.step, slot.co_runner) = (None, None);
        let running = slot.running.take()?;
        let split = slot.kind != QueueKind::Shared;
        if let Some(model) = self.model_mut(running.model) {
            model.weights.users -= 1;
        }
        match running.class {
            Class::RealTime => {
                let share = u64::from(self.options.best_effort_share_percent.min(90));
                // Of every `100 - share` parts of real time, best effort earns `share`; what it
                // could have used long ago is no claim on the future.
                let limit = self.options.best_effort_slice.0.saturating_mul(2);
                let earned = busy.0.saturating_mul(share) / (100 - share);
                if self.has_best_effort_work() {
                    self.best_effort_credit = (self.best_effort_credit + earned).min(limit);
                }
            }
            Class::BestEffort => {
                // On streams of their own a slice is paid for when it begins.
                let paid = if split { 0 } else { busy.0 };
                self.best_effort_credit = self.best_effort_credit.saturating_sub(paid);
                if let Some(state) = self.requests.get(running.request) {
                    self.best_effort.charge(state.model, busy);
                }
            }
        }
        Some(running)
    }

    /// Learns from a real-time run that is done how long such runs take beside what ran padding_models it.
    fn record_run(&mut self, queue: usize, busy: Nanos) {
        let Some(slot) = self.queues.get(queue) else { return };
        let Some(running) = slot.running.filter(|_| slot.kind == QueueKind::RealTime) else {
            return;
        };
        let request = self.requests.get(running.request);
        // Runs of several rows, in parts, or beside others of their model, are not to be compared.
        let plain =
            request.is_none_or(|state| state.rows == 1 && state.progress == Progress::default());
        let sole = self.queues.iter().filter(|slot| slot.kind == QueueKind::RealTime);
        let sole = sole.filter(|slot| slot.running.is_some()).count() == 1;
        if plain && sole && self.rules.co_run == CoRun::AdmittedPair {
            self.co_run.record(running.model, slot.co_runner, busy);
        }
    }

    fn segment_done(&mut self, now: Nanos, queue: usize, busy: Nanos, actions: &mut Vec<Action>) {
        self.record_run(queue, busy);
        let Some(running) = self.release_queue(queue, busy) else { return };
        let end = match self.requests.get(running.request) {
            None => return,
            Some(state) => match state.phase {
                Phase::Abandoned(end) => end,
                _ if state.deadline <= now => End::DeadlineExceeded,
                _ => End::Done,
            },
        };
        self.end(running.request, end, actions);
    }

    fn segment_preempted(
        &mut self,
        now: Nanos,
        queue: usize,
        left: PreemptionPoint,
        busy: Nanos,
        actions: &mut Vec<Action>,
    ) {
        let Some(running) = self.release_queue(queue, busy) else { return };
        let Some(state) = self.requests.get_mut(running.request) else { return };
        state.progress = self.policy.restore(left, state.progress);
        match state.phase {
            Phase::Abandoned(end) => self.end(running.request, end, actions),
            _ if state.deadline <= now => {
                self.end(running.request, End::DeadlineExceeded, actions);
            }
            _ => {
                self.enqueue(running.request);
                self.count_waiting(running.model, 1);
            }
        }
    }

    /// Ends a request that waits, or marks one that runs so that it ends when it leaves.
    fn abandon(&mut self, request: RequestId, end: End, actions: &mut Vec<Action>) {
        match self.requests.get(request).map(|state| state.phase) {
            None | Some(Phase::Abandoned(_)) => {}
            Some(Phase::Waiting) => {
                self.dequeue(request);
                self.end_waiting(request, end, actions);
            }
            Some(Phase::Preparing) => self.end_waiting(request, end, actions),
            Some(Phase::Running { queue }) => {
                if let Some(state) = self.requests.get_mut(request) {
                    state.phase = Phase::Abandoned(end);
                }
                if self.options.mutation == Some(Mutation::EndsTwice) {
                    actions.push(Action::End { request, end });
                }
                let how = self.rules.preempt.unwrap_or(PreemptMode::BetweenLaunches);
                self.preempt(queue, how, actions);
            }
        }
    }

    fn end_waiting(&mut self, request: RequestId, end: End, actions: &mut Vec<Action>) {
        if let Some(model) = self.requests.get(request).map(|state| state.model) {
            self.count_waiting(model, -1);
        }
        self.end(request, end, actions);
    }

    fn end(&mut self, request: RequestId, end: End, actions: &mut Vec<Action>) {
        self.copy_ended(request);
        let Some(state) = self.requests.remove(request) else { return };
        self.deadlines.remove(request);
        actions.push(Action::End { request, end });
        if let Some(model) = self.model_mut(state.model) {
            model.pending -= 1;
        }
        self.free_if_unused(state.model, actions);
    }

    /// Ends what is late, gives entitlements back and looks after what is never heard of.
    fn expire(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        while let Some(((_, deadline, _), request)) = self.deadlines.peek() {
            if deadline > now.0 {
                break;
            }
            self.deadlines.remove(request);
            self.abandon(request, End::DeadlineExceeded, actions);
        }
        if self.watchdog_due().is_some_and(|due| due <= now) {
            self.lost = true;
            actions.push(Action::ResetDevice);
        }
    }
}

#[cfg(test)]
mod tests;
