//! Where the windows of convolutions begin in images in channel blocks.

use super::super::dense;
use super::super::geometry::Geometry;
use super::super::parallel::for_each;
use crate::buffer::Buffer;
use crate::kernel::KernelError;
use crate::yield_point;

/// Where the windows of one image are.
pub(in crate::kernel) struct Positions<'a> {
    pub(in crate::kernel) geometry: &'a Geometry,
    pub(in crate::kernel) lanes: usize,
    pub(in crate::kernel) blocks: usize,
    /// Whether windows reach beyond the image, which is surrounded then.
    pub(in crate::kernel) bordered: bool,
    /// Extents of the image that windows read.
    pub(in crate::kernel) extent: [usize; 3],
    /// Elements of that image.
    pub(in crate::kernel) image_len: usize,
    /// Where each block and tap begins.
    pub(in crate::kernel) offsets: Buffer<usize>,
    /// Positions of the result that follow each other without a gap in the image.
    pub(in crate::kernel) width: usize,
}

impl<'a> Positions<'a> {
    pub(in crate::kernel) fn new(
        g: &'a Geometry,
        lanes: usize,
        blocks: usize,
    ) -> Result<Positions<'a>, KernelError> {
        let reach = |axis: usize| {
            g.output[axis].saturating_sub(1) * g.strides[axis]
                + (g.kernel[axis] - 1) * g.dilations[axis]
                + 1
        };
        let reached = [reach(0), reach(1), reach(2)];
        let bordered = g.begin != [0; 3] || (0..3).any(|axis| reached[axis] > g.input[axis]);
        let extent = if bordered { reached } else { g.input };
        let row = extent[2] * lanes;
        let plane = extent[1] * row;
        let block = extent[0] * plane;
        let image_len = dense::count(&[blocks, block])?;
        let mut offsets = Buffer::with_capacity(blocks * g.taps())?;
        for index in 0..blocks {
            for z in 0..g.kernel[0] {
                for y in 0..g.kernel[1] {
                    let start =
                        index * block + z * g.dilations[0] * plane + y * g.dilations[1] * row;
                    offsets.extend((0..g.kernel[2]).map(|x| start + x * g.dilations[2] * lanes));
                }
            }
        }
        let width = if g.is_pointwise() { g.output_size() } else { g.output[2] };
        Ok(Positions { geometry: g, lanes, blocks, bordered, extent, image_len, offsets, width })
    }

    /// Where the window of a position begins in the image.
    pub(in crate::kernel) fn window(&self, position: usize) -> usize {
        let g = self.geometry;
        let (row, x) = (position / self.width, position % self.width);
        if g.is_pointwise() {
            return x * self.lanes;
        }
        let (z, y) = (row / g.output[1], row % g.output[1]);
        let line = z * g.strides[0] * self.extent[1] + y * g.strides[1];
        (line * self.extent[2] + x * g.strides[2]) * self.lanes
    }

    /// Copies `input` into `target` and surrounds it with `fill`.
    pub(in crate::kernel) fn surround<T: Copy + Send + Sync>(
        &self,
        target: &mut [T],
        input: &[T],
        fill: T,
        parallel: bool,
    ) {
        let g = self.geometry;
        let row = self.extent[2] * self.lanes;
        let rows = self.extent[0] * self.extent[1];
        let width = g.input[2] * self.lanes;
        let copy = |(index, target): (usize, &mut [T])| {
            let (block, z, y) =
                (index / rows, index % rows / self.extent[1], index % self.extent[1]);
            let inside = |at: usize, axis: usize| {
                at.checked_sub(g.begin[axis]).filter(|at| *at < g.input[axis])
            };
            let (Some(z), Some(y)) = (inside(z, 0), inside(y, 1)) else {
                return target.fill(fill);
            };
            let start = ((block * g.input[0] + z) * g.input[1] + y) * width;
            let begin = (g.begin[2] * self.lanes).min(target.len());
            let (before, rest) = target.split_at_mut(begin);
            let (middle, after) = rest.split_at_mut(width.min(rest.len()));
            before.fill(fill);
            middle.copy_from_slice(&input[start..start + middle.len()]);
            after.fill(fill);
            yield_point::did_work(row / 8);
        };
        let target = &mut target[..self.blocks * rows * row];
        if parallel && target.len() > 32 * 1024 {
            for_each(target.chunks_exact_mut(row).enumerate(), &copy);
        } else {
            target.chunks_exact_mut(row).enumerate().for_each(copy);
        }
    }
}
