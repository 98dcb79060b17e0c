//! `atoll run`: runs and times one model, as a whole and step by step.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use assembly::progress::Progress;
use assembly::{Failure, TaskRunner, sample_inputs};
use base::{Histogram, Nanos, Random};
use device::{Device, MachineLimits, Outcome, Program, RecordedStep};
use model::config::Class;
use model::{LaunchPlan, Tensor};
use serde::Serialize;

use crate::args::RunArgs;
use crate::npy;

/// The report of a run.
#[derive(Debug, Serialize)]
struct RunReport {
    model: String,
    device: String,
    class: Class,
    runs: u32,
    latency_us: LatencyReport,
    inputs: Vec<TensorReport>,
    outputs: Vec<TensorReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limits: Option<LimitsReport>,
    steps: Vec<StepReport>,
}

#[derive(Debug, Serialize)]
struct LatencyReport {
    p50: f64,
    p99: f64,
    mean: f64,
    max: f64,
}

#[derive(Debug, Serialize)]
struct TensorReport {
    name: String,
    datatype: String,
    shape: Vec<usize>,
}

#[derive(Debug, Serialize)]
struct StepReport {
    name: String,
    op: String,
    us: f64,
    share: f64,
    #[serde(flatten)]
    work: Option<WorkReport>,
}

/// What bounds steps.
#[derive(Debug, Serialize)]
struct LimitsReport {
    gflops: f64,
    memory_gb_per_s: f64,
    caches: Vec<CacheReport>,
    /// Of all steps whose work is known: their shortest time over the measured time.
    share_of_limit: f64,
}

#[derive(Debug, Serialize)]
struct CacheReport {
    bytes: u64,
    gb_per_s: f64,
}

/// What a step has to do, and how far it is from the limit.
#[derive(Debug, Serialize)]
struct WorkReport {
    flops: u64,
    bytes: u64,
    gflops: f64,
    gb_per_s: f64,
    bound: &'static str,
    share_of_limit: f64,
}

/// Runs the command.
pub(crate) fn run(args: &RunArgs) -> Result<(), Failure> {
    let device = assembly::open_device(&args.device)?;
    let bindings = sample_inputs::parse_bindings(&args.bind)?;
    let plan = assembly::compile_file(&args.model)
        .map_err(|err| Failure::failed(format!("{}: {err}", args.model.display())))?;
    let plan = Arc::new(plan);
    sample_inputs::check_known(&plan, &bindings)?;
    let inputs = inputs(&plan, args, &bindings)?;
    let limits = if args.limits { Some(limits_of(device.as_ref())?) } else { None };
    let runner = ModelRunner::open(device.as_ref(), plan.clone(), inputs, args.best_effort)?;
    let measured = runner.measure(args)?;
    if let Some(folder) = &args.save {
        save(folder, &plan, &measured.outputs)?;
    }
    let report = report(args, &device.info().description, &runner, measured, limits);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report).map_err(Failure::failed)?);
    } else {
        print(&report, args.slowest);
    }
    Ok(())
}

/// The given tensors, and random ones for the other inputs, in the plan's order.
fn inputs(
    plan: &LaunchPlan,
    args: &RunArgs,
    bindings: &sample_inputs::Bindings,
) -> Result<Vec<Tensor>, Failure> {
    let mut given: BTreeMap<&str, Tensor> = BTreeMap::new();
    for argument in &args.input {
        let (name, file) = argument.split_once('=').ok_or_else(|| {
            Failure::usage(format!("'{argument}' is not of the form NAME=FILE.npy"))
        })?;
        given.insert(name, npy::read(Path::new(file))?);
    }
    let mut random = Random::new(args.seed);
    let mut inputs = Vec::with_capacity(plan.inputs.len());
    for id in &plan.inputs {
        let info = plan.value(*id);
        inputs.push(match given.remove(info.name.as_str()) {
            Some(tensor) => tensor,
            None => sample_inputs::random_input(info, bindings, &mut random)?,
        });
    }
    match given.keys().next() {
        None => Ok(inputs),
        Some(name) => {
            let known: Vec<&str> =
                plan.inputs.iter().map(|id| plan.value(*id).name.as_str()).collect();
            Err(Failure::usage(format!(
                "the model has no input '{name}'; it has: {}",
                known.join(", ")
            )))
        }
    }
}

/// Max runs in which steps are timed.
const STEP_RUNS_MAX: u32 = 20;

/// A loaded model with a queue and inputs.
pub(crate) struct ModelRunner {
    program: Arc<dyn Program>,
    task_runner: TaskRunner,
    inputs: Vec<Tensor>,
}

