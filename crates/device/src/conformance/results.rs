//! Results of plans, and refused inputs.

use base::Random;
use model::op::{
    Activation, Binary, Conv, MatMul, Op, Padding, Pool, PoolKind, Reduce, ReduceKind, Softmax,
    SoftmaxKind, Unary, Window,
};
use model::{DataType, Dim, LaunchPlan, Tensor};

use super::plans::{Builder, integers, noise, reals};
use super::reference::{Grid, conv, matmul, pool, rows};
use super::{ConformanceReport, Stop, TestQueue, ensure, load};
use crate::{Device, DeviceError};

/// Allowed error of an output, relative to its magnitude.
const TOLERANCE: f64 = 2e-4;

pub(super) fn run(device: &dyn Device, report: &mut ConformanceReport) {
    report.add("a broken plan is not loaded", broken_plan(device));
    report.add("inputs are checked", bad_inputs(device));
    report.add("64-bit integers stay exact", exact_integers(device));
    report.add("outputs may be inputs, constants and listed twice", odd_outputs(device));
    for (name, case) in cases() {
        // Twice, since memory is reused the second time.
        let outcome = (1..=2).try_for_each(|seed| compare(device, case(&mut Random::new(seed))));
        report.add(name, outcome);
    }
}

/// A plan with inputs and expected outputs.
struct Example {
    plan: LaunchPlan,
    inputs: Vec<Tensor>,
    want: Grid,
}

type Make = fn(&mut Random) -> Example;

fn cases() -> Vec<(&'static str, Make)> {
    vec![
        ("element-wise chain", chain),
        ("broadcast sum", broadcast),
        ("matrix product", product),
        ("convolution", convolution),
        ("grouped convolution", grouped_convolution),
        ("max pooling", max_pool),
        ("mean pooling", mean_pool),
        ("softmax", softmax),
        ("layer normalisation", layer_norm),
        ("concatenation", concatenation),
        ("transposition", transposition),
        ("mean", mean),
        ("gather", gather),
    ]
}

fn compare(device: &dyn Device, example: Example) -> Result<(), Stop> {
    let program = load(device, example.plan)?;
    let task = program.prepare(example.inputs).map_err(|err| format!("not prepared: {err}"))?;
    let outputs = TestQueue::open(device, 0, 1)?.outputs(task)?;
    let [output] = outputs.as_slice() else {
        return Err(format!("{} outputs instead of one", outputs.len()).into());
    };
    ensure(
        output.shape() == example.want.shape,
        format!("shape {:?} instead of {:?}", output.shape(), example.want.shape),
    )?;
    let got = Grid::new(output);
    // Rounding errors of stored values add up.
    let tolerance = TOLERANCE.max(8.0 * device.info().rounding);
    for (position, (got, want)) in got.data.iter().zip(&example.want.data).enumerate() {
        let close = (got - want).abs() <= tolerance * want.abs().max(1.0);
        ensure(close, format!("element {position} is {got} instead of {want}"))?;
    }
    Ok(())
}

fn broken_plan(device: &dyn Device) -> Result<(), Stop> {
    let mut builder = Builder::default();
    let x = builder.input(DataType::F32, &[2]);
    let y = builder.real(Op::Unary(Unary::Relu), &[x]);
    let mut plan = builder.finish(&[y]);
    plan.steps[0].inputs[0] = Some(y);
    match device.load(std::sync::Arc::new(plan)) {
        Err(DeviceError::BadPlan(_)) => Ok(()),
        Err(other) => Err(format!("refused for another reason: {other}").into()),
        Ok(_) => Err("a step that reads its own output was loaded".into()),
    }
}

