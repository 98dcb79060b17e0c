//! `atoll bench`: published experiments, side by side.

use std::path::PathBuf;

use bench::cluster_sim::study;
use bench::disb::{self, DisbOptions};
use bench::plot::{self, Chart};
use bench::report::{Report, table};
use bench::{batching, preemption};
use clap::{Args, Subcommand};
use runtime::policy::NAMES;

use crate::args::DeviceSettings;
use crate::failure::Failure;
use crate::frontend_bench::FrontendBenchArgs;
use crate::padding_command::PaddingArgs;
use crate::server_bench::ServerBenchArgs;
use crate::sim_command::write;
use crate::swap_command::SwapArgs;
use crate::{
    batching_command, disb_command, frontend_bench, padding_command, preempt_command, server_bench,
    swap_command,
};

#[derive(Clone, Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) which: Which,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Which {
    /// DISB: real-time latency and overall throughput of every execution policy
    Disb(Box<DisbArgs>),
    /// How long preemption takes, by model and by shape of the work
    #[command(alias = "preemption")]
    Preempt(PreemptArgs),
    /// Nexus's case studies on 16 GPUs, its techniques turned off one after another (figures 10 to 12)
    Cluster {
        /// Print as JSON
        #[arg(long)]
        json: bool,
    },
    /// What a frontend adds to a request, against the same request sent to the backend
    Frontend(FrontendBenchArgs),
    /// What of the engine's rate is left over gRPC and REST, and how many cores that takes
    Server(Box<ServerBenchArgs>),
    /// More models than memory: what swapping costs those who wait for it, and those who do not
    Swap(Box<SwapArgs>),
    /// Batching policies: Nexus's drop curves and Ebird's step load, in virtual time or on a real device
    Batching(Box<BatchingArgs>),
    /// Padding: what best effort gets beside real time and costs it, in streams and in a partition
    Padding(Box<PaddingArgs>),
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll bench batching
  atoll bench batching --device cuda:0 --models models --network resnet50,vgg19 --json batching.json --svg batching.svg
  atoll bench batching --device cpu --models models --network resnet50 --policy window,auto --seconds 5

On a real device each network gets a low and a high load under every policy, then rates are tried for the highest one with 99 of
100 answers inside the objective. 'window' assembles batches of up to 32 as TensorFlow Serving does, with each of --waits; the
best that waits is what others are compared with.")]
pub(crate) struct BatchingArgs {
    /// Device: sim for virtual time; cpu or cuda:N for real models in real time
    #[arg(long, default_value = "sim")]
    pub(crate) device: String,

    /// Folder of the models, for a real device
    #[arg(long, value_name = "FOLDER")]
    pub(crate) models: Option<PathBuf>,

    /// Networks, by file name without .onnx, separated by commas
    #[arg(
        long,
        default_value = "resnet50,resnet101,resnet152,inception_v3,vgg16,vgg19",
        value_delimiter = ','
    )]
    pub(crate) network: Vec<String>,

    /// Policies, separated by commas
    #[arg(long, default_value = "window,elastic,adaptive,auto", value_delimiter = ',')]
    pub(crate) policy: Vec<String>,

    /// Waits of the window in microseconds, separated by commas
    #[arg(long, default_value = "0,1000,2000,5000", value_delimiter = ',')]
    pub(crate) waits: Vec<u64>,

    /// Seconds of each load
    #[arg(long, default_value_t = 1.0)]
    pub(crate) seconds: f64,

    /// Rates tried for the highest inside the objective
    #[arg(long, default_value_t = 6)]
    pub(crate) probes: usize,

    /// The objective in milliseconds; thrice a batch of 32 when absent
    #[arg(long)]
    pub(crate) slo_ms: Option<f64>,

    /// Low load in percent of what the device can do
    #[arg(long, default_value_t = 5.0)]
    pub(crate) low: f64,

    /// High load in percent of what the device can do
    #[arg(long, default_value_t = 70.0)]
    pub(crate) high: f64,

    /// Batches that may run side by side
    #[arg(long, default_value_t = 2)]
    pub(crate) lanes: usize,

    /// Seed of arrivals and inputs
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// Print as JSON, or write it to a file
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub(crate) json: Option<Option<PathBuf>>,

    /// Draw latencies and rates as bars
    #[arg(long, alias = "plot", value_name = "FILE.svg")]
    pub(crate) svg: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) settings: DeviceSettings,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll bench disb --device sim --workload A --policy ALL --json
  atoll bench disb --device sim --workload ALL --policy ALL --plot out.svg
  atoll bench disb --device sim --workload REAL --trace REAL.json --policy atoll
  atoll bench disb --device sim --gpu h200 --scaled --workload C --policy ALL
  atoll bench disb --device cuda:0 --models models --workload A,D --policy ALL --rates scaled \\
                   --seconds 10 --json disb.json --svg disb.svg
  atoll bench disb --device cuda:0 --models models --workload REAL --trace REAL.json --rates scaled \\
                   --soak 480 --json soak.json

