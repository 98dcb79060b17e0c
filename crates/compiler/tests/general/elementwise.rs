//! Chains and copies.

use compiler::gpu::elementwise::{Expr, clear_slack, copy, work};
use compiler::gpu::quantize;
use compiler::gpu::view::{Element, View};
use model::op::{Activation, Binary, Cast, Compare, Op, Unary, Variadic};
use model::{DataType, Tensor};

use crate::bench::{Bench, Layout, Random};
use crate::{Case, reference, stored, tolerance};

const PRECISIONS: [Element; 3] = [Element::F16, Element::BF16, Element::F32];

fn input(index: usize) -> Box<Expr> {
    Box::new(Expr::Input(index))
}

/// Checks one operator on `inputs` in some layouts.
fn case(
    bench: &mut Bench,
    op: &Op,
    expr: &Expr,
    inputs: &[&Tensor],
    layouts: &[Layout],
    precision: Element,
) {
    let expected = &reference(op, inputs, 1)[0];
    let views: Vec<View> = inputs
        .iter()
        .enumerate()
        .map(|(i, tensor)| {
            bench.place(tensor, layouts[i % layouts.len()], stored(tensor.dtype(), precision))
        })
        .collect();
    let output = bench.buffer(expected.shape(), layouts[0], stored(expected.dtype(), precision));
    let made = work(expr, &views, &output).unwrap_or_else(|error| panic!("{op:?}: {error}"));
    let name = format!("{op:?} {layouts:?} {precision:?}");
    bench.check(&name, &[made], &[(&output, expected)], tolerance(output.element));
}

const UNARIES: [Unary; 38] = [
    Unary::Abs,
    Unary::Acos,
    Unary::Acosh,
    Unary::Asin,
    Unary::Asinh,
    Unary::Atan,
    Unary::Atanh,
    Unary::Ceil,
    Unary::Celu { alpha: 0.7 },
    Unary::Cos,
    Unary::Cosh,
    Unary::Elu { alpha: 0.7 },
    Unary::Erf,
    Unary::Exp,
    Unary::Floor,
    Unary::Gelu { tanh: false },
    Unary::Gelu { tanh: true },
    Unary::HardSigmoid { alpha: 0.3, beta: 0.4 },
    Unary::HardSwish,
    Unary::LeakyRelu { alpha: 0.1 },
    Unary::Log,
    Unary::Mish,
    Unary::Neg,
    Unary::Reciprocal,
    Unary::Relu,
    Unary::Round,
    Unary::Selu { alpha: 1.6, gamma: 1.05 },
    Unary::Shrink { bias: 0.2, lambda: 0.5 },
    Unary::Sigmoid,
    Unary::Sign,
    Unary::Silu { alpha: 1.5 },
    Unary::Sin,
    Unary::Sinh,
    Unary::Softplus,
    Unary::Softsign,
    Unary::Sqrt,
    Unary::Tanh,
    Unary::ThresholdedRelu { alpha: 0.6 },
];

#[test]
fn functions_of_one_operand() {
    let mut bench = Bench::default();
    let mut random = Random::new(1);
    let x = random.floats(&[3, 5, 8]);
    for unary in UNARIES {
        case(
            &mut bench,
            &Op::Unary(unary),
            &Expr::Unary(unary, input(0)),
            &[&x],
            &[Layout::Packed],
            Element::F32,
        );
    }
    let special =
        Tensor::from_vec(vec![4], vec![1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]).unwrap();
    for unary in [Unary::IsNan, Unary::IsInf { positive: true, negative: false }] {
        let expr = Expr::Unary(unary, input(0));
        case(&mut bench, &Op::Unary(unary), &expr, &[&special], &[Layout::Packed], Element::F32);
    }
    bench.finish("unary");
}

