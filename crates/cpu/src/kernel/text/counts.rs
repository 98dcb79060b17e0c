//! How often sequences occur.

use std::collections::HashMap;

use bytes::Bytes;
use model::op::{TfIdf, TfIdfMode};

use super::keys;
use crate::buffer::Buffer;
use crate::kernel::operand::{Element, elements, one, output_len};
use crate::kernel::{Inputs, Kernel, KernelError, KernelResult, StepFacts, invalid};
use crate::value::Value;
use crate::yield_point;

/// The longest sequences that are counted.
const MAX_LENGTH: usize = 64;

/// The pool: columns of sequences, by their elements one after the other.
struct Pool {
    op: TfIdf,
    /// By length, less one.
    columns: Vec<HashMap<Vec<Bytes>, usize>>,
    /// By column.
    weights: Option<Buffer<f32>>,
}

pub(super) fn build(facts: &StepFacts, op: TfIdf) -> Result<Kernel, KernelError> {
    let missing = || KernelError::from("the pool of sequences must be a constant");
    let numbers = |index: usize| match facts.constant(index) {
        Some(Value::I64(tensor)) => Ok(elements(tensor)),
        _ => Err(missing()),
    };
    let (counts, columns) = (numbers(1)?, numbers(2)?);
    let pool = keys(facts.constant(3).ok_or_else(missing)?)?;
    if op.min_length == 0 || op.min_length > op.max_length || op.max_length > MAX_LENGTH {
        return Err(invalid!("sequences of {} to {}", op.min_length, op.max_length));
    }
    let mut by_length: Vec<HashMap<Vec<Bytes>, usize>> = Vec::new();
    let mut next = columns.iter().enumerate();
    let mut places = Vec::new();
    for (index, start) in counts.iter().enumerate() {
        let end = counts.get(index + 1).copied().unwrap_or(pool.len() as i64);
        let range = usize::try_from(*start).ok().zip(usize::try_from(end).ok());
        let part = range.and_then(|(start, end)| pool.get(start..end));
        let part = part.ok_or_else(|| invalid!("sequences {start} to {end} of {}", pool.len()))?;
        let mut sequences = HashMap::new();
        for sequence in part.chunks_exact(index + 1) {
            let (place, column) = next.next().ok_or("a sequence without a column")?;
            let column = usize::try_from(*column).ok().filter(|column| *column < op.columns);
            let column = column.ok_or("a column that does not exist")?;
            places.push((place, column));
            sequences.insert(sequence.to_vec(), column);
        }
        by_length.push(sequences);
    }
    let weights = match facts.constant(4) {
        Some(Value::F32(tensor)) => {
            let mut weights = Buffer::filled(op.columns, 0.0)?;
            for (place, column) in places {
                weights[column] = *elements(tensor).get(place).ok_or("a weight is missing")?;
            }
            Some(weights)
        }
        Some(other) => return Err(invalid!("weights of {}", other.dtype())),
        None => None,
    };
    let pool = Pool { op, columns: by_length, weights };
    Ok(Kernel::new(move |_, inputs| pool.run(&inputs)))
}

impl Pool {
    fn run(&self, inputs: &Inputs) -> KernelResult {
        let value = inputs.get(0)?;
        let columns = self.op.columns;
        let (rows, width, shape) = match *value.shape() {
            [] => (1, 1, vec![columns]),
            [width] => (1, width, vec![columns]),
            [rows, width] => (rows, width, vec![rows, columns]),
            ref other => return Err(invalid!("shape {other:?} is not of rows")),
        };
        let data = keys(value)?;
        let mut out = Buffer::filled(output_len(&shape)?, 0f32)?;
        for (row, target) in (0..rows).zip(out.chunks_mut(columns)) {
            self.count(&data[row * width..][..width], target);
            if let (Some(weights), true) = (&self.weights, self.op.mode != TfIdfMode::Count) {
                for (slot, weight) in target.iter_mut().zip(weights) {
                    *slot = match self.op.mode {
                        TfIdfMode::Weight if *slot > 0.0 => *weight,
                        TfIdfMode::Weight => 0.0,
                        _ => *slot * weight,
                    };
                }
            } else if self.op.mode == TfIdfMode::Weight {
                target.iter_mut().for_each(|slot| *slot = slot.min(1.0));
            }
        }
        one(f32::wrap(&shape, out))
    }

    fn count(&self, row: &[Bytes], target: &mut [f32]) {
        let lengths = self.op.min_length..=self.op.max_length.min(self.columns.len());
        for length in lengths {
            let sequences = &self.columns[length - 1];
            if sequences.is_empty() {
                continue;
            }
            // Elements that stand alone have nothing between them.
            let skips = if length == 1 { 0 } else { self.op.max_skip };
            for distance in 1..=skips.min(row.len()) + 1 {
                let reach = (length - 1) * distance;
                yield_point::did_work(row.len() * length * 40);
                for start in 0..row.len().saturating_sub(reach) {
                    let sequence: Vec<Bytes> =
                        (0..length).map(|at| row[start + at * distance].clone()).collect();
                    if let Some(column) = sequences.get(&sequence) {
                        target[*column] += 1.0;
                    }
                }
            }
        }
    }
}
