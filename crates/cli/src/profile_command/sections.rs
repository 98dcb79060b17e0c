//! Profiles of models with steps that run on the host: the time of every section, and the tuning of
//! those of the GPU.

use std::sync::Arc;
use std::time::Instant;

use assembly::sample_inputs::{self, Bindings};
use assembly::{Failure, TaskRunner};
use base::{Bytes, Nanos, Random};
use cuda::CudaDevice;
use device::hybrid::section::{Section, Side};
use device::hybrid::{HybridDevice, HybridProgram, Placement};
use device::{Outcome, Program};
use model::{Dim, LaunchPlan, Tensor};
use serde::Serialize;

use super::{LatencyReport, profile};
use crate::args::ProfileArgs;

/// Runs before times are recorded: the first ones compile and open queues.
const WARM_UP: usize = 3;

/// Recorded runs are at most this many: sections of the host take milliseconds.
const MAX_RUNS: usize = 50;

#[derive(Debug, Serialize)]
struct SectionsReport {
    model: String,
    device: String,
    plans: Vec<PlanSections>,
}

#[derive(Debug, Serialize)]
struct PlanSections {
    batch: usize,
    sizes: Vec<(String, usize)>,
    /// From inputs to outputs in host memory.
    latency_us: LatencyReport,
    sections: Vec<SectionReport>,
}

#[derive(Debug, Serialize)]
struct SectionReport {
    side: &'static str,
    /// Median time on its device, without the copies of its inputs.
    us: f64,
    /// Bytes of the values that it takes: copied when another side made them.
    input_bytes: u64,
    steps: Vec<SectionStep>,
}

#[derive(Debug, Serialize)]
struct SectionStep {
    name: String,
    op: String,
    /// Why it runs on the host.
    reason: Option<String>,
}

/// A model in sections, and the devices that run it.
pub(super) struct SectionProfiler<'a> {
    pub(super) args: &'a ProfileArgs,
    pub(super) gpu: Arc<CudaDevice>,
    pub(super) hybrid: HybridDevice,
    pub(super) plan: Arc<LaunchPlan>,
    pub(super) placement: Placement,
}

impl SectionProfiler<'_> {
    /// Profiles the model at these batches and sizes, and prints the report.
    pub(super) fn run(&self, sizes: Vec<(usize, Vec<(String, usize)>)>) -> Result<(), Failure> {
        let model = self.args.model.display().to_string();
        let device = self.gpu.gpu_name().to_string();
        let mut report = SectionsReport { model, device, plans: Vec::new() };
        for (batch, sizes) in sizes {
            report.plans.push(self.plan(batch, sizes)?);
        }
        if self.args.json {
            println!("{}", serde_json::to_string_pretty(&report).map_err(Failure::failed)?);
        } else {
            print(&report);
        }
        Ok(())
    }

    fn plan(&self, batch: usize, sizes: Vec<(String, usize)>) -> Result<PlanSections, Failure> {
        let bindings: Bindings = sizes.iter().cloned().collect();
        let inputs = sample_inputs::random_inputs(&self.plan, &bindings, &mut Random::new(1));
        let inputs = inputs.map_err(Failure::failed)?;
        let runner = TaskRunner::open(&self.hybrid, false)?;
        // One run tells the sizes of the sections; then these are tuned and loaded again.
        let first = self.load()?;
        run_once(&runner, &first, &inputs)?;
        for (index, section) in first.sections().enumerate() {
            if section.side == Side::Accelerator {
                let sizes = section_sizes(section, &first.recorded_shapes(index));
                let profiled = profile(&self.gpu, &section.plan, &sizes, self.args)?;
                self.gpu.set_choices(&profiled).map_err(Failure::failed)?;
            }
        }
        drop(first);
        let program = self.load()?;
        for _ in 0..WARM_UP {
            run_once(&runner, &program, &inputs)?;
        }
        let (mut latencies, mut times) = (Vec::new(), Vec::new());
        for _ in 0..MAX_RUNS.min(self.args.replays as usize) {
            let (latency, of_sections) = run_once(&runner, &program, &inputs)?;
            latencies.push(latency);
            times.push(of_sections);
        }
        let report = |(index, section): (usize, &Section)| SectionReport {
            side: match section.side {
                Side::Accelerator => "gpu",
                Side::Host => "host",
            },
            us: median(times.iter().filter_map(|run| run.get(index)).map(micros).collect()),
            input_bytes: input_bytes(section, &program.recorded_shapes(index)),
            steps: section.steps.iter().map(|step| self.step(*step)).collect(),
        };
        let sections = program.sections().enumerate().map(report).collect();
        latencies.sort_by(f64::total_cmp);
        let at = |share: f64| latencies[((latencies.len() - 1) as f64 * share).round() as usize];
        let latency_us = LatencyReport { p50: at(0.5), p99: at(0.99) };
        Ok(PlanSections { batch, sizes, latency_us, sections })
    }

    fn load(&self) -> Result<Arc<HybridProgram>, Failure> {
        let loaded = self.hybrid.load_sections(&self.plan).map_err(Failure::failed)?;
        loaded.ok_or_else(|| Failure::failed("no step of the model runs on the host"))
    }

    fn step(&self, index: usize) -> SectionStep {
        let step = &self.plan.steps[index];
        let reason = self.placement.reason(index);
        SectionStep { name: step.name.clone(), op: step.op.name(), reason }
    }
}

