//! Resizing, one dimension after the other.

use model::DataType;
use model::op::{AspectPolicy, CoordinateMode, Resize, ResizeMode};

use super::taps::{ResizeAxis, Taps};
use crate::buffer::{Buffer, Data};
use crate::buffer_pool::{BufferPool, Pooled};
use crate::kernel::cast::convert;
use crate::kernel::layout::rearrange;
use crate::kernel::operand::{
    around, elements, integers, is_half, one, output_len, resolve_axes, through_f32,
};
use crate::kernel::parallel::in_weighted_pieces;
use crate::kernel::unary::Real;
use crate::kernel::{Context, Inputs, Kernel, KernelResult, StepFacts, no_kernel};
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, Value, into_elements};
use crate::yield_point;

/// Maximum taps of a dimension in all, against hostile sizes.
const MAX_TAPS: f64 = (1u64 << 28) as f64;

pub(super) fn build(
    facts: &StepFacts,
    resize: Resize,
    dtype: DataType,
) -> Result<Kernel, KernelError> {
    if resize.antialias && resize.mode == ResizeMode::Nearest {
        return Err("nearest neighbours cannot be antialiased".into());
    }
    let moves = resize.mode == ResizeMode::Nearest
        && resize.coordinates != CoordinateMode::CropAndResize
        && !resize.exclude_outside;
    match dtype {
        _ if moves => Ok(Kernel::new(move |context, inputs| nearest(context, inputs, &resize))),
        DataType::F32 => {
            Ok(Kernel::new(move |context, inputs| real::<f32>(context, inputs, &resize)))
        }
        DataType::F64 => {
            Ok(Kernel::new(move |context, inputs| real::<f64>(context, inputs, &resize)))
        }
        _ if is_half(dtype) => Ok(through_f32(
            dtype,
            Kernel::new(move |context, inputs| real::<f32>(context, inputs, &resize)),
        )),
        _ if dtype.is_integer() => {
            Ok(Kernel::new(move |context, inputs| rounded(context, inputs, &resize, dtype)))
        }
        _ => Err(no_kernel(facts)),
    }
}

/// The elements of optional float operand `index`; none when it is empty.
fn floats(inputs: &Inputs, index: usize) -> Result<Option<Buffer<f64>>, KernelError> {
    let Some(value) = inputs.optional(index) else { return Ok(None) };
    match convert(value, DataType::F64)? {
        Value::F64(tensor) if tensor.len() > 0 => Ok(Some(into_elements(tensor))),
        _ => Ok(None),
    }
}

/// Every dimension's extents, scale and region.
fn plan(inputs: &Inputs, resize: &Resize) -> Result<Vec<ResizeAxis>, KernelError> {
    let value = inputs.get(0)?;
    let shape = value.shape();
    let axes = match &resize.axes {
        Some(axes) => resolve_axes(axes, shape.len())?,
        None => (0..shape.len()).collect(),
    };
    let mut plan: Vec<ResizeAxis> = shape
        .iter()
        .map(|&size| ResizeAxis { input: size, output: size, scale: 1.0, roi: (0.0, 1.0) })
        .collect();
    let sizes = inputs.optional(3).map(integers).transpose()?.filter(|sizes| !sizes.is_empty());
    match (floats(inputs, 2)?, sizes) {
        (Some(scales), None) => scale_axes(&mut plan, &axes, &scales)?,
        (None, Some(sizes)) => size_axes(&mut plan, &axes, &sizes, resize.keep_aspect)?,
        _ => return Err("exactly one of scales and sizes must be given".into()),
    }
    if resize.coordinates == CoordinateMode::CropAndResize {
        let roi = floats(inputs, 1)?.ok_or("a region to crop is needed")?;
        if roi.len() != axes.len() * 2 {
            return Err(invalid!("a region of {} numbers for {} axes", roi.len(), axes.len()));
        }
        for (i, &axis) in axes.iter().enumerate() {
            plan[axis].roi = (roi[i], roi[axes.len() + i]);
        }
    }
    check(&plan, resize)?;
    Ok(plan)
}

