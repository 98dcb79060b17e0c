//! The budget of host memory: who wants memory whose size comes from outside reserves it first.
//!
//! Linux grants more memory than there is and ends the process when it is used. An allocation
//! that succeeds therefore proves nothing; only a budget that is checked before the allocation
//! does. A reservation is one addition to an atomic counter, and its drop one subtraction.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, Weak};

use thiserror::Error;

mod limit;

pub use limit::detect;

/// Why memory is not granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MemoryError {
    /// More than the whole budget: it is never granted.
    #[error("{bytes} bytes of memory are needed, the limit is {limit}")]
    TooLarge {
        /// Bytes requested.
        bytes: usize,
        /// Bytes of the budget.
        limit: usize,
    },
    /// Others use too much of the budget at the moment.
    #[error("{bytes} bytes of memory are needed, {used} of {limit} are in use; try again later")]
    Busy {
        /// Bytes requested.
        bytes: usize,
        /// Bytes in use.
        used: usize,
        /// Bytes of the budget.
        limit: usize,
    },
}

/// Reservations up to this size may use the last part of a budget, which larger ones leave free:
/// clients that fill the budget with large requests do not take it from small ones.
const SMALL_BYTES: usize = 64 << 10;

/// The part of a budget that is kept for small reservations: one of so many.
const SMALL_PART: usize = 32;

/// Smaller budgets keep no part.
const PARTED_LIMIT: usize = 64 << 20;

/// Memory that is kept for reuse and can be freed at any time.
pub trait MemoryCache: Send + Sync {
    /// Frees all of it. Must not reserve memory.
    fn free(&self);
}

/// A budget of host memory. Budgets live as long as the process, so that reservations need no
/// reference count.
pub struct HostMemory {
    limit: AtomicUsize,
    used: AtomicUsize,
    refused: AtomicU64,
    caches: Mutex<Vec<Weak<dyn MemoryCache>>>,
    faults: Option<Faults>,
}

/// Reservations to refuse, for tests.
struct Faults {
    /// Reservations until the one that is refused.
    left: AtomicU64,
}

impl Default for &'static HostMemory {
    fn default() -> &'static HostMemory {
        HostMemory::process()
    }
}

impl std::fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (used, limit) = (self.used(), self.limit());
        f.debug_struct("HostMemory").field("used", &used).field("limit", &limit).finish()
    }
}

impl HostMemory {
    /// A budget of `limit` bytes.
    pub const fn new(limit: usize) -> HostMemory {
        HostMemory {
            limit: AtomicUsize::new(limit),
            used: AtomicUsize::new(0),
            refused: AtomicU64::new(0),
            caches: Mutex::new(Vec::new()),
            faults: None,
        }
    }

