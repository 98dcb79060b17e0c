//! Steps between operators that quantize become steps of bytes, when a plan is loaded.
//!
//! `DequantizeLinear`, a product with a constant weight and `QuantizeLinear` are one step; so are
//! an integer product and what turns its sums into numbers, and functions of one or two operands
//! between both. What is not recognised stays as it is.

mod images;
mod scope;

use std::collections::HashMap;
use std::sync::Arc;

use model::op::{Activation, Binary, Op, Pool, Unary};
use model::{DataType, LaunchPlan, Step, Tensor, ValueId};

use crate::dequantized_weights::empty;
use crate::kernel::bytes::elementwise::{self, ByteBinary, ByteZip};
use crate::kernel::bytes::mean::{self, ByteMean};
use crate::kernel::bytes::{self, ByteLayout, ByteOutput, ByteSpec};
use crate::kernel::{self, Kernel, KernelError};
use crate::value::Value;
use scope::Scope;

/// A step of bytes.
pub(crate) enum ByteStep {
    /// A product with a constant weight.
    Product { spec: Box<ByteSpec>, weight: Tensor },
    /// A function of two operands.
    Zip(ByteZip),
    /// A function of one operand, by its byte.
    Table { table: Box<[u8; 256]>, from_signed: bool, signed: bool },
    /// The largest byte of each window.
    Largest { pool: Pool, signed: bool },
    /// The mean of each plane.
    Mean(ByteMean),
}

impl ByteStep {
    /// Its kernel.
    pub(crate) fn build(&self) -> Result<Kernel, KernelError> {
        match self {
            ByteStep::Product { spec, weight } => {
                bytes::build((**spec).clone(), &Value::from_host(weight)?)
            }
            ByteStep::Zip(zip) => Ok(elementwise::build_zip(*zip)),
            ByteStep::Table { table, signed, .. } => Ok(elementwise::build_table(**table, *signed)),
            ByteStep::Largest { pool, signed } => {
                Ok(kernel::build_max_bytes(pool.clone(), *signed))
            }
            ByteStep::Mean(mean) => Ok(mean::build(*mean)),
        }
    }
}

/// A recognised step and those it replaces.
struct Found {
    byte_step: ByteStep,
    inputs: Vec<Option<ValueId>>,
    /// Indices of steps; the last one's result becomes the new step's.
    replaced: Vec<usize>,
}

/// Steps of bytes by their result.
pub(crate) type ByteSteps = HashMap<ValueId, ByteStep>;

/// `plan` with steps of bytes.
pub(crate) fn with_byte_steps(plan: Arc<LaunchPlan>) -> (Arc<LaunchPlan>, ByteSteps) {
    let is_quantized = |step: &Step| {
        matches!(
            step.op,
            Op::DequantizeLinear { .. }
                | Op::QuantizeLinear { .. }
                | Op::MatMulInteger
                | Op::ConvInteger(_)
                | Op::QLinearConv(_)
        )
    };
    // A broken plan is refused as it is.
    if !plan.steps.iter().any(is_quantized) || plan.check().is_err() {
        return (plan, ByteSteps::new());
    }
    let found = find(&plan);
    if found.is_empty() {
        return (plan, ByteSteps::new());
    }
    rewritten((*plan).clone(), found)
}

fn find(plan: &LaunchPlan) -> Vec<Found> {
    let scope = Scope::new(plan);
    let mut taken = vec![false; plan.steps.len()];
    let mut all = Vec::new();
    for index in 0..plan.steps.len() {
        let step = &plan.steps[index];
        let found = match &step.op {
            Op::Conv(_) | Op::MatMul(_) | Op::Gemm(_) => product(&scope, index),
            Op::MatMulInteger | Op::ConvInteger(_) => scaled_sums(&scope, index),
            Op::QLinearConv(_) => images::linear_convolution(&scope, index),
            Op::Pool(_) => images::largest(&scope, index),
            Op::GlobalPool(_) => images::mean(&scope, index),
            Op::Binary(_) => zip(&scope, index),
            Op::Unary(_) => table(&scope, index),
            _ => None,
        };
        let Some(found) = found else { continue };
        if found.replaced.iter().any(|at| taken[*at]) {
            continue;
        }
        found.replaced.iter().for_each(|at| taken[*at] = true);
        all.push(found);
    }
    all
}

