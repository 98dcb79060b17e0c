//! Pooling of bytes in channel blocks.

use model::op::Pool;
use rten_simd::{Isa, SimdOp};

use super::super::super::geometry::Geometry;
use super::super::super::parallel::for_each;
use super::super::super::{Context, Inputs, Kernel, KernelResult, dense};
use super::super::mean::ByteMean;
use super::{BlockedShape, LANES};
use crate::buffer::Buffer;
use crate::kernel::invalid;
use crate::yield_point;

/// Bytes that one task reads.
const TASK_READS: usize = 256 * 1024;

/// The kernel of the largest byte of each window.
pub(crate) fn build_window(pool: Pool) -> Kernel {
    Kernel::new(move |context: &Context, inputs: Inputs| window(context, &inputs, &pool))
}

fn window(context: &Context, inputs: &Inputs, pool: &Pool) -> KernelResult {
    let (dims, data) = BlockedShape::of(inputs.get(0)?)?;
    if dims.lanes != LANES {
        return Err(invalid!("blocks of {} channels instead of {LANES}", dims.lanes));
    }
    let geometry = Geometry::new(&pool.window, dims.spatial, &pool.window.kernel, pool.ceil_mode)?;
    let mut out_shape = geometry.output_shape(&[dims.images, dims.blocks]);
    out_shape.push(dims.lanes);
    let mut out = context.pool.any_bytes(dense::count(&out_shape)?)?;
    if out.is_empty() {
        return dense::output(&out_shape, out);
    }
    let plane = geometry.output_size() * LANES;
    let row = geometry.output[2] * LANES;
    let rows = (TASK_READS / (row * geometry.taps())).max(1);
    let per_plane = plane.div_ceil(rows * row);
    let mut pieces = Buffer::with_capacity(out.len() / plane * per_plane)?;
    for (number, plane) in out.chunks_exact_mut(plane).enumerate() {
        let parts = plane.chunks_mut(rows * row).enumerate();
        pieces.extend(parts.map(|(part, out)| Piece {
            geometry: &geometry,
            image: &data[number * dims.plane()..][..dims.plane()],
            first: part * rows * geometry.output[2],
            out,
        }));
    }
    for_each(pieces.into_vec().into_iter(), &|piece: Piece| piece.dispatch());
    dense::output(&out_shape, out)
}

/// Positions of one block of the result.
struct Piece<'a> {
    geometry: &'a Geometry,
    image: &'a [u8],
    first: usize,
    out: &'a mut [u8],
}

impl SimdOp for Piece<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let g = self.geometry;
        let [_, height, width] = g.output;
        for (index, out) in self.out.chunks_exact_mut(LANES).enumerate() {
            let at = self.first + index;
            let position = [at / (height * width), at / width % height, at % width];
            let [z, y, x] = [0, 1, 2].map(|axis| g.inside(axis, position[axis]));
            let mut most = [0u8; LANES];
            for depth in 0..z.0.len() {
                for line in 0..y.0.len() {
                    let row =
                        (z.1 + depth * g.dilations[0]) * g.input[1] + y.1 + line * g.dilations[1];
                    let start = (row * g.input[2] + x.1) * LANES;
                    for column in 0..x.0.len() {
                        let bytes = &self.image[start + column * g.dilations[2] * LANES..];
                        let Some(bytes) = bytes.first_chunk::<LANES>() else { continue };
                        for (most, byte) in most.iter_mut().zip(bytes) {
                            *most = (*most).max(*byte);
                        }
                    }
                }
            }
            out.copy_from_slice(&most);
            yield_point::did_work(g.taps());
        }
    }
}

/// The kernel of the mean of each plane.
pub(crate) fn build_mean(mean: ByteMean) -> Kernel {
    let mean = mean.in_blocks();
    Kernel::new(move |context: &Context, inputs: Inputs| {
        let (dims, data) = BlockedShape::of(inputs.get(0)?)?;
        let mut out_shape = vec![dims.images, dims.blocks];
        out_shape.extend(dims.spatial.iter().map(|_| 1));
        out_shape.push(dims.lanes);
        let mut out = context.pool.any_bytes(dense::count(&out_shape)?)?;
        let (plane, lanes) = (dims.plane(), dims.lanes);
        let count = plane / lanes;
        let compute = |(number, out): (usize, &mut [u8])| {
            let bytes = &data[number * plane..][..plane];
            let mut sums = [0u64; LANES];
            PlaneSums { bytes, lanes, sums: &mut sums }.dispatch();
            for (slot, sum) in out.iter_mut().zip(sums) {
                *slot = mean.of(sum as i64, count) as u8;
            }
            yield_point::did_work(plane / 8);
        };
        for_each(out.chunks_exact_mut(lanes).enumerate(), &compute);
        dense::output(&out_shape, out)
    })
}

/// The sums of the bytes of each lane.
struct PlaneSums<'a> {
    bytes: &'a [u8],
    lanes: usize,
    sums: &'a mut [u64; LANES],
}

/// Positions whose sums fit in 16 bits.
const SHORT: usize = 256;

impl SimdOp for PlaneSums<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        for bytes in self.bytes.chunks(SHORT * self.lanes) {
            let mut sums = [0u16; LANES];
            for bytes in bytes.chunks_exact(self.lanes) {
                match bytes.first_chunk::<LANES>() {
                    Some(bytes) => {
                        sums.iter_mut().zip(bytes).for_each(|(sum, x)| *sum += u16::from(*x));
                    }
                    None => sums.iter_mut().zip(bytes).for_each(|(sum, x)| *sum += u16::from(*x)),
                }
            }
            for (total, sum) in self.sums.iter_mut().zip(sums) {
                *total += u64::from(sum);
            }
        }
    }
}
