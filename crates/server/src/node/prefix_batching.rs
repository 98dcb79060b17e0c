//! Prefix batching: models that begin with the same layers run these, the prefix, as one batch.
//! The remaining layers of each model, its suffix, run on their own.
//!
//! A common prefix is searched for when a model is loaded. Until prefix and suffix are loaded the
//! model is served whole, so that no request waits. A real-time model without an SLO stays whole,
//! because two launches take longer than one.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use compiler::prefix::{CommonPrefix, Fingerprint, SuffixInput};
use device::DeviceError;
use model::LaunchPlan;
use model::config::{Batching, BatchingPolicy, Class, ModelConfig};
use runtime::DeviceGroup;
use runtime::device_group::router::GroupModelId;

use super::model_table::ModelTable;
use super::served_model::{PrefixSplit, ServedModel};
use crate::heavy_work::in_background;

/// A prefix in service. The device group removes it when its last model is dropped.
pub struct PrefixModel {
    /// Name derived from the steps: equal prefixes have equal names.
    pub name: String,
    /// Key in the device group.
    pub key: GroupModelId,
    cut: CommonPrefix,
    settings: SharedSettings,
    device_group: Arc<DeviceGroup>,
}

impl Drop for PrefixModel {
    fn drop(&mut self) {
        self.device_group.remove_model(self.key);
    }
}

/// Settings that must be equal for models to share batches.
#[derive(Clone, Debug, PartialEq)]
struct SharedSettings {
    batching: Batching,
    slo_ms: Option<u64>,
    max_batch_size: usize,
}

impl SharedSettings {
    /// `None` for a model that does not take part in prefix batching.
    fn of(config: &ModelConfig) -> Option<SharedSettings> {
        let urgent = config.class == Class::RealTime
            && config.slo_ms.is_none()
            && config.timeout_ms.is_none();
        let unbatched = config.batching.policy == BatchingPolicy::None;
        (!urgent && !unbatched).then(|| SharedSettings {
            batching: config.batching.clone(),
            slo_ms: config.slo_ms,
            max_batch_size: config.max_batch_size,
        })
    }
}

/// Whether a change of settings changes with which models a model may share a prefix.
pub(super) fn concerns_prefix(old: &ModelConfig, new: &ModelConfig) -> bool {
    SharedSettings::of(old) != SharedSettings::of(new)
}

/// The prefixes of a device group.
#[derive(Default)]
pub struct PrefixBatching {
    /// Held while a prefix is searched for, so that two models never start the same one.
    search: tokio::sync::Mutex<()>,
    prefixes: Mutex<Vec<Weak<PrefixModel>>>,
}

/// A prefix and the models to split at it.
struct PrefixMatch {
    prefix: Arc<PrefixModel>,
    models: Vec<Arc<ServedModel>>,
}

impl PrefixBatching {
    /// The prefixes in service.
    pub fn prefixes(&self) -> Vec<Arc<PrefixModel>> {
        let mut prefixes = self.prefixes.lock().unwrap_or_else(PoisonError::into_inner);
        prefixes.retain(|prefix| prefix.strong_count() > 0);
        prefixes.iter().filter_map(Weak::upgrade).collect()
    }

    fn remember(&self, prefix: &Arc<PrefixModel>) {
        let mut prefixes = self.prefixes.lock().unwrap_or_else(PoisonError::into_inner);
        prefixes.retain(|known| known.strong_count() > 0);
        if !prefixes.iter().any(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(prefix))) {
            prefixes.push(Arc::downgrade(prefix));
        }
    }

    /// Searches for models that share a prefix with `served`, which has just been loaded, and
    /// splits them. A failure is logged; the models stay whole. Only weak references are held while
    /// waiting for a lock, because an unload holds its model's lock until the last reference is
    /// dropped.
    pub async fn join(
        &self,
        device_group: &Arc<DeviceGroup>,
        models: &ModelTable,
        served: Arc<ServedModel>,
    ) {
        let waiting = Arc::downgrade(&served);
        drop(served);
        let _search = self.search.lock().await;
        let Some(served) = waiting.upgrade() else { return };
        let (prefixes, others) = (self.prefixes(), models.all());
        let (own, name) = (device_group.clone(), served.name.clone());
        let found = in_background(move || find(&own, &prefixes, &others, served)).await;
        let found = match found {
            Some(Ok(Some(found))) => found,
            Some(Ok(None)) => return,
            Some(Err(error)) => {
                tracing::warn!(model = &*name, %error, "prefix batching disabled");
                return;
            }
            None => return,
        };
        let PrefixMatch { prefix, models: matched } = found;
        self.remember(&prefix);
        let waiting: Vec<_> =
            matched.iter().map(|model| (model.name.clone(), Arc::downgrade(model))).collect();
        drop(matched);
        for (name, model) in waiting {
            split(device_group, models, &prefix, (&name, model)).await;
        }
    }
}

