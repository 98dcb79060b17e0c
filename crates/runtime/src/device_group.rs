//! The devices of one server: a [`Node`] each, and one router above them.
//!
//! Each device is scheduled independently. The device group decides which device gets a request and
//! which devices hold a model ([`router`]). Replicas are loaded on a thread of the device group. A
//! faulted device is opened again ([`recovery`]).

pub mod recovery;
pub mod router;
mod settings;

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use base::{Bytes, Clock, Nanos};
use device::batch::rows_of;
use device::{DeviceError, MachineLimits, Program, TuningProgress};
use model::LaunchPlan;
use model::config::{Class, ModelConfig};

use crate::batching::StaggeredBatch;
use crate::node::{
    BatchTime, CheckedPadding, ModelKey, Node, Rejection, Reply, Request, RequestHandle, StepTimes,
    StepTimesError, refuse_at_once,
};

use self::recovery::{FaultDomain, RecoveryCounts};
use self::router::{
    GroupModelId, ReplicaChange, ReplicaCounts, ReplicaStatus, RequestEnd, RoutedRequest, Router,
};

/// Weights take at least this part of a plan's constants: a half in half precision, and half of
/// that where constants serve only shapes or are folded.
const LEAST_SHARE: u64 = 4;

/// How a device group evaluates load.
#[derive(Clone, Copy, Debug)]
pub struct DeviceGroupOptions {
    /// Interval of the evaluation.
    pub interval: Nanos,
    /// A queue is standing if every request of an interval waited longer than this.
    pub standing_wait: Nanos,
    /// Consecutive intervals with a standing queue before a model gets another replica.
    pub overloaded_intervals: u32,
    /// Consecutive intervals in which one replica fewer would be enough before one is removed.
    pub calm_intervals: u32,
    /// One fewer is enough when the rate is below this percentage of what the others served at
    /// their limit.
    pub calm_percent: u32,
    /// How long a faulted device is avoided.
    pub avoid: Nanos,
    /// Device time of a request while nothing is known of its model.
    pub unknown_cost: Nanos,
    /// Rate of loads while none was measured.
    pub bytes_per_second: u64,
}

impl Default for DeviceGroupOptions {
    fn default() -> Self {
        DeviceGroupOptions {
            interval: Nanos::from_millis(500),
            standing_wait: Nanos::from_millis(2),
            overloaded_intervals: 2,
            calm_intervals: 20,
            calm_percent: 60,
            avoid: Nanos::from_millis(5_000),
            unknown_cost: Nanos::from_millis(1),
            bytes_per_second: 10_000_000_000,
        }
    }
}

/// A program, and the device it was placed on.
pub struct PlacedProgram {
    /// Index of the device in the group.
    pub device: usize,
    /// The program.
    pub program: Arc<dyn Program>,
    /// Faults of the device before the program was loaded.
    pub faults: u64,
}

/// The steps of a model, measured.
#[derive(Clone, Debug)]
pub struct MeasuredSteps {
    /// The device in the group.
    pub device: usize,
    /// The times.
    pub times: StepTimes,
    /// What bounds steps on that device, if that was measured.
    pub limits: Option<MachineLimits>,
}

/// The devices of a server, with their router.
pub struct DeviceGroup {
    shared: Arc<Shared>,
    /// They balance load and open faulted devices again.
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    /// By device; a node is replaced when its device has faulted.
    nodes: RwLock<Vec<Arc<Node>>>,
    names: Vec<String>,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    router: Router,
    /// By slot of their id.
    entries: Vec<Option<Entry>>,
    due: VecDeque<ReplicaChange>,
    /// By device.
    recoveries: Vec<RecoveryCounts>,
    stopping: bool,
}

/// What is needed to load a model on another device.
struct Entry {
    model: GroupModelId,
    plan: Arc<LaunchPlan>,
    config: ModelConfig,
    /// By device.
    keys: Vec<Option<ModelKey>>,
    /// Measured batch times, and the kind of device they hold for.
    profile: Option<(String, Vec<BatchTime>)>,
    staggered: Option<StaggeredBatch>,
    /// How requests are padded, and the kind of device it was checked on.
    padding: Option<(String, Arc<CheckedPadding>)>,
}

