//! Reuse of `f32` buffers without filling them.
//!
//! The buffers stay initialized, so that a kernel that overwrites all of its output need not fill
//! it first.

use std::cell::RefCell;

use crate::buffer_pool::BufferPool;
use crate::yield_point;

/// Buffers kept per thread.
const MAX_BUFFERS: usize = 24;

/// Elements of the smallest buffer worth keeping.
const MIN_LENGTH: usize = 1024;

thread_local! {
    // All steps of a queue run on one thread, which keeps and takes.
    static BUFFERS: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Keeps `buffer` for [`take`]. The oldest one goes to `pool` when there are too many.
pub(crate) fn keep(buffer: Vec<f32>, pool: &BufferPool) {
    if buffer.len() < MIN_LENGTH {
        return;
    }
    BUFFERS.with_borrow_mut(|buffers| {
        buffers.push(buffer);
        if buffers.len() > MAX_BUFFERS {
            pool.add(buffers.remove(0));
        }
    });
}

/// A buffer of `count` elements with arbitrary content: the caller must overwrite all of it.
pub(crate) fn take(pool: &BufferPool, count: usize) -> Vec<f32> {
    let found = BUFFERS.with_borrow_mut(|buffers| {
        // Filling missing elements costs most; holding too much memory comes second.
        let cost = |buffer: &Vec<f32>| (count.saturating_sub(buffer.len()), buffer.capacity());
        let fits =
            |buffer: &Vec<f32>| (count..=count.saturating_mul(2)).contains(&buffer.capacity());
        let candidates = buffers.iter().enumerate().filter(|(_, buffer)| fits(buffer));
        let best = candidates.min_by_key(|(_, buffer)| cost(buffer))?.0;
        Some(buffers.swap_remove(best))
    });
    let mut buffer = found.unwrap_or_else(|| pool.alloc(count));
    yield_point::resize(&mut buffer, count, 0.0);
    // Makes tests fail if a kernel does not overwrite everything.
    #[cfg(test)]
    buffer.fill(f32::NAN);
    buffer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_buffers_are_reused() {
        let pool = BufferPool::new();
        keep(vec![1.0; 5000], &pool);
        keep(vec![1.0; 9000], &pool);
        assert_eq!(take(&pool, 4500).capacity(), 5000);
        assert_eq!(take(&pool, 4500).capacity(), 9000);
        assert_eq!(take(&pool, 4500).len(), 4500);
    }
}
