//! A process's own keys in the store: present for as long as it lives, and restored after every
//! interruption. With every renewal of the lease they are compared with what they should be, and
//! what is missing or was changed by another writer is written again.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::store::{LeaseId, OPERATIONS_MAX, Store, StoreError, Write};

/// Renewals in the span of a lease.
const RENEWALS: u32 = 4;
/// Keys that are compared with the store at one renewal.
const VERIFIED_MAX: usize = 8;
/// Pause before an unreachable store is tried again.
const RETRY: Duration = Duration::from_millis(100);

#[derive(Default)]
struct DesiredKeys {
    keys: BTreeMap<String, Bytes>,
    /// Keys whose value in the store may differ.
    dirty: BTreeMap<String, Bytes>,
    /// The key that was last compared with the store.
    verified: String,
}

struct Shared {
    desired: Mutex<DesiredKeys>,
    changed: Notify,
}

/// Keys under one lease.
pub struct Membership {
    store: Arc<dyn Store>,
    shared: Arc<Shared>,
    lease: Arc<Mutex<Option<LeaseId>>>,
    task: JoinHandle<()>,
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Membership {
    /// Keeps keys in `store` with leases of `span`.
    pub fn start(store: Arc<dyn Store>, span: Duration) -> Membership {
        let shared = Arc::new(Shared { desired: Mutex::default(), changed: Notify::new() });
        let lease: Arc<Mutex<Option<LeaseId>>> = Arc::default();
        let task = tokio::spawn(keep(store.clone(), shared.clone(), lease.clone(), span));
        Membership { store, shared, lease, task }
    }

    /// Sets a key, now or as soon as the store can be reached.
    pub fn put(&self, key: String, value: Bytes) {
        self.put_together(vec![(key, value)]);
    }

    /// Sets a few keys, in one transaction.
    pub fn put_together(&self, pairs: Vec<(String, Bytes)>) {
        let mut desired = self.shared.desired.lock().unwrap_or_else(PoisonError::into_inner);
        for (key, value) in pairs {
            if desired.keys.get(&key) != Some(&value) {
                desired.keys.insert(key.clone(), value.clone());
                desired.dirty.insert(key, value);
            }
        }
        if !desired.dirty.is_empty() {
            drop(desired);
            self.shared.changed.notify_one();
        }
    }

    /// Removes all keys from the store.
    pub async fn leave(self) {
        self.task.abort();
        let lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(lease) = lease
            && let Err(error) = self.store.revoke(lease).await
        {
            tracing::debug!(%error, "cannot revoke the lease; it expires by itself");
        }
    }
}

async fn keep(
    store: Arc<dyn Store>,
    shared: Arc<Shared>,
    held: Arc<Mutex<Option<LeaseId>>>,
    span: Duration,
) {
    loop {
        let lease = match store.grant(span).await {
            Ok(lease) => lease,
            Err(error) => {
                tracing::debug!(%error, "cannot join the cluster");
                tokio::time::sleep(RETRY).await;
                continue;
            }
        };
        *held.lock().unwrap_or_else(PoisonError::into_inner) = Some(lease);
        {
            let mut desired = shared.desired.lock().unwrap_or_else(PoisonError::into_inner);
            desired.dirty = desired.keys.clone();
        }
        serve(&*store, &shared, lease, span).await;
        tracing::warn!("lease lost; joining the cluster again");
    }
}

/// Writes and renews until the lease is lost.
async fn serve(store: &dyn Store, shared: &Shared, lease: LeaseId, span: Duration) {
    let mut renewal = tokio::time::interval(span / RENEWALS);
    renewal.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let pause = match flush(store, shared, lease).await {
            Ok(()) => Duration::MAX,
            Err(StoreError::NoLease) => return,
            Err(_) => RETRY,
        };
        tokio::select! {
            () = shared.changed.notified() => {}
            () = tokio::time::sleep(pause) => {}
            _ = renewal.tick() => {
                if store.renew(lease).await == Err(StoreError::NoLease) {
                    return;
                }
                verify(store, shared, lease).await;
            }
        }
    }
}

