//! Arguments of `atoll bench swap`.

use std::path::PathBuf;

use assembly::DeviceSettings;
use clap::Args;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll bench swap --device cuda:0 --models models --count 5,50 --resident 4,20 --concurrency 1,64
  atoll bench swap --device cuda:0 --models models --network resnet50 --count 50 --resident 20 \\
                   --access zipf --co-located --large-model models/bert_large.onnx --json swap.json
  atoll bench swap --device cpu --models models --network magika --count 5 --resident 4 --seconds 2
  atoll bench swap --device cpu --models models --network magika --soak 2000
  atoll bench swap --device cuda:0 --models models --network resnet50 --large-model --seconds 20

Models are copies of the networks in the folder, each with weights of its own; every reply is
compared with that of the same model undisturbed. The CPU never evicts weights; there, loading takes
as long as their bytes need at --link.

--large-model alone serves the first network as real time at half of its throughput. Idle phases
alternate with phases in which a model of --large-model-mb megabytes is loaded and unloaded over and
over: first only its weights, then all of it, packed and prepared again each time. Both take three
times --seconds.

--soak: of 100 operations, 85 send a request to a loaded model, 9 to one that is not loaded, and 2
each load, unload and register a model (at most 24 are registered). There are five rounds; the first
is warm-up. After each round all models are unloaded and the device's memory is recorded by kind.
The command fails on an undocumented error, a wrong reply, weights that stay on the device, or if
the GPU's own tools report 64 MiB more after the last round than after the warm-up.")]
pub(crate) struct SwapArgs {
    /// Device: cuda:N, or cpu
    #[arg(long, default_value = "cpu")]
    pub(crate) device: String,

    /// Folder of the networks
    #[arg(long, value_name = "FOLDER")]
    pub(crate) models: PathBuf,

    /// Networks that models are copies of, in turn, by file name without .onnx
    #[arg(long, value_delimiter = ',', default_value = "resnet50")]
    pub(crate) network: Vec<String>,

    /// Number of models that are requested; several separated by commas
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "5",
        value_parser = clap::value_parser!(u16).range(1..=1000)
    )]
    pub(crate) count: Vec<u16>,

    /// How many of them fit into memory; as many numbers as for --count
    #[arg(
        long,
        alias = "room",
        value_delimiter = ',',
        default_value = "4",
        value_parser = clap::value_parser!(u16).range(1..=1000)
    )]
    pub(crate) resident: Vec<u16>,

    /// Order in which models are requested: sequential, uniform, zipf
    #[arg(long, value_delimiter = ',', default_value = "sequential,uniform,zipf")]
    pub(crate) access: Vec<String>,

    /// Requests outstanding; several separated by commas
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,64",
        value_parser = clap::value_parser!(u16).range(1..=4096)
    )]
    pub(crate) concurrency: Vec<u16>,

    /// Seconds of each case
    #[arg(long, default_value_t = 5.0)]
    pub(crate) seconds: f64,

    /// Class of requests: rt or be
    #[arg(long, default_value = "rt")]
    pub(crate) class: String,

    /// Also measure a pinned real-time model at half of its throughput while other models are
    /// loaded and evicted
    #[arg(long, alias = "beside")]
    pub(crate) co_located: bool,

    /// Also load a large model beside it: one from a file, or else one of random numbers
    #[arg(long, alias = "big", value_name = "FILE.onnx", num_args = 0..=1)]
    pub(crate) large_model: Option<Option<PathBuf>>,

    /// Megabytes of weights, on the device, of a large model of random numbers
    #[arg(
        long,
        alias = "big-mb",
        default_value_t = 1000,
        value_parser = clap::value_parser!(u64).range(1..=64_000)
    )]
    pub(crate) large_model_mb: u64,

    /// Instead: so many random operations on a whole server, from 64 clients
    #[arg(long, value_name = "OPERATIONS")]
    pub(crate) soak: Option<u64>,

    /// KiB of weights that are copied to a GPU at once
    #[arg(
        long,
        default_value_t = 2048,
        value_parser = clap::value_parser!(u64).range(2048..=1048576)
    )]
    pub(crate) chunk_kib: u64,

    /// Speed of loading weights to the CPU device, in MB/s
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) link: u64,

    /// Seed of access and inputs
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// Print as JSON, or write it to a file
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub(crate) json: Option<Option<PathBuf>>,

    #[command(flatten)]
    pub(crate) settings: DeviceSettings,
}
