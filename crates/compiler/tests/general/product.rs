//! Matrix products and convolutions.

use compiler::gpu::product;
use compiler::gpu::view::Element;
use model::gpu::{GpuTarget, Precision};
use model::op::{Activation, Compare, Conv, ConvTranspose, Gemm, MatMul, Op, Padding, Window};

use crate::Case;
use crate::bench::{Bench, Layout, Random};

/// A device without clusters, which the host does not emulate.
const TARGET: GpuTarget =
    GpuTarget { capability: 80, multiprocessors: 8, precision: Precision::F16 };

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
            Case::new(Op::MatMul(spec), &[&a, &b]).lying(layout, Layout::Packed).of(element).check(
                &mut bench,
                |i, o| {
                    Ok(vec![product::matmul(&TARGET, &spec, (&i[0], &i[1]), (None, None), &o[0])?])
                },
            );
        }
    }
    let (a, b) = (random.floats(&[2, 17, 20]), random.floats(&[2, 9, 17]));
    let (bias, residual) = (random.floats(&[9]), random.floats(&[2, 20, 9]));
    let activation = Activation::Gelu { tanh: false };
    let spec = MatMul { transpose_a: true, transpose_b: true, alpha: 0.5, activation };
    Case::new(Op::MatMul(spec), &[&a, &b, &bias, &residual]).check(&mut bench, |i, o| {
        Ok(vec![product::matmul(
            &TARGET,
            &spec,
            (&i[0], &i[1]),
            (Some(&i[2]), Some(&i[3])),
            &o[0],
        )?])
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
        Ok(vec![product::gemm(&TARGET, &spec, (&i[0], &i[1]), Some(&i[2]), &o[0])?])
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
                    Ok(vec![product::conv(
                        &TARGET,
                        &spec,
                        (&i[0], &i[1]),
                        (Some(&i[2]), None),
                        &o[0],
                    )?])
                });
        }
        let spec = Conv { activation: Activation::LeakyRelu { alpha: 0.1 }, ..spec };
        let expected = crate::reference(&Op::Conv(spec.clone()), &[&x, &weight], 1).remove(0);
        let residual = random.floats(expected.shape());
        // An absent bias is an input of zeros for the reference.
        let zeros = model::Tensor::from_vec(vec![kernel[0]], vec![0f32; kernel[0]]).unwrap();
        Case::new(Op::Conv(spec.clone()), &[&x, &weight, &zeros, &residual]).check(
            &mut bench,
            |i, o| {
                Ok(vec![product::conv(&TARGET, &spec, (&i[0], &i[1]), (None, Some(&i[3])), &o[0])?])
            },
        );
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
                    Ok(vec![product::conv_transpose(
                        &TARGET,
                        &spec,
                        (&i[0], &i[1]),
                        Some(&i[2]),
                        &o[0],
                    )?])
                });
        }
    }
    bench.finish("transposed");
}

/// The padding follows from the size of the output, the strides and the extra extent at the end.
#[test]
fn transposed_convolutions_to_a_given_size() {
    let mut bench = Bench::default();
    let mut random = Random::new(26);
    let cases: [[&[usize]; 5]; 5] = [
        [&[1, 1, 3, 3], &[1, 2, 3, 3], &[3, 2], &[1, 1], &[10, 8]],
        [&[1, 1, 3, 3], &[1, 12, 3, 3], &[3, 2], &[1, 0], &[9, 6]],
        [&[2, 3, 4], &[3, 9, 3], &[2], &[1], &[8]],
        [&[1, 2, 2, 3, 3], &[2, 3, 2, 2, 2], &[2, 2, 2], &[1, 0, 1], &[5, 5, 6]],
        [&[1, 2, 4, 5], &[2, 8, 3, 3], &[2, 2], &[], &[8, 9]],
    ];
    for [input, kernel, strides, extra, output] in cases {
        let (x, weight) = (random.floats(input), random.floats(kernel));
        let spec = ConvTranspose {
            window: window(strides, &[], Padding::Explicit(vec![])),
            groups: 1,
            output_padding: extra.to_vec(),
            output_shape: Some(output.to_vec()),
        };
        Case::new(Op::ConvTranspose(spec.clone()), &[&x, &weight]).check(&mut bench, |i, o| {
            Ok(vec![product::conv_transpose(&TARGET, &spec, (&i[0], &i[1]), None, &o[0])?])
        });
    }
    bench.finish("given_size");
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
                    product::attention(
                        &TARGET,
                        scale,
                        (&i[0], &i[1], &i[2]),
                        Some(&i[3]),
                        scratch,
                        &o[0],
                    )
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
            Ok(vec![product::einsum(&TARGET, equation, &views, &o[0])?])
        });
    }
    bench.finish("einstein");
}

/// Sizes of a convolution: input, weights and spec parts.
struct Layer {
    input: Vec<usize>,
    groups: usize,
    channels: usize,
    columns: usize,
    kernel: Vec<usize>,
    window: Window,
}

