//! Loops over memory on all threads of the pool, with yield points.
//!
//! Loop bodies are called through vtables, and threads take chunks from a common queue, so that the
//! machinery is compiled once per element type and not once per loop. The traits here exist beside
//! `Fn` because a vtable of `Fn` also holds the code for calls by value.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use smallvec::SmallVec;

use crate::kernel::KernelError;
use crate::yield_point;

/// Outputs with fewer elements are computed by one thread.
const PARALLEL: usize = 1 << 15;

/// Simple elements between two yield points: few enough for the slowest functions.
const PART: usize = 1 << 13;

/// Minimum elements of a part, whatever each costs: runs of memory must not become too short.
const MIN_PART: usize = 512;

/// Elements that a thread takes from the queue at least, unless that leaves others idle.
const MIN_TAKEN: usize = 1 << 12;

/// The first error of a loop's bodies. Bodies themselves cannot fail: most have no reason to.
#[derive(Default)]
pub(crate) struct Failure(OnceLock<KernelError>);

impl Failure {
    /// The value of `result`; keeps its error.
    pub(crate) fn check<T>(&self, result: Result<T, impl Into<KernelError>>) -> Option<T> {
        result.map_err(|error| self.0.set(error.into())).ok()
    }

    fn is_set(&self) -> bool {
        self.0.get().is_some()
    }

    /// The error that was kept.
    pub(crate) fn result(self) -> Result<(), KernelError> {
        self.0.into_inner().map_or(Ok(()), Err)
    }
}

/// The body of a loop over chunks; gets a chunk's position or number.
pub(crate) trait ChunkBody<T>: Sync {
    fn run(&self, index: usize, chunk: &mut [T]);
}

impl<T, F: Fn(usize, &mut [T]) + Sync> ChunkBody<T> for F {
    fn run(&self, index: usize, chunk: &mut [T]) {
        self(index, chunk);
    }
}

/// Runs `work` on `count` threads of the pool, the calling one among them.
fn on_threads(count: usize, work: &(dyn Fn() + Sync)) {
    let ended = AtomicUsize::new(0);
    let run = || {
        let _working = yield_point::start_work();
        work();
    };
    rayon::in_place_scope(|scope| {
        for _ in 1..count {
            scope.spawn(|_| {
                run();
                ended.fetch_add(1, Ordering::Release);
            });
        }
        run();
        yield_point::wait_for(|| ended.load(Ordering::Acquire) + 1 >= count);
    });
}

/// The most items that a thread takes at once.
const MAX_ITEMS: usize = 16;

/// Calls `body` with each item, on all threads.
pub(crate) fn for_each<I>(items: I, body: &(dyn Fn(I::Item) + Sync))
where
    I: ExactSizeIterator + Send,
{
    let threads = rayon::current_num_threads().min(items.len());
    if threads <= 1 {
        items.for_each(body);
        return;
    }
    // Few at a time, so that threads end together; several if there are many.
    let several = (items.len() / (threads * 8)).clamp(1, MAX_ITEMS);
    let items = Mutex::new(items);
    on_threads(threads, &|| {
        loop {
            // The lock is released before the body runs, which may park the thread.
            let taken: SmallVec<[I::Item; MAX_ITEMS]> = {
                let mut items = items.lock().unwrap_or_else(PoisonError::into_inner);
                items.by_ref().take(several).collect()
            };
            if taken.is_empty() {
                return;
            }
            taken.into_iter().for_each(body);
        }
    });
}

/// Like [`for_each`], for bodies that may fail: the first error is returned.
pub(crate) fn try_for_each<I>(
    items: I,
    body: &(dyn Fn(I::Item) -> Result<(), KernelError> + Sync),
) -> Result<(), KernelError>
where
    I: ExactSizeIterator + Send,
{
    let failure = Failure::default();
    for_each(items, &|item| {
        if !failure.is_set() {
            failure.check(body(item));
        }
    });
    failure.result()
}

/// Calls `body` with the number of each chunk of `size` elements and the chunk, on all threads.
pub(crate) fn in_chunks<T: Send>(data: &mut [T], size: usize, body: &dyn ChunkBody<T>) {
    if data.len() <= size || rayon::current_num_threads() == 1 {
        for (index, chunk) in data.chunks_mut(size).enumerate() {
            body.run(index, chunk);
        }
        return;
    }
    // Threads take several small chunks at once, so that they rarely wait for the queue.
    let chunks = data.len().div_ceil(size);
    let fair = chunks.div_ceil(rayon::current_num_threads() * 4);
    let group = (MIN_TAKEN / size).min(fair).max(1);
    for_each(data.chunks_mut(size * group).enumerate(), &|(number, several): (usize, &mut [T])| {
        for (index, chunk) in several.chunks_mut(size).enumerate() {
            body.run(number * group + index, chunk);
        }
    });
}

/// Runs `body` over pieces of `out`, on all threads if it is large. `body` gets the position of its
/// piece.
pub(crate) fn in_pieces<T: Send>(out: &mut [T], body: &dyn ChunkBody<T>) {
    in_weighted_pieces(out, 1, 1, body);
}

/// Like [`in_pieces`], with every piece a whole number of runs of `unit` elements.
pub(crate) fn in_aligned_pieces<T: Send>(out: &mut [T], unit: usize, body: &dyn ChunkBody<T>) {
    in_weighted_pieces(out, unit, 1, body);
}

/// Like [`in_aligned_pieces`], where each element costs as much as `weight` simple ones.
pub(crate) fn in_weighted_pieces<T: Send>(
    out: &mut [T],
    unit: usize,
    weight: usize,
    body: &dyn ChunkBody<T>,
) {
    let threads = rayon::current_num_threads();
    let work = out.len().saturating_mul(weight.max(1));
    if work < PARALLEL || threads == 1 || out.len() <= unit {
        in_parts(out, 0, unit, weight, body);
        return;
    }
    let least = (PARALLEL / 2 / weight.max(1)).max(1);
    let size = out.len().div_ceil(threads * 4).max(least).next_multiple_of(unit.max(1));
    in_chunks(out, size, &|index: usize, piece: &mut [T]| {
        in_parts(piece, index * size, unit, weight, body);
    });
}

/// Runs `body` over small parts of a piece that begins at `start`, with a yield point before each.
fn in_parts<T>(piece: &mut [T], start: usize, unit: usize, weight: usize, body: &dyn ChunkBody<T>) {
    if piece.is_empty() {
        body.run(start, piece);
        return;
    }
    let size = (PART / weight.max(1)).max(MIN_PART).next_multiple_of(unit.max(1));
    for (index, part) in piece.chunks_mut(size).enumerate() {
        yield_point::check();
        body.run(start + index * size, part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visits_every_element_once() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().expect("threads start");
        for (length, size) in [(0, 5), (3, 5), (1000, 7), (100_000, 1), (100_000, 9000)] {
            let mut data = vec![0usize; length];
            pool.install(|| {
                in_chunks(&mut data, size, &|index: usize, chunk: &mut [usize]| {
                    for (offset, x) in chunk.iter_mut().enumerate() {
                        *x += index * size + offset + 1;
                    }
                });
                in_weighted_pieces(&mut data, size, 3, &|start: usize, piece: &mut [usize]| {
                    assert_eq!(start % size, 0);
                    for (offset, x) in piece.iter_mut().enumerate() {
                        *x += start + offset + 1;
                    }
                });
            });
            assert!(data.iter().enumerate().all(|(index, &x)| x == 2 * (index + 1)));
        }
    }
}
