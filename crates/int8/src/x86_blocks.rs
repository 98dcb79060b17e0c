//! Convolutions of images in channel blocks on x86-64.

use std::arch::x86_64::*;

use crate::LANES;
use crate::blocks::{BlockRun, ROUND, next_count, vector, word};
use crate::x86::halves;

/// Loops over vectors of 512 bits, for functions of the instruction set `$features`: `factors`
/// makes a vector's weights ready, `spread` one word of the image, and `add` adds their products to
/// a sum.
macro_rules! wide_blocks {
    ($features:literal) => {
        #[target_feature(enable = $features)]
        pub(crate) fn convolve(run: BlockRun) {
            match (run.words, run.step) {
                (4, 16) => stepped::<4, 16>(run),
                (4, 32) => stepped::<4, 32>(run),
                (1, 4) => stepped::<1, 4>(run),
                (1, 8) => stepped::<1, 8>(run),
                (4, _) => stepped::<4, 0>(run),
                _ => stepped::<1, 0>(run),
            }
        }

        /// With windows `STEP` bytes apart; 0 for any distance.
        #[target_feature(enable = $features)]
        fn stepped<const WORDS: usize, const STEP: usize>(run: BlockRun) {
            match run.out.len() {
                1 => tiles::<WORDS, STEP, 1>(run),
                2 => tiles::<WORDS, STEP, 2>(run),
                3 => tiles::<WORDS, STEP, 3>(run),
                _ => tiles::<WORDS, STEP, 4>(run),
            }
        }

        #[target_feature(enable = $features)]
        fn tiles<const WORDS: usize, const STEP: usize, const BLOCKS: usize>(mut run: BlockRun) {
            // Without a known distance each position is a tile.
            let most = if STEP == 0 { 1 } else { most_positions(BLOCKS) };
            let mut first = 0;
            while first < run.positions {
                let count = next_count(run.positions - first, most);
                match count {
                    1 => tile::<WORDS, STEP, BLOCKS, 1>(&mut run, first),
                    2 => tile::<WORDS, STEP, BLOCKS, 2>(&mut run, first),
                    3 => tile::<WORDS, STEP, BLOCKS, 3>(&mut run, first),
                    4 => tile::<WORDS, STEP, BLOCKS, 4>(&mut run, first),
                    5 => tile::<WORDS, STEP, BLOCKS, 5>(&mut run, first),
                    6 => tile::<WORDS, STEP, BLOCKS, 6>(&mut run, first),
                    7 => tile::<WORDS, STEP, BLOCKS, 7>(&mut run, first),
                    _ => tile::<WORDS, STEP, BLOCKS, 8>(&mut run, first),
                }
                first += count;
            }
        }

        /// `COUNT` positions from `first` on.
        #[target_feature(enable = $features)]
        fn tile<const WORDS: usize, const STEP: usize, const BLOCKS: usize, const COUNT: usize>(
            run: &mut BlockRun,
            first: usize,
        ) {
            let mut sums = [[_mm512_setzero_si512(); BLOCKS]; COUNT];
            for block in 0..BLOCKS {
                let start: __m512i = bytemuck::cast(vector(run.finish.start, block));
                sums.iter_mut().for_each(|sums| sums[block] = start);
            }
            let reach = (COUNT - 1) * STEP + WORDS * 4;
            let image = &run.image[first * run.step..];
            let (weights, _) = run.weights.as_chunks::<LANES>();
            let weights = weights.chunks_exact(WORDS * BLOCKS);
            for (&offset, weights) in run.offsets.iter().zip(weights) {
                let image = &image[offset..][..reach];
                for index in 0..WORDS {
                    let mut all = [factors(&[0; LANES]); BLOCKS];
                    for (block, factors_of) in all.iter_mut().enumerate() {
                        *factors_of = factors(&weights[index * BLOCKS + block]);
                    }
                    for (position, sums) in sums.iter_mut().enumerate() {
                        let x = spread(word(image, position * STEP + index * 4));
                        for (sum, factors) in sums.iter_mut().zip(all) {
                            *sum = add(*sum, x, factors);
                        }
                    }
                }
            }
            // A copy, so that the sums themselves are never in memory.
            let mut stored = [[[0; LANES]; BLOCKS]; COUNT];
            for (target, sums) in stored.iter_mut().zip(sums) {
                for (target, sum) in target.iter_mut().zip(sums) {
                    *target = bytemuck::cast(sum);
                }
            }
            finish::<BLOCKS, COUNT>(run, first, &stored);
        }

        #[inline(never)]
        #[target_feature(enable = $features)]
        fn finish<const BLOCKS: usize, const COUNT: usize>(
            run: &mut BlockRun,
            first: usize,
            sums: &[[[i32; LANES]; BLOCKS]; COUNT],
        ) {
            let finish = run.finish;
            let (low, high) = (_mm512_set1_ps(finish.clamp.0), _mm512_set1_ps(finish.clamp.1));
            let (round, zero) = (_mm512_set1_ps(ROUND), _mm512_set1_epi32(finish.zero));
            for (block, out) in run.out.iter_mut().enumerate().take(BLOCKS) {
                let scale: __m512 = bytemuck::cast(vector(finish.scales, block));
                let bias: __m512 = bytemuck::cast(vector(finish.bias, block));
                let out = &mut out[first * LANES..][..COUNT * LANES];
                for (sums, out) in sums.iter().zip(out.chunks_exact_mut(LANES)) {
                    let value = _mm512_cvtepi32_ps(bytemuck::cast(sums[block]));
                    let value = _mm512_add_ps(_mm512_mul_ps(value, scale), bias);
                    // The second operand is the result for what is no number.
                    let value = _mm512_min_ps(_mm512_max_ps(value, low), high);
                    let rounded = _mm512_castps_si512(_mm512_add_ps(value, round));
                    let bytes = _mm512_cvtepi32_epi8(_mm512_add_epi32(rounded, zero));
                    let bytes: [u8; LANES] = bytemuck::cast(bytes);
                    out.copy_from_slice(&bytes);
                }
            }
        }
    };
}

