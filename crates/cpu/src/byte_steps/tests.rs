//! Plans with quantization against the same plans step by step.

use std::collections::HashMap;

use base::Random;
use device::Program;
use model::op::{Cast, Conv, Gemm, MatMul, Padding, Window};
use model::{ValueInfo, plan::Dim};

use super::*;
use crate::buffer_pool::BufferPool;
use crate::program::{CpuProgram, CpuTask};

/// A plan that grows.
#[derive(Default)]
struct Draft {
    plan: LaunchPlan,
    given: Vec<Tensor>,
}

impl Draft {
    fn value(&mut self, dtype: DataType, shape: Option<Vec<usize>>) -> ValueId {
        let shape = shape.map(|shape| shape.into_iter().map(Dim::Fixed).collect());
        self.plan.values.push(ValueInfo { name: String::new(), dtype, shape });
        ValueId(self.plan.values.len() as u32 - 1)
    }

    fn constant(&mut self, tensor: Tensor) -> ValueId {
        let id = self.value(tensor.dtype(), Some(tensor.shape().to_vec()));
        self.plan.constants.push((id, tensor));
        id
    }

    fn input(&mut self, tensor: Tensor) -> ValueId {
        let id = self.value(tensor.dtype(), None);
        self.plan.inputs.push(id);
        self.given.push(tensor);
        id
    }

    fn step(&mut self, op: Op, inputs: &[ValueId], dtype: DataType) -> ValueId {
        self.steps(op, inputs, &[dtype])[0]
    }

    fn steps(&mut self, op: Op, inputs: &[ValueId], dtypes: &[DataType]) -> Vec<ValueId> {
        let shape = |index: usize| (dtypes.len() == 3 && index > 0).then(Vec::new);
        let outputs: Vec<ValueId> =
            dtypes.iter().enumerate().map(|(at, dtype)| self.value(*dtype, shape(at))).collect();
        self.plan.steps.push(Step {
            name: format!("s{}", self.plan.steps.len()),
            op,
            inputs: inputs.iter().copied().map(Some).collect(),
            outputs: outputs.iter().copied().map(Some).collect(),
            last_uses: vec![],
        });
        outputs
    }

    fn scalar(&mut self, scale: f32) -> ValueId {
        self.constant(Tensor::from_vec(vec![], vec![scale]).unwrap())
    }

    fn zero(&mut self, zero: i32, signed: bool) -> ValueId {
        self.constant(match signed {
            true => Tensor::from_vec(vec![], vec![zero as i8]).unwrap(),
            false => Tensor::from_vec(vec![], vec![zero as u8]).unwrap(),
        })
    }

    fn quantize(&mut self, x: ValueId, scale: f32, zero: i32, signed: bool) -> ValueId {
        let dtype = if signed { DataType::I8 } else { DataType::U8 };
        let parameters = [x, self.scalar(scale), self.zero(zero, signed)];
        self.step(Op::QuantizeLinear { axis: 1, dtype }, &parameters, dtype)
    }

    fn dequantize(&mut self, x: ValueId, scale: f32, zero: i32, signed: bool) -> ValueId {
        let parameters = [x, self.scalar(scale), self.zero(zero, signed)];
        self.step(Op::DequantizeLinear { axis: 1 }, &parameters, DataType::F32)
    }

    /// Signed weights with a scale for each index of `axis`.
    fn weights(&mut self, random: &mut Random, shape: &[usize], axis: usize) -> ValueId {
        let count: usize = shape.iter().product();
        let bytes: Vec<i8> = (0..count).map(|_| random.below(256) as u8 as i8).collect();
        let scales: Vec<f32> =
            (0..shape[axis]).map(|_| 0.002 + random.below(100) as f32 * 1e-4).collect();
        let bytes = self.constant(Tensor::from_vec(shape.to_vec(), bytes).unwrap());
        let scales = self.constant(Tensor::from_vec(vec![shape[axis]], scales).unwrap());
        self.step(Op::DequantizeLinear { axis: axis as i64 }, &[bytes, scales], DataType::F32)
    }

    fn floats(&mut self, random: &mut Random, shape: &[usize]) -> ValueId {
        let tensor = numbers(random, shape);
        self.constant(tensor)
    }

