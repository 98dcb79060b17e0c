//! The node: the core, driven by a device and a clock.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use base::{Bytes, Clock, Nanos};
use device::{
    CompletionSink, Device, DeviceError, Program, Queue, QueueCommand, Segment, Task, thread_watch,
};
use model::Tensor;
use model::config::{Class, ModelConfig};
use model::length_padding::LengthPadding;
use thiserror::Error;

use crate::core::{Action, CoRunCounts, Core, CoreOptions, Event, ModelId, RequestId};
use crate::spans::ring::SpanRing;

mod announcement;
mod batch_jobs;
mod batcher;
mod completion;
mod fault;
mod layout;
mod lengths;
mod lock;
mod preemptions;
mod preparation;
mod profiling;
mod request;
mod settings;
mod span_record;
mod step_times;
mod submission;
mod totals;
mod weights;

use self::batch_jobs::{BatchStaging, Batches, ModelBatcher, Preparer};
use self::batcher::MemberId;
use self::completion::Sink;
pub use self::lengths::CheckedPadding;
pub use self::lock::LockContention;
use self::lock::LockWaits;
pub use self::preemptions::{PREEMPTION_BOUNDS_US, Preemption, PreemptionLog, PreemptionStats};
use self::preemptions::{PreemptionRecord, QueueJob};
use self::preparation::{PreparationThreads, PreparingRequest};
pub use self::profiling::BatchTime;
pub use self::request::{ModelStats, Rejection, Reply, ReplyResult, Request, Timing};
use self::settings::BatchSettings;
pub use self::step_times::{StepTimes, StepTimesError};
pub(crate) use self::submission::refuse_at_once;
use self::totals::TotalsByClass;
pub use self::totals::{DeviceTotals, RequestTotals};
use self::weights::{Discard, EntryWeights};
pub use self::weights::{NodeMemory, SwapStats};

/// A loaded model of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelKey {
    slot: u32,
    generation: u64,
}

impl ModelKey {
    /// A key as a node makes it, for what measures records of requests without a node.
    pub const fn new(slot: u32, generation: u64) -> ModelKey {
        ModelKey { slot, generation }
    }

    /// Its number among the models of the node; used again after it was removed.
    pub fn slot(self) -> u32 {
        self.slot
    }

    /// Its number among all models that the node ever had.
    pub fn number(self) -> u64 {
        self.generation
    }
}

/// Observes events and actions of a node's core, to record or check them. Called with the node's
/// lock held.
pub trait Observer: Send + Sync {
    /// Called before the core processes `event`.
    fn event(&self, now: Nanos, event: &Event);
    /// Called before the node carries out `action`.
    fn action(&self, now: Nanos, action: &Action);
}

/// Settings of a node.
#[derive(Clone)]
pub struct NodeOptions {
    /// The policy: one of [`crate::policy::NAMES`].
    pub policy: String,
    /// Maximum number of pending requests over all models.
    pub max_requests: usize,
    /// Share of time, in percent, that best effort keeps under saturating real time.
    pub best_effort_share_percent: u32,
    /// Real-time queues of a policy that runs real time alone, for concurrent batches of one model.
    pub concurrent_rt_batches: usize,
    /// Real-time queues of a policy that runs everything concurrently.
    pub real_time_queues: usize,
    /// Best-effort queues of such a policy.
    pub best_effort_queues: usize,
    /// Whether a request preempts real time of a lower priority to meet its deadline, on devices
    /// that preempt inside steps. Preemptible work uses slower kernels.
    pub preempt_real_time: bool,
    /// Allowed slowdown of real time beside a co-runner, in percent.
    pub max_rt_slowdown_percent: f64,
    /// Number of preemptions that are kept in the log.
    pub preemptions_kept: usize,
    /// Number of spans that are kept.
    pub spans_kept: usize,
    /// Memory for weights on devices that load and evict them; all of it when absent.
    pub memory: Option<Bytes>,
    /// A segment that makes no progress within this time makes the device faulted; never when
    /// absent.
    pub watchdog: Option<Nanos>,
    /// Observer of the core.
    pub observer: Option<Arc<dyn Observer>>,
}