#[test]
fn functions_of_several_operands() {
    let mut bench = Bench::default();
    let mut random = Random::new(2);
    let (a, b) = (random.floats(&[2, 16, 3, 5]), random.floats(&[16, 1, 5]));
    let (i, j) = (random.integers(&[7, 6], -20, 20), random.integers(&[6], 1, 9));
    for precision in PRECISIONS {
        for layouts in [[Layout::Packed, Layout::Gapped], [Layout::ChannelsLast(8), Layout::Packed]]
        {
            for binary in [Binary::Add, Binary::Div] {
                let expr = Expr::Binary(binary, input(0), input(1));
                case(&mut bench, &Op::Binary(binary), &expr, &[&a, &b], &layouts, precision);
            }
        }
    }
    for binary in [Binary::Sub, Binary::Mul, Binary::Mod, Binary::Fmod] {
        let expr = Expr::Binary(binary, input(0), input(1));
        case(&mut bench, &Op::Binary(binary), &expr, &[&a, &b], &[Layout::Packed], Element::F32);
    }
    use Binary::{Add, BitAnd, BitOr, BitXor, Div, Fmod, Mod, Mul, Pow, Sub};
    for binary in [Add, Sub, Mul, Div, Mod, Fmod, Pow, BitAnd, BitOr, BitXor] {
        let expr = Expr::Binary(binary, input(0), input(1));
        let layouts = [Layout::Packed, Layout::Gapped];
        case(&mut bench, &Op::Binary(binary), &expr, &[&i, &j], &layouts, Element::F32);
    }
    let (p, q) = (bytes(&mut random, 256), bytes(&mut random, 11));
    for binary in [Add, Sub, Mul, Binary::ShiftLeft, Binary::ShiftRight] {
        let expr = Expr::Binary(binary, input(0), input(1));
        case(&mut bench, &Op::Binary(binary), &expr, &[&p, &q], &[Layout::Packed], Element::F32);
    }
    let compare =
        |a: &Tensor, b: &Tensor| reference(&Op::Compare(Compare::Less), &[a, b], 1).remove(0);
    let (r, s) = (compare(&i, &j), compare(&j, &i));
    for binary in [Binary::And, Binary::Or, Binary::Xor] {
        let expr = Expr::Binary(binary, input(0), input(1));
        case(&mut bench, &Op::Binary(binary), &expr, &[&r, &s], &[Layout::Packed], Element::F32);
    }
    for (unary, x) in [
        (Unary::Not, &r),
        (Unary::BitNot, &i),
        (Unary::BitNot, &p),
        (Unary::Abs, &i),
        (Unary::Sign, &i),
    ] {
        let expr = Expr::Unary(unary, input(0));
        case(&mut bench, &Op::Unary(unary), &expr, &[x], &[Layout::Packed], Element::F32);
    }
    for compare in [Compare::Equal, Compare::Less, Compare::GreaterOrEqual] {
        let expr = Expr::Compare(compare, input(0), input(1));
        case(&mut bench, &Op::Compare(compare), &expr, &[&i, &j], &[Layout::Packed], Element::F32);
        case(&mut bench, &Op::Compare(compare), &expr, &[&a, &b], &[Layout::Packed], Element::F16);
    }
    for variadic in [Variadic::Sum, Variadic::Mean, Variadic::Max, Variadic::Min] {
        let expr = Expr::Variadic(variadic, (0..3).map(Expr::Input).collect());
        case(
            &mut bench,
            &Op::Variadic(variadic),
            &expr,
            &[&a, &b, &a],
            &[Layout::Reversed, Layout::Packed],
            Element::F32,
        );
    }
    bench.finish("several");
}

