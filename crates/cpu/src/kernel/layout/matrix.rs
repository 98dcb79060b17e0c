//! Triangles of matrices, and reversed sequences.

use crate::buffer::Buffer;
use crate::buffer_pool::{BufferPool, Pooled};
use crate::kernel::KernelError;
use crate::kernel::invalid;

use super::rearrange;
use crate::kernel::operand::{integer_list, integer_scalar, one};
use crate::kernel::parallel::in_aligned_pieces;
use crate::kernel::{Context, Inputs, KernelResult};

pub(super) fn trilu(context: &Context, inputs: &Inputs, upper: bool) -> KernelResult {
    let value = inputs.get(0)?;
    let k = match inputs.optional(1) {
        Some(_) => integer_scalar(inputs, 1)?,
        None => 0,
    };
    let &[.., rows, columns] = value.shape() else {
        return Err(invalid!("shape {:?} is not of matrices", value.shape()));
    };
    one(rearrange!(value, value.shape(), data => {
        triangle(context.pool, data, rows, columns, k, upper)?
    }))
}

fn triangle<T: Pooled + Default>(
    pool: &BufferPool,
    data: &[T],
    rows: usize,
    columns: usize,
    k: i64,
    upper: bool,
) -> Result<Buffer<T>, KernelError> {
    let mut out = pool.filled(data.len(), T::default())?;
    if out.is_empty() {
        return Ok(out);
    }
    in_aligned_pieces(&mut out, columns, &|start: usize, piece: &mut [T]| {
        for (number, target) in piece.chunks_mut(columns).enumerate() {
            let line = start / columns + number;
            let row = (line % rows) as i64;
            // The diagonal's column in this row, clamped to the matrix.
            let edge = |extra: i64| {
                row.saturating_add(k).saturating_add(extra).clamp(0, columns as i64) as usize
            };
            let kept = if upper { edge(0)..columns } else { 0..edge(1) };
            target[kept.clone()].clone_from_slice(&data[line * columns..][kept]);
        }
    });
    Ok(out)
}

pub(super) fn reverse_sequence(
    context: &Context,
    inputs: &Inputs,
    batch_axis: usize,
    time_axis: usize,
) -> KernelResult {
    let value = inputs.get(0)?;
    let shape = value.shape();
    if shape.len() < 2 || batch_axis + time_axis != 1 {
        return Err("batch and time must be the first two dimensions".into());
    }
    let (batch, time) = (shape[batch_axis], shape[time_axis]);
    let inner: usize = shape[2..].iter().product();
    let lengths = integer_list(inputs, 1)?;
    if lengths.len() != batch {
        return Err(invalid!("{} lengths for a batch of {batch}", lengths.len()));
    }
    if let Some(bad) = lengths.iter().find(|&&length| length < 0 || length > time as i64) {
        return Err(invalid!("a sequence of length {bad} is outside of 0..={time}"));
    }
    // Distances along batch and time, in units of `inner` elements.
    let (across, along) = if batch_axis == 0 { (time, 1) } else { (1, batch) };
    one(rearrange!(value, shape, data => {
        let mut out = context.pool.filled(data.len(), Default::default())?;
        for (sequence, &length) in lengths.iter().enumerate() {
            for step in 0..time {
                let length = length as usize;
                let source = if step < length { length - 1 - step } else { step };
                let at = |step: usize| (sequence * across + step * along) * inner;
                out[at(step)..][..inner].clone_from_slice(&data[at(source)..][..inner]);
            }
        }
        out
    }))
}