impl DeviceGroup {
    /// Starts a device group of one or several nodes, which share one clock.
    pub fn start(
        nodes: Vec<Arc<Node>>,
        options: DeviceGroupOptions,
    ) -> Result<DeviceGroup, DeviceError> {
        DeviceGroup::start_with(nodes, options, Vec::new())
    }

    /// The same; devices of `domains` are opened again when they have faulted.
    pub fn start_with(
        nodes: Vec<Arc<Node>>,
        options: DeviceGroupOptions,
        domains: Vec<FaultDomain>,
    ) -> Result<DeviceGroup, DeviceError> {
        let Some(first) = nodes.first() else {
            return Err(DeviceError::BadPlan("a device group needs a device".to_string()));
        };
        let clock = first.clock().clone();
        let budgets: Vec<u64> = nodes.iter().map(|node| node.budget().0).collect();
        let router = Router::new(options, &budgets);
        let (count, names) = (nodes.len(), names(&nodes));
        let state = State {
            router,
            entries: Vec::new(),
            due: VecDeque::new(),
            recoveries: vec![RecoveryCounts::default(); count],
            stopping: false,
        };
        let shared = Arc::new(Shared {
            names,
            nodes: RwLock::new(nodes),
            clock,
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let mut group = DeviceGroup { shared, threads: Vec::new() };
        // One device needs no replicas.
        if count > 1 {
            group.spawn("device-group", Shared::balance)?;
        }
        for domain in domains {
            group.spawn("device-recovery", move |shared| shared.watch(&domain))?;
        }
        Ok(group)
    }

    fn spawn(
        &mut self,
        name: &str,
        work: impl FnOnce(&Shared) + Send + 'static,
    ) -> Result<(), DeviceError> {
        let shared = self.shared.clone();
        let spawned =
            std::thread::Builder::new().name(name.to_string()).spawn(move || work(&shared));
        let thread = spawned.map_err(|err| DeviceError::Faulted {
            device: self.shared.names[0].clone(),
            reason: format!("cannot start the thread {name}: {err}"),
        })?;
        self.threads.push(thread);
        Ok(())
    }

    /// A device group of this node alone.
    pub fn of(node: Arc<Node>) -> Result<DeviceGroup, DeviceError> {
        DeviceGroup::start(vec![node], DeviceGroupOptions::default())
    }

    /// Its nodes, one per device. A node is replaced when its device has faulted: do not keep it.
    pub fn nodes(&self) -> Vec<Arc<Node>> {
        self.shared.nodes()
    }

    /// The node of a device; do not keep it.
    pub fn node(&self, device: usize) -> Arc<Node> {
        self.shared.node(device)
    }

    /// The clock of all its nodes.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.shared.clock
    }

    /// Number of devices.
    pub fn device_count(&self) -> usize {
        self.shared.names.len()
    }

    /// The pinned host pool of the first device that has one. Other devices copy from it as from
    /// any memory.
    pub fn host_pool(&self) -> Option<Arc<dyn model::HostPool>> {
        self.nodes().iter().find_map(|node| node.device().host_pool())
    }

    /// The unique names of its devices.
    pub fn names(&self) -> &[String] {
        &self.shared.names
    }

    /// Loads `plan` on the best device for it. May take long.
    pub fn load(&self, plan: Arc<LaunchPlan>) -> Result<PlacedProgram, DeviceError> {
        // An estimate, before a device packs them.
        let bytes = plan.constant_bytes();
        self.check_may_fit(bytes)?;
        let (device, faults, node) = {
            let state = self.shared.lock();
            let home = state.router.home_for(self.shared.clock.now(), bytes);
            // The exact size is known after the load; the node refuses what can never fit.
            let home = home.or_else(|| state.router.home_for(self.shared.clock.now(), 0));
            let device = home.unwrap_or(0);
            (device, state.recoveries[device].faults, self.shared.node(device))
        };
        let program = node.device().load(plan)?;
        Ok(PlacedProgram { device, program, faults })
    }

    /// Refuses constants that fit on no device, before anything is compiled or allocated for them.
    fn check_may_fit(&self, bytes: u64) -> Result<(), DeviceError> {
        let needed = Bytes(bytes / LEAST_SHARE);
        let nodes = self.shared.nodes();
        let largest = nodes.iter().max_by_key(|node| node.budget().0);
        match largest.map(|node| (node.budget(), node.device().info())) {
            // A budget of 0 is that of a device which does not say.
            Some((available, info)) if available.0 > 0 && needed > available => {
                let device = info.name.clone();
                Err(DeviceError::OutOfMemory { device, needed, available })
            }
            _ => Ok(()),
        }
    }

    /// Why a model can never fit where it was placed; `None` when it can.
    pub fn cannot_fit(&self, placed: &PlacedProgram) -> Option<DeviceError> {
        self.shared.node(placed.device).cannot_fit(&*placed.program)
    }

    /// Adds a placed program. Requests may follow at once.
    pub fn add_model(&self, placed: PlacedProgram, config: &ModelConfig) -> GroupModelId {
        let PlacedProgram { device, program, faults } = placed;
        let (plan, bytes) = (program.plan().clone(), program_bytes(&*program));
        let node = self.shared.node(device);
        let key = node.add_model(program, config);
        let mut state = self.shared.lock();
        let model = state.router.add(device, bytes, settings::facts(config));
        let mut keys = vec![None; self.device_count()];
        // A model that was loaded before a fault is loaded again.
        let current = self.shared.is_current(&state, device, faults, &node);
        keys[device] = current.then_some(key);
        let (config, profile, staggered, padding) = (config.clone(), None, None, None);
        let entry = Entry { model, plan, config, keys, profile, staggered, padding };
        if model.slot() >= state.entries.len() {
            state.entries.resize_with(model.slot() + 1, || None);
        }
        state.entries[model.slot()] = Some(entry);
        model
    }

    /// Accepts no more requests for `model`, finishes the pending ones and frees it on all devices.
    /// `false` when there is no such model.
    pub fn remove_model(&self, model: GroupModelId) -> bool {
        let keys = {
            let mut state = self.shared.lock();
            if state.entry(model).is_none() {
                return false;
            }
            state.router.remove(model);
            let entry = state.entries[model.slot()].take();
            entry.map(|entry| entry.keys).unwrap_or_default()
        };
        for (node, key) in self.shared.nodes().iter().zip(keys) {
            if let Some(key) = key {
                node.remove_model(key);
            }
        }
        true
    }

    /// Submits a request to the device where it starts soonest. `reply` is called exactly once,
    /// from any thread, also when the request is refused at once.
    pub fn submit(
        &self,
        request: Request<GroupModelId>,
        reply: Box<dyn FnOnce(Reply) + Send>,
    ) -> RequestHandle {
        let shared = &self.shared;
        let now = shared.clock.now();
        let routed = shared.lock().route(shared, now, request.model, request.class);
        let (routed, key) = match routed {
            Ok(found) => found,
            Err(why) => return refuse_at_once(now, reply, why),
        };
        let rows = rows_of(&request.inputs);
        let request = request.with_model(key);
        let Some(routed) = routed else { return shared.node(0).submit(request, reply) };
        let device_group = Arc::downgrade(shared);
        let counted = move |outcome: Reply| {
            if let Some(device_group) = device_group.upgrade() {
                device_group.ended(routed, &outcome, rows);
            }
            reply(outcome);
        };
        shared.node(routed.device).submit(request, Box::new(counted))
    }

    /// The replicas of `model`, with their keys.
    pub fn replicas(&self, model: GroupModelId) -> Vec<(ReplicaStatus, ModelKey)> {
        let state = self.shared.lock();
        let Some(entry) = state.entry(model) else { return Vec::new() };
        let views = state.router.replicas(model).into_iter();
        views.filter_map(|view| Some((view, entry.keys[view.device]?))).collect()
    }

    /// Whether a device is ready to run `model`.
    pub fn is_loaded(&self, model: GroupModelId) -> bool {
        let state = self.shared.lock();
        state.entry(model).is_some_and(|entry| entry.keys.iter().any(Option::is_some))
    }

    /// Faults of a device so far, and how long it was out of service.
    pub fn recoveries(&self, device: usize) -> RecoveryCounts {
        self.shared.lock().recoveries[device]
    }

    /// Whether no device is left that this process can use: only a new process can serve again.
    pub fn is_lost(&self) -> bool {
        self.shared.lock().recoveries.iter().all(|counts| counts.lost)
    }

    /// Gives a device up as a fault would that only a new process recovers from: its pending
    /// requests are answered.
    ///
    /// # Errors
    /// When nothing can take the place of its node.
    pub fn lose(&self, device: usize, fault: &DeviceError) -> Result<(), DeviceError> {
        self.shared.lose(device, fault)
    }

    /// Goes on counting the faults of a device where another process stopped.
    pub fn restore_recoveries(&self, device: usize, earlier: RecoveryCounts) {
        if let Some(counts) = self.shared.lock().recoveries.get_mut(device) {
            counts.faults += earlier.faults;
            counts.recovered += earlier.recovered;
            counts.out_of_service += earlier.out_of_service;
        }
    }

    /// Replicas added and removed so far.
    pub fn changes(&self) -> ReplicaCounts {
        self.shared.lock().router.changes()
    }

    /// Measures batch times of `model` as best effort and sets them on all devices of the same
    /// kind. Takes about `limit`, plus the time of work that goes first.
    pub fn profile(&self, model: GroupModelId, limit: Duration) -> Vec<BatchTime> {
        let Some((view, key)) = self.replicas(model).into_iter().next() else { return Vec::new() };
        let times = self.shared.node(view.device).profile(key, limit);
        let kind = self.shared.kind(view.device);
        if let Some(entry) = self.shared.lock().entry_mut(model) {
            entry.profile = Some((kind.clone(), times.clone()));
        }
        for (other, key) in self.replicas(model) {
            if other.device != view.device && self.shared.kind(other.device) == kind {
                self.shared.node(other.device).set_profile(key, &times);
            }
        }
        times
    }

    /// Measures the steps of `model` on one of its devices, as best effort; with what bounds them
    /// there. Takes at most about `limit`.
    ///
    /// # Errors
    /// Why they cannot be measured.
    pub fn measure_steps(
        &self,
        model: GroupModelId,
        limit: Duration,
    ) -> Result<MeasuredSteps, StepTimesError> {
        let (view, key) =
            self.replicas(model).into_iter().next().ok_or(StepTimesError::NoSuchModel)?;
        let node = self.shared.node(view.device);
        let times = node.measure_steps(key, limit)?;
        Ok(MeasuredSteps { device: view.device, times, limits: node.device().limits() })
    }

    /// How far the steps of `model` are tuned on its devices; `None` where there is nothing to
    /// tune.
    pub fn tuning(&self, model: GroupModelId) -> Option<TuningProgress> {
        let replicas = self.replicas(model).into_iter();
        let tuned: Vec<TuningProgress> =
            replicas.filter_map(|(view, key)| self.shared.node(view.device).tuning(key)).collect();
        (!tuned.is_empty()).then(|| tuned.into_iter().sum())
    }

    /// Whether requests of `model` might be padded; [`DeviceGroup::check_padding`] tells.
    pub fn may_pad(&self, model: GroupModelId) -> bool {
        let mut replicas = self.replicas(model).into_iter();
        replicas.any(|(view, key)| self.shared.node(view.device).may_pad(key))
    }

    /// Checks whether requests of `model` that have different lengths may share a batch, with
    /// best-effort runs, and pads them from then on. `None` when its inputs have no mask; else the
    /// longest length, or why they are not padded. Takes about `limit`.
    pub fn check_padding(
        &self,
        model: GroupModelId,
        limit: Duration,
    ) -> Option<Result<usize, String>> {
        let (view, key) = self.replicas(model).into_iter().next()?;
        let node = self.shared.node(view.device);
        if !node.may_pad(key) {
            return None;
        }
        let padding = match node.check_padding(key, limit) {
            Ok(padding) => padding,
            Err(why) => return Some(Err(why)),
        };
        let kind = self.shared.kind(view.device);
        if let Some(entry) = self.shared.lock().entry_mut(model) {
            entry.padding = Some((kind.clone(), padding.clone()));
        }
        for (other, key) in self.replicas(model) {
            if self.shared.kind(other.device) == kind {
                self.shared.node(other.device).set_padding(key, Some(padding.clone()));
            }
        }
        Some(Ok(padding.max_length()))
    }

    /// The measured batch times of `model`.
    pub fn profile_of(&self, model: GroupModelId) -> Vec<BatchTime> {
        let state = self.shared.lock();
        let profile = state.entry(model).and_then(|entry| entry.profile.clone());
        profile.map(|(_, times)| times).unwrap_or_default()
    }

    /// Sets the batches of a backend pool for `model`, or returns to its settings. Only with one
    /// device: several devices are filled by the router's own rule.
    pub fn set_staggered_batch(&self, model: GroupModelId, staggered: Option<StaggeredBatch>) {
        if self.device_count() > 1 {
            return;
        }
        if let Some(entry) = self.shared.lock().entry_mut(model) {
            entry.staggered = staggered;
        }
        for (view, key) in self.replicas(model) {
            self.shared.node(view.device).set_staggered_batch(key, staggered);
        }
    }

    /// The largest batch of `model`; `None` without batching.
    pub fn max_batch(&self, model: GroupModelId) -> Option<usize> {
        let mut replicas = self.replicas(model).into_iter();
        replicas.find_map(|(view, key)| self.shared.node(view.device).max_batch(key))
    }

    /// Whether requests of `model` are batched.
    pub fn is_batched(&self, model: GroupModelId) -> bool {
        let mut replicas = self.replicas(model).into_iter();
        replicas.any(|(view, key)| self.shared.node(view.device).is_batched(key))
    }

    /// Loads the weights of a model on its devices, into free memory.
    pub fn preload(&self, model: GroupModelId) {
        for (view, key) in self.replicas(model) {
            self.shared.node(view.device).preload(key);
        }
    }

    /// Accepts no more requests. Returns when none is pending and every reply is sent, or `false`
    /// after `limit`.
    pub fn drain(&self, limit: Duration) -> bool {
        let end = self.shared.clock.now() + Nanos::from(limit);
        // All nodes start to drain before one is waited for.
        let nodes = self.shared.nodes();
        let drained = nodes.iter().map(|node| node.drain(Duration::ZERO)).collect::<Vec<_>>();
        nodes
            .iter()
            .zip(drained)
            .all(|(node, done)| done || node.drain((end - self.shared.clock.now()).into()))
    }

    /// Waits until all removed programs without requests are dropped; `false` after `limit`.
    pub fn wait_discarded(&self, limit: Duration) -> bool {
        let end = self.shared.clock.now() + Nanos::from(limit);
        let remaining = || (end - self.shared.clock.now()).into();
        self.shared.nodes().iter().all(|node| node.wait_discarded(remaining()))
    }
}

impl Drop for DeviceGroup {
    fn drop(&mut self) {
        self.shared.lock().stopping = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A panic there has been reported already.
            let _ = thread.join();
        }
    }
}

