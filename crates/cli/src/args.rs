//! The command line: every flag has an environment variable, every command an example.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use assembly::{DeviceArgs, Failure, value_parsers};
use base::Bytes;
use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use server::ServerOptions;

use crate::apply_args::ApplyArgs;
use crate::security_args::{Ports, SecurityArgs};

use crate::registry_args::{ModelCheckArgs, RegistryArgs};

/// Serves neural networks: real-time models reply as if alone, best-effort models use the remaining
/// time.
#[derive(Debug, Parser)]
#[command(name = "atoll", version, max_term_width = 100)]
#[command(after_help = "Examples:
  atoll demo                                serve a model under a mixed load
  atoll serve --model-repository models     serve every model of a folder
  atoll check model.onnx                    operators, shapes, memory
  atoll run model.onnx --repeat 50          latency and the slowest steps")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Log level: error, warn, info, debug, trace, or per module
    #[arg(long, global = true, env = "ATOLL_LOG", default_value = "info")]
    pub(crate) log: String,

    /// Log as JSON lines
    #[arg(long, global = true, env = "ATOLL_LOG_JSON")]
    pub(crate) log_json: bool,

    /// Max memory in MiB of requests, their outputs and temporaries, and of models on the CPU;
    /// requests beyond it get 413 or 503 [default: 80 % of the cgroup's or the machine's memory]
    #[arg(
        long,
        global = true,
        env = "ATOLL_MEMORY_LIMIT_MIB",
        value_parser = clap::value_parser!(u64).range(16..)
    )]
    pub(crate) memory_limit_mib: Option<u64>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve models over HTTP and gRPC (Open Inference Protocol v2)
    Serve(Box<ServeArgs>),
    /// Serve the built-in digits model under a mixed load
    Demo(DemoArgs),
    /// Print what a model needs and whether it runs here
    Check(CheckArgs),
    /// Run a model on given or random inputs and time it
    Run(RunArgs),
    /// Time a model on a GPU: every variant of every step, and the whole model at several batch
    /// sizes
    Profile(ProfileArgs),
    /// Make a quantized file of a float model, calibrated on samples, with its measured accuracy
    Quantize(crate::quantize_command::QuantizeArgs),
    /// Make libraries of GPU kernels that are compiled ahead
    Kernels(crate::kernels_command::KernelsArgs),
    /// Run the conformance tests of a device on this machine
    Conformance(ConformanceArgs),
    /// List the models of a repository and of the registry
    Models(ModelsArgs),
    /// Check, repair, export or import the registry; list and release quarantined models
    Registry(crate::registry_args::RegistryCommandArgs),
    /// Check the model on standard input; for the server's own use
    #[command(hide = true)]
    ModelCheck,
    /// Simulate a scenario in virtual time and check it
    Sim(crate::sim_command::SimArgs),
    /// Run benchmarks: policies, preemption, batching, memory, server, cluster
    Bench(benchmarks::BenchArgs),
    /// Plan services onto GPUs (slices, batches, processes), with a proof of how few GPUs suffice
    Plan(PlanArgs),
    /// Apply a plan to this machine (MIG slices, MPS daemons, servers), or undo it
    Apply(ApplyArgs),
    /// Run a role of a cluster: scheduler, frontend or backend
    Cluster(crate::cluster_args::ClusterArgs),
    /// Create, list and revoke tokens for the clients of a server
    Token(crate::token_command::TokenArgs),
    /// Write what a running server did in the last seconds, for ui.perfetto.dev
    Trace(crate::trace_command::TraceArgs),
    /// Watch a running server in the terminal: models, devices, queues, preemptions
    Top(crate::top_command::TopArgs),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
}

/// Addresses to listen on.
#[derive(Clone, Debug, Args)]
pub(crate) struct ListenArgs {
    /// Address to listen on
    #[arg(long, env = "ATOLL_HOST", default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,

    /// Port of REST; 0 for any free one
    #[arg(long, env = "ATOLL_HTTP_PORT", default_value_t = 8000)]
    pub(crate) http_port: u16,

    /// Port of gRPC; 0 for any free one
    #[arg(long, env = "ATOLL_GRPC_PORT", default_value_t = 8001)]
    pub(crate) grpc_port: u16,

    /// Admin port, with metrics, health and the management of models; 0 for any free one
    #[arg(long, visible_alias = "admin-port", env = "ATOLL_METRICS_PORT", default_value_t = 8002)]
    pub(crate) metrics_port: u16,

