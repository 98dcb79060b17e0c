//! Walks over outputs whose operands lie at other strides, and loops over flat data.

use rayon::prelude::*;
use rten_simd::{Isa, SimdOp};
use smallvec::SmallVec;

use super::operand::{Element, row_strides};
use crate::watch;

/// Outputs with fewer elements are computed by one thread.
const PARALLEL: usize = 1 << 15;

/// Simple elements between two looks: few enough for the slowest functions.
const PART: usize = 1 << 13;

/// Elements of a part at least, however much each costs: runs of memory must not become too short.
const LEAST_PART: usize = 512;

/// Runs `body` over pieces of `out`, on all threads of the pool when it is large. `body` gets the
/// position of its piece.
pub(crate) fn in_pieces<T: Send>(out: &mut [T], body: impl Fn(usize, &mut [T]) + Sync) {
    in_aligned_pieces(out, 1, body);
}

/// Like [`in_pieces`], with every piece a whole number of runs of `unit` elements.
pub(crate) fn in_aligned_pieces<T: Send>(
    out: &mut [T],
    unit: usize,
    body: impl Fn(usize, &mut [T]) + Sync,
) {
    in_weighted_pieces(out, unit, 1, body);
}

/// Like [`in_aligned_pieces`], where each element costs as much as `weight` simple ones.
pub(crate) fn in_weighted_pieces<T: Send>(
    out: &mut [T],
    unit: usize,
    weight: usize,
    body: impl Fn(usize, &mut [T]) + Sync,
) {
    pieces(out, unit, weight, &body);
}

/// One copy of the parallel machinery per element type, whatever runs in it.
fn pieces<T: Send>(
    out: &mut [T],
    unit: usize,
    weight: usize,
    body: &(dyn Fn(usize, &mut [T]) + Sync),
) {
    let threads = rayon::current_num_threads();
    let work = out.len().saturating_mul(weight.max(1));
    if work < PARALLEL || threads == 1 || out.len() <= unit {
        in_turn(out, 0, unit, weight, body);
        return;
    }
    let least = (PARALLEL / 2 / weight.max(1)).max(1);
    let piece = out.len().div_ceil(threads * 4).max(least).next_multiple_of(unit.max(1));
    out.par_chunks_mut(piece).enumerate().for_each_init(watch::at_work, |_, (index, chunk)| {
        in_turn(chunk, index * piece, unit, weight, body);
    });
}

/// Runs `body` over small parts of a piece that begins at `start`, with a look before each.
fn in_turn<T>(
    piece: &mut [T],
    start: usize,
    unit: usize,
    weight: usize,
    body: &(dyn Fn(usize, &mut [T]) + Sync),
) {
    if piece.is_empty() {
        body(start, piece);
        return;
    }
    let part = (PART / weight.max(1)).max(LEAST_PART).next_multiple_of(unit.max(1));
    for (index, part_of) in piece.chunks_mut(part).enumerate() {
        watch::look();
        body(start + index * part, part_of);
    }
}