fn bad_inputs(device: &dyn Device) -> Result<(), Stop> {
    let mut builder = Builder::default();
    let batch = || Dim::Symbol("batch".to_string());
    let a = builder.input_of(DataType::F32, vec![batch(), Dim::Fixed(2)]);
    let b = builder.input_of(DataType::F32, vec![batch(), Dim::Fixed(2)]);
    let y = builder.real(Op::Binary(Binary::Add), &[a, b]);
    let program = load(device, builder.finish(&[y]))?;
    let of = |shape: &[usize]| reals(shape, vec![0.0; shape.iter().product()]);
    let bad = [
        ("too few", vec![of(&[1, 2])]),
        ("too many", vec![of(&[1, 2]), of(&[1, 2]), of(&[1, 2])]),
        ("of another type", vec![of(&[1, 2]), integers(&[1, 2])]),
        ("of another shape", vec![of(&[1, 3]), of(&[1, 3])]),
        ("of another rank", vec![of(&[2]), of(&[2])]),
        ("of two batches", vec![of(&[1, 2]), of(&[2, 2])]),
    ];
    for (what, inputs) in bad {
        match program.prepare(inputs) {
            Err(DeviceError::BadInput(_)) => {}
            Err(other) => return Err(format!("inputs {what} give '{other}'").into()),
            Ok(_) => return Err(format!("inputs {what} were taken").into()),
        }
    }
    let task = program.prepare(vec![of(&[3, 2]), of(&[3, 2])]);
    ensure(task.is_ok(), "good inputs were refused")
}

fn exact_integers(device: &dyn Device) -> Result<(), Stop> {
    let mut builder = Builder::default();
    let x = builder.input(DataType::I64, &[2]);
    let one = builder.constant(integers(&[1]));
    let y = builder.step(Op::Binary(Binary::Add), &[x, one], DataType::I64);
    let program = load(device, builder.finish(&[y]))?;
    let big = (1i64 << 53) + 2;
    let task = program.prepare(vec![integers(&[big, -big])]).map_err(|err| err.to_string())?;
    let outputs = TestQueue::open(device, 0, 1)?.outputs(task)?;
    let got = outputs.first().and_then(Tensor::to_vec::<i64>);
    ensure(
        got == Some(vec![big + 1, 1 - big]),
        format!("{got:?} instead of {big} + 1 and 1 - {big}"),
    )
}

fn odd_outputs(device: &dyn Device) -> Result<(), Stop> {
    let mut builder = Builder::default();
    let x = builder.input(DataType::F32, &[2]);
    let weight = builder.constant(reals(&[1], vec![4.0]));
    let y = builder.real(Op::Binary(Binary::Mul), &[x, weight]);
    let program = load(device, builder.finish(&[y, x, weight, y]))?;
    let task = program.prepare(vec![reals(&[2], vec![1.0, 2.0])]).map_err(|err| err.to_string())?;
    let outputs = TestQueue::open(device, 0, 1)?.outputs(task)?;
    let got: Vec<Option<Vec<f32>>> = outputs.iter().map(Tensor::to_vec).collect();
    let want = [vec![4.0, 8.0], vec![1.0, 2.0], vec![4.0], vec![4.0, 8.0]].map(Some);
    ensure(got == want, format!("{got:?} instead of {want:?}"))
}

fn chain(random: &mut Random) -> Example {
    let (x, scale) = (noise(random, &[5, 37]), noise(random, &[5, 37]));
    let mut builder = Builder::default();
    let input = builder.input(DataType::F32, &[5, 37]);
    let constant = builder.constant(scale.clone());
    let product = builder.real(Op::Binary(Binary::Mul), &[input, constant]);
    let bent = builder.real(Op::Unary(Unary::Tanh), &[product]);
    let sum = builder.real(Op::Binary(Binary::Add), &[bent, input]);
    let cut = builder.real(Op::Unary(Unary::Relu), &[sum]);
    let output = builder.real(Op::Unary(Unary::Sigmoid), &[cut]);
    let (xs, scales) = (Grid::new(&x), Grid::new(&scale));
    let want = Grid::fill(&[5, 37], |index| {
        let x = xs.at(index);
        let y = ((x * scales.at(index)).tanh() + x).max(0.0);
        1.0 / (1.0 + (-y).exp())
    });
    Example { plan: builder.finish(&[output]), inputs: vec![x], want }
}

