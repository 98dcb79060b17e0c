//! Matrix products of `f32`, with fused operations on the result while it is in registers or cache.
//!
//! Both operands are packed into panels that the innermost loop reads from front to back: the left
//! one into panels of a few rows, the right one into panels of a few vectors' columns. Constant
//! operands are packed when a plan is loaded. A product is split into tasks by columns or by rows;
//! a task packs its part into a buffer that stays in its core's second-level cache.

mod pack;
mod tile;

use std::cell::RefCell;
use std::ops::Range;

use model::MemoryError;
use model::op::Activation;

pub(super) use pack::{IMAGE_GUARD, Image, Matrix, PackedLeft, PackedRight, flush_subnormal};
pub(super) use tile::lanes;
use tile::{PackedBlock, TileEpilogue};

use super::activation;
use super::parallel::try_for_each;
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};

/// Vectors across a panel of the right operand.
pub(super) const PANEL_VECTORS: usize = 3;

/// Maximum rows of the result that one pass of the innermost loop computes.
const MAX_ROWS: usize = 8;

/// Elements of packed operands that one task keeps in its core's second-level cache.
const CACHED_ELEMENTS: usize = 192 * 1024;

/// Elements of a packed right operand when the left one stays in the cache as well.
const FEW_ELEMENTS: usize = 32 * 1024;

/// Depth that is summed up before the result is written.
pub(super) const MAX_DEPTH: usize = 1024;

/// Products smaller than this many multiplications stay on one thread.
pub(super) const MIN_PARALLEL_WORK: usize = 256 * 1024;

/// The left operand, `rows x depth`.
#[derive(Clone, Copy)]
pub(super) enum Left<'a> {
    Plain(Matrix<'a>),
    Packed(&'a PackedLeft),
}

/// The right operand, `depth x columns`.
#[derive(Clone, Copy)]
pub(super) enum Right<'a> {
    Plain(Matrix<'a>),
    Packed(&'a PackedRight),
    /// The windows of an image, one per column.
    Image(&'a Image<'a>),
}

impl Left<'_> {
    fn rows(&self) -> usize {
        match self {
            Left::Plain(matrix) => matrix.rows,
            Left::Packed(packed) => packed.rows(),
        }
    }

    fn depth(&self) -> usize {
        match self {
            Left::Plain(matrix) => matrix.columns,
            Left::Packed(packed) => packed.depth(),
        }
    }
}

impl Right<'_> {
    fn columns(&self) -> usize {
        match self {
            Right::Plain(matrix) => matrix.columns,
            Right::Packed(packed) => packed.columns(),
            Right::Image(image) => image.columns(),
        }
    }

    fn depth(&self) -> usize {
        match self {
            Right::Plain(matrix) => matrix.rows,
            Right::Packed(packed) => packed.depth(),
            Right::Image(image) => image.depth(),
        }
    }
}

/// Operations on the product before it is the result.
#[derive(Clone, Copy)]
pub(super) struct Epilogue<'a> {
    /// Factor on the product.
    pub(super) alpha: f32,
    /// Added to each row.
    pub(super) row_bias: Option<&'a [f32]>,
    /// Added to each column.
    pub(super) column_bias: Option<&'a [f32]>,
    /// Added to each element; laid out as the result.
    pub(super) residual: Option<&'a [f32]>,
    /// Adds the present content of the result's memory.
    pub(super) accumulate: bool,
    /// Applied last.
    pub(super) activation: Activation,
}

impl Default for Epilogue<'_> {
    fn default() -> Self {
        Epilogue {
            alpha: 1.0,
            row_bias: None,
            column_bias: None,
            residual: None,
            accumulate: false,
            activation: Activation::None,
        }
    }
}

/// Elements of scratch memory that a thread keeps.
pub(crate) const MAX_KEPT_SCRATCH: usize = 4 << 20;

