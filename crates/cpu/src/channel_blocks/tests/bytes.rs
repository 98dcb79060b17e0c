//! Random networks of bytes in channel blocks against the same networks plain, and against plain
//! loops over their steps.

use std::collections::HashMap;

use super::*;
use crate::byte_steps::with_byte_steps;
use crate::kernel::bytes::elementwise::Quantum;

/// A network of quantized images that grows.
struct ByteDraft {
    draft: Draft,
    /// How each image is quantized.
    quanta: HashMap<ValueId, Quantum>,
    /// Whether steps of bytes compute exactly what their parts do.
    exact: bool,
}

impl ByteDraft {
    fn new(seed: u64) -> ByteDraft {
        ByteDraft { draft: Draft::new(seed), quanta: HashMap::new(), exact: true }
    }

    fn random(&mut self) -> &mut Random {
        &mut self.draft.random
    }

    fn chance(&mut self, of: u64) -> bool {
        self.random().below(of) == 0
    }

    fn typed(&mut self, shape: Vec<usize>, dtype: DataType) -> ValueId {
        let id = self.draft.value(shape);
        self.draft.plan.values[id.index()].dtype = dtype;
        id
    }

    fn fixed(&mut self, tensor: Tensor) -> ValueId {
        let id = self.typed(tensor.shape().to_vec(), tensor.dtype());
        self.draft.plan.constants.push((id, tensor));
        id
    }

    fn random_bytes(&mut self, shape: &[usize], signed: bool) -> Tensor {
        let count: usize = shape.iter().product();
        let bytes: Vec<u8> = (0..count).map(|_| self.random().below(256) as u8).collect();
        match signed {
            false => Tensor::from_vec(shape.to_vec(), bytes).unwrap(),
            true => {
                let bytes: Vec<i8> = bytes.into_iter().map(|byte| byte as i8).collect();
                Tensor::from_vec(shape.to_vec(), bytes).unwrap()
            }
        }
    }

    fn zero(&mut self, zero: i32, signed: bool) -> ValueId {
        self.fixed(match signed {
            true => Tensor::from_vec(vec![], vec![zero as i8]).unwrap(),
            false => Tensor::from_vec(vec![], vec![zero as u8]).unwrap(),
        })
    }

    fn scalar(&mut self, scale: f32) -> ValueId {
        self.fixed(Tensor::from_vec(vec![], vec![scale]).unwrap())
    }

    fn quantum(&mut self) -> Quantum {
        let signed = self.chance(3);
        let zero = self.random().below(256) as i32 - if signed { 128 } else { 0 };
        let scale = 0.005 + self.random().below(1000) as f32 * 1e-4;
        Quantum { scale, zero, signed }
    }

    fn image(&mut self, shape: Vec<usize>, quantum: Quantum) -> ValueId {
        let id = self.typed(shape, if quantum.signed { DataType::I8 } else { DataType::U8 });
        self.quanta.insert(id, quantum);
        id
    }

    fn push(&mut self, op: Op, inputs: Vec<Option<ValueId>>, output: ValueId) -> ValueId {
        let name = format!("s{}", self.draft.plan.steps.len());
        let outputs = vec![Some(output)];
        self.draft.plan.steps.push(Step { name, op, inputs, outputs, last_uses: vec![] });
        output
    }

    /// The numbers of an image.
    fn dequantized(&mut self, x: ValueId) -> ValueId {
        let Quantum { scale, zero, signed } = self.quanta[&x];
        let (scale, zero) = (self.scalar(scale), self.zero(zero, signed));
        let output = self.typed(self.draft.shape(x), DataType::F32);
        self.push(Op::DequantizeLinear { axis: 1 }, vec![Some(x), Some(scale), Some(zero)], output)
    }

    fn quantized(&mut self, x: ValueId, quantum: Quantum) -> ValueId {
        let Quantum { scale, zero, signed } = quantum;
        let dtype = if signed { DataType::I8 } else { DataType::U8 };
        let (scale, zero) = (self.scalar(scale), self.zero(zero, signed));
        let output = self.image(self.draft.shape(x), quantum);
        let inputs = vec![Some(x), Some(scale), Some(zero)];
        self.push(Op::QuantizeLinear { axis: 1, dtype }, inputs, output)
    }

