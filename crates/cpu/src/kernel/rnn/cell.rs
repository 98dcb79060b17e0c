//! One time step of a recurrent cell.

use model::op::{Activation, Rnn, RnnCell};

use super::super::activation;
use super::super::gemm::{self, Epilogue, Left, Matrix, PackedRight, Right};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};

/// A function of a gate.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Function {
    Fused(Activation),
    Elu,
    Softplus,
    Softsign,
    ThresholdedRelu,
}

impl Function {
    fn parse(name: &str) -> Result<Function, KernelError> {
        Ok(match name.to_ascii_lowercase().as_str() {
            "relu" => Function::Fused(Activation::Relu),
            "tanh" => Function::Fused(Activation::Tanh),
            "sigmoid" => Function::Fused(Activation::Sigmoid),
            "leakyrelu" => Function::Fused(Activation::LeakyRelu { alpha: 0.01 }),
            "hardsigmoid" => Function::Fused(Activation::HardSigmoid { alpha: 0.2, beta: 0.5 }),
            "elu" => Function::Elu,
            "softplus" => Function::Softplus,
            "softsign" => Function::Softsign,
            "thresholdedrelu" => Function::ThresholdedRelu,
            _ => return Err(invalid!("the activation '{name}' is not supported")),
        })
    }

    fn apply(self, row: &mut [f32]) {
        let each = |row: &mut [f32], f: fn(f32) -> f32| row.iter_mut().for_each(|x| *x = f(*x));
        match self {
            Function::Fused(fused) => activation::apply(fused, row),
            Function::Elu => each(row, |x| if x < 0.0 { x.exp_m1() } else { x }),
            Function::Softplus => each(row, |x| x.max(0.0) + (-x.abs()).exp().ln_1p()),
            Function::Softsign => each(row, |x| x / (1.0 + x.abs())),
            Function::ThresholdedRelu => each(row, |x| if x > 1.0 { x } else { 0.0 }),
        }
    }
}

/// The functions of a cell: of its gates, its candidate and its output.
pub(super) struct Functions([Function; 3]);

impl Functions {
    /// The functions of each of `directions` directions.
    pub(super) fn parse(rnn: &Rnn, directions: usize) -> Result<Vec<Functions>, KernelError> {
        let defaults: &[&str] = match rnn.cell {
            RnnCell::Simple => &["Tanh"],
            RnnCell::Lstm { .. } => &["Sigmoid", "Tanh", "Tanh"],
            RnnCell::Gru { .. } => &["Sigmoid", "Tanh"],
        };
        let each = defaults.len();
        if !rnn.activations.is_empty() && rnn.activations.len() != each * directions {
            return Err(invalid!(
                "{} activations for {directions} directions of {each}",
                rnn.activations.len()
            ));
        }
        (0..directions)
            .map(|direction| {
                let name = |position: usize| {
                    let given = rnn.activations.get(direction * each + position);
                    given.map_or(defaults[position], String::as_str)
                };
                let last = each - 1;
                let parse = |position: usize| Function::parse(name(position.min(last)));
                Ok(Functions([parse(0)?, parse(1)?, parse(2)?]))
            })
            .collect()
    }
}

/// A cell with its parameters.
pub(super) struct Cell<'a> {
    kind: RnnCell,
    hidden: usize,
    clip: Option<f32>,
    functions: &'a Functions,
    /// Added to the product with the inputs.
    input_bias: Option<Buffer<f32>>,
    /// Added to a GRU's last product with the state, inside the reset gate.
    candidate_bias: Option<Buffer<f32>>,
    /// Of the input, output and forget gates.
    peepholes: Option<Buffer<f32>>,
}

/// Memory of a running cell.
pub(super) struct CellBuffers {
    /// Products with the state.
    gates: Buffer<f32>,
    /// A GRU's last product with the state, and its operand.
    candidate: Buffer<f32>,
    reset: Buffer<f32>,
    /// One item's gates.
    row: Buffer<f32>,
    output: Buffer<f32>,
}