thread_local! {
    /// Memory for packed panels. Stays initialized, so that it is filled only once.
    static SCRATCH: RefCell<Vec<Buffer<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with `length` elements of scratch memory whose contents are arbitrary.
pub(crate) fn with_scratch<R>(
    length: usize,
    f: impl FnOnce(&mut [f32]) -> R,
) -> Result<R, MemoryError> {
    let mut buffer = SCRATCH.with(|cell| cell.borrow_mut().pop()).unwrap_or_default();
    if buffer.len() < length {
        // The shorter one is freed first.
        drop(std::mem::take(&mut buffer));
        buffer = Buffer::filled(length, 0.0)?;
    }
    let result = f(&mut buffer[..length]);
    if buffer.len() <= MAX_KEPT_SCRATCH {
        SCRATCH.with(|cell| cell.borrow_mut().push(buffer));
    }
    Ok(result)
}

/// `out = activation(alpha * a @ b + biases + residual)` for a row-major `out`.
pub(super) fn product(
    out: &mut [f32],
    a: Left,
    b: Right,
    epilogue: Epilogue,
) -> Result<(), KernelError> {
    let threads = rayon::current_num_threads();
    product_on(threads, out, a, b, epilogue)
}

/// Like [`product`], on the calling thread alone.
pub(super) fn product_here(
    out: &mut [f32],
    a: Left,
    b: Right,
    epilogue: Epilogue,
) -> Result<(), KernelError> {
    product_on(1, out, a, b, epilogue)
}

fn product_on(
    threads: usize,
    out: &mut [f32],
    a: Left,
    b: Right,
    epilogue: Epilogue,
) -> Result<(), KernelError> {
    let (rows, depth, columns) = (a.rows(), a.depth(), b.columns());
    if depth != b.depth() {
        return Err(invalid!(
            "a matrix of {depth} columns is multiplied by one of {} rows",
            b.depth()
        ));
    }
    let fits = |bias: Option<&[f32]>, length| bias.is_none_or(|bias| bias.len() == length);
    if rows.checked_mul(columns) != Some(out.len())
        || !fits(epilogue.row_bias, rows)
        || !fits(epilogue.column_bias, columns)
        || !fits(epilogue.residual, out.len())
    {
        return Err(invalid!("operands do not fit a {rows} x {columns} product"));
    }
    if out.is_empty() {
        return Ok(());
    }
    let work = rows.saturating_mul(columns).saturating_mul(depth.max(1));
    let threads = if work < MIN_PARALLEL_WORK { 1 } else { threads };
    let call = ProductCall { a, b, epilogue, rows, depth, columns, threads };
    if call.splits_columns() { call.by_columns(out) } else { call.by_rows(out) }
}

/// One call of a product.
struct ProductCall<'a> {
    a: Left<'a>,
    b: Right<'a>,
    epilogue: Epilogue<'a>,
    rows: usize,
    depth: usize,
    columns: usize,
    threads: usize,
}