    /// The groups and channels of a convolution of `inputs` channels.
    fn groups(&mut self, inputs: usize) -> (usize, usize) {
        match self.random().below(4) {
            0 => (inputs, inputs),
            1 if inputs.is_multiple_of(32) => (2, 32 * between(self.random(), 1, 2)),
            1 if inputs.is_multiple_of(2) => (2, 2 * between(self.random(), 1, 20)),
            _ => (1, self.draft.channels()),
        }
    }

    fn convolution(&mut self, x: ValueId) -> ValueId {
        let shape = self.draft.shape(x);
        let (mut window, mut extents) = self.draft.window(x, 3);
        if self.chance(12) && window.dilations.iter().all(|d| *d == 1) {
            // A stride that tiles are not made for.
            let last = window.strides.len() - 1;
            window.strides[last] = 3;
            let Padding::Explicit(pads) = &window.padding else { unreachable!() };
            let padded = shape[2 + last] + pads[last] + pads[2 * last + 1];
            extents[last] = (padded - window.kernel[last]) / 3 + 1;
        }
        let (groups, outputs) = self.groups(shape[1]);
        let mut weight = vec![outputs, shape[1] / groups];
        weight.extend(&window.kernel);
        let depth: usize = weight[1..].iter().product();
        let signed = !self.chance(3);
        let middle = if signed { 0 } else { 128 };
        let zero = if self.chance(5) { middle + 3 } else { middle };
        let mut out = vec![shape[0], outputs];
        out.extend(extents);
        let (x_quantum, y_quantum) = (self.quanta[&x], self.quantum());
        let spread = 40.0 * y_quantum.scale / (x_quantum.scale * 5000.0 * (depth as f32).sqrt());
        let count = if self.chance(2) { outputs } else { 1 };
        let scales: Vec<f32> =
            (0..count).map(|_| spread * (0.5 + self.random().below(100) as f32 / 100.0)).collect();
        let conv = Conv { window, groups, activation: Activation::None };
        let bytes = self.random_bytes(&weight, signed);
        let weight = self.fixed(bytes);
        let scale_shape = if count == 1 { vec![] } else { vec![count] };
        let scales = self.fixed(Tensor::from_vec(scale_shape, scales).unwrap());
        let weight_zero = self.zero(zero, signed);
        if self.chance(4) {
            return self.convolution_of_numbers(x, conv, [weight, scales, weight_zero], out);
        }
        let (x_scale, x_zero) =
            (self.scalar(x_quantum.scale), self.zero(x_quantum.zero, x_quantum.signed));
        let (y_scale, y_zero) =
            (self.scalar(y_quantum.scale), self.zero(y_quantum.zero, y_quantum.signed));
        let bias = self.chance(2).then(|| {
            let bias: Vec<i32> =
                (0..outputs).map(|_| self.random().below(20_000) as i32 - 10_000).collect();
            self.fixed(Tensor::from_vec(vec![outputs], bias).unwrap())
        });
        let mut inputs: Vec<Option<ValueId>> =
            [x, x_scale, x_zero, weight, scales, weight_zero, y_scale, y_zero].map(Some).to_vec();
        inputs.push(bias);
        let output = self.image(out, y_quantum);
        self.push(Op::QLinearConv(conv), inputs, output)
    }

    /// A convolution between a dequantizer and a quantizer.
    fn convolution_of_numbers(
        &mut self,
        x: ValueId,
        conv: Conv,
        [weight, scales, zero]: [ValueId; 3],
        out: Vec<usize>,
    ) -> ValueId {
        self.exact = false;
        let numbers = self.dequantized(x);
        let one = self.draft.shape(scales).is_empty();
        let zero = (one || self.draft.shape(zero) == self.draft.shape(scales)).then_some(zero);
        let output = self.typed(self.draft.shape(weight), DataType::F32);
        let inputs = vec![Some(weight), Some(scales), zero];
        let weight = self.push(Op::DequantizeLinear { axis: 0 }, inputs, output);
        let bias = numbers_of(self.random(), out[1]);
        let bias = self.fixed(bias);
        let activation = self.draft.activation();
        let output = self.typed(out, DataType::F32);
        let inputs = vec![Some(numbers), Some(weight), Some(bias)];
        let y = self.push(Op::Conv(Conv { activation, ..conv }), inputs, output);
        let quantum = self.quantum();
        self.quantized(y, quantum)
    }

