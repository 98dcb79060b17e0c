//! Compiles ONNX to launch plans, with the CPU's kernels for constant folding.

use std::path::Path;

use compiler::CompileError;
use graph::Limits;
use model::op::Op;
use model::{LaunchPlan, Tensor};

/// Folds constants on the CPU device's kernels.
pub(crate) struct CpuEvaluator;

impl graph::Evaluator for CpuEvaluator {
    fn evaluate(&self, op: &Op, inputs: &[Option<Tensor>], outputs: usize) -> Option<Vec<Tensor>> {
        cpu::evaluate(op, inputs, outputs)
    }
}

/// The launch plan of the model in `path`.
///
/// # Errors
/// When the file cannot be read or is no supported model.
pub fn compile_file(path: &Path) -> Result<LaunchPlan, CompileError> {
    compiler::compile_onnx_file(path, &Limits::default(), Some(&CpuEvaluator))
}

/// The launch plan of an ONNX file in memory.
///
/// # Errors
/// When it is no supported model.
pub fn compile_bytes(bytes: &[u8]) -> Result<LaunchPlan, CompileError> {
    compiler::compile_onnx(bytes, Some(&CpuEvaluator))
}
