//! The router of a device group: a state machine without clock, thread or device.
//!
//! It selects the device of each request and the devices that hold each model. A model has a home,
//! and replicas on other devices while one is not enough. A request goes to the replica where it
//! starts soonest, by the work ahead of it and the time to load its weights.
//!
//! Load is evaluated in intervals, by the shortest wait of any request in it (CoDel): if even that
//! is positive, the queue is standing, whatever the device runs concurrently and however large its
//! batches are. A model gets another replica when all its replicas have a standing queue. It loses
//! one when its rate has long been below what fewer replicas served at their limit.

use base::Nanos;
use model::config::Class;

use super::DeviceGroupOptions;

/// A model of a device group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupModelId {
    slot: u32,
    generation: u64,
}

impl GroupModelId {
    /// Its index among the models; reused after removal.
    pub fn slot(self) -> usize {
        self.slot as usize
    }
}

/// A change of replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaChange {
    /// Load the model on the device, then call [`Router::replica_added`] or
    /// [`Router::replica_failed`].
    Add(GroupModelId, usize),
    /// Remove the model from the device: no request uses it there any more.
    Remove(GroupModelId, usize),
}

/// A routed request; passed back when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutedRequest {
    /// Its model.
    pub model: GroupModelId,
    /// The selected device.
    pub device: usize,
    class: Class,
    cost: Nanos,
}

/// How a routed request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestEnd {
    /// With outputs.
    Done {
        /// Latency minus device time.
        wait: Nanos,
        /// Its share of the device time of its batch.
        cost: Nanos,
    },
    /// Without outputs, for reasons other than the device.
    Refused,
    /// The device is faulted.
    Faulted,
}

/// State of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaState {
    /// Loading.
    Loading,
    /// Accepts requests.
    Serving,
    /// Accepts no more requests; pending ones finish.
    Draining,
}

/// A replica, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// The device.
    pub device: usize,
    /// Its state.
    pub state: ReplicaState,
    /// Routed requests that are pending.
    pub pending: usize,
    /// Requests that got outputs.
    pub completed: u64,
}

#[derive(Debug)]
struct Replica {
    state: ReplicaState,
    pending: usize,
    completed: u64,
    /// Mean device time of a request; `None` before the first reply.
    cost: Option<Nanos>,
    interval: Interval,
}

/// Counters since the last evaluation.
#[derive(Clone, Copy, Debug, Default)]
struct Interval {
    completed: u64,
    /// Device time of completed requests.
    work: Nanos,
    least_wait: Option<Nanos>,
    /// At least one request was pending all the time.
    busy: bool,
}

#[derive(Debug)]
struct ModelState {
    generation: u64,
    bytes: u64,
    pinned: bool,
    class: Class,
    /// Time that requests wait deliberately to be batched.
    held_back: Nanos,
    home: usize,
    /// By device.
    replicas: Vec<Option<Replica>>,
    /// Consecutive intervals in which every replica had a standing queue.
    overloaded: u32,
    /// Consecutive intervals in which one replica fewer would have been enough.
    underused: u32,
    /// Requests that a replica completed in an interval at its limit, as measured last.
    limit: Option<u64>,
    /// No replica is added before this time.
    not_before: Nanos,
}

#[derive(Clone, Debug, Default)]
struct DeviceState {
    budget: u64,
    /// Expected device time of pending requests: of real time, and of both classes.
    real_time: Nanos,
    all: Nanos,
    /// It is faulted; other devices are preferred until then.
    avoided_until: Nanos,
    /// It had a standing queue in the last interval.
    overloaded: bool,
    /// Device time of requests completed in the last interval.
    work: Nanos,
}

/// Number of changes of replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaCounts {
    /// Replicas added.
    pub added: u64,
    /// Replicas that could not be loaded.
    pub failed: u64,
    /// Replicas removed.
    pub removed: u64,
}

/// The state machine.
#[derive(Debug)]
pub struct Router {
    options: DeviceGroupOptions,
    devices: Vec<DeviceState>,
    models: Vec<Option<ModelState>>,
    next_generation: u64,
    evaluated_at: Nanos,
    changes: ReplicaCounts,
    /// Expected rate of loads in bytes per second, by device.
    speeds: Vec<u64>,
}

impl Router {
    /// A router for devices with these memory budgets.
    pub fn new(options: DeviceGroupOptions, budgets: &[u64]) -> Router {
        let device = |budget: &u64| DeviceState { budget: *budget, ..DeviceState::default() };
        Router {
            devices: budgets.iter().map(device).collect(),
            speeds: vec![options.bytes_per_second.max(1); budgets.len()],
            options,
            models: Vec::new(),
            next_generation: 0,
            evaluated_at: Nanos::ZERO,
            changes: ReplicaCounts::default(),
        }
    }

