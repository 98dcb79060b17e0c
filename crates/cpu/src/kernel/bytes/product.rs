//! Products of packed bytes, in tasks.

use std::ops::Range;

use int8::{LANES, MAX_ROWS, MAX_VECTORS, Sums, Unsigned, WORD_DEPTH};
use rten_simd::SimdOp;

use super::finish::{Channels, Finish, FinishTile, Target};
use super::pack::{self, ByteImage, PANEL_COLUMNS};
use crate::buffer::Buffer;
use crate::kernel::KernelError;
use crate::kernel::gemm::with_scratch;
use crate::kernel::parallel::{Failure, for_each};
use crate::yield_point;

/// Words of packed columns that a task keeps in its core's second-level cache.
const CACHED_WORDS: usize = 64 * 1024;

/// Words of a panel of columns that stay in the first-level cache.
const NEAR_WORDS: usize = 7 * 1024;

/// Products with fewer multiplications stay on one thread.
const MIN_PARALLEL_WORK: usize = 512 * 1024;

/// Multiplications of bytes that take as long as one of numbers.
pub(super) const BYTES_PER_NUMBER: usize = 3;

/// Multiplications that are added up before they are reported.
const REPORT_AFTER: usize = 256 * 1024;

/// The operand with columns.
#[derive(Clone, Copy)]
pub(super) enum Right<'a> {
    Packed(&'a [u32]),
    Windows(&'a ByteImage<'a>),
}

/// A product of `rows x words` by `words x columns`.
pub(super) struct ByteProduct<'a> {
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Bytes of a column; the last word may hold more.
    pub(super) depth: usize,
    pub(super) words: usize,
    pub(super) left: &'a [u32],
    pub(super) right: Right<'a>,
    pub(super) unsigned: Unsigned,
    pub(super) finish: Finish<'a>,
    /// Sums of the rows' bytes, if the finish needs them and channels are columns.
    pub(super) row_sums: &'a [i32],
}

/// A part of the result.
struct Block<'b, T> {
    rows: Range<usize>,
    columns: Range<usize>,
    out: Buffer<&'b mut [T]>,
}

