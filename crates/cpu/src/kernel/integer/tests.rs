//! 8-bit products against a plain reference.

use base::Random;
use model::Tensor as Host;
use model::op::{Activation, Padding, Window};

use super::super::testing_dense::{TestOperand, run, wide};
use super::*;

fn bytes(source: &mut Random, shape: &[usize]) -> Host {
    let count = shape.iter().product();
    let values: Vec<u8> = (0..count).map(|_| source.below(256) as u8).collect();
    Host::from_vec(shape.to_vec(), values).unwrap()
}

fn signed(source: &mut Random, shape: &[usize]) -> Host {
    let values: Vec<i8> =
        bytes(source, shape).to_vec::<u8>().unwrap().iter().map(|&x| x as i8).collect();
    Host::from_vec(shape.to_vec(), values).unwrap()
}

fn floats(values: &[f32]) -> TestOperand {
    let shape = if values.len() == 1 { vec![] } else { vec![values.len()] };
    TestOperand::Constant(Host::from_vec(shape, values.to_vec()).unwrap())
}

#[test]
fn integer_products_are_exact() {
    let mut source = Random::new(91);
    let (m, k, n) = (5, 70, 9);
    let (a, b) = (bytes(&mut source, &[2, m, k]), signed(&mut source, &[k, n]));
    let (a_zero, b_zero) = (bytes(&mut source, &[m]), signed(&mut source, &[n]));
    let (x, y, xz, yz) = (wide(&a), wide(&b), wide(&a_zero), wide(&b_zero));
    let sum = |i: usize| -> f64 {
        let (batch, row, column) = (i / (m * n), i / n % m, i % n);
        (0..k)
            .map(|d| (x[(batch * m + row) * k + d] - xz[row]) * (y[d * n + column] - yz[column]))
            .sum()
    };
    let sums: Vec<f64> = (0..2 * m * n).map(sum).collect();
    let operands = [&a, &b, &a_zero, &b_zero].map(|t| TestOperand::Input(t.clone()));
    let out = run(Op::MatMulInteger, &operands, &[DataType::I32]).unwrap();
    assert_eq!(wide(&out[0]), sums);
    let b_scale: Vec<f32> = (0..n).map(|i| 0.01 + i as f32 * 0.001).collect();
    let operands = [
        TestOperand::Input(a),
        floats(&[0.02]),
        TestOperand::Input(a_zero),
        TestOperand::Constant(b),
        floats(&b_scale),
        TestOperand::Constant(b_zero),
        floats(&[0.5]),
        TestOperand::Constant(Host::from_vec(vec![], vec![7i8]).unwrap()),
    ];
    let out = run(Op::QLinearMatMul, &operands, &[DataType::I8]).unwrap();
    for (i, (actual, sum)) in wide(&out[0]).iter().zip(&sums).enumerate() {
        let exact = sum * 0.02 * f64::from(b_scale[i % n]) / 0.5 + 7.0;
        assert!((actual - exact.clamp(-128.0, 127.0)).abs() <= 0.51, "{actual} is not {exact}");
    }
}

#[test]
fn integer_convolutions_are_exact() {
    let mut source = Random::new(92);
    let (x, w) = (bytes(&mut source, &[2, 3, 7]), signed(&mut source, &[4, 3, 3]));
    let x_zero = Host::from_vec(vec![], vec![120u8]).unwrap();
    let w_zero = signed(&mut source, &[4]);
    let window = Window {
        kernel: vec![3],
        strides: vec![2],
        dilations: vec![1],
        padding: Padding::Explicit(vec![1, 1]),
    };
    let conv = Conv { window, groups: 1, activation: Activation::None };
    let (data, weights, zeros) = (wide(&x), wide(&w), wide(&w_zero));
    let sum = |i: usize| -> f64 {
        let (image, m, o) = (i / 16, i / 4 % 4, i % 4);
        let mut sum = 0.0;
        for c in 0..3 {
            for tap in 0..3 {
                if let Some(at) = (o * 2 + tap).checked_sub(1).filter(|&at| at < 7) {
                    sum += (data[(image * 3 + c) * 7 + at] - 120.0)
                        * (weights[(m * 3 + c) * 3 + tap] - zeros[m]);
                }
            }
        }
        sum
    };
    let sums: Vec<f64> = (0..32).map(sum).collect();
    let operands = [&x, &w, &x_zero, &w_zero].map(|t| TestOperand::Input(t.clone()));
    let out = run(Op::ConvInteger(conv.clone()), &operands, &[DataType::I32]).unwrap();
    assert_eq!(wide(&out[0]), sums);
    let scales = [0.01f32, 0.02, 0.03, 0.04];
    let bias = Host::from_vec(vec![4], vec![100i32, -200, 300, 0]).unwrap();
    let operands = [
        TestOperand::Input(x),
        floats(&[0.1]),
        TestOperand::Constant(x_zero),
        TestOperand::Constant(w),
        floats(&scales),
        TestOperand::Constant(w_zero),
        floats(&[0.7]),
        TestOperand::Constant(Host::from_vec(vec![], vec![128u8]).unwrap()),
        TestOperand::Constant(bias.clone()),
    ];
    let out = run(Op::QLinearConv(conv), &operands, &[DataType::U8]).unwrap();
    for (i, (actual, sum)) in wide(&out[0]).iter().zip(&sums).enumerate() {
        let m = i / 4 % 4;
        let exact = (sum + wide(&bias)[m]) * 0.1 * f64::from(scales[m]) / 0.7 + 128.0;
        assert!((actual - exact.clamp(0.0, 255.0)).abs() <= 0.51, "{actual} is not {exact}");
    }
}