    /// The best home for a new model of this size; `None` when it fits nowhere beside pinned
    /// models.
    pub fn home_for(&self, now: Nanos, bytes: u64) -> Option<usize> {
        let fits = |device: &usize| self.fits(*device, bytes);
        (0..self.devices.len()).filter(fits).min_by_key(|device| {
            let state = &self.devices[*device];
            let placed = self.placed(*device);
            let crowded = placed.saturating_add(bytes) > state.budget;
            (state.avoided_until > now, crowded, state.overloaded, placed, self.count(*device))
        })
    }

    /// Maximum size of a model that fits somewhere beside pinned models.
    pub fn max_free(&self) -> u64 {
        (0..self.devices.len()).map(|device| self.unpinned(device)).max().unwrap_or(0)
    }

    /// Whether a model of this size can fit on `device` beside pinned models.
    pub fn fits(&self, device: usize, bytes: u64) -> bool {
        bytes <= self.unpinned(device)
    }

    fn unpinned(&self, device: usize) -> u64 {
        let stays = |model: &&ModelState| model.pinned && model.home == device;
        let pinned: u64 = self.models.iter().flatten().filter(stays).map(|model| model.bytes).sum();
        self.devices[device].budget.saturating_sub(pinned)
    }

    /// Bytes of all models with a replica on `device`.
    fn placed(&self, device: usize) -> u64 {
        let here = |model: &&ModelState| model.replicas[device].is_some();
        self.models.iter().flatten().filter(here).map(|model| model.bytes).sum()
    }

    /// Models with a replica on `device`.
    fn count(&self, device: usize) -> usize {
        self.models.iter().flatten().filter(|model| model.replicas[device].is_some()).count()
    }

    /// Bytes of those that were used in the last interval.
    fn used(&self, device: usize) -> u64 {
        let in_use = |replica: &Replica| {
            replica.pending > 0
                || replica.interval.completed > 0
                || replica.state == ReplicaState::Loading
        };
        let here = |model: &&ModelState| model.replicas[device].as_ref().is_some_and(in_use);
        self.models.iter().flatten().filter(here).map(|model| model.bytes).sum()
    }

    /// Adds a model that is loaded on `home`.
    pub fn add(&mut self, home: usize, bytes: u64, facts: ModelFacts) -> GroupModelId {
        self.next_generation += 1;
        let generation = self.next_generation;
        let mut replicas: Vec<_> = self.devices.iter().map(|_| None).collect();
        replicas[home] = Some(Replica::new(ReplicaState::Serving));
        let ModelFacts { class, pinned, held_back } = facts;
        let state = ModelState {
            generation,
            bytes,
            pinned,
            class,
            held_back,
            home,
            replicas,
            overloaded: 0,
            underused: 0,
            limit: None,
            not_before: Nanos::ZERO,
        };
        let slot = self.models.iter().position(Option::is_none).unwrap_or(self.models.len());
        if slot == self.models.len() {
            self.models.push(None);
        }
        self.models[slot] = Some(state);
        GroupModelId { slot: slot as u32, generation }
    }

    /// Changes the properties of a model.
    pub fn set_facts(&mut self, model: GroupModelId, facts: ModelFacts) {
        if let Some(state) = self.model_mut(model) {
            (state.class, state.pinned, state.held_back) =
                (facts.class, facts.pinned, facts.held_back);
        }
    }

    /// The device that a model always stays on.
    pub fn home_of(&self, model: GroupModelId) -> Option<usize> {
        self.model(model).map(|state| state.home)
    }

    /// Removes a model and returns the devices that have it. Its pending requests may still end.
    pub fn remove(&mut self, model: GroupModelId) -> Vec<usize> {
        if self.model(model).is_none() {
            return Vec::new();
        }
        let Some(state) = self.models[model.slot()].take() else { return Vec::new() };
        let ready = |(device, replica): (usize, &Option<Replica>)| {
            replica
                .as_ref()
                .filter(|replica| replica.state != ReplicaState::Loading)
                .map(|_| device)
        };
        state.replicas.iter().enumerate().filter_map(ready).collect()
    }

    /// Corrects the size of a model.
    pub fn resize(&mut self, model: GroupModelId, bytes: u64) {
        if let Some(state) = self.model_mut(model) {
            state.bytes = bytes;
        }
    }

