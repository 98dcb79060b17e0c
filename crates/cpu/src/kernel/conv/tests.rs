//! Convolutions against a plain reference.

use base::Random;
use model::Tensor;
use model::op::{Activation, Op, Padding, Window};

use super::super::testing_dense::{
    TestOperand, assert_close, assert_close_f64, between, input_or_constant, random, run, run_f32,
    wide,
};
use super::*;

/// Every output element as the sum over its window, in double precision.
fn reference(x: &Tensor, weight: &Tensor, conv: &Conv) -> (Vec<usize>, Vec<f64>) {
    let (xs, ws) = (x.shape(), weight.shape());
    let rank = xs.len() - 2;
    let pad = |shape: &[usize], fill: usize| {
        let mut all = vec![fill; 3 - rank];
        all.extend(shape);
        all
    };
    let (input, kernel) = (pad(&xs[2..], 1), pad(&ws[2..], 1));
    let strides = pad(&conv.window.strides, 1);
    let dilations = pad(&conv.window.dilations, 1);
    let mut begin = [0; 3];
    let mut output = [1; 3];
    for axis in 3 - rank..3 {
        let extent = (kernel[axis] - 1) * dilations[axis] + 1;
        let (before, out) = match &conv.window.padding {
            Padding::Explicit(pads) => {
                let at = axis + rank - 3;
                let padded = input[axis] + pads[at] + pads[at + rank];
                (pads[at], (padded - extent) / strides[axis] + 1)
            }
            same => {
                let out = input[axis].div_ceil(strides[axis]);
                let total = ((out - 1) * strides[axis] + extent).saturating_sub(input[axis]);
                (if *same == Padding::SameUpper { total / 2 } else { total.div_ceil(2) }, out)
            }
        };
        (begin[axis], output[axis]) = (before, out);
    }
    let (data, weights) = (wide(x), wide(weight));
    let (per_in, per_out) = (ws[1], ws[0] / conv.groups);
    let mut shape = vec![xs[0], ws[0]];
    shape.extend(&output[3 - rank..]);
    let mut out = Vec::new();
    for n in 0..xs[0] {
        for m in 0..ws[0] {
            for z in 0..output[0] {
                for y in 0..output[1] {
                    for x in 0..output[2] {
                        let mut sum = 0.0;
                        for c in 0..per_in {
                            let channel = m / per_out * per_in + c;
                            for tap in 0..kernel.iter().product() {
                                let t = [
                                    tap / (kernel[1] * kernel[2]),
                                    tap / kernel[2] % kernel[1],
                                    tap % kernel[2],
                                ];
                                let at: Vec<Option<usize>> = [z, y, x]
                                    .iter()
                                    .enumerate()
                                    .map(|(axis, &o)| {
                                        (o * strides[axis] + t[axis] * dilations[axis])
                                            .checked_sub(begin[axis])
                                            .filter(|&i| i < input[axis])
                                    })
                                    .collect();
                                if let [Some(a), Some(b), Some(d)] = at[..] {
                                    let plane = n * xs[1] + channel;
                                    let index =
                                        ((plane * input[0] + a) * input[1] + b) * input[2] + d;
                                    let taps: usize = kernel.iter().product();
                                    sum += data[index] * weights[(m * per_in + c) * taps + tap];
                                }
                            }
                        }
                        out.push(sum);
                    }
                }
            }
        }
    }
    (shape, out)
}

fn random_conv(source: &mut Random, rank: usize) -> (Conv, Vec<usize>, Vec<usize>) {
    let depthwise = source.below(3) == 0;
    let groups = if depthwise { between(source, 2, 9) } else { between(source, 1, 3) };
    let per_in = if depthwise { 1 } else { between(source, 1, 9) };
    let per_out = if depthwise { between(source, 1, 2) } else { between(source, 1, 20) };
    let kernel: Vec<usize> = (0..rank).map(|_| between(source, 1, 4)).collect();
    let strides: Vec<usize> = (0..rank).map(|_| between(source, 1, 3)).collect();
    let dilations: Vec<usize> = (0..rank).map(|_| between(source, 1, 2)).collect();
    let extents: Vec<usize> = kernel
        .iter()
        .zip(&dilations)
        .map(|(k, d)| (k - 1) * d + between(source, 1, if rank == 3 { 6 } else { 23 }))
        .collect();
    let padding = match source.below(4) {
        0 => Padding::SameUpper,
        1 => Padding::SameLower,
        _ => Padding::Explicit((0..2 * rank).map(|_| between(source, 0, 2)).collect()),
    };
    let window = Window { kernel: vec![], strides, dilations, padding };
    let images = between(source, 1, 3);
    let mut x_shape = vec![images, groups * per_in];
    x_shape.extend(extents);
    let mut w_shape = vec![groups * per_out, per_in];
    w_shape.extend(kernel);
    (Conv { window, groups, activation: Activation::None }, x_shape, w_shape)
}

