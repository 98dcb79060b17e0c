//! The models of a node by name, with their states.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use api::error::ApiResult;
use api::{ApiError, IndexEntry, ModelRef, ModelState};
use tokio::sync::oneshot;

use super::loader::RepositoryEntry;
use super::served_model::ServedModel;

/// One model by name.
struct ModelEntry {
    served: Option<Arc<ServedModel>>,
    released: Option<oneshot::Receiver<()>>,
    state: ModelState,
    reason: String,
    /// Ends the load in progress, if there is one.
    cancel: Option<Arc<AtomicBool>>,
}

impl ModelEntry {
    fn loading() -> ModelEntry {
        ModelEntry {
            served: None,
            released: None,
            state: ModelState::Loading,
            reason: String::new(),
            cancel: None,
        }
    }
}

/// Number of locks: how many models can be loaded or unloaded concurrently.
const LOCK_COUNT: usize = 16;

/// All models by name. Requests read; only loads and unloads write.
#[derive(Default)]
pub struct ModelTable {
    entries: RwLock<HashMap<String, ModelEntry>>,
    // Selected by a hash of the name, so that unknown names occupy no memory.
    locks: [tokio::sync::Mutex<()>; LOCK_COUNT],
}

impl ModelTable {
    fn read(&self) -> RwLockReadGuard<'_, HashMap<String, ModelEntry>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<String, ModelEntry>> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks `name` against other loads and unloads.
    pub async fn lock(&self, name: &str) -> tokio::sync::MutexGuard<'_, ()> {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        self.locks[hasher.finish() as usize % LOCK_COUNT].lock().await
    }

    /// The loaded model.
    pub fn find(&self, model: ModelRef<'_>) -> ApiResult<Arc<ServedModel>> {
        let entries = self.read();
        let name = model.name;
        let entry = entries.get(name).ok_or_else(|| {
            let name: String = name.chars().take(128).collect();
            ApiError::not_found(format!("there is no model '{name}'"))
        })?;
        let Some(served) = &entry.served else { return Err(not_ready(name, entry)) };
        match model.version {
            Some(version) if version != served.version => Err(ApiError::not_found(format!(
                "model '{name}' has no version {version} in service; version {} is",
                served.version
            ))),
            _ => Ok(served.clone()),
        }
    }

    /// Whether `model` is ready; an error if it is unknown.
    pub fn is_ready(&self, model: ModelRef<'_>) -> ApiResult<bool> {
        match self.find(model) {
            Ok(_) => Ok(true),
            Err(error) if error.kind == api::ErrorKind::Unavailable => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether exactly this instance is in service.
    pub fn holds(&self, served: &Arc<ServedModel>) -> bool {
        let entries = self.read();
        let entry = entries.get(&*served.name).and_then(|entry| entry.served.as_ref());
        entry.is_some_and(|held| Arc::ptr_eq(held, served))
    }

    /// Every model in service, by name.
    pub fn all(&self) -> Vec<Arc<ServedModel>> {
        let mut all: Vec<_> =
            self.read().values().filter_map(|entry| entry.served.clone()).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// Marks `name` as loading, until `cancelled` is set. A version in service remains in service.
    pub fn begin_load(&self, name: &str, cancelled: Arc<AtomicBool>) {
        let mut entries = self.write();
        let entry = entries.entry(name.to_string()).or_insert_with(ModelEntry::loading);
        entry.cancel = Some(cancelled);
        if entry.served.is_none() {
            entry.state = ModelState::Loading;
            entry.reason.clear();
        }
    }

    /// Models that will be loaded: requests for them get 503 with `Retry-After` meanwhile.
    pub fn announce(&self, names: &[String]) {
        let mut entries = self.write();
        for name in names {
            entries.entry(name.clone()).or_insert_with(ModelEntry::loading);
        }
    }

    /// Ends a load of `name` that is in progress, as soon as it notices.
    pub fn cancel_load(&self, name: &str) {
        if let Some(cancel) = self.read().get(name).and_then(|entry| entry.cancel.as_ref()) {
            cancel.store(true, Ordering::SeqCst);
        }
    }

    /// Marks the load of `name` as failed. `known`: whether the repository has the model.
    pub fn fail_load(&self, name: &str, reason: String, known: bool) {
        let mut entries = self.write();
        if !known && entries.get(name).is_some_and(|entry| entry.served.is_none()) {
            entries.remove(name);
            return;
        }
        let Some(entry) = entries.get_mut(name) else { return };
        entry.cancel = None;
        if entry.served.is_none() {
            entry.state = ModelState::Unavailable;
            entry.reason = reason;
        }
    }

    /// Puts `served` in service. Requests in flight keep the instance it replaces.
    pub fn finish_load(&self, served: Arc<ServedModel>, released: oneshot::Receiver<()>) {
        let name = served.name.to_string();
        let entry = ModelEntry {
            served: Some(served),
            released: Some(released),
            state: ModelState::Ready,
            reason: String::new(),
            cancel: None,
        };
        let old = self.write().insert(name, entry);
        // Dropped outside the lock, because dropping may take time.
        drop(old);
    }

    /// Puts `changed` in the place of `served`, the same model with other settings. `false` if
    /// `served` is no longer in service.
    pub fn replace(&self, served: &Arc<ServedModel>, changed: Arc<ServedModel>) -> bool {
        let mut entries = self.write();
        let entry = entries.get_mut(&*served.name).and_then(|entry| entry.served.as_mut());
        let Some(held) = entry.filter(|held| Arc::ptr_eq(held, served)) else { return false };
        *held = changed;
        true
    }

    /// Takes `name` out of service. The receiver fires when its last request is done.
    pub fn begin_unload(&self, name: &str) -> ApiResult<Option<oneshot::Receiver<()>>> {
        let (served, released) = {
            let mut entries = self.write();
            let entry = entries
                .get_mut(name)
                .ok_or_else(|| ApiError::not_found(format!("model '{name}' is not loaded")))?;
            if entry.served.is_some() {
                entry.state = ModelState::Unloading;
            }
            (entry.served.take(), entry.released.take())
        };
        drop(served);
        Ok(released)
    }

    /// Marks `name` as unloaded.
    pub fn finish_unload(&self, name: &str) {
        if let Some(entry) = self.write().get_mut(name) {
            entry.state = ModelState::Unavailable;
            entry.reason = "unloaded".to_string();
        }
    }

    /// Forgets `name`, which no longer exists, unless it is in service.
    pub fn forget(&self, name: &str) {
        let mut entries = self.write();
        if entries.get(name).is_some_and(|entry| entry.served.is_none()) {
            entries.remove(name);
        }
    }

    /// The index: the models of the repository with their states.
    pub fn index(&self, repository: Vec<RepositoryEntry>, only_ready: bool) -> Vec<IndexEntry> {
        let entries = self.read();
        let mut newest: BTreeMap<&str, u64> = BTreeMap::new();
        for entry in &repository {
            let version = newest.entry(&entry.name).or_default();
            *version = entry.version.max(*version);
        }
        let mut rows: BTreeMap<(String, u64), IndexEntry> = BTreeMap::new();
        for RepositoryEntry { name, version } in &repository {
            let entry = entries.get(name);
            let serving =
                entry.and_then(|entry| entry.served.as_ref()).map(|served| served.version);
            // Without a version in service, the state is that of the newest, which a load selects.
            let concerned = serving.unwrap_or_else(|| newest[name.as_str()]) == *version;
            let (state, reason) = match entry {
                Some(entry) if concerned => (Some(entry.state), entry.reason.clone()),
                _ => (None, String::new()),
            };
            let entry =
                IndexEntry { name: name.clone(), version: version.to_string(), state, reason };
            rows.insert((name.clone(), *version), entry);
        }
        for (name, entry) in entries.iter() {
            add_unlisted(&mut rows, name, entry, newest.contains_key(name.as_str()));
        }
        let ready = |entry: &IndexEntry| !only_ready || entry.state == Some(ModelState::Ready);
        rows.into_values().filter(ready).collect()
    }
}

/// Adds a model that is known here but no longer listed in the repository.
fn add_unlisted(
    rows: &mut BTreeMap<(String, u64), IndexEntry>,
    name: &str,
    entry: &ModelEntry,
    listed: bool,
) {
    let version = entry.served.as_ref().map(|served| served.version);
    if version.is_none() && listed {
        return;
    }
    let key = (name.to_string(), version.unwrap_or(0));
    rows.entry(key).or_insert_with(|| IndexEntry {
        name: name.to_string(),
        version: version.map(|version| version.to_string()).unwrap_or_default(),
        state: Some(entry.state),
        reason: entry.reason.clone(),
    });
}

fn not_ready(name: &str, entry: &ModelEntry) -> ApiError {
    match entry.state {
        ModelState::Loading => {
            ApiError::unavailable(format!("model '{name}' is loading")).retry_after(1)
        }
        _ if entry.reason.is_empty() => {
            ApiError::unavailable(format!("model '{name}' is not ready"))
        }
        _ => ApiError::unavailable(format!("model '{name}' is not ready: {}", entry.reason)),
    }
}
