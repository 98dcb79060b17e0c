//! Lowers ONNX models for a GPU, without one, and shows what their steps must cost.
//!
//! `gpu_steps [--batch N] [--all] FILE...` prints, for every model, the number of steps, the sum
//! of their limits (bytes over bandwidth, operations over the rate of tensor cores, the least time
//! of a launch), the operations that miss the tensor cores, and the steps with most of either;
//! `--all` prints every step.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use compiler::gpu::GpuCompiler;
use device::KernelCompiler;
use graph::Limits;
use model::gpu::{GpuPlan, GpuStep, GpuTarget, Precision};
use model::op::Op;
use model::{Dim, LaunchPlan, Tensor};

const BYTES_PER_US: f64 = 4.3e6;
const FLOPS_PER_US: f64 = 790e6;
const LAUNCH_US: f64 = 1.6;

fn main() {
    let mut arguments = std::env::args().skip(1).peekable();
    let (mut batch, mut all) = (1, false);
    while let Some(option) = arguments.next_if(|argument| argument.starts_with("--")) {
        match option.as_str() {
            "--batch" => batch = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(1),
            "--all" => all = true,
            _ => return eprintln!("usage: gpu_steps [--batch N] [--all] FILE..."),
        }
    }
    for file in arguments {
        match lower(Path::new(&file), batch) {
            Ok(plan) => show(&file, &plan, all),
            Err(reason) => println!("{file}: {reason}"),
        }
    }
}

/// Folds constants with the CPU device's kernels.
struct CpuEvaluator;

impl graph::Evaluator for CpuEvaluator {
    fn evaluate(&self, op: &Op, inputs: &[Option<Tensor>], outputs: usize) -> Option<Vec<Tensor>> {
        cpu::evaluate(op, inputs, outputs)
    }
}

fn lower(path: &Path, batch: usize) -> Result<GpuPlan, String> {
    let plan = compiler::compile_onnx_file(path, &Limits::default(), Some(&CpuEvaluator))
        .map_err(|err| err.to_string())?;
    let sizes: Vec<_> = symbols(&plan).into_iter().map(|symbol| (symbol, batch)).collect();
    let target = GpuTarget { capability: 90, multiprocessors: 132, precision: Precision::F16 };
    let compiler = GpuCompiler::new(Some(Arc::new(CpuEvaluator)));
    compiler
        .lower(&plan, &sizes, &target)
        .map_err(|refused| refused.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))
}

fn symbols(plan: &LaunchPlan) -> BTreeSet<String> {
    let shapes = plan.inputs.iter().filter_map(|id| plan.values[id.index()].shape.as_ref());
    let dims = shapes.flatten().filter_map(|dim| match dim {
        Dim::Symbol(name) => Some(name.to_string()),
        _ => None,
    });
    dims.collect()
}

fn limit_us(step: &GpuStep) -> f64 {
    let (bytes, flops) = (step.bytes as f64 / BYTES_PER_US, step.flops as f64 / FLOPS_PER_US);
    bytes.max(flops).max(LAUNCH_US)
}

/// Whether a product or convolution runs without tensor cores.
fn misses_tensor_cores(plan: &GpuPlan, step: &GpuStep) -> bool {
    let kernel = &plan.kernels[step.choices[step.rt].kernel];
    kernel.source.contains("product.cuh")
}

fn show(file: &str, plan: &GpuPlan, all: bool) {
    let limit: f64 = plan.steps.iter().map(limit_us).sum();
    let missed = plan.steps.iter().filter(|step| misses_tensor_cores(plan, step));
    let (missed, missed_flops) =
        missed.fold((0, 0), |(count, flops), step| (count + 1, flops + step.flops));
    let flops: u64 = plan.steps.iter().map(|step| step.flops).sum();
    println!(
        "{file}: {} steps, limit {limit:.0} us, {:.1} GFLOP, without tensor cores {missed} steps \
         with {:.1} GFLOP",
        plan.steps.len(),
        flops as f64 / 1e9,
        missed_flops as f64 / 1e9
    );
    let mut steps: Vec<&GpuStep> = plan.steps.iter().collect();
    let weight = |step: &&GpuStep| {
        let slow = if misses_tensor_cores(plan, step) { 30.0 } else { 1.0 };
        limit_us(step).max(slow * step.flops as f64 / FLOPS_PER_US)
    };
    if !all {
        steps.sort_by(|a, b| weight(b).total_cmp(&weight(a)));
        steps.truncate(5);
    }
    for step in steps {
        let launch = &step.choices[step.rt];
        let kernel = &plan.kernels[launch.kernel].expression;
        println!(
            "  {:8.1} us {:18} {:12} {} [{}]",
            limit_us(step),
            step.op,
            launch.variant,
            &kernel[..kernel.len().min(40)],
            step.signature
        );
    }
}
