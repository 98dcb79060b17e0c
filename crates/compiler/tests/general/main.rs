//! Kernels for any sizes and strides, run on the host and compared with the CPU device.

mod attention;
mod bench;
mod bytes;
mod dress;
mod einsum;
mod elementwise;
mod golden;
mod index;
mod product;
mod recurrent;
mod reduce;
mod tensor_float;
mod window;

use bench::{Bench, Layout};
use compiler::gpu::draft::StepDraft;
use compiler::gpu::view::{Element, View};
use model::op::Op;
use model::{DataType, Tensor};

/// The result of `op` on the CPU device.
fn reference(op: &Op, inputs: &[&Tensor], outputs: usize) -> Vec<Tensor> {
    let inputs: Vec<Option<Tensor>> = inputs.iter().map(|tensor| Some((*tensor).clone())).collect();
    cpu::evaluate(op, &inputs, outputs).unwrap_or_else(|| panic!("no reference for {op:?}"))
}

/// The allowed error, relative to the larger of the result and one.
fn tolerance(element: Element) -> f64 {
    match element {
        Element::F16 => 2e-3,
        Element::BF16 => 3.2e-2,
        _ => 2e-5,
    }
}

/// How a tensor of `dtype` is stored in `precision`.
fn stored(dtype: DataType, precision: Element) -> Element {
    if dtype == DataType::F32 { precision } else { Element::exact(dtype).unwrap() }
}

/// An operator on tensors, and how to run it.
struct Case<'a> {
    op: Op,
    inputs: &'a [&'a Tensor],
    outputs: usize,
    precision: Element,
    from: Layout,
    to: Layout,
}

impl<'a> Case<'a> {
    fn new(op: Op, inputs: &'a [&'a Tensor]) -> Case<'a> {
        let (from, to) = (Layout::Packed, Layout::Packed);
        Case { op, inputs, outputs: 1, precision: Element::F32, from, to }
    }

    fn lying(self, from: Layout, to: Layout) -> Case<'a> {
        Case { from, to, ..self }
    }

    fn of(self, precision: Element) -> Case<'a> {
        Case { precision, ..self }
    }

    fn giving(self, outputs: usize) -> Case<'a> {
        Case { outputs, ..self }
    }

    /// Checks the step that `make` builds from the views of inputs and outputs.
    fn check(
        self,
        bench: &mut Bench,
        make: impl Fn(&[View], &[View]) -> Result<Vec<StepDraft>, String>,
    ) {
        let expected = reference(&self.op, self.inputs, self.outputs);
        let place = |tensor: &Tensor| {
            bench.place(tensor, self.from, stored(tensor.dtype(), self.precision))
        };
        let inputs: Vec<View> = self.inputs.iter().copied().map(place).collect();
        let buffer = |tensor: &Tensor| {
            bench.buffer(tensor.shape(), self.to, stored(tensor.dtype(), self.precision))
        };
        let outputs: Vec<View> = expected.iter().take(self.outputs).map(buffer).collect();
        let name = format!("{:?} {:?} to {:?} {:?}", self.op, self.from, self.to, self.precision);
        let works = make(&inputs, &outputs).unwrap_or_else(|error| panic!("{name}: {error}"));
        let pairs: Vec<(&View, &Tensor)> = outputs.iter().zip(&expected).collect();
        bench.check(&name, &works, &pairs, tolerance(self.precision));
    }
}
