//! Products and convolutions of 8-bit integers, with 32-bit sums or requantized results. With a
//! constant weight they are products of bytes; else a plain loop computes them.

use model::DataType;
use model::op::{Activation, Conv, Op};

use super::bytes::{self, ByteLayout, ByteOutput, ByteSpec};
use super::conv::{ConvShapes, convolve};
use super::dense::{self, elements};
use super::matmul::plain_matmul;
use super::{Context, Inputs, Kernel, KernelResult, Operand, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, Value};

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    let is_byte = |index: usize| {
        facts.input_dtype(index).is_none_or(|dtype| matches!(dtype, DataType::U8 | DataType::I8))
    };
    let is = |index: usize, wanted: DataType| {
        facts.input_dtype(index).is_none_or(|dtype| dtype == wanted)
    };
    let quantised = [0, 2, 3, 5, 7].into_iter().all(is_byte)
        && [1, 4, 6].into_iter().all(|index| is(index, DataType::F32))
        && is(8, DataType::I32);
    if let Some(kernel) = with_constant_weight(facts)? {
        return Ok(kernel);
    }
    match facts.step.op.clone() {
        Op::MatMulInteger if (0..4).all(is_byte) => {
            Ok(Kernel::new(|_, inputs| matmul_integer(&inputs)))
        }
        Op::ConvInteger(conv) if (0..4).all(is_byte) => {
            Ok(Kernel::new(move |_, inputs| conv_integer(&inputs, &conv)))
        }
        Op::QLinearMatMul if quantised => Ok(Kernel::new(|_, inputs| linear_matmul(&inputs))),
        Op::QLinearConv(conv) if quantised => {
            Ok(Kernel::new(move |_, inputs| linear_conv(&inputs, &conv)))
        }
        _ => Err(no_kernel(facts)),
    }
}

/// The elements of a constant operand of bytes, or of 32-bit integers; `[0]` where there is none.
fn constant_integers(facts: &StepFacts, index: usize) -> Option<Vec<i32>> {
    if facts.input_dtype(index).is_none() {
        return Some(vec![0]);
    }
    match facts.constant(index)? {
        Value::I32(tensor) => Some(elements(tensor).to_vec()),
        value => integers(value).ok().map(Buffer::into_vec),
    }
}

fn constant_scales(facts: &StepFacts, index: usize) -> Option<Vec<f32>> {
    match facts.constant(index)? {
        Value::F32(tensor) => Some(elements(tensor).to_vec()),
        _ => None,
    }
}

/// Whether an operand is known to have no dimensions.
fn is_scalar(facts: &StepFacts, index: usize) -> bool {
    let id = facts.step.inputs.get(index).copied().flatten();
    id.is_some_and(|id| facts.plan.value(id).shape.as_ref().is_some_and(Vec::is_empty))
}

/// What a step with a constant weight computes, and the position of the weight.
fn spec_of(facts: &StepFacts) -> Option<(ByteSpec, usize)> {
    let (layout, quantised) = match facts.step.op.clone() {
        Op::MatMulInteger => (ByteLayout::Matrix { transposed: false }, false),
        Op::QLinearMatMul => (ByteLayout::Matrix { transposed: false }, true),
        Op::ConvInteger(conv) => (ByteLayout::Convolution(conv), false),
        Op::QLinearConv(conv) => (ByteLayout::Convolution(conv), true),
        _ => return None,
    };
    let (weight, zero, weight_zero) = if quantised { (3, 2, 5) } else { (1, 2, 3) };
    let signed = facts.input_dtype(0)? == DataType::I8;
    let activations_zero = match constant_integers(facts, zero) {
        Some(zeros) => {
            let [zero] = zeros[..] else { return None };
            Some(zero)
        }
        // Rows may have zero points of their own.
        None if !quantised && is_scalar(facts, zero) => None,
        None => return None,
    };
    let mut spec = ByteSpec {
        layout,
        activations_signed: signed,
        activations_zero,
        weight_zeros: constant_integers(facts, weight_zero)?,
        scales: vec![1.0],
        sum_bias: None,
        bias: None,
        clamp: (f32::NEG_INFINITY, f32::INFINITY),
        activation: Activation::None,
        output: ByteOutput::Sums,
    };
    if quantised {
        let one = |values: Vec<f32>| if let [one] = values[..] { Some(one) } else { None };
        let x_scale = one(constant_scales(facts, 1)?)?;
        let y_scale = one(constant_scales(facts, 6)?)?;
        let factor = |scale: &f32| x_scale * scale / y_scale;
        spec.scales = constant_scales(facts, 4)?.iter().map(factor).collect();
        if facts.input_dtype(8).is_some() {
            spec.sum_bias = Some(constant_integers(facts, 8)?);
        }
        let [zero] = constant_integers(facts, 7)?[..] else { return None };
        let signed = facts.input_dtype(7)? == DataType::I8;
        spec.output = ByteOutput::Bytes { zero, signed };
    }
    Some((spec, weight))
}

