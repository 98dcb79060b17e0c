//! Leader election: the leader is the process that holds the key, for as long as its lease lives.

use std::sync::Arc;
use std::time::Duration;

use crate::lease::LeaseKeeper;
use crate::store::{Condition, OPERATIONS_MAX, Revision, Store, StoreError, Write};

/// Pause before the store is tried again.
const RETRY: Duration = Duration::from_millis(200);

/// A process that wants to lead.
pub struct Candidate {
    store: Arc<dyn Store>,
    key: String,
    name: String,
    span: Duration,
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
        Candidate { store, key: key.to_string(), name: name.to_string(), span }
    }

    /// Waits until it leads, also while the store is unreachable.
    pub async fn campaign(&self) -> Result<Leader, StoreError> {
        loop {
            match self.try_acquire().await {
                Ok(Some(leader)) => return Ok(leader),
                Ok(None) => {}
                Err(StoreError::Unreachable(reason)) => {
                    tracing::debug!(reason, "cannot campaign");
                    tokio::time::sleep(RETRY).await;
                }
                Err(StoreError::NoLease | StoreError::Behind) => tokio::time::sleep(RETRY).await,
                Err(error) => return Err(error),
            }
        }
    }

    async fn try_acquire(&self) -> Result<Option<Leader>, StoreError> {
        let listing = self.store.list(&self.key).await?;
        if listing.entries.iter().any(|entry| entry.key == self.key) {
            let mut watch = self.store.watch(&self.key, listing.revision).await?;
            // Any change is a reason to try again, and so is the end of the watch.
            let _ = watch.next().await;
            return Ok(None);
        }
        let lease = LeaseKeeper::start(self.store.clone(), self.span).await?;
        let value = self.name.clone();
        let made = self.store.compare_and_put(&self.key, 0, value, Some(lease.id())).await;
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
