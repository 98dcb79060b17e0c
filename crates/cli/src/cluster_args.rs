//! The command line of `atoll cluster`.

use std::path::PathBuf;

use assembly::{DeviceArgs, value_parsers};
use base::Bytes;
use clap::{Args, Subcommand};
use cluster::scaling::kubernetes::WorkloadName;
use cluster::scheduler::packing::Packer;

use crate::args::ListenArgs;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll cluster scheduler --store etcd://etcd:2379
  atoll cluster backend   --store etcd://etcd:2379 --model-repository models --device cuda:0
  atoll cluster frontend  --store etcd://etcd:2379 --host 0.0.0.0
  atoll cluster status    --store etcd://etcd:2379
  atoll serve --cluster --model-repository models      all of it in one process

docs/CLUSTER.md says how the parts work together.")]
pub(crate) struct ClusterArgs {
    #[command(subcommand)]
    pub(crate) role: Role,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Role {
    /// Plan: stand for election, and while leading decide who serves what
    Scheduler(SchedulerArgs),
    /// Take requests and route them: REST, gRPC and metrics of a single node
    Frontend(FrontendArgs),
    /// Run models on this machine's device, as the plan says
    Backend(Box<BackendArgs>),
    /// Print plan, backends, routes, load and misses
    Status(StatusArgs),
    /// The same, again and again
    Top(TopArgs),
}

/// Where the cluster's state lives.
#[derive(Clone, Debug, Args)]
pub(crate) struct StoreArgs {
    /// The store: etcd://HOST:PORT[,HOST:PORT...]
    #[arg(long, env = "ATOLL_STORE")]
    pub(crate) store: String,

    /// Name of the cluster; several can share a store
    #[arg(long, env = "ATOLL_CLUSTER", default_value = "default")]
    pub(crate) cluster: String,

    /// Name of this process in the cluster [default: host name and process id]
    #[arg(long, env = "ATOLL_NAME")]
    pub(crate) name: Option<String>,

    /// Milliseconds that a process may be silent before others act as if it were gone
    #[arg(long, env = "ATOLL_LEASE_MS", default_value_t = 5000, value_parser = clap::value_parser!(u64).range(2000..=600_000))]
    pub(crate) lease_ms: u64,
}

/// How plans are made.
#[derive(Clone, Debug, Args)]
pub(crate) struct PlanningArgs {
    /// Milliseconds between two plans when nothing special happens
    #[arg(long, env = "ATOLL_EPOCH_MS", default_value_t = 30_000, value_parser = clap::value_parser!(u64).range(100..))]
    pub(crate) epoch_ms: u64,

    /// Least milliseconds between two plans because of load
    #[arg(long, env = "ATOLL_SPACING_MS", default_value_t = 10_000)]
    pub(crate) spacing_ms: u64,

    /// Capacity beyond the observed load: 0.2 is 20 % more
    #[arg(long, env = "ATOLL_HEADROOM", default_value_t = 0.2)]
    pub(crate) headroom: f64,

    /// Backends that hold a model at least, where there are so many
    #[arg(long, env = "ATOLL_COPIES", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) copies: u16,

    /// Who packs models onto backends: squishy or certified
    #[arg(long, env = "ATOLL_PACKER", default_value = "squishy")]
    pub(crate) packer: Packer,

    /// Serve from as few backends as possible, so that others can be released
    #[arg(long, env = "ATOLL_COMPACT")]
    pub(crate) compact: bool,

    /// Let every backend gather its own batches: those that do nothing but one model do not share its requests turn by turn
    #[arg(long, env = "ATOLL_APART")]
    pub(crate) apart: bool,

    /// Latency objective in milliseconds of models whose settings name none
    #[arg(long, env = "ATOLL_SLO_MS", default_value_t = 1000.0)]
    pub(crate) slo_ms: f64,
}

/// How many backends there are.
#[derive(Clone, Debug, Args)]
pub(crate) struct ScalingArgs {
    /// Scale the backends through the Kubernetes API while leading: deployment/NAME or statefulset/NAME, whose pods are
    /// backends under the pods' names
    #[arg(long, env = "ATOLL_KUBERNETES_SCALE", value_name = "KIND/NAME")]
    pub(crate) kubernetes_scale: Option<WorkloadName>,

