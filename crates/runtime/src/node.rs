//! The node: the core, driven by a real device and a real clock.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use base::{Bytes, Clock, Histogram, Nanos};
use device::{
    Completion, CompletionSink, Device, DeviceError, Outcome, PreemptionLevel, Program, Queue,
    QueueOptions, Segment, Task,
};
use model::Tensor;
use model::config::{Class, ModelConfig};
use thiserror::Error;

use crate::core::{Action, Core, CoreOptions, End, Event, ModelId, QueueLayout, RequestId};
use crate::policy::{Atoll, Beside, Left, Policy, Rules};

/// A loaded model of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelKey {
    slot: u32,
    generation: u64,
}

/// Limits of a node.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Requests that may be under way at once, over all models.
    pub max_requests: usize,
    /// Least share of time, in percent, that best effort gets under saturating real-time load.
    pub best_effort_share_percent: u32,
}

impl Default for NodeOptions {
    fn default() -> Self {
        NodeOptions { max_requests: 65_536, best_effort_share_percent: 0 }
    }
}

/// One inference to do.
pub struct Request {
    /// The loaded model.
    pub model: ModelKey,
    /// One tensor per plan input, in the plan's order.
    pub inputs: Vec<Tensor>,
    /// Class; the model's default when absent.
    pub class: Option<Class>,
    /// Priority, 1 is the highest; the model's default when absent.
    pub priority: Option<u32>,
    /// Time from now until the answer is of no use; the model's default when absent.
    pub timeout: Option<Nanos>,
}

/// Why a request got no outputs.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Rejection {
    /// The model was unloaded, or never there.
    #[error("the model is not loaded")]
    NoSuchModel,
    /// As many requests wait as may.
    #[error("the queue of the model is full ({capacity} requests)")]
    QueueFull {
        /// The bound that was met.
        capacity: usize,
    },
    /// The deadline passed before the work was done.
    #[error("the deadline passed")]
    DeadlineExceeded,
    /// The client went away or asked to.
    #[error("the request was cancelled")]
    Cancelled,
    /// The node is draining.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The inputs do not fit, or the device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// When things happened to a request, by the node's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// Taken in.
    pub arrived: Nanos,
    /// First step began.
    pub started: Nanos,
    /// Last step ended.
    pub finished: Nanos,
    /// Time spent on the device.
    pub busy: Nanos,
    /// Times it was made to leave for other work.
    pub preemptions: u32,
}

/// Outputs in the plan's order, or why there are none.
pub type ReplyResult = Result<Vec<Tensor>, Rejection>;

/// The end of a request.
#[derive(Debug)]
pub struct Reply {
    /// What came of it.
    pub result: ReplyResult,
    /// When.
    pub timing: Timing,
}

/// What a model has done so far.
#[derive(Clone, Debug, Default)]
pub struct ModelStats {
    /// Requests answered with outputs.
    pub success: u64,
    /// Requests refused or dropped: queue full, deadline, draining.
    pub rejected: u64,
    /// Requests whose client went away.
    pub cancelled: u64,
    /// Requests the device failed.
    pub failed: u64,
    /// Requests waiting or running now.
    pub pending: u64,
    /// Times its work was made to leave for other work.
    pub preemptions: u64,
    /// Arrival to answer, of successes.
    pub latency: Histogram,
}

/// A node over one device.
pub struct Node {
    shared: Arc<Shared>,
    timer: Option<JoinHandle<()>>,
}

/// A request under way. Dropping it does nothing; [`RequestHandle::cancel`] gives it up.
pub struct RequestHandle {
    shared: Weak<Shared>,
    request: Option<RequestId>,
}

impl RequestHandle {
    /// Gives the request up: it leaves the queue, or the device at the next boundary. Its reply is
    /// still sent, once.
    pub fn cancel(&self) {
        if let (Some(shared), Some(request)) = (self.shared.upgrade(), self.request) {
            shared.handle(Event::Cancel { request });
        }
    }
}

type ReplyFn = Box<dyn FnOnce(Reply) + Send>;