impl Default for NodeOptions {
    fn default() -> Self {
        NodeOptions {
            policy: "atoll".to_string(),
            max_requests: 65_536,
            best_effort_share_percent: 0,
            concurrent_rt_batches: 1,
            real_time_queues: 4,
            best_effort_queues: 6,
            preempt_real_time: false,
            max_rt_slowdown_percent: 1.0,
            preemptions_kept: 1_024,
            spans_kept: 65_536,
            memory: None,
            watchdog: None,
            observer: None,
        }
    }
}

/// Why a node cannot start.
#[derive(Debug, Error)]
pub enum NodeError {
    /// There is no policy of that name.
    #[error("there is no policy '{0}'; there are: {1}")]
    UnknownPolicy(String, String),
    /// The device cannot carry out the rules of the policy.
    #[error(
        "policy '{0}' kills and fuses kernels, which this device cannot do; \
         it runs in the simulation: atoll bench disb --device sim --policy {0}"
    )]
    PolicyNotSupported(String),
    /// The device cannot open its queues.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// The scheduler of one device.
pub struct Node {
    shared: Arc<Shared>,
    timer: Option<JoinHandle<()>>,
}

/// A submitted request. Dropping it has no effect; [`RequestHandle::cancel`] cancels it.
pub struct RequestHandle {
    shared: Weak<Shared>,
    location: RequestLocation,
}

/// Where a request is pending.
enum RequestLocation {
    Ended,
    Preparing(Arc<PreparingRequest>),
    Core(RequestId),
    Batcher(ModelKey, MemberId),
}

impl RequestHandle {
    /// Cancels the request: it is removed from its queue, or preempted. Its reply is still sent,
    /// once.
    pub fn cancel(&self) {
        let Some(shared) = self.shared.upgrade() else { return };
        match &self.location {
            RequestLocation::Ended => {}
            RequestLocation::Preparing(preparing) => preparing.cancel(&shared),
            RequestLocation::Core(request) => shared.handle(Event::Cancel { request: *request }),
            RequestLocation::Batcher(model, member) => shared.cancel_member(*model, *member),
        }
    }
}

type ReplyFn = Box<dyn FnOnce(Reply) + Send>;

struct Shared {
    /// Reference to itself, for callbacks.
    own: Weak<Shared>,
    device: Arc<dyn Device>,
    /// Memory for weights.
    budget: Bytes,
    discard: Discard,
    clock: Arc<dyn Clock>,
    observer: Option<Arc<dyn Observer>>,
    max_requests: usize,
    /// Whether the policy runs best effort.
    best_effort: bool,
    /// Whether real time is announced, so that best effort is preempted before it starts.
    announces_arrivals: bool,
    queues: OnceLock<Vec<Box<dyn Queue>>>,
    preparer: OnceLock<Preparer>,
    preparation: OnceLock<PreparationThreads>,
    /// Requests whose inputs wait for a copy on the threads for heavy work.
    copied_apart: Arc<AtomicUsize>,
    state: Mutex<State>,
    lock_waits: LockWaits,
    /// The next timer is earlier than before, or the node stops.
    timer_changed: Condvar,
    /// The last pending request ended, or its reply was sent.
    idle: Condvar,
    /// Replies that are due and not sent, and requests whose sizes are not prepared.
    unsent: AtomicUsize,
    /// A thread waits until all replies are sent.
    drain_waits: AtomicBool,
}

struct State {
    core: Core,
    actions: Vec<Action>,
    jobs: Vec<Option<Job>>,
    models: Vec<Option<ModelEntry>>,
    next_generation: u64,
    armed_timer: Option<Nanos>,
    record: PreemptionRecord,
    spans: SpanRing,
    totals: DeviceTotals,
    batches: Batches,
    draining: bool,
    drain_sent: bool,
    swaps: SwapStats,
    /// Why the device takes no more requests.
    fault: Option<DeviceError>,
    /// Everything was answered, and nothing that the device does matters any more.
    abandoned: bool,
    /// By queue: the run that the watchdog looked at last, and its progress.
    watched: Vec<Option<(RequestId, Nanos, u64)>>,
    stopping: bool,
}