impl<'a> Cell<'a> {
    pub(super) fn new(
        rnn: &Rnn,
        functions: &'a Functions,
        bias: Option<&[f32]>,
        peepholes: Option<Buffer<f32>>,
    ) -> Result<Cell<'a>, KernelError> {
        let hidden = rnn.hidden_size;
        let after = matches!(rnn.cell, RnnCell::Gru { linear_before_reset: true });
        let mut candidate_bias = None;
        let mut input_bias = None;
        if let Some(bias) = bias {
            let (w, r) = bias.split_at(bias.len() / 2);
            let mut sum = Buffer::collect(w.iter().zip(r).map(|(w, r)| w + r))?;
            if after {
                sum[2 * hidden..].copy_from_slice(&w[2 * hidden..]);
                candidate_bias = Some(Buffer::copy_of(&r[2 * hidden..])?);
            }
            input_bias = Some(sum);
        }
        let clip = rnn.clip;
        let kind = rnn.cell;
        Ok(Cell { kind, hidden, clip, functions, input_bias, candidate_bias, peepholes })
    }

    pub(super) fn input_bias(&self) -> Option<&[f32]> {
        self.input_bias.as_deref()
    }

    pub(super) fn buffers(&self, batch: usize) -> Result<CellBuffers, KernelError> {
        let gates = match self.kind {
            RnnCell::Simple => 1,
            RnnCell::Lstm { .. } => 4,
            RnnCell::Gru { .. } => 2,
        };
        Ok(CellBuffers {
            gates: Buffer::filled(batch * gates * self.hidden, 0.0)?,
            candidate: Buffer::filled(batch * self.hidden, 0.0)?,
            reset: Buffer::filled(batch * self.hidden, 0.0)?,
            row: Buffer::filled(gates * self.hidden, 0.0)?,
            output: Buffer::filled(self.hidden, 0.0)?,
        })
    }

    /// Multiplies the state with the weights.
    pub(super) fn begin(
        &self,
        buffers: &mut CellBuffers,
        h: &[f32],
        weights: &PackedRight,
    ) -> Result<(), KernelError> {
        multiply(&mut buffers.gates, h, self.hidden, weights, None)
    }

    /// Advances every item for which `input` has a row.
    pub(super) fn advance<'x>(
        &self,
        buffers: &mut CellBuffers,
        h: &mut [f32],
        c: &mut [f32],
        candidate: Option<&PackedRight>,
        input: impl Fn(usize) -> Option<&'x [f32]>,
    ) -> Result<(), KernelError> {
        let hidden = self.hidden;
        if let (RnnCell::Gru { linear_before_reset }, Some(weights)) = (self.kind, candidate) {
            return self.advance_gru(buffers, h, weights, linear_before_reset, input);
        }
        let rows = h.chunks_exact_mut(hidden).zip(c.chunks_exact_mut(hidden)).enumerate();
        for (item, (h, c)) in rows {
            let Some(input) = input(item) else { continue };
            let width = input.len();
            buffers.row.copy_from_slice(&buffers.gates[item * width..(item + 1) * width]);
            activation::add(&mut buffers.row, input);
            match self.kind {
                RnnCell::Lstm { input_forget } => {
                    self.lstm(&mut buffers.row, &mut buffers.output, h, c, input_forget);
                }
                _ => {
                    self.gate(&mut buffers.row, 0);
                    h.copy_from_slice(&buffers.row);
                }
            }
        }
        Ok(())
    }

    /// Clips a gate's input and applies its function.
    fn gate(&self, row: &mut [f32], function: usize) {
        if let Some(clip) = self.clip {
            activation::apply(Activation::Clip { low: -clip, high: clip }, row);
        }
        self.functions.0[function].apply(row);
    }

    fn lstm(
        &self,
        row: &mut [f32],
        output: &mut [f32],
        h: &mut [f32],
        c: &mut [f32],
        input_forget: bool,
    ) {
        let hidden = self.hidden;
        let (i, rest) = row.split_at_mut(hidden);
        let (o, rest) = rest.split_at_mut(hidden);
        let (f, candidate) = rest.split_at_mut(hidden);
        let peephole = |gate: &mut [f32], index: usize, c: &[f32]| {
            if let Some(peepholes) = &self.peepholes {
                let peephole = &peepholes[index * hidden..(index + 1) * hidden];
                gate.iter_mut().zip(peephole).zip(c).for_each(|((x, p), c)| *x += p * c);
            }
        };
        peephole(i, 0, c);
        peephole(f, 2, c);
        self.gate(i, 0);
        self.gate(f, 0);
        self.gate(candidate, 1);
        for index in 0..hidden {
            let forget = if input_forget { 1.0 - i[index] } else { f[index] };
            c[index] = forget * c[index] + i[index] * candidate[index];
        }
        peephole(o, 1, c);
        self.gate(o, 0);
        output.copy_from_slice(c);
        self.functions.0[2].apply(output);
        h.iter_mut().zip(o.iter().zip(output)).for_each(|(h, (o, x))| *h = *o * *x);
    }

    fn advance_gru<'x>(
        &self,
        buffers: &mut CellBuffers,
        h: &mut [f32],
        weights: &PackedRight,
        linear_before_reset: bool,
        input: impl Fn(usize) -> Option<&'x [f32]>,
    ) -> Result<(), KernelError> {
        let hidden = self.hidden;
        for (item, gates) in buffers.gates.chunks_exact_mut(2 * hidden).enumerate() {
            let Some(input) = input(item) else { continue };
            activation::add(gates, &input[..2 * hidden]);
            self.gate(gates, 0);
            let state = h[item * hidden..(item + 1) * hidden].iter();
            let reset = &mut buffers.reset[item * hidden..(item + 1) * hidden];
            for ((y, h), r) in reset.iter_mut().zip(state).zip(&gates[hidden..]) {
                *y = if linear_before_reset { *h } else { r * h };
            }
        }
        let bias = self.candidate_bias.as_deref();
        multiply(&mut buffers.candidate, &buffers.reset, hidden, weights, bias)?;
        for (item, h) in h.chunks_exact_mut(hidden).enumerate() {
            let Some(input) = input(item) else { continue };
            let (z, r) = buffers.gates[item * 2 * hidden..(item + 1) * 2 * hidden].split_at(hidden);
            let candidate = &mut buffers.candidate[item * hidden..(item + 1) * hidden];
            if linear_before_reset {
                candidate.iter_mut().zip(r).for_each(|(x, r)| *x *= r);
            }
            activation::add(candidate, &input[2 * hidden..]);
            self.gate(candidate, 1);
            for ((h, z), x) in h.iter_mut().zip(z).zip(candidate) {
                *h = (1.0 - z) * *x + z * *h;
            }
        }
        Ok(())
    }
}

fn multiply(
    out: &mut [f32],
    state: &[f32],
    hidden: usize,
    weights: &PackedRight,
    bias: Option<&[f32]>,
) -> Result<(), KernelError> {
    let left = Left::Plain(Matrix::new(state, state.len() / hidden, hidden));
    let epilogue = Epilogue { column_bias: bias, ..Epilogue::default() };
    gemm::product(out, left, Right::Packed(weights), epilogue)
}
