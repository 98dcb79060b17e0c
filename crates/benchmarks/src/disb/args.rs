//! Arguments of `atoll bench disb`.

use std::path::PathBuf;

use assembly::{DeviceSettings, value_parsers};
use clap::Args;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll bench disb --device sim --workload A --policy ALL --json
  atoll bench disb --device sim --workload ALL --policy ALL --plot out.svg
  atoll bench disb --device sim --workload REAL --trace REAL.json --policy atoll
  atoll bench disb --device sim --workload A --policy rt_only,atoll --perfetto a.json
  atoll bench disb --device sim --gpu h200 --scaled --workload C --policy ALL
  atoll bench disb --device cuda:0 --models models --workload A,D --policy ALL --rates scaled \\
                   --seconds 10 --json disb.json --svg disb.svg
  atoll bench disb --device cuda:0 --models models --workload REAL --trace REAL.json \\
                   --rates scaled --soak 480 --json soak.json

With --soak one workload runs for so many seconds under one policy (atoll by default); its trace is
repeated. Meanwhile, at random times, best-effort copies of the networks are loaded, used and
unloaded, models in use are replaced, and requests are cancelled. Every reply is compared bit by bit
with that of an undisturbed run, and the recorded trace is checked four times per second. Memory of
the device and of the process, threads and open files are sampled about every second. The first
tenth of the time is warm-up; the medians of the second and the last tenth are compared. The
command fails if the last is more by 2 % and 16 MiB on the device, by 5 % and 64 MiB in the
process, by 8 threads or by 16 files.

On a real device the folder holds resnet152.onnx, densenet201.onnx, vgg19.onnx, inception_v3.onnx
and distilbert.onnx, as far as the workloads need them; real time alone always runs first.")]
pub(crate) struct DisbArgs {
    /// Device: sim for virtual time; cpu or cuda:N for real models in real time
    #[arg(long, default_value = "sim")]
    pub(crate) device: String,

    /// Folder of the benchmark's models, for a real device
    #[arg(long, value_name = "FOLDER")]
    pub(crate) models: Option<PathBuf>,

    /// A, B, C, D, E, REAL, several separated by commas, or ALL; PAIRS for every real-time model
    /// with every best-effort one (such as vgg19+resnet152)
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

    /// On a real device: seconds of warm-up before each workload, and of each model alone
    #[arg(long, value_name = "SECONDS", default_value_t = 0.4)]
    pub(crate) warm_seconds: f64,

    /// On a real device: max slowdown of real time, in percent, for best effort that co-runs
    #[arg(
        long,
        alias = "bearable",
        value_name = "PERCENT",
        default_value_t = 1.0,
        value_parser = value_parsers::max_rt_slowdown
    )]
    pub(crate) max_rt_slowdown: f64,

    /// Instead: soak one workload for so many seconds on a real device, with churn
    #[arg(
        long,
        value_name = "SECONDS",
        conflicts_with_all = ["seconds", "plot"],
        value_parser = soak_seconds
    )]
    pub(crate) soak: Option<f64>,

    /// Seed of random arrivals, and of the churn of --soak
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// Scale the rates so that real time alone uses the same share of this GPU as of the paper's
    #[arg(long)]
    pub(crate) scaled: bool,

    /// On a real device: literal as published, scaled as with --scaled, or both
    #[arg(long)]
    pub(crate) rates: Option<String>,

    /// File of DISB's REAL workload, in its JSON format
    #[arg(long, env = "ATOLL_DISB_REAL", value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,

    /// Print as JSON, or write it to a file
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub(crate) json: Option<Option<PathBuf>>,

    /// Draw latency, throughput and preemption as bars
    #[arg(long, alias = "svg", value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,

    /// Write requests and runs in the trace event format, for ui.perfetto.dev: each workload under
    /// each policy is a process. At most 1,000,000 spans in all
    #[arg(long, value_name = "FILE.json", conflicts_with = "soak")]
    pub(crate) perfetto: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) settings: DeviceSettings,
}

/// Parses a length between a second and a week.
fn soak_seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("'{text}' is no number of seconds"))?;
    match (1.0..=604_800.0).contains(&seconds) {
        true => Ok(seconds),
        false => Err("a soak takes between 1 and 604800 seconds".to_string()),
    }
}
