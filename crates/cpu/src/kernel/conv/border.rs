//! Images with a border, laid out so that adjacent windows read adjacent elements.

use rten_simd::{Isa, SimdOp};

use super::super::gemm::IMAGE_GUARD;
use super::super::geometry::Geometry;
use crate::buffer::Buffer;
use crate::kernel::KernelError;
use crate::kernel::parallel::for_each;
use crate::yield_point;

/// Elements of rows that are added up before their work is reported.
const REPORT_AFTER: usize = 4096;

/// How a bordered image is laid out.
///
/// Columns are grouped by their remainder modulo the stride: with stride 2 first the even ones,
/// then the odd ones. Window `x` then reads tap `k` at `x` plus a constant, for any stride.
pub(crate) struct Border<'a> {
    geometry: &'a Geometry,
    channels: usize,
    /// Bordered extent of depth and height, as far as windows reach.
    extent: [usize; 2],
    /// Columns of one remainder.
    phase: usize,
    taps: Buffer<usize>,
    rows: Buffer<usize>,
}

/// One channel on its way into a bordered image.
struct CopyChannel<'a, 'b, T> {
    border: &'a Border<'b>,
    target: &'a mut [T],
    input: &'a [T],
    fill: T,
}

impl<T: Copy> SimdOp for CopyChannel<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        self.border.copy_channel(self.target, self.input, self.fill);
    }
}

