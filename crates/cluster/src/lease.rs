//! A lease that is renewed for as long as its keeper lives.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::store::{LeaseId, Store, StoreError};

/// Renewals in the span of a lease.
const RENEWALS: u32 = 4;

/// Keeps one lease alive.
pub struct LeaseKeeper {
    store: Arc<dyn Store>,
    lease: LeaseId,
    lost: watch::Receiver<bool>,
    task: JoinHandle<()>,
}

impl Drop for LeaseKeeper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl LeaseKeeper {
    /// Grants a lease of `span` and renews it from now on.
    pub async fn start(store: Arc<dyn Store>, span: Duration) -> Result<LeaseKeeper, StoreError> {
        let lease = store.grant(span).await?;
        let (sender, lost) = watch::channel(false);
        let renewed = store.clone();
        let task = tokio::spawn(async move {
            loop {
                tokio::time::sleep(span / RENEWALS).await;
                // Only the store knows whether a lease has expired; an unreachable store is tried
                // again.
                if renewed.renew(lease).await == Err(StoreError::NoLease) {
                    let _ = sender.send(true);
                    return;
                }
            }
        });
        Ok(LeaseKeeper { store, lease, lost, task })
    }

    /// The lease.
    pub fn id(&self) -> LeaseId {
        self.lease
    }

    /// Returns when the lease has expired.
    pub async fn lost(&mut self) {
        if self.lost.wait_for(|lost| *lost).await.is_err() {
            // The keeper was stopped; the lease expires without further notice.
            std::future::pending::<()>().await;
        }
    }

    /// Stops renewing.
    pub fn abandon(&mut self) {
        self.task.abort();
    }

    /// Revokes the lease and so removes its keys. If the store does not reply, the lease expires by
    /// itself.
    pub async fn end(self) {
        self.task.abort();
        if let Err(error) = self.store.revoke(self.lease).await {
            tracing::debug!(%error, "cannot revoke the lease; it expires by itself");
        }
    }
}