#[test]
fn random_geometries_match_the_reference() {
    let mut source = Random::new(21);
    for case in 0..150 {
        let rank = [1, 2, 2, 3][case % 4];
        let (mut conv, x_shape, w_shape) = random_conv(&mut source, rank);
        let (x, w) = (random(&mut source, &x_shape), random(&mut source, &w_shape));
        let (shape, mut expected) = reference(&x, &w, &conv);
        let mut operands = vec![TestOperand::Input(x), input_or_constant(&mut source, &w)];
        let plane: usize = shape[2..].iter().product();
        let bias = random(&mut source, &[shape[1]]);
        let with_bias = source.below(2) == 0;
        operands.push(if with_bias {
            input_or_constant(&mut source, &bias)
        } else {
            TestOperand::Absent
        });
        if with_bias {
            let bias = wide(&bias);
            expected.iter_mut().enumerate().for_each(|(i, y)| *y += bias[i / plane % bias.len()]);
        }
        if source.below(2) == 0 {
            let residual = random(&mut source, &shape);
            expected.iter_mut().zip(wide(&residual)).for_each(|(y, x)| *y += x);
            operands.push(input_or_constant(&mut source, &residual));
        }
        if source.below(2) == 0 {
            conv.activation = Activation::Relu;
            expected.iter_mut().for_each(|y| *y = y.max(0.0));
        }
        let what = format!("{conv:?} of {x_shape:?} with {w_shape:?}");
        let (actual_shape, actual) = run_f32(Op::Conv(conv), &operands).unwrap();
        assert_eq!(actual_shape, shape, "{what}");
        assert_close(&actual, &expected, 1e-5, &what);
    }
}

/// One signal and long windows that lie apart, as spectra are computed.
#[test]
fn windows_of_a_signal_match_the_reference() {
    let mut source = Random::new(22);
    for case in 0..60 {
        let taps = between(&mut source, 1, 70);
        let stride = between(&mut source, 2, 40);
        let length = taps + between(&mut source, 0, 900);
        let outputs = between(&mut source, 1, 30);
        let spread = |source: &mut Random| between(source, 0, taps - 1);
        let pads = vec![spread(&mut source), spread(&mut source)];
        let groups = [1, 1, outputs][case % 3];
        let images = between(&mut source, 1, 2);
        let window = Window {
            kernel: vec![],
            strides: vec![stride],
            dilations: vec![1],
            padding: Padding::Explicit(pads),
        };
        let conv = Conv { window, groups, activation: Activation::None };
        let x = random(&mut source, &[images, groups, length]);
        let w = random(&mut source, &[outputs, 1, taps]);
        let (shape, expected) = reference(&x, &w, &conv);
        let what = format!("{conv:?} of {length} with {taps} taps");
        let operands = [TestOperand::Input(x), input_or_constant(&mut source, &w)];
        let (actual_shape, actual) = run_f32(Op::Conv(conv), &operands).unwrap();
        assert_eq!(actual_shape, shape, "{what}");
        assert_close(&actual, &expected, 1e-5, &what);
    }
}

/// Weights below the least normal number count as zeros, also where they would add up.
#[test]
fn weights_that_are_no_normal_numbers_are_zeros() {
    let window = Window {
        kernel: Vec::new(),
        strides: Vec::new(),
        dilations: Vec::new(),
        padding: Padding::Explicit(vec![1; 4]),
    };
    for (groups, per_group) in [(1, 8), (8, 1)] {
        let conv = Conv { window: window.clone(), groups, activation: Activation::None };
        let x = Tensor::from_vec(vec![1, 8, 5, 5], vec![1e38f32; 200]).unwrap();
        let mut weights = vec![1e-39f32; 8 * per_group * 9];
        weights.iter_mut().step_by(9).for_each(|weight| *weight = 1e-30);
        let filters = |weights: &[f32]| {
            let tensor = Tensor::from_vec(vec![8, per_group, 3, 3], weights.to_vec()).unwrap();
            [TestOperand::Input(x.clone()), TestOperand::Constant(tensor)]
        };
        let got = run_f32(Op::Conv(conv.clone()), &filters(&weights)).unwrap();
        weights.iter_mut().filter(|weight| **weight < 1e-35).for_each(|weight| *weight = 0.0);
        assert_eq!(got, run_f32(Op::Conv(conv), &filters(&weights)).unwrap());
    }
}

