//! ConvShapes of a convolution, and a plain implementation for any element type.

use model::op::Conv;

use super::super::dense;
use super::super::geometry::Geometry;
use super::super::matmul::PlainNumber;
use super::super::parallel::in_chunks;
use crate::buffer::Buffer;
use crate::kernel::parallel::Failure;
use crate::kernel::{KernelError, invalid};
use crate::yield_point;

/// The shapes of a convolution, checked against each other.
pub(crate) struct ConvShapes {
    pub(crate) geometry: Geometry,
    pub(crate) groups: usize,
    /// Input channels per group.
    pub(crate) group_inputs: usize,
    /// Output channels per group.
    pub(crate) group_outputs: usize,
    /// The result's shape.
    pub(crate) output: Vec<usize>,
}

impl ConvShapes {
    /// Checks an input of shape `x` against weights of shape `weight`.
    pub(crate) fn new(
        x: &[usize],
        weight: &[usize],
        conv: &Conv,
    ) -> Result<ConvShapes, KernelError> {
        let ([images, channels, spatial @ ..], [outputs, per_group, kernel @ ..]) = (x, weight)
        else {
            return Err(invalid!("input {x:?} and weights {weight:?} have no channels"));
        };
        let groups = conv.groups;
        if spatial.len() != kernel.len() {
            return Err(invalid!("weights {weight:?} do not fit an input of shape {x:?}"));
        }
        if groups == 0 || outputs % groups != 0 || per_group.checked_mul(groups) != Some(*channels)
        {
            return Err(invalid!(
                "input {x:?} and weights {weight:?} do not divide into {groups} groups"
            ));
        }
        let given = &conv.window.kernel;
        if !given.is_empty() && given != kernel {
            return Err(invalid!("kernel {given:?} is not that of weights {weight:?}"));
        }
        let geometry = Geometry::new(&conv.window, spatial, kernel, false)?;
        let output = geometry.output_shape(&[*images, *outputs]);
        dense::count(&output)?;
        Ok(ConvShapes {
            geometry,
            groups,
            group_inputs: *per_group,
            group_outputs: outputs / groups,
            output,
        })
    }

    /// Checks that a bias of `length` elements fits, if there is one.
    pub(crate) fn check_bias(&self, length: Option<usize>) -> Result<(), KernelError> {
        let outputs = self.groups * self.group_outputs;
        match length {
            Some(length) if length != outputs => {
                Err(invalid!("a bias of {length} elements for {outputs} output channels"))
            }
            _ => Ok(()),
        }
    }
}

/// The convolution of `x` with `weight`, both in row-major order.
pub(crate) fn convolve<T: PlainNumber>(
    x: &[T],
    weight: &[T],
    shapes: &ConvShapes,
) -> Result<Buffer<T>, KernelError> {
    let geometry = &shapes.geometry;
    let mut out = Buffer::filled(dense::count(&shapes.output)?, T::zero())?;
    let depth = shapes.group_inputs * geometry.taps();
    let columns = geometry.output_size();
    let out_size = shapes.group_outputs * columns;
    if out.is_empty() || depth == 0 {
        return Ok(out);
    }
    dense::count(&[depth, columns])?;
    let in_size = shapes.group_inputs * geometry.input_size();
    let failure = Failure::default();
    in_chunks(&mut out, out_size, &|index: usize, out: &mut [T]| {
        let group = index % shapes.groups;
        let windows = windows(&x[index * in_size..(index + 1) * in_size], geometry);
        let Some(windows) = failure.check(windows) else { return };
        let rows = shapes.group_outputs * depth;
        let weight = &weight[group * rows..(group + 1) * rows];
        dense::plain_product(out, weight, &windows, columns, T::multiply_add);
    });
    failure.result()?;
    Ok(out)
}

/// The windows of `input` as columns: one row per channel and tap.
fn windows<T: PlainNumber>(input: &[T], g: &Geometry) -> Result<Buffer<T>, KernelError> {
    let (plane, taps, columns) = (g.input_size(), g.taps(), g.output_size());
    let channels = input.len().checked_div(plane).unwrap_or(0);
    let mut matrix = Buffer::filled(channels * taps * columns, T::zero())?;
    for (index, row) in matrix.chunks_exact_mut(columns).enumerate() {
        yield_point::did_work(columns * 4);
        let (channel, tap) = (index / taps, index % taps);
        let tap =
            [tap / (g.kernel[1] * g.kernel[2]), tap / g.kernel[2] % g.kernel[1], tap % g.kernel[2]];
        for (column, y) in row.iter_mut().enumerate() {
            let window = [
                column / (g.output[1] * g.output[2]),
                column / g.output[2] % g.output[1],
                column % g.output[2],
            ];
            let at = |axis: usize| {
                (window[axis] * g.strides[axis] + tap[axis] * g.dilations[axis])
                    .checked_sub(g.begin[axis])
                    .filter(|&at| at < g.input[axis])
            };
            if let (Some(z), Some(h), Some(w)) = (at(0), at(1), at(2)) {
                *y = input[channel * plane + (z * g.input[1] + h) * g.input[2] + w];
            }
        }
    }
    Ok(matrix)
}
