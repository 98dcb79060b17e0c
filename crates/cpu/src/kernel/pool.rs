//! Pooling over windows and over whole planes.

use model::DataType;
use model::op::{GlobalPool, Op, Pool, PoolKind};
use rten_simd::SimdOp;
use rten_vecmath::Sum;

use super::dense::{self, Real, elements};
use super::geometry::Geometry;
use super::parallel::{for_each, in_chunks};
use super::{Context, Inputs, Kernel, KernelResult, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::buffer_pool::Pooled;
use crate::kernel::{KernelError, invalid};
use crate::spare_buffers;
use crate::value::{Typed, TypedTensor, Value};
use crate::yield_point;

mod rows;

/// Planes that one task pools.
const TASK_PLANES: usize = 64;

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    let dtype = facts.input_dtype(0);
    match facts.step.op.clone() {
        Op::Pool(pool) => match (pool.kind, dtype) {
            (PoolKind::Max | PoolKind::MaxWithIndices { .. }, Some(dtype)) => {
                build_max(facts, pool, dtype)
            }
            (_, Some(DataType::F32)) => Ok(Kernel::new(move |c, i| mean_pool_f32(c, &i, &pool))),
            (_, Some(DataType::F64)) => Ok(Kernel::new(move |c, i| mean_pool::<f64>(c, &i, &pool))),
            (_, Some(DataType::F16 | DataType::BF16)) => {
                let wide = Kernel::new(move |c, i| mean_pool_f32(c, &i, &pool));
                Ok(dense::through_f32(facts, wide))
            }
            _ => Err(no_kernel(facts)),
        },
        Op::GlobalPool(kind) => match dtype {
            Some(DataType::F32) => Ok(Kernel::new(move |_, i| global::<f32>(&i, kind))),
            Some(DataType::F64) => Ok(Kernel::new(move |_, i| global::<f64>(&i, kind))),
            Some(DataType::F16 | DataType::BF16) => {
                let wide = Kernel::new(move |_, i| global::<f32>(&i, kind));
                Ok(dense::through_f32(facts, wide))
            }
            _ => Err(no_kernel(facts)),
        },
        other => Err(invalid!("{} is not a pooling operator", other.name())),
    }
}

fn build_max(facts: &StepFacts, pool: Pool, dtype: DataType) -> Result<Kernel, KernelError> {
    match dtype {
        DataType::F32 => Ok(Kernel::new(move |c, i| max_pool_f32(c, &i, &pool))),
        DataType::F64 => Ok(Kernel::new(move |c, i| max_pool::<f64>(c, &i, &pool))),
        DataType::U8 => Ok(Kernel::new(move |c, i| max_pool_bytes::<u8>(c, &i, &pool))),
        DataType::I8 => Ok(Kernel::new(move |c, i| max_pool_bytes::<i8>(c, &i, &pool))),
        DataType::F16 | DataType::BF16 => {
            let wide = Kernel::new(move |c, i| max_pool_f32(c, &i, &pool));
            Ok(dense::through_f32(facts, wide))
        }
        _ => Err(no_kernel(facts)),
    }
}

/// The kernel of the largest byte of each window.
pub(crate) fn build_max_bytes(pool: Pool, signed: bool) -> Kernel {
    match signed {
        true => Kernel::new(move |c, i| max_pool_bytes::<i8>(c, &i, &pool)),
        false => Kernel::new(move |c, i| max_pool_bytes::<u8>(c, &i, &pool)),
    }
}

/// The window over an input of `shape`, and the output's shape.
fn resolve(pool: &Pool, shape: &[usize]) -> Result<(Geometry, Vec<usize>), KernelError> {
    let [images, channels, spatial @ ..] = shape else {
        return Err(invalid!("shape {shape:?} has no spatial dimensions"));
    };
    let geometry = Geometry::new(&pool.window, spatial, &pool.window.kernel, pool.ceil_mode)?;
    let out_shape = geometry.output_shape(&[*images, *channels]);
    dense::count(&out_shape)?;
    Ok((geometry, out_shape))
}

fn max_pool_f32(context: &Context, inputs: &Inputs, pool: &Pool) -> KernelResult {
    let x = inputs.typed::<f32>(0)?;
    let (geometry, out_shape) = resolve(pool, dims(x))?;
    if pool.kind != PoolKind::Max || !rows::handles(&geometry) {
        return max_pool::<f32>(context, inputs, pool);
    }
    let mut out = spare_buffers::take(context.pool, dense::count(&out_shape)?)?;
    rows::max(&mut out, elements(x), &geometry)?;
    dense::output(&out_shape, out)
}

