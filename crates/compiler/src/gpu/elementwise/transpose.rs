//! Copies that change the fastest dimension, in squares through shared memory.

use super::super::args::ArgsWriter;
use super::super::draft::{LaunchDraft, StepDraft};
use super::super::loop_nest::{Loop, LoopNest, address, computed_name, describe, kernel, single};
use super::super::view::View;

/// Edge of a square: `kTurn` of `kernels/chain.cuh`.
const SQUARE: usize = 32;

/// If either dimension is smaller, a plain copy is as fast: threads then read or write runs of
/// whole pixels.
const WORTHWHILE: usize = 16;

/// The copy of `from` to `to`, of the same shape, when their fastest dimensions differ and both are
/// long.
pub fn work(from: &View, to: &View) -> Result<Option<StepDraft>, String> {
    let mut nest = LoopNest::new(&to.shape, &[from.strides.clone(), to.strides.clone()])
        .ordered_by(1)
        .merged();
    let fastest = |operand: usize| nest.loops.iter().position(|each| each.strides[operand] == 1);
    let (Some(column), Some(row)) = (fastest(0), fastest(1)) else { return Ok(None) };
    let short = |at: usize| nest.loops[at].size < WORTHWHILE;
    if column == row || short(column) || short(row) {
        return Ok(None);
    }
    let (columns, rows) = (nest.loops[column].clone(), nest.loops[row].clone());
    nest.loops.remove(column.max(row));
    nest.loops.remove(column.min(row));
    let padded = rows.size + to.slack;
    let (across, down) = (columns.size.div_ceil(SQUARE), padded.div_ceil(SQUARE));
    let mut squares = nest.clone();
    squares.push(across * down, vec![0, 0]);
    squares.push(SQUARE * SQUARE, vec![0, 0]);
    if squares.check().is_err() {
        return Ok(None);
    }
    let tiles = nest.len() * across * down;
    let args = arguments(from, to, (&columns, &rows, padded), &nest);
    let expression = format!(
        "tiles::Turn<{}, {}, {}, {}>",
        from.element.cuda_name(),
        to.element.cuda_name(),
        computed_name(to.element),
        nest.rank()
    );
    let kernel = kernel("chain.cuh", &[from.element, to.element], expression, 256);
    let signature = format!("turn {} to {}", describe(from), describe(to));
    Ok(Some(single("Copy", signature, LaunchDraft::plain(kernel, tiles, args), &[from], to)))
}

fn arguments(
    from: &View,
    to: &View,
    (columns, rows, padded): (&Loop, &Loop, usize),
    nest: &LoopNest,
) -> ArgsWriter {
    let mut args = ArgsWriter::new();
    args.address(address(from)).address(address(to));
    args.int(columns.size).int(columns.strides[1]);
    args.int(rows.size).int(rows.strides[0]);
    args.int(padded);
    args.fast_div(columns.size.div_ceil(SQUARE)).fast_div(padded.div_ceil(SQUARE));
    nest.write(&mut args);
    args
}
