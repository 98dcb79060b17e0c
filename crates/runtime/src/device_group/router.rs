//! Which device a request goes to, and which devices hold a model: a state machine without clock, thread or device.
//!
//! Every model has a home, and replicas on other devices while one is not enough. A request goes to the replica where it
//! starts soonest by what is known: the work ahead of it, and the time its weights would take to arrive. Load is evaluated_at interval
//! by interval, by the shortest wait of any answer in it: if even the luckiest request waited, a queue stands, whatever the
//! device does side by side and however large its batches are. A model whose replicas all have a state queue gets another;
//! when its rate has long been what fewer of them served at their limit, one goes.

use base::Nanos;
use model::config::Class;

use super::DeviceGroupOptions;

/// A model of a device_group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupModelId {
    slot: u32,
    generation: u64,
}

impl GroupModelId {
    /// Its place among the models there are; used again when it is gone.
    pub fn slot(self) -> usize {
        self.slot as usize
    }
}

/// What is to be done about replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaChange {
    /// Make the model ready on the device, then say [`Router::made`] or [`Router::not_made`].
    Add(GroupModelId, usize),
    /// Nobody uses the model on this device any more, and nobody will: take it away.
    Remove(GroupModelId, usize),
}

/// A request that was routed; given back when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutedRequest {
    /// Its model.
    pub model: GroupModelId,
    /// Where it went.
    pub device: usize,
    class: Class,
    cost: Nanos,
}

/// How a routed request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestEnd {
    /// With outputs, after so much time off the device, and so much of the device's time for itself.
    Done {
        /// From its arrival to its answer, less what it ran.
        wait: Nanos,
        /// Its share of the runs it was in.
        cost: Nanos,
    },
    /// Without, and it says nothing about the device.
    Refused,
    /// The device is broken.
    Faulted,
}

/// How a model stands on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaState {
    /// It is being made ready.
    Loading,
    /// It takes requests.
    Serving,
    /// It takes no more; those under way finish.
    Draining,
}

/// A model on a device, for those who look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// The device.
    pub device: usize,
    /// How it stands.
    pub state: ReplicaState,
    /// Requests routed there and not answered.
    pub pending: usize,
    /// Requests answered with outputs so far.
    pub completed: u64,
}

#[derive(Debug)]
struct Replica {
    state: ReplicaState,
    pending: usize,
    completed: u64,
    /// What a request takes of the device; `None` before the first answer.
    cost: Option<Nanos>,
    interval: Interval,
}

/// What happened since load was evaluated_at last.
#[derive(Clone, Copy, Debug, Default)]
struct Interval {
    completed: u64,
    /// Device time of the answers.
    work: Nanos,
    least_wait: Option<Nanos>,
    /// Somebody was under way all the time.
    busy: bool,
}

#[derive(Debug)]
struct ModelState {
    generation: u64,
    bytes: u64,
    pinned: bool,
    class: Class,
    /// Time that requests wait on purpose, for others to share a batch with.
    held_back: Nanos,
    home: usize,
    /// By device.
    replicas: Vec<Option<Replica>>,
    /// Intervals in a row in which every replica had a state queue.
    overloaded: u32,
    /// Intervals in a row in which one replica less would have done.
    underused: u32,
    /// Answers in an interval that a replica gave at its limit, as measured last.
    limit: Option<u64>,
    /// No replica is tried before.
    not_before: Nanos,
}

#[derive(Clone, Debug, Default)]
struct DeviceState {
    budget: u64,
    /// Expected device time of what is under way: of real time, and of all.
    real_time: Nanos,
    all: Nanos,
    /// It said that it is broken; others are preferred until then.
    avoided_until: Nanos,
    /// A queue stood there in the last interval.
    overloaded: bool,
    /// Device time of the answers of the last interval.
    work: Nanos,
}

/// How often replicas were made and taken away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaCounts {
    /// Replicas beside a model's home that were made.
    pub added: u64,
    /// Those that could not be made.
    pub failed: u64,
    /// Those that were taken away.
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
    /// What a load is expected to bring in a second, by device.
    speeds: Vec<u64>,
}

