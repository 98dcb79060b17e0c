//! Normalizations against their definitions.

use base::Random;
use model::Tensor as Host;

use super::super::testing_dense::{
    TestOperand, assert_close, assert_close_f64, between, random, run, run_f32, wide,
};
use super::*;

const EPSILON: f32 = 1e-3;

fn moments(values: &[f64]) -> (f64, f64) {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / values.len() as f64;
    (mean, 1.0 / (variance + f64::from(EPSILON)).sqrt())
}

#[test]
fn per_channel_scales_match_the_reference() {
    let mut source = Random::new(61);
    for shape in [vec![2, 5, 4, 3], vec![3, 4], vec![1, 7, 50], vec![2, 3, 2, 2, 2]] {
        let x = random(&mut source, &shape);
        let channels = shape[1];
        let plane: usize = shape[2..].iter().product();
        let p: Vec<Host> = (0..4).map(|_| random(&mut source, &[channels])).collect();
        let variance: Vec<f32> = wide(&p[3]).iter().map(|x| x.abs() as f32).collect();
        let variance = Host::from_vec(vec![channels], variance).unwrap();
        let (scale, bias, mean, var) = (wide(&p[0]), wide(&p[1]), wide(&p[2]), wide(&variance));
        let channel = |i: usize| i / plane % channels;
        let data = wide(&x);
        let expected: Vec<f64> = data
            .iter()
            .enumerate()
            .map(|(i, x)| {
                let c = channel(i);
                scale[c] * (x - mean[c]) / (var[c] + f64::from(EPSILON)).sqrt() + bias[c]
            })
            .collect();
        let operands = [&x, &p[0], &p[1], &p[2], &variance].map(|t| TestOperand::Input(t.clone()));
        let (_, actual) = run_f32(Op::BatchNorm { epsilon: EPSILON }, &operands).unwrap();
        assert_close(&actual, &expected, 1e-5, "batch norm");
        let expected: Vec<f64> = data
            .iter()
            .enumerate()
            .map(|(i, x)| (x * scale[channel(i)] + bias[channel(i)]).max(0.0))
            .collect();
        let op = Op::ScaleShift { activation: Activation::Relu };
        let (_, actual) = run_f32(op, &operands[..3]).unwrap();
        assert_close(&actual, &expected, 1e-5, "scale and shift");
    }
}

#[test]
fn layers_are_normalized() {
    let mut source = Random::new(62);
    for case in 0..40 {
        let rank = between(&mut source, 1, 4);
        let shape: Vec<usize> = (0..rank).map(|_| between(&mut source, 1, 20)).collect();
        let axis = between(&mut source, 0, rank - 1);
        let width: usize = shape[axis..].iter().product();
        let x = random(&mut source, &shape);
        let (scale, bias) =
            (random(&mut source, &shape[axis..]), random(&mut source, &shape[axis..]));
        let (gain, shift) = (wide(&scale), wide(&bias));
        let data = wide(&x);
        let mut expected = Vec::new();
        let (mut means, mut factors) = (Vec::new(), Vec::new());
        for row in data.chunks(width) {
            let (mean, factor) = moments(row);
            expected.extend(
                row.iter().enumerate().map(|(i, x)| (x - mean) * factor * gain[i] + shift[i]),
            );
            means.push(mean);
            factors.push(factor);
        }
        let signed = if case % 2 == 0 { axis as i64 } else { axis as i64 - rank as i64 };
        let op = Op::LayerNorm { axis: signed, epsilon: EPSILON };
        let operands = [&x, &scale, &bias].map(|t| TestOperand::Input(t.clone()));
        let out = run(op.clone(), &operands, &[DataType::F32; 3]).unwrap();
        let what = format!("layer norm of {shape:?} from {axis}");
        for (out, expected) in out.iter().zip([&expected, &means, &factors]) {
            assert_close(&out.to_vec::<f32>().unwrap(), expected, 3e-5, &what);
        }
        let double =
            |t: &Host| TestOperand::Input(Host::from_vec(t.shape().to_vec(), wide(t)).unwrap());
        let out = run(op, &[&x, &scale, &bias].map(double), &[DataType::F64]).unwrap();
        assert_close_f64(&wide(&out[0]), &expected, 1e-12, &what);
        let expected: Vec<f64> = data
            .chunks(width)
            .flat_map(|row| {
                let mean = row.iter().map(|x| x * x).sum::<f64>() / width as f64;
                let factor = 1.0 / (mean + f64::from(EPSILON)).sqrt();
                row.iter().zip(&gain).map(move |(x, g)| x * factor * g).collect::<Vec<_>>()
            })
            .collect();
        let op = Op::RmsNorm { axis: signed, epsilon: EPSILON };
        let (_, actual) = run_f32(op, &operands[..2]).unwrap();
        assert_close(&actual, &expected, 1e-5, "rms norm");
    }
}

