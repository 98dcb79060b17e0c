//! `atoll bench padding`: two networks on a GPU at the same time, under several methods.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use assembly::progress::{self, Progress};
use assembly::{DeviceArgs, DeviceSettings, Failure, write_file};
use base::Random;
use bench::disb;
use bench::padding::{
    MethodReport, PaddingReport, PairReport, SlowdownRatios, TimingSummary, summaries, table,
};
use clap::Args;
use cuda::{
    CoRunMethod, CudaDevice, PaddingBench, PaddingOptions, PaddingPair, PaddingTiming, PairTiming,
};
use device::Device;

use crate::{environment, models};

/// How often the methods of a pair alternate.
const TURNS: usize = 3;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll bench padding --device cuda:0 --models models --json padding.json
  atoll bench padding --device cuda:0 --models models --pairs vgg19+resnet152 --seconds 1
  atoll bench padding --device cuda:0 --models models --methods alone,partition --partition-sms 8,24

The first network of a pair is real time, replayed without pause as one CUDA graph; the second is
best effort. Methods:
  alone      real time only; always measured, as the baseline
  free       best effort in a stream of low priority
  partition  the same on an SM partition, once for each of --partition-sms
  apart      the same, with real time on all other SMs only

Methods alternate. Best effort has the same launches under all of them, without clusters and not
preemptible; its share is relative to its throughput alone. Outputs of both networks are compared
bit by bit with those alone, and the command fails if they differ.")]
pub(crate) struct PaddingArgs {
    /// GPU: cuda:N
    #[arg(long, default_value = "cuda:0")]
    pub(crate) device: String,

    /// Folder of the models
    #[arg(long, value_name = "FOLDER")]
    pub(crate) models: Option<PathBuf>,

    /// Pairs like vgg19+resnet152, separated by commas, or ALL pairs of DISB's networks
    #[arg(long, default_value = "ALL")]
    pub(crate) pairs: String,

    /// Methods, separated by commas
    #[arg(
        long,
        alias = "ways",
        default_value = "alone,free,partition,apart",
        value_delimiter = ','
    )]
    pub(crate) methods: Vec<String>,

    /// SMs of partitions, multiples of 8, separated by commas
    #[arg(
        long,
        alias = "corners",
        default_value = "8,16,32,64",
        value_delimiter = ',',
        value_parser = clap::value_parser!(u32).range(8..=128)
    )]
    pub(crate) partition_sms: Vec<u32>,

    /// Seconds per method and pair
    #[arg(long, default_value_t = 0.2, value_parser = seconds)]
    pub(crate) seconds: f64,

    /// Seed of inputs
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// Print as JSON, or write it to a file
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub(crate) json: Option<Option<PathBuf>>,

    #[command(flatten)]
    pub(crate) settings: DeviceSettings,
}

/// Parses a length between a hundredth of a second and ten minutes.
fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("'{text}' is no number of seconds"))?;
    match (0.01..=600.0).contains(&seconds) {
        true => Ok(seconds),
        false => Err("a method takes between 0.01 and 600 seconds".to_string()),
    }
}

/// Runs the benchmark.
pub(crate) fn run(args: &PaddingArgs) -> Result<(), Failure> {
    let (pairs, methods) = (pairs(&args.pairs)?, methods(&args.methods, &args.partition_sms)?);
    let named = DeviceArgs { device: args.device.clone(), settings: args.settings.clone() };
    let device = assembly::open_gpu_with(&named, |options| options.partition_multiprocessors = 0)?;
    let mut table = NetworkTable::load(args, &device, &pairs)?;
    let mut report = PaddingReport {
        device: device.info().description.clone(),
        driver: environment::driver(&args.device),
        date: environment::today(),
        command: environment::command(),
        seed: args.seed,
        seconds: args.seconds,
        summaries: Vec::new(),
        pairs: Vec::new(),
    };
    let turn = Duration::from_secs_f64(args.seconds / TURNS as f64);
    let options = PaddingOptions { methods, turns: TURNS, turn };
    let progress = Progress::new(pairs.len() as u64, "pairs");
    for (number, pair) in pairs.iter().enumerate() {
        let measured = table.measure(pair, &options)?;
        print_pair(number + 1, pairs.len(), &measured);
        progress.advance();
        report.pairs.push(measured);
        report.summaries = summaries(&report.pairs);
        // After every pair, so that an interrupted run keeps its results.
        if let Some(Some(path)) = &args.json {
            write_file(path, &to_json(&report)?)?;
        }
    }
    drop(progress);
    finish(args, &report)
}