/// The plan with the steps `all` instead of those they replace, and with nothing to do for steps
/// whose results nothing reads.
fn rewritten(mut plan: LaunchPlan, all: Vec<Found>) -> (Arc<LaunchPlan>, ByteSteps) {
    let producers = Scope::new(&plan).into_producers();
    let mut byte_steps = ByteSteps::new();
    for Found { byte_step, inputs, replaced } in all {
        let (Some(first), Some(last)) = (replaced.first(), replaced.last()) else { continue };
        let outputs = plan.steps[*last].outputs.clone();
        byte_steps.extend(outputs.first().copied().flatten().map(|id| (id, byte_step)));
        // The first operator does most of the work. Operands may come later than it.
        let is_there = |id: &ValueId| producers[id.index()].is_none_or(|at| at < *first);
        let place = if inputs.iter().flatten().all(is_there) { *first } else { *last };
        let op = plan.steps[*first].op.clone();
        replaced.iter().for_each(|at| empty(&mut plan.steps[*at]));
        let step = &mut plan.steps[place];
        (step.op, step.inputs, step.outputs) = (op, inputs, outputs);
    }
    let mut read = vec![false; plan.values.len()];
    plan.outputs.iter().for_each(|id| read[id.index()] = true);
    for step in plan.steps.iter_mut().rev() {
        if step.outputs.iter().flatten().any(|id| read[id.index()]) {
            step.inputs.iter().flatten().for_each(|id| read[id.index()] = true);
        } else {
            empty(step);
        }
    }
    plan.constants.retain(|(id, _)| read[id.index()]);
    plan.plan_lifetimes();
    (Arc::new(plan), byte_steps)
}

/// An activation as a clamp of numbers, and what is left of it.
fn as_clamp(activation: Activation) -> ((f32, f32), Activation) {
    let all = (f32::NEG_INFINITY, f32::INFINITY);
    match activation {
        Activation::Relu => ((0.0, f32::INFINITY), Activation::None),
        Activation::Clip { low, high } if low <= high => ((low, high), Activation::None),
        other => (all, other),
    }
}

/// A product of dequantized operands.
fn product(scope: &Scope, index: usize) -> Option<Found> {
    let step = &scope.plan.steps[index];
    let (layout, alpha, beta, activation) = match &step.op {
        Op::Conv(conv) => {
            let activation = conv.activation;
            (ByteLayout::Convolution(conv.clone()), 1.0, 1.0, activation)
        }
        Op::MatMul(op) if !op.transpose_a => {
            let layout = ByteLayout::Matrix { transposed: op.transpose_b };
            (layout, op.alpha, 1.0, op.activation)
        }
        Op::Gemm(op) if !op.transpose_a => {
            let layout = ByteLayout::Matrix { transposed: op.transpose_b };
            (layout, op.alpha, op.beta, op.activation)
        }
        _ => return None,
    };
    let (x, quantum) = scope.dequantized(scope.input(step, 0)?)?;
    let weight = scope.weight(step, &layout)?;
    let channels = weight.channels;
    let bias = match scope.input(step, 2) {
        None => None,
        Some(id) => {
            let tensor = scope.constant(id)?;
            let plain = tensor.shape().iter().rev().skip(1).all(|size| *size == 1);
            let bias = tensor.to_vec::<f32>().filter(|bias| plain && bias.len() == channels)?;
            Some(bias.into_iter().map(|x| beta * x).collect::<Vec<f32>>())
        }
    };
    let residual = scope.input(step, 3);
    let (clamp, activation) = as_clamp(activation);
    let scales = weight.scales.iter().map(|scale| alpha * (quantum.scale * scale)).collect();
    let mut spec = ByteSpec {
        layout,
        activations_signed: quantum.signed,
        activations_zero: Some(quantum.zero),
        weight_zeros: weight.zeros,
        scales,
        sum_bias: None,
        bias,
        clamp,
        activation,
        output: ByteOutput::Numbers,
    };
    let mut replaced = vec![index];
    let quantizer = scope.only_reader(step).and_then(|at| Some((at, scope.quantizes(at)?)));
    if let (Some((at, output)), None, Activation::None) = (quantizer, residual, activation) {
        let relative = |x: &mut f32| *x /= output.scale;
        spec.scales.iter_mut().for_each(relative);
        spec.bias.iter_mut().flatten().for_each(relative);
        spec.clamp = (clamp.0 / output.scale, clamp.1 / output.scale);
        spec.output = ByteOutput::Bytes { zero: output.zero, signed: output.signed };
        replaced.push(at);
    }
    let weight = weight.tensor.clone();
    let byte_step = ByteStep::Product { spec: Box::new(spec), weight };
    Some(Found { byte_step, inputs: vec![Some(x), residual], replaced })
}

