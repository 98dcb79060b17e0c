//! `atoll bench swap`: more models than memory on a real device.

mod args;
mod device;
mod large_model;
mod soak;

use std::sync::Arc;

use ::device::Device;
use assembly::{Failure, sample_inputs, write_file};
use base::Random;
use bench::swap::{
    AccessPattern, BackgroundLoad, Swap, SwapCase, SwapModel, SwapOptions, SwapReport, table,
    with_distinct_weights,
};
use model::config::Class;

pub(crate) use self::args::SwapArgs;
use self::device::SwappingDevice;
use self::large_model::{LargeModel, LargeModelRound};
use crate::{environment, models};

/// Runs the command.
pub(crate) fn run(args: &SwapArgs) -> Result<(), Failure> {
    let opened = SwappingDevice::open(args)?;
    if let Some(operations) = args.soak {
        return soak::run(args, &opened, operations);
    }
    // On its own it is all that is asked for.
    let only_big = args.big.is_some() && !args.beside;
    let cases = if only_big { Vec::new() } else { cases(args)? };
    let speed = opened.speed()?;
    let models = load(args, &*opened.device)?;
    let options = SwapOptions {
        seconds: args.seconds,
        class: class(&args.class)?,
        seed: args.seed,
        bytes_per_second: speed,
    };
    let swap = Swap::new(opened.device.clone(), models, options).map_err(Failure::failed)?;
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
        big_bytes: None,
        rows: Vec::new(),
        beside: Vec::new(),
    };
    for case in cases {
        let row = swap.run(case).map_err(Failure::failed)?;
        eprintln!(
            "{} of {} {} x{}: {}/s, cold p50 {} us of {} us, {} errors",
            row.room,
            row.models,
            row.access,
            row.concurrency,
            row.throughput_rps,
            row.cold.p50_us,
            row.bound_us,
            row.errors + row.wrong
        );
        report.rows.push(row);
        keep(args, &report)?;
    }
    if args.beside || only_big {
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
    if args.count.len() != args.room.len() {
        return Err(Failure::usage("--count and --room need equally many numbers"));
    }
    let mut cases = Vec::new();
    for (count, room) in args.count.iter().zip(&args.room) {
        for access in &args.access {
            let access = AccessPattern::parse(access.trim()).ok_or_else(|| {
                Failure::usage(format!(
                    "there is no access '{access}'; there are: sequential, uniform, zipf"
                ))
            })?;
            for concurrency in &args.concurrency {
                let (count, room) = (usize::from(*count), usize::from(*room));
                cases.push(SwapCase {
                    count,
                    room,
                    access,
                    concurrency: usize::from(*concurrency),
                });
            }
        }
    }
    Ok(cases)
}

/// As many models as the largest case needs.
fn load(args: &SwapArgs, device: &dyn Device) -> Result<Vec<SwapModel>, Failure> {
    let most = args.count.iter().copied().max().map_or(1, usize::from);
    let count = match (args.beside, args.big.is_some()) {
        (false, true) => 1,
        (beside, _) => most + usize::from(beside),
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
    eprintln!("{count} models are packed");
    Ok(models)
}

fn run_co_located(
    args: &SwapArgs,
    opened: &SwappingDevice,
    swap: &Swap,
    report: &mut SwapReport,
) -> Result<(), Failure> {
    let count = args.count.iter().copied().max().map_or(1, usize::from);
    let room = args.room.iter().copied().max().map_or(1, usize::from).min(count);
    let big = args.big.as_ref().map(|file| LargeModel::open(args, opened, file.as_deref()));
    let big = big.transpose()?;
    report.big_bytes = big.as_ref().map(|big| big.bytes);
    let bring = |_: &runtime::Node| big.as_ref().map_or(Ok(0), LargeModel::bring);
    let load = |node: &runtime::Node| big.as_ref().map_or(Ok(0), |big| big.load(node));
    let mut backgrounds = Vec::new();
    if args.beside {
        backgrounds.push(BackgroundLoad::Serving { count: room, clients: 2 });
        backgrounds.push(BackgroundLoad::Swapping {
            count,
            room: room.min(count - 1).max(1),
            clients: 2,
        });
    }
    if let Some(LargeModel { name, bytes, .. }) = &big {
        let (bring, load): (&LargeModelRound<'_>, &LargeModelRound<'_>) = (&bring, &load);
        for (what, round) in [("loaded and evicted", bring), ("prepared, loaded and removed", load)]
        {
            backgrounds.push(BackgroundLoad::Other {
                name: format!("{name} being {what}"),
                round,
                room: *bytes,
            });
        }
    }
    for noise in backgrounds {
        let beside = swap.beside(&noise, 50.0, args.seconds * 3.0).map_err(Failure::failed)?;
        eprintln!(
            "beside {}: p99 {} us, {:+.2} %, {} rounds, {} GB/s, {} errors {:?}",
            beside.noise,
            beside.noisy.p99_us,
            beside.p99_change_pct,
            beside.events,
            beside.gigabytes_per_second,
            beside.errors,
            beside.first_error
        );
        report.beside.push(beside);
        keep(args, report)?;
    }
    Ok(())
}

fn keep(args: &SwapArgs, report: &SwapReport) -> Result<(), Failure> {
    // After every case: a run that is cut short leaves what it has.
    match &args.json {
        Some(Some(path)) => write_file(path, &to_json(report)?),
        _ => Ok(()),
    }
}

fn to_json(report: &SwapReport) -> Result<String, Failure> {
    Ok(serde_json::to_string_pretty(report).map_err(Failure::failed)? + "\n")
}

fn finish(args: &SwapArgs, report: &SwapReport) -> Result<(), Failure> {
    keep(args, report)?;
    match &args.json {
        Some(None) => print!("{}", to_json(report)?),
        _ => print!("{}", table(report)),
    }
    let errors: u64 = report.rows.iter().map(|row| row.errors + row.wrong).sum::<u64>()
        + report.beside.iter().map(|beside| beside.errors).sum::<u64>();
    match errors {
        0 => Ok(()),
        count => Err(Failure::failed(format!("{count} requests failed or were answered wrong"))),
    }
}