/// A job of the core: a request, or a batch.
struct Job {
    /// Its number in the spans.
    number: u64,
    model: ModelId,
    class: Class,
    priority: u32,
    deadline: Nanos,
    task: Option<Box<dyn Task>>,
    outputs: Option<Vec<Tensor>>,
    failure: Option<DeviceError>,
    reply_to: ReplyTarget,
    rows: usize,
    timing: Timing,
    launched: bool,
}

/// Who gets the reply of a job.
enum ReplyTarget {
    Request(ReplyFn),
    /// The members of the batch, which the batcher knows.
    Members,
}

impl Job {
    fn new(
        number: u64,
        model: ModelId,
        (class, priority, deadline): (Class, u32, Nanos),
        task: Option<Box<dyn Task>>,
        reply_to: ReplyTarget,
        timing: Timing,
    ) -> Job {
        Job {
            number,
            model,
            class,
            priority,
            deadline,
            task,
            outputs: None,
            failure: None,
            reply_to,
            rows: 0,
            timing,
            launched: false,
        }
    }
}

struct ModelEntry {
    generation: u64,
    program: Arc<dyn Program>,
    /// Its weights, if they are loaded and evicted.
    weights: Option<EntryWeights>,
    defaults: Defaults,
    queue_capacity: usize,
    stats: ModelStats,
    preemption_stats: PreemptionStats,
    totals: TotalsByClass,
    batching: Option<(ModelBatcher, BatchStaging)>,
    /// How its requests could be padded to a common length, and how they are.
    padding_rule: Option<LengthPadding>,
    padding: Option<Arc<CheckedPadding>>,
    /// When the batcher must be updated.
    batch_timer: Option<Nanos>,
    /// No more requests are accepted; the core is notified when the batcher is empty.
    removed: bool,
    removal_sent: bool,
}

#[derive(Clone, Copy)]
struct Defaults {
    class: Class,
    priority: u32,
    timeout: Option<Nanos>,
    /// The SLO: what takes longer has missed it.
    objective: Option<Nanos>,
}

/// A reply that is sent when the lock is released.
type DueReply = (ReplyFn, Reply);

/// The queue command of an action. Adjacent commands are sent in one call.
fn queue_command(action: &Action) -> Option<(usize, QueueCommand)> {
    match *action {
        Action::Preempt { queue, .. } => Some((queue, QueueCommand::Preempt)),
        Action::Confine { queue, confined } => Some((queue, QueueCommand::Confine(confined))),
        _ => None,
    }
}

/// Resumes best effort when replies are sent, also after a panic of a reply callback.
struct ResumeBestEffort<'a>(&'a Shared);

impl Drop for ResumeBestEffort<'_> {
    fn drop(&mut self) {
        self.0.handle(Event::RepliesSent);
    }
}

