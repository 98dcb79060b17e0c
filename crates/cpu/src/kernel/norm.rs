//! Normalizations, and the per-channel scale and shift they often reduce to.

use model::DataType;
use model::op::{Activation, Op};
use rten_simd::SimdOp;
use rten_vecmath::{Normalize, NormalizeOptions, Sum, SumSquare, SumSquareSub};

use super::dense::{self, Real, elements};
use super::parallel::{for_each, in_chunks};
use super::{Inputs, Kernel, KernelResult, Outputs, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, Value, into_elements};
use crate::yield_point;

/// Minimum elements per task.
const TASK_ELEMENTS: usize = 8 * 1024;

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    let op = facts.step.op.clone();
    let outputs = facts.output_count();
    match facts.input_dtype(0) {
        Some(DataType::F32) if dense::all_of_type(facts, DataType::F32) => {
            Ok(Kernel::new(move |_, inputs| run::<f32>(&op, inputs, outputs)))
        }
        Some(DataType::F64) if dense::all_of_type(facts, DataType::F64) => {
            Ok(Kernel::new(move |_, inputs| run::<f64>(&op, inputs, outputs)))
        }
        Some(DataType::F16 | DataType::BF16) => {
            let wide = Kernel::new(move |_, inputs| run::<f32>(&op, inputs, outputs));
            Ok(dense::through_f32(facts, wide))
        }
        _ => Err(no_kernel(facts)),
    }
}

/// Element types of a normalization.
pub(super) trait NormElement: Real
where
    TypedTensor<Self>: Into<Value>,
{
    /// Mean and mean squared deviation.
    fn moments(row: &[Self]) -> (Self, Self);
    /// Mean of the squares.
    fn mean_square(row: &[Self]) -> Self;
    /// `(x - mean) * factor * scale + shift` in place, with a scale and shift per element.
    fn normalize(
        row: &mut [Self],
        mean: Self,
        factor: Self,
        scale: &[Self],
        shift: Option<&[Self]>,
    );
    /// `x * scale + shift` in place.
    fn scale_shift(row: &mut [Self], scale: Self, shift: Self);
}

impl NormElement for f32 {
    fn moments(row: &[f32]) -> (f32, f32) {
        let count = row.len() as f32;
        let mean = Sum::new(row).dispatch() / count;
        (mean, SumSquareSub::new(row, mean).dispatch() / count)
    }

    fn mean_square(row: &[f32]) -> f32 {
        SumSquare::new(row).dispatch() / row.len() as f32
    }

    fn normalize(row: &mut [f32], mean: f32, factor: f32, scale: &[f32], shift: Option<&[f32]>) {
        let options = NormalizeOptions {
            pre_scale_bias: mean,
            scale: factor,
            element_scale: Some(scale),
            bias: 0.0,
            element_bias: shift,
        };
        Normalize::new_mut(row, options).dispatch();
    }

    fn scale_shift(row: &mut [f32], scale: f32, shift: f32) {
        let options = NormalizeOptions {
            pre_scale_bias: 0.0,
            scale,
            element_scale: None,
            bias: shift,
            element_bias: None,
        };
        Normalize::new_mut(row, options).dispatch();
    }
}

impl NormElement for f64 {
    fn moments(row: &[f64]) -> (f64, f64) {
        let count = row.len() as f64;
        let mean = row.iter().sum::<f64>() / count;
        (mean, row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / count)
    }

    fn mean_square(row: &[f64]) -> f64 {
        row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64
    }

    fn normalize(row: &mut [f64], mean: f64, factor: f64, scale: &[f64], shift: Option<&[f64]>) {
        for (index, x) in row.iter_mut().enumerate() {
            *x = (*x - mean) * factor * scale[index] + shift.map_or(0.0, |shift| shift[index]);
        }
    }

    fn scale_shift(row: &mut [f64], scale: f64, shift: f64) {
        row.iter_mut().for_each(|x| *x = *x * scale + shift);
    }
}

