//! The mean of each plane of quantized elements, as a byte again: sums of bytes are exact.

use super::bytes_of;
use super::elementwise::Quantum;
use super::finish::{clamped, rounded};
use crate::buffer::Buffer;
use crate::kernel::parallel::in_chunks;
use crate::kernel::{Context, Inputs, Kernel, KernelResult, dense, invalid};
use crate::yield_point;

/// Planes that one task sums.
const TASK_PLANES: usize = 64;

/// How the mean of a plane is quantized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ByteMean {
    pub(crate) input: Quantum,
    pub(crate) output: Quantum,
}

impl ByteMean {
    /// The same mean of bytes in channel blocks.
    pub(crate) fn in_blocks(self) -> ByteMean {
        let [input, output] = [self.input, self.output].map(super::blocks::in_blocks);
        ByteMean { input, output }
    }

    /// The byte of a plane of `count` elements whose bytes add up to `sum`.
    pub(super) fn of(&self, sum: i64, count: usize) -> i32 {
        let ByteMean { input, output } = self;
        let centred = sum - count as i64 * i64::from(input.zero);
        let mean = centred as f32 * input.scale / count as f32 / output.scale;
        let (least, most) = output.range();
        let (least, most) = ((least - output.zero) as f32, (most - output.zero) as f32);
        rounded(clamped(mean, least, most), output.zero)
    }
}

/// The kernel of `mean`.
pub(crate) fn build(mean: ByteMean) -> Kernel {
    Kernel::new(move |context: &Context, inputs: Inputs| run(context, &inputs, mean))
}

fn run(context: &Context, inputs: &Inputs, mean: ByteMean) -> KernelResult {
    let x = inputs.get(0)?;
    let (data, signed) = bytes_of(x)?;
    if signed != mean.input.signed {
        return Err(invalid!("the image is {}", x.dtype()));
    }
    let [images, channels, spatial @ ..] = x.shape() else {
        return Err(invalid!("shape {:?} has no channels", x.shape()));
    };
    let plane = dense::count(spatial)?;
    let mut out: Buffer<u8> = context.pool.filled(dense::count(&[*images, *channels])?, 0)?;
    in_chunks(&mut out, TASK_PLANES, &|task: usize, out: &mut [u8]| {
        for (index, slot) in out.iter_mut().enumerate() {
            let bytes = &data[(task * TASK_PLANES + index) * plane..][..plane];
            let sum: i64 = match signed {
                true => bytes.iter().map(|byte| i64::from(*byte as i8)).sum(),
                false => bytes.iter().map(|byte| i64::from(*byte)).sum(),
            };
            *slot = mean.of(sum, plane) as u8;
            yield_point::did_work(plane / 4);
        }
    });
    let mut out_shape = vec![*images, *channels];
    out_shape.extend(spatial.iter().map(|_| 1));
    match mean.output.signed {
        true => dense::output(&out_shape, out.cast::<i8>()),
        false => dense::output(&out_shape, out),
    }
}
