//! Boxes of an image resampled to one size.

use model::op::RoiAlign;

use crate::buffer::Buffer;
use crate::kernel::operand::{integers, one, output_len, resolve_index};
use crate::kernel::parallel::in_chunks;
use crate::kernel::wide::{from_reals, reals};
use crate::kernel::{Inputs, KernelError, KernelResult, invalid};
use crate::yield_point;

/// The most samples of one cell in one direction.
const MAX_SAMPLES: f64 = 4096.0;

/// Four pixels and their weights.
#[derive(Clone, Copy, Default)]
struct Tap {
    at: [usize; 4],
    weights: [f64; 4],
}

/// The pixels around a point; those of a point far outside weigh nothing.
fn tap((y, x): (f64, f64), (height, width): (usize, usize)) -> Tap {
    if !(y >= -1.0 && x >= -1.0 && y <= height as f64 && x <= width as f64) {
        return Tap::default();
    }
    let along = |at: f64, size: usize| {
        let low = (at.max(0.0) as usize).min(size - 1);
        match low == size - 1 {
            true => (low, low, 0.0),
            false => (low, low + 1, at.max(0.0) - low as f64),
        }
    };
    let ((top, bottom, down), (left, right, over)) = (along(y, height), along(x, width));
    Tap {
        at: [
            top * width + left,
            top * width + right,
            bottom * width + left,
            bottom * width + right,
        ],
        weights: [
            (1.0 - down) * (1.0 - over),
            (1.0 - down) * over,
            down * (1.0 - over),
            down * over,
        ],
    }
}

/// Start and extent of a box in one direction, and samples of a cell.
fn side(
    low: f64,
    high: f64,
    roi: &RoiAlign,
    cells: usize,
) -> Result<(f64, f64, usize), KernelError> {
    let offset = if roi.half_pixel { 0.5 } else { 0.0 };
    let scale = f64::from(roi.scale);
    let start = low * scale - offset;
    let extent = high * scale - offset - start;
    let extent = if roi.half_pixel { extent } else { extent.max(1.0) };
    let samples = match roi.sampling_ratio {
        0 => (extent / cells as f64).ceil(),
        ratio => ratio as f64,
    };
    if !(extent.is_finite() && samples <= MAX_SAMPLES) {
        return Err(invalid!("a box from {low} to {high}"));
    }
    Ok((start, extent / cells as f64, samples.max(0.0) as usize))
}

pub(super) fn roi_align(inputs: &Inputs, roi: RoiAlign) -> KernelResult {
    let value = inputs.get(0)?;
    let (boxes, images) = (inputs.get(1)?, inputs.get(2)?);
    let &[batch, channels, height, width] = value.shape() else {
        return Err(invalid!("an image of shape {:?}", value.shape()));
    };
    let &[count, 4] = boxes.shape() else {
        return Err(invalid!("boxes of shape {:?}", boxes.shape()));
    };
    let (corners, images) = (reals(boxes)?, integers(images)?);
    if images.len() != count || height == 0 || width == 0 || roi.height == 0 || roi.width == 0 {
        return Err(invalid!("{count} boxes in {} images of {height} x {width}", images.len()));
    }
    let data = reals(value)?;
    let shape = [count, channels, roi.height, roi.width];
    let mut out = Buffer::filled(output_len(&shape)?, 0f64)?;
    let cells = roi.height * roi.width;
    for (index, block) in out.chunks_mut((channels * cells).max(1)).enumerate() {
        let image = resolve_index(images[index], batch)?;
        let corner = &corners[index * 4..][..4];
        let (x, wide, across) = side(corner[0], corner[2], &roi, roi.width)?;
        let (y, high, down) = side(corner[1], corner[3], &roi, roi.height)?;
        let mut taps: Buffer<Tap> = Buffer::with_capacity(output_len(&[cells, down, across])?)?;
        for cell in 0..cells {
            let (row, column) = (cell / roi.width, cell % roi.width);
            yield_point::did_work(down * across * 10);
            for sample in 0..down * across {
                let (iy, ix) = ((sample / across) as f64 + 0.5, (sample % across) as f64 + 0.5);
                let at_y = y + row as f64 * high + iy * high / down as f64;
                let at_x = x + column as f64 * wide + ix * wide / across as f64;
                taps.push(tap((at_y, at_x), (height, width)))?;
            }
        }
        let pixels = height * width;
        in_chunks(block, cells, &|channel: usize, plane: &mut [f64]| {
            let source = &data[(image * channels + channel) * pixels..][..pixels];
            yield_point::did_work(taps.len() * 4);
            for (slot, taps) in plane.iter_mut().zip(taps.chunks((down * across).max(1))) {
                *slot = cell_value(source, taps, roi.max);
            }
        });
    }
    one(from_reals(&shape, out, value.dtype())?)
}

/// The mean of a cell's samples, or the largest of their weighted pixels as ONNX defines it.
fn cell_value(source: &[f64], taps: &[Tap], max: bool) -> f64 {
    let terms = |tap: &Tap| {
        let pairs = tap.at.into_iter().zip(tap.weights);
        pairs.map(|(at, weight)| weight * source[at]).collect::<smallvec::SmallVec<[f64; 4]>>()
    };
    match max {
        true => taps.iter().flat_map(terms).fold(f64::NEG_INFINITY, f64::max),
        false => taps.iter().flat_map(terms).sum::<f64>() / taps.len().max(1) as f64,
    }
}
