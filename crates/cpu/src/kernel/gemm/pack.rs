//! Operands in the order the innermost loop reads them.

use std::ops::Range;

use rten_simd::ops::BitOps;
use rten_simd::{Isa, SimdOp};

use super::tile::{self, packed_rows, panel_rows, panel_width};
use super::{PANEL_VECTORS, Right};
use crate::buffer::Buffer;
use crate::kernel::KernelError;
use crate::kernel::parallel::for_each;
use crate::yield_point;

/// A matrix in memory.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) row_stride: usize,
    pub(crate) column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// A row-major matrix.
    pub(crate) fn new(data: &'a [f32], rows: usize, columns: usize) -> Matrix<'a> {
        Matrix { data, rows, columns, row_stride: columns, column_stride: 1 }
    }

    /// The same elements with rows and columns exchanged.
    pub(crate) fn transposed(self) -> Matrix<'a> {
        Matrix {
            data: self.data,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }

    /// Exchanges rows and columns if `transpose`.
    pub(crate) fn transposed_if(self, transpose: bool) -> Matrix<'a> {
        if transpose { self.transposed() } else { self }
    }

    /// Some of the rows.
    pub(crate) fn rows_in(self, rows: Range<usize>) -> Matrix<'a> {
        let start = (rows.start * self.row_stride).min(self.data.len());
        Matrix { data: &self.data[start..], rows: rows.len(), ..self }
    }
}

/// A left operand in panels of rows: for each panel, for each depth, its rows' elements.
pub(crate) struct PackedLeft {
    data: Buffer<f32>,
    rows: usize,
    depth: usize,
}

impl PackedLeft {
    pub(crate) fn new(matrix: Matrix) -> Result<PackedLeft, KernelError> {
        let mut data = Buffer::filled(PackedLeft::length(matrix.rows, matrix.columns), 0.0)?;
        pack_left(&mut data, matrix, true);
        flush_subnormal(&mut data);
        Ok(PackedLeft { data, rows: matrix.rows, depth: matrix.columns })
    }

    /// Elements that packing `rows x depth` takes.
    pub(crate) fn length(rows: usize, depth: usize) -> usize {
        let whole = rows / panel_rows() * panel_rows();
        let rest = rows - whole;
        (whole + if rest > 0 { packed_rows(rest) } else { 0 }) * depth
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    pub(crate) fn data(&self) -> &[f32] {
        &self.data
    }

    pub(crate) fn size_bytes(&self) -> usize {
        size_of_val(&*self.data)
    }
}

/// A right operand in panels of columns: for each panel, for each depth, its columns' elements.
pub(crate) struct PackedRight {
    data: Buffer<f32>,
    columns: usize,
    depth: usize,
}

impl PackedRight {
    pub(crate) fn new(matrix: Matrix) -> Result<PackedRight, KernelError> {
        let mut data = Buffer::filled(PackedRight::length(matrix.rows, matrix.columns), 0.0)?;
        pack_right(&mut data, Right::Plain(matrix), 0..matrix.columns, true);
        flush_subnormal(&mut data);
        Ok(PackedRight { data, columns: matrix.columns, depth: matrix.rows })
    }