impl ByteProduct<'_> {
    /// Computes the row-major `out`, on all threads if `parallel`.
    pub(super) fn run<T: Target>(&self, out: &mut [T], parallel: bool) -> Result<(), KernelError> {
        if out.is_empty() {
            return Ok(());
        }
        let work = self.rows.saturating_mul(self.columns).saturating_mul(self.words * 4);
        let threads = match parallel && work >= MIN_PARALLEL_WORK {
            true => rayon::current_num_threads(),
            false => 1,
        };
        let blocks = self.blocks(out, threads)?;
        let failure = Failure::default();
        let one = |block: Block<T>| {
            failure.check(self.block(block));
        };
        if threads > 1 {
            for_each(blocks.into_iter(), &one);
        } else {
            blocks.into_iter().for_each(one);
        }
        failure.result()
    }

    /// The result in parts for `threads` threads.
    fn blocks<'b, T>(
        &self,
        out: &'b mut [T],
        threads: usize,
    ) -> Result<Vec<Block<'b, T>>, KernelError> {
        // Packed columns can only be cut between panels.
        let unit = match self.right {
            Right::Packed(_) => PANEL_COLUMNS,
            Right::Windows(_) => LANES,
        };
        let units = self.columns.div_ceil(unit);
        let panels = self.rows.div_ceil(MAX_ROWS);
        // Twice as many tasks as threads even out different speeds, if panels stay whole.
        let wanted = if threads > 1 { 2 * threads } else { 1 };
        let across = wanted.min(self.columns / PANEL_COLUMNS).max(1);
        let down = if across >= threads { 1 } else { threads.div_ceil(across).min(panels) };
        let column_at = |task: usize| (units * task / across * unit).min(self.columns);
        let row_at = |task: usize| (panels * task / down * MAX_ROWS).min(self.rows);
        let mut blocks: Vec<Block<T>> = Vec::new();
        for task in 0..down {
            let rows = row_at(task)..row_at(task + 1);
            for task in 0..across {
                let columns = column_at(task)..column_at(task + 1);
                let out = Buffer::with_capacity(rows.len())?;
                blocks.push(Block { rows: rows.clone(), columns, out });
            }
        }
        for (row, line) in out.chunks_exact_mut(self.columns).enumerate() {
            let task = (0..down).find(|task| row < row_at(task + 1)).unwrap_or(0);
            let mut rest = line;
            for block in &mut blocks[task * across..(task + 1) * across] {
                let (head, tail) = rest.split_at_mut(block.columns.len());
                block.out.extend([head]);
                rest = tail;
            }
        }
        Ok(blocks)
    }

    fn block<T: Target>(&self, mut block: Block<T>) -> Result<(), KernelError> {
        let per_chunk = (CACHED_WORDS / (self.words.max(1) * PANEL_COLUMNS)).max(1) * PANEL_COLUMNS;
        let columns = block.columns.clone();
        for start in columns.clone().step_by(per_chunk) {
            let chunk = start..(start + per_chunk).min(columns.end);
            match self.right {
                Right::Packed(packed) => self.chunk(&mut block, chunk, Packed::All(packed), &[]),
                Right::Windows(image) => {
                    let length = pack::right_length(self.words, chunk.len());
                    let sums = match self.finish.weight_zeros {
                        Some(_) => chunk.len(),
                        None => 0,
                    };
                    with_scratch(length + sums, |scratch| {
                        let scratch: &mut [u32] = bytemuck::cast_slice_mut(scratch);
                        let (packed, sums) = scratch.split_at_mut(length);
                        image.pack(packed, chunk.clone());
                        let sums: &mut [i32] = bytemuck::cast_slice_mut(sums);
                        if !sums.is_empty() {
                            pack::column_sums(packed, self.depth, chunk.len(), sums);
                        }
                        self.chunk(&mut block, chunk, Packed::Chunk(packed), sums);
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Computes some columns of a block.
    fn chunk<T: Target>(
        &self,
        block: &mut Block<T>,
        columns: Range<usize>,
        right: Packed,
        column_sums: &[i32],
    ) {
        let panels = block.out.len().div_ceil(MAX_ROWS);
        let steps = (columns.end - columns.start).div_ceil(PANEL_COLUMNS);
        let mut multiplied = 0;
        let mut sums: Sums = [[[0; LANES]; MAX_VECTORS]; MAX_ROWS];
        let mut tile = |panel: usize, step: usize| {
            let column = columns.start + step * PANEL_COLUMNS;
            let (words, vectors) = right.panel(self, &columns, column);
            let own = column_sums.get(step * PANEL_COLUMNS..).unwrap_or_default();
            multiplied += self.tile(block, panel, column, words, vectors, own, &mut sums);
            if multiplied >= REPORT_AFTER {
                yield_point::did_multiplications(multiplied / BYTES_PER_NUMBER);
                multiplied = 0;
            }
        };
        if self.words * PANEL_COLUMNS <= NEAR_WORDS {
            // A panel of columns stays in the first-level cache while all rows use it.
            (0..steps).for_each(|step| (0..panels).for_each(|panel| tile(panel, step)));
        } else {
            (0..panels).for_each(|panel| (0..steps).for_each(|step| tile(panel, step)));
        }
        yield_point::did_multiplications(multiplied / BYTES_PER_NUMBER);
    }

    /// Computes a few rows and vectors of a block; returns how many products that took.
    fn tile<T: Target>(
        &self,
        block: &mut Block<T>,
        panel: usize,
        column: usize,
        words: &[u32],
        vectors: usize,
        column_sums: &[i32],
        sums: &mut Sums,
    ) -> usize {
        let first_row = block.rows.start + panel * MAX_ROWS;
        let packed = pack::packed_rows(self.rows.saturating_sub(first_row).min(MAX_ROWS));
        let left = &self.left[first_row * self.words..][..packed * self.words];
        int8::dot(packed, vectors, self.unsigned, left, words, sums);
        let end = ((panel + 1) * MAX_ROWS).min(block.out.len());
        FinishTile {
            finish: &self.finish,
            sums,
            out: &mut block.out[panel * MAX_ROWS..end],
            first_row,
            first_column: column,
            offset: column - block.columns.start,
            vectors,
            activation_sums: match self.finish.channels {
                Channels::Rows => column_sums,
                Channels::Columns => self.row_sums,
            },
        }
        .dispatch();
        packed * vectors * LANES * self.words * WORD_DEPTH
    }
}

/// Where packed columns are.
#[derive(Clone, Copy)]
enum Packed<'a> {
    /// All of the product's.
    All(&'a [u32]),
    /// Those of a chunk.
    Chunk(&'a [u32]),
}

impl<'a> Packed<'a> {
    /// The words of whole vectors from `column` on, and how many vectors.
    fn panel(
        &self,
        product: &ByteProduct,
        chunk: &Range<usize>,
        column: usize,
    ) -> (&'a [u32], usize) {
        let words = product.words;
        match self {
            Packed::Chunk(packed) => {
                let start = column - chunk.start;
                let vectors = (chunk.end - column).div_ceil(LANES).min(MAX_VECTORS);
                (&packed[start * words..][..vectors * LANES * words], vectors)
            }
            Packed::All(packed) => {
                let vectors = (product.columns - column).div_ceil(LANES).min(MAX_VECTORS);
                (&packed[column * words..][..vectors * LANES * words], vectors)
            }
        }
    }
}
