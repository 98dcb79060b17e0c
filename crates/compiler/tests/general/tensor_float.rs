//! Products of single precision on tensor cores, which round their operands to tf32.

use compiler::gpu::draft::StepDraft;
use compiler::gpu::product;
use compiler::gpu::view::{Element, View};
use model::Tensor;
use model::gpu::{GpuTarget, Precision};
use model::op::{Activation, Conv, ConvTranspose, MatMul, Op, Padding, Window};

use crate::Case;
use crate::bench::{Bench, Layout, Random};

const TARGET: GpuTarget =
    GpuTarget { capability: 80, multiprocessors: 8, precision: Precision::TF32 };

/// The product, which must have a variant in tf32.
fn matmul(
    spec: &MatMul,
    (a, b): (&View, &View),
    extra: (Option<&View>, Option<&View>),
    output: &View,
) -> Result<Vec<StepDraft>, String> {
    let step = product::matmul(&TARGET, spec, (a, b), extra, output)?;
    let rounds = |expression: &str| expression.contains("TensorFloat<");
    assert!(step.drafts.iter().any(|draft| rounds(&draft.kernel.expression)));
    let plain = |expression: &str| expression.contains("tiles::Product<");
    assert!(!step.drafts.iter().any(|draft| plain(&draft.kernel.expression)));
    Ok(vec![step])
}

#[test]
fn matrix_products_of_any_strides() {
    let mut bench = Bench::default();
    for seed in 0..3 {
        let mut random = Random::new(61 + seed);
        let mut size = |most: usize| 1 + random.below(most);
        let (m, k, n) = (size(90), size(70), size(140));
        let shapes: [(Vec<usize>, Vec<usize>); 7] = [
            (vec![m, k], vec![k, n]),
            (vec![2, m, k], vec![k, n]),
            (vec![2, 3, 20, k], vec![2, 3, k, 9]),
            (vec![2, 1, 5, 17], vec![3, 17, 9]),
            (vec![1, 1], vec![1, 1]),
            (vec![k], vec![k, n]),
            (vec![140, 40], vec![40, 130]),
        ];
        for (left, right) in shapes {
            let (a, b) = (random.floats(&left), random.floats(&right));
            for layout in [Layout::Packed, Layout::Reversed, Layout::Gapped] {
                let spec = MatMul { alpha: 0.25, ..MatMul::default() };
                Case::new(Op::MatMul(spec), &[&a, &b])
                    .lying(layout, Layout::Packed)
                    .check(&mut bench, |i, o| matmul(&spec, (&i[0], &i[1]), (None, None), &o[0]));
            }
        }
        let (a, b) = (random.floats(&[2, k, 40]), random.floats(&[2, 33, k]));
        let (bias, residual) = (random.floats(&[33]), random.floats(&[2, 40, 33]));
        let activation = Activation::Gelu { tanh: false };
        let spec = MatMul { transpose_a: true, transpose_b: true, alpha: 0.5, activation };
        Case::new(Op::MatMul(spec), &[&a, &b, &bias, &residual]).check(&mut bench, |i, o| {
            matmul(&spec, (&i[0], &i[1]), (Some(&i[2]), Some(&i[3])), &o[0])
        });
    }
    bench.finish("tf32_matrix");
}

