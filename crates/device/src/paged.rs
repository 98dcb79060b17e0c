//! A device whose weights are loaded and evicted, on top of one whose weights always stay. Tests
//! and benchmarks exercise memory management with it, without a GPU.
//!
//! It wraps the programs of the inner device. A load takes the time that its bytes need at a given
//! rate. A run without weights fails, and so does every violation of the rules of [`Residency`];
//! violations are counted.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::{Bytes, Nanos};
use model::{LaunchPlan, Tensor};

use crate::residency::{LoadCallback, LoadProgress, MemoryUse, Residency};
use crate::{
    Completion, CompletionSink, Device, DeviceError, DeviceInfo, DeviceReadings, InjectedFault,
    Outcome, Program, Queue, QueueOptions, RecordedStep, Segment, Task, TuningProgress,
};

/// Properties of the memory.
#[derive(Clone, Copy, Debug)]
pub struct PagedDeviceOptions {
    /// Bytes for weights; a load beyond them fails.
    pub memory: Bytes,
    /// Rate of loads in bytes per second; 0 for instant loads.
    pub bytes_per_second: u64,
    /// Percentage of the weights that must be loaded before tasks may start.
    pub runnable_percent: u32,
    /// Bytes added to what the inner device reports for each program.
    pub added: Bytes,
}

/// A device whose weights are loaded and evicted.
pub struct PagedDevice {
    inner: Arc<dyn Device>,
    pager: Arc<Pager>,
}

impl PagedDevice {
    /// Wraps `inner` with memory as in `options`.
    pub fn new(
        inner: Arc<dyn Device>,
        options: PagedDeviceOptions,
    ) -> std::io::Result<PagedDevice> {
        let pager = Arc::new(Pager {
            options,
            device: inner.info().name.clone(),
            commands: Mutex::default(),
            command_sent: Condvar::new(),
            held: AtomicU64::new(0),
            max_held: AtomicU64::new(0),
            violations: AtomicU64::new(0),
        });
        let worker = pager.clone();
        std::thread::Builder::new().name("paged".to_string()).spawn(move || worker.run())?;
        Ok(PagedDevice { inner, pager })
    }

    /// Wraps a program of the inner device whose weights have `bytes`.
    pub fn wrap(&self, program: Arc<dyn Program>, bytes: Bytes) -> Arc<dyn Program> {
        let weights = Weights { pager: self.pager.clone(), bytes, state: Mutex::default() };
        Arc::new(PagedProgram { inner: program, weights: Arc::new(weights) })
    }

    /// Number of violations: tasks started without weights, weights evicted under a running task,
    /// resident weights loaded again.
    pub fn violations(&self) -> u64 {
        self.pager.violations.load(Ordering::SeqCst)
    }

    /// Maximum of resident bytes so far.
    pub fn max_held(&self) -> Bytes {
        Bytes(self.pager.max_held.load(Ordering::SeqCst))
    }
}

impl Drop for PagedDevice {
    fn drop(&mut self) {
        self.pager.lock().closed = true;
        self.pager.command_sent.notify_all();
    }
}

impl Device for PagedDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn fault(&self) -> Option<DeviceError> {
        self.inner.fault()
    }

    fn give_up(&self, reason: &str) {
        self.inner.give_up(reason);
    }

    fn inject(&self, fault: InjectedFault) -> Result<(), DeviceError> {
        self.inner.inject(fault)
    }

    fn unsupported_steps(&self, plan: &LaunchPlan) -> Vec<DeviceError> {
        self.inner.unsupported_steps(plan)
    }

    fn load(&self, plan: Arc<LaunchPlan>) -> Result<Arc<dyn Program>, DeviceError> {
        let program = self.inner.load(plan)?;
        let bytes = Bytes(program.resident().0.max(1) + self.pager.options.added.0);
        Ok(self.wrap(program, bytes))
    }

    fn open_queue(
        &self,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<Box<dyn Queue>, DeviceError> {
        let wrappers =
            Arc::new(TaskWrappers { sink, pager: self.pager.clone(), running: Mutex::default() });
        let inner = self.inner.open_queue(options, wrappers.clone())?;
        Ok(Box::new(PagedQueue { inner, wrappers, id: options.id }))
    }

    fn memory_use(&self) -> Option<MemoryUse> {
        let weights = Bytes(self.pager.held.load(Ordering::SeqCst));
        let max_weights = self.max_held();
        Some(MemoryUse { weights, max_weights, ..MemoryUse::default() })
    }

    fn readings(&self) -> Option<DeviceReadings> {
        self.inner.readings()
    }
}

/// Carries commands running, one after another.
struct Pager {
    options: PagedDeviceOptions,
    device: String,
    commands: Mutex<CommandQueue>,
    command_sent: Condvar,
    held: AtomicU64,
    max_held: AtomicU64,
    violations: AtomicU64,
}

