//! Loops over outputs whose operands have other strides.

use smallvec::SmallVec;

use super::operand::row_strides;
use super::parallel::in_pieces;
use crate::kernel::{KernelError, invalid};

/// The shape that operands of these shapes broadcast to.
pub(crate) fn broadcast_shape(shapes: &[&[usize]]) -> Result<Vec<usize>, KernelError> {
    let rank = shapes.iter().map(|shape| shape.len()).max().unwrap_or(0);
    let mut out = vec![1usize; rank];
    for shape in shapes {
        let lead = rank - shape.len();
        for (target, &size) in out[lead..].iter_mut().zip(*shape) {
            match (*target, size) {
                (_, 1) => {}
                (1, size) => *target = size,
                (have, size) if have == size => {}
                _ => return Err(invalid!("shapes {shapes:?} do not broadcast")),
            }
        }
    }
    Ok(out)
}

/// Strides of an operand of `shape` inside `out`, zero where it is broadcast.
fn broadcast_strides(shape: &[usize], out: &[usize]) -> Vec<isize> {
    let lead = out.len() - shape.len();
    let own = row_strides(shape);
    let mut strides = vec![0; out.len()];
    for (axis, &size) in shape.iter().enumerate() {
        if size != 1 {
            strides[lead + axis] = own[axis] as isize;
        }
    }
    strides
}

/// A row-major loop over an output with `N` operands at their own strides. Adjacent dimensions that
/// are one run of memory in all operands are merged.
pub(crate) struct StridedLoop<const N: usize> {
    /// Extents and strides, outermost first; the innermost is `inner`.
    outer: SmallVec<[(usize, [isize; N]); 6]>,
    /// Extent of the innermost dimension.
    inner: usize,
    /// Operand strides of the innermost dimension.
    pub(crate) inner_strides: [isize; N],
    /// Operand offsets of the first element.
    base: [usize; N],
}

impl<const N: usize> StridedLoop<N> {
    /// A loop over `out` with operands that broadcast to it.
    pub(crate) fn broadcast(out: &[usize], shapes: [&[usize]; N]) -> StridedLoop<N> {
        let strides = shapes.map(|shape| broadcast_strides(shape, out));
        let dims = out.iter().enumerate().map(|(axis, &extent)| {
            let mut here = [0; N];
            for (slot, operand) in here.iter_mut().zip(&strides) {
                *slot = operand[axis];
            }
            (extent, here)
        });
        StridedLoop::new(dims, [0; N])
    }

    /// A loop over dimensions of these extents and operand strides, outermost first.
    pub(crate) fn new(
        dims: impl DoubleEndedIterator<Item = (usize, [isize; N])>,
        base: [usize; N],
    ) -> StridedLoop<N> {
        // Innermost first while merging.
        let mut merged: SmallVec<[(usize, [isize; N]); 6]> = SmallVec::new();
        for (extent, strides) in dims.rev().filter(|(extent, _)| *extent != 1) {
            match merged.last_mut() {
                Some((inner, inner_strides))
                    if (0..N).all(|i| strides[i] == inner_strides[i] * *inner as isize) =>
                {
                    *inner *= extent;
                }
                _ => merged.push((extent, strides)),
            }
        }
        merged.reverse();
        let (inner, inner_strides) = merged.pop().unwrap_or((1, [0; N]));
        StridedLoop { outer: merged, inner, inner_strides, base }
    }

    /// Calls `visit` with the position, the length and the operand offsets of every run of the
    /// innermost dimension within `start..end`.
    pub(crate) fn for_each_run(
        &self,
        start: usize,
        end: usize,
        visit: &mut dyn FnMut(usize, usize, [usize; N]),
    ) {
        if start >= end {
            return;
        }
        let (mut row, mut column) = (start / self.inner, start % self.inner);
        let mut index: SmallVec<[usize; 6]> = SmallVec::from_elem(0, self.outer.len());
        let mut offsets = self.base.map(|base| base as isize);
        for (slot, (extent, strides)) in index.iter_mut().zip(&self.outer).rev() {
            *slot = row % extent;
            row /= extent;
            (0..N).for_each(|i| offsets[i] += strides[i] * *slot as isize);
        }
        let mut position = start;
        loop {
            let length = (self.inner - column).min(end - position);
            let mut here = [0usize; N];
            for i in 0..N {
                here[i] = (offsets[i] + self.inner_strides[i] * column as isize) as usize;
            }
            visit(position, length, here);
            position += length;
            if position >= end {
                return;
            }
            column = 0;
            self.advance(&mut index, &mut offsets);
        }
    }

    /// Advances to the next row.
    fn advance(&self, index: &mut [usize], offsets: &mut [isize; N]) {
        for (slot, (extent, strides)) in index.iter_mut().zip(&self.outer).rev() {
            *slot += 1;
            (0..N).for_each(|i| offsets[i] += strides[i]);
            if *slot < *extent {
                return;
            }
            (0..N).for_each(|i| offsets[i] -= strides[i] * *extent as isize);
            *slot = 0;
        }
    }
}

impl StridedLoop<1> {
    /// Copies the elements of `source` in the order of the loop.
    pub(crate) fn copy<T: Clone + Send + Sync>(&self, source: &[T], out: &mut [T]) {
        let stride = self.inner_strides[0];
        in_pieces(out, &|start: usize, chunk: &mut [T]| {
            self.for_each_run(start, start + chunk.len(), &mut |position, length, [offset]| {
                let target = &mut chunk[position - start..][..length];
                match stride {
                    1 => target.clone_from_slice(&source[offset..][..length]),
                    0 => target.fill(source[offset].clone()),
                    _ => {
                        for (i, slot) in target.iter_mut().enumerate() {
                            let at = offset as isize + stride * i as isize;
                            slot.clone_from(&source[at as usize]);
                        }
                    }
                }
            });
        });
    }
}
