//! Arguments of `atoll bench batching`.

use std::path::PathBuf;

use assembly::DeviceSettings;
use clap::Args;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll bench batching
  atoll bench batching --device cuda:0 --models models --network resnet50,vgg19 \\
                       --json batching.json --svg batching.svg
  atoll bench batching --device cpu --models models --network resnet50 --policy window,auto

On a real device each network gets a low and a high load under every policy. Then several rates are
tried to find the highest one with 99 of 100 replies within the SLO. 'window' forms batches of up to
32 as TensorFlow Serving does, with each of --waits; the best of those that wait is the baseline.")]
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

    /// Number of rates tried to find the highest within the SLO
    #[arg(long, default_value_t = 6)]
    pub(crate) probes: usize,

    /// SLO in milliseconds [default: three times a batch of 32]
    #[arg(long)]
    pub(crate) slo_ms: Option<f64>,

    /// Low load in percent of the device's throughput
    #[arg(long, default_value_t = 5.0)]
    pub(crate) low: f64,

    /// High load in percent of the device's throughput
    #[arg(long, default_value_t = 70.0)]
    pub(crate) high: f64,

    /// Batches that may run at the same time
    #[arg(long, alias = "lanes", default_value_t = 2)]
    pub(crate) concurrent_batches: usize,

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
