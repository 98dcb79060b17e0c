//! Compiles models: ONNX to IR ([`graph`]), IR to a launch plan ([`lower()`]), a launch plan to a
//! GPU plan ([`gpu`]), and the common prefixes of models ([`prefix`]).

pub mod gpu;
pub mod lower;
pub mod memory;
pub mod prefix;

use std::path::Path;

use bytes::Bytes;
use graph::{Evaluator, ExternalData, Graph, ImportError, Limits};
use model::{LaunchPlan, PlanError};
use thiserror::Error;

pub use lower::lower;

/// Why a model cannot be compiled.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum CompileError {
    /// The model cannot be imported.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// The graph has no valid plan.
    #[error("the graph has no valid plan: {0}")]
    Plan(#[from] PlanError),
}

/// Imports, optimises and lowers a serialized model without external weights.
pub fn compile_onnx(
    bytes: &[u8],
    evaluator: Option<&dyn Evaluator>,
) -> Result<LaunchPlan, CompileError> {
    compile_graph(graph::import(bytes, &ExternalData::none())?, evaluator)
}

/// The same for a model whose weights share the memory of `bytes`.
pub fn compile_onnx_shared(
    bytes: Bytes,
    evaluator: Option<&dyn Evaluator>,
) -> Result<LaunchPlan, CompileError> {
    let graph = graph::import_shared(bytes, &ExternalData::none(), &Limits::default())?;
    compile_graph(graph, evaluator)
}

/// Imports, optimises and lowers a model file. External weights must lie in its folder or below.
pub fn compile_onnx_file(
    path: &Path,
    limits: &Limits,
    evaluator: Option<&dyn Evaluator>,
) -> Result<LaunchPlan, CompileError> {
    compile_graph(graph::import_file(path, limits)?, evaluator)
}

/// Optimises and lowers a graph.
pub fn compile_graph(
    mut graph: Graph,
    evaluator: Option<&dyn Evaluator>,
) -> Result<LaunchPlan, CompileError> {
    graph::optimize(&mut graph, evaluator);
    lower(&graph)
}
