//! The store of a cluster in one process.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use base::{Clock, Nanos};
use tokio::sync::mpsc;

use super::health::HealthRecord;
use super::{
    Change, Condition, Entry, LeaseId, Listing, OPERATIONS_MAX, Revision, Store, StoreError,
    StoreFuture, StoreHealth, StoreSpace, VALUE_MAX, Watch, Write,
};

/// Changes kept for watches that start in the past.
const HISTORY: usize = 10_000;
/// Batches of changes that a watch may lag behind before it is ended.
const WATCH_BUFFER: usize = 1024;
/// How often leases are checked.
const SWEEP: Duration = Duration::from_millis(50);

struct Value {
    value: bytes::Bytes,
    revision: Revision,
    lease: Option<LeaseId>,
}

struct Lease {
    span: Nanos,
    ends: Nanos,
}

struct Watcher {
    prefix: String,
    changes: mpsc::Sender<Result<Vec<Change>, StoreError>>,
}

#[derive(Default)]
struct State {
    revision: Revision,
    keys: BTreeMap<String, Value>,
    leases: BTreeMap<LeaseId, Lease>,
    next_lease: i64,
    history: VecDeque<(Revision, Change)>,
    forgotten: Revision,
    watchers: Vec<Watcher>,
    /// Writes are refused, as those of an engine without space.
    full: bool,
}

/// Keys in the memory of this process.
pub struct MemoryStore {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    health: HealthRecord,
}

impl MemoryStore {
    /// Creates an empty store. Must be called inside a tokio runtime, which expires its leases.
    pub fn start(clock: Arc<dyn Clock>) -> Arc<MemoryStore> {
        let (state, health) = (Mutex::default(), HealthRecord::default());
        let store = Arc::new(MemoryStore { clock, state, health });
        tokio::spawn(sweep(Arc::downgrade(&store)));
        store
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses writes for lack of space from now on, or no longer. For tests of what an engine
    /// with a quota does.
    pub fn set_full(&self, full: bool) {
        self.lock().full = full;
    }

    /// Loses all keys and leases, as an engine does whose files are lost. For tests.
    pub fn lose_everything(&self) {
        let mut state = self.lock();
        state.leases.clear();
        let writes = state.keys.keys().cloned().map(Write::delete).collect();
        state.write(writes);
    }
}

/// Ends leases that were not renewed, for as long as the store exists.
async fn sweep(store: Weak<MemoryStore>) {
    loop {
        tokio::time::sleep(SWEEP).await;
        let Some(store) = store.upgrade() else { return };
        let now = store.clock.now();
        let mut state = store.lock();
        let ended: Vec<LeaseId> =
            state.leases.iter().filter(|(_, lease)| lease.ends <= now).map(|(id, _)| *id).collect();
        ended.into_iter().for_each(|lease| state.end_lease(lease));
    }
}

impl State {
    fn end_lease(&mut self, lease: LeaseId) {
        if self.leases.remove(&lease).is_none() {
            return;
        }
        let held = self.keys.iter().filter(|(_, value)| value.lease == Some(lease));
        let writes: Vec<Write> = held.map(|(key, _)| Write::delete(key.clone())).collect();
        self.write(writes);
    }

    fn write(&mut self, writes: Vec<Write>) -> Revision {
        self.revision += 1;
        let revision = self.revision;
        let mut changes = Vec::new();
        for write in writes {
            match write {
                Write::Put { key, value, lease } => {
                    let entry = Entry { key: key.clone(), value: value.clone(), revision, lease };
                    self.keys.insert(key, Value { value, revision, lease });
                    changes.push(Change::Put(entry));
                }
                Write::Delete { key } => {
                    if self.keys.remove(&key).is_some() {
                        changes.push(Change::Delete { key, revision });
                    }
                }
            }
        }
        for change in &changes {
            if self.history.len() == HISTORY
                && let Some((revision, _)) = self.history.pop_front()
            {
                self.forgotten = revision;
            }
            self.history.push_back((revision, change.clone()));
        }
        self.watchers.retain(|watcher| watcher.notify(&changes));
        revision
    }

    fn check(&self, writes: &[Write]) -> Result<(), StoreError> {
        if self.full && writes.iter().any(|write| matches!(write, Write::Put { .. })) {
            return Err(StoreError::Full("no space".to_string()));
        }
        if writes.len() > OPERATIONS_MAX {
            return Err(StoreError::Refused(format!("more than {OPERATIONS_MAX} writes at once")));
        }
        for write in writes {
            let Write::Put { key, value, lease } = write else { continue };
            if value.len() > VALUE_MAX {
                let message = format!("the value of '{key}' is larger than {VALUE_MAX} bytes");
                return Err(StoreError::Refused(message));
            }
            if lease.is_some_and(|lease| !self.leases.contains_key(&lease)) {
                return Err(StoreError::NoLease);
            }
        }
        Ok(())
    }
}

fn key_of(change: &Change) -> &str {
    match change {
        Change::Put(entry) => &entry.key,
        Change::Delete { key, .. } => key,
    }
}

impl Watcher {
    /// Sends changes; returns whether the watcher stays registered.
    fn notify(&self, changes: &[Change]) -> bool {
        let mine = changes.iter().filter(|change| key_of(change).starts_with(&self.prefix));
        let mine: Vec<Change> = mine.cloned().collect();
        // A watcher whose buffer is full notices by the end of its channel.
        mine.is_empty() && !self.changes.is_closed() || {
            !mine.is_empty() && self.changes.try_send(Ok(mine)).is_ok()
        }
    }
}

fn ready<'a, T: Send + 'a>(result: Result<T, StoreError>) -> StoreFuture<'a, T> {
    Box::pin(std::future::ready(result))
}