fn broadcast(random: &mut Random) -> Example {
    let (a, b) = (noise(random, &[2, 1, 7]), noise(random, &[5, 1]));
    let mut builder = Builder::default();
    let inputs = [builder.input(DataType::F32, &[2, 1, 7]), builder.input(DataType::F32, &[5, 1])];
    let output = builder.real(Op::Binary(Binary::Add), &inputs);
    let (left, right) = (Grid::new(&a), Grid::new(&b));
    let want = Grid::fill(&[2, 5, 7], |i| left.at(&[i[0], 0, i[2]]) + right.at(&[i[1], 0]));
    Example { plan: builder.finish(&[output]), inputs: vec![a, b], want }
}

fn product(random: &mut Random) -> Example {
    let (a, b) = (noise(random, &[3, 17, 31]), noise(random, &[31, 13]));
    let mut builder = Builder::default();
    let input = builder.input(DataType::F32, &[3, 17, 31]);
    let weight = builder.constant(b.clone());
    let output = builder.real(Op::MatMul(MatMul::default()), &[input, weight]);
    let want = matmul(&Grid::new(&a), &Grid::new(&b));
    Example { plan: builder.finish(&[output]), inputs: vec![a], want }
}

fn window(kernel: usize, stride: usize, pad: usize) -> Window {
    Window {
        kernel: vec![kernel; 2],
        strides: vec![stride; 2],
        dilations: Vec::new(),
        padding: Padding::Explicit(vec![pad; 4]),
    }
}

fn convolve(random: &mut Random, channels: usize, stride: usize, groups: usize) -> Example {
    let (x, weight) =
        (noise(random, &[2, channels, 11, 9]), noise(random, &[6, channels / groups, 3, 3]));
    let bias = noise(random, &[6]);
    let mut builder = Builder::default();
    let operands = [
        builder.input(DataType::F32, &[2, channels, 11, 9]),
        builder.constant(weight.clone()),
        builder.constant(bias.clone()),
    ];
    let op = Conv { window: window(3, stride, 1), groups, activation: Activation::Relu };
    let output = builder.real(Op::Conv(op), &operands);
    let plain = conv(&Grid::new(&x), &Grid::new(&weight), &Grid::new(&bias), stride, 1, groups);
    let want = plain.map(|x| x.max(0.0));
    Example { plan: builder.finish(&[output]), inputs: vec![x], want }
}

fn convolution(random: &mut Random) -> Example {
    convolve(random, 4, 2, 1)
}

fn grouped_convolution(random: &mut Random) -> Example {
    convolve(random, 6, 1, 3)
}

fn pooling(random: &mut Random, kind: PoolKind, fold: fn(&[f64]) -> f64) -> Example {
    let x = noise(random, &[1, 3, 8, 7]);
    let mut builder = Builder::default();
    let input = builder.input(DataType::F32, &[1, 3, 8, 7]);
    let op = Pool { kind, window: window(3, 2, 1), ceil_mode: false };
    let output = builder.real(Op::Pool(op), &[input]);
    let want = pool(&Grid::new(&x), 3, 2, 1, fold);
    Example { plan: builder.finish(&[output]), inputs: vec![x], want }
}

fn max_pool(random: &mut Random) -> Example {
    pooling(random, PoolKind::Max, |pixels| pixels.iter().copied().fold(f64::MIN, f64::max))
}

fn mean_pool(random: &mut Random) -> Example {
    pooling(random, PoolKind::Average { count_include_pad: false }, |pixels| {
        pixels.iter().sum::<f64>() / pixels.len() as f64
    })
}

fn softmax(random: &mut Random) -> Example {
    let x = noise(random, &[4, 33]);
    let mut builder = Builder::default();
    let input = builder.input(DataType::F32, &[4, 33]);
    let op = Softmax { kind: SoftmaxKind::Softmax, axis: -1, flatten: false };
    let output = builder.real(Op::Softmax(op), &[input]);
    let want = rows(&Grid::new(&x), |row| {
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        row.iter().map(|x| x.exp() / sum).collect()
    });
    Example { plan: builder.finish(&[output]), inputs: vec![x], want }
}

