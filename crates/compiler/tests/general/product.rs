//! Matrix products and convolutions.

use compiler::gpu::product;
use compiler::gpu::view::Element;
use model::op::{Activation, Compare, Conv, ConvTranspose, Gemm, MatMul, Op, Padding, Window};

use crate::Case;
use crate::bench::{Bench, Layout, Random};

#[test]
fn matrix_products() {
    let mut bench = Bench::default();
    let mut random = Random::new(21);
    let shapes: [(&[usize], &[usize]); 9] = [
        (&[70, 33], &[33, 65]),
        (&[3, 20, 17], &[17, 40]),
        (&[2, 3, 20, 17], &[2, 3, 17, 9]),
        (&[2, 1, 5, 17], &[3, 17, 9]),
        (&[17], &[17, 9]),
        (&[5, 17], &[17]),
        (&[17], &[17]),
        (&[2, 4, 17], &[17]),
        (&[140, 40], &[40, 130]),
    ];
    for (left, right) in shapes {
        let (a, b) = (random.floats(left), random.floats(right));
        for (layout, element) in [
            (Layout::Packed, Element::F32),
            (Layout::Reversed, Element::F16),
            (Layout::Gapped, Element::BF16),
        ] {
            let spec = MatMul { alpha: 0.25, ..MatMul::default() };
            Case::new(Op::MatMul(spec), &[&a, &b])
                .lying(layout, Layout::Packed)
                .of(element)
                .check(&mut bench, |i, o| {
                    Ok(vec![product::matmul(&spec, (&i[0], &i[1]), (None, None), &o[0])?])
                });
        }
    }
    let (a, b) = (random.floats(&[2, 17, 20]), random.floats(&[2, 9, 17]));
    let (bias, residual) = (random.floats(&[9]), random.floats(&[2, 20, 9]));
    let activation = Activation::Gelu { tanh: false };
    let spec = MatMul { transpose_a: true, transpose_b: true, alpha: 0.5, activation };
    Case::new(Op::MatMul(spec), &[&a, &b, &bias, &residual]).check(&mut bench, |i, o| {
        Ok(vec![product::matmul(&spec, (&i[0], &i[1]), (Some(&i[2]), Some(&i[3])), &o[0])?])
    });
    let (a, b, c) = (random.floats(&[30, 7]), random.floats(&[30, 11]), random.floats(&[7, 1]));
    let spec = Gemm {
        transpose_a: true,
        transpose_b: false,
        alpha: 0.5,
        beta: 2.0,
        activation: Activation::Relu,
    };
    Case::new(Op::Gemm(spec), &[&a, &b, &c]).check(&mut bench, |i, o| {
        Ok(vec![product::gemm(&spec, (&i[0], &i[1]), Some(&i[2]), &o[0])?])
    });
    bench.finish("matrix");
}

fn window(strides: &[usize], dilations: &[usize], padding: Padding) -> Window {
    Window { kernel: Vec::new(), strides: strides.to_vec(), dilations: dilations.to_vec(), padding }
}

#[test]
fn convolutions() {
    let mut bench = Bench::default();
    let mut random = Random::new(22);
    let explicit = |list: &[usize]| Padding::Explicit(list.to_vec());
    let cases: [(&[usize], &[usize], usize, Window); 9] = [
        (&[2, 5, 9, 8], &[12, 5, 3, 3], 1, window(&[], &[], explicit(&[1, 1, 1, 1]))),
        (&[1, 5, 9, 8], &[70, 5, 3, 2], 1, window(&[2, 1], &[1, 2], explicit(&[0, 2, 1, 0]))),
        (&[1, 16, 7, 7], &[16, 8, 3, 3], 2, window(&[2, 2], &[], Padding::SameUpper)),
        (&[1, 16, 8, 7], &[16, 8, 2, 2], 2, window(&[1, 1], &[], Padding::SameLower)),
        (&[2, 6, 9, 8], &[6, 1, 3, 3], 6, window(&[2, 2], &[], explicit(&[1, 1, 1, 1]))),
        (&[2, 6, 9, 8], &[12, 2, 3, 3], 3, window(&[], &[2, 2], explicit(&[2, 2, 2, 2]))),
        (&[2, 20, 5, 6], &[40, 20, 1, 1], 1, window(&[2, 1], &[], explicit(&[]))),
        (&[2, 5, 30], &[12, 5, 4], 1, window(&[3], &[2], explicit(&[2, 1]))),
        (&[1, 3, 5, 6, 7], &[9, 3, 2, 3, 3], 1, window(&[], &[], explicit(&[1, 1, 1, 0, 1, 1]))),
    ];
    for (input, kernel, groups, window) in cases {
        let (x, weight, bias) =
            (random.floats(input), random.floats(kernel), random.floats(&kernel[..1]));
        let spec = Conv { window, groups, activation: Activation::HardSwish };
        for (layout, element) in [
            (Layout::Packed, Element::F32),
            (Layout::ChannelsLast(4), Element::F32),
            (Layout::ChannelsLast(0), Element::F16),
        ] {
            Case::new(Op::Conv(spec.clone()), &[&x, &weight, &bias])
                .lying(layout, layout)
                .of(element)
                .check(&mut bench, |i, o| {
                    Ok(vec![product::conv(&spec, (&i[0], &i[1]), (Some(&i[2]), None), &o[0])?])
                });
        }
        let spec = Conv { activation: Activation::LeakyRelu { alpha: 0.1 }, ..spec };
        let expected = crate::reference(&Op::Conv(spec.clone()), &[&x, &weight], 1).remove(0);
        let residual = random.floats(expected.shape());
        // An absent bias is an input of zeros for the reference.
        let zeros = model::Tensor::from_vec(vec![kernel[0]], vec![0f32; kernel[0]]).unwrap();
        Case::new(Op::Conv(spec.clone()), &[&x, &weight, &zeros, &residual])
            .check(&mut bench, |i, o| {
                Ok(vec![product::conv(&spec, (&i[0], &i[1]), (None, Some(&i[3])), &o[0])?])
            });
    }
    bench.finish("convolutions");
}