    /// Outputs of the plan as it is loaded, and of its steps one by one; and how many steps of
    /// bytes the loaded one has.
    fn run(mut self, output: ValueId) -> (Tensor, Tensor, usize) {
        self.plan.outputs = vec![output];
        self.plan.plan_lifetimes();
        assert_eq!(self.plan.check(), Ok(()));
        let mut values: HashMap<ValueId, Tensor> = self.plan.constants.iter().cloned().collect();
        values.extend(self.plan.inputs.iter().copied().zip(self.given.iter().cloned()));
        for step in &self.plan.steps {
            let operands: Vec<Option<Tensor>> =
                step.inputs.iter().map(|id| id.map(|id| values[&id].clone())).collect();
            let results =
                crate::evaluate::evaluate(&step.op, &operands, step.outputs.len()).unwrap();
            for (id, result) in step.outputs.iter().flatten().zip(results) {
                values.insert(*id, result);
            }
        }
        let plan = Arc::new(self.plan);
        let (rewritten, byte_steps) = with_byte_steps(plan.clone());
        assert_eq!(rewritten.check(), Ok(()));
        assert_eq!(rewritten.steps.len(), plan.steps.len(), "steps keep their places");
        let program = CpuProgram::load(plan.clone(), crate::buffer::memory()).unwrap();
        // Others read the plan of a program: it must be a valid one.
        assert!(Arc::ptr_eq(program.plan(), &plan));
        let mut task = program.prepare(self.given).unwrap();
        let pool = BufferPool::new();
        let own = task.as_any_mut().downcast_mut::<CpuTask>().unwrap();
        for _ in 0..rewritten.steps.len() {
            own.run_step(&pool).unwrap();
        }
        let got = task.into_outputs().unwrap().remove(0);
        (got, values.remove(&output).unwrap(), byte_steps.len())
    }
}

fn numbers(random: &mut Random, shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    let data: Vec<f32> = (0..count).map(|_| 4.0 * random.symmetric_f32()).collect();
    Tensor::from_vec(shape.to_vec(), data).unwrap()
}

/// Whether bytes differ by one at most, and rarely.
fn bytes_agree(got: &Tensor, wanted: &Tensor) {
    assert_eq!((got.dtype(), got.shape()), (wanted.dtype(), wanted.shape()));
    let (a, b) = (scope::integers(got).unwrap(), scope::integers(wanted).unwrap());
    let differences: Vec<i32> = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).collect();
    assert!(differences.iter().all(|difference| *difference <= 1), "{a:?} {b:?}");
    let flips = differences.iter().filter(|difference| **difference > 0).count();
    assert!(flips * 50 <= a.len(), "{flips} of {} differ", a.len());
    assert!(b.iter().any(|x| *x != b[0]), "all are {}", b[0]);
}

fn numbers_agree(got: &Tensor, wanted: &Tensor) {
    assert_eq!(got.shape(), wanted.shape());
    let (a, b) = (got.to_vec::<f32>().unwrap(), wanted.to_vec::<f32>().unwrap());
    let largest = b.iter().fold(0f32, |most, x| most.max(x.abs()));
    for (a, b) in a.iter().zip(&b) {
        assert!((a - b).abs() <= 1e-5 * largest, "{a} is not {b}");
    }
}

fn conv_of(kernel: usize, groups: usize, activation: Activation) -> Conv {
    let window = Window {
        kernel: vec![kernel; 2],
        strides: vec![1, 1],
        dilations: vec![1, 1],
        padding: Padding::Explicit(vec![kernel / 2; 4]),
    };
    Conv { window, groups, activation }
}

