//! Permutations of dimensions.

use smallvec::SmallVec;

use super::rearrange;
use super::reshape::reshaped;
use crate::buffer::Buffer;
use crate::buffer_pool::{BufferPool, Pooled};
use crate::kernel::operand::{one, row_strides};
use crate::kernel::parallel::in_chunks;
use crate::kernel::strided::StridedLoop;
use crate::kernel::{Context, Inputs, KernelResult};
use crate::kernel::{KernelError, invalid};
use crate::value::Value;
use crate::yield_point;

/// Edge of the tiles in which a matrix is transposed: two of them fit in the first-level cache.
const TILE: usize = 32;

/// Matrices with fewer elements are transposed by one thread.
const PARALLEL: usize = 1 << 15;

pub(super) fn transpose(
    context: &Context,
    mut inputs: Inputs,
    perm: Option<&[usize]>,
) -> KernelResult {
    let rank = inputs.get(0)?.shape().len();
    let perm: Vec<usize> = match perm {
        Some(perm) => perm.to_vec(),
        None => (0..rank).rev().collect(),
    };
    let mut seen = vec![false; rank];
    let fits = perm.len() == rank
        && perm
            .iter()
            .all(|&axis| seen.get_mut(axis).is_some_and(|slot| !std::mem::replace(slot, true)));
    if !fits {
        return Err(invalid!("{perm:?} is not a permutation of {rank} dimensions"));
    }
    let shape = inputs.get(0)?.shape();
    let out: Vec<usize> = perm.iter().map(|&axis| shape[axis]).collect();
    // Only dimensions of one element move: the order in memory stays.
    let moving = perm.iter().filter(|&&axis| shape[axis] != 1);
    if moving.is_sorted() {
        return one(reshaped(inputs.take(0)?, &out)?);
    }
    one(transposed(context.pool, inputs.get(0)?, &perm)?)
}

/// `value` with its dimensions in the order `perm`, a permutation.
pub(crate) fn transposed(
    pool: &BufferPool,
    value: &Value,
    perm: &[usize],
) -> Result<Value, KernelError> {
    let shape = value.shape();
    let strides = row_strides(shape);
    let dims: Vec<(usize, usize)> = perm.iter().map(|&axis| (shape[axis], strides[axis])).collect();
    let out: Vec<usize> = dims.iter().map(|&(extent, _)| extent).collect();
    Ok(rearrange!(value, &out, data => permuted(pool, data, &dims)?))
}

/// The elements of `data` in the row-major order of `dims`, extents with their strides in `data`.
fn permuted<T: Pooled + Default>(
    pool: &BufferPool,
    data: &[T],
    dims: &[(usize, usize)],
) -> Result<Buffer<T>, KernelError> {
    let mut out = pool.filled(data.len(), T::default())?;
    if data.is_empty() {
        return Ok(out);
    }
    let dims = merged(dims);
    // The output's rows run along the last dimension. Where that is not also the input's, both are
    // read and written in tiles, so that neither is accessed at a stride for every element.
    match dims.as_slice() {
        [outer @ .., (rows, 1), (columns, stride)] if *stride != 1 => {
            let (rows, columns, stride) = (*rows, *columns, *stride);
            let plane = rows * columns;
            let strided = StridedLoop::new(outer.iter().map(|&(n, s)| (n, [s as isize])), [0]);
            let mut bases = Buffer::with_capacity(out.len() / plane)?;
            let step = strided.inner_strides[0] as usize;
            strided.for_each_run(0, out.len() / plane, &mut |_, length, [offset]| {
                bases.extend((0..length).map(|i| offset + i * step));
            });
            transpose_planes(data, &mut out, &bases, rows, columns, stride);
        }
        _ => {
            let strides = dims.iter().map(|&(extent, stride)| (extent, [stride as isize]));
            StridedLoop::new(strides, [0]).copy(data, &mut out);
        }
    }
    Ok(out)
}

