//! Pooling of planes a row at a time: each tap of the window is one pass over whole rows.

use rayon::prelude::*;

use super::super::geometry::Geometry;
use super::MaxPoolElement;
use crate::buffer::Buffer;
use crate::kernel::KernelError;
use crate::kernel::parallel::Failure;
use crate::yield_point;

/// Elements of rows that are added up before their work is reported.
const REPORT_AFTER: usize = 4096;

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
    let (plane, out_plane, width) = (g.input_size(), g.output_size(), g.input[2]);
    let columns = column_ranges(g);
    let failure = Failure::default();
    let planes = out.par_chunks_mut(out_plane).zip(data.par_chunks(plane)).with_min_len(4);
    planes.for_each_init(
        || (yield_point::start_work(), failure.check(Buffer::filled(width, initial))),
        |(_, folded), (out, input)| {
            let Some(folded) = folded else { return };
            let mut unreported = 0;
            for (row, out_row) in out.chunks_exact_mut(g.output[2]).enumerate() {
                let (taps, first) = g.inside(1, row);
                fold_rows(folded, input, width, first, g.dilations[1], taps.len(), initial, &fold);
                out_row.fill(initial);
                for (range, start) in &columns {
                    let stride = g.strides[2];
                    let target = &mut out_row[range.clone()];
                    if stride == 1 {
                        let source = &folded[*start..*start + target.len()];
                        target.iter_mut().zip(source).for_each(|(y, &x)| *y = fold(*y, x));
                    } else {
                        let source = folded[*start..].iter().step_by(stride);
                        target.iter_mut().zip(source).for_each(|(y, &x)| *y = fold(*y, x));
                    }
                }
                finish(row, out_row);
                unreported += width * taps.len();
                if unreported >= REPORT_AFTER {
                    yield_point::did_work(unreported / 2);
                    unreported = 0;
                }
            }
            yield_point::did_work(unreported / 2);
        },
    );
    failure.result()
}

/// Folds the rows a window covers into one.
fn fold_rows<T: Copy>(
    folded: &mut [T],
    input: &[T],
    width: usize,
    first: usize,
    dilation: usize,
    taps: usize,
    initial: T,
    fold: &impl Fn(T, T) -> T,
) {
    if taps == 0 {
        folded.fill(initial);
        return;
    }
    folded.copy_from_slice(&input[first * width..(first + 1) * width]);
    for tap in 1..taps {
        let start = (first + tap * dilation) * width;
        let row = &input[start..start + width];
        folded.iter_mut().zip(row).for_each(|(y, &x)| *y = fold(*y, x));
    }
}

/// For each tap along a row, the outputs for which it lies in the input, and the first one's input
/// position.
fn column_ranges(g: &Geometry) -> Vec<(std::ops::Range<usize>, usize)> {
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