/// The shape that operands of these shapes broadcast to.
pub(crate) fn broadcast_shape(shapes: &[&[usize]]) -> Result<Vec<usize>, String> {
    let rank = shapes.iter().map(|shape| shape.len()).max().unwrap_or(0);
    let mut out = vec![1usize; rank];
    for shape in shapes {
        let lead = rank - shape.len();
        for (target, &size) in out[lead..].iter_mut().zip(*shape) {
            match (*target, size) {
                (_, 1) => {}
                (1, size) => *target = size,
                (have, size) if have == size => {}
                _ => return Err(format!("shapes {shapes:?} do not broadcast")),
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

/// Row-major walk over an output with `N` operands at their own strides. Neighbouring dimensions
/// that all operands cross in one stride are one dimension here.
pub(crate) struct Walk<const N: usize> {
    /// Extents and strides, outermost first; the innermost is `inner`.
    outer: SmallVec<[(usize, [isize; N]); 6]>,
    /// Extent of the innermost dimension.
    inner: usize,
    /// Operand strides of the innermost dimension.
    pub(crate) inner_strides: [isize; N],
    /// Operand offsets of the first element.
    base: [usize; N],
}

impl<const N: usize> Walk<N> {
    /// A walk over `out` with operands that broadcast to it.
    pub(crate) fn broadcast(out: &[usize], shapes: [&[usize]; N]) -> Walk<N> {
        let strides = shapes.map(|shape| broadcast_strides(shape, out));
        let dims = out.iter().enumerate().map(|(axis, &extent)| {
            let mut here = [0; N];
            for (slot, operand) in here.iter_mut().zip(&strides) {
                *slot = operand[axis];
            }
            (extent, here)
        });
        Walk::strided(dims, [0; N])
    }

    /// A walk over dimensions of these extents and operand strides, outermost first.
    pub(crate) fn strided(
        dims: impl DoubleEndedIterator<Item = (usize, [isize; N])>,
        base: [usize; N],
    ) -> Walk<N> {
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
        Walk { outer: merged, inner, inner_strides, base }
    }

    /// Calls `visit` with the position, the length and the operand offsets of every run of the
    /// innermost dimension within `start..end`.
    pub(crate) fn visit(
        &self,
        start: usize,
        end: usize,
        mut visit: impl FnMut(usize, usize, [usize; N]),
    ) {
        self.visit_runs(start, end, &mut visit);
    }

    /// One copy of the walk per number of operands, whatever is done on it.
    fn visit_runs(
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
            self.step(&mut index, &mut offsets);
        }
    }

    /// Moves to the next row.
    fn step(&self, index: &mut [usize], offsets: &mut [isize; N]) {
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

impl Walk<1> {
    /// Copies the elements of `source` in the order of the walk.
    pub(crate) fn copy<T: Clone + Send + Sync>(&self, source: &[T], out: &mut [T]) {
        let stride = self.inner_strides[0];
        in_pieces(out, |start, chunk| {
            self.visit(start, start + chunk.len(), |position, length, [offset]| {
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

/// An operand of an inner loop: one element each, or one for all.
#[derive(Clone, Copy)]
pub(crate) enum Lane<'a, T> {
    Each(&'a [T]),
    All(T),
}

impl<'a, T: Copy> Lane<'a, T> {
    fn new(data: &'a [T], offset: usize, length: usize, stride: isize) -> Lane<'a, T> {
        if stride == 0 { Lane::All(data[offset]) } else { Lane::Each(&data[offset..][..length]) }
    }
}

/// Runs `op`, for the processor's widest vectors if `wide`.
#[inline(always)]
fn run<Op: SimdOp<Output = ()>>(op: Op, wide: bool) {
    if wide { op.dispatch() } else { op.eval(rten_simd::isa::GenericIsa::new()) }
}

struct MapLoop<'a, T, U, F> {
    source: &'a [T],
    target: &'a mut [U],
    f: F,
}

impl<T: Copy, U, F: Fn(T) -> U> SimdOp for MapLoop<'_, T, U, F> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        for (target, &source) in self.target.iter_mut().zip(self.source) {
            *target = (self.f)(source);
        }
    }
}

struct MapMutLoop<'a, T, F> {
    data: &'a mut [T],
    f: F,
}

impl<T: Copy, F: Fn(T) -> T> SimdOp for MapMutLoop<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        for slot in self.data {
            *slot = (self.f)(*slot);
        }
    }
}

struct ZipLoop<'a, A, B, U, F> {
    a: Lane<'a, A>,
    b: Lane<'a, B>,
    target: &'a mut [U],
    f: F,
}

impl<A: Copy, B: Copy, U, F: Fn(A, B) -> U> SimdOp for ZipLoop<'_, A, B, U, F> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let f = self.f;
        match (self.a, self.b) {
            (Lane::Each(a), Lane::Each(b)) => {
                for ((target, &a), &b) in self.target.iter_mut().zip(a).zip(b) {
                    *target = f(a, b);
                }
            }
            (Lane::Each(a), Lane::All(b)) => {
                for (target, &a) in self.target.iter_mut().zip(a) {
                    *target = f(a, b);
                }
            }
            (Lane::All(a), Lane::Each(b)) => {
                for (target, &b) in self.target.iter_mut().zip(b) {
                    *target = f(a, b);
                }
            }
            (Lane::All(a), Lane::All(b)) => {
                for target in self.target {
                    *target = f(a, b);
                }
            }
        }
    }
}

struct ZipMutLoop<'a, A, B, F> {
    data: &'a mut [A],
    b: Lane<'a, B>,
    f: F,
}

impl<A: Copy, B: Copy, F: Fn(A, B) -> A> SimdOp for ZipMutLoop<'_, A, B, F> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let f = self.f;
        match self.b {
            Lane::Each(b) => {
                for (slot, &b) in self.data.iter_mut().zip(b) {
                    *slot = f(*slot, b);
                }
            }
            Lane::All(b) => {
                for slot in self.data {
                    *slot = f(*slot, b);
                }
            }
        }
    }
}

/// `target[i] = f(source[i])`.
pub(crate) fn map<T: Element + Copy, U: Element>(
    source: &[T],
    target: &mut [U],
    f: impl Fn(T) -> U + Sync + Copy,
) {
    in_pieces(target, |start, target| {
        run(MapLoop { source: &source[start..][..target.len()], target, f }, T::WIDE);
    });
}

/// `data[i] = f(data[i])`.
pub(crate) fn map_mut<T: Element + Copy>(data: &mut [T], f: impl Fn(T) -> T + Sync + Copy) {
    in_pieces(data, |_, data| run(MapMutLoop { data, f }, T::WIDE));
}

/// `target[i] = f(a[..], b[..])` along `walk`.
pub(crate) fn zip<A: Element + Copy, B: Element + Copy, U: Element>(
    walk: &Walk<2>,
    a: &[A],
    b: &[B],
    target: &mut [U],
    f: impl Fn(A, B) -> U + Sync + Copy,
) {
    let [a_stride, b_stride] = walk.inner_strides;
    in_pieces(target, |start, chunk| {
        walk.visit(start, start + chunk.len(), |position, length, [a_at, b_at]| {
            let target = &mut chunk[position - start..][..length];
            let a = Lane::new(a, a_at, length, a_stride);
            let b = Lane::new(b, b_at, length, b_stride);
            run(ZipLoop { a, b, target, f }, A::WIDE);
        });
    });
}

/// `data[i] = f(data[i], b[..])` along `walk`.
pub(crate) fn zip_mut<A: Element + Copy, B: Element + Copy>(
    walk: &Walk<1>,
    data: &mut [A],
    b: &[B],
    f: impl Fn(A, B) -> A + Sync + Copy,
) {
    let [b_stride] = walk.inner_strides;
    in_pieces(data, |start, chunk| {
        walk.visit(start, start + chunk.len(), |position, length, [b_at]| {
            let data = &mut chunk[position - start..][..length];
            run(ZipMutLoop { data, b: Lane::new(b, b_at, length, b_stride), f }, A::WIDE);
        });
    });
}