struct Shared {
    device: Arc<dyn Device>,
    clock: Arc<dyn Clock>,
    max_requests: usize,
    queues: OnceLock<Vec<Box<dyn Queue>>>,
    state: Mutex<State>,
    /// The earliest timer moved forward, or the node stops.
    timer_changed: Condvar,
    /// The last request under way ended.
    idle: Condvar,
}

struct State {
    core: Core,
    actions: Vec<Action>,
    live: Vec<Option<Live>>,
    models: Vec<Option<ModelEntry>>,
    next_generation: u64,
    armed_timer: Option<Nanos>,
    stopping: bool,
}

/// What the node keeps of a request while the core decides about it.
struct Live {
    model: ModelId,
    task: Option<Box<dyn Task>>,
    outputs: Option<Vec<Tensor>>,
    failure: Option<DeviceError>,
    reply: ReplyFn,
    timing: Timing,
    launched: bool,
}

struct ModelEntry {
    generation: u64,
    program: Arc<dyn Program>,
    defaults: Defaults,
    queue_capacity: usize,
    stats: ModelStats,
}

#[derive(Clone, Copy)]
struct Defaults {
    class: Class,
    priority: u32,
    timeout: Option<Nanos>,
}

/// Atoll's policy as far as devices carry it out: none of them holds a queue to a budget, so best effort would not pad real
/// time but run against it.
#[derive(Clone, Copy, Debug)]
struct Unpadded;

impl Policy for Unpadded {
    fn name(&self) -> &'static str {
        Atoll.name()
    }

    fn rules(&self) -> Rules {
        Rules { beside: Beside::Nothing, ..Atoll.rules() }
    }
}

/// What the queues of a device are for. Where work leaves only between steps, real time waits for the step that runs
/// whichever queue it has, so all queues take anything. Where it leaves faster, one is kept for real time: the device lets
/// its work go first, and that work never leaves for other.
fn layout_of(preemption: PreemptionLevel, queues: usize) -> QueueLayout {
    let queues = queues.max(1);
    if preemption > PreemptionLevel::BetweenLaunches {
        QueueLayout { shared: 0, real_time: 1, best_effort: (queues - 1).max(1) }
    } else {
        QueueLayout { shared: queues, real_time: 0, best_effort: 0 }
    }
}

/// A reply that is due, to be sent once the lock is free.
type Due = (ReplyFn, Reply);

impl Node {
    /// Starts the node on `device`.
    pub fn start(
        device: Arc<dyn Device>,
        options: NodeOptions,
        clock: Arc<dyn Clock>,
    ) -> Result<Node, DeviceError> {
        let layout = layout_of(device.info().preemption, device.info().queues);
        let queue_count = layout.shared + layout.real_time + layout.best_effort;
        let first = layout.shared..layout.shared + layout.real_time;
        let goes_first = |queue: usize| Unpadded.rules().high_priority && first.contains(&queue);
        let core = CoreOptions {
            queues: layout,
            max_requests: options.max_requests,
            best_effort_share_percent: options.best_effort_share_percent,
            ..CoreOptions::default()
        };
        let core = Core::with_policy(core, Box::new(Unpadded));
        let state = State {
            core,
            actions: Vec::new(),
            live: Vec::new(),
            models: Vec::new(),
            next_generation: 0,
            armed_timer: None,
            stopping: false,
        };
        let shared = Arc::new(Shared {
            device,
            clock,
            max_requests: options.max_requests,
            queues: OnceLock::new(),
            state: Mutex::new(state),
            timer_changed: Condvar::new(),
            idle: Condvar::new(),
        });
        let sink: Arc<dyn CompletionSink> = Arc::new(Sink(Arc::downgrade(&shared)));
        let mut queues = Vec::with_capacity(queue_count);
        for queue in 0..queue_count {
            let high_priority = goes_first(queue);
            let preemptible = !first.contains(&queue);
            let id = queue as u32;
            let options = QueueOptions { id, capacity: 1, high_priority, preemptible };
            queues.push(shared.device.open_queue(options, sink.clone())?);
        }
        let _ = shared.queues.set(queues);
        let timed = shared.clone();
        let timer = std::thread::Builder::new()
            .name("node-timer".to_string())
            .spawn(move || timed.run_timer())
            .map_err(|err| DeviceError::Faulted {
                device: shared.device.info().name.clone(),
                reason: format!("cannot start the timer thread: {err}"),
            })?;
        Ok(Node { shared, timer: Some(timer) })
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.shared.device
    }

