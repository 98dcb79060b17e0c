//! Reading and writing at positions given by a tensor of indices.

mod scatter;

use model::DataType;
use model::op::Op;

use super::layout::rearrange;
use super::operand::{
    around, dtype_of, integers, one, output_len, resolve_axis, resolve_index, row_strides,
};
use super::parallel::in_chunks;
use super::{Context, Inputs, Kernel, KernelResult, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::buffer_pool::{BufferPool, Pooled};
use crate::kernel::{KernelError, invalid};
use crate::yield_point;

/// Outputs with fewer elements are gathered by one thread.
const PARALLEL: usize = 1 << 15;

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    if !matches!(dtype_of(facts, 1)?, DataType::I32 | DataType::I64) {
        return Err(no_kernel(facts));
    }
    Ok(match facts.step.op {
        Op::Gather { axis } => Kernel::new(move |context, inputs| gather(context, &inputs, axis)),
        Op::GatherElements { axis } => {
            Kernel::new(move |context, inputs| gather_elements(context, &inputs, axis))
        }
        Op::GatherNd { batch_dims } => {
            Kernel::new(move |context, inputs| gather_nd(context, &inputs, batch_dims))
        }
        Op::ScatterElements { axis, reduction } => {
            scatter::check_types(facts, reduction)?;
            Kernel::new(move |_, inputs| scatter::scatter_elements(inputs, axis, reduction))
        }
        Op::ScatterNd { reduction } => {
            scatter::check_types(facts, reduction)?;
            Kernel::new(move |_, inputs| scatter::nd(inputs, reduction))
        }
        _ => return Err(no_kernel(facts)),
    })
}

/// Runs of `length` elements of `data` that begin at `starts`.
fn runs<T: Pooled + Default>(
    pool: &BufferPool,
    data: &[T],
    starts: &[usize],
    length: usize,
) -> Result<Buffer<T>, KernelError> {
    let count = starts.len() * length;
    if count < PARALLEL || rayon::current_num_threads() == 1 {
        let mut out = pool.alloc(count)?;
        match length {
            1 => starts.chunks(PARALLEL / 2).for_each(|starts| {
                yield_point::check();
                out.extend(starts.iter().map(|&start| data[start].clone()));
            }),
            _ => starts.iter().for_each(|&start| {
                out.extend_from_slice(&data[start..][..length]);
                yield_point::did_work(length);
            }),
        }
        return Ok(out);
    }
    let mut out = pool.filled(count, T::default())?;
    let per_piece = (PARALLEL / 2).div_ceil(length);
    in_chunks(&mut out, per_piece * length, &|index: usize, piece: &mut [T]| {
        yield_point::did_work(piece.len());
        for (target, &start) in piece.chunks_mut(length).zip(&starts[index * per_piece..]) {
            target.clone_from_slice(&data[start..][..length]);
        }
    });
    Ok(out)
}

fn gather(context: &Context, inputs: &Inputs, axis: i64) -> KernelResult {
    let value = inputs.get(0)?;
    let shape = value.shape();
    let axis = resolve_axis(axis, shape.len())?;
    let (outer, along, inner) = around(shape, axis);
    let index_shape = inputs.get(1)?.shape();
    let out: Vec<usize> = [&shape[..axis], index_shape, &shape[axis + 1..]].concat();
    if output_len(&out)? == 0 {
        return one(rearrange!(value, &out, _data => Buffer::default()));
    }
    let mut starts = Buffer::with_capacity(outer * index_shape.iter().product::<usize>())?;
    for &index in integers(inputs.get(1)?)?.iter() {
        starts.push(resolve_index(index, along)? * inner)?;
    }
    let first = starts.len();
    for row in 1..outer {
        for index in 0..first {
            starts.push(starts[index] + row * along * inner)?;
        }
    }
    one(rearrange!(value, &out, data => runs(context.pool, data, &starts, inner)?))
}

