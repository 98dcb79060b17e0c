//! Transposed convolutions against scattered sums.

use base::Random;
use model::op::Window;

use super::super::testing_dense::{
    TestOperand, assert_close, assert_close_f64, between, input_or_constant, random, run, run_f32,
    wide,
};
use super::*;

#[test]
fn random_geometries_match_the_reference() {
    let mut source = Random::new(31);
    for case in 0..100 {
        let rank = [1, 2, 2, 3][case % 4];
        let groups = between(&mut source, 1, 3);
        let (per_in, per_out) = (between(&mut source, 1, 5), between(&mut source, 1, 5));
        let mut dims = |low, high| -> Vec<usize> {
            (0..rank).map(|_| between(&mut source, low, high)).collect()
        };
        let (input, kernel) = (dims(1, 6), dims(1, 4));
        let (strides, dilations) = (dims(1, 3), dims(1, 2));
        let extra: Vec<usize> = strides.iter().map(|s| s - 1).collect();
        let full: Vec<usize> = (0..rank)
            .map(|a| (input[a] - 1) * strides[a] + (kernel[a] - 1) * dilations[a] + 1 + extra[a])
            .collect();
        let (padding, output_shape, begin, output) = match case % 3 {
            0 => {
                let begin: Vec<usize> = full.iter().map(|f| (f - 1).min(1)).collect();
                let end: Vec<usize> =
                    full.iter().zip(&begin).map(|(f, b)| (f - b - 1).min(1)).collect();
                let output = (0..rank).map(|a| full[a] - begin[a] - end[a]).collect::<Vec<_>>();
                (Padding::Explicit([begin.clone(), end].concat()), None, begin, output)
            }
            1 => {
                let output: Vec<usize> = (0..rank).map(|a| input[a] * strides[a]).collect();
                let begin = (0..rank).map(|a| full[a].saturating_sub(output[a]) / 2).collect();
                (Padding::SameUpper, None, begin, output)
            }
            _ => {
                let output: Vec<usize> = full.iter().map(|f| f.div_ceil(2)).collect();
                let begin =
                    (0..rank).map(|a| full[a].saturating_sub(output[a]).div_ceil(2)).collect();
                (Padding::Explicit(vec![]), Some(output.clone()), begin, output)
            }
        };
        let window = Window {
            kernel: vec![],
            strides: strides.clone(),
            dilations: dilations.clone(),
            padding,
        };
        let conv = ConvTranspose { window, groups, output_padding: extra, output_shape };
        let x = random(&mut source, &[&[2, groups * per_in], input.as_slice()].concat());
        let w = random(&mut source, &[&[groups * per_in, per_out], kernel.as_slice()].concat());
        let bias = random(&mut source, &[groups * per_out]);
        let expected = reference(&x, &w, &bias, groups, &strides, &dilations, &begin, &output);
        let what = format!("{conv:?} of {:?} with {:?}", x.shape(), w.shape());
        let op = Op::ConvTranspose(conv);
        let operands = [
            TestOperand::Input(x.clone()),
            input_or_constant(&mut source, &w),
            input_or_constant(&mut source, &bias),
        ];
        let (shape, actual) = run_f32(op.clone(), &operands).unwrap();
        assert_eq!(shape[2..], output, "{what}");
        assert_close(&actual, &expected, 1e-5, &what);
        let double = |t: &model::Tensor| {
            TestOperand::Input(model::Tensor::from_vec(t.shape().to_vec(), wide(t)).unwrap())
        };
        let out = run(op, &[double(&x), double(&w), double(&bias)], &[DataType::F64]).unwrap();
        assert_close_f64(&wide(&out[0]), &expected, 1e-12, &what);
    }
}

#[allow(clippy::too_many_arguments)]
fn reference(
    x: &model::Tensor,
    w: &model::Tensor,
    bias: &model::Tensor,
    groups: usize,
    strides: &[usize],
    dilations: &[usize],
    begin: &[usize],
    output: &[usize],
) -> Vec<f64> {
    let (xs, ws) = (x.shape(), w.shape());
    let (per_in, per_out) = (xs[1] / groups, ws[1]);
    let windows: usize = xs[2..].iter().product();
    let taps: usize = ws[2..].iter().product();
    let plane: usize = output.iter().product();
    let (data, weights, bias) = (wide(x), wide(w), wide(bias));
    let index = |mut flat: usize, dims: &[usize]| {
        let mut at = vec![0; dims.len()];
        for axis in (0..dims.len()).rev() {
            at[axis] = flat % dims[axis];
            flat /= dims[axis];
        }
        at
    };
    let mut out: Vec<f64> =
        (0..xs[0] * groups * per_out * plane).map(|i| bias[i / plane % bias.len()]).collect();
    for n in 0..xs[0] {
        for c in 0..xs[1] {
            for m in 0..per_out {
                for window in 0..windows {
                    for tap in 0..taps {
                        let (i, k) = (index(window, &xs[2..]), index(tap, &ws[2..]));
                        let mut flat = Some(0);
                        for axis in 0..output.len() {
                            let at = (i[axis] * strides[axis] + k[axis] * dilations[axis])
                                .checked_sub(begin[axis])
                                .filter(|&at| at < output[axis]);
                            flat = flat.zip(at).map(|(flat, at)| flat * output[axis] + at);
                        }
                        if let Some(flat) = flat {
                            let channel = c / per_in * per_out + m;
                            out[(n * groups * per_out + channel) * plane + flat] += data
                                [(n * xs[1] + c) * windows + window]
                                * weights[(c * per_out + m) * taps + tap];
                        }
                    }
                }
            }
        }
    }
    out
}
