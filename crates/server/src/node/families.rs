//! Models that begin alike run their common beginning, the trunk, as one batch, and what is left of each on its own.
//!
//! A family is found when a model is loaded. Until its parts are there the model is served whole, so nobody waits for it.
//! A model that is real time and names no objective stays whole: two launches take longer than one.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use compiler::prefix::{CommonPrefix, Fingerprint, SuffixInput};
use device::DeviceError;
use model::LaunchPlan;
use model::config::{Batching, BatchingPolicy, Class, ModelConfig};
use runtime::DeviceGroup;
use runtime::device_group::router::GroupModelId;

use super::catalogue::Catalogue;
use super::served::{Served, Split};

/// The common beginning of several models, in service. When its last model lets go, the device_group drops it.
pub struct Trunk {
    /// Its name: the same for the same steps.
    pub name: String,
    /// Its key in the device_group.
    pub key: GroupModelId,
    cut: CommonPrefix,
    habits: Habits,
    device_group: Arc<DeviceGroup>,
}

impl Drop for Trunk {
    fn drop(&mut self) {
        self.device_group.remove_model(self.key);
    }
}

/// What models must agree on to share batches.
#[derive(Clone, Debug, PartialEq)]
struct Habits {
    batching: Batching,
    slo_ms: Option<u64>,
    max_batch_size: usize,
}

impl Habits {
    /// Nothing where a model is to be run on its own.
    fn of(config: &ModelConfig) -> Option<Habits> {
        let hurried = config.class == Class::RealTime
            && config.slo_ms.is_none()
            && config.timeout_ms.is_none();
        let alone = config.batching.policy == BatchingPolicy::None;
        (!hurried && !alone).then(|| Habits {
            batching: config.batching.clone(),
            slo_ms: config.slo_ms,
            max_batch_size: config.max_batch_size,
        })
    }
}

/// The trunks of a device_group.
#[derive(Default)]
pub struct Families {
    /// One model at a time finds its family.
    turn: tokio::sync::Mutex<()>,
    trunks: Mutex<Vec<Weak<Trunk>>>,
}

/// Models that are to be taken apart at a cut.
struct Match {
    trunk: Arc<Trunk>,
    models: Vec<Arc<Served>>,
}

impl Families {
    /// The trunks in service.
    pub fn trunks(&self) -> Vec<Arc<Trunk>> {
        let mut trunks = self.trunks.lock().unwrap_or_else(PoisonError::into_inner);
        trunks.retain(|trunk| trunk.strong_count() > 0);
        trunks.iter().filter_map(Weak::upgrade).collect()
    }

    fn keep(&self, trunk: &Arc<Trunk>) {
        let mut trunks = self.trunks.lock().unwrap_or_else(PoisonError::into_inner);
        trunks.retain(|known| known.strong_count() > 0);
        if !trunks.iter().any(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(trunk))) {
            trunks.push(Arc::downgrade(trunk));
        }
    }

    /// Finds the family of `served`, which has just been loaded, and lets all of it run that way. What goes wrong is said and
    /// leaves models whole. Nobody is kept in service by those who wait here for a turn: an unload has its model's turn until
    /// the last one has let go.
    pub async fn join(
        &self,
        device_group: &Arc<DeviceGroup>,
        catalogue: &Catalogue,
        served: Arc<Served>,
    ) {
        let waiting = Arc::downgrade(&served);
        drop(served);
        let _turn = self.turn.lock().await;
        let Some(served) = waiting.upgrade() else { return };
        let (trunks, others) = (self.trunks(), catalogue.all());
        let (own, name) = (device_group.clone(), served.name.clone());
        let found = tokio::task::spawn_blocking(move || find(&own, &trunks, &others, served)).await;
        let found = match found {
            Ok(Ok(Some(found))) => found,
            Ok(Ok(None)) => return,
            Ok(Err(error)) => {
                tracing::warn!(model = &*name, %error, "a common beginning is not used");
                return;
            }
            Err(_) => return,
        };
        let Match { trunk, models } = found;
        self.keep(&trunk);
        let waiting: Vec<_> =
            models.iter().map(|model| (model.name.clone(), Arc::downgrade(model))).collect();
        drop(models);
        for (name, model) in waiting {
            part(device_group, catalogue, &trunk, (&name, model)).await;
        }
    }
}

