//! Compiles ONNX to launch plans, with the CPU's kernels for constant folding.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use compiler::CompileError;
use graph::Limits;
use model::op::Op;
use model::{LaunchPlan, Tensor};

/// Folds constants on the CPU device's kernels, until it is cancelled.
#[derive(Default)]
pub(crate) struct CpuEvaluator<'a> {
    cancelled: Option<&'a AtomicBool>,
}

impl graph::Evaluator for CpuEvaluator<'_> {
    fn evaluate(&self, op: &Op, inputs: &[Option<Tensor>], outputs: usize) -> Option<Vec<Tensor>> {
        if self.cancelled.is_some_and(|cancelled| cancelled.load(Ordering::Relaxed)) {
            return None;
        }
        cpu::evaluate(op, inputs, outputs)
    }
}

/// The launch plan of the model in `path`.
///
/// # Errors
/// When the file cannot be read or is no supported model.
pub fn compile_file(path: &Path) -> Result<LaunchPlan, CompileError> {
    compiler::compile_onnx_file(path, &Limits::default(), Some(&CpuEvaluator::default()))
}

/// The launch plan of an ONNX file in memory, which its weights share.
///
/// # Errors
/// When it is no supported model.
pub fn compile_bytes(bytes: impl Into<Bytes>) -> Result<LaunchPlan, CompileError> {
    compiler::compile_onnx_shared(bytes.into(), Some(&CpuEvaluator::default()))
}

/// Like [`compile_file`]; folds no further constants once `cancelled` is set.
pub(crate) fn compile_file_until(
    path: &Path,
    cancelled: &AtomicBool,
) -> Result<LaunchPlan, CompileError> {
    let evaluator = CpuEvaluator { cancelled: Some(cancelled) };
    compiler::compile_onnx_file(path, &Limits::default(), Some(&evaluator))
}

/// Like [`compile_bytes`]; folds no further constants once `cancelled` is set.
pub(crate) fn compile_bytes_until(
    bytes: impl Into<Bytes>,
    cancelled: &AtomicBool,
) -> Result<LaunchPlan, CompileError> {
    let evaluator = CpuEvaluator { cancelled: Some(cancelled) };
    compiler::compile_onnx_shared(bytes.into(), Some(&evaluator))
}