/// Bytes of a model's weights on a device.
fn program_bytes(program: &dyn Program) -> u64 {
    match program.residency() {
        Some(residency) => residency.bytes().0,
        None => program.resident().0,
    }
}

/// The names of the devices; equal names get a number.
fn names(nodes: &[Arc<Node>]) -> Vec<String> {
    let name = |node: &Arc<Node>| node.device().info().name.clone();
    let all: Vec<String> = nodes.iter().map(name).collect();
    let numbered = |(index, name): (usize, &String)| match all.iter().filter(|n| *n == name).count()
    {
        1 => name.clone(),
        _ => format!("{name}#{}", all[..index].iter().filter(|n| *n == name).count()),
    };
    all.iter().enumerate().map(numbered).collect()
}

impl State {
    fn entry(&self, model: GroupModelId) -> Option<&Entry> {
        self.entries.get(model.slot())?.as_ref().filter(|entry| entry.model == model)
    }

    fn entry_mut(&mut self, model: GroupModelId) -> Option<&mut Entry> {
        self.entries.get_mut(model.slot())?.as_mut().filter(|entry| entry.model == model)
    }

    /// Routes a request: the key of `model` on the selected device. With one device nothing is
    /// routed.
    fn route(
        &mut self,
        shared: &Shared,
        now: Nanos,
        model: GroupModelId,
        class: Option<Class>,
    ) -> Result<(Option<RoutedRequest>, ModelKey), Rejection> {
        let entry = self.entries.get(model.slot()).and_then(Option::as_ref);
        let entry = entry.filter(|entry| entry.model == model).ok_or(Rejection::NoSuchModel)?;
        if entry.keys.len() == 1 {
            let key = entry.keys[0].ok_or_else(|| shared.not_loaded(0))?;
            return Ok((None, key));
        }
        let resident = |device: usize| {
            entry.keys[device].is_some_and(|key| shared.node(device).is_resident(key))
        };
        let routed = self.router.route(now, model, class, resident);
        let routed = routed.ok_or(Rejection::NoSuchModel)?;
        let Some(key) = entry.keys[routed.device] else {
            // The router avoids the device for a while.
            self.router.ended(now, routed, RequestEnd::Faulted);
            return Err(shared.not_loaded(routed.device));
        };
        Ok((Some(routed), key))
    }
}

