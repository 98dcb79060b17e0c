//! Weights that come and go on a device that needs no such thing: what a node does about memory can be tried, timed and tested
//! without a GPU.
//!
//! Programs of the device below are wrapped. Bringing their weights takes the time their bytes need at a given speed. A run
//! without them fails, and so does everything that breaks the rules of [`Residency`]; each such case is counted.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::{Bytes, Nanos};
use model::{LaunchPlan, Tensor};

use crate::residency::{LoadProgress, LoadReport, MemoryUse, Residency};
use crate::{
    Completion, CompletionSink, Device, DeviceError, DeviceInfo, Outcome, Program, Queue,
    QueueOptions, Segment, Task,
};

/// How the memory behaves.
#[derive(Clone, Copy, Debug)]
pub struct PagedOptions {
    /// What there is for weights; a load beyond it fails.
    pub memory: Bytes,
    /// How fast weights are brought, in bytes per second; 0 for no time at all.
    pub bytes_per_second: u64,
    /// How much of them, in percent, must be there for runs to start.
    pub runnable_percent: u32,
    /// What each program counts beside what the device below says of it.
    pub added: Bytes,
}

/// A device whose programs' weights come and go.
pub struct Paged {
    inner: Arc<dyn Device>,
    pager: Arc<Pager>,
}

impl Paged {
    /// `inner` with memory that behaves like `options`.
    pub fn new(inner: Arc<dyn Device>, options: PagedOptions) -> std::io::Result<Paged> {
        let pager = Arc::new(Pager {
            options,
            device: inner.info().name.clone(),
            orders: Mutex::default(),
            given: Condvar::new(),
            held: AtomicU64::new(0),
            most_held: AtomicU64::new(0),
            violations: AtomicU64::new(0),
        });
        let worker = pager.clone();
        std::thread::Builder::new().name("paged".to_string()).spawn(move || worker.run())?;
        Ok(Paged { inner, pager })
    }

    /// `program` of the device below with weights of `bytes` that come and go.
    pub fn wrap(&self, program: Arc<dyn Program>, bytes: Bytes) -> Arc<dyn Program> {
        let weights = Weights { pager: self.pager.clone(), bytes, state: Mutex::default() };
        Arc::new(PagedProgram { inner: program, weights: Arc::new(weights) })
    }

    /// Runs without weights, evictions under a run, and loads of what is there: how often the rules were broken.
    pub fn violations(&self) -> u64 {
        self.pager.violations.load(Ordering::SeqCst)
    }

    /// The most bytes of weights that were there at once.
    pub fn most_held(&self) -> Bytes {
        Bytes(self.pager.most_held.load(Ordering::SeqCst))
    }
}

impl Drop for Paged {
    fn drop(&mut self) {
        self.pager.lock().closed = true;
        self.pager.given.notify_all();
    }
}

impl Device for Paged {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
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
        let shells = Arc::new(Shells { sink, pager: self.pager.clone(), out: Mutex::default() });
        let inner = self.inner.open_queue(options, shells.clone())?;
        Ok(Box::new(PagedQueue { inner, shells, id: options.id }))
    }

    fn memory_use(&self) -> Option<MemoryUse> {
        let weights = Bytes(self.pager.held.load(Ordering::SeqCst));
        let most_weights = self.most_held();
        Some(MemoryUse { weights, most_weights, ..MemoryUse::default() })
    }
}

/// Carries orders out, one after another.
struct Pager {
    options: PagedOptions,
    device: String,
    orders: Mutex<Orders>,
    given: Condvar,
    held: AtomicU64,
    most_held: AtomicU64,
    violations: AtomicU64,
}

/// At most a load, an eviction and a load again of each program, and one refusal of each queue.
#[derive(Default)]
struct Orders {
    waiting: VecDeque<Order>,
    closed: bool,
}

enum Order {
    Load(Arc<Weights>, LoadReport),
    Evict(Arc<Weights>),
    /// Give a segment back that may not run.
    Refuse(Arc<dyn CompletionSink>, Completion),
}

impl Pager {
    fn lock(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn order(&self, order: Order) {
        let mut orders = self.lock();
        if orders.closed {
            return;
        }
        orders.waiting.push_back(order);
        drop(orders);
        self.given.notify_one();
    }

    fn fault(&self, reason: &str) -> DeviceError {
        DeviceError::Faulted { device: self.device.clone(), reason: reason.to_string() }
    }

    fn violation(&self, what: &str) {
        self.violations.fetch_add(1, Ordering::SeqCst);
        // Whoever looks at a failing test's output finds it there.
        eprintln!("paged device: {what}");
    }

    fn run(&self) {
        loop {
            let mut orders = self.lock();
            let order = loop {
                match orders.waiting.pop_front() {
                    Some(order) => break order,
                    None if orders.closed => return,
                    None => {
                        orders = self.given.wait(orders).unwrap_or_else(PoisonError::into_inner);
                    }
                }
            };
            drop(orders);
            match order {
                Order::Load(weights, report) => self.load(&weights, &report),
                Order::Evict(weights) => self.evict(&weights),
                Order::Refuse(sink, completion) => sink.complete(completion),
            }
        }
    }

    fn load(&self, weights: &Weights, report: &LoadReport) {
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
            if state.place != Place::Absent {
                self.violation("weights are loaded that are there");
            }
            state.place = Place::Arriving;
        }
        let held = self.held.fetch_add(bytes, Ordering::SeqCst) + bytes;
        self.most_held.fetch_max(held, Ordering::SeqCst);
        let first = u64::from(self.options.runnable_percent.min(100));
        self.transfer(bytes / 100 * first);
        weights.lock().place = Place::There;
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
            self.violation("weights are evicted under a run");
        }
        if state.place != Place::Absent {
            state.place = Place::Absent;
            self.held.fetch_sub(weights.bytes.0, Ordering::SeqCst);
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Absent,
    Arriving,
    There,
}

#[derive(Default)]
struct WeightsState {
    place: Place,
    /// Segments that run.
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

/// What a program shows of its weights.
struct Handle(Arc<Weights>);

impl Residency for Handle {
    fn bytes(&self) -> Bytes {
        self.0.bytes
    }

