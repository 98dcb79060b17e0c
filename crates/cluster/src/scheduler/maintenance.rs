//! Keeps the store from filling up, in the scheduler that leads: forgets its history from time to
//! time, and makes space where it has none left.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::record::Keys;
use crate::store::{Revision, Store, StoreError, StoreSpace};

/// How often the store's space is looked at.
const LOOK: Duration = Duration::from_secs(10);
/// Looks between two attempts to make space.
const RECLAIM_LOOKS: u64 = 6;

/// How the store is kept from filling up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaintenanceSettings {
    /// History that is kept; zero to leave it to others.
    pub history: Duration,
    /// Bytes from which the store refuses writes.
    pub quota_bytes: u64,
}

impl Default for MaintenanceSettings {
    fn default() -> Self {
        MaintenanceSettings { history: Duration::from_secs(300), quota_bytes: 2 << 30 }
    }
}

/// The store's space as last seen.
#[derive(Debug, Default)]
pub struct SpaceGauges {
    /// Bytes of its files.
    pub bytes: AtomicU64,
    /// Of those in use.
    pub used_bytes: AtomicU64,
    /// It has no space left.
    pub full: AtomicBool,
}

impl SpaceGauges {
    fn set(&self, space: StoreSpace) {
        self.bytes.store(space.bytes, Relaxed);
        self.used_bytes.store(space.used_bytes, Relaxed);
        self.full.store(space.full, Relaxed);
    }
}

/// Maintains one store.
pub struct Maintenance {
    store: Arc<dyn Store>,
    /// A key to read the store's revision with.
    key: String,
    settings: MaintenanceSettings,
    gauges: Arc<SpaceGauges>,
    looks: u64,
    /// The revision one period ago.
    old: Option<Revision>,
    failed: bool,
}

impl Maintenance {
    /// Maintains `store` from now on, where [`Maintenance::run`] is awaited.
    pub fn new(
        store: Arc<dyn Store>,
        keys: &Keys,
        settings: MaintenanceSettings,
        gauges: Arc<SpaceGauges>,
    ) -> Maintenance {
        let key = keys.leader();
        Maintenance { store, key, settings, gauges, looks: 0, old: None, failed: false }
    }

    /// Never returns.
    pub async fn run(mut self) {
        loop {
            let result = self.look().await;
            self.report(result);
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Logs a failure once, until something succeeds.
    fn report(&mut self, result: Result<(), StoreError>) {
        match result {
            Ok(()) => self.failed = false,
            Err(error) if !self.failed => {
                tracing::warn!(%error, "cannot maintain the store; compact it yourself");
                self.failed = true;
            }
            Err(_) => {}
        }
    }

    /// Looks at the store once, and does what is due.
    async fn look(&mut self) -> Result<(), StoreError> {
        let space = self.store.space().await?;
        self.gauges.set(space);
        let (looks, history) = (self.looks, self.settings.history);
        self.looks += 1;
        if history.is_zero() {
            return Ok(());
        }
        if space.full && looks.is_multiple_of(RECLAIM_LOOKS) {
            return self.make_space(space).await;
        }
        let period = (history.as_millis() / LOOK.as_millis()).max(1) as u64;
        if looks.is_multiple_of(period) {
            let now = self.store.list(&self.key).await?.revision;
            // One period is kept, for watchers that were cut off for a moment.
            if let Some(old) = self.old.replace(now) {
                self.store.compact(old).await?;
                tracing::debug!(revision = old, "history of the store forgotten");
            }
        }
        Ok(())
    }

    async fn make_space(&mut self, before: StoreSpace) -> Result<(), StoreError> {
        tracing::error!(bytes = before.bytes, "store full; forgetting its history");
        let now = self.store.list(&self.key).await?.revision;
        self.store.compact(now).await?;
        self.store.reclaim().await?;
        let after = self.store.space().await?;
        self.gauges.set(after);
        tracing::warn!(bytes = before.bytes, bytes_left = after.bytes, "space of the store freed");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use base::MonotonicClock;

    use super::*;
    use crate::store::memory::MemoryStore;

    #[tokio::test]
    async fn history_is_forgotten_after_one_period() {
        let store = MemoryStore::start(Arc::new(MonotonicClock::new()));
        let all: Arc<dyn Store> = store.clone();
        let settings = MaintenanceSettings { history: LOOK, quota_bytes: 1 << 30 };
        let gauges = Arc::new(SpaceGauges::default());
        let keys = Keys::new("test");
        let mut maintenance = Maintenance::new(all.clone(), &keys, settings, gauges.clone());
        let mut largest = 0;
        for _ in 0..50 {
            for _ in 0..10 {
                all.put("loads/f", "x".repeat(1000), None).await.unwrap();
            }
            maintenance.look().await.unwrap();
            largest = largest.max(gauges.bytes.load(Relaxed));
        }
        // Two periods of history, and not fifty.
        assert!(largest < 25_000, "{largest}");
    }
}