    /// The clock all timings are read from.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.shared.clock
    }

    /// Makes a loaded program known under a new key. Requests may come at once.
    pub fn add_model(&self, program: Arc<dyn Program>, config: &ModelConfig) -> ModelKey {
        let mut state = self.shared.lock();
        state.next_generation += 1;
        let generation = state.next_generation;
        let slot = state.models.iter().position(Option::is_none).unwrap_or(state.models.len());
        let entry = ModelEntry {
            generation,
            defaults: Defaults {
                class: config.class,
                priority: config.priority,
                timeout: config.timeout_ms.map(Nanos::from_millis),
            },
            queue_capacity: config.queue_capacity,
            stats: ModelStats::default(),
            program,
        };
        let event = Event::ModelAdded {
            model: ModelId(slot as u32),
            steps: entry.program.plan().steps.len(),
            queue_capacity: config.queue_capacity,
        };
        if slot == state.models.len() {
            state.models.push(None);
        }
        state.models[slot] = Some(entry);
        self.shared.step(state, event);
        ModelKey { slot: slot as u32, generation }
    }

    /// Takes no more requests for `model`, lets those under way finish and frees it afterwards.
    /// `false` when there is no such model.
    pub fn remove_model(&self, model: ModelKey) -> bool {
        let state = self.shared.lock();
        if state.model(model).is_none() {
            return false;
        }
        self.shared.step(state, Event::ModelRemoved { model: ModelId(model.slot) });
        true
    }

    /// Takes a request in. `reply` is called exactly once, from any thread, also when the request is
    /// refused at once.
    pub fn submit(&self, request: Request, reply: ReplyFn) -> RequestHandle {
        let shared = &self.shared;
        let arrived = shared.clock.now();
        let refused = |reply: ReplyFn, rejection: Rejection| {
            let timing = Timing { arrived, finished: arrived, ..Timing::default() };
            reply(Reply { result: Err(rejection), timing });
            RequestHandle { shared: Weak::new(), request: None }
        };
        let found = shared.lock().model(request.model).map(|e| (e.program.clone(), e.defaults));
        let Some((program, defaults)) = found else {
            return refused(reply, Rejection::NoSuchModel);
        };
        // The copy into the device's own memory happens on the caller's thread and outside the lock.
        let task = match program.prepare(request.inputs) {
            Ok(task) => task,
            Err(err) => {
                if let Some(entry) = shared.lock().model_mut(request.model) {
                    entry.stats.failed += 1;
                }
                return refused(reply, Rejection::Device(err));
            }
        };
        let mut state = shared.lock();
        if state.model(request.model).is_none() {
            drop(state);
            return refused(reply, Rejection::NoSuchModel);
        }
        let Some(id) = state.core.next_request_id() else {
            if let Some(entry) = state.model_mut(request.model) {
                entry.stats.rejected += 1;
            }
            drop(state);
            return refused(reply, Rejection::QueueFull { capacity: shared.max_requests });
        };
        let timeout = request.timeout.or(defaults.timeout);
        let model = ModelId(request.model.slot);
        state.keep(
            id,
            Live {
                model,
                task: Some(task),
                outputs: None,
                failure: None,
                reply,
                timing: Timing { arrived, ..Timing::default() },
                launched: false,
            },
        );
        let event = Event::Arrival {
            request: id,
            model,
            class: request.class.unwrap_or(defaults.class),
            priority: request.priority.unwrap_or(defaults.priority),
            deadline: timeout.map_or(Nanos::MAX, |timeout| arrived + timeout),
        };
        shared.step(state, event);
        RequestHandle { shared: Arc::downgrade(shared), request: Some(id) }
    }

    /// What `model` has done so far.
    pub fn stats(&self, model: ModelKey) -> Option<ModelStats> {
        let state = self.shared.lock();
        let mut stats = state.model(model)?.stats.clone();
        stats.pending = state.core.load_of(ModelId(model.slot)).1 as u64;
        Some(stats)
    }

    /// Memory its loaded programs hold.
    pub fn resident(&self) -> Bytes {
        let state = self.shared.lock();
        Bytes(state.models.iter().flatten().map(|entry| entry.program.resident().0).sum())
    }

    /// Takes no more requests and returns when none is under way, or `false` after `limit`.
    pub fn drain(&self, limit: Duration) -> bool {
        self.shared.handle(Event::Drain);
        let end = self.shared.clock.now() + Nanos::from(limit);
        let mut state = self.shared.lock();
        while state.core.under_way() > 0 {
            let left = end - self.shared.clock.now();
            if left == Nanos::ZERO {
                return false;
            }
            state = self
                .shared
                .idle
                .wait_timeout(state, left.into())
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        true
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.shared.lock().stopping = true;
        self.shared.timer_changed.notify_all();
        if let Some(timer) = self.timer.take() {
            // The timer thread holds no lock while it sleeps and never panics on purpose; a panic
            // there has been reported already.
            let _ = timer.join();
        }
    }
}

