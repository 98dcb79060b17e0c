//! Loads and evictions that the core decides, carried out by the device.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::{Bytes, Histogram, Nanos};
use device::residency::{LoadProgress, MemoryUse, Residency};
use device::{DeviceError, Program, thread_priority};

use super::{ModelKey, Node, Shared, State};
use crate::core::{Event, ModelId};
use crate::spans::{LoadSpan, Span};

/// Concurrent loads: one copies, and the memory of the next is prepared meanwhile.
pub(super) const MAX_CONCURRENT_LOADS: usize = 2;

/// How long a load waits before it evicts a model that has requests waiting.
pub(super) const LOAD_PATIENCE: Nanos = Nanos::from_millis(5);

/// How long it waits after that before a model that is always in use is drained.
pub(super) const DRAIN_AFTER: Nanos = Nanos::from_millis(50);

/// Maximum number of programs that wait to be dropped; further ones are dropped by the caller.
const MAX_DISCARDED: usize = 1_024;

/// The weights of a model in the node.
pub(super) struct EntryWeights {
    residency: Arc<dyn Residency>,
    bytes: u64,
    pinned: bool,
    /// Counts loads and evictions, to tell reports of an earlier load from those of this one.
    number: u64,
    /// Start of the current load.
    since: Nanos,
    /// Whether real time waits for it.
    urgent: bool,
    /// Why the last load failed.
    failure: Option<DeviceError>,
}

impl EntryWeights {
    pub(super) fn of(program: &dyn Program, pinned: bool) -> Option<EntryWeights> {
        let residency = program.residency()?;
        let bytes = residency.bytes().0;
        Some(EntryWeights {
            residency,
            bytes,
            pinned,
            number: 0,
            since: Nanos::ZERO,
            urgent: false,
            failure: None,
        })
    }

    /// Pins them, or no longer; whether that is a change.
    pub(super) fn set_pinned(&mut self, pinned: bool) -> bool {
        std::mem::replace(&mut self.pinned, pinned) != pinned
    }

    pub(super) fn event(&self, model: ModelId) -> Event {
        Event::ModelWeights { model, bytes: self.bytes, pinned: self.pinned }
    }
}

/// Counters of loads and evictions.
#[derive(Clone, Debug, Default)]
pub struct SwapStats {
    /// Successful loads.
    pub loads: u64,
    /// Loads that the device refused.
    pub refused: u64,
    /// Evictions.
    pub evictions: u64,
    /// Bytes loaded.
    pub loaded: Bytes,
    /// Time of loads, from the action until all weights are there.
    pub load_times: Histogram,
}

/// State of the memory for weights.
#[derive(Clone, Debug, Default)]
pub struct NodeMemory {
    /// Memory for weights.
    pub budget: Bytes,
    /// Bytes of weights on the device, loading ones included, as the node counts.
    pub held: Bytes,
    /// Bytes of pinned weights.
    pub pinned: Bytes,
    /// Requested loads that have not started.
    pub pending_loads: usize,
    /// The device's count.
    pub device: Option<MemoryUse>,
    /// Loads and evictions so far.
    pub swaps: SwapStats,
}

impl Node {
    /// State of the memory for weights.
    pub fn memory(&self) -> NodeMemory {
        let device = self.shared.device.memory_use();
        let state = self.shared.lock();
        let memory = state.core.memory();
        NodeMemory {
            budget: self.shared.budget,
            held: Bytes(memory.held),
            pinned: Bytes(memory.pinned),
            pending_loads: memory.pending_loads,
            device,
            swaps: state.swaps.clone(),
        }
    }

    /// Loads the weights of a model into free memory; no effect where they are resident.
    pub fn preload(&self, model: ModelKey) {
        let state = self.shared.lock();
        if state.model(model).is_some_and(|entry| entry.weights.is_some()) {
            self.shared.step(state, Event::Preload { model: ModelId(model.slot) });
        }
    }

    /// Waits until all removed programs without requests are dropped; `false` after `limit`.
    pub fn wait_discarded(&self, limit: Duration) -> bool {
        self.shared.discard.wait(limit)
    }

    /// Device memory that `model` holds now.
    pub fn resident_of(&self, model: ModelKey) -> Option<Bytes> {
        let program = self.shared.lock().model(model).map(|entry| entry.program.clone())?;
        Some(program.resident())
    }

    /// Memory for weights.
    pub fn budget(&self) -> Bytes {
        self.shared.budget
    }

    /// Bytes of the weights of `model`; 0 where they are not managed.
    pub fn weight_bytes(&self, model: ModelKey) -> Option<Bytes> {
        let state = self.shared.lock();
        state.model(model)?;
        state.core.weights_of(ModelId(model.slot)).map(|(bytes, _)| Bytes(bytes))
    }

    /// Whether all weights of `model` are on the device.
    pub fn is_resident(&self, model: ModelKey) -> bool {
        let state = self.shared.lock();
        state.model(model).is_some()
            && state.core.weights_of(ModelId(model.slot)).is_some_and(|(_, there)| there)
    }

    /// Why a model can never fit beside the pinned ones; `None` when it can.
    pub fn cannot_fit(&self, program: &dyn Program) -> Option<DeviceError> {
        let needed = program.residency()?.bytes();
        let pinned = self.shared.lock().core.memory().pinned;
        let available = Bytes(self.shared.budget.0.saturating_sub(pinned));
        let device = self.shared.device.info().name.clone();
        (needed > available).then_some(DeviceError::OutOfMemory { device, needed, available })
    }
}