#[test]
fn groups_and_instances_are_normalized() {
    let mut source = Random::new(63);
    let shape = [2, 6, 5, 3];
    let x = random(&mut source, &shape);
    let (scale, bias) = (random(&mut source, &[6]), random(&mut source, &[6]));
    let (gain, shift) = (wide(&scale), wide(&bias));
    let operands = [&x, &scale, &bias].map(|t| TestOperand::Input(t.clone()));
    for groups in [1, 2, 3, 6] {
        let size = 6 / groups * 15;
        let mut expected = Vec::new();
        for (g, block) in wide(&x).chunks(size).enumerate() {
            let (mean, factor) = moments(block);
            expected.extend(block.iter().enumerate().map(|(i, x)| {
                let c = g % groups * (6 / groups) + i / 15;
                (x - mean) * factor * gain[c] + shift[c]
            }));
        }
        let op = Op::GroupNorm { groups, epsilon: EPSILON };
        let (_, actual) = run_f32(op, &operands).unwrap();
        assert_close(&actual, &expected, 1e-5, "group norm");
        if groups == 6 {
            let (_, actual) = run_f32(Op::InstanceNorm { epsilon: EPSILON }, &operands).unwrap();
            assert_close(&actual, &expected, 1e-5, "instance norm");
        }
    }
    let error = run_f32(Op::GroupNorm { groups: 4, epsilon: EPSILON }, &operands).unwrap_err();
    assert!(error.contains("4 groups"));
}

#[test]
fn responses_and_lengths_are_normalized() {
    let mut source = Random::new(64);
    let x = random(&mut source, &[2, 7, 3]);
    let data = wide(&x);
    for size in [1, 2, 3, 4, 5] {
        let op = Op::Lrn { alpha: 0.5, beta: 0.75, bias: 1.5, size };
        let (_, actual) = run_f32(op, &[TestOperand::Input(x.clone())]).unwrap();
        let expected: Vec<f64> = (0..data.len())
            .map(|i| {
                let (n, c, p) = (i / 21, i / 3 % 7, i % 3);
                let from = c.saturating_sub((size - 1) / 2);
                let to = (c + size / 2).min(6);
                let sum: f64 = (from..=to).map(|c| data[n * 21 + c * 3 + p].powi(2)).sum();
                data[i] / (1.5 + 0.5 / size as f64 * sum).powf(0.75)
            })
            .collect();
        assert_close(&actual, &expected, 1e-5, "response norm");
    }
    for p in [1, 2] {
        let (_, actual) =
            run_f32(Op::LpNorm { axis: 1, p }, &[TestOperand::Input(x.clone())]).unwrap();
        let expected: Vec<f64> = (0..data.len())
            .map(|i| {
                let row = (0..7).map(|c| data[i / 21 * 21 + c * 3 + i % 3]);
                let norm = match p {
                    1 => row.map(f64::abs).sum::<f64>(),
                    _ => row.map(|x| x * x).sum::<f64>().sqrt(),
                };
                data[i] / norm
            })
            .collect();
        assert_close(&actual, &expected, 1e-5, "length norm");
    }
}
