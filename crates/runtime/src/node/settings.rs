//! Settings of a model that change while it is served: no request is lost or refused for it.
//!
//! What waits in the batcher stays there and is batched by the new rules; what runs ends by the old
//! ones. The batcher of a model whose requests no longer share batches remains for those that it
//! holds.

use std::collections::VecDeque;

use base::Nanos;
use device::{PreemptionLevel, Program};
use model::config::{ModelConfig, RequestLimits};
use model::length_padding::LengthPadding;

use super::batch_jobs::{BatchStaging, ModelBatcher, batcher_of};
use super::{Defaults, ModelEntry, ModelKey, Node};
use crate::core::{Event, ModelId};

/// The defaults of requests in `config`.
pub(super) fn defaults(config: &ModelConfig) -> Defaults {
    Defaults {
        class: config.class,
        priority: config.priority,
        timeout: config.timeout_ms.map(Nanos::from_millis),
        objective: config.slo_ms.map(Nanos::from_millis),
    }
}

/// The batcher of a model and how its requests could be padded, by its settings.
pub(super) struct BatchSettings {
    pub(super) batching: Option<(ModelBatcher, BatchStaging)>,
    pub(super) padding_rule: Option<LengthPadding>,
}

impl BatchSettings {
    pub(super) fn of(program: &dyn Program, config: &ModelConfig, level: PreemptionLevel) -> Self {
        let plan = program.plan();
        let batching = batcher_of(plan, config, level);
        let padding_rule = batching.as_ref().and_then(|(_, staging)| {
            let rule = LengthPadding::of(plan, staging.symbol(), &config.batching);
            rule.inspect_err(|why| tracing::debug!(why, "lengths are not mixed")).ok()
        });
        BatchSettings { batching, padding_rule }
    }
}

/// Whether `new` changes what a node holds of the settings; the others concern only the server.
fn concerns_node(old: &ModelConfig, new: &ModelConfig) -> bool {
    let of_node = |config: &ModelConfig| ModelConfig {
        labels: Vec::new(),
        preprocessing: None,
        limits: RequestLimits::default(),
        ..config.clone()
    };
    of_node(old) != of_node(new)
}

impl Node {
    /// Changes the settings of `model`: requests that arrive from now on have the new defaults, and
    /// those that wait for a batch get one by the new rules. `false` when there is no such model.
    pub fn set_settings(&self, model: ModelKey, old: &ModelConfig, new: &ModelConfig) -> bool {
        let Some(program) = self.shared.lock().model(model).map(|entry| entry.program.clone())
        else {
            return false;
        };
        if !concerns_node(old, new) {
            return true;
        }
        let rebatch = old.batching != new.batching
            || old.slo_ms != new.slo_ms
            || old.max_batch_size != new.max_batch_size;
        let level = self.shared.device.info().preemption;
        // Outside the lock: it looks at every step.
        let made = rebatch.then(|| BatchSettings::of(&*program, new, level));
        let mut state = self.shared.lock();
        let Some(entry) = state.model_mut(model) else { return false };
        let id = ModelId(model.slot);
        let mut events = VecDeque::new();
        entry.defaults = defaults(new);
        entry.queue_capacity = new.queue_capacity;
        let prepared = made.and_then(|made| entry.rebatch(made, new.queue_capacity));
        let is_batched = entry.is_batched();
        if let Some((batcher, _)) = &mut entry.batching {
            batcher.set_capacity(new.queue_capacity);
            let max_running = if is_batched { batcher.rules().workers.len() } else { 1 };
            events.push_back(Event::ModelConcurrency { model: id, max_running });
        }
        let queue_capacity = entry.core_queue_capacity();
        events.push_back(Event::ModelQueueCapacity { model: id, queue_capacity });
        if let Some(weights) = &mut entry.weights
            && weights.set_pinned(new.pinned)
        {
            events.push_back(weights.event(id));
        }
        state.batches.due.push(id);
        self.shared.run(state, events);
        if let Some(batches) = prepared {
            self.shared.prepare_batches(model, &program, batches);
        }
        true
    }

    /// Whether the weights of `model` fit beside those that are pinned, if they are to be.
    pub fn can_pin(&self, model: ModelKey) -> bool {
        let program = self.shared.lock().model(model).map(|entry| entry.program.clone());
        program.is_none_or(|program| self.cannot_fit(&*program).is_none())
    }
}

impl ModelEntry {
    /// Whether requests may share batches.
    pub(super) fn is_batched(&self) -> bool {
        self.batching.as_ref().is_some_and(|(_, staging)| staging.is_open())
    }

    /// How many requests wait in the core; the batcher enforces the queue capacity itself.
    pub(super) fn core_queue_capacity(&self) -> usize {
        if self.is_batched() { usize::MAX } else { self.queue_capacity }
    }

    /// Batches by new settings. Returns the batch sizes that the device should prepare.
    fn rebatch(&mut self, made: BatchSettings, capacity: usize) -> Option<Vec<usize>> {
        if self.padding_rule != made.padding_rule {
            // It must be checked again.
            (self.padding_rule, self.padding) = (made.padding_rule, None);
        }
        match (&mut self.batching, made.batching) {
            (Some((batcher, staging)), Some((fresh, open))) => {
                batcher.set_rules(fresh.rules().clone(), capacity);
                *staging = open;
            }
            // Requests that are being staged still come.
            (Some((_, staging)), None) => staging.close(),
            (none, fresh) => *none = fresh,
        }
        let (batcher, _) = self.batching.as_ref().filter(|(_, staging)| staging.is_open())?;
        Some(batcher.rules().batches())
    }
}
