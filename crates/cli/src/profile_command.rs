//! `atoll profile`: times every variant of a model's steps on a GPU, and selects the fastest.

mod sections;

use std::sync::Arc;

use assembly::progress::Progress;
use assembly::{
    Failure,
    sample_inputs::{self, Bindings},
};
use cuda::{ClassTiming, CudaDevice, PlanProfile, ProfileOptions, StepProfile};
use device::{MachineLimits, StepWork};
use model::{Dim, LaunchPlan};
use serde::Serialize;

use crate::args::ProfileArgs;
use sections::SectionProfiler;

#[derive(Debug, Serialize)]
struct ProfileReport {
    model: String,
    device: String,
    driver: i32,
    compiler: (i32, i32),
    plans: Vec<PlanReport>,
}

/// The report of `--classes`.
#[derive(Debug, Serialize)]
struct ClassesReport {
    model: String,
    device: String,
    plans: Vec<BatchClasses>,
}

#[derive(Debug, Serialize)]
struct BatchClasses {
    batch: usize,
    classes: ClassReport,
}

#[derive(Debug, Serialize)]
struct PlanReport {
    batch: usize,
    sizes: Vec<(String, usize)>,
    latency_us: LatencyReport,
    /// The same graph without dependent launches.
    plain_latency_us: LatencyReport,
    /// Real time and best effort alternately, without preemption.
    classes: ClassReport,
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
struct ClassReport {
    real_time_us: LatencyReport,
    best_effort_us: LatencyReport,
    best_effort_chains_us: LatencyReport,
    /// Ratios of medians: best-effort kernels in one graph, and in the chains they are launched in.
    ratio: f64,
    chains_ratio: f64,
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
    if args.device.device == "cpu" {
        return Err(Failure::usage(format!(
            "a CPU has no variants to measure; atoll run {} --limits shows the steps, and --grid \
             measures a table for atoll plan",
            args.model.display()
        )));
    }
    let device = Arc::new(assembly::open_gpu(&args.device)?);
    let bindings = sample_inputs::parse_bindings(&args.bind)?;
    let plan = assembly::compile_file(&args.model)
        .map_err(|err| Failure::failed(format!("{}: {err}", args.model.display())))?;
    sample_inputs::check_known(&plan, &bindings)?;
    let batch_symbol = sample_inputs::batch_symbol(&plan);
    let batches = if batch_symbol.is_some() { args.batches.clone() } else { vec![1] };
    let sizes = batches.into_iter().map(|batch| {
        (batch, sizes_for(&plan, &bindings, batch_symbol.as_deref().map(|symbol| (symbol, batch))))
    });
    let sizes: Vec<(usize, Vec<(String, usize)>)> = sizes.collect();
    let hybrid = assembly::with_host(device.clone(), &args.device);
    if let Some(placement) = hybrid.place(&plan).map_err(Failure::failed)? {
        if args.classes {
            return Err(Failure::usage("--classes is for models without steps on the host"));
        }
        let (gpu, plan) = (device, Arc::new(plan));
        return SectionProfiler { args, gpu, hybrid, plan, placement }.run(sizes);
    }
    if args.classes {
        return compare_classes(args, &device, &plan, &sizes);
    }
    let (driver, compiler) = device.versions();
    let mut report = ProfileReport {
        model: args.model.display().to_string(),
        device: device.gpu_name().to_string(),
        driver,
        compiler,
        plans: Vec::new(),
    };
    for (batch, sizes) in sizes {
        let profiled = profile(&device, &plan, &sizes, args)?;
        device.set_choices(&profiled).map_err(Failure::failed)?;
        let classes = device.time_classes(&plan, &sizes, args.replays as usize);
        report.plans.push(plan_report(batch, profiled, classes.map_err(Failure::failed)?));
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report).map_err(Failure::failed)?);
    } else {
        print(&report);
    }
    Ok(())
}

/// A size for every symbol: the batch, the user's binding, or 1.
fn sizes_for(
    plan: &LaunchPlan,
    bindings: &Bindings,
    batch: Option<(&str, usize)>,
) -> Vec<(String, usize)> {
    let size = |symbol: &String| match batch {
        Some((name, size)) if name == symbol => size,
        _ => bindings.get(symbol).copied().unwrap_or(1),
    };
    symbols(plan).into_iter().map(|symbol| (symbol.clone(), size(&symbol))).collect()
}