/// An integer product whose sums become numbers: cast, times a scale, plus a bias.
fn scaled_sums(scope: &Scope, index: usize) -> Option<Found> {
    let step = &scope.plan.steps[index];
    let layout = match &step.op {
        Op::MatMulInteger => ByteLayout::Matrix { transposed: false },
        Op::ConvInteger(conv) => ByteLayout::Convolution(conv.clone()),
        _ => return None,
    };
    let x = scope.input(step, 0)?;
    let signed = scope.is_signed(x)?;
    let weight = scope.constant(scope.input(step, 1)?)?;
    let channels = match &layout {
        ByteLayout::Convolution(_) => *weight.shape().first()?,
        ByteLayout::Matrix { .. } => {
            *weight.shape().get(1).filter(|_| weight.shape().len() == 2)?
        }
    };
    let zero = scope.input(step, 2);
    let activations_zero = match zero {
        None => Some(0),
        Some(id) => match scope.constant(id) {
            Some(tensor) => Some(*scope::integers(tensor)?.first().filter(|_| tensor.len() == 1)?),
            // Rows may have zero points of their own.
            None if scope.is_single(id) => None,
            None => return None,
        },
    };
    let weight_zeros = match scope.input(step, 3) {
        None => vec![0],
        Some(id) => scope::integers(scope.constant(id)?)?,
    };
    let fits = weight_zeros.len() == 1 || weight_zeros.len() == channels;
    if !fits || !bytes::supports(&layout, weight.shape()) {
        return None;
    }
    let cast = scope.only_reader(step)?;
    let Op::Cast(to) = &scope.plan.steps[cast].op else { return None };
    if to.to != DataType::F32 {
        return None;
    }
    let times = scope.only_reader(&scope.plan.steps[cast])?;
    let Op::Binary(Binary::Mul) = scope.plan.steps[times].op else { return None };
    let numbers = scope.plan.steps[cast].outputs.first().copied().flatten()?;
    let scale = scope.other_operand(times, numbers)?;
    if !scope.is_scale(scale, channels, &layout) {
        return None;
    }
    let mut spec = ByteSpec {
        layout,
        activations_signed: signed,
        activations_zero,
        weight_zeros,
        scales: vec![1.0],
        sum_bias: None,
        bias: None,
        clamp: (f32::NEG_INFINITY, f32::INFINITY),
        activation: Activation::None,
        output: ByteOutput::Numbers,
    };
    let mut replaced = vec![index, cast, times];
    if let Some((at, bias)) = scope.bias_behind(times, channels, &spec.layout) {
        spec.bias = Some(bias);
        replaced.push(at);
    }
    if let Some(at) = replaced.last().and_then(|at| scope.only_reader(&scope.plan.steps[*at]))
        && let Op::Unary(unary) = &scope.plan.steps[at].op
        && let Some(activation) = as_activation(*unary)
    {
        (spec.clamp, spec.activation) = as_clamp(activation);
        replaced.push(at);
    }
    let zero = zero.filter(|_| activations_zero.is_none());
    let byte_step = ByteStep::Product { spec: Box::new(spec), weight: weight.clone() };
    Some(Found { byte_step, inputs: vec![Some(x), None, zero, Some(scale)], replaced })
}

