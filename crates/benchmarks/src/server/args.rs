//! Arguments of `atoll bench server`.

use std::path::PathBuf;

use assembly::DeviceArgs;
use clap::{Args, ValueEnum};

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll bench server --model resnet50.onnx --device cuda:0 --json server.json
  atoll bench server --models models --network resnet50 --clients 256 --connections 16 --rounds 5
  atoll bench server --model tiny.onnx --protocols grpc -- --concurrent-rt-batches 4
  atoll bench server --model tiny.onnx --security none,tls,tls-token --json overhead.json
  atoll bench server --model tiny.onnx --viewers 0,1,5 --rounds 20

Arguments after -- are those of atoll serve; they apply to the engine alone, too.")]
pub(crate) struct ServerBenchArgs {
    /// The ONNX file; settings beside it apply, as for atoll serve
    #[arg(long, value_name = "FILE.onnx", required_unless_present = "models")]
    pub(crate) model: Option<PathBuf>,

    /// Folder of models, with --network
    #[arg(long, value_name = "FOLDER", conflicts_with = "model")]
    pub(crate) models: Option<PathBuf>,

    /// Network of the folder, by file name without .onnx
    #[arg(long, default_value = "resnet50")]
    pub(crate) network: String,

    /// Size of a symbolic dimension of the inputs; 1 unless given
    #[arg(long, value_name = "SYMBOL=SIZE")]
    pub(crate) bind: Vec<String>,

    /// Requests outstanding, over all connections
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) clients: u16,

    /// gRPC connections, each with a thread; REST has a connection per outstanding request, on as
    /// many threads
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) connections: u16,

    /// Threads that send requests to the engine alone
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) engine_threads: u16,

    /// Seconds of one measurement
    #[arg(long, default_value_t = 3.0)]
    pub(crate) seconds: f64,

    /// Measurements of each kind
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) rounds: u16,

    /// Max seconds of warm-up of each kind; it ends when the rate is stable
    #[arg(long, default_value_t = 30)]
    pub(crate) warm_secs: u64,

    /// Protocols, separated by commas
    #[arg(long, value_enum, default_value = "grpc,rest", value_delimiter = ',')]
    pub(crate) protocols: Vec<Protocol>,

    /// Protection of the connections, separated by commas: each has a server of its own, measured
    /// alternately, and rates are compared with those of the first
    #[arg(long, value_enum, default_value = "none", value_delimiter = ',')]
    pub(crate) security: Vec<Security>,

    /// Viewers of the console's live stream, separated by commas: each number is measured
    /// alternately, and compared with the first in the same round
    #[arg(long, value_name = "NUMBER", default_value = "0", value_delimiter = ',',
          value_parser = clap::value_parser!(u16).range(0..=16))]
    pub(crate) viewers: Vec<u16>,

    /// Seconds the server may take until it is ready
    #[arg(long, default_value_t = 300)]
    pub(crate) start_timeout_secs: u64,

    /// Another atoll binary to compare with, measured alternately
    #[arg(long, value_name = "FILE")]
    pub(crate) against: Option<PathBuf>,

    /// Seed of the inputs
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// Print as JSON, or write it to a file
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub(crate) json: Option<Option<PathBuf>>,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    /// Further arguments of atoll serve
    #[arg(last = true)]
    pub(crate) serve: Vec<String>,
}

/// Protocol of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Protocol {
    /// Raw tensors in protobuf
    Grpc,
    /// Binary tensors after JSON
    Rest,
}

/// Protection of the connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Security {
    /// Plain text, no credentials
    None,
    /// TLS
    Tls,
    /// TLS, and a token in every request
    TlsToken,
}

impl Security {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Security::None => "plain",
            Security::Tls => "TLS",
            Security::TlsToken => "TLS, token",
        }
    }
}

impl Protocol {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Protocol::Grpc => "gRPC",
            Protocol::Rest => "REST",
        }
    }
}
