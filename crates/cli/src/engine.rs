//! Puts importer, compiler and devices together.

use std::path::Path;
use std::sync::Arc;

use compiler::CompileError;
use cpu::{CpuDevice, CpuOptions};
use device::Device;
use graph::Limits;
use model::op::Op;
use model::{LaunchPlan, Tensor};

use crate::args::DeviceArgs;
use crate::failure::Failure;

/// The device that `args` name.
pub(crate) fn open_device(args: &DeviceArgs) -> Result<Arc<dyn Device>, Failure> {
    match args.device.as_str() {
        "cpu" => {
            let options =
                CpuOptions { threads: args.threads, queues: usize::from(args.cpu_queues) };
            Ok(Arc::new(CpuDevice::new(options)))
        }
        other => Err(Failure::usage(format!(
            "device '{other}' is not in this build; it has: cpu (--device cpu)"
        ))),
    }
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
