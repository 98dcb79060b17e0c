//! From sums of products to a result: zero points, scales, bias, clamp, rounding.

use int8::{LANES, Sums};
use model::op::Activation;
use rten_simd::{Isa, SimdOp};

use crate::kernel::activation;

/// Adding it to a number below 2^22 leaves the nearest integer, halves to even, in the low bits.
const ROUND: f32 = 12_582_912.0;

/// An element of the result.
pub(super) trait Target: Copy + Default + Send + Sync + 'static {
    /// From the exact sum, the clamped number and the zero point.
    fn of(sum: i32, value: f32, zero: i32) -> Self;

    /// Applies a function to numbers; others are not asked for one.
    fn activate(_: Activation, _: &mut [Self]) {}
}

impl Target for i32 {
    #[inline(always)]
    fn of(sum: i32, _: f32, _: i32) -> i32 {
        sum
    }
}

impl Target for f32 {
    #[inline(always)]
    fn of(_: i32, value: f32, _: i32) -> f32 {
        value
    }

    fn activate(activation: Activation, out: &mut [f32]) {
        activation::apply_in_pieces(activation, out);
    }
}

/// The nearest integer to a number below 2^22, halves to even, plus `zero`. Vectors have
/// instructions for all of this.
#[inline(always)]
pub(crate) fn rounded(value: f32, zero: i32) -> i32 {
    ((value + ROUND).to_bits() as i32).wrapping_add(zero)
}

impl Target for u8 {
    #[inline(always)]
    fn of(_: i32, value: f32, zero: i32) -> u8 {
        rounded(value, zero) as u8
    }
}

impl Target for i8 {
    #[inline(always)]
    fn of(_: i32, value: f32, zero: i32) -> i8 {
        rounded(value, zero) as i8
    }
}

/// Whether a channel is a row or a column of the product.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Channels {
    Rows,
    Columns,
}

/// What happens to sums. Slices have one element for each channel.
#[derive(Clone, Copy)]
pub(super) struct Finish<'a> {
    pub(super) channels: Channels,
    /// Added to the sums.
    pub(super) offsets: &'a [i32],
    /// Zero points of the weight, where there are any.
    pub(super) weight_zeros: Option<&'a [i32]>,
    pub(super) scales: &'a [f32],
    pub(super) bias: Option<&'a [f32]>,
    /// Laid out as the result, with this distance of rows.
    pub(super) residual: Option<(&'a [f32], usize)>,
    pub(super) clamp: (f32, f32),
    pub(super) zero: i32,
}

/// The sums of a few rows and vectors on their way into the result.
pub(super) struct FinishTile<'a, 'b, T> {
    pub(super) finish: &'a Finish<'a>,
    pub(super) sums: &'a Sums,
    /// Rows of the result, as long as the task's columns.
    pub(super) out: &'a mut [&'b mut [T]],
    /// Of the whole result.
    pub(super) first_row: usize,
    pub(super) first_column: usize,
    /// Where the tile begins in `out`.
    pub(super) offset: usize,
    pub(super) vectors: usize,
    /// Sums of the bytes of the activations: for each column of the tile, or each row of the
    /// result. Only read with `weight_zeros`.
    pub(super) activation_sums: &'a [i32],
}

/// The first elements of `source`, and defaults where it ends.
#[inline(always)]
pub(super) fn lanes<T: Copy + Default>(source: &[T]) -> [T; LANES] {
    if let Some(chunk) = source.first_chunk::<LANES>() {
        return *chunk;
    }
    let mut chunk = [T::default(); LANES];
    chunk[..source.len()].copy_from_slice(source);
    chunk
}

/// The number between both ends next to `x`; the first if `x` is no number. Unlike `f32::max` and
/// `f32::min` these are two instructions.
#[inline(always)]
pub(crate) fn clamped(x: f32, low: f32, high: f32) -> f32 {
    let x = if x > low { x } else { low };
    if x < high { x } else { high }
}

/// What a vector of sums is changed by.
#[derive(Clone, Copy)]
struct Terms {
    offsets: [i32; LANES],
    scales: [f32; LANES],
    bias: [f32; LANES],
}

impl<T: Target> FinishTile<'_, '_, T> {
    /// The terms of one channel.
    #[inline(always)]
    fn of_row(&self, row: usize) -> Terms {
        let finish = self.finish;
        Terms {
            offsets: [finish.offsets[row]; LANES],
            scales: [finish.scales[row]; LANES],
            bias: [finish.bias.map_or(0.0, |bias| bias[row]); LANES],
        }
    }

    /// The terms of the channels from `column` on.
    #[inline(always)]
    fn of_columns(&self, column: usize) -> Terms {
        let finish = self.finish;
        Terms {
            offsets: lanes(&finish.offsets[column..]),
            scales: lanes(&finish.scales[column..]),
            bias: finish.bias.map_or([0.0; LANES], |bias| lanes(&bias[column..])),
        }
    }

    /// What the zero points of the weight take off: one factor for all rows, one for each lane.
    #[inline(always)]
    fn corrected(&self, mut terms: Terms, row: usize, within: usize) -> Terms {
        let Some(zeros) = self.finish.weight_zeros else { return terms };
        let (one, each): (i32, [i32; LANES]) = match self.finish.channels {
            Channels::Rows => (zeros[row], lanes(&self.activation_sums[within..])),
            Channels::Columns => {
                let column = self.first_column + within;
                (self.activation_sums[row], lanes(&zeros[column..]))
            }
        };
        for (offset, each) in terms.offsets.iter_mut().zip(each) {
            *offset = offset.wrapping_sub(one.wrapping_mul(each));
        }
        terms
    }

    #[inline(always)]
    fn vector(&mut self, index: usize, vector: usize, terms: &Terms) {
        let finish = self.finish;
        let (low, high) = finish.clamp;
        let (row, within) = (self.first_row + index, vector * LANES);
        let sums = &self.sums[index][vector];
        let out = &mut self.out[index][self.offset + within..];
        let mut values = [0f32; LANES];
        let mut exact = [0i32; LANES];
        for lane in 0..LANES {
            exact[lane] = sums[lane].wrapping_add(terms.offsets[lane]);
            values[lane] = exact[lane] as f32 * terms.scales[lane] + terms.bias[lane];
        }
        if let Some((all, stride)) = finish.residual {
            let at = row * stride + self.first_column + within;
            let residual = lanes(&all[at..at + out.len().min(LANES)]);
            for (value, residual) in values.iter_mut().zip(residual) {
                *value += residual;
            }
        }
        let mut result = [T::default(); LANES];
        for lane in 0..LANES {
            let value = clamped(values[lane], low, high);
            result[lane] = T::of(exact[lane], value, finish.zero);
        }
        match out.first_chunk_mut::<LANES>() {
            Some(out) => *out = result,
            None => {
                let count = out.len();
                out.copy_from_slice(&result[..count]);
            }
        }
    }
}

impl<T: Target> SimdOp for FinishTile<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(mut self, _: I) {
        match self.finish.channels {
            Channels::Rows => {
                for index in 0..self.out.len() {
                    let row = self.first_row + index;
                    let own = self.of_row(row);
                    for vector in 0..self.vectors {
                        let terms = self.corrected(own, row, vector * LANES);
                        self.vector(index, vector, &terms);
                    }
                }
            }
            Channels::Columns => {
                for vector in 0..self.vectors {
                    let within = vector * LANES;
                    let own = self.of_columns(self.first_column + within);
                    for index in 0..self.out.len() {
                        let terms = self.corrected(own, self.first_row + index, within);
                        self.vector(index, vector, &terms);
                    }
                }
            }
        }
    }
}