#[test]
fn selections_and_conversions() {
    let mut bench = Bench::default();
    let mut random = Random::new(3);
    let (a, b) = (random.floats(&[4, 5, 16]), random.floats(&[5, 1]));
    let (low, high) = (
        Tensor::from_vec(vec![], vec![-0.5f32]).unwrap(),
        Tensor::from_vec(vec![], vec![0.75f32]).unwrap(),
    );
    let flags = reference(&Op::Compare(Compare::Less), &[&a, &low], 1).remove(0);
    let choose = Expr::Where(input(0), input(1), input(2));
    case(&mut bench, &Op::Where, &choose, &[&flags, &a, &b], &[Layout::Packed], Element::F16);
    let clip = Expr::Clip(input(0), Some(input(1)), Some(input(2)));
    case(&mut bench, &Op::Clip, &clip, &[&a, &low, &high], &[Layout::Gapped], Element::F32);
    case(
        &mut bench,
        &Op::PRelu,
        &Expr::PRelu(input(0), input(1)),
        &[&a, &b],
        &[Layout::Packed],
        Element::F32,
    );
    for to in [DataType::I64, DataType::I32, DataType::Bool, DataType::F64] {
        let expr = Expr::Cast(Element::exact(to).unwrap(), input(0));
        case(&mut bench, &Op::Cast(Cast { to }), &expr, &[&a], &[Layout::Packed], Element::F32);
    }
    let (scale, shift) = (random.floats(&[5, 1]), random.floats(&[5, 1]));
    let activation = Activation::Clip { low: -1.0, high: 1.5 };
    let expr = Expr::ScaleShift(activation, input(0), input(1), input(2));
    let (flat_scale, flat_shift) =
        (scale.clone().with_shape(vec![5]).unwrap(), shift.clone().with_shape(vec![5]).unwrap());
    let expected =
        &reference(&Op::ScaleShift { activation }, &[&a, &flat_scale, &flat_shift], 1)[0];
    let views =
        [&a, &scale, &shift].map(|tensor| bench.place(tensor, Layout::Packed, Element::F16));
    let output = bench.buffer(&[4, 5, 16], Layout::Packed, Element::F16);
    bench.check(
        "scale and shift",
        &[work(&expr, &views, &output).unwrap()],
        &[(&output, expected)],
        4e-3,
    );
    bench.finish("choices");
}

/// A copy gives the same numbers in every layout, and zeros in the slack.
#[test]
fn copies() {
    let mut bench = Bench::default();
    let mut random = Random::new(4);
    let layouts = [
        Layout::Packed,
        Layout::ChannelsLast(0),
        Layout::ChannelsLast(5),
        Layout::Gapped,
        Layout::Reversed,
    ];
    for shape in [&[2usize, 3, 5, 7][..], &[2, 40, 5, 9], &[1, 1, 4, 6], &[33, 17], &[70], &[]] {
        let tensor = random.floats(shape);
        for from in layouts {
            for to in layouts {
                for (source, target) in [
                    (Element::F32, Element::F16),
                    (Element::F16, Element::F16),
                    (Element::BF16, Element::F32),
                ] {
                    let input = bench.place(&tensor, from, source);
                    let mut output = bench.buffer(shape, to, target);
                    let made = copy(&input, &output).unwrap();
                    let name =
                        format!("copy of {shape:?} from {from:?} {source:?} to {to:?} {target:?}");
                    let expected =
                        if source == Element::BF16 { rounded(&tensor) } else { tensor.clone() };
                    bench.check(&name, std::slice::from_ref(&made), &[(&output, &expected)], 0.0);
                    if output.slack > 0 {
                        let zeros =
                            Tensor::from_vec(slack(&mut output), vec![0f32; output.len()]).unwrap();
                        bench.check(&format!("slack, {name}"), &[made], &[(&output, &zeros)], 0.0);
                    }
                }
            }
        }
        let mut output = bench.buffer(shape, Layout::ChannelsLast(3), Element::F16);
        let clear = clear_slack(&output).unwrap().unwrap();
        let zeros = Tensor::from_vec(slack(&mut output), vec![0f32; output.len()]).unwrap();
        bench.check(&format!("cleared slack of {shape:?}"), &[clear], &[(&output, &zeros)], 0.0);
    }
    bench.finish("copies");
}