    fn pooled(&mut self, x: ValueId) -> ValueId {
        let shape = self.draft.shape(x);
        let quantum = self.quanta[&x];
        if self.chance(4) {
            self.exact = false;
            let numbers = self.dequantized(x);
            let mut out = shape[..2].to_vec();
            out.resize(shape.len(), 1);
            let output = self.typed(out, DataType::F32);
            let op = Op::GlobalPool(GlobalPool::Average);
            let mean = self.push(op, vec![Some(numbers)], output);
            let quantum = self.quantum();
            return self.quantized(mean, quantum);
        }
        let (window, extents) = self.draft.window(x, 3);
        let op = Op::Pool(Pool { kind: PoolKind::Max, window, ceil_mode: false });
        let mut out = shape[..2].to_vec();
        out.extend(extents);
        if self.chance(2) {
            let output = self.image(out, quantum);
            return self.push(op, vec![Some(x)], output);
        }
        let numbers = self.dequantized(x);
        let output = self.typed(out, DataType::F32);
        let largest = self.push(op, vec![Some(numbers)], output);
        self.quantized(largest, quantum)
    }

    /// An image that is there already, of `shape` or with one element a channel.
    fn like(&mut self, shape: &[usize]) -> Option<ValueId> {
        let gate = |other: &[usize]| other[..2] == shape[..2] && other[2..].iter().all(|n| *n == 1);
        let fits = |id: &ValueId| {
            let other = &self.draft.shapes[id.index()];
            other.len() == shape.len() && (other == shape || gate(other))
        };
        let mut fitting: Vec<ValueId> = self.quanta.keys().copied().filter(fits).collect();
        fitting.sort_by_key(|id| id.index());
        let at = self.random().below(fitting.len().max(1) as u64) as usize;
        fitting.get(at).copied()
    }

    fn combined(&mut self, x: ValueId) -> ValueId {
        let shape = self.draft.shape(x);
        let other = self.like(&shape).unwrap_or(x);
        let (a, b) = if self.chance(2) { (x, other) } else { (other, x) };
        let (a, b) = (self.dequantized(a), self.dequantized(b));
        let function = if self.chance(3) { Binary::Mul } else { Binary::Add };
        let output = self.typed(shape.clone(), DataType::F32);
        let mut y = self.push(Op::Binary(function), vec![Some(a), Some(b)], output);
        if self.chance(2) {
            let output = self.typed(shape, DataType::F32);
            y = self.push(Op::Unary(Unary::Relu), vec![Some(y)], output);
        }
        let quantum = self.quantum();
        self.quantized(y, quantum)
    }

    fn function(&mut self, x: ValueId) -> ValueId {
        let numbers = self.dequantized(x);
        let output = self.typed(self.draft.shape(x), DataType::F32);
        let y = self.push(Op::Unary(Unary::Sigmoid), vec![Some(numbers)], output);
        self.quantized(y, Quantum { scale: 0.005, zero: 10, signed: false })
    }

    /// The image backwards along its last dimension: no step over blocks.
    fn other(&mut self, x: ValueId) -> ValueId {
        let shape = self.draft.shape(x);
        let mut order: Vec<usize> = (0..shape.len()).collect();
        order.swap(0, shape.len() - 1);
        let turned = order.iter().map(|axis| shape[*axis]).collect();
        let quantum = self.quanta[&x];
        let op = Op::Transpose { perm: Some(order.clone()) };
        let output = self.image(turned, quantum);
        let turned = self.push(op.clone(), vec![Some(x)], output);
        let output = self.image(shape, quantum);
        self.push(op, vec![Some(turned)], output)
    }

    fn grow(&mut self, x: ValueId) -> ValueId {
        match self.random().below(10) {
            0 => self.pooled(x),
            1 | 2 => self.combined(x),
            3 => self.function(x),
            4 => self.other(x),
            _ => self.convolution(x),
        }
    }

