use std::sync::Arc;

use super::*;

#[test]
fn reservations_are_given_back() {
    let memory = HostMemory::leaked(1000);
    let mut first = memory.reserve(600).unwrap();
    assert_eq!(memory.used(), 600);
    let busy = memory.reserve(500).unwrap_err();
    assert_eq!(busy, MemoryError::Busy { bytes: 500, used: 600, limit: 1000 });
    let never = memory.reserve(1001).unwrap_err();
    assert_eq!(never, MemoryError::TooLarge { bytes: 1001, limit: 1000 });
    first.grow(400).unwrap();
    // Together with what it holds, this can never be granted.
    assert_eq!(first.grow(1), Err(MemoryError::TooLarge { bytes: 1001, limit: 1000 }));
    first.shrink_to(100);
    assert_eq!((memory.used(), first.bytes()), (100, 100));
    first.grow_to(50).unwrap();
    first.grow_to(150).unwrap();
    assert_eq!(memory.used(), 150);
    drop(first);
    assert_eq!((memory.used(), memory.refused()), (0, 3));
    assert!(memory.reserve(usize::MAX).is_err());
    assert_eq!(memory.used(), 0);
}

/// Large reservations leave a part of the budget to small ones, also when they grow in small steps.
#[test]
fn small_reservations_have_a_part_of_their_own() {
    const MIB: usize = 1 << 20;
    let memory = HostMemory::leaked(64 * MIB);
    let never = memory.reserve(63 * MIB).unwrap_err();
    assert_eq!(never, MemoryError::TooLarge { bytes: 63 * MIB, limit: 62 * MIB });
    let mut large = memory.empty();
    while large.grow(1 << 12).is_ok() {}
    assert_eq!(large.bytes(), 62 * MIB);
    assert!(matches!(memory.reserve(SMALL_BYTES + 1), Err(MemoryError::Busy { .. })));
    let small: Vec<Reservation> = (0..).map_while(|_| memory.reserve(SMALL_BYTES).ok()).collect();
    assert_eq!(small.len(), 2 * MIB / SMALL_BYTES);
    assert_eq!(memory.used(), memory.limit());
}

#[test]
fn memory_that_cannot_be_allocated_is_an_error() {
    let memory = HostMemory::leaked(usize::MAX);
    // More than the address space: the budget has room, the allocator has not.
    let refused = try_vec::<u64>(memory, 1 << 58);
    assert!(matches!(refused, Err(MemoryError::Busy { .. } | MemoryError::TooLarge { .. })));
    assert_eq!(memory.used(), 0);
    let (vec, reservation) = try_vec::<u64>(memory, 10).unwrap();
    assert!(vec.is_empty() && vec.capacity() >= 10 && reservation.bytes() == 80);
}

#[test]
fn threads_never_get_more_than_the_limit() {
    let memory = HostMemory::leaked(100);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for size in 0..20_000 {
                    if let Ok(held) = memory.reserve(size % 70) {
                        assert!(held.bytes() <= 100);
                    }
                }
            });
        }
    });
    assert_eq!(memory.used(), 0);
}

struct Kept(Mutex<Option<Reservation>>);

impl MemoryCache for Kept {
    fn free(&self) {
        self.0.lock().unwrap().take();
    }
}

#[test]
fn caches_are_freed_before_a_refusal() {
    let memory = HostMemory::leaked(1000);
    let cache: Arc<Kept> = Arc::new(Kept(Mutex::new(Some(memory.reserve(900).unwrap()))));
    let weak: Weak<Kept> = Arc::downgrade(&cache);
    memory.add_cache(weak);
    assert!(memory.reserve(1001).is_err());
    assert_eq!(memory.used(), 900, "nothing is freed for what can never fit");
    assert_eq!(memory.reserve(500).unwrap().bytes(), 500);
    assert!(cache.0.lock().unwrap().is_none());
}

#[test]
fn refuses_the_reservation_that_a_test_names() {
    let memory = HostMemory::leaked_with_faults(1000);
    memory.fail_at(2);
    assert!(memory.reserve(1).is_ok() && memory.check(1).is_ok() && !memory.has_failed());
    assert!(memory.reserve(1).is_err() && memory.has_failed());
    assert!(memory.reserve(1).is_ok());
    assert_eq!(memory.used(), 0);
}

#[test]
fn a_reservation_costs_nanoseconds() {
    let memory = HostMemory::leaked(1 << 40);
    let started = std::time::Instant::now();
    for size in 0..100_000 {
        std::hint::black_box(memory.reserve(size).unwrap());
    }
    let each = started.elapsed().as_nanos() / 100_000;
    // About 10 ns when optimized; the bound leaves room for busy machines and debug builds.
    assert!(each < 1000, "{each} ns");
}
