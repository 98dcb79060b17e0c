//! Attention against its definition.

use base::Random;
use model::Tensor as Host;
use model::op::Op;

use super::super::testing_dense::{
    TestOperand, assert_close, assert_close_f64, between, random, run, run_f32, wide,
};
use super::*;

fn reference(
    [q, k, v]: [&Host; 3],
    mask: impl Fn(usize, usize, usize) -> f64,
    scale: f64,
) -> Vec<f64> {
    let shape = q.shape();
    let [.., queries, width] = *shape else { panic!("queries are matrices") };
    let [.., keys, value_width] = *v.shape() else { panic!("values are matrices") };
    let batch: usize = shape[..shape.len() - 2].iter().product();
    let (q, k, v) = (wide(q), wide(k), wide(v));
    let mut out = Vec::new();
    for b in 0..batch {
        for i in 0..queries {
            let scores: Vec<f64> = (0..keys)
                .map(|j| {
                    let dot: f64 = (0..width)
                        .map(|d| q[(b * queries + i) * width + d] * k[(b * keys + j) * width + d])
                        .sum();
                    dot * scale + mask(b, i, j)
                })
                .collect();
            let max = scores.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            out.extend((0..value_width).map(|d| {
                let weigh =
                    |j: usize| (scores[j] - max).exp() / sum * v[(b * keys + j) * value_width + d];
                (0..keys).map(weigh).sum::<f64>()
            }));
        }
    }
    out
}

#[test]
fn random_attention_matches_the_reference() {
    let mut source = Random::new(71);
    for case in 0..30 {
        let (batch, heads) = (between(&mut source, 1, 3), between(&mut source, 1, 4));
        let queries = if case == 0 { 300 } else { between(&mut source, 1, 20) };
        let keys = between(&mut source, 1, 40);
        let (width, value_width) = (between(&mut source, 1, 33), between(&mut source, 1, 20));
        let q = random(&mut source, &[batch, heads, queries, width]);
        let k = random(&mut source, &[batch, heads, keys, width]);
        let v = random(&mut source, &[batch, heads, keys, value_width]);
        let mut operands = [&q, &k, &v].map(|t| TestOperand::Input(t.clone())).to_vec();
        let values: Vec<f64>;
        let expected = match case % 3 {
            0 => reference([&q, &k, &v], |_, _, _| 0.0, 0.3),
            1 => {
                let mask = random(&mut source, &[batch, 1, queries, keys]);
                values = wide(&mask);
                operands.push(TestOperand::Input(mask));
                let at = |b: usize, i, j| values[(b / heads * queries + i) * keys + j];
                reference([&q, &k, &v], at, 0.3)
            }
            _ => {
                let keep: Vec<u8> =
                    (0..keys).map(|j| u8::from(j == 0 || source.below(2) == 0)).collect();
                let mask = Host::from_raw(DataType::Bool, vec![1, keys], keep.clone().into());
                operands.push(TestOperand::Constant(mask.unwrap()));
                let at = |_, _, j: usize| if keep[j] == 1 { 0.0 } else { f64::NEG_INFINITY };
                reference([&q, &k, &v], at, 0.3)
            }
        };
        let op = Op::Attention { scale: 0.3 };
        let (_, actual) = run_f32(op.clone(), &operands).unwrap();
        assert_close(&actual, &expected, 1e-5, &format!("case {case}"));
        if case % 3 == 0 {
            let double =
                |t: &Host| TestOperand::Input(Host::from_vec(t.shape().to_vec(), wide(t)).unwrap());
            let out = run(op, &[&q, &k, &v].map(double), &[DataType::F64]).unwrap();
            assert_close_f64(&wide(&out[0]), &expected, 1e-7, "f64");
        }
    }
}

#[test]
fn bad_shapes_are_refused() {
    let mut source = Random::new(72);
    let operands = [[1, 3, 4], [1, 3, 5], [1, 3, 4]]
        .map(|shape| TestOperand::Input(random(&mut source, &shape)));
    assert!(run_f32(Op::Attention { scale: 1.0 }, &operands).unwrap_err().contains("queries"));
    let mut operands = [[1, 3, 4], [1, 3, 4], [1, 3, 4]]
        .map(|s| TestOperand::Input(random(&mut source, &s)))
        .to_vec();
    operands.push(TestOperand::Input(random(&mut source, &[2, 3, 3])));
    assert!(run_f32(Op::Attention { scale: 1.0 }, &operands).unwrap_err().contains("mask"));
}
