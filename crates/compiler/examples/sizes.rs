//! Lowers an ONNX model for a GPU at many sizes, without a GPU, and shows what a size that was
//! never seen costs: the time to lower it, and the kernels that no earlier size used.
//!
//! `sizes [--symbol NAME=MIN..MAX]... [--fixed NAME=SIZE]... [--count N] FILE...`

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use compiler::gpu::GpuCompiler;
use device::{KernelCompiler, LaunchChoices};
use graph::Limits;
use model::gpu::{GpuPlan, GpuTarget, Kernel, Precision};
use model::op::Op;
use model::{Dim, LaunchPlan, Tensor};

/// Folds constants with the CPU device's kernels.
struct CpuEvaluator;

impl graph::Evaluator for CpuEvaluator {
    fn evaluate(&self, op: &Op, inputs: &[Option<Tensor>], outputs: usize) -> Option<Vec<Tensor>> {
        cpu::evaluate(op, inputs, outputs)
    }
}

fn main() -> Result<(), String> {
    let mut arguments = std::env::args().skip(1);
    let (mut ranges, mut count, mut files) = (Vec::new(), 50, Vec::new());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--symbol" => ranges.push(range(&arguments.next().unwrap_or_default())?),
            "--count" => count = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(count),
            _ => files.push(argument),
        }
    }
    files.iter().try_for_each(|file| survey(file, &ranges, count))
}

/// `NAME=SIZE` or `NAME=MIN..MAX`.
fn range(text: &str) -> Result<(String, usize, usize), String> {
    let bad = || format!("'{text}' is not NAME=SIZE or NAME=MIN..MAX");
    let (name, sizes) = text.split_once('=').ok_or_else(bad)?;
    let (low, high) = sizes.split_once("..").unwrap_or((sizes, sizes));
    let number = |text: &str| text.parse::<usize>().map_err(|_| bad());
    Ok((name.to_string(), number(low)?, number(high)?))
}

fn survey(file: &str, ranges: &[(String, usize, usize)], count: usize) -> Result<(), String> {
    let plan =
        compiler::compile_onnx_file(Path::new(file), &Limits::default(), Some(&CpuEvaluator))
            .map_err(|err| err.to_string())?;
    let symbols = symbols(&plan);
    let target = GpuTarget { capability: 90, multiprocessors: 132, precision: Precision::F16 };
    let compiler = GpuCompiler::new(Some(Arc::new(CpuEvaluator)));
    let (mut selected, mut all) = (HashSet::new(), HashSet::new());
    let mut random = base::random::Random::new(1);
    for number in 0..count {
        let sizes: Vec<(String, usize)> = symbols
            .iter()
            .map(|symbol| {
                let range = ranges.iter().find(|(name, ..)| name == symbol);
                let (low, high) = range.map_or((1, 1), |(_, low, high)| (*low, *high));
                (symbol.clone(), low + random.below((high - low + 1) as u64) as usize)
            })
            .collect();
        let start = Instant::now();
        let gpu = compiler
            .lower_with(&plan, &sizes, &target, LaunchChoices::Fastest)
            .map_err(|errors| format!("{errors:?}"))?;
        let millis = start.elapsed().as_secs_f64() * 1e3;
        let (new, unseen) = new_kernels(&gpu, &mut selected, &mut all);
        println!(
            "{number:4} {sizes:?}: {millis:.2} ms, {} steps, {new} of {} kernels new, {unseen} \
             variants new",
            gpu.steps.len(),
            selected.len(),
        );
    }
    println!("{file}: {} kernels selected, {} variants in all", selected.len(), all.len());
    Ok(())
}

fn symbols(plan: &LaunchPlan) -> Vec<String> {
    let mut names = Vec::new();
    for dims in plan.inputs.iter().filter_map(|id| plan.value(*id).shape.as_ref()) {
        for dim in dims {
            if let Dim::Symbol(name) = dim
                && !names.contains(name)
            {
                names.push(name.clone());
            }
        }
    }
    names
}

/// How many kernels and how many variants of `gpu` no earlier plan had.
fn new_kernels(
    gpu: &GpuPlan,
    selected: &mut HashSet<Kernel>,
    all: &mut HashSet<Kernel>,
) -> (usize, usize) {
    let (before, variants) = (selected.len(), all.len());
    for step in &gpu.steps {
        for choice in [step.rt, step.be] {
            selected.insert(gpu.kernels[step.choices[choice].kernel].clone());
        }
    }
    all.extend(gpu.kernels.iter().cloned());
    (selected.len() - before, all.len() - variants)
}