impl Node {
    /// Starts a node on `device`.
    pub fn start(
        device: Arc<dyn Device>,
        options: NodeOptions,
        clock: Arc<dyn Clock>,
    ) -> Result<Node, NodeError> {
        let capabilities = device.capabilities();
        let policy = layout::policy(&options.policy, capabilities)?;
        let rules = policy.rules(capabilities);
        let info = device.info();
        let queues = layout::layout(&rules, info.preemption, info.queues, &options);
        let opened: Vec<_> = layout::queue_options(&rules, queues).collect();
        let budget = options.memory.unwrap_or(info.memory);
        let core = CoreOptions {
            queues,
            max_requests: options.max_requests,
            best_effort_share_percent: options.best_effort_share_percent,
            memory_bytes: Some(budget.0),
            max_concurrent_loads: weights::MAX_CONCURRENT_LOADS,
            load_patience: weights::LOAD_PATIENCE,
            drain_after: weights::DRAIN_AFTER,
            capabilities,
            max_rt_slowdown: options.max_rt_slowdown_percent / 100.0,
            reply_before_best_effort: true,
            // Two looks at a run show whether it makes progress.
            watchdog: options.watchdog.map(|limit| Nanos(limit.0 / 2)),
            ..CoreOptions::default()
        };
        let state = State {
            core: Core::with_policy(core, policy),
            actions: Vec::new(),
            jobs: Vec::new(),
            models: Vec::new(),
            next_generation: 0,
            armed_timer: None,
            record: PreemptionRecord::new(opened.len(), options.preemptions_kept),
            spans: SpanRing::new(options.spans_kept),
            totals: DeviceTotals::default(),
            batches: Batches::default(),
            draining: false,
            drain_sent: false,
            swaps: SwapStats::default(),
            fault: None,
            abandoned: false,
            watched: vec![None; opened.len()],
            stopping: false,
        };
        let no_thread = |device: &dyn Device, err: std::io::Error| DeviceError::Faulted {
            device: device.info().name.clone(),
            reason: format!("cannot start a node thread: {err}"),
        };
        let discard = Discard::start().map_err(|err| no_thread(&*device, err))?;
        let shared = Arc::new_cyclic(|own| Shared {
            own: own.clone(),
            budget,
            discard,
            device,
            clock,
            observer: options.observer,
            max_requests: options.max_requests,
            best_effort: rules.best_effort,
            announces_arrivals: layout::announces_arrivals(&rules, queues),
            queues: OnceLock::new(),
            preparer: OnceLock::new(),
            preparation: OnceLock::new(),
            copied_apart: Arc::default(),
            state: Mutex::new(state),
            lock_waits: LockWaits::default(),
            timer_changed: Condvar::new(),
            idle: Condvar::new(),
            unsent: AtomicUsize::new(0),
            drain_waits: AtomicBool::new(false),
        });
        let sink: Arc<dyn CompletionSink> = Arc::new(Sink(Arc::downgrade(&shared)));
        let mut queues = Vec::with_capacity(opened.len());
        for options in opened {
            queues.push(shared.device.open_queue(options, sink.clone())?);
        }
        let _ = shared.queues.set(queues);
        let preparer = Preparer::start(Arc::downgrade(&shared));
        let _ = shared.preparer.set(preparer.map_err(|err| no_thread(&*shared.device, err))?);
        let threads = PreparationThreads::start(&Arc::downgrade(&shared));
        let _ = shared.preparation.set(threads.map_err(|err| no_thread(&*shared.device, err))?);
        let timed = shared.clone();
        let timer = std::thread::Builder::new()
            .name("node-timer".to_string())
            .spawn(move || timed.run_timer())
            .map_err(|err| no_thread(&*shared.device, err))?;
        Ok(Node { shared, timer: Some(timer) })
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.shared.device
    }

