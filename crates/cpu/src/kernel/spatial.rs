//! Operators on images beside convolution and pooling.

mod boxes;
mod deform;

use model::op::{Op, Spatial};

use super::layout::rearrange;
use super::operand::{
    Element, dtype_of, elements, integer_list, integers, one, output_len, resolve_axes,
    row_strides, sizes,
};
use super::wide::{from_reals, reals};
use super::{Inputs, Kernel, KernelResult, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, with_number};
use crate::yield_point;

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    let Op::Spatial(spatial) = &facts.step.op else { return Err(no_kernel(facts)) };
    let dtype = dtype_of(facts, 0)?;
    let number = dtype.is_float() || dtype.is_integer();
    match spatial.clone() {
        Spatial::AffineGrid { align_corners } if dtype.is_float() => {
            Ok(Kernel::new(move |_, inputs| affine_grid(&inputs, align_corners)))
        }
        Spatial::CenterCropPad { axes } => {
            Ok(Kernel::new(move |_, inputs| center_crop_pad(&inputs, axes.as_deref())))
        }
        Spatial::Col2Im { dilations, pads, strides } if number => {
            let blocks = Blocks { dilations, pads, strides };
            Ok(Kernel::new(move |_, inputs| col2im(&inputs, &blocks)))
        }
        Spatial::MaxUnpool { kernel, pads, strides } if number => {
            let pooled = Pooled { kernel, pads, strides };
            Ok(Kernel::new(move |_, inputs| max_unpool(&inputs, &pooled)))
        }
        Spatial::RoiAlign(roi) if dtype.is_float() => {
            Ok(Kernel::new(move |_, inputs| boxes::roi_align(&inputs, roi)))
        }
        Spatial::DeformConv { window, groups, offset_groups } if dtype.is_float() => {
            let conv = deform::DeformedConv { window, groups, offset_groups };
            Ok(Kernel::new(move |_, inputs| conv.run(&inputs)))
        }
        _ => Err(no_kernel(facts)),
    }
}

fn affine_grid(inputs: &Inputs, align_corners: bool) -> KernelResult {
    let value = inputs.get(0)?;
    let size = sizes(&integer_list(inputs, 1)?)?;
    let spatial = match size.len() {
        4 => 2,
        5 => 3,
        other => return Err(invalid!("{other} sizes of an image")),
    };
    if value.shape() != [size[0], spatial, spatial + 1] {
        return Err(invalid!("a transform of shape {:?} for {size:?}", value.shape()));
    }
    let theta = reals(value)?;
    let extents = &size[2..];
    let points = output_len(extents)?;
    let shape = [&size[..1], extents, &[spatial]].concat();
    let mut out = Buffer::filled(output_len(&shape)?, 0f64)?;
    let strides = row_strides(extents);
    let coordinate = |index: usize, size: usize| match align_corners {
        true if size == 1 => -1.0,
        true => -1.0 + 2.0 * index as f64 / (size as f64 - 1.0),
        false => (2.0 * index as f64 + 1.0) / size as f64 - 1.0,
    };
    for image in 0..size[0] {
        let matrix = &theta[image * spatial * (spatial + 1)..][..spatial * (spatial + 1)];
        for point in 0..points {
            yield_point::did_work(10);
            // The first coordinate is along the last dimension.
            let mut at = [1.0; 4];
            for (axis, (stride, extent)) in strides.iter().zip(extents).enumerate() {
                at[spatial - 1 - axis] = coordinate(point / stride % extent, *extent);
            }
            let target = &mut out[(image * points + point) * spatial..][..spatial];
            for (row, slot) in matrix.chunks_exact(spatial + 1).zip(target) {
                *slot = row.iter().zip(at).map(|(weight, at)| weight * at).sum();
            }
        }
    }
    one(from_reals(&shape, out, value.dtype())?)
}

