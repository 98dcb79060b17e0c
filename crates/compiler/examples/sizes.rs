//! Lowers an ONNX model for a GPU at many sizes, without a GPU, and shows what a size that was
//! never seen costs: the time to lower it, and the kernels that no earlier size used.
//!
//! `sizes [--symbol NAME=MIN..MAX]... [--count N] [--seed N] [--keep N] [--summary] [--digest]
//! FILE...`
//!
//! Sizes are drawn without repetition as long as there are others. `--summary` prints one line for
//! each file instead of one for each size; `--digest` adds a digest of every plan, which two
//! versions of the compiler may be compared by; `--keep` keeps as many plans as a device would, for
//! the memory that a long run takes.

use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
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

/// What is asked for on the command line.
struct Options {
    ranges: Vec<(String, usize, usize)>,
    count: usize,
    seed: u64,
    keep: usize,
    summary: bool,
    digest: bool,
}

fn main() -> Result<(), String> {
    let mut options =
        Options { ranges: Vec::new(), count: 50, seed: 1, keep: 0, summary: false, digest: false };
    let mut files = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut next = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--symbol" => options.ranges.push(range(&next()?)?),
            "--count" => options.count = number(&next()?)?,
            "--seed" => options.seed = number(&next()?)? as u64,
            "--keep" => options.keep = number(&next()?)?,
            "--summary" => options.summary = true,
            "--digest" => options.digest = true,
            option if option.starts_with("--") => return Err(format!("{option} is no option")),
            _ => files.push(argument),
        }
    }
    files.iter().try_for_each(|file| survey(file, &options))
}

fn number(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| format!("'{text}' is not a number"))
}

/// `NAME=SIZE` or `NAME=MIN..MAX`.
fn range(text: &str) -> Result<(String, usize, usize), String> {
    let bad = || format!("'{text}' is not NAME=SIZE or NAME=MIN..MAX");
    let (name, sizes) = text.split_once('=').ok_or_else(bad)?;
    let (low, high) = sizes.split_once("..").unwrap_or((sizes, sizes));
    let (low, high) = (number(low).map_err(|_| bad())?, number(high).map_err(|_| bad())?);
    if low > high {
        return Err(bad());
    }
    Ok((name.to_string(), low, high))
}

fn survey(file: &str, options: &Options) -> Result<(), String> {
    let plan =
        compiler::compile_onnx_file(Path::new(file), &Limits::default(), Some(&CpuEvaluator))
            .map_err(|err| err.to_string())?;
    let symbols = symbols(&plan);
    let target = GpuTarget { capability: 90, multiprocessors: 132, precision: Precision::F16 };
    let compiler = GpuCompiler::new(Some(Arc::new(CpuEvaluator)));
    let template = compiler.template(&plan, &target).ok_or("the plan is broken")?;
    let (mut selected, mut all) = (HashSet::new(), HashSet::new());
    let mut draw = Draw::new(&symbols, options);
    let (mut kept, mut took, mut memory) = (VecDeque::new(), Vec::new(), Vec::new());
    for number in 0..options.count {
        let sizes = draw.next();
        let start = Instant::now();
        let gpu = template
            .lower_with(&sizes, LaunchChoices::Fastest)
            .map_err(|errors| format!("{sizes:?}: {errors:?}"))?;
        let millis = start.elapsed().as_secs_f64() * 1e3;
        took.push(millis);
        let (new, unseen) = new_kernels(&gpu, &mut selected, &mut all);
        if !options.summary {
            let digest = if options.digest { digest(&gpu) } else { String::new() };
            println!(
                "{number:4} {sizes:?}: {millis:.2} ms, {} steps, {new} of {} kernels new, \
                 {unseen} variants new{digest}",
                gpu.steps.len(),
                selected.len(),
            );
        }
        kept.push_back(gpu);
        kept.drain(..kept.len().saturating_sub(options.keep));
        if number + 1 == options.count.div_ceil(10) || number + 1 == options.count {
            memory.push(resident_mib());
        }
    }
    println!("{file}: {} kernels selected, {} variants in all", selected.len(), all.len());
    println!("{file}: {}, resident MiB {memory:.1?} after a tenth and all", summary(took));
    Ok(())
}

/// Draws sizes, new ones as long as there are any.
struct Draw<'a> {
    symbols: &'a [String],
    options: &'a Options,
    random: base::random::Random,
    drawn: HashSet<Vec<usize>>,
}

impl<'a> Draw<'a> {
    fn new(symbols: &'a [String], options: &'a Options) -> Draw<'a> {
        let random = base::random::Random::new(options.seed);
        Draw { symbols, options, random, drawn: HashSet::new() }
    }

    fn next(&mut self) -> Vec<(String, usize)> {
        const TRIES: usize = 100;
        for _ in 0..TRIES {
            let sizes = self.any();
            if self.drawn.insert(sizes.iter().map(|(_, size)| *size).collect()) {
                return sizes;
            }
        }
        self.any()
    }

    fn any(&mut self) -> Vec<(String, usize)> {
        let ranges = &self.options.ranges;
        let mut size = |symbol: &String| {
            let range = ranges.iter().find(|(name, ..)| name == symbol);
            let (low, high) = range.map_or((1, 1), |(_, low, high)| (*low, *high));
            low + self.random.below((high - low + 1) as u64) as usize
        };
        self.symbols.iter().map(|symbol| (symbol.clone(), size(symbol))).collect()
    }
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

/// Median, 99th percentile and maximum; the first sizes, which fill caches, counted apart.
fn summary(mut took: Vec<f64>) -> String {
    let first = took.first().copied().unwrap_or_default();
    took.sort_by(f64::total_cmp);
    let at = |share: f64| took.get(((took.len() as f64 * share) as usize).min(took.len() - 1));
    let [median, p99, max] = [0.5, 0.99, 1.0].map(|share| at(share).copied().unwrap_or_default());
    format!(
        "{} sizes in ms: first {first:.3}, median {median:.3}, p99 {p99:.3}, max {max:.3}",
        took.len()
    )
}

/// Memory of the process that is in use, where the system tells.
fn resident_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok());
    kilobytes.unwrap_or(0.0) / 1024.0
}

/// Every field of a plan as one number; what packs a weight is known by its key.
fn digest(gpu: &GpuPlan) -> String {
    let mut hasher = DefaultHasher::new();
    format!("{gpu:?}").hash(&mut hasher);
    format!(", {:016x}", hasher.finish())
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
