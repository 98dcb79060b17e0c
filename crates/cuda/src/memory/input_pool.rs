//! The input pool: rows of device memory in a ring, each with pinned host memory and an event.
//!
//! Inputs are copied to the device as soon as they arrive, on their own stream, while earlier
//! batches compute. Rows that arrive in sequence are adjacent, so a batch is one range of rows, or
//! two at the end of the ring. All memory is allocated with the pool; a pool slot only marks rows
//! as used. Inputs in the pinned host pool are copied from there, others through the pinned memory
//! of their rows.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use super::MemoryServices;
use crate::driver::{CountedResource, DeviceBuffer, Event, PinnedBuffer, ResourceKind, Stream};
use crate::error::CudaError;
use crate::memory::input_copier::InputCopier;
use crate::memory::write_inputs;

/// Device memory of a pool, at most; it uses as much on the host.
const MAX_POOL_BYTES: usize = 160 << 20;

/// Rows of a pool, at most.
const MAX_ROWS: usize = 256;

/// A pool with fewer rows is not made.
const MIN_ROWS: usize = 8;

/// Pinned memory that is allocated with one call, for whole rows: other calls of the driver wait
/// for it, half a millisecond a MiB. Twice that for a few rows, which one request may have.
const CHUNK_BYTES: usize = 4 << 20;
const ROWS_OF_REQUEST: usize = 8;

/// Rows of one chunk, in each of which a row has at most `row_bytes`.
fn rows_of_chunk(row_bytes: usize) -> usize {
    let row_bytes = row_bytes.max(1);
    let few = ROWS_OF_REQUEST.min(2 * CHUNK_BYTES / row_bytes);
    (CHUNK_BYTES / row_bytes).max(few).clamp(1, MAX_ROWS)
}

/// Which rows are in use.
#[derive(Debug)]
struct RowAllocator {
    used: Vec<bool>,
    /// The rows of a request are in one chunk of so many rows.
    chunk: usize,
    /// Where the search for free rows begins: behind those taken last.
    next: usize,
    /// Copies enqueued so far.
    copies: u64,
}

impl RowAllocator {
    fn new(count: usize, chunk: usize) -> RowAllocator {
        RowAllocator { used: vec![false; count], chunk, next: 0, copies: 0 }
    }

    /// Takes `rows` adjacent rows, if there are any.
    fn take(&mut self, rows: usize) -> Option<usize> {
        let fits = |first: &usize| {
            let run = self.used.get(*first..*first + rows);
            first % self.chunk + rows <= self.chunk && run.is_some_and(|run| !run.contains(&true))
        };
        let first = (self.next..self.used.len()).chain(0..self.next).find(fits)?;
        self.used[first..first + rows].fill(true);
        self.next = (first + rows) % self.used.len();
        Some(first)
    }

    fn give(&mut self, first: usize, rows: usize) {
        self.used[first..first + rows].fill(false);
    }
}

/// The pool of one model for inputs whose rows have these sizes.
pub(crate) struct InputPool {
    row_bytes: Vec<usize>,
    rings: Vec<DeviceBuffer>,
    /// Per input: the chunks of its rows.
    host: Vec<Vec<PinnedBuffer>>,
    /// Rows of a chunk.
    chunk: usize,
    /// Per row: the copy of the slot that begins there is done.
    events: Vec<Event>,
    rows_in_use: Mutex<RowAllocator>,
    stream: Arc<Stream>,
    input_copier: Arc<InputCopier>,
    _counted: CountedResource,
}

/// Rows of a pool that hold one request's inputs.
pub(crate) struct PoolSlot {
    pool: Arc<InputPool>,
    first: usize,
    rows: usize,
    /// Number of the copy to the device; `None` when there was none.
    copy: Option<u64>,
    /// The inputs in the pinned host pool; empty when they are in the memory of the rows.
    pooled: Vec<Bytes>,
}

