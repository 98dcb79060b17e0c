//! Bytes in the order the dot products read them: four depths of a row or column are one word.

use int8::{LANES, MAX_ROWS, MAX_VECTORS, WORD_DEPTH};
use rten_simd::{Isa, SimdOp};

use crate::yield_point;

/// Columns of a panel of the right operand.
pub(super) const PANEL_COLUMNS: usize = LANES * MAX_VECTORS;

/// Rows that a panel with `rows` used ones is packed with.
pub(super) fn packed_rows(rows: usize) -> usize {
    rows.next_power_of_two().min(MAX_ROWS)
}

/// Words that `rows` rows of `words` words take.
pub(super) fn left_length(rows: usize, words: usize) -> usize {
    let whole = rows / MAX_ROWS * MAX_ROWS;
    let rest = rows - whole;
    (whole + if rest > 0 { packed_rows(rest) } else { 0 }) * words
}

/// Words that `columns` columns of `words` words take.
pub(super) fn right_length(words: usize, columns: usize) -> usize {
    columns.next_multiple_of(LANES) * words
}

/// The word of up to four bytes; missing ones are zero.
fn word(bytes: &[u8]) -> u32 {
    let mut all = [0; WORD_DEPTH];
    let used = bytes.len().min(WORD_DEPTH);
    all[..used].copy_from_slice(&bytes[..used]);
    u32::from_le_bytes(all)
}

/// The bit that makes signed bytes unsigned and back, for each byte of a word.
pub(super) const FLIP: u32 = 0x8080_8080;

/// Packs rows of `depth` bytes as the left operand. Bytes past the depth are zero, whatever
/// `flip`.
pub(super) fn pack_left(target: &mut [u32], data: &[u8], rows: usize, depth: usize, flip: u32) {
    let words = depth.div_ceil(WORD_DEPTH);
    for panel in 0..rows.div_ceil(MAX_ROWS) {
        let first = panel * MAX_ROWS;
        let used = (rows - first).min(MAX_ROWS);
        let packed = packed_rows(used);
        let target = &mut target[first * words..][..packed * words];
        for row in 0..packed {
            let slots = target[row..].iter_mut().step_by(packed);
            if row >= used {
                slots.for_each(|slot| *slot = 0);
                continue;
            }
            let source = &data[(first + row) * depth..][..depth];
            let (whole, rest) = source.as_chunks::<WORD_DEPTH>();
            let last = (!rest.is_empty()).then(|| {
                let kept = u32::MAX >> (8 * (WORD_DEPTH - rest.len()));
                (word(rest) ^ flip) & kept
            });
            let all = whole.iter().map(|bytes| u32::from_le_bytes(*bytes) ^ flip).chain(last);
            slots.zip(all).for_each(|(slot, word)| *slot = word);
        }
        yield_point::did_work(packed * words);
    }
}

/// Packs a matrix of `depth` rows and `columns` columns as the right operand. `at` gives a byte by
/// its depth and column. Slow: for constants.
pub(super) fn pack_right(
    target: &mut [u32],
    depth: usize,
    columns: usize,
    at: impl Fn(usize, usize) -> u8,
) {
    let words = depth.div_ceil(WORD_DEPTH);
    for start in (0..columns).step_by(PANEL_COLUMNS) {
        let width = (columns - start).min(PANEL_COLUMNS).next_multiple_of(LANES);
        let panel = &mut target[start * words..][..width * words];
        for (index, line) in panel.chunks_exact_mut(width).enumerate() {
            for (lane, slot) in line.iter_mut().enumerate() {
                let column = start + lane;
                let byte = |part: usize| match index * WORD_DEPTH + part {
                    row if row < depth && column < columns => at(row, column),
                    _ => 0,
                };
                *slot = u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)]);
            }
        }
    }
}

/// The windows of an image of bytes: each column is a window, each row one channel and tap.
pub(super) struct ByteImage<'a> {
    pub(super) data: &'a [u8],
    /// The offset of each channel and tap; a whole number of words.
    pub(super) taps: &'a [usize],
    /// The offset of each row of windows.
    pub(super) rows: &'a [usize],
    /// Windows per row.
    pub(super) width: usize,
    /// Makes the bytes unsigned.
    pub(super) flip: u32,
}

impl ByteImage<'_> {
    /// Packs the windows `columns`, which begin at a whole vector.
    pub(super) fn pack(&self, target: &mut [u32], columns: std::ops::Range<usize>) {
        PackWindows { target, image: self, columns }.dispatch();
    }
}

struct PackWindows<'a> {
    target: &'a mut [u32],
    image: &'a ByteImage<'a>,
    columns: std::ops::Range<usize>,
}

/// A run of windows in one row: lanes before it, and the offset of lane 0 if it began there. The
/// offset may be negative, because only lanes from `before` on are read there.
#[derive(Clone, Copy)]
struct Piece {
    before: usize,
    count: usize,
    offset: usize,
}

