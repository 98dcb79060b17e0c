//! The input copier: a kernel that copies inputs to the device while weights load.
//!
//! All copies to a GPU share one copy engine, which stays with a stream that has copies enqueued
//! for milliseconds before it turns to another. A kernel that reads host memory itself shares only
//! the bus with them. While no weights load, the engine is better: it needs no SM.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use device::DeviceError;
use model::gpu::{Kernel, KernelFacts};

use crate::compile::kernel_cache::{KernelCache, LoadedKernel};
use crate::compile::kernel_text::KernelClass;
use crate::driver::{LaunchShape, Stream};
use crate::error::CudaError;

/// Two addresses and a length.
const ARGS_BYTES: usize = 24;

/// Threads of a block, and bytes it copies: four vectors per thread.
const THREADS: u32 = 256;
const BLOCK_BYTES: u64 = 16 << 10;

/// Larger inputs use the copy engine: they would occupy the SMs for long.
const MAX_COPY_BYTES: usize = 4 << 20;

/// Required alignment of both sides.
const VECTOR_BYTES: u64 = 16;

const SOURCE: &str = r#"
struct InputCopyArgs {
    unsigned char* to;
    const unsigned char* from;
    unsigned long long bytes;
};
struct InputCopy {
    using Args = InputCopyArgs;
    static constexpr int kThreads = 256, kShared = 0, kBlocks = 1, kVectors = 4;
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(const Args& a, int t, unsigned char*,
                                                YieldPoint&, const Dependency& dependency)
    {
        unsigned long long first = ((unsigned long long)t * kThreads * kVectors + threadIdx.x) * 16;
        uint4 v[kVectors];
        dependency.wait();
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            unsigned long long at = first + i * kThreads * 16;
            if (at + 16 <= a.bytes) v[i] = __ldcv((const uint4*)(a.from + at));
        }
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            unsigned long long at = first + i * kThreads * 16;
            if (at + 16 <= a.bytes) {
                *(uint4*)(a.to + at) = v[i];
            } else {
                for (; at < a.bytes; ++at) a.to[at] = *(const volatile unsigned char*)(a.from + at);
            }
        }
        return true;
    }
};
"#;

pub(crate) fn kernel() -> Kernel {
    Kernel::new(KernelFacts {
        source: format!("#include \"base.cuh\"\nusing namespace tiles;\n{SOURCE}"),
        expression: "InputCopy".to_string(),
        threads: THREADS,
        shared_bytes: 0,
        args_bytes: ARGS_BYTES as u32,
    })
}

/// Copies inputs of one device.
pub(crate) struct InputCopier {
    kernel: Option<Arc<LoadedKernel>>,
    /// Loads of weights in flight.
    loads: Arc<AtomicUsize>,
}

impl InputCopier {
    /// A copier that uses its kernel while `loads` is not zero; it has none where weights are never
    /// loaded on demand.
    pub(crate) fn new(
        kernels: &KernelCache,
        loads: Arc<AtomicUsize>,
        weights_on_demand: bool,
    ) -> Result<InputCopier, DeviceError> {
        if !weights_on_demand {
            return Ok(InputCopier { kernel: None, loads });
        }
        let request = (kernel(), KernelClass::RealTime);
        let mut made = kernels.get(std::slice::from_ref(&request), &|_, _| {})?;
        Ok(InputCopier { kernel: made.remove(&request), loads })
    }

    /// A copier that always uses its kernel where it can.
    pub(crate) fn always(kernels: &KernelCache) -> Result<InputCopier, DeviceError> {
        InputCopier::new(kernels, Arc::new(AtomicUsize::new(1)), true)
    }

    /// Whether weights load now.
    fn weights_are_loading(&self) -> bool {
        self.loads.load(Ordering::Relaxed) > 0
    }

    /// Whether `bytes` can be copied from where they are as fast as from a staging buffer.
    pub(crate) fn copies_in_place(&self, bytes: &[u8]) -> bool {
        !self.weights_are_loading() || can_copy(0, bytes.as_ptr() as u64, bytes.len().max(1))
    }

    /// Enqueues a copy to the device from pinned memory.
    ///
    /// # Safety
    /// As for [`Stream::copy_in`]; and `from` is pinned.
    pub(crate) unsafe fn copy_in(
        &self,
        stream: &Stream,
        to: u64,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let kernel = self.kernel.as_ref().filter(|_| self.weights_are_loading());
        let Some(kernel) = kernel.filter(|_| can_copy(to, from as u64, bytes)) else {
            // SAFETY: the caller is responsible for both sides.
            return unsafe { stream.copy_in(to, from, bytes) };
        };
        let bytes = bytes as u64;
        let mut args = [0; ARGS_BYTES];
        args[0..8].copy_from_slice(&to.to_le_bytes());
        args[8..16].copy_from_slice(&(from as u64).to_le_bytes());
        args[16..24].copy_from_slice(&bytes.to_le_bytes());
        let shape = LaunchShape {
            grid: bytes.div_ceil(BLOCK_BYTES) as u32,
            threads: THREADS,
            shared: 0,
            cluster: 1,
            dependent: false,
        };
        // SAFETY: the arguments have the layout of `InputCopyArgs`; pinned memory has the same
        // address on the device, and the caller answers for both sides.
        unsafe { stream.launch(kernel.function(), shape, &[&args]) }
    }
}

/// Whether the kernel can copy these bytes, and is worth it.
fn can_copy(to: u64, from: u64, bytes: usize) -> bool {
    let aligned = (to | from).is_multiple_of(VECTOR_BYTES);
    aligned && (1..=MAX_COPY_BYTES).contains(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_only_aligned_inputs_of_limited_size() {
        assert!(can_copy(256, 4096, 602_112));
        assert!(can_copy(256, 4096, 3), "the last vector may be a part of one");
        assert!(!can_copy(257, 4096, 16) && !can_copy(256, 4104, 16));
        assert!(!can_copy(256, 4096, 0) && !can_copy(256, 4096, MAX_COPY_BYTES + 1));
    }

    #[test]
    fn block_copies_four_vectors_per_thread() {
        assert_eq!(BLOCK_BYTES, u64::from(THREADS) * 4 * VECTOR_BYTES);
    }
}