impl Store for MemoryStore {
    fn get<'a>(&'a self, key: &'a str) -> StoreFuture<'a, Option<Entry>> {
        let state = self.lock();
        let entry = state.keys.get(key).map(|value| Entry {
            key: key.to_string(),
            value: value.value.clone(),
            revision: value.revision,
            lease: value.lease,
        });
        ready(Ok(entry))
    }

    fn list<'a>(&'a self, prefix: &'a str) -> StoreFuture<'a, Listing> {
        let state = self.lock();
        let from = state.keys.range(prefix.to_string()..);
        let entries = from.take_while(|(key, _)| key.starts_with(prefix)).map(|(key, value)| {
            let Value { value, revision, lease } = value;
            let (key, value) = (key.clone(), value.clone());
            Entry { key, value, revision: *revision, lease: *lease }
        });
        ready(Ok(Listing { entries: entries.collect(), revision: state.revision }))
    }

    fn transact(
        &self,
        conditions: Vec<Condition>,
        writes: Vec<Write>,
    ) -> StoreFuture<'_, Option<Revision>> {
        let mut state = self.lock();
        let holds = |condition: &Condition| {
            state.keys.get(&condition.key).map_or(0, |value| value.revision) == condition.revision
        };
        if !conditions.iter().all(holds) {
            return ready(Ok(None));
        }
        let checked = state.check(&writes);
        self.health.record(&checked, !writes.is_empty());
        ready(checked.map(|()| Some(state.write(writes))))
    }

    fn watch<'a>(&'a self, prefix: &'a str, since: Revision) -> StoreFuture<'a, Watch> {
        let mut state = self.lock();
        let (sender, changes) = mpsc::channel(WATCH_BUFFER);
        if since < state.forgotten {
            let _ = sender.try_send(Err(StoreError::Behind));
            return ready(Ok(Watch { changes }));
        }
        let missed = state.history.iter().filter(|(revision, _)| *revision > since);
        let missed = missed.filter(|(_, change)| key_of(change).starts_with(prefix));
        let missed: Vec<Change> = missed.map(|(_, change)| change.clone()).collect();
        if !missed.is_empty() {
            let _ = sender.try_send(Ok(missed));
        }
        state.watchers.push(Watcher { prefix: prefix.to_string(), changes: sender });
        ready(Ok(Watch { changes }))
    }

    fn grant(&self, span: Duration) -> StoreFuture<'_, LeaseId> {
        let mut state = self.lock();
        state.next_lease += 1;
        let id = LeaseId(state.next_lease);
        let span = Nanos::from(span);
        state.leases.insert(id, Lease { span, ends: self.clock.now() + span });
        ready(Ok(id))
    }

    fn renew(&self, lease: LeaseId) -> StoreFuture<'_, ()> {
        let now = self.clock.now();
        let mut state = self.lock();
        ready(match state.leases.get_mut(&lease) {
            None => Err(StoreError::NoLease),
            Some(lease) => {
                lease.ends = now + lease.span;
                Ok(())
            }
        })
    }

    fn revoke(&self, lease: LeaseId) -> StoreFuture<'_, ()> {
        self.lock().end_lease(lease);
        ready(Ok(()))
    }

    fn compact(&self, revision: Revision) -> StoreFuture<'_, ()> {
        let mut state = self.lock();
        let old = state.history.iter().take_while(|(at, _)| *at <= revision).count();
        state.history.drain(..old);
        state.forgotten = state.forgotten.max(revision.min(state.revision));
        ready(Ok(()))
    }

    fn space(&self) -> StoreFuture<'_, StoreSpace> {
        let state = self.lock();
        let values = state.keys.iter().map(|(key, value)| key.len() + value.value.len());
        let history = state.history.iter().map(|(_, change)| match change {
            Change::Put(entry) => entry.key.len() + entry.value.len(),
            Change::Delete { key, .. } => key.len(),
        });
        let used_bytes = (values.sum::<usize>() + history.sum::<usize>()) as u64;
        ready(Ok(StoreSpace { bytes: used_bytes, used_bytes, full: state.full }))
    }

    fn reclaim(&self) -> StoreFuture<'_, ()> {
        ready(Ok(()))
    }

    fn health(&self) -> StoreHealth {
        self.health.get()
    }
}
