//! Residency: inputs and weights that must be on the device before a request can run.
//!
//! Weights stay within a memory budget. When a request needs a model that is not resident, its load
//! is requested. Loads are served one after another, real time first; a load that has waited long
//! counts as real time. Memory is reclaimed by eviction of the least recently used model: first of
//! models without requests, after some patience also of models with waiting requests. When a model
//! is always in use, it is drained: it starts no more work until it can be evicted. Pinned weights
//! stay. Weights in use are never evicted.

use base::Nanos;

use super::{Action, Core, End, ModelId, ModelState, Phase, RequestId, SimAction};
use model::config::Class;

/// A best-effort load that has waited this long counts as real time.
const AGING: Nanos = Nanos::from_millis(1_000);

/// How long a load that the device refused waits before the next try, while others hold memory.
const RETRY_AFTER: Nanos = Nanos::from_millis(10);

/// Tries of a load before the requests that wait for it fail.
const MAX_TRIES: u32 = 200;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum WeightState {
    /// On the device, or not managed.
    #[default]
    Resident,
    Loading,
    /// Loading, and tasks may start: each step waits for its weights.
    Runnable,
    Absent,
}

/// The weights of a model.
#[derive(Clone, Debug, Default)]
pub(super) struct Weights {
    bytes: u64,
    state: WeightState,
    /// Never evicted.
    pinned: bool,
    last_used: Nanos,
    /// Running segments that use them.
    pub(super) users: usize,
    /// Loaded and not yet used.
    fresh: bool,
    /// Starts no more work and is evicted when idle: for others, or because it has grown.
    draining: bool,
    /// New size, if it is more than was loaded.
    grown: Option<u64>,
    /// Loads that the device refused.
    refused: u32,
    /// Requests that wait for the load.
    waiting_requests: Vec<RequestId>,
}

/// A requested load.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadRequest {
    model: ModelId,
    since: Nanos,
    real_time: bool,
    /// Only if there is free memory.
    idle: bool,
    /// Not tried before this time.
    not_before: Nanos,
}

/// How memory can be reclaimed.
enum Reclaim {
    /// Evict this model now.
    Evict(ModelId),
    /// Drain this model.
    Drain(ModelId),
    /// Wait; at most until this time, if given.
    Wait(Option<Nanos>),
}

impl Weights {
    pub(super) fn absent(bytes: u64) -> Weights {
        Weights { bytes, state: WeightState::Absent, ..Weights::default() }
    }

    /// The device is lost, and managed weights with it.
    pub(super) fn lose(&mut self) {
        if self.bytes > 0 {
            self.set_absent();
        }
        self.waiting_requests.clear();
    }

    /// Marks them as not on the device.
    fn set_absent(&mut self) {
        (self.state, self.fresh, self.draining) = (WeightState::Absent, false, false);
        self.bytes = self.grown.take().unwrap_or(self.bytes);
    }

    /// Whether tasks may start with them.
    pub(super) fn usable(&self) -> bool {
        matches!(self.state, WeightState::Resident | WeightState::Runnable) && !self.draining
    }

    fn held(&self) -> u64 {
        if self.state == WeightState::Absent { 0 } else { self.bytes }
    }

    fn arriving(&self) -> bool {
        matches!(self.state, WeightState::Loading | WeightState::Runnable)
    }

    pub(super) fn touch(&mut self, now: Nanos) {
        (self.last_used, self.fresh) = (now, false);
        self.users += 1;
    }
}

/// State of the memory for weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryState {
    /// Bytes of weights on the device, loading ones included.
    pub held: u64,
    /// Bytes of pinned weights.
    pub pinned: u64,
    /// Requested loads that have not started.
    pub pending_loads: usize,
}

impl Core {
    pub(super) fn can_ever_load(&self, model: &ModelState) -> bool {
        let Some(memory) = self.options.memory_bytes else { return true };
        let pinned: u64 = self.pinned_bytes();
        let others = pinned - if model.weights.pinned { model.weights.bytes } else { 0 };
        model.weights.held() > 0 || others.saturating_add(model.weights.bytes) <= memory
    }

    fn pinned_bytes(&self) -> u64 {
        let pinned = self.models.iter().flatten().filter(|model| model.weights.pinned);
        pinned.map(|model| model.weights.bytes).sum()
    }

