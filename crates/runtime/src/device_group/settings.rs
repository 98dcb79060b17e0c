//! Settings of a model that change while it is served.

use base::Nanos;
use model::config::{BatchingPolicy, ModelConfig};

use super::DeviceGroup;
use super::router::{GroupModelId, ModelFacts};

/// What the router needs to know of `config`.
pub(super) fn facts(config: &ModelConfig) -> ModelFacts {
    ModelFacts {
        class: config.class,
        pinned: config.pinned,
        held_back: match config.batching.policy {
            BatchingPolicy::Window => Nanos::from_micros(config.batching.max_wait_us),
            // Waits deliberately as long as its SLO allows.
            BatchingPolicy::Deferred => Nanos::from_millis(config.slo_ms.unwrap_or(0)),
            _ => Nanos::ZERO,
        },
    }
}

/// The settings of a replica beside that at the home: pinned weights stay there, a replica can be
/// evicted.
pub(super) fn of_replica(config: &ModelConfig) -> ModelConfig {
    ModelConfig { pinned: false, ..config.clone() }
}

impl DeviceGroup {
    /// Changes the settings of a model on all its devices: requests that arrive from now on have
    /// the new defaults, and those that wait for a batch get one by the new rules. `false` when
    /// there is no such model.
    pub fn set_settings(&self, model: GroupModelId, config: &ModelConfig) -> bool {
        let shared = &self.shared;
        let (old, keys, home) = {
            let mut state = shared.lock();
            let Some(entry) = state.entry_mut(model) else { return false };
            // A replica that is being added compares its settings with these afterwards.
            let old = std::mem::replace(&mut entry.config, config.clone());
            let keys = entry.keys.clone();
            state.router.set_facts(model, facts(config));
            (old, keys, state.router.home_of(model))
        };
        for (device, key) in keys.into_iter().enumerate() {
            let Some(key) = key else { continue };
            let node = shared.node(device);
            // A node that has lost the model in a fault gets it again with the new settings.
            match home == Some(device) {
                true => node.set_settings(key, &old, config),
                false => node.set_settings(key, &of_replica(&old), &of_replica(config)),
            };
        }
        true
    }

    /// Whether the weights of a model could be pinned at its home.
    pub fn can_pin(&self, model: GroupModelId) -> bool {
        let (key, home) = {
            let state = self.shared.lock();
            let Some(home) = state.router.home_of(model) else { return false };
            (state.entry(model).and_then(|entry| entry.keys[home]), home)
        };
        key.is_none_or(|key| self.shared.node(home).can_pin(key))
    }
}
