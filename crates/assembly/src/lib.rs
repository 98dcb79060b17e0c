//! Puts devices, compiler, loaders and servers together, for the commands of `atoll` and for its
//! benchmarks.
//!
//! The other crates know each other only through traits: a node runs any [`device::Device`], a
//! server any [`server::ModelLoader`], a backend any [`cluster::backend::Host`]. Here these are
//! connected, from the arguments that commands share ([`DeviceArgs`]) to a running device group
//! ([`device_group::open_device_group`]) or backend ([`backend::RunningBackend`]).

pub mod backend;
mod compile;
pub mod demo_model;
mod device_args;
pub mod device_group;
mod devices;
mod disk_loader;
mod failure;
mod files;
pub mod kernel_library;
mod load_checks;
mod memory_available;
pub mod model_check;
pub mod progress;
pub mod sample_inputs;
mod sandbox;
mod task_runner;
pub mod value_parsers;

pub use compile::{
    CheckedPlans, compile_bytes, compile_file, compile_file_with_outputs, compile_file_with_sizes,
};
pub use device_args::{DeviceArgs, DeviceSettings, PrecisionArg};
pub use devices::{open_device, open_gpu, open_gpu_with, with_host};
pub use disk_loader::{DiskLoader, load_file};
pub use failure::Failure;
pub use files::{read_file, write_file};
pub use task_runner::TaskRunner;

/// An async runtime for sockets; devices compute on threads of their own.
///
/// # Errors
/// When the system gives no threads.
pub fn tokio_runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(Failure::failed)
}