/// The kernel of a step whose weight is constant, if its parameters are usual ones.
fn with_constant_weight(facts: &StepFacts) -> Result<Option<Kernel>, KernelError> {
    let Some((spec, position)) = spec_of(facts) else { return Ok(None) };
    let Some(weight) = facts.constant(position) else { return Ok(None) };
    let has_zero = spec.activations_zero.is_none();
    let Some(kernel) = dense::unless_invalid(bytes::build(spec, weight))? else { return Ok(None) };
    let Kernel { run, resident_bytes, .. } = kernel;
    let run = move |context: &Context, mut inputs: Inputs| {
        let zero = if has_zero { inputs.take_operand(2)? } else { Operand::Absent };
        let operands = [inputs.take_operand(0)?, Operand::Absent, zero, Operand::Absent];
        run.run(context, Inputs::new(operands.into_iter().collect(), context.pool))
    };
    Ok(Some(Kernel { run: Box::new(run), resident_bytes, packed_inputs: vec![position] }))
}

/// The elements of a tensor of bytes as `i32`.
fn integers(value: &Value) -> Result<Buffer<i32>, KernelError> {
    match value {
        Value::U8(tensor) => Ok(Buffer::collect(elements(tensor).iter().map(|&x| i32::from(x)))?),
        Value::I8(tensor) => Ok(Buffer::collect(elements(tensor).iter().map(|&x| i32::from(x)))?),
        other => Err(invalid!("an operand is {}", other.dtype())),
    }
}

/// `value` minus its zero point, which is one number or has a shape that broadcasts.
fn centred(
    value: &Value,
    zero: Option<&Value>,
    zero_shape: &[usize],
) -> Result<Buffer<i32>, KernelError> {
    let mut data = integers(value)?;
    let Some(zero) = zero else { return Ok(data) };
    let zero = integers(zero)?;
    if let [zero] = &*zero {
        data.iter_mut().for_each(|x| *x -= zero);
        return Ok(data);
    }
    let zero = TypedTensor::try_from_data(zero_shape, zero)
        .map_err(|_| "a zero point of a wrong size".to_string())?;
    for (x, zero) in data.iter_mut().zip(&dense::broadcast(&zero, value.shape())?) {
        *x -= zero;
    }
    Ok(data)
}

/// A parameter per row of the left operand, as a shape that broadcasts to it.
fn per_row(shape: &[usize]) -> Vec<usize> {
    match shape {
        [rows] => vec![*rows, 1],
        other => other.to_vec(),
    }
}

/// A parameter per output channel, as a shape that broadcasts to the weights.
fn per_channel(shape: &[usize], rank: usize) -> Vec<usize> {
    let mut all = vec![1; rank];
    if let (Some(first), [channels]) = (all.first_mut(), shape) {
        *first = *channels;
    }
    all
}

/// The shape and sums of `a @ b`, each minus its zero point.
fn centred_matmul(
    a: &Value,
    a_zero: Option<&Value>,
    b: &Value,
    b_zero: Option<&Value>,
) -> Result<(Vec<usize>, Buffer<i32>), KernelError> {
    let a_shape = a_zero.map_or(vec![], |zero| per_row(zero.shape()));
    let b_shape = b_zero.map_or(vec![], |zero| zero.shape().to_vec());
    let left = centred(a, a_zero, &a_shape)?;
    let right = centred(b, b_zero, &b_shape)?;
    plain_matmul((a.shape(), &left), (b.shape(), &right))
}

fn matmul_integer(inputs: &Inputs) -> KernelResult {
    let (shape, sums) =
        centred_matmul(inputs.get(0)?, inputs.optional(2), inputs.get(1)?, inputs.optional(3))?;
    dense::output(&shape, sums)
}

/// The convolution of the operands minus their zero points.
fn centred_conv(
    x: &Value,
    x_zero: Option<&Value>,
    weight: &Value,
    weight_zero: Option<&Value>,
    conv: &Conv,
) -> Result<(ConvShapes, Buffer<i32>), KernelError> {
    let shapes = ConvShapes::new(x.shape(), weight.shape(), conv)?;
    let rank = weight.shape().len();
    let zero_shape = weight_zero.map_or(vec![], |zero| per_channel(zero.shape(), rank));
    let input = centred(x, x_zero, &[])?;
    let weight = centred(weight, weight_zero, &zero_shape)?;
    let sums = convolve::<i32>(&input, &weight, &shapes)?;
    Ok((shapes, sums))
}

