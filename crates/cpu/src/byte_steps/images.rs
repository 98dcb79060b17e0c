//! Steps over quantized images: convolutions of bytes as one operator, pooling between quantizers.

use model::op::{Activation, GlobalPool, Op, PoolKind};

use super::scope::{self, Scope};
use super::{ByteStep, Found};
use crate::kernel::bytes::mean::ByteMean;
use crate::kernel::bytes::{self, ByteLayout, ByteOutput, ByteSpec};

/// A `QLinearConv` whose weight and parameters are constant.
pub(super) fn linear_convolution(scope: &Scope, index: usize) -> Option<Found> {
    let step = &scope.plan.steps[index];
    let Op::QLinearConv(conv) = &step.op else { return None };
    let scales = |at: usize| scope.constant(scope.input(step, at)?)?.to_vec::<f32>();
    let integers = |at: usize| scope::integers(scope.constant(scope.input(step, at)?)?);
    let x = scope.input(step, 0)?;
    let [x_scale] = scales(1)?[..] else { return None };
    let [x_zero] = integers(2)?[..] else { return None };
    let weight = scope.constant(scope.input(step, 3)?)?;
    let [y_scale] = scales(6)?[..] else { return None };
    let [y_zero] = integers(7)?[..] else { return None };
    let [Some(output)] = step.outputs[..] else { return None };
    let layout = ByteLayout::Convolution(conv.clone());
    let channels = *weight.shape().first()?;
    let sum_bias = match scope.input(step, 8) {
        None => None,
        Some(_) => Some(integers(8).filter(|bias| bias.len() == channels)?),
    };
    let spec = ByteSpec {
        activations_signed: scope.is_signed(x)?,
        activations_zero: Some(x_zero),
        weight_zeros: integers(5)?,
        scales: scales(4)?.iter().map(|scale| x_scale * scale / y_scale).collect(),
        sum_bias,
        bias: None,
        clamp: (f32::NEG_INFINITY, f32::INFINITY),
        activation: Activation::None,
        output: ByteOutput::Bytes { zero: y_zero, signed: scope.is_signed(output)? },
        layout,
    };
    let fits = |count: usize| count == 1 || count == channels;
    let fitting = fits(spec.scales.len()) && fits(spec.weight_zeros.len());
    let is_bytes = scope::integers(weight).is_some() && weight.dtype() != model::DataType::I32;
    if !fitting || !is_bytes || !bytes::supports(&spec.layout, weight.shape()) {
        return None;
    }
    let byte_step = ByteStep::Product { spec: Box::new(spec), weight: weight.clone() };
    Some(Found { byte_step, inputs: vec![Some(x)], replaced: vec![index] })
}

/// The largest elements of windows between a dequantizer and a quantizer of the same scale and zero
/// point: those of the bytes themselves.
pub(super) fn largest(scope: &Scope, index: usize) -> Option<Found> {
    let step = &scope.plan.steps[index];
    let Op::Pool(pool) = &step.op else { return None };
    let (x, quantum) = scope.dequantized(scope.input(step, 0)?)?;
    let quantizer = scope.only_reader(step)?;
    if pool.kind != PoolKind::Max || scope.quantizes(quantizer)? != quantum {
        return None;
    }
    let byte_step = ByteStep::Largest { pool: pool.clone(), signed: quantum.signed };
    Some(Found { byte_step, inputs: vec![Some(x)], replaced: vec![index, quantizer] })
}

/// The means of planes between a dequantizer and a quantizer.
pub(super) fn mean(scope: &Scope, index: usize) -> Option<Found> {
    let step = &scope.plan.steps[index];
    let Op::GlobalPool(GlobalPool::Average) = step.op else { return None };
    let (x, input) = scope.dequantized(scope.input(step, 0)?)?;
    let quantizer = scope.only_reader(step)?;
    let mean = ByteMean { input, output: scope.quantizes(quantizer)? };
    let byte_step = ByteStep::Mean(mean);
    Some(Found { byte_step, inputs: vec![Some(x)], replaced: vec![index, quantizer] })
}
