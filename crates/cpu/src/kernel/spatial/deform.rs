//! A convolution whose taps are moved.

use model::op::Window;

use super::bilinear;
use crate::buffer::Buffer;
use crate::kernel::geometry::Geometry;
use crate::kernel::operand::{one, output_len};
use crate::kernel::parallel::in_chunks;
use crate::kernel::wide::{from_reals, reals};
use crate::kernel::{Inputs, KernelResult, invalid};
use crate::yield_point;

/// A deformable convolution of images.
pub(super) struct DeformedConv {
    pub(super) window: Window,
    pub(super) groups: usize,
    pub(super) offset_groups: usize,
}

impl DeformedConv {
    pub(super) fn run(&self, inputs: &Inputs) -> KernelResult {
        let (value, weight) = (inputs.get(0)?, inputs.get(1)?);
        let (&[batch, channels, height, width], &[outputs, group_width, kh, kw]) =
            (value.shape(), weight.shape())
        else {
            return Err(invalid!("{:?} and {:?} are no images", value.shape(), weight.shape()));
        };
        let geometry = Geometry::new(&self.window, &[height, width], &[kh, kw], false)?;
        let [_, rows, columns] = geometry.output;
        let (taps, places) = (kh * kw, rows * columns);
        let (groups, offset_groups) = (self.groups, self.offset_groups);
        let fits = groups > 0
            && offset_groups > 0
            && group_width.checked_mul(groups) == Some(channels)
            && outputs % groups == 0
            && channels % offset_groups == 0
            && inputs.get(2)?.shape() == [batch, offset_groups * taps * 2, rows, columns];
        if !fits {
            return Err(invalid!(
                "weights {:?} and offsets {:?} do not fit {:?}",
                weight.shape(),
                inputs.get(2)?.shape(),
                value.shape()
            ));
        }
        let mask = inputs.optional(4).map(reals).transpose()?;
        let bias = inputs.optional(3).map(reals).transpose()?;
        let wrong = |have: &Option<Buffer<f64>>, want: usize| {
            have.as_ref().is_some_and(|have| have.len() != want)
        };
        if wrong(&mask, batch * offset_groups * taps * places) || wrong(&bias, outputs) {
            return Err(invalid!("a mask or bias of another size"));
        }
        let (data, weights, offsets) = (reals(value)?, reals(weight)?, reals(inputs.get(2)?)?);
        let shape = [batch, outputs, rows, columns];
        let mut out = Buffer::filled(output_len(&shape)?, 0f64)?;
        let (per_offset, per_group) = (channels / offset_groups, outputs / groups);
        let pixels = height * width;
        in_chunks(&mut out, places.max(1), &|plane: usize, target: &mut [f64]| {
            let (image, output) = (plane / outputs, plane % outputs);
            for (place, slot) in target.iter_mut().enumerate() {
                yield_point::did_work(group_width * taps * 12);
                let (row, column) = (place / columns, place % columns);
                let mut sum = bias.as_ref().map_or(0.0, |bias| bias[output]);
                for channel in 0..group_width {
                    let source = output / per_group * group_width + channel;
                    let group = image * offset_groups + source / per_offset;
                    let pixels = &data[(image * channels + source) * pixels..][..pixels];
                    for tap in 0..taps {
                        let offset = |axis: usize| {
                            offsets[((group * taps + tap) * 2 + axis) * places + place]
                        };
                        let start = |at: usize, tap: usize, axis: usize| {
                            (at * geometry.strides[axis] + tap * geometry.dilations[axis]) as f64
                                - geometry.begin[axis] as f64
                        };
                        let y = start(row, tap / kw, 1) + offset(0);
                        let x = start(column, tap % kw, 2) + offset(1);
                        let factor = mask
                            .as_ref()
                            .map_or(1.0, |mask| mask[(group * taps + tap) * places + place]);
                        let weight = weights[(output * group_width + channel) * taps + tap];
                        sum += weight * factor * bilinear(pixels, (height, width), (y, x));
                    }
                }
                *slot = sum;
            }
        });
        one(from_reals(&shape, out, value.dtype())?)
    }
}
