//! Every kind of kernel compiles for every architecture, in every precision, and fits its blocks.
//!
//! All tile shapes in half precision are compiled elsewhere, for two architectures (`kernels.rs`).
//! Here, one kernel stands for those that differ in numbers only, and each architecture compiles
//! one precision, so that the time is bounded. `ATOLL_ALL_KERNELS=1` compiles every tile shape in
//! every precision for every architecture, which takes minutes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use model::gpu::{GpuTarget, Kernel, Precision};
use model::{DataType, LaunchPlan};

use crate::compiled::{Compiled, compiler_for};
use crate::{kernels, lower_in, models, products, quantized};

const ARCHITECTURES: [(u32, Precision); 4] =
    [(80, Precision::TF32), (89, Precision::F16), (90, Precision::BF16), (100, Precision::F32)];
const PRECISIONS: [Precision; 4] =
    [Precision::F16, Precision::BF16, Precision::F32, Precision::TF32];

fn plans() -> Vec<LaunchPlan> {
    vec![
        kernels::layers(),
        models::dense(),
        models::odd(),
        models::encoder(),
        models::hard(),
        models::stages(),
        products::plan(1),
        products::plan(2),
        quantized::plan(DataType::U8),
        quantized::plan(DataType::I8),
    ]
}

/// What a kernel is without its numbers: its headers and its type. For a convolution on tensor
/// cores the numbers are its tile shape, and all of them count where `all_tiles`.
fn kind(kernel: &Kernel, all_tiles: bool) -> String {
    let headers: Vec<&str> = kernel.source.lines().filter(|line| line.starts_with('#')).collect();
    let expression = &kernel.expression;
    let tiles = expression.contains("ConvConfig<") || expression.contains("HopperConfig<");
    let keep = |c: &char| all_tiles && tiles || !c.is_ascii_digit();
    format!("{} {}", headers.join(" "), expression.chars().filter(keep).collect::<String>())
}

/// One kernel of every kind that plans for `capability` use; all in every precision, where `all`.
fn sample(capability: u32, precision: Precision, all: bool) -> BTreeMap<String, Kernel> {
    let one = [precision];
    let precisions = if all { &PRECISIONS[..] } else { &one };
    let mut sample = BTreeMap::new();
    for plan in plans() {
        for precision in precisions {
            for batch in [1, 8, 32] {
                for kernel in lower_in(&plan, batch, capability, *precision).kernels {
                    sample.entry(kind(&kernel, all)).or_insert(kernel);
                }
            }
        }
    }
    sample
}

#[test]
fn no_launch_exceeds_the_shared_memory_of_its_device() {
    for capability in [80, 86, 89, 90, 100, 120] {
        for plan in plans() {
            for precision in PRECISIONS {
                let target = GpuTarget { capability, multiprocessors: 132, precision };
                let gpu = lower_in(&plan, 32, capability, precision);
                let launches = gpu.steps.iter().flat_map(|step| &step.choices);
                for kernel in launches.map(|launch| &gpu.kernels[launch.kernel]) {
                    let (bytes, most) = (kernel.shared_bytes, target.block_shared_bytes());
                    assert!(bytes <= most, "{capability}: {bytes} in {}", kernel.expression);
                }
            }
        }
    }
}

/// Single precision in tf32 has no product without tensor cores but those that reading limits.
#[test]
fn tf32_puts_products_on_tensor_cores() {
    let mut rounded = 0;
    for seed in 0..10 {
        let gpu = lower_in(&products::plan(seed), 16, 90, Precision::TF32);
        for step in gpu.steps.iter().filter(|step| ["MatMul", "Gemm"].contains(&&*step.op)) {
            for choice in &step.choices {
                let kernel = &gpu.kernels[choice.kernel].expression;
                assert!(!kernel.contains("tiles::Product<"), "{}: {kernel}", step.signature);
                rounded += usize::from(kernel.contains("tiles::TensorFloat<"));
            }
        }
    }
    assert!(rounded >= 20, "{rounded}");
}

#[test]
fn every_kind_of_kernel_compiles_for_every_architecture() {
    let began = Instant::now();
    let (mut count, all) = (0, std::env::var_os("ATOLL_ALL_KERNELS").is_some());
    let compiled = Compiled::open("architectures");
    for (capability, precision) in ARCHITECTURES {
        let Some(report) = compiler_for(capability) else { return };
        let sample = sample(capability, precision, all);
        count += sample.len();
        let kernels: Vec<&Kernel> = sample.values().collect();
        let facts = kernels.iter().zip(compiled.facts(&report, &kernels));
        let error = |(kernel, facts): (&&Kernel, Result<_, String>)| {
            facts.err().map(|err| format!("{}: {err}", kernel.expression))
        };
        let errors: BTreeSet<String> = facts.filter_map(error).collect();
        assert_eq!(errors, BTreeSet::new(), "for {capability}");
    }
    compiled.record();
    println!("{count} kernels in {:.1} s", began.elapsed().as_secs_f64());
}
