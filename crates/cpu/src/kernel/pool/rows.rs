//! Pooling of planes a row at a time: each tap of the window is one pass over whole rows.

use std::ops::Range;

use rten_simd::{Isa, SimdOp};

use super::super::geometry::Geometry;
use super::MaxPoolElement;
use crate::buffer::Buffer;
use crate::kernel::KernelError;
use crate::kernel::parallel::try_for_each;
use crate::yield_point;

/// Elements of rows that are added up before their work is reported.
const REPORT_AFTER: usize = 4096;

/// Inputs with fewer elements are pooled by one thread.
const PARALLEL: usize = 1 << 15;

/// Whether this module supports the window.
pub(super) fn handles(g: &Geometry) -> bool {
    g.input[0] == 1 && g.kernel[0] == 1 && g.input_size() > 0 && g.output_size() > 0
}

/// The largest element of each window.
pub(super) fn max<T: MaxPoolElement>(
    out: &mut [T],
    data: &[T],
    g: &Geometry,
) -> Result<(), KernelError> {
    each_row(out, data, g, T::LOWEST, |_, _| {}, |y, x| if x > y { x } else { y })
}

/// The sum of each window, divided by the `divisor` of its position.
pub(super) fn average(
    out: &mut [f32],
    data: &[f32],
    g: &Geometry,
    divisor: impl Fn([usize; 3]) -> usize + Sync,
) -> Result<(), KernelError> {
    let [_, height, width] = g.output;
    // The divisor depends only on the position: all planes share its reciprocals.
    let factor = |index: usize| match divisor([0, index / width, index % width]) {
        0 => 0.0,
        count => 1.0 / count as f32,
    };
    let factors = Buffer::collect((0..height * width).map(factor))?;
    let finish = |row: usize, out: &mut [f32]| {
        for (y, factor) in out.iter_mut().zip(&factors[row * width..]) {
            *y *= factor;
        }
    };
    each_row(out, data, g, 0.0, finish, |y, x| y + x)
}

/// Folds every window's taps into `out`, one output row at a time.
fn each_row<T: Copy + Send + Sync>(
    out: &mut [T],
    data: &[T],
    g: &Geometry,
    initial: T,
    finish: impl Fn(usize, &mut [T]) + Sync,
    fold: impl Fn(T, T) -> T + Sync,
) -> Result<(), KernelError> {
    let (plane, out_plane) = (g.input_size(), g.output_size());
    let columns = column_ranges(g);
    let phase = g.input[2].div_ceil(g.strides[2]);
    let scratch = || Buffer::filled(g.input[2] + phase * g.strides[2], initial);
    let pool = |scratch: &mut [T], out: &mut [T], input: &[T]| {
        let (folded, phases) = scratch.split_at_mut(g.input[2]);
        let (finish, fold, columns) = (&finish, &fold, columns.as_slice());
        Plane { out, input, g, initial, columns, folded, phases, finish, fold }.dispatch();
    };
    if data.len() < PARALLEL {
        let mut scratch = scratch()?;
        let planes = out.chunks_mut(out_plane).zip(data.chunks(plane));
        planes.for_each(|(out, input)| pool(&mut scratch, out, input));
        return Ok(());
    }
    // Several planes share the memory of a thread.
    let several = (PARALLEL / 4 / plane).max(1);
    let groups = out.chunks_mut(out_plane * several).zip(data.chunks(plane * several));
    try_for_each(groups, &|(out, data)| {
        let mut scratch = scratch()?;
        let planes = out.chunks_mut(out_plane).zip(data.chunks(plane));
        planes.for_each(|(out, input)| pool(&mut scratch, out, input));
        Ok(())
    })
}