impl<'a> Border<'a> {
    /// The layout for `channels` channels.
    pub(crate) fn new(g: &'a Geometry, channels: usize) -> Result<Border<'a>, KernelError> {
        let reach = |axis: usize| {
            g.output[axis].saturating_sub(1) * g.strides[axis]
                + (g.kernel[axis] - 1) * g.dilations[axis]
                + 1
        };
        let extent = [reach(0), reach(1)];
        let phase = reach(2).div_ceil(g.strides[2]);
        let row = phase * g.strides[2];
        let plane = row * extent[1];
        let mut taps = Buffer::with_capacity(channels * g.taps())?;
        for channel in 0..channels {
            for z in 0..g.kernel[0] {
                for y in 0..g.kernel[1] {
                    for x in 0..g.kernel[2] {
                        let column = x * g.dilations[2];
                        taps.push(
                            (channel * extent[0] + z * g.dilations[0]) * plane
                                + y * g.dilations[1] * row
                                + column % g.strides[2] * phase
                                + column / g.strides[2],
                        )?;
                    }
                }
            }
        }
        let mut rows = Buffer::with_capacity(g.output[0] * g.output[1])?;
        for z in 0..g.output[0] {
            rows.extend(
                (0..g.output[1]).map(|y| z * g.strides[0] * plane + y * g.strides[1] * row),
            );
        }
        Ok(Border { geometry: g, channels, extent, phase, taps, rows })
    }

    /// The offset of each channel and tap.
    pub(crate) fn taps(&self) -> &[usize] {
        &self.taps
    }

    /// The offset of each row of windows.
    pub(crate) fn rows(&self) -> &[usize] {
        &self.rows
    }

    fn channel_size(&self) -> usize {
        self.extent[0] * self.extent[1] * self.phase * self.geometry.strides[2]
    }

    /// Elements of the bordered image with its guards.
    pub(crate) fn length(&self) -> usize {
        self.channels * self.channel_size() + 2 * IMAGE_GUARD
    }

    /// Copies `input` into `target`, whose contents are arbitrary, and surrounds it with `fill`.
    pub(crate) fn copy<T: Copy + Send + Sync>(
        &self,
        target: &mut [T],
        input: &[T],
        fill: T,
        parallel: bool,
    ) {
        let end = target.len() - IMAGE_GUARD;
        target[..IMAGE_GUARD].fill(fill);
        target[end..].fill(fill);
        let channels = &mut target[IMAGE_GUARD..end];
        let plane = self.geometry.input_size();
        let size = self.channel_size();
        if plane == 0 {
            channels.fill(fill);
        } else if parallel && channels.len() > 32 * 1024 {
            let pairs = channels.chunks_exact_mut(size).zip(input.chunks_exact(plane));
            for_each(pairs, &|(target, input)| {
                CopyChannel { border: self, target, input, fill }.dispatch();
            });
        } else {
            channels.chunks_exact_mut(size).zip(input.chunks_exact(plane)).for_each(
                |(target, input)| {
                    CopyChannel { border: self, target, input, fill }.dispatch();
                },
            );
        }
    }

    #[inline(always)]
    fn copy_channel<T: Copy>(&self, target: &mut [T], input: &[T], fill: T) {
        let g = self.geometry;
        let [_, height, width] = g.input;
        let row_size = self.phase * g.strides[2];
        let mut unreported = 0;
        let inside = |position: usize, axis: usize| {
            position.checked_sub(g.begin[axis]).filter(|&at| at < g.input[axis])
        };
        let mut planes = target.chunks_exact_mut(row_size * self.extent[1]);
        for (z, plane) in (0..self.extent[0]).zip(&mut planes) {
            for (y, row) in plane.chunks_exact_mut(row_size).enumerate() {
                let (Some(z), Some(y)) = (inside(z, 0), inside(y, 1)) else {
                    row.fill(fill);
                    continue;
                };
                let start = (z * height + y) * width;
                self.copy_row(row, &input[start..start + width], fill);
                unreported += row_size;
                if unreported >= REPORT_AFTER {
                    yield_point::did_work(unreported / 2);
                    unreported = 0;
                }
            }
        }
    }

    #[inline(always)]
    fn copy_row<T: Copy>(&self, row: &mut [T], source: &[T], fill: T) {
        let g = self.geometry;
        let (stride, begin) = (g.strides[2], g.begin[2]);
        if stride == 1 {
            let begin = begin.min(row.len());
            let (before, rest) = row.split_at_mut(begin);
            let (middle, after) = rest.split_at_mut(source.len().min(rest.len()));
            before.fill(fill);
            middle.copy_from_slice(&source[..middle.len()]);
            after.fill(fill);
            return;
        }
        if stride == 2 && begin <= 1 {
            return self.copy_halves(row, source, begin == 1, fill);
        }
        for (phase, target) in row.chunks_exact_mut(self.phase).enumerate() {
            // Element `i` of this phase is column `i * stride + phase - begin` of the input.
            let first = begin.saturating_sub(phase).div_ceil(stride).min(target.len());
            let from = (first * stride + phase).saturating_sub(begin).min(source.len());
            let count = (source.len() - from).div_ceil(stride).min(target.len() - first);
            target[..first].fill(fill);
            target[first + count..].fill(fill);
            let target = &mut target[first..first + count];
            let source = source[from..].iter().step_by(stride);
            target.iter_mut().zip(source).for_each(|(y, &x)| *y = x);
        }
    }

    /// Copies a row for stride 2 and separates even and odd columns. With a border of one, the
    /// input's even columns are the bordered row's odd ones.
    #[inline(always)]
    fn copy_halves<T: Copy>(&self, row: &mut [T], source: &[T], shifted: bool, fill: T) {
        let (even, odd) = row.split_at_mut(self.phase);
        let (first, second) = if shifted { (odd, &mut even[1..]) } else { (even, odd) };
        let (pairs, rest) = source.as_chunks::<2>();
        for (target, pair) in first.iter_mut().zip(pairs) {
            *target = pair[0];
        }
        for (target, pair) in second.iter_mut().zip(pairs) {
            *target = pair[1];
        }
        let mut end = pairs.len();
        second.iter_mut().skip(end).for_each(|target| *target = fill);
        if let ([last], Some(target)) = (rest, first.get_mut(end)) {
            *target = *last;
            end += 1;
        }
        first.iter_mut().skip(end).for_each(|target| *target = fill);
        if shifted {
            row[0] = fill;
        }
    }
}