impl Router {
    /// A router over devices whose weights may take these many bytes.
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

    /// Where a new model with weights of these bytes had best live; `None` when it fits nowhere beside what is pinned.
    pub fn home_for(&self, now: Nanos, bytes: u64) -> Option<usize> {
        let fits = |device: &usize| self.fits(*device, bytes);
        (0..self.devices.len()).filter(fits).min_by_key(|device| {
            let state = &self.devices[*device];
            let placed = self.placed(*device);
            let crowded = placed.saturating_add(bytes) > state.budget;
            (state.avoided_until > now, crowded, state.overloaded, placed, self.count(*device))
        })
    }

    /// Most bytes that a model could have anywhere beside what is pinned.
    pub fn most_room(&self) -> u64 {
        (0..self.devices.len()).map(|device| self.unpinned(device)).max().unwrap_or(0)
    }

    /// Whether weights of these bytes could ever be on `device` beside what is pinned there.
    pub fn fits(&self, device: usize, bytes: u64) -> bool {
        bytes <= self.unpinned(device)
    }

    fn unpinned(&self, device: usize) -> u64 {
        let stays = |model: &&ModelState| model.pinned && model.home == device;
        let pinned: u64 = self.models.iter().flatten().filter(stays).map(|model| model.bytes).sum();
        self.devices[device].budget.saturating_sub(pinned)
    }

    /// Bytes of all models that have a place on `device`.
    fn placed(&self, device: usize) -> u64 {
        let here = |model: &&ModelState| model.replicas[device].is_some();
        self.models.iter().flatten().filter(here).map(|model| model.bytes).sum()
    }

    /// Models that have a place on `device`.
    fn count(&self, device: usize) -> usize {
        self.models.iter().flatten().filter(|model| model.replicas[device].is_some()).count()
    }

    /// Bytes of those models that were in use in the last interval.
    fn used(&self, device: usize) -> u64 {
        let in_use = |replica: &Replica| {
            replica.pending > 0
                || replica.interval.completed > 0
                || replica.state == ReplicaState::Loading
        };
        let here = |model: &&ModelState| model.replicas[device].as_ref().is_some_and(in_use);
        self.models.iter().flatten().filter(here).map(|model| model.bytes).sum()
    }

    /// A model that is ready on `home`.
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

    /// Forgets a model and returns where it was ready. What is under way may still be told as ended.
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

    /// A model's weights turned out to be of other size.
    pub fn resize(&mut self, model: GroupModelId, bytes: u64) {
        if let Some(state) = self.model_mut(model) {
            state.bytes = bytes;
        }
    }

    /// What loads were measured to bring in a second on `device`.
    pub fn set_speed(&mut self, device: usize, bytes_per_second: u64) {
        self.speeds[device] = bytes_per_second.max(1);
    }

    /// Sends a request to the device where it starts soonest; `None` when no device takes requests of the model. `resident`
    /// tells whether the model's weights are on a device.
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

