//! Memory of values that are no longer needed, kept for the outputs of later steps.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;
use half::{bf16, f16};
use model::memory::MemoryCache;
use model::{HostMemory, MemoryError};

use crate::buffer::{self, Buffer};

/// Buffers kept per element width. The oldest is freed when there are more.
const MAX_BUFFERS: usize = 64;

/// Bytes below which a buffer is not kept: the allocator is as fast.
const MIN_BYTES: usize = 128;

/// Buffers that are reused instead of freed. Element types of one width share their buffers.
#[derive(Default)]
pub(crate) struct BufferPool {
    buffers: Mutex<PooledBuffers>,
}

/// Buffers with capacity, oldest first. Their elements are of no use.
#[derive(Default)]
pub(crate) struct PooledBuffers {
    bools: Vec<Buffer<bool>>,
    bits8: Vec<Buffer<u8>>,
    bits16: Vec<Buffer<u16>>,
    bits32: Vec<Buffer<u32>>,
    bits64: Vec<Buffer<u64>>,
    /// Buffers with elements, for kernels that overwrite all of their output: these need not be
    /// filled first.
    spare: Vec<Buffer<f32>>,
}

/// An element type whose buffers the pool reuses.
pub(crate) trait Pooled: Clone + Send + Sync + 'static {
    /// Takes a buffer with room for `capacity` elements out of the pool.
    fn take_buffer(buffers: &mut PooledBuffers, capacity: usize) -> Option<Buffer<Self>>;
    /// Puts an empty `buffer` into the pool; the result is a buffer to free.
    fn put_buffer(buffers: &mut PooledBuffers, buffer: Buffer<Self>) -> Option<Buffer<Self>>;
}

macro_rules! pooled {
    ($($rust:ty: $list:ident),+ $(,)?) => {
        $(impl Pooled for $rust {
            fn take_buffer(buffers: &mut PooledBuffers, capacity: usize) -> Option<Buffer<Self>> {
                best_fit(&mut buffers.$list, capacity).map(Buffer::cast)
            }

            fn put_buffer(
                buffers: &mut PooledBuffers,
                buffer: Buffer<Self>,
            ) -> Option<Buffer<Self>> {
                push(&mut buffers.$list, buffer.cast()).map(Buffer::cast)
            }
        })+
    };
}

pooled! {
    u8: bits8, i8: bits8,
    u16: bits16, i16: bits16, f16: bits16, bf16: bits16,
    u32: bits32, i32: bits32, f32: bits32,
    u64: bits64, i64: bits64, f64: bits64,
}

impl Pooled for bool {
    fn take_buffer(buffers: &mut PooledBuffers, capacity: usize) -> Option<Buffer<bool>> {
        best_fit(&mut buffers.bools, capacity)
    }

    fn put_buffer(buffers: &mut PooledBuffers, buffer: Buffer<bool>) -> Option<Buffer<bool>> {
        push(&mut buffers.bools, buffer)
    }
}

impl Pooled for Bytes {
    fn take_buffer(_: &mut PooledBuffers, _: usize) -> Option<Buffer<Bytes>> {
        None
    }

    fn put_buffer(_: &mut PooledBuffers, buffer: Buffer<Bytes>) -> Option<Buffer<Bytes>> {
        Some(buffer)
    }
}

/// Removes the smallest buffer that has room for `capacity` elements.
fn best_fit<T>(list: &mut Vec<Buffer<T>>, capacity: usize) -> Option<Buffer<T>> {
    let fits = list.iter().enumerate().filter(|(_, buffer)| buffer.capacity() >= capacity);
    let (index, _) = fits.min_by_key(|(_, buffer)| buffer.capacity())?;
    Some(list.remove(index))
}

/// Appends `buffer`, and removes the oldest one when there are too many.
fn push<T>(list: &mut Vec<Buffer<T>>, buffer: Buffer<T>) -> Option<Buffer<T>> {
    list.push(buffer);
    (list.len() > MAX_BUFFERS).then(|| list.remove(0))
}

impl BufferPool {
    /// An empty pool whose buffers are freed when the memory of the calling thread's budget is
    /// short.
    pub(crate) fn new() -> Arc<BufferPool> {
        BufferPool::of(buffer::memory())
    }

