//! Convolutions with one filter for each channel: too little to multiply for products, so that the
//! bytes of a plane become numbers in the cache.

use rten_simd::{Isa, SimdOp};

use super::finish::{Target, clamped};
use super::{Call, FLIP};
use crate::kernel::KernelError;
use crate::kernel::conv::{Border, ConvShapes, DepthwisePlane, run_depthwise};
use crate::kernel::gemm::with_scratch;
use crate::kernel::parallel::try_for_each;
use model::op::Activation;

/// Bytes as numbers, less the zero point.
struct Centred<'a> {
    source: &'a [u8],
    target: &'a mut [f32],
    flip: u8,
    zero: i32,
}

impl SimdOp for Centred<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        for (slot, byte) in self.target.iter_mut().zip(self.source) {
            *slot = (i32::from(byte ^ self.flip) - self.zero) as f32;
        }
    }
}

/// Sums of products as results. Sums of bytes are exact, because they are small.
struct Finished<'a, T> {
    sums: &'a [f32],
    residual: Option<&'a [f32]>,
    out: &'a mut [T],
    offset: f32,
    scale: f32,
    bias: f32,
    clamp: (f32, f32),
    zero: i32,
}

impl<T: Target> SimdOp for Finished<'_, T> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let (low, high) = self.clamp;
        for (index, (slot, sum)) in self.out.iter_mut().zip(self.sums).enumerate() {
            let sum = sum + self.offset;
            let residual = self.residual.map_or(0.0, |all| all[index]);
            let value = sum * self.scale + self.bias + residual;
            *slot = T::of(sum as i32, clamped(value, low, high), self.zero);
        }
    }
}

impl Call<'_> {
    /// One plane for each image and channel.
    pub(super) fn depthwise<T: Target>(
        &self,
        out: &mut [T],
        x: &[u8],
        shapes: &ConvShapes,
        filters: &[f32],
        residual: Option<&[f32]>,
    ) -> Result<(), KernelError> {
        let geometry = &shapes.geometry;
        let border = Border::new(geometry, 1)?;
        let (in_plane, out_plane) = (geometry.input_size(), geometry.output_size());
        let outputs = shapes.groups * shapes.group_outputs;
        let taps = geometry.taps();
        let flip = if self.kernel.spec.activations_signed { FLIP as u8 } else { 0 };
        let clamp = self.kernel.spec.clamp();
        let zero = self.kernel.output_zero();
        let sum_bias = self.kernel.spec.sum_bias.as_deref();
        try_for_each(out.chunks_exact_mut(out_plane).enumerate(), &|(index, out)| {
            let channel = index % outputs;
            let input = index / outputs * shapes.groups + channel / shapes.group_outputs;
            let source = &x[input * in_plane..][..in_plane];
            let needed = in_plane + border.length() + out_plane;
            with_scratch(needed, |scratch| {
                let (plane, rest) = scratch.split_at_mut(in_plane);
                let (image, sums) = rest.split_at_mut(border.length());
                Centred { source, target: plane, flip, zero: self.zero }.dispatch();
                border.copy(image, plane, 0.0, false);
                run_depthwise(DepthwisePlane {
                    out: sums,
                    image,
                    taps: border.taps(),
                    rows: border.rows(),
                    width: geometry.output[2],
                    weights: &filters[channel * taps..(channel + 1) * taps],
                    bias: 0.0,
                    residual: None,
                    accumulate: false,
                    activation: Activation::None,
                })?;
                Finished {
                    sums,
                    residual: residual.map(|all| &all[index * out_plane..][..out_plane]),
                    out,
                    offset: sum_bias.map_or(0.0, |bias| bias[channel] as f32),
                    scale: self.scales[channel],
                    bias: self.kernel.bias.as_ref().map_or(0.0, |bias| bias[channel]),
                    clamp,
                    zero,
                }
                .dispatch();
                Ok(())
            })?
        })
    }
}