/// Dot products of four bytes.
pub(crate) mod vnni {
    use super::*;
    use crate::blocks::most_positions;

    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    fn factors(words: &[u32; LANES]) -> __m512i {
        bytemuck::cast(*words)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    fn spread(word: u32) -> __m512i {
        _mm512_set1_epi32(word as i32)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    fn add(sum: __m512i, x: __m512i, factors: __m512i) -> __m512i {
        _mm512_dpbusd_epi32(sum, x, factors)
    }

    wide_blocks!("avx512f,avx512vnni");
}

/// Pairs of 16-bit products: weights are made ready once for all positions of a tile, words of the
/// image once for all blocks.
pub(crate) mod pairs {
    use super::*;
    use crate::x86::{add_pairs, wide_halves};

    /// Positions whose sums, weights and operands fit the registers.
    const fn most_positions(blocks: usize) -> usize {
        match blocks {
            4 => 4,
            3 => 6,
            _ => 8,
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn factors(words: &[u32; LANES]) -> [__m512i; 2] {
        wide_halves::<false>(bytemuck::cast(*words))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn spread(word: u32) -> [__m512i; 2] {
        let bytes = |word: u32| _mm512_set1_epi32((word & 0x00ff_00ff) as i32);
        [bytes(word), bytes(word >> 8)]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn add(sum: __m512i, x: [__m512i; 2], factors: [__m512i; 2]) -> __m512i {
        add_pairs(sum, x, factors)
    }

    wide_blocks!("avx512f,avx512bw");
}

/// Positions that the registers hold sums of one block for.
const AVX2_POSITIONS: usize = 4;

#[target_feature(enable = "avx2")]
pub(crate) fn convolve_avx2(mut run: BlockRun) {
    for block in 0..run.out.len() {
        let mut first = 0;
        while first < run.positions {
            let count = next_count(run.positions - first, AVX2_POSITIONS);
            match count {
                1 => avx2_tile::<1>(&mut run, block, first),
                2 => avx2_tile::<2>(&mut run, block, first),
                3 => avx2_tile::<3>(&mut run, block, first),
                _ => avx2_tile::<4>(&mut run, block, first),
            }
            first += count;
        }
    }
}

/// `COUNT` positions of one block. Products of 16 bits cannot overflow, unlike the instruction that
/// multiplies bytes.
#[target_feature(enable = "avx2")]
fn avx2_tile<const COUNT: usize>(run: &mut BlockRun, block: usize, first: usize) {
    let (blocks, words, step) = (run.out.len(), run.words, run.step);
    let start: [__m256i; 2] = bytemuck::cast(vector(run.finish.start, block));
    let mut sums = [start; COUNT];
    let image = &run.image[first * step..];
    let (weights, _) = run.weights.as_chunks::<LANES>();
    for (&offset, weights) in run.offsets.iter().zip(weights.chunks_exact(words * blocks)) {
        for (index, weights) in weights.chunks_exact(blocks).enumerate() {
            let [low, high]: [__m256i; 2] = bytemuck::cast(weights[block]);
            let factors = [halves::<false>(low), halves::<false>(high)];
            for (position, sums) in sums.iter_mut().enumerate() {
                let x = word(image, position * step + offset + index * 4);
                let [even, odd] = halves::<true>(_mm256_set1_epi32(x as i32));
                for (sum, factors) in sums.iter_mut().zip(factors) {
                    let even = _mm256_madd_epi16(even, factors[0]);
                    let odd = _mm256_madd_epi16(odd, factors[1]);
                    *sum = _mm256_add_epi32(*sum, _mm256_add_epi32(even, odd));
                }
            }
        }
    }
    let finish = run.finish;
    let out = &mut run.out[block][first * LANES..][..COUNT * LANES];
    for (out, sums) in out.chunks_exact_mut(LANES).zip(sums) {
        finish.write(block, &bytemuck::cast(sums), out);
    }
}
