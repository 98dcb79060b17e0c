//! Puts importer, compiler and devices together.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use compiler::CompileError;
use compiler::gpu::GpuCompiler;
use cpu::{CpuDevice, CpuOptions};
use cuda::{CudaDevice, CudaOptions};
use device::Device;
use graph::Limits;
use model::gpu::Precision;
use model::op::Op;
use model::{LaunchPlan, Tensor};

use crate::args::{DeviceArgs, PrecisionArg};
use crate::failure::Failure;

/// The device that `args` name.
pub(crate) fn open_device(args: &DeviceArgs) -> Result<Arc<dyn Device>, Failure> {
    if args.device.starts_with("cuda") {
        return Ok(Arc::new(open_gpu(args)?));
    }
    let settings = &args.settings;
    match args.device.as_str() {
        "cpu" => {
            let options =
                CpuOptions { threads: settings.threads, queues: usize::from(settings.cpu_queues) };
            Ok(Arc::new(CpuDevice::new(options)))
        }
        other => Err(Failure::usage(format!(
            "there is no device '{other}'; there are: cpu, and cuda:N for the N-th GPU; several at once are for atoll serve"
        ))),
    }
}

/// The GPU that `args` name, with weights that are there as long as their models.
pub(crate) fn open_gpu(args: &DeviceArgs) -> Result<CudaDevice, Failure> {
    open_gpu_with(args, |_| {})
}

/// The GPU that `args` name, with further options as `set` makes them.
pub(crate) fn open_gpu_with(
    args: &DeviceArgs,
    set: impl FnOnce(&mut CudaOptions),
) -> Result<CudaDevice, Failure> {
    let number = args.device.strip_prefix("cuda:").and_then(|number| number.parse().ok());
    let number: usize = number.ok_or_else(|| {
        Failure::usage(format!(
            "'{}' is no GPU; the first one is cuda:0, and several or parts of one are for atoll serve",
            args.device
        ))
    })?;
    let mut gpus = open_gpu_parts(args, number, 1, set)?;
    gpus.pop().ok_or_else(|| Failure::failed("no GPU was opened"))
}

/// The GPU `ordinal` in so many parts, each a device of its own.
pub(crate) fn open_gpu_parts(
    args: &DeviceArgs,
    ordinal: usize,
    parts: usize,
    set: impl FnOnce(&mut CudaOptions),
) -> Result<Vec<CudaDevice>, Failure> {
    let settings = &args.settings;
    let mut options = CudaOptions {
        precision: match settings.precision {
            PrecisionArg::F16 => Precision::F16,
            PrecisionArg::Bf16 => Precision::BF16,
            PrecisionArg::F32 => Precision::F32,
        },
        cache_dir: settings.kernel_cache.clone().or_else(default_cache),
        toolkit: settings.cuda_toolkit.clone(),
        chain_length: usize::from(settings.best_effort_chain),
        partition_multiprocessors: settings.best_effort_sms,
        ..CudaOptions::default()
    };
    set(&mut options);
    let compiler = Arc::new(GpuCompiler::new(Some(Arc::new(CpuEvaluator))));
    let refused = |err| Failure::usage(format!("cuda:{ordinal}: {err}"));
    match parts {
        1 => Ok(vec![CudaDevice::open(ordinal, options, compiler).map_err(refused)?]),
        _ => CudaDevice::open_parts(ordinal, parts, options, compiler).map_err(refused),
    }
}

/// `atoll` in the user's cache folder, where there is a user.
fn default_cache() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let folder = match set("XDG_CACHE_HOME") {
        Some(folder) => PathBuf::from(folder),
        None => PathBuf::from(set("HOME")?).join(".cache"),
    };
    Some(folder.join("atoll"))
}

/// Folds constants on the CPU device's kernels.
struct CpuEvaluator;

impl graph::Evaluator for CpuEvaluator {
    fn evaluate(&self, op: &Op, inputs: &[Option<Tensor>], outputs: usize) -> Option<Vec<Tensor>> {
        cpu::evaluate(op, inputs, outputs)
    }
}

/// The launch plan of the model in `path`.
pub(crate) fn compile_file(path: &Path) -> Result<LaunchPlan, CompileError> {
    compiler::compile_onnx_file(path, &Limits::default(), Some(&CpuEvaluator))
}

/// The launch plan of a model that is all in memory.
pub(crate) fn compile_bytes(bytes: &[u8]) -> Result<LaunchPlan, CompileError> {
    compiler::compile_onnx(bytes, Some(&CpuEvaluator))
}