impl State {
    /// The event to send before a request of `model`, if its weights have grown.
    pub(super) fn grown(&mut self, model: ModelKey) -> Option<Event> {
        let weights = self.model_mut(model)?.weights.as_mut()?;
        let bytes = weights.residency.bytes().0;
        if bytes == weights.bytes {
            return None;
        }
        weights.bytes = bytes;
        Some(weights.event(ModelId(model.slot)))
    }

    /// Why a request failed without a reason from the device: the weights of its model.
    pub(super) fn memory_failure(
        &self,
        model: ModelId,
        device: &str,
        budget: Bytes,
    ) -> DeviceError {
        let entry = self.models.get(model.0 as usize).and_then(Option::as_ref);
        let Some(weights) = entry.and_then(|entry| entry.weights.as_ref()) else {
            return DeviceError::BadPlan("failed without a reason".to_string());
        };
        weights.failure.clone().unwrap_or_else(|| {
            let pinned = self.core.memory().pinned;
            let own = if weights.pinned { weights.bytes } else { 0 };
            let available = Bytes(budget.0.saturating_sub(pinned - own.min(pinned)));
            let (device, needed) = (device.to_string(), Bytes(weights.bytes));
            DeviceError::OutOfMemory { device, needed, available }
        })
    }

    pub(super) fn evict(&mut self, now: Nanos, model: ModelId) {
        let entry = self.models.get_mut(model.0 as usize).and_then(Option::as_mut);
        if let Some(weights) = entry.and_then(|entry| entry.weights.as_mut()) {
            weights.number += 1;
            weights.residency.evict();
            self.swaps.evictions += 1;
            self.record_eviction(now, model);
        }
    }
}

impl Shared {
    pub(super) fn start_load(&self, state: &mut State, now: Nanos, model: ModelId, urgent: bool) {
        let Some(entry) = state.models.get_mut(model.0 as usize).and_then(Option::as_mut) else {
            return;
        };
        let key = ModelKey { slot: model.0, generation: entry.generation };
        let Some(weights) = &mut entry.weights else { return };
        weights.number += 1;
        (weights.since, weights.urgent, weights.failure) = (now, urgent, None);
        let (node, number) = (self.own.clone(), weights.number);
        let report = move |progress| {
            if let Some(shared) = node.upgrade() {
                shared.load_progressed(key, number, progress);
            }
        };
        weights.residency.load(urgent, Box::new(report));
    }

    fn load_progressed(&self, key: ModelKey, number: u64, progress: LoadProgress) {
        let now = self.clock.now();
        let mut state = self.lock();
        let entry = state.model_mut(key).and_then(|entry| entry.weights.as_mut());
        let Some(weights) = entry.filter(|weights| weights.number == number) else { return };
        let model = ModelId(key.slot);
        let (bytes, since, urgent) = (weights.bytes, weights.since, weights.urgent);
        let event = match progress {
            LoadProgress::Runnable => Event::LoadRunnable { model },
            LoadProgress::Loaded => {
                state.swaps.loads += 1;
                state.swaps.loaded.0 += bytes;
                state.swaps.load_times.record(now - since);
                Event::LoadDone { model }
            }
            LoadProgress::Failed(err) => {
                weights.failure = Some(err);
                state.swaps.refused += 1;
                Event::LoadFailed { model }
            }
        };
        if !matches!(event, Event::LoadRunnable { .. }) {
            let failed = matches!(event, Event::LoadFailed { .. });
            let (began, ended) = (since, now);
            let span = LoadSpan { model: key, began, ended, bytes, urgent, failed };
            state.spans.record(Span::Load(span));
        }
        self.step(state, event);
    }
}

/// Drops programs on a thread of its own: freeing their memory may take long.
pub(super) struct Discard {
    programs: SyncSender<Arc<dyn Program>>,
    pending: Arc<Pending>,
}

/// Programs that are not dropped yet.
#[derive(Default)]
struct Pending {
    count: Mutex<usize>,
    none: Condvar,
}

impl Pending {
    fn lock(&self) -> MutexGuard<'_, usize> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn finish(&self, program: Arc<dyn Program>) {
        drop(program);
        let mut count = self.lock();
        *count -= 1;
        if *count == 0 {
            self.none.notify_all();
        }
    }
}

impl Discard {
    /// Starts its thread, which ends after the last program when this is dropped.
    pub(super) fn start() -> std::io::Result<Discard> {
        let (programs, receiver): (_, Receiver<Arc<dyn Program>>) = sync_channel(MAX_DISCARDED);
        let pending = Arc::new(Pending::default());
        let theirs = pending.clone();
        std::thread::Builder::new().name("node-discard".to_string()).spawn(move || {
            thread_priority::lower(thread_priority::LOW);
            receiver.iter().for_each(|program| theirs.finish(program));
        })?;
        Ok(Discard { programs, pending })
    }

    pub(super) fn discard(&self, program: Arc<dyn Program>) {
        *self.pending.lock() += 1;
        if let Err(TrySendError::Full(program) | TrySendError::Disconnected(program)) =
            self.programs.try_send(program)
        {
            self.pending.finish(program);
        }
    }

    fn wait(&self, limit: Duration) -> bool {
        let waiting =
            self.pending.none.wait_timeout_while(self.pending.lock(), limit, |count| *count > 0);
        *waiting.unwrap_or_else(PoisonError::into_inner).0 == 0
    }
}

#[cfg(test)]
mod tests;