    /// Sets the measured rate of loads on `device`.
    pub fn set_speed(&mut self, device: usize, bytes_per_second: u64) {
        self.speeds[device] = bytes_per_second.max(1);
    }

    /// Routes a request to the device where it starts soonest; `None` when no replica accepts
    /// requests. `resident` tells whether the weights are on a device.
    pub fn route(
        &mut self,
        now: Nanos,
        model: GroupModelId,
        class: Option<Class>,
        resident: impl Fn(usize) -> bool,
    ) -> Option<RoutedRequest> {
        let state = self.model(model)?;
        let class = class.unwrap_or(state.class);
        let serving = |(device, replica): (usize, &Option<Replica>)| {
            replica
                .as_ref()
                .filter(|replica| replica.state == ReplicaState::Serving)
                .map(|_| device)
        };
        let mut serving: Vec<usize> =
            state.replicas.iter().enumerate().filter_map(serving).collect();
        if serving.len() > 1 {
            serving.sort_by_key(|device| self.start(now, state, *device, class, &resident));
        }
        let device = *serving.first()?;
        let cost = self.cost(state, device);
        let load = &mut self.devices[device];
        load.all += cost;
        if class == Class::RealTime {
            load.real_time += cost;
        }
        let replica = self.models[model.slot()].as_mut()?.replicas[device].as_mut()?;
        replica.pending += 1;
        Some(RoutedRequest { model, device, class, cost })
    }

    /// Sort key of a device for a request: the expected start, earlier is better. Only real time is
    /// ahead of real time; other work breaks ties.
    fn start(
        &self,
        now: Nanos,
        model: &ModelState,
        device: usize,
        class: Class,
        resident: &impl Fn(usize) -> bool,
    ) -> (bool, Nanos, Nanos, usize) {
        let load = &self.devices[device];
        let (ahead, beside) = match class {
            Class::RealTime => (load.real_time, load.all),
            Class::BestEffort => (load.all, load.real_time),
        };
        let arrival = match model.bytes == 0 || resident(device) {
            true => Nanos::ZERO,
            false => {
                let nanos =
                    u128::from(model.bytes) * 1_000_000_000 / u128::from(self.speeds[device]);
                Nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
            }
        };
        // A slower device also takes longer for the request itself.
        let whole = Nanos(ahead.0.saturating_add(arrival.0)) + self.cost(model, device);
        (load.avoided_until > now, whole, beside, device)
    }

    /// Expected device time of a request of the model on `device`.
    fn cost(&self, model: &ModelState, device: usize) -> Nanos {
        let here = model.replicas[device].as_ref().and_then(|replica| replica.cost);
        let elsewhere = || model.replicas.iter().flatten().filter_map(|replica| replica.cost).min();
        here.or_else(elsewhere).unwrap_or(self.options.unknown_cost)
    }

    /// Records the end of a routed request. Returns the removal of a draining replica if it was the
    /// last one there.
    pub fn ended(
        &mut self,
        now: Nanos,
        routed: RoutedRequest,
        end: RequestEnd,
    ) -> Option<ReplicaChange> {
        let RoutedRequest { model, device, class, cost } = routed;
        let load = &mut self.devices[device];
        load.all = load.all - cost;
        if class == Class::RealTime {
            load.real_time = load.real_time - cost;
        }
        if end == RequestEnd::Faulted {
            load.avoided_until = now + self.options.avoid;
        }
        let replica = self.model_mut(model)?.replicas[device].as_mut()?;
        replica.pending = replica.pending.saturating_sub(1);
        if let RequestEnd::Done { wait, cost } = end {
            replica.done(wait, cost);
        }
        if replica.pending > 0 {
            return None;
        }
        replica.interval.busy = false;
        let draining = replica.state == ReplicaState::Draining;
        draining.then(|| self.take(model, device)).flatten()
    }

    fn take(&mut self, model: GroupModelId, device: usize) -> Option<ReplicaChange> {
        self.model_mut(model)?.replicas[device] = None;
        self.changes.removed += 1;
        Some(ReplicaChange::Remove(model, device))
    }

    /// A replica was loaded. `false` when the model was removed meanwhile.
    pub fn replica_added(&mut self, model: GroupModelId, device: usize) -> bool {
        let Some(state) = self.model_mut(model) else { return false };
        let Some(replica) = state.replicas[device].as_mut() else { return false };
        replica.state = ReplicaState::Serving;
        self.changes.added += 1;
        true
    }

    /// A replica could not be loaded; another is tried later.
    pub fn replica_failed(&mut self, now: Nanos, model: GroupModelId, device: usize) {
        let pause = Nanos(self.options.interval.0 * u64::from(self.options.calm_intervals));
        self.changes.failed += 1;
        if let Some(state) = self.model_mut(model) {
            state.replicas[device] = None;
            state.not_before = now + pause;
        }
    }