struct RunMeasurements {
    latency: Histogram,
    /// Time of every step in every run.
    step_times: Vec<Vec<Nanos>>,
    outputs: Vec<Tensor>,
}

impl ModelRunner {
    /// Loads `plan` onto a device.
    pub(crate) fn open(
        device: &dyn Device,
        plan: Arc<LaunchPlan>,
        inputs: Vec<Tensor>,
        best_effort: bool,
    ) -> Result<ModelRunner, Failure> {
        let program = device.load(plan).map_err(Failure::failed)?;
        Ok(ModelRunner { program, task_runner: TaskRunner::open(device, best_effort)?, inputs })
    }

    fn measure(&self, args: &RunArgs) -> Result<RunMeasurements, Failure> {
        for _ in 0..args.warmup {
            self.run_once(false)?;
        }
        let progress = Progress::new(u64::from(args.repeat), "runs");
        let mut latency = Histogram::new();
        let mut outputs = Vec::new();
        for _ in 0..args.repeat {
            let (elapsed, _, result) = self.run_once(false)?;
            latency.record(elapsed);
            outputs = result;
            progress.advance();
        }
        drop(progress);
        // In separate runs: timing steps costs time, and on a GPU it prevents the graph.
        let mut step_times = Vec::new();
        for _ in 0..args.repeat.min(STEP_RUNS_MAX) {
            step_times.push(self.run_once(true)?.1);
        }
        Ok(RunMeasurements { latency, step_times, outputs })
    }

    /// One run: its time, the times of its steps if recorded, and its outputs.
    pub(crate) fn run_once(
        &self,
        record: bool,
    ) -> Result<(Nanos, Vec<Nanos>, Vec<Tensor>), Failure> {
        let started = Instant::now();
        let mut task = self.program.prepare(self.inputs.clone()).map_err(Failure::failed)?;
        if record {
            task.record_step_times();
        }
        let completion = self.task_runner.run(task)?;
        match completion.outcome {
            Outcome::Done => {}
            Outcome::Preempted => return Err(Failure::failed("the run was interrupted")),
            Outcome::Failed(err) => return Err(Failure::failed(err)),
        }
        let times = completion.task.step_times().unwrap_or_default().to_vec();
        let outputs = completion.task.into_outputs().map_err(Failure::failed)?;
        Ok((started.elapsed().into(), times, outputs))
    }
}

fn save(folder: &Path, plan: &LaunchPlan, outputs: &[Tensor]) -> Result<(), Failure> {
    std::fs::create_dir_all(folder)
        .map_err(|err| Failure::failed(format!("{}: {err}", folder.display())))?;
    for (id, tensor) in plan.outputs.iter().zip(outputs) {
        let name = plan.value(*id).name.replace('/', "_");
        npy::write(&folder.join(format!("{name}.npy")), tensor)?;
    }
    Ok(())
}

fn us(nanos: Nanos) -> f64 {
    nanos.0 as f64 / 1e3
}

fn report(
    args: &RunArgs,
    device: &str,
    runner: &ModelRunner,
    measured: RunMeasurements,
    limits: Option<MachineLimits>,
) -> RunReport {
    // A device may compute some steps when it loads the plan.
    let plan = runner.program.plan();
    let tensors = |ids: &[model::ValueId], tensors: &[Tensor]| {
        let one = |(id, tensor): (&model::ValueId, &Tensor)| TensorReport {
            name: plan.value(*id).name.clone(),
            datatype: tensor.dtype().to_string(),
            shape: tensor.shape().to_vec(),
        };
        ids.iter().zip(tensors).map(one).collect()
    };
    let shapes: Vec<Vec<usize>> =
        runner.inputs.iter().map(|input| input.shape().to_vec()).collect();
    let recorded = runner.program.recorded_steps(&shapes);
    let mut steps = step_reports(recorded, &measured.step_times, limits);
    let limits = limits.map(|limits| limits_report(&limits, &steps));
    steps.sort_by(|a, b| b.us.total_cmp(&a.us));
    let latency = &measured.latency;
    RunReport {
        model: args.model.display().to_string(),
        device: device.to_string(),
        class: if args.best_effort { Class::BestEffort } else { Class::RealTime },
        runs: args.repeat,
        latency_us: LatencyReport {
            p50: us(latency.quantile(0.5)),
            p99: us(latency.quantile(0.99)),
            mean: us(latency.mean()),
            max: us(latency.max()),
        },
        inputs: tensors(&plan.inputs, &runner.inputs),
        outputs: tensors(&plan.outputs, &measured.outputs),
        limits,
        steps,
    }
}

