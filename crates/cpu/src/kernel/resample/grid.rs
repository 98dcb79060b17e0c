//! Sampling of an image or volume at the points of a grid.

use model::DataType;
use model::op::{GridPadding, ResizeMode};

use super::taps::cubic;
use crate::buffer::Buffer;
use crate::kernel::cast::convert;
use crate::kernel::invalid;
use crate::kernel::operand::{elements, one, output_len};
use crate::kernel::unary::Real;
use crate::kernel::{Inputs, KernelResult};
use crate::value::Value;
use crate::yield_point;

/// Coefficient of the cubic filter.
const CUBIC: f64 = -0.75;

/// How points are read.
#[derive(Clone, Copy)]
pub(super) struct Sampler {
    mode: ResizeMode,
    padding: GridPadding,
    align_corners: bool,
}

/// The taps along one dimension: weights, and positions unless they are outside.
type AxisTaps = Vec<(Option<usize>, f64)>;

impl Sampler {
    pub(super) fn new(mode: ResizeMode, padding: GridPadding, align_corners: bool) -> Sampler {
        Sampler { mode, padding, align_corners }
    }

    /// The lowest and highest coordinate of a dimension.
    fn borders(&self, size: usize) -> (f64, f64) {
        let size = size as f64;
        if self.align_corners { (0.0, size - 1.0) } else { (-0.5, size - 0.5) }
    }

    /// The coordinate, in pixels, of a grid coordinate between -1 and 1.
    fn coordinate(&self, x: f64, size: usize) -> f64 {
        // Single precision, as the operator is defined.
        let (x, size) = (x as f32, size as f32);
        let pixel = if self.align_corners {
            (x + 1.0) / 2.0 * (size - 1.0)
        } else {
            ((x + 1.0) * size - 1.0) / 2.0
        };
        f64::from(pixel)
    }

    /// The taps that make up the point at grid coordinate `x` of a dimension of `size`.
    fn axis_taps(&self, x: f64, size: usize) -> AxisTaps {
        let (low, high) = self.borders(size);
        let mut x = self.coordinate(x, size);
        if self.mode == ResizeMode::Nearest {
            x = x.round_ties_even();
        }
        if x < low || x > high {
            x = match self.padding {
                GridPadding::Zeros => x,
                GridPadding::Border => x.clamp(0.0, size as f64 - 1.0),
                GridPadding::Reflection => reflected(x, low, high),
            };
        }
        // Points far outside would overflow as integers; they read nothing.
        let x = x.clamp(-1e12, 1e12);
        let first = x.floor() as i64;
        let ratio = x - x.floor();
        match self.mode {
            ResizeMode::Nearest => vec![(self.pixel(x as i64, size), 1.0)],
            ResizeMode::Linear => {
                vec![(self.pixel(first, size), 1.0 - ratio), (self.pixel(first + 1, size), ratio)]
            }
            ResizeMode::Cubic => (-1..3)
                .map(|tap| (self.pixel(first + tap, size), cubic(tap as f64 - ratio, CUBIC)))
                .collect(),
        }
    }

    /// The pixel that is read for position `index`; `None` in a border of zeros.
    fn pixel(&self, index: i64, size: usize) -> Option<usize> {
        let last = size as i64 - 1;
        match self.padding {
            GridPadding::Zeros => (0..=last).contains(&index).then_some(index as usize),
            GridPadding::Border => Some(index.clamp(0, last) as usize),
            GridPadding::Reflection => {
                let (low, high) = self.borders(size);
                Some((reflected(index as f64, low, high) as i64).clamp(0, last) as usize)
            }
        }
    }
}

/// `x` mirrored at the borders until it lies between them.
fn reflected(x: f64, low: f64, high: f64) -> f64 {
    let range = high - low;
    if range <= 0.0 || !x.is_finite() {
        return low.max(0.0);
    }
    if x < low {
        let over = low - x;
        let rest = over % range;
        if (over / range).trunc() % 2.0 == 0.0 { low + rest } else { high - rest }
    } else if x > high {
        let over = x - high;
        let rest = over % range;
        if (over / range).trunc() % 2.0 == 0.0 { high - rest } else { low + rest }
    } else {
        x
    }
}

pub(super) fn sample<F: Real>(inputs: &Inputs, sampler: Sampler) -> KernelResult {
    let x = inputs.typed::<F>(0)?;
    let Value::F64(grid) = convert(inputs.get(1)?, DataType::F64)? else {
        return Err("the grid is not of numbers".into());
    };
    let (shape, grid_shape) = (x.shape(), grid.shape());
    let spatial = shape.len().saturating_sub(2);
    let fits = spatial > 0
        && grid_shape.len() == shape.len()
        && grid_shape[0] == shape[0]
        && grid_shape[grid_shape.len() - 1] == spatial;
    if !fits {
        return Err(invalid!("a grid of shape {grid_shape:?} does not fit shape {shape:?}"));
    }
    let points: usize = grid_shape[1..grid_shape.len() - 1].iter().product();
    let out_shape = [&shape[..2], &grid_shape[1..grid_shape.len() - 1]].concat();
    let count = output_len(&out_shape)?;
    let picture: usize = shape[2..].iter().product();
    if count > 0 && picture == 0 {
        return Err("there is no pixel to sample".into());
    }
    let (x, grid) = (elements(x), elements(&grid));
    let mut out = Buffer::filled(count, F::default())?;
    if count == 0 {
        return one(F::wrap(&out_shape, out));
    }
    let channels = shape[1];
    for (image, target) in out.chunks_mut(channels * points).enumerate() {
        for point in 0..points {
            let at = &grid[(image * points + point) * spatial..][..spatial];
            let taps = point_taps(sampler, at, &shape[2..]);
            yield_point::did_work(100 + channels * taps.len());
            for channel in 0..channels {
                let plane = &x[(image * channels + channel) * picture..][..picture];
                let sum = taps.iter().fold(0.0, |sum, &(offset, weight)| {
                    sum + plane[offset].to_f64().unwrap_or(f64::NAN) * weight
                });
                target[channel * points + point] = F::of(sum);
            }
        }
    }
    one(F::wrap(&out_shape, out))
}

/// The offsets and weights whose sum is the point `at`, whose coordinates are innermost first.
fn point_taps(sampler: Sampler, at: &[f64], sizes: &[usize]) -> Vec<(usize, f64)> {
    let mut taps = vec![(0, 1.0)];
    for (axis, &size) in sizes.iter().enumerate() {
        let axis_taps = sampler.axis_taps(at[sizes.len() - 1 - axis], size);
        taps = taps
            .iter()
            .flat_map(|&(offset, weight)| {
                axis_taps.iter().filter_map(move |&(pixel, tap)| {
                    pixel.map(|pixel| (offset * size + pixel, weight * tap))
                })
            })
            .collect();
    }
    taps
}
