//! Arguments of `atoll bench strangers`.

use std::path::PathBuf;

use assembly::DeviceArgs;
use clap::Args;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll bench strangers --models models --rt resnet50 --device cuda:0 --seconds 300 --json out.json
  atoll bench strangers --models models --rt mobilenet --be minilm,unet --rate 20 --seed 7
  atoll bench strangers --models models --rt resnet50 -- --max-rt-slowdown 2

Starts a server on the ONNX files of the folder. A client per real-time network sends at --rate over
HTTP; a reply is timed from the moment its request was due. Clients have processors of their own
where there are at least 8. First real time is alone, then strangers are there, then it is alone
again. Every stranger has a best-effort model of its own. Of 100
actions, 78 send a request of new sizes, 8 close the connection before the reply, 4 unload the model
and load it again, 3 load a new version of it, 4 send a request that is wrong, 3 pause.

Lengths of sentences are log-normal with a median of 14 tokens and a sigma of 0.75, 3 to 200: a mean
of 18, near the 15.3 words of a sentence in Universal Dependencies' English Web Treebank (254,825
words in 16,621 sentences), which tokenizers cut into a fifth more pieces. Sides of pictures are
multiples of 32 from 96 to 384. A batch is 1 in 6 of 10 requests, and at most 8.

The command fails on a real-time request without a right reply, and on a stranger's that is not
answered as it must be. Timings never make it fail. Arguments after -- are those of atoll serve.")]
pub(crate) struct StrangersArgs {
    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    /// Folder of the networks
    #[arg(long, value_name = "FOLDER")]
    pub(crate) models: PathBuf,

    /// Real-time networks, by file name without .onnx
    #[arg(long, value_name = "NAME", value_delimiter = ',', required = true)]
    pub(crate) rt: Vec<String>,

    /// Best-effort networks, by file name without .onnx; all others of the folder unless given
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub(crate) be: Vec<String>,

    /// Requests a second of each real-time network
    #[arg(long, default_value_t = 100.0)]
    pub(crate) rate: f64,

    /// Clients that send best effort
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) strangers: u16,

    /// Seconds with strangers
    #[arg(long, default_value_t = 60.0)]
    pub(crate) seconds: f64,

    /// Seconds of real time alone, before and after
    #[arg(long, default_value_t = 15.0)]
    pub(crate) alone_seconds: f64,

    /// Seed of everything that is random
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// Print as JSON, or write it to a file
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub(crate) json: Option<Option<PathBuf>>,

    /// Arguments of atoll serve
    #[arg(last = true, value_name = "ARGUMENTS")]
    pub(crate) serve: Vec<String>,
}