/// An error for outputs and filters that no real image needs.
fn check(plan: &[ResizeAxis], resize: &Resize) -> Result<(), KernelError> {
    let out: Vec<usize> = plan.iter().map(|axis| axis.output).collect();
    output_len(&out)?;
    for axis in plan {
        if axis.input == 0 && axis.output > 0 {
            return Err("an empty dimension cannot be resized".into());
        }
        let taps = if resize.antialias { 4.0 / axis.scale.min(1.0) } else { 4.0 };
        let all = taps * axis.output as f64;
        if axis.output > 0 && (all.is_nan() || all > MAX_TAPS) {
            return Err(invalid!("scale {} is too small to filter", axis.scale));
        }
    }
    Ok(())
}

fn scale_axes(plan: &mut [ResizeAxis], axes: &[usize], scales: &[f64]) -> Result<(), KernelError> {
    if scales.len() != axes.len() {
        return Err(invalid!("{} scales for {} axes", scales.len(), axes.len()));
    }
    for (&axis, &scale) in axes.iter().zip(scales) {
        if !(scale > 0.0 && scale.is_finite()) {
            return Err(invalid!("a scale cannot be {scale}"));
        }
        plan[axis].scale = scale;
        plan[axis].output = (scale * plan[axis].input as f64).floor() as usize;
    }
    Ok(())
}

fn size_axes(
    plan: &mut [ResizeAxis],
    axes: &[usize],
    sizes: &[i64],
    policy: AspectPolicy,
) -> Result<(), KernelError> {
    if sizes.len() != axes.len() {
        return Err(invalid!("{} sizes for {} axes", sizes.len(), axes.len()));
    }
    let mut scales = Vec::with_capacity(axes.len());
    for (&axis, &size) in axes.iter().zip(sizes) {
        let size = usize::try_from(size).map_err(|_| invalid!("size {size} is negative"))?;
        plan[axis].output = size;
        plan[axis].scale = size as f64 / plan[axis].input as f64;
        scales.push(plan[axis].scale);
    }
    let common = match policy {
        AspectPolicy::Stretch => return Ok(()),
        AspectPolicy::NotLarger => scales.into_iter().fold(f64::INFINITY, f64::min),
        AspectPolicy::NotSmaller => scales.into_iter().fold(0.0, f64::max),
    };
    for &axis in axes {
        plan[axis].scale = common;
        plan[axis].output = (common * plan[axis].input as f64 + 0.5).floor() as usize;
    }
    Ok(())
}

/// Dimensions that change, those that shrink most first, which makes the others cheaper.
fn changing(plan: &[ResizeAxis], coordinates: CoordinateMode) -> Vec<usize> {
    let mut axes: Vec<usize> =
        (0..plan.len()).filter(|&axis| !plan[axis].is_identity(coordinates)).collect();
    axes.sort_by(|&a, &b| plan[a].scale.total_cmp(&plan[b].scale));
    axes
}

/// Nearest-neighbour resizing, which only copies elements.
fn nearest(context: &Context, mut inputs: Inputs, resize: &Resize) -> KernelResult {
    let plan = plan(&inputs, resize)?;
    let axes = changing(&plan, resize.coordinates);
    if axes.is_empty() {
        return one(inputs.take(0)?);
    }
    let value = inputs.get(0)?;
    let out: Vec<usize> = plan.iter().map(|axis| axis.output).collect();
    let mut picks = Vec::with_capacity(axes.len());
    for &axis in &axes {
        picks.push((axis, Taps::new(resize, plan[axis])?.single()?));
    }
    one(rearrange!(value, &out, data => pick(context.pool, data, value.shape(), &picks)?))
}

