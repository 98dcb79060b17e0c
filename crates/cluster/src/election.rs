//! Leader election: the leader is the process that holds the key, for as long as its lease lives.
//!
//! A key that no leader can have written is replaced at once: one without a lease, or whose value
//! is no name. So is the key of a leader that makes no progress. This is safe, because every write
//! of a leader is a transaction on its own version of the key.

use std::sync::Arc;
use std::time::Duration;

use model::repository::is_valid_name;

use crate::lease::LeaseKeeper;
use crate::store::{Condition, Entry, OPERATIONS_MAX, Revision, Store, StoreError, Write};

/// Pause before the store is tried again.
const RETRY: Duration = Duration::from_millis(200);
/// Looks at the sign of progress within the time that a leader has to make some.
const LOOKS: u32 = 4;

/// A key that a leader writes again and again, and the time it has for that.
struct Progress {
    key: String,
    limit: Duration,
}

/// A process that wants to lead.
pub struct Candidate {
    store: Arc<dyn Store>,
    key: String,
    name: String,
    span: Duration,
    progress: Option<Progress>,
}

/// The leader.
pub struct Leader {
    store: Arc<dyn Store>,
    key: String,
    revision: Revision,
    lease: LeaseKeeper,
}

impl Candidate {
    /// A candidate for `key` under `name`, with leases of `span`.
    pub fn new(store: Arc<dyn Store>, key: &str, name: &str, span: Duration) -> Candidate {
        let (key, name) = (key.to_string(), name.to_string());
        Candidate { store, key, name, span, progress: None }
    }

    /// Also replaces a leader that does not write `key` for `limit`, although its lease lives.
    pub fn expect_progress(self, key: &str, limit: Duration) -> Candidate {
        Candidate { progress: Some(Progress { key: key.to_string(), limit }), ..self }
    }

