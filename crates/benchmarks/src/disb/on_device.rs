//! `atoll bench disb` on a real device: loads the models of DISB and runs every policy in real
//! time.

use std::time::Duration;

use assembly::progress::{self, Progress};
use assembly::{DeviceArgs, Failure, write_file};
use bench::disb;
use bench::live::{
    LiveBenchmark, LiveOptions, LiveReport, Rates, SkippedPolicy, SoakOptions, SoakReport,
    Workload, charts, table,
};
use bench::plot;
use bench::recorded_run;
use runtime::policy::NAMES;
use serde::Serialize;

use super::args::DisbArgs;
use crate::{environment, models};

/// Why ALL does not contain `reef`.
const REEF: &str =
    "it kills and fuses kernels, which no device here can; it runs with --device sim";

/// Runs the benchmark on the device that `args` name.
pub(crate) fn run(args: &DisbArgs) -> Result<(), Failure> {
    if let Some(seconds) = args.soak {
        return soak(args, seconds);
    }
    let (policies, skipped) = policies(&args.policy)?;
    let workloads = workloads(args)?;
    let each = recorded_run::spans_of_each(cells(args, &workloads, &policies)?);
    let recorded_spans = args.perfetto.as_ref().map_or(0, |_| each);
    let (live, description) = open(args, &workloads, recorded_spans)?;
    let mut report = LiveReport {
        device: description,
        driver: environment::driver(&args.device),
        date: environment::today(),
        command: environment::command(),
        seed: args.seed,
        alone: live.alone().to_vec(),
        skipped,
        cells: Vec::new(),
    };
    let all = cells(args, &workloads, &policies)?;
    let mut recorded = Vec::new();
    let progress = Progress::new(all as u64, "cells");
    for rates in rates(args)? {
        for workload in &workloads {
            for policy in &policies {
                let run = live.run(workload, rates, policy).map_err(Failure::failed)?;
                let (cell, spans) = run;
                recorded.extend(spans);
                progress::note(&format!(
                    "{} {} {policy}: RT mean {} us, p99 {} us, {}/s in all, {} errors",
                    workload.name,
                    rates.name(),
                    cell.rt.mean_us,
                    cell.rt.p99_us,
                    cell.throughput_rps,
                    cell.errors
                ));
                progress.advance();
                report.cells.push(cell);
                live.finish(&mut report.cells);
                // After every cell, so that an interrupted run keeps its results.
                if let Some(Some(path)) = &args.json {
                    write_file(path, &to_json(&report)?)?;
                }
            }
        }
    }
    drop(progress);
    if let Some(path) = &args.perfetto {
        write_file(path, &recorded_run::trace(&recorded))?;
    }
    finish(args, &report)
}

/// How many cells there are: rates, workloads and policies.
fn cells(args: &DisbArgs, workloads: &[Workload], policies: &[String]) -> Result<usize, Failure> {
    Ok(rates(args)?.len() * workloads.len() * policies.len())
}

