//! Kernels for any sizes and strides, run on the host and compared with the CPU device.

mod bench;
mod elementwise;

use compiler::gpu::view::Element;
use model::op::Op;
use model::{DataType, Tensor};

/// What the CPU device makes of `op`.
fn reference(op: &Op, inputs: &[&Tensor]) -> Vec<Tensor> {
    let inputs: Vec<Option<Tensor>> = inputs.iter().map(|tensor| Some((*tensor).clone())).collect();
    cpu::evaluate(op, &inputs, 1).unwrap_or_else(|| panic!("no reference for {op:?}"))
}

/// How far a result may be off, relative to the larger of itself and one.
fn tolerance(element: Element) -> f64 {
    match element {
        Element::F16 => 2e-3,
        Element::BF16 => 1.6e-2,
        _ => 2e-5,
    }
}

/// Where a tensor of `dtype` lies in `precision`.
fn stored(dtype: DataType, precision: Element) -> Element {
    if dtype == DataType::F32 { precision } else { Element::exact(dtype).unwrap() }
}