/// Transposes one matrix per base. Element `(row, column)` comes from
/// `base + row + column * stride`.
fn transpose_planes<T: Clone + Send + Sync>(
    data: &[T],
    out: &mut [T],
    bases: &[usize],
    rows: usize,
    columns: usize,
    stride: usize,
) {
    let parallel = out.len() >= PARALLEL && rayon::current_num_threads() > 1;
    let band = |first: usize, target: &mut [T]| {
        // A band is some rows of one matrix.
        let (base, row) = (bases[first / rows], first % rows);
        transpose_band(&data[base + row..], target, columns, stride);
    };
    if !parallel {
        for (index, target) in out.chunks_mut(rows * columns).enumerate() {
            band(index * rows, target);
        }
        return;
    }
    if bases.len() >= rayon::current_num_threads() * 2 {
        in_chunks(out, rows * columns, &|index: usize, plane: &mut [T]| band(index * rows, plane));
        return;
    }
    for (index, plane) in out.chunks_mut(rows * columns).enumerate() {
        in_chunks(plane, TILE * columns, &|number: usize, target: &mut [T]| {
            band(index * rows + number * TILE, target);
        });
    }
}

/// `target[row][column] = data[row + column * stride]`.
fn transpose_band<T: Clone>(data: &[T], target: &mut [T], columns: usize, stride: usize) {
    let rows = target.len() / columns;
    for first_row in (0..rows).step_by(TILE) {
        let row_end = (first_row + TILE).min(rows);
        for first_column in (0..columns).step_by(TILE) {
            yield_point::did_work((row_end - first_row) * TILE.min(columns - first_column));
            let column_end = (first_column + TILE).min(columns);
            for row in first_row..row_end {
                let line = &mut target[row * columns..][first_column..column_end];
                for (slot, column) in line.iter_mut().zip(first_column..) {
                    slot.clone_from(&data[row + column * stride]);
                }
            }
        }
    }
}

/// `dims` without dimensions of extent 1, with adjacent ones merged that are one run of memory.
fn merged(dims: &[(usize, usize)]) -> SmallVec<[(usize, usize); 6]> {
    let mut merged: SmallVec<[(usize, usize); 6]> = SmallVec::new();
    for &(extent, stride) in dims.iter().filter(|(extent, _)| *extent != 1) {
        match merged.last_mut() {
            Some((before, outer)) if *outer == stride * extent => {
                *before *= extent;
                *outer = stride;
            }
            _ => merged.push((extent, stride)),
        }
    }
    merged
}

/// Permutes `value`, reshaped to `split`, and reshapes the result to `out`.
fn through(
    context: &Context,
    value: &Value,
    split: &[usize],
    perm: &[usize],
    out: &[usize],
) -> KernelResult {
    let strides = row_strides(split);
    let dims: Vec<(usize, usize)> = perm.iter().map(|&axis| (split[axis], strides[axis])).collect();
    one(rearrange!(value, out, data => permuted(context.pool, data, &dims)?))
}

/// The four dimensions of an image batch.
fn image(value: &Value) -> Result<[usize; 4], KernelError> {
    value.shape().try_into().map_err(|_| invalid!("shape {:?} is not NCHW", value.shape()))
}

pub(super) fn depth_to_space(
    context: &Context,
    inputs: &Inputs,
    block: usize,
    crd: bool,
) -> KernelResult {
    let value = inputs.get(0)?;
    let [n, c, h, w] = image(value)?;
    let square = block.checked_mul(block).filter(|&square| square > 0 && c % square == 0);
    let square =
        square.ok_or_else(|| invalid!("{c} channels do not divide in blocks of {block}"))?;
    let depth = c / square;
    let out = [n, depth, h * block, w * block];
    if crd {
        let split = [n, depth, block, block, h, w];
        through(context, value, &split, &[0, 1, 4, 2, 5, 3], &out)
    } else {
        let split = [n, block, block, depth, h, w];
        through(context, value, &split, &[0, 3, 4, 1, 5, 2], &out)
    }
}

pub(super) fn space_to_depth(context: &Context, inputs: &Inputs, block: usize) -> KernelResult {
    let value = inputs.get(0)?;
    let [n, c, h, w] = image(value)?;
    if block == 0 || h % block != 0 || w % block != 0 {
        return Err(invalid!("{h} by {w} does not divide in blocks of {block}"));
    }
    let split = [n, c, h / block, block, w / block, block];
    let out = [n, c * block * block, h / block, w / block];
    through(context, value, &split, &[0, 3, 5, 1, 2, 4], &out)
}
