//! Which models there are and where each stands.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use api::error::ApiResult;
use api::{ApiError, IndexEntry, ModelRef, ModelState};
use tokio::sync::oneshot;

use super::loader::RepositoryEntry;
use super::served::Served;

/// One model by name.
struct Slot {
    served: Option<Arc<Served>>,
    gone: Option<oneshot::Receiver<()>>,
    state: ModelState,
    reason: String,
}

/// Loads and unloads of different models that may go on at the same time.
const TURNS: usize = 16;

/// All models by name. Reading is what requests do; only loads and unloads write.
#[derive(Default)]
pub struct Catalogue {
    slots: RwLock<HashMap<String, Slot>>,
    // By a hash of the name, so that names which do not exist leave nothing behind.
    turns: [tokio::sync::Mutex<()>; TURNS],
}

impl Catalogue {
    fn read(&self) -> RwLockReadGuard<'_, HashMap<String, Slot>> {
        self.slots.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<String, Slot>> {
        self.slots.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until it is the caller's turn to change `name`.
    pub async fn turn(&self, name: &str) -> tokio::sync::MutexGuard<'_, ()> {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        self.turns[hasher.finish() as usize % TURNS].lock().await
    }

    /// The model in service.
    pub fn find(&self, model: ModelRef<'_>) -> ApiResult<Arc<Served>> {
        let slots = self.read();
        let name = model.name;
        let slot = slots.get(name).ok_or_else(|| {
            let name: String = name.chars().take(128).collect();
            ApiError::not_found(format!("there is no model '{name}'"))
        })?;
        let Some(served) = &slot.served else { return Err(not_ready(name, slot)) };
        match model.version {
            Some(version) if version != served.version => Err(ApiError::not_found(format!(
                "model '{name}' has no version {version} in service; version {} is",
                served.version
            ))),
            _ => Ok(served.clone()),
        }
    }

    /// Whether `model` answers; fails when it is unknown.
    pub fn is_ready(&self, model: ModelRef<'_>) -> ApiResult<bool> {
        match self.find(model) {
            Ok(_) => Ok(true),
            Err(error) if error.kind == api::ErrorKind::Unavailable => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether exactly this one is in service.
    pub fn holds(&self, served: &Arc<Served>) -> bool {
        let slots = self.read();
        let slot = slots.get(&*served.name).and_then(|slot| slot.served.as_ref());
        slot.is_some_and(|held| Arc::ptr_eq(held, served))
    }

    /// Every model in service, by name.
    pub fn all(&self) -> Vec<Arc<Served>> {
        let mut all: Vec<_> = self.read().values().filter_map(|slot| slot.served.clone()).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// A load of `name` begins. A version in service stays there meanwhile.
    pub fn begin_load(&self, name: &str) {
        let mut slots = self.write();
        let slot = slots.entry(name.to_string()).or_insert_with(|| Slot {
            served: None,
            gone: None,
            state: ModelState::Loading,
            reason: String::new(),
        });
        if slot.served.is_none() {
            slot.state = ModelState::Loading;
            slot.reason.clear();
        }
    }

    /// The load of `name` failed. `known` says whether the repository has such a model.
    pub fn fail_load(&self, name: &str, reason: String, known: bool) {
        let mut slots = self.write();
        if !known && slots.get(name).is_some_and(|slot| slot.served.is_none()) {
            slots.remove(name);
            return;
        }
        if let Some(slot) = slots.get_mut(name)
            && slot.served.is_none()
        {
            slot.state = ModelState::Unavailable;
            slot.reason = reason;
        }
    }

    /// Puts `served` in service in place of what was there, which its requests still hold.
    pub fn finish_load(&self, served: Arc<Served>, gone: oneshot::Receiver<()>) {
        let name = served.name.to_string();
        let slot = Slot {
            served: Some(served),
            gone: Some(gone),
            state: ModelState::Ready,
            reason: String::new(),
        };
        let old = self.write().insert(name, slot);
        // Dropped here, not under the lock: the node may have work to do for it.
        drop(old);
    }

    /// Takes `name` out of service. What is returned fires when its last request is done.
    pub fn begin_unload(&self, name: &str) -> ApiResult<Option<oneshot::Receiver<()>>> {
        let (served, gone) = {
            let mut slots = self.write();
            let slot = slots
                .get_mut(name)
                .ok_or_else(|| ApiError::not_found(format!("model '{name}' is not loaded")))?;
            if slot.served.is_some() {
                slot.state = ModelState::Unloading;
            }
            (slot.served.take(), slot.gone.take())
        };
        drop(served);
        Ok(gone)
    }

    /// `name` is out of service.
    pub fn finish_unload(&self, name: &str) {
        if let Some(slot) = self.write().get_mut(name) {
            slot.state = ModelState::Unavailable;
            slot.reason = "unloaded".to_string();
        }
    }

    /// The index: what the repository has, with where each stands.
    pub fn index(&self, repository: Vec<RepositoryEntry>, only_ready: bool) -> Vec<IndexEntry> {
        let slots = self.read();
        let mut newest: BTreeMap<&str, u64> = BTreeMap::new();
        for entry in &repository {
            let version = newest.entry(&entry.name).or_default();
            *version = entry.version.max(*version);
        }
        let mut rows: BTreeMap<(String, u64), IndexEntry> = BTreeMap::new();
        for RepositoryEntry { name, version } in &repository {
            let slot = slots.get(name);
            let serving = slot.and_then(|slot| slot.served.as_ref()).map(|served| served.version);
            // Without a version in service, the state is that of the newest, which a load takes.
            let concerned = serving.unwrap_or_else(|| newest[name.as_str()]) == *version;
            let (state, reason) = match slot {
                Some(slot) if concerned => (Some(slot.state), slot.reason.clone()),
                _ => (None, String::new()),
            };
            let entry =
                IndexEntry { name: name.clone(), version: version.to_string(), state, reason };
            rows.insert((name.clone(), *version), entry);
        }
        for (name, slot) in slots.iter() {
            add_unlisted(&mut rows, name, slot, newest.contains_key(name.as_str()));
        }
        let ready = |entry: &IndexEntry| !only_ready || entry.state == Some(ModelState::Ready);
        rows.into_values().filter(ready).collect()
    }
}

/// Adds a model that the repository does not list (any more) but that is still known here.
fn add_unlisted(
    rows: &mut BTreeMap<(String, u64), IndexEntry>,
    name: &str,
    slot: &Slot,
    listed: bool,
) {
    let version = slot.served.as_ref().map(|served| served.version);
    if version.is_none() && listed {
        return;
    }
    let key = (name.to_string(), version.unwrap_or(0));
    rows.entry(key).or_insert_with(|| IndexEntry {
        name: name.to_string(),
        version: version.map(|version| version.to_string()).unwrap_or_default(),
        state: Some(slot.state),
        reason: slot.reason.clone(),
    });
}

fn not_ready(name: &str, slot: &Slot) -> ApiError {
    match slot.state {
        ModelState::Loading => {
            ApiError::unavailable(format!("model '{name}' is loading")).retry_after(1)
        }
        _ if slot.reason.is_empty() => {
            ApiError::unavailable(format!("model '{name}' is not ready"))
        }
        _ => ApiError::unavailable(format!("model '{name}' is not ready: {}", slot.reason)),
    }
}