    /// Lame-duck period in milliseconds after SIGTERM or Ctrl-C: the server is not ready and tells
    /// its clients to go away, but still serves them; then it refuses requests and ends streams
    #[arg(
        long,
        env = "ATOLL_LAME_DUCK_MS",
        default_value_t = 500,
        value_parser = clap::value_parser!(u64).range(0..=3_600_000)
    )]
    pub(crate) lame_duck_ms: u64,

    #[command(flatten)]
    pub(crate) security: SecurityArgs,
}

impl ListenArgs {
    /// The options of a server; `folder` may hold its tokens.
    pub(crate) fn options(
        &self,
        folder: Option<&Path>,
        max_body_bytes: usize,
    ) -> Result<ServerOptions, Failure> {
        let ports = Ports {
            host: self.host,
            http: self.http_port,
            grpc: self.grpc_port,
            metrics: self.metrics_port,
        };
        let options = self.security.options(&ports, folder, max_body_bytes)?;
        Ok(ServerOptions { lame_duck: Duration::from_millis(self.lame_duck_ms), ..options })
    }
}

/// When models are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModelControlMode {
    /// All at start, none later
    None,
    /// All at start; follow changes of the folder
    Poll,
    /// Those named by --load-model at start, others on request over the API
    Explicit,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll serve --model-repository models
  atoll serve --model-repository resnet50.onnx --threads 4
  atoll serve --model-repository models --model-control-mode explicit --load-model resnet50
  atoll serve --data-dir /var/lib/atoll            only models registered over POST /register

A repository is a folder of NAME.onnx files or of NAME/VERSION/model.onnx trees with an optional
atoll.toml or config.pbtxt, or a single .onnx file.")]
pub(crate) struct ServeArgs {
    /// Folder of models, or one .onnx file; may be given several times
    #[arg(long, env = "ATOLL_MODEL_REPOSITORY", value_delimiter = ':')]
    pub(crate) model_repository: Vec<PathBuf>,

    /// Folder of the registry, to which POST /register writes [default: atoll in the user's data
    /// folder]
    #[arg(long, env = "ATOLL_DATA_DIR")]
    pub(crate) data_dir: Option<PathBuf>,

    /// When models are loaded [default: all at start, others on request over the API]
    #[arg(long, env = "ATOLL_MODEL_CONTROL_MODE", value_enum)]
    pub(crate) model_control_mode: Option<ModelControlMode>,

    /// Load this model at start; '*' for all
    #[arg(long, env = "ATOLL_LOAD_MODEL", value_delimiter = ',')]
    pub(crate) load_model: Vec<String>,

    /// Seconds between two polls of the folder with --model-control-mode=poll
    #[arg(
        long,
        env = "ATOLL_REPOSITORY_POLL_SECS",
        default_value_t = 15,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub(crate) repository_poll_secs: u64,

    #[command(flatten)]
    pub(crate) registry: RegistryArgs,

    #[command(flatten)]
    pub(crate) model_check: ModelCheckArgs,

    #[command(flatten)]
    pub(crate) listen: ListenArgs,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    /// Seconds that requests in flight may take to finish after SIGTERM or Ctrl-C
    #[arg(long, env = "ATOLL_EXIT_TIMEOUT_SECS", default_value_t = 30)]
    pub(crate) exit_timeout_secs: u64,

