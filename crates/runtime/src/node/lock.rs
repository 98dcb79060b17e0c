//! How much the node's threads wait for each other.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{MutexGuard, PoisonError, TryLockError};

use base::Nanos;

use super::{Shared, State};

/// How often a thread looks whether the node's lock is free before it sleeps.
const SPINS_BEFORE_SLEEP: usize = 500;

/// LockWaits for the node's lock since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LockContention {
    /// Times somebody else held it.
    pub waits: u64,
    /// All waits together.
    pub waited: Nanos,
    /// The longest.
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
    /// The node's state, once nobody else has it.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under the lock leaves the core in a state it can go on from: every change to it is
        // made by one call of `Core::step`.
        let look = || match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        if let Some(state) = look() {
            return state;
        }
        let began = self.clock.now();
        // It is held for microseconds, and a thread that sleeps is woken after tens of them.
        let again = || {
            std::hint::spin_loop();
            look()
        };
        let state = (0..SPINS_BEFORE_SLEEP).find_map(|_| again());
        let state =
            state.unwrap_or_else(|| self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.lock_waits.count(self.clock.now() - began);
        state
    }
}