    /// When the next evaluation is due.
    pub fn next_evaluation(&self) -> Nanos {
        self.evaluated_at + self.options.interval
    }

    /// Evaluates the past interval and returns the changes of replicas.
    pub fn evaluate(&mut self, now: Nanos) -> Vec<ReplicaChange> {
        self.evaluated_at = now;
        self.find_standing_queues();
        let mut changes: Vec<ReplicaChange> = Vec::new();
        changes.extend(self.add_replica(now));
        changes.extend(self.drop_replicas(now));
        for replica in
            self.models.iter_mut().flatten().flat_map(|m| m.replicas.iter_mut()).flatten()
        {
            replica.interval = Interval { busy: replica.pending > 0, ..Interval::default() };
        }
        changes
    }

    /// Finds standing queues, and counts the intervals in which models met them on all devices.
    fn find_standing_queues(&mut self) {
        for device in &mut self.devices {
            (device.overloaded, device.work) = (false, Nanos::ZERO);
        }
        let options = &self.options;
        for model in self.models.iter_mut().flatten() {
            let allowed = options.standing_wait + model.held_back;
            let (mut stands, mut drains) = (false, false);
            for (device, replica) in model.replicas.iter().enumerate() {
                let Some(replica) = replica else { continue };
                let load = &mut self.devices[device];
                load.work += replica.interval.work;
                if replica.state != ReplicaState::Serving {
                    continue;
                }
                let measured = replica.queue_stands(allowed, options.interval);
                stands |= measured == Some(true);
                drains |= measured == Some(false);
                load.overloaded |= measured == Some(true);
                if measured == Some(true) && replica.interval.completed > 0 {
                    model.limit = Some(replica.interval.completed);
                }
            }
            model.overloaded = match (drains, stands) {
                (true, _) => 0,
                (false, true) => model.overloaded.saturating_add(1),
                // Requests longer than an interval give no information until they end.
                (false, false) => model.overloaded,
            };
        }
    }

    /// Adds a replica for the model that needs it most, if a device can take it.
    fn add_replica(&mut self, now: Nanos) -> Option<ReplicaChange> {
        let wanting = |state: &&(usize, &ModelState)| {
            let making = |replica: &Replica| replica.state == ReplicaState::Loading;
            let broken = |(device, _): (usize, &Replica)| self.devices[device].avoided_until > now;
            let mut there = state
                .1
                .replicas
                .iter()
                .enumerate()
                .filter_map(|(device, replica)| Some((device, replica.as_ref()?)));
            let lost = there.clone().all(broken);
            let needs = state.1.overloaded >= self.options.overloaded_intervals || lost;
            needs && state.1.not_before <= now && !there.any(|(_, replica)| making(replica))
        };
        let models = self.models.iter().enumerate();
        let mut models: Vec<(usize, &ModelState)> =
            models.filter_map(|(slot, model)| Some((slot, model.as_ref()?))).collect();
        models.retain(|state| wanting(&state));
        models.sort_by_key(|(_, model)| std::cmp::Reverse(model.work()));
        let (slot, device) = models
            .iter()
            .find_map(|(slot, model)| self.target(now, model).map(|device| (*slot, device)))?;
        let state = self.models[slot].as_mut()?;
        state.replicas[device] = Some(Replica::new(ReplicaState::Loading));
        (state.overloaded, state.underused) = (0, 0);
        let generation = state.generation;
        Some(ReplicaChange::Add(GroupModelId { slot: slot as u32, generation }, device))
    }

    /// The best device for a replica of `model`: with free memory beside models in use, and without
    /// a standing queue.
    fn target(&self, now: Nanos, model: &ModelState) -> Option<usize> {
        let may = |device: &usize| {
            let state = &self.devices[*device];
            let fits = self.used(*device).saturating_add(model.bytes) <= state.budget;
            model.replicas[*device].is_none()
                && !state.overloaded
                && state.avoided_until <= now
                && fits
                && self.fits(*device, model.bytes)
        };
        let load = |device: &usize| (self.devices[*device].work, self.placed(*device), *device);
        (0..self.devices.len()).filter(may).min_by_key(load)
    }