    /// Its namespace [default: the service account's, or the kubeconfig's]
    #[arg(long, env = "ATOLL_KUBERNETES_NAMESPACE", requires = "kubernetes_scale")]
    pub(crate) kubernetes_namespace: Option<String>,

    /// Replicas there are at least
    #[arg(long, env = "ATOLL_REPLICAS_MIN", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) replicas_min: u32,

    /// Replicas there are at most
    #[arg(long, env = "ATOLL_REPLICAS_MAX", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) replicas_max: u32,

    /// Replicas that one change adds at most
    #[arg(long, env = "ATOLL_SCALE_UP_STEP", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) scale_up_step: u32,

    /// Replicas that one change takes away at most
    #[arg(long, env = "ATOLL_SCALE_DOWN_STEP", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) scale_down_step: u32,

    /// Seconds without need for a replica before it goes
    #[arg(long, env = "ATOLL_SCALE_DOWN_AFTER_SECS", default_value_t = 300)]
    pub(crate) scale_down_after_secs: u64,

    /// Least seconds between two changes
    #[arg(long, env = "ATOLL_SCALE_COOLDOWN_SECS", default_value_t = 30)]
    pub(crate) scale_cooldown_secs: u64,
}

/// Where the models' files are.
#[derive(Clone, Debug, Args)]
pub(crate) struct ModelStoreArgs {
    /// Models named by their content, for all machines: a folder they mount, or s3://BUCKET/PREFIX. POST /register at a
    /// frontend writes there. For S3 the environment says more, under AWS's names: AWS_ACCESS_KEY_ID,
    /// AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL
    #[arg(long, env = "ATOLL_MODEL_STORE", value_name = "FOLDER|URL")]
    pub(crate) model_store: Option<String>,

    /// Folder for copies of what is in S3; may be cleared at any time [default: atoll/model-cache in the user's data folder]
    #[arg(long, env = "ATOLL_MODEL_CACHE", value_name = "FOLDER")]
    pub(crate) model_cache: Option<PathBuf>,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll cluster scheduler --store etcd://127.0.0.1:2379
  atoll cluster scheduler --store etcd://a:2379,b:2379,c:2379 --lease-ms 3000 --copies 3
  atoll cluster scheduler --store etcd://etcd:2379 --kubernetes-scale deployment/atoll-backend --replicas-max 20

Start two or more: one leads, the others take over within the lease.")]
pub(crate) struct SchedulerArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    #[command(flatten)]
    pub(crate) planning: PlanningArgs,

    #[command(flatten)]
    pub(crate) scaling: ScalingArgs,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll cluster frontend --store etcd://127.0.0.1:2379
  atoll cluster frontend --store etcd://127.0.0.1:2379 --host 0.0.0.0 --model-store /models
  AWS_ENDPOINT_URL=http://minio:9000 atoll cluster frontend --store etcd://etcd:2379 --model-store s3://models/atoll
  atoll cluster frontend --store etcd://127.0.0.1:2379 --query scenarios/ocr.toml
  curl -T scenarios/ocr.toml localhost:8000/v2/atoll/queries/ocr            the same, while it runs
  curl --data-binary @page.png -H 'Content-Type: image/png' localhost:8000/v2/atoll/queries/ocr/infer
  curl localhost:8000/v2/atoll/queries/ocr                                  stages, budgets, times

docs/CLUSTER.md says how a query is written.")]
pub(crate) struct FrontendArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    #[command(flatten)]
    pub(crate) listen: ListenArgs,

    #[command(flatten)]
    pub(crate) models: ModelStoreArgs,

    /// Query to keep: a TOML or JSON file, under its own name; may be given several times
    #[arg(long, env = "ATOLL_QUERY", value_name = "FILE", value_delimiter = ':')]
    pub(crate) query: Vec<PathBuf>,

    /// Requests that may be under way at once
    #[arg(long, env = "ATOLL_MAX_REQUESTS", default_value_t = 16384, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_requests: u32,

    /// Largest request body in MiB, after decompression
    #[arg(long, env = "ATOLL_MAX_BODY_MIB", default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..=65536))]
    pub(crate) max_body_mib: u64,

