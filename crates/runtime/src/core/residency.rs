//! What has to be on the device before a request can run: its inputs and its model's weights.
//!
//! Weights are kept within a budget of exact bytes. A model that is asked for and not there is *wanted*; wants are served one
//! after another, real time first, and a want that waited long counts as real time. Room is made by evicting what was used
//! least recently: at once what nobody asks for, after some patience also what has requests waiting, and when even that is
//! always in use, the one used least recently starts no more work until it can go. Pinned weights stay. Nothing that runs
//! loses its weights.

use base::Nanos;

use super::{Action, Core, End, ModelId, ModelState, Phase, RequestId};
use model::config::Class;

/// A want of best effort that waited so long goes by its age among those of real time.
const AGED: Nanos = Nanos::from_millis(1_000);

/// How long a load that the device refused waits before it is tried again, while others hold memory.
const RETRY_AFTER: Nanos = Nanos::from_millis(10);

/// Tries of a load that the device refuses before the requests that wait for it fail.
const TRIES_MOST: u32 = 200;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
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
    place: Place,
    /// Never evicted for others.
    pinned: bool,
    last_used: Nanos,
    /// Segments that run with them.
    pub(super) users: usize,
    /// Loaded and not yet used.
    fresh: bool,
    /// To be evicted once nothing runs with them: for others, or because there are more of them now.
    closing: bool,
    /// How many bytes there are meanwhile, if it is more than were loaded.
    grown: Option<u64>,
    /// Tries that the device refused.
    refused: u32,
    /// Requests that wait for them.
    parked: Vec<RequestId>,
}

/// A model that is to be loaded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Want {
    model: ModelId,
    since: Nanos,
    real_time: bool,
    /// Only if there is room.
    idle: bool,
    /// Not to be tried before.
    not_before: Nanos,
}

/// How room can be made.
enum MakeRoom {
    /// By evicting this one now.
    Evict(ModelId),
    /// By letting this one start no more work.
    Close(ModelId),
    /// By waiting, if a time is given at most until then.
    Wait(Option<Nanos>),
}

impl Weights {
    pub(super) fn absent(bytes: u64) -> Weights {
        Weights { bytes, place: Place::Absent, ..Weights::default() }
    }

    /// The device lost them, if they are of the kind that is loaded.
    pub(super) fn lose(&mut self) {
        if self.bytes > 0 {
            self.leave_device();
        }
        self.parked.clear();
    }

    /// None of them is on the device any more.
    fn leave_device(&mut self) {
        (self.place, self.fresh, self.closing) = (Place::Absent, false, false);
        self.bytes = self.grown.take().unwrap_or(self.bytes);
    }

    /// Whether work may start with them.
    pub(super) fn usable(&self) -> bool {
        matches!(self.place, Place::Resident | Place::Runnable) && !self.closing
    }

    fn held(&self) -> u64 {
        if self.place == Place::Absent { 0 } else { self.bytes }
    }

    fn arriving(&self) -> bool {
        matches!(self.place, Place::Loading | Place::Runnable)
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
    pub wanted: usize,
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
        MemoryState { held, pinned: self.pinned_bytes(), wanted: self.wants.len() }
    }

    /// Bytes of a model's weights, and whether they are on the device as a whole.
    pub fn weights_of(&self, model: ModelId) -> Option<(u64, bool)> {
        let weights = &self.model(model)?.weights;
        Some((weights.bytes, weights.place == Place::Resident))
    }

    /// A model's weights are known, or there are more of them than before.
    pub(super) fn set_weights(&mut self, now: Nanos, model: ModelId, bytes: u64, pinned: bool) {
        if self.options.memory_bytes.is_none() {
            return;
        }
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        weights.pinned = pinned;
        if weights.bytes != bytes {
            if weights.bytes == 0 || weights.place == Place::Absent {
                (weights.bytes, weights.place) = (bytes, Place::Absent);
            } else {
                // What is there is let go of as soon as nothing runs with it, and all is loaded anew. Until then its bytes
                // count as they were.
                (weights.grown, weights.closing) = (Some(bytes), true);
            }
        }
        if pinned && bytes > 0 {
            self.want(now, model, Some(Class::RealTime));
        }
    }

    /// Wants all that is pinned, after the device lost it.
    pub(super) fn want_pinned(&mut self, now: Nanos) {
        for index in 0..self.models.len() {
            let pinned = |state: &ModelState| state.weights.pinned && state.weights.bytes > 0;
            if self.models[index].as_ref().is_some_and(pinned) {
                self.want(now, ModelId(index as u32), Some(Class::RealTime));
            }
        }
    }

