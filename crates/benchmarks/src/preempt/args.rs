//! Arguments of `atoll bench preempt`.

use std::path::PathBuf;

use assembly::DeviceSettings;
use clap::Args;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll bench preempt
  atoll bench preempt --device cuda:0 --models models --json preempt.json
  atoll bench preempt --device cuda:0 --models models --best-effort resnet152 --rounds 10000

On a GPU best effort runs without pause and is preempted at random times, 200 per second: first by a
probe that reports when its first block runs and when every SM runs one, then by requests to the
real-time model. Outputs of best effort are compared bit by bit with those of an undisturbed run.")]
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