    fn load(&self, _urgent: bool, report: LoadReport) {
        self.0.pager.order(Order::Load(self.0.clone(), report));
    }

    fn evict(&self) {
        self.0.pager.order(Order::Evict(self.0.clone()));
    }
}

struct PagedProgram {
    inner: Arc<dyn Program>,
    weights: Arc<Weights>,
}

impl Drop for PagedProgram {
    fn drop(&mut self) {
        self.weights.pager.order(Order::Evict(self.weights.clone()));
    }
}

impl Program for PagedProgram {
    fn plan(&self) -> &Arc<LaunchPlan> {
        self.inner.plan()
    }

    fn resident(&self) -> Bytes {
        match self.weights.lock().place {
            Place::Absent => Bytes(0),
            Place::Arriving | Place::There => self.weights.bytes,
        }
    }

    fn prepare(&self, inputs: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError> {
        let inner = Some(self.inner.prepare(inputs)?);
        Ok(Box::new(PagedTask { inner, weights: self.weights.clone() }))
    }

    fn residency(&self) -> Option<Arc<dyn Residency>> {
        Some(Arc::new(Handle(self.weights.clone())))
    }
}

/// A task of the device below; empty while it runs there.
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
            None => Err(DeviceError::BadPlan("outputs of a task that runs".to_string())),
        }
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

struct PagedQueue {
    inner: Box<dyn Queue>,
    shells: Arc<Shells>,
    id: u32,
}

/// The wrappers of tasks that run below, by the tickets they run under.
struct Shells {
    sink: Arc<dyn CompletionSink>,
    pager: Arc<Pager>,
    out: Mutex<Out>,
}

#[derive(Default)]
struct Out {
    next: u64,
    shells: HashMap<u64, (u64, Box<dyn Task>)>,
}

impl Shells {
    fn lock(&self) -> MutexGuard<'_, Out> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a task back into its wrapper; the wrapper's token and the wrapper.
    fn unpack(&self, ticket: u64, inner: Box<dyn Task>) -> Option<(u64, Box<dyn Task>)> {
        let (token, mut shell) = self.lock().shells.remove(&ticket)?;
        if let Some(own) = shell.as_any_mut().downcast_mut::<PagedTask>() {
            own.inner = Some(inner);
            own.weights.lock().users -= 1;
        }
        Some((token, shell))
    }
}

impl CompletionSink for Shells {
    fn complete(&self, completion: Completion) {
        let Completion { queue, token, task, outcome, busy } = completion;
        if let Some((token, task)) = self.unpack(token, task) {
            self.sink.complete(Completion { queue, token, task, outcome, busy });
        }
    }
}

impl Queue for PagedQueue {
    fn launch(&self, segment: Segment) -> Result<(), Segment> {
        let Segment { token, task: mut shell, steps } = segment;
        let pager = &self.shells.pager;
        let Some(own) = shell.as_any_mut().downcast_mut::<PagedTask>() else {
            let err = DeviceError::BadPlan("the task belongs to another device".to_string());
            let outcome = Outcome::Failed(err);
            let refusal =
                Completion { queue: self.id, token, task: shell, outcome, busy: Nanos::ZERO };
            pager.order(Order::Refuse(self.shells.sink.clone(), refusal));
            return Ok(());
        };
        let weights = own.weights.clone();
        let mut state = weights.lock();
        let inner = own.inner.take().filter(|_| state.place == Place::There);
        let Some(inner) = inner else {
            drop(state);
            pager.violation("a run starts without its weights");
            let outcome = Outcome::Failed(pager.fault("the weights are not there"));
            let refusal =
                Completion { queue: self.id, token, task: shell, outcome, busy: Nanos::ZERO };
            pager.order(Order::Refuse(self.shells.sink.clone(), refusal));
            return Ok(());
        };
        state.users += 1;
        drop(state);
        let ticket = {
            let mut out = self.shells.lock();
            out.next += 1;
            let ticket = out.next;
            out.shells.insert(ticket, (token, shell));
            ticket
        };
        match self.inner.launch(Segment { token: ticket, task: inner, steps }) {
            Ok(()) => Ok(()),
            Err(Segment { token: ticket, task, steps }) => {
                match self.shells.unpack(ticket, task) {
                    Some((token, task)) => Err(Segment { token, task, steps }),
                    // Only a completion takes a wrapper out, so the segment was not refused after all.
                    None => Ok(()),
                }
            }
        }
    }

    fn preempt(&self) {
        self.inner.preempt();
    }
}