/// Puts the parts of `model` in its place, unless it has been replaced or unloaded since.
async fn part(
    device_group: &Arc<DeviceGroup>,
    catalogue: &Catalogue,
    trunk: &Arc<Trunk>,
    (name, model): (&str, Weak<Served>),
) {
    let _turn = catalogue.turn(name).await;
    let Some(model) = model.upgrade().filter(|model| catalogue.holds(model)) else { return };
    let (devices, cut, whole) = (device_group.clone(), trunk.cut.clone(), model.clone());
    let parted = tokio::task::spawn_blocking(move || {
        let plan = whole.plan();
        let suffix = cut.suffix(plan, &whole.fingerprint())?;
        Some(devices.load(Arc::new(suffix.plan)).map(|placed| (placed, suffix.sources)))
    });
    let (placed, sources) = match parted.await {
        Ok(Some(Ok(parts))) => parts,
        Ok(Some(Err(error))) => {
            tracing::warn!(model = &*model.name, %error, "served whole: its own part does not load");
            return;
        }
        _ => return,
    };
    if let Some(why) = device_group.cannot_fit(&placed) {
        tracing::warn!(model = &*model.name, %why, "served whole: no room for its own part");
        return;
    }
    tracing::info!(model = &*model.name, trunk = trunk.name, "shares its beginning");
    let split = Split { trunk: trunk.clone(), sources };
    let (served, gone) = Served::start_apart(&model, placed, split);
    catalogue.finish_load(served, gone);
}

/// A trunk that `served` fits, or one of it and of another model.
fn find(
    device_group: &Arc<DeviceGroup>,
    trunks: &[Arc<Trunk>],
    others: &[Arc<Served>],
    served: Arc<Served>,
) -> Result<Option<Match>, DeviceError> {
    let Some(habits) = Habits::of(&served.config) else { return Ok(None) };
    let of = served.fingerprint();
    let mut known = trunks.iter().filter(|trunk| trunk.habits == habits);
    if let Some(trunk) = known.find(|trunk| trunk.cut.suffix(served.plan(), &of).is_some()) {
        return Ok(Some(Match { trunk: trunk.clone(), models: vec![served] }));
    }
    let mate = |other: &&Arc<Served>| {
        other.name != served.name
            && !other.is_apart()
            && Habits::of(&other.config).as_ref() == Some(&habits)
    };
    for other in others.iter().filter(mate) {
        let of_other = other.fingerprint();
        let pair = ((served.plan(), &*of), (other.plan(), &*of_other));
        let Some(cut) = CommonPrefix::between(pair.0, pair.1) else { continue };
        let Some(plan) = cut.prefix(served.plan(), &of) else { continue };
        let models = vec![other.clone(), served.clone()];
        match start(device_group, cut, plan, &models, habits.clone())? {
            Some(trunk) => return Ok(Some(Match { trunk, models })),
            None => continue,
        }
    }
    Ok(None)
}

/// Puts a trunk in service; nothing where its rows cannot share a batch, for then it has no use.
fn start(
    device_group: &Arc<DeviceGroup>,
    cut: CommonPrefix,
    plan: LaunchPlan,
    models: &[Arc<Served>],
    habits: Habits,
) -> Result<Option<Arc<Trunk>>, DeviceError> {
    let placed = device_group.load(Arc::new(plan))?;
    if let Some(why) = device_group.cannot_fit(&placed) {
        return Err(why);
    }
    let Some(first) = models.first() else { return Ok(None) };
    let config = ModelConfig {
        queue_capacity: models.iter().map(|model| model.config.queue_capacity).sum(),
        pinned: models.iter().any(|model| model.config.pinned),
        timeout_ms: None,
        ..first.config.clone()
    };
    let key = device_group.add_model(placed, &config);
    let trunk = Trunk { name: cut.name(), key, cut, habits, device_group: device_group.clone() };
    if !device_group.is_batched(key) {
        tracing::info!(trunk = trunk.name, "a common beginning whose rows are not independent");
        return Ok(None);
    }
    Ok(Some(Arc::new(trunk)))
}

/// The inputs of a model's own part: what the trunk gave, and the model's own inputs.
pub(super) fn hand_over(
    sources: &[SuffixInput],
    inputs: &[model::Tensor],
    trunk: &[model::Tensor],
) -> Option<Vec<model::Tensor>> {
    let tensor = |source: &SuffixInput| match source {
        SuffixInput::Prefix(place) => trunk.get(*place).cloned(),
        SuffixInput::Model(place) => inputs.get(*place).cloned(),
    };
    sources.iter().map(tensor).collect()
}

/// The fingerprint of a plan, made when it is first wanted.
pub(super) type LazyFingerprint = std::sync::OnceLock<Arc<Fingerprint>>;