fn center_crop_pad(inputs: &Inputs, axes: Option<&[i64]>) -> KernelResult {
    let value = inputs.get(0)?;
    let shape = value.shape();
    let target = sizes(&integer_list(inputs, 1)?)?;
    let all: Vec<i64> = (0..shape.len() as i64).collect();
    let axes = resolve_axes(axes.unwrap_or(&all), shape.len())?;
    if axes.len() != target.len() {
        return Err(invalid!("{} sizes for {} dimensions", target.len(), axes.len()));
    }
    let mut out_shape = shape.to_vec();
    // What is cut from the front of the input, and what is left free in the output.
    let (mut cut, mut free) = (vec![0; shape.len()], vec![0; shape.len()]);
    for (axis, size) in axes.into_iter().zip(target) {
        cut[axis] = shape[axis].saturating_sub(size) / 2;
        free[axis] = size.saturating_sub(shape[axis]) / 2;
        out_shape[axis] = size;
    }
    let count = output_len(&out_shape)?;
    let copied: Vec<usize> = shape.iter().zip(&out_shape).map(|(a, b)| *a.min(b)).collect();
    let (from, to) = (row_strides(shape), row_strides(&out_shape));
    let dot = |at: &[usize], strides: &[usize]| -> usize {
        at.iter().zip(strides).map(|(at, stride)| at * stride).sum()
    };
    let (from_start, to_start) = (dot(&cut, &from), dot(&free, &to));
    let moved = output_len(&copied)?;
    let steps = row_strides(&copied);
    let place = |index: usize, strides: &[usize]| -> usize {
        let parts = steps.iter().zip(&copied).zip(strides);
        parts.map(|((step, size), stride)| index / step % size * stride).sum()
    };
    let rearranged = rearrange!(value, &out_shape, data => {
        let mut out = Buffer::filled(count, Default::default())?;
        for index in 0..moved {
            yield_point::did_work(4);
            let (from, to) = (from_start + place(index, &from), to_start + place(index, &to));
            out[to..=to].clone_from_slice(&data[from..=from]);
        }
        out
    });
    one(rearranged)
}

/// Blocks of an image.
struct Blocks {
    dilations: Vec<usize>,
    pads: Vec<usize>,
    strides: Vec<usize>,
}

fn filled(list: &[usize], count: usize, default: usize) -> Result<Vec<usize>, KernelError> {
    match list.len() {
        0 => Ok(std::iter::repeat_n(default, count).collect()),
        length if length == count => Ok(list.to_vec()),
        length => Err(invalid!("{length} numbers for {count}")),
    }
}

fn col2im(inputs: &Inputs, blocks: &Blocks) -> KernelResult {
    let value = inputs.get(0)?;
    let (image, kernel) = (sizes(&integer_list(inputs, 1)?)?, sizes(&integer_list(inputs, 2)?)?);
    let rank = image.len();
    let &[batch, columns, count] = value.shape() else {
        return Err(invalid!("columns of shape {:?}", value.shape()));
    };
    let taps = output_len(&kernel)?;
    if rank == 0 || kernel.len() != rank || taps == 0 || columns % taps != 0 {
        return Err(invalid!("{columns} rows of columns for blocks of {kernel:?}"));
    }
    let dilations = filled(&blocks.dilations, rank, 1)?;
    let pads = filled(&blocks.pads, 2 * rank, 0)?;
    let strides = filled(&blocks.strides, rank, 1)?;
    let mut places = Vec::new();
    for axis in 0..rank {
        let padded = image[axis].saturating_add(pads[axis]).saturating_add(pads[axis + rank]);
        let reach = (kernel[axis] - 1).saturating_mul(dilations[axis]).saturating_add(1);
        let free = padded.checked_sub(reach).filter(|_| strides[axis] > 0);
        places
            .push(free.ok_or_else(|| invalid!("blocks do not fit the image"))? / strides[axis] + 1);
    }
    if output_len(&places)? != count {
        return Err(invalid!("{count} columns instead of {places:?}"));
    }
    let channels = columns / taps;
    let shape = [&[batch, channels], &image[..]].concat();
    let pixels = output_len(&image)?;
    let data = reals(value)?;
    let mut out = Buffer::filled(output_len(&shape)?, 0f64)?;
    let (tap_strides, place_strides) = (row_strides(&kernel), row_strides(&places));
    let image_strides = row_strides(&image);
    for tap in 0..taps {
        for place in 0..count {
            let mut pixel = Some(0usize);
            for axis in 0..rank {
                let at = place / place_strides[axis] % places[axis] * strides[axis]
                    + tap / tap_strides[axis] % kernel[axis] * dilations[axis];
                let at = at.checked_sub(pads[axis]).filter(|at| *at < image[axis]);
                pixel = pixel.zip(at).map(|(sum, at)| sum + at * image_strides[axis]);
            }
            let Some(pixel) = pixel else { continue };
            yield_point::did_work(batch * channels * 2 + 10);
            for plane in 0..batch * channels {
                let column = plane * taps + tap;
                out[plane * pixels + pixel] += data[column * count + place];
            }
        }
    }
    one(from_reals(&shape, out, value.dtype())?)
}

/// The pooling that is undone.
struct Pooled {
    kernel: Vec<usize>,
    pads: Vec<usize>,
    strides: Vec<usize>,
}