fn layer_norm(random: &mut Random) -> Example {
    let (x, scale, bias) = (noise(random, &[6, 24]), noise(random, &[24]), noise(random, &[24]));
    let mut builder = Builder::default();
    let operands = [
        builder.input(DataType::F32, &[6, 24]),
        builder.constant(scale.clone()),
        builder.constant(bias.clone()),
    ];
    let output = builder.real(Op::LayerNorm { axis: -1, epsilon: 1e-5 }, &operands);
    let (scale, bias) = (Grid::new(&scale), Grid::new(&bias));
    let want = rows(&Grid::new(&x), |row| {
        let count = row.len() as f64;
        let mean = row.iter().sum::<f64>() / count;
        let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / count;
        let normal = |x: f64| (x - mean) / (variance + 1e-5).sqrt();
        row.iter().enumerate().map(|(i, &x)| normal(x) * scale.data[i] + bias.data[i]).collect()
    });
    Example { plan: builder.finish(&[output]), inputs: vec![x], want }
}

fn concatenation(random: &mut Random) -> Example {
    let (a, b) = (noise(random, &[2, 3, 5]), noise(random, &[2, 4, 5]));
    let mut builder = Builder::default();
    let inputs =
        [builder.input(DataType::F32, &[2, 3, 5]), builder.input(DataType::F32, &[2, 4, 5])];
    let output = builder.real(Op::Concat { axis: 1 }, &inputs);
    let (left, right) = (Grid::new(&a), Grid::new(&b));
    let want = Grid::fill(&[2, 7, 5], |i| match i[1] {
        0..3 => left.at(i),
        far => right.at(&[i[0], far - 3, i[2]]),
    });
    Example { plan: builder.finish(&[output]), inputs: vec![a, b], want }
}

fn transposition(random: &mut Random) -> Example {
    let x = noise(random, &[3, 40, 50]);
    let mut builder = Builder::default();
    let input = builder.input(DataType::F32, &[3, 40, 50]);
    let output = builder.real(Op::Transpose { perm: Some(vec![2, 0, 1]) }, &[input]);
    let grid = Grid::new(&x);
    let want = Grid::fill(&[50, 3, 40], |i| grid.at(&[i[1], i[2], i[0]]));
    Example { plan: builder.finish(&[output]), inputs: vec![x], want }
}

fn mean(random: &mut Random) -> Example {
    let x = noise(random, &[2, 3, 6, 7]);
    let mut builder = Builder::default();
    let input = builder.input(DataType::F32, &[2, 3, 6, 7]);
    let axes = builder.constant(integers(&[2, -1]));
    let op = Reduce { kind: ReduceKind::Mean, keep_dims: true, noop_with_empty_axes: false };
    let output = builder.real(Op::Reduce(op), &[input, axes]);
    let grid = Grid::new(&x);
    let want = Grid::fill(&[2, 3, 1, 1], |i| {
        let pixels = (0..42).map(|p| grid.at(&[i[0], i[1], p / 7, p % 7]));
        pixels.sum::<f64>() / 42.0
    });
    Example { plan: builder.finish(&[output]), inputs: vec![x], want }
}

fn gather(random: &mut Random) -> Example {
    let table = noise(random, &[9, 4]);
    let indices: Vec<i64> = (0..6).map(|_| random.below(18) as i64 - 9).collect();
    let mut builder = Builder::default();
    let rows = builder.constant(table.clone());
    let input = builder.input(DataType::I64, &[6]);
    let output = builder.real(Op::Gather { axis: 0 }, &[rows, input]);
    let grid = Grid::new(&table);
    let want = Grid::fill(&[6, 4], |i| grid.at(&[indices[i[0]].rem_euclid(9) as usize, i[1]]));
    Example { plan: builder.finish(&[output]), inputs: vec![integers(&indices)], want }
}