/// Makes `view` one of its slack and returns the shape.
/// Rows of an odd length: a thread computes several elements of a large value.
#[test]
fn large_values_in_short_vectors() {
    let mut bench = Bench::default();
    let mut random = Random::new(23);
    let x = random.floats(&[3, 2059, 85]);
    let op = Op::Unary(Unary::Abs);
    let expected = &reference(&op, &[&x], 1)[0];
    let view = bench.place(&x, Layout::Gapped, Element::F16);
    let output = bench.buffer(expected.shape(), Layout::Packed, Element::F16);
    let made = work(&Expr::Unary(Unary::Abs, input(0)), &[view], &output).unwrap();
    let kernel = &made.drafts[0].kernel.expression;
    assert!(kernel.ends_with("Function, 4>"), "{kernel}");
    bench.check("large", &[made], &[(&output, expected)], tolerance(Element::F16));
    bench.finish("large_chain");
}

fn slack(view: &mut View) -> Vec<usize> {
    let row = (0..view.shape.len()).find(|&axis| view.shape[axis] > 1 && view.strides[axis] == 1);
    match row {
        Some(axis) => {
            view.offset += view.shape[axis];
            view.shape[axis] = view.slack;
        }
        None => {
            view.offset += 1;
            view.shape.push(view.slack);
            view.strides.push(1);
        }
    }
    view.shape.clone()
}

/// To brain float and back.
fn rounded(tensor: &Tensor) -> Tensor {
    let values: Vec<f32> = tensor.to_vec::<f32>().unwrap();
    let values = values.into_iter().map(|value| half::bf16::from_f32(value).to_f32()).collect();
    Tensor::from_vec(tensor.shape().to_vec(), values).unwrap()
}

#[test]
fn parameters_per_channel() {
    let mut bench = Bench::default();
    let mut random = Random::new(5);
    let x = random.floats(&[2, 6, 3, 5]);
    let parameters = [0, 1, 2].map(|_| random.floats(&[6]));
    let positive: Vec<f32> = (1..7).map(|i| i as f32 / 4.0).collect();
    let positive = Tensor::from_vec(vec![6], positive).unwrap();
    let [scale, bias, mean] = &parameters;
    let epsilon = 1e-3;
    for (layout, element) in
        [(Layout::Packed, Element::F32), (Layout::ChannelsLast(2), Element::F16)]
    {
        Case::new(Op::BatchNorm { epsilon }, &[&x, scale, bias, mean, &positive])
            .lying(layout, layout)
            .of(element)
            .check(&mut bench, |i, o| {
                Ok(vec![quantize::batch_norm(epsilon, &i[0], [&i[1], &i[2], &i[3], &i[4]], &o[0])?])
            });
    }
    let zero = Tensor::from_vec(vec![6], vec![0u8, 3, 128, 255, 7, 9]).unwrap();
    let op = Op::QuantizeLinear { axis: 1, dtype: DataType::U8 };
    let quantized = reference(&op, &[&x, &positive, &zero], 1).remove(0);
    Case::new(op, &[&x, &positive, &zero]).check(&mut bench, |i, o| {
        Ok(vec![quantize::quantize_linear(1, &i[0], &i[1], Some(&i[2]), &o[0])?])
    });
    Case::new(Op::DequantizeLinear { axis: 1 }, &[&quantized, &positive, &zero])
        .check(&mut bench, |i, o| {
            Ok(vec![quantize::dequantize_linear(1, &i[0], &i[1], Some(&i[2]), &o[0])?])
        });
    bench.finish("channels");
}

fn bytes(random: &mut Random, limit: usize) -> Tensor {
    let values: Vec<u8> = (0..30).map(|_| random.below(limit) as u8).collect();
    Tensor::from_vec(vec![5, 6], values).unwrap()
}