impl PackWindows<'_> {
    /// The runs of the vector that begins at `column`.
    fn pieces(&self, column: usize) -> ([Piece; LANES], usize) {
        let end = (column + LANES).min(self.columns.end);
        let mut pieces = [Piece { before: 0, count: 0, offset: 0 }; LANES];
        let (mut at, mut used) = (column, 0);
        while at < end {
            let (row, x) = (at / self.image.width, at % self.image.width);
            let count = (self.image.width - x).min(end - at);
            pieces[used] = Piece { before: at - column, count, offset: self.image.rows[row] + x };
            at += count;
            used += 1;
        }
        (pieces, used)
    }
}

/// One byte of each tap for each lane, as words.
#[inline(always)]
fn interleave(rows: [[u8; LANES]; WORD_DEPTH], flip: u32) -> [u32; LANES] {
    std::array::from_fn(|lane| {
        let word = u32::from(rows[0][lane])
            | u32::from(rows[1][lane]) << 8
            | u32::from(rows[2][lane]) << 16
            | u32::from(rows[3][lane]) << 24;
        word ^ flip
    })
}

impl SimdOp for PackWindows<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(mut self, _: I) {
        let target = std::mem::take(&mut self.target);
        let words = self.image.taps.len() / WORD_DEPTH;
        let (taps, _) = self.image.taps.as_chunks::<WORD_DEPTH>();
        let columns = self.columns.len();
        for start in (0..columns).step_by(LANES) {
            let panel = start / PANEL_COLUMNS * PANEL_COLUMNS;
            let width = (columns - panel).min(PANEL_COLUMNS).next_multiple_of(LANES);
            let (pieces, used) = self.pieces(self.columns.start + start);
            let lines = target[panel * words..][..width * words].chunks_exact_mut(width);
            let slots = lines.map(|line| &mut line[start - panel..][..LANES]).zip(taps);
            let data = self.image.data;
            // Whole vectors may be read where the image goes on behind the last window.
            let furthest = taps.iter().flatten().max().copied().unwrap_or(0);
            let readable = |piece: &Piece| {
                piece.offset >= piece.before
                    && piece.offset - piece.before + furthest + LANES <= data.len()
            };
            let whole = pieces[..used].iter().all(readable);
            match (&pieces[..used], whole) {
                ([piece], true) => {
                    for (slot, taps) in slots {
                        let rows = taps.map(|tap| load(data, tap + piece.offset));
                        slot.copy_from_slice(&interleave(rows, self.image.flip));
                    }
                }
                (pieces, true) => {
                    let mut masks = [[0u8; LANES]; LANES];
                    for (mask, piece) in masks.iter_mut().zip(pieces) {
                        mask[piece.before..piece.before + piece.count].fill(u8::MAX);
                    }
                    for (slot, taps) in slots {
                        let rows = taps.map(|tap| {
                            let mut row = [0; LANES];
                            for (piece, mask) in pieces.iter().zip(&masks) {
                                let source = load(data, tap + piece.offset - piece.before);
                                for lane in 0..LANES {
                                    row[lane] |= source[lane] & mask[lane];
                                }
                            }
                            row
                        });
                        slot.copy_from_slice(&interleave(rows, self.image.flip));
                    }
                }
                (pieces, false) => {
                    for (slot, taps) in slots {
                        let rows = taps.map(|tap| {
                            let mut row = [0; LANES];
                            for piece in pieces {
                                let source = &data[tap + piece.offset..][..piece.count];
                                row[piece.before..][..piece.count].copy_from_slice(source);
                            }
                            row
                        });
                        slot.copy_from_slice(&interleave(rows, self.image.flip));
                    }
                }
            }
            yield_point::did_work(words * LANES / 8);
        }
    }
}

#[inline(always)]
fn load(data: &[u8], at: usize) -> [u8; LANES] {
    let mut bytes = [0; LANES];
    bytes.copy_from_slice(&data[at..at + LANES]);
    bytes
}

/// The sum of the first `depth` bytes of each packed column, as unsigned numbers.
pub(super) fn column_sums(packed: &[u32], depth: usize, columns: usize, sums: &mut [i32]) {
    ColumnSums { packed, depth, columns, sums }.dispatch();
}

struct ColumnSums<'a> {
    packed: &'a [u32],
    depth: usize,
    columns: usize,
    sums: &'a mut [i32],
}

impl SimdOp for ColumnSums<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) {
        let words = self.depth.div_ceil(WORD_DEPTH);
        let surplus = words * WORD_DEPTH - self.depth;
        for start in (0..self.columns).step_by(PANEL_COLUMNS) {
            let used = (self.columns - start).min(PANEL_COLUMNS);
            let width = used.next_multiple_of(LANES);
            let mut totals = [0u32; PANEL_COLUMNS];
            let lines = self.packed[start * words..][..width * words].chunks_exact(width);
            for (index, line) in lines.enumerate() {
                let kept = if index + 1 == words { u32::MAX >> (8 * surplus) } else { u32::MAX };
                for (total, word) in totals.iter_mut().zip(line) {
                    let word = word & kept;
                    // Two sums of 16 bits side by side, then both together.
                    let pairs = (word & 0x00ff_00ff) + (word >> 8 & 0x00ff_00ff);
                    *total += (pairs & 0xffff) + (pairs >> 16);
                }
            }
            for (sum, total) in self.sums[start..start + used].iter_mut().zip(totals) {
                *sum = total as i32;
            }
            yield_point::did_work(words * width / 8);
        }
    }
}