/// Marks the keys that are not in the store as they should be. Of many, some are looked at in turn.
async fn verify(store: &dyn Store, shared: &Shared, lease: LeaseId) {
    let keys: Vec<String> = {
        let mut desired = shared.desired.lock().unwrap_or_else(PoisonError::into_inner);
        let clean = |key: &&String| !desired.dirty.contains_key(*key);
        let after = desired.verified.clone();
        let (first, rest): (Vec<&String>, Vec<&String>) =
            desired.keys.keys().filter(clean).partition(|key| **key > after);
        let keys: Vec<String> = first.into_iter().chain(rest).take(VERIFIED_MAX).cloned().collect();
        desired.verified = keys.last().cloned().unwrap_or_default();
        keys
    };
    for key in keys {
        // An unreachable store says nothing.
        let Ok(entry) = store.get(&key).await else { return };
        let mut desired = shared.desired.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(value) = desired.keys.get(&key).cloned() else { continue };
        let is_intact =
            entry.is_some_and(|entry| entry.value == value && entry.lease == Some(lease));
        // A value that changed in the meantime is written anyway.
        if !is_intact && !desired.dirty.contains_key(&key) {
            tracing::warn!(key, "own key missing or changed by another writer; written again");
            desired.dirty.insert(key, value);
        }
    }
}

async fn flush(store: &dyn Store, shared: &Shared, lease: LeaseId) -> Result<(), StoreError> {
    loop {
        let batch: Vec<(String, Bytes)> = {
            let desired = shared.desired.lock().unwrap_or_else(PoisonError::into_inner);
            desired.dirty.iter().take(OPERATIONS_MAX).map(|(k, v)| (k.clone(), v.clone())).collect()
        };
        if batch.is_empty() {
            return Ok(());
        }
        let write =
            |(key, value): &(String, Bytes)| Write::put_leased(key.clone(), value.clone(), lease);
        store.transact(Vec::new(), batch.iter().map(write).collect()).await?;
        let mut desired = shared.desired.lock().unwrap_or_else(PoisonError::into_inner);
        for (key, value) in batch {
            // A value that changed in the meantime still has to be written.
            if desired.dirty.get(&key) == Some(&value) {
                desired.dirty.remove(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use base::MonotonicClock;

    use super::*;
    use crate::store::memory::MemoryStore;

    const SPAN: Duration = Duration::from_millis(200);

    async fn wait_until(store: &Arc<MemoryStore>, key: &str, value: &str) {
        let store: Arc<dyn Store> = store.clone();
        for _ in 0..2000 {
            let entry = store.get(key).await.unwrap();
            if entry.is_some_and(|entry| entry.value == value && entry.lease.is_some()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("'{key}' is not {value} again");
    }

    #[tokio::test]
    async fn own_keys_are_written_again_while_the_lease_lives() {
        let memory = MemoryStore::start(Arc::new(MonotonicClock::new()));
        let store: Arc<dyn Store> = memory.clone();
        let membership = Membership::start(store.clone(), SPAN);
        membership.put("backends/b".to_string(), "here".into());
        wait_until(&memory, "backends/b", "here").await;
        store.delete("backends/b").await.unwrap();
        wait_until(&memory, "backends/b", "here").await;
        // Damaged, and without a lease: nobody would remove it.
        store.put("backends/b", "garbage", None).await.unwrap();
        wait_until(&memory, "backends/b", "here").await;
        store.put("backends/b", "here", None).await.unwrap();
        wait_until(&memory, "backends/b", "here").await;
        memory.lose_everything();
        wait_until(&memory, "backends/b", "here").await;
        // A full store changes nothing, and is written to when it has space again.
        memory.set_full(true);
        membership.put("backends/b".to_string(), "moved".into());
        tokio::time::sleep(2 * SPAN).await;
        memory.set_full(false);
        wait_until(&memory, "backends/b", "moved").await;
        membership.leave().await;
        assert_eq!(store.get("backends/b").await.unwrap(), None);
    }
}
