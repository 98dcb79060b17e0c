//! Measures how soon RT blocks run, and how soon they run on every SM, while best effort is
//! enqueued.
//!
//! The probe is an RT launch of one block per SM, each with so much shared memory that no other
//! block with shared memory fits next to it. The first block writes a host word, and so does the
//! last one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use device::{DeviceError, Queue};
use model::gpu::{Kernel, KernelFacts};

use crate::CudaDevice;
use crate::compile::kernel_cache::LoadedKernel;
use crate::compile::kernel_text::KernelClass;
use crate::driver::{DeviceBuffer, LaunchShape, PinnedWord, Priority, Stream};
use crate::error::CudaError;
use crate::services::DeviceServices;

/// Three addresses and two words.
const ARGS_BYTES: usize = 32;

/// Shared memory of a block: more than half of what an SM has on every supported GPU.
const SHARED_BYTES: u32 = 96 << 10;

/// A probe that takes longer counts as stuck.
const TIMEOUT: Duration = Duration::from_secs(10);

const SOURCE: &str = r#"
struct ProbeArgs {
    u32* first;
    u32* all;
    u32* count;
    u32 round, blocks;
};
struct Probe {
    using Args = ProbeArgs;
    static constexpr int kThreads = 128, kShared = 96 << 10, kBlocks = 1;
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(const Args& a, int, unsigned char* shared,
                                                YieldPoint&, const Dependency&)
    {
        if (threadIdx.x == 0) {
            shared[0] = 1;
            *(volatile u32*)a.first = a.round;
            if (atomicAdd(a.count, 1) + 1 == a.round * a.blocks) *(volatile u32*)a.all = a.round;
        }
        return true;
    }
};
"#;

pub(crate) fn kernel() -> Kernel {
    Kernel::new(KernelFacts {
        source: format!("#include \"base.cuh\"\nusing namespace tiles;\n{SOURCE}"),
        expression: "Probe".to_string(),
        threads: 128,
        shared_bytes: SHARED_BYTES,
        args_bytes: ARGS_BYTES as u32,
    })
}

/// When the blocks of one probe ran, since the preemption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartTimes {
    /// The first block.
    pub first: Duration,
    /// All blocks, one on every SM.
    pub all: Duration,
}

/// A launch that reports when it runs.
pub struct StartProbe {
    services: DeviceServices,
    kernel: Arc<LoadedKernel>,
    stream: Stream,
    first: PinnedWord,
    all: PinnedWord,
    count: DeviceBuffer,
    round: u32,
}

impl CudaDevice {
    /// A probe of this device.
    pub fn start_probe(&self) -> Result<StartProbe, DeviceError> {
        StartProbe::new(self.services())
    }
}

impl StartProbe {
    fn new(services: &DeviceServices) -> Result<StartProbe, DeviceError> {
        let request = (kernel(), KernelClass::RealTime);
        let mut kernels =
            services.compile.kernels.get(std::slice::from_ref(&request), &|_, _| {})?;
        let kernel = kernels
            .remove(&request)
            .ok_or_else(|| DeviceError::BadPlan("the probe was not compiled".to_string()))?;
        let make = || {
            let context = services.device.context();
            Ok(StartProbe {
                kernel,
                stream: Stream::new(context, Priority::High)?,
                first: PinnedWord::new(context)?,
                all: PinnedWord::new(context)?,
                count: DeviceBuffer::zeroed(&services.memory.memory_stream, 64)?,
                round: 0,
                services: services.clone(),
            })
        };
        let probe = make().map_err(|err| services.device.error(err))?;
        services.memory.memory_stream.synchronize().map_err(|err| services.device.error(err))?;
        Ok(probe)
    }

    /// Preempts `queues` and launches the probe at once, as real time does.
    pub fn fire(&mut self, queues: &[&dyn Queue]) -> Result<StartTimes, DeviceError> {
        self.services.device.check_healthy()?;
        self.round += 1;
        let began = Instant::now();
        let _call = self.services.preemption.driver_backoff.enter_driver();
        self.services
            .preemption
            .epoch_counters
            .batch(|| queues.iter().for_each(|queue| queue.preempt()));
        self.launch().map_err(|err| self.services.device.error(err))?;
        self.services.preemption.epoch_counters.flush();
        let first = self.wait(&self.first, began)?;
        let all = self.wait(&self.all, began)?;
        Ok(StartTimes { first, all })
    }

    fn launch(&self) -> Result<(), CudaError> {
        let blocks = self.services.device.target().multiprocessors.max(1);
        let mut args = [0; ARGS_BYTES];
        args[0..8].copy_from_slice(&self.first.device_address().to_le_bytes());
        args[8..16].copy_from_slice(&self.all.device_address().to_le_bytes());
        args[16..24].copy_from_slice(&self.count.address().to_le_bytes());
        args[24..28].copy_from_slice(&self.round.to_le_bytes());
        args[28..32].copy_from_slice(&blocks.to_le_bytes());
        let shape = LaunchShape {
            grid: blocks,
            threads: 128,
            shared: SHARED_BYTES,
            cluster: 1,
            dependent: false,
        };
        // SAFETY: the arguments have the layout of `ProbeArgs`, and what they point to lives as
        // long as this probe, which waits for the last block of every launch.
        unsafe { self.stream.launch(self.kernel.function(), shape, &[&args]) }
    }

    fn wait(&self, word: &PinnedWord, began: Instant) -> Result<Duration, DeviceError> {
        while word.load() != self.round {
            std::hint::spin_loop();
            if began.elapsed() > TIMEOUT {
                return Err(DeviceError::Faulted {
                    device: self.services.device.info.name.clone(),
                    reason: "the probe does not run".to_string(),
                });
            }
        }
        Ok(began.elapsed())
    }
}

impl Drop for StartProbe {
    fn drop(&mut self) {
        // The words must outlive a launch that is still to run.
        let _ = self.stream.synchronize();
    }
}