fn as_activation(unary: Unary) -> Option<Activation> {
    Some(match unary {
        Unary::Relu => Activation::Relu,
        Unary::Sigmoid => Activation::Sigmoid,
        Unary::Tanh => Activation::Tanh,
        Unary::Silu { alpha: 1.0 } => Activation::Silu,
        Unary::Gelu { tanh } => Activation::Gelu { tanh },
        _ => return None,
    })
}

/// A sum or product of dequantized operands that is quantized.
fn zip(scope: &Scope, index: usize) -> Option<Found> {
    let step = &scope.plan.steps[index];
    let function = match step.op {
        Op::Binary(Binary::Add) => ByteBinary::Add,
        Op::Binary(Binary::Mul) => ByteBinary::Mul,
        _ => return None,
    };
    let (a, first) = scope.dequantized(scope.input(step, 0)?)?;
    let (b, second) = scope.dequantized(scope.input(step, 1)?)?;
    let mut replaced = vec![index];
    let mut clamp = (f32::NEG_INFINITY, f32::INFINITY);
    let mut next = scope.only_reader(step)?;
    if let Op::Unary(Unary::Relu) = scope.plan.steps[next].op {
        clamp.0 = 0.0;
        replaced.push(next);
        next = scope.only_reader(&scope.plan.steps[next])?;
    }
    let output = scope.quantizes(next)?;
    replaced.push(next);
    let zip = ByteZip { function, operands: [first, second], clamp, output };
    Some(Found { byte_step: ByteStep::Zip(zip), inputs: vec![Some(a), Some(b)], replaced })
}

/// Functions of a dequantized operand whose result is quantized: the bytes of all bytes.
fn table(scope: &Scope, index: usize) -> Option<Found> {
    let step = &scope.plan.steps[index];
    let (x, quantum) = scope.dequantized(scope.input(step, 0)?)?;
    let numbers: Vec<f32> = (0..=255u8)
        .map(|byte| {
            let byte = if quantum.signed { i32::from(byte as i8) } else { i32::from(byte) };
            (byte - quantum.zero) as f32 * quantum.scale
        })
        .collect();
    let mut tensor = Tensor::from_vec(vec![256], numbers).ok()?;
    let mut replaced = Vec::new();
    let mut at = index;
    let output = loop {
        replaced.push(at);
        let step = &scope.plan.steps[at];
        if let Some(output) = scope.quantizes(at) {
            break output;
        }
        let Op::Unary(_) = step.op else { return None };
        let results = crate::evaluate::evaluate(&step.op, &[Some(tensor)], 1)?;
        tensor = results.into_iter().next()?;
        at = scope.only_reader(step)?;
    };
    let (least, most) = output.range();
    let bytes = tensor.to_vec::<f32>()?.into_iter().map(|x| {
        let rounded = (x / output.scale).round_ties_even() + output.zero as f32;
        rounded.max(least as f32).min(most as f32) as i32 as u8
    });
    let table: [u8; 256] = bytes.collect::<Vec<u8>>().try_into().ok()?;
    let byte_step = ByteStep::Table {
        table: Box::new(table),
        from_signed: quantum.signed,
        signed: output.signed,
    };
    Some(Found { byte_step, inputs: vec![Some(x)], replaced })
}

#[cfg(test)]
mod tests;
