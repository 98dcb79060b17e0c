//! NVIDIA GPUs as a device: kernels compiled at run time, real-time work as CUDA graphs, best-effort work that leaves inside
//! a tile.
//!
//! Nothing of CUDA is needed to build this crate. On a machine without a driver [`CudaDevice::open`] says what is missing.
//!
//! The way of a model: a [`KernelCompiler`](device::KernelCompiler) turns a launch plan into a
//! [`GpuPlan`](model::gpu::GpuPlan) for one set of sizes; NVRTC compiles its kernels (`kernels`), weights are put on the
//! device once (`weights`), a run gets one block of memory with every address patched in (`layout`, `instance`). Queues whose
//! work is never told to leave launch the whole plan as one graph; the others a chain of steps at a time, which leave when
//! their run's `seats::Seat` passes the number they carry. A step that was left is done again, a very long one from the tiles
//! that are missing.

mod batch;
mod cargo;
mod carrier;
mod cubin_cache;
mod device;
mod driver;
mod error;
mod form;
mod fused;
mod holdings;
mod hub;
mod instance;
mod kernel_text;
mod kernels;
mod layout;
mod lending;
mod lowered;
mod nvml;
mod nvrtc;
mod pool;
mod probe;
mod process;
mod profile;
mod program;
mod promises;
mod queue;
mod quiet;
mod report;
mod seats;
mod task;
mod timeline;
mod toolkit;
mod traffic;
mod tuning;
mod weights;

#[cfg(test)]
#[path = "../tests/support/toy.rs"]
#[allow(dead_code, missing_docs)]
mod toy;

pub use crate::device::{CudaDevice, CudaOptions};
pub use error::{CudaError, OpenError};
pub use fused::fused_operators;
pub use holdings::Holdings;
pub use kernels::Progress;
pub use layout::run_bytes;
pub use nvml::Health;
pub use probe::{Start, StartProbe};
pub use process::{end_process, tune_allocator};
pub use profile::{
    ChoiceProfile, ClassTiming, PaddingBench, PaddingKernel, PaddingLaunch, PaddingOptions,
    PaddingPair, PaddingSlice, PaddingStep, PaddingTiming, PaddingWay, PairTiming, PlanProfile,
    ProfileOptions, StepProfile, Timing, WayTiming,
};
pub use queue::Polling;
pub use report::{EntryFacts, KernelReport, own_kernels};
pub use tuning::{Chosen, Tuning};