#[test]
fn convolutions_between_quantizers_are_steps_of_bytes() {
    let mut random = Random::new(17);
    for signed in [false, true] {
        for (kernel, groups, activation) in [
            (3, 1, Activation::Relu),
            (1, 1, Activation::None),
            (3, 2, Activation::Clip { low: -1.0, high: 2.0 }),
            (3, 8, Activation::Relu),
        ] {
            let mut draft = Draft::default();
            let x = draft.input(numbers(&mut random, &[2, 8, 9, 11]));
            let (scale, zero) = if signed { (0.04, 3) } else { (0.03, 121) };
            let q = draft.quantize(x, scale, zero, signed);
            let x = draft.dequantize(q, scale, zero, signed);
            let outputs = if groups == 8 { 8 } else { 10 };
            let shape = [outputs, 8 / groups, kernel, kernel];
            let weight = match groups {
                8 => draft.floats(&mut random, &shape),
                _ => draft.weights(&mut random, &shape, 0),
            };
            let bias = draft.floats(&mut random, &[outputs]);
            let conv = Op::Conv(conv_of(kernel, groups, activation));
            let y = draft.step(conv, &[x, weight, bias], DataType::F32);
            let scale = if activation == Activation::None { 0.4 } else { 0.3 };
            let y = draft.quantize(y, scale, if signed { -9 } else { 40 }, signed);
            let (got, wanted, count) = draft.run(y);
            assert_eq!(count, 1);
            bytes_agree(&got, &wanted);
        }
    }
}

#[test]
fn matrix_products_between_quantizers_are_steps_of_bytes() {
    let mut random = Random::new(18);
    for transposed in [false, true] {
        for quantized in [false, true] {
            let mut draft = Draft::default();
            let x = draft.input(numbers(&mut random, &[7, 33]));
            let q = draft.quantize(x, 0.03, 130, false);
            let x = draft.dequantize(q, 0.03, 130, false);
            let shape = if transposed { [21, 33] } else { [33, 21] };
            let weight = draft.weights(&mut random, &shape, usize::from(!transposed));
            let bias = draft.floats(&mut random, &[21]);
            let op = match quantized {
                true => Op::Gemm(Gemm {
                    transpose_a: false,
                    transpose_b: transposed,
                    alpha: 0.5,
                    beta: 2.0,
                    activation: Activation::None,
                }),
                false => Op::MatMul(MatMul {
                    transpose_b: transposed,
                    activation: Activation::Gelu { tanh: false },
                    ..MatMul::default()
                }),
            };
            let y = draft.step(op, &[x, weight, bias], DataType::F32);
            let y = if quantized { draft.quantize(y, 0.2, 128, false) } else { y };
            let (got, wanted, count) = draft.run(y);
            assert_eq!(count, 1);
            match quantized {
                true => bytes_agree(&got, &wanted),
                false => numbers_agree(&got, &wanted),
            }
        }
    }
}

#[test]
fn scaled_sums_are_one_step() {
    let mut random = Random::new(19);
    let mut draft = Draft::default();
    let x = draft.input(numbers(&mut random, &[2, 5, 40]));
    let parts =
        draft.steps(Op::DynamicQuantizeLinear, &[x], &[DataType::U8, DataType::F32, DataType::U8]);
    let bytes: Vec<i8> = (0..40 * 18).map(|_| random.below(256) as u8 as i8).collect();
    let weight = draft.constant(Tensor::from_vec(vec![40, 18], bytes).unwrap());
    let zero = draft.constant(Tensor::from_vec(vec![], vec![2i8]).unwrap());
    let operands = [parts[0], weight, parts[2], zero];
    let sums = draft.step(Op::MatMulInteger, &operands, DataType::I32);
    let sums = draft.step(Op::Cast(Cast { to: DataType::F32 }), &[sums], DataType::F32);
    let own = draft.scalar(0.01);
    let scale = draft.steps(Op::Binary(Binary::Mul), &[parts[1], own], &[DataType::F32])[0];
    draft.plan.values[scale.index()].shape = Some(vec![]);
    let y = draft.step(Op::Binary(Binary::Mul), &[sums, scale], DataType::F32);
    let bias = draft.floats(&mut random, &[18]);
    let y = draft.step(Op::Binary(Binary::Add), &[bias, y], DataType::F32);
    let y = draft.step(Op::Unary(Unary::Tanh), &[y], DataType::F32);
    let (got, wanted, count) = draft.run(y);
    assert_eq!(count, 1);
    numbers_agree(&got, &wanted);
}