/// For each element of an index tensor, the offset into a tensor of `shape`. The position along
/// `axis` is the index; along other dimensions it is the position of the index element.
fn element_offsets(
    shape: &[usize],
    axis: usize,
    indices: &[i64],
    index_shape: &[usize],
) -> Result<Buffer<usize>, KernelError> {
    let fits = index_shape.len() == shape.len()
        && (0..shape.len()).all(|other| other == axis || index_shape[other] <= shape[other]);
    if !fits {
        return Err(invalid!("indices of shape {index_shape:?} exceed shape {shape:?}"));
    }
    let strides = row_strides(shape);
    let mut offsets = Buffer::with_capacity(indices.len())?;
    let mut position = vec![0usize; shape.len()];
    let mut base = 0;
    for &index in indices {
        offsets.push(base + resolve_index(index, shape[axis])? * strides[axis])?;
        for other in (0..shape.len()).rev() {
            let stride = if other == axis { 0 } else { strides[other] };
            position[other] += 1;
            base += stride;
            if position[other] < index_shape[other] {
                break;
            }
            base -= stride * index_shape[other];
            position[other] = 0;
        }
    }
    Ok(offsets)
}

fn gather_elements(context: &Context, inputs: &Inputs, axis: i64) -> KernelResult {
    let (value, indices) = (inputs.get(0)?, inputs.get(1)?);
    let axis = resolve_axis(axis, value.shape().len())?;
    let list = integers(indices)?;
    let offsets = element_offsets(value.shape(), axis, &list, indices.shape())?;
    one(rearrange!(value, indices.shape(), data => runs(context.pool, data, &offsets, 1)?))
}

/// The offsets into `shape` that index tuples select, and the elements per tuple.
fn tuple_offsets(
    shape: &[usize],
    indices: &[i64],
    index_shape: &[usize],
    batch_dims: usize,
) -> Result<(Buffer<usize>, usize), KernelError> {
    let &depth = index_shape.last().ok_or("indices need at least one dimension")?;
    if batch_dims >= index_shape.len() || batch_dims + depth > shape.len() {
        return Err(invalid!(
            "indices of shape {index_shape:?} are too deep for shape {shape:?} after {batch_dims}"
        ));
    }
    if shape[..batch_dims] != index_shape[..batch_dims] {
        return Err(invalid!("the batch of {index_shape:?} is not that of {shape:?}"));
    }
    let strides = row_strides(shape);
    let tuples: usize = index_shape[..index_shape.len() - 1].iter().product();
    let batches: usize = shape[..batch_dims].iter().product();
    let batch_size: usize = shape[batch_dims..].iter().product();
    let per_batch = tuples.checked_div(batches).unwrap_or(1).max(1);
    let mut offsets = Buffer::with_capacity(tuples)?;
    for tuple in 0..tuples {
        let mut offset = tuple / per_batch * batch_size;
        for (i, &index) in indices[tuple * depth..][..depth].iter().enumerate() {
            let axis = batch_dims + i;
            offset += resolve_index(index, shape[axis])? * strides[axis];
        }
        offsets.push(offset)?;
    }
    Ok((offsets, shape[batch_dims + depth..].iter().product()))
}

fn gather_nd(context: &Context, inputs: &Inputs, batch_dims: usize) -> KernelResult {
    let (value, indices) = (inputs.get(0)?, inputs.get(1)?);
    let list = integers(indices)?;
    let (shape, index_shape) = (value.shape(), indices.shape());
    let (offsets, length) = tuple_offsets(shape, &list, index_shape, batch_dims)?;
    let depth = index_shape[index_shape.len() - 1];
    let out = [&index_shape[..index_shape.len() - 1], &shape[batch_dims + depth..]].concat();
    output_len(&out)?;
    if length == 0 {
        return one(rearrange!(value, &out, _data => Buffer::default()));
    }
    one(rearrange!(value, &out, data => runs(context.pool, data, &offsets, length)?))
}

#[cfg(test)]
mod tests {
    use model::op::{Op, ScatterReduction};

    use super::super::testing::*;