    /// State of the memory for weights.
    pub fn memory(&self) -> MemoryState {
        let held = self.models.iter().flatten().map(|model| model.weights.held()).sum();
        MemoryState { held, pinned: self.pinned_bytes(), pending_loads: self.load_requests.len() }
    }

    /// Bytes of a model's weights, and whether all of them are on the device.
    pub fn weights_of(&self, model: ModelId) -> Option<(u64, bool)> {
        let weights = &self.model(model)?.weights;
        Some((weights.bytes, weights.state == WeightState::Resident))
    }

    /// Sets the size of a model's weights, or their new size.
    pub(super) fn set_weights(&mut self, now: Nanos, model: ModelId, bytes: u64, pinned: bool) {
        if self.options.memory_bytes.is_none() {
            return;
        }
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        weights.pinned = pinned;
        if weights.bytes != bytes {
            if weights.bytes == 0 || weights.state == WeightState::Absent {
                (weights.bytes, weights.state) = (bytes, WeightState::Absent);
            } else {
                // The old weights are evicted when idle, and all are loaded again. Until then the
                // old size counts.
                (weights.grown, weights.draining) = (Some(bytes), true);
            }
        }
        if pinned && bytes > 0 {
            self.request_load(now, model, Some(Class::RealTime));
        }
    }

    /// Requests loads of all pinned models, after the device was lost.
    pub(super) fn request_pinned_loads(&mut self, now: Nanos) {
        for index in 0..self.models.len() {
            let pinned = |state: &ModelState| state.weights.pinned && state.weights.bytes > 0;
            if self.models[index].as_ref().is_some_and(pinned) {
                self.request_load(now, ModelId(index as u32), Some(Class::RealTime));
            }
        }
    }

    /// Requests a load of `model` if it is absent; without a class only into free memory.
    pub(super) fn request_load(&mut self, now: Nanos, model: ModelId, class: Option<Class>) {
        let absent = |state: &ModelState| state.weights.state == WeightState::Absent;
        if !self.model(model).is_some_and(absent) {
            return;
        }
        let (real_time, idle) = (class == Some(Class::RealTime), class.is_none());
        match self.load_requests.iter_mut().find(|load| load.model == model) {
            Some(load) => {
                load.real_time |= real_time;
                load.idle &= idle;
            }
            None => {
                let not_before = Nanos::ZERO;
                self.load_requests.push(LoadRequest {
                    model,
                    since: now,
                    real_time,
                    idle,
                    not_before,
                });
            }
        }
    }

    /// Prepares the inputs and weights of a new request.
    pub(super) fn prepare(&mut self, now: Nanos, request: RequestId, actions: &mut Vec<Action>) {
        if self.lost {
            return;
        }
        if self.options.capabilities.input_copies {
            self.copy_started(request);
            actions.push(Action::Sim(SimAction::CopyInputs { request }));
        } else {
            self.input_ready(now, request);
        }
    }

    fn copy_started(&mut self, request: RequestId) {
        if let Some(state) = self.requests.get_mut(request)
            && !state.copying
        {
            state.copying = true;
            self.real_time_copies += usize::from(state.class == Class::RealTime);
        }
    }

    /// The copy of a request's inputs has ended, or is not needed any more.
    pub(super) fn copy_ended(&mut self, request: RequestId) {
        if let Some(state) = self.requests.get_mut(request)
            && state.copying
        {
            state.copying = false;
            self.real_time_copies -= usize::from(state.class == Class::RealTime);
        }
    }

    /// The inputs are staged: the request enters its queue, or waits for its weights.
    pub(super) fn input_ready(&mut self, now: Nanos, request: RequestId) {
        self.copy_ended(request);
        let Some(state) = self.requests.get(request) else { return };
        if state.phase != Phase::Preparing || self.lost {
            return;
        }
        if self.model(state.model).is_some_and(|model| model.weights.usable()) {
            self.enqueue(request);
        } else {
            self.wait_for_weights(now, request);
        }
    }

    /// Makes a request wait for the weights of its model.
    pub(super) fn wait_for_weights(&mut self, now: Nanos, request: RequestId) {
        let Some(state) = self.requests.get_mut(request) else { return };
        state.phase = Phase::Preparing;
        let (model, class) = (state.model, state.class);
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        weights.waiting_requests.push(request);
        self.request_load(now, model, Some(class));
    }