With --soak one workload runs for so many seconds under one policy (atoll unless --policy says otherwise), its trace played
again whenever it ends. Beside it, at random, further best-effort copies of the networks are loaded, asked and unloaded,
models in use are replaced, and requests are given up as by clients that disconnect. Every answer is compared bit by bit
with an undisturbed run's. The checkers go over the recorded trace as it comes, four times a second, and what they have seen
is forgotten. Memory of the device and of the process, threads and open files are read about every second, when no copy is
there; the first tenth is warm-up, the second is what the last is compared with. The command fails when the median of the last
is more by 2 % and 16 MiB on the device, by 5 % and 64 MiB in the process, by 8 threads or by 16 files.

On a real device the folder holds resnet152.onnx, densenet201.onnx, vgg19.onnx, inception_v3.onnx and
distilbert.onnx, as far as the workloads need them; real time alone always runs first.")]
pub(crate) struct DisbArgs {
    /// Device: sim for virtual time; cpu or cuda:N for real models in real time
    #[arg(long, default_value = "sim")]
    pub(crate) device: String,

    /// Folder of the benchmark's models, for a real device
    #[arg(long, value_name = "FOLDER")]
    pub(crate) models: Option<PathBuf>,

    /// A, B, C, D, E, REAL, several of them separated by commas, ALL of these, or PAIRS: every real-time model beside
    /// every best-effort one, alone (vgg19+resnet152 is one of them)
    #[arg(long, default_value = "ALL")]
    pub(crate) workload: String,

    /// An execution policy, several separated by commas, or ALL
    #[arg(long, default_value = "ALL")]
    pub(crate) policy: String,

    /// GPU of the simulation: mi50, h200, or a profile file in JSON
    #[arg(long, default_value = "mi50")]
    pub(crate) gpu: String,

    /// Seconds of each workload
    #[arg(long, default_value_t = 60.0)]
    pub(crate) seconds: f64,

    /// On a real device: seconds of load before each of them, and of each model on its own
    #[arg(long, value_name = "SECONDS", default_value_t = 0.4)]
    pub(crate) warm_seconds: f64,

    /// On a real device: how much longer, in percent, real time may take so that best effort goes on beside it
    #[arg(long, alias = "bearable", value_name = "PERCENT", default_value_t = 1.0, value_parser = crate::args::max_rt_slowdown)]
    pub(crate) max_rt_slowdown: f64,

    /// Instead: one workload for so many seconds on a real device, disturbed all the time; does anything break or grow?
    #[arg(long, value_name = "SECONDS", conflicts_with_all = ["seconds", "plot"], value_parser = soak_seconds)]
    pub(crate) soak: Option<f64>,

    /// Seed of random arrivals, and of what disturbs with --soak
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// Raise the rates so that real time alone uses as much of this GPU as it used of the paper's
    #[arg(long)]
    pub(crate) scaled: bool,

    /// On a real device: literal as published, scaled as with --scaled, or both
    #[arg(long)]
    pub(crate) rates: Option<String>,

    /// DISB's REAL workload in its own JSON
    #[arg(long, env = "ATOLL_DISB_REAL", value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,

    /// Print as JSON, or write it to a file
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub(crate) json: Option<Option<PathBuf>>,