    /// Max size of a request body in MiB, after decompression
    #[arg(
        long,
        env = "ATOLL_MAX_BODY_MIB",
        default_value_t = 256,
        value_parser = clap::value_parser!(u64).range(1..=65536)
    )]
    pub(crate) max_body_mib: u64,

    /// Max requests in flight
    #[arg(
        long,
        env = "ATOLL_MAX_REQUESTS",
        default_value_t = 16384,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) max_requests: u32,

    /// GPU memory for weights on each device, such as 8GiB. Further models stay on the host and are
    /// loaded when requested [default: what is free, less a tenth]
    #[arg(
        long,
        env = "ATOLL_GPU_MEMORY",
        value_name = "SIZE",
        value_parser = value_parsers::memory
    )]
    pub(crate) gpu_memory: Option<Bytes>,

    /// Policy by which real time and best effort share the device: atoll, atoll_alone, reef_n,
    /// sequential, free_streams, priority_streams or rt_only
    #[arg(long, env = "ATOLL_POLICY", default_value = "atoll")]
    pub(crate) policy: String,

    /// Run all roles of a cluster in this process, with the store in memory
    #[arg(long, env = "ATOLL_SERVE_CLUSTER")]
    pub(crate) cluster: bool,

    /// Query to store, with --cluster: a TOML or JSON file; its name is the query's; may be given
    /// several times
    #[arg(
        long,
        env = "ATOLL_QUERY",
        value_name = "FILE",
        value_delimiter = ':',
        requires = "cluster"
    )]
    pub(crate) query: Vec<PathBuf>,

    /// Best-effort share: percent of device time that best effort keeps under saturating real time
    #[arg(
        long,
        env = "ATOLL_BEST_EFFORT_SHARE",
        default_value_t = 0,
        value_parser = clap::value_parser!(u32).range(0..=90)
    )]
    pub(crate) best_effort_share: u32,

    /// Max slowdown of real time, in percent, for best effort that co-runs; 0 preempts all best
    /// effort
    #[arg(
        long,
        alias = "bearable",
        env = "ATOLL_MAX_RT_SLOWDOWN",
        value_name = "PERCENT",
        default_value_t = 1.0,
        value_parser = value_parsers::max_rt_slowdown
    )]
    pub(crate) max_rt_slowdown: f64,

    /// Let real time of a higher priority preempt real time if that helps its deadline; preemptible
    /// real time runs slightly slower
    #[arg(long, env = "ATOLL_PREEMPT_REAL_TIME")]
    pub(crate) preempt_real_time: bool,

    /// Batches of a real-time model that may run at the same time, if the device has queues for
    /// them
    #[arg(
        long,
        alias = "real-time-lanes",
        env = "ATOLL_CONCURRENT_RT_BATCHES",
        default_value_t = 2,
        value_parser = clap::value_parser!(u32).range(1..=16)
    )]
    pub(crate) concurrent_rt_batches: u32,

    #[command(flatten)]
    pub(crate) spans: SpanArgs,

    /// Stop when standard input ends, for parents that the server must not outlive
    #[arg(long, hide = true)]
    pub(crate) until_input_ends: bool,

    /// Inject the faults that lines of standard input name, as `inject trap`
    #[arg(long, hide = true, requires = "until_input_ends")]
    pub(crate) inject_faults: bool,
}

/// What is kept of the past.
#[derive(Clone, Debug, Args)]
pub(crate) struct SpanArgs {
    /// Latest requests, runs, copies and loads that each device keeps, for the timeline, traces and
    /// explanations: at most 1048576. 1000 take about 0.1 MB of memory, 65536 take 8 MB; writing a
    /// trace takes five times as much for a moment
    #[arg(
        long,
        env = "ATOLL_SPANS_KEPT",
        value_name = "SPANS",
        default_value_t = 65_536,
        value_parser = clap::value_parser!(u32).range(0..=1 << 20)
    )]
    pub(crate) spans_kept: u32,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll demo                      load for a few seconds, then some load until stopped
  atoll demo --seconds 5          load for five seconds, then exit
  atoll demo --seconds 5 --json   the same, for machines")]
pub(crate) struct DemoArgs {
    /// Seconds of load, then exit [default: 5 seconds, then some load until stopped]
    #[arg(
        long,
        env = "ATOLL_DEMO_SECONDS",
        value_parser = clap::value_parser!(u64).range(1..=3600)
    )]
    pub(crate) seconds: Option<u64>,

    /// Print the report as JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) listen: ListenArgs,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll profile model.onnx --device cuda:0
  atoll profile model.onnx --device cuda:0 --batches 1,8,32 --bind sequence=128 --json
  atoll profile model.onnx --device cuda:0 --classes
  atoll profile model.onnx --grid --batches 1,4,16 --processes 1,2 --slices 1,2,7 \\
                --output profiles.csv

The fastest variants are stored with the compiled kernels; serve and run use them from then on.
--grid measures every combination of batch, processes and slice, with all processes running at the
same time, as the table that atoll plan reads. On a GPU a slice is a share of its threads and
needs a running MPS daemon (nvidia-cuda-mps-control -d); on the CPU it is a share of the cores, as
threads.")]
pub(crate) struct ProfileArgs {
    /// The ONNX file
    pub(crate) model: PathBuf,

