//! No product in half precision runs without tensor cores.

use compiler::gpu::check;
use model::op::{Activation, Conv, ConvTranspose, Gemm, MatMul, Op, Padding, Window};
use model::{LaunchPlan, ValueId};

use crate::lower;
use crate::models::Builder;

/// Numbers that are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) as usize % limit
    }

    fn between(&mut self, least: usize, most: usize) -> usize {
        least + self.below(most + 1 - least)
    }

    /// Small, odd or a multiple of eight.
    fn size(&mut self) -> usize {
        [1, 3, 8, 17, 40, 64, 100, 197][self.below(8)]
    }
}

/// An activation whose dimensions after the batch have `sizes`, with a random order in memory.
fn operand(b: &mut Builder, random: &mut Random, sizes: &[usize]) -> ValueId {
    let rank = sizes.len() + 1;
    let mut perm: Vec<usize> = (1..rank).collect();
    for at in (1..perm.len()).rev() {
        perm.swap(at, random.below(at + 1));
    }
    // The stored dimension `perm[i] - 1` becomes dimension `i`.
    let mut stored = vec![0; sizes.len()];
    for (axis, from) in perm.iter().enumerate() {
        stored[from - 1] = sizes[axis];
    }
    let x = b.input(&stored);
    let perm: Vec<usize> = [0].into_iter().chain(perm).collect();
    b.step(Op::Transpose { perm: Some(perm) }, &[Some(x)], sizes)
}

fn matmul(b: &mut Builder, random: &mut Random) -> ValueId {
    let (h, m, k, n) = (random.between(1, 3), random.size(), random.size(), random.size());
    let (transpose_a, transpose_b) = (random.below(3) == 0, random.below(3) == 0);
    let spec = MatMul { transpose_a, transpose_b, ..MatMul::default() };
    let turned = |turn: bool, x: usize, y: usize| if turn { [y, x] } else { [x, y] };
    let left = turned(transpose_a, m, k);
    let a = operand(b, random, &[h, left[0], left[1]]);
    let right = turned(transpose_b, k, n);
    let other = match random.below(3) {
        0 => b.constant(&right),
        1 => b.constant(&[h, right[0], right[1]]),
        _ => operand(b, random, &[h, right[0], right[1]]),
    };
    let bias = if random.below(2) == 0 { Some(b.constant(&[n])) } else { None };
    let inputs = [Some(a), Some(other), bias];
    let count = if bias.is_some() { 3 } else { 2 };
    b.step(Op::MatMul(spec), &inputs[..count], &[h, m, n])
}

fn gemm(b: &mut Builder, random: &mut Random) -> ValueId {
    let (k, n) = (random.size(), random.size());
    let a = b.input(&[k]);
    let spec = Gemm {
        transpose_a: false,
        transpose_b: true,
        alpha: 0.5,
        beta: 2.0,
        activation: Activation::None,
    };
    let (weight, bias) = (b.constant(&[n, k]), b.constant(&[n]));
    b.step(Op::Gemm(spec), &[Some(a), Some(weight), Some(bias)], &[n])
}

fn einsum(b: &mut Builder, random: &mut Random) -> ValueId {
    let (h, q, k, d) = (random.between(1, 4), random.size(), random.size(), random.size());
    let (x, y) = (operand(b, random, &[q, h, d]), operand(b, random, &[k, h, d]));
    let equation = "bqhd,bkhd->bhqk".to_string();
    b.step(Op::Einsum { equation }, &[Some(x), Some(y)], &[h, q, k])
}

struct Layer {
    groups: usize,
    channels: usize,
    columns: usize,
    spatial: Vec<usize>,
    window: Window,
}

fn layer(random: &mut Random) -> Layer {
    let rank = random.between(1, 3);
    let groups = [1, 1, 2, 5, 32][random.below(5)];
    let (channels, columns) = (random.between(2, 20), random.between(1, 20));
    let mut list = |least, most| (0..rank).map(|_| random.between(least, most)).collect();
    let (kernel, strides, dilations): (Vec<usize>, Vec<usize>, Vec<usize>) =
        (list(1, 4), list(1, 3), list(1, 2));
    let spatial: Vec<usize> = list(9, 14);
    let begin: Vec<usize> = list(0, 1);
    let padding = Padding::Explicit([begin, list(0, 1)].concat());
    Layer {
        groups,
        channels,
        columns,
        spatial,
        window: Window { kernel, strides, dilations, padding },
    }
}

/// The extent of `axis` after a convolution.
fn extent(layer: &Layer, axis: usize, transposed: bool) -> usize {
    let Window { kernel, strides, dilations, padding } = &layer.window;
    let Padding::Explicit(pads) = padding else { unreachable!() };
    let pads = pads[axis] + pads[axis + kernel.len()];
    let reach = (kernel[axis] - 1) * dilations[axis] + 1;
    if transposed {
        return (layer.spatial[axis] - 1) * strides[axis] + reach - pads.min(reach - 1);
    }
    (layer.spatial[axis] + pads - reach) / strides[axis] + 1
}