impl State {
    fn model(&self, key: ModelKey) -> Option<&ModelEntry> {
        let entry = self.models.get(key.slot as usize)?.as_ref()?;
        (entry.generation == key.generation).then_some(entry)
    }

    fn model_mut(&mut self, key: ModelKey) -> Option<&mut ModelEntry> {
        let entry = self.models.get_mut(key.slot as usize)?.as_mut()?;
        (entry.generation == key.generation).then_some(entry)
    }

    fn keep(&mut self, id: RequestId, live: Live) {
        if id.slot() >= self.live.len() {
            self.live.resize_with(id.slot() + 1, || None);
        }
        self.live[id.slot()] = Some(live);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under the lock leaves the core in a state it can go on from: every change to it is
        // made by one call of `Core::step`.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handle(&self, event: Event) {
        self.step(self.lock(), event);
    }

    /// Feeds the core, carries out what it says and sends the replies that became due.
    fn step(&self, mut state: MutexGuard<'_, State>, event: Event) {
        let mut due: Vec<Due> = Vec::new();
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let now = self.clock.now();
            let mut actions = std::mem::take(&mut state.actions);
            state.core.step(now, event, &mut actions);
            for action in actions.drain(..) {
                self.act(&mut state, now, action, &mut events, &mut due);
            }
            state.actions = actions;
        }
        self.rearm_timer(&mut state);
        if state.core.under_way() == 0 {
            self.idle.notify_all();
        }
        drop(state);
        for (send, reply) in due {
            send(reply);
        }
    }

    fn act(
        &self,
        state: &mut State,
        now: Nanos,
        action: Action,
        events: &mut VecDeque<Event>,
        due: &mut Vec<Due>,
    ) {
        match action {
            Action::Launch { queue, request, .. } => {
                let Some(live) = state.live.get_mut(request.slot()).and_then(Option::as_mut) else {
                    return;
                };
                if !live.launched {
                    live.launched = true;
                    live.timing.started = now;
                }
                let Some(task) = live.task.take() else { return };
                // The core counts the plan's steps; the device may have made more or fewer of them.
                let steps = task.next_step()..task.step_count();
                let segment = Segment { token: request.slot() as u64, task, steps };
                let queues = self.queues.get().map(Vec::as_slice).unwrap_or_default();
                let launched = match queues.get(queue) {
                    Some(queue) => queue.launch(segment).is_ok(),
                    None => false,
                };
                if !launched {
                    live.failure = Some(DeviceError::Faulted {
                        device: self.device.info().name.clone(),
                        reason: "a queue takes no work".to_string(),
                    });
                    events.push_back(Event::SegmentFailed { queue, busy: Nanos::ZERO });
                }
            }
            Action::Preempt { queue, .. } => {
                if let Some(queue) = self.queues.get().and_then(|queues| queues.get(queue)) {
                    queue.preempt();
                }
            }
            Action::End { request, end } => {
                if let Some(live) = state.live.get_mut(request.slot()).and_then(Option::take) {
                    due.push(finish(state, now, live, end));
                }
            }
            Action::FreeModel { model } => state.models[model.0 as usize] = None,
            // The device copies inputs and loads weights by itself, and a step there is not divided.
            Action::SetBudget { .. }
            | Action::Pad { .. }
            | Action::Copy { .. }
            | Action::Load { .. }
            | Action::Evict { .. }
            | Action::ResetDevice => {}
        }
    }

    fn rearm_timer(&self, state: &mut State) {
        let next = state.core.next_timer();
        if next != state.armed_timer {
            let sooner = next.unwrap_or(Nanos::MAX) < state.armed_timer.unwrap_or(Nanos::MAX);
            state.armed_timer = next;
            if sooner {
                self.timer_changed.notify_one();
            }
        }
    }

    /// Sleeps until the core's next timer and reports it.
    fn run_timer(&self) {
        loop {
            let state = self.lock();
            if state.stopping {
                return;
            }
            let now = self.clock.now();
            match state.core.next_timer() {
                Some(at) if at <= now => self.step(state, Event::Timer),
                Some(at) => {
                    let wait = self.timer_changed.wait_timeout(state, (at - now).into());
                    drop(wait.unwrap_or_else(PoisonError::into_inner));
                }
                None => {
                    let wait = self.timer_changed.wait(state);
                    drop(wait.unwrap_or_else(PoisonError::into_inner));
                }
            }
        }
    }

    /// Takes a segment back from the device.
    fn complete(&self, completion: Completion) {
        let Completion { queue, token, task, outcome, busy } = completion;
        let queue = queue as usize;
        let next_step = task.next_step();
        let (event, task, outputs, failure) = match outcome {
            Outcome::Left => {
                let left = Left::before(next_step);
                (Event::SegmentLeft { queue, left, busy }, Some(task), None, None)
            }
            Outcome::Failed(err) => (Event::SegmentFailed { queue, busy }, None, None, Some(err)),
            // Outputs are made on the device's thread, outside the lock.
            Outcome::Done => match task.into_outputs() {
                Ok(outputs) => (Event::SegmentDone { queue, busy }, None, Some(outputs), None),
                Err(err) => (Event::SegmentFailed { queue, busy }, None, None, Some(err)),
            },
        };
        let mut state = self.lock();
        let left = task.is_some();
        if let Some(live) = state.live.get_mut(token as usize).and_then(Option::as_mut) {
            live.task = task;
            live.outputs = outputs;
            live.failure = failure;
            live.timing.busy += busy;
            live.timing.preemptions += u32::from(left);
            let model = live.model;
            if let Some(entry) = &mut state.models[model.0 as usize] {
                entry.stats.preemptions += u64::from(left);
            }
        }
        self.step(state, event);
    }
}