    /// Batch sizes: sizes of the first dimension of the first input
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32])]
    pub(crate) batches: Vec<usize>,

    /// Size of another symbolic dimension [default: 1]
    #[arg(long, value_name = "SYMBOL=SIZE")]
    pub(crate) bind: Vec<String>,

    /// Replays of the whole plan, for median and p99
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(10..=100_000))]
    pub(crate) replays: u32,

    /// Only compare real time with best effort, with the selected variants: the cost of preemptible
    /// kernels
    #[arg(long, conflicts_with = "grid")]
    pub(crate) classes: bool,

    /// Measure all combinations of batch, processes and slice, in separate processes, for atoll
    /// plan
    #[arg(long)]
    pub(crate) grid: bool,

    /// Numbers of concurrent processes, with --grid
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = [1, 2, 3, 4, 5],
        value_parser = clap::value_parser!(u32).range(1..=64)
    )]
    pub(crate) processes: Vec<u32>,

    /// Slice sizes in compute slices, with --grid
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = [1, 2, 3, 4, 7],
        value_parser = clap::value_parser!(u8).range(1..=8)
    )]
    pub(crate) slices: Vec<u8>,

    /// Compute slices of the whole device, with --grid: 7, 4 for an A30, 8 without MIG
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub(crate) compute_slices: u8,

    /// Seconds of each measurement, with --grid
    #[arg(long, default_value_t = 1.0)]
    pub(crate) seconds: f64,

    /// Max seconds until a process is ready, with --grid
    #[arg(long, default_value_t = 300)]
    pub(crate) start_timeout_secs: u64,

    /// The model's name in the table, with --grid [default: the file's name]
    #[arg(long)]
    pub(crate) name: Option<String>,

    /// File for the table, with --grid [default: standard output]
    #[arg(long, value_name = "FILE.csv")]
    pub(crate) output: Option<PathBuf>,

    /// Run as one process of the grid, with this batch
    #[arg(long, hide = true)]
    pub(crate) grid_member: Option<usize>,

    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll conformance
  atoll conformance --device cuda:0 --json

Exit code 0 when every test passes, 1 otherwise.")]
pub(crate) struct ConformanceArgs {
    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll check model.onnx
  atoll check model.onnx --bind batch=8 --steps
  atoll check model.onnx --json

Exit code 0 when the model runs on the device, 2 when it does not.")]
pub(crate) struct CheckArgs {
    /// The ONNX file
    pub(crate) model: PathBuf,

    /// Size of a symbolic dimension, for the memory estimate [default: 1]
    #[arg(long, value_name = "SYMBOL=SIZE")]
    pub(crate) bind: Vec<String>,

    /// List every step
    #[arg(long)]
    pub(crate) steps: bool,

    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll run model.onnx                                random inputs, symbolic dimensions 1
  atoll run model.onnx --bind batch=4 --repeat 100
  atoll run model.onnx --input image=cat.npy --save out")]
pub(crate) struct RunArgs {
    /// The ONNX file
    pub(crate) model: PathBuf,

    /// An input from a .npy file; random values for the others
    #[arg(long, value_name = "NAME=FILE.npy")]
    pub(crate) input: Vec<String>,

    /// Size of a symbolic dimension of random inputs [default: 1]
    #[arg(long, value_name = "SYMBOL=SIZE")]
    pub(crate) bind: Vec<String>,

    /// Folder to write every output to, as NAME.npy
    #[arg(long)]
    pub(crate) save: Option<PathBuf>,

    /// Timed runs
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) repeat: u32,

    /// Untimed runs before them
    #[arg(long, default_value_t = 2)]
    pub(crate) warmup: u32,

    /// Seed of the random inputs
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,

    /// Run as best effort: on a preemptible queue without priority
    #[arg(long)]
    pub(crate) best_effort: bool,

    /// How many of the slowest steps to print
    #[arg(long, default_value_t = 5)]
    pub(crate) slowest: usize,

    /// Print what each step has to do, and its share of the machine's limit: the shortest time in
    /// which the machine could compute it and move its operands, over the measured time. On a CPU
    /// the limits are measured in the same call
    #[arg(long)]
    pub(crate) limits: bool,

    /// Print as JSON, with every step
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll models --model-repository models
  atoll models --data-dir /var/lib/atoll --json
  atoll models --data-dir /var/lib/atoll --remove digits:2    (with the server stopped)")]
pub(crate) struct ModelsArgs {
    /// Folder of models, or one .onnx file; may be given several times
    #[arg(long, env = "ATOLL_MODEL_REPOSITORY", value_delimiter = ':')]
    pub(crate) model_repository: Vec<PathBuf>,

    /// Folder of the registry
    #[arg(long, env = "ATOLL_DATA_DIR")]
    pub(crate) data_dir: Option<PathBuf>,