/// One run: its time in microseconds, and the times of its sections.
fn run_once(
    runner: &TaskRunner,
    program: &HybridProgram,
    inputs: &[Tensor],
) -> Result<(f64, Vec<Nanos>), Failure> {
    let started = Instant::now();
    let mut task = program.prepare(inputs.to_vec()).map_err(Failure::failed)?;
    task.record_step_times();
    let completion = runner.run(task)?;
    match completion.outcome {
        Outcome::Done => {}
        Outcome::Preempted => return Err(Failure::failed("the run was interrupted")),
        Outcome::Failed(err) => return Err(Failure::failed(err)),
    }
    let times = completion.task.step_times().unwrap_or_default().to_vec();
    completion.task.into_outputs().map_err(Failure::failed)?;
    Ok((started.elapsed().as_secs_f64() * 1e6, times))
}

fn micros(nanos: &Nanos) -> f64 {
    nanos.0 as f64 / 1e3
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// The sizes that inputs of these shapes give to the symbols of a section.
fn section_sizes(section: &Section, shapes: &[Vec<usize>]) -> Vec<(String, usize)> {
    let mut sizes: Vec<(String, usize)> = Vec::new();
    for (id, shape) in section.plan.inputs.iter().zip(shapes) {
        for (dim, size) in section.plan.value(*id).shape.iter().flatten().zip(shape) {
            if let Dim::Symbol(symbol) = dim
                && !sizes.iter().any(|(known, _)| known == symbol)
            {
                sizes.push((symbol.clone(), *size));
            }
        }
    }
    sizes
}

fn input_bytes(section: &Section, shapes: &[Vec<usize>]) -> u64 {
    let bytes = section.plan.inputs.iter().zip(shapes).map(|(id, shape)| {
        let element = section.plan.value(*id).dtype.size_bytes().unwrap_or(0);
        (shape.iter().product::<usize>() * element) as u64
    });
    bytes.sum()
}

fn print(report: &SectionsReport) {
    println!("{} on {}, with steps on the host", report.model, report.device);
    for plan in &report.plans {
        let LatencyReport { p50, p99 } = plan.latency_us;
        println!("batch {:>3}: median {p50:.1} us, p99 {p99:.1} us", plan.batch);
        for section in &plan.sections {
            println!(
                "{:>10.1} us  {:<4} {:>4} steps, takes {}",
                section.us,
                section.side,
                section.steps.len(),
                Bytes(section.input_bytes)
            );
        }
    }
    let Some(plan) = report.plans.first() else { return };
    println!("on the host:");
    for step in plan.sections.iter().flat_map(|section| &section.steps) {
        if let Some(reason) = &step.reason {
            println!("  {:<16} {:<32} {reason}", step.op, step.name);
        }
    }
}
