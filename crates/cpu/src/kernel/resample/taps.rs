//! The input positions and weights of each output position of a resized dimension.

use model::op::{CoordinateMode, NearestMode, Resize, ResizeMode};

use crate::buffer::Buffer;
use crate::kernel::KernelError;

/// One dimension to resize.
#[derive(Clone, Copy)]
pub(super) struct ResizeAxis {
    pub(super) input: usize,
    pub(super) output: usize,
    /// Output extent per input extent, before rounding.
    pub(super) scale: f64,
    /// The part of the image that `CropAndResize` reads.
    pub(super) roi: (f64, f64),
}

impl ResizeAxis {
    /// Whether resizing does not change the dimension.
    pub(super) fn is_identity(&self, coordinates: CoordinateMode) -> bool {
        let cropped = coordinates == CoordinateMode::CropAndResize && self.roi != (0.0, 1.0);
        self.input == self.output && (self.scale - 1.0).abs() < 1e-9 && !cropped
    }

    /// The input coordinate of output position `position`.
    fn coordinate(&self, mode: CoordinateMode, position: usize) -> f64 {
        let x = position as f64;
        let last = self.input as f64 - 1.0;
        let width = self.scale * self.input as f64;
        match mode {
            CoordinateMode::AlignCorners if width == 1.0 => 0.0,
            CoordinateMode::AlignCorners => x * last / (width - 1.0),
            CoordinateMode::Asymmetric => x / self.scale,
            CoordinateMode::PytorchHalfPixel if width == 1.0 => -0.5,
            CoordinateMode::HalfPixel | CoordinateMode::PytorchHalfPixel => {
                (x + 0.5) / self.scale - 0.5
            }
            CoordinateMode::HalfPixelSymmetric => {
                let adjustment = self.output as f64 / width;
                let offset = self.input as f64 / 2.0 * (1.0 - adjustment);
                offset + (x + 0.5) / self.scale - 0.5
            }
            CoordinateMode::CropAndResize => {
                let (start, end) = self.roi;
                let inside = if width == 1.0 {
                    (end - start) * last / 2.0
                } else {
                    x * (end - start) * last / (width - 1.0)
                };
                inside + start * last
            }
        }
    }
}

/// The taps of every output position of a dimension, equally many each.
pub(super) struct Taps {
    /// Taps per output position.
    pub(super) width: usize,
    /// Input positions, `width` per output position.
    pub(super) sources: Buffer<usize>,
    /// The weights of these positions.
    pub(super) weights: Buffer<f64>,
    /// Output positions outside the image, which get the extrapolation value.
    pub(super) outside: Buffer<bool>,
}

impl Taps {
    pub(super) fn new(resize: &Resize, axis: ResizeAxis) -> Result<Taps, KernelError> {
        let mut taps = Taps {
            width: 0,
            sources: Buffer::default(),
            weights: Buffer::default(),
            outside: Buffer::with_capacity(axis.output)?,
        };
        for position in 0..axis.output {
            let x = axis.coordinate(resize.coordinates, position);
            // The pixel on the left is preferred: on a pixel the ratio is one and not zero.
            let ratio = if x == x.floor() { 1.0 } else { x - x.floor() };
            let mut weights = weights(resize, ratio, axis.scale);
            let first = first_tap(x, weights.len());
            let inside = |tap: i64| (0..axis.input as i64).contains(&tap);
            if resize.exclude_outside {
                renormalise(&mut weights, |i| inside(first + i as i64));
            }
            taps.width = weights.len();
            for (i, weight) in weights.into_iter().enumerate() {
                let tap = (first + i as i64).clamp(0, axis.input as i64 - 1);
                taps.sources.push(tap as usize)?;
                taps.weights.push(weight)?;
            }
            taps.outside.push(
                resize.coordinates == CoordinateMode::CropAndResize
                    && (x < 0.0 || x > axis.input as f64 - 1.0),
            )?;
        }
        Ok(taps)
    }