/// Input, weights, groups, window, extra extent at the end.
type TransposedCase<'a> = (&'a [usize], &'a [usize], usize, Window, &'a [usize]);

#[test]
fn transposed_convolutions() {
    let mut bench = Bench::default();
    let mut random = Random::new(23);
    let explicit = |list: &[usize]| Padding::Explicit(list.to_vec());
    let cases: [TransposedCase; 6] = [
        (&[2, 5, 4, 6], &[5, 12, 3, 3], 1, window(&[2, 2], &[], explicit(&[1, 1, 1, 1])), &[1, 1]),
        (&[1, 5, 4, 6], &[5, 9, 2, 2], 1, window(&[2, 2], &[], explicit(&[])), &[]),
        (&[1, 6, 5, 5], &[6, 8, 3, 2], 2, window(&[1, 3], &[2, 1], explicit(&[0, 1, 2, 0])), &[]),
        (&[1, 6, 5, 5], &[6, 1, 3, 3], 6, window(&[2, 2], &[], explicit(&[1, 1, 1, 1])), &[]),
        (&[1, 6, 5], &[6, 10, 4], 1, window(&[3], &[], explicit(&[1, 0])), &[2]),
        (&[1, 3, 4, 5], &[3, 8, 3, 3], 1, window(&[2, 2], &[], Padding::SameUpper), &[]),
    ];
    for (input, kernel, groups, window, extra) in cases {
        let outputs = kernel[1] * groups;
        let (x, weight, bias) =
            (random.floats(input), random.floats(kernel), random.floats(&[outputs]));
        let spec =
            ConvTranspose { window, groups, output_padding: extra.to_vec(), output_shape: None };
        for layout in [Layout::Packed, Layout::ChannelsLast(4)] {
            Case::new(Op::ConvTranspose(spec.clone()), &[&x, &weight, &bias])
                .lying(layout, layout)
                .check(&mut bench, |i, o| {
                    Ok(vec![product::conv_transpose(&spec, (&i[0], &i[1]), Some(&i[2]), &o[0])?])
                });
        }
    }
    bench.finish("transposed");
}

#[test]
fn attention_of_any_width() {
    let mut bench = Bench::default();
    let mut random = Random::new(24);
    let (q, k) = (random.floats(&[2, 3, 9, 20]), random.floats(&[2, 3, 11, 20]));
    let (v, mask) = (random.floats(&[2, 3, 11, 12]), random.floats(&[2, 1, 1, 11]));
    let zero = model::Tensor::from_vec(vec![], vec![1.5f32]).unwrap();
    let keep = crate::reference(&Op::Compare(Compare::Less), &[&mask, &zero], 1).remove(0);
    let scale = 0.25;
    for element in [Element::F16, Element::F32] {
        for mask in [&mask, &keep] {
            let scratch =
                [0, 1].map(|_| bench.buffer(&[2, 3, 9, 11], Layout::Packed, Element::F32));
            Case::new(Op::Attention { scale }, &[&q, &k, &v, mask]).of(element).check(
                &mut bench,
                |i, o| {
                    let scratch = (&scratch[0], &scratch[1]);
                    product::attention(scale, (&i[0], &i[1], &i[2]), Some(&i[3]), scratch, &o[0])
                },
            );
        }
    }
    bench.finish("attention");
}

#[test]
fn einstein_notation() {
    let mut bench = Bench::default();
    let mut random = Random::new(25);
    let cases: [(&str, &[&[usize]]); 8] = [
        ("bij,bjk->bik", &[&[2, 5, 7], &[2, 7, 9]]),
        ("bqhd,bkhd->bhqk", &[&[2, 5, 3, 8], &[2, 6, 3, 8]]),
        ("bhqk,bkhd->bqhd", &[&[2, 3, 5, 6], &[2, 6, 3, 8]]),
        ("i,j->ij", &[&[5], &[70]]),
        ("...ij,jk", &[&[2, 3, 5, 7], &[7, 9]]),
        ("ij,ij->", &[&[5, 7], &[5, 7]]),
        ("abc->ca", &[&[3, 4, 5]]),
        ("ab->ba", &[&[3, 4]]),
    ];
    for (equation, shapes) in cases {
        let tensors: Vec<_> = shapes.iter().map(|shape| random.floats(shape)).collect();
        let inputs: Vec<_> = tensors.iter().collect();
        let op = Op::Einsum { equation: equation.to_string() };
        Case::new(op, &inputs).check(&mut bench, |i, o| {
            let views: Vec<_> = i.iter().collect();
            Ok(vec![product::einsum(equation, &views, &o[0])?])
        });
    }
    bench.finish("einstein");
}