    /// Seconds running requests may take to finish after SIGTERM or Ctrl-C
    #[arg(long, env = "ATOLL_EXIT_TIMEOUT_SECS", default_value_t = 30)]
    pub(crate) exit_timeout_secs: u64,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll cluster backend --store etcd://127.0.0.1:2379 --model-repository models
  atoll cluster backend --store etcd://etcd:2379 --model-store /models --device cuda:0 --host 0.0.0.0 --advertise 10.0.0.7
  atoll cluster backend --store etcd://etcd:2379 --model-store s3://models/atoll --model-cache /var/cache/atoll

Models of --model-repository become models of the cluster. Ports are free ones unless given.")]
pub(crate) struct BackendArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// Folder of models, or one .onnx file; may be given several times
    #[arg(long, env = "ATOLL_MODEL_REPOSITORY", value_delimiter = ':')]
    pub(crate) model_repository: Vec<PathBuf>,

    #[command(flatten)]
    pub(crate) models: ModelStoreArgs,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    /// GPU memory for the weights of models, such as 8GiB, of each device. Models beyond it are kept on the host and brought when
    /// they are asked for [default: what is free, less a tenth]
    #[arg(long, env = "ATOLL_GPU_MEMORY", value_name = "SIZE", value_parser = value_parsers::memory)]
    pub(crate) gpu_memory: Option<Bytes>,

    /// Kind of device, for profiles; backends of one kind are equally fast [default: the device's]
    #[arg(long, env = "ATOLL_DEVICE_KIND")]
    pub(crate) device_kind: Option<String>,

    /// Memory for models in MiB; 0 for no bound [default: the GPU's; none for a CPU]
    #[arg(long, env = "ATOLL_MODEL_MEMORY_MIB")]
    pub(crate) memory_mib: Option<u64>,

    /// Address to listen on
    #[arg(long, env = "ATOLL_HOST", default_value = "127.0.0.1")]
    pub(crate) host: std::net::IpAddr,

    /// Host under which frontends reach this backend [default: the address it listens on]
    #[arg(long, env = "ATOLL_ADVERTISE")]
    pub(crate) advertise: Option<String>,

    /// Port of REST; 0 for any free one
    #[arg(long, env = "ATOLL_HTTP_PORT", default_value_t = 0)]
    pub(crate) http_port: u16,

    /// Port of gRPC; 0 for any free one
    #[arg(long, env = "ATOLL_GRPC_PORT", default_value_t = 0)]
    pub(crate) grpc_port: u16,

    /// Port of the metrics; 0 for any free one
    #[arg(long, env = "ATOLL_METRICS_PORT", default_value_t = 0)]
    pub(crate) metrics_port: u16,

    /// Requests that may be under way at once
    #[arg(long, env = "ATOLL_MAX_REQUESTS", default_value_t = 16384, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_requests: u32,

    /// Largest request body in MiB
    #[arg(long, env = "ATOLL_MAX_BODY_MIB", default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..=65536))]
    pub(crate) max_body_mib: u64,

    /// Share of time in percent that best effort keeps under saturating real-time load
    #[arg(long, env = "ATOLL_BEST_EFFORT_SHARE", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=90))]
    pub(crate) best_effort_share: u32,

    /// How much longer, in percent, real time may take so that best effort goes on beside it; 0 makes all of it leave
    #[arg(long, alias = "bearable", env = "ATOLL_MAX_RT_SLOWDOWN", value_name = "PERCENT", default_value_t = 1.0, value_parser = value_parsers::max_rt_slowdown)]
    pub(crate) max_rt_slowdown: f64,

    /// Seconds running requests may take to finish after SIGTERM or Ctrl-C
    #[arg(long, env = "ATOLL_EXIT_TIMEOUT_SECS", default_value_t = 30)]
    pub(crate) exit_timeout_secs: u64,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll cluster status --store etcd://127.0.0.1:2379
  atoll cluster status --store etcd://127.0.0.1:2379 --json

Exit code 1 when nobody leads or the store cannot be reached.")]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll cluster top --store etcd://127.0.0.1:2379
  atoll cluster top --store etcd://127.0.0.1:2379 --every-ms 250 --json")]
pub(crate) struct TopArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// Milliseconds between two pictures
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(50..))]
    pub(crate) every_ms: u64,

    /// A line of JSON each time instead of a picture
    #[arg(long)]
    pub(crate) json: bool,
}
