//! `atoll bench swap`: more models than memory on a real device.

mod args;
mod device;
mod large_model;
mod soak;

use std::sync::Arc;

use ::device::Device;
use assembly::progress::{self, Progress};
use assembly::{Failure, sample_inputs, write_file};
use base::Random;
use bench::swap::{
    AccessPattern, BackgroundLoad, SwapBenchmark, SwapCase, SwapModel, SwapOptions, SwapReport,
    table, with_distinct_weights,
};
use model::config::Class;

pub(crate) use self::args::SwapArgs;
use self::device::SwappingDevice;
use self::large_model::{LargeModel, LargeModelRound};
use crate::{environment, models};

/// Runs the benchmark.
pub(crate) fn run(args: &SwapArgs) -> Result<(), Failure> {
    let opened = SwappingDevice::open(args)?;
    if let Some(operations) = args.soak {
        return soak::run(args, &opened, operations);
    }
    // Without --co-located, only the large model is measured.
    let only_large_model = args.large_model.is_some() && !args.co_located;
    let cases = if only_large_model { Vec::new() } else { cases(args)? };
    let speed = opened.speed()?;
    let models = load(args, &*opened.device)?;
    let options = SwapOptions {
        seconds: args.seconds,
        class: class(&args.class)?,
        seed: args.seed,
        bytes_per_second: speed,
    };
    let swap =
        SwapBenchmark::new(opened.device.clone(), models, options).map_err(Failure::failed)?;
    let mut report = SwapReport {
        device: opened.device.info().description.clone(),
        driver: environment::driver(&args.device),
        date: environment::today(),
        command: environment::command(),
        network: args.network.join("+"),
        model_bytes: swap.bytes().0,
        distinct_answers: swap.distinct(),
        copy_bytes_per_second: [speed, speed],
        warm: swap.warm(),
        large_model_bytes: None,
        rows: Vec::new(),
        co_located: Vec::new(),
    };
    let progress = Progress::new(cases.len() as u64, "cases");
    for case in cases {
        let row = swap.run(case).map_err(Failure::failed)?;
        progress.advance();
        progress::note(&format!(
            "{} of {} {} x{}: {}/s, cold p50 {} us of {} us, {} errors",
            row.resident,
            row.models,
            row.access,
            row.concurrency,
            row.throughput_rps,
            row.cold.p50_us,
            row.bound_us,
            row.errors + row.wrong
        ));
        report.rows.push(row);
        write_report(args, &report)?;
    }
    drop(progress);
    if args.co_located || only_large_model {
        run_co_located(args, &opened, &swap, &mut report)?;
    }
    report.copy_bytes_per_second[1] = opened.speed()?;
    finish(args, &report)
}

fn class(name: &str) -> Result<Class, Failure> {
    Class::parse(name)
        .ok_or_else(|| Failure::usage(format!("there is no class '{name}'; there are: rt, be")))
}

fn cases(args: &SwapArgs) -> Result<Vec<SwapCase>, Failure> {
    if args.count.len() != args.resident.len() {
        return Err(Failure::usage("--count and --resident need equally many numbers"));
    }
    let mut cases = Vec::new();
    for (count, resident) in args.count.iter().zip(&args.resident) {
        for access in &args.access {
            let access = AccessPattern::parse(access.trim()).ok_or_else(|| {
                Failure::usage(format!(
                    "there is no access '{access}'; there are: sequential, uniform, zipf"
                ))
            })?;
            for concurrency in &args.concurrency {
                let (count, resident) = (usize::from(*count), usize::from(*resident));
                cases.push(SwapCase {
                    count,
                    resident,
                    access,
                    concurrency: usize::from(*concurrency),
                });
            }
        }
    }
    Ok(cases)
}

