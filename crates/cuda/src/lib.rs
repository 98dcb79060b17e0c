//! NVIDIA GPUs as a device: kernels compiled at run time, real-time work as CUDA graphs, best-effort work that leaves inside
//! a tile.
//!
//! Nothing of CUDA is needed to build this crate. On a machine without a driver [`CudaDevice::open`] says what is missing.
//!
//! The way of a model: a [`KernelCompiler`](device::KernelCompiler) turns a launch plan into a
//! [`GpuPlan`](model::gpu::GpuPlan) for one set of sizes; NVRTC compiles its kernels (`kernels`), weights are put on the
//! device once (`weights`), a run gets one block of memory with every address patched in (`layout`, `instance`). Queues whose
//! work is never told to leave launch the whole plan as one graph; the others a chain of steps at a time, which leave when
//! their run's `epoch_counters::EpochCounter` passes the number they carry. A step that was left is done again, a very long one from the tiles
//! that are missing.

mod compile;
mod device;
mod device_context;
mod driver;
mod error;
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

pub use crate::device::CudaDevice;
pub use compile::kernel_cache::CompileProgress;
pub use compile::tuning::{TunedVariants, Tuning};
pub use driver::nvml::Health;
pub use driver::process::{end_process, tune_allocator};
pub use error::{CudaError, OpenError};
pub use measure::fused::fused_operators;
pub use measure::kernel_report::{EntryFacts, KernelReport, builtin_kernels};
pub use measure::padding::{
    PaddingBench, PaddingKernel, PaddingLaunch, PaddingOptions, PaddingPair, PaddingSlice,
    PaddingStep, PaddingTiming, PaddingWay, PairTiming, WayTiming,
};
pub use measure::profile::{
    ChoiceProfile, ClassTiming, PlanProfile, ProfileOptions, StepProfile, Timing,
};
pub use measure::start_probe::{StartProbe, StartTimes};
pub use memory::memory_report::MemoryReport;
pub use options::{CudaOptions, Polling};
pub use program::layout::run_bytes;
