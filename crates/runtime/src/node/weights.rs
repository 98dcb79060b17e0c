//! Weights that come and go: what the core decides about memory, carried out by the device.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::{Bytes, Histogram, Nanos};
use device::residency::{LoadProgress, MemoryUse, Residency};
use device::{DeviceError, Program};

use super::{ModelKey, Node, Shared, State};
use crate::core::{Event, ModelId};

/// Loads under way at once: one that arrives, and the next whose memory is made ready meanwhile.
pub(super) const MAX_CONCURRENT_LOADS: usize = 2;

/// How long a load waits before it takes the place of a model that has requests waiting.
pub(super) const LOAD_PATIENCE: Nanos = Nanos::from_millis(5);

/// How long it waits then before a model that is always in use starts no more work.
pub(super) const DRAIN_AFTER: Nanos = Nanos::from_millis(50);

/// Programs that wait to be taken apart; whoever has one more does it itself.
const MAX_DISCARDED: usize = 1_024;

/// A model's weights as the node knows them.
pub(super) struct EntryWeights {
    residency: Arc<dyn Residency>,
    bytes: u64,
    pinned: bool,
    /// Counts loads and evictions, so that a report of an earlier load is told from one of this.
    number: u64,
    /// Since when the load under way is.
    since: Nanos,
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
            failure: None,
        })
    }

    pub(super) fn event(&self, model: ModelId) -> Event {
        Event::ModelWeights { model, bytes: self.bytes, pinned: self.pinned }
    }
}

/// What was done about memory so far.
#[derive(Clone, Debug, Default)]
pub struct SwapStats {
    /// Loads that ended well.
    pub loads: u64,
    /// Loads the device refused.
    pub refused: u64,
    /// Evictions.
    pub evictions: u64,
    /// Bytes that were loaded.
    pub loaded: Bytes,
    /// From the order to load to all weights being there.
    pub load_times: Histogram,
}

/// How memory stands.
#[derive(Clone, Debug, Default)]
pub struct NodeMemory {
    /// What weights may take.
    pub budget: Bytes,
    /// What they take, arriving ones included, as the node counts.
    pub held: Bytes,
    /// What of it is pinned.
    pub pinned: Bytes,
    /// Models that wait to be loaded.
    pub pending_loads: usize,
    /// The device's own count.
    pub device: Option<MemoryUse>,
    /// What was done so far.
    pub swaps: SwapStats,
}

impl Node {
    /// How memory for weights stands.
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

    /// Loads a model's weights if there is room for them; does nothing where they are there already or always.
    pub fn preload(&self, model: ModelKey) {
        let state = self.shared.lock();
        if state.model(model).is_some_and(|entry| entry.weights.is_some()) {
            self.shared.step(state, Event::Preload { model: ModelId(model.slot) });
        }
    }

    /// LockWaits until everything that was removed and has no request under way is taken apart; `false` after `limit`.
    pub fn wait_discarded(&self, limit: Duration) -> bool {
        self.shared.discard.wait(limit)
    }

    /// Memory that `model` holds on the device now.
    pub fn resident_of(&self, model: ModelKey) -> Option<Bytes> {
        let program = self.shared.lock().model(model).map(|entry| entry.program.clone())?;
        Some(program.resident())
    }

    /// What weights may take.
    pub fn budget(&self) -> Bytes {
        self.shared.budget
    }

    /// What the weights of `model` take when they are there; 0 where they do not come and go.
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

    /// Why a model with such weights could never run here beside what is pinned; `None` when it could.
    pub fn cannot_fit(&self, program: &dyn Program) -> Option<DeviceError> {
        let needed = program.residency()?.bytes();
        let pinned = self.shared.lock().core.memory().pinned;
        let available = Bytes(self.shared.budget.0.saturating_sub(pinned));
        let device = self.shared.device.info().name.clone();
        (needed > available).then_some(DeviceError::OutOfMemory { device, needed, available })
    }
}

impl State {
    /// What the core must hear before a request of `model` if its weights became more.
    pub(super) fn grown(&mut self, model: ModelKey) -> Option<Event> {
        let weights = self.model_mut(model)?.weights.as_mut()?;
        let bytes = weights.residency.bytes().0;
        if bytes == weights.bytes {
            return None;
        }
        weights.bytes = bytes;
        Some(weights.event(ModelId(model.slot)))
    }

    /// Why a request failed for which the device gave no reason: its model's weights.
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

    pub(super) fn evict(&mut self, model: ModelId) {
        let entry = self.models.get_mut(model.0 as usize).and_then(Option::as_mut);
        if let Some(weights) = entry.and_then(|entry| entry.weights.as_mut()) {
            weights.number += 1;
            weights.residency.evict();
            self.swaps.evictions += 1;
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
        (weights.since, weights.failure) = (now, None);
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
        let (bytes, since) = (weights.bytes, weights.since);
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
        self.step(state, event);
    }
}

/// Takes programs apart on a thread of its own: that frees memory, which may take its time.
pub(super) struct Discard {
    programs: SyncSender<Arc<dyn Program>>,
    pending: Arc<Pending>,
}

/// Programs that are not yet taken apart.
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
    /// Starts its thread, which ends with the last program after this is dropped.
    pub(super) fn start() -> std::io::Result<Discard> {
        let (programs, receiver): (_, Receiver<Arc<dyn Program>>) = sync_channel(MAX_DISCARDED);
        let pending = Arc::new(Pending::default());
        let theirs = pending.clone();
        std::thread::Builder::new()
            .name("node-discard".to_string())
            .spawn(move || receiver.iter().for_each(|program| theirs.finish(program)))?;
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
