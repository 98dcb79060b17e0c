//! Recurrent layers. One product covers the inputs of all time steps; the products with the state
//! are computed step by step.

mod cell;

use model::DataType;
use model::op::{Rnn, RnnCell, RnnDirection};

use self::cell::{Cell, Functions};
use super::dense::{self, elements};
use super::gemm::{self, Epilogue, Left, Matrix, PackedRight, Right};
use super::{Inputs, Kernel, KernelResult, Outputs, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::value::TypedTensor;
use crate::yield_point;

pub(crate) fn build(facts: &StepFacts, rnn: &Rnn) -> Result<Kernel, KernelError> {
    let dtype = facts.input_dtype(0);
    let fits = |index: usize| {
        let expected = if index == 4 { Some(DataType::I32) } else { dtype };
        facts.input_dtype(index).is_none_or(|dtype| Some(dtype) == expected)
    };
    if !(0..8).all(fits) {
        return Err(no_kernel(facts));
    }
    match dtype {
        Some(DataType::F32) => build_f32(facts, rnn),
        Some(DataType::F16 | DataType::BF16) => {
            Ok(dense::through_f32(facts, build_f32(facts, rnn)?))
        }
        _ => Err(no_kernel(facts)),
    }
}

fn build_f32(facts: &StepFacts, rnn: &Rnn) -> Result<Kernel, KernelError> {
    let layer = Layer::new(rnn, facts.output_count())?;
    let constants = (dense::constant_f32(facts, 1)?, dense::constant_f32(facts, 2)?);
    let weights = match constants {
        (Some(w), Some(r)) => Some(Weights::new(&layer, &w, &r)?),
        _ => None,
    };
    let resident_bytes = weights.as_ref().map_or(0, Weights::size_bytes);
    let packed_inputs = if weights.is_some() { vec![1, 2] } else { vec![] };
    let run = move |_: &super::Context, inputs: Inputs| match &weights {
        Some(weights) => layer.run(&inputs, weights),
        None => {
            let weights = Weights::new(&layer, inputs.typed(1)?, inputs.typed(2)?)?;
            layer.run(&inputs, &weights)
        }
    };
    Ok(Kernel { run: Box::new(run), resident_bytes, packed_inputs })
}

/// A layer bound to its operator.
struct Layer {
    rnn: Rnn,
    gates: usize,
    /// The cell's functions, per direction.
    functions: Vec<Functions>,
    outputs: usize,
}

/// The weights of one layer, packed, per direction.
struct Weights {
    input: Vec<PackedRight>,
    /// For a GRU the first two gates; for other cells all.
    state: Vec<PackedRight>,
    /// For a GRU the last gate.
    candidate: Vec<PackedRight>,
    input_size: usize,
}

impl Weights {
    fn new(
        layer: &Layer,
        w: &TypedTensor<f32>,
        r: &TypedTensor<f32>,
    ) -> Result<Weights, KernelError> {
        let (hidden, rows) = (layer.rnn.hidden_size, layer.gates * layer.rnn.hidden_size);
        let directions = layer.functions.len();
        let (&[w_directions, w_rows, input_size], r_shape) = (w.shape(), r.shape()) else {
            return Err(invalid!("weights of shape {:?} are no recurrent layer's", w.shape()));
        };
        if (w_directions, w_rows) != (directions, rows) || *r_shape != [directions, rows, hidden] {
            return Err(invalid!(
                "weights {:?} and {r_shape:?} are not those of {directions} directions of {hidden}",
                w.shape()
            ));
        }
        let (w, r) = (elements(w), elements(r));
        let early = if matches!(layer.rnn.cell, RnnCell::Gru { .. }) { 2 * hidden } else { rows };
        let pack = |data: &[f32], from: usize, to: usize, width: usize| {
            PackedRight::new(
                Matrix::new(&data[from * width..to * width], to - from, width).transposed(),
            )
        };
        let each = |data: &[f32],
                    from: usize,
                    to: usize,
                    width: usize|
         -> Result<Vec<PackedRight>, KernelError> {
            (0..directions)
                .map(|direction| pack(data, direction * rows + from, direction * rows + to, width))
                .collect()
        };
        Ok(Weights {
            input: each(w, 0, rows, input_size)?,
            state: each(r, 0, early, hidden)?,
            candidate: if early < rows { each(r, early, rows, hidden)? } else { vec![] },
            input_size,
        })
    }

    fn size_bytes(&self) -> usize {
        let all = self.input.iter().chain(&self.state).chain(&self.candidate);
        all.map(PackedRight::size_bytes).sum()
    }
}

/// Extents of one run.
struct Extents {
    time: usize,
    batch: usize,
    /// Number of valid time steps per batch item.
    lengths: Buffer<usize>,
}

impl Layer {
    fn new(rnn: &Rnn, outputs: usize) -> Result<Layer, KernelError> {
        let directions = if rnn.direction == RnnDirection::Bidirectional { 2 } else { 1 };
        let gates = match rnn.cell {
            RnnCell::Simple => 1,
            RnnCell::Lstm { .. } => 4,
            RnnCell::Gru { .. } => 3,
        };
        let functions = Functions::parse(rnn, directions)?;
        Ok(Layer { rnn: rnn.clone(), gates, functions, outputs })
    }

    fn extents(&self, inputs: &Inputs, input_size: usize) -> Result<Extents, KernelError> {
        let shape = inputs.typed::<f32>(0)?.shape();
        let &[first, second, width] = shape else {
            return Err(invalid!("an input of shape {shape:?} is not a sequence"));
        };
        let (time, batch) = if self.rnn.batch_first { (second, first) } else { (first, second) };
        if width != input_size {
            return Err(invalid!("inputs of width {width} do not fit weights for {input_size}"));
        }
        let lengths = match inputs.optional_typed::<i32>(4)? {
            None => Buffer::filled(batch, time)?,
            Some(lengths) => {
                let lengths = elements(lengths);
                let fits = |&length: &i32| usize::try_from(length).is_ok_and(|l| l <= time);
                if lengths.len() != batch || !lengths.iter().all(fits) {
                    return Err(invalid!("the lengths do not fit {batch} sequences of {time}"));
                }
                Buffer::collect(lengths.iter().map(|&length| length as usize))?
            }
        };
        Ok(Extents { time, batch, lengths })
    }

    /// The row-major position of `(time, item)` among the inputs.
    fn row(&self, extents: &Extents, time: usize, item: usize) -> usize {
        if self.rnn.batch_first { item * extents.time + time } else { time * extents.batch + item }
    }

    /// The row-major position of an item's state among all directions' states.
    fn state_row(&self, extents: &Extents, direction: usize, item: usize) -> usize {
        if self.rnn.batch_first {
            item * self.functions.len() + direction
        } else {
            direction * extents.batch + item
        }
    }

    /// The initial state of one direction: operand `index`, or zeros.
    fn first_state(
        &self,
        inputs: &Inputs,
        index: usize,
        extents: &Extents,
        direction: usize,
    ) -> Result<Buffer<f32>, KernelError> {
        let (hidden, directions) = (self.rnn.hidden_size, self.functions.len());
        let mut state = Buffer::filled(extents.batch * hidden, 0.0)?;
        let Some(initial) = inputs.optional_typed::<f32>(index)? else { return Ok(state) };
        if initial.len() != directions * extents.batch * hidden {
            return Err(invalid!("an initial state of shape {:?} does not fit", initial.shape()));
        }
        let initial = elements(initial);
        for (item, row) in state.chunks_exact_mut(hidden.max(1)).enumerate() {
            let from = self.state_row(extents, direction, item) * hidden;
            row.copy_from_slice(&initial[from..from + hidden]);
        }
        Ok(state)
    }

    /// A direction's part of operand `index`, which has `size` elements per direction.
    fn parameter(
        &self,
        inputs: &Inputs,
        index: usize,
        size: usize,
        direction: usize,
    ) -> Result<Option<Buffer<f32>>, KernelError> {
        let Some(tensor) = inputs.optional_typed::<f32>(index)? else { return Ok(None) };
        if tensor.len() != size * self.functions.len() {
            return Err(invalid!("operand {index} of shape {:?} does not fit", tensor.shape()));
        }
        let part = &elements(tensor)[direction * size..(direction + 1) * size];
        Ok(Some(Buffer::copy_of(part)?))
    }

    fn run(&self, inputs: &Inputs, weights: &Weights) -> KernelResult {
        let extents = self.extents(inputs, weights.input_size)?;
        let (hidden, directions) = (self.rnn.hidden_size, self.functions.len());
        let y_shape = if self.rnn.batch_first {
            [extents.batch, extents.time, directions, hidden]
        } else {
            [extents.time, directions, extents.batch, hidden]
        };
        let state_shape = if self.rnn.batch_first {
            [extents.batch, directions, hidden]
        } else {
            [directions, extents.batch, hidden]
        };
        let mut y = Buffer::filled(dense::count(&y_shape)?, 0.0)?;
        let states = dense::count(&state_shape)?;
        let mut last = [Buffer::filled(states, 0.0)?, Buffer::filled(states, 0.0)?];
        dense::count(&[extents.time, extents.batch, self.gates, hidden])?;
        if hidden > 0 && extents.batch > 0 {
            for direction in 0..directions {
                self.run_direction(inputs, weights, &extents, direction, &mut y, &mut last)?;
            }
        }
        let mut outputs: Outputs = dense::output(&y_shape, y)?;
        let [h, c] = last;
        if self.outputs > 1 {
            outputs.push(dense::tensor(&state_shape, h)?);
        }
        if self.outputs > 2 {
            outputs.push(dense::tensor(&state_shape, c)?);
        }
        Ok(outputs)
    }

    fn run_direction(
        &self,
        inputs: &Inputs,
        weights: &Weights,
        extents: &Extents,
        direction: usize,
        y: &mut [f32],
        last: &mut [Buffer<f32>; 2],
    ) -> Result<(), KernelError> {
        let hidden = self.rnn.hidden_size;
        let rows = self.gates * hidden;
        let bias = self.parameter(inputs, 3, 2 * rows, direction)?;
        let peepholes = self.parameter(inputs, 7, 3 * hidden, direction)?;
        let cell = Cell::new(&self.rnn, &self.functions[direction], bias.as_deref(), peepholes)?;
        let mut h = self.first_state(inputs, 5, extents, direction)?;
        let mut c = self.first_state(inputs, 6, extents, direction)?;
        let x = elements(inputs.typed::<f32>(0)?);
        let mut from_input =
            Buffer::filled(dense::count(&[extents.time, extents.batch, rows])?, 0.0)?;
        let left = Left::Plain(Matrix::new(x, extents.time * extents.batch, weights.input_size));
        let epilogue = Epilogue { column_bias: cell.input_bias(), ..Epilogue::default() };
        gemm::product(&mut from_input, left, Right::Packed(&weights.input[direction]), epilogue)?;
        let backward = match self.rnn.direction {
            RnnDirection::Forward => false,
            RnnDirection::Reverse => true,
            RnnDirection::Bidirectional => direction == 1,
        };
        let steps = extents.lengths.iter().copied().max().unwrap_or(0);
        let mut buffers = cell.buffers(extents.batch)?;
        let state = &weights.state[direction];
        let candidate = weights.candidate.get(direction);
        for step in 0..steps {
            cell.begin(&mut buffers, &h, state)?;
            let moving = |item: usize| extents.lengths[item] > step;
            let time = |item: usize| if backward { extents.lengths[item] - 1 - step } else { step };
            let input = |item: usize| {
                moving(item).then(|| {
                    let row = self.row(extents, time(item), item) * rows;
                    &from_input[row..row + rows]
                })
            };
            cell.advance(&mut buffers, &mut h, &mut c, candidate, input)?;
            for item in (0..extents.batch).filter(|&item| moving(item)) {
                yield_point::did_work(rows * 2);
                let to = if self.rnn.batch_first {
                    (item * extents.time + time(item)) * self.functions.len() + direction
                } else {
                    (time(item) * self.functions.len() + direction) * extents.batch + item
                };
                y[to * hidden..(to + 1) * hidden]
                    .copy_from_slice(&h[item * hidden..(item + 1) * hidden]);
            }
        }
        for (last, state) in last.iter_mut().zip([&h, &c]) {
            for (item, row) in state.chunks_exact(hidden).enumerate() {
                let to = self.state_row(extents, direction, item) * hidden;
                last[to..to + hidden].copy_from_slice(row);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
