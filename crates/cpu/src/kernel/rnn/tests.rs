//! Recurrent layers against their equations.

use base::Random;
use model::Tensor as Host;
use model::op::Op;

use super::super::testing_dense::{
    TestOperand, assert_close, between, input_or_constant, random, run, wide,
};
use super::*;

struct Case {
    rnn: Rnn,
    directions: usize,
    gates: usize,
    time: usize,
    batch: usize,
    input: usize,
    lengths: Vec<usize>,
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `[y, h, c]` with time first, by the equations of the ONNX operators.
fn reference(case: &Case, p: &[Vec<f64>]) -> [Vec<f64>; 3] {
    let (hidden, batch, directions) = (case.rnn.hidden_size, case.batch, case.directions);
    let rows = case.gates * hidden;
    let [x, w, r, b, h0, c0, peep] = p else { panic!("seven parameters") };
    let mut y = vec![0.0; case.time * directions * batch * hidden];
    let (mut h_out, mut c_out) = (h0.clone(), c0.clone());
    let clip = |x: f64| case.rnn.clip.map_or(x, |c| x.clamp(f64::from(-c), f64::from(c)));
    for d in 0..directions {
        let backward = case.rnn.direction == RnnDirection::Reverse || d == 1;
        for item in 0..batch {
            let state = (d * batch + item) * hidden;
            let mut h = h0[state..state + hidden].to_vec();
            let mut c = c0[state..state + hidden].to_vec();
            for step in 0..case.lengths[item] {
                let t = if backward { case.lengths[item] - 1 - step } else { step };
                let wx = |row: usize| -> f64 {
                    (0..case.input)
                        .map(|i| {
                            w[(d * rows + row) * case.input + i]
                                * x[(t * batch + item) * case.input + i]
                        })
                        .sum::<f64>()
                        + b[d * 2 * rows + row]
                };
                let product = |row: usize, h: &[f64]| -> f64 {
                    (0..hidden).map(|i| r[(d * rows + row) * hidden + i] * h[i]).sum()
                };
                let rb = |row: usize| b[d * 2 * rows + rows + row];
                let gate = |g: usize, j: usize| {
                    wx(g * hidden + j) + product(g * hidden + j, &h) + rb(g * hidden + j)
                };
                let pe = |g: usize, j: usize| peep[d * 3 * hidden + g * hidden + j];
                let next: Vec<(f64, f64)> = match case.rnn.cell {
                    RnnCell::Simple => {
                        (0..hidden).map(|j| (clip(gate(0, j)).tanh(), 0.0)).collect()
                    }
                    RnnCell::Lstm { input_forget } => (0..hidden)
                        .map(|j| {
                            let i = sigmoid(clip(gate(0, j) + pe(0, j) * c[j]));
                            let f = sigmoid(clip(gate(2, j) + pe(2, j) * c[j]));
                            let f = if input_forget { 1.0 - i } else { f };
                            let cell = f * c[j] + i * clip(gate(3, j)).tanh();
                            let o = sigmoid(clip(gate(1, j) + pe(1, j) * cell));
                            (o * cell.tanh(), cell)
                        })
                        .collect(),
                    RnnCell::Gru { linear_before_reset } => {
                        let z: Vec<f64> = (0..hidden).map(|j| sigmoid(clip(gate(0, j)))).collect();
                        let reset: Vec<f64> =
                            (0..hidden).map(|j| sigmoid(clip(gate(1, j)))).collect();
                        let gated: Vec<f64> = h.iter().zip(&reset).map(|(h, r)| h * r).collect();
                        (0..hidden)
                            .map(|j| {
                                let row = 2 * hidden + j;
                                let inner = if linear_before_reset {
                                    wx(row) + reset[j] * (product(row, &h) + rb(row))
                                } else {
                                    wx(row) + product(row, &gated) + rb(row)
                                };
                                ((1.0 - z[j]) * clip(inner).tanh() + z[j] * h[j], 0.0)
                            })
                            .collect()
                    }
                };
                h = next.iter().map(|s| s.0).collect();
                if matches!(case.rnn.cell, RnnCell::Lstm { .. }) {
                    c = next.iter().map(|s| s.1).collect();
                }
                let at = ((t * directions + d) * batch + item) * hidden;
                y[at..at + hidden].copy_from_slice(&h);
            }
            h_out[state..state + hidden].copy_from_slice(&h);
            c_out[state..state + hidden].copy_from_slice(&c);
        }
    }
    [y, h_out, c_out]
}

/// `tensor` with its dimensions in another order.
fn permuted(tensor: &Host, perm: &[usize]) -> Host {
    let data: Vec<f32> = tensor.to_vec().unwrap();
    let shape = tensor.shape();
    let new: Vec<usize> = perm.iter().map(|&axis| shape[axis]).collect();
    let out = (0..data.len())
        .map(|flat| {
            let mut rest = flat;
            let mut at = vec![0; shape.len()];
            for position in (0..perm.len()).rev() {
                at[perm[position]] = rest % new[position];
                rest /= new[position];
            }
            data[at.iter().zip(shape).fold(0, |index, (a, dim)| index * dim + a)]
        })
        .collect();
    Host::from_vec(new, out).unwrap()
}

#[test]
fn random_layers_match_the_reference() {
    let mut source = Random::new(101);
    for number in 0..60 {
        let cells = [
            RnnCell::Simple,
            RnnCell::Lstm { input_forget: number % 8 == 1 },
            RnnCell::Gru { linear_before_reset: false },
            RnnCell::Gru { linear_before_reset: true },
        ];
        let cell = cells[number % 4];
        let direction =
            [RnnDirection::Forward, RnnDirection::Reverse, RnnDirection::Bidirectional][number % 3];
        let directions = if number % 3 == 2 { 2 } else { 1 };
        let hidden = between(&mut source, 1, 20);
        let (time, batch, input) =
            (between(&mut source, 1, 6), between(&mut source, 1, 4), between(&mut source, 1, 9));
        let batch_first = source.below(3) == 0;
        let clip = (source.below(3) == 0).then_some(0.5);
        let rnn =
            Rnn { cell, direction, hidden_size: hidden, batch_first, clip, activations: vec![] };
        let gates = match cell {
            RnnCell::Simple => 1,
            RnnCell::Lstm { .. } => 4,
            RnnCell::Gru { .. } => 3,
        };
        let lengths: Vec<usize> = (0..batch).map(|_| between(&mut source, 0, time)).collect();
        let case = Case { rnn: rnn.clone(), directions, gates, time, batch, input, lengths };
        let x = random(&mut source, &[time, batch, input]);
        let w = random(&mut source, &[directions, gates * hidden, input]);
        let r = random(&mut source, &[directions, gates * hidden, hidden]);
        let b = random(&mut source, &[directions, 2 * gates * hidden]);
        let h = random(&mut source, &[directions, batch, hidden]);
        let c = random(&mut source, &[directions, batch, hidden]);
        let peep = random(&mut source, &[directions, 3 * hidden]);
        let [ey, eh, ec] = reference(&case, &[&x, &w, &r, &b, &h, &c, &peep].map(wide));
        let lstm = matches!(cell, RnnCell::Lstm { .. });
        let swap = |t: &Host| if batch_first { permuted(t, &[1, 0, 2]) } else { t.clone() };
        let steps: Vec<i32> = case.lengths.iter().map(|&n| n as i32).collect();
        let mut operands = vec![
            TestOperand::Input(swap(&x)),
            input_or_constant(&mut source, &w),
            input_or_constant(&mut source, &r),
            input_or_constant(&mut source, &b),
            TestOperand::Input(Host::from_vec(vec![batch], steps).unwrap()),
            TestOperand::Input(swap(&h)),
        ];
        if lstm {
            operands.extend([TestOperand::Input(swap(&c)), input_or_constant(&mut source, &peep)]);
        }
        let dtypes = vec![DataType::F32; if lstm { 3 } else { 2 }];
        let out = run(Op::Rnn(rnn.clone()), &operands, &dtypes).unwrap();
        let what = format!("{rnn:?}");
        let y = if batch_first { permuted(&out[0], &[1, 2, 0, 3]) } else { out[0].clone() };
        assert_close(&y.to_vec::<f32>().unwrap(), &ey, 2e-5, &what);
        assert_close(&swap(&out[1]).to_vec::<f32>().unwrap(), &eh, 2e-5, &what);
        if lstm {
            assert_close(&swap(&out[2]).to_vec::<f32>().unwrap(), &ec, 2e-5, &what);
        }
    }
}