fn conv(b: &mut Builder, random: &mut Random, transposed: bool) -> ValueId {
    let mut layer = layer(random);
    let Layer { groups, channels, columns, .. } = layer;
    if transposed {
        // Padding never exceeds the window.
        layer.window.padding = Padding::Explicit(vec![0; 2 * layer.spatial.len()]);
    }
    let x = operand(b, random, &[&[groups * channels], &layer.spatial[..]].concat());
    let from = if transposed { [groups * channels, columns] } else { [groups * columns, channels] };
    let weight = b.constant(&[&from, &layer.window.kernel[..]].concat());
    let bias = b.constant(&[groups * columns]);
    let spatial = (0..layer.spatial.len()).map(|axis| extent(&layer, axis, transposed));
    let sizes: Vec<usize> = [groups * columns].into_iter().chain(spatial).collect();
    let window = layer.window;
    let op = if transposed {
        Op::ConvTranspose(ConvTranspose {
            window,
            groups,
            output_padding: vec![],
            output_shape: None,
        })
    } else {
        Op::Conv(Conv { window, groups, activation: Activation::HardSwish })
    };
    b.step(op, &[Some(x), Some(weight), Some(bias)], &sizes)
}

pub(crate) fn plan(seed: u64) -> LaunchPlan {
    let (mut b, mut random) = (Builder::default(), Random(seed));
    let mut outputs = Vec::new();
    for _ in 0..3 {
        outputs.push(matmul(&mut b, &mut random));
        outputs.push(conv(&mut b, &mut random, false));
        outputs.push(conv(&mut b, &mut random, true));
        outputs.push(einsum(&mut b, &mut random));
        outputs.push(gemm(&mut b, &mut random));
    }
    b.plan.outputs = outputs;
    b.plan.plan_lifetimes();
    b.plan.check().unwrap();
    b.plan
}

#[test]
fn every_product_in_half_precision_runs_on_tensor_cores() {
    let mut products = 0;
    for seed in 0..40 {
        let plan = plan(seed);
        for batch in [1, 3] {
            let gpu = lower(&plan, batch);
            assert_eq!(check::faults(&gpu), Vec::<String>::new(), "seed {seed}");
            for step in &gpu.steps {
                let is_product =
                    ["MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose"].contains(&&*step.op);
                for choice in step.choices.iter().filter(|_| is_product) {
                    let kernel = &gpu.kernels[choice.kernel].expression;
                    let tensor = kernel.contains("Tensor<") || kernel.contains("tiles::Conv<");
                    assert!(tensor, "seed {seed}: {} has {kernel}", step.signature);
                }
                products += usize::from(is_product);
            }
        }
    }
    assert!(products >= 40 * 2 * 15, "{products} products");
}

/// Tokens before heads in memory, as exported transformers have them: rows in another order.
fn permuted(b: &mut Builder) -> ValueId {
    let x = b.input(&[197, 12, 64]);
    let perm = Some(vec![0, 2, 1, 3]);
    b.step(Op::Transpose { perm }, &[Some(x)], &[12, 197, 64])
}

#[test]
fn products_of_permuted_activations_need_no_copy() {
    let mut b = Builder::default();
    let x = permuted(&mut b);
    let (first, second) = (b.constant(&[64, 40]), b.constant(&[40, 24]));
    let product = Op::MatMul(MatMul::default());
    let hidden = b.step(product.clone(), &[Some(x), Some(first)], &[12, 197, 40]);
    let y = b.step(product, &[Some(hidden), Some(second)], &[12, 197, 24]);
    let gpu = lower(&b.finish(y), 4);
    let ops: Vec<&str> = gpu.steps.iter().map(|step| step.op.as_str()).collect();
    assert_eq!(ops, ["Copy", "MatMul", "MatMul", "Copy"]);
    for step in &gpu.steps[1..3] {
        let kernel = &gpu.kernels[step.choices[0].kernel].expression;
        assert!(kernel.contains("tiles::Conv<"), "{kernel}");
    }
}

#[test]
fn a_residual_in_another_order_is_copied() {
    let mut b = Builder::default();
    let x = permuted(&mut b);
    let (weight, other) = (b.constant(&[64, 64]), b.input(&[12, 197, 64]));
    let inputs = [Some(x), Some(weight), None, Some(other)];
    let y = b.step(Op::MatMul(MatMul::default()), &inputs, &[12, 197, 64]);
    let gpu = lower(&b.finish(y), 4);
    assert_eq!(check::faults(&gpu), Vec::<String>::new());
    let product = gpu.steps.iter().find(|step| step.op == "MatMul").unwrap();
    let kernel = &gpu.kernels[product.choices[0].kernel].expression;
    assert!(kernel.contains("tiles::Conv<"), "{kernel}");
}