impl InputPool {
    /// A pool for rows of these sizes, one per input; `None` when they are too large. `wait` is
    /// called before each call that blocks others.
    pub(crate) fn new(
        memory: &MemoryServices,
        row_bytes: Vec<usize>,
        wait: impl Fn(),
    ) -> Result<Option<InputPool>, CudaError> {
        let row: usize = row_bytes.iter().sum();
        let count = (MAX_POOL_BYTES / row.max(1)).min(MAX_ROWS);
        if count < MIN_ROWS || row == 0 {
            return Ok(None);
        }
        let ring =
            |bytes: &usize| DeviceBuffer::zeroed(&memory.memory_stream, (bytes * count) as u64);
        let chunk = rows_of_chunk(row_bytes.iter().copied().max().unwrap_or(0)).min(count);
        let pinned = |bytes: &usize| {
            let rows = (0..count).step_by(chunk).map(|first| chunk.min(count - first));
            rows.map(|rows| {
                wait();
                PinnedBuffer::zeroed(memory.memory_stream.context(), bytes * rows)
            })
            .collect::<Result<Vec<_>, _>>()
        };
        Ok(Some(InputPool {
            rings: row_bytes.iter().map(ring).collect::<Result<_, _>>()?,
            host: row_bytes.iter().map(pinned).collect::<Result<_, _>>()?,
            chunk,
            events: (0..count)
                .map(|_| Event::untimed(memory.memory_stream.context()))
                .collect::<Result<_, _>>()?,
            rows_in_use: Mutex::new(RowAllocator::new(count, chunk)),
            stream: memory.input_stream.clone(),
            input_copier: memory.input_copier.clone(),
            _counted: memory
                .memory_stream
                .context()
                .resource_counts()
                .count(ResourceKind::InputPool, (row * count) as u64),
            row_bytes,
        }))
    }

    /// Device memory of the pool.
    pub(crate) fn bytes(&self) -> u64 {
        (self.row_bytes.iter().sum::<usize>() * self.events.len()) as u64
    }

    fn rows_in_use(&self) -> MutexGuard<'_, RowAllocator> {
        self.rows_in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes rows for `inputs` and copies them: to pinned memory unless they are in the pinned host
    /// pool (`pooled`), and to the device when `early`. `None` when no rows are free.
    pub(crate) fn take(
        self: &Arc<InputPool>,
        inputs: &[&Bytes],
        rows: usize,
        (early, pooled): (bool, bool),
        notify: &mut dyn FnMut(),
    ) -> Result<Option<PoolSlot>, CudaError> {
        let lengths = inputs.iter().map(|input| input.len());
        if !lengths.eq(self.row_bytes.iter().map(|bytes| bytes * rows)) {
            return Err(CudaError::Misuse("inputs do not have the sizes of their pool"));
        }
        let Some(first) = self.rows_in_use().take(rows) else { return Ok(None) };
        let mut slot = PoolSlot { pool: self.clone(), first, rows, copy: None, pooled: Vec::new() };
        match pooled {
            true => {
                notify();
                slot.pooled = inputs.iter().copied().cloned().collect();
            }
            false => slot.fill(inputs, notify),
        }
        if early {
            slot.copy_to_device()?;
        }
        Ok(Some(slot))
    }
}

impl Drop for InputPool {
    fn drop(&mut self) {
        // Copies of slots that were dropped may still be in flight.
        let _ = self.stream.synchronize();
    }
}

impl PoolSlot {
    /// Copies `inputs` to the pinned memory of the rows.
    fn fill(&mut self, inputs: &[&Bytes], notify: &mut dyn FnMut()) {
        let write = |index: usize, at: usize, part: &[u8]| {
            // SAFETY: these rows are inside the buffer and belong to this slot; the result of a
            // copy that an earlier owner enqueued is no longer used.
            unsafe {
                std::ptr::copy_nonoverlapping(part.as_ptr(), self.row(index).add(at), part.len())
            };
        };
        write_inputs(inputs, write, notify);
    }