    /// The name of its policy.
    pub fn policy(&self) -> &'static str {
        self.shared.lock().core.policy_name()
    }

    /// The clock of all timings.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.shared.clock
    }

    /// Adds a loaded program under a new key. Requests may follow at once.
    pub fn add_model(&self, program: Arc<dyn Program>, config: &ModelConfig) -> ModelKey {
        let level = self.shared.device.info().preemption;
        let BatchSettings { batching, padding_rule } = BatchSettings::of(&*program, config, level);
        let prepared = batching.as_ref().map(|(batcher, _)| {
            (program.clone(), batcher.rules().batches(), batcher.rules().workers.len())
        });
        let mut state = self.shared.lock();
        state.next_generation += 1;
        let generation = state.next_generation;
        let slot = state.models.iter().position(Option::is_none).unwrap_or(state.models.len());
        let entry = ModelEntry {
            generation,
            defaults: settings::defaults(config),
            queue_capacity: config.queue_capacity,
            stats: ModelStats::default(),
            preemption_stats: PreemptionStats::default(),
            totals: TotalsByClass::default(),
            batching,
            padding_rule,
            padding: None,
            batch_timer: None,
            removed: false,
            removal_sent: false,
            weights: EntryWeights::of(&*program, config.pinned),
            program,
        };
        let model = ModelId(slot as u32);
        let steps = entry.program.plan().steps.len();
        let queue_capacity = entry.core_queue_capacity();
        let mut events = VecDeque::from([Event::ModelAdded { model, steps, queue_capacity }]);
        if let Some((_, _, max_running)) = prepared {
            events.push_back(Event::ModelConcurrency { model, max_running });
        }
        if slot == state.models.len() {
            state.models.push(None);
        }
        let weights = entry.weights.as_ref().map(|weights| weights.event(ModelId(slot as u32)));
        state.models[slot] = Some(entry);
        self.shared.run(state, events);
        if let Some(event) = weights {
            self.shared.handle(event);
        }
        let key = ModelKey { slot: slot as u32, generation };
        if let Some((program, batches, _)) = prepared {
            self.shared.prepare_batches(key, &program, batches);
        }
        key
    }

    /// Whether requests of `model` are batched.
    pub fn is_batched(&self, model: ModelKey) -> bool {
        self.shared.lock().model(model).is_some_and(ModelEntry::is_batched)
    }

    /// Accepts no more requests for `model`, finishes the pending ones and frees it. `false` when
    /// there is no such model.
    pub fn remove_model(&self, model: ModelKey) -> bool {
        let mut state = self.shared.lock();
        let Some(entry) = state.model_mut(model) else { return false };
        entry.removed = true;
        state.batches.due.push(ModelId(model.slot));
        if state.model(model).is_some_and(|entry| entry.batching.is_none()) {
            self.shared.step(state, Event::ModelRemoved { model: ModelId(model.slot) });
        } else {
            self.shared.run(state, VecDeque::new());
        }
        true
    }

    /// Counters of `model`.
    pub fn stats(&self, model: ModelKey) -> Option<ModelStats> {
        let state = self.shared.lock();
        let mut stats = state.model(model)?.stats.clone();
        let batcher = state.model(model)?.batching.as_ref().map(|(batcher, _)| batcher);
        let (jobs, members) = batcher.map_or((0, 0), |b| (b.jobs(), b.pending()));
        let pending = state.core.request_counts(ModelId(model.slot)).1.saturating_sub(jobs);
        stats.pending = (pending + members) as u64;
        Some(stats)
    }

    /// How long preemptions of `model` took, and how many it caused.
    pub fn preemption_stats(&self, model: ModelKey) -> Option<PreemptionStats> {
        Some(self.shared.lock().model(model)?.preemption_stats.clone())
    }

    /// How often real time ran beside best effort.
    pub fn co_run_counts(&self) -> CoRunCounts {
        self.shared.lock().core.co_run_counts()
    }

    /// The latest preemptions.
    pub fn preemptions(&self) -> PreemptionLog {
        self.shared.lock().record.snapshot()
    }

    /// Contention of the node's lock.
    pub fn contention(&self) -> LockContention {
        self.shared.lock_waits.read()
    }

    /// Memory that its programs hold.
    pub fn resident(&self) -> Bytes {
        let state = self.shared.lock();
        Bytes(state.models.iter().flatten().map(|entry| entry.program.resident().0).sum())
    }

    /// Accepts no more requests. Returns when none is pending and every reply is sent, or `false`
    /// after `limit`.
    pub fn drain(&self, limit: Duration) -> bool {
        self.shared.drain_waits.store(true, Ordering::SeqCst);
        let mut state = self.shared.lock();
        state.draining = true;
        let mut events = VecDeque::new();
        state.drain_if_empty(&mut events);
        self.shared.run(state, events);
        let end = self.shared.clock.now() + Nanos::from(limit);
        let mut state = self.shared.lock();
        let unsent = || self.shared.unsent.load(Ordering::SeqCst);
        while state.pending() + unsent() > 0 {
            let remaining = end - self.shared.clock.now();
            if remaining == Nanos::ZERO {
                return false;
            }
            state = self
                .shared
                .idle
                .wait_timeout(state, remaining.into())
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
            // The timer thread holds no lock while it sleeps; a panic there has been reported
            // already.
            let _ = timer.join();
        }
    }
}

