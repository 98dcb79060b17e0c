//! One process of a point: it prepares, waits for the start, and reports.

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use assembly::{Failure, sample_inputs};
use base::{Histogram, Random};
use serde::{Deserialize, Serialize};

use crate::args::ProfileArgs;
use crate::run_command::ModelRunner;

/// Written when the model is loaded and warm.
pub(crate) const READY: &str = "ready";
/// Read when all processes are ready.
pub(crate) const GO: &str = "go";
/// Runs before it is ready; the first ones compile, allocate and tune.
const WARMUP: u32 = 5;

/// Results of a process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct MemberReport {
    pub(crate) batches: u64,
    pub(crate) seconds: f64,
    pub(crate) mean_us: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    /// Peak memory of the process.
    pub(crate) peak_bytes: u64,
}

/// Runs one process.
pub(crate) fn run_member(args: &ProfileArgs, batch: usize) -> Result<(), Failure> {
    let runner = prepare(args, batch)?;
    for _ in 0..WARMUP {
        runner.run_once(false)?;
    }
    write_line(READY)?;
    let mut line = String::new();
    let mut input = std::io::stdin().lock();
    input.read_line(&mut line).map_err(Failure::failed)?;
    if line.trim() != GO {
        return Err(Failure::failed("no start signal"));
    }
    let report = measure(&runner, Duration::from_secs_f64(args.seconds))?;
    write_line(&serde_json::to_string(&report).map_err(Failure::failed)?)?;
    // The parent reads the memory in use until it closes the pipe.
    line.clear();
    input.read_line(&mut line).map(drop).map_err(Failure::failed)
}

fn prepare(args: &ProfileArgs, batch: usize) -> Result<ModelRunner, Failure> {
    let device = assembly::open_device(&args.device)?;
    let mut bindings = sample_inputs::parse_bindings(&args.bind)?;
    let plan = assembly::compile_file(&args.model)
        .map_err(|err| Failure::failed(format!("{}: {err}", args.model.display())))?;
    sample_inputs::check_known(&plan, &bindings)?;
    if let Some(symbol) = sample_inputs::batch_symbol(&plan) {
        bindings.insert(symbol, batch);
    }
    let mut random = Random::new(0);
    let inputs = sample_inputs::random_inputs(&plan, &bindings, &mut random)?;
    ModelRunner::open(device.as_ref(), Arc::new(plan), inputs, false)
}

fn measure(runner: &ModelRunner, time: Duration) -> Result<MemberReport, Failure> {
    let mut latency = Histogram::new();
    let started = Instant::now();
    let mut batches = 0;
    while batches == 0 || started.elapsed() < time {
        latency.record(runner.run_once(false)?.0);
        batches += 1;
    }
    let seconds = started.elapsed().as_secs_f64();
    let us = |nanos: base::Nanos| nanos.0 as f64 / 1e3;
    Ok(MemberReport {
        batches,
        seconds,
        mean_us: us(latency.mean()),
        p50_us: us(latency.quantile(0.5)),
        p99_us: us(latency.quantile(0.99)),
        peak_bytes: peak_bytes(),
    })
}

/// Peak memory of this process, as the kernel reports it.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()).and_then(|kib| kib.parse().ok());
    kib.unwrap_or(0u64) * 1024
}

fn write_line(line: &str) -> Result<(), Failure> {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{line}").and_then(|()| output.flush()).map_err(Failure::failed)
}
