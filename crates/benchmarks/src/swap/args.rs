//! Arguments of `atoll bench swap`.

use std::path::PathBuf;

use assembly::DeviceSettings;
use clap::Args;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll bench swap --device cuda:0 --models models --count 5,50 --room 4,20 --concurrency 1,64
  atoll bench swap --device cuda:0 --models models --network resnet50 --count 50 --room 20 \\
                   --access zipf --beside --big models/bert_large.onnx --json swap.json
  atoll bench swap --device cpu --models models --network magika --count 5 --room 4 --seconds 2
  atoll bench swap --device cpu --models models --network magika --soak 2000
  atoll bench swap --device cuda:0 --models models --network resnet50 --big --seconds 20 --json big.json

Models are copies of the networks in the folder, each with weights of its own; every answer is compared with that of the same
model undisturbed. On the CPU, whose weights are always there, bringing them takes the time their bytes need at --link.

--big alone serves the first network as real time at half of what it can do, in stretches with nothing beside it and in
stretches in which a model of --big-mb megabytes of weights is loaded and unloaded over and over: first its weights alone, then
all of it, packed and prepared anew each time. Both take three times --seconds.

--soak: 85 of 100 operations ask a model that is in service, 9 one that is not, 2 each load, unload and register (24 at most are
there). In five rounds, the first of which is warm-up; behind each everything is unloaded and what the device holds is put
down by kind. It fails for an error that is not documented, a wrong answer, weights that stay, or 64 MiB more by the GPU's own
count after the last round than after the warm-up.")]
pub(crate) struct SwapArgs {
    /// Device: cuda:N, or cpu
    #[arg(long, default_value = "cpu")]
    pub(crate) device: String,

    /// Folder of the networks
    #[arg(long, value_name = "FOLDER")]
    pub(crate) models: PathBuf,

    /// Networks to make models of, in turn, by file name without .onnx
    #[arg(long, value_delimiter = ',', default_value = "resnet50")]
    pub(crate) network: Vec<String>,

    /// How many models are asked for; several separated by commas
    #[arg(long, value_delimiter = ',', default_value = "5", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) count: Vec<u16>,

    /// How many of them have room, as many numbers as for --count
    #[arg(long, value_delimiter = ',', default_value = "4", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) room: Vec<u16>,

    /// Order in which they are asked for: sequential, uniform, zipf
    #[arg(long, value_delimiter = ',', default_value = "sequential,uniform,zipf")]
    pub(crate) access: Vec<String>,

    /// Requests outstanding; several separated by commas
    #[arg(long, value_delimiter = ',', default_value = "1,64", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) concurrency: Vec<u16>,

    /// Seconds of each case
    #[arg(long, default_value_t = 5.0)]
    pub(crate) seconds: f64,

    /// Class of requests: rt or be
    #[arg(long, default_value = "rt")]
    pub(crate) class: String,

    /// Also ask one pinned model regularly, at half of what it can do, while others swap and load
    #[arg(long)]
    pub(crate) beside: bool,

    /// Load a large model beside it: one from a file, or else one made of random numbers
    #[arg(long, value_name = "FILE.onnx", num_args = 0..=1)]
    pub(crate) big: Option<Option<PathBuf>>,

    /// Megabytes of weights, on the device, of a large model that is made
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=64_000))]
    pub(crate) big_mb: u64,

    /// Instead: so many random operations on a whole server, from 64 clients
    #[arg(long, value_name = "OPERATIONS")]
    pub(crate) soak: Option<u64>,

    /// KiB of weights that are copied to a GPU at once
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u64).range(2048..=1048576))]
    pub(crate) chunk_kib: u64,

    /// How fast weights come to the CPU device, in MB/s
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) link: u64,

    /// Seed of orders and inputs
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// Print as JSON, or write it to a file
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub(crate) json: Option<Option<PathBuf>>,

    #[command(flatten)]
    pub(crate) settings: DeviceSettings,
}