impl State {
    /// The next timer of the core or of a batcher.
    fn next_timer(&self) -> Option<Nanos> {
        let timers = self.core.next_timer().into_iter().chain(self.batch_timer());
        timers.filter(|_| !self.abandoned).min()
    }

    /// Number of pending requests and batches.
    fn pending(&self) -> usize {
        match self.abandoned {
            true => 0,
            false => self.core.pending() + self.batches.members,
        }
    }

    fn model(&self, key: ModelKey) -> Option<&ModelEntry> {
        let entry = self.models.get(key.slot as usize)?.as_ref()?;
        (entry.generation == key.generation).then_some(entry)
    }

    fn model_mut(&mut self, key: ModelKey) -> Option<&mut ModelEntry> {
        let entry = self.models.get_mut(key.slot as usize)?.as_mut()?;
        (entry.generation == key.generation).then_some(entry)
    }

    fn key(&self, model: ModelId) -> Option<ModelKey> {
        let entry = self.models.get(model.0 as usize)?.as_ref()?;
        Some(ModelKey { slot: model.0, generation: entry.generation })
    }

    fn job(&self, request: RequestId) -> Option<&Job> {
        self.jobs.get(request.slot())?.as_ref()
    }

    fn keep(&mut self, id: RequestId, job: Job) {
        if id.slot() >= self.jobs.len() {
            self.jobs.resize_with(id.slot() + 1, || None);
        }
        self.jobs[id.slot()] = Some(job);
    }
}

impl Shared {
    fn handle(&self, event: Event) {
        self.step(self.lock(), event);
    }

    /// Feeds the core, carries out its actions and sends the replies that are due.
    fn step(&self, state: MutexGuard<'_, State>, event: Event) {
        self.run(state, VecDeque::from([event]));
    }

    fn run(&self, mut state: MutexGuard<'_, State>, mut events: VecDeque<Event>) {
        if state.abandoned {
            return;
        }
        let mut due: Vec<DueReply> = Vec::new();
        loop {
            if events.is_empty() {
                self.update_batchers(&mut state, &mut events, &mut due);
            }
            let Some(event) = events.pop_front() else { break };
            let now = self.clock.now();
            if let Some(observer) = &self.observer {
                observer.event(now, &event);
            }
            let mut actions = std::mem::take(&mut state.actions);
            state.core.step(now, event, &mut actions);
            self.record_actions(&mut state, now, &actions);
            let mut commands = Vec::new();
            for action in actions.drain(..) {
                if let Some(command) = queue_command(&action) {
                    commands.push(command);
                    continue;
                }
                self.send_commands(&mut commands);
                self.act(&mut state, now, action, &mut events, &mut due);
            }
            self.send_commands(&mut commands);
            state.actions = actions;
        }
        self.rearm_timer(&mut state);
        if state.core.pending() + state.batches.members == 0 {
            self.idle.notify_all();
        }
        let resume = state.core.awaits_replies().then(|| ResumeBestEffort(self));
        self.unsent.fetch_add(due.len(), Ordering::SeqCst);
        drop(state);
        for (send, reply) in due {
            self.send(send, reply);
        }
        drop(resume);
    }

    /// Sends a reply that is counted in `unsent`.
    fn send(&self, send: ReplyFn, reply: Reply) {
        send(reply);
        self.unsent.fetch_sub(1, Ordering::SeqCst);
        if self.drain_waits.load(Ordering::SeqCst) {
            let _state = self.lock();
            self.idle.notify_all();
        }
    }