fn run<T: NormElement>(op: &Op, mut inputs: Inputs, outputs: usize) -> KernelResult
where
    TypedTensor<T>: Into<Value>,
{
    let value = inputs.take(0)?;
    let shape = value.shape().to_vec();
    let tensor = T::take(value).map_err(|value| invalid!("operand 0 is {}", value.dtype()))?;
    let mut data = into_elements(tensor);
    match op {
        Op::ScaleShift { activation } => {
            let (scale, shift) = (inputs.typed(1)?, inputs.typed(2)?);
            scale_shift(&mut data, &shape, elements(scale), elements(shift), *activation)?;
        }
        Op::BatchNorm { epsilon } => batch_norm::<T>(&mut data, &shape, &inputs, *epsilon)?,
        Op::LayerNorm { axis, epsilon } => {
            return layer_norm::<T>(data, &shape, &inputs, *axis, *epsilon, outputs);
        }
        Op::RmsNorm { axis, epsilon } => {
            rms_norm::<T>(&mut data, &shape, &inputs, *axis, *epsilon)?;
        }
        Op::InstanceNorm { epsilon } => {
            let channels = channels(&shape)?;
            group_norm::<T>(&mut data, &shape, &inputs, channels, *epsilon)?;
        }
        Op::GroupNorm { groups, epsilon } => {
            group_norm::<T>(&mut data, &shape, &inputs, *groups, *epsilon)?;
        }
        Op::Lrn { alpha, beta, bias, size } => {
            data = response_norm(&data, &shape, [*alpha, *beta, *bias].map(T::from_f32), *size)?;
        }
        Op::LpNorm { axis, p } => {
            let axis = dense::resolve_axis(*axis, shape.len())?;
            power_norm(&mut data, shape[axis], shape[axis + 1..].iter().product(), *p);
        }
        other => return Err(invalid!("{} is not a normalization", other.name())),
    }
    dense::output(&shape, data)
}

/// The extent of axis 1; a vector has one channel.
fn channels(shape: &[usize]) -> Result<usize, KernelError> {
    match shape {
        [] => Err("a scalar has no channels".into()),
        [_] => Ok(1),
        [_, channels, ..] => Ok(*channels),
    }
}

fn check_channels(what: &str, actual: usize, channels: usize) -> Result<(), KernelError> {
    match actual == channels {
        true => Ok(()),
        false => Err(invalid!("{what} has {actual} elements for {channels} channels")),
    }
}

/// `activation(x * scale[c] + shift[c])`.
fn scale_shift<T: NormElement>(
    data: &mut [T],
    shape: &[usize],
    scale: &[T],
    shift: &[T],
    activation: Activation,
) -> Result<(), KernelError>
where
    TypedTensor<T>: Into<Value>,
{
    let channels = channels(shape)?;
    check_channels("the scale", scale.len(), channels)?;
    check_channels("the shift", shift.len(), channels)?;
    if data.is_empty() {
        return Ok(());
    }
    let plane: usize = shape.iter().skip(2).product();
    let planes = (TASK_ELEMENTS / plane).max(1);
    in_chunks(data, plane * planes, &|chunk: usize, block: &mut [T]| {
        yield_point::did_work(block.len());
        for (index, row) in block.chunks_exact_mut(plane).enumerate() {
            let channel = (chunk * planes + index) % channels;
            T::scale_shift(row, scale[channel], shift[channel]);
            T::activate(activation, row);
        }
    });
    Ok(())
}

fn batch_norm<T: NormElement>(
    data: &mut [T],
    shape: &[usize],
    inputs: &Inputs,
    epsilon: f32,
) -> Result<(), KernelError>
where
    TypedTensor<T>: Into<Value>,
{
    let channels = channels(shape)?;
    let mut parameters = Vec::with_capacity(4);
    for (index, what) in ["the scale", "the bias", "the mean", "the variance"].iter().enumerate() {
        let parameter = elements(inputs.typed::<T>(index + 1)?);
        check_channels(what, parameter.len(), channels)?;
        parameters.push(parameter);
    }
    let [scale, bias, mean, variance] = parameters.as_slice() else {
        return Err("four parameters are needed".into());
    };
    let epsilon = T::from_f32(epsilon);
    let scaled = |c: usize| scale[c] / (variance[c] + epsilon).sqrt();
    let factor = Buffer::collect((0..channels).map(scaled))?;
    let shift = Buffer::collect((0..channels).map(|c| bias[c] - mean[c] * factor[c]))?;
    scale_shift(data, shape, &factor, &shift, Activation::None)
}

