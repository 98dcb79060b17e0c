//! Reusable memory for request bodies, from the pinned host pool or from the heap.
//!
//! The allocator returns the pages of a body of several hundred kilobytes to the kernel after every
//! request, and the kernel clears them for the next one, which takes longer than filling them. A
//! device reads inputs in the pinned host pool directly, without another copy.

use std::collections::TryReserveError;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use model::memory::MemoryCache;
use model::{HostPool, HostPoolBuffer};

/// Maximum size of free buffers.
const MAX_FREE_BYTES: usize = 128 << 20;
/// Smaller buffers are left to the allocator, which caches them.
const MIN_BYTES: usize = 64 << 10;
/// Initial allocation for longer bodies; they grow as data arrives.
const FIRST_BYTES: usize = 4 << 20;
/// In the host pool a body ends at a multiple of this: tensors are at its end, so most of them
/// start aligned.
const ALIGNED_BYTES: usize = 64;

/// Free buffers, and the host pool that others come from.
#[derive(Default)]
pub(crate) struct BodyBuffers {
    host_pool: Option<Arc<dyn HostPool>>,
    free: Mutex<FreeBuffers>,
}

#[derive(Debug, Default)]
struct FreeBuffers {
    /// Last in, first out: the last one may still be in a cache.
    buffers: Vec<Vec<u8>>,
    bytes: usize,
}

/// A buffer that is returned when it is dropped.
pub(crate) struct BodyBuffer {
    memory: Memory,
    pool: Arc<BodyBuffers>,
}

enum Memory {
    /// On the heap.
    Heap(Vec<u8>),
    /// In the host pool, used from `first` to `end`.
    Pooled { buffer: Box<dyn HostPoolBuffer>, first: usize, end: usize },
}

impl fmt::Debug for BodyBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BodyBuffer").field("length", &self.len()).finish_non_exhaustive()
    }
}

impl BodyBuffers {
    pub(crate) fn new(host_pool: Option<Arc<dyn HostPool>>) -> BodyBuffers {
        BodyBuffers { host_pool, free: Mutex::default() }
    }

    /// An empty buffer for about `length` bytes.
    pub(crate) fn take(self: &Arc<BodyBuffers>, length: usize) -> BodyBuffer {
        let memory = self.pooled(length).unwrap_or_else(|| Memory::Heap(self.heap(length)));
        BodyBuffer { memory, pool: self.clone() }
    }

    /// A claimed length above `FIRST_BYTES` gets no pool memory, like on the heap.
    fn pooled(&self, length: usize) -> Option<Memory> {
        let host_pool = self.host_pool.as_ref()?;
        if !(MIN_BYTES..=FIRST_BYTES).contains(&length) {
            return None;
        }
        let first = length.next_multiple_of(ALIGNED_BYTES) - length;
        let buffer = host_pool.allocate(first + length)?;
        Some(Memory::Pooled { buffer, first, end: first })
    }

    fn heap(&self, length: usize) -> Vec<u8> {
        let fits =
            |buffer: &Vec<u8>| (length..=length.saturating_mul(2)).contains(&buffer.capacity());
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let found = free.buffers.iter().rposition(fits).map(|at| free.buffers.remove(at));
        free.bytes -= found.as_ref().map_or(0, Vec::capacity);
        drop(free);
        found.unwrap_or_else(|| {
            let mut new = Vec::new();
            // Without memory it stays empty, and its first bytes say so.
            let _ = new.try_reserve_exact(length.min(FIRST_BYTES));
            new
        })
    }

    fn give(&self, mut buffer: Vec<u8>) {
        let capacity = buffer.capacity();
        buffer.clear();
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if capacity >= MIN_BYTES && free.bytes + capacity <= MAX_FREE_BYTES {
            free.bytes += capacity;
            free.buffers.push(buffer);
        }
    }
}

impl MemoryCache for BodyBuffers {
    fn free(&self) {
        // Freed after the lock is released.
        let freed = std::mem::take(&mut *self.free.lock().unwrap_or_else(PoisonError::into_inner));
        drop(freed);
    }
}

impl BodyBuffer {
    /// Appends `bytes`, unless there is not enough memory. A body longer than announced moves to
    /// the heap.
    pub(crate) fn extend(&mut self, bytes: &[u8]) -> Result<(), TryReserveError> {
        match &mut self.memory {
            Memory::Heap(own) => {
                own.try_reserve(bytes.len())?;
                own.extend_from_slice(bytes);
            }
            Memory::Pooled { buffer, end, .. } => {
                let space = (**buffer).as_mut().get_mut(*end..*end + bytes.len());
                match space {
                    Some(space) => {
                        space.copy_from_slice(bytes);
                        *end += bytes.len();
                    }
                    None => {
                        let mut own = Vec::new();
                        own.try_reserve(self.len() + bytes.len())?;
                        own.extend_from_slice(self.as_ref());
                        own.extend_from_slice(bytes);
                        self.memory = Memory::Heap(own);
                    }
                }
            }
        }
        Ok(())
    }

    /// Length of its contents.
    pub(crate) fn len(&self) -> usize {
        match &self.memory {
            Memory::Heap(own) => own.len(),
            Memory::Pooled { first, end, .. } => end - first,
        }
    }

