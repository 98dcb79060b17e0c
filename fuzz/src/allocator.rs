//! The allocator of every fuzzing process: it counts, holds a limit, and fails on request.
//!
//! This file holds the only unsafe code outside of `cuda`. A global allocator cannot be written
//! without it, and nothing of this crate is part of the product.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// The system's allocator with counters.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// No allocation has this number.
const NEVER: u64 = u64::MAX;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Allocations of at least `FAULT_MIN` bytes until the one that fails.
static FAULT_LEFT: AtomicU64 = AtomicU64::new(NEVER);
static FAULT_MIN: AtomicUsize = AtomicUsize::new(0);
/// Size of the allocation that failed; 0 while none has.
static FAULT_SIZE: AtomicUsize = AtomicUsize::new(0);
static TRACING: AtomicBool = AtomicBool::new(false);

/// Bytes that are allocated now.
pub fn live() -> usize {
    LIVE.load(Relaxed)
}

/// Begins a new measurement of the peak; returns the bytes that are allocated now.
pub fn reset_peak() -> usize {
    let live = live();
    PEAK.store(live, Relaxed);
    live
}

/// The most bytes that were allocated at once since [`reset_peak`].
pub fn peak() -> usize {
    PEAK.load(Relaxed)
}

/// Refuses allocations that would exceed `bytes` in all.
pub fn set_limit(bytes: usize) {
    LIMIT.store(bytes, Relaxed);
}

/// Refuses one allocation: the one after the next `count` of at least `min` bytes.
pub fn fail_at(count: u64, min: usize) {
    FAULT_SIZE.store(0, Relaxed);
    FAULT_MIN.store(min, Relaxed);
    FAULT_LEFT.store(count, Relaxed);
}

/// Refuses nothing any more. Returns the size of the allocation that was refused, if one was.
pub fn disarm() -> Option<usize> {
    FAULT_LEFT.store(NEVER, Relaxed);
    Some(FAULT_SIZE.swap(0, Relaxed)).filter(|size| *size > 0)
}

/// Whether the place of an allocation that is refused is printed.
pub fn set_tracing(tracing: bool) {
    TRACING.store(tracing, Relaxed);
}

/// Whether this allocation is the one to refuse.
fn is_fault(size: usize) -> bool {
    // The common case is one load.
    if FAULT_LEFT.load(Relaxed) == NEVER || size < FAULT_MIN.load(Relaxed) {
        return false;
    }
    let next = |left: u64| match left {
        NEVER => None,
        0 => Some(NEVER),
        left => Some(left - 1),
    };
    let fails = FAULT_LEFT.fetch_update(Relaxed, Relaxed, next) == Ok(0);
    if fails {
        FAULT_SIZE.store(size, Relaxed);
        if TRACING.load(Relaxed) {
            // Allocates itself, which is no fault any more.
            let place = std::backtrace::Backtrace::force_capture();
            eprintln!("allocation of {size} bytes fails at\n{place}");
        }
    }
    fails
}

/// Counts `added` bytes of an allocation of `size`, unless it is refused.
fn admit(size: usize, added: usize) -> bool {
    if is_fault(size) {
        return false;
    }
    let live = LIVE.fetch_add(added, Relaxed).saturating_add(added);
    if live > LIMIT.load(Relaxed) {
        LIVE.fetch_sub(added, Relaxed);
        return false;
    }
    if live > PEAK.load(Relaxed) {
        PEAK.fetch_max(live, Relaxed);
    }
    true
}

fn release(bytes: usize) {
    LIVE.fetch_sub(bytes, Relaxed);
}

// SAFETY: every call is passed on to the system's allocator with its own arguments, or answered
// with null, which the contract permits. The counters are atomics and allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !admit(layout.size(), layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract for `layout`.
        let memory = unsafe { System.alloc(layout) };
        if memory.is_null() {
            release(layout.size());
        }
        memory
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !admit(layout.size(), layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract for `layout`.
        let memory = unsafe { System.alloc_zeroed(layout) };
        if memory.is_null() {
            release(layout.size());
        }
        memory
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: `memory` came from `System` with `layout`.
        unsafe { System.dealloc(memory, layout) };
        release(layout.size());
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let added = size.saturating_sub(layout.size());
        if added > 0 && !admit(size, added) {
            return std::ptr::null_mut();
        }
        // SAFETY: `memory` came from `System` with `layout`; the caller checked `size`.
        let moved = unsafe { System.realloc(memory, layout, size) };
        match moved.is_null() {
            true => release(added),
            false => release(layout.size().saturating_sub(size)),
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Large enough that no other thread of the test allocates as much.
    const LARGE: usize = 1 << 30;

    #[test]
    fn one_allocation_fails_and_the_next_does_not() {
        let take = || Vec::<u8>::new().try_reserve_exact(LARGE);
        fail_at(1, LARGE);
        assert!(take().is_ok());
        assert!(take().is_err());
        assert!(take().is_ok());
        assert_eq!(disarm(), Some(LARGE));
        assert_eq!(disarm(), None);
        let before = reset_peak();
        assert!(take().is_ok());
        assert!(peak() >= before + LARGE);
        assert!(live() < before + LARGE);
    }
}
