//! Joins and repetitions.

use crate::buffer_pool::{BufferPool, Pooled};
use rayon::prelude::*;

use super::rearrange;
use super::reshape::reshaped;
use crate::kernel::operand::{
    Element, around, flat, integer_list, one, output_len, resolve_axis, sizes,
};
use crate::kernel::{Context, Inputs, KernelResult, StepFacts, no_kernel};
use crate::value::with_value;
use crate::watch;

/// Joins with fewer elements are made by one thread.
const PARALLEL: usize = 1 << 16;

/// Refuses operands of different types.
pub(super) fn same_types(facts: &StepFacts) -> Result<(), String> {
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

/// The shape of all operands put after each other along `axis`.
fn joined_shape(inputs: &Inputs, axis: usize) -> Result<Vec<usize>, String> {
    let mut shape = inputs.get(0)?.shape().to_vec();
    for index in 1..inputs.len() {
        let next = inputs.get(index)?.shape();
        let fits = next.len() == shape.len()
            && (0..next.len()).all(|other| other == axis || next[other] == shape[other]);
        if !fits {
            return Err(format!("{next:?} does not go beside {shape:?} along axis {axis}"));
        }
        shape[axis] += next[axis];
    }
    Ok(shape)
}

/// Joins the operands, all of the type of `_first`.
fn join<T: Element>(
    context: &Context,
    inputs: &Inputs,
    _first: &rten_tensor::Tensor<T>,
    axis: usize,
    shape: &[usize],
) -> KernelResult {
    let mut parts = Vec::with_capacity(inputs.len());
    for index in 0..inputs.len() {
        parts.push(flat(inputs.typed::<T>(index)?));
    }
    let (outer, along, inner) = around(shape, axis);
    let rows: Vec<&[T]> = parts.iter().map(AsRef::as_ref).collect();
    let count = output_len::<T>(shape, usize::MAX)?;
    let mut out: Vec<T> = context.pool.alloc(count);
    if count < PARALLEL || rayon::current_num_threads() == 1 {
        for row in 0..outer {
            for part in &rows {
                let length = part.len() / outer;
                out.extend_from_slice(&part[row * length..][..length]);
                watch::did(length / 2);
            }
        }
    } else {
        out.resize(count, T::default());
        let targets = out.par_chunks_mut(along * inner).enumerate();
        targets.for_each(|(row, mut target)| {
            let mut pieces = Vec::with_capacity(rows.len());
            for part in &rows {
                let length = part.len() / outer;
                let (piece, rest) = std::mem::take(&mut target).split_at_mut(length);
                pieces.push((piece, &part[row * length..][..length]));
                target = rest;
            }
            pieces.into_par_iter().for_each_init(watch::at_work, |_, (to, from)| copy(to, from));
        });
    }
    one(T::wrap(shape, out))
}

/// Copies, on several threads when there is much.
fn copy<T: Clone + Send + Sync>(to: &mut [T], from: &[T]) {
    if to.len() < PARALLEL {
        to.clone_from_slice(from);
        watch::did(to.len() / 2);
        return;
    }
    to.par_chunks_mut(PARALLEL).zip(from.par_chunks(PARALLEL)).for_each_init(
        watch::at_work,
        |_, (to, from)| {
            to.clone_from_slice(from);
            watch::did(to.len() / 2);
        },
    );
}

pub(super) fn tile(context: &Context, mut inputs: Inputs) -> KernelResult {
    let repeats = sizes(&integer_list(&inputs, 1)?)?;
    let value = inputs.get(0)?;
    let shape = value.shape().to_vec();
    if repeats.len() != shape.len() {
        return Err(format!("{} repeats for {} dimensions", repeats.len(), shape.len()));
    }
    let mut out = Vec::with_capacity(shape.len());
    for (&size, &times) in shape.iter().zip(&repeats) {
        out.push(size.checked_mul(times).ok_or("a repeat is too large")?);
    }
    output_len::<u64>(&out, value.size_bytes())?;
    if out == shape {
        return one(reshaped(inputs.take(0)?, &out)?);
    }
    one(rearrange!(value, &out, data => tiled(context.pool, data, &shape, &repeats)))
}

/// Repeats `data` along every dimension, innermost first: what is repeated next is then one run.
fn tiled<T: Pooled>(pool: &BufferPool, data: &[T], shape: &[usize], repeats: &[usize]) -> Vec<T> {
    if repeats.contains(&0) || data.is_empty() {
        return Vec::new();
    }
    let mut current = data.to_vec();
    let mut run = 1;
    for (&size, &times) in shape.iter().zip(repeats).rev() {
        run *= size;
        if times > 1 {
            let mut next = pool.alloc(current.len() * times);
            for block in current.chunks(run) {
                (0..times).for_each(|_| next.extend_from_slice(block));
            }
            current = next;
        }
        run *= times;
    }
    current
}
