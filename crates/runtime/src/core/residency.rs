//! What has to be on the device before a request can run: its inputs and its model's weights.
//!
//! Weights are kept within a budget of exact bytes. A model that is asked for and not there is *pending_loads*; load_requests are served one
//! after another, real time first, and a load that waited long counts as real time. PaddingDevice is made by evicting what was used
//! least recently: at once what nobody asks for, after some patience also what has requests waiting, and when even that is
//! always in use, the one used least recently starts no more work until it can go. Pinned weights stay. Nothing that runs
//! loses its weights.

use base::Nanos;

use super::{Action, Core, End, ModelId, ModelState, Phase, RequestId};
use model::config::Class;

/// A load of best effort that waited so long goes by its age among those of real time.
const AGING: Nanos = Nanos::from_millis(1_000);

/// How long a load that the device refused waits before it is tried again, while others hold memory.
const RETRY_AFTER: Nanos = Nanos::from_millis(10);

/// Tries of a load that the device refuses before the requests that wait for it fail.
const MAX_TRIES: u32 = 200;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum WeightState {
    /// On the device, or nothing has to be there.
    #[default]
    Resident,
    Loading,
    /// Still arriving, and far enough that runs may start: the device holds each step until its weights are there.
    Runnable,
    Absent,
}

/// A model's weights.
#[derive(Clone, Debug, Default)]
pub(super) struct Weights {
    bytes: u64,
    state: WeightState,
    /// Never evicted for others.
    pinned: bool,
    last_used: Nanos,
    /// Segments that run with them.
    pub(super) users: usize,
    /// Loaded and not yet used.
    fresh: bool,
    /// To be evicted once nothing runs with them: for others, or because there are more of them now.
    draining: bool,
    /// How many bytes there are meanwhile, if it is more than were loaded.
    grown: Option<u64>,
    /// Tries that the device refused.
    refused: u32,
    /// Requests that wait for them.
    waiting_requests: Vec<RequestId>,
}

/// A model that is to be loaded.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadRequest {
    model: ModelId,
    since: Nanos,
    real_time: bool,
    /// Only if there is room.
    idle: bool,
    /// Not to be tried before.
    not_before: Nanos,
}

/// How room can be made.
enum Reclaim {
    /// By evicting this one now.
    Evict(ModelId),
    /// By letting this one start no more work.
    Drain(ModelId),
    /// By waiting, if a time is given at most until then.
    Wait(Option<Nanos>),
}

impl Weights {
    pub(super) fn absent(bytes: u64) -> Weights {
        Weights { bytes, state: WeightState::Absent, ..Weights::default() }
    }

    /// The device lost them, if they are of the kind that is loaded.
    pub(super) fn lose(&mut self) {
        if self.bytes > 0 {
            self.set_absent();
        }
        self.waiting_requests.clear();
    }

    /// None of them is on the device any more.
    fn set_absent(&mut self) {
        (self.state, self.fresh, self.draining) = (WeightState::Absent, false, false);
        self.bytes = self.grown.take().unwrap_or(self.bytes);
    }

    /// Whether work may start with them.
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

/// What is known of memory for weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryState {
    /// Bytes of weights that are on the device or on their way.
    pub held: u64,
    /// Bytes of these that are pinned.
    pub pinned: u64,
    /// Models that are to be loaded and wait for room or their turn.
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

    /// How memory for weights stands.
    pub fn memory(&self) -> MemoryState {
        let held = self.models.iter().flatten().map(|model| model.weights.held()).sum();
        MemoryState { held, pinned: self.pinned_bytes(), pending_loads: self.load_requests.len() }
    }

    /// Bytes of a model's weights, and whether they are on the device as a whole.
    pub fn weights_of(&self, model: ModelId) -> Option<(u64, bool)> {
        let weights = &self.model(model)?.weights;
        Some((weights.bytes, weights.state == WeightState::Resident))
    }

