//! The node's lock, and its contention.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{MutexGuard, PoisonError, TryLockError};

use base::Nanos;

use super::{Shared, State};

/// Tries to take the lock before a thread sleeps.
const SPINS_BEFORE_SLEEP: usize = 500;

/// Waits for the node's lock since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LockContention {
    /// Number of waits.
    pub waits: u64,
    /// Total wait time.
    pub waited: Nanos,
    /// The longest wait.
    pub longest: Nanos,
}

#[derive(Debug, Default)]
pub(super) struct LockWaits {
    waits: AtomicU64,
    waited: AtomicU64,
    longest: AtomicU64,
}

impl LockWaits {
    pub(super) fn count(&self, span: Nanos) {
        self.waits.fetch_add(1, Relaxed);
        self.waited.fetch_add(span.0, Relaxed);
        self.longest.fetch_max(span.0, Relaxed);
    }

    pub(super) fn read(&self) -> LockContention {
        LockContention {
            waits: self.waits.load(Relaxed),
            waited: Nanos(self.waited.load(Relaxed)),
            longest: Nanos(self.longest.load(Relaxed)),
        }
    }
}

impl Shared {
    /// Takes the lock.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic leaves the core consistent: every change is one call of `Core::step`.
        let try_lock = || match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        if let Some(state) = try_lock() {
            return state;
        }
        let began = self.clock.now();
        // The lock is held for microseconds; waking a thread takes tens of them.
        let spin = || {
            std::hint::spin_loop();
            try_lock()
        };
        let state = (0..SPINS_BEFORE_SLEEP).find_map(|_| spin());
        let state =
            state.unwrap_or_else(|| self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.lock_waits.count(self.clock.now() - began);
        state
    }
}