/// Selects the positions `picks` of one dimension after the other.
fn pick<T: Pooled + Default>(
    pool: &BufferPool,
    data: &[T],
    shape: &[usize],
    picks: &[(usize, Buffer<usize>)],
) -> Result<Buffer<T>, KernelError> {
    let mut shape = shape.to_vec();
    let mut current = Data::Borrowed(data);
    for (axis, sources) in picks {
        let (outer, along, inner) = around(&shape, *axis);
        let mut next = pool.filled(outer * sources.len() * inner, T::default())?;
        let block = sources.len() * inner;
        if !next.is_empty() {
            in_weighted_pieces(&mut next, block, 1, &|start: usize, piece: &mut [T]| {
                for (number, target) in piece.chunks_mut(block).enumerate() {
                    let from =
                        &current[(start / block + number) * along * inner..][..along * inner];
                    if inner == 1 {
                        yield_point::did_work(target.len());
                        for (slot, &source) in target.iter_mut().zip(sources) {
                            slot.clone_from(&from[source]);
                        }
                    } else {
                        for (run, &source) in target.chunks_mut(inner).zip(sources) {
                            yield_point::did_work(inner);
                            run.clone_from_slice(&from[source * inner..][..inner]);
                        }
                    }
                }
            });
        }
        shape[*axis] = sources.len();
        current = Data::Owned(next);
    }
    Ok(current.into_owned()?)
}

fn real<F: Real>(context: &Context, mut inputs: Inputs, resize: &Resize) -> KernelResult {
    let plan = plan(&inputs, resize)?;
    let axes = changing(&plan, resize.coordinates);
    if axes.is_empty() {
        return one(inputs.take(0)?);
    }
    let tensor = inputs.typed::<F>(0)?;
    let mut shape = tensor.shape().to_vec();
    let mut current = Data::Borrowed(elements(tensor));
    let extrapolation = F::of(f64::from(resize.extrapolation_value));
    for axis in axes {
        let taps = Taps::new(resize, plan[axis])?;
        let extents = around(&shape, axis);
        let next = blend(context.pool, &current, extents, plan[axis].output, &taps, extrapolation)?;
        shape[axis] = plan[axis].output;
        current = Data::Owned(next);
    }
    one(F::wrap(&shape, current.into_owned()?))
}

/// Applies the weighted taps of one dimension.
fn blend<F: Real>(
    pool: &BufferPool,
    data: &[F],
    (outer, along, inner): (usize, usize, usize),
    length: usize,
    taps: &Taps,
    extrapolation: F,
) -> Result<Buffer<F>, KernelError> {
    let mut out = pool.filled(outer * length * inner, F::default())?;
    if out.is_empty() {
        return Ok(out);
    }
    let weights = Buffer::collect(taps.weights.iter().map(|&weight| F::of(weight)))?;
    let width = taps.width;
    in_weighted_pieces(&mut out, inner, width, &|start: usize, piece: &mut [F]| {
        for (number, run) in piece.chunks_mut(inner).enumerate() {
            yield_point::did_work(inner * width);
            let (row, position) =
                ((start / inner + number) / length, (start / inner + number) % length);
            if taps.outside[position] {
                run.fill(extrapolation);
                continue;
            }
            let from = &data[row * along * inner..][..along * inner];
            let sources = &taps.sources[position * width..][..width];
            let weights = &weights[position * width..][..width];
            for (&source, &weight) in sources.iter().zip(weights) {
                // An infinite or NaN element with a weight of zero must not count.
                if weight != F::default() {
                    let line = &from[source * inner..][..inner];
                    for (slot, &x) in run.iter_mut().zip(line) {
                        *slot = *slot + weight * x;
                    }
                }
            }
        }
    });
    Ok(out)
}

/// Integers are resized as real numbers and rounded back.
fn rounded(
    context: &Context,
    mut inputs: Inputs,
    resize: &Resize,
    dtype: DataType,
) -> KernelResult {
    let wide = convert(inputs.get(0)?, DataType::F64)?;
    inputs.replace(0, wide);
    match real::<f64>(context, inputs, resize)?.pop() {
        Some(Value::F64(tensor)) => {
            let data = Buffer::collect(elements(&tensor).iter().map(|x| x.round_ties_even()))?;
            let rounded = TypedTensor::from_data(tensor.shape(), data);
            one(convert(&Value::F64(rounded), dtype)?)
        }
        _ => Err("no result".into()),
    }
}
