//! Dot products on x86-64.

use std::arch::x86_64::*;

use crate::{LANES, Sums, Tile};

#[target_feature(enable = "avx512f,avx512vnni")]
pub(crate) fn dot_vnni<const ROWS: usize, const VECTORS: usize, const LEFT: bool>(tile: Tile) {
    let mut sums = [[_mm512_setzero_si512(); VECTORS]; ROWS];
    let (left, _) = tile.left.as_chunks::<ROWS>();
    let (right, _) = tile.right.as_chunks::<LANES>();
    for (a, b) in left.iter().zip(right.chunks_exact(VECTORS)) {
        let mut columns = [_mm512_setzero_si512(); VECTORS];
        for (column, words) in columns.iter_mut().zip(b) {
            *column = bytemuck::cast(*words);
        }
        for (sums, &a) in sums.iter_mut().zip(a) {
            let a = _mm512_set1_epi32(a as i32);
            for (sum, &b) in sums.iter_mut().zip(&columns) {
                // The first factor is the unsigned one.
                *sum = match LEFT {
                    true => _mm512_dpbusd_epi32(*sum, a, b),
                    false => _mm512_dpbusd_epi32(*sum, b, a),
                };
            }
        }
    }
    for (target, sums) in tile.sums.iter_mut().zip(sums) {
        for (target, sum) in target.iter_mut().zip(sums) {
            *target = bytemuck::cast(sum);
        }
    }
}

/// Bytes at even and at odd places, each as 16 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) fn wide_halves<const UNSIGNED: bool>(words: __m512i) -> [__m512i; 2] {
    let even = _mm512_slli_epi16::<8>(words);
    match UNSIGNED {
        true => [_mm512_srli_epi16::<8>(even), _mm512_srli_epi16::<8>(words)],
        false => [_mm512_srai_epi16::<8>(even), _mm512_srai_epi16::<8>(words)],
    }
}

/// `sum` and the products of two operands' halves, which 16 bits times 16 cannot overflow.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) fn add_pairs(sum: __m512i, a: [__m512i; 2], b: [__m512i; 2]) -> __m512i {
    let even = _mm512_madd_epi16(a[0], b[0]);
    let odd = _mm512_madd_epi16(a[1], b[1]);
    _mm512_add_epi32(sum, _mm512_add_epi32(even, odd))
}

#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) fn dot_pairs<const ROWS: usize, const VECTORS: usize, const LEFT: bool>(tile: Tile) {
    match (ROWS, VECTORS) {
        // More sums than there are registers for.
        (8, 3) => {
            pairs_of_rows::<ROWS, VECTORS, LEFT, 4>(tile.left, tile.right, 0, tile.sums);
            pairs_of_rows::<ROWS, VECTORS, LEFT, 4>(tile.left, tile.right, 4, tile.sums);
        }
        _ => pairs_of_rows::<ROWS, VECTORS, LEFT, ROWS>(tile.left, tile.right, 0, tile.sums),
    }
}

/// The sums of `COUNT` rows from `first` on.
#[target_feature(enable = "avx512f,avx512bw")]
fn pairs_of_rows<const ROWS: usize, const VECTORS: usize, const LEFT: bool, const COUNT: usize>(
    left: &[u32],
    right: &[u32],
    first: usize,
    target: &mut Sums,
) {
    let mut sums = [[_mm512_setzero_si512(); VECTORS]; COUNT];
    let (left, _) = left.as_chunks::<ROWS>();
    let (right, _) = right.as_chunks::<LANES>();
    for (a, b) in left.iter().zip(right.chunks_exact(VECTORS)) {
        let mut columns = [[_mm512_setzero_si512(); 2]; VECTORS];
        for (column, words) in columns.iter_mut().zip(b) {
            *column = match LEFT {
                true => wide_halves::<false>(bytemuck::cast(*words)),
                false => wide_halves::<true>(bytemuck::cast(*words)),
            };
        }
        for (sums, &a) in sums.iter_mut().zip(&a[first..first + COUNT]) {
            let a = _mm512_set1_epi32(a as i32);
            let a = match LEFT {
                true => wide_halves::<true>(a),
                false => wide_halves::<false>(a),
            };
            for (sum, &b) in sums.iter_mut().zip(&columns) {
                *sum = add_pairs(*sum, a, b);
            }
        }
    }
    for (target, sums) in target[first..].iter_mut().zip(sums) {
        for (target, sum) in target.iter_mut().zip(sums) {
            *target = bytemuck::cast(sum);
        }
    }
}