fn compare_classes(
    args: &ProfileArgs,
    device: &CudaDevice,
    plan: &LaunchPlan,
    sizes: &[(usize, Vec<(String, usize)>)],
) -> Result<(), Failure> {
    let (model, device_name) = (args.model.display().to_string(), device.gpu_name().to_string());
    let mut report = ClassesReport { model, device: device_name, plans: Vec::new() };
    for (batch, sizes) in sizes {
        let timing = device.time_classes(plan, sizes, args.replays as usize);
        let classes = class_report(timing.map_err(Failure::failed)?);
        if !args.json {
            println!(
                "batch {batch:>3}: real time {:.1} us, best effort {:.1} us ({:+.1} %), \
                 in chains {:.1} us ({:+.1} %)",
                classes.real_time_us.p50,
                classes.best_effort_us.p50,
                (classes.ratio - 1.0) * 100.0,
                classes.best_effort_chains_us.p50,
                (classes.chains_ratio - 1.0) * 100.0,
            );
        }
        report.plans.push(BatchClasses { batch: *batch, classes });
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report).map_err(Failure::failed)?);
    }
    Ok(())
}

fn profile(
    device: &CudaDevice,
    plan: &LaunchPlan,
    sizes: &[(String, usize)],
    args: &ProfileArgs,
) -> Result<PlanProfile, Failure> {
    let bar = Progress::new(0, "kernels");
    let named = |(name, size): &(String, usize)| format!("{name}={size} ");
    bar.describe(&sizes.iter().map(named).collect::<String>());
    let progress = |done: usize, all: usize| bar.set(done, all);
    let options =
        ProfileOptions { plan_replays: args.replays as usize, ..ProfileOptions::default() };
    device.profile(plan, sizes, options, &progress).map_err(Failure::failed)
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

fn latency(timing: cuda::Timing) -> LatencyReport {
    LatencyReport { p50: timing.median_us, p99: timing.p99_us }
}

fn class_report(timing: ClassTiming) -> ClassReport {
    let over = |best_effort: cuda::Timing| match timing.real_time.median_us {
        us if us > 0.0 => best_effort.median_us / us,
        _ => 0.0,
    };
    ClassReport {
        ratio: over(timing.best_effort),
        chains_ratio: over(timing.best_effort_chains),
        real_time_us: latency(timing.real_time),
        best_effort_us: latency(timing.best_effort),
        best_effort_chains_us: latency(timing.best_effort_chains),
    }
}

fn plan_report(batch: usize, profiled: PlanProfile, classes: ClassTiming) -> PlanReport {
    PlanReport {
        batch,
        sizes: profiled.sizes,
        latency_us: latency(profiled.graph),
        plain_latency_us: latency(profiled.plain_graph),
        classes: class_report(classes),
        weight_bytes: profiled.weight_bytes,
        run_bytes: profiled.run_bytes,
        compile_seconds: profiled.compile_seconds,
        steps: profiled.steps.iter().map(step_report).collect(),
    }
}

fn step_report(step: &StepProfile) -> StepReport {
    let choice = &step.choices[step.rt];
    let us = choice.time.map_or(0.0, |time| time.median_us);
    // Other GPUs are compared with it too.
    let (limits, work) = (MachineLimits::H200, StepWork { flops: step.flops, bytes: step.bytes });
    let limit = limits.shortest_us(work);
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
        bound: if limits.is_compute_bound(work) { "compute" } else { "memory" },
        share_of_limit: if us > 0.0 { limit / us } else { 0.0 },
        variants_timed: step.choices.iter().filter(|choice| choice.time.is_some()).count(),
    }
}

fn print(report: &ProfileReport) {
    println!("{} on {}", report.model, report.device);
    for plan in &report.plans {
        let LatencyReport { p50, p99 } = plan.latency_us;
        println!(
            "batch {:>3}: median {p50:.1} us, p99 {p99:.1} us, best effort {:+.1} %; {} steps, \
             weights {:.1} MB, a run {:.1} MB",
            plan.batch,
            (plan.classes.chains_ratio - 1.0) * 100.0,
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
