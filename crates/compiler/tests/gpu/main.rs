//! Models lowered to GPU kernels: plans are valid, share weights between sizes, and match golden
//! files.

mod architectures;
mod compiled;
mod kernels;
mod layouts;
#[path = "../../../cli/tests/support/lowering_device.rs"]
mod lowering_device;
mod models;
mod products;
mod quantized;
mod recurrent;
mod sections;
mod shapes;
mod templates;

use std::collections::HashMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use compiler::gpu::{GpuCompiler, check};
use device::KernelCompiler;
use model::LaunchPlan;
use model::gpu::{GpuPlan, GpuTarget, Precision};
use models::{dense, encoder, odd, stages};
use shapes::CpuEvaluator;

fn lower(plan: &LaunchPlan, batch: usize) -> GpuPlan {
    lower_for(plan, batch, 90)
}

fn lower_for(plan: &LaunchPlan, batch: usize, capability: u32) -> GpuPlan {
    lower_in(plan, batch, capability, Precision::F16)
}

fn lower_in(plan: &LaunchPlan, batch: usize, capability: u32, precision: Precision) -> GpuPlan {
    let target = GpuTarget { capability, multiprocessors: 132, precision };
    let sizes = [("batch".to_string(), batch)];
    GpuCompiler::default().lower(plan, &sizes, &target).unwrap()
}

fn plans() -> Vec<(&'static str, LaunchPlan)> {
    vec![("dense", dense()), ("odd", odd()), ("encoder", encoder())]
}

#[test]
fn plans_are_valid_at_every_size() {
    for (name, plan) in plans() {
        for batch in [1, 2, 7, 32] {
            assert_eq!(check::faults(&lower(&plan, batch)), Vec::<String>::new(), "{name} {batch}");
        }
    }
}

#[test]
fn six_workers_take_little_more_memory_than_one() {
    let plan = stages();
    let weights: u64 = lower(&plan, 1).weights.iter().map(|weight| weight.bytes).sum();
    let run = |batch| cuda::run_bytes(&lower(&plan, batch));
    let (six, one) = ([1, 1, 2, 4, 8, 16].map(run).iter().sum::<u64>(), run(32));
    // Small batches split products through the workspace, the largest one does not.
    assert!(
        (weights + six) * 100 <= (weights + one) * 125,
        "weights {weights}, six {six}, one {one}"
    );
    let all = lower(&plan, 4);
    assert!(all.workspace_bytes > run(4), "unused variants would cost more than a run");
}

#[test]
fn the_checker_finds_defects() {
    let sound = lower(&dense(), 2);
    let break_it = |change: fn(&mut GpuPlan)| {
        let mut plan = sound.clone();
        change(&mut plan);
        check::faults(&plan)
    };
    assert!(!break_it(|plan| plan.steps.swap(1, 2)).is_empty(), "order");
    assert!(!break_it(|plan| plan.arena_bytes = 256).is_empty(), "arena");
    assert!(!break_it(|plan| drop(plan.steps.pop())).is_empty(), "missing output");
    assert!(!break_it(|plan| plan.steps[2].choices[0].args.truncate(8)).is_empty(), "arguments");
    assert!(!break_it(|plan| plan.steps[2].choices.clear()).is_empty(), "no choice");
}

#[test]
fn weights_are_shared_between_sizes_and_have_their_declared_length() {
    for (name, plan) in plans() {
        let (one, many) = (lower(&plan, 1), lower(&plan, 32));
        let keys: HashMap<_, _> = one.weights.iter().map(|weight| (&weight.key, weight)).collect();
        assert_eq!(keys.len(), one.weights.len(), "{name}: a key twice");
        for weight in &many.weights {
            let bytes = (weight.pack.0)();
            assert_eq!(bytes.len() as u64, weight.bytes, "{name} {:?}", weight.key);
            assert_eq!((keys[&weight.key].pack.0)(), bytes, "{name} {:?}", weight.key);
        }
    }
}