fn conv_integer(inputs: &Inputs, conv: &Conv) -> KernelResult {
    let (shapes, sums) =
        centred_conv(inputs.get(0)?, inputs.optional(2), inputs.get(1)?, inputs.optional(3), conv)?;
    dense::output(&shapes.output, sums)
}

/// The one element of a scale.
fn scalar(inputs: &Inputs, index: usize) -> Result<f32, KernelError> {
    match elements(inputs.typed::<f32>(index)?) {
        [scale] => Ok(*scale),
        other => Err(invalid!("operand {index} has {} elements instead of one", other.len())),
    }
}

/// Sums as the result's bytes: scaled, rounded to even, shifted and saturated.
fn requantized(shape: &[usize], sums: &[i32], factors: &[f32], zero: &Value) -> KernelResult {
    let shift = match &*integers(zero)? {
        [zero] => *zero as f32,
        other => return Err(invalid!("an output zero point of {} elements", other.len())),
    };
    let rounded = |index: usize| {
        let factor = if factors.len() == 1 { factors[0] } else { factors[index] };
        (sums[index] as f32 * factor).round_ties_even() + shift
    };
    match zero {
        // A conversion from a float saturates.
        Value::U8(_) => {
            dense::output(shape, Buffer::collect((0..sums.len()).map(|i| rounded(i) as u8))?)
        }
        _ => dense::output(shape, Buffer::collect((0..sums.len()).map(|i| rounded(i) as i8))?),
    }
}

fn linear_matmul(inputs: &Inputs) -> KernelResult {
    let (a, b) = (inputs.get(0)?, inputs.get(3)?);
    let (shape, sums) = centred_matmul(a, inputs.optional(2), b, inputs.optional(5))?;
    let (a_scale, b_scale) = (inputs.typed::<f32>(1)?, inputs.typed::<f32>(4)?);
    let y_scale = scalar(inputs, 6)?;
    let spread = |tensor: &TypedTensor<f32>, rows: bool| -> Result<Buffer<f32>, KernelError> {
        let data = Buffer::copy_of(elements(tensor))?;
        if data.len() == 1 {
            return Ok(data);
        }
        let dims = if rows { per_row(tensor.shape()) } else { tensor.shape().to_vec() };
        let tensor = TypedTensor::try_from_data(dims.as_slice(), data)
            .map_err(|_| "a scale of a wrong size".to_string())?;
        dense::broadcast(&tensor, &shape)
    };
    let (a_scale, b_scale) = (spread(a_scale, true)?, spread(b_scale, false)?);
    let at = |scale: &[f32], index: usize| if scale.len() == 1 { scale[0] } else { scale[index] };
    let count = if a_scale.len() == 1 && b_scale.len() == 1 { 1 } else { sums.len() };
    let factors = Buffer::collect((0..count).map(|i| at(&a_scale, i) * at(&b_scale, i) / y_scale))?;
    requantized(&shape, &sums, &factors, inputs.get(7)?)
}

fn linear_conv(inputs: &Inputs, conv: &Conv) -> KernelResult {
    let (x, weight) = (inputs.get(0)?, inputs.get(3)?);
    let (shapes, mut sums) = centred_conv(x, inputs.optional(2), weight, inputs.optional(5), conv)?;
    let (x_scale, y_scale) = (scalar(inputs, 1)?, scalar(inputs, 6)?);
    let weight_scale = elements(inputs.typed::<f32>(4)?);
    let outputs = shapes.groups * shapes.group_outputs;
    if weight_scale.len() != 1 && weight_scale.len() != outputs {
        return Err(invalid!("{} weight scales for {outputs} channels", weight_scale.len()));
    }
    let plane = shapes.geometry.output_size().max(1);
    if let Some(bias) = inputs.optional_typed::<i32>(8)? {
        let bias = elements(bias);
        shapes.check_bias(Some(bias.len()))?;
        for (index, row) in sums.chunks_exact_mut(plane).enumerate() {
            row.iter_mut().for_each(|y| *y = y.wrapping_add(bias[index % outputs]));
        }
    }
    let factor = |scale: f32| x_scale * scale / y_scale;
    let factors = if weight_scale.len() == 1 {
        Buffer::filled(1, factor(weight_scale[0]))?
    } else {
        let each = |index: usize| factor(weight_scale[index / plane % outputs]);
        Buffer::collect((0..sums.len()).map(each))?
    };
    requantized(&shapes.output, &sums, &factors, inputs.get(7)?)
}

#[cfg(test)]
mod tests;