/// A real-time and a best-effort network.
type NetworkPair = (String, String);

fn pairs(requested: &str) -> Result<Vec<NetworkPair>, Failure> {
    let all = disb::pairs();
    let names: Vec<&str> = match requested {
        "ALL" => all.iter().map(String::as_str).collect(),
        list => list.split(',').map(str::trim).collect(),
    };
    let pair = |name: &&str| match name.split_once('+') {
        Some((real_time, best_effort)) if !real_time.is_empty() && !best_effort.is_empty() => {
            Ok((real_time.to_string(), best_effort.to_string()))
        }
        _ => Err(Failure::usage(format!(
            "'{name}' is no pair: name real time and best effort, like vgg19+resnet152, or ALL"
        ))),
    };
    names.iter().map(pair).collect()
}

/// The methods to measure, alone first, one for each partition size.
fn methods(requested: &[String], partitions: &[u32]) -> Result<Vec<CoRunMethod>, Failure> {
    let mut methods = vec![CoRunMethod::Alone];
    for name in requested {
        match name.trim() {
            "alone" => {}
            "free" => methods.push(CoRunMethod::Free),
            "partition" | "corner" => {
                methods.extend(partitions.iter().copied().map(CoRunMethod::Partition))
            }
            "apart" => methods.extend(partitions.iter().copied().map(CoRunMethod::Apart)),
            other => {
                return Err(Failure::usage(format!(
                    "there is no method '{other}'; known: alone, free, partition, apart"
                )));
            }
        }
    }
    let twice = |(at, method): (usize, &CoRunMethod)| methods[..at].contains(method);
    match methods.iter().enumerate().any(twice) {
        true => Err(Failure::usage("a method or a partition is named twice")),
        false => Ok(methods),
    }
}

/// The networks on the device, by name.
struct NetworkTable {
    bench: PaddingBench,
    numbers: BTreeMap<String, usize>,
}

impl NetworkTable {
    fn load(
        args: &PaddingArgs,
        device: &CudaDevice,
        pairs: &[NetworkPair],
    ) -> Result<NetworkTable, Failure> {
        let names: BTreeSet<&String> = pairs.iter().flat_map(|(rt, be)| [rt, be]).collect();
        let mut random = Random::new(args.seed);
        let mut table = NetworkTable { bench: device.padding_bench(), numbers: BTreeMap::new() };
        for name in names {
            let (plan, inputs) = models::read(args.models.as_deref(), name, &mut random)?;
            let (began, bar) = (Instant::now(), Progress::new(0, "kernels"));
            bar.describe(&format!("{name} "));
            let number = table.bench.add(&plan, &inputs, &|done, all| bar.set(done, all));
            let number = number.map_err(|err| Failure::failed(format!("{name}: {err}")))?;
            drop(bar);
            progress::note(&format!("{name}: loaded in {:.1} s", began.elapsed().as_secs_f64()));
            table.numbers.insert(name.clone(), number);
        }
        Ok(table)
    }

    fn measure(
        &mut self,
        (real_time, best_effort): &NetworkPair,
        options: &PaddingOptions,
    ) -> Result<PairReport, Failure> {
        let number = |name: &str| self.numbers.get(name).copied().unwrap_or(usize::MAX);
        let pair = PaddingPair { real_time: number(real_time), best_effort: number(best_effort) };
        let failed = |err| Failure::failed(format!("{real_time}+{best_effort}: {err}"));
        let timed = self.bench.measure(&pair, options).map_err(failed)?;
        Ok(PairReport {
            real_time: real_time.clone(),
            best_effort: best_effort.clone(),
            best_effort_alone: spread(&timed.best_effort_alone),
            methods: method_reports(&timed),
        })
    }
}

fn spread(timing: &PaddingTiming) -> TimingSummary {
    let PaddingTiming { replays, median_us, mean_us, p99_us } = *timing;
    TimingSummary { replays, median_us, mean_us, p99_us }
}

fn method_name(method: CoRunMethod) -> String {
    match method {
        CoRunMethod::Alone => "alone".to_string(),
        CoRunMethod::Free => "free".to_string(),
        CoRunMethod::Partition(count) => format!("partition {count}"),
        CoRunMethod::Apart(count) => format!("apart {count}"),
    }
}

