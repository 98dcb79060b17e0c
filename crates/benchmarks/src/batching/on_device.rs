//! `atoll bench batching` on a real device: batching policies under open load.

use std::sync::Arc;

use assembly::progress::{self, Progress};
use assembly::{DeviceArgs, Failure, sample_inputs, write_file};
use base::Random;
use bench::load::{
    self, BatchingReport, BatchingSetting, LoadBenchmark, LoadModel, LoadOptions, charts, table,
};
use bench::plot;
use device::Device;
use model::LaunchPlan;

use super::args::BatchingArgs;
use crate::environment;

/// Number of different inputs of a model.
const INPUTS: usize = 8;

/// Runs the benchmark on the device that `args` name.
pub(crate) fn run(args: &BatchingArgs) -> Result<(), Failure> {
    let settings = settings(args)?;
    let named = DeviceArgs { device: args.device.clone(), settings: args.settings.clone() };
    let (device, timeline) = open(&named)?;
    let options = LoadOptions {
        seconds: args.seconds,
        seed: args.seed,
        slo_ms: args.slo_ms,
        probes: args.probes,
        shares: (args.low / 100.0, args.high / 100.0),
        concurrent_batches: args.concurrent_batches,
    };
    let mut report = BatchingReport {
        device: device.info().description.clone(),
        driver: environment::driver(&args.device),
        date: environment::today(),
        command: environment::command(),
        seed: args.seed,
        concurrent_batches: args.concurrent_batches,
        networks: Vec::new(),
    };
    let load = LoadBenchmark::new(device.clone(), options, timeline);
    let progress = Progress::new((args.network.len() * settings.len()) as u64, "results");
    for name in &args.network {
        let (plan, inputs) = read(args, &*device, name)?;
        let memory = memory(&*device, &plan)?;
        let program = device.load(plan).map_err(|err| Failure::failed(format!("{name}: {err}")))?;
        let model = LoadModel { name: name.clone(), program, inputs };
        let report_result = |c: &load::PolicyResult| {
            progress.advance();
            progress::note(&format!(
                "{name} {}: low {:.0} us, high {:.0} us in batches of {:.1}, at most {:.0}/s",
                c.policy,
                c.low.latency.mean_us,
                c.high.latency.mean_us,
                c.high.mean_batch,
                c.best_rps
            ));
        };
        let mut network = load.run(&model, &settings, report_result).map_err(Failure::failed)?;
        (network.memory_one, network.memory_six) = memory;
        report.networks.push(network);
        // After every network, so that an interrupted run keeps its results.
        if let Some(Some(path)) = &args.json {
            write_file(path, &to_json(&report)?)?;
        }
        if let Some(path) = &args.svg {
            write_file(path, &plot::svg(&charts(&report.networks)))?;
        }
    }
    drop(progress);
    match &args.json {
        Some(None) => print!("{}", to_json(&report)?),
        _ => print!("{}", table(&report.networks)),
    }
    let results = report.networks.iter().flat_map(|network| &network.results);
    let bad = |p: &load::PhaseResult| p.wrong > 0 || p.errors > 0;
    match results.into_iter().find(|c| bad(&c.low) || bad(&c.high) || bad(&c.best)) {
        None => Ok(()),
        Some(c) => Err(Failure::failed(format!("{}: replies are wrong or missing", c.policy))),
    }
}

/// The device, and its timeline if it has one.
fn open(args: &DeviceArgs) -> Result<(Arc<dyn Device>, Option<load::DeviceTimeline>), Failure> {
    if !args.device.starts_with("cuda") {
        return Ok((assembly::open_device(args)?, None));
    }
    let gpu = Arc::new(assembly::open_gpu(args)?);
    let (one, other) = (gpu.clone(), gpu.clone());
    let timeline = load::DeviceTimeline {
        begin: Box::new(move || one.begin_timeline().is_ok()),
        end: Box::new(move || other.end_timeline()),
    };
    Ok((gpu, Some(timeline)))
}

fn settings(args: &BatchingArgs) -> Result<Vec<BatchingSetting>, Failure> {
    let mut all = Vec::new();
    for name in &args.policy {
        all.extend(load::settings(name, &args.waits).ok_or_else(|| {
            let known = load::NAMES.join(", ");
            Failure::usage(format!("there is no batching policy '{name}' here; known: {known}"))
        })?);
    }
    Ok(all)
}

type Inputs = Vec<Vec<model::Tensor>>;

fn read(
    args: &BatchingArgs,
    device: &dyn Device,
    name: &str,
) -> Result<(Arc<LaunchPlan>, Inputs), Failure> {
    let folder = args.models.as_ref().ok_or_else(|| {
        Failure::usage("a real device runs real models: name their folder with --models")
    })?;
    let path = folder.join(format!("{name}.onnx"));
    let failed = |err: String| Failure::failed(format!("{}: {err}", path.display()));
    let plan = assembly::compile_file(&path).map_err(|err| failed(err.to_string()))?;
    if model::row_independence::batch_symbol(&plan).is_none() {
        return Err(failed(
            "its inputs and outputs do not all begin with the same open dimension".to_string(),
        ));
    }
    let mut random = Random::new(args.seed);
    let mut one = |_| {
        let inputs =
            sample_inputs::random_inputs(&plan, &sample_inputs::Bindings::new(), &mut random);
        inputs.map(|inputs| sample_inputs::in_host_pool(device.host_pool(), inputs)).map_err(failed)
    };
    let inputs = (0..INPUTS).map(&mut one).collect::<Result<Vec<_>, _>>()?;
    Ok((Arc::new(plan), inputs))
}

/// Device memory with one worker of 32, and with six workers.
fn memory(device: &dyn Device, plan: &Arc<LaunchPlan>) -> Result<(u64, u64), Failure> {
    let with = |batches: &[usize]| {
        let program = device.load(plan.clone()).map_err(Failure::failed)?;
        program.prepare_batches(&[], batches).map_err(Failure::failed)?;
        Ok::<u64, Failure>(program.resident().0)
    };
    Ok((with(&[32])?, with(&[1, 1, 2, 4, 8, 16])?))
}

fn to_json(report: &BatchingReport) -> Result<String, Failure> {
    Ok(serde_json::to_string_pretty(report).map_err(Failure::failed)? + "\n")
}