/// Replaces `model` by prefix and suffix, unless it has been replaced or unloaded since.
async fn split(
    device_group: &Arc<DeviceGroup>,
    models: &ModelTable,
    prefix: &Arc<PrefixModel>,
    (name, model): (&str, Weak<ServedModel>),
) {
    let _lock = models.lock(name).await;
    let Some(model) = model.upgrade().filter(|model| models.holds(model)) else { return };
    let (devices, cut, whole) = (device_group.clone(), prefix.cut.clone(), model.clone());
    let loaded = in_background(move || {
        let suffix = cut.suffix(whole.plan(), &whole.fingerprint())?;
        Some(devices.load(Arc::new(suffix.plan)).map(|placed| (placed, suffix.sources)))
    });
    let (placed, sources) = match loaded.await {
        Some(Some(Ok(loaded))) => loaded,
        Some(Some(Err(error))) => {
            let reason = "cannot load the suffix";
            tracing::warn!(model = &*model.name, reason, %error, "prefix batching disabled");
            return;
        }
        _ => return,
    };
    if let Some(error) = device_group.cannot_fit(&placed) {
        let reason = "no memory for the suffix";
        tracing::warn!(model = &*model.name, reason, %error, "prefix batching disabled");
        return;
    }
    tracing::info!(model = &*model.name, prefix = prefix.name, "prefix batching enabled");
    let split = PrefixSplit { prefix: prefix.clone(), sources };
    let (served, released) = ServedModel::start_split(&model, placed, split);
    models.finish_load(served, released);
}

/// A known prefix of `served`, or a new one of it and another model.
fn find(
    device_group: &Arc<DeviceGroup>,
    prefixes: &[Arc<PrefixModel>],
    others: &[Arc<ServedModel>],
    served: Arc<ServedModel>,
) -> Result<Option<PrefixMatch>, DeviceError> {
    let Some(settings) = SharedSettings::of(&served.config) else { return Ok(None) };
    let fingerprint = served.fingerprint();
    let mut known = prefixes.iter().filter(|prefix| prefix.settings == settings);
    let fits =
        |prefix: &&Arc<PrefixModel>| prefix.cut.suffix(served.plan(), &fingerprint).is_some();
    if let Some(prefix) = known.find(fits) {
        return Ok(Some(PrefixMatch { prefix: prefix.clone(), models: vec![served] }));
    }
    let compatible = |other: &&Arc<ServedModel>| {
        other.name != served.name
            && !other.is_split()
            && SharedSettings::of(&other.config).as_ref() == Some(&settings)
    };
    for other in others.iter().filter(compatible) {
        let of_other = other.fingerprint();
        let pair = ((served.plan(), &*fingerprint), (other.plan(), &*of_other));
        let Some(cut) = CommonPrefix::between(pair.0, pair.1) else { continue };
        let Some(plan) = cut.prefix(served.plan(), &fingerprint) else { continue };
        let models = vec![other.clone(), served.clone()];
        match start(device_group, cut, plan, &models, settings.clone())? {
            Some(prefix) => return Ok(Some(PrefixMatch { prefix, models })),
            None => continue,
        }
    }
    Ok(None)
}

/// Puts a prefix in service. `None` if its rows cannot share a batch: then it is of no use.
fn start(
    device_group: &Arc<DeviceGroup>,
    cut: CommonPrefix,
    plan: LaunchPlan,
    models: &[Arc<ServedModel>],
    settings: SharedSettings,
) -> Result<Option<Arc<PrefixModel>>, DeviceError> {
    let placed = device_group.load(Arc::new(plan))?;
    if let Some(error) = device_group.cannot_fit(&placed) {
        return Err(error);
    }
    let Some(first) = models.first() else { return Ok(None) };
    let config = ModelConfig {
        queue_capacity: models.iter().map(|model| model.config.queue_capacity).sum(),
        pinned: models.iter().any(|model| model.config.pinned),
        timeout_ms: None,
        ..first.config.clone()
    };
    let key = device_group.add_model(placed, &config);
    let prefix =
        PrefixModel { name: cut.name(), key, cut, settings, device_group: device_group.clone() };
    if !device_group.is_batched(key) {
        let reason = "rows are not independent";
        tracing::info!(prefix = prefix.name, reason, "prefix batching disabled");
        return Ok(None);
    }
    Ok(Some(Arc::new(prefix)))
}

/// The inputs of a suffix: outputs of the prefix, and inputs of the model.
pub(super) fn suffix_inputs(
    sources: &[SuffixInput],
    inputs: &[model::Tensor],
    prefix_outputs: &[model::Tensor],
) -> Option<Vec<model::Tensor>> {
    let tensor = |source: &SuffixInput| match source {
        SuffixInput::Prefix(index) => prefix_outputs.get(*index).cloned(),
        SuffixInput::Model(index) => inputs.get(*index).cloned(),
    };
    sources.iter().map(tensor).collect()
}

/// The fingerprint of a plan, computed on first use.
pub(super) type LazyFingerprint = std::sync::OnceLock<Arc<Fingerprint>>;