    fn copy_to_device(&mut self) -> Result<(), CudaError> {
        let pool = &self.pool;
        // Held during the calls, so that copies are numbered in the order of the stream.
        let mut rows_in_use = pool.rows_in_use();
        for (index, bytes) in pool.row_bytes.iter().enumerate() {
            // SAFETY: both sides are this slot's rows, which nothing else writes; the pool drains
            // its stream before it is dropped.
            unsafe {
                let (to, from) = (self.ring(index), self.host(index));
                pool.input_copier.copy_in(&pool.stream, to, from, bytes * self.rows)
            }?;
        }
        pool.events[self.first].record(&pool.stream)?;
        rows_in_use.copies += 1;
        self.copy = Some(rows_in_use.copies);
        Ok(())
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Number of its copy, if one was enqueued.
    pub(crate) fn copy(&self) -> Option<u64> {
        self.copy
    }

    /// The event behind its copy.
    pub(crate) fn copy_event(&self) -> &Event {
        &self.pool.events[self.first]
    }

    /// Device address of its rows of input `index`.
    pub(crate) fn ring(&self, index: usize) -> u64 {
        let pool = &self.pool;
        pool.rings[index].address() + (self.first * pool.row_bytes[index]) as u64
    }

    /// Host address of its rows of input `index`.
    pub(crate) fn host(&self, index: usize) -> *const u8 {
        self.pooled.get(index).map_or_else(|| self.row(index).cast_const(), |raw| raw.as_ptr())
    }

    /// Pinned memory of the rows for input `index`.
    fn row(&self, index: usize) -> *mut u8 {
        let (chunk, row) = (self.first / self.pool.chunk, self.first % self.pool.chunk);
        let chunk = &self.pool.host[index][chunk];
        // SAFETY: the row is inside the chunk, and so are those behind it of the same slot.
        unsafe { chunk.as_ptr().add(row * self.pool.row_bytes[index]) }
    }

    /// Whether `next` is adjacent, and both are on the device or neither is.
    pub(crate) fn is_before(&self, next: &PoolSlot) -> bool {
        let together = match (self.copy, next.copy) {
            (Some(_), Some(_)) => true,
            (None, None) => {
                let same_chunk = !next.first.is_multiple_of(self.pool.chunk);
                self.pooled.is_empty() && next.pooled.is_empty() && same_chunk
            }
            _ => false,
        };
        together && Arc::ptr_eq(&self.pool, &next.pool) && self.first + self.rows == next.first
    }
}

impl Drop for PoolSlot {
    fn drop(&mut self) {
        self.pool.rows_in_use().give(self.first, self.rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_taken_around_the_ring() {
        let mut rows_in_use = RowAllocator::new(5, 5);
        let taken: Vec<_> = (0..4).map(|_| rows_in_use.take(1)).collect();
        assert_eq!(taken, [Some(0), Some(1), Some(2), Some(3)]);
        assert_eq!(rows_in_use.take(2), None, "rows of one request are side by side");
        rows_in_use.give(0, 1);
        assert_eq!((rows_in_use.take(1), rows_in_use.take(1)), (Some(4), Some(0)));
        assert_eq!(rows_in_use.take(1), None, "full");
        rows_in_use.give(2, 1);
        rows_in_use.give(1, 1);
        assert_eq!(rows_in_use.take(2), Some(1), "what was given back out of turn is found");
    }

    #[test]
    fn slots_never_share_rows() {
        let mut random = base::Random::new(5);
        let (mut rows_in_use, mut held) = (RowAllocator::new(16, 6), Vec::new());
        for _ in 0..20_000 {
            let rows = 1 + random.below(4) as usize;
            if random.below(2) == 0 && !held.is_empty() {
                let (first, rows) = held.swap_remove(random.below(held.len() as u64) as usize);
                rows_in_use.give(first, rows);
            } else if let Some(first) = rows_in_use.take(rows) {
                let apart = |(other, count): &(usize, usize)| {
                    first + rows <= *other || other + count <= first
                };
                assert!(first + rows <= 16 && held.iter().all(apart));
                assert_eq!(first / 6, (first + rows - 1) / 6, "in one chunk");
                held.push((first, rows));
            }
        }
    }

    #[test]
    fn chunks_hold_a_request_of_a_few_rows_and_are_not_large() {
        assert_eq!(rows_of_chunk(602_112), 8);
        assert_eq!(rows_of_chunk(1), MAX_ROWS);
        assert_eq!(rows_of_chunk(20 << 20), 1);
        for row in [1, 1000, 602_112, 1 << 20, 3 << 20, 4 << 20, 8 << 20] {
            assert!(row * rows_of_chunk(row) <= 2 * CHUNK_BYTES, "{row}");
        }
    }
}