    /// Wants `model` loaded, if it is not there; without a class only if there is room.
    pub(super) fn want(&mut self, now: Nanos, model: ModelId, class: Option<Class>) {
        let absent = |state: &ModelState| state.weights.place == Place::Absent;
        if !self.model(model).is_some_and(absent) {
            return;
        }
        let (real_time, idle) = (class == Some(Class::RealTime), class.is_none());
        match self.wants.iter_mut().find(|want| want.model == model) {
            Some(want) => {
                want.real_time |= real_time;
                want.idle &= idle;
            }
            None => {
                let not_before = Nanos::ZERO;
                self.wants.push(Want { model, since: now, real_time, idle, not_before });
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
            self.park(now, request);
        }
    }

    /// Makes a request wait until its model is loaded.
    pub(super) fn park(&mut self, now: Nanos, request: RequestId) {
        let Some(state) = self.requests.get_mut(request) else { return };
        state.phase = Phase::Preparing;
        let (model, class) = (state.model, state.class);
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        weights.parked.push(request);
        self.want(now, model, Some(class));
    }

    /// Those who wait for `model` wait for their turn now.
    fn unpark(&mut self, model: ModelId) {
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        for request in std::mem::take(&mut weights.parked) {
            let waits = |state: &super::RequestState| state.phase == Phase::Preparing;
            if self.requests.get(request).is_some_and(waits) {
                self.enqueue(request);
            }
        }
    }

    /// Enough of a model's weights is there for runs to start.
    pub(super) fn load_runnable(&mut self, now: Nanos, model: ModelId) {
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        if weights.place == Place::Loading {
            (weights.place, weights.fresh, weights.last_used) = (Place::Runnable, true, now);
            self.unpark(model);
        }
    }

    pub(super) fn load_done(&mut self, now: Nanos, model: ModelId) {
        self.load_runnable(now, model);
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        if weights.place == Place::Runnable {
            (weights.place, weights.refused) = (Place::Resident, 0);
        }
    }

    /// The device had no room after all. Room is made as long as there is something to make it of.
    pub(super) fn load_failed(&mut self, now: Nanos, model: ModelId, actions: &mut Vec<Action>) {
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        if !weights.arriving() {
            return;
        }
        weights.leave_device();
        weights.refused += 1;
        let tried_enough = weights.refused >= TRIES_MOST;
        let others = self.models.iter().flatten().any(|other| other.weights.held() > 0);
        if tried_enough || !others {
            return self.fail_parked(model, actions);
        }
        if let Some(victim) = self.victim(|weights, _| weights.users == 0 && !weights.pinned) {
            self.unload(now, victim, actions);
        }
        self.want(now, model, Some(Class::RealTime));
        if let Some(want) = self.wants.iter_mut().find(|want| want.model == model) {
            want.not_before = now + RETRY_AFTER;
        }
    }

    fn fail_parked(&mut self, model: ModelId, actions: &mut Vec<Action>) {
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        weights.refused = 0;
        for request in std::mem::take(&mut weights.parked) {
            let waits = |state: &super::RequestState| state.phase == Phase::Preparing;
            if self.requests.get(request).is_some_and(waits) {
                self.end_waiting(request, End::Failed, actions);
            }
        }
    }

    /// Starts the loads there is memory for, and makes memory where nobody uses it.
    pub(super) fn load_wanted(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        self.load_timer = None;
        let Some(memory) = self.options.memory_bytes else { return };
        self.let_go(now, actions);
        while let Some(at) = self.next_want(now) {
            let want = self.wants[at];
            let Some(state) = self.model(want.model).filter(|state| wants_still(state, want))
            else {
                self.wants.swap_remove(at);
                continue;
            };
            if !self.can_ever_load(state) {
                self.wants.swap_remove(at);
                self.fail_parked(want.model, actions);
                continue;
            }
            let need = state.weights.bytes;
            let states = || self.models.iter().flatten();
            if states().filter(|state| state.weights.arriving()).count()
                >= self.options.loads_at_once.max(1)
            {
                return;
            }
            let held: u64 = states().map(|state| state.weights.held()).sum();
            if held + need <= memory {
                self.wants.swap_remove(at);
                if let Some(state) = self.model_mut(want.model) {
                    state.weights.place = Place::Loading;
                    let (model, urgent) = (want.model, want.real_time);
                    actions.push(Action::Load { model, urgent });
                }
                continue;
            }
            if want.idle {
                self.wants.swap_remove(at);
                continue;
            }
            match self.make_room(now, want) {
                MakeRoom::Evict(victim) => self.unload(now, victim, actions),
                MakeRoom::Close(victim) => {
                    if let Some(state) = self.model_mut(victim) {
                        state.weights.closing = true;
                    }
                    return;
                }
                MakeRoom::Wait(until) => {
                    self.load_timer = until;
                    return;
                }
            }
        }
        self.reopen();
        self.load_timer = self.wants.iter().map(|want| want.not_before).min();
    }

    /// The want to serve next: real time and what waited long, then the rest, each by age; last what only fills room.
    fn next_want(&self, now: Nanos) -> Option<usize> {
        let rank = |want: &Want| {
            let urgent = want.real_time || want.since + AGED <= now;
            (want.idle, !urgent, want.since, want.model)
        };
        let due = self.wants.iter().enumerate().filter(|(_, want)| want.not_before <= now);
        due.min_by_key(|(_, want)| rank(want)).map(|(at, _)| at)
    }

    fn make_room(&self, now: Nanos, want: Want) -> MakeRoom {
        let closing = |weights: &Weights, _: usize| weights.closing;
        if self.victim(closing).is_some() {
            return MakeRoom::Wait(None);
        }
        let (patient, close) = (
            want.since + self.options.load_patience,
            want.since + self.options.load_patience + self.options.close_after,
        );
        let unwanted = |weights: &Weights, asked: usize| asked == 0 && weights.users == 0;
        if let Some(victim) =
            self.victim(|weights, asked| unwanted(weights, asked) && !weights.pinned)
        {
            return MakeRoom::Evict(victim);
        }
        // What was just loaded is left alone for a while, so that a load is not in vain.
        let spared = |weights: &Weights, asked: usize| {
            weights.pinned
                || (weights.fresh
                    && asked > 0
                    && now < weights.last_used + self.options.close_after)
        };
        let idle = |weights: &Weights, asked: usize| weights.users == 0 && !spared(weights, asked);
        if now < patient {
            return MakeRoom::Wait(Some(patient));
        }
        if let Some(victim) = self.victim(idle) {
            return MakeRoom::Evict(victim);
        }
        if now < close {
            return MakeRoom::Wait(Some(close));
        }
        match self.victim(|weights, asked| !spared(weights, asked)) {
            Some(victim) => MakeRoom::Close(victim),
            // A spared one's time may end without anything else happening.
            None => MakeRoom::Wait(
                (self.options.close_after > Nanos::ZERO).then_some(now + self.options.close_after),
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
            let there = weights.place == Place::Resident && weights.bytes > 0;
            there && fits(weights, state.under_way)
        });
        let age = |state: &ModelState| (state.under_way > 0, state.weights.last_used);
        let oldest = candidates.min_by_key(|(_, state)| age(state))?;
        Some(ModelId(oldest.0 as u32))
    }

    /// Evicts what was only waiting for its last run.
    fn let_go(&mut self, now: Nanos, actions: &mut Vec<Action>) {
        while let Some(model) = self.victim(|weights, _| weights.closing && weights.users == 0) {
            self.unload(now, model, actions);
        }
    }

    /// Nobody needs room any more: what was closed for it may go on.
    fn reopen(&mut self) {
        for index in 0..self.models.len() {
            let Some(state) = &mut self.models[index] else { continue };
            if state.weights.closing && state.weights.grown.is_none() {
                state.weights.closing = false;
                self.unpark(ModelId(index as u32));
            }
        }
    }

    /// Evicts a model's weights; who waits for them waits for the next load.
    fn unload(&mut self, now: Nanos, model: ModelId, actions: &mut Vec<Action>) {
        self.free_weights(model, actions);
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        for request in std::mem::take(&mut weights.parked) {
            if self.requests.get(request).is_some_and(|state| state.phase == Phase::Preparing) {
                self.park(now, request);
            }
        }
    }

    /// Frees a model's weights, if it has any on the device.
    pub(super) fn free_weights(&mut self, model: ModelId, actions: &mut Vec<Action>) {
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        if weights.bytes > 0 && weights.place != Place::Absent {
            weights.leave_device();
            actions.push(Action::Evict { model });
        }
    }
}

/// Whether what was wanted is still to be loaded: it is not there, and somebody asks for it.
fn wants_still(state: &ModelState, want: Want) -> bool {
    let asked = state.under_way > 0 || state.weights.pinned || want.idle;
    state.weights.place == Place::Absent && asked
}

#[cfg(test)]
mod tests;
