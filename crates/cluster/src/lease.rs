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
    /// A lease of `span`, renewed from now on.
    pub async fn start(store: Arc<dyn Store>, span: Duration) -> Result<LeaseKeeper, StoreError> {
        let lease = store.grant(span).await?;
        let (sender, lost) = watch::channel(false);
        let renewed = store.clone();
        let task = tokio::spawn(async move {
            loop {
                tokio::time::sleep(span / RENEWALS).await;
                // Only the store knows whether a lease is over; while it cannot be reached, it is tried.
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

    /// Returns when the lease is over.
    pub async fn lost(&mut self) {
        if self.lost.wait_for(|lost| *lost).await.is_err() {
            // The keeper was told to stop renewing; the lease ends without further notice.
            std::future::pending::<()>().await;
        }
    }

    /// Stops renewing.
    pub fn abandon(&mut self) {
        self.task.abort();
    }

    /// Ends the lease now, and its keys with it. A store that does not answer ends it in time.
    pub async fn end(self) {
        self.task.abort();
        if let Err(error) = self.store.revoke(self.lease).await {
            tracing::debug!(%error, "cannot revoke the lease; it expires by itself");
        }
    }
}
