//! Compiles ONNX to launch plans, with the CPU's kernels for constant folding.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use compiler::CompileError;
use graph::{ExternalData, Graph, ImportError, Limits};
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
    compiler::compile_graph(imported(path)?, Some(&CpuEvaluator::default()))
}

/// The graph in `path`. What a person should know of it is logged.
fn imported(path: &Path) -> Result<Graph, ImportError> {
    let graph = graph::import_file(path, &Limits::default())?;
    log_warnings(&graph);
    Ok(graph)
}

fn log_warnings(graph: &Graph) {
    for warning in &graph.warnings {
        tracing::warn!(graph = graph.name, "{warning}");
    }
}

/// A model as `atoll check` looks at it.
pub struct CheckedPlans {
    /// The plan for any sizes.
    pub plan: LaunchPlan,
    /// The plan for given sizes, if they fit the model.
    pub bound: Option<LaunchPlan>,
    /// What a person should know of the file.
    pub warnings: Vec<String>,
}

/// As [`compile_file`], and a second plan for the sizes of symbols that `sizes` gives: shapes are
/// inferred and constants folded again with them.
///
/// # Errors
/// As above.
pub fn compile_file_with_sizes(
    path: &Path,
    sizes: impl FnOnce(&LaunchPlan) -> Vec<(String, usize)>,
) -> Result<CheckedPlans, CompileError> {
    let evaluator = CpuEvaluator::default();
    let mut graph = graph::import_file(path, &Limits::default())?;
    let warnings = std::mem::take(&mut graph.warnings);
    graph::optimize(&mut graph, Some(&evaluator));
    let plan = compiler::lower(&graph)?;
    let sizes = sizes(&plan);
    let sizes: Vec<(&str, usize)> = sizes.iter().map(|(name, size)| (&**name, *size)).collect();
    let bound = graph::bind(&graph, &sizes).ok().and_then(|mut bound| {
        graph::optimize(&mut bound, Some(&evaluator));
        compiler::lower(&bound).ok()
    });
    Ok(CheckedPlans { plan, bound, warnings })
}

/// As [`compile_file`], with the values called `names` as further outputs, in that order.
///
/// # Errors
/// As above, and when the model has no such value.
pub fn compile_file_with_outputs(
    path: &Path,
    names: &[String],
) -> Result<LaunchPlan, CompileError> {
    let mut graph = imported(path)?;
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
    compiler::compile_graph(imported(path)?, Some(&evaluator))
}

/// Like [`compile_bytes`]; folds no further constants once `cancelled` is set.
pub(crate) fn compile_bytes_until(
    bytes: impl Into<Bytes>,
    cancelled: &AtomicBool,
) -> Result<LaunchPlan, CompileError> {
    let evaluator = CpuEvaluator { cancelled: Some(cancelled) };
    let graph = graph::import_shared(bytes.into(), &ExternalData::none(), &Limits::default())?;
    log_warnings(&graph);
    compiler::compile_graph(graph, Some(&evaluator))
}