    /// A model's weights are known, or there are more of them than before.
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
                // What is there is let go of as soon as nothing runs with it, and all is loaded anew. Until then its bytes
                // count as they were.
                (weights.grown, weights.draining) = (Some(bytes), true);
            }
        }
        if pinned && bytes > 0 {
            self.request_load(now, model, Some(Class::RealTime));
        }
    }

    /// Wants all that is pinned, after the device lost it.
    pub(super) fn request_pinned_loads(&mut self, now: Nanos) {
        for index in 0..self.models.len() {
            let pinned = |state: &ModelState| state.weights.pinned && state.weights.bytes > 0;
            if self.models[index].as_ref().is_some_and(pinned) {
                self.request_load(now, ModelId(index as u32), Some(Class::RealTime));
            }
        }
    }

    /// Wants `model` loaded, if it is not there; without a class only if there is room.
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

    /// Starts what a new request needs.
    pub(super) fn prepare(&mut self, now: Nanos, request: RequestId, actions: &mut Vec<Action>) {
        if self.lost {
            return;
        }
        if self.options.copies {
            self.copy_started(request);
            actions.push(Action::Copy { request });
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

    /// A request's inputs are there, or of no more use.
    pub(super) fn copy_ended(&mut self, request: RequestId) {
        if let Some(state) = self.requests.get_mut(request)
            && state.copying
        {
            state.copying = false;
            self.real_time_copies -= usize::from(state.class == Class::RealTime);
        }
    }

    /// The inputs are there: the request waits for its turn, or first for its model's weights.
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

    /// Makes a request wait until its model is loaded.
    pub(super) fn wait_for_weights(&mut self, now: Nanos, request: RequestId) {
        let Some(state) = self.requests.get_mut(request) else { return };
        state.phase = Phase::Preparing;
        let (model, class) = (state.model, state.class);
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        weights.waiting_requests.push(request);
        self.request_load(now, model, Some(class));
    }

    /// Those who wait for `model` wait for their turn now.
    fn weights_arrived(&mut self, model: ModelId) {
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        for request in std::mem::take(&mut weights.waiting_requests) {
            let waits = |state: &super::RequestState| state.phase == Phase::Preparing;
            if self.requests.get(request).is_some_and(waits) {
                self.enqueue(request);
            }
        }
    }

    /// Enough of a model's weights is there for runs to start.
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

    /// The device had no room after all. PaddingDevice is made as long as there is something to make it of.
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

    /// Starts the loads there is memory for, and makes memory where nobody uses it.
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

    /// The load to serve next: real time and what waited long, then the rest, each by age; last what only fills room.
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
        let unwanted = |weights: &Weights, asked: usize| asked == 0 && weights.users == 0;
        if let Some(victim) =
            self.victim(|weights, asked| unwanted(weights, asked) && !weights.pinned)
        {
            return Reclaim::Evict(victim);
        }
        // What was just loaded is left alone for a while, so that a load is not in vain.
        let protected = |weights: &Weights, asked: usize| {
            weights.pinned
                || (weights.fresh
                    && asked > 0
                    && now < weights.last_used + self.options.drain_after)
        };
        let idle =
            |weights: &Weights, asked: usize| weights.users == 0 && !protected(weights, asked);
        if now < patient {
            return Reclaim::Wait(Some(patient));
        }
        if let Some(victim) = self.victim(idle) {
            return Reclaim::Evict(victim);
        }
        if now < close {
            return Reclaim::Wait(Some(close));
        }
        match self.victim(|weights, asked| !protected(weights, asked)) {
            Some(victim) => Reclaim::Drain(victim),
            // A protected one's time may end without anything else happening.
            None => Reclaim::Wait(
                (self.options.drain_after > Nanos::ZERO).then_some(now + self.options.drain_after),
            ),
        }
    }

    /// Of the models that are wholly on the device and that `fits` accepts, by their weights and how many requests ask for
    /// them, the one that was not used for the longest time.
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

    /// Evicts what was only waiting for its last run.
    fn evict_drained(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        while let Some(model) = self.victim(|weights, _| weights.draining && weights.users == 0) {
            self.evict(now, model, actions);
        }
    }

    /// Nobody needs room any more: what was closed for it may go on.
    fn stop_draining(&mut self) {
        for index in 0..self.models.len() {
            let Some(state) = &mut self.models[index] else { continue };
            if state.weights.draining && state.weights.grown.is_none() {
                state.weights.draining = false;
                self.weights_arrived(ModelId(index as u32));
            }
        }
    }

    /// Evicts a model's weights; who waits for them waits for the next load.
    fn evict(&mut self, now: Nanos, model: ModelId, actions: &mut Vec<Action>) {
        self.free_weights(model, actions);
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        for request in std::mem::take(&mut weights.waiting_requests) {
            if self.requests.get(request).is_some_and(|state| state.phase == Phase::Preparing) {
                self.wait_for_weights(now, request);
            }
        }
    }

    /// Frees a model's weights, if it has any on the device.
    pub(super) fn free_weights(&mut self, model: ModelId, actions: &mut Vec<Action>) {
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        if weights.bytes > 0 && weights.state != WeightState::Absent {
            weights.set_absent();
            actions.push(Action::Evict { model });
        }
    }
}

/// Whether what was pending_loads is still to be loaded: it is not there, and somebody asks for it.
fn is_still_needed(state: &ModelState, load: LoadRequest) -> bool {
    let asked = state.pending > 0 || state.weights.pinned || load.idle;
    state.weights.state == WeightState::Absent && asked
}

#[cfg(test)]
mod tests;
