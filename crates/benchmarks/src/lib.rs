//! The `atoll bench` commands: one module per benchmark, with its arguments, its measurement and
//! its report.
//!
//! What a benchmark computes without a device or a socket (workloads, simulations, load generators,
//! reports) is in the crate `bench`. To add a benchmark, add a module with `Args` and `run`, and a
//! variant to `Benchmark`.

mod batching;
mod cluster;
mod disb;
mod environment;
mod faults;
mod frontend;
mod models;
mod output;
mod padding;
mod preempt;
mod server;
mod strangers;
mod swap;

use assembly::Failure;
use clap::{Args, Subcommand};

use crate::batching::BatchingArgs;
use crate::cluster::ClusterStudyArgs;
use crate::disb::DisbArgs;
use crate::faults::FaultsArgs;
use crate::frontend::FrontendBenchArgs;
use crate::padding::PaddingArgs;
use crate::preempt::PreemptArgs;
use crate::server::ServerBenchArgs;
use crate::strangers::StrangersArgs;
use crate::swap::SwapArgs;

pub use crate::server::{ParseServeArguments, ServeSettings};

/// Arguments of `atoll bench`.
#[derive(Clone, Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Clone, Debug, Subcommand)]
enum Benchmark {
    /// DISB: real-time latency and overall throughput of every execution policy
    Disb(Box<DisbArgs>),
    /// How long preemption takes, by model and by kernel length
    #[command(alias = "preemption")]
    Preempt(PreemptArgs),
    /// Nexus's case studies on 16 GPUs, its techniques turned off one after another (figures 10 to
    /// 12)
    Cluster(ClusterStudyArgs),
    /// Latency that a frontend adds to a request sent directly to the backend
    Frontend(FrontendBenchArgs),
    /// Share of the engine's throughput that remains over gRPC and REST, and the cores it takes
    Server(Box<ServerBenchArgs>),
    /// Real-time latency beside clients that change shapes, load, update, unload and cancel
    Strangers(Box<StrangersArgs>),
    /// Faults of a GPU while it serves: how long they keep it from serving, and what is answered
    Faults(Box<FaultsArgs>),
    /// More models than memory: what loading and evicting weights costs
    Swap(Box<SwapArgs>),
    /// Batching policies: Nexus's drop curves and Ebird's step load, in virtual time or on a real
    /// device
    Batching(Box<BatchingArgs>),
    /// Co-running: what best effort gains beside real time and costs it, in streams and on SM
    /// partitions
    Padding(Box<PaddingArgs>),
}

/// Runs a benchmark. `parse_serve` parses arguments of `atoll serve`, which belong to the caller.
///
/// # Errors
/// When the arguments make no sense, something fails, or outputs are wrong.
pub fn run(args: &BenchArgs, parse_serve: ParseServeArguments) -> Result<(), Failure> {
    match &args.benchmark {
        Benchmark::Disb(args) => disb::run(args),
        Benchmark::Preempt(args) => preempt::run(args),
        Benchmark::Cluster(args) => cluster::run(args),
        Benchmark::Frontend(args) => frontend::run(args),
        Benchmark::Server(args) => server::run(args, parse_serve),
        Benchmark::Strangers(args) => strangers::run(args),
        Benchmark::Faults(args) => faults::run(args),
        Benchmark::Swap(args) => swap::run(args),
        Benchmark::Batching(args) => batching::run(args),
        Benchmark::Padding(args) => padding::run(args),
    }
}
