//! Small models, built by hand.

use model::op::{Activation, Binary, Conv, MatMul, Op, Padding, Pool, PoolKind, Unary, Window};
use model::{DataType, Dim, LaunchPlan, Step, Tensor, ValueId, ValueInfo};

/// Builds launch plans: the batch is symbolic, all other sizes are numbers.
#[derive(Default)]
pub struct Builder {
    pub plan: LaunchPlan,
    random: u64,
}

impl Builder {
    pub fn value(&mut self, shape: Vec<Dim>, dtype: DataType) -> ValueId {
        let id = ValueId(self.plan.values.len() as u32);
        self.plan.values.push(ValueInfo { name: format!("v{}", id.0), dtype, shape: Some(shape) });
        id
    }

    pub fn activation(&mut self, sizes: &[usize]) -> ValueId {
        let batch = Dim::Symbol("batch".to_string());
        let shape = std::iter::once(batch).chain(sizes.iter().map(|size| Dim::Fixed(*size)));
        self.value(shape.collect(), DataType::F32)
    }

    pub fn input(&mut self, sizes: &[usize]) -> ValueId {
        let id = self.activation(sizes);
        self.plan.inputs.push(id);
        id
    }

    pub fn constant(&mut self, shape: &[usize]) -> ValueId {
        let mut next = || {
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (self.random >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|_| next()).collect();
        let dims = shape.iter().map(|size| Dim::Fixed(*size)).collect();
        let id = self.value(dims, DataType::F32);
        self.plan.constants.push((id, Tensor::from_vec(shape.to_vec(), values).unwrap()));
        id
    }

    pub fn step(&mut self, op: Op, inputs: &[Option<ValueId>], sizes: &[usize]) -> ValueId {
        let output = self.activation(sizes);
        let name = format!("s{}", self.plan.steps.len());
        let (inputs, outputs) = (inputs.to_vec(), vec![Some(output)]);
        self.plan.steps.push(Step { name, op, inputs, outputs, last_uses: vec![] });
        output
    }

    pub fn conv(
        &mut self,
        x: ValueId,
        from: [usize; 3],
        to: usize,
        edge: usize,
        groups: usize,
    ) -> ValueId {
        let weight = self.constant(&[to, from[0] / groups, edge, edge]);
        let bias = self.constant(&[to]);
        let padding = Padding::Explicit(vec![edge / 2; 4]);
        let window = Window { kernel: vec![edge; 2], strides: vec![], dilations: vec![], padding };
        let op = Op::Conv(Conv { window, groups, activation: Activation::Relu });
        self.step(op, &[Some(x), Some(weight), Some(bias)], &[to, from[1], from[2]])
    }

    pub fn finish(mut self, output: ValueId) -> LaunchPlan {
        self.plan.outputs = vec![output];
        self.plan.plan_lifetimes();
        self.plan.check().unwrap();
        self.plan
    }
}

/// Three layers that concatenate all previous outputs, as in DenseNet.
pub fn dense() -> LaunchPlan {
    let mut b = Builder::default();
    let image = b.input(&[3, 12, 12]);
    let mut parts = vec![b.conv(image, [3, 12, 12], 16, 3, 1)];
    let mut channels = 16;
    let mut whole = parts[0];
    for _ in 0..3 {
        let (scale, shift) = (b.constant(&[channels]), b.constant(&[channels]));
        let op = Op::ScaleShift { activation: Activation::Relu };
        let normal = b.step(op, &[Some(whole), Some(scale), Some(shift)], &[channels, 12, 12]);
        let narrow = b.conv(normal, [channels, 12, 12], 32, 1, 1);
        parts.push(b.conv(narrow, [32, 12, 12], 8, 3, 1));
        channels += 8;
        let inputs: Vec<Option<ValueId>> = parts.iter().copied().map(Some).collect();
        whole = b.step(Op::Concat { axis: 1 }, &inputs, &[channels, 12, 12]);
    }
    b.finish(whole)
}

/// Fewer pixels and more channels in each stage, as in image classification: the last products are
/// split at small batches.
pub fn stages() -> LaunchPlan {
    let mut b = Builder::default();
    let mut x = b.input(&[8, 112, 112]);
    let (mut channels, mut side) = (8, 112);
    for to in [64, 128, 256, 512, 512] {
        for _ in 0..2 {
            x = b.conv(x, [channels, side, side], to, 3, 1);
            channels = to;
        }
        let padding = Padding::Explicit(vec![]);
        let window = Window { kernel: vec![2, 2], strides: vec![2, 2], dilations: vec![], padding };
        let op = Op::Pool(Pool { kind: PoolKind::Max, window, ceil_mode: false });
        side /= 2;
        x = b.step(op, &[Some(x)], &[channels, side, side]);
    }
    b.finish(x)
}

/// Odd channels, depthwise filters, pooling, and a chain of element-wise operators with a branch.
pub fn odd() -> LaunchPlan {
    let mut b = Builder::default();
    let image = b.input(&[5, 9, 9]);
    let x = b.conv(image, [5, 9, 9], 20, 3, 1);
    let x = b.conv(x, [20, 9, 9], 24, 1, 1);
    let x = b.conv(x, [24, 9, 9], 24, 3, 24);
    let padding = Padding::Explicit(vec![]);
    let window = Window { kernel: vec![3, 3], strides: vec![2, 2], dilations: vec![], padding };
    let kind = PoolKind::Max;
    let op = Op::Pool(Pool { kind, window, ceil_mode: false });
    let x = b.step(op, &[Some(x)], &[24, 4, 4]);
    let gate = b.step(Op::Unary(Unary::Sigmoid), &[Some(x)], &[24, 4, 4]);
    let scaled = b.step(Op::Binary(Binary::Mul), &[Some(x), Some(gate)], &[24, 4, 4]);
    let half = b.constant(&[1]);
    let x = b.step(Op::Binary(Binary::Add), &[Some(scaled), Some(half)], &[24, 4, 4]);
    let x = b.step(Op::Flatten { axis: 1 }, &[Some(x)], &[384]);
    let (weight, bias) = (b.constant(&[384, 10]), b.constant(&[10]));
    let op = Op::MatMul(MatMul::default());
    let x = b.step(op, &[Some(x), Some(weight), Some(bias)], &[10]);
    b.finish(x)
}

/// Self-attention with two heads: three products of one operand become one launch.
pub fn encoder() -> LaunchPlan {
    let mut b = Builder::default();
    let x = b.input(&[16, 128]);
    let mut heads = Vec::new();
    for _ in 0..3 {
        let (weight, bias) = (b.constant(&[128, 128]), b.constant(&[128]));
        let op = Op::MatMul(MatMul::default());
        let y = b.step(op, &[Some(x), Some(weight), Some(bias)], &[16, 128]);
        let shape = b.value(vec![Dim::Fixed(4)], DataType::I64);
        let sizes = Tensor::from_vec(vec![4], vec![0i64, 0, 2, 64]).unwrap();
        b.plan.constants.push((shape, sizes));
        let op = Op::Reshape { allow_zero: false };
        let y = b.step(op, &[Some(y), Some(shape)], &[16, 2, 64]);
        heads.push(b.step(
            Op::Transpose { perm: Some(vec![0, 2, 1, 3]) },
            &[Some(y)],
            &[2, 16, 64],
        ));
    }
    let inputs: Vec<Option<ValueId>> = heads.into_iter().map(Some).collect();
    let y = b.step(Op::Attention { scale: 0.125 }, &inputs, &[2, 16, 64]);
    let y = b.step(Op::Transpose { perm: Some(vec![0, 2, 1, 3]) }, &[Some(y)], &[16, 2, 64]);
    let shape = b.value(vec![Dim::Fixed(3)], DataType::I64);
    b.plan.constants.push((shape, Tensor::from_vec(vec![3], vec![0i64, 0, 128]).unwrap()));
    let y = b.step(Op::Reshape { allow_zero: false }, &[Some(y), Some(shape)], &[16, 128]);
    let (weight, bias) = (b.constant(&[128, 128]), b.constant(&[128]));
    let op = Op::MatMul(MatMul::default());
    let y = b.step(op, &[Some(y), Some(weight), Some(bias), Some(x)], &[16, 128]);
    let (scale, shift) = (b.constant(&[128]), b.constant(&[128]));
    let op = Op::LayerNorm { axis: -1, epsilon: 1e-5 };
    let y = b.step(op, &[Some(y), Some(scale), Some(shift)], &[16, 128]);
    b.finish(y)
}

/// Products with activations that need a step of their own.
pub fn hard() -> LaunchPlan {
    let mut b = Builder::default();
    let image = b.input(&[16, 9, 9]);
    let x = b.conv(image, [16, 9, 9], 32, 3, 1);
    let x = b.conv(x, [32, 9, 9], 32, 3, 32);
    let activations = [Activation::HardSwish, Activation::LeakyRelu { alpha: 0.1 }];
    for (step, new) in b.plan.steps.iter_mut().zip(activations) {
        if let Op::Conv(conv) = &mut step.op {
            conv.activation = new;
        }
    }
    b.finish(x)
}