#[test]
fn concatenations_cost_no_copy_and_sibling_products_one_launch() {
    let copies = |plan: &GpuPlan| plan.steps.iter().filter(|step| step.op == "Copy").count();
    // The conversions of the input and of the output.
    assert_eq!(copies(&lower(&dense(), 1)), 2);
    let products = lower(&encoder(), 1).steps.iter().filter(|step| step.op == "MatMul").count();
    assert_eq!(products, 2);
}

/// An activation that product kernels do not support becomes a step of its own, and the product
/// stays on the tensor cores.
#[test]
fn an_activation_without_a_kernel_is_a_step_of_its_own() {
    let plan = models::hard();
    for batch in [1, 8] {
        let gpu = lower(&plan, batch);
        assert_eq!(check::faults(&gpu), Vec::<String>::new());
        let ops: Vec<&str> = gpu.steps.iter().map(|step| step.op.as_str()).collect();
        assert_eq!(ops, ["Copy", "Conv", "Elementwise", "Depthwise", "Elementwise"]);
        let kernel = &gpu.kernels[gpu.steps[1].choices[0].kernel];
        assert!(kernel.expression.contains("ConvConfig"), "{}", kernel.expression);
        assert!(gpu.steps[2].signature.contains("HardSwish"), "{}", gpu.steps[2].signature);
        assert!(gpu.steps[4].signature.contains("LeakyRelu"), "{}", gpu.steps[4].signature);
    }
}

/// Without measurements: large problems start with a kernel of Hopper's own instructions, small
/// ones have none, and no other GPU gets one.
#[test]
fn large_products_use_hoppers_instructions_on_hopper() {
    let plan = kernels::layers();
    let is_hopper = |launch: &model::gpu::Launch| !launch.maps.is_empty();
    for batch in [1, 8, 32] {
        let gpu = lower(&plan, batch);
        assert_eq!(check::faults(&gpu), Vec::<String>::new(), "{batch}");
        for step in gpu.steps.iter().filter(|step| step.op == "Conv") {
            let first = is_hopper(&step.choices[step.rt]);
            let any = step.choices.iter().any(is_hopper);
            assert!(first || step.flops < 10_000_000_000, "{batch}: {}", step.signature);
            assert!(!any || step.flops >= 200_000_000, "{batch}: {}", step.signature);
            assert!(step.choices.iter().any(|launch| !is_hopper(launch)), "{}", step.signature);
        }
        for capability in [80, 89, 100] {
            let gpu = lower_for(&plan, batch, capability);
            let none = gpu.steps.iter().flat_map(|step| &step.choices).all(|l| !is_hopper(l));
            assert!(none, "capability {capability}");
        }
    }
    let large = lower(&plan, 32);
    assert!(
        large
            .steps
            .iter()
            .any(|step| step.choices.iter().any(|launch| { launch.rt_blocks != launch.tiles }))
    );
}

/// A summary for review: steps with their sizes and first variants.
fn listing(plan: &GpuPlan) -> String {
    let mut text = String::new();
    for step in &plan.steps {
        let launch = &step.choices[step.rt];
        let (variant, tiles) = (&launch.variant, launch.tiles);
        let _ = writeln!(text, "{:18} {variant:14} {tiles:4} {}", step.op, step.signature);
    }
    let _ = writeln!(text, "arena {} workspace {}", plan.arena_bytes, plan.workspace_bytes);
    for kernel in &plan.kernels {
        let _ = writeln!(text, "{}", kernel.expression);
        text.push_str(&kernel.source);
    }
    text
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(format!("{name}.txt"))
}

/// `ATOLL_BLESS=1` rewrites the golden files.
#[test]
fn listings_match_golden_files() {
    for (name, plan) in plans() {
        let text = listing(&lower(&plan, 2));
        let path = golden(name);
        if std::env::var_os("ATOLL_BLESS").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(committed == text, "{} differs; ATOLL_BLESS=1 rewrites it", path.display());
    }
}