fn max_pool_bytes<T: MaxPoolElement>(
    context: &Context,
    inputs: &Inputs,
    pool: &Pool,
) -> KernelResult
where
    TypedTensor<T>: Into<Value>,
{
    let x = inputs.typed::<T>(0)?;
    let (geometry, out_shape) = resolve(pool, dims(x))?;
    if pool.kind != PoolKind::Max || !rows::handles(&geometry) {
        return max_pool::<T>(context, inputs, pool);
    }
    let mut out = context.pool.filled(dense::count(&out_shape)?, T::LOWEST)?;
    rows::max(&mut out, elements(x), &geometry)?;
    dense::output(&out_shape, out)
}

fn mean_pool_f32(context: &Context, inputs: &Inputs, pool: &Pool) -> KernelResult {
    let x = inputs.typed::<f32>(0)?;
    let (geometry, out_shape) = resolve(pool, dims(x))?;
    let PoolKind::Average { count_include_pad } = pool.kind else {
        return mean_pool::<f32>(context, inputs, pool);
    };
    if !rows::handles(&geometry) {
        return mean_pool::<f32>(context, inputs, pool);
    }
    let mut out = spare_buffers::take(context.pool, dense::count(&out_shape)?)?;
    rows::average(&mut out, elements(x), &geometry, |position| {
        divisor(&geometry, position, count_include_pad)
    })?;
    dense::output(&out_shape, out)
}

fn dims<T>(tensor: &TypedTensor<T>) -> &[usize] {
    tensor.shape()
}

/// Element types of max pooling.
trait MaxPoolElement: Copy + PartialOrd + Pooled + Typed {
    const LOWEST: Self;
}

impl MaxPoolElement for f32 {
    const LOWEST: f32 = f32::NEG_INFINITY;
}

impl MaxPoolElement for f64 {
    const LOWEST: f64 = f64::NEG_INFINITY;
}

impl MaxPoolElement for u8 {
    const LOWEST: u8 = u8::MIN;
}

impl MaxPoolElement for i8 {
    const LOWEST: i8 = i8::MIN;
}

/// Calls `visit` with the offset of each tap of the window at `position` that lies in the input.
fn visit_window(g: &Geometry, position: [usize; 3], mut visit: impl FnMut([usize; 3])) {
    let [(z_taps, z0), (y_taps, y0), (x_taps, x0)] =
        [0, 1, 2].map(|axis| g.inside(axis, position[axis]));
    for z in 0..z_taps.len() {
        for y in 0..y_taps.len() {
            for x in 0..x_taps.len() {
                visit([z0 + z * g.dilations[0], y0 + y * g.dilations[1], x0 + x * g.dilations[2]]);
            }
        }
    }
}

/// The position of the window of output element `index`.
fn window_position(g: &Geometry, index: usize) -> [usize; 3] {
    let [_, height, width] = g.output;
    [index / (height * width), index / width % height, index % width]
}

fn max_pool<T: MaxPoolElement>(context: &Context, inputs: &Inputs, pool: &Pool) -> KernelResult
where
    TypedTensor<T>: Into<Value>,
{
    let x = inputs.typed::<T>(0)?;
    let (geometry, out_shape) = resolve(pool, dims(x))?;
    let count = dense::count(&out_shape)?;
    let data = elements(x);
    let [depth, height, width] = geometry.input;
    let column_major = pool.kind == PoolKind::MaxWithIndices { column_major: true };
    let mut out = context.pool.filled(count, T::LOWEST)?;
    let mut indices = context.pool.filled(count, 0i64)?;
    let (plane, out_plane) = (geometry.input_size(), geometry.output_size());
    let taps = geometry.taps();
    if count > 0 {
        let planes = out.chunks_mut(out_plane).zip(indices.chunks_mut(out_plane));
        type Plane<'a, T> = (usize, (&'a mut [T], &'a mut [i64]));
        for_each(planes.enumerate(), &|(number, (out, indices)): Plane<T>| {
            let input = &data[number * plane..(number + 1) * plane];
            for (position, (y, index)) in out.iter_mut().zip(indices).enumerate() {
                yield_point::did_work(taps * 2);
                let mut best: Option<[usize; 3]> = None;
                visit_window(&geometry, window_position(&geometry, position), |at| {
                    let x = input[(at[0] * height + at[1]) * width + at[2]];
                    if best.is_none() || x > *y {
                        (*y, best) = (x, Some(at));
                    }
                });
                let [d, h, w] = best.unwrap_or_default();
                let offset = if column_major {
                    d + (h + w * height) * depth
                } else {
                    (d * height + h) * width + w
                };
                *index = (number * plane + offset) as i64;
            }
        });
    }
    let mut outputs = dense::output(&out_shape, out)?;
    if matches!(pool.kind, PoolKind::MaxWithIndices { .. }) {
        outputs.push(Value::I64(TypedTensor::from_data(out_shape.as_slice(), indices)));
    }
    Ok(outputs)
}