/// Compares with real time alone, and with the throughput of best effort alone.
fn method_reports(timed: &PairTiming) -> Vec<MethodReport> {
    let alone = timed.methods.first().map(|method| spread(&method.real_time)).unwrap_or_default();
    let run_seconds = timed.best_effort_alone.median_us / 1e6;
    let report = |method: &cuda::MethodTiming| {
        let real_time = spread(&method.real_time);
        let share = method.best_effort_runs * run_seconds / method.seconds.max(f64::MIN_POSITIVE);
        MethodReport {
            method: method_name(method.method),
            multiprocessors: method.multiprocessors,
            real_time,
            ratio: SlowdownRatios::of(&real_time, &alone),
            best_effort_share: if method.seconds > 0.0 { share } else { 0.0 },
            best_effort_runs: method.best_effort_runs,
            wrong_real_time: method.wrong_real_time,
            wrong_best_effort: method.wrong_best_effort,
            checks: method.checks,
        }
    };
    timed.methods.iter().map(report).collect()
}

/// Prints one line on a measured pair.
fn print_pair(number: usize, of: usize, pair: &PairReport) {
    let method = |method: &MethodReport| {
        let (more, share) = ((method.ratio.median - 1.0) * 100.0, method.best_effort_share * 100.0);
        format!("{} {more:+.1} % for {share:.0} %", method.method)
    };
    let methods: Vec<String> = pair.methods.iter().skip(1).map(method).collect();
    let (real_time, best_effort) = (&pair.real_time, &pair.best_effort);
    progress::note(&format!("{number}/{of} {real_time}+{best_effort}: {}", methods.join(", ")));
}

fn to_json(report: &PaddingReport) -> Result<String, Failure> {
    let text = serde_json::to_string_pretty(report).map_err(Failure::failed)?;
    Ok(text + "\n")
}

fn finish(args: &PaddingArgs, report: &PaddingReport) -> Result<(), Failure> {
    match &args.json {
        Some(None) => print!("{}", to_json(report)?),
        _ => print!("{}", table(&report.pairs, &report.summaries)),
    }
    match &report.wrong()[..] {
        [] => Ok(()),
        wrong => {
            Err(Failure::failed(format!("outputs differ from those alone: {}", wrong.join(", "))))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda::MethodTiming;

    #[test]
    fn pairs_have_two_names() {
        assert_eq!(pairs("ALL").unwrap().len(), 25);
        let one = ("vgg19".to_string(), "resnet50".to_string());
        assert_eq!(pairs("vgg19+resnet50").unwrap(), [one]);
        for refused in ["vgg19", "+vgg19", "vgg19+", ""] {
            assert!(pairs(refused).is_err(), "{refused}");
        }
    }

    #[test]
    fn alone_is_first_and_every_partition_is_a_method() {
        let named = |list: &str| -> Vec<String> { list.split(',').map(str::to_string).collect() };
        let all = methods(&named("partition,free,alone"), &[8, 16]).unwrap();
        use CoRunMethod::{Alone, Free, Partition};
        assert_eq!(all, [Alone, Partition(8), Partition(16), Free]);
        assert!(methods(&named("free,unknown"), &[]).is_err());
        assert!(methods(&named("free,free"), &[]).is_err());
        assert!(methods(&named("partition"), &[8, 8]).is_err());
        assert!(seconds("0").is_err() && seconds("x").is_err() && seconds("0.5") == Ok(0.5));
    }

    #[test]
    fn shares_are_relative_to_best_effort_alone() {
        let timing = |median_us| PaddingTiming {
            replays: 9,
            median_us,
            mean_us: median_us,
            p99_us: median_us,
        };
        let method = |method, median_us, best_effort_runs| MethodTiming {
            method,
            multiprocessors: None,
            real_time: timing(median_us),
            best_effort_runs,
            seconds: 0.5,
            checks: 3,
            wrong_real_time: 0,
            wrong_best_effort: 0,
        };
        let methods =
            vec![method(CoRunMethod::Alone, 400.0, 0.0), method(CoRunMethod::Free, 500.0, 50.0)];
        let reports = method_reports(&PairTiming { best_effort_alone: timing(2000.0), methods });
        assert_eq!((reports[0].ratio.median, reports[0].best_effort_share), (1.0, 0.0));
        assert_eq!(reports[1].ratio.median, 1.25);
        // Fifty runs of two milliseconds in half a second.
        assert!((reports[1].best_effort_share - 0.2).abs() < 1e-9);
    }
}