    /// Remove a registered version
    #[arg(long, value_name = "NAME:VERSION", requires = "data_dir")]
    pub(crate) remove: Option<String>,

    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll plan --services services.toml --profiles profiles.csv --gpu a100-80gb
  atoll plan --services services.toml --profiles profiles.csv --sharing time --headroom 0.15
  atoll plan --services services.toml --profiles profiles.csv --from current.json
  atoll plan --services services.toml --profiles profiles.csv --algorithm parvagpu
  atoll plan --services services.toml --profiles profiles.csv --explain resnet50
  atoll plan --services services.toml --profiles profiles.csv --sweep rate=0.5..2 --svg sweep.svg
  atoll plan --services services.toml --profiles profiles.csv --traffic week.csv --percentile 99
  atoll plan --services services.toml --profiles profiles.csv --stock stock.toml --survive gpu

Services are [[service]] tables with name, model, rate and slo_ms and, where wanted, headroom,
priority (1 is the highest), revenue (of a thousand requests), gpus and apart. Profiles have the
columns model, mig_gpcs, batch, procs, throughput_total_rps, latency_ms and, where measured, gpu,
memory_mib and status. Exit code 2: an input is wrong; file, line and field are named.
Ctrl-C ends the search and prints the best plan so far with its gap.")]
pub(crate) struct PlanArgs {
    /// Flags of the command line, by the names of these fields
    #[arg(skip)]
    pub(crate) given: BTreeSet<String>,

    /// TOML file of the services
    #[arg(long, env = "ATOLL_PLAN_SERVICES", required_unless_present = "verify")]
    pub(crate) services: Option<PathBuf>,

    /// CSV file of measured operating points, or JSON of the same
    #[arg(long, env = "ATOLL_PLAN_PROFILES", required_unless_present = "verify")]
    pub(crate) profiles: Option<PathBuf>,

    /// Plan nothing: verify a plan, as written by --json, from that file alone
    #[arg(long, value_name = "PLAN.json")]
    pub(crate) verify: Option<PathBuf>,

    /// GPU kind: a30-24gb, a100-40gb, a100-80gb, h100-80gb, h200-141gb, gh200-96gb, gh200-144gb,
    /// b200-180gb; without MIG l4-24gb, a10-24gb, l40s-48gb, rtx-4090-24gb, rtx-5090-32gb
    #[arg(long, env = "ATOLL_PLAN_GPU", default_value = "a100-80gb")]
    pub(crate) gpu: String,

    /// TOML file of further GPU kinds, for --gpu
    #[arg(long, env = "ATOLL_PLAN_GPU_TABLE", value_name = "GPUS.toml")]
    pub(crate) gpu_table: Option<PathBuf>,

    /// Plan with profiles that were measured on another GPU
    #[arg(long)]
    pub(crate) foreign_profiles: bool,

    /// TOML file of GPUs that there are: tables `offer` with gpu, price and, where wanted, name,
    /// watts and count. Plans the services onto all of these kinds
    #[arg(
        long,
        env = "ATOLL_PLAN_STOCK",
        value_name = "STOCK.toml",
        conflicts_with_all = ["from", "rates", "sweep", "explain", "commands", "mig_parted"]
    )]
    pub(crate) stock: Option<PathBuf>,

