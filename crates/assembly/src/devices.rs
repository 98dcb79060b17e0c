//! Opens one device.

use std::path::PathBuf;
use std::sync::Arc;

use compiler::gpu::GpuCompiler;
use cpu::{CpuDevice, CpuOptions};
use cuda::{CudaDevice, CudaOptions};
use device::Device;
use device::hybrid::HybridDevice;

use crate::compile::CpuEvaluator;
use crate::device_args::DeviceArgs;
use crate::failure::Failure;
use crate::kernel_library;

/// Opens the device that `args` name.
///
/// # Errors
/// When there is no such device or it cannot be used.
pub fn open_device(args: &DeviceArgs) -> Result<Arc<dyn Device>, Failure> {
    if args.device.starts_with("cuda") {
        return Ok(Arc::new(with_host(Arc::new(open_gpu(args)?), args)));
    }
    match args.device.as_str() {
        "cpu" => Ok(Arc::new(open_cpu(args))),
        other => Err(Failure::usage(format!(
            "there is no device '{other}'; there are: cpu, and cuda:N for the N-th GPU; \
             only atoll serve takes several"
        ))),
    }
}

fn open_cpu(args: &DeviceArgs) -> CpuDevice {
    let settings = &args.settings;
    let queues = usize::from(settings.cpu_queues);
    CpuDevice::new(CpuOptions { threads: settings.threads, queues, ..CpuOptions::default() })
}

/// `gpu` with this machine's CPU for the steps that have no GPU kernel.
pub fn with_host(gpu: Arc<CudaDevice>, args: &DeviceArgs) -> HybridDevice {
    HybridDevice::new(gpu, Arc::new(open_cpu(args)))
}

/// Opens the GPU that `args` name, with weights that stay on the device.
///
/// # Errors
/// When there is no such GPU or it cannot be used.
pub fn open_gpu(args: &DeviceArgs) -> Result<CudaDevice, Failure> {
    open_gpu_with(args, |_| {})
}

/// Opens the GPU that `args` name, with further options that `set` changes.
///
/// # Errors
/// When there is no such GPU or it cannot be used.
pub fn open_gpu_with(
    args: &DeviceArgs,
    set: impl FnOnce(&mut CudaOptions),
) -> Result<CudaDevice, Failure> {
    let number = args.device.strip_prefix("cuda:").and_then(|number| number.parse().ok());
    let number: usize = number.ok_or_else(|| {
        Failure::usage(format!(
            "'{}' is no GPU; the first one is cuda:0, and only atoll serve takes several or \
             parts of one",
            args.device
        ))
    })?;
    let mut gpus = open_gpu_parts(args, number, 1, set)?;
    gpus.pop().ok_or_else(|| Failure::failed("no GPU was opened"))
}

/// Opens GPU number `ordinal`, divided into `parts` devices.
pub(crate) fn open_gpu_parts(
    args: &DeviceArgs,
    ordinal: usize,
    parts: usize,
    set: impl FnOnce(&mut CudaOptions),
) -> Result<Vec<CudaDevice>, Failure> {
    let settings = &args.settings;
    let mut options = CudaOptions {
        precision: settings.precision.into(),
        cache_dir: settings.kernel_cache.clone().or_else(default_cache),
        kernel_library: settings.kernel_library.clone().or_else(kernel_library::beside_binary),
        toolkit: settings.cuda_toolkit.clone(),
        chain_length: usize::from(settings.best_effort_chain),
        partition_multiprocessors: settings.best_effort_sms,
        slow_call: std::time::Duration::from_micros(settings.slow_call_us),
        ..CudaOptions::default()
    };
    set(&mut options);
    let compiler = Arc::new(GpuCompiler::new(Some(Arc::new(CpuEvaluator::default()))));
    let refused = |err| Failure::usage(format!("cuda:{ordinal}: {err}"));
    match parts {
        1 => Ok(vec![CudaDevice::open(ordinal, options, compiler).map_err(refused)?]),
        _ => CudaDevice::open_parts(ordinal, parts, options, compiler).map_err(refused),
    }
}

/// `atoll` in the user's cache folder, if there is one.
fn default_cache() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let folder = match set("XDG_CACHE_HOME") {
        Some(folder) => PathBuf::from(folder),
        None => PathBuf::from(set("HOME")?).join(".cache"),
    };
    Some(folder.join("atoll"))
}
