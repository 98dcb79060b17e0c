//! `atoll profile`: how long a model's steps take on a GPU, in every variant, and which to take.

use cuda::{CudaDevice, PlanProfile, ProfileOptions, StepProfile};
use indicatif::{ProgressBar, ProgressStyle};
use model::{Dim, LaunchPlan};
use serde::Serialize;

use crate::args::ProfileArgs;
use crate::failure::Failure;
use crate::{binding, engine};

/// Bytes a second and operations a second that bound a step, measured on an H200 (see `crates/compiler/kernels/README.md`).
const H200: Limits = Limits { bytes_per_us: 4.3e6, flops_per_us: 790e6, launch_us: 1.6 };

struct Limits {
    bytes_per_us: f64,
    flops_per_us: f64,
    launch_us: f64,
}

#[derive(Debug, Serialize)]
struct ProfileReport {
    model: String,
    device: String,
    driver: i32,
    compiler: (i32, i32),
    plans: Vec<PlanReport>,
}

#[derive(Debug, Serialize)]
struct PlanReport {
    batch: usize,
    sizes: Vec<(String, usize)>,
    latency_us: LatencyReport,
    /// The same graph without dependent launches.
    plain_latency_us: LatencyReport,
    weight_bytes: u64,
    run_bytes: u64,
    compile_seconds: f64,
    steps: Vec<StepReport>,
}

#[derive(Debug, Serialize)]
struct LatencyReport {
    p50: f64,
    p99: f64,
}

#[derive(Debug, Serialize)]
struct StepReport {
    name: String,
    op: String,
    problem: String,
    variant: String,
    best_effort_variant: String,
    us: f64,
    tiles: u32,
    threads: u32,
    registers: u32,
    spilled_bytes: u32,
    shared_bytes: u32,
    blocks_per_multiprocessor: u32,
    flops: u64,
    bytes: u64,
    tflops: f64,
    gb_per_s: f64,
    bound: &'static str,
    share_of_limit: f64,
    variants_timed: usize,
}

/// Runs the command.
pub(crate) fn run(args: &ProfileArgs) -> Result<(), Failure> {
    if let Some(batch) = args.grid_member {
        return crate::grid::run_member(args, batch);
    }
    if args.grid {
        return crate::grid::run(args);
    }
    let device = engine::open_gpu(&args.device)?;
    let bindings = binding::parse(&args.bind)?;
    let plan = engine::compile_file(&args.model)
        .map_err(|err| Failure::failed(format!("{}: {err}", args.model.display())))?;
    binding::check_known(&plan, &bindings)?;
    let (driver, compiler) = device.versions();
    let mut report = ProfileReport {
        model: args.model.display().to_string(),
        device: device.gpu_name().to_string(),
        driver,
        compiler,
        plans: Vec::new(),
    };
    let batch_symbol = batch_symbol(&plan);
    let batches = if batch_symbol.is_some() { args.batches.clone() } else { vec![1] };
    for batch in batches {
        let mut sizes: Vec<(String, usize)> =
            bindings.iter().map(|(name, size)| (name.clone(), *size)).collect();
        for symbol in symbols(&plan) {
            if Some(&symbol) == batch_symbol.as_ref() {
                sizes.retain(|(name, _)| *name != symbol);
                sizes.push((symbol, batch));
            } else if !sizes.iter().any(|(name, _)| *name == symbol) {
                sizes.push((symbol, 1));
            }
        }
        let profiled = profile(&device, &plan, &sizes, args)?;
        device.set_choices(profiled.tuning()).map_err(Failure::failed)?;
        report.plans.push(plan_report(batch, profiled));
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report).map_err(Failure::failed)?);
    } else {
        print(&report);
    }
    Ok(())
}

fn profile(
    device: &CudaDevice,
    plan: &LaunchPlan,
    sizes: &[(String, usize)],
    args: &ProfileArgs,
) -> Result<PlanProfile, Failure> {
    let bar = ProgressBar::new(0);
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg}, {elapsed}");
    bar.set_style(style.map_err(Failure::failed)?);
    let named = |(name, size): &(String, usize)| format!("{name}={size}");
    bar.set_message(sizes.iter().map(named).collect::<Vec<_>>().join(" "));
    let progress = |done: usize, all: usize| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    };
    let options =
        ProfileOptions { plan_replays: args.replays as usize, ..ProfileOptions::default() };
    let profiled = device.profile(plan, sizes, options, &progress).map_err(Failure::failed);
    bar.finish_and_clear();
    profiled
}

