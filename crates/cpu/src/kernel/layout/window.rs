//! Slice, split and expand.

use crate::buffer::Buffer;
use crate::buffer_pool::{BufferPool, Pooled};
use crate::kernel::{KernelError, invalid};

use super::rearrange;
use super::reshape::reshaped;
use crate::kernel::operand::{
    around, integer_list, one, optional_integers, output_len, resolve_axes, resolve_axis,
    row_strides, sizes,
};
use crate::kernel::strided::{StridedLoop, broadcast_shape};
use crate::kernel::{Context, Inputs, KernelResult, Outputs};
use crate::value::Value;

/// The elements of `data` in the order of `strided`.
fn copied<T: Pooled + Default>(
    pool: &BufferPool,
    data: &[T],
    strided: &StridedLoop<1>,
    count: usize,
) -> Result<Buffer<T>, KernelError> {
    let mut out = pool.filled(count, T::default())?;
    strided.copy(data, &mut out);
    Ok(out)
}

pub(super) fn expand(context: &Context, mut inputs: Inputs) -> KernelResult {
    let target = sizes(&integer_list(&inputs, 1)?)?;
    let value = inputs.get(0)?;
    let shape = broadcast_shape(&[value.shape(), &target])?;
    if shape == value.shape() {
        return one(inputs.take(0)?);
    }
    let count = output_len(&shape)?;
    let strided = StridedLoop::broadcast(&shape, [value.shape()]);
    one(rearrange!(value, &shape, data => copied(context.pool, data, &strided, count)?))
}

pub(super) fn split(
    context: &Context,
    mut inputs: Inputs,
    axis: i64,
    parts: usize,
) -> KernelResult {
    let value = inputs.get(0)?;
    let shape = value.shape().to_vec();
    let axis = resolve_axis(axis, shape.len())?;
    let lengths = match optional_integers(&inputs, 1)? {
        Some(lengths) => sizes(&lengths)?,
        None => equal_parts(shape[axis], parts),
    };
    if lengths.len() != parts || lengths.iter().sum::<usize>() != shape[axis] {
        return Err(invalid!("parts {lengths:?} do not make up dimension {axis} of {shape:?}"));
    }
    if parts == 1 {
        return one(inputs.take(0)?);
    }
    let mut outputs = Outputs::new();
    let mut start = 0;
    for length in lengths {
        outputs.push(cut(context, value, axis, start, length)?);
        start += length;
    }
    Ok(outputs)
}

/// Lengths of `parts` equal parts; the last one is smaller if `size` is no multiple.
fn equal_parts(size: usize, parts: usize) -> Vec<usize> {
    let part = size.div_ceil(parts.max(1));
    (0..parts).map(|index| part.min(size.saturating_sub(index * part))).collect()
}

/// `length` positions from `start` along `axis`.
fn cut(
    context: &Context,
    value: &Value,
    axis: usize,
    start: usize,
    length: usize,
) -> Result<Value, KernelError> {
    let (outer, along, inner) = around(value.shape(), axis);
    let mut shape = value.shape().to_vec();
    shape[axis] = length;
    let strided = StridedLoop::new(
        [(outer, [(along * inner) as isize]), (length * inner, [1])].into_iter(),
        [start * inner],
    );
    let count = outer * length * inner;
    Ok(rearrange!(value, &shape, data => copied(context.pool, data, &strided, count)?))
}

pub(super) fn slice(context: &Context, mut inputs: Inputs) -> KernelResult {
    let value = inputs.get(0)?;
    let mut cuts: Vec<SliceRange> =
        value.shape().iter().map(|&size| SliceRange::all(size)).collect();
    let (starts, ends) = (integer_list(&inputs, 1)?, integer_list(&inputs, 2)?);
    let axes = match optional_integers(&inputs, 3)? {
        Some(axes) => resolve_axes(&axes, cuts.len())?,
        None => (0..starts.len()).collect(),
    };
    let steps = match optional_integers(&inputs, 4)? {
        Some(steps) => steps,
        None => Buffer::filled(starts.len(), 1)?,
    };
    if [ends.len(), axes.len(), steps.len()] != [starts.len(); 3] || starts.len() > cuts.len() {
        return Err("starts, ends, axes and steps differ in length".into());
    }
    for (i, &axis) in axes.iter().enumerate() {
        cuts[axis] = SliceRange::new(value.shape()[axis], starts[i], ends[i], steps[i])?;
    }
    let shape: Vec<usize> = cuts.iter().map(|cut| cut.count).collect();
    if shape == value.shape() && cuts.iter().all(|cut| cut.step == 1) {
        return one(reshaped(inputs.take(0)?, &shape)?);
    }
    let strides = row_strides(value.shape());
    let base: usize = cuts.iter().zip(&strides).map(|(cut, stride)| cut.start * stride).sum();
    let dims = cuts
        .iter()
        .zip(&strides)
        .map(|(cut, &stride)| (cut.count, [cut.step.saturating_mul(stride as i64) as isize]));
    let strided = StridedLoop::new(dims, [base]);
    let count = shape.iter().product();
    one(rearrange!(value, &shape, data => copied(context.pool, data, &strided, count)?))
}

/// The positions of one dimension that a slice selects.
struct SliceRange {
    start: usize,
    count: usize,
    step: i64,
}

impl SliceRange {
    fn all(size: usize) -> SliceRange {
        SliceRange { start: 0, count: size, step: 1 }
    }

    /// The positions from `start` until before `end`, either of which may be negative or out of
    /// range.
    fn new(size: usize, start: i64, end: i64, step: i64) -> Result<SliceRange, KernelError> {
        let bound = size as i64;
        let absolute = |index: i64| if index < 0 { index.saturating_add(bound) } else { index };
        let (start, end) = (absolute(start), absolute(end));
        let (start, distance) = match step {
            0 => return Err("a step is 0".into()),
            1.. => {
                let start = start.clamp(0, bound);
                (start, end.clamp(0, bound) - start)
            }
            _ => {
                let start = start.clamp(-1, bound - 1);
                (start, start - end.clamp(-1, bound - 1))
            }
        };
        let count = match distance {
            1.. => (distance as u64).div_ceil(step.unsigned_abs()) as usize,
            _ => 0,
        };
        // One position needs no step; with more of them, the step is smaller than the dimension.
        let step = if count <= 1 { 1 } else { step };
        Ok(SliceRange { start: if count == 0 { 0 } else { start as usize }, count, step })
    }
}