    /// The only input position with a weight, for each output position.
    pub(super) fn single(&self) -> Result<Buffer<usize>, KernelError> {
        let width = self.width.max(1);
        let taps = self.sources.chunks(width).zip(self.weights.chunks(width));
        Ok(Buffer::collect(taps.map(|(sources, weights)| {
            weights.iter().position(|&weight| weight == 1.0).map_or(sources[0], |i| sources[i])
        }))?)
    }
}

/// The first of `count` taps nearest to `x`, the lower ones among equals.
fn first_tap(x: f64, count: usize) -> i64 {
    // Coordinates far outside would overflow; they all read the same edge.
    let x = x.clamp(-1e12, 1e12);
    let (floor, half) = (x.floor() as i64, (count / 2) as i64);
    let fraction = x - x.floor();
    match count % 2 {
        0 if fraction == 0.0 => floor - half,
        0 => floor - half + 1,
        _ if fraction <= 0.5 => floor - half,
        _ => floor - half + 1,
    }
}

/// Drops weights that `keep` refuses and scales the rest to a sum of one.
fn renormalise(weights: &mut [f64], keep: impl Fn(usize) -> bool) {
    for (i, weight) in weights.iter_mut().enumerate() {
        if !keep(i) {
            *weight = 0.0;
        }
    }
    let sum: f64 = weights.iter().sum();
    if sum != 0.0 {
        weights.iter_mut().for_each(|weight| *weight /= sum);
    }
}

/// The weights of the taps around a point that lies `ratio` right of a pixel.
fn weights(resize: &Resize, ratio: f64, scale: f64) -> Vec<f64> {
    let a = f64::from(resize.cubic_coefficient);
    match resize.mode {
        ResizeMode::Nearest => nearest(resize.nearest, ratio).to_vec(),
        ResizeMode::Linear if resize.antialias => {
            let scale = scale.min(1.0);
            let start = (-1.0 / scale).floor() as i64 + 1;
            let taps = start..start + 2 - 2 * start;
            normalised(taps, |x| (1.0 - x.abs()).clamp(0.0, 1.0), ratio, scale)
        }
        ResizeMode::Linear => vec![1.0 - ratio, ratio],
        ResizeMode::Cubic if resize.antialias => {
            let scale = scale.min(1.0);
            let start = (-2.0 / scale).floor() as i64 + 1;
            normalised(start..2 - start, |x| cubic(x, a), ratio, scale)
        }
        ResizeMode::Cubic => {
            vec![
                cubic(ratio + 1.0, a),
                cubic(ratio, a),
                cubic(1.0 - ratio, a),
                cubic(2.0 - ratio, a),
            ]
        }
    }
}

fn nearest(mode: NearestMode, ratio: f64) -> [f64; 2] {
    let right = match mode {
        _ if ratio == 1.0 => true,
        NearestMode::RoundPreferFloor => ratio > 0.5,
        NearestMode::RoundPreferCeil => ratio >= 0.5,
        NearestMode::Floor => false,
        NearestMode::Ceil => true,
    };
    if right { [0.0, 1.0] } else { [1.0, 0.0] }
}

/// A filter stretched by `1 / scale` around `ratio`, with a sum of one.
fn normalised(
    taps: std::ops::Range<i64>,
    filter: impl Fn(f64) -> f64,
    ratio: f64,
    scale: f64,
) -> Vec<f64> {
    let mut weights: Vec<f64> = taps.map(|tap| filter((tap as f64 - ratio) * scale)).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter_mut().for_each(|weight| *weight /= sum);
    weights
}

/// The cubic convolution kernel with coefficient `a`.
pub(super) fn cubic(x: f64, a: f64) -> f64 {
    let x = x.abs();
    if x <= 1.0 {
        ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        ((x - 5.0) * x + 8.0) * x * a - 4.0 * a
    } else {
        0.0
    }
}