    /// Its contents; the buffer is returned when the last slice of them is dropped.
    pub(crate) fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for BodyBuffer {
    fn as_ref(&self) -> &[u8] {
        match &self.memory {
            Memory::Heap(own) => own,
            Memory::Pooled { buffer, first, end } => {
                (**buffer).as_ref().get(*first..*end).unwrap_or(&[])
            }
        }
    }
}

impl Drop for BodyBuffer {
    fn drop(&mut self) {
        if let Memory::Heap(own) = &mut self.memory {
            self.pool.give(std::mem::take(own));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn free_buffers(pool: &BodyBuffers) -> (usize, usize) {
        let free = pool.free.lock().unwrap();
        assert_eq!(free.bytes, free.buffers.iter().map(Vec::capacity).sum::<usize>());
        (free.buffers.len(), free.bytes)
    }

    #[test]
    fn returns_a_buffer_when_its_last_slice_is_dropped() {
        let pool = Arc::new(BodyBuffers::default());
        let mut buffer = pool.take(100_000);
        buffer.extend(&[7; 100_000]).unwrap();
        let address = buffer.as_ref().as_ptr();
        let bytes = buffer.freeze();
        let part = bytes.slice(10..20);
        drop(bytes);
        assert_eq!(free_buffers(&pool).0, 0, "a part is still held");
        drop(part);
        assert_eq!(free_buffers(&pool).0, 1);
        let mut again = pool.take(90_000);
        assert_eq!((again.len(), free_buffers(&pool)), (0, (0, 0)));
        again.extend(&[8; 90_000]).unwrap();
        assert_eq!(again.as_ref().as_ptr(), address);
    }

    #[test]
    fn limits_free_buffers_and_reuses_fitting_ones() {
        let pool = Arc::new(BodyBuffers::default());
        let many: Vec<_> = (0..100).map(|_| pool.take(FIRST_BYTES)).collect();
        drop(many);
        let (count, bytes) = free_buffers(&pool);
        assert!(bytes <= MAX_FREE_BYTES && count < 100, "{count}, {bytes}");
        drop(pool.take(10));
        assert_eq!(free_buffers(&pool).0, count, "short ones are not kept");
        let small = pool.take(70_000);
        assert_eq!(free_buffers(&pool).0, count, "a much larger buffer is not reused");
        drop(small);
        // A large announced length is not allocated before the data arrives.
        assert!(pool.heap(1 << 40).capacity() <= 2 * FIRST_BYTES);
    }

    /// A host pool with a limited number of buffers that records the address of the last one.
    #[derive(Default)]
    struct LimitedHostPool {
        left: Arc<AtomicUsize>,
        began: AtomicUsize,
    }

    struct PoolBuffer(Vec<u8>, Arc<AtomicUsize>);

    impl AsRef<[u8]> for PoolBuffer {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    impl AsMut<[u8]> for PoolBuffer {
        fn as_mut(&mut self) -> &mut [u8] {
            &mut self.0
        }
    }

    impl Drop for PoolBuffer {
        fn drop(&mut self) {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl HostPool for LimitedHostPool {
        fn allocate(&self, bytes: usize) -> Option<Box<dyn HostPoolBuffer>> {
            self.left
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
                .ok()?;
            let buffer = PoolBuffer(vec![9; bytes], self.left.clone());
            self.began.store(buffer.0.as_ptr() as usize, Ordering::Relaxed);
            Some(Box::new(buffer))
        }
    }

    fn with_host_pool(buffers: usize) -> (Arc<LimitedHostPool>, Arc<BodyBuffers>) {
        let host_pool = Arc::new(LimitedHostPool {
            left: Arc::new(buffers.into()),
            ..LimitedHostPool::default()
        });
        (host_pool.clone(), Arc::new(BodyBuffers::new(Some(host_pool))))
    }

    #[test]
    fn pooled_bodies_end_aligned_and_are_returned() {
        for length in [65_536, 100_001, 602_112 + 77] {
            let (host_pool, pool) = with_host_pool(1);
            let mut buffer = pool.take(length);
            let body: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            body.chunks(16_384).for_each(|part| buffer.extend(part).unwrap());
            assert_eq!(buffer.len(), length);
            let end = buffer.as_ref().as_ptr_range().end as usize;
            assert!((end - host_pool.began.load(Ordering::Relaxed)).is_multiple_of(ALIGNED_BYTES));
            let bytes = buffer.freeze();
            assert_eq!(bytes, body);
            let part = bytes.slice(5..9);
            drop(bytes);
            assert_eq!(host_pool.left.load(Ordering::Relaxed), 0, "a part is still held");
            drop(part);
            assert_eq!((host_pool.left.load(Ordering::Relaxed), free_buffers(&pool).0), (1, 0));
        }
    }

    #[test]
    fn falls_back_to_the_heap() {
        let (host_pool, pool) = with_host_pool(1);
        let held = pool.take(70_000);
        let mut second = pool.take(70_000);
        second.extend(&[1; 70_000]).unwrap();
        drop(held);
        assert_eq!((second.len(), host_pool.left.load(Ordering::Relaxed)), (70_000, 1));
        for length in [MIN_BYTES - 1, FIRST_BYTES + 1] {
            let _other = pool.take(length);
            assert_eq!(
                host_pool.left.load(Ordering::Relaxed),
                1,
                "neither short nor very long ones"
            );
        }
        let mut longer = pool.take(70_000);
        assert_eq!(host_pool.left.load(Ordering::Relaxed), 0);
        longer.extend(&[2; 70_000]).unwrap();
        longer.extend(&[3; 1]).unwrap();
        assert_eq!(host_pool.left.load(Ordering::Relaxed), 1, "it moved");
        assert_eq!(longer.as_ref(), [&[2; 70_000][..], &[3]].concat());
    }
}
