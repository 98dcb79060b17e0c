//! Reuse of `f32` buffers without filling them.
//!
//! The buffers stay initialized, so that a kernel that overwrites all of its output need not fill
//! it first.

use model::MemoryError;

use crate::buffer::Buffer;
use crate::buffer_pool::BufferPool;
use crate::kernel::gemm;

/// Buffers kept per pool: a network has more steps, and what was dropped is filled again.
const MAX_BUFFERS: usize = 64;

/// Elements of the smallest buffer worth keeping.
const MIN_LENGTH: usize = 1024;

/// Keeps `buffer` for [`take`]. The oldest one is emptied when there are too many.
pub(crate) fn keep(buffer: Buffer<f32>, pool: &BufferPool) {
    if buffer.len() < MIN_LENGTH {
        return;
    }
    let surplus = {
        let mut buffers = pool.lock();
        let spare = buffers.spare();
        spare.push(buffer);
        (spare.len() > MAX_BUFFERS).then(|| spare.remove(0))
    };
    if let Some(surplus) = surplus {
        pool.add(surplus);
    }
}

/// A buffer of `count` elements with arbitrary content: the caller must overwrite all of it.
pub(crate) fn take(pool: &BufferPool, count: usize) -> Result<Buffer<f32>, MemoryError> {
    let found = {
        let mut buffers = pool.lock();
        let spare = buffers.spare();
        // Filling missing elements costs most; holding too much memory comes second.
        let cost = |buffer: &Buffer<f32>| (count.saturating_sub(buffer.len()), buffer.capacity());
        let fits =
            |buffer: &Buffer<f32>| (count..=count.saturating_mul(2)).contains(&buffer.capacity());
        let candidates = spare.iter().enumerate().filter(|(_, buffer)| fits(buffer));
        let best = candidates.min_by_key(|(_, buffer)| cost(buffer)).map(|(index, _)| index);
        best.map(|index| spare.swap_remove(index))
    };
    let mut buffer = match found {
        Some(buffer) => buffer,
        None => pool.alloc(count)?,
    };
    buffer.resize(count, 0.0);
    // Makes tests fail if a kernel does not overwrite everything.
    #[cfg(test)]
    buffer.fill(f32::NAN);
    Ok(buffer)
}

/// Calls `f` with `count` elements whose contents are arbitrary: memory of the thread, or of `pool`
/// where they are more than a thread keeps. New memory costs more than a pass over it.
pub(crate) fn with_scratch<R>(
    pool: &BufferPool,
    count: usize,
    f: impl FnOnce(&mut [f32]) -> R,
) -> Result<R, MemoryError> {
    if count <= gemm::MAX_KEPT_SCRATCH {
        return gemm::with_scratch(count, f);
    }
    let mut buffer = take(pool, count)?;
    let result = f(&mut buffer);
    keep(buffer, pool);
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn much_scratch_memory_is_used_again() {
        let pool = BufferPool::new();
        let count = gemm::MAX_KEPT_SCRATCH + 1;
        let place = |scratch: &mut [f32]| (scratch.len(), scratch.as_ptr() as usize);
        let first = with_scratch(&pool, count, place).unwrap();
        // Memory that was given back would be at the same place.
        let other = vec![0f32; count];
        assert_eq!(with_scratch(&pool, count, place).unwrap(), first);
        assert_ne!(other.as_ptr() as usize, first.1);
    }

    #[test]
    fn kept_buffers_are_reused() {
        let pool = BufferPool::new();
        keep(Buffer::filled(5000, 1.0).unwrap(), &pool);
        keep(Buffer::filled(9000, 1.0).unwrap(), &pool);
        assert_eq!(take(&pool, 4500).unwrap().capacity(), 5000);
        assert_eq!(take(&pool, 4500).unwrap().capacity(), 9000);
        assert_eq!(take(&pool, 4500).unwrap().len(), 4500);
    }
}