#[test]
fn convolutions_plain_and_transposed() {
    let mut bench = Bench::default();
    let mut random = Random::new(65);
    let window = |strides: &[usize], dilations: &[usize], pads: &[usize]| Window {
        kernel: Vec::new(),
        strides: strides.to_vec(),
        dilations: dilations.to_vec(),
        padding: Padding::Explicit(pads.to_vec()),
    };
    let cases: [(&[usize], &[usize], usize, Window); 4] = [
        (&[2, 5, 9, 8], &[36, 5, 3, 3], 1, window(&[], &[], &[1, 1, 1, 1])),
        (&[1, 32, 7, 7], &[64, 16, 3, 3], 2, window(&[2, 2], &[2, 1], &[2, 1, 2, 1])),
        (&[2, 20, 30], &[24, 20, 4], 1, window(&[3], &[2], &[2, 1])),
        (&[1, 9, 5, 6, 7], &[19, 9, 2, 3, 3], 1, window(&[], &[], &[1, 1, 1, 0, 1, 1])),
    ];
    for (input, kernel, groups, window) in cases {
        let (x, weight, bias) =
            (random.floats(input), random.floats(kernel), random.floats(&kernel[..1]));
        let spec = Conv { window, groups, activation: Activation::Silu };
        for layout in [Layout::Packed, Layout::ChannelsLast(0)] {
            Case::new(Op::Conv(spec.clone()), &[&x, &weight, &bias]).lying(layout, layout).check(
                &mut bench,
                |i, o| {
                    let (operands, extra) = ((&i[0], &i[1]), (Some(&i[2]), None));
                    Ok(vec![product::conv(&TARGET, &spec, operands, extra, &o[0])?])
                },
            );
        }
    }
    let (x, weight) = (random.floats(&[2, 12, 5, 6]), random.floats(&[12, 20, 3, 2]));
    let bias = random.floats(&[20]);
    let spec = ConvTranspose {
        window: window(&[2, 3], &[], &[1, 0, 0, 1]),
        groups: 1,
        output_padding: vec![1, 0],
        output_shape: None,
    };
    Case::new(Op::ConvTranspose(spec.clone()), &[&x, &weight, &bias]).check(&mut bench, |i, o| {
        let operands = (&i[0], &i[1]);
        Ok(vec![product::conv_transpose(&TARGET, &spec, operands, Some(&i[2]), &o[0])?])
    });
    bench.finish("tf32_convolution");
}

/// To ten bits of mantissa, halves away from zero.
fn rounded(tensor: &Tensor) -> Tensor {
    let round = |x: f32| f32::from_bits((x.to_bits() + 0x1000) & !0x1fff);
    let values: Vec<f32> = tensor.to_vec::<f32>().unwrap().into_iter().map(round).collect();
    Tensor::from_vec(tensor.shape().to_vec(), values).unwrap()
}

/// Exactly the operands are rounded, and nothing else: the result is that of rounded operands, and
/// not that of the operands themselves.
#[test]
fn operands_are_rounded_and_sums_are_not() {
    let mut bench = Bench::default();
    let mut random = Random::new(66);
    let mut odd = |shape: &[usize]| {
        let values: Vec<f32> =
            random.floats(shape).to_vec::<f32>().unwrap().into_iter().map(|x| x / 3.0).collect();
        Tensor::from_vec(shape.to_vec(), values).unwrap()
    };
    let (a, b) = (odd(&[37, 50]), odd(&[50, 70]));
    let op = Op::MatMul(MatMul::default());
    let want = crate::reference(&op, &[&rounded(&a), &rounded(&b)], 1).remove(0);
    let exact = crate::reference(&op, &[&a, &b], 1).remove(0);
    let pairs = want.to_vec::<f32>().unwrap().into_iter().zip(exact.to_vec::<f32>().unwrap());
    let differs = pairs.map(|(want, exact)| (want - exact).abs()).fold(0f32, f32::max);
    assert!(differs > 1e-4, "the test would not see whether operands are rounded: {differs}");
    let place =
        |bench: &mut Bench, tensor: &Tensor| bench.place(tensor, Layout::Packed, Element::F32);
    let (x, y) = (place(&mut bench, &a), place(&mut bench, &b));
    let output = bench.buffer(want.shape(), Layout::Packed, Element::F32);
    let works = matmul(&MatMul::default(), (&x, &y), (None, None), &output).unwrap();
    bench.check("rounded operands", &works, &[(&output, &want)], 2e-5);
    bench.finish("tf32_rounding");
}