/// Loads the models of `workloads` and measures each alone; also returns the device's description.
fn open(
    args: &DisbArgs,
    workloads: &[Workload],
    recorded_spans: usize,
) -> Result<(LiveBenchmark, String), Failure> {
    let named = DeviceArgs { device: args.device.clone(), settings: args.settings.clone() };
    assembly::device_group::place_threads_as_served(&named)?;
    let device = assembly::open_device(&named)?;
    let mut names: Vec<&str> =
        workloads.iter().flat_map(|w| &w.clients).map(|client| client.model.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let models = models::load(args.models.as_deref(), args.seed, device.as_ref(), &names)?;
    let options = LiveOptions {
        seconds: args.seconds,
        warm_seconds: args.warm_seconds,
        seed: args.seed,
        max_rt_slowdown_percent: args.max_rt_slowdown,
        recorded_spans,
    };
    let description = device.info().description.clone();
    let live = LiveBenchmark::new(device, models, options).map_err(Failure::failed)?;
    for alone in live.alone() {
        let latency = &alone.latency;
        progress::note(&format!(
            "{} alone: mean {} us, p99 {} us",
            alone.model, latency.mean_us, latency.p99_us
        ));
    }
    Ok((live, description))
}

/// The report of a soak, with its environment.
#[derive(Serialize)]
struct SoakFile {
    device: String,
    driver: Option<String>,
    date: String,
    command: String,
    seed: u64,
    #[serde(flatten)]
    soak: SoakReport,
    /// Why the soak failed; empty if it did not.
    failures: Vec<String>,
}

/// Soaks one workload under one policy.
fn soak(args: &DisbArgs, seconds: f64) -> Result<(), Failure> {
    let policy = soak_policy(&args.policy)?;
    let workloads = workloads(args)?;
    let [workload] = &workloads[..] else {
        return Err(Failure::usage("--soak runs one workload: name it with --workload"));
    };
    let [rates] = rates(args)?[..] else {
        return Err(Failure::usage("--soak runs at one kind of rates: literal or scaled"));
    };
    let (live, device) = open(args, &workloads, 0)?;
    let options = SoakOptions { seconds, policy: policy.to_string(), seed: args.seed };
    let progress = Progress::lasting("soaking", Duration::from_secs_f64(seconds));
    let soak = live.soak(workload, rates, &options, &progress::note).map_err(Failure::failed)?;
    drop(progress);
    let failures = soak.failures();
    let file = SoakFile {
        device,
        driver: environment::driver(&args.device),
        date: environment::today(),
        command: environment::command(),
        seed: args.seed,
        soak,
        failures,
    };
    let text = serde_json::to_string_pretty(&file).map_err(Failure::failed)? + "\n";
    match &args.json {
        Some(Some(path)) => write_file(path, &text)?,
        _ => print!("{text}"),
    }
    match file.failures.is_empty() {
        true => Ok(()),
        false => Err(Failure::failed(file.failures.join("; "))),
    }
}

/// The policy of a soak; it must run best effort, which churn uses.
fn soak_policy(requested: &str) -> Result<&str, Failure> {
    let policy = if requested == "ALL" { "atoll" } else { requested };
    match policy {
        "reef" => Err(Failure::usage(format!("policy 'reef' cannot be run here: {REEF}"))),
        "rt_only" => Err(Failure::usage("--soak disturbs best effort, which rt_only does not run")),
        name if NAMES.contains(&name) => Ok(name),
        other => {
            let known = NAMES.join(", ");
            Err(Failure::usage(format!("--soak runs one policy, not '{other}'; known: {known}")))
        }
    }
}

fn finish(args: &DisbArgs, report: &LiveReport) -> Result<(), Failure> {
    if let Some(path) = &args.plot {
        write_file(path, &plot::svg(&charts(&report.cells)))?;
    }
    match &args.json {
        Some(None) => println!("{}", to_json(report)?),
        _ => print!("{}", table(&report.cells)),
    }
    let broken =
        |cell: &&bench::live::CellReport| cell.wrong_outputs > 0 || !cell.violations.is_empty();
    match report.cells.iter().find(broken) {
        None => Ok(()),
        Some(cell) => Err(Failure::failed(format!(
            "workload {} under {}: {} outputs differ from an undisturbed run's; {:?}",
            cell.workload, cell.policy, cell.wrong_outputs, cell.violations
        ))),
    }
}

fn to_json(report: &LiveReport) -> Result<String, Failure> {
    let text = serde_json::to_string_pretty(report).map_err(Failure::failed)?;
    Ok(text + "\n")
}

/// The policies to run, real time alone first as the baseline, and those that cannot run.
fn policies(requested: &str) -> Result<(Vec<String>, Vec<SkippedPolicy>), Failure> {
    let (requested, skipped): (Vec<&str>, Vec<SkippedPolicy>) = match requested {
        "ALL" => {
            let able = NAMES.into_iter().filter(|name| *name != "reef").collect();
            (able, vec![SkippedPolicy { policy: "reef".to_string(), why: REEF.to_string() }])
        }
        list => (list.split(',').map(str::trim).collect(), Vec::new()),
    };
    for name in &requested {
        if !NAMES.contains(name) {
            let known = NAMES.join(", ");
            return Err(Failure::usage(format!("there is no policy '{name}'; known: {known}")));
        }
        if *name == "reef" {
            return Err(Failure::usage(format!("policy 'reef' cannot be run here: {REEF}")));
        }
    }
    let others = requested.into_iter().filter(|name| *name != "rt_only").map(str::to_string);
    Ok((["rt_only".to_string()].into_iter().chain(others).collect(), skipped))
}

fn rates(args: &DisbArgs) -> Result<Vec<Rates>, Failure> {
    match (args.rates.as_deref(), args.scaled) {
        (Some("literal"), false) | (None, false) => Ok(vec![Rates::Literal]),
        (Some("scaled"), _) | (None, true) => Ok(vec![Rates::Scaled]),
        (Some("both"), _) => Ok(vec![Rates::Scaled, Rates::Literal]),
        (Some(other), _) => Err(Failure::usage(format!(
            "--rates {other}: literal, scaled or both, and --scaled only with scaled rates"
        ))),
    }
}

fn workloads(args: &DisbArgs) -> Result<Vec<Workload>, Failure> {
    let pairs = disb::pairs();
    let names: Vec<&str> = match args.workload.as_str() {
        "ALL" if args.trace.is_some() => disb::WORKLOADS.into_iter().chain(["REAL"]).collect(),
        "ALL" => disb::WORKLOADS.into(),
        "PAIRS" => pairs.iter().map(String::as_str).collect(),
        list => list.split(',').map(str::trim).collect(),
    };
    let workload = |name: &str| {
        if name == "REAL" {
            let path = args.trace.as_ref().ok_or_else(|| {
                Failure::usage("REAL is read from DISB's own file: give it with --trace")
            })?;
            let (clients, seconds) = disb::read_clients(path).map_err(Failure::usage)?;
            return Ok(Workload { name: name.to_string(), clients, seconds: Some(seconds) });
        }
        let clients = disb::clients(name).ok_or_else(|| {
            Failure::usage(format!(
                "there is no workload '{name}'; known: A, B, C, D, E, REAL, ALL, PAIRS, \
                 or one pair like vgg19+resnet152"
            ))
        })?;
        Ok(Workload { name: name.to_string(), clients, seconds: None })
    };
    names.into_iter().map(workload).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn real_time_alone_is_first_and_reef_is_refused() {
        let (all, skipped) = policies("ALL").unwrap();
        assert_eq!((all[0].as_str(), all.len()), ("rt_only", 7));
        assert_eq!(skipped[0].policy, "reef");
        assert_eq!(policies("atoll").unwrap().0, ["rt_only", "atoll"]);
        assert!(policies("reef").is_err());
        assert!(policies("atoll,unknown").is_err());
        assert_eq!(soak_policy("ALL").unwrap(), "atoll");
        for refused in ["reef", "rt_only", "unknown", "atoll,reef_n"] {
            assert!(soak_policy(refused).is_err(), "{refused}");
        }
    }
}