fn layer(random: &mut Random) -> Layer {
    let rank = 1 + random.below(3);
    let groups = [1, 1, 2, 3, 8][random.below(5)];
    let (channels, columns) = (1 + random.below(9), 1 + random.below(12));
    let mut list = |least: usize, most: usize| -> Vec<usize> {
        (0..rank).map(|_| least + random.below(most + 1 - least)).collect()
    };
    let (kernel, strides, dilations) = (list(1, 4), list(1, 3), list(1, 2));
    let spatial = list(if rank == 3 { 4 } else { 8 }, if rank == 3 { 6 } else { 11 });
    let pads: Vec<usize> = [list(0, 1), list(0, 1)].concat();
    let input = [vec![1 + rank % 2, groups * channels], spatial].concat();
    let padding = Padding::Explicit(pads);
    let window = Window { kernel: kernel.clone(), strides, dilations, padding };
    Layer { input, groups, channels, columns, kernel, window }
}

/// The same numbers in steps that eight bits can represent.
fn coarse(tensor: &model::Tensor) -> model::Tensor {
    let values = tensor.to_vec::<f32>().unwrap();
    let coarse: Vec<f32> = values.iter().map(|x| (x * 16.0).round() / 16.0).collect();
    model::Tensor::from_vec(tensor.shape().to_vec(), coarse).unwrap()
}

/// Runs `conv` on tensor cores and compares with the CPU device.
fn check_packed(
    bench: &mut Bench,
    op: &Op,
    conv: &product::PackedConv,
    tensors: &[model::Tensor],
    expected: &model::Tensor,
    element: Element,
) {
    let [x, weight, bias, residual @ ..] = tensors else { panic!("operands") };
    let channels = x.shape()[1];
    let slack = channels.next_multiple_of(conv.rounding()) - channels;
    let x = bench.place_pixels(x, slack, element);
    assert!(conv.reads(&x), "{op:?} does not read {x:?}");
    let packed = conv.pack(weight, element).unwrap();
    assert_eq!(packed.len(), conv.weight_len() * 2);
    let packed = bench.raw(packed, element);
    let columns = expected.shape()[1];
    let mut row = bias.to_vec::<f32>().unwrap();
    row.resize(columns.next_multiple_of(8), 0.0);
    let mut bias = bench.raw(row.iter().flat_map(|x| x.to_le_bytes()).collect(), Element::F32);
    bias.shape = vec![columns];
    let room = columns.next_multiple_of(8) - columns;
    let residual = residual.first().map(|each| bench.place_pixels(each, room, element));
    let y = bench.buffer(expected.shape(), Layout::ChannelsLast(room), element);
    for rounded in [false, true] {
        let extra = (Some(&bias), residual.as_ref());
        let work = conv.work(&TARGET, (&x, &packed), extra, &y, rounded).unwrap();
        let name = format!("{op:?} {element:?} {rounded} {conv:?}");
        bench.check(&name, &[work], &[(&y, expected)], crate::tolerance(element));
    }
}

#[test]
fn packed_convolutions() {
    let mut bench = Bench::default();
    let mut random = Random::new(26);
    let mut checked = 0;
    while checked < 16 {
        let Layer { input, groups, channels, columns, kernel, window } = layer(&mut random);
        let shape = [vec![groups * columns, channels], kernel.clone()].concat();
        let element = if checked % 4 == 3 { Element::BF16 } else { Element::F16 };
        let mut floats = |shape: &[usize]| match element {
            Element::BF16 => coarse(&random.floats(shape)),
            _ => random.floats(shape),
        };
        let (x, weight, bias) = (floats(&input), floats(&shape), floats(&[groups * columns]));
        let spec = Conv { window, groups, activation: Activation::HardSwish };
        let op = Op::Conv(spec.clone());
        let plain = cpu::evaluate(&op, &[Some(x.clone()), Some(weight.clone())], 1);
        let Some(plain) = plain.map(|mut all| all.remove(0)).filter(|y| !y.is_empty()) else {
            continue;
        };
        let mut tensors = vec![x, weight, bias];
        if random.below(2) == 0 {
            tensors.push(coarse(&random.floats(plain.shape())));
        }
        let expected = crate::reference(&op, &tensors.iter().collect::<Vec<_>>(), 1).remove(0);
        let (x, weight) = (tensors[0].shape(), tensors[1].shape());
        let conv = product::PackedConv::conv(&spec, x, weight, expected.shape()).unwrap();
        check_packed(&mut bench, &op, &conv, &tensors, &expected, element);
        checked += 1;
    }
    bench.finish("packed");
}

#[test]
fn packed_transposed_convolutions() {
    let mut bench = Bench::default();
    let mut random = Random::new(27);
    let mut checked = 0;
    while checked < 16 {
        let Layer { input, groups, channels, columns, kernel, window } = layer(&mut random);
        let shape = [vec![groups * channels, columns], kernel.clone()].concat();
        let extra: Vec<usize> = window.strides.iter().map(|stride| random.below(*stride)).collect();
        let tensors =
            [random.floats(&input), random.floats(&shape), random.floats(&[groups * columns])];
        let spec = ConvTranspose { window, groups, output_padding: extra, output_shape: None };
        let op = Op::ConvTranspose(spec.clone());
        let inputs: Vec<_> = tensors.iter().cloned().map(Some).collect();
        let Some(expected) = cpu::evaluate(&op, &inputs, 1).map(|mut all| all.remove(0)) else {
            continue;
        };
        if expected.is_empty() {
            continue;
        }
        let (x, weight) = (tensors[0].shape(), tensors[1].shape());
        let conv = product::PackedConv::transposed(&spec, x, weight, expected.shape()).unwrap();
        check_packed(&mut bench, &op, &conv, &tensors, &expected, Element::F16);
        checked += 1;
    }
    bench.finish("packed_transposed");
}