/// A scale or shift for the rows of a normalization over the dimensions from `axis` on: one row
/// if all rows share it, otherwise as many elements as the data.
fn row_parameter<T: NormElement>(
    tensor: &TypedTensor<T>,
    shape: &[usize],
    axis: usize,
) -> Result<Buffer<T>, KernelError>
where
    TypedTensor<T>: Into<Value>,
{
    match dense::broadcast(tensor, &shape[axis..]) {
        Err(KernelError::Invalid(_)) => dense::broadcast(tensor, shape),
        result => result,
    }
}

/// The part of a row parameter that belongs to `row`.
fn part<T>(parameter: &[T], width: usize, row: usize) -> &[T] {
    if parameter.len() == width { parameter } else { &parameter[row * width..(row + 1) * width] }
}

fn layer_norm<T: NormElement>(
    mut data: Buffer<T>,
    shape: &[usize],
    inputs: &Inputs,
    axis: i64,
    epsilon: f32,
    outputs: usize,
) -> KernelResult
where
    TypedTensor<T>: Into<Value>,
{
    let axis = dense::resolve_axis(axis, shape.len())?;
    let scale = row_parameter(inputs.typed::<T>(1)?, shape, axis)?;
    let shift = match inputs.optional_typed::<T>(2)? {
        Some(shift) => Some(row_parameter(shift, shape, axis)?),
        None => None,
    };
    let width: usize = shape[axis..].iter().product();
    let rows: usize = shape[..axis].iter().product();
    let epsilon = T::from_f32(epsilon);
    let mut statistics = Buffer::filled(rows, (T::nan(), T::nan()))?;
    if let Some(per_task) = TASK_ELEMENTS.checked_div(width) {
        let per_task = per_task.max(1);
        let tasks = data.chunks_mut(width * per_task).zip(statistics.chunks_mut(per_task));
        type Task<'a, T> = (usize, (&'a mut [T], &'a mut [(T, T)]));
        for_each(tasks.enumerate(), &|(task, (block, statistics)): Task<T>| {
            yield_point::did_work(block.len());
            let rows = block.chunks_exact_mut(width).zip(statistics).enumerate();
            for (index, (row, statistic)) in rows {
                let number = task * per_task + index;
                let (mean, variance) = T::moments(row);
                let factor = T::one() / (variance + epsilon).sqrt();
                let shift = shift.as_deref().map(|shift| part(shift, width, number));
                T::normalize(row, mean, factor, part(&scale, width, number), shift);
                *statistic = (mean, factor);
            }
        });
    }
    let mut results: Outputs = dense::output(shape, data)?;
    let kept: Vec<usize> =
        shape.iter().enumerate().map(|(index, &dim)| if index < axis { dim } else { 1 }).collect();
    if outputs > 1 {
        results.push(dense::tensor(&kept, Buffer::collect(statistics.iter().map(|s| s.0))?)?);
    }
    if outputs > 2 {
        results.push(dense::tensor(&kept, Buffer::collect(statistics.iter().map(|s| s.1))?)?);
    }
    Ok(results)
}

fn rms_norm<T: NormElement>(
    data: &mut [T],
    shape: &[usize],
    inputs: &Inputs,
    axis: i64,
    epsilon: f32,
) -> Result<(), KernelError>
where
    TypedTensor<T>: Into<Value>,
{
    let axis = dense::resolve_axis(axis, shape.len())?;
    let scale = row_parameter(inputs.typed::<T>(1)?, shape, axis)?;
    let width: usize = shape[axis..].iter().product();
    if data.is_empty() {
        return Ok(());
    }
    let epsilon = T::from_f32(epsilon);
    let per_task = (TASK_ELEMENTS / width).max(1);
    in_chunks(data, width * per_task, &|task: usize, block: &mut [T]| {
        yield_point::did_work(block.len());
        for (index, row) in block.chunks_exact_mut(width).enumerate() {
            let factor = T::one() / (T::mean_square(row) + epsilon).sqrt();
            let scale = part(&scale, width, task * per_task + index);
            T::normalize(row, T::zero(), factor, scale, None);
        }
    });
    Ok(())
}

