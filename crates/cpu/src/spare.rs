//! Buffers of `f32` that were results and no longer are. They stay initialised, so that a kernel that
//! overwrites all of its output need not fill it first.

use std::cell::RefCell;

use rten::BufferPool;

/// Buffers kept per thread.
const MAX_BUFFERS: usize = 24;

/// Elements of the least buffer worth keeping.
const MIN_LENGTH: usize = 1024;

thread_local! {
    // A queue's steps all run on one thread, which gives and takes.
    static BUFFERS: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Keeps `buffer` for [`take`]; the oldest goes to `pool` when there are too many.
pub(crate) fn give(buffer: Vec<f32>, pool: &BufferPool) {
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

/// A buffer of `count` elements whose contents are arbitrary: what takes it must overwrite all of it.
pub(crate) fn take(pool: &BufferPool, count: usize) -> Vec<f32> {
    let found = BUFFERS.with_borrow_mut(|buffers| {
        let fits = |buffer: &&(usize, usize)| (count..=count.saturating_mul(2)).contains(&buffer.1);
        let lengths: Vec<(usize, usize)> = buffers.iter().map(Vec::len).enumerate().collect();
        let best = lengths.iter().filter(fits).min_by_key(|(_, length)| *length)?;
        Some(buffers.swap_remove(best.0))
    });
    let mut buffer = found.unwrap_or_else(|| {
        let mut buffer = pool.alloc(count);
        buffer.resize(count, 0.0);
        buffer
    });
    buffer.truncate(count);
    // What a kernel fails to overwrite must not go unnoticed.
    #[cfg(test)]
    buffer.fill(f32::NAN);
    buffer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_is_taken() {
        let pool = BufferPool::new();
        give(vec![1.0; 5000], &pool);
        give(vec![1.0; 9000], &pool);
        assert_eq!(take(&pool, 4500).capacity(), 5000);
        assert_eq!(take(&pool, 4500).capacity(), 9000);
        assert_eq!(take(&pool, 4500).len(), 4500);
    }
}
