//! Memory of values that are no longer needed, kept for the outputs of later steps.

use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use half::{bf16, f16};

/// Buffers kept per element width. The oldest is freed when there are more.
const MAX_BUFFERS: usize = 64;

/// Bytes below which a buffer is not kept: the allocator is as fast.
const MIN_BYTES: usize = 128;

/// Vectors that are reused instead of freed. Element types of one width share their buffers.
#[derive(Default)]
pub(crate) struct BufferPool {
    buffers: Mutex<PooledBuffers>,
}

/// Empty vectors with capacity, oldest first.
#[derive(Default)]
pub(crate) struct PooledBuffers {
    bools: Vec<Vec<bool>>,
    bits8: Vec<Vec<u8>>,
    bits16: Vec<Vec<u16>>,
    bits32: Vec<Vec<u32>>,
    bits64: Vec<Vec<u64>>,
}

/// An element type whose vectors the pool reuses.
pub(crate) trait Pooled: Clone + Send + Sync + 'static {
    /// Takes a buffer with room for `capacity` elements out of the pool.
    fn take_buffer(buffers: &mut PooledBuffers, capacity: usize) -> Option<Vec<Self>>;
    /// Puts an empty `buffer` into the pool; the result is a buffer to free.
    fn put_buffer(buffers: &mut PooledBuffers, buffer: Vec<Self>) -> Option<Vec<Self>>;
}

macro_rules! pooled {
    ($($rust:ty: $list:ident),+ $(,)?) => {
        $(impl Pooled for $rust {
            fn take_buffer(buffers: &mut PooledBuffers, capacity: usize) -> Option<Vec<Self>> {
                best_fit(&mut buffers.$list, capacity).map(bytemuck::cast_vec)
            }

            fn put_buffer(buffers: &mut PooledBuffers, buffer: Vec<Self>) -> Option<Vec<Self>> {
                push(&mut buffers.$list, bytemuck::cast_vec(buffer)).map(bytemuck::cast_vec)
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
    fn take_buffer(buffers: &mut PooledBuffers, capacity: usize) -> Option<Vec<bool>> {
        best_fit(&mut buffers.bools, capacity)
    }

    fn put_buffer(buffers: &mut PooledBuffers, buffer: Vec<bool>) -> Option<Vec<bool>> {
        push(&mut buffers.bools, buffer)
    }
}

impl Pooled for Bytes {
    fn take_buffer(_: &mut PooledBuffers, _: usize) -> Option<Vec<Bytes>> {
        None
    }

    fn put_buffer(_: &mut PooledBuffers, buffer: Vec<Bytes>) -> Option<Vec<Bytes>> {
        Some(buffer)
    }
}

/// Removes the smallest buffer that has room for `capacity` elements.
fn best_fit<T>(list: &mut Vec<Vec<T>>, capacity: usize) -> Option<Vec<T>> {
    let fits = list.iter().enumerate().filter(|(_, buffer)| buffer.capacity() >= capacity);
    let (index, _) = fits.min_by_key(|(_, buffer)| buffer.capacity())?;
    Some(list.remove(index))
}

/// Appends `buffer`, and removes the oldest one when there are too many.
fn push<T>(list: &mut Vec<Vec<T>>, buffer: Vec<T>) -> Option<Vec<T>> {
    list.push(buffer);
    (list.len() > MAX_BUFFERS).then(|| list.remove(0))
}

impl BufferPool {
    pub(crate) fn new() -> BufferPool {
        BufferPool::default()
    }

    fn lock(&self) -> MutexGuard<'_, PooledBuffers> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An empty vector with room for at least `capacity` elements.
    pub(crate) fn alloc<T: Pooled>(&self, capacity: usize) -> Vec<T> {
        if capacity.saturating_mul(size_of::<T>()) < MIN_BYTES {
            return Vec::with_capacity(capacity);
        }
        // The lock is released before the allocator is called.
        let found = T::take_buffer(&mut self.lock(), capacity);
        found.unwrap_or_else(|| Vec::with_capacity(capacity))
    }

    /// Keeps the memory of `buffer` for [`alloc`](BufferPool::alloc).
    pub(crate) fn add<T: Pooled>(&self, mut buffer: Vec<T>) {
        if buffer.capacity().saturating_mul(size_of::<T>()) < MIN_BYTES {
            return;
        }
        buffer.clear();
        let surplus = T::put_buffer(&mut self.lock(), buffer);
        drop(surplus);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reuses_the_smallest_buffer_that_fits() {
        let pool = BufferPool::new();
        pool.add(vec![0f32; 300]);
        pool.add(vec![0f32; 200]);
        let buffer: Vec<f32> = pool.alloc(150);
        assert!(buffer.is_empty() && buffer.capacity() == 200);
        assert_eq!(pool.alloc::<f32>(150).capacity(), 300);
        assert_eq!(pool.alloc::<f32>(150).capacity(), 150);
    }

    #[test]
    fn types_of_one_width_share_buffers() {
        let pool = BufferPool::new();
        pool.add(vec![0f32; 300]);
        assert_eq!(pool.alloc::<u64>(100).capacity(), 100);
        assert_eq!(pool.alloc::<u32>(100).capacity(), 300);
    }

    #[test]
    fn frees_the_oldest_and_ignores_the_small() {
        let pool = BufferPool::new();
        pool.add(vec![0u8; MIN_BYTES - 1]);
        assert!(pool.lock().bits8.is_empty());
        for extra in 0..=MAX_BUFFERS {
            pool.add(Vec::<u8>::with_capacity(1000 + extra));
        }
        let kept: Vec<usize> = pool.lock().bits8.iter().map(Vec::capacity).collect();
        assert_eq!(kept.len(), MAX_BUFFERS);
        assert_eq!(kept[0], 1001);
    }
}
