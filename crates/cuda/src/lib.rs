//! NVIDIA GPUs as a device: kernels compiled at run time, RT work as CUDA graphs, best-effort work
//! that is preempted inside a tile.
//!
//! The crate builds without CUDA. On a machine without a driver [`CudaDevice::open`] reports what
//! is missing.
//!
//! # Where to find things
//! - A best-effort kernel is preempted in `preempt::epoch_counters`: `EpochCounter::preempt`
//!   increments the run's counter, `EpochCounters::flush` writes it to the device, and the kernel
//!   exits at its next yield point. `queue::run_state` finds the step at which it stopped.
//! - Weights are loaded and evicted in `memory::weights::loader` (`LoaderThread::load` and
//!   `LoaderThread::evict`).
//! - A model is loaded in `program` and compiled for one set of sizes in
//!   `program::specialization`. A run has its memory in `program::instance` and its inputs in
//!   `program::task`.
//! - RT runs are launched in `queue::real_time`, best effort in `queue::launches`.
//! - CUDA is called in `driver` only, and NVRTC in `compile::nvrtc`.
//!
//! # How a model runs
//! A [`KernelCompiler`](::device::KernelCompiler) lowers a launch plan to a
//! [`GpuPlan`](model::gpu::GpuPlan) for one set of sizes. NVRTC compiles its kernels (`compile`),
//! weights are packed once (`memory::weights`), and a run gets one block of memory with all
//! addresses patched into the arguments (`program::layout`). RT queues launch the whole program as
//! one graph. Best-effort queues launch a chain of steps at a time; its kernels exit when the run's
//! epoch counter passes the epoch they carry. A preempted step is computed again, a very long one
//! from the tiles that are not done.

mod absent_gpu;
mod compile;
mod device;
mod device_context;
mod driver;
mod error;
mod fault_injection;
mod large_blocks;
mod library_builder;
mod measure;
mod memory;
mod options;
mod preempt;
mod program;
mod queue;
mod services;

#[cfg(test)]
#[path = "../tests/support/toy.rs"]
#[allow(dead_code, missing_docs)]
mod toy;

/// Threads of `gpus` open GPUs that should have a processor each: two of each poll, for real time
/// and for best effort, one maps weights, and one makes slow driver calls for all.
pub fn lone_threads(gpus: usize) -> ::device::thread_placement::LoneThreads {
    ::device::thread_placement::LoneThreads { polling: 2 * gpus, driver: gpus + 1 }
}

pub use crate::absent_gpu::AbsentGpu;
pub use crate::device::CudaDevice;
pub use compile::kernel_cache::CompileProgress;
pub use compile::tuning::{TunedVariant, TunedVariants, Tuning};
pub use driver::is_refused;
pub use driver::nvml::Health;
pub use driver::process::{close_descriptors_on_exec, end_process, tune_allocator};
pub use error::{CudaError, OpenError};
pub use large_blocks::{Allocator, keep_large_blocks};
pub use library_builder::{KernelList, LibraryBuilder, capability_of, usual_targets};
pub use measure::kernel_report::{EntryFacts, KernelReport, builtin_kernels};
pub use measure::padding::{
    CoRunMethod, MethodTiming, PaddingBench, PaddingOptions, PaddingPair, PaddingTiming, PairTiming,
};
pub use measure::profile::{
    ChoiceProfile, ClassTiming, PlanProfile, ProfileOptions, StepProfile, Timing,
};
pub use measure::start_probe::{StartProbe, StartTimes};
pub use memory::memory_report::MemoryReport;
pub use options::{CudaOptions, Polling};
pub use program::layout::run_bytes;
pub use program::lowering::steps_without_kernel;