    /// A budget of its own for a test. It is never freed.
    pub fn leaked(limit: usize) -> &'static HostMemory {
        Box::leak(Box::new(HostMemory::new(limit)))
    }

    /// A budget for tests that refuses exactly one reservation: the one that [`fail_at`] names.
    ///
    /// [`fail_at`]: HostMemory::fail_at
    pub fn leaked_with_faults(limit: usize) -> &'static HostMemory {
        let faults = Some(Faults { left: AtomicU64::new(u64::MAX) });
        Box::leak(Box::new(HostMemory { faults, ..HostMemory::new(limit) }))
    }

    /// Refuses the reservation after the next `count`, whatever its size; only with
    /// [`leaked_with_faults`](HostMemory::leaked_with_faults).
    pub fn fail_at(&self, count: u64) {
        if let Some(faults) = &self.faults {
            faults.left.store(count, Ordering::SeqCst);
        }
    }

    /// Whether the reservation that [`fail_at`](HostMemory::fail_at) names was refused.
    pub fn has_failed(&self) -> bool {
        self.faults.as_ref().is_some_and(|faults| faults.left.load(Ordering::SeqCst) == u64::MAX)
    }

    /// The budget of this process. Its limit is what [`detect`] finds until it is set.
    pub fn process() -> &'static HostMemory {
        static PROCESS: OnceLock<HostMemory> = OnceLock::new();
        PROCESS.get_or_init(|| HostMemory::new(detect().unwrap_or(usize::MAX)))
    }

    /// Sets the limit. What is reserved already stays.
    pub fn set_limit(&self, bytes: usize) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    /// Bytes that may be reserved in all.
    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// Bytes that are reserved.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// How many reservations were refused.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Registers memory that is freed before a reservation is refused.
    pub fn add_cache(&self, cache: Weak<dyn MemoryCache>) {
        let mut caches = self.caches.lock().unwrap_or_else(PoisonError::into_inner);
        caches.retain(|cache| cache.strong_count() > 0);
        caches.push(cache);
    }

    /// Reserves `bytes`.
    pub fn reserve(&'static self, bytes: usize) -> Result<Reservation, MemoryError> {
        self.add(bytes, 0)?;
        Ok(Reservation { memory: self, bytes })
    }

    /// A reservation of nothing, which can grow.
    pub fn empty(&'static self) -> Reservation {
        Reservation { memory: self, bytes: 0 }
    }

    /// Whether `bytes` can be reserved now, without reserving them: for work whose memory is known
    /// before it starts.
    pub fn check(&self, bytes: usize) -> Result<(), MemoryError> {
        self.add(bytes, 0)?;
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// The error for `bytes` that a caller who holds `held` of them cannot get.
    pub fn refusal(&self, bytes: usize, held: usize) -> MemoryError {
        let (limit, used) = (self.limit_for(bytes.saturating_add(held)), self.used());
        match bytes.saturating_add(held) > limit {
            true => MemoryError::TooLarge { bytes: bytes.saturating_add(held), limit },
            false => MemoryError::Busy { bytes, used, limit },
        }
    }

    /// How much may be in use once a reservation has `total` bytes.
    fn limit_for(&self, total: usize) -> usize {
        let limit = self.limit();
        match total > SMALL_BYTES && limit >= PARTED_LIMIT {
            true => limit - limit / SMALL_PART,
            false => limit,
        }
    }

    /// Adds `bytes` to a reservation of `held`.
    fn add(&self, bytes: usize, held: usize) -> Result<(), MemoryError> {
        let limit = self.limit_for(bytes.saturating_add(held));
        if self.try_add(bytes, limit) {
            return Ok(());
        }
        self.add_after_freeing(bytes, held, limit)
    }

    fn try_add(&self, bytes: usize, limit: usize) -> bool {
        if self.faults.as_ref().is_some_and(Faults::refuse_next) {
            return false;
        }
        if bytes > limit {
            return false;
        }
        // Added first and taken back if it was too much: cheaper than a loop of exchanges. The sum
        // cannot overflow: every summand is at most the limit, which fits the address space.
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        let fits = before.saturating_add(bytes) <= limit;
        if !fits {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
        }
        fits
    }

    #[cold]
    fn add_after_freeing(
        &self,
        bytes: usize,
        held: usize,
        limit: usize,
    ) -> Result<(), MemoryError> {
        let failed_on_purpose = self.has_failed();
        if bytes <= limit && !failed_on_purpose {
            let caches = self.caches.lock().unwrap_or_else(PoisonError::into_inner).clone();
            caches.iter().filter_map(Weak::upgrade).for_each(|cache| cache.free());
            if self.try_add(bytes, limit) {
                return Ok(());
            }
        }
        self.refused.fetch_add(1, Ordering::Relaxed);
        Err(self.refusal(bytes, held))
    }
}

impl Faults {
    fn refuse_next(&self) -> bool {
        let next = |left: u64| (left != u64::MAX).then(|| left.checked_sub(1).unwrap_or(u64::MAX));
        self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next) == Ok(0)
    }
}

/// Bytes of a budget, given back when it is dropped.
#[derive(Debug)]
pub struct Reservation {
    memory: &'static HostMemory,
    bytes: usize,
}

impl Reservation {
    /// Bytes it holds.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its budget.
    pub fn memory(&self) -> &'static HostMemory {
        self.memory
    }

    /// Reserves `bytes` more.
    pub fn grow(&mut self, bytes: usize) -> Result<(), MemoryError> {
        self.memory.add(bytes, self.bytes)?;
        self.bytes += bytes;
        Ok(())
    }

    /// Makes sure that it holds at least `bytes`.
    pub fn grow_to(&mut self, bytes: usize) -> Result<(), MemoryError> {
        match bytes.checked_sub(self.bytes) {
            None | Some(0) => Ok(()),
            Some(missing) => self.grow(missing),
        }
    }

    /// Gives back all but `bytes`.
    pub fn shrink_to(&mut self, bytes: usize) {
        let surplus = self.bytes.saturating_sub(bytes);
        self.memory.used.fetch_sub(surplus, Ordering::Relaxed);
        self.bytes -= surplus;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.memory.used.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

/// An empty vector with room for `count` elements, and the reservation of its memory: the only way
/// to make a vector whose length comes from outside.
pub fn try_vec<T>(
    memory: &'static HostMemory,
    count: usize,
) -> Result<(Vec<T>, Reservation), MemoryError> {
    let bytes = count.saturating_mul(size_of::<T>());
    let reservation = memory.reserve(bytes)?;
    let mut vec = Vec::new();
    // The allocator itself refuses under a limit of the address space.
    vec.try_reserve_exact(count).map_err(|_| memory.refusal(bytes, 0))?;
    Ok((vec, reservation))
}

#[cfg(test)]
mod tests;