/// Loads as many models as the largest case needs.
fn load(args: &SwapArgs, device: &dyn Device) -> Result<Vec<SwapModel>, Failure> {
    let count_max = args.count.iter().copied().max().map_or(1, usize::from);
    let count = match (args.co_located, args.large_model.is_some()) {
        (false, true) => 1,
        (co_located, _) => count_max + usize::from(co_located),
    };
    let mut random = Random::new(args.seed);
    let mut networks = Vec::new();
    for name in &args.network {
        let path = args.models.join(format!("{name}.onnx"));
        let plan = assembly::compile_file(&path)
            .map_err(|err| Failure::failed(format!("{}: {err}", path.display())))?;
        let inputs = models::random_inputs(&plan, &mut random).map_err(Failure::failed)?;
        let inputs = sample_inputs::in_host_pool(device.host_pool(), inputs);
        networks.push((name.clone(), plan, inputs));
    }
    let mut models = Vec::new();
    for copy in 0..count {
        let (name, plan, inputs) = &networks[copy % networks.len()];
        let failed = |err| Failure::failed(format!("{name}: {err}"));
        let program = device.load(Arc::new(with_distinct_weights(plan, copy))).map_err(failed)?;
        models.push(SwapModel { name: format!("{name}#{copy}"), program, inputs: inputs.clone() });
    }
    progress::note(&format!("{count} models are packed"));
    Ok(models)
}

fn run_co_located(
    args: &SwapArgs,
    opened: &SwappingDevice,
    swap: &SwapBenchmark,
    report: &mut SwapReport,
) -> Result<(), Failure> {
    let count = args.count.iter().copied().max().map_or(1, usize::from);
    let resident = args.resident.iter().copied().max().map_or(1, usize::from).min(count);
    let large_model =
        args.large_model.as_ref().map(|file| LargeModel::open(args, opened, file.as_deref()));
    let large_model = large_model.transpose()?;
    report.large_model_bytes = large_model.as_ref().map(|large_model| large_model.bytes);
    let load_weights =
        |_: &runtime::Node| large_model.as_ref().map_or(Ok(0), LargeModel::load_weights);
    let load = |node: &runtime::Node| {
        large_model.as_ref().map_or(Ok(0), |large_model| large_model.load(node))
    };
    let mut backgrounds = Vec::new();
    if args.co_located {
        backgrounds.push(BackgroundLoad::Serving { count: resident, clients: 2 });
        backgrounds.push(BackgroundLoad::Swapping {
            count,
            resident: resident.min(count - 1).max(1),
            clients: 2,
        });
    }
    if let Some(LargeModel { name, bytes, .. }) = &large_model {
        let (load_weights, load): (&LargeModelRound<'_>, &LargeModelRound<'_>) =
            (&load_weights, &load);
        for (what, round) in
            [("loaded and evicted", load_weights), ("prepared, loaded and removed", load)]
        {
            backgrounds.push(BackgroundLoad::Other {
                name: format!("{name} being {what}"),
                round,
                resident: *bytes,
            });
        }
    }
    let progress = Progress::new(backgrounds.len() as u64, "loads");
    for background in backgrounds {
        let row =
            swap.co_located(&background, 50.0, args.seconds * 3.0).map_err(Failure::failed)?;
        progress::note(&format!(
            "beside {}: p99 {} us, {:+.2} %, {} rounds, {} GB/s, {} errors {:?}",
            row.background,
            row.with_background.p99_us,
            row.p99_change_pct,
            row.events,
            row.gigabytes_per_second,
            row.errors,
            row.first_error
        ));
        report.co_located.push(row);
        progress.advance();
        write_report(args, report)?;
    }
    Ok(())
}

fn write_report(args: &SwapArgs, report: &SwapReport) -> Result<(), Failure> {
    // After every case, so that an interrupted run keeps its results.
    match &args.json {
        Some(Some(path)) => write_file(path, &to_json(report)?),
        _ => Ok(()),
    }
}

fn to_json(report: &SwapReport) -> Result<String, Failure> {
    Ok(serde_json::to_string_pretty(report).map_err(Failure::failed)? + "\n")
}

fn finish(args: &SwapArgs, report: &SwapReport) -> Result<(), Failure> {
    write_report(args, report)?;
    match &args.json {
        Some(None) => print!("{}", to_json(report)?),
        _ => print!("{}", table(report)),
    }
    let errors: u64 = report.rows.iter().map(|row| row.errors + row.wrong).sum::<u64>()
        + report.co_located.iter().map(|row| row.errors).sum::<u64>();
    match errors {
        0 => Ok(()),
        count => Err(Failure::failed(format!("{count} requests failed or got wrong replies"))),
    }
}