/// The symbol of the first input's first dimension.
pub(crate) fn batch_symbol(plan: &LaunchPlan) -> Option<String> {
    let shape = plan.value(*plan.inputs.first()?).shape.as_ref()?;
    match shape.first()? {
        Dim::Symbol(name) => Some(name.clone()),
        _ => None,
    }
}

/// The symbols of the inputs' dimensions.
fn symbols(plan: &LaunchPlan) -> Vec<String> {
    let mut symbols = Vec::new();
    for dim in plan.inputs.iter().filter_map(|id| plan.value(*id).shape.as_ref()).flatten() {
        if let Dim::Symbol(name) = dim
            && !symbols.contains(name)
        {
            symbols.push(name.clone());
        }
    }
    symbols
}

fn plan_report(batch: usize, profiled: PlanProfile) -> PlanReport {
    let latency =
        |timing: cuda::Timing| LatencyReport { p50: timing.median_us, p99: timing.p99_us };
    PlanReport {
        batch,
        sizes: profiled.sizes,
        latency_us: latency(profiled.graph),
        plain_latency_us: latency(profiled.plain_graph),
        weight_bytes: profiled.weight_bytes,
        run_bytes: profiled.run_bytes,
        compile_seconds: profiled.compile_seconds,
        steps: profiled.steps.iter().map(step_report).collect(),
    }
}

fn step_report(step: &StepProfile) -> StepReport {
    let choice = &step.choices[step.rt];
    let us = choice.time.map_or(0.0, |time| time.median_us);
    let moving = step.bytes as f64 / H200.bytes_per_us;
    let computing = step.flops as f64 / H200.flops_per_us;
    let limit = moving.max(computing).max(H200.launch_us);
    let per_us = |amount: u64| if us > 0.0 { amount as f64 / us } else { 0.0 };
    StepReport {
        name: step.name.clone(),
        op: step.op.clone(),
        problem: step.signature.clone(),
        variant: choice.variant.clone(),
        best_effort_variant: step.choices[step.be].variant.clone(),
        us,
        tiles: choice.tiles,
        threads: choice.threads,
        registers: choice.registers,
        spilled_bytes: choice.spilled_bytes,
        shared_bytes: choice.shared_bytes,
        blocks_per_multiprocessor: choice.blocks_per_multiprocessor,
        flops: step.flops,
        bytes: step.bytes,
        tflops: per_us(step.flops) / 1e6,
        gb_per_s: per_us(step.bytes) / 1e3,
        bound: if computing > moving { "compute" } else { "memory" },
        share_of_limit: if us > 0.0 { limit / us } else { 0.0 },
        variants_timed: step.choices.iter().filter(|choice| choice.time.is_some()).count(),
    }
}

fn print(report: &ProfileReport) {
    println!("{} on {}", report.model, report.device);
    for plan in &report.plans {
        let LatencyReport { p50, p99 } = plan.latency_us;
        println!(
            "batch {:>3}: median {p50:.1} us, p99 {p99:.1} us; {} steps, weights {:.1} MB, a run {:.1} MB",
            plan.batch,
            plan.steps.len(),
            plan.weight_bytes as f64 / 1e6,
            plan.run_bytes as f64 / 1e6,
        );
    }
    let Some(plan) = report.plans.first() else { return };
    println!("slowest steps at batch {}:", plan.batch);
    let mut steps: Vec<&StepReport> = plan.steps.iter().collect();
    steps.sort_by(|a, b| b.us.total_cmp(&a.us));
    for step in steps.into_iter().take(15) {
        println!(
            "{:>8.1} us  {:<14} {:<16} {:>6.1} TFLOP/s {:>6.0} GB/s {:>4.0} % of its limit  {}",
            step.us,
            step.op,
            step.variant,
            step.tflops,
            step.gb_per_s,
            step.share_of_limit * 100.0,
            step.name
        );
    }
}