    /// By what a request chooses among devices: the sooner it starts, the smaller. Real time goes before best effort, so only
    /// real time is ahead of it; what else is there tells two of them apart.
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
        // A device that is slower takes longer for the request itself, too.
        let whole = Nanos(ahead.0.saturating_add(arrival.0)) + self.cost(model, device);
        (load.avoided_until > now, whole, beside, device)
    }

    /// What a request of the model takes on `device`, as far as anything is known.
    fn cost(&self, model: &ModelState, device: usize) -> Nanos {
        let here = model.replicas[device].as_ref().and_then(|replica| replica.cost);
        let elsewhere = || model.replicas.iter().flatten().filter_map(|replica| replica.cost).min();
        here.or_else(elsewhere).unwrap_or(self.options.unknown_cost)
    }

    /// A routed request ended. The replica that nobody uses any more, if it was the last one of a leaving replica.
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
        let left = replica.state == ReplicaState::Draining;
        left.then(|| self.take(model, device)).flatten()
    }

    fn take(&mut self, model: GroupModelId, device: usize) -> Option<ReplicaChange> {
        self.model_mut(model)?.replicas[device] = None;
        self.changes.removed += 1;
        Some(ReplicaChange::Remove(model, device))
    }

    /// A replica is ready. `false` when the model is gone meanwhile.
    pub fn made(&mut self, model: GroupModelId, device: usize) -> bool {
        let Some(state) = self.model_mut(model) else { return false };
        let Some(replica) = state.replicas[device].as_mut() else { return false };
        replica.state = ReplicaState::Serving;
        self.changes.added += 1;
        true
    }

    /// A replica could not be made; another is tried later.
    pub fn not_made(&mut self, now: Nanos, model: GroupModelId, device: usize) {
        let pause = Nanos(self.options.interval.0 * u64::from(self.options.calm_intervals));
        self.changes.failed += 1;
        if let Some(state) = self.model_mut(model) {
            state.replicas[device] = None;
            state.not_before = now + pause;
        }
    }

    /// When load is to be evaluated_at next.
    pub fn next_evaluation(&self) -> Nanos {
        self.evaluated_at + self.options.interval
    }

    /// Judges the interval that is over and says what is to be done.
    pub fn evaluate(&mut self, now: Nanos) -> Vec<ReplicaChange> {
        self.evaluated_at = now;
        self.see_load();
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

    /// Where queues stand, and for how long which models have met them everywhere.
    fn see_load(&mut self) {
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
                // Requests that take longer than an interval say nothing until they end.
                (false, false) => model.overloaded,
            };
        }
    }

    /// A replica for the model that needs one most, if there is a device for it.
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

    /// The device that a replica of `model` had best be on: with room beside what is in use, and without a queue.
    fn target(&self, now: Nanos, model: &ModelState) -> Option<usize> {
        let may = |device: &usize| {
            let state = &self.devices[*device];
            let room = self.used(*device).saturating_add(model.bytes) <= state.budget;
            model.replicas[*device].is_none()
                && !state.overloaded
                && state.avoided_until <= now
                && room
                && self.fits(*device, model.bytes)
        };
        let quiet = |device: &usize| (self.devices[*device].work, self.placed(*device), *device);
        (0..self.devices.len()).filter(may).min_by_key(quiet)
    }

    /// Lets replicas go that are not needed any more.
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

    /// Where `model` is.
    pub fn replicas(&self, model: GroupModelId) -> Vec<ReplicaStatus> {
        let Some(state) = self.model(model) else { return Vec::new() };
        let view = |(device, replica): (usize, &Option<Replica>)| {
            let Replica { state, pending, completed, .. } = *replica.as_ref()?;
            Some(ReplicaStatus { device, state, pending, completed })
        };
        state.replicas.iter().enumerate().filter_map(view).collect()
    }

    /// What was done about replicas so far.
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

/// What a router is told of a model beside its size.
#[derive(Clone, Copy, Debug)]
pub struct ModelFacts {
    /// The class of requests that name none.
    pub class: Class,
    /// Its weights stay at its home.
    pub pinned: bool,
    /// Time that its requests wait on purpose.
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
        // An eighth of what is new: one odd run hardly counts.
        let known = self.cost.unwrap_or(cost);
        self.cost = Some(Nanos(known.0 - known.0 / 8 + cost.0 / 8));
    }

    /// Whether everybody waited in the interval that is over, or nobody got an answer although there was time for several.
    /// `None` when there was no time for an answer that would tell.
    fn queue_stands(&self, allowed: Nanos, interval: Nanos) -> Option<bool> {
        match self.interval.least_wait {
            // A request that waits as long as it runs is not yet a reason to double its memory.
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
    /// Device time of its answers in the interval.
    fn work(&self) -> Nanos {
        Nanos(self.replicas.iter().flatten().map(|replica| replica.interval.work.0).sum())
    }

    /// The device whose replica is not needed any more, if there is one.
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
        // Not divided: of a model with one answer in an interval nothing would be left.
        let enough = self.limit.unwrap_or(0) * others * u64::from(options.calm_percent);
        let well = devices[self.home].avoided_until <= now;
        // Without a limit it is there because its home was broken, and goes when that is well again.
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
