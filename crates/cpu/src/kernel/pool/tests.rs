//! Pooling against a plain reference.

use base::Random;
use model::op::{Padding, Window};

use super::super::testing_dense::{TestOperand, assert_close, between, random, run, wide};
use super::*;

#[test]
fn random_geometries_match_the_reference() {
    let mut source = Random::new(41);
    for case in 0..200 {
        let rank = [1, 2, 2, 3][case % 4];
        let kinds = [
            PoolKind::Max,
            PoolKind::MaxWithIndices { column_major: case % 2 == 0 },
            PoolKind::Average { count_include_pad: false },
            PoolKind::Average { count_include_pad: true },
            PoolKind::Lp { p: 2 },
        ];
        let kind = kinds[case % 5];
        let mut dims = |low, high| -> Vec<usize> {
            (0..rank).map(|_| between(&mut source, low, high)).collect()
        };
        let (kernel, strides, dilations) = (dims(1, 4), dims(1, 3), dims(1, 2));
        let extent: Vec<usize> = (0..rank).map(|a| (kernel[a] - 1) * dilations[a]).collect();
        let input: Vec<usize> = dims(1, 9).iter().zip(&extent).map(|(x, e)| x + e).collect();
        let pads: Vec<usize> =
            (0..2 * rank).map(|i| between(&mut source, 0, (kernel[i % rank] - 1).min(2))).collect();
        let ceil_mode = source.below(2) == 0;
        let window = Window {
            kernel: kernel.clone(),
            strides: strides.clone(),
            dilations: dilations.clone(),
            padding: Padding::Explicit(pads.clone()),
        };
        let pool = Pool { kind, window, ceil_mode };
        let shape = [&[2, 3], input.as_slice()].concat();
        let x = random(&mut source, &shape);
        let what = format!("{pool:?} of {shape:?}");
        let (out_dims, expected, indices) =
            reference(&wide(&x), &input, &kernel, &strides, &dilations, &pads, ceil_mode, kind);
        let dtypes: &[DataType] = match kind {
            PoolKind::MaxWithIndices { .. } => &[DataType::F32, DataType::I64],
            _ => &[DataType::F32],
        };
        let out = run(Op::Pool(pool), &[TestOperand::Input(x)], dtypes).unwrap();
        assert_eq!(out[0].shape()[2..], out_dims, "{what}");
        assert_close(&out[0].to_vec::<f32>().unwrap(), &expected, 1e-5, &what);
        if let Some(actual) = out.get(1) {
            assert_eq!(actual.to_vec::<i64>().unwrap(), indices, "{what}");
        }
    }
}

#[allow(clippy::too_many_arguments)]
fn reference(
    data: &[f64],
    input: &[usize],
    kernel: &[usize],
    strides: &[usize],
    dilations: &[usize],
    pads: &[usize],
    ceil_mode: bool,
    kind: PoolKind,
) -> (Vec<usize>, Vec<f64>, Vec<i64>) {
    let rank = input.len();
    let plane: usize = input.iter().product();
    let output: Vec<usize> = (0..rank)
        .map(|a| {
            let free = input[a] + pads[a] + pads[a + rank] - ((kernel[a] - 1) * dilations[a] + 1);
            if !ceil_mode {
                return free / strides[a] + 1;
            }
            let out = free.div_ceil(strides[a]) + 1;
            if (out - 1) * strides[a] >= input[a] + pads[a] { out - 1 } else { out }
        })
        .collect();
    let index = |mut flat: usize, dims: &[usize]| {
        let mut at = vec![0; dims.len()];
        for axis in (0..dims.len()).rev() {
            at[axis] = flat % dims[axis];
            flat /= dims[axis];
        }
        at
    };
    let (mut out, mut indices) = (Vec::new(), Vec::new());
    for number in 0..data.len() / plane {
        for position in 0..output.iter().product() {
            let o = index(position, &output);
            let (mut best, mut best_index, mut sum, mut squares) = (f64::NEG_INFINITY, 0, 0.0, 0.0);
            let (mut inside, mut padded) = (0, 0);
            for tap in 0..kernel.iter().product() {
                let k = index(tap, kernel);
                let at: Vec<usize> =
                    (0..rank).map(|a| o[a] * strides[a] + k[a] * dilations[a]).collect();
                if (0..rank).all(|a| at[a] < input[a] + pads[a] + pads[a + rank]) {
                    padded += 1;
                }
                if !(0..rank).all(|a| at[a] >= pads[a] && at[a] < input[a] + pads[a]) {
                    continue;
                }
                inside += 1;
                let at: Vec<usize> = (0..rank).map(|a| at[a] - pads[a]).collect();
                let flat = (0..rank).fold(0, |flat, a| flat * input[a] + at[a]);
                let x = data[number * plane + flat];
                if x > best {
                    let column = (0..rank).rev().fold(0, |flat, a| flat * input[a] + at[a]);
                    let column_major = kind == PoolKind::MaxWithIndices { column_major: true };
                    (best, best_index) = (x, if column_major { column } else { flat });
                }
                sum += x;
                squares += x * x;
            }
            indices.push((number * plane + best_index) as i64);
            out.push(match kind {
                PoolKind::Average { count_include_pad: true } => sum / f64::from(padded),
                PoolKind::Average { .. } => {
                    if inside == 0 {
                        0.0
                    } else {
                        sum / f64::from(inside)
                    }
                }
                PoolKind::Lp { .. } => squares.sqrt(),
                _ => best,
            });
        }
    }
    (output, out, indices)
}

#[test]
fn whole_planes_are_pooled() {
    let mut source = Random::new(42);
    let x = random(&mut source, &[2, 5, 3, 7]);
    for kind in [GlobalPool::Average, GlobalPool::Max, GlobalPool::Lp { p: 2 }] {
        let out =
            run(Op::GlobalPool(kind), &[TestOperand::Input(x.clone())], &[DataType::F32]).unwrap();
        assert_eq!(out[0].shape(), [2, 5, 1, 1]);
        let expected: Vec<f64> = wide(&x)
            .chunks(21)
            .map(|row| match kind {
                GlobalPool::Average => row.iter().sum::<f64>() / 21.0,
                GlobalPool::Max => row.iter().copied().fold(f64::MIN, f64::max),
                GlobalPool::Lp { .. } => row.iter().map(|x| x * x).sum::<f64>().sqrt(),
            })
            .collect();
        assert_close(&out[0].to_vec::<f32>().unwrap(), &expected, 1e-5, &format!("{kind:?}"));
    }
}

#[test]
fn max_pool_supports_bytes() {
    let window = Window {
        kernel: vec![2],
        strides: vec![2],
        dilations: vec![],
        padding: Padding::Explicit(vec![]),
    };
    let pool = Pool { kind: PoolKind::Max, window, ceil_mode: true };
    let x = model::Tensor::from_vec(vec![1, 1, 5], vec![-3i8, -4, 7, 9, -128]).unwrap();
    let out = run(Op::Pool(pool), &[TestOperand::Input(x)], &[DataType::I8]).unwrap();
    assert_eq!(out[0].to_vec::<i8>().unwrap(), [-3, 9, -128]);
}
