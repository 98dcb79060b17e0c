//! Products of bytes against the plain loops of `integer.rs`, which nothing but constant weights
//! tells apart.

use base::Random;
use model::op::{Activation, Conv, Op, Padding, Window};
use model::{DataType, Tensor as Host};

use crate::kernel::testing_dense::{TestOperand, run};

fn bytes(random: &mut Random, shape: &[usize], signed: bool) -> Host {
    let count: usize = shape.iter().product();
    let values: Vec<u8> = (0..count).map(|_| random.below(256) as u8).collect();
    match signed {
        true => {
            let values: Vec<i8> = values.into_iter().map(|byte| byte as i8).collect();
            Host::from_vec(shape.to_vec(), values).unwrap()
        }
        false => Host::from_vec(shape.to_vec(), values).unwrap(),
    }
}

fn scales(random: &mut Random, count: usize) -> Host {
    let values: Vec<f32> = (0..count).map(|_| 0.001 + random.below(1000) as f32 * 1e-5).collect();
    let shape = if count == 1 { vec![] } else { vec![count] };
    Host::from_vec(shape, values).unwrap()
}

/// Compares `op` without a constant with `op` whose operands are constant, but for the first and
/// those in `dynamic`.
fn compare(op: Op, operands: &[Host], weight: usize, dynamic: &[usize], to: DataType, what: &str) {
    let plain: Vec<TestOperand> = operands.iter().cloned().map(TestOperand::Input).collect();
    let wanted = run(op.clone(), &plain, &[to]).unwrap();
    let packed: Vec<TestOperand> = operands
        .iter()
        .enumerate()
        .map(|(index, tensor)| match index == 0 || dynamic.contains(&index) {
            true => TestOperand::Input(tensor.clone()),
            false => TestOperand::Constant(tensor.clone()),
        })
        .collect();
    assert!(!dynamic.contains(&weight));
    let got = run(op, &packed, &[to]).unwrap();
    assert_eq!(got[0].shape(), wanted[0].shape(), "{what}");
    assert!(got[0].raw() == wanted[0].raw(), "{what}");
}

#[test]
fn matrix_products_equal_the_plain_loop() {
    let mut random = Random::new(5);
    for round in 0..60 {
        let size = |random: &mut Random, most: u64| 1 + random.below(most) as usize;
        let (m, k, n) = (size(&mut random, 40), size(&mut random, 90), size(&mut random, 130));
        let (a_signed, b_signed) = (random.below(2) == 1, random.below(2) == 1);
        let a = bytes(&mut random, &[2, m, k], a_signed);
        let b = bytes(&mut random, &[k, n], b_signed);
        let a_zero = bytes(&mut random, &[], a_signed);
        let per_column = random.below(2) == 1;
        let zero_shape: &[usize] = if per_column { &[n] } else { &[] };
        let b_zero = bytes(&mut random, zero_shape, b_signed);
        let what = format!("round {round}: {m} x {k} x {n}, {a_signed} {b_signed}");
        let operands = [a.clone(), b.clone(), a_zero.clone(), b_zero.clone()];
        let dynamic: &[usize] = if round % 2 == 0 { &[2] } else { &[] };
        compare(Op::MatMulInteger, &operands, 1, dynamic, DataType::I32, &what);
        let out_signed = random.below(2) == 1;
        let count = if per_column { n } else { 1 };
        let operands = [
            a,
            scales(&mut random, 1),
            a_zero,
            b,
            scales(&mut random, count),
            b_zero,
            scales(&mut random, 1),
            bytes(&mut random, &[], out_signed),
        ];
        let to = if out_signed { DataType::I8 } else { DataType::U8 };
        compare(Op::QLinearMatMul, &operands, 3, &[], to, &what);
    }
}

fn random_conv(random: &mut Random) -> (Conv, Vec<usize>, Vec<usize>) {
    let size = |random: &mut Random, most: u64| 1 + random.below(most) as usize;
    let groups = [1, 1, 2, 5][random.below(4) as usize];
    let per_group = size(random, 9);
    let outputs = groups * size(random, 20);
    let kernel = [size(random, 3), size(random, 3)];
    let window = Window {
        kernel: kernel.to_vec(),
        strides: vec![size(random, 2), size(random, 3)],
        dilations: vec![size(random, 2), 1],
        padding: Padding::Explicit(
            (0..4).map(|_| random.below(2) as usize).collect::<Vec<usize>>(),
        ),
    };
    let image = [5 + size(random, 12), 5 + size(random, 40)];
    let x = vec![size(random, 3), groups * per_group, image[0], image[1]];
    let weight = vec![outputs, per_group, kernel[0], kernel[1]];
    (Conv { window, groups, activation: Activation::None }, x, weight)
}

#[test]
fn convolutions_equal_the_plain_loop() {
    let mut random = Random::new(6);
    for round in 0..80 {
        let (mut conv, mut x, mut weight) = random_conv(&mut random);
        if round % 4 == 0 {
            // Pointwise, and one filter for each channel.
            match round % 8 {
                0 => {
                    conv.window.kernel = vec![1, 1];
                    conv.window.strides = vec![1, 1];
                    conv.window.padding = Padding::Explicit(vec![]);
                    weight[2..].fill(1);
                }
                _ => {
                    conv.groups = x[1];
                    weight[0] = 2 * x[1];
                    weight[1] = 1;
                }
            }
        }
        if round % 5 == 0 {
            x[3] = 16 * (1 + x[3] / 16);
        }
        let (x_signed, w_signed) = (random.below(2) == 1, random.below(2) == 1);
        let what = format!("round {round}: {x:?} {weight:?} {conv:?}");
        let outputs = weight[0];
        let input = bytes(&mut random, &x, x_signed);
        let weight = bytes(&mut random, &weight, w_signed);
        let x_zero = bytes(&mut random, &[], x_signed);
        let per_channel = random.below(2) == 1;
        let zero_shape: &[usize] = if per_channel { &[outputs] } else { &[] };
        let weight_zero = bytes(&mut random, zero_shape, w_signed);
        let operands = [input.clone(), weight.clone(), x_zero.clone(), weight_zero.clone()];
        compare(Op::ConvInteger(conv.clone()), &operands, 1, &[], DataType::I32, &what);
        let out_signed = random.below(2) == 1;
        let bias: Vec<i32> = (0..outputs).map(|_| random.below(20_000) as i32 - 10_000).collect();
        let count = if per_channel { outputs } else { 1 };
        let operands = [
            input,
            scales(&mut random, 1),
            x_zero,
            weight,
            scales(&mut random, count),
            weight_zero,
            scales(&mut random, 1),
            bytes(&mut random, &[], out_signed),
            Host::from_vec(vec![outputs], bias).unwrap(),
        ];
        let to = if out_signed { DataType::I8 } else { DataType::U8 };
        compare(Op::QLinearConv(conv), &operands, 3, &[], to, &what);
    }
}
