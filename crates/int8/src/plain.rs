//! Dot products without any instruction of their own. The reference of the others.

use crate::blocks::{self, BlockRun};
use crate::{LANES, Tile};

/// The sum of the products of the bytes of two words.
#[inline(always)]
fn word<const LEFT: bool>(left: u32, right: u32) -> i32 {
    let (unsigned, signed) = if LEFT { (left, right) } else { (right, left) };
    let (unsigned, signed) = (unsigned.to_le_bytes(), signed.to_le_bytes());
    (0..4).map(|at| i32::from(unsigned[at]) * i32::from(signed[at] as i8)).sum()
}

pub(crate) fn dot<const ROWS: usize, const VECTORS: usize, const LEFT: bool>(tile: Tile) {
    let mut sums = [[[0i32; LANES]; VECTORS]; ROWS];
    let (left, _) = tile.left.as_chunks::<ROWS>();
    let (right, _) = tile.right.as_chunks::<LANES>();
    for (a, b) in left.iter().zip(right.chunks_exact(VECTORS)) {
        for (sums, &a) in sums.iter_mut().zip(a) {
            for (sums, b) in sums.iter_mut().zip(b) {
                for (sum, &b) in sums.iter_mut().zip(b) {
                    *sum = sum.wrapping_add(word::<LEFT>(a, b));
                }
            }
        }
    }
    for (target, sums) in tile.sums.iter_mut().zip(sums) {
        target[..VECTORS].copy_from_slice(&sums);
    }
}

/// The convolution of `run`, one position and block after the other.
pub(crate) fn convolve(run: BlockRun) {
    let BlockRun { image, offsets, words, step, weights, positions, finish, out } = run;
    let (weights, _) = weights.as_chunks::<LANES>();
    let blocks = out.len();
    for (block, out) in out.iter_mut().enumerate() {
        for (position, out) in out.chunks_exact_mut(LANES).take(positions).enumerate() {
            let mut sums = blocks::vector(finish.start, block);
            let window = &image[position * step..];
            for (&offset, weights) in offsets.iter().zip(weights.chunks_exact(words * blocks)) {
                for (index, weights) in weights.chunks_exact(blocks).enumerate() {
                    let x = blocks::word(window, offset + 4 * index);
                    for (sum, weight) in sums.iter_mut().zip(weights[block]) {
                        *sum = sum.wrapping_add(word::<true>(x, weight));
                    }
                }
            }
            finish.write(block, &sums, out);
        }
    }
}