/// One plane of the result and its operands.
struct Plane<'a, T, Finish, Fold> {
    out: &'a mut [T],
    input: &'a [T],
    g: &'a Geometry,
    initial: T,
    columns: &'a [(Range<usize>, usize)],
    /// A row's worth of memory, and one with columns grouped by their remainder modulo the stride.
    folded: &'a mut [T],
    phases: &'a mut [T],
    finish: &'a Finish,
    fold: &'a Fold,
}

impl<T, Finish, Fold> SimdOp for Plane<'_, T, Finish, Fold>
where
    T: Copy,
    Finish: Fn(usize, &mut [T]),
    Fold: Fn(T, T) -> T,
{
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let Plane { g, initial, folded, phases, fold, .. } = self;
        let (width, stride) = (g.input[2], g.strides[2]);
        let phase = width.div_ceil(stride);
        let mut unreported = 0;
        for (row, out_row) in self.out.chunks_exact_mut(g.output[2]).enumerate() {
            let (taps, first) = g.inside(1, row);
            let taps = (first, g.dilations[1], taps.len());
            fold_rows(folded, self.input, width, taps, initial, fold);
            let source: &[T] = match stride {
                1 => folded,
                _ => {
                    separate(phases, folded, stride);
                    phases
                }
            };
            out_row.fill(initial);
            for (range, start) in self.columns {
                let target = &mut out_row[range.clone()];
                let from = start % stride * phase + start / stride;
                let source = &source[from..from + target.len()];
                target.iter_mut().zip(source).for_each(|(y, &x)| *y = fold(*y, x));
            }
            (self.finish)(row, out_row);
            unreported += width * taps.2;
            if unreported >= REPORT_AFTER {
                yield_point::did_work(unreported / 4);
                unreported = 0;
            }
        }
        yield_point::did_work(unreported / 4);
    }
}

/// Groups the columns of a row by their remainder modulo the stride.
#[inline(always)]
fn separate<T: Copy>(phases: &mut [T], row: &[T], stride: usize) {
    let phase = row.len().div_ceil(stride);
    if stride == 2 {
        let (even, odd) = phases.split_at_mut(phase);
        let (pairs, rest) = row.as_chunks::<2>();
        for ((even, odd), pair) in even.iter_mut().zip(odd.iter_mut()).zip(pairs) {
            (*even, *odd) = (pair[0], pair[1]);
        }
        if let ([last], Some(slot)) = (rest, even.last_mut()) {
            *slot = *last;
        }
        return;
    }
    for (number, phase) in phases.chunks_exact_mut(phase).enumerate() {
        let source = row.iter().skip(number).step_by(stride);
        phase.iter_mut().zip(source).for_each(|(y, &x)| *y = x);
    }
}

/// Folds the rows a window covers into one: `taps` are the first, their distance and their number.
#[inline(always)]
fn fold_rows<T: Copy>(
    folded: &mut [T],
    input: &[T],
    width: usize,
    taps: (usize, usize, usize),
    initial: T,
    fold: &impl Fn(T, T) -> T,
) {
    let (first, dilation, count) = taps;
    if count == 0 {
        folded.fill(initial);
        return;
    }
    folded.copy_from_slice(&input[first * width..(first + 1) * width]);
    for tap in 1..count {
        let start = (first + tap * dilation) * width;
        let row = &input[start..start + width];
        folded.iter_mut().zip(row).for_each(|(y, &x)| *y = fold(*y, x));
    }
}

/// For each tap along a row, the outputs for which it lies in the input, and the first one's input
/// position.
fn column_ranges(g: &Geometry) -> Vec<(Range<usize>, usize)> {
    let (stride, begin, width) = (g.strides[2], g.begin[2], g.input[2]);
    (0..g.kernel[2])
        .filter_map(|tap| {
            let offset = tap * g.dilations[2];
            let first = begin.saturating_sub(offset).div_ceil(stride);
            let end = (width + begin).saturating_sub(offset).div_ceil(stride).min(g.output[2]);
            (first < end).then(|| (first..end, first * stride + offset - begin))
        })
        .collect()
}
