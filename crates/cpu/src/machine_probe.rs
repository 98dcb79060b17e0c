//! What bounds steps on this machine from below: measured, in about a quarter of a second.

use std::hint::black_box;
use std::time::{Duration, Instant};

use device::{CACHES, CacheLimit, MachineLimits, thread_priority};
use model::HostMemory;
use rten_simd::ops::{BitOps, NumOps};
use rten_simd::{Isa, Simd, SimdOp};

use crate::buffer::{self, Buffer};

/// Operands that are read again and again, of all threads together: what holds them is faster than
/// what holds the next ones. The last ones are in no cache of today's machines.
const SIZES: [usize; CACHES + 1] = [512 << 10, 4 << 20, 16 << 20, 256 << 20];
/// Time of one measurement, and how many there are of each kind; the fastest counts.
const TIME: Duration = Duration::from_millis(12);
const ROUNDS: usize = 4;
/// Sums beside each other: as many as hide how long one takes, and as registers hold.
const SUMS: usize = 12;
/// Additions to each sum in one call.
const DEPTH: usize = 4096;

/// Measures with so many threads, of low priority; `None` where there is not the memory for it.
pub(crate) fn measure(threads: usize, memory: &'static HostMemory) -> Option<MachineLimits> {
    let threads = threads.max(1);
    let numbers = SIZES[CACHES] / size_of::<f32>();
    let memory = buffer::with_memory(memory, || Buffer::filled(numbers, 1f32)).ok()?;
    let mut rates: Vec<f64> = SIZES.iter().map(|size| reading(threads, &memory, *size)).collect();
    // Another program may disturb one of them: a smaller cache is at least as fast.
    for at in (0..CACHES).rev() {
        rates[at] = rates[at].max(rates[at + 1]);
    }
    let cache = |at: usize| CacheLimit { bytes: SIZES[at] as u64, bytes_per_us: rates[at] };
    Some(MachineLimits {
        bytes_per_us: rates[CACHES],
        caches: std::array::from_fn(cache),
        flops_per_us: best(threads, &|_| {
            let (sum, lanes) = MulAdds.dispatch();
            black_box(sum);
            (MulAdds::COUNT * lanes * 2) as f64
        }),
        launch_us: 0.0,
    })
}

/// Bytes read in a microsecond when each thread reads its part of the first `size` bytes.
fn reading(threads: usize, memory: &[f32], size: usize) -> f64 {
    let part = size / size_of::<f32>() / threads;
    best(threads, &|thread| {
        let numbers = &memory[thread * part..][..part];
        black_box(Read { numbers }.dispatch());
        size_of_val(numbers) as f64
    })
}

/// What all threads do together in a microsecond; `work` says how much it has done.
fn best(threads: usize, work: &(dyn Fn(usize) -> f64 + Sync)) -> f64 {
    (0..ROUNDS).map(|_| together(threads, work)).fold(f64::MIN_POSITIVE, f64::max)
}

fn together(threads: usize, work: &(dyn Fn(usize) -> f64 + Sync)) -> f64 {
    let one = |thread: usize| {
        thread_priority::lower_computation();
        work(thread);
        let (started, mut done) = (Instant::now(), 0.0);
        while started.elapsed() < TIME {
            done += work(thread);
        }
        done / (started.elapsed().as_secs_f64() * 1e6)
    };
    std::thread::scope(|scope| {
        let one = &one;
        // Without a thread that cannot be started the others do less together.
        let start = |thread| {
            let named = std::thread::Builder::new().name("machine-probe".to_string());
            named.spawn_scoped(scope, move || one(thread)).ok()
        };
        let running: Vec<_> = (0..threads).filter_map(start).collect();
        running.into_iter().filter_map(|thread| thread.join().ok()).sum()
    })
}

/// Multiplications with an addition, from registers to registers.
struct MulAdds;

impl MulAdds {
    /// Vectors that one call computes.
    const COUNT: usize = SUMS * DEPTH;
}

impl SimdOp for MulAdds {
    /// A sum that depends on all of them, and the numbers in a vector.
    type Output = (f32, usize);

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) -> (f32, usize) {
        let ops = isa.f32();
        let (a, b) = (ops.splat(black_box(0.999)), ops.splat(black_box(1e-3)));
        let mut sums = [ops.splat(1.0); SUMS];
        for _ in 0..DEPTH {
            for sum in &mut sums {
                *sum = ops.mul_add(*sum, a, b);
            }
        }
        let total = sums.into_iter().fold(ops.zero(), |total, sum| ops.add(total, sum));
        (total.to_array().as_ref()[0], ops.len())
    }
}

/// Reads numbers in order.
struct Read<'a> {
    numbers: &'a [f32],
}

impl SimdOp for Read<'_> {
    type Output = f32;

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) -> f32 {
        const VECTORS: usize = 8;
        let ops = isa.f32();
        let mut sums = [ops.zero(); VECTORS];
        for numbers in self.numbers.chunks_exact(ops.len() * VECTORS) {
            let loaded: [I::F32; VECTORS] = ops.load_many(numbers);
            for (sum, x) in sums.iter_mut().zip(loaded) {
                *sum = ops.add(*sum, x);
            }
        }
        let total = sums.into_iter().fold(ops.zero(), |total, sum| ops.add(total, sum));
        total.to_array().as_ref()[0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_in_order() {
        let memory = HostMemory::process();
        let limits = measure(2, memory).expect("memory for the measurement");
        assert!(limits.flops_per_us > 1.0 && limits.bytes_per_us > 1.0, "{limits:?}");
        let rates: Vec<f64> = limits.caches.iter().map(|cache| cache.bytes_per_us).collect();
        assert!(rates.is_sorted_by(|a, b| a >= b) && rates[CACHES - 1] >= limits.bytes_per_us);
        assert!(limits.caches.is_sorted_by(|a, b| a.bytes < b.bytes));
    }
}
