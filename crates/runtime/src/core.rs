//! The scheduler of one device as a pure state machine: events in, actions out.
//!
//! The core knows no device, no thread and no clock. A node or a simulation passes it the time and
//! the events, and carries out its actions. Its rules:
//!
//! - Real time goes before best effort: by priority, then by execution order, then by arrival.
//! - A real-time request that finds every queue busy preempts best effort on one of them.
//! - Best effort is shared between models by deficit round robin over the time they use; within a
//!   model it goes by priority, then by arrival.
//! - While real time saturates the device, best effort earns a share of the time and is not
//!   preempted before it has used what it earned.
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
use device::profile::KernelProfile;
use device::{DeviceCapabilities, PreemptMode};
use model::config::Class;

use crate::order::{Edf, ExecutionOrder, OrderedRequest};
use crate::policy::padding::{PaddingCandidate, PaddingDevice, PaddingGrant, PairSlowdowns};
use crate::policy::{Atoll, CoRun, Policy, PreemptionPoint, ResumePoint, Rules};

use self::co_run::CoRunAdmission;
pub use self::co_run::CoRunCounts;
use self::fair::FairQueue;
pub use self::messages::{Action, End, Event, SimAction, SimEvent};
use self::ready::ReadyHeap;
pub use self::requests::RequestId;
use self::requests::{Phase, RequestState, Requests};
pub use self::residency::MemoryState;
use self::residency::{LoadRequest, Weights};

/// A model: a small dense number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelId(pub u32);

/// Queues of a device, by purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLayout {
    /// Queues for both classes; numbered first.
    pub shared: usize,
    /// Real-time queues; numbered next.
    pub real_time: usize,
    /// Best-effort queues; numbered next.
    pub best_effort: usize,
    /// Preemptible real-time queues, for requests that yield to a higher priority; numbered last.
    pub yielding: usize,
}

/// A bug that tests plant to validate their checkers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// A request that is cancelled while it runs ends at once, and again when it is preempted.
    EndsTwice,
}

/// Settings of the core.
#[derive(Clone, Debug)]
pub struct CoreOptions {
    /// Queues of the device; each runs one segment at a time. Either all are shared or none is.
    pub queues: QueueLayout,
    /// Maximum number of pending requests.
    pub max_requests: usize,
    /// Share of time, in percent, that best effort earns while real time runs; at most 90.
    pub best_effort_share_percent: u32,
    /// Longest time that best effort may hold a queue against real time.
    pub best_effort_slice: Nanos,
    /// Execution order within a real-time priority.
    pub real_time_order: &'static dyn ExecutionOrder,
    /// Memory for weights; `None` when weights are not managed.
    pub memory_bytes: Option<u64>,
    /// Maximum number of concurrent loads: they share one copy engine.
    pub max_concurrent_loads: usize,
    /// How long a load waits before it evicts a model that has requests waiting.
    pub load_patience: Nanos,
    /// How long it waits after that before a model that is always in use is drained; and how long a
    /// model that was just loaded is protected.
    pub drain_after: Nanos,
    /// A segment without completion for this long makes the core reset the device.
    pub watchdog: Option<Nanos>,
    /// Capabilities of the device; the policy chooses its rules by them.
    pub capabilities: DeviceCapabilities,
    /// Properties of the device for kernel padding; used where queues have block budgets.
    pub padding_device: PaddingDevice,
    /// Allowed slowdown of real time beside a co-runner, as a fraction.
    pub max_rt_slowdown: f64,
    /// Whether best effort starts only after the reply of the real-time request that ended is sent
    /// ([`Core::awaits_replies`]).
    pub reply_before_best_effort: bool,
    /// Set only by tests.
    pub mutation: Option<Mutation>,
}

