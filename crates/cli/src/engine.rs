//! Puts importer, compiler and devices together.

use std::path::Path;
use std::sync::Arc;

use cpu::{CpuDevice, CpuOptions};
use device::Device;
use graph::{Graph, ImportError};
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

/// The optimised graph of the model in `path`.
pub(crate) fn import_file(path: &Path) -> Result<Graph, ImportError> {
    let mut graph = graph::import_file(path, &graph::Limits::default())?;
    graph::optimize(&mut graph, Some(&CpuEvaluator));
    Ok(graph)
}

/// The optimised graph of a model that is all in memory.
pub(crate) fn import_bytes(bytes: &[u8]) -> Result<Graph, ImportError> {
    let mut graph = graph::import(bytes, &graph::ExternalData::None)?;
    graph::optimize(&mut graph, Some(&CpuEvaluator));
    Ok(graph)
}

/// The launch plan of the model in `path`.
pub(crate) fn compile_file(path: &Path) -> Result<LaunchPlan, String> {
    let graph = import_file(path).map_err(|err| format!("{}: {err}", path.display()))?;
    compiler::lower(&graph).map_err(|err| format!("{}: {err}", path.display()))
}

/// The launch plan of a model that is all in memory.
pub(crate) fn compile_bytes(bytes: &[u8]) -> Result<LaunchPlan, String> {
    let graph = import_bytes(bytes).map_err(|err| err.to_string())?;
    compiler::lower(&graph).map_err(|err| err.to_string())
}
