//! Pooling of images in channel blocks.

use model::op::{GlobalPool, Pool, PoolKind};
use rten_simd::ops::{BitOps, FloatOps, NumOps};
use rten_simd::{Isa, SimdOp};

use super::super::geometry::Geometry;
use super::super::parallel::for_each;
use super::super::pool::divisor;
use super::super::{Context, Inputs, Kernel, KernelResult, dense};
use super::BlockedShape;
use super::layout::{Piece, output, pieces_of};
use crate::spare_buffers;
use crate::value::elements;
use crate::yield_point;

/// Elements that one task reads.
const TASK_READS: usize = 128 * 1024;

/// Whether a window is pooled in blocks.
pub(crate) fn supports_window(pool: &Pool) -> bool {
    matches!(pool.kind, PoolKind::Max | PoolKind::Average { .. })
}

/// The kernel of `pool`, for which [`supports_window`] holds.
pub(crate) fn build_window(pool: Pool) -> Kernel {
    Kernel::new(move |context: &Context, inputs: Inputs| window(context, &inputs, &pool))
}

/// Whether whole planes are pooled in blocks.
pub(crate) fn supports_global(kind: GlobalPool) -> bool {
    matches!(kind, GlobalPool::Average | GlobalPool::Max)
}

/// The kernel of a pooling over whole planes: the mean or the largest element.
pub(crate) fn build_global(kind: GlobalPool) -> Kernel {
    Kernel::new(move |context: &Context, inputs: Inputs| global(context, &inputs, kind))
}

fn window(context: &Context, inputs: &Inputs, pool: &Pool) -> KernelResult {
    let x = inputs.typed::<f32>(0)?;
    let shape = BlockedShape::new(x.shape())?;
    let lanes = shape.lanes;
    let geometry = Geometry::new(&pool.window, shape.spatial, &pool.window.kernel, pool.ceil_mode)?;
    let mut out_shape = geometry.output_shape(&[shape.images, shape.blocks]);
    out_shape.push(lanes);
    let mut out = spare_buffers::take(context.pool, dense::count(&out_shape)?)?;
    if out.is_empty() {
        return output(&out_shape, out);
    }
    let plane = geometry.output_size() * lanes;
    let row = geometry.output[2] * lanes;
    let rows = (TASK_READS / (row * geometry.taps())).max(1);
    let parallel = out.len() * geometry.taps() > TASK_READS;
    let mut pieces = pieces_of(&mut out, plane, rows * row)?;
    let data = elements(x);
    let compute = |piece: &mut Piece| {
        let image = &data[piece.number * shape.plane()..][..shape.plane()];
        let first = piece.start / lanes;
        PoolPiece { geometry: &geometry, kind: pool.kind, image, first, out: &mut *piece.data }
            .dispatch();
    };
    match parallel {
        true => for_each(pieces.iter_mut(), &compute),
        false => pieces.iter_mut().for_each(compute),
    }
    drop(pieces);
    output(&out_shape, out)
}

/// Positions of one block of the result.
struct PoolPiece<'a> {
    geometry: &'a Geometry,
    kind: PoolKind,
    image: &'a [f32],
    first: usize,
    out: &'a mut [f32],
}

impl SimdOp for PoolPiece<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let ops = isa.f32();
        let lanes = ops.len();
        let g = self.geometry;
        let [_, height, width] = g.output;
        for (index, out) in self.out.chunks_exact_mut(lanes).enumerate() {
            let at = self.first + index;
            let position = [at / (height * width), at / width % height, at % width];
            let [z, y, x] = [0, 1, 2].map(|axis| g.inside(axis, position[axis]));
            let is_max = self.kind == PoolKind::Max;
            let mut value = if is_max { ops.splat(f32::NEG_INFINITY) } else { ops.zero() };
            for depth in 0..z.0.len() {
                for line in 0..y.0.len() {
                    let row =
                        (z.1 + depth * g.dilations[0]) * g.input[1] + y.1 + line * g.dilations[1];
                    let start = (row * g.input[2] + x.1) * lanes;
                    for column in 0..x.0.len() {
                        let x = &self.image[start + column * g.dilations[2] * lanes..];
                        let x = ops.load(x);
                        value = if is_max { ops.max(value, x) } else { ops.add(value, x) };
                    }
                }
            }
            if let PoolKind::Average { count_include_pad } = self.kind {
                let count = divisor(g, position, count_include_pad);
                let factor = if count == 0 { 0.0 } else { 1.0 / count as f32 };
                value = ops.mul(value, ops.splat(factor));
            }
            ops.store(value, out);
            yield_point::did_work(g.taps());
        }
    }
}

fn global(context: &Context, inputs: &Inputs, kind: GlobalPool) -> KernelResult {
    let x = inputs.typed::<f32>(0)?;
    let shape = BlockedShape::new(x.shape())?;
    let mut out_shape = vec![shape.images, shape.blocks];
    out_shape.extend(shape.spatial.iter().map(|_| 1));
    out_shape.push(shape.lanes);
    let mut out = spare_buffers::take(context.pool, dense::count(&out_shape)?)?;
    let (data, plane) = (elements(x), shape.plane());
    if plane == 0 {
        out.fill(f32::NAN);
        return output(&out_shape, out);
    }
    let compute = |(index, out): (usize, &mut [f32])| {
        let image = &data[index * plane..][..plane];
        GlobalPiece { image, is_max: kind == GlobalPool::Max, out }.dispatch();
        yield_point::did_work(plane / 8);
    };
    let blocks = out.chunks_exact_mut(shape.lanes).enumerate();
    match data.len() > TASK_READS {
        true => for_each(blocks, &compute),
        false => blocks.for_each(compute),
    }
    output(&out_shape, out)
}

/// One block of a pooling over whole planes.
struct GlobalPiece<'a> {
    image: &'a [f32],
    is_max: bool,
    out: &'a mut [f32],
}

/// Sums that are added up side by side, to hide the latency of additions.
const SIDE_BY_SIDE: usize = 4;

impl SimdOp for GlobalPiece<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let ops = isa.f32();
        let lanes = ops.len();
        let start = if self.is_max { ops.splat(f32::NEG_INFINITY) } else { ops.zero() };
        let combine = |a, b| if self.is_max { ops.max(a, b) } else { ops.add(a, b) };
        let mut values = [start; SIDE_BY_SIDE];
        let groups = self.image.chunks_exact(SIDE_BY_SIDE * lanes);
        for x in groups.remainder().chunks_exact(lanes) {
            values[0] = combine(values[0], ops.load(x));
        }
        for group in groups {
            let x: [I::F32; SIDE_BY_SIDE] = ops.load_many(group);
            values = std::array::from_fn(|at| combine(values[at], x[at]));
        }
        let [a, b, c, d] = values;
        let mut value = combine(combine(a, b), combine(c, d));
        if !self.is_max {
            value = ops.div(value, ops.splat((self.image.len() / lanes) as f32));
        }
        ops.store(value, self.out);
    }
}
