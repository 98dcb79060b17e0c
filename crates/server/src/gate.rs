//! The gate that inference work passes: open until the server drains, and counting who is inside.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use api::{ApiError, error::ApiResult};
use tokio::sync::Notify;

/// Counts work under way and refuses more once closed.
#[derive(Debug, Default)]
pub struct Gate {
    closed: AtomicBool,
    inside: AtomicUsize,
    left: Notify,
}

/// PreemptMode to work; given back when dropped.
#[derive(Debug)]
pub struct Pass<'a>(&'a Gate);

impl Gate {
    /// Lets one piece of work in, unless the gate is closed.
    pub fn enter(&self) -> ApiResult<Pass<'_>> {
        // Counted before the look at `closed`, so that a drain never misses one that got in.
        self.inside.fetch_add(1, Ordering::SeqCst);
        let pass = Pass(self);
        match self.closed.load(Ordering::SeqCst) {
            false => Ok(pass),
            true => Err(ApiError::shutting_down()),
        }
    }

    /// Whether no more work is let in.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Pieces of work inside.
    pub fn inside(&self) -> usize {
        self.inside.load(Ordering::SeqCst)
    }

    /// Lets no more work in.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Returns when nobody is inside.
    pub async fn empty(&self) {
        loop {
            let left = self.left.notified();
            if self.inside() == 0 {
                return;
            }
            left.await;
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if self.0.inside.fetch_sub(1, Ordering::SeqCst) == 1 && self.0.is_closed() {
            self.0.left.notify_waiters();
        }
    }
}