    /// Draw latency, throughput and preemption as bars
    #[arg(long, alias = "svg", value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) settings: DeviceSettings,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll bench preempt
  atoll bench preempt --device cuda:0 --models models --json preempt.json
  atoll bench preempt --device cuda:0 --models models --best-effort resnet152 --rounds 10000

On a GPU best effort runs without pause and is made to leave at random times, 200 a second: by a probe that tells when its
first block runs and when it has one on every multiprocessor, then by real requests of the real-time model. Outputs of best
effort are compared bit by bit with an undisturbed run's.")]
pub(crate) struct PreemptArgs {
    /// Device: sim for virtual time, or cuda:N
    #[arg(long, default_value = "sim")]
    pub(crate) device: String,

    /// Folder of the models, for a GPU
    #[arg(long, value_name = "FOLDER")]
    pub(crate) models: Option<PathBuf>,

    /// Best-effort models, separated by commas
    #[arg(
        long,
        default_value = "resnet152,densenet201,vgg19,inceptionv3,distilbert",
        value_delimiter = ','
    )]
    pub(crate) best_effort: Vec<String>,

    /// Real-time model
    #[arg(long, default_value = "vgg19")]
    pub(crate) real_time: String,

    /// Preemptions of each kind
    #[arg(long, default_value_t = 400)]
    pub(crate) rounds: usize,

    /// Seed of times and inputs
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// Print as JSON, or write it to a file
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub(crate) json: Option<Option<PathBuf>>,

    #[command(flatten)]
    pub(crate) settings: DeviceSettings,
}

/// Runs the command.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    match &args.which {
        Which::Disb(args) => run_disb(args),
        Which::Preempt(args) if args.device == "sim" => run_preemption(args.json.is_some()),
        Which::Preempt(args) => preempt_command::run(args),
        Which::Cluster { json } => run_cluster(*json),
        Which::Frontend(args) => frontend_bench::run(args),
        Which::Server(args) => server_bench::run(args),
        Which::Swap(args) => swap_command::run(args),
        Which::Batching(args) if args.device == "sim" => run_batching(args.json.is_some()),
        Which::Batching(args) => batching_command::run(args),
        Which::Padding(args) => padding_command::run(args),
    }
}

/// Between a second and a week.
fn soak_seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("'{text}' is no number of seconds"))?;
    match (1.0..=604_800.0).contains(&seconds) {
        true => Ok(seconds),
        false => Err("a soak takes between 1 and 604800 seconds".to_string()),
    }
}

fn run_disb(args: &DisbArgs) -> Result<(), Failure> {
    if args.device != "sim" {
        return disb_command::run(args);
    }
    if args.soak.is_some() {
        return Err(Failure::usage("--soak needs a real device: --device cpu or cuda:N"));
    }
    let policies: Vec<String> = match args.policy.as_str() {
        "ALL" => NAMES.map(str::to_string).into(),
        list => list.split(',').map(|name| name.trim().to_string()).collect(),
    };
    let pairs = disb::pairs();
    let mut workloads: Vec<&str> = match args.workload.as_str() {
        "ALL" => disb::WORKLOADS.into(),
        "PAIRS" => pairs.iter().map(String::as_str).collect(),
        list => list.split(',').map(str::trim).collect(),
    };
    if args.workload == "ALL" && args.trace.is_some() {
        workloads.push("REAL");
    }
    let mut reports = Vec::new();
    for workload in workloads {
        let scenario = scenario(args, workload)?;
        reports.extend(disb::compare(workload, &scenario, &policies).map_err(Failure::usage)?);
    }
    if let Some(path) = &args.plot {
        write(path, &plot::svg(&charts(&reports)))?;
    }
    match &args.json {
        None => print!("{}", table(&reports)),
        Some(file) => {
            let text = serde_json::to_string_pretty(&reports).map_err(Failure::failed)? + "\n";
            match file {
                Some(path) => write(path, &text)?,
                None => print!("{text}"),
            }
        }
    }
    Ok(())
}

fn scenario(args: &DisbArgs, workload: &str) -> Result<bench::scenario::Scenario, Failure> {
    let scaled = args.scaled || args.rates.as_deref() == Some("scaled");
    let (gpu, seed) = (args.gpu.clone(), args.seed);
    let options = DisbOptions { gpu, seconds: args.seconds, seed, scaled };
    if workload == "REAL" {
        let path = args.trace.as_ref().ok_or_else(|| {
            Failure::usage("REAL is read from DISB's own file: give it with --trace")
        })?;
        return disb::read(path, workload, &options).map_err(Failure::usage);
    }
    disb::workload(workload, &options).ok_or_else(|| {
        Failure::usage(format!(
            "there is no workload '{workload}'; known: A, B, C, D, E, REAL, ALL, PAIRS, \
             or one pair like vgg19+resnet152"
        ))
    })
}