#[test]
fn double_and_half_precision_match_the_reference() {
    let mut source = Random::new(22);
    let (conv, x_shape, w_shape) = random_conv(&mut source, 2);
    let (x, w) = (random(&mut source, &x_shape), random(&mut source, &w_shape));
    let (_, expected) = reference(&x, &w, &conv);
    let double =
        |t: &Tensor| TestOperand::Input(Tensor::from_vec(t.shape().to_vec(), wide(t)).unwrap());
    let out = run(Op::Conv(conv.clone()), &[double(&x), double(&w)], &[DataType::F64]).unwrap();
    assert_close_f64(&wide(&out[0]), &expected, 1e-12, "f64");
    let half = |t: &Tensor| {
        let values: Vec<half::f16> = wide(t).into_iter().map(half::f16::from_f64).collect();
        TestOperand::Constant(Tensor::from_vec(t.shape().to_vec(), values).unwrap())
    };
    let TestOperand::Constant(x) = half(&x) else { panic!("a constant was made") };
    let out = run(Op::Conv(conv), &[TestOperand::Input(x), half(&w)], &[DataType::F16]).unwrap();
    assert_close_f64(&wide(&out[0]), &expected, 5e-3, "f16");
}

#[test]
fn large_products_match_the_reference() {
    let mut source = Random::new(23);
    for (channels, size, kernel, stride) in
        [(64, 30, 3, 1), (80, 14, 1, 1), (40, 31, 3, 2), (130, 7, 3, 1), (64, 20, 1, 2)]
    {
        let window = Window {
            kernel: vec![kernel; 2],
            strides: vec![stride; 2],
            dilations: vec![1; 2],
            padding: Padding::Explicit(vec![kernel / 2; 4]),
        };
        let conv = Conv { window, groups: 1, activation: Activation::Silu };
        let x = random(&mut source, &[2, channels, size, size]);
        let w = random(&mut source, &[96, channels, kernel, kernel]);
        let (_, mut expected) = reference(&x, &w, &conv);
        expected.iter_mut().for_each(|y| *y /= 1.0 + (-*y).exp());
        let operands = [TestOperand::Input(x), TestOperand::Constant(w)];
        let (_, actual) = run_f32(Op::Conv(conv.clone()), &operands).unwrap();
        assert_close(&actual, &expected, 1e-5, &format!("{conv:?}"));
    }
}

#[test]
fn bad_shapes_are_refused() {
    let mut source = Random::new(24);
    let window = Window {
        kernel: vec![],
        strides: vec![],
        dilations: vec![],
        padding: Padding::Explicit(vec![]),
    };
    let conv = Conv { window, groups: 1, activation: Activation::None };
    let refused = |x: &[usize], w: &[usize], groups: usize, source: &mut Random| {
        let operands =
            [TestOperand::Input(random(source, x)), TestOperand::Constant(random(source, w))];
        run_f32(Op::Conv(Conv { groups, ..conv.clone() }), &operands).unwrap_err()
    };
    assert!(refused(&[1, 3, 4], &[2, 4, 3], 1, &mut source).contains("groups"));
    assert!(refused(&[1, 3, 4], &[2, 3, 5], 1, &mut source).contains("does not fit"));
    assert!(refused(&[1, 3, 4, 4], &[2, 3, 3], 1, &mut source).contains("do not fit"));
    assert!(refused(&[1, 3, 4], &[2, 3, 3], 0, &mut source).contains("0 groups"));
    assert!(refused(&[3], &[2], 1, &mut source).contains("channels"));
    let empty = [
        TestOperand::Input(random(&mut source, &[0, 3, 4])),
        TestOperand::Constant(random(&mut source, &[2, 3, 3])),
    ];
    assert_eq!(run_f32(Op::Conv(conv), &empty).unwrap().0, vec![0, 2, 2]);
}
