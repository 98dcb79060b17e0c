//! ONNX files.

use std::time::Duration;

use graph::{Evaluator, ExternalData, optimize};
use model::Tensor;
use model::op::Op;

/// Names of operators, attributes and directions that edits may write into a model.
pub(super) const WORDS: &[&str] = &[
    "",
    "N",
    "T",
    "v1",
    "v2",
    "v3",
    "v4",
    "Add",
    "MatMul",
    "Gemm",
    "Conv",
    "ConvTranspose",
    "MaxPool",
    "Reshape",
    "Transpose",
    "Concat",
    "Split",
    "Slice",
    "Gather",
    "Expand",
    "Tile",
    "Pad",
    "Resize",
    "Einsum",
    "LSTM",
    "GRU",
    "RNN",
    "TopK",
    "NonZero",
    "Range",
    "OneHot",
    "Softmax",
    "LayerNormalization",
    "ReduceSum",
    "Cast",
    "Where",
    "If",
    "Loop",
    "Scan",
    "Constant",
    "ConstantOfShape",
    "ScatterND",
    "Attention",
    "QuantizeLinear",
    "value",
    "axis",
    "axes",
    "perm",
    "pads",
    "strides",
    "dilations",
    "group",
    "kernel_shape",
    "auto_pad",
    "SAME_UPPER",
    "VALID",
    "bidirectional",
    "equation",
    "ij,jk->ik",
    "hidden_size",
    "to",
    "com.microsoft",
    "ai.onnx",
];

/// Models that take longer are given up by their time limit in the server, `--model-check-secs`.
pub(super) const COMPILE_TIME: Duration = Duration::from_secs(5);

/// Folds constants on the CPU device's kernels.
struct CpuEvaluator;

impl Evaluator for CpuEvaluator {
    fn evaluate(&self, op: &Op, inputs: &[Option<Tensor>], outputs: usize) -> Option<Vec<Tensor>> {
        cpu::evaluate(op, inputs, outputs)
    }
}

/// Importing, optimising and printing.
pub(super) fn import(data: &[u8]) {
    if let Ok(mut graph) = graph::import(data, &ExternalData::none()) {
        optimize(&mut graph, None);
        graph.infer_all().expect("an optimized graph infers its shapes");
        let _ = graph.to_string();
    }
}

/// Importing, folding on the CPU's kernels and lowering to a launch plan.
pub(super) fn compile(data: &[u8]) {
    if let Ok(plan) = compiler::compile_onnx(data, Some(&CpuEvaluator)) {
        for &input in &plan.inputs {
            let _ = plan.value(input);
        }
    }
}