fn charts(reports: &[Report]) -> Vec<Chart> {
    let distinct = |name: fn(&Report) -> &String| {
        let mut names: Vec<String> = Vec::new();
        for report in reports {
            if !names.contains(name(report)) {
                names.push(name(report).clone());
            }
        }
        names
    };
    let (groups, policies) = (distinct(|r| &r.workload), distinct(|r| &r.policy));
    let chart = |title: &str, unit: &str, value: fn(&Report) -> f64| {
        let of = |policy: &String| {
            let mine = reports.iter().filter(|report| report.policy == *policy);
            (policy.clone(), mine.map(value).collect())
        };
        Chart {
            title: title.to_string(),
            unit: unit.to_string(),
            groups: groups.clone(),
            bars: policies.iter().map(of).collect(),
        }
    };
    vec![
        chart("Mean real-time latency", "ms", |r| r.rt_mean_us / 1e3),
        chart("Overall throughput", "requests/s", |r| r.throughput_rps),
        chart("Preemption, median", "us", |r| r.preempt_p50_us),
    ]
}

fn run_preemption(json: bool) -> Result<(), Failure> {
    let models = preemption::by_model().map_err(Failure::failed)?;
    let shapes = preemption::by_shape().map_err(Failure::failed)?;
    if json {
        println!("{:#}", serde_json::json!({ "by_model": models, "by_shape": shapes }));
        return Ok(());
    }
    println!(
        "{:<24}{:>10}{:>10}{:>10}{:>10}",
        "preempted, mean us", "atoll", "reef", "reef_n", "wait"
    );
    for point in models.iter().chain(&shapes) {
        let (name, atoll, reef) = (&point.preempted, point.atoll_us, point.reef_us);
        println!("{name:<24}{atoll:>10}{reef:>10}{:>10}{:>10}", point.reef_n_us, point.wait_us);
    }
    Ok(())
}

fn run_batching(json: bool) -> Result<(), Failure> {
    let (drops, steps) = (batching::nexus(20_000), batching::ebird());
    if json {
        println!("{:#}", serde_json::json!({ "nexus": drops, "ebird": steps }));
        return Ok(());
    }
    println!(
        "Nexus: objective 100 ms, optimum 500/s; share not answered in time at 450/s, and the"
    );
    println!("highest rate of which 99 % is answered in time");
    println!(
        "{:>9}{:>10}{:>12}{:>13}{:>9}{:>9}{:>12}",
        "alpha ms", "arrivals", "lazy bad %", "early bad %", "lazy/s", "early/s", "deferred/s"
    );
    for p in &drops {
        println!(
            "{:>9}{:>10}{:>12}{:>13}{:>9}{:>9}{:>12}",
            p.alpha_ms,
            p.arrivals,
            p.lazy_bad_pct,
            p.early_bad_pct,
            p.lazy_rps,
            p.early_rps,
            p.deferred_rps
        );
    }
    println!("\nEbird: 150 requests 10 ms apart, then 250 requests 0.25 ms apart; mean latency");
    println!("{:<14}{:>10}{:>10}", "policy", "slow ms", "fast ms");
    for row in &steps {
        println!("{:<14}{:>10}{:>10}", row.policy, row.slow_ms, row.fast_ms);
    }
    Ok(())
}

fn run_cluster(json: bool) -> Result<(), Failure> {
    let studies = [
        ("game, figure 10", study::figure_10()),
        ("traffic, figure 11", study::figure_11(false)),
        ("traffic in rush hour, figure 12", study::figure_11(true)),
    ];
    if json {
        let rows: serde_json::Map<String, serde_json::Value> = studies
            .into_iter()
            .map(|(title, rows)| (title.to_string(), serde_json::json!(rows)))
            .collect();
        println!("{:#}", serde_json::Value::Object(rows));
        return Ok(());
    }
    studies.iter().for_each(|(title, rows)| println!("{}", study::text(title, rows)));
    Ok(())
}