    /// Elements that packing `depth x columns` takes.
    pub(crate) fn length(depth: usize, columns: usize) -> usize {
        columns.next_multiple_of(tile::lanes()) * depth
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    pub(crate) fn data(&self) -> &[f32] {
        &self.data
    }

    pub(crate) fn size_bytes(&self) -> usize {
        size_of_val(&*self.data)
    }
}

/// Makes zeros of weights below the least normal number. Training leaves many of them where a
/// filter reads nothing but its border, and a processor takes a hundred times as long to multiply
/// by one.
pub(crate) fn flush_subnormal(weights: &mut [f32]) {
    for weight in weights {
        *weight = if weight.abs() < f32::MIN_POSITIVE { 0.0 } else { *weight };
    }
}

/// Packs `matrix` into `target`, which is exactly as long as that takes.
pub(super) fn pack_left(target: &mut [f32], matrix: Matrix, parallel: bool) {
    let height = panel_rows();
    if matrix.columns == 0 {
        return;
    }
    let pack = |(panel, target): (usize, &mut [f32])| {
        let first = panel * height;
        let used = (matrix.rows - first).min(height);
        match packed_rows(used) {
            8 => pack_rows::<8>(target, matrix, first, used),
            4 => pack_rows::<4>(target, matrix, first, used),
            2 => pack_rows::<2>(target, matrix, first, used),
            _ => pack_rows::<1>(target, matrix, first, used),
        }
        yield_point::did_work(used * matrix.columns / 2);
    };
    let size = height * matrix.columns;
    if parallel {
        for_each(target.chunks_mut(size).enumerate(), &pack);
    } else {
        target.chunks_mut(size).enumerate().for_each(pack);
    }
}

fn pack_rows<const ROWS: usize>(target: &mut [f32], matrix: Matrix, first: usize, used: usize) {
    let (target, _) = target.as_chunks_mut::<ROWS>();
    if matrix.row_stride == 1 && matrix.column_stride != 1 {
        for (depth, target) in target.iter_mut().enumerate() {
            let start = depth * matrix.column_stride + first;
            target[..used].copy_from_slice(&matrix.data[start..start + used]);
            target[used..].fill(0.0);
        }
        return;
    }
    if matrix.column_stride == 1 {
        // All rows are read at the same time, so that writes are contiguous.
        let rows: [&[f32]; ROWS] = std::array::from_fn(|row| {
            let start = (first + row.min(used - 1)) * matrix.row_stride;
            &matrix.data[start..start + matrix.columns]
        });
        interleave(target, rows);
        if used < ROWS {
            target.iter_mut().for_each(|target| target[used..].fill(0.0));
        }
        return;
    }
    for row in 0..ROWS {
        if row >= used {
            target.iter_mut().for_each(|target| target[row] = 0.0);
            continue;
        }
        let source = matrix.data[(first + row) * matrix.row_stride..].iter();
        let source = source.step_by(matrix.column_stride);
        target.iter_mut().zip(source).for_each(|(target, &x)| target[row] = x);
    }
}

/// Element `i` of each row becomes element `i` of `target`.
#[inline(always)]
fn interleave<const ROWS: usize>(target: &mut [[f32; ROWS]], rows: [&[f32]; ROWS]) {
    let rows = rows.map(|row| &row[..target.len()]);
    for (index, target) in target.iter_mut().enumerate() {
        *target = std::array::from_fn(|row| rows[row][index]);
    }
}

/// Packs the columns `range` of `source` into the front of `target`.
pub(super) fn pack_right(target: &mut [f32], source: Right, range: Range<usize>, parallel: bool) {
    let depth = source.depth();
    if depth == 0 || range.is_empty() {
        return;
    }
    let target = &mut target[..PackedRight::length(depth, range.len())];
    let width = panel_width();
    if let (Right::Plain(matrix), false) = (source, parallel)
        && matrix.column_stride == 1
    {
        PackRows { target, matrix, columns: range }.dispatch();
        return;
    }
    let pack = |(panel, target): (usize, &mut [f32])| {
        let start = range.start + panel * width;
        let columns = start..(start + width).min(range.end);
        match source {
            Right::Plain(matrix) if matrix.column_stride == 1 => {
                PackRows { target, matrix, columns }.dispatch();
            }
            Right::Plain(matrix) => pack_columns(target, matrix, columns),
            Right::Image(image) => PackImage { target, image, columns }.dispatch(),
            Right::Packed(_) => {}
        }
        yield_point::did_work(width * depth / 2);
    };
    if parallel {
        for_each(target.chunks_mut(width * depth).enumerate(), &pack);
    } else {
        target.chunks_mut(width * depth).enumerate().for_each(pack);
    }
}

/// Columns that are read at the same time.
const COLUMNS: usize = 8;

/// Packs columns of any strides.
fn pack_columns(target: &mut [f32], matrix: Matrix, columns: Range<usize>) {
    let width = target.len() / matrix.rows;
    let mut lane = 0;
    while lane + COLUMNS <= columns.len() && matrix.row_stride == 1 {
        let sources: [&[f32]; COLUMNS] = std::array::from_fn(|column| {
            let start = (columns.start + lane + column) * matrix.column_stride;
            &matrix.data[start..start + matrix.rows]
        });
        let rows = target.len() / width;
        let sources = sources.map(|source| &source[..rows]);
        for (depth, target) in (0..rows).zip(target.chunks_exact_mut(width)) {
            let values: [f32; COLUMNS] = std::array::from_fn(|column| sources[column][depth]);
            target[lane..lane + COLUMNS].copy_from_slice(&values);
        }
        lane += COLUMNS;
    }
    for lane in lane..width {
        let targets = target[lane..].iter_mut().step_by(width);
        let column = columns.start + lane;
        if column >= columns.end {
            targets.for_each(|target| *target = 0.0);
            continue;
        }
        let source = &matrix.data[column * matrix.column_stride..];
        let source = source.iter().step_by(matrix.row_stride.max(1));
        targets.zip(source).for_each(|(target, &x)| *target = x);
    }
}

/// Packs columns of a matrix whose rows are contiguous: each row is read once from left to right.
struct PackRows<'a> {
    target: &'a mut [f32],
    matrix: Matrix<'a>,
    columns: Range<usize>,
}

impl SimdOp for PackRows<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let ops = isa.f32();
        let lanes = ops.len();
        let width = lanes * PANEL_VECTORS;
        let depth = self.matrix.rows;
        let used = self.columns.len();
        let whole = used / width;
        let (panels, rest) = self.target.split_at_mut(whole * width * depth);
        for row in 0..depth {
            let start = row * self.matrix.row_stride + self.columns.start;
            let source = &self.matrix.data[start..start + used];
            for (panel, source) in source.chunks_exact(width).enumerate() {
                let vectors: [I::F32; PANEL_VECTORS] = ops.load_many(source);
                let at = (panel * depth + row) * width;
                let target = &mut panels[at..at + width];
                for (vector, target) in vectors.iter().zip(target.chunks_exact_mut(lanes)) {
                    ops.store(*vector, target);
                }
            }
            let narrow = rest.len() / depth;
            if narrow > 0 {
                let target = &mut rest[row * narrow..(row + 1) * narrow];
                target[..used - whole * width].copy_from_slice(&source[whole * width..]);
                target[used - whole * width..].fill(0.0);
            }
        }
    }
}