/// Normalizes each of `groups` groups of channels per image; an instance norm has one channel each.
fn group_norm<T: NormElement>(
    data: &mut [T],
    shape: &[usize],
    inputs: &Inputs,
    groups: usize,
    epsilon: f32,
) -> Result<(), KernelError>
where
    TypedTensor<T>: Into<Value>,
{
    let channels = channels(shape)?;
    let (scale, bias) = (elements(inputs.typed::<T>(1)?), elements(inputs.typed::<T>(2)?));
    check_channels("the scale", scale.len(), channels)?;
    check_channels("the bias", bias.len(), channels)?;
    if groups == 0 || channels % groups != 0 {
        return Err(invalid!("{channels} channels do not divide into {groups} groups"));
    }
    if data.is_empty() {
        return Ok(());
    }
    let plane: usize = shape.iter().skip(2).product();
    let per_group = channels / groups;
    let epsilon = T::from_f32(epsilon);
    in_chunks(data, plane * per_group, &|index: usize, block: &mut [T]| {
        yield_point::did_work(block.len() / 2);
        let (mean, variance) = T::moments(block);
        let factor = T::one() / (variance + epsilon).sqrt();
        let first = index % groups * per_group;
        for (offset, row) in block.chunks_exact_mut(plane).enumerate() {
            let gain = factor * scale[first + offset];
            T::scale_shift(row, gain, bias[first + offset] - mean * gain);
            yield_point::did_work(plane / 4);
        }
    });
    Ok(())
}

/// Local response normalization over a window of `size` channels.
fn response_norm<T: NormElement>(
    data: &[T],
    shape: &[usize],
    [alpha, beta, bias]: [T; 3],
    size: usize,
) -> Result<Buffer<T>, KernelError>
where
    TypedTensor<T>: Into<Value>,
{
    let channels = channels(shape)?;
    if size == 0 {
        return Err("the window has no channels".into());
    }
    let plane: usize = shape.iter().skip(2).product();
    let mut out = Buffer::copy_of(data)?;
    if data.is_empty() {
        return Ok(out);
    }
    let alpha = alpha / T::from(size).unwrap_or_else(T::one);
    let (before, after) = ((size - 1) / 2, size / 2);
    in_chunks(&mut out, plane, &|index: usize, row: &mut [T]| {
        let (image, channel) = (index / channels, index % channels);
        let first = channel.saturating_sub(before);
        let last = (channel.saturating_add(after)).min(channels - 1);
        for (position, x) in row.iter_mut().enumerate() {
            yield_point::did_work(20 + size);
            let mut sum = T::zero();
            for other in first..=last {
                let neighbour = data[(image * channels + other) * plane + position];
                sum = sum + neighbour * neighbour;
            }
            *x = *x / (bias + alpha * sum).powf(beta);
        }
    });
    Ok(out)
}

/// Divides by the 1- or 2-norm along the middle one of the dimensions `.. x width x inner`.
fn power_norm<T: NormElement>(data: &mut [T], width: usize, inner: usize, p: u8)
where
    TypedTensor<T>: Into<Value>,
{
    if data.is_empty() {
        return;
    }
    in_chunks(data, width * inner, &|_: usize, block: &mut [T]| {
        for column in 0..inner {
            yield_point::did_work(width * 2);
            let values = block[column..].iter().step_by(inner);
            let norm = match p {
                1 => values.fold(T::zero(), |sum, x| sum + x.abs()),
                _ => values.fold(T::zero(), |sum, x| sum + *x * *x).sqrt(),
            };
            for x in block[column..].iter_mut().step_by(inner) {
                *x = if norm == T::zero() { T::zero() } else { *x / norm };
            }
        }
    });
}

#[cfg(test)]
mod tests;