/// Bounded: at most load, evict, load per program, and one refusal per queue.
#[derive(Default)]
struct CommandQueue {
    waiting: VecDeque<PagerCommand>,
    closed: bool,
}

enum PagerCommand {
    Load(Arc<Weights>, LoadCallback),
    Evict(Arc<Weights>),
    /// Return a segment that may not run.
    Refuse(Arc<dyn CompletionSink>, Completion),
}

impl Pager {
    fn lock(&self) -> MutexGuard<'_, CommandQueue> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, command: PagerCommand) {
        let mut commands = self.lock();
        if commands.closed {
            return;
        }
        commands.waiting.push_back(command);
        drop(commands);
        self.command_sent.notify_one();
    }

    fn fault(&self, reason: &str) -> DeviceError {
        DeviceError::Faulted { device: self.device.clone(), reason: reason.to_string() }
    }

    fn violation(&self, what: &str) {
        self.violations.fetch_add(1, Ordering::SeqCst);
        // Shown with the output of a failing test.
        eprintln!("paged device: {what}");
    }

    fn run(&self) {
        loop {
            let mut commands = self.lock();
            let command = loop {
                match commands.waiting.pop_front() {
                    Some(command) => break command,
                    None if commands.closed => return,
                    None => {
                        commands = self
                            .command_sent
                            .wait(commands)
                            .unwrap_or_else(PoisonError::into_inner);
                    }
                }
            };
            drop(commands);
            match command {
                PagerCommand::Load(weights, report) => self.load(&weights, &report),
                PagerCommand::Evict(weights) => self.evict(&weights),
                PagerCommand::Refuse(sink, completion) => sink.complete(completion),
            }
        }
    }

    fn load(&self, weights: &Weights, report: &LoadCallback) {
        let bytes = weights.bytes.0;
        let held = self.held.load(Ordering::SeqCst);
        if held + bytes > self.options.memory.0 {
            let available = Bytes(self.options.memory.0.saturating_sub(held));
            let (device, needed) = (self.device.clone(), weights.bytes);
            let err = DeviceError::OutOfMemory { device, needed, available };
            return report(LoadProgress::Failed(err));
        }
        {
            let mut state = weights.lock();
            if state.location != WeightState::Absent {
                self.violation("resident weights are loaded again");
            }
            state.location = WeightState::Loading;
        }
        let held = self.held.fetch_add(bytes, Ordering::SeqCst) + bytes;
        self.max_held.fetch_max(held, Ordering::SeqCst);
        let first = u64::from(self.options.runnable_percent.min(100));
        self.transfer(bytes / 100 * first);
        weights.lock().location = WeightState::Resident;
        if first < 100 {
            report(LoadProgress::Runnable);
            self.transfer(bytes - bytes / 100 * first);
        }
        report(LoadProgress::Loaded);
    }

    fn transfer(&self, bytes: u64) {
        let speed = self.options.bytes_per_second;
        if speed > 0 {
            let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(speed);
            std::thread::sleep(Duration::from_nanos(nanos as u64));
        }
    }

    fn evict(&self, weights: &Weights) {
        let mut state = weights.lock();
        if state.users > 0 {
            self.violation("weights are evicted under a running task");
        }
        if state.location != WeightState::Absent {
            state.location = WeightState::Absent;
            self.held.fetch_sub(weights.bytes.0, Ordering::SeqCst);
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum WeightState {
    #[default]
    Absent,
    Loading,
    Resident,
}

#[derive(Default)]
struct WeightsState {
    location: WeightState,
    /// Running segments.
    users: usize,
}

struct Weights {
    pager: Arc<Pager>,
    bytes: Bytes,
    state: Mutex<WeightsState>,
}

impl Weights {
    fn lock(&self) -> MutexGuard<'_, WeightsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The weights of a program, for the node.
struct PagedResidency(Arc<Weights>);

impl Residency for PagedResidency {
    fn bytes(&self) -> Bytes {
        self.0.bytes
    }

    fn load(&self, _urgent: bool, report: LoadCallback) {
        self.0.pager.send(PagerCommand::Load(self.0.clone(), report));
    }

    fn evict(&self) {
        self.0.pager.send(PagerCommand::Evict(self.0.clone()));
    }
}

struct PagedProgram {
    inner: Arc<dyn Program>,
    weights: Arc<Weights>,
}

impl Drop for PagedProgram {
    fn drop(&mut self) {
        self.weights.pager.send(PagerCommand::Evict(self.weights.clone()));
    }
}

impl Program for PagedProgram {
    fn plan(&self) -> &Arc<LaunchPlan> {
        self.inner.plan()
    }

    fn resident(&self) -> Bytes {
        match self.weights.lock().location {
            WeightState::Absent => Bytes(0),
            WeightState::Loading | WeightState::Resident => self.weights.bytes,
        }
    }

    fn prepare(&self, inputs: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError> {
        let inner = Some(self.inner.prepare(inputs)?);
        Ok(Box::new(PagedTask { inner, weights: self.weights.clone() }))
    }

    fn recorded_steps(&self, shapes: &[Vec<usize>]) -> Vec<RecordedStep> {
        self.inner.recorded_steps(shapes)
    }

    fn tuning(&self) -> Option<TuningProgress> {
        self.inner.tuning()
    }

    fn residency(&self) -> Option<Arc<dyn Residency>> {
        Some(Arc::new(PagedResidency(self.weights.clone())))
    }
}

/// A task of the inner device; empty while it runs there.
struct PagedTask {
    inner: Option<Box<dyn Task>>,
    weights: Arc<Weights>,
}

impl Task for PagedTask {
    fn step_count(&self) -> usize {
        self.inner.as_ref().map_or(0, |inner| inner.step_count())
    }

    fn next_step(&self) -> usize {
        self.inner.as_ref().map_or(0, |inner| inner.next_step())
    }

    fn record_step_times(&mut self) {
        if let Some(inner) = &mut self.inner {
            inner.record_step_times();
        }
    }

    fn step_times(&self) -> Option<&[Nanos]> {
        self.inner.as_ref().and_then(|inner| inner.step_times())
    }

    fn into_outputs(mut self: Box<Self>) -> Result<Vec<Tensor>, DeviceError> {
        match self.inner.take() {
            Some(inner) => inner.into_outputs(),
            None => Err(DeviceError::BadPlan("the task is still running".to_string())),
        }
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

struct PagedQueue {
    inner: Box<dyn Queue>,
    wrappers: Arc<TaskWrappers>,
    id: u32,
}

/// Wrappers of tasks that run on the inner device, by inner token.
struct TaskWrappers {
    sink: Arc<dyn CompletionSink>,
    pager: Arc<Pager>,
    running: Mutex<RunningTasks>,
}

#[derive(Default)]
struct RunningTasks {
    next: u64,
    wrappers: HashMap<u64, (u64, Box<dyn Task>)>,
}

impl TaskWrappers {
    fn lock(&self) -> MutexGuard<'_, RunningTasks> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a task back into its wrapper; returns the outer token and the wrapper.
    fn take_wrapper(&self, inner_token: u64, inner: Box<dyn Task>) -> Option<(u64, Box<dyn Task>)> {
        let (token, mut wrapper) = self.lock().wrappers.remove(&inner_token)?;
        if let Some(own) = wrapper.as_any_mut().downcast_mut::<PagedTask>() {
            own.inner = Some(inner);
            own.weights.lock().users -= 1;
        }
        Some((token, wrapper))
    }
}

impl CompletionSink for TaskWrappers {
    fn complete(&self, completion: Completion) {
        let Completion { queue, token, task, outcome, busy } = completion;
        if let Some((token, task)) = self.take_wrapper(token, task) {
            self.sink.complete(Completion { queue, token, task, outcome, busy });
        }
    }
}

impl Queue for PagedQueue {
    fn launch(&self, segment: Segment) -> Result<(), Segment> {
        let Segment { token, task: mut wrapper, steps } = segment;
        let pager = &self.wrappers.pager;
        let Some(own) = wrapper.as_any_mut().downcast_mut::<PagedTask>() else {
            let err = DeviceError::BadPlan("the task belongs to another device".to_string());
            let outcome = Outcome::Failed(err);
            let refusal =
                Completion { queue: self.id, token, task: wrapper, outcome, busy: Nanos::ZERO };
            pager.send(PagerCommand::Refuse(self.wrappers.sink.clone(), refusal));
            return Ok(());
        };
        let weights = own.weights.clone();
        let mut state = weights.lock();
        let inner = own.inner.take().filter(|_| state.location == WeightState::Resident);
        let Some(inner) = inner else {
            drop(state);
            pager.violation("a task starts without its weights");
            let outcome = Outcome::Failed(pager.fault("the weights are not resident"));
            let refusal =
                Completion { queue: self.id, token, task: wrapper, outcome, busy: Nanos::ZERO };
            pager.send(PagerCommand::Refuse(self.wrappers.sink.clone(), refusal));
            return Ok(());
        };
        state.users += 1;
        drop(state);
        let inner_token = {
            let mut running = self.wrappers.lock();
            running.next += 1;
            let inner_token = running.next;
            running.wrappers.insert(inner_token, (token, wrapper));
            inner_token
        };
        match self.inner.launch(Segment { token: inner_token, task: inner, steps }) {
            Ok(()) => Ok(()),
            Err(Segment { token: inner_token, task, steps }) => {
                match self.wrappers.take_wrapper(inner_token, task) {
                    Some((token, task)) => Err(Segment { token, task, steps }),
                    // Only a completion removes a wrapper, so the segment was not refused after
                    // all.
                    None => Ok(()),
                }
            }
        }
    }

    fn preempt(&self) {
        self.inner.preempt();
    }
}