/// The zero point of an image, and with it what surrounds the image, is known when the step runs.
#[test]
fn convolutions_of_images_that_are_quantized_when_they_arrive_are_one_step() {
    let mut random = Random::new(20);
    for (kernel, groups, channels) in [(3, 1, 6), (1, 1, 6), (3, 6, 6), (3, 2, 8)] {
        let mut draft = Draft::default();
        let image = numbers(&mut random, &[2, channels, 9, 7]).to_vec::<f32>().unwrap();
        let image = image.into_iter().map(|x| x + 1.0).collect();
        let x = draft.input(Tensor::from_vec(vec![2, channels, 9, 7], image).unwrap());
        let types = [DataType::U8, DataType::F32, DataType::U8];
        let parts = draft.steps(Op::DynamicQuantizeLinear, &[x], &types);
        let shape = vec![24, channels / groups, kernel, kernel];
        let count = shape.iter().product();
        let bytes: Vec<u8> = (0..count).map(|_| random.below(256) as u8).collect();
        let weight = draft.constant(Tensor::from_vec(shape, bytes).unwrap());
        let zero = draft.constant(Tensor::from_vec(vec![], vec![117u8]).unwrap());
        let operands = [parts[0], weight, parts[2], zero];
        let op = Op::ConvInteger(conv_of(kernel, groups, Activation::None));
        let sums = draft.step(op, &operands, DataType::I32);
        let sums = draft.step(Op::Cast(Cast { to: DataType::F32 }), &[sums], DataType::F32);
        let own = draft.scalar(0.01);
        let scale = draft.steps(Op::Binary(Binary::Mul), &[parts[1], own], &[DataType::F32])[0];
        draft.plan.values[scale.index()].shape = Some(vec![]);
        let y = draft.step(Op::Binary(Binary::Mul), &[sums, scale], DataType::F32);
        let bias = draft.floats(&mut random, &[24, 1, 1]);
        let y = draft.step(Op::Binary(Binary::Add), &[y, bias], DataType::F32);
        let (got, wanted, count) = draft.run(y);
        assert_eq!(count, 1);
        numbers_agree(&got, &wanted);
    }
}

#[test]
fn functions_between_quantizers_are_steps_of_bytes() {
    let mut random = Random::new(20);
    for (function, relu) in [(Binary::Add, true), (Binary::Mul, false)] {
        let mut draft = Draft::default();
        let x = draft.input(numbers(&mut random, &[3, 4, 50]));
        let y = draft.input(numbers(&mut random, &[4, 50]));
        let (x, y) = (draft.quantize(x, 0.04, 1, true), draft.quantize(y, 0.03, 125, false));
        let (x, y) = (draft.dequantize(x, 0.04, 1, true), draft.dequantize(y, 0.03, 125, false));
        let mut z = draft.step(Op::Binary(function), &[x, y], DataType::F32);
        if relu {
            z = draft.step(Op::Unary(Unary::Relu), &[z], DataType::F32);
        }
        let z = draft.quantize(z, 0.1, 12, false);
        let z = draft.dequantize(z, 0.1, 12, false);
        let z = draft.step(Op::Unary(Unary::Sigmoid), &[z], DataType::F32);
        let z = draft.step(Op::Unary(Unary::Neg), &[z], DataType::F32);
        let z = draft.quantize(z, 0.005, 100, true);
        let (got, wanted, count) = draft.run(z);
        assert_eq!(count, 2);
        assert_eq!(got.raw(), wanted.raw());
    }
}

#[test]
fn values_that_others_read_are_still_computed() {
    let mut random = Random::new(21);
    let mut draft = Draft::default();
    let x = draft.input(numbers(&mut random, &[4, 16]));
    let q = draft.quantize(x, 0.03, 120, false);
    let x = draft.dequantize(q, 0.03, 120, false);
    let weight = draft.weights(&mut random, &[16, 16], 1);
    let op = Op::MatMul(MatMul::default());
    let y = draft.step(op, &[x, weight], DataType::F32);
    let quantized = draft.quantize(y, 0.2, 128, false);
    let quantized = draft.dequantize(quantized, 0.2, 128, false);
    // The number itself, its bytes and the operand are all read.
    let sum = draft.step(Op::Binary(Binary::Add), &[y, quantized], DataType::F32);
    let sum = draft.step(Op::Binary(Binary::Add), &[sum, x], DataType::F32);
    let (got, wanted, count) = draft.run(sum);
    assert_eq!(count, 1);
    let (a, b) = (got.to_vec::<f32>().unwrap(), wanted.to_vec::<f32>().unwrap());
    // A byte may have been rounded to the other side.
    assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= 0.21), "{a:?} {b:?}");
}
