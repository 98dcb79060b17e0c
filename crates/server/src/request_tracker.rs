//! Counts requests in flight and refuses new ones once the server drains.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use api::{ApiError, error::ApiResult};
use tokio::sync::Notify;

/// Counts requests in flight. Once closed it refuses new ones.
#[derive(Debug, Default)]
pub struct RequestTracker {
    closed: AtomicBool,
    in_flight: AtomicUsize,
    idle: Notify,
}

/// A request in flight; it ends when this is dropped.
#[derive(Debug)]
pub struct RequestGuard<'a>(&'a RequestTracker);

impl RequestTracker {
    /// Admits a request, unless the tracker is closed.
    pub fn admit(&self) -> ApiResult<RequestGuard<'_>> {
        // Counted before `closed` is read, so that a drain waits for every admitted request.
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        let guard = RequestGuard(self);
        match self.closed.load(Ordering::SeqCst) {
            false => Ok(guard),
            true => Err(ApiError::shutting_down()),
        }
    }

    /// Whether new requests are refused.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::SeqCst)
    }

    /// Refuses new requests from now on.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Waits until no request is in flight.
    pub async fn wait_idle(&self) {
        loop {
            let idle = self.idle.notified();
            if self.in_flight() == 0 {
                return;
            }
            idle.await;
        }
    }
}

impl Drop for RequestGuard<'_> {
    fn drop(&mut self) {
        if self.0.in_flight.fetch_sub(1, Ordering::SeqCst) == 1 && self.0.is_closed() {
            self.0.idle.notify_waiters();
        }
    }
}