    /// A network of some steps, its input, and whether its parts compute the same bytes.
    fn network(mut self) -> (LaunchPlan, Tensor, bool) {
        let channels = match self.chance(4) {
            true => between(self.random(), 1, 5),
            false => self.draft.channels(),
        };
        let mut shape = vec![between(self.random(), 1, 3), channels];
        let rank = self.draft.rank;
        let most = if rank == 5 { 6 } else { 21 };
        shape.extend((2..rank).map(|_| between(self.random(), 1, most)));
        let quantum = self.quantum();
        let given = self.random_bytes(&shape, quantum.signed);
        let mut at = self.image(shape, quantum);
        self.draft.plan.inputs = vec![at];
        for _ in 0..between(self.random(), 2, 9) {
            at = self.grow(at);
            if self.chance(6) {
                self.draft.plan.outputs.push(at);
            }
        }
        if !self.draft.plan.outputs.contains(&at) {
            self.draft.plan.outputs.push(at);
        }
        self.draft.plan.plan_lifetimes();
        (self.draft.plan, given, self.exact)
    }
}

fn numbers_of(random: &mut Random, count: usize) -> Tensor {
    super::numbers(random, &[count])
}

/// Outputs of the network without anything constant: no step of bytes is made of others.
fn by_plain_loops(mut plan: LaunchPlan, given: &Tensor) -> Vec<Tensor> {
    let mut all = vec![given.clone()];
    for (id, tensor) in std::mem::take(&mut plan.constants) {
        plan.inputs.push(id);
        plan.values[id.index()].shape = None;
        all.push(tensor);
    }
    plan.plan_lifetimes();
    let (_, byte_steps) = with_byte_steps(Arc::new(plan.clone()));
    assert!(byte_steps.is_empty());
    run_with(&Arc::new(plan), all, |_, _| ChannelBlocks::default()).unwrap()
}

#[test]
fn random_networks_of_bytes_in_blocks_equal_plain_ones() {
    let (mut in_blocks, mut exact) = (0, 0);
    for seed in 0..400 {
        let (plan, given, is_exact) = ByteDraft::new(seed).network();
        let (rewritten, byte_steps) = with_byte_steps(Arc::new(plan.clone()));
        in_blocks += ChannelBlocks::find(&rewritten, &byte_steps).count();
        let shared = Arc::new(plan.clone());
        let plain = run(&shared, &given, |_, _| ChannelBlocks::default()).unwrap();
        let blocked = run(&shared, &given, ChannelBlocks::find).unwrap();
        let same = |a: &[Tensor], b: &[Tensor], what: &str| {
            for (a, b) in a.iter().zip(b) {
                assert_eq!((a.dtype(), a.shape()), (b.dtype(), b.shape()), "seed {seed}, {what}");
                assert!(a.raw() == b.raw(), "seed {seed}, {what}: {a:?} {b:?}");
            }
        };
        same(&plain, &blocked, "plain");
        if is_exact {
            exact += 1;
            same(&by_plain_loops(plan, &given), &blocked, "plain loops");
        }
    }
    assert!(in_blocks > 800 && exact > 100, "{in_blocks} steps in blocks, {exact} exact networks");
}

#[test]
fn images_of_bytes_of_other_shapes_are_refused_as_plain_ones_are() {
    for seed in 1000..1100 {
        let (mut plan, given, _) = ByteDraft::new(seed).network();
        let mut random = Random::new(seed);
        let mut shape = given.shape().to_vec();
        let axis = random.below(shape.len() as u64) as usize;
        shape[axis] = between(&mut random, 0, 20);
        plan.values[plan.inputs[0].index()].shape = None;
        let plan = Arc::new(plan);
        let mut draft = ByteDraft::new(seed);
        let given = draft.random_bytes(&shape, given.dtype() == DataType::I8);
        let plain = run(&plan, &given, |_, _| ChannelBlocks::default());
        let blocked = run(&plan, &given, ChannelBlocks::find);
        assert_eq!(plain.is_ok(), blocked.is_ok(), "seed {seed}: {plain:?} {blocked:?}");
    }
}
