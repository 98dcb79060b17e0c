//! Convolutions of images in channel blocks: the channels of a position lie side by side, so that
//! four of them are one word of a dot product where they are.

use crate::LANES;

/// Bytes of a block: channels of the result that lie side by side.
pub const BLOCK: usize = LANES;

/// The most vectors that one run computes at a time.
pub const MAX_BLOCKS: usize = 4;

/// What adding it to a number below 2^22 leaves in the low bits: the nearest integer, halves to
/// even.
pub const ROUND: f32 = 12_582_912.0;

/// Adjacent positions of a few blocks of a result, and what they are computed from.
///
/// Sums beyond 32 bits wrap around. Bytes of the image are unsigned, those of the weights signed.
pub struct BlockRun<'a, 'b> {
    /// The image from the window of the first position on.
    pub image: &'a [u8],
    /// Where each block and tap begins in a window.
    pub offsets: &'a [usize],
    /// Words at each offset: 1 or 4.
    pub words: usize,
    /// Bytes between the windows of adjacent positions.
    pub step: usize,
    /// For each offset and each of its words, a vector for each block of the result.
    pub weights: &'a [u32],
    /// How many positions.
    pub positions: usize,
    /// From sums to bytes.
    pub finish: BlockFinish<'a>,
    /// The result's blocks from the first position on: at most [`MAX_BLOCKS`], one vector each.
    pub out: &'a mut [&'b mut [u8]],
}

/// From the sums of a run to bytes. Slices have one element for each channel.
#[derive(Clone, Copy)]
pub struct BlockFinish<'a> {
    /// What sums begin with.
    pub start: &'a [i32],
    /// Factors of the sums.
    pub scales: &'a [f32],
    /// Added to the scaled sums.
    pub bias: &'a [f32],
    /// The least and the largest number, below 2^22.
    pub clamp: (f32, f32),
    /// Added to the rounded number.
    pub zero: i32,
}

/// Positions that are computed at a time for `blocks` blocks: as many as there are registers for.
pub(crate) const fn most_positions(blocks: usize) -> usize {
    match blocks {
        MAX_BLOCKS => 6,
        _ => 8,
    }
}

/// The positions of the next tile, of which tiles of the same run are about as large.
#[inline(always)]
pub(crate) fn next_count(left: usize, most: usize) -> usize {
    left.div_ceil(left.div_ceil(most).max(1))
}

/// Vector `index` of `all`.
#[inline(always)]
pub(crate) fn vector<T: Copy + Default>(all: &[T], index: usize) -> [T; LANES] {
    let mut one = [T::default(); LANES];
    one.copy_from_slice(&all[index * LANES..][..LANES]);
    one
}

/// The word at `at`.
#[inline(always)]
pub(crate) fn word(image: &[u8], at: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&image[at..at + 4]);
    u32::from_le_bytes(bytes)
}

impl BlockFinish<'_> {
    /// Writes the bytes of the sums of one position and block.
    #[inline(always)]
    pub(crate) fn write(&self, block: usize, sums: &[i32; LANES], out: &mut [u8]) {
        let (scales, bias) = (vector(self.scales, block), vector(self.bias, block));
        let (low, high) = self.clamp;
        let mut result = [0; LANES];
        for lane in 0..LANES {
            let value = sums[lane] as f32 * scales[lane] + bias[lane];
            // Two instructions, and `low` for what is no number.
            let value = if value > low { value } else { low };
            let value = if value < high { value } else { high };
            let rounded = (value + ROUND).to_bits() as i32;
            result[lane] = rounded.wrapping_add(self.zero) as u8;
        }
        out.copy_from_slice(&result);
    }
}
