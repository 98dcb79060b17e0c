//! What has to be on the device before a request can run: its inputs and its model's weights.

use base::Nanos;

use super::{Action, Core, ModelId, ModelState, Phase, RequestId};
use model::config::Class;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    /// On the device, or nothing has to be there.
    #[default]
    Resident,
    Loading,
    Absent,
}

/// A model's weights.
#[derive(Clone, Debug, Default)]
pub(super) struct Weights {
    bytes: u64,
    place: Place,
    last_used: Nanos,
    /// Segments that run with them.
    pub(super) users: usize,
    /// Loaded and not yet used: not to be evicted before.
    fresh: bool,
    /// Requests that wait for them.
    parked: Vec<RequestId>,
}

impl Weights {
    pub(super) fn absent(bytes: u64) -> Weights {
        Weights { bytes, place: Place::Absent, ..Weights::default() }
    }

    /// The device lost them, if they are of the kind that is loaded.
    pub(super) fn lose(&mut self) {
        if self.bytes > 0 {
            self.place = Place::Absent;
        }
        self.fresh = false;
        self.parked.clear();
    }

    pub(super) fn resident(&self) -> bool {
        self.place == Place::Resident
    }

    fn held(&self) -> u64 {
        if self.place == Place::Absent { 0 } else { self.bytes }
    }

    pub(super) fn touch(&mut self, now: Nanos) {
        (self.last_used, self.fresh) = (now, false);
        self.users += 1;
    }
}

impl Core {
    pub(super) fn can_ever_load(&self, model: &ModelState) -> bool {
        self.options.memory_bytes.is_none_or(|memory| model.weights.bytes <= memory)
    }

    /// Starts what a new request needs.
    pub(super) fn prepare(&mut self, request: RequestId, actions: &mut Vec<Action>) {
        if self.lost {
            return;
        }
        if self.options.copies {
            self.copy_started(request);
            actions.push(Action::Copy { request });
        } else {
            self.input_ready(request);
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
    pub(super) fn input_ready(&mut self, request: RequestId) {
        self.copy_ended(request);
        let Some(state) = self.requests.get(request) else { return };
        if state.phase != Phase::Preparing || self.lost {
            return;
        }
        if self.model(state.model).is_some_and(|model| model.weights.resident()) {
            self.enqueue(request);
        } else {
            self.park(request);
        }
    }

    /// Makes a request wait until its model is loaded.
    pub(super) fn park(&mut self, request: RequestId) {
        let Some(state) = self.requests.get_mut(request) else { return };
        state.phase = Phase::Preparing;
        let (model, class) = (state.model, state.class);
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        weights.parked.push(request);
        if weights.place == Place::Absent {
            let wanted = self.load_queue.contains(&model);
            match class {
                Class::RealTime => {
                    self.load_queue.retain(|other| *other != model);
                    self.load_queue.push_front(model);
                }
                Class::BestEffort if !wanted => self.load_queue.push_back(model),
                Class::BestEffort => {}
            }
        }
    }

    pub(super) fn load_done(&mut self, now: Nanos, model: ModelId) {
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        if weights.place != Place::Loading {
            return;
        }
        (weights.place, weights.fresh, weights.last_used) = (Place::Resident, true, now);
        for request in std::mem::take(&mut weights.parked) {
            let waits = |state: &super::RequestState| state.phase == Phase::Preparing;
            if self.requests.get(request).is_some_and(waits) {
                self.enqueue(request);
            }
        }
    }

    /// Starts the loads there is memory for, and makes memory where nobody uses it.
    pub(super) fn load_wanted(&mut self, actions: &mut Vec<Action>) {
        let Some(memory) = self.options.memory_bytes else { return };
        while let Some(model) = self.load_queue.front().copied() {
            let Some(need) = self.model(model).map(|model| model.weights.bytes) else {
                self.load_queue.pop_front();
                continue;
            };
            let held: u64 = self.models.iter().flatten().map(|model| model.weights.held()).sum();
            if held + need > memory {
                let Some(victim) = self.eviction_victim() else { return };
                self.unload(victim, actions);
                continue;
            }
            self.load_queue.pop_front();
            if let Some(state) = self.model_mut(model) {
                state.weights.place = Place::Loading;
                actions.push(Action::Load { model });
            }
        }
    }

    /// The model that was not used for the longest time and is not in use now.
    fn eviction_victim(&self) -> Option<ModelId> {
        let idle = |(_, state): &(usize, &ModelState)| {
            let weights = &state.weights;
            let needed = weights.fresh && state.under_way > 0;
            weights.resident() && weights.bytes > 0 && weights.users == 0 && !needed
        };
        let models = self.models.iter().enumerate();
        let present = models.filter_map(|(index, state)| Some((index, state.as_ref()?)));
        // Rather one that nobody asks for.
        let age = |state: &ModelState| (state.under_way > 0, state.weights.last_used);
        let oldest = present.filter(idle).min_by_key(|(_, state)| age(state))?;
        Some(ModelId(oldest.0 as u32))
    }

    /// Frees a model's weights, if it has any on the device.
    pub(super) fn unload(&mut self, model: ModelId, actions: &mut Vec<Action>) {
        let Some(weights) = self.model_mut(model).map(|model| &mut model.weights) else { return };
        if weights.bytes > 0 && weights.place != Place::Absent {
            weights.place = Place::Absent;
            actions.push(Action::Evict { model });
        }
    }
}