    #[test]
    fn rows_are_gathered_along_any_axis() {
        let x = floats(&[2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        let on = |axis, index: &[i64], shape: &[usize]| {
            run(Op::Gather { axis }, &[x.clone(), integers(shape, index)]).remove(0)
        };
        assert_eq!(on(0, &[1, -2], &[2]), floats(&[2, 3], &[3.0, 4.0, 5.0, 0.0, 1.0, 2.0]));
        assert_eq!(on(-1, &[2, 0], &[2, 1]), floats(&[2, 2, 1], &[2.0, 0.0, 5.0, 3.0]));
        assert_eq!(on(0, &[1], &[]), floats(&[3], &[3.0, 4.0, 5.0]));
        assert_eq!(on(1, &[], &[0]).shape(), [2, 0]);
        let far = error(Op::Gather { axis: 0 }, &[x.clone(), integers(&[1], &[2])]);
        assert!(far.contains("index 2 is outside of 0..2"), "{far}");
        let low = error(Op::Gather { axis: 0 }, &[x, integers(&[1], &[i64::MIN])]);
        assert!(low.contains("outside"), "{low}");
        let words =
            run(Op::Gather { axis: 0 }, &[strings(&[2], &["a", "b"]), integers(&[1], &[1])]);
        assert_eq!(words[0], strings(&[1], &["b"]));
    }

    #[test]
    fn gathers_elements_and_tuples() {
        let x = floats(&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
        let got =
            run(Op::GatherElements { axis: 1 }, &[x.clone(), integers(&[2, 2], &[0, 0, 1, 0])]);
        assert_eq!(got[0], floats(&[2, 2], &[1.0, 1.0, 4.0, 3.0]));
        let nd = Op::GatherNd { batch_dims: 0 };
        let got = run(nd.clone(), &[x.clone(), integers(&[2, 2], &[0, 0, 1, 1])]);
        assert_eq!(got[0], floats(&[2], &[1.0, 4.0]));
        let batched = run(Op::GatherNd { batch_dims: 1 }, &[x.clone(), integers(&[2, 1], &[1, 0])]);
        assert_eq!(batched[0], floats(&[2], &[2.0, 3.0]));
        assert!(error(nd.clone(), &[x.clone(), integers(&[1, 3], &[0, 0, 0])]).contains("deep"));
        assert!(error(nd, &[x, integers(&[1, 2], &[0, 9])]).contains("index 9"));
    }

    #[test]
    fn updates_are_reduced_with_present_elements() {
        let x = integers(&[4], &[1, 2, 3, 4]);
        let on = |reduction, index: &[i64], update: &[i64]| {
            let n = index.len();
            let inputs = [x.clone(), integers(&[n], index), integers(&[n], update)];
            values::<i64>(&run(Op::ScatterElements { axis: 0, reduction }, &inputs)[0])
        };
        assert_eq!(on(ScatterReduction::None, &[1, -1], &[9, 8]), [1, 9, 3, 8]);
        assert_eq!(on(ScatterReduction::Add, &[1, 1], &[9, 8]), [1, 19, 3, 4]);
        assert_eq!(on(ScatterReduction::Mul, &[0, 0], &[9, 8]), [72, 2, 3, 4]);
        assert_eq!(on(ScatterReduction::Max, &[2, 3], &[9, 0]), [1, 2, 9, 4]);
        assert_eq!(on(ScatterReduction::Min, &[2, 3], &[9, 0]), [1, 2, 3, 0]);
        let rows = floats(&[2, 2], &[0.0; 4]);
        let update = floats(&[1, 2], &[5.0, 6.0]);
        let op = Op::ScatterNd { reduction: ScatterReduction::None };
        let got = run(op.clone(), &[rows.clone(), integers(&[1, 1], &[1]), update.clone()]);
        assert_eq!(got[0], floats(&[2, 2], &[0.0, 0.0, 5.0, 6.0]));
        assert!(error(op, &[rows, integers(&[1, 1], &[2]), update]).contains("index 2"));
    }
}
