//! The innermost loops: a few rows times a few vectors of the result at a time, held in registers.

use std::sync::OnceLock;

use model::op::Activation;
use rten_simd::ops::{BitOps, NumOps};
use rten_simd::{Isa, Simd, SimdOp};

use super::{MAX_ROWS, PANEL_VECTORS, finish_rows};
use crate::yield_point;

/// Multiplications that are added up before they are reported: one tile is too little work.
const LOOK_AFTER: usize = 128 * 1024;

/// Columns of a panel of the right operand.
pub(super) fn panel_width() -> usize {
    lanes() * PANEL_VECTORS
}

/// Rows of a panel of the left operand: as many as the machine's registers hold accumulators for.
pub(super) fn panel_rows() -> usize {
    if lanes() == 16 || cfg!(target_arch = "aarch64") { MAX_ROWS } else { MAX_ROWS / 2 }
}

/// Elements of a vector on this machine.
pub(in super::super) fn lanes() -> usize {
    struct Lanes;
    impl SimdOp for Lanes {
        type Output = usize;

        #[inline(always)]
        fn eval<I: Isa>(self, isa: I) -> usize {
            isa.f32().len()
        }
    }
    static LANES: OnceLock<usize> = OnceLock::new();
    *LANES.get_or_init(|| Lanes.dispatch())
}

/// Rows that a panel with `rows` used ones is packed with.
pub(super) fn packed_rows(rows: usize) -> usize {
    rows.next_power_of_two().min(panel_rows())
}

/// Operations on a tile before it is written for the last time. Slices begin at the block's first
/// element.
#[derive(Clone, Copy)]
pub(super) struct TileEpilogue<'a> {
    pub(super) alpha: f32,
    pub(super) row_bias: Option<&'a [f32]>,
    pub(super) column_bias: Option<&'a [f32]>,
    /// The elements and the distance of their rows.
    pub(super) residual: Option<(&'a [f32], usize)>,
    pub(super) clamp: Option<(f32, f32)>,
}

/// A block of the result whose operands are packed.
pub(super) struct PackedBlock<'a, 'b> {
    /// The block's rows.
    pub(super) out: &'a mut [&'b mut [f32]],
    /// Panels of the left operand from the block's first row on.
    pub(super) left: &'a [f32],
    /// Panels of the right operand from the block's first column on.
    pub(super) right: &'a [f32],
    pub(super) depth: usize,
    pub(super) max_depth: usize,
    pub(super) accumulate: bool,
    pub(super) finish: TileEpilogue<'a>,
    /// Applied to whole rows afterwards.
    pub(super) activation: Activation,
}

/// Computes `block`.
pub(super) fn run(block: PackedBlock) {
    block.dispatch();
}

impl SimdOp for PackedBlock<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let height = panel_rows();
        let lanes = isa.f32().len();
        let width = lanes * PANEL_VECTORS;
        let columns = self.out.first().map_or(0, |row| row.len());
        let steps = self.depth.div_ceil(self.max_depth).max(1);
        let mut multiplied = 0;
        // A panel of the right operand stays in the cache while all rows use it.
        for step in 0..steps {
            let from = step * self.max_depth;
            let to = (from + self.max_depth).min(self.depth);
            let (add, last) = (self.accumulate || step > 0, step + 1 == steps);
            for (panel, rows) in self.out.chunks_mut(height).enumerate() {
                let packed = packed_rows(rows.len());
                let left = &self.left[panel * height * self.depth..][from * packed..to * packed];
                let first_row = panel * height;
                let mut tile = Tile { rows, first_row, column: 0, finish: &self.finish };
                for start in (0..columns).step_by(width) {
                    let vectors = (columns - start).div_ceil(lanes).min(PANEL_VECTORS);
                    let used = vectors * lanes;
                    let right = &self.right[start * self.depth..][from * used..to * used];
                    tile.column = start;
                    tile.compute(isa, packed, vectors, left, right, add, last);
                    multiplied += packed * used * (to - from);
                    if multiplied >= LOOK_AFTER {
                        yield_point::did_multiplications(multiplied);
                        multiplied = 0;
                    }
                }
                if last {
                    finish_rows(self.activation, rows);
                }
            }
        }
        yield_point::did_multiplications(multiplied);
    }
}