/// An image whose windows are the columns of a matrix. Each row is one channel and tap.
///
/// The image is bordered with zeros, and its columns are grouped by their remainder modulo the
/// stride, so that the elements one tap reads in adjacent windows are adjacent.
pub(crate) struct Image<'a> {
    /// Channels of rows of phases of columns.
    pub(crate) data: &'a [f32],
    /// The offset of each row of the matrix, that is of its channel and tap.
    pub(crate) taps: &'a [usize],
    /// The offset of each row of windows.
    pub(crate) rows: &'a [usize],
    /// Windows per row.
    pub(crate) width: usize,
}

/// Zeros before a bordered image, because a vector may begin before its first useful lane.
pub(crate) const IMAGE_GUARD: usize = 64;

impl Image<'_> {
    pub(crate) fn columns(&self) -> usize {
        self.width * self.rows.len()
    }

    pub(crate) fn depth(&self) -> usize {
        self.taps.len()
    }
}

/// The sources of the lanes of a vector of windows: `(lanes before this one, offset)` per row.
type ImagePieces = Vec<(usize, usize)>;

/// Packs the windows `columns` of an image.
struct PackImage<'a> {
    target: &'a mut [f32],
    image: &'a Image<'a>,
    columns: Range<usize>,
}

impl PackImage<'_> {
    /// The rows of windows that the vector starting at `column` covers. Offsets are those of the
    /// vector's first lane, so they may lie before the row.
    fn pieces(&self, column: usize, lanes: usize) -> ImagePieces {
        let image = self.image;
        let end = (column + lanes).min(self.columns.end);
        let mut pieces = ImagePieces::new();
        let mut at = column;
        while at < end {
            let (row, x) = (at / image.width, at % image.width);
            let before = at - column;
            pieces.push((before, image.rows[row] + x + IMAGE_GUARD - before));
            at += image.width - x;
        }
        pieces
    }
}

impl SimdOp for PackImage<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) {
        let ops = isa.f32();
        let lanes = ops.len();
        let width = self.target.len() / self.image.taps.len();
        let vectors = width / lanes;
        for vector in 0..vectors {
            let pieces = self.pieces(self.columns.start + vector * lanes, lanes);
            let targets = self.target[vector * lanes..].chunks_mut(width);
            let Some(((_, first), more)) = pieces.split_first() else { continue };
            let masks: Vec<_> =
                more.iter().map(|(before, offset)| (ops.first_n_mask(*before), *offset)).collect();
            let taps = targets.zip(self.image.taps);
            let data = self.image.data;
            match masks.as_slice() {
                [] => {
                    for (target, tap) in taps {
                        ops.store(ops.load(&data[tap + first..]), target);
                    }
                }
                [(mask, second)] => {
                    for (target, tap) in taps {
                        let (x, y) =
                            (ops.load(&data[tap + first..]), ops.load(&data[tap + second..]));
                        ops.store(ops.select(x, y, *mask), target);
                    }
                }
                [(mask, second), (last_mask, third)] => {
                    for (target, tap) in taps {
                        let (x, y) =
                            (ops.load(&data[tap + first..]), ops.load(&data[tap + second..]));
                        let z = ops.load(&data[tap + third..]);
                        ops.store(ops.select(ops.select(x, y, *mask), z, *last_mask), target);
                    }
                }
                masks => {
                    for (target, tap) in taps {
                        let mut value = ops.load(&data[tap + first..]);
                        for (mask, offset) in masks {
                            value = ops.select(value, ops.load(&data[tap + offset..]), *mask);
                        }
                        ops.store(value, target);
                    }
                }
            }
        }
    }
}