impl Default for CoreOptions {
    fn default() -> Self {
        CoreOptions {
            queues: QueueLayout { shared: 1, real_time: 0, best_effort: 0, yielding: 0 },
            max_requests: 65_536,
            best_effort_share_percent: 0,
            best_effort_slice: Nanos::from_millis(10),
            real_time_order: &Edf,
            memory_bytes: None,
            max_concurrent_loads: usize::MAX,
            load_patience: Nanos::ZERO,
            drain_after: Nanos::from_millis(100),
            watchdog: None,
            capabilities: DeviceCapabilities::default(),
            padding_device: PaddingDevice {
                sms: 1,
                launch: Nanos::ZERO,
                gap: Nanos::ZERO,
                inside_tile: false,
            },
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
    /// Time of all kernels alone on the device, where they are known.
    run_time: Option<Nanos>,
    weights: Weights,
}

/// Purpose of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueKind {
    Shared,
    RealTime,
    BestEffort,
}

#[derive(Clone, Debug)]
struct QueueState {
    kind: QueueKind,
    /// Its real-time work yields to a higher priority.
    yields: bool,
    running: Option<Running>,
    /// Whether it has a block budget.
    padded: bool,
    /// Whether it is confined to the SM partition.
    confined: bool,
    hold: u32,
    take: u32,
    expiry: Option<(Nanos, u32)>,
    /// Its current kernel, and since when.
    step: Option<usize>,
    step_since: Nanos,
    /// The co-runner of the real-time task on it.
    co_runner: Option<ModelId>,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    request: RequestId,
    model: ModelId,
    class: Class,
    preempting: bool,
    /// Real time does not preempt it before; zero when it may.
    entitled_until: Nanos,
    /// Start of the watchdog's interval.
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
    /// Earned and unused time of best effort, in nanoseconds.
    best_effort_credit: u64,
    /// End of the current best-effort slice.
    slice_until: Option<Nanos>,
    /// Requested loads, unordered.
    load_requests: Vec<LoadRequest>,
    /// When a load that waits for memory may take the next measure to get it.
    load_timer: Option<Nanos>,
    /// Real-time requests whose inputs are being copied.
    real_time_copies: usize,
    slowdowns: PairSlowdowns,
    /// Best-effort models that pad the running real-time kernel, as bits.
    padding_models: u64,
    co_run: CoRunAdmission,
    /// The co-runner of the real-time task that was started last.
    co_runner: Option<ModelId>,
    /// The real-time model for whose next task it was chosen, until that starts.
    co_runner_for: Option<ModelId>,
    /// Announced real-time requests, and the model of the latest.
    expected: usize,
    expected_model: Option<ModelId>,
    /// The highest real-time priority so far: the smallest number.
    highest_priority: u32,
    /// Best effort waits until a real-time reply is sent.
    awaiting_replies: bool,
    lost: bool,
    draining: bool,
    candidates: Vec<PaddingCandidate>,
    grants: Vec<PaddingGrant>,
}

impl Core {
    /// An idle core with Atoll's own policy.
    pub fn new(options: CoreOptions) -> Core {
        Core::with_policy(options, Box::new(Atoll))
    }