fn max_unpool(inputs: &Inputs, pooled: &Pooled) -> KernelResult {
    let value = inputs.get(0)?;
    let indices = inputs.get(1)?;
    let (shape, rank) = (value.shape(), pooled.kernel.len());
    if shape.len() != rank + 2 || indices.shape() != shape {
        return Err(invalid!("maxima of shape {shape:?} at {:?}", indices.shape()));
    }
    let (strides, pads) = (filled(&pooled.strides, rank, 1)?, filled(&pooled.pads, 2 * rank, 0)?);
    let mut inferred = shape[..2].to_vec();
    for axis in 0..rank {
        let grown = shape[axis + 2].saturating_sub(1).saturating_mul(strides[axis]);
        let size = grown.saturating_add(pooled.kernel[axis]);
        inferred.push(size.saturating_sub(pads[axis]).saturating_sub(pads[axis + rank]));
    }
    let out_shape = match inputs.optional(2) {
        Some(_) => sizes(&integer_list(inputs, 2)?)?,
        None => inferred.clone(),
    };
    let fits = out_shape.len() == inferred.len()
        && out_shape.iter().zip(&inferred).all(|(out, own)| out >= own);
    if !fits {
        return Err(invalid!("an output of shape {out_shape:?} for {inferred:?}"));
    }
    let indices = integers(indices)?;
    with_number!(value, tensor => put(tensor, &indices, &inferred, &out_shape), _ => {
        Err("maxima are numbers".into())
    })
}

/// Elements at indices into `inferred`, in an output that may be larger at its ends.
fn put<T: Element + Copy>(
    tensor: &TypedTensor<T>,
    indices: &[i64],
    inferred: &[usize],
    out_shape: &[usize],
) -> KernelResult {
    let count = output_len(inferred)?;
    let mut out = Buffer::filled(output_len(out_shape)?, T::default())?;
    let (own, target) = (row_strides(inferred), row_strides(out_shape));
    for (x, index) in elements(tensor).iter().zip(indices) {
        yield_point::did_work(10);
        let index = usize::try_from(*index).ok().filter(|index| *index < count);
        let index = index.ok_or_else(|| invalid!("an index outside of {inferred:?}"))?;
        let parts = own.iter().zip(inferred).zip(&target);
        let at: usize = parts.map(|((own, size), to)| index / own % size * to).sum();
        out[at] = *x;
    }
    one(T::wrap(out_shape, out))
}

/// The value of `value` at a point between pixels; zeros outside.
fn bilinear(plane: &[f64], (height, width): (usize, usize), (y, x): (f64, f64)) -> f64 {
    if !(y > -1.0 && x > -1.0 && y < height as f64 && x < width as f64) {
        return 0.0;
    }
    let (top, left) = (y.floor(), x.floor());
    let (down, right) = (y - top, x - left);
    let pixel = |row: f64, column: f64| {
        let inside = row >= 0.0 && column >= 0.0 && row < height as f64 && column < width as f64;
        if inside { plane[row as usize * width + column as usize] } else { 0.0 }
    };
    let upper = pixel(top, left) * (1.0 - right) + pixel(top, left + 1.0) * right;
    let lower = pixel(top + 1.0, left) * (1.0 - right) + pixel(top + 1.0, left + 1.0) * right;
    upper * (1.0 - down) + lower * down
}

#[cfg(test)]
mod tests {
    use super::super::testing::integers;
    use super::super::testing::*;
    use super::*;

    #[test]
    fn crops_and_pads_around_the_centre() {
        let x = integers(&[2, 3], &[1, 2, 3, 4, 5, 6]);
        let op = Op::Spatial(Spatial::CenterCropPad { axes: None });
        let got = run(op, &[x, integers(&[2], &[4, 2])]).remove(0);
        assert_eq!(got.shape(), [4, 2]);
        assert_eq!(values::<i64>(&got), [0, 0, 1, 2, 4, 5, 0, 0]);
    }

    #[test]
    fn bad_positions_are_refused() {
        let kernel = vec![2, 2];
        let op = Op::Spatial(Spatial::MaxUnpool { kernel, pads: vec![], strides: vec![] });
        let x = floats(&[1, 1, 1, 1], &[1.0]);
        let text = error(op, &[x, integers(&[1, 1, 1, 1], &[4])]);
        assert!(text.contains("outside"), "{text}");
        let none = || Vec::new();
        let op = Spatial::Col2Im { dilations: none(), pads: none(), strides: none() };
        let x = floats(&[1, 4, 2], &[0.0; 8]);
        let image = integers(&[2], &[i64::MAX, 2]);
        assert!(!error(Op::Spatial(op), &[x, image, integers(&[2], &[2, 2])]).is_empty());
    }
}