/// Rows that the registers hold sums for, with one vector.
const ROWS_AT_ONCE: usize = 4;

#[target_feature(enable = "avx2")]
pub(crate) fn dot_avx2<const ROWS: usize, const VECTORS: usize, const LEFT: bool>(tile: Tile) {
    for vector in 0..VECTORS {
        for first in (0..ROWS).step_by(ROWS_AT_ONCE) {
            match ROWS - first {
                1 => few_rows::<ROWS, VECTORS, LEFT, 1>(&tile, first, vector),
                2 | 3 => few_rows::<ROWS, VECTORS, LEFT, 2>(&tile, first, vector),
                _ => few_rows::<ROWS, VECTORS, LEFT, 4>(&tile, first, vector),
            }
            .into_iter()
            .enumerate()
            .for_each(|(row, sums)| tile.sums[first + row][vector] = sums);
        }
    }
}

/// Bytes at even and at odd places, each as 16 bits.
#[target_feature(enable = "avx2")]
pub(crate) fn halves<const UNSIGNED: bool>(words: __m256i) -> [__m256i; 2] {
    let even = _mm256_slli_epi16::<8>(words);
    match UNSIGNED {
        true => [_mm256_srli_epi16::<8>(even), _mm256_srli_epi16::<8>(words)],
        false => [_mm256_srai_epi16::<8>(even), _mm256_srai_epi16::<8>(words)],
    }
}

/// The sums of `COUNT` rows from `first` on with one vector. Products of 16 bits cannot overflow,
/// unlike the instruction that multiplies bytes.
#[target_feature(enable = "avx2")]
fn few_rows<const ROWS: usize, const VECTORS: usize, const LEFT: bool, const COUNT: usize>(
    tile: &Tile,
    first: usize,
    vector: usize,
) -> SomeRows {
    let mut sums = [[_mm256_setzero_si256(); 2]; COUNT];
    let (left, _) = tile.left.as_chunks::<ROWS>();
    let (right, _) = tile.right.as_chunks::<LANES>();
    for (a, b) in left.iter().zip(right.chunks_exact(VECTORS)) {
        let [low, high]: [__m256i; 2] = bytemuck::cast(b[vector]);
        let columns = match LEFT {
            true => [halves::<false>(low), halves::<false>(high)],
            false => [halves::<true>(low), halves::<true>(high)],
        };
        for (sums, &a) in sums.iter_mut().zip(&a[first..first + COUNT]) {
            let a = _mm256_set1_epi32(a as i32);
            let [even, odd] = match LEFT {
                true => halves::<true>(a),
                false => halves::<false>(a),
            };
            for (sum, column) in sums.iter_mut().zip(columns) {
                let even = _mm256_madd_epi16(even, column[0]);
                let odd = _mm256_madd_epi16(odd, column[1]);
                *sum = _mm256_add_epi32(*sum, _mm256_add_epi32(even, odd));
            }
        }
    }
    let mut rows = SomeRows { count: COUNT, ..SomeRows::default() };
    for (target, sums) in rows.sums.iter_mut().zip(sums) {
        *target = bytemuck::cast(sums);
    }
    rows
}

/// Sums of one to four rows.
#[derive(Default)]
struct SomeRows {
    sums: [[i32; LANES]; ROWS_AT_ONCE],
    count: usize,
}

impl SomeRows {
    fn into_iter(self) -> impl Iterator<Item = [i32; LANES]> {
        self.sums.into_iter().take(self.count)
    }
}