/// Turns the end of a request into its reply and counts it.
fn finish(state: &mut State, now: Nanos, live: Live, end: End) -> Due {
    let Live { model, outputs, failure, reply, mut timing, .. } = live;
    timing.finished = now;
    let entry = state.models[model.0 as usize].as_mut();
    let capacity = entry.as_ref().map_or(0, |entry| entry.queue_capacity);
    let result = match end {
        End::Done => outputs.ok_or_else(|| {
            Rejection::Device(DeviceError::BadPlan("done without outputs".to_string()))
        }),
        End::Failed => Err(Rejection::Device(
            failure.unwrap_or_else(|| DeviceError::BadPlan("failed without a reason".to_string())),
        )),
        End::DeadlineExceeded => Err(Rejection::DeadlineExceeded),
        End::Cancelled => Err(Rejection::Cancelled),
        End::QueueFull => Err(Rejection::QueueFull { capacity }),
        End::NoSuchModel => Err(Rejection::NoSuchModel),
        End::ShuttingDown => Err(Rejection::ShuttingDown),
    };
    if let Some(entry) = entry {
        let stats = &mut entry.stats;
        match &result {
            Ok(_) => {
                stats.success += 1;
                stats.latency.record(timing.finished - timing.arrived);
            }
            Err(Rejection::Device(_)) => stats.failed += 1,
            Err(Rejection::Cancelled) => stats.cancelled += 1,
            Err(_) => stats.rejected += 1,
        }
    }
    (reply, Reply { result, timing })
}

/// Hands completions to the node as long as it is there.
struct Sink(Weak<Shared>);

impl CompletionSink for Sink {
    fn complete(&self, completion: Completion) {
        if let Some(shared) = self.0.upgrade() {
            shared.complete(completion);
        }
    }
}

#[cfg(test)]
mod tests;
