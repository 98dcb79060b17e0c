//! Conformance of CUDA devices beyond that of every device: the input copier copies what the copy
//! engine copies, and the SM partition confines its work.

use std::collections::BTreeSet;
use std::sync::Arc;

use base::Random;
use device::conformance::{Case, Verdict};
use model::gpu::{Kernel, KernelFacts};

use crate::compile::kernel_cache::LoadedKernel;
use crate::compile::kernel_text::KernelClass;
use crate::device::CudaDevice;
use crate::driver::{DeviceBuffer, LaunchShape, PinnedBuffer, Priority, Stream};
use crate::error::CudaError;
use crate::memory::input_copier::InputCopier;
use crate::services::DeviceServices;

/// An address and a number of nanoseconds.
const ARGS_BYTES: usize = 16;

/// Blocks per SM and the time that each runs, so that blocks are spread over all SMs.
const BLOCKS_EACH: u32 = 4;
const STAY_NS: u64 = 20_000;

const SOURCE: &str = r#"
struct SmLocatorArgs {
    u32* seen;
    u64 stay_ns;
};
struct SmLocator {
    using Args = SmLocatorArgs;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;
    static __device__ __forceinline__ u64 now()
    {
        u64 ns;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
        return ns;
    }
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(const Args& a, int t, unsigned char*,
                                                YieldPoint&, const Dependency&)
    {
        u32 multiprocessor;
        asm volatile("mov.u32 %0, %smid;" : "=r"(multiprocessor));
        if (threadIdx.x == 0) a.seen[t] = multiprocessor;
        for (u64 began = now(); now() - began < a.stay_ns;) {}
        return true;
    }
};
"#;

impl CudaDevice {
    /// Checks this device. Nothing else may use it meanwhile.
    pub fn conformance_cases(&self) -> Vec<Case> {
        let services = self.services();
        let case = |name: &str, outcome: Result<Option<String>, String>| Case {
            name: name.to_string(),
            verdict: match outcome {
                Ok(None) => Verdict::Passed,
                Ok(Some(why)) => Verdict::Skipped(why),
                Err(why) => Verdict::Failed(why),
            },
        };
        vec![
            case(
                "the kernel for inputs copies what the copy engine does",
                input_copier_matches_copy_engine(services),
            ),
            case(
                "work in the partition keeps to its multiprocessors",
                partition_confines(services),
            ),
        ]
    }
}

fn input_copier_matches_copy_engine(services: &DeviceServices) -> Result<Option<String>, String> {
    let text_of = |err: CudaError| err.to_string();
    let input_copier =
        InputCopier::always(&services.compile.kernels).map_err(|err| err.to_string())?;
    let stream = Stream::new(services.device.context(), Priority::High).map_err(text_of)?;
    let mut random = Random::new(17);
    for length in [1, 15, 16, 17, 4096, 16_384, 16_400, 602_112, 602_119, 4 << 20] {
        for offset in [0, 16, 4] {
            let bytes = length + offset;
            let mut host =
                PinnedBuffer::zeroed(services.device.context(), bytes).map_err(text_of)?;
            host.as_mut_slice().iter_mut().for_each(|byte| *byte = random.below(256) as u8);
            let back = PinnedBuffer::zeroed(services.device.context(), bytes).map_err(text_of)?;
            let memory = DeviceBuffer::zeroed(&services.memory.memory_stream, bytes as u64 + 16);
            let memory = memory.map_err(text_of)?;
            services.memory.memory_stream.synchronize().map_err(text_of)?;
            // SAFETY: all three buffers are that long and live until the stream is idle; bytes
            // before the offset stay zero.
            unsafe {
                let (to, from) = (memory.address() + offset as u64, host.as_ptr().add(offset));
                input_copier.copy_in(&stream, to, from, length).map_err(text_of)?;
                stream.copy_out(back.as_ptr(), memory.address(), bytes).map_err(text_of)?;
            }
            stream.synchronize().map_err(text_of)?;
            let (want, got) = (&host.as_slice()[offset..], &back.as_slice()[offset..]);
            if want != got || back.as_slice()[..offset].iter().any(|byte| *byte != 0) {
                let at = want.iter().zip(got).position(|(want, got)| want != got);
                return Err(format!("{length} bytes at {offset} differ from byte {at:?} on"));
            }
        }
    }
    Ok(None)
}

fn partition_confines(services: &DeviceServices) -> Result<Option<String>, String> {
    let Some(partition) = &services.recorder.partition else {
        return Ok(Some("it was opened without a partition".to_string()));
    };
    let text_of = |err: CudaError| err.to_string();
    let kernel = loaded_kernel(services)?;
    let high = Stream::new(services.device.context(), Priority::High).map_err(text_of)?;
    let inside = Stream::in_partition(services.device.context(), partition).map_err(text_of)?;
    let everywhere = seen_from(services, &kernel, &high).map_err(text_of)?;
    let (all, allowed) = (everywhere.len(), partition.multiprocessors() as usize);
    if all <= allowed {
        return Err(format!("{all} multiprocessors were used outside of a partition of {allowed}"));
    }
    let mut used = BTreeSet::new();
    for _ in 0..10 {
        used.extend(seen_from(services, &kernel, &inside).map_err(text_of)?);
    }
    match used.len() == allowed {
        true => Ok(None),
        false => Err(format!("{} multiprocessors were used, not {allowed}: {used:?}", used.len())),
    }
}

pub(crate) fn kernel() -> Kernel {
    Kernel::new(KernelFacts {
        source: format!("#include \"base.cuh\"\nusing namespace tiles;\n{SOURCE}"),
        expression: "SmLocator".to_string(),
        threads: 128,
        shared_bytes: 0,
        args_bytes: ARGS_BYTES as u32,
    })
}

fn loaded_kernel(services: &DeviceServices) -> Result<Arc<LoadedKernel>, String> {
    let request = (kernel(), KernelClass::RealTime);
    let made = services.compile.kernels.get(std::slice::from_ref(&request), &|_, _| {});
    let kernel = made.map_err(|err| err.to_string())?.remove(&request);
    kernel.ok_or_else(|| "the kernel was not compiled".to_string())
}

/// The SMs on which blocks launched on `stream` run.
fn seen_from(
    services: &DeviceServices,
    kernel: &LoadedKernel,
    stream: &Stream,
) -> Result<BTreeSet<u32>, CudaError> {
    let blocks = services.device.target().multiprocessors.max(1) * BLOCKS_EACH;
    let bytes = blocks as usize * size_of::<u32>();
    let seen = DeviceBuffer::zeroed(&services.memory.memory_stream, bytes as u64)?;
    let host = PinnedBuffer::zeroed(services.device.context(), bytes)?;
    services.memory.memory_stream.synchronize()?;
    let mut args = [0; ARGS_BYTES];
    args[0..8].copy_from_slice(&seen.address().to_le_bytes());
    args[8..16].copy_from_slice(&STAY_NS.to_le_bytes());
    let shape = LaunchShape { grid: blocks, threads: 128, shared: 0, cluster: 1, dependent: false };
    // SAFETY: the arguments have the layout of `SmLocatorArgs`; both buffers have one word per
    // block and live until the stream is idle.
    unsafe {
        stream.launch(kernel.function(), shape, &[&args])?;
        stream.copy_out(host.as_ptr(), seen.address(), bytes)?;
    }
    stream.synchronize()?;
    let text_of = host.as_slice().chunks_exact(size_of::<u32>());
    Ok(text_of.map(|word| u32::from_le_bytes(word.try_into().unwrap_or_default())).collect())
}
