//! Brings inputs to the device past weights that are on their way.
//!
//! All copies to a GPU share one engine, and it stays with a stream that has copies queued for milliseconds before it polls at
//! another. A kernel that reads the host's memory itself shares nothing with them but the wires. Where no weights are on their way the
//! engine is the better choice: it needs no multiprocessor.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use device::DeviceError;
use model::gpu::Kernel;

use crate::compile::kernel_cache::{KernelCache, LoadedKernel};
use crate::compile::kernel_text::KernelClass;
use crate::driver::{LaunchShape, Stream};
use crate::error::CudaError;

/// Two addresses and a length.
const ARGS_BYTES: usize = 24;

/// Threads of a block, and bytes it copies_in_place: four vectors a thread.
const THREADS: u32 = 256;
const BLOCK_BYTES: u64 = 16 << 10;

/// Larger inputs wait like everybody: they would hold the multiprocessors for long.
const MAX_COPY_BYTES: usize = 4 << 20;

/// What both sides must be aligned to.
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
    template <class Watch, class Gate>
    static __device__ __forceinline__ bool tile(const Args& a, int t, unsigned char*, Watch&, const Gate& gate)
    {
        unsigned long long first = ((unsigned long long)t * kThreads * kVectors + threadIdx.x) * 16;
        uint4 v[kVectors];
        gate.wait();
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
    Kernel {
        source: format!("#include \"base.cuh\"\nusing namespace tiles;\n{SOURCE}"),
        expression: "InputCopy".to_string(),
        threads: THREADS,
        shared_bytes: 0,
        args_bytes: ARGS_BYTES as u32,
    }
}

/// A device's way for inputs.
pub(crate) struct InputCopier {
    kernel: Option<Arc<LoadedKernel>>,
    /// Loads that are under way.
    loads: Arc<AtomicUsize>,
}

impl InputCopier {
    /// A input_copier that goes by how many `loads` are under way; where weights never are it has no kernel.
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

    /// One that copies_in_place whatever it can, as if weights were always on their way.
    pub(crate) fn always(kernels: &KernelCache) -> Result<InputCopier, DeviceError> {
        InputCopier::new(kernels, Arc::new(AtomicUsize::new(1)), true)
    }

    /// Whether weights are on their way now.
    fn weights_are_loading(&self) -> bool {
        self.loads.load(Ordering::Relaxed) > 0
    }

    /// Whether these bytes would come as soon from where they lie as from any other pinned memory.
    pub(crate) fn copies_in_place(&self, bytes: &[u8]) -> bool {
        !self.weights_are_loading() || can_copy(0, bytes.as_ptr() as u64, bytes.len().max(1))
    }

    /// Queues a copy to the device from memory that the device reaches.
    ///
    /// # Safety
    /// As for [`Stream::copy_in`]; and the host's side is pinned.
    pub(crate) unsafe fn copy_in(
        &self,
        stream: &Stream,
        to: u64,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let kernel = self.kernel.as_ref().filter(|_| self.weights_are_loading());
        let Some(kernel) = kernel.filter(|_| can_copy(to, from as u64, bytes)) else {
            // SAFETY: the caller answers for both sides.
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
        // SAFETY: the arguments have the layout of `InputCopyArgs`; pinned memory has the same address on the device, and the
        // caller answers for both sides.
        unsafe { stream.launch(kernel.function(0), shape, &[&args]) }
    }
}

/// Whether the kernel can bring these bytes, and is worth it.
fn can_copy(to: u64, from: u64, bytes: usize) -> bool {
    let aligned = (to | from).is_multiple_of(VECTOR_BYTES);
    aligned && (1..=MAX_COPY_BYTES).contains(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_aligned_and_not_large_is_carried() {
        assert!(can_copy(256, 4096, 602_112));
        assert!(can_copy(256, 4096, 3), "the last vector may be a part of one");
        assert!(!can_copy(257, 4096, 16) && !can_copy(256, 4104, 16));
        assert!(!can_copy(256, 4096, 0) && !can_copy(256, 4096, MAX_COPY_BYTES + 1));
    }

    #[test]
    fn a_block_brings_what_its_threads_hold() {
        assert_eq!(BLOCK_BYTES, u64::from(THREADS) * 4 * VECTOR_BYTES);
    }
}
