//! A quantized network: its products are products of bytes, in every form they have.

use model::op::{Activation, Conv, MatMul, Op, Padding, Window};
use model::{DataType, Dim, LaunchPlan, Step, Tensor, ValueId};

use crate::models::Builder;

/// A constant of any type.
fn constant(b: &mut Builder, tensor: Tensor) -> ValueId {
    let dims = tensor.shape().iter().map(|size| Dim::Fixed(*size)).collect();
    let id = b.value(dims, tensor.dtype());
    b.plan.constants.push((id, tensor));
    id
}

fn step(b: &mut Builder, op: Op, inputs: &[ValueId], output: ValueId) -> ValueId {
    let name = format!("s{}", b.plan.steps.len());
    let (inputs, outputs) = (inputs.iter().copied().map(Some).collect(), vec![Some(output)]);
    b.plan.steps.push(Step { name, op, inputs, outputs, last_uses: vec![] });
    output
}

/// A scale and a zero point of zero.
fn quantum(b: &mut Builder, dtype: DataType) -> (ValueId, ValueId) {
    let scale = constant(b, Tensor::from_vec(vec![], vec![0.125f32]).unwrap());
    let zero = match dtype {
        DataType::U8 => Tensor::from_vec(vec![], vec![0u8]),
        _ => Tensor::from_vec(vec![], vec![0i8]),
    };
    (scale, constant(b, zero.unwrap()))
}

/// `x` as bytes, and as the numbers that they stand for.
fn requantized(b: &mut Builder, x: ValueId, sizes: &[usize], dtype: DataType) -> ValueId {
    let (scale, zero) = quantum(b, dtype);
    let bytes = b.activation(sizes);
    b.plan.values[bytes.index()].dtype = dtype;
    step(b, Op::QuantizeLinear { axis: 1, dtype }, &[x, scale, zero], bytes);
    let real = b.activation(sizes);
    step(b, Op::DequantizeLinear { axis: 1 }, &[bytes, scale, zero], real)
}

fn weight(b: &mut Builder, shape: &[usize]) -> ValueId {
    let count = shape.iter().product::<usize>();
    let bytes: Vec<i8> = (0..count).map(|index| (index * 37 % 255) as u8 as i8).collect();
    let bytes = constant(b, Tensor::from_vec(shape.to_vec(), bytes).unwrap());
    let (scale, zero) = quantum(b, DataType::I8);
    let real = b.value(shape.iter().map(|size| Dim::Fixed(*size)).collect(), DataType::F32);
    step(b, Op::DequantizeLinear { axis: 0 }, &[bytes, scale, zero], real)
}

/// Two convolutions and a matrix product, on activations of this type.
pub(crate) fn plan(dtype: DataType) -> LaunchPlan {
    let mut b = Builder::default();
    let sizes = [64, 28, 28];
    let image = b.input(&sizes);
    let first = requantized(&mut b, image, &sizes, dtype);
    let mut last = first;
    for edge in [3, 1] {
        let padding = Padding::Explicit(vec![edge / 2; 4]);
        let window = Window { kernel: vec![edge; 2], strides: vec![], dilations: vec![], padding };
        let op = Op::Conv(Conv { window, groups: 1, activation: Activation::Relu });
        let (weight, output) = (weight(&mut b, &[64, 64, edge, edge]), b.activation(&sizes));
        let product = step(&mut b, op, &[last, weight], output);
        last = requantized(&mut b, product, &sizes, dtype);
    }
    let rows = b.input(&[48]);
    let rows = requantized(&mut b, rows, &[48], dtype);
    let (weight, output) = (weight(&mut b, &[48, 40]), b.activation(&[40]));
    let logits = step(&mut b, Op::MatMul(MatMul::default()), &[rows, weight], output);
    b.plan.outputs = vec![last, logits];
    b.plan.plan_lifetimes();
    b.plan.check().unwrap();
    b.plan
}

#[test]
fn every_product_multiplies_bytes() {
    for dtype in [DataType::U8, DataType::I8] {
        let gpu = crate::lower(&plan(dtype), 8);
        let products = gpu.steps.iter().filter(|step| {
            let kernel = &gpu.kernels[step.choices[0].kernel];
            kernel.expression.contains("Bytes")
        });
        let ops: Vec<&str> = gpu.steps.iter().map(|step| step.op.as_str()).collect();
        assert_eq!(products.count(), 3, "{ops:?}");
    }
}