impl ProductCall<'_> {
    /// Whether tasks are ranges of columns rather than of rows.
    fn splits_columns(&self) -> bool {
        let panels = self.columns.div_ceil(tile::panel_width());
        let row_panels = self.rows.div_ceil(tile::panel_rows());
        match self.b {
            // Weights are read only once if each thread has its own columns.
            Right::Packed(_) => panels >= 2 * self.threads && self.rows < 512,
            _ => panels >= 4 * self.threads || row_panels < 2 * self.threads,
        }
    }

    /// Panels of the right operand that a task works on at a time.
    fn cached_panels(&self) -> usize {
        let depth = self.depth.clamp(1, MAX_DEPTH);
        let left_fits = depth * self.rows <= CACHED_ELEMENTS / 2;
        let elements = if left_fits { FEW_ELEMENTS } else { CACHED_ELEMENTS };
        (elements / (depth * tile::panel_width())).max(1)
    }

    /// Tasks that are ranges of columns. All of them read one packed left operand.
    fn by_columns(&self, out: &mut [f32]) -> Result<(), KernelError> {
        match self.a {
            Left::Packed(packed) => self.columns_of(out, packed.data()),
            Left::Plain(matrix) => {
                with_scratch(PackedLeft::length(self.rows, self.depth), |scratch| {
                    pack::pack_left(scratch, matrix, self.threads > 1);
                    self.columns_of(out, scratch)
                })?
            }
        }
    }

    fn columns_of(&self, out: &mut [f32], left: &[f32]) -> Result<(), KernelError> {
        let width = tile::panel_width();
        let panels = self.columns.div_ceil(width);
        let tasks =
            panels.div_ceil(self.cached_panels()).next_multiple_of(self.threads).min(panels);
        let bounds: Vec<usize> =
            (0..=tasks).map(|task| (panels * task / tasks * width).min(self.columns)).collect();
        let mut segments: Vec<Buffer<&mut [f32]>> =
            (0..tasks).map(|_| Buffer::with_capacity(self.rows)).collect::<Result<_, _>>()?;
        for row in out.chunks_exact_mut(self.columns) {
            let mut rest = row;
            for (task, segments) in segments.iter_mut().enumerate() {
                let (head, tail) = rest.split_at_mut(bounds[task + 1] - bounds[task]);
                segments.extend([head]);
                rest = tail;
            }
        }
        let run = |(task, mut rows): (usize, Buffer<&mut [f32]>)| {
            self.block(&mut rows, 0..self.rows, bounds[task]..bounds[task + 1], left, None)
        };
        if self.threads > 1 {
            try_for_each(segments.into_iter().enumerate(), &run)
        } else {
            segments.into_iter().enumerate().try_for_each(run)
        }
    }

    /// Tasks that are ranges of rows. All of them read one packed right operand.
    fn by_rows(&self, out: &mut [f32]) -> Result<(), KernelError> {
        match self.b {
            Right::Packed(packed) => self.rows_of(out, packed.data()),
            _ => with_scratch(PackedRight::length(self.depth, self.columns), |scratch| {
                pack::pack_right(scratch, self.b, 0..self.columns, self.threads > 1);
                self.rows_of(out, scratch)
            })?,
        }
    }

    fn rows_of(&self, out: &mut [f32], right: &[f32]) -> Result<(), KernelError> {
        let height = tile::panel_rows();
        let panels = self.rows.div_ceil(height);
        let cached = (CACHED_ELEMENTS / (height * self.depth).max(1)).max(1);
        let tasks = panels.div_ceil(cached).next_multiple_of(self.threads).min(panels);
        let per_task = panels.div_ceil(tasks) * height;
        let run = |(task, chunk): (usize, &mut [f32])| {
            let first = task * per_task;
            let range = first..(first + per_task).min(self.rows);
            let mut rows = Buffer::collect(chunk.chunks_exact_mut(self.columns))?;
            let columns = 0..self.columns;
            match self.a {
                Left::Packed(packed) => {
                    self.block(&mut rows, range, columns, packed.data(), Some(right))
                }
                Left::Plain(matrix) => {
                    let part = matrix.rows_in(range.clone());
                    with_scratch(PackedLeft::length(part.rows, self.depth), |scratch| {
                        pack::pack_left(scratch, part, false);
                        // The packed rows begin at the task's first one.
                        let offset = range.start;
                        self.block_at(&mut rows, range, columns, scratch, offset, Some(right))
                    })?
                }
            }
        };
        if self.threads > 1 {
            try_for_each(out.chunks_mut(per_task * self.columns).enumerate(), &run)
        } else {
            out.chunks_mut(per_task * self.columns).enumerate().try_for_each(run)
        }
    }

    fn block(
        &self,
        out: &mut [&mut [f32]],
        rows: Range<usize>,
        columns: Range<usize>,
        left: &[f32],
        right: Option<&[f32]>,
    ) -> Result<(), KernelError> {
        self.block_at(out, rows, columns, left, 0, right)
    }

    /// Computes `rows x columns` of the result. `left` holds packed rows from `left_start` on;
    /// `right` holds all packed columns, or is `None` if the task packs its own.
    fn block_at(
        &self,
        out: &mut [&mut [f32]],
        rows: Range<usize>,
        columns: Range<usize>,
        left: &[f32],
        left_start: usize,
        right: Option<&[f32]>,
    ) -> Result<(), KernelError> {
        let right = right.or(match self.b {
            Right::Packed(packed) => Some(packed.data()),
            _ => None,
        });
        if let Some(right) = right {
            self.tiles(out, rows, columns, left, left_start, right, 0);
            return Ok(());
        }
        let step = self.cached_panels() * tile::panel_width();
        with_scratch(PackedRight::length(self.depth, step.min(columns.len())), |scratch| {
            for start in columns.clone().step_by(step) {
                let part = start..(start + step).min(columns.end);
                pack::pack_right(scratch, self.b, part.clone(), false);
                let offset = start - columns.start;
                let cut = |row| {
                    let row: &mut &mut [f32] = row;
                    &mut row[offset..offset + part.len()]
                };
                let mut segments = Buffer::collect(out.iter_mut().map(cut))?;
                self.tiles(&mut segments, rows.clone(), part, left, left_start, scratch, start);
            }
            Ok(())
        })?
    }

    /// Computes a block whose operands are packed; `right` holds columns from `right_start` on.
    fn tiles(
        &self,
        out: &mut [&mut [f32]],
        rows: Range<usize>,
        columns: Range<usize>,
        left: &[f32],
        left_start: usize,
        right: &[f32],
        right_start: usize,
    ) {
        let clamp = activation::as_clamp(self.epilogue.activation);
        let finish = TileEpilogue {
            alpha: self.epilogue.alpha,
            row_bias: self.epilogue.row_bias.map(|bias| &bias[rows.clone()]),
            column_bias: self.epilogue.column_bias.map(|bias| &bias[columns.clone()]),
            residual: self.epilogue.residual.map(|residual| {
                (&residual[rows.start * self.columns + columns.start..], self.columns)
            }),
            clamp,
        };
        let height = tile::panel_rows();
        let first_panel = (rows.start - left_start) / height * height * self.depth;
        let first_column =
            (columns.start - right_start) / tile::panel_width() * tile::panel_width() * self.depth;
        tile::run(PackedBlock {
            out,
            left: &left[first_panel..],
            right: &right[first_column..],
            depth: self.depth,
            max_depth: MAX_DEPTH,
            accumulate: self.epilogue.accumulate,
            finish,
            activation: match clamp {
                Some(_) => Activation::None,
                None => self.epilogue.activation,
            },
        });
    }
}

/// Applies activations that the innermost loop does not have.
fn finish_rows(activation: Activation, rows: &mut [&mut [f32]]) {
    if activation != Activation::None {
        rows.iter_mut().for_each(|row| activation::apply(activation, row));
    }
}

/// Frees the calling thread's scratch memory.
#[cfg(test)]
pub(super) fn free_scratch() {
    SCRATCH.with(|cell| cell.borrow_mut().clear());
}