    /// The requests that wait for `model` enter their queues.
    fn weights_arrived(&mut self, model: ModelId) {
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        for request in std::mem::take(&mut weights.waiting_requests) {
            let waits = |state: &super::RequestState| state.phase == Phase::Preparing;
            if self.requests.get(request).is_some_and(waits) {
                self.enqueue(request);
            }
        }
    }

    /// Enough weights are loaded for tasks to start.
    pub(super) fn load_runnable(&mut self, now: Nanos, model: ModelId) {
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        if weights.state == WeightState::Loading {
            (weights.state, weights.fresh, weights.last_used) = (WeightState::Runnable, true, now);
            self.weights_arrived(model);
        }
    }

    pub(super) fn load_done(&mut self, now: Nanos, model: ModelId) {
        self.load_runnable(now, model);
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        if weights.state == WeightState::Runnable {
            (weights.state, weights.refused) = (WeightState::Resident, 0);
        }
    }

    /// The device refused the load. Evicts another model if possible and tries again.
    pub(super) fn load_failed(&mut self, now: Nanos, model: ModelId, actions: &mut Vec<Action>) {
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        if !weights.arriving() {
            return;
        }
        weights.set_absent();
        weights.refused += 1;
        let tried_enough = weights.refused >= MAX_TRIES;
        let others = self.models.iter().flatten().any(|other| other.weights.held() > 0);
        if tried_enough || !others {
            return self.fail_waiting(model, actions);
        }
        if let Some(victim) = self.victim(|weights, _| weights.users == 0 && !weights.pinned) {
            self.evict(now, victim, actions);
        }
        self.request_load(now, model, Some(Class::RealTime));
        if let Some(load) = self.load_requests.iter_mut().find(|load| load.model == model) {
            load.not_before = now + RETRY_AFTER;
        }
    }

    fn fail_waiting(&mut self, model: ModelId, actions: &mut Vec<Action>) {
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        weights.refused = 0;
        for request in std::mem::take(&mut weights.waiting_requests) {
            let waits = |state: &super::RequestState| state.phase == Phase::Preparing;
            if self.requests.get(request).is_some_and(waits) {
                self.end_waiting(request, End::Failed, actions);
            }
        }
    }

    /// Starts requested loads, and reclaims memory for them.
    pub(super) fn start_loads(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        self.load_timer = None;
        let Some(memory) = self.options.memory_bytes else { return };
        self.evict_drained(now, actions);
        while let Some(at) = self.next_load_request(now) {
            let load = self.load_requests[at];
            let Some(state) = self.model(load.model).filter(|state| is_still_needed(state, load))
            else {
                self.load_requests.swap_remove(at);
                continue;
            };
            if !self.can_ever_load(state) {
                self.load_requests.swap_remove(at);
                self.fail_waiting(load.model, actions);
                continue;
            }
            let need = state.weights.bytes;
            let states = || self.models.iter().flatten();
            if states().filter(|state| state.weights.arriving()).count()
                >= self.options.max_concurrent_loads.max(1)
            {
                return;
            }
            let held: u64 = states().map(|state| state.weights.held()).sum();
            if held + need <= memory {
                self.load_requests.swap_remove(at);
                if let Some(state) = self.model_mut(load.model) {
                    state.weights.state = WeightState::Loading;
                    let (model, urgent) = (load.model, load.real_time);
                    actions.push(Action::Load { model, urgent });
                }
                continue;
            }
            if load.idle {
                self.load_requests.swap_remove(at);
                continue;
            }
            match self.reclaim(now, load) {
                Reclaim::Evict(victim) => self.evict(now, victim, actions),
                Reclaim::Drain(victim) => {
                    if let Some(state) = self.model_mut(victim) {
                        state.weights.draining = true;
                    }
                    return;
                }
                Reclaim::Wait(until) => {
                    self.load_timer = until;
                    return;
                }
            }
        }
        self.stop_draining();
        self.load_timer = self.load_requests.iter().map(|load| load.not_before).min();
    }