    /// Sends all `commands` in one call.
    fn send_commands(&self, commands: &mut Vec<(usize, QueueCommand)>) {
        if commands.is_empty() {
            return;
        }
        let queues = self.queues.get().map(Vec::as_slice).unwrap_or_default();
        let to = |(queue, command): (usize, QueueCommand)| Some((&**queues.get(queue)?, command));
        let commands: Vec<(&dyn Queue, QueueCommand)> = commands.drain(..).filter_map(to).collect();
        self.device.command(&commands);
    }

    fn act(
        &self,
        state: &mut State,
        now: Nanos,
        action: Action,
        events: &mut VecDeque<Event>,
        due: &mut Vec<DueReply>,
    ) {
        match action {
            Action::Launch { queue, request, .. } => {
                let formed = self.form_batch(state, now, request, events);
                let Some(job) = state.jobs.get_mut(request.slot()).and_then(Option::as_mut) else {
                    return;
                };
                let first = !std::mem::replace(&mut job.launched, true);
                if first {
                    job.timing.started = now;
                }
                let Some(task) = job.task.take() else {
                    job.failure = formed.err();
                    events.push_back(Event::SegmentFailed { queue, busy: Nanos::ZERO });
                    return;
                };
                // The core counts steps of the plan; the device may have fused or split them.
                let steps = task.next_step()..task.step_count();
                if let Some(slot) = state.record.queues.get_mut(queue) {
                    *slot = Some(QueueJob {
                        request,
                        first_step: steps.start,
                        began: now,
                        preempt_request: None,
                    });
                }
                let segment = Segment { token: request.slot() as u64, task, steps };
                let queues = self.queues.get().map(Vec::as_slice).unwrap_or_default();
                let launched = match queues.get(queue) {
                    Some(queue) => queue.launch(segment).is_ok(),
                    None => false,
                };
                if first {
                    job.timing.launched = self.clock.now();
                }
                if !launched {
                    job.failure = Some(DeviceError::Faulted {
                        device: self.device.info().name.clone(),
                        reason: "a queue refused a segment".to_string(),
                    });
                    events.push_back(Event::SegmentFailed { queue, busy: Nanos::ZERO });
                }
            }
            Action::End { request, end } => {
                let job = state.jobs.get_mut(request.slot()).and_then(Option::take);
                match job {
                    Some(job) if matches!(job.reply_to, ReplyTarget::Members) => {
                        self.end_batch(state, now, (request, end), job, due);
                    }
                    Some(job) => due.extend(self.finish(state, now, job, end)),
                    None => {}
                }
            }
            Action::FreeModel { model } => {
                if let Some(entry) = state.models[model.0 as usize].take() {
                    self.discard.discard(entry.program);
                }
            }
            Action::Load { model, urgent } => self.start_load(state, now, model, urgent),
            Action::Evict { model } => state.evict(now, model),
            Action::ResetDevice => {
                if self.makes_progress(state, now) {
                    events.push_back(Event::DeviceAlive);
                    return;
                }
                let device = self.device.info().name.clone();
                tracing::error!(device, "device does not respond; new requests are refused");
                let reason = "a run made no progress in time".to_string();
                state.fault = Some(DeviceError::Faulted { device, reason });
            }
            // Queue commands are sent before; no device declares a capability for the last.
            action @ (Action::Preempt { .. } | Action::Confine { .. } | Action::Sim(_)) => {
                tracing::error!(?action, "action not supported by the device");
            }
        }
    }

    fn rearm_timer(&self, state: &mut State) {
        let next = state.next_timer();
        if next != state.armed_timer {
            let sooner = next.unwrap_or(Nanos::MAX) < state.armed_timer.unwrap_or(Nanos::MAX);
            state.armed_timer = next;
            if sooner {
                self.timer_changed.notify_one();
            }
        }
    }

    /// Sleeps until the next timer and reports it.
    fn run_timer(&self) {
        loop {
            let state = self.lock();
            if state.stopping {
                return;
            }
            let now = self.clock.now();
            match state.next_timer() {
                Some(at) if at <= now => {
                    let _turn = thread_watch::turn();
                    self.step(state, Event::Timer);
                }
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
}

#[cfg(test)]
mod tests;