    /// What a plan from stock keeps small
    #[arg(
        long,
        default_value = "cost",
        value_parser = ["cost", "gpus", "energy"],
        requires = "stock"
    )]
    pub(crate) objective: String,

    /// Most GPUs of a plan from stock; services that do not fit are named
    #[arg(long, requires = "stock")]
    pub(crate) max_gpus: Option<usize>,

    /// Which services are served when not all can be
    #[arg(
        long,
        default_value = "priority",
        value_parser = ["priority", "revenue"],
        requires = "stock"
    )]
    pub(crate) serve_first: String,

    /// Spare capacity: any one GPU, machine or rack may fail; with --machine-gpus or --rack-gpus
    #[arg(
        long,
        value_name = "DOMAIN",
        requires = "stock",
        value_parser = ["gpu", "machine", "rack"]
    )]
    pub(crate) survive: Option<String>,

    /// GPUs of a machine, for --survive and for services that are apart by machine
    #[arg(
        long,
        value_name = "GPUS",
        requires = "stock",
        value_parser = clap::value_parser!(u32).range(1..=1024)
    )]
    pub(crate) machine_gpus: Option<u32>,

    /// GPUs of a rack, for --survive and for services that are apart by rack
    #[arg(
        long,
        value_name = "GPUS",
        requires = "stock",
        value_parser = clap::value_parser!(u32).range(1..=65536)
    )]
    pub(crate) rack_gpus: Option<u32>,

    /// Plan at several values: rate, slo (factors) or headroom, such as rate=0.5..2 or
    /// rate=0.5..2:16; prints a table, and --svg draws it
    #[arg(long, value_name = "FIELD=FROM..TO", conflicts_with_all = ["from", "rates"])]
    pub(crate) sweep: Option<planner::sweep::Sweep>,

    /// CSV file of recorded rates: time,service,rate or time and a column for each service. Plans
    /// each window from the one before and counts the moves
    #[arg(long, value_name = "RATES.csv", conflicts_with = "from", group = "rates")]
    pub(crate) traffic: Option<PathBuf>,

    /// Address of a Prometheus server to take recorded rates from, with --query, instead of a CSV
    /// file
    #[arg(long, value_name = "URL", conflicts_with = "from", requires = "query", group = "rates")]
    pub(crate) prometheus: Option<String>,

    /// PromQL of the rates: a series for each service, in requests per second
    #[arg(long, value_name = "PROMQL", requires = "prometheus")]
    pub(crate) query: Option<String>,

    /// Label that names the service of a series
    #[arg(long, default_value = "service", requires = "prometheus")]
    pub(crate) service_label: String,

    /// First moment of the recording: seconds since 1970 or 2026-01-31T18:00:00 in UTC; without it
    /// seven days before the last
    #[arg(long, value_name = "TIME", requires = "prometheus")]
    pub(crate) start: Option<String>,

    /// Last moment of the recording; without it now
    #[arg(long, value_name = "TIME", requires = "prometheus")]
    pub(crate) end: Option<String>,

    /// Seconds between two samples of the query
    #[arg(
        long,
        default_value_t = 60,
        requires = "prometheus",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) step_s: u32,

    /// File with the token that the Prometheus server asks for
    #[arg(long, env = "ATOLL_PLAN_PROMETHEUS_TOKEN_FILE", value_name = "FILE")]
    pub(crate) prometheus_token_file: Option<PathBuf>,

    /// Max seconds of one request to the Prometheus server
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) prometheus_timeout_secs: u64,

    /// Seconds of a window of the traffic
    #[arg(long, default_value_t = 3600, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) window_s: u32,

    /// Percentile of a window's samples to plan for, instead of their peak
    #[arg(long, requires = "rates")]
    pub(crate) percentile: Option<f64>,

    /// Plan every window of the recording, instead of the times of day over all days
    #[arg(long, requires = "rates")]
    pub(crate) unfolded: bool,

    /// With --traffic or --prometheus: write the plan of every window into this folder, for
    /// --verify and atoll apply
    #[arg(long, value_name = "FOLDER", requires = "rates")]
    pub(crate) plans: Option<PathBuf>,

    /// Whether services may share a slice by time
    #[arg(
        long,
        env = "ATOLL_PLAN_SHARING",
        default_value = "none",
        value_parser = ["none", "time"]
    )]
    pub(crate) sharing: String,

    /// Algorithm: certified, parvagpu, parvagpu-single, parvagpu-unoptimized, squishy,
    /// mig-serving-like, least-fragmentation-like, repartitioning-like, gpulet-like, igniter-like
    #[arg(long, env = "ATOLL_PLAN_ALGORITHM", default_value = "certified")]
    pub(crate) algorithm: planner::Algorithm,

    /// Capacity beyond the rates, for bursts: 0.15 is 15 % more
    #[arg(long, env = "ATOLL_PLAN_HEADROOM", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) headroom: f64,

    /// Plan the other services if one is faulty or infeasible
    #[arg(long)]
    pub(crate) keep_going: bool,

    /// Current plan, as written by --json: change little, and print the steps
    #[arg(long, value_name = "CURRENT.json")]
    pub(crate) from: Option<PathBuf>,

    /// With --from: how many services may move although their rate did not change; without it a
    /// move only has to cost less than it saves
    #[arg(long, value_name = "COUNT", requires = "from")]
    pub(crate) max_moves: Option<usize>,

    /// Explain how a service is served
    #[arg(long, value_name = "SERVICE")]
    pub(crate) explain: Option<String>,

    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// Write the plan as SVG
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) svg: Option<PathBuf>,

    /// Print the nvidia-smi and MPS commands that would apply the plan; runs nothing
    #[arg(long)]
    pub(crate) commands: bool,

    /// Write a configuration for mig-parted
    #[arg(long, value_name = "FILE.yaml")]
    pub(crate) mig_parted: Option<PathBuf>,
}