    /// The next load: real time and aged loads first, then best effort, each by age; preloads last.
    fn next_load_request(&self, now: Nanos) -> Option<usize> {
        let rank = |load: &LoadRequest| {
            let urgent = load.real_time || load.since + AGING <= now;
            (load.idle, !urgent, load.since, load.model)
        };
        let due = self.load_requests.iter().enumerate().filter(|(_, load)| load.not_before <= now);
        due.min_by_key(|(_, load)| rank(load)).map(|(at, _)| at)
    }

    fn reclaim(&self, now: Nanos, load: LoadRequest) -> Reclaim {
        let draining = |weights: &Weights, _: usize| weights.draining;
        if self.victim(draining).is_some() {
            return Reclaim::Wait(None);
        }
        let (patient, close) = (
            load.since + self.options.load_patience,
            load.since + self.options.load_patience + self.options.drain_after,
        );
        let unwanted = |weights: &Weights, pending: usize| pending == 0 && weights.users == 0;
        if let Some(victim) =
            self.victim(|weights, pending| unwanted(weights, pending) && !weights.pinned)
        {
            return Reclaim::Evict(victim);
        }
        // A model that was just loaded is protected for a while, so that its load was not in vain.
        let protected = |weights: &Weights, pending: usize| {
            weights.pinned
                || (weights.fresh
                    && pending > 0
                    && now < weights.last_used + self.options.drain_after)
        };
        let idle =
            |weights: &Weights, pending: usize| weights.users == 0 && !protected(weights, pending);
        if now < patient {
            return Reclaim::Wait(Some(patient));
        }
        if let Some(victim) = self.victim(idle) {
            return Reclaim::Evict(victim);
        }
        if now < close {
            return Reclaim::Wait(Some(close));
        }
        match self.victim(|weights, pending| !protected(weights, pending)) {
            Some(victim) => Reclaim::Drain(victim),
            // Protection may end without any other event.
            None => Reclaim::Wait(
                (self.options.drain_after > Nanos::ZERO).then_some(now + self.options.drain_after),
            ),
        }
    }

    /// The least recently used of the resident models that `fits` accepts, given their weights and
    /// number of pending requests.
    fn victim(&self, fits: impl Fn(&Weights, usize) -> bool) -> Option<ModelId> {
        let present = self.models.iter().enumerate();
        let present = present.filter_map(|(index, state)| Some((index, state.as_ref()?)));
        let candidates = present.filter(|(_, state)| {
            let weights = &state.weights;
            let there = weights.state == WeightState::Resident && weights.bytes > 0;
            there && fits(weights, state.pending)
        });
        let age = |state: &ModelState| (state.pending > 0, state.weights.last_used);
        let oldest = candidates.min_by_key(|(_, state)| age(state))?;
        Some(ModelId(oldest.0 as u32))
    }

    /// Evicts drained models whose last task has ended.
    fn evict_drained(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        while let Some(model) = self.victim(|weights, _| weights.draining && weights.users == 0) {
            self.evict(now, model, actions);
        }
    }

    /// No load waits for memory: drained models resume.
    fn stop_draining(&mut self) {
        for index in 0..self.models.len() {
            let Some(state) = &mut self.models[index] else { continue };
            if state.weights.draining && state.weights.grown.is_none() {
                state.weights.draining = false;
                self.weights_arrived(ModelId(index as u32));
            }
        }
    }

    /// Evicts a model; requests that wait for it request the next load.
    fn evict(&mut self, now: Nanos, model: ModelId, actions: &mut Vec<Action>) {
        self.free_weights(model, actions);
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        for request in std::mem::take(&mut weights.waiting_requests) {
            if self.requests.get(request).is_some_and(|state| state.phase == Phase::Preparing) {
                self.wait_for_weights(now, request);
            }
        }
    }

    /// Frees the weights of a model, if any are on the device.
    pub(super) fn free_weights(&mut self, model: ModelId, actions: &mut Vec<Action>) {
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        if weights.bytes > 0 && weights.state != WeightState::Absent {
            weights.set_absent();
            actions.push(Action::Evict { model });
        }
    }
}

/// Whether a requested load is still needed.
fn is_still_needed(state: &ModelState, load: LoadRequest) -> bool {
    let needed = state.pending > 0 || state.weights.pinned || load.idle;
    state.weights.state == WeightState::Absent && needed
}

#[cfg(test)]
mod tests;
