//! Copies that swap the fastest dimension, a square at a time through shared memory.

use super::super::args::ArgsWriter;
use super::super::draft::{Draft, Work};
use super::super::view::View;
use super::super::walk::{Dim, Walk, address, computed_name, describe, kernel, single};

/// Edge of a square: `kTurn` of `kernels/chain.cuh`.
const SQUARE: usize = 32;

/// Below this extent of either dimension a plain copy is as good: threads then read or write runs of whole pixels.
const WORTHWHILE: usize = 16;

/// The copy of `from` to `to`, of the same shape, when their fastest dimensions differ and both are long.
pub fn work(from: &View, to: &View) -> Result<Option<Work>, String> {
    let mut walk =
        Walk::new(&to.shape, &[from.strides.clone(), to.strides.clone()]).ordered_by(1).merged();
    let fastest = |operand: usize| walk.dims.iter().position(|dim| dim.strides[operand] == 1);
    let (Some(column), Some(row)) = (fastest(0), fastest(1)) else { return Ok(None) };
    let short = |at: usize| walk.dims[at].size < WORTHWHILE;
    if column == row || short(column) || short(row) {
        return Ok(None);
    }
    let (columns, rows) = (walk.dims[column].clone(), walk.dims[row].clone());
    walk.dims.remove(column.max(row));
    walk.dims.remove(column.min(row));
    let padded = rows.size + to.slack;
    let (across, down) = (columns.size.div_ceil(SQUARE), padded.div_ceil(SQUARE));
    let mut squares = walk.clone();
    squares.push(across * down, vec![0, 0]);
    squares.push(SQUARE * SQUARE, vec![0, 0]);
    if squares.check().is_err() {
        return Ok(None);
    }
    let tiles = walk.len() * across * down;
    let args = arguments(from, to, (&columns, &rows, padded), &walk);
    let expression = format!(
        "tiles::Turn<{}, {}, {}, {}>",
        from.element.cuda_name(),
        to.element.cuda_name(),
        computed_name(to.element),
        walk.rank()
    );
    let kernel = kernel("chain.cuh", &[from.element, to.element], expression, 256);
    let signature = format!("turn {} to {}", describe(from), describe(to));
    Ok(Some(single("Copy", signature, Draft::plain(kernel, tiles, args), &[from], to)))
}

fn arguments(
    from: &View,
    to: &View,
    (columns, rows, padded): (&Dim, &Dim, usize),
    walk: &Walk,
) -> ArgsWriter {
    let mut args = ArgsWriter::new();
    args.address(address(from)).address(address(to));
    args.int(columns.size).int(columns.strides[1]);
    args.int(rows.size).int(rows.strides[0]);
    args.int(padded);
    args.fast_div(columns.size.div_ceil(SQUARE)).fast_div(padded.div_ceil(SQUARE));
    walk.write(&mut args);
    args
}