    fn of(memory: &HostMemory) -> Arc<BufferPool> {
        let pool = Arc::new(BufferPool::default());
        let cache: Weak<BufferPool> = Arc::downgrade(&pool);
        memory.add_cache(cache);
        pool
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, PooledBuffers> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An empty buffer with room for at least `capacity` elements.
    pub(crate) fn alloc<T: Pooled>(&self, capacity: usize) -> Result<Buffer<T>, MemoryError> {
        if capacity.saturating_mul(size_of::<T>()) < MIN_BYTES {
            return Buffer::with_capacity(capacity);
        }
        // The lock is released before the allocator is called.
        let found = T::take_buffer(&mut self.lock(), capacity);
        match found {
            Some(mut buffer) => {
                buffer.clear();
                Ok(buffer)
            }
            None => Buffer::with_capacity(capacity),
        }
    }

    /// A buffer of `count` bytes with arbitrary content: the caller must overwrite all that is
    /// read.
    pub(crate) fn any_bytes(&self, count: usize) -> Result<Buffer<u8>, MemoryError> {
        let found = u8::take_buffer(&mut self.lock(), count);
        let mut buffer = found.map_or_else(|| Buffer::with_capacity(count), Ok)?;
        buffer.resize(count, 0);
        // Makes tests fail if a kernel does not overwrite everything.
        #[cfg(test)]
        buffer.fill(0xa5);
        Ok(buffer)
    }

    /// A buffer of `count` copies of `value`.
    pub(crate) fn filled<T: Pooled>(
        &self,
        count: usize,
        value: T,
    ) -> Result<Buffer<T>, MemoryError> {
        let mut buffer = self.alloc(count)?;
        buffer.resize(count, value);
        Ok(buffer)
    }

    /// Keeps the memory of `buffer` for [`alloc`](BufferPool::alloc).
    pub(crate) fn add<T: Pooled>(&self, buffer: Buffer<T>) {
        if buffer.capacity().saturating_mul(size_of::<T>()) < MIN_BYTES {
            return;
        }
        let surplus = T::put_buffer(&mut self.lock(), buffer);
        drop(surplus);
    }
}

impl PooledBuffers {
    pub(crate) fn spare(&mut self) -> &mut Vec<Buffer<f32>> {
        &mut self.spare
    }
}

impl MemoryCache for BufferPool {
    fn free(&self) {
        // Freed after the lock is released.
        let freed = std::mem::take(&mut *self.lock());
        drop(freed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reuses_the_smallest_buffer_that_fits() {
        let pool = BufferPool::new();
        pool.add(Buffer::filled(300, 0f32).unwrap());
        pool.add(Buffer::filled(200, 0f32).unwrap());
        let buffer: Buffer<f32> = pool.alloc(150).unwrap();
        assert!(buffer.is_empty() && buffer.capacity() == 200);
        assert_eq!(pool.alloc::<f32>(150).unwrap().capacity(), 300);
        assert_eq!(pool.alloc::<f32>(150).unwrap().capacity(), 150);
    }

    #[test]
    fn types_of_one_width_share_buffers() {
        let pool = BufferPool::new();
        pool.add(Buffer::filled(300, 0f32).unwrap());
        assert_eq!(pool.alloc::<u64>(100).unwrap().capacity(), 100);
        assert_eq!(pool.alloc::<u32>(100).unwrap().capacity(), 300);
    }

    #[test]
    fn frees_the_oldest_and_ignores_the_small() {
        let pool = BufferPool::new();
        pool.add(Buffer::filled(MIN_BYTES - 1, 0u8).unwrap());
        assert!(pool.lock().bits8.is_empty());
        for extra in 0..=MAX_BUFFERS {
            pool.add(Buffer::<u8>::with_capacity(1000 + extra).unwrap());
        }
        let kept: Vec<usize> = pool.lock().bits8.iter().map(Buffer::capacity).collect();
        assert_eq!(kept.len(), MAX_BUFFERS);
        assert_eq!(kept[0], 1001);
    }

    #[test]
    fn frees_its_buffers_when_memory_is_short() {
        let memory = HostMemory::leaked(100_000);
        buffer::with_memory(memory, || {
            let pool = BufferPool::new();
            pool.add(pool.alloc::<f32>(20_000).unwrap());
            assert_eq!(memory.used(), 80_000);
            // Of another width, so that the kept buffer does not fit.
            let other = pool.alloc::<u64>(10_000).unwrap();
            assert_eq!((memory.used(), other.capacity()), (80_000, 10_000));
        });
    }
}
