//! Compiles ONNX to launch plans, with the CPU's kernels for constant folding.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use compiler::CompileError;
use graph::{ImportError, Limits};
use model::op::Op;
use model::{LaunchPlan, Tensor, ValueId};

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

/// As [`compile_file`], and a second plan for the sizes of symbols that `sizes` gives: shapes are
/// inferred and constants folded again with them. There is none when they do not fit the model.
///
/// # Errors
/// As above.
pub fn compile_file_with_sizes(
    path: &Path,
    sizes: impl FnOnce(&LaunchPlan) -> Vec<(String, usize)>,
) -> Result<(LaunchPlan, Option<LaunchPlan>), CompileError> {
    let evaluator = CpuEvaluator::default();
    let mut graph = graph::import_file(path, &Limits::default())?;
    graph::optimize(&mut graph, Some(&evaluator));
    let plan = compiler::lower(&graph)?;
    let sizes = sizes(&plan);
    let sizes: Vec<(&str, usize)> = sizes.iter().map(|(name, size)| (&**name, *size)).collect();
    let bound = graph::bind(&graph, &sizes).ok().and_then(|mut bound| {
        graph::optimize(&mut bound, Some(&evaluator));
        compiler::lower(&bound).ok()
    });
    Ok((plan, bound))
}

/// As [`compile_file`], with the values called `names` as further outputs, in that order.
///
/// # Errors
/// As above, and when the model has no such value.
pub fn compile_file_with_outputs(
    path: &Path,
    names: &[String],
) -> Result<LaunchPlan, CompileError> {
    let mut graph = graph::import_file(path, &Limits::default())?;
    let ids: HashMap<&str, ValueId> = graph
        .values
        .iter()
        .enumerate()
        .map(|(index, value)| (value.name.as_str(), ValueId(index as u32)))
        .collect();
    let find = |name: &String| {
        let missing = || format!("the model computes no value '{name}'");
        ids.get(name.as_str()).copied().ok_or_else(|| ImportError::Model(missing()))
    };
    let more: Vec<ValueId> = names.iter().map(find).collect::<Result<_, _>>()?;
    graph.outputs.extend(more);
    graph::optimize(&mut graph, Some(&CpuEvaluator::default()));
    compiler::lower(&graph)
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