impl Shared {
    fn node(&self, device: usize) -> Arc<Node> {
        self.nodes.read().unwrap_or_else(PoisonError::into_inner)[device].clone()
    }

    fn nodes(&self) -> Vec<Arc<Node>> {
        self.nodes.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether `node` is still that of the device, which has had no more faults than these.
    fn is_current(&self, state: &State, device: usize, faults: u64, node: &Arc<Node>) -> bool {
        state.recoveries[device].faults == faults && Arc::ptr_eq(&self.node(device), node)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change of the router is one call, so a panic leaves it consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self, routed: RoutedRequest, reply: &Reply, rows: usize) {
        let timing = &reply.timing;
        let end = match &reply.result {
            Ok(_) => {
                let wait = (timing.finished - timing.arrived) - timing.busy;
                let shared = timing.rows.max(rows).max(1) as u64;
                let own = if timing.rows == 0 { shared } else { rows.max(1) as u64 };
                RequestEnd::Done { wait, cost: Nanos(timing.busy.0 / shared * own.min(shared)) }
            }
            Err(Rejection::Device(DeviceError::Faulted { .. })) => RequestEnd::Faulted,
            Err(_) => RequestEnd::Refused,
        };
        let mut state = self.lock();
        if let Some(change) = state.router.ended(timing.finished, routed, end) {
            state.due.push_back(change);
            self.changed.notify_one();
        }
    }

    /// Evaluates load periodically and applies the changes.
    fn balance(&self) {
        let mut state = self.lock();
        loop {
            if state.stopping {
                return;
            }
            let now = self.clock.now();
            if now >= state.router.next_evaluation() {
                drop(state);
                let measured = self.measure();
                state = self.lock();
                state.update(&measured);
                let changes = state.router.evaluate(now);
                state.due.extend(changes);
            }
            if let Some(change) = state.due.pop_front() {
                drop(state);
                self.apply(change);
                state = self.lock();
                continue;
            }
            let wait: Duration = (state.router.next_evaluation() - now).into();
            let waited = self.changed.wait_timeout(state, wait);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Measures the rate of loads and the sizes of models.
    fn measure(&self) -> Measurements {
        let speed = |node: &Arc<Node>| {
            let swaps = node.memory().swaps;
            let nanos = u128::from(swaps.load_times.mean().0) * u128::from(swaps.loads);
            let speed = u128::from(swaps.loaded.0) * 1_000_000_000 / nanos.max(1);
            (swaps.loads > 0).then_some(u64::try_from(speed).unwrap_or(u64::MAX))
        };
        let keys: Vec<(GroupModelId, Vec<Option<ModelKey>>)> = {
            let state = self.lock();
            state.entries.iter().flatten().map(|entry| (entry.model, entry.keys.clone())).collect()
        };
        let nodes = self.nodes();
        let bytes = |(model, keys): (GroupModelId, Vec<Option<ModelKey>>)| {
            let known = nodes.iter().zip(keys).filter_map(|(node, key)| node.weight_bytes(key?));
            Some((model, known.max()?.0)).filter(|(_, bytes)| *bytes > 0)
        };
        Measurements {
            speeds: nodes.iter().map(speed).collect(),
            bytes: keys.into_iter().filter_map(bytes).collect(),
        }
    }

    fn apply(&self, change: ReplicaChange) {
        match change {
            ReplicaChange::Add(model, device) => self.add_replica(model, device),
            ReplicaChange::Remove(model, device) => {
                let mut state = self.lock();
                let key = state.entry_mut(model).and_then(|entry| entry.keys[device].take());
                drop(state);
                if let Some(key) = key {
                    tracing::info!(device = self.names[device], "replica removed");
                    self.node(device).remove_model(key);
                }
            }
        }
    }

    /// The kind of a device: devices of one kind are equally fast.
    fn kind(&self, device: usize) -> String {
        self.node(device).device().info().description.clone()
    }

    fn add_replica(&self, model: GroupModelId, device: usize) {
        let found = {
            let state = self.lock();
            let needed = |e: &Entry| {
                (e.plan.clone(), e.config.clone(), e.profile.clone(), e.padding.clone())
            };
            state.entry(model).map(needed)
        };
        // The model was removed meanwhile.
        let Some((plan, config, profile, padding)) = found else { return };
        let (node, faults) = (self.node(device), self.lock().recoveries[device].faults);
        let made = node.device().load(plan).and_then(|program| match node.cannot_fit(&*program) {
            Some(why) => Err(why),
            None => Ok(program),
        });
        let program = match made {
            Ok(program) => program,
            Err(why) => {
                tracing::warn!(device = self.names[device], error = %why, "cannot add replica");
                self.lock().router.replica_failed(self.clock.now(), model, device);
                return;
            }
        };
        // Pinned weights stay at their home; a replica can be evicted.
        let key = node.add_model(program, &settings::of_replica(&config));
        node.preload(key);
        if let Some((_, times)) = profile.filter(|(kind, _)| *kind == self.kind(device)) {
            node.set_profile(key, &times);
        }
        if let Some((_, padding)) = padding.filter(|(kind, _)| *kind == self.kind(device)) {
            node.set_padding(key, Some(padding));
        }
        let mut state = self.lock();
        if !self.is_current(&state, device, faults, &node) {
            state.router.replica_failed(self.clock.now(), model, device);
            return;
        }
        let mut changed = None;
        let kept = match state.entry_mut(model) {
            Some(entry) => {
                entry.keys[device] = Some(key);
                changed = (entry.config != config).then(|| entry.config.clone());
                state.router.replica_added(model, device)
            }
            None => false,
        };
        drop(state);
        if let Some(changed) = changed {
            let (old, new) = (settings::of_replica(&config), settings::of_replica(&changed));
            node.set_settings(key, &old, &new);
        }
        match kept {
            true => tracing::info!(device = self.names[device], "replica added"),
            false => drop(node.remove_model(key)),
        }
    }
}

/// What the nodes measured for the router.
struct Measurements {
    /// Rate of loads in bytes per second, by device; `None` without loads.
    speeds: Vec<Option<u64>>,
    bytes: Vec<(GroupModelId, u64)>,
}

impl State {
    fn update(&mut self, measured: &Measurements) {
        for (device, speed) in measured.speeds.iter().enumerate() {
            if let Some(speed) = speed {
                self.router.set_speed(device, *speed);
            }
        }
        for (model, bytes) in &measured.bytes {
            self.router.resize(*model, *bytes);
        }
    }
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