/// A few rows and vectors of a block.
struct Tile<'a, 'b, 'c> {
    rows: &'a mut [&'b mut [f32]],
    /// Position of the first row and column in the block.
    first_row: usize,
    column: usize,
    finish: &'c TileEpilogue<'c>,
}

impl Tile<'_, '_, '_> {
    #[inline(always)]
    fn compute<I: Isa>(
        &mut self,
        isa: I,
        packed: usize,
        vectors: usize,
        left: &[f32],
        right: &[f32],
        add: bool,
        last: bool,
    ) {
        if packed == MAX_ROWS && self.rows[0].len() == 1 {
            return self.compute_column(isa, left, right, add, last);
        }
        match (packed, vectors) {
            (8, 3) => self.compute_sized::<I, 8, 3>(isa, left, right, add, last),
            (8, 2) => self.compute_sized::<I, 8, 2>(isa, left, right, add, last),
            (8, _) => self.compute_sized::<I, 8, 1>(isa, left, right, add, last),
            (4, 3) => self.compute_sized::<I, 4, 3>(isa, left, right, add, last),
            (4, 2) => self.compute_sized::<I, 4, 2>(isa, left, right, add, last),
            (4, _) => self.compute_sized::<I, 4, 1>(isa, left, right, add, last),
            (2, 3) => self.compute_sized::<I, 2, 3>(isa, left, right, add, last),
            (2, 2) => self.compute_sized::<I, 2, 2>(isa, left, right, add, last),
            (2, _) => self.compute_sized::<I, 2, 1>(isa, left, right, add, last),
            (_, 3) => self.compute_sized::<I, 1, 3>(isa, left, right, add, last),
            (_, 2) => self.compute_sized::<I, 1, 2>(isa, left, right, add, last),
            (_, _) => self.compute_sized::<I, 1, 1>(isa, left, right, add, last),
        }
    }

    /// A result of one column: vectors hold rows of the left operand, because those of columns
    /// would be nearly empty.
    #[inline(always)]
    fn compute_column<I: Isa>(
        &mut self,
        isa: I,
        left: &[f32],
        right: &[f32],
        add: bool,
        last: bool,
    ) {
        const SIDE_BY_SIDE: usize = 4;
        let ops = isa.f32();
        let lanes = ops.len();
        let (rows, _) = left.as_chunks::<MAX_ROWS>();
        let (several, rest) = rows.as_chunks::<SIDE_BY_SIDE>();
        let mut sums = [[0f32; MAX_ROWS]; SIDE_BY_SIDE];
        for (rows, right) in several.iter().zip(right.chunks_exact(SIDE_BY_SIDE * lanes)) {
            for side in 0..SIDE_BY_SIDE {
                let factor = right[side * lanes];
                for row in 0..MAX_ROWS {
                    sums[side][row] += rows[side][row] * factor;
                }
            }
        }
        let right = &right[several.len() * SIDE_BY_SIDE * lanes..];
        for (rows, right) in rest.iter().zip(right.chunks_exact(lanes)) {
            for row in 0..MAX_ROWS {
                sums[0][row] += rows[row] * right[0];
            }
        }
        for row in 0..self.rows.len() {
            let sum: f32 = sums.iter().map(|sums| sums[row]).sum();
            self.write(isa, row, 0, ops.splat(self.finish.alpha * sum), add, last);
        }
    }

    #[inline(always)]
    fn compute_sized<I: Isa, const ROWS: usize, const VECTORS: usize>(
        &mut self,
        isa: I,
        left: &[f32],
        right: &[f32],
        add: bool,
        last: bool,
    ) {
        let ops = isa.f32();
        let lanes = ops.len();
        let mut sums = [[ops.zero(); VECTORS]; ROWS];
        let (factors, _) = left.as_chunks::<ROWS>();
        for (a, b) in factors.iter().zip(right.chunks_exact(VECTORS * lanes)) {
            let b: [I::F32; VECTORS] = ops.load_many::<VECTORS>(b);
            for row in 0..ROWS {
                let factor = ops.splat(a[row]);
                for vector in 0..VECTORS {
                    sums[row][vector] = ops.mul_add(factor, b[vector], sums[row][vector]);
                }
            }
        }
        if self.is_plain(VECTORS * lanes, last) {
            return self.write_plain(isa, &sums, add);
        }
        let alpha = ops.splat(self.finish.alpha);
        let scaled = self.finish.alpha != 1.0;
        for (row, sums) in sums.iter().enumerate().take(self.rows.len()) {
            for (vector, &sum) in sums.iter().enumerate() {
                let sum = if scaled { ops.mul(sum, alpha) } else { sum };
                self.write(isa, row, vector * lanes, sum, add, last);
            }
        }
    }

    /// Whether whole vectors are written for the last time with at most a bias and a clamp, as in
    /// nearly all tiles of convolutions.
    #[inline(always)]
    fn is_plain(&self, width: usize, last: bool) -> bool {
        let finish = self.finish;
        let whole = self.rows.first().is_some_and(|row| row.len() >= self.column + width);
        let no_operands = finish.column_bias.is_none() && finish.residual.is_none();
        last && whole && no_operands && finish.alpha == 1.0
    }

    /// Writes a tile without looking at each vector's conditions.
    #[inline(always)]
    fn write_plain<I: Isa, const ROWS: usize, const VECTORS: usize>(
        &mut self,
        isa: I,
        sums: &[[I::F32; VECTORS]; ROWS],
        add: bool,
    ) {
        let ops = isa.f32();
        let lanes = ops.len();
        let (low, high) = self.finish.clamp.unwrap_or_default();
        let (low, high) = (ops.splat(low), ops.splat(high));
        let columns = self.column..self.column + VECTORS * lanes;
        for (row, (out, sums)) in self.rows.iter_mut().zip(sums).enumerate() {
            let mut values = *sums;
            let out = &mut out[columns.clone()];
            if add {
                let before: [I::F32; VECTORS] = ops.load_many(out);
                values = std::array::from_fn(|at| ops.add(values[at], before[at]));
            }
            if let Some(bias) = self.finish.row_bias {
                let bias = ops.splat(bias[self.first_row + row]);
                values = values.map(|value| ops.add(value, bias));
            }
            if self.finish.clamp.is_some() {
                values = values.map(|value| ops.min(high, ops.max(low, value)));
            }
            for (out, value) in out.chunks_exact_mut(lanes).zip(values) {
                ops.store(value, out);
            }
        }
    }

    /// Writes one vector of the result at `offset` from the tile's first column.
    #[inline(always)]
    fn write<I: Isa>(
        &mut self,
        isa: I,
        row: usize,
        offset: usize,
        sum: I::F32,
        add: bool,
        last: bool,
    ) {
        let ops = isa.f32();
        let lanes = ops.len();
        let start = self.column + offset;
        let out = &mut self.rows[row][start..];
        let mut value = sum;
        if add {
            value = ops.add(value, read(isa, out));
        }
        if last {
            let block_row = self.first_row + row;
            if let Some(bias) = self.finish.row_bias {
                value = ops.add(value, ops.splat(bias[block_row]));
            }
            if let Some(bias) = self.finish.column_bias {
                value = ops.add(value, read(isa, &bias[start..]));
            }
            if let Some((residual, stride)) = self.finish.residual {
                let from = block_row * stride + start;
                let wanted = lanes.min(out.len());
                value = ops.add(value, read(isa, &residual[from..from + wanted]));
            }
            if let Some((low, high)) = self.finish.clamp {
                value = ops.min(ops.splat(high), ops.max(ops.splat(low), value));
            }
        }
        if out.len() >= lanes {
            ops.store(value, out);
        } else {
            let values = value.to_array();
            let length = out.len();
            out.copy_from_slice(&values.as_ref()[..length]);
        }
    }
}

/// A vector of the first elements of `source`, padded with zeros.
#[inline(always)]
fn read<I: Isa>(isa: I, source: &[f32]) -> I::F32 {
    let ops = isa.f32();
    if source.len() >= ops.len() { ops.load(source) } else { ops.load_pad(source).0 }
}