/// The steps in the order they run.
fn step_reports(
    recorded: Vec<RecordedStep>,
    times: &[Vec<Nanos>],
    limits: Option<MachineLimits>,
) -> Vec<StepReport> {
    let known = times.iter().all(|times| times.len() == recorded.len());
    let timed = if known { recorded.len() } else { 0 };
    let medians: Vec<f64> = (0..timed).map(|step| us(median(times, step))).collect();
    let total: f64 = medians.iter().sum();
    let one = |(step, us): (RecordedStep, f64)| StepReport {
        work: work_report(&step, us, limits),
        name: step.name,
        op: step.op,
        us,
        share: if total > 0.0 { us / total } else { 0.0 },
    };
    recorded.into_iter().zip(medians).map(one).collect()
}

fn work_report(step: &RecordedStep, us: f64, limits: Option<MachineLimits>) -> Option<WorkReport> {
    let (work, limits) = step.work.zip(limits).filter(|_| us > 0.0)?;
    Some(WorkReport {
        flops: work.flops,
        bytes: work.bytes,
        gflops: work.flops as f64 / us / 1e3,
        gb_per_s: work.bytes as f64 / us / 1e3,
        bound: if limits.is_compute_bound(work) { "compute" } else { "memory" },
        share_of_limit: limits.shortest_us(work) / us,
    })
}

/// What bounds the steps of `device`.
fn limits_of(device: &dyn Device) -> Result<MachineLimits, Failure> {
    let name = &device.info().name;
    let why = format!("the limits of {name} are not known: leave out --limits");
    device.limits().ok_or_else(|| Failure::failed(why))
}

fn limits_report(limits: &MachineLimits, steps: &[StepReport]) -> LimitsReport {
    let caches = limits.caches.iter().filter(|cache| cache.bytes > 0);
    let known = || steps.iter().filter_map(|step| Some((step.us, step.work.as_ref()?)));
    let measured: f64 = known().map(|(us, _)| us).sum();
    let shortest: f64 = known().map(|(us, work)| us * work.share_of_limit).sum();
    LimitsReport {
        gflops: limits.flops_per_us / 1e3,
        memory_gb_per_s: limits.bytes_per_us / 1e3,
        caches: caches
            .map(|cache| CacheReport { bytes: cache.bytes, gb_per_s: cache.bytes_per_us / 1e3 })
            .collect(),
        share_of_limit: if measured > 0.0 { shortest / measured } else { 0.0 },
    }
}

fn median(runs: &[Vec<Nanos>], step: usize) -> Nanos {
    let mut times: Vec<Nanos> = runs.iter().filter_map(|run| run.get(step).copied()).collect();
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn print(report: &RunReport, slowest: usize) {
    println!("{} on {}", report.model, report.device);
    for (what, tensors) in [("input ", &report.inputs), ("output", &report.outputs)] {
        for tensor in tensors {
            println!("  {what} {} {} {:?}", tensor.name, tensor.datatype, tensor.shape);
        }
    }
    let latency = &report.latency_us;
    println!(
        "latency over {} runs: median {:.1} us, p99 {:.1} us, mean {:.1} us",
        report.runs, latency.p50, latency.p99, latency.mean
    );
    if let Some(limits) = &report.limits {
        print_limits(limits);
    }
    if slowest > 0 && !report.steps.is_empty() {
        println!("slowest of {} steps:", report.steps.len());
    }
    for step in report.steps.iter().take(slowest) {
        print!("  {:>5.1} %  {:>9.1} us  ", step.share * 100.0, step.us);
        match &step.work {
            Some(work) => print!(
                "{:>7.1} GFLOP/s {:>6.1} GB/s {:>4.0} % of its {} limit  ",
                work.gflops,
                work.gb_per_s,
                work.share_of_limit * 100.0,
                work.bound
            ),
            None if report.limits.is_some() => print!("{:>54}", "not known  "),
            None => {}
        }
        println!("{:<14} {}", step.op, step.name);
    }
}

fn print_limits(limits: &LimitsReport) {
    let caches = limits.caches.iter().map(|cache| {
        format!("{:.0} GB/s with {:.1} MiB", cache.gb_per_s, cache.bytes as f64 / 1048576.0)
    });
    let caches: Vec<String> = caches.collect();
    println!(
        "limits: {:.0} GFLOP/s, {:.0} GB/s from memory{}{}",
        limits.gflops,
        limits.memory_gb_per_s,
        if caches.is_empty() { "" } else { ", " },
        caches.join(", ")
    );
    println!(
        "all steps whose work is known: {:.0} % of their limit",
        limits.share_of_limit * 100.0
    );
}
