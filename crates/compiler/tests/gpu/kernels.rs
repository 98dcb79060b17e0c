//! Every tensor-core kernel compiles for the supported GPUs, with the registers of the committed
//! table.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

use cuda::EntryFacts;
use model::LaunchPlan;
use model::gpu::Kernel;
use model::op::{Activation, Conv, GlobalPool, MatMul, Op, Padding, Window};

use crate::compiled::{Compiled, compiler_for};
use crate::lower_for;
use crate::models::{self, Builder};

/// Layers of many sizes: between them and the batch sizes below, every tile shape suits some layer.
pub(crate) fn layers() -> LaunchPlan {
    let mut b = Builder::default();
    let mut outputs = Vec::new();
    for (channels, edge) in [(64, 56), (256, 14), (512, 7), (128, 28)] {
        let x = b.input(&[channels, edge, edge]);
        for (to, kernel) in
            [(channels, 3), (channels, 1), (channels * 4, 1), (32, 3), (channels, 5)]
        {
            outputs.push(b.conv(x, [channels, edge, edge], to, kernel, 1));
        }
        outputs.push(b.conv(x, [channels, edge, edge], channels, 3, channels));
        outputs.push(b.conv(x, [channels, edge, edge], channels, 5, channels));
        outputs.push(strided_depthwise(&mut b, x, channels, edge));
        outputs.push(dilated(&mut b, x, channels, edge));
        outputs.push(b.step(Op::GlobalPool(GlobalPool::Average), &[Some(x)], &[channels, 1, 1]));
    }
    let image = b.input(&[3, 112, 112]);
    outputs.push(b.conv(image, [3, 112, 112], 64, 3, 1));
    for width in [256, 768, 1024, 2048] {
        let x = b.input(&[width]);
        let (weight, bias) = (b.constant(&[width, 1000]), b.constant(&[1000]));
        let op = Op::MatMul(MatMul::default());
        outputs.push(b.step(op, &[Some(x), Some(weight), Some(bias)], &[1000]));
        let (scale, shift) = (b.constant(&[width]), b.constant(&[width]));
        let op = Op::LayerNorm { axis: -1, epsilon: 1e-5 };
        outputs.push(b.step(op, &[Some(x), Some(scale), Some(shift)], &[width]));
    }
    b.plan.outputs = outputs;
    b.plan.plan_lifetimes();
    b.plan.check().unwrap();
    b.plan
}

fn strided_depthwise(
    b: &mut Builder,
    x: model::ValueId,
    channels: usize,
    edge: usize,
) -> model::ValueId {
    let weight = b.constant(&[channels, 1, 3, 3]);
    let padding = Padding::Explicit(vec![1; 4]);
    let window = Window { kernel: vec![3, 3], strides: vec![2, 2], dilations: vec![], padding };
    let op = Op::Conv(Conv { window, groups: channels, activation: Activation::None });
    b.step(op, &[Some(x), Some(weight)], &[channels, edge.div_ceil(2), edge.div_ceil(2)])
}

fn dilated(b: &mut Builder, x: model::ValueId, channels: usize, edge: usize) -> model::ValueId {
    let weight = b.constant(&[channels, channels, 3, 3]);
    let padding = Padding::Explicit(vec![2; 4]);
    let window = Window { kernel: vec![3, 3], strides: vec![], dilations: vec![2, 2], padding };
    let op = Op::Conv(Conv { window, groups: 1, activation: Activation::Silu });
    b.step(op, &[Some(x), Some(weight)], &[channels, edge, edge])
}

/// The kernels with fixed text; tests that run on the host compile the generated ones.
fn kernels(capability: u32) -> Vec<Kernel> {
    let plans = [layers(), models::dense(), models::odd(), models::encoder()];
    let mut kernels = BTreeMap::new();
    for plan in &plans {
        for batch in [1, 8, 32] {
            for kernel in lower_for(plan, batch, capability).kernels {
                if !kernel.expression.contains("Function") {
                    kernels.insert(kernel.expression.clone(), kernel);
                }
            }
        }
    }
    kernels.into_values().collect()
}

#[test]
fn the_layers_use_every_tile_shape() {
    let shape = |kernel: &Kernel| {
        let inside = kernel.expression.split("ConvConfig<").nth(1)?;
        Some(inside.split(", tiles").next()?.to_string())
    };
    let shapes: BTreeSet<String> = kernels(90).iter().filter_map(shape).collect();
    let missing = compiler::gpu::tile::shapes().into_iter().filter(|shape| !shapes.contains(shape));
    assert_eq!(missing.collect::<Vec<_>>(), Vec::<String>::new());
}

/// Each with both maps of its input. Only capability 9.0 has the instructions.
#[test]
fn the_layers_use_every_hopper_shape_on_hopper_only() {
    let hopper = |capability| -> BTreeSet<String> {
        let parameters = |kernel: &Kernel| {
            let inside = kernel.expression.split("HopperConfig<").nth(1)?;
            // The last one is the activation.
            Some(inside.trim_end_matches('>').rsplit_once(", ")?.0.to_string())
        };
        kernels(capability).iter().filter_map(parameters).collect()
    };
    let both = |shape: String| [format!("{shape}, false"), format!("{shape}, true")];
    let want: BTreeSet<String> =
        compiler::gpu::conv::hopper::shapes().into_iter().flat_map(both).collect();
    assert_eq!(hopper(90), want);
    assert_eq!(hopper(80), BTreeSet::new());
    assert_eq!(hopper(100), BTreeSet::new());
}

/// `ATOLL_BLESS=1` rewrites the table.
#[test]
fn kernels_compile_and_need_the_registers_in_the_table() {
    let mut table = String::from("capability entry registers spilled kernel\n");
    let compiled = Compiled::open("registers");
    for capability in [80, 90] {
        let Some(report) = compiler_for(capability) else { return };
        let all = [kernels(capability), cuda::builtin_kernels()].concat();
        let all: BTreeMap<&str, &Kernel> =
            all.iter().map(|kernel| (kernel.expression.as_str(), kernel)).collect();
        let kernels: Vec<&Kernel> = all.values().copied().collect();
        for (expression, facts) in all.keys().zip(compiled.facts(&report, &kernels)) {
            let facts = facts.unwrap_or_else(|err| panic!("{expression}: {err}"));
            for EntryFacts { entry, registers, spilled_bytes } in facts {
                let hopper = expression.contains("HopperConv");
                assert!(!hopper || spilled_bytes == 0, "{entry} of {expression} spills");
                let _ = writeln!(
                    table,
                    "{capability} {entry} {registers} {spilled_bytes} {expression}"
                );
            }
        }
    }
    compiled.record();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/registers.txt");
    if std::env::var_os("ATOLL_BLESS").is_some() {
        std::fs::write(&path, &table).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == table, "{} differs; ATOLL_BLESS=1 rewrites it", path.display());
}