    /// Drains replicas that are not needed any more.
    fn drop_replicas(&mut self, now: Nanos) -> Vec<ReplicaChange> {
        let mut gone = Vec::new();
        for slot in 0..self.models.len() {
            let Some(state) = &mut self.models[slot] else { continue };
            let Some(device) = state.spare(&self.options, &self.devices, now) else { continue };
            let model = GroupModelId { slot: slot as u32, generation: state.generation };
            let Some(replica) = &mut state.replicas[device] else { continue };
            replica.state = ReplicaState::Draining;
            let unused = replica.pending == 0;
            gone.extend(unused.then(|| self.take(model, device)).flatten());
        }
        gone
    }

    /// The replicas of `model`.
    pub fn replicas(&self, model: GroupModelId) -> Vec<ReplicaStatus> {
        let Some(state) = self.model(model) else { return Vec::new() };
        let view = |(device, replica): (usize, &Option<Replica>)| {
            let Replica { state, pending, completed, .. } = *replica.as_ref()?;
            Some(ReplicaStatus { device, state, pending, completed })
        };
        state.replicas.iter().enumerate().filter_map(view).collect()
    }

    /// Replicas added and removed so far.
    pub fn changes(&self) -> ReplicaCounts {
        self.changes
    }

    fn model(&self, model: GroupModelId) -> Option<&ModelState> {
        let state = self.models.get(model.slot())?.as_ref()?;
        (state.generation == model.generation).then_some(state)
    }

    fn model_mut(&mut self, model: GroupModelId) -> Option<&mut ModelState> {
        let state = self.models.get_mut(model.slot())?.as_mut()?;
        (state.generation == model.generation).then_some(state)
    }
}

/// Properties of a model for the router.
#[derive(Clone, Copy, Debug)]
pub struct ModelFacts {
    /// The default class.
    pub class: Class,
    /// Its weights are pinned at its home.
    pub pinned: bool,
    /// Time that its requests wait deliberately.
    pub held_back: Nanos,
}

impl Replica {
    fn new(state: ReplicaState) -> Replica {
        let interval = Interval::default();
        Replica { state, pending: 0, completed: 0, cost: None, interval }
    }

    fn done(&mut self, wait: Nanos, cost: Nanos) {
        self.completed += 1;
        let interval = &mut self.interval;
        interval.completed += 1;
        interval.work += cost;
        interval.least_wait = Some(interval.least_wait.map_or(wait, |least| least.min(wait)));
        // A new value has a weight of 1/8: one outlier hardly counts.
        let known = self.cost.unwrap_or(cost);
        self.cost = Some(Nanos(known.0 - known.0 / 8 + cost.0 / 8));
    }

    /// Whether the queue is standing: every request of the interval waited, or none completed
    /// although there was time for several. `None` without information.
    fn queue_stands(&self, allowed: Nanos, interval: Nanos) -> Option<bool> {
        match self.interval.least_wait {
            // A wait as long as its run time does not yet justify double memory.
            Some(wait) => Some(wait > allowed.max(self.cost.unwrap_or_default())),
            None if !self.interval.busy => Some(false),
            None => {
                let several = |cost: Nanos| cost.0.saturating_mul(4) < interval.0;
                self.cost.is_some_and(several).then_some(true)
            }
        }
    }
}

impl ModelState {
    /// Device time of its requests completed in the interval.
    fn work(&self) -> Nanos {
        Nanos(self.replicas.iter().flatten().map(|replica| replica.interval.work.0).sum())
    }

    /// The device whose replica is not needed any more.
    fn spare(
        &mut self,
        options: &DeviceGroupOptions,
        devices: &[DeviceState],
        now: Nanos,
    ) -> Option<usize> {
        let serving = |(device, replica): (usize, &Option<Replica>)| {
            let replica = replica.as_ref()?;
            (replica.state == ReplicaState::Serving).then_some((device, replica.interval.completed))
        };
        let serving: Vec<(usize, u64)> =
            self.replicas.iter().enumerate().filter_map(serving).collect();
        let completed: u64 = serving.iter().map(|(_, completed)| completed).sum();
        let others = serving.len().saturating_sub(1) as u64;
        // Not divided: one request per interval would be rounded to zero.
        let enough = self.limit.unwrap_or(0) * others * u64::from(options.calm_percent);
        let well = devices[self.home].avoided_until <= now;
        // Without a limit it was added because its home was faulted, and is removed when that works
        // again.
        let underused = others > 0 && well && (completed * 100 < enough || self.limit.is_none());
        self.underused = if underused { self.underused.saturating_add(1) } else { 0 };
        if self.underused < options.calm_intervals {
            return None;
        }
        self.underused = 0;
        let away = serving.into_iter().filter(|(device, _)| *device != self.home);
        away.min_by_key(|(device, completed)| (*completed, *device)).map(|(device, _)| device)
    }
}
