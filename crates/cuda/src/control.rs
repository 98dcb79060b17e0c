//! The epoch: one word on the device that grows with every order to leave.
//!
//! A best-effort launch carries the epoch it was launched in and leaves once the word has passed it. There is no reset, so
//! an order can neither be lost nor meet a launch that came after it. One word serves all queues; whoever left without
//! having been told to is launched again by its own queue.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::driver::{DeviceBuffer, Stream};
use crate::error::CudaError;

/// An epoch that no order passes: a launch with it runs to its end.
const NEVER: u32 = u32::MAX;

/// Where a word with [`NEVER`] lies behind the epoch. Watches copy the sixteen bytes a word begins.
const NEVER_AT: u64 = 16;

/// The device's epoch.
pub(crate) struct Epoch {
    word: DeviceBuffer,
    stream: Arc<Stream>,
    /// What the word is or is about to be; written before the device is told, so a launch found complete while this is still
    /// its own epoch cannot have left early.
    value: AtomicU32,
    raising: Mutex<()>,
}

/// What a queue knows of orders to leave.
#[derive(Default)]
pub(crate) struct Orders {
    /// Work launched in an earlier epoch than this one leaves.
    ordered: AtomicU32,
    /// The newest epoch that work of this queue was launched in.
    launched: AtomicU32,
}

impl Epoch {
    /// An epoch word, raised through `stream`, which nothing else uses.
    pub(crate) fn new(stream: Arc<Stream>) -> Result<Epoch, CudaError> {
        let word = DeviceBuffer::fixed(&stream, 64)?;
        // SAFETY: both words are in the buffer, which is dropped after the stream's work.
        unsafe { stream.write_word(word.address() + NEVER_AT, NEVER) }?;
        stream.synchronize()?;
        Ok(Epoch { word, stream, value: AtomicU32::new(0), raising: Mutex::new(()) })
    }

    /// Where the word is.
    pub(crate) fn address(&self) -> u64 {
        self.word.address()
    }

    /// Where the launch epoch of work lies that is never told to leave.
    pub(crate) fn never_address(&self) -> u64 {
        self.word.address() + NEVER_AT
    }

    pub(crate) fn now(&self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.raising.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that work enters the queue of `orders`, and says in which epoch.
    pub(crate) fn enter(&self, orders: &Orders) -> u32 {
        let now = self.now();
        orders.launched.fetch_max(now, Ordering::AcqRel);
        now
    }

    /// Makes everything launched so far in the queue of `orders` leave.
    pub(crate) fn raise(&self, orders: &Orders) -> Result<(), CudaError> {
        let _raising = self.lock();
        let Some(next) = order(self.now(), orders) else { return Ok(()) };
        self.value.store(next, Ordering::Release);
        // SAFETY: the word lives as long as `self`, and dropping it waits for the stream's work.
        unsafe { self.stream.write_word(self.word.address(), next) }
    }

    /// The epoch for work that was launched in `launched` and goes on now; `None` when it was told to leave.
    pub(crate) fn renew(&self, orders: &Orders, launched: u32) -> Option<u32> {
        let _raising = self.lock();
        if orders.told(launched) {
            return None;
        }
        Some(self.enter(orders))
    }
}

impl Drop for Epoch {
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
    }
}

impl Orders {
    /// Whether work launched in `epoch` was told to leave.
    pub(crate) fn told(&self, epoch: u32) -> bool {
        self.ordered.load(Ordering::Acquire) > epoch
    }
}

/// Marks the order in `orders`; the next epoch when the device has to be told, `None` when all it concerns is already
/// leaving or there is none.
fn order(now: u32, orders: &Orders) -> Option<u32> {
    if orders.launched.load(Ordering::Acquire) < now {
        orders.ordered.store(now, Ordering::Release);
        return None;
    }
    // The last epoch is never reached: it would take years of orders, and work that cannot be told to leave is safer than
    // work that leaves at once for ever.
    let next = now.saturating_add(1).min(NEVER - 1);
    orders.ordered.store(next, Ordering::Release);
    Some(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn orders(launched: u32) -> Orders {
        Orders { launched: AtomicU32::new(launched), ..Orders::default() }
    }

    #[test]
    fn an_order_passes_what_was_launched() {
        let queue = orders(5);
        assert_eq!(order(5, &queue), Some(6));
        assert!(queue.told(5));
        assert!(!queue.told(6));
    }

    #[test]
    fn the_device_is_told_once_for_many_queues() {
        let (one, other) = (orders(5), orders(5));
        assert_eq!(order(5, &one), Some(6));
        assert_eq!(order(6, &other), None, "all of it is leaving already");
        assert!(other.told(5));
        assert!(!other.told(6));
    }

    #[test]
    fn an_order_to_an_idle_queue_concerns_nothing_later() {
        let queue = orders(0);
        for _ in 0..3 {
            order(7, &queue);
        }
        assert!(!queue.told(7));
    }
}