    /// Waits until it leads, also while the store is unreachable.
    pub async fn campaign(&self) -> Result<Leader, StoreError> {
        loop {
            match self.try_acquire().await {
                Ok(Some(leader)) => return Ok(leader),
                Ok(None) => {}
                Err(error) if error.is_transient() => {
                    tracing::debug!(%error, "cannot campaign");
                    tokio::time::sleep(RETRY).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn try_acquire(&self) -> Result<Option<Leader>, StoreError> {
        let listing = self.store.list(&self.key).await?;
        let held = listing.entries.into_iter().find(|entry| entry.key == self.key);
        let Some(held) = held else { return self.acquire(0).await };
        let why = match usurper(&held) {
            Some(why) => why,
            None => {
                let mut watch = self.store.watch(&self.key, listing.revision).await?;
                tokio::select! {
                    // Any change is a reason to try again, and so is the end of the watch.
                    _ = watch.next() => return Ok(None),
                    () = self.stands_still() => "it makes no progress",
                }
            }
        };
        let leader = String::from_utf8_lossy(&held.value);
        tracing::warn!(key = self.key, %leader, why, "leader replaced");
        self.acquire(held.revision).await
    }

    /// Returns when the leader has made no progress for too long. Every look at it counts, and not
    /// the time alone: this process may have stood still itself.
    async fn stands_still(&self) {
        let Some(Progress { key, limit }) = &self.progress else {
            return std::future::pending().await;
        };
        let (mut seen, mut unchanged) = (None, 0);
        while unchanged < LOOKS {
            // Nothing is known while the store does not reply.
            if let Ok(entry) = self.store.get(key).await {
                let revision = entry.map_or(0, |entry| entry.revision);
                unchanged = if seen == Some(revision) { unchanged + 1 } else { 0 };
                seen = Some(revision);
            }
            tokio::time::sleep(*limit / LOOKS).await;
        }
    }

    /// Takes the key, which was last written at `expected`; `None` where another candidate was
    /// faster.
    async fn acquire(&self, expected: Revision) -> Result<Option<Leader>, StoreError> {
        let lease = LeaseKeeper::start(self.store.clone(), self.span).await?;
        let value = self.name.clone();
        let made = self.store.compare_and_put(&self.key, expected, value, Some(lease.id())).await;
        match made {
            Ok(Some(revision)) => Ok(Some(Leader {
                store: self.store.clone(),
                key: self.key.clone(),
                revision,
                lease,
            })),
            Ok(None) => {
                lease.end().await;
                Ok(None)
            }
            Err(error) => {
                lease.end().await;
                Err(error)
            }
        }
    }
}

/// Why no leader can have written this key, if that is so.
fn usurper(held: &Entry) -> Option<&'static str> {
    let name = std::str::from_utf8(&held.value).unwrap_or_default();
    match (held.lease, is_valid_name(name)) {
        (None, _) => Some("its key has no lease"),
        (_, false) => Some("its key has no name"),
        _ => None,
    }
}

impl Leader {
    /// Writes if it still leads, atomically where the writes fit one transaction; `false` when it
    /// does not lead any more.
    pub async fn write(&self, mut writes: Vec<Write>) -> Result<bool, StoreError> {
        while !writes.is_empty() {
            let rest = writes.split_off(writes.len().min(OPERATIONS_MAX));
            let condition = Condition { key: self.key.clone(), revision: self.revision };
            if self.store.transact(vec![condition], writes).await?.is_none() {
                return Ok(false);
            }
            writes = rest;
        }
        Ok(true)
    }

    /// Makes one write if it still leads and `condition` holds; whether it was made.
    pub async fn write_if(&self, condition: Condition, write: Write) -> Result<bool, StoreError> {
        let leads = Condition { key: self.key.clone(), revision: self.revision };
        let written = self.store.transact(vec![leads, condition], vec![write]).await?;
        Ok(written.is_some())
    }

    /// Returns when the lease is lost, and with it the leadership.
    pub async fn lost(&mut self) {
        self.lease.lost().await;
    }

    /// Stops renewing without giving up the leadership, as a process that crashes does.
    pub fn abandon(&mut self) {
        self.lease.abandon();
    }

    /// Gives up the leadership, so that the next candidate leads at once.
    pub async fn resign(self) {
        self.lease.end().await;
    }
}

#[cfg(test)]
mod tests {
    use base::MonotonicClock;

    use super::*;
    use crate::store::memory::MemoryStore;

    const SPAN: Duration = Duration::from_secs(60);

    fn store() -> Arc<dyn Store> {
        MemoryStore::start(Arc::new(MonotonicClock::new()))
    }

    fn candidate(store: &Arc<dyn Store>, name: &str) -> Candidate {
        Candidate::new(store.clone(), "leader", name, SPAN)
            .expect_progress("plan", Duration::from_millis(400))
    }

    async fn soon<T>(work: impl Future<Output = T>) -> T {
        tokio::time::timeout(Duration::from_secs(60), work).await.expect("it never ends")
    }

    #[tokio::test]
    async fn a_key_that_no_leader_wrote_is_replaced_once() {
        let store = store();
        let foreign = store.grant(SPAN * 1000).await.unwrap();
        for (value, lease) in [("s1", None), ("no name!", Some(foreign)), ("", Some(foreign))] {
            store.put("leader", value, lease).await.unwrap();
            let (first, second) = (candidate(&store, "a"), candidate(&store, "b"));
            let mut work = tokio::task::JoinSet::new();
            work.spawn(async move { first.campaign().await.unwrap() });
            work.spawn(async move { second.campaign().await.unwrap() });
            let leader = soon(work.join_next()).await.unwrap().unwrap();
            assert!(leader.write(vec![Write::put("plan", "1")]).await.unwrap());
            let rest = tokio::time::timeout(Duration::from_millis(150), work.join_next()).await;
            assert!(rest.is_err(), "two leaders after {value:?}");
            leader.resign().await;
        }
    }

    #[tokio::test]
    async fn a_leader_without_progress_is_replaced_and_cannot_write() {
        let store = store();
        let idle = candidate(&store, "idle").campaign().await.unwrap();
        let next = soon(candidate(&store, "next").campaign()).await.unwrap();
        assert!(!idle.write(vec![Write::put("plan", "old")]).await.unwrap());
        // One that writes stays.
        let other = candidate(&store, "other");
        let waiting = tokio::spawn(async move { other.campaign().await });
        for epoch in 0..100 {
            assert!(next.write(vec![Write::put("plan", format!("{epoch}"))]).await.unwrap());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(!waiting.is_finished());
    }
}