/// Taps of the window at `position` that count towards its mean.
pub(super) fn divisor(g: &Geometry, position: [usize; 3], include_pad: bool) -> usize {
    let along = |axis: usize| {
        if !include_pad {
            return g.inside(axis, position[axis]).0.len();
        }
        let start = position[axis] * g.strides[axis];
        let available = (g.input[axis] + g.begin[axis] + g.end[axis]).saturating_sub(start);
        available.div_ceil(g.dilations[axis]).min(g.kernel[axis])
    };
    along(0) * along(1) * along(2)
}

/// Average and p-norm pooling.
fn mean_pool<T: Real>(context: &Context, inputs: &Inputs, pool: &Pool) -> KernelResult
where
    TypedTensor<T>: Into<Value>,
{
    let x = inputs.typed::<T>(0)?;
    let (geometry, out_shape) = resolve(pool, dims(x))?;
    let count = dense::count(&out_shape)?;
    let data = elements(x);
    let [_, height, width] = geometry.input;
    let mut out = context.pool.filled(count, T::zero())?;
    let (plane, out_plane) = (geometry.input_size(), geometry.output_size());
    let taps = geometry.taps();
    if count > 0 {
        in_chunks(&mut out, out_plane, &|number: usize, out: &mut [T]| {
            let input = &data[number * plane..(number + 1) * plane];
            for (index, y) in out.iter_mut().enumerate() {
                let position = window_position(&geometry, index);
                yield_point::did_work(taps * 2);
                let mut values = Accumulator::new(pool.kind);
                visit_window(&geometry, position, |at| {
                    values.add(input[(at[0] * height + at[1]) * width + at[2]]);
                });
                *y = values.finish(|include_pad| divisor(&geometry, position, include_pad));
            }
        });
    }
    dense::output(&out_shape, out)
}

/// The sum behind a mean or a norm.
struct Accumulator<T> {
    kind: PoolKind,
    sum: T,
}

impl<T: Real> Accumulator<T>
where
    TypedTensor<T>: Into<Value>,
{
    fn new(kind: PoolKind) -> Self {
        Accumulator { kind, sum: T::zero() }
    }

    fn add(&mut self, x: T) {
        self.sum = self.sum
            + match self.kind {
                PoolKind::Lp { p } => x.abs().powi(p as i32),
                _ => x,
            };
    }

    fn finish(&self, divisor: impl Fn(bool) -> usize) -> T {
        match self.kind {
            PoolKind::Lp { p } => {
                self.sum.powf(T::one() / T::from(p.max(1)).unwrap_or_else(T::one))
            }
            PoolKind::Average { count_include_pad } => match divisor(count_include_pad) {
                0 => T::zero(),
                count => self.sum / T::from(count).unwrap_or_else(T::one),
            },
            _ => self.sum,
        }
    }
}

/// One plane of a global pooling.
fn pooled_plane<T: PlaneSum + Real>(row: &[T], kind: GlobalPool) -> T
where
    TypedTensor<T>: Into<Value>,
{
    match kind {
        GlobalPool::Average => T::sum(row) / T::from(row.len()).unwrap_or_else(T::one),
        GlobalPool::Max => row.iter().copied().fold(row[0], |a, b| if b > a { b } else { a }),
        GlobalPool::Lp { p } => {
            let sum = row.iter().fold(T::zero(), |sum, x| sum + x.abs().powi(p as i32));
            sum.powf(T::one() / T::from(p.max(1)).unwrap_or_else(T::one))
        }
    }
}

fn global<T: Real + PlaneSum>(inputs: &Inputs, kind: GlobalPool) -> KernelResult
where
    TypedTensor<T>: Into<Value>,
{
    let x = inputs.typed::<T>(0)?;
    let shape = dims(x);
    let [images, channels, spatial @ ..] = shape else {
        return Err(invalid!("shape {shape:?} has no channels"));
    };
    let plane: usize = spatial.iter().product();
    let mut out = Buffer::filled(dense::count(&[*images, *channels])?, T::zero())?;
    let data = elements(x);
    if plane > 0 {
        in_chunks(&mut out, TASK_PLANES, &|task: usize, out: &mut [T]| {
            let rows = data[task * TASK_PLANES * plane..].chunks_exact(plane);
            for (y, row) in out.iter_mut().zip(rows) {
                yield_point::did_work(plane / 4);
                *y = pooled_plane(row, kind);
            }
        });
    } else {
        out.fill(T::nan());
    }
    let out_shape: Vec<usize> =
        shape.iter().enumerate().map(|(index, &dim)| if index < 2 { dim } else { 1 }).collect();
    dense::output(&out_shape, out)
}

/// The sum of a whole plane.
trait PlaneSum: Sized {
    fn sum(row: &[Self]) -> Self;
}

impl PlaneSum for f32 {
    fn sum(row: &[f32]) -> f32 {
        Sum::new(row).dispatch()
    }
}

impl PlaneSum for f64 {
    fn sum(row: &[f64]) -> f64 {
        row.iter().sum()
    }
}

#[cfg(test)]
mod tests;