    /// An idle core.
    pub fn with_policy(options: CoreOptions, policy: Box<dyn Policy>) -> Core {
        let QueueLayout { shared, real_time, best_effort, yielding } = options.queues;
        let slots = |kind, yields, count| std::iter::repeat_n(QueueState::new(kind, yields), count);
        let queues = slots(QueueKind::Shared, false, shared)
            .chain(slots(QueueKind::RealTime, false, real_time))
            .chain(slots(QueueKind::BestEffort, false, best_effort))
            .chain(slots(QueueKind::RealTime, true, yielding));
        Core {
            rules: policy.rules(options.capabilities),
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
            co_run: CoRunAdmission::new(options.max_rt_slowdown, options.capabilities.sm_partition),
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

    /// Reserves a number for a new request; `None` when too many are pending.
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

    /// Number of pending requests: waiting or running.
    pub fn pending(&self) -> usize {
        self.requests.len()
    }

    /// How often real time ran beside best effort.
    pub fn co_run_counts(&self) -> CoRunCounts {
        self.co_run.counts()
    }

    /// Waiting requests of `model`, and all pending ones.
    pub fn request_counts(&self, model: ModelId) -> (usize, usize) {
        self.model(model).map_or((0, 0), |state| (state.waiting, state.pending))
    }

    /// The model of the next real-time request, waiting or announced.
    pub fn next_real_time(&self) -> Option<ModelId> {
        let Some((_, request)) = self.real_time.peek() else { return self.expected_model };
        self.requests.get(request).map(|state| state.model)
    }

    /// Whether a running request was cancelled or is late.
    pub fn is_given_up(&self, request: RequestId) -> bool {
        let phase = self.requests.get(request).map(|state| state.phase);
        matches!(phase, Some(Phase::Abandoned(_)))
    }

    /// Whether best effort waits for replies that the last event caused. The node sends
    /// [`Event::RepliesSent`] when they are sent; any other event starts best effort as well.
    pub fn awaits_replies(&self) -> bool {
        self.awaiting_replies
    }

    /// Processes `event` at time `now` and appends the resulting actions.
    pub fn step(&mut self, now: Nanos, event: Event, actions: &mut Vec<Action>) {
        self.awaiting_replies = false;
        match event {
            Event::ModelAdded { model, steps, queue_capacity } => {
                self.add_model(model, steps, queue_capacity);
            }
            Event::ModelQueueCapacity { model, queue_capacity } => {
                if let Some(state) = self.model_mut(model) {
                    state.queue_capacity = queue_capacity;
                }
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
                    progress: ResumePoint::default(),
                    losses: 0,
                    copying: false,
                    phase: Phase::Preparing,
                };
                self.arrive(now, request, state, actions);
            }
            Event::BatchFormed { request, rows, deadline } => {
                return self.set_batch(request, rows, deadline);
            }
            Event::LoadRunnable { model } => self.load_runnable(now, model),
            Event::LoadFailed { model } => self.load_failed(now, model, actions),
            Event::LoadDone { model } => self.load_done(now, model),
            Event::SegmentDone { queue, busy } => {
                self.segment_done(now, queue, busy, actions);
                let kind = self.queues.get(queue).map(|slot| slot.kind);
                self.awaiting_replies =
                    self.options.reply_before_best_effort && kind == Some(QueueKind::RealTime);
            }
            Event::RepliesSent => {}
            Event::SegmentPreempted { queue, point, busy } => {
                self.segment_preempted(now, queue, point, busy, actions);
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
            Event::DeviceAlive => self.device_alive(now),
            Event::Cancel { request } => self.abandon(request, End::Cancelled, actions),
            Event::Timer => self.expire(now, actions),
            Event::Drain => self.draining = true,
            Event::Sim(SimEvent::ModelProfiled { model, kernels, weight_bytes }) => {
                self.profile_model(model, kernels, weight_bytes);
            }
            Event::Sim(SimEvent::InputReady { request }) => self.input_ready(now, request),
            Event::Sim(SimEvent::StepReady { queue, step }) => {
                return self.step_ready(now, queue, step, actions);
            }
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
            run_time: None,
            weights: Weights::default(),
        };
        self.models[index] = Some(fresh);
        self.best_effort.ensure(model);
        self.co_run.forget(model);
    }

    fn profile_model(&mut self, model: ModelId, kernels: Arc<[KernelProfile]>, weight_bytes: u64) {
        let managed = self.options.memory_bytes.is_some();
        let PaddingDevice { sms, gap, .. } = self.options.padding_device;
        let times = kernels.iter().map(|kernel| kernel.time_on(sms) + gap);
        let run_time = times.reduce(|sum, time| sum + time);
        self.slowdowns.ensure(model.0 as usize, kernels.len());
        if let Some(state) = self.model_mut(model) {
            (state.kernels, state.run_time) = (kernels, run_time);
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

    /// Sets the rows and the deadline of a batch that was just launched.
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
        match class {
            Class::RealTime => {
                let (deadline, progress) = (state.deadline, state.progress);
                let remaining = self.remaining_time(model, progress);
                let ordered = OrderedRequest { deadline, remaining };
                let key = self.options.real_time_order.key(&ordered);
                self.real_time.push((priority, key, request.order()), request);
            }
            Class::BestEffort => {
                self.best_effort.push(model, (priority, 0, request.order()), request);
            }
        }
    }

    /// Device time that a request still needs, if known: from its kernels, or from earlier runs of
    /// its model.
    fn remaining_time(&self, model: ModelId, progress: ResumePoint) -> Option<Nanos> {
        let state = self.model(model)?;
        let whole = state.run_time.or_else(|| self.co_run.alone(model))?;
        let steps = state.steps.max(1) as u64;
        let remaining = steps.saturating_sub(progress.step as u64);
        Some(Nanos((u128::from(whole.0) * u128::from(remaining) / u128::from(steps)) as u64))
    }

    /// Removes a waiting request from the queue of its class.
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

    /// Frees a queue and accounts the time of its segment.
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
                // For `100 - share` parts of real time, best effort earns `share`. The credit is
                // bounded: unused time of the distant past is not owed.
                let limit = self.options.best_effort_slice.0.saturating_mul(2);
                let earned = busy.0.saturating_mul(share) / (100 - share);
                if self.has_best_effort_work() {
                    self.best_effort_credit = (self.best_effort_credit + earned).min(limit);
                }
            }
            Class::BestEffort => {
                // With queues of its own, best effort pays for a slice when it begins.
                let paid = if split { 0 } else { busy.0 };
                self.best_effort_credit = self.best_effort_credit.saturating_sub(paid);
                if let Some(state) = self.requests.get(running.request) {
                    self.best_effort.charge(state.model, busy);
                }
            }
        }
        Some(running)
    }

    /// Records the time of a real-time run and its co-runner.
    fn record_run(&mut self, queue: usize, busy: Nanos) {
        let Some(slot) = self.queues.get(queue) else { return };
        let Some(running) = slot.running.filter(|_| slot.kind == QueueKind::RealTime) else {
            return;
        };
        let request = self.requests.get(running.request);
        // Batches, resumed runs and concurrent runs of a model are not comparable.
        let plain =
            request.is_none_or(|state| state.rows == 1 && state.progress == ResumePoint::default());
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
        point: PreemptionPoint,
        busy: Nanos,
        actions: &mut Vec<Action>,
    ) {
        let Some(running) = self.release_queue(queue, busy) else { return };
        let Some(state) = self.requests.get_mut(running.request) else { return };
        state.progress = self.policy.restore(point, state.progress);
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

    /// Ends a waiting request; preempts a running one, which ends when it is preempted.
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

    /// Ends late requests, and resets the device when the watchdog expires.
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
