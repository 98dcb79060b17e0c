//! Times every variant of every step of ONNX models on a GPU: what the estimates of
//! `compiler::gpu::tile` are fitted to and checked with (`scripts/gpu/calibrate.py`).
//!
//! `variant_times [--batches N,..] [--plans] FILE...` prints tab-separated lines: for each model
//! and batch the latency with the estimated and with the measured variants and the seconds of each
//! phase, and unless `--plans` is given for every problem each variant with its time, the estimated
//! one first.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use compiler::gpu::GpuCompiler;
use cuda::{CudaDevice, CudaOptions, ProfileOptions};
use graph::Limits;
use model::op::Op;
use model::{Dim, LaunchPlan, Tensor};

/// Replays of a whole plan.
const REPLAYS: usize = 30;

/// Folds constants with the CPU device's kernels.
struct CpuEvaluator;

impl graph::Evaluator for CpuEvaluator {
    fn evaluate(&self, op: &Op, inputs: &[Option<Tensor>], outputs: usize) -> Option<Vec<Tensor>> {
        cpu::evaluate(op, inputs, outputs)
    }
}

fn main() -> Result<(), String> {
    let mut arguments = std::env::args().skip(1).peekable();
    let (mut batches, mut plans_only) = (vec![1], false);
    while let Some(option) = arguments.next_if(|argument| argument.starts_with("--")) {
        match option.as_str() {
            "--batches" => {
                let list = arguments.next().unwrap_or_default();
                let numbers: Result<Vec<usize>, _> = list.split(',').map(str::parse).collect();
                batches = numbers.map_err(|err| format!("--batches {list}: {err}"))?;
            }
            "--plans" => plans_only = true,
            _ => return Err("usage: variant_times [--batches N,..] [--plans] FILE...".to_string()),
        }
    }
    let compiler = Arc::new(GpuCompiler::new(Some(Arc::new(CpuEvaluator))));
    let device = CudaDevice::open(0, CudaOptions::default(), compiler);
    let device = device.map_err(|err| err.to_string())?;
    for file in arguments {
        for batch in &batches {
            if let Err(reason) = measure(&device, &file, *batch, plans_only) {
                println!("failed\t{file}\t{batch}\t{reason}");
            }
        }
    }
    Ok(())
}

fn measure(device: &CudaDevice, file: &str, batch: usize, plans_only: bool) -> Result<(), String> {
    let text = |err: device::DeviceError| err.to_string();
    let started = Instant::now();
    let plan =
        compiler::compile_onnx_file(Path::new(file), &Limits::default(), Some(&CpuEvaluator))
            .map_err(|err| err.to_string())?;
    let sizes: Vec<_> = symbols(&plan).into_iter().map(|symbol| (symbol, batch)).collect();
    let read_s = started.elapsed().as_secs_f64();
    // Before anything is measured, plans have the variants that were estimated to be fastest.
    let estimated = device.time_classes(&plan, &sizes, REPLAYS).map_err(text)?;
    let first_s = started.elapsed().as_secs_f64() - read_s;
    let options = ProfileOptions { plan_replays: REPLAYS, ..ProfileOptions::default() };
    let profile = device.profile(&plan, &sizes, options, &|_, _| {}).map_err(text)?;
    let profile_s = started.elapsed().as_secs_f64() - read_s - first_s;
    println!(
        "plan\t{file}\t{batch}\t{:.2}\t{:.2}\t{read_s:.2}\t{first_s:.2}\t{profile_s:.2}\t{:.2}",
        estimated.real_time.median_us, profile.graph.median_us, profile.compile_seconds
    );
    let mut known = BTreeSet::new();
    for step in profile.steps.iter().filter(|step| known.insert(step.signature.clone())) {
        let count = profile.steps.iter().filter(|other| other.signature == step.signature).count();
        let micros = |at: usize| step.choices[at].time.map_or(f64::NAN, |time| time.median_us);
        println!(
            "step\t{}\t{}\t{count}\t{}\t{}\t{:.3}\t{:.3}",
            step.op,
            step.signature,
            step.flops,
            step.bytes,
            micros(0),
            micros(step.rt)
        );
        for (at, choice) in step.choices.iter().enumerate().filter(|_| !plans_only) {
            let blocks = choice.blocks_per_multiprocessor;
            println!("variant\t{}\t{:.3}\t{}\t{blocks}", choice.variant, micros(at), choice.tiles);
        }
    }
    Ok(())
}

fn symbols(plan: &LaunchPlan) -> BTreeSet<String> {
    let shapes = plan.inputs.iter().filter_map(|id| plan.values[id.index()].shape.as_ref());
    let dims = shapes.flatten().filter_map(|dim| match dim {
        Dim::Symbol(name) => Some(name.to_string()),
        _ => None,
    });
    dims.collect()
}
