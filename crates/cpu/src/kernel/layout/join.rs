//! Concat and tile.

use super::rearrange;
use super::reshape::reshaped;
use crate::buffer::Buffer;
use crate::buffer_pool::{BufferPool, Pooled};
use crate::kernel::operand::{
    Element, around, elements, integer_list, one, output_len, resolve_axis, sizes,
};
use crate::kernel::parallel;
use crate::kernel::{Context, Inputs, KernelResult, StepFacts, no_kernel};
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, with_value};
use crate::yield_point;

/// Outputs with fewer elements are copied by one thread.
const PARALLEL: usize = 1 << 16;

/// An error if the operands have different types.
pub(super) fn same_types(facts: &StepFacts) -> Result<(), KernelError> {
    let first = facts.input_dtype(0);
    match (0..facts.step.inputs.len()).all(|index| facts.input_dtype(index) == first) {
        true => Ok(()),
        false => Err(no_kernel(facts)),
    }
}

pub(super) fn concat(context: &Context, mut inputs: Inputs, axis: i64) -> KernelResult {
    if inputs.len() == 1 {
        return one(inputs.take(0)?);
    }
    let first = inputs.get(0)?;
    let axis = resolve_axis(axis, first.shape().len())?;
    let shape = joined_shape(&inputs, axis)?;
    with_value!(first, tensor => join(context, &inputs, tensor, axis, &shape))
}

/// The shape of the operands concatenated along `axis`.
fn joined_shape(inputs: &Inputs, axis: usize) -> Result<Vec<usize>, KernelError> {
    let mut shape = inputs.get(0)?.shape().to_vec();
    for index in 1..inputs.len() {
        let next = inputs.get(index)?.shape();
        let fits = next.len() == shape.len()
            && (0..next.len()).all(|other| other == axis || next[other] == shape[other]);
        if !fits {
            return Err(invalid!(
                "{next:?} cannot be concatenated with {shape:?} along axis {axis}"
            ));
        }
        shape[axis] += next[axis];
    }
    Ok(shape)
}

/// Concatenates the operands, all of the type of `_first`.
fn join<T: Element>(
    context: &Context,
    inputs: &Inputs,
    _first: &TypedTensor<T>,
    axis: usize,
    shape: &[usize],
) -> KernelResult {
    let mut rows = Vec::with_capacity(inputs.len());
    for index in 0..inputs.len() {
        rows.push(elements(inputs.typed::<T>(index)?));
    }
    let (outer, along, inner) = around(shape, axis);
    let count = output_len(shape)?;
    let mut out: Buffer<T> = context.pool.alloc(count)?;
    if count < PARALLEL || rayon::current_num_threads() == 1 {
        for row in 0..outer {
            for part in &rows {
                let length = part.len() / outer;
                out.extend_from_slice(&part[row * length..][..length]);
                yield_point::did_work(length / 2);
            }
        }
    } else {
        out.resize(count, T::default());
        let mut pieces = Buffer::with_capacity(outer * rows.len())?;
        for (row, mut target) in out.chunks_mut(along * inner).enumerate() {
            for part in &rows {
                let length = part.len() / outer;
                let (to, rest) = std::mem::take(&mut target).split_at_mut(length);
                let from = &part[row * length..][..length];
                for piece in to.chunks_mut(PARALLEL).zip(from.chunks(PARALLEL)) {
                    pieces.push(piece)?;
                }
                target = rest;
            }
        }
        parallel::for_each(pieces.iter_mut(), &|(to, from): &mut (&mut [T], &[T])| {
            to.clone_from_slice(from);
            yield_point::did_work(to.len() / 2);
        });
    }
    one(T::wrap(shape, out))
}

pub(super) fn tile(context: &Context, mut inputs: Inputs) -> KernelResult {
    let repeats = sizes(&integer_list(&inputs, 1)?)?;
    let value = inputs.get(0)?;
    let shape = value.shape().to_vec();
    if repeats.len() != shape.len() {
        return Err(invalid!("{} repeats for {} dimensions", repeats.len(), shape.len()));
    }
    let mut out = Vec::with_capacity(shape.len());
    for (&size, &times) in shape.iter().zip(&repeats) {
        out.push(size.checked_mul(times).ok_or("a repeat is too large")?);
    }
    output_len(&out)?;
    if out == shape {
        return one(reshaped(inputs.take(0)?, &out)?);
    }
    one(rearrange!(value, &out, data => tiled(context.pool, data, &shape, &repeats)?))
}

/// Repeats `data` along every dimension, innermost first, so that each repetition copies runs.
fn tiled<T: Pooled>(
    pool: &BufferPool,
    data: &[T],
    shape: &[usize],
    repeats: &[usize],
) -> Result<Buffer<T>, KernelError> {
    if repeats.contains(&0) || data.is_empty() {
        return Ok(Buffer::default());
    }
    let mut current = Buffer::copy_of(data)?;
    let mut run = 1;
    for (&size, &times) in shape.iter().zip(repeats).rev() {
        run *= size;
        if times > 1 {
            let mut next = pool.alloc(current.len() * times)?;
            for block in current.chunks(run) {
                (0..times).for_each(|_| next.extend_from_slice(block));
            }
            current = next;
        }
        run *= times;
    }
    Ok(current)
}
